"""The LM head, and the likeliest token of each row found on the way.

S rows, V vocabulary, N hidden size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels.argmax_keys import index_of, largest_key
from simplellm.model.kernels.launch import launcher, pdl_wait
from simplellm.model.kernels.linear import (
    Dot,
    Gemv,
    Product,
    Table,
    choose_in,
    multiply_into,
)


@triton.jit
def best_kernel(best_ptr, ids_ptr, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program a row: ids[row] = the index in the largest of its keys."""
    pdl_wait(PDL)
    row = tl.program_id(0)
    best = largest_key(best_ptr + row * count, count, BLOCK)
    tl.store(ids_ptr + row, index_of(best))


# For up to so many rows, how. Above the last, PyTorch's matmul and argmax.
HEADS: Table = (
    (1, Gemv(rows=8, warps=4)),
    (32, Dot(rows=128, depth=128, parts=1, warps=8, stages=4, pdl=False)),
    (128, Dot(rows=128, depth=128, parts=1, warps=4, stages=3, pdl=False)),
)


def choose_head(rows: int) -> Product | None:
    """How to compute the head for so many rows; None for PyTorch's matmul."""
    return choose_in(HEADS, rows)


def head(
    hidden: Tensor, weight: Tensor, logits: Tensor, batch_invariant: bool = False
) -> Tensor:
    """The likeliest token of each row: hidden [S, N], weight [V, N] -> int32 [S].

    Fills ``logits``, float32 [S, V], with sums in float32, which no rounding ties; of
    equal ones the lower id wins, and NaN wins against all numbers, so that a row of NaN
    yields 0. With ``batch_invariant`` no row's logits depend on the others.
    """
    config = choose_head(hidden.shape[0])
    if batch_invariant:  # on tensor cores any tile sums a row in the same order
        config = choose_head(max(hidden.shape[0], 2)) or HEADS[-1][1]
    if config is not None:
        return likeliest(hidden, weight, logits, config)
    if hidden.dtype == torch.float32:
        torch.mm(hidden, weight.T, out=logits)
    else:  # the sums are not rounded to hidden's dtype
        torch.mm(hidden, weight.T, out_dtype=torch.float32, out=logits)
    return logits.argmax(-1).int()


def likeliest(
    hidden: Tensor, weight: Tensor, logits: Tensor, config: Product
) -> Tensor:
    """`head` in the way that ``config`` says."""
    rows, tiles = hidden.shape[0], -(-weight.shape[0] // config.rows)
    best = hidden.new_empty(rows, tiles, dtype=torch.int64)
    ids = hidden.new_empty(rows, dtype=torch.int32)
    multiply_into(logits, hidden, weight, None, config, best)
    # One row has 25,136 keys: 8.1 us in tiles of 2,048 on an H200, 3.3 in these.
    block, warps = (2048, 8) if tiles <= 2048 else (8192, 32)
    start = launcher(best_kernel, BLOCK=block, num_warps=warps)
    start((rows, 1, 1), best, ids, tiles)
    return ids
