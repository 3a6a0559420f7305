"""Experts of so few tokens that hardly any two share one, when reading weights is all.

Sorting pairs would take longer than it saves. Each is multiplied by programs of its
own, several for each processor: a program asks for all that it holds of a few rows at
once, and while that is on its way it rounds its input where the format says so, for
which a launch would take longer.

Tiles of 128 columns are multiplied as matrices of their own, by one instruction of
Triton's for many. So each has sums of its own, for its scale, and a program's warps
share the columns.

T tokens, k experts a token, n = T * k (token, choice) pairs, N rows and K columns of a
weight, I intermediate size.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from simplellm.checkpoint.cpu_weights import PackedExperts
from simplellm.checkpoint.mxfp4 import Weight
from simplellm.checkpoint.scaled import LARGEST, LEAST_TILE, Scaled
from simplellm.model.kernels.gated import gate_activation
from simplellm.model.kernels.launch import Launcher, launcher, pdl_wait, power_of_two
from simplellm.model.kernels.rounding import round_numbers
from simplellm.model.layers import Experts


@triton.jit
def tile_columns(FIRST: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr):
    """TILES of COLUMNS from FIRST on: [TILES, COLUMNS]."""
    tiles = tl.arange(0, TILES)[:, None]
    return FIRST + tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def few_weights(
    weight_ptr,
    rows,
    has_row,
    FIRST: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """TILES of ``rows`` from column FIRST on: [TILES, rows, COLUMNS].

    An expert has less than 2^31 numbers: offsets need no wider integers.
    """
    columns = tile_columns(FIRST, TILES, COLUMNS)
    inside = has_row[None, :, None] & (columns < K)[:, None, :]
    where = rows[None, :, None] * K + columns[:, None, :]
    return tl.load(weight_ptr + where, inside, 0.0)


@triton.jit
def few_scales(
    scales_ptr,
    strips,
    has_row,
    FIRST: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The scales of `few_weights`, [TILES, rows]; ``strips`` are the rows' tiles.

    Triton leaves with its threads what is loaded last, and brings them what it is
    multiplied with. Loaded after x, that is sums, late, and not these, early, for which
    the weights would wait.
    """
    tiles = FIRST // COLUMNS + tl.arange(0, TILES)
    inside = (tiles * COLUMNS < K)[:, None] & has_row[None, :]
    where = (strips * tl.cdiv(K, COLUMNS))[None, :] + tiles[:, None]
    return tl.load(scales_ptr + where, inside, 0)


@triton.jit
def few_numbers(
    x_ptr,
    FIRST: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """TILES of one x from column FIRST on: [TILES, COLUMNS]."""
    columns = tile_columns(FIRST, TILES, COLUMNS)
    return tl.load(x_ptr + columns, columns < K, 0)


@triton.jit
def largest_of(x_ptr, K: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr):
    """The largest magnitude of all of one x."""
    largest = 0.0
    for k in tl.static_range(0, K, TILES * COLUMNS):
        x = few_numbers(x_ptr, k, K, TILES, COLUMNS).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.max(tl.abs(x), 1), 0))
    return largest


@triton.jit
def few_input(
    x, largest, SCALED: tl.constexpr, MOST: tl.constexpr, FLOOR: tl.constexpr
):
    """x [TILES, COLUMNS] as weights are multiplied with it, and its scales [TILES].

    If MOST is not 0, it is rounded to that. The tiles share a scale if they are not
    SCALED; their largest number counts as ``largest`` at least. What is e4m3 becomes
    float16, in which all of its products are exact.
    """
    scales = tl.full([x.shape[0]], 1.0, tl.float32)
    if MOST > 0:
        x = x.to(tl.float32)
        own = tl.max(tl.abs(x), 1)
        if not SCALED:
            own = tl.maximum(own, tl.max(own, 0))
        largest = tl.maximum(own, tl.maximum(largest, FLOOR))
        scales = tl.div_rn(largest, tl.full(largest.shape, MOST, tl.float32))
        if MOST == 127:  # an integer cannot be NaN, so that its scale has to be
            scales += tl.sum(x * 0.0, 1)
        x = round_numbers(x, largest[:, None], MOST)
        x = x.to(tl.int8 if MOST == 127 else tl.float16)
    return x, scales


