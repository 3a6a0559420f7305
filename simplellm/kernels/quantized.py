"""Products with weights of 8 bits: half the bytes of bfloat16, twice the arithmetic.

T tokens, N out, K in, S parts along K, C scales of a token.

As in `linear`, one kernel is for very few tokens and holds rows of the weight in
registers, the other is for any number and multiplies on the tensor cores. Both compute
what the format says, `Scaled.product`: where inputs are rounded, `round_kernel` does so
in front of either, once for all rows of the weight. Sums are float32, and int32 of
integers. On the tensor cores the sums of e4m3 keep fewer bits than float32 has, so what
each step of up to 128 columns adds is taken out of them.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.kernels.head import head as head_dense
from simplellm.kernels.launch import Launcher, follow, launcher, power_of_two
from simplellm.kernels.linear import (
    Dot,
    Gemv,
    Product,
    count_parts,
    gemv_hold,
    split_columns,
)
from simplellm.kernels.linear import project as project_dense
from simplellm.scaled import LARGEST, LEAST_TILE, Scaled
from simplellm.weights import Weight


@triton.jit
def round_numbers(x, largest, MOST: tl.constexpr):
    """float32 numbers of 8 bits: x, of which ``largest`` becomes MOST, rounded."""
    x = x * tl.div_rn(tl.full(largest.shape, MOST, tl.float32), largest)
    if MOST == 127:  # below 2^22, nothing after the point is left of such a sum
        return (x + 12582912.0) - 12582912.0
    else:
        return x.to(tl.float8e4nv).to(tl.float32)


@triton.jit
def round_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    stride_x,
    tokens,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    FLOOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token: values [T, K] of 8 bits, scales float32 [C, T].

    COLUMNS share a scale; a row, padded to BLOCK, is a multiple of them.
    """
    follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, BLOCK // COLUMNS)
    columns = groups[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + token * stride_x + columns, columns < K, 0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 1), FLOOR)
    values = round_numbers(x, largest[:, None], MOST)
    values_ptrs = values_ptr + token * K + columns
    tl.store(values_ptrs, values.to(values_ptr.dtype.element_ty), columns < K)
    # An integer cannot be NaN.
    broken = tl.max((x != x).to(tl.int32), 1) > 0
    scales = tl.div_rn(largest, tl.full(largest.shape, MOST, tl.float32))
    scales = tl.where(broken, float("nan"), scales)
    inside = groups * COLUMNS < K
    tl.store(scales_ptr + groups.to(tl.int64) * tokens + token, scales, inside)


