"""Pairs sorted by expert and cut into blocks: what every way to sort them leaves.

E experts, k experts a token, n = T * k (token, choice) pairs.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class ExpertBlocks(NamedTuple):
    """The n pairs in order of their experts, and blocks of pairs of one expert.

    Pairs of padding, and those whose expert is E, of another rank, come last, after
    ``offsets[E]``.
    """

    pairs: Tensor  # int32 [n]; pair p is choice p % k of token p // k
    offsets: Tensor  # int32 [E + 1], where each expert's pairs begin
    blocks: Tensor  # int32 [blocks, 2], expert and first position; -1, 0 if empty

    @classmethod
    def empty(cls, ids: Tensor, experts: int, num_blocks: int) -> "ExpertBlocks":
        """Room for the pairs of ``ids`` int32 [T, k]."""
        pairs, offsets = ids.new_empty(ids.numel()), ids.new_empty(experts + 1)
        return cls(pairs, offsets, ids.new_empty(num_blocks, 2))


@triton.jit
def count_pairs(num_tokens_ptr, n, TOP_K: tl.constexpr):
    """How many pairs have experts; those after them are padding."""
    num_pairs = n
    if num_tokens_ptr is not None:
        num_pairs = tl.load(num_tokens_ptr) * TOP_K
    return num_pairs


@triton.jit
def write_blocks(
    count,
    offsets_ptr,
    blocks_ptr,
    num_blocks,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """From how many pairs each expert has: the offsets and this program's STEP blocks.

    Block b is of the expert whose blocks, counted up over the experts, b falls into.
    Returns the offsets.
    """
    program = tl.program_id(0)
    experts = tl.arange(0, count.shape[0])
    end = tl.cumsum(count, 0)
    begin = end - count
    if program == 0:
        tl.store(offsets_ptr + experts, begin, experts < E)
        tl.store(offsets_ptr + experts + 1, end, experts == E - 1)

    blocks = tl.where(experts < E, (count + BLOCK - 1) // BLOCK, 0)
    last = tl.cumsum(blocks, 0)  # blocks up to and with this expert's
    b = program * STEP + tl.arange(0, STEP)
    nth = b[:, None] - (last - blocks)[None, :]  # which of this expert's
    hit = (nth >= 0) & (nth < blocks[None, :])
    expert = tl.sum(tl.where(hit, experts[None, :] + 1, 0), 1) - 1
    first = tl.sum(tl.where(hit, begin[None, :] + nth * BLOCK, 0), 1)
    tl.store(blocks_ptr + b * 2, expert, b < num_blocks)
    tl.store(blocks_ptr + b * 2 + 1, first, b < num_blocks)
    return begin


@triton.jit
def nearest(count, SIZE: tl.constexpr, LAST: tl.constexpr):
    """Whether SIZE is the least power of two from ``count`` on, or LAST and enough."""
    if LAST:
        return (count > 0) & (count <= SIZE)
    return (count > SIZE // 2) & (count <= SIZE)
