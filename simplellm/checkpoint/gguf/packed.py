"""Weights of a GGUF file that a CPU multiplies as they are: in 4 bits, or twice 4."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from simplellm.base.config import BLOCK, ModelConfig
from simplellm.checkpoint.formats import NumberFormat, is_matrix
from simplellm.checkpoint.gguf.container import Container
from simplellm.checkpoint.gguf.metadata import KEPT, type_of
from simplellm.checkpoint.gguf.tensors import float16_at, scaled_of
from simplellm.checkpoint.int4 import (
    ROWS,
    Codes,
    Int4,
    dequantized_bytes,
    split_int8,
)
from simplellm.checkpoint.names import is_expert_weight, tensor_names, tensor_shapes

EIGHT = KEPT["Q8_0"]
PACKABLE = {
    "Q4_0": replace(EIGHT, name="Q4_0", dtype="int4"),
    "Q4_1": replace(EIGHT, name="Q4_1", dtype="int4"),
    "Q8_0": replace(EIGHT, dtype="int4", addends=2),
}
TABLE, OUTPUT = "embed_tokens.weight", "lm_head.weight"
MAX_DEQUANTIZED = 2**30  # bytes of all numbers, up to which they are kept, too


def packed_formats(
    config: ModelConfig, container: Container
) -> dict[str, NumberFormat]:
    """Formats of the weights that become `Int4`, by our names.

    The head is among them, even where it is the embedding: that stays numbers as well.
    """
    shapes, sources = tensor_shapes(config), {}
    for ours, name in tensor_names(config).items():
        inner = ours.startswith("layers.") and not is_expert_weight(ours)
        if ours == OUTPUT or (inner and is_matrix(name)):
            sources[ours] = ours
    if config.tie_word_embeddings:
        sources[OUTPUT] = TABLE
    formats = {}
    for ours, source in sources.items():
        form = PACKABLE.get(type_of(source, config, container))
        if form and shapes[source][0] % ROWS == 0:
            formats[ours] = form
    count = sum(math.prod(shapes[ours]) for ours in formats)
    keep = dequantized_bytes(count) <= MAX_DEQUANTIZED
    return {
        ours: replace(form, keep_dequantized=keep) for ours, form in formats.items()
    }


def nibbles(blocks: Tensor, start: int) -> Tensor:
    """The values, int32 [out, in], of blocks [out, G, bytes]: low halves come first."""
    packed = blocks[..., start:].int()
    return torch.cat([packed & 15, packed >> 4], -1).flatten(-2)


def codes_of_q4_0(rows: Tensor) -> list[Codes]:
    """A block is its scale and 32 numbers from -8 to 7."""
    blocks = rows.unflatten(-1, (-1, 2 + BLOCK // 2))
    scales = float16_at(blocks, 0)
    return [Codes(nibbles(blocks, 2), scales, torch.zeros_like(scales))]


def codes_of_q4_1(rows: Tensor) -> list[Codes]:
    """A block is its scale, its least number and 32 multiples to add, 0 to 15."""
    blocks = rows.unflatten(-1, (-1, 4 + BLOCK // 2))
    scales, least = float16_at(blocks, 0), float16_at(blocks, 2)
    return [Codes(nibbles(blocks, 4), scales, least + 8 * scales)]


READERS: dict[str, Callable[[Tensor], list[Codes]]] = {
    "Q4_0": codes_of_q4_0,
    "Q4_1": codes_of_q4_1,
    "Q8_0": lambda rows: split_int8(scaled_of(rows)),
}


def pack_rows(rows: Tensor, kind: str, keep: bool) -> Int4:
    """A weight from uint8 ``rows`` [out, bytes of a row] of a type of `PACKABLE`."""
    return Int4.of(READERS[kind](rows), keep)
