"""Products with weights of 8 bits: half the bytes of bfloat16, twice the arithmetic.

T tokens, N out, K in, S parts along K, C scales of a token.

As in `linear`, one kernel is for very few tokens and holds rows of the weight in
registers, the other is for any number and multiplies on the tensor cores. Both compute
what the format says, `Scaled.product`. Inputs that are to be rounded are so where they
were made, a `Rounded`; else the first kernel does so by itself, and `round_kernel` in
front of the other one, once for all rows of the weight.
Sums are float32, and int32 of integers. On the tensor cores the sums of e4m3 keep fewer
bits than float32 has, so what each step of up to 128 columns adds is taken out of them.
More tokens than `BEFORE_CUBLAS` go to cuBLAS, where it has the format.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.checkpoint.mxfp4 import Weight
from simplellm.checkpoint.scaled import LARGEST, LEAST_TILE, Scaled
from simplellm.model.kernels.head import head as head_dense
from simplellm.model.kernels.launch import Launcher, launcher, pdl_wait, power_of_two
from simplellm.model.kernels.linear import (
    MOST_PARTS,
    Dot,
    Gemv,
    Product,
    count_parts,
    split_columns,
)
from simplellm.model.kernels.linear import project as project_dense
from simplellm.model.kernels.rounding import (
    BEFORE_CUBLAS,
    Rounded,
    input_arguments,
    library_suits,
    multiply_by_library,
    round_numbers,
    round_rows,
)

PLACES = 3 * 132  # programs of 64 rows that all processors of an H200 hold at once
# Rows of a weight from which on all processors get a program with 128 of them.
MANY_ROWS = 128 * 132


@triton.jit
def hold_weight(
    weight_ptr,
    rows,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """SIZE columns of ``rows`` from FIRST on, in registers.

    A thread has WIDE in a row, as it has of x: otherwise all of the weight would go
    through shared memory, to be where x is.
    """
    columns = FIRST + tl.arange(0, SIZE)
    inside = (rows < N)[:, None] & (columns < K)[None, :]
    where = rows[:, None].to(tl.int64) * K + columns[None, :]
    return tl.load(weight_ptr + tl.max_contiguous(where, [1, WIDE]), inside, 0.0)


@triton.jit
def round_input(x, scales, least, MOST: tl.constexpr):
    """x [tiles, columns] times scales, rounded before it unless MOST is 0.

    As `round_kernel` does it; a tile's largest number counts as ``least`` at least.
    """
    if MOST > 0:
        largest = tl.maximum(tl.max(tl.abs(x), 1), least)
        x = round_numbers(x, largest[:, None], MOST)
        scales *= tl.div_rn(largest, tl.full(largest.shape, MOST, tl.float32))
    return x * scales[:, None]


@triton.jit
def load_tiles(
    scales_ptr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The weight's scales for SIZE columns from FIRST on; 1 for all if COLUMNS is 0."""
    if COLUMNS == 0:
        return tl.full([1], 1.0, tl.float32)
    else:
        places = FIRST // COLUMNS + tl.arange(0, SIZE // COLUMNS)
        return tl.load(scales_ptr + places, places * COLUMNS < K, 0)


