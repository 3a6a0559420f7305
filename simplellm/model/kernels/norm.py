"""The residual stream: tokens become rows, layers' outputs are added, sums normalized.

T tokens, N hidden size, V vocabulary, S parts of an update.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels.launch import Launcher, launcher, power_of_two


@triton.jit
def sum_parts(
    x, update, inside, N: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr
):
    """x plus the parts of its update, which are added first, rounded to DTYPE."""
    total = tl.load(update, inside, 0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(update + part * N, inside, 0).to(tl.float32)
    return (x + total).to(DTYPE).to(tl.float32)


@triton.jit
def add_norm_kernel(
    residual_ptr,
    update_ptr,
    weight_ptr,
    normed_ptr,
    eps,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: residual += sum of the parts; normed = its RMSNorm.

    scale = 1 / sqrt(mean(residual^2) + eps); normed = residual * scale * weight
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    weight = tl.load(weight_ptr + columns, inside, 0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(residual_ptr + row * N + columns, inside, 0).to(tl.float32)
    if PARTS > 0:
        update = update_ptr + row * (PARTS * N) + columns
        dtype = residual_ptr.dtype.element_ty
        x = sum_parts(x, update, inside, N, PARTS, dtype)
        tl.store(residual_ptr + row * N + columns, x.to(dtype), inside)
    scale = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    y = x * scale * weight
    tl.store(normed_ptr + row * N + columns, y.to(normed_ptr.dtype.element_ty), inside)


@cache
def add_norm_launcher(size: int, parts: int) -> Launcher:
    """For rows of ``size`` numbers, and updates in so many parts."""
    block = power_of_two(size)
    return launcher(add_norm_kernel, N=size, PARTS=parts, BLOCK=block, num_warps=8)


def add_norm(
    residual: Tensor, update: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add ``update`` to ``residual`` in place; return it and its RMSNorm, [T, N] both.

    residual [T, N]; update [T, N] or, in S parts that are first summed in float32 and
    in order, [T, S, N], any float dtype; weight [N]. All are contiguous. The sum is
    rounded to residual's dtype before it is normalized.
    """
    tokens, size = residual.shape
    normed = torch.empty_like(residual)
    if update is None:
        update, parts = residual, 0
    else:
        parts = 1 if update.ndim == 2 else update.shape[1]
    start = add_norm_launcher(size, parts)
    start((tokens, 1, 1), residual, update, weight, normed, eps)
    return residual, normed


@triton.jit(do_not_specialize_on_alignment=["tokens_ptr", "previous_ptr"])
def embed_kernel(
    tokens_ptr,
    previous_ptr,
    table_ptr,
    out_ptr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,  # False: the first of a step has nothing to overlap with
):
    """out[t] = table[token], where token -1 - i is previous[i]."""
    row = tl.program_id(0)
    token = tl.load(tokens_ptr + row)
    if token < 0:
        token = tl.load(previous_ptr - 1 - token)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    x = tl.load(table_ptr + token.to(tl.int64) * N + columns, inside)
    tl.store(out_ptr + row * N + columns, x, inside)


@cache
def embed_launcher(size: int) -> Launcher:
    """For rows of ``size`` numbers."""
    block = power_of_two(size)
    return launcher(embed_kernel, pdl=False, N=size, BLOCK=block, num_warps=4)


def embed(tokens: Tensor, previous: Tensor, table: Tensor) -> Tensor:
    """The rows of ``table`` [V, N] of int32 tokens [T]; -1 - i means previous[i].

    The caller answers for tokens being in the table, or in ``previous``, int32.
    """
    count, size = tokens.shape[0], table.shape[1]
    out = table.new_empty(count, size)
    embed_launcher(size)((count, 1, 1), tokens, previous, table, out)
    return out
