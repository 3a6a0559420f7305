"""Rewrite a checkpoint's weights in a smaller number format."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from simplellm.base.config import BLOCK, ModelConfig, expect, read_json, reraise_as
from simplellm.checkpoint.checkpoint import (
    INDEX,
    Checkpoint,
    CheckpointError,
    find_shards,
    map_shard,
    read_headers,
)
from simplellm.checkpoint.families import FAMILIES
from simplellm.checkpoint.folder import check_downloaded, is_gguf
from simplellm.checkpoint.formats import (
    MXFP4_EXPERTS,
    SCHEMES,
    SQUARES,
    NumberFormat,
    is_linear,
    is_matrix,
)
from simplellm.checkpoint.mxfp4 import quantize
from simplellm.checkpoint.names import (
    TensorInfo,
    is_expert_weight,
    stored_names,
    tensor_names,
)
from simplellm.checkpoint.stored import encode_weight, join_weights, tensors
from simplellm.checkpoint.tensors import tensor_view

Forms = Mapping[str, NumberFormat | None]  # of each tensor, by name
TARGETS = {
    "fp8": SQUARES,
    "int8": SCHEMES["int", 8, "channel"],
    "mxfp4": SCHEMES["float", 4, "group"],
}
ALIGNED = 16  # bytes that rows have to fill for products such as torch._scaled_mm
ROWS_AT_ONCE = 4096  # of a weight that are rounded at once
# What is copied beside the weights: a tokenizer, a chat template, a license.
COPIED = "", ".json", ".jinja", ".md", ".model", ".tiktoken", ".txt"


def has_whole_tiles(info: TensorInfo, form: NumberFormat) -> bool:
    """Whether a tensor [out, in] has whole tiles, which other engines need."""
    columns = BLOCK if form.is_mxfp4 else form.tile[1] or ALIGNED
    return info.shape[0] % form.tile[0] == 0 and info.shape[1] % columns == 0


def choose_formats(
    source: Checkpoint, infos: Mapping[str, TensorInfo], form: NumberFormat
) -> Forms:
    """The format of each tensor; tensors that engines join all have it, or none has.

    Embeddings, heads and routers decide too much for the little that they weigh.
    """
    config = source.config
    spelled = FAMILIES[config.model_type].spelled
    by_name = {spelled(name): info for name, info in infos.items()}
    forms: dict[str, NumberFormat | None] = dict.fromkeys(infos)
    for ours, name in tensor_names(config).items():
        names = stored_names(name, config.num_local_experts)
        parts = [by_name[part] for part in names if part in by_name]
        if form is MXFP4_EXPERTS:
            ok = is_expert_weight(ours)
        else:
            ok = ours.startswith("layers.") and is_matrix(name)
            ok = ok and all(has_whole_tiles(part, form) for part in parts)
        forms |= {part.name: form for part in parts if ok}
    return forms


def round_weight(
    tensor: Tensor, name: str, form: NumberFormat | None
) -> dict[str, Tensor]:
    """The tensors that ``name`` becomes, by name; ValueError for NaN and infinity."""
    if form is None:
        return {name: tensor}
    if form is MXFP4_EXPERTS:  # [E, in, out], as the hub has gpt-oss's experts
        pairs = [tensors(quantize(expert.T)) for expert in tensor]
        first, second = map(torch.stack, zip(*pairs, strict=True))
    else:
        pieces = [encode_weight(form, rows) for rows in tensor.split(ROWS_AT_ONCE)]
        first, second = tensors(join_weights(pieces, tensor.shape))
        if form.is_mxfp4:
            first = first.flatten(-2)
        else:
            largest = second.max().item()
            expect(isfinite(largest), "its largest scale", largest, "a finite number")
    return {
        name + suffix: part
        for suffix, part in zip(form.suffixes, (first, second), strict=True)
    }


def round_file(
    infos: Iterable[TensorInfo], data: Any, forms: Forms, progress: tqdm
) -> dict[str, Tensor]:
    """The tensors that those of a file become, by name; ``data`` is the file."""
    parts: dict[str, Tensor] = {}
    for info in infos:
        with reraise_as(CheckpointError, info.name):
            parts |= round_weight(tensor_view(data, info), info.name, forms[info.name])
        progress.update(info.nbytes)
    return parts


def quantization_config(form: NumberFormat, left: list[str]) -> dict[str, Any]:
    """The quantization_config of a format; the modules ``left`` stay as they are."""
    if form is MXFP4_EXPERTS:
        return {"quant_method": "mxfp4", "modules_to_not_convert": left}
    if form is SQUARES:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [*SQUARES.tile],
            "modules_to_not_convert": left,
        }
    kind, bits, strategy = next(key for key, one in SCHEMES.items() if one is form)
    numbers = {"num_bits": bits, "type": kind, "symmetric": True}
    weights = {**numbers, "strategy": strategy, "dynamic": False}
    inputs = {**numbers, "strategy": "token", "dynamic": True} if form.inputs else None
    if form.is_mxfp4:
        weights |= {"group_size": BLOCK, "scale_dtype": "torch.uint8"}
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized" if form.is_mxfp4 else f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": left,
    }


def find_source(source: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of a checkpoint's weights and its index, {} when it has none."""
    path = check_downloaded(source)
    expected = (
        "a folder of safetensors files: a GGUF file's numbers are rounded already"
    )
    expect(not is_gguf(path), "IN", str(source), expected)
    return find_shards(path)