@triton.jit
def scales_of_both(
    scales,
    x_scales_ptr,
    room,
    FIRST: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The weight's scales from column FIRST on times those of one token of x."""
    places = tl.arange(0, scales.shape[0])
    if COLUMNS > 0:
        places += FIRST // COLUMNS
    inside = places * COLUMNS < K
    return scales * tl.load(x_scales_ptr + places.to(tl.int64) * room, inside, 0)


@triton.jit
def load_input(x_ptr, scales, FIRST: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr):
    """SIZE columns of one x from FIRST on, [scales, columns]; 0 behind the last."""
    columns = FIRST + tl.arange(0, SIZE)
    x = tl.load(x_ptr + columns, columns < K, 0.0).to(tl.float32)
    return tl.reshape(x, [scales.shape[0], SIZE // scales.shape[0]])


@triton.jit(do_not_specialize=["room"])
def scaled_gemv_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    stride_x,
    room,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    FLOOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for ROWS rows and all tokens: y[t, row] = x[t] . weight[row] + bias.

    x is rounded, with scales [C, room]; or x_scales is None, and each program rounds x
    for itself, unless MOST is 0. COLUMNS share a scale, and then so do the rows; or all
    columns, if it is 0. bias may be None. The weight and its scales are on their way
    before the program waits for x.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    WIDE: tl.constexpr = 8 if x_scales_ptr is None else 16  # 16 bytes of x
    first = hold_weight(weight_ptr, rows, 0, BLOCK, N, K, WIDE)
    rest = first
    if REST > 0:
        rest = hold_weight(weight_ptr, rows, BLOCK, REST, N, K, WIDE)
    bias = tl.zeros([ROWS], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, rows < N, 0).to(tl.float32)
    if COLUMNS == 0:
        row_scales = tl.load(scales_ptr + rows // TILE_ROWS, rows < N, 0)
    else:
        row_scales = tl.full([ROWS], 1.0, tl.float32)
        tile = tl.program_id(0) * ROWS // TILE_ROWS
        scales_ptr += tile * tl.cdiv(K, COLUMNS)
    scales = load_tiles(scales_ptr, 0, BLOCK, K, COLUMNS)
    more_scales = scales
    if REST > 0:
        more_scales = load_tiles(scales_ptr, BLOCK, REST, K, COLUMNS)
    pdl_wait(PDL)
    for token in tl.static_range(TOKENS):
        row = x_ptr + token * stride_x
        both, more_both = scales, more_scales
        if x_scales_ptr is not None:
            of_x = x_scales_ptr + token
            both = scales_of_both(scales, of_x, room, 0, K, COLUMNS)
            if REST > 0:
                more_both = scales_of_both(more_scales, of_x, room, BLOCK, K, COLUMNS)
        x = load_input(row, scales, 0, BLOCK, K)
        least, more = tl.full([1], FLOOR, tl.float32), x
        if REST > 0:
            more = load_input(row, more_scales, BLOCK, REST, K)
            if COLUMNS == 0:  # then they share a scale, too
                least = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(more), 1))
                least = tl.maximum(least, FLOOR)
        x = tl.reshape(round_input(x, both, least, MOST), [1, BLOCK])
        y = tl.sum(first.to(tl.float32) * x, 1)
        if REST > 0:
            x = tl.reshape(round_input(more, more_both, least, MOST), [1, REST])
            y += tl.sum(rest.to(tl.float32) * x, 1)
        y = y * row_scales + bias
        tl.store(y_ptr + token * N + rows, y.to(y_ptr.dtype.element_ty), rows < N)


@triton.jit
def load_scales(
    scales_ptrs,
    x_scales_ptr,
    k,
    t,
    tokens,
    has_row,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """float32 [rows, 1] and [1, t] of the tiles of column k, or the last; 1 for None.

    ``scales_ptrs`` [rows, 1] are those of column 0.
    """
    place = tl.minimum(k, K - 1) // COLUMNS
    scales = tl.load(scales_ptrs + place, has_row, 0)
    x_scales = tl.full([1, 1], 1.0, tl.float32)
    if x_scales_ptr is not None:
        where = place.to(tl.int64) * tokens + t[None, :]
        x_scales = tl.load(x_scales_ptr + where, (t < tokens)[None, :], 0)
    return scales, x_scales


@triton.jit(do_not_specialize=["room", "tokens"])
def scaled_dot_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    stride_x,
    room,
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
    x is of the weight's dtype, with scales [C, room], or wider, if x_scales is None.
    COLUMNS share a scale: a multiple of DEPTH, or K. 0 is K too, but the sums are
    scaled at the end, of inputs that are rounded. bias may be None.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(1)
    LENGTH: tl.constexpr = tl.cdiv(tl.cdiv(K, DEPTH), PARTS) * DEPTH
    start = part * LENGTH
    stop = tl.minimum(start + LENGTH, K)
    has_row, has_token = (rows < N)[:, None], (t < tokens)[None, :]
    SCALES: tl.constexpr = tl.cdiv(K, COLUMNS) if COLUMNS > 0 else 1
    scales_ptrs = scales_ptr + (rows // TILE_ROWS * SCALES)[:, None]
    INTEGER: tl.constexpr = weight_ptr.dtype.element_ty == x_ptr.dtype.element_ty and (
        weight_ptr.dtype.element_ty == tl.int8
    )
    total = tl.zeros([ROWS, TOKENS], tl.int32 if INTEGER else tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    weight_rows = weight_ptr + rows[:, None].to(tl.int64) * K
    x_rows = x_ptr + t[:, None].to(tl.int64) * stride_x
    if COLUMNS > 0:
        scales, x_scales = load_scales(
            scales_ptrs, x_scales_ptr, start, t, room, has_row, K, COLUMNS
        )
    for k in range(start, stop, DEPTH):
        at = (k + tl.arange(0, DEPTH))[None, :]
        w = tl.load(weight_rows + at, has_row & (at < K), 0.0)
        x = tl.trans(tl.load(x_rows + at, (t < tokens)[:, None] & (at < K), 0.0))
        if INTEGER:
            total = tl.dot(w, x, total, out_dtype=tl.int32)
        elif COLUMNS > 0:
            part_sum = tl.dot(w.to(x.dtype), x, input_precision="ieee")
            total += part_sum * (scales * x_scales)
            # Those of the next step are on their way while this one is multiplied.
            scales, x_scales = load_scales(
                *(scales_ptrs, x_scales_ptr, k + DEPTH, t, room, has_row),
                *(K, COLUMNS),
            )
        else:
            total += tl.dot(w, x)
    if PDL:
        # Not before: programs behind that start early, and wait, would take the places
        # of this kernel's own, which then crowd on a few processors.
        tl.extra.cuda.gdc_launch_dependents()
    y = total.to(tl.float32)
    if COLUMNS == 0:
        y *= tl.load(scales_ptrs, has_row, 0)
        y *= tl.load(x_scales_ptr + t[None, :], has_token, 0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, rows < N, 0).to(tl.float32)
        y += tl.where(part == 0, bias, 0.0)[:, None]
    where = (t[None, :].to(tl.int64) * PARTS + part) * N + rows[:, None]
    tl.store(y_ptr + where, y.to(y_ptr.dtype.element_ty), has_row & has_token)


@lru_cache(8192)
def choose_scaled(
    tokens: int,
    size_out: int,
    size_in: int,
    tile: tuple[int, int],
    parts: bool,
    rounded: bool = False,
) -> Product:
    """The way to multiply ``tokens`` tokens, in parts along K if that helps and may.

    ``rounded``: x is. Else all programs of a `Gemv` do it, which takes too long for
    longer rows. More tokens than one are for tensor cores in any case: what is
    converted one by one takes too long then.
    """
    gemv = Gemv(rows=2, warps=4) if rounded else Gemv(rows=16, warps=8)
    longest = 16384 if rounded else 4096
    fits = size_in <= longest and (tile[1] >= size_in or tile[0] % gemv.rows == 0)
    if tokens == 1 and fits:
        return gemv
    if tokens > BEFORE_CUBLAS:
        return Dot(rows=128, depth=128, parts=1, warps=8, stages=3)
    if tokens > 16:
        most = PLACES // -(-size_out // 64) if parts else 1
        count = max(1, min(most, MOST_PARTS, size_in // 128))
        rows = 64 if size_out <= 64 * PLACES else 128  # no program waits for a place
        return Dot(rows=rows, depth=128, parts=count, warps=4, stages=3)
    if size_out >= MANY_ROWS:
        return Dot(rows=128, depth=128, parts=1, warps=8, stages=4)
    count = count_parts(size_out, size_in) if parts else 1
    return Dot(rows=64, depth=128, parts=count, warps=4, stages=6)


def choose_scaled_invariant(
    size_out: int, size_in: int, tile: tuple[int, int], parts: bool
) -> Product:
    """The way for any number of tokens, each summed in the same order."""
    config = choose_scaled(64, size_out, size_in, tile, parts)
    assert isinstance(config, Dot)
    return config._replace(width=64)


@lru_cache(8192)
def scaled_launcher(
    config: Product,
    tokens: int,
    shape: tuple[int, int],
    tile: tuple[int, int],
    most: int = 0,
) -> tuple[Launcher, tuple[int, int, int]]:
    """For so many tokens; and the grid. ``most`` is what inputs are rounded to, or 0.

    Where it matters: on the tensor cores they have been rounded before. 0 also if they
    have been for a `Gemv`.
    """
    size_out, size_in = shape
    options: dict[str, Any] = {"N": size_out, "K": size_in, "ROWS": config.rows}
    # Wider inputs are scaled at each step: what uses its sums waits for the tensor
    # cores, and the next weights go to registers that these still read, see
    # `experts.wait_for_wgmma`.
    whole = tile[1] >= size_in and (most > 0 or isinstance(config, Gemv))
    options |= {"TILE_ROWS": tile[0], "COLUMNS": 0 if whole else tile[1]}
    options |= {"pdl": config.pdl, "num_warps": config.warps}
    programs = -(-size_out // config.rows)
    if isinstance(config, Gemv):
        block, rest = split_columns(size_in)
        block, rest = max(block, 128), rest and max(rest, 128)
        options |= {"TOKENS": tokens, "BLOCK": block, "REST": rest}
        options |= {"MOST": most, "FLOOR": LEAST_TILE}
        return launcher(scaled_gemv_kernel, **options), (programs, 1, 1)
    width = config.width or min(max(16, power_of_two(tokens)), 128)
    options |= {"TOKENS": width, "DEPTH": config.depth, "PARTS": config.parts}
    options |= {"num_stages": config.stages}
    grid = programs, config.parts, -(-tokens // width)
    return launcher(scaled_dot_kernel, **options), grid


def multiply_scaled(
    y: Tensor,
    x: Tensor | Rounded,
    weight: Scaled,
    bias: Tensor | None,
    config: Product,
) -> None:
    """Fill y [T, N], or the float32 parts [T, S, N] of ``config``: `Scaled.product`.

    x [T, K] has contiguous rows; all else is contiguous.
    """
    shape = weight.shape[0], weight.shape[1]
    most = int(LARGEST[weight.values.dtype]) if weight.inputs else 0
    if isinstance(config, Gemv):
        most = 0 if isinstance(x, Rounded) else most
    elif weight.inputs and isinstance(x, Tensor):
        x = Rounded(*round_rows(x, weight), len(x), weight.tile[1], x.dtype)
    tokens = len(x)
    start, grid = scaled_launcher(config, tokens, shape, weight.tile, most)
    values, scales, room = input_arguments(x)
    args = values, scales, weight.values, weight.scales, bias, y, values.stride(0), room
    start(grid, *args, *(() if isinstance(config, Gemv) else (tokens,)))


def project(
    x: Tensor | Rounded,
    weight: Weight,
    bias: Tensor | None,
    batch_invariant: bool = False,
) -> Tensor:
    """x [T, K] times ``weight`` [N, K], transposed, plus ``bias`` [N].

    [T, N] in x's dtype, or float32 parts [T, S, N] for the next kernel to add up. With
    ``batch_invariant`` no token's result depends on the others.
    """
    if isinstance(weight, Tensor):
        assert isinstance(x, Tensor)
        return project_dense(x, weight, bias, batch_invariant)
    assert isinstance(weight, Scaled)
    tokens, (size_out, size_in), tile = len(x), weight.shape, weight.tile
    if bias is None and not batch_invariant and library_suits(x, weight):
        return multiply_by_library(x, weight)
    if batch_invariant:
        config = choose_scaled_invariant(size_out, size_in, tile, True)
    else:
        rounded = isinstance(x, Rounded)
        config = choose_scaled(tokens, size_out, size_in, tile, True, rounded)
    shape: tuple[int, ...] = (tokens, size_out)
    dtype = x.dtype
    if config.parts > 1:
        shape, dtype = (tokens, config.parts, size_out), torch.float32
    y = torch.empty(shape, dtype=dtype, device=x.device)
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
