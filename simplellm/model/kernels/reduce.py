"""What ranks add up: the results of row-parallel weights.

T tokens, N hidden size, S parts of an update.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels.launch import Launcher, launcher, pdl_wait, power_of_two
from simplellm.model.kernels.norm import sum_parts


@triton.jit
def add_parts_kernel(
    parts_ptr,
    out_ptr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK numbers of a row: out = the sum of its parts."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    parts = parts_ptr + row * (PARTS * N) + columns
    total = sum_parts(0.0, parts, inside, N, PARTS, tl.float32)
    tl.store(out_ptr + row * N + columns, total.to(out_ptr.dtype.element_ty), inside)


@cache
def add_parts_launcher(size: int, parts: int) -> tuple[Launcher, int]:
    """For rows of ``size`` numbers in so many parts; and the programs of a row."""
    block = min(1024, power_of_two(size))
    start = launcher(add_parts_kernel, N=size, PARTS=parts, BLOCK=block, num_warps=4)
    return start, -(-size // block)


def add_parts(update: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, N] in ``dtype`` of [T, S, N], summed in float32 and in order.

    What is [T, N] is returned as it is.
    """
    if update.ndim == 2:
        return update
    tokens, parts, size = update.shape
    out = update.new_empty(tokens, size, dtype=dtype)
    start, programs = add_parts_launcher(size, parts)
    start((tokens, programs, 1), update, out)
    return out


def of_sums(
    add_up: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> Callable[[Tensor], Any]:
    """`Ops.reduce` of updates in parts: of each rank's sum in ``dtype``."""
    return lambda update: add_up(add_parts(update, dtype))