@triton.jit
def load_input(
    x_ptr,
    x_scales_ptr,
    scales_ptr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """SIZE columns of one x from FIRST on, [1, SIZE], zeros where there are none.

    If COLUMNS share a scale, x is multiplied by its own and by the weight's.
    """
    columns = FIRST + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + columns, columns < K, 0.0).to(tl.float32)
    if COLUMNS == 0:
        return x
    else:
        places = FIRST // COLUMNS + tl.arange(0, SIZE // COLUMNS)
        scales = tl.load(scales_ptr + places, places * COLUMNS < K, 0)
        if x_scales_ptr is not None:
            its = x_scales_ptr + places * TOKENS
            scales *= tl.load(its, places * COLUMNS < K, 0)
        x = tl.reshape(x, [SIZE // COLUMNS, COLUMNS]) * scales[:, None]
        return tl.reshape(x, [1, SIZE])


@triton.jit
def scaled_gemv_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    stride_x,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for ROWS rows and all tokens: y[t, row] = x[t] . weight[row] + bias.

    x is of the weight's dtype, with scales [C, TOKENS], or wider, if x_scales is None.
    COLUMNS share a scale, and then so do the rows; or all columns, if it is 0. bias may
    be None. The weight is on its way before the program waits for x.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first, rest = gemv_hold(weight_ptr, rows, N, K, BLOCK, REST)
    bias = tl.zeros([ROWS], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, rows < N, 0).to(tl.float32)
    if COLUMNS == 0:
        row_scales = tl.load(scales_ptr + rows // TILE_ROWS, rows < N, 0)
    else:
        row_scales = tl.full([ROWS], 1.0, tl.float32)
        tile = tl.program_id(0) * ROWS // TILE_ROWS
        scales_ptr += tile * tl.cdiv(K, COLUMNS)
    follow(PDL)
    for token in tl.static_range(TOKENS):
        its, scales = x_scales_ptr, row_scales
        if x_scales_ptr is not None:
            its += token
            if COLUMNS == 0:
                scales *= tl.load(its)
        row = x_ptr + token * stride_x
        x = load_input(row, its, scales_ptr, 0, BLOCK, K, TOKENS, COLUMNS)
        y = tl.sum(first.to(tl.float32) * x, 1)
        if REST > 0:
            x = load_input(row, its, scales_ptr, BLOCK, REST, K, TOKENS, COLUMNS)
            y += tl.sum(rest.to(tl.float32) * x, 1)
        y = y * scales + bias
        tl.store(y_ptr + token * N + rows, y.to(y_ptr.dtype.element_ty), rows < N)


@triton.jit(do_not_specialize=["tokens"])
def scaled_dot_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    stride_x,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for ROWS rows, TOKENS tokens and one of PARTS parts of K.

    y[t, part, row] = x[t, part of K] . weight[row, part of K], and in part 0 + bias.
    x is of the weight's dtype, with scales [C, T], or wider, if x_scales is None.
    COLUMNS, a multiple of DEPTH, share a scale, or all if it is 0. bias may be None.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(1)
    LENGTH: tl.constexpr = tl.cdiv(tl.cdiv(K, DEPTH), PARTS) * DEPTH
    start = part * LENGTH
    stop = tl.minimum(start + LENGTH, K)
    has_row, has_token = (rows < N)[:, None], (t < tokens)[None, :]
    SCALES: tl.constexpr = tl.cdiv(K, COLUMNS) if COLUMNS > 0 else 1
    scales_ptrs = scales_ptr + rows // TILE_ROWS * SCALES
    INTEGER: tl.constexpr = weight_ptr.dtype.element_ty == x_ptr.dtype.element_ty and (
        weight_ptr.dtype.element_ty == tl.int8
    )
    total = tl.zeros([ROWS, TOKENS], tl.int32 if INTEGER else tl.float32)
    follow(PDL)
    weight_rows = weight_ptr + rows[:, None].to(tl.int64) * K
    x_rows = x_ptr + t[:, None].to(tl.int64) * stride_x
    for k in range(start, stop, DEPTH):
        at = (k + tl.arange(0, DEPTH))[None, :]
        w = tl.load(weight_rows + at, has_row & (at < K), 0.0)
        x = tl.trans(tl.load(x_rows + at, (t < tokens)[:, None] & (at < K), 0.0))
        if INTEGER:
            total = tl.dot(w, x, total, out_dtype=tl.int32)
        elif COLUMNS > 0:
            place = k // COLUMNS
            scales = tl.load(scales_ptrs + place, rows < N, 0)[:, None]
            if x_scales_ptr is not None:
                x_scales = tl.load(x_scales_ptr + place * tokens + t, t < tokens, 0)
                total += tl.dot(w, x) * (scales * x_scales[None, :])
            else:
                total += tl.dot(w.to(x.dtype), x, input_precision="ieee") * scales
        elif x_scales_ptr is not None:
            total += tl.dot(w, x)
        else:
            total = tl.dot(w.to(x.dtype), x, total, input_precision="ieee")
    y = total.to(tl.float32)
    if COLUMNS == 0:
        y *= tl.load(scales_ptrs, rows < N, 0)[:, None]
        if x_scales_ptr is not None:
            y *= tl.load(x_scales_ptr + t, t < tokens, 0)[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, rows < N, 0).to(tl.float32)
        y += tl.where(part == 0, bias, 0.0)[:, None]
    where = (t[None, :].to(tl.int64) * PARTS + part) * N + rows[:, None]
    tl.store(y_ptr + where, y.to(y_ptr.dtype.element_ty), has_row & has_token)


@lru_cache(8192)
def choose_scaled(
    tokens: int, size_out: int, size_in: int, tile: tuple[int, int], parts: bool
) -> Product:
    """The way to multiply ``tokens`` tokens, in parts along K if that helps and may."""
    # A thread has registers for up to about 100 numbers of a weight, beside the input.
    # Numbers of 8 bits become float32 one by one, which takes more tokens too long.
    fits = size_in <= 16384 and (tile[1] >= size_in or tile[0] % 2 == 0)
    if tokens <= 2 and fits:
        return Gemv(rows=2, warps=4 if size_in <= 4096 else 8)
    if tokens > 128:
        return Dot(rows=128, depth=128, parts=1, warps=8, stages=3)
    count = count_parts(size_out, size_in) if parts else 1
    return Dot(rows=64, depth=128, parts=count, warps=4, stages=4)


def choose_scaled_invariant(
    size_out: int, size_in: int, tile: tuple[int, int], parts: bool
) -> Product:
    """The way for any number of tokens, each summed in the same order."""
    config = choose_scaled(64, size_out, size_in, tile, parts)
    assert isinstance(config, Dot)
    return config._replace(width=64)


@lru_cache(8192)
def scaled_launcher(
    config: Product, tokens: int, shape: tuple[int, int], tile: tuple[int, int]
) -> tuple[Launcher, tuple[int, int, int]]:
    """For so many tokens; and the grid."""
    size_out, size_in = shape
    options: dict[str, Any] = {"N": size_out, "K": size_in, "ROWS": config.rows}
    options |= {"TILE_ROWS": tile[0], "COLUMNS": 0 if tile[1] >= size_in else tile[1]}
    options |= {"pdl": config.pdl, "num_warps": config.warps}
    programs = -(-size_out // config.rows)
    if isinstance(config, Gemv):
        block, rest = split_columns(size_in)
        block, rest = max(block, 128), rest and max(rest, 128)
        options |= {"TOKENS": tokens, "BLOCK": block, "REST": rest}
        return launcher(scaled_gemv_kernel, **options), (programs, 1, 1)
    width = config.width or min(max(16, power_of_two(tokens)), 128)
    options |= {"TOKENS": width, "DEPTH": config.depth, "PARTS": config.parts}
    options |= {"num_stages": config.stages}
    grid = programs, config.parts, -(-tokens // width)
    return launcher(scaled_dot_kernel, **options), grid


@lru_cache(8192)
def round_launcher(size: int, columns: int, most: int) -> Launcher:
    """For inputs of ``size`` numbers, of which ``columns`` share a scale."""
    whole = columns >= size
    block = power_of_two(size)
    options: dict[str, Any] = {"BLOCK": block, "COLUMNS": block if whole else columns}
    options |= {
        "MOST": most,
        "FLOOR": LEAST_TILE,
        "num_warps": min(16, max(1, block // 512)),
    }
    return launcher(round_kernel, K=size, **options)


def round_rows(x: Tensor, weight: Scaled) -> tuple[Tensor, Tensor]:
    """x [T, K] in the weight's dtype, and its float32 scales [C, T]."""
    (tokens, size), dtype = x.shape, weight.values.dtype
    values = x.new_empty(tokens, size, dtype=dtype)
    scales = x.new_empty(-(-size // weight.tile[1]), tokens, dtype=torch.float32)
    start = round_launcher(size, weight.tile[1], int(LARGEST[dtype]))
    start((tokens, 1, 1), x, values, scales, x.stride(0), tokens)
    return values, scales


def multiply_scaled(
    y: Tensor, x: Tensor, weight: Scaled, bias: Tensor | None, config: Product
) -> None:
    """Fill y [T, N], or the float32 parts [T, S, N] of ``config``: `Scaled.product`.

    x [T, K] has contiguous rows; all else is contiguous.
    """
    shape = weight.shape[0], weight.shape[1]
    start, grid = scaled_launcher(config, x.shape[0], shape, weight.tile)
    scales = None
    if weight.inputs:
        x, scales = round_rows(x, weight)
    args = x, scales, weight.values, weight.scales, bias, y, x.stride(0)
    start(grid, *args, *(() if isinstance(config, Gemv) else (x.shape[0],)))


def project(
    x: Tensor, weight: Weight, bias: Tensor | None, batch_invariant: bool = False
) -> Tensor:
    """x [T, K] times ``weight`` [N, K], transposed, plus ``bias`` [N].

    [T, N] in x's dtype, or float32 parts [T, S, N] for the next kernel to add up. With
    ``batch_invariant`` no token's result depends on the others.
    """
    if isinstance(weight, Tensor):
        return project_dense(x, weight, bias, batch_invariant)
    assert isinstance(weight, Scaled)
    tokens, (size_out, size_in) = x.shape[0], weight.shape
    if batch_invariant:
        config = choose_scaled_invariant(size_out, size_in, weight.tile, True)
    else:
        config = choose_scaled(tokens, size_out, size_in, weight.tile, True)
    if config.parts == 1:
        y = x.new_empty(tokens, size_out)
    else:
        y = x.new_empty(tokens, config.parts, size_out, dtype=torch.float32)
    multiply_scaled(y, x, weight, bias, config)
    return y


def head(
    hidden: Tensor, weight: Weight, logits: Tensor, batch_invariant: bool = False
) -> Tensor:
    """The likeliest token of each row: hidden [S, N], weight [V, N] -> int32 [S].

    Fills ``logits``, float32 [S, V]. With ``batch_invariant`` no row's logits depend on
    the others.
    """
    if isinstance(weight, Tensor):
        return head_dense(hidden, weight, logits, batch_invariant)
    assert isinstance(weight, Scaled)
    rows, (size_out, size_in) = hidden.shape[0], weight.shape
    if batch_invariant:
        config = choose_scaled_invariant(size_out, size_in, weight.tile, False)
    else:
        config = choose_scaled(rows, size_out, size_in, weight.tile, False)
    multiply_scaled(logits, hidden, weight, None, config)
    return logits.argmax(-1).int()