@triton.jit(do_not_specialize_on_alignment=["num_tokens_ptr"])
def few_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    scores_ptr,
    ids_ptr,
    num_tokens_ptr,
    out_ptr,
    TOP_K: tl.constexpr,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    MOST: tl.constexpr,
    FLOOR: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program multiplies ROWS rows of one pair's expert, TILES of COLUMNS at once.

    If GATED, gates and as many ups, for the first half of an expert's network:

    gate, up = both halves of weight[expert] @ x[token]
    out[pair] = gate * sigmoid(gate) * up

    Else the other one:

    out[pair] = weight[expert] @ x[pair] * scores[pair]

    x is rounded as `few_input` does it. TILE_ROWS share a scale, and of their columns
    COLUMNS do if they are SCALED, else all; scales may be None. The other half may
    start once the first one has the ids: it reads them, scores, and its first tiles
    without waiting.
    """
    if PDL and GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Those that share an expert, side by side: one finds its rows in the cache.
    pair = tl.program_id(0)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    WIDTH: tl.constexpr = N // 2 if GATED else N
    # Padding has no rows, nor has what other ranks have.
    here = (pair // TOP_K < tl.load(num_tokens_ptr)) & (expert < E)
    end = tl.where(here, WIDTH, 0)
    UNITS: tl.constexpr = ROWS // 2 if GATED else ROWS
    rows = tl.program_id(1) * UNITS + tl.arange(0, ROWS) % UNITS
    has_row = rows < end
    rows += tl.arange(0, ROWS) // UNITS * WIDTH
    strips = rows // TILE_ROWS
    x_ptr += (pair // TOP_K if GATED else pair).to(tl.int64) * K
    weight_ptr += expert * (N * K)
    row_scales = tl.full([ROWS], 1.0, tl.float32)
    if scales_ptr is not None:
        WIDE: tl.constexpr = tl.cdiv(K, COLUMNS) if SCALED else 1
        scales_ptr += expert * (tl.cdiv(N, TILE_ROWS) * WIDE)
        if not SCALED:
            row_scales = tl.load(scales_ptr + strips, has_row, 0)
    if not GATED:
        score = tl.load(scores_ptr + pair)
        weight = few_weights(weight_ptr, rows, has_row, 0, K, TILES, COLUMNS)
        pdl_wait(PDL)
    STEP: tl.constexpr = TILES * COLUMNS
    SUMS: tl.constexpr = tl.int32 if MOST == 127 else tl.float32
    largest = 0.0
    if MOST > 0 and not SCALED and K > STEP:
        largest = largest_of(x_ptr, K, TILES, COLUMNS)
    total = tl.zeros([TILES, ROWS], tl.float32)
    for k in tl.static_range(0, K, STEP):
        x = few_numbers(x_ptr, k, K, TILES, COLUMNS)
        if SCALED:
            scales = few_scales(scales_ptr, strips, has_row, k, K, TILES, COLUMNS)
        if GATED or k > 0:
            weight = few_weights(weight_ptr, rows, has_row, k, K, TILES, COLUMNS)
        x, factors = few_input(x, largest, SCALED, MOST, FLOOR)
        # With less than 8 columns, Triton 3.9 mixes up the sums of a warp's matrices.
        x = tl.broadcast_to(x[:, :, None], [TILES, COLUMNS, 8])
        part = tl.dot(weight.to(x.dtype), x, input_precision="ieee", out_dtype=SUMS)
        part = tl.sum(part.to(tl.float32), 2) * 0.125
        total += part * (scales * factors[:, None] if SCALED else factors[:, None])
    out = tl.sum(total, 0) * row_scales
    units = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(out, [2, UNITS]), (1, 0)))
        out = gate_activation(gate, "swiglu") * up
    else:
        out *= score
    out_ptrs = out_ptr + pair.to(tl.int64) * WIDTH + units
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), units < end)


# So many of 128 experts were quicker by a twentieth than when they are sorted.
FEW_PAIRS = 64


def are_few(tokens: int, experts: int, top_k: int) -> bool:
    """Whether pairs are not to be sorted: each then multiplies its expert's weights.

    Those of a single token have different ones.
    """
    return tokens == 1 or tokens * top_k <= min(FEW_PAIRS, experts // 2)


class Few(NamedTuple):
    """How a program divides its work. It may change the last bits of a result."""

    rows: int  # of the weight: 16, as a tensor core multiplies them, or more
    columns: int  # at once, a power of two from 128 on
    warps: int


@lru_cache(8192)
def choose_few(size_in: int, itemsize: int) -> Few:
    """A good way for rows of so many numbers, measured with Qwen3-30B-A3B's."""
    size = max(power_of_two(size_in), 128)
    if size_in <= 1024:
        return Few(rows=16, columns=min(size, 512), warps=2)
    return Few(rows=16, columns=min(size, 2048 // itemsize), warps=8)


@cache
def few_launcher(
    config: Few,
    shape: tuple[int, ...],
    tile: tuple[int, int],
    top_k: int,
    most: int,
    gated: bool,
) -> Launcher:
    """For a weight of this shape, [E, N, K].

    ``tile`` is `Scaled.tile`, of 0 columns where there is none; ``most`` is what inputs
    are rounded to, or 0.
    """
    scaled = 0 < tile[1] < shape[2]
    columns = tile[1] if scaled else 128
    return launcher(
        few_kernel,
        TOP_K=top_k,
        E=shape[0],
        N=shape[1],
        K=shape[2],
        ROWS=config.rows,
        TILES=config.columns // columns,
        TILE_ROWS=tile[0],
        COLUMNS=columns,
        SCALED=scaled,
        MOST=most,
        FLOOR=LEAST_TILE,
        GATED=gated,
        num_warps=config.warps,
    )


def multiply_few(
    out: Tensor,
    x: Tensor,
    weight: Weight | PackedExperts,
    ids: Tensor,
    scores: Tensor | None,
    num_tokens: Tensor,
) -> None:
    """One half of the experts ``ids``, int32 [T, k]: fill ``out``.

    The first one without ``scores``: x [T, hidden] -> [n, I]. The other one with
    ``scores`` [T, k]: x [n, I], from the first, launched just before -> [T, k, hidden].
    Padding's are not written.
    """
    values, scales, tile, most = weight, None, (1, 0), 0
    if isinstance(weight, Scaled):
        values, scales, tile = weight.values, weight.scales, weight.tile
        most = int(LARGEST[values.dtype]) if weight.inputs else 0
    assert isinstance(values, Tensor)
    shape, gated = tuple(values.shape), scores is None
    config = choose_few(shape[2], values.itemsize)
    start = few_launcher(config, shape, tile, ids.shape[1], most, gated)
    start(
        (ids.numel(), -(-shape[1] // config.rows), 1),
        *(x, values, scales, scores, ids, num_tokens, out),
    )


def experts_few(
    x: Tensor,
    mlp: Experts,
    ids: Tensor,
    scores: Tensor,
    num_tokens: Tensor,
    out: Tensor,
) -> Tensor:
    """What each chosen expert adds to each token: x [T, hidden] -> [T, k, hidden].

    The experts ``ids``, int32 [T, k], with ``scores``, float32 [T, k]. Tokens from
    ``num_tokens``, int32 [1], on are padding: no expert is read for them, and nothing
    written to ``out``; nor for ids of other ranks, which are len(mlp.held).
    """
    hidden = x.new_empty(ids.numel(), mlp.down.shape[2])
    multiply_few(hidden, x, mlp.gate_up, ids, None, num_tokens)
    multiply_few(out, hidden, mlp.down, ids, scores, num_tokens)
    return out
