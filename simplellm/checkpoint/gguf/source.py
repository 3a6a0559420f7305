"""A GGUF file as a checkpoint: our names to weights, each read when it is asked for."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simplellm.base.config import CheckpointError, expect, reraise_as
from simplellm.checkpoint.cpu_weights import PackedExperts
from simplellm.checkpoint.float16 import fits
from simplellm.checkpoint.gguf.blocks import MIDDLES
from simplellm.checkpoint.gguf.container import open_container
from simplellm.checkpoint.gguf.metadata import (
    KEPT,
    KEPT_ON_GPU,
    ROPE_FACTORS,
    read_gguf_config,
)
from simplellm.checkpoint.gguf.names import stored_as
from simplellm.checkpoint.gguf.packed import pack_weight, packed_formats
from simplellm.checkpoint.gguf.tensors import (
    ORDINARY,
    as_array,
    dequantize_rows,
    join_parts,
    mxfp4_of,
    reverse_permute,
    scaled_of,
)
from simplellm.checkpoint.in_float16 import TABLE
from simplellm.checkpoint.mxfp4 import Weight
from simplellm.checkpoint.names import PARTS_OF, TensorInfo, axes, tensor_names

# Families of which llama.cpp has q and k with their rows in pairs.
PAIRED_HEADS = "llama", "mistral", "mixtral", "smollm3", "granite"


class GGUFCheckpoint:
    """A GGUF file, or several that are one model: a `Source`.

    Opening reads the headers and checks all that they can tell; numbers stay in the
    file until a tensor is touched. Those of other types than ordinary ones and `KEPT`
    (or `KEPT_ON_GPU`, by ``device``) become ``dtype`` then. With ``packed``, quantized
    ones become a `CPUWeight` where that can be. Raises CheckpointError or ConfigError.
    """

    mapped = False  # all experts are rearranged

    def __init__(
        self,
        path: str | Path,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        packed: bool = False,
    ) -> None:
        self.container = open_container(path)
        self.path, self.dtype = self.container.path, dtype
        self.files = [*self.container.data]
        gpu = torch.device(device).type == "cuda"
        config = read_gguf_config(self.container, KEPT_ON_GPU if gpu else KEPT)
        self._packed = packed_formats(config, self.container) if packed else {}
        self.config = replace(config, formats={**config.formats, **self._packed})
        with reraise_as(CheckpointError, self.path):
            self._names = {
                ours: stored_as(ours, self.config.model_type)
                for ours in tensor_names(self.config)
            }
            if self.config.tie_word_embeddings:
                self._names["lm_head.weight"] = self._names["embed_tokens.weight"]
            self._check_names()
            self._check_shapes()
            self._check_library()

    def names(self) -> list[str]:
        return list(self._names)

    def stored(self, ours: str) -> list[TensorInfo]:
        return [self.container.tensors[name] for name in self._names[ours]]

    def __getitem__(self, ours: str) -> Weight | PackedExperts:
        """The weight [..., out, in]: ordinary numbers, or one that stays packed."""
        tensors = self.stored(ours)
        parts: list[Any] = [self._part(tensor, ours) for tensor in tensors]
        if ".qkv." in ours and self.config.model_type in PAIRED_HEADS:
            config = self.config
            heads = config.num_attention_heads, config.num_key_value_heads
            q, k = map(reverse_permute, parts, heads)
            parts = [q, k, *parts[2:]]
        of_experts = ".experts." in ours
        interleaved = of_experts and self.config.activation == "clamped_swiglu"
        weight: Weight = join_parts(parts, int(of_experts), interleaved)
        if ours != TABLE and (form := self._packed.get(ours)):
            assert isinstance(weight, Tensor)
            return pack_weight(weight, tensors[0].dtype, form)
        return weight

    def _part(self, tensor: TensorInfo, ours: str) -> Weight:
        """One tensor of the file, or its bytes if it is packed with others later."""
        rows = as_array(self.container.data[tensor.file], tensor)
        form = self._packed.get(ours)
        if form and form.dtype == "float16":
            half = dequantize_rows(rows, tensor, torch.float16)
            return half if fits(half) else dequantize_rows(rows, tensor, self.dtype)
        if form:
            return torch.from_numpy(rows)
        if ours in self.config.formats:
            read = mxfp4_of if tensor.dtype == "MXFP4" else scaled_of
            return read(torch.from_numpy(rows))
        return dequantize_rows(rows, tensor, self.dtype)

    def _check_names(self) -> None:
        """Raise ValueError if the file holds other tensors than it should."""
        present = {*self.container.tensors} - {ROPE_FACTORS}
        expected = {name for names in self._names.values() for name in names}
        implied = f"the {len(expected)} tensors that its metadata implies"
        expect(
            present >= expected, "what it lacks", sorted(expected - present), implied
        )
        expect(
            present <= expected, "what it holds", sorted(present - expected), implied
        )

    def _check_shapes(self) -> None:
        """Raise ValueError for a tensor of another shape than it should have."""
        size = axes(self.config)
        for ours, name in tensor_names(self.config).items():
            sides, tensors = name.shape.split(), self.stored(ours)
            axis = int(".experts." in ours)  # that parts lie along
            parts = PARTS_OF[sides[axis]] if len(tensors) > 1 else [sides[axis]]
            for tensor, part in zip(tensors, parts, strict=True):
                sides[axis] = part
                shape = tuple(size[side] for side in sides)
                where, said = f"the shape of {tensor.name!r}", [*tensor.shape]
                expect(tensor.shape == shape, where, said, f"{[*shape]}")

    def _check_library(self) -> None:
        """Raise ValueError if numbers have to be made and nothing here makes them."""
        forms = self.config.formats
        kept = {ours for ours, form in forms.items() if form.dtype != "float16"}
        made = self._names.keys() - kept
        types = {tensor.dtype for ours in made for tensor in self.stored(ours)}
        ready = types <= ORDINARY.keys() | MIDDLES.keys() or find_spec("gguf")
        expected = "it installed, as by pip install 'simplellm[gguf]'"
        expect(ready, "the library gguf", "missing", expected)
