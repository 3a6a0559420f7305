"""What a product with a weight of 8 bits does besides: scales, and inputs rounded.

N out, K in, C scales of a token. Of the weight TILE_ROWS share a scale, and of their
columns COLUMNS do; all, if it is 0.
"""

import triton
import triton.language as tl

from simplellm.model.kernels.rounding import round_numbers

# On the tensor cores


@triton.jit
def load_scales(
    scales_ptrs,
    x_scales_ptr,
    k,
    t,
    room,
    has_row,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """float32 [rows, 1] and [1, t] of the tiles of column k, or the last; 1 for None.

    ``scales_ptrs`` [rows, 1] are those of column 0; x's are [C, room].
    """
    tile = tl.minimum(k, K - 1) // COLUMNS
    scales = tl.load(scales_ptrs + tile, has_row, 0)
    x_scales = tl.full([1, 1], 1.0, tl.float32)
    if x_scales_ptr is not None:
        where = tile.to(tl.int64) * room + t[None, :]
        x_scales = tl.load(x_scales_ptr + where, (t < room)[None, :], 0)
    return scales, x_scales


# Row by row, in registers


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
        tiles = FIRST // COLUMNS + tl.arange(0, SIZE // COLUMNS)
        return tl.load(scales_ptr + tiles, tiles * COLUMNS < K, 0)


@triton.jit
def gemv_scales(
    scales_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """What `gemv_hold` is scaled with: for each row, and for tiles of both its blocks.

    Where columns have scales of their own, a program's rows share them.
    """
    if COLUMNS == 0:
        row_scales = tl.load(scales_ptr + rows // TILE_ROWS, rows < N, 0)
    else:
        row_scales = tl.full(rows.shape, 1.0, tl.float32)
        tile = tl.program_id(0) * rows.shape[0] // TILE_ROWS
        scales_ptr += tile * tl.cdiv(K, COLUMNS)
    first = load_tiles(scales_ptr, 0, BLOCK, K, COLUMNS)
    rest = first
    if REST > 0:
        rest = load_tiles(scales_ptr, BLOCK, REST, K, COLUMNS)
    return row_scales, first, rest


@triton.jit
def scales_of_both(
    scales,
    x_scales_ptr,
    room,
    FIRST: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The weight's scales from column FIRST on times those of one token of x.

    The latter are 1 if x_scales is None.
    """
    if x_scales_ptr is None:
        return scales
    else:
        tiles = tl.arange(0, scales.shape[0])
        if COLUMNS > 0:
            tiles += FIRST // COLUMNS
        x_scales_ptrs = x_scales_ptr + tiles.to(tl.int64) * room
        return scales * tl.load(x_scales_ptrs, tiles * COLUMNS < K, 0)


@triton.jit
def load_input(x_ptr, scales, FIRST: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr):
    """SIZE columns of one x from FIRST on, [scales, columns]; 0 behind the last."""
    columns = FIRST + tl.arange(0, SIZE)
    x = tl.load(x_ptr + columns, columns < K, 0.0).to(tl.float32)
    return tl.reshape(x, [scales.shape[0], SIZE // scales.shape[0]])


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
def scaled_gemv_times(
    weights,
    held_scales,
    x_ptr,
    x_scales_ptr,
    token,
    room,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """As `gemv_times`, with the scales that `gemv_scales` holds.

    x is that of ``token``, rounded, with x_scales [C, room]; or they are None, and it
    is rounded here, unless MOST is 0.
    """
    first, rest = weights
    row_scales, scales, more_scales = held_scales
    if x_scales_ptr is not None:
        x_scales_ptr += token
    both = scales_of_both(scales, x_scales_ptr, room, 0, K, COLUMNS)
    x = load_input(x_ptr, scales, 0, BLOCK, K)
    least = tl.full([1], FLOOR, tl.float32)
    if REST > 0:
        more_both = scales_of_both(more_scales, x_scales_ptr, room, BLOCK, K, COLUMNS)
        more = load_input(x_ptr, more_scales, BLOCK, REST, K)
        if COLUMNS == 0:  # then they share a scale, too
            least = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(more), 1))
            least = tl.maximum(least, FLOOR)
    x = tl.reshape(round_input(x, both, least, MOST), [1, BLOCK])
    y = tl.sum(first.to(tl.float32) * x, 1)
    if REST > 0:
        x = tl.reshape(round_input(more, more_both, least, MOST), [1, REST])
        y += tl.sum(rest.to(tl.float32) * x, 1)
    return y * row_scales
