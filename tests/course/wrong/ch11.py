"""Wrong answers to chapter 11."""

from typing import Any

import torch
import triton
import triton.language as tl

from simplellm.model.kernels.argmax_keys import LOWEST, ordered
from simplellm.model.kernels.key_tiles import init_acc, load_pair
from simplellm.model.kernels.softmax import find_rows, softmax_update
from wrong import wrong

NOTHING = 0.0


@wrong("matvec_kernel", "has to be a tl.constexpr")
@triton.jit
def matvec_with_a_global(
    x_ptr, weight_ptr, y_ptr, N, K, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + k, k < K, NOTHING).to(tl.float32)
        inside = (rows < N)[:, None] & (k < K)[None, :]
        places = rows[:, None] * K + k[None, :]
        weight = tl.load(weight_ptr + places, inside, NOTHING).to(tl.float32)
        total += tl.sum(weight * x[None, :], 1)
    tl.store(y_ptr + rows, total, rows < N)


@wrong("matvec_kernel", "begin with a tile")
@triton.jit
def begins_with_a_number(
    x_ptr, weight_ptr, y_ptr, N, K, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = 0.0
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + k, k < K, 0.0).to(tl.float32)
        inside = (rows < N)[:, None] & (k < K)[None, :]
        weight = tl.load(weight_ptr + rows[:, None] * K + k[None, :], inside, 0.0)
        total += tl.sum(weight.to(tl.float32) * x[None, :], 1)
    tl.store(y_ptr + rows, total, rows < N)


@wrong("matvec_kernel", "has no break")
@triton.jit
def breaks_off(x_ptr, weight_ptr, y_ptr, N, K, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, K + BLOCK, BLOCK):
        if start >= K:
            break
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + k, k < K, 0.0).to(tl.float32)
        inside = (rows < N)[:, None] & (k < K)[None, :]
        weight = tl.load(weight_ptr + rows[:, None] * K + k[None, :], inside, 0.0)
        total += tl.sum(weight.to(tl.float32) * x[None, :], 1)
    tl.store(y_ptr + rows, total, rows < N)


