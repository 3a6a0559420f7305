"""The residual stream: tokens become rows, layers' outputs are added, sums normalized.

T tokens, N hidden size, V vocabulary, S parts of an update.
"""

from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels.exchange import ALONE, Peers, exchange, load_addresses
from simplellm.model.kernels.launch import Launcher, launcher, power_of_two
from simplellm.model.kernels.rounding import (
    RoundedNorm,
    Rounding,
    empty_input,
    input_arguments,
    rounding_constants,
    store_rounded,
)
from simplellm.model.layers import LayerNorm, Norm, SandwichNorm


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
def norm_row(row_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """N numbers as float32 [BLOCK], zeros behind them; zeros alone for None."""
    columns = tl.arange(0, BLOCK)
    if row_ptr is None:
        return tl.zeros([BLOCK], tl.float32)
    else:
        return tl.load(row_ptr + columns, columns < N, 0).to(tl.float32)


@triton.jit(do_not_specialize=["room"])
def add_norm_kernel(
    residual_ptr,
    update_ptr,
    update_weight_ptr,
    weight_ptr,
    bias_ptr,
    normed_ptr,
    scales_ptr,
    peers_ptr,
    room,
    eps,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    FLOOR: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: residual += sum of the parts; normed = a norm of it.

    RMSNorm is residual / sqrt(mean(residual^2) + eps) * weight. With bias, a LayerNorm:
    (residual - mean) / sqrt(variance + eps) * weight + bias. With update_weight, the
    parts' RMSNorm is added in place of their sum. With peers, all ranks' parts are
    summed, see `exchange`. With scales, normed has 8 bits, as `store_rounded` makes
    them.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    update_weight = norm_row(update_weight_ptr, N, BLOCK)
    weight = norm_row(weight_ptr, N, BLOCK)
    bias = norm_row(bias_ptr, N, BLOCK)
    if peers_ptr is not None:
        addresses = load_addresses(peers_ptr, RANKS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = norm_row(residual_ptr + row * N, N, BLOCK)
    if PARTS > 0:
        update = update_ptr + row * (PARTS * N) + columns
        dtype = residual_ptr.dtype.element_ty
        if update_weight_ptr is None and peers_ptr is None:
            x = sum_parts(x, update, inside, N, PARTS, dtype)
        else:
            total = sum_parts(0.0, update, inside, N, PARTS, tl.float32)
            if peers_ptr is not None:
                total = exchange(
                    *(total, columns, inside, row.to(tl.int32), addresses),
                    *(WORDS, RANK, RANKS, ROWS, dtype),
                )
            if update_weight_ptr is not None:
                scale = tl.rsqrt(tl.sum(total * total, 0) / N + eps)
                total *= scale * update_weight
            x = (x + total).to(dtype).to(tl.float32)
        tl.store(residual_ptr + row * N + columns, x.to(dtype), inside)
    if bias_ptr is not None:
        x = tl.where(inside, x - tl.sum(x, 0) / N, 0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    y = x * scale * weight
    if bias_ptr is not None:
        y += bias
    if scales_ptr is None:
        y = y.to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + row * N + columns, y, inside)
    else:
        y = y.to(residual_ptr.dtype.element_ty).to(tl.float32)
        store_rounded(
            *(y, row, 0, normed_ptr, scales_ptr, room, N, COLUMNS, MOST, FLOOR)
        )


@cache
def add_norm_launcher(
    size: int,
    parts: int,
    rounding: Rounding | None = None,
    peers: Peers | None = None,
) -> Launcher:
    """For rows of ``size`` numbers, and updates in so many parts.

    With ``rounding``, the norm is rounded; with ``peers``, all ranks' are summed.
    """
    block = power_of_two(size)
    options = rounding_constants(block, size, rounding) | {"N": size, "PARTS": parts}
    options |= ALONE if peers is None else peers.constants()
    return launcher(add_norm_kernel, BLOCK=block, num_warps=8, **options)


def add_norm(
    residual: Tensor,
    update: Tensor | None,
    norm: Norm | RoundedNorm | None,
    eps: float,
    peers: Peers | None = None,
) -> tuple[Tensor, Any]:
    """Add ``update`` to ``residual`` in place; return it and its norm, [T, N] both.

    residual [T, N]; update [T, N] or, in S parts that are first summed in float32 and
    in order, [T, S, N], any float dtype. All are contiguous. The sum is rounded to
    residual's dtype, once, before it is normed. A `RoundedNorm` makes a `Rounded`, of
    which tables of operations know nothing. With ``peers``, whose rows are enough, the
    update is what all ranks have, which do the same.
    """
    size = residual.shape[1]
    weight = norm if isinstance(norm, Tensor) or norm is None else norm.weight
    inner = norm.update if isinstance(norm, SandwichNorm) else None
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    rounding = norm.rounding if isinstance(norm, RoundedNorm) else None
    normed = empty_input(residual, size, residual.dtype, rounding)
    parts = 0
    if update is not None:
        parts = 1 if update.ndim == 2 else update.shape[1]
    start = add_norm_launcher(size, parts, rounding, peers)
    values, scales, room = input_arguments(normed)
    addresses = None if peers is None else peers.addresses
    args = residual, update, inner, weight, bias, values, scales, addresses, room, eps
    start((len(residual), 1, 1), *args)
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
