"""A checkpoint whose matrices a CPU multiplies in float16, not in float32."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from simplellm.base.config import ModelConfig
from simplellm.checkpoint.cpu_weights import PackedExperts
from simplellm.checkpoint.float16 import Float16, fits
from simplellm.checkpoint.formats import NumberFormat, is_matrix
from simplellm.checkpoint.mxfp4 import Weight
from simplellm.checkpoint.names import (
    TensorInfo,
    is_expert_weight,
    tensor_names,
    tensor_shapes,
)
from simplellm.checkpoint.source import Source

FLOAT16 = NumberFormat("float16", ("",), "float16")
TABLE, OUTPUT = "embed_tokens.weight", "lm_head.weight"
SIXTEEN = "BF16", "F16"
# In such matrices, from which on a step waits for memory. Of smaller models nothing is
# rounded, since little would be gained.
MIN_NUMBERS = 2**23


def product_weights(config: ModelConfig) -> dict[str, str]:
    """Our names of the weights that products read, and of what is stored for each.

    The head is among them, even where it is the embedding: that stays numbers as well.
    """
    found = {}
    for ours, name in tensor_names(config).items():
        matrix = is_matrix(name) or is_expert_weight(ours)
        if ours == OUTPUT or (ours.startswith("layers.") and matrix):
            found[ours] = ours
    if config.tie_word_embeddings:
        found[OUTPUT] = TABLE
    return found


class InFloat16:
    """A `Source` whose matrices become a `CPUWeight`, if they are large.

    That is those that would become float32 and are stored in less. Of bfloat16's
    numbers, float16 has those below 2^-17 rounded, by 2^-25 at most, and none above
    65,504. A matrix with one of these, or with NaN, is left as it is.
    """

    def __init__(self, source: Source) -> None:
        self._source, shapes = source, tensor_shapes(source.config)
        formats = source.config.formats
        self._stored = {
            ours: stored
            for ours, stored in product_weights(source.config).items()
            if formats.keys().isdisjoint({ours, stored})
            and all(info.dtype != "F32" for info in source.stored(stored))
        }
        count = sum(math.prod(shapes[stored]) for stored in self._stored.values())
        if count < MIN_NUMBERS:
            self._stored = {}
        kept = [*self._stored]
        if kept and all(info.dtype in SIXTEEN for info in source.stored(TABLE)):
            kept.append(TABLE)  # looked up, not multiplied: any 16 bits will do
        formats = {**formats, **dict.fromkeys(kept, FLOAT16)}
        self.config: ModelConfig = replace(source.config, formats=formats)

    @property
    def files(self) -> Sequence[Path]:
        return self._source.files

    @property
    def mapped(self) -> bool:
        return self._source.mapped

    def names(self) -> list[str]:
        return list(dict.fromkeys([*self._source.names(), *self._stored]))

    def stored(self, ours: str) -> list[TensorInfo]:
        return self._source.stored(self._stored.get(ours, ours))

    def __getitem__(self, ours: str) -> Weight | PackedExperts:
        weight = self._source[self._stored.get(ours, ours)]
        if ours not in self._stored or not isinstance(weight, Tensor):
            return weight
        return in_float16(weight)


def in_float16(weight: Tensor) -> Tensor | Float16 | PackedExperts:
    """``weight`` [out, in] or [E, out, in] of ordinary numbers, rounded if it fits."""
    if not fits(weight):
        return weight
    if weight.ndim == 2:
        return Float16.of(weight)
    return PackedExperts([Float16.of(one) for one in weight])
