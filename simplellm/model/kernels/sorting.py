"""Sort each token's choices of experts by expert, and cut them into blocks.

T tokens, E experts, k experts a token, n = T * k (token, choice) pairs.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels.launch import pdl_wait

# What changes from step to step. Triton would compile a kernel again for numbers that
# 16 divides, and for 1, in the middle of somebody's answer.
VARYING = ["tokens", "n", "num_blocks"]


def max_blocks(pairs: int, experts: int, block: int) -> int:
    """The most blocks that ``pairs`` pairs can fill, however they are routed."""
    return min(pairs, (pairs + min(pairs, experts) * (block - 1)) // block)


class Dispatch(NamedTuple):
    """The n pairs in order of their experts, and blocks of pairs of one expert.

    Pairs of padding come last, after ``offsets[E]``.
    """

    pairs: Tensor  # int32 [n]; pair p is choice p % k of token p // k
    offsets: Tensor  # int32 [E + 1], where each expert's pairs begin
    blocks: Tensor  # int32 [blocks, 2], expert and first position; -1, 0 if empty

    @classmethod
    def empty(cls, ids: Tensor, experts: int, num_blocks: int) -> "Dispatch":
        """Room for the pairs of ``ids`` int32 [T, k]."""
        pairs, offsets = ids.new_empty(ids.numel()), ids.new_empty(experts + 1)
        return cls(pairs, offsets, ids.new_empty(num_blocks, 2))


@triton.jit
def count_tokens(num_tokens_ptr, tokens):
    """How many tokens have experts; those after them are padding."""
    num_tokens = tokens
    if num_tokens_ptr is not None:
        num_tokens = tl.load(num_tokens_ptr)
    return num_tokens


@triton.jit
def count_pairs(num_tokens_ptr, n, TOP_K: tl.constexpr):
    """How many pairs have experts."""
    return count_tokens(num_tokens_ptr, n // TOP_K) * TOP_K


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

    blocks = (count + BLOCK - 1) // BLOCK
    last = tl.cumsum(blocks, 0)  # blocks up to and with this expert's
    b = program * STEP + tl.arange(0, STEP)
    nth = b[:, None] - (last - blocks)[None, :]  # which of this expert's
    hit = (nth >= 0) & (nth < blocks[None, :])
    expert = tl.sum(tl.where(hit, experts[None, :] + 1, 0), 1) - 1
    first = tl.sum(tl.where(hit, begin[None, :] + nth * BLOCK, 0), 1)
    tl.store(blocks_ptr + b * 2, expert, b < num_blocks)
    tl.store(blocks_ptr + b * 2 + 1, first, b < num_blocks)
    return begin


@triton.jit(
    do_not_specialize=VARYING, do_not_specialize_on_alignment=["num_tokens_ptr"]
)
def sort_small_kernel(
    ids_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    num_tokens_ptr,
    n,
    num_blocks,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for ROWS pairs, each of which it compares with all the others.

    position[i] = #{j: (id[j], j) < (id[i], i)}
    """
    num_pairs = count_pairs(num_tokens_ptr, n, TOP_K)
    pdl_wait(PDL)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mine = tl.load(ids_ptr + i, i < num_pairs, E) * n + i
    position = tl.zeros([ROWS], tl.int32)
    count = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, n, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = tl.load(
            ids_ptr + j, j < num_pairs, E
        )  # the others come after every expert
        count += tl.histogram(other, BLOCK_E, j < num_pairs)
        lower = (other * n + j)[None, :] < mine[:, None]
        position += tl.sum(lower.to(tl.int32), 1)
    tl.store(pairs_ptr + position, i, i < n)
    write_blocks(count, offsets_ptr, blocks_ptr, num_blocks, E, BLOCK, STEP)