def unrounded_config(source: Path) -> dict[str, Any]:
    """A checkpoint's config.json, which must not be of rounded weights already."""
    with reraise_as(CheckpointError, source / "config.json"):
        config = read_json(source / "config.json")
    name, expected = "quantization_config", "none: weights as trained"
    expect(config.get(name) is None, name, config.get(name), expected)
    return config


def wanted_tiles(form: NumberFormat, format: str, config: ModelConfig) -> str:
    """What a checkpoint needs for some of its weights to be rounded."""
    high, wide = form.tile[0], BLOCK if form.is_mxfp4 else form.tile[1] or ALIGNED
    if not any(is_matrix(name) for name in config.names if "{n}" in name.ours):
        family = FAMILIES[config.model_type].name
        return f"another family: {family} stores its layers' weights [in, out]"
    expected = (
        f"a checkpoint with weights that {format} is for: of whole tiles, {high} x "
        f"{wide}, where hidden_size is {config.hidden_size}"
    )
    return expected + (" (int8's are 1 x 16)" if format == "fp8" else "")


def quantize_checkpoint(source: Path, target: Path, format: str) -> tuple[int, int]:
    """Write the checkpoint ``source`` to the folder ``target`` in a format of TARGETS.

    Returns how many bytes the weights were, and are. It needs memory for one new file.
    ``target`` is there once it is complete, and not before. Raises ValueError if it is
    there already, or if ``source`` is no checkpoint that can be rewritten.
    """
    expect(not target.exists(), "OUT", str(target), "a folder that does not exist yet")
    files, index = find_source(source)
    config = unrounded_config(source)
    checkpoint, form = Checkpoint(source), TARGETS[format]
    if checkpoint.config.activation == "clamped_swiglu":  # gpt-oss
        expect(form.is_mxfp4, "format", format, "mxfp4, that of gpt-oss's experts")
        form = MXFP4_EXPERTS
    shards = {file: map_shard(file) for file in files}
    infos = read_headers(shards)
    forms = choose_formats(checkpoint, infos, form)
    before = sum(info.nbytes for info in infos.values())
    fits = any(forms.values())
    expect(fits, "IN", str(source), wanted_tiles(form, format, checkpoint.config))
    left = [
        name.removesuffix(".weight")
        for name, info in infos.items()
        if is_linear(name) and len(info.shape) == 2 and forms[name] is None
    ]
    config["quantization_config"] = quantization_config(
        form, sorted({*left, "lm_head"})
    )
    weight_map: dict[str, str] = {}
    after = 0
    os.umask(umask := os.umask(0o077))
    options: dict[str, Any] = {"total": before, "unit": "B", "unit_scale": True}
    parent = target.absolute().parent
    with (
        TemporaryDirectory(prefix=f".{target.name}-", dir=parent) as t,
        tqdm(desc="Quantizing", disable=before < 2**26, **options) as progress,
    ):
        folder = Path(t) / target.name
        folder.mkdir()
        for file, data in shards.items():
            here = [info for info in infos.values() if info.file == file]
            parts = round_file(here, data, forms, progress)
            save_file(parts, folder / file.name, metadata={"format": "pt"})
            os.chmod(folder / file.name, 0o666 & ~umask)  # which safetensors ignores
            weight_map |= dict.fromkeys(parts, file.name)
            after += sum(part.nbytes for part in parts.values())
        written: dict[str, Any] = {"config.json": config}
        if index:
            metadata = {"total_size": after}
            written[INDEX] = {"metadata": metadata, "weight_map": weight_map}
        for file in source.iterdir():
            if file.is_file() and file.suffix in COPIED and file.name not in written:
                shutil.copyfile(file, folder / file.name)
        for name, data in written.items():
            (folder / name).write_text(json.dumps(data, indent=2) + "\n", "utf-8")
        Checkpoint(folder)  # says what it should, or nothing is kept
        os.rename(folder, target)
    return before, after