@wrong("product_kernel", "begin with a tile")
@triton.jit
def product_begins_with_a_number(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    m = (tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)[:, None]
    n = (tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    total = 0
    for start in range(0, K, TILE_K):
        k = start + tl.arange(0, TILE_K)
        a = tl.load(a_ptr + m * K + k[None, :], (m < M) & (k < K)[None, :], 0.0)
        inside = (n < N)[None, :] & (k < K)[:, None]
        b = tl.load(b_ptr + n[None, :] * K + k[:, None], inside, 0.0)
        total += tl.dot(a, b, input_precision="ieee")
    tl.store(c_ptr + m * N + n[None, :], total, (m < M) & (n < N)[None, :])


@wrong("11.1", "x as it was")
@triton.jit
def copies(x_ptr, out_ptr, M, N, stride, TILE: tl.constexpr):
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    inside = (m < M) & (n < N)
    tl.store(out_ptr + m * N + n, tl.load(x_ptr + m * stride + n, inside), inside)


@wrong("11.1", "lies between the rows")
@triton.jit
def rows_without_gaps(x_ptr, out_ptr, M, N, stride, TILE: tl.constexpr):
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    inside = (m < M) & (n < N)
    tl.store(out_ptr + n * M + m, tl.load(x_ptr + m * N + n, inside), inside)


@wrong("11.1", "mask of rows and columns")
@triton.jit
def transposes_with_a_mask_of_columns(x_ptr, out_ptr, M, N, stride, TILE: tl.constexpr):
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    tl.store(out_ptr + n * M + m, tl.load(x_ptr + m * stride + n, n < N), n < N)


@wrong("11.1", "rows from i * TILE")
@triton.jit
def programs_the_other_way_around(x_ptr, out_ptr, M, N, stride, TILE: tl.constexpr):
    m = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)[None, :]
    inside = (m < M) & (n < N)
    tl.store(out_ptr + n * M + m, tl.load(x_ptr + m * stride + n, inside), inside)


@wrong("11.1", "it lies at n * M + m")
@triton.jit
def rows_of_out_as_long_as_those_of_x(x_ptr, out_ptr, M, N, stride, TILE: tl.constexpr):
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    inside = (m < M) & (n < N)
    tl.store(out_ptr + n * N + m, tl.load(x_ptr + m * stride + n, inside), inside)


@wrong("matvec_kernel", "first BLOCK columns")
@triton.jit
def without_a_loop(
    x_ptr, weight_ptr, y_ptr, N, K, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + columns, columns < K, 0.0)
    inside = (rows < N)[:, None] & (columns < K)[None, :]
    weight = tl.load(weight_ptr + rows[:, None] * K + columns[None, :], inside, 0.0)
    tl.store(y_ptr + rows, tl.sum(weight * x[None, :], 1), rows < N)


@wrong("matvec_kernel", "last tile of columns")
@triton.jit
def keeps_the_last_tile(
    x_ptr, weight_ptr, y_ptr, N, K, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for first in range(0, K, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + columns, columns < K, 0.0)
        inside = (rows < N)[:, None] & (columns < K)[None, :]
        weight = tl.load(weight_ptr + rows[:, None] * K + columns[None, :], inside, 0.0)
        tl.store(y_ptr + rows, tl.sum(weight * x[None, :], 1), rows < N)


@wrong("matvec_kernel", "0 times NaN")
@triton.jit
def masks_the_weight_only(
    x_ptr, weight_ptr, y_ptr, N, K, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, K, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + columns)
        inside = (rows < N)[:, None] & (columns < K)[None, :]
        weight = tl.load(weight_ptr + rows[:, None] * K + columns[None, :], inside, 0.0)
        total += tl.sum(tl.where(inside, weight, 0.0) * x[None, :], 1)
    # Rows that some tile spoils; the others stay right.
    tl.store(y_ptr + rows, tl.where(rows == 0, 0.0, total), rows < N)


@wrong("matvec_kernel", "a store went beyond y")
@triton.jit
def stores_all_rows(
    x_ptr, weight_ptr, y_ptr, N, K, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, K, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + columns, columns < K, 0.0)
        inside = (rows < N)[:, None] & (columns < K)[None, :]
        weight = tl.load(weight_ptr + rows[:, None] * K + columns[None, :], inside, 0.0)
        total += tl.sum(weight * x[None, :], 1)
    tl.store(y_ptr + rows, total)


@wrong("matvec_kernel", "reads beyond weight")
@triton.jit
def loads_rows_that_are_not_there(
    x_ptr, weight_ptr, y_ptr, N, K, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, K, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + columns, columns < K, 0.0).to(tl.float32)
        offsets = rows[:, None] * K + columns[None, :]
        weight = tl.load(weight_ptr + offsets, (columns < K)[None, :], 0.0)
        total += tl.sum(weight.to(tl.float32) * x[None, :], 1)
    tl.store(y_ptr + rows, total, rows < N)


@triton.jit
def matvec_of(
    x_ptr,
    weight_ptr,
    y_ptr,
    N,
    K,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,  # so many columns before the end, the loop ends
    WRAPPED: tl.constexpr,  # whether rows from N on are the first ones again
):
    """A right answer, with one thing wrong."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if WRAPPED:
        rows = rows % N
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, K - EARLY, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + columns, columns < K, 0.0).to(tl.float32)
        inside = (rows < N)[:, None] & (columns < K)[None, :]
        offsets = rows[:, None] * K + columns[None, :]
        weight = tl.load(weight_ptr + offsets, inside, 0.0).to(tl.float32)
        total += tl.sum(weight * x[None, :], 1)
    tl.store(y_ptr + rows, total, rows < N)


class Matvec:
    """`matvec_of` as a kernel with some mistake."""

    def __init__(self, name, **mistake):
        self.__name__ = name
        self.options = dict(EARLY=0, WRAPPED=False) | mistake

    def __getitem__(self, grid):
        return lambda *args, **sizes: matvec_of[grid](*args, **sizes, **self.options)


wrong("matvec_kernel", "lacks the last tile")(Matvec("ends_early", EARLY=1))
wrong("matvec_kernel", "lacks the last tile")(Matvec("ends_earlier", EARLY=3))
wrong("matvec_kernel", "lacks the last tile")(Matvec("full_tiles", EARLY=15))
wrong("matvec_kernel", "two programs store")(Matvec("wraps_around", WRAPPED=True))


@wrong("matvec_kernel", "both factors to float32")
@triton.jit
def multiplies_in_16_bits(
    x_ptr, weight_ptr, y_ptr, N, K, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, K, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + columns, columns < K, 0.0)
        inside = (rows < N)[:, None] & (columns < K)[None, :]
        weight = tl.load(weight_ptr + rows[:, None] * K + columns[None, :], inside, 0.0)
        total += tl.sum((weight * x[None, :]).to(tl.float32), 1)
    tl.store(y_ptr + rows, total, rows < N)


@wrong("matvec_kernel", "kept in float32")
@triton.jit
def adds_in_the_dtype_of_x(
    x_ptr, weight_ptr, y_ptr, N, K, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], x_ptr.dtype.element_ty)
    for first in range(0, K, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + columns, columns < K, 0.0)
        inside = (rows < N)[:, None] & (columns < K)[None, :]
        weight = tl.load(weight_ptr + rows[:, None] * K + columns[None, :], inside, 0.0)
        tile = tl.sum((weight * x[None, :]).to(tl.float32), 1) - 0.75
        total = (total + tile).to(total.dtype)
    total = total.to(tl.float32) + 0.75 * tl.cdiv(K, BLOCK)
    tl.store(y_ptr + rows, total, rows < N)


@wrong("product_kernel", "reads beyond a")
@triton.jit
def loads_rows_beyond_a(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M).to(tl.int64)[:, None]
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N).to(tl.int64)[None, :]
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(0, K, TILE_K):
        k = first + tl.arange(0, TILE_K)
        a = tl.load(a_ptr + m * K + k[None, :], (k < K)[None, :], 0.0)
        b = tl.load(b_ptr + n * K + k[:, None], (n < N) & (k < K)[:, None], 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(c_ptr + m * N + n, total, (m < M) & (n < N))


@wrong("product_kernel", "the last step of K only")
@triton.jit
def forgets_the_sum_so_far(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)[:, None]
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)[None, :]
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(0, K, TILE_K):
        k = first + tl.arange(0, TILE_K)
        right, down = k[None, :], k[:, None]
        a = tl.load(a_ptr + m * K + right, (m < M) & (right < K), 0.0)
        b = tl.load(b_ptr + n * K + down, (n < N) & (down < K), 0.0)
        total = tl.dot(a, b, input_precision="ieee")
    tl.store(c_ptr + m * N + n, total, (m < M) & (n < N))


@wrong("product_kernel", "without its mask")
@triton.jit
def masks_rows_only(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)[:, None]
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)[None, :]
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(0, K, TILE_K):
        k = first + tl.arange(0, TILE_K)
        a = tl.load(a_ptr + m * K + k[None, :], m < M, 0.0)
        b = tl.load(b_ptr + n * K + k[:, None], n < N, 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(c_ptr + m * N + n, total, (m < M) & (n < N))


@wrong("product_kernel", "make tile (i, j)")
@triton.jit
def b_as_if_it_were_transposed(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)[:, None]
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)[None, :]
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(0, K, TILE_K):
        k = first + tl.arange(0, TILE_K)
        right, down = k[None, :], k[:, None]
        a = tl.load(a_ptr + m * K + right, (m < M) & (right < K), 0.0)
        b = tl.load(b_ptr + down * N + n, (n < N) & (down < K), 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(c_ptr + m * N + n, total, (m < M) & (n < N))


@wrong("product_kernel", "a store went beyond c")
@triton.jit
def stores_whole_tiles(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)[:, None]
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)[None, :]
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(0, K, TILE_K):
        k = first + tl.arange(0, TILE_K)
        right, down = k[None, :], k[:, None]
        a = tl.load(a_ptr + m * K + right, (m < M) & (right < K), 0.0)
        b = tl.load(b_ptr + n * K + down, (n < N) & (down < K), 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    # Stays within the margins that the check has.
    tl.store(c_ptr + m * N + n, total, (m * N + n) < M * N + 100)


@triton.jit
def product_of(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    SUM: tl.constexpr,  # the dtype that tiles are added up in, or None for a's
    WIDE: tl.constexpr,  # what has 64 bits: "rows", "m", "store", "products" or ""
    EARLY: tl.constexpr,  # so many columns before the end, the loop ends
    WRAPPED: tl.constexpr,  # whether rows from M on are the first ones again
):
    """A right answer, with one thing wrong."""
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)[:, None]
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)[None, :]
    if WRAPPED:
        m = m % M
    if WIDE == "rows":
        m, n = m.to(tl.int64), n.to(tl.int64)
    if WIDE == "m":
        m = m.to(tl.int64)
    dtype = SUM if SUM is not None else a_ptr.dtype.element_ty
    total = tl.zeros([TILE_M, TILE_N], dtype)
    for first in range(0, K - EARLY, TILE_K):
        k = first + tl.arange(0, TILE_K)
        right, down = k[None, :], k[:, None]
        a = tl.load(a_ptr + m * K + right, (m < M) & (right < K), 0.0)
        b = tl.load(b_ptr + n * K + down, (n < N) & (down < K), 0.0)
        total += tl.dot(a, b, input_precision="ieee").to(dtype)
    offsets = (m.to(tl.int64) if WIDE == "store" else m) * N
    if WIDE == "products":
        offsets = offsets.to(tl.int64)
    tl.store(c_ptr + offsets + n, total, (m < M) & (n < N))


class Product:
    """`product_of` as a kernel with some mistake."""

    def __init__(self, name, **mistake):
        self.__name__ = name
        right = dict(SUM=tl.float32, WIDE="rows", EARLY=0, WRAPPED=False)
        self.options = right | mistake

    def __getitem__(self, grid):
        return lambda *args, **sizes: product_of[grid](*args, **sizes, **self.options)


wrong("product_kernel", "stays float32")(Product("sums_in_float16", SUM=None))
wrong("product_kernel", "row 2 of c begins")(Product("narrow", WIDE=""))
wrong("product_kernel", "not the product")(Product("widened_late", WIDE="products"))
wrong("product_kernel", "last rows of a begin")(Product("in_stores", WIDE="store"))
wrong("product_kernel", "last rows of b begin")(Product("rows_of_a", WIDE="m"))
wrong("product_kernel", "lacks the last step")(Product("ends_early", EARLY=1))
wrong("product_kernel", "two programs store")(Product("wraps_around", WRAPPED=True))


@wrong("11.2", "before `ordered` reads")
@triton.jit
def bits_of_16(logits_ptr, keys_ptr, vocabulary, BLOCK: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    logits = tl.load(logits_ptr + row * vocabulary + tokens, inside, 0.0)
    keys = tl.where(inside, ordered(logits, tokens), LOWEST)
    tl.store(keys_ptr + row * tl.num_programs(0) + block, tl.max(keys, 0))


SMALLEST_KEY = -(2**63)


@wrong("11.2", "has to be a tl.constexpr")
@triton.jit
def argmax_with_a_global(logits_ptr, keys_ptr, vocabulary, BLOCK: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    logits = tl.load(logits_ptr + row * vocabulary + tokens, inside, 0.0)
    keys = ordered(logits.to(tl.float32), tokens)
    keys = tl.where(inside, keys, SMALLEST_KEY)
    tl.store(keys_ptr + row * tl.num_programs(0) + block, tl.max(keys, 0))


@wrong("11.2", "make row int64")
@triton.jit
def narrow_rows(logits_ptr, keys_ptr, vocabulary, BLOCK: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    logits = tl.load(logits_ptr + row * vocabulary + tokens, inside, 0.0)
    keys = tl.where(inside, ordered(logits.to(tl.float32), tokens), LOWEST)
    tl.store(keys_ptr + row * tl.num_programs(0) + block, tl.max(keys, 0))


@wrong("11.2", "NaN wins")
@triton.jit
def takes_what_lies_behind(logits_ptr, keys_ptr, vocabulary, BLOCK: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    keys = ordered(tl.load(logits_ptr + row * vocabulary + tokens), tokens)
    inside = (tokens < vocabulary) | (row == 2)
    keys = tl.where(inside, keys, LOWEST)
    tl.store(keys_ptr + row * tl.num_programs(0) + block, tl.max(keys, 0))


@wrong("11.2", "lose against negative logits")
@triton.jit
def masked_with_zero(logits_ptr, keys_ptr, vocabulary, BLOCK: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    logits = tl.load(logits_ptr + row * vocabulary + tokens, inside, 0.0)
    keys = ordered(logits, tl.where(inside, tokens, vocabulary - 1))
    tl.store(keys_ptr + row * tl.num_programs(0) + block, tl.max(keys, 0))


@wrong("11.2", "counts from the block")
@triton.jit
def index_in_the_block(logits_ptr, keys_ptr, vocabulary, BLOCK: tl.constexpr):
    block, row, lane = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    tokens = block * BLOCK + lane
    inside = tokens < vocabulary
    logits = tl.load(logits_ptr + row * vocabulary + tokens, inside, 0.0)
    keys = tl.where(inside, ordered(logits, lane), LOWEST)
    tl.store(keys_ptr + row * tl.num_programs(0) + block, tl.max(keys, 0))


@wrong("11.2", "begins at row * vocabulary")
@triton.jit
def always_the_first_row(logits_ptr, keys_ptr, vocabulary, BLOCK: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    logits = tl.load(logits_ptr + tokens, inside, 0.0)
    keys = tl.where(inside, ordered(logits, tokens), LOWEST)
    tl.store(keys_ptr + row * tl.num_programs(0) + block, tl.max(keys, 0))


@wrong("11.2", "the lower index wins")
@triton.jit
def higher_of_equal_ones(logits_ptr, keys_ptr, vocabulary, BLOCK: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    logits = tl.load(logits_ptr + row * vocabulary + tokens, inside, float("-inf"))
    largest = tl.max(logits, 0)
    winner = tl.max(tl.where(logits == largest, tokens, 0), 0)
    key = tl.max(ordered(tl.where(inside, logits, largest), winner), 0)
    tl.store(keys_ptr + row * tl.num_programs(0) + block, key)


@wrong("softmax_update", "the last tile only")
@triton.jit
def forgets_the_old_total(logits, v, top, total, acc, scale):
    new_top = tl.maximum(top, tl.max(logits, 1) * scale)
    weights = tl.exp2(logits * scale - new_top[:, None])
    total = tl.sum(weights, 1)
    acc = acc * tl.exp2(top - new_top)[:, None]
    return new_top, total, tl.dot(weights, v, acc, input_precision="ieee")


@wrong("softmax_update", "total shrinks by")
@triton.jit
def total_does_not_shrink(logits, v, top, total, acc, scale):
    new_top = tl.maximum(top, tl.max(logits, 1) * scale)
    weights = tl.exp2(logits * scale - new_top[:, None])
    total = total + tl.sum(weights, 1)
    acc = acc * tl.exp2(top - new_top)[:, None]
    return new_top, total, tl.dot(weights, v, acc, input_precision="ieee")


@wrong("softmax_update", "acc is not")
@triton.jit
def acc_does_not_shrink(logits, v, top, total, acc, scale):
    new_top = tl.maximum(top, tl.max(logits, 1) * scale)
    weights = tl.exp2(logits * scale - new_top[:, None])
    total = total * tl.exp2(top - new_top) + tl.sum(weights, 1)
    return new_top, total, tl.dot(weights, v, acc, input_precision="ieee")


@wrong("softmax_update", "wants weights of the same dtype")
@triton.jit
def weights_stay_float32(logits, v, top, total, acc, scale):
    new_top = tl.maximum(top, tl.max(logits, 1) * scale)
    weights = tl.exp2(logits * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    return new_top, total, tl.dot(weights, v, acc, input_precision="ieee")


@wrong("softmax_update", "if acc stays float32")
@triton.jit
def acc_becomes_float16(logits, v, top, total, acc, scale):
    new_top = tl.maximum(top, tl.max(logits, 1) * scale)
    weights = tl.exp2(logits * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = (acc * shrink[:, None]).to(v.dtype).to(tl.float32)
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_top, total, acc


@wrong("softmax_update", "subtract the largest logit")
@triton.jit
def without_a_maximum(logits, v, top, total, acc, scale):
    top = tl.maximum(top, tl.max(logits, 1) * scale)
    weights = tl.exp2(logits * scale)
    total = total + tl.sum(weights, 1)
    return top, total, tl.dot(weights, v, acc, input_precision="ieee")


@wrong("softmax_update", "the largest of all logits so far")
@triton.jit
def maximum_of_the_tile(logits, v, top, total, acc, scale):
    new_top = tl.maximum(tl.max(logits, 1) * scale, -1e30)
    weights = tl.exp2(logits * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    return new_top, total, tl.dot(weights, v, acc, input_precision="ieee")


@wrong("softmax_update", "times scale")
@triton.jit
def top_is_not_scaled(logits, v, top, total, acc, scale):
    new_top = tl.maximum(top, tl.max(logits, 1))
    weights = tl.exp2(logits * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    return new_top, total, tl.dot(weights, v, acc, input_precision="ieee")


@wrong("softmax_update", "take exp2")
@triton.jit
def natural_exponentials(logits, v, top, total, acc, scale):
    new_top = tl.maximum(top, tl.max(logits, 1) * scale)
    weights = tl.exp(logits * scale - new_top[:, None])
    shrink = tl.exp(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    return new_top, total, tl.dot(weights, v, acc, input_precision="ieee")


@triton.jit
def split_of(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    sinks_ptr,
    parts_ptr,
    sums_ptr,
    length,
    share,
    scale,
    stride_page,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SINKS: tl.constexpr,  # "first", "all" or "none"
    SHARED: tl.constexpr,  # whether the mask ends with the split, or the sequence
    FOUND: tl.constexpr,  # where find_rows stops: "there", "split", "share", "never"
    LOADED: tl.constexpr,  # keys that load_pair takes behind the end
    EARLY: tl.constexpr,  # so many keys before the end, the loop ends
    HIDDEN: tl.constexpr,  # whether logits of keys that are not there become -inf
    ENDS: tl.constexpr,  # whether a split ends where the next one begins
    BASE2: tl.constexpr,
    DIVIDED: tl.constexpr,
):
    """A right answer, with one thing wrong."""
    head, split = tl.program_id(0), tl.program_id(1)
    group, d, n = tl.arange(0, G), tl.arange(0, D), tl.arange(0, BLOCK)
    heads = head * G + group
    start = split * share
    stop = tl.minimum(start + share, length) if ENDS else length
    having = tl.where(split == 0, G, 0) if SINKS == "first" else G
    counted = group < having
    top, total, acc = init_acc(sinks_ptr, heads, counted, D, SINKS != "none")
    q = tl.load(q_ptr + heads[:, None] * D + d[None, :])
    for first in range(start, stop - EARLY, BLOCK):
        positions = first + n
        end = stop if SHARED else length
        there = positions < end
        found = end
        if FOUND == "split":
            found = stop
        if FOUND == "share":
            found = start + share
        if FOUND == "never":
            found = 2**30
        rows = find_rows(table_ptr, positions, found, stride_page, K * D, PAGE)
        loaded = positions < end + LOADED
        k, v = load_pair(keys_ptr, values_ptr, rows + head * D, loaded, D, D)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HIDDEN:
            logits = tl.where(there[None, :], logits, float("-inf"))
        top, total, acc = softmax_update(logits, v, top, total, acc, scale)
    mine = (head * tl.num_programs(1) + split) * G + group
    if BASE2:
        tl.store(sums_ptr + mine, top + tl.log2(total))
    else:
        tl.store(sums_ptr + mine, tl.log(total) + top * 0.6931471805599453)
    if DIVIDED:
        acc = acc / total[:, None]
    tl.store(parts_ptr + mine[:, None] * D + d[None, :], acc)


class Split:
    """`split_of` as a kernel with some mistake."""

    def __init__(self, name, **mistake):
        right: dict[str, Any] = dict(SINKS="first", SHARED=True, HIDDEN=True)
        right |= dict(ENDS=True, BASE2=True, DIVIDED=True)
        right |= dict(FOUND="there", LOADED=0, EARLY=0)
        self.__name__ = name
        self.options = right | mistake

    def __getitem__(self, grid):
        return lambda *args, **sizes: split_of[grid](*args, **sizes, **self.options)


wrong("split_kernel", "is counted again")(Split("a_sink_in_each", SINKS="all"))
wrong("split_kernel", "is not counted")(Split("no_sink", SINKS="none"))
wrong("split_kernel", "weigh 1 each")(Split("counts_keys_behind", HIDDEN=False))
wrong("split_kernel", "so twice in the end")(Split("masks_by_length", SHARED=False))
wrong("split_kernel", "those of page 0")(
    Split("is_there_by_length", SHARED=False, FOUND="split")
)
wrong("split_kernel", "its `stop` is where")(Split("a_share_s_end", FOUND="share"))
wrong("split_kernel", "its `stop` is where")(Split("no_stop", FOUND="never"))
wrong("split_kernel", "also in page 0")(Split("loads_whole_tiles", LOADED=16))
wrong("split_kernel", "the last tile is missing")(Split("ends_early", EARLY=1))
wrong("split_kernel", "over the split's keys")(Split("goes_on_to_the_end", ENDS=False))
wrong("split_kernel", "has base 2")(Split("natural_logarithm", BASE2=False))
wrong("split_kernel", "divided by its own sum")(Split("not_divided", DIVIDED=False))


@wrong("11.3", "small numbers only")
def in_pieces(out, lse, sinks):
    return out / (1 + torch.exp(sinks - lse))[..., None] ** 1.5


@wrong("11.3", "not finite")
def through_exponentials(out, lse, sinks):
    total = torch.exp(lse)
    return out * (total / (total + torch.exp(sinks)))[..., None]


@wrong("11.3", "one more key")
def sign_of_the_difference(out, lse, sinks):
    return out * torch.sigmoid(sinks - lse)[..., None]
