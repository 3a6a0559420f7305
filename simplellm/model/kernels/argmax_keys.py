"""Numbers with their indices as one int64 key, so that one maximum finds both.

A key has the number in its upper half and its index, reversed, in the lower one: of
equal numbers the one with the lower index is larger.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**63))  # below every key of a number


@triton.jit
def ordered(values, indices):
    """int64 keys that sort as (value, then lower index first); NaN above all numbers.

    A float's bits, read as an integer, sort as the float does, negative ones reversed.
    """
    # Adding 0 turns -0 into +0, which it has to tie with.
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(values != values, 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - indices).to(tl.int64)


@triton.jit
def index_of(keys):
    """The indices that went into `ordered`."""
    return (0x7FFFFFFF - (keys & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def largest_key(keys_ptr, count, BLOCK: tl.constexpr):
    """The largest of ``count`` keys."""
    lane = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.int64) + LOWEST
    for first in range(0, count, BLOCK):
        here = first + lane
        keys = tl.load(keys_ptr + here, here < count, LOWEST)
        largest = tl.maximum(largest, keys)
    return tl.max(largest, 0)
