"""Weights of a GGUF file that a CPU multiplies without making them float32.

In 4 bits, as they are; of 5 and 8 bits, as a sum of two of 4; or in float16.
"""

import math
from dataclasses import replace

from torch import Tensor

from simplellm.base.config import ModelConfig
from simplellm.checkpoint.cpu_weights import CPUWeight, PackedExperts
from simplellm.checkpoint.formats import NumberFormat
from simplellm.checkpoint.gguf.blocks import MIDDLES, read_blocks
from simplellm.checkpoint.gguf.container import Container
from simplellm.checkpoint.gguf.metadata import KEPT, types_of
from simplellm.checkpoint.gguf.tensors import ORDINARY
from simplellm.checkpoint.in_float16 import FLOAT16, TABLE, in_float16, product_weights
from simplellm.checkpoint.int4 import ROWS, Codes, Int4
from simplellm.checkpoint.names import tensor_shapes

INT4 = replace(KEPT["Q8_0"], name="int4", dtype="int4")
# Of 4 bits each; the product has no scales for Q6_K's small blocks.
ADDENDS = {kind: 1 + (n > 8) for kind, n in MIDDLES.items() if kind != "Q6_K"}
MAX_DEQUANTIZED = 2**30  # bytes of all numbers in float16, up to which they are kept


def packed_formats(
    config: ModelConfig, container: Container
) -> dict[str, NumberFormat]:
    """Formats of the weights that become a `CPUWeight`, by our names."""
    shapes, sources = tensor_shapes(config), product_weights(config)
    types = {
        ours: types_of(source, config, container) for ours, source in sources.items()
    }
    types = {ours: kinds for ours, kinds in types.items() if is_packable(kinds)}
    # Looked up, not multiplied: numbers in any case.
    table = is_packable(types_of(TABLE, config, container))
    count = sum(math.prod(shapes[sources[ours]]) for ours in types)
    keep = 2 * count <= MAX_DEQUANTIZED
    formats = {
        ours: packed_format(kinds, shapes[sources[ours]][-2], keep)
        for ours, kinds in types.items()
    }
    return {**formats, TABLE: FLOAT16} if table else formats


def is_packable(kinds: set[str]) -> bool:
    """Whether a weight has parts of these types, none of them ordinary numbers."""
    return bool(kinds) and kinds.isdisjoint({*ORDINARY, "MXFP4"})


def packed_format(kinds: set[str], rows: int, keep: bool) -> NumberFormat:
    """How a weight with so many ``rows`` is kept; ``keep``: in float16 in any case.

    Of several addends that is all that's kept then, since it's the faster one.
    """
    kind, *others = kinds
    addends = 0 if others else ADDENDS.get(kind, 0)
    if addends == 0 or rows % ROWS or (keep and addends > 1):
        return FLOAT16
    return replace(INT4, addends=addends, keep_dequantized=keep)


def codes_of(rows: Tensor, kind: str) -> list[Codes]:
    """A weight from uint8 ``rows`` [out, bytes of a row] of a type of `ADDENDS`.

    The addends of a sum are about as large as it is: each product is rounded.
    """
    blocks = read_blocks(rows, kind)
    if ADDENDS[kind] == 1:
        return [Codes(blocks.values, blocks.scales, blocks.offsets)]
    high = (blocks.values >> 4) + (8 - blocks.middle // 16)
    return [
        Codes(high, 16 * blocks.scales, 8 * blocks.scales),
        Codes(blocks.values & 15, blocks.scales, blocks.offsets),
    ]


def pack_weight(weight: Tensor, kind: str, form: NumberFormat) -> Tensor | CPUWeight:
    """A weight [out, ...] or [E, out, ...] in a format of `packed_formats`.

    From its numbers for `FLOAT16`, which stay so where one doesn't fit; else from the
    bytes of its rows.
    """
    if form.dtype == "float16":
        return in_float16(weight)
    if weight.ndim > 2:
        return PackedExperts([pack_matrix(one, kind, form) for one in weight])
    return pack_matrix(weight, kind, form)


def pack_matrix(rows: Tensor, kind: str, form: NumberFormat) -> Int4:
    """`pack_weight` of one matrix that is kept in 4 bits."""
    return Int4.of(codes_of(rows, kind), form.keep_dequantized)
