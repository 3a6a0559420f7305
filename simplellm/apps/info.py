"""What a checkpoint is made of, in a table. No tensor is read."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

import torch

from simplellm.base.config import ModelConfig
from simplellm.checkpoint.checkpoint import RandomCheckpoint, open_weights
from simplellm.checkpoint.families import FAMILIES
from simplellm.checkpoint.families.gpt_oss import MODELS
from simplellm.checkpoint.folder import is_gguf
from simplellm.checkpoint.formats import FLOATS, format_names
from simplellm.checkpoint.gguf.packed import ADDENDS
from simplellm.checkpoint.names import part_of_model
from simplellm.checkpoint.source import Source
from simplellm.model.memory import count_parameters

ROW = "{:<12}  {:<11}  {:>17}  {:>16}  {:>7}"


def dimensions(config: ModelConfig, total: int, active: int) -> dict[str, str]:
    """The model's sizes in words."""
    kinds = Counter(kind.replace("_", " ") for kind in config.layer_types)
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    window, dense = config.sliding_window, len(config.dense_layers)
    wide = f"intermediate size {config.intermediate_size:,}"
    if config.num_local_experts:
        wide = (
            f"{config.num_local_experts} a layer, {config.num_experts_per_tok} for "
            f"each token, {wide}" + f"; none in {dense} layers" * (dense > 0)
        )
    return {
        "family": FAMILIES[config.model_type].name,
        **({"format": format_names(config)} if config.formats else {}),
        "parameters": f"{total:,}, of which {active:,} active for each token",
        "layers": f"{config.num_hidden_layers}: {layers}",
        **({} if window is None else {"window": f"{window} tokens"}),
        "hidden size": f"{config.hidden_size:,}",
        "heads": f"{config.num_attention_heads} for queries, "
        f"{config.num_key_value_heads} for keys and values, of {config.head_dim} each",
        "experts" if config.num_local_experts else "feed-forward": wide,
        "vocabulary": f"{config.vocab_size:,} ids",
        "context": f"{config.max_position_embeddings:,} tokens",
    }


def at_load(source: Source) -> Iterator[str]:
    """What becomes of types of numbers that no operation reads, as GGUF files have."""
    types = {
        info.dtype
        for ours in source.names()
        if ours not in source.config.formats
        for info in source.stored(ours)
    }
    kept = {form.name for form in source.config.formats.values()} & {"Q8_0"}
    if made := sorted(types - {*FLOATS} - kept):
        text = f"{', '.join(made)} become bfloat16 on a GPU"
        text += ", float16 or float32 on a CPU"
        text += "; Q8_0 becomes bfloat16 on a GPU" * len(kept)
        if as_is := sorted((types | kept) & ADDENDS.keys()):
            text += f"; a CPU with AVX2 may keep {', '.join(as_is)} packed"
        for number, line in enumerate(wrap(text, 67)):
            yield f"{'' if number else 'at load':<12} {line}"


def describe(path: str | None) -> Iterator[str]:
    """The lines of the table, no wider than 80 columns for 120 billion parameters.

    ``path`` is a checkpoint or the name of a known model, whose published shapes then
    count; None is the embedded model. Raises CheckpointError or ConfigError.
    """
    source: Source
    if path in MODELS and not Path(path).exists():
        source, said = RandomCheckpoint(MODELS[path]), "no files, the published shapes"
    else:
        source = open_weights(path, torch.float32, torch.device("cpu"), False, None)
        files = "GGUF" if is_gguf(source.files[0]) else "safetensors"
        said = f"{files} files: {len(source.files)}"
    config = source.config
    total, active, parameters = count_parameters(config)
    yield f"{path or 'the embedded model'}: {said}"
    yield ""
    for name, text in dimensions(config, total, active).items():
        yield f"{name:<12} {text}"
    yield from at_load(source)
    yield ""
    parts: dict[str, list[tuple[str, int]]] = {}  # dtypes or formats, and bytes
    for ours in source.names():
        form = config.formats.get(ours)
        parts.setdefault(part_of_model(ours), []).extend(
            (form.name.split()[0] if form else info.dtype, info.nbytes)
            for info in source.stored(ours)
        )
    if config.tie_word_embeddings:
        del parts["embedding"]  # it is the LM head
    nbytes = sum(size for sizes in parts.values() for _, size in sizes)
    yield ROW.format("part", "stored as", "parameters", "bytes", "share")
    for part, count in parameters.items():
        size = sum(size for _, size in parts[part])
        kinds = ", ".join(dict(parts[part]))
        kinds = kinds if len(kinds) < 12 else f"{len(dict(parts[part]))} types"
        yield ROW.format(part, kinds, f"{count:,}", f"{size:,}", f"{size / nbytes:.1%}")
    yield ROW.format("total", "", f"{total:,}", f"{nbytes:,}", "100.0%")
