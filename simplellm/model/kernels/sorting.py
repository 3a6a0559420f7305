"""Sort each token's choices of experts by expert, and cut them into blocks.

T tokens, E experts, k experts a token, n = T * k (token, choice) pairs.
"""

import triton
import triton.language as tl

from simplellm.model.kernels.expert_blocks import count_pairs, write_blocks
from simplellm.model.kernels.launch import pdl_wait

# What changes from step to step. Triton would compile a kernel again for numbers that
# 16 divides, and for 1, in the middle of somebody's answer.
VARYING = ["tokens", "n", "num_blocks"]


def max_blocks(pairs: int, experts: int, block: int) -> int:
    """The most blocks that ``pairs`` pairs can fill, however they are routed."""
    return min(pairs, (pairs + min(pairs, experts) * (block - 1)) // block)


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
    count = tl.zeros([BLOCK_E], tl.int32)
    mine = tl.load(ids_ptr + i, i < num_pairs, E) * n + i
    position = tl.zeros([ROWS], tl.int32)
    for first in range(0, n, CHUNK):
        j = first + tl.arange(0, CHUNK)
        # Padding comes after every expert.
        other = tl.load(ids_ptr + j, j < num_pairs, E)
        count += tl.histogram(other, BLOCK_E, j < num_pairs)
        lower = (other * n + j)[None, :] < mine[:, None]
        position += tl.sum(lower.to(tl.int32), 1)
    tl.store(pairs_ptr + position, i, i < n)
    write_blocks(count, offsets_ptr, blocks_ptr, num_blocks, E, BLOCK, STEP)
