"""The experts' MXFP4 matmuls for up to eight tokens an expert, from registers.

As in `experts_few`, but the eight columns of an mma are eight tokens, and the scales of
a block of 32 weights are applied to the sums of its two mmas.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.kernels import supports_pdl
from simplellm.kernels.experts import (
    EXPONENTS,
    Packed,
    activate,
    high,
    low,
    registers,
    rotate_right,
)
from simplellm.kernels.experts_few import UNSHIFT, enlarge, mma, weight_of
from simplellm.kernels.routing import Dispatch


@triton.jit
def load_tokens(x_ptr, tokens, valid, K: tl.constexpr, WARPS: tl.constexpr):
    """Fragments of x, 8 tensors [WARPS * 32] a tile, a token for each g."""
    TILES: tl.constexpr = ((K + 63) // 64 + WARPS - 1) // WARPS
    thread = tl.arange(0, WARPS * 32)
    pairs = thread // 32 * (TILES * 32) + thread % 4  # of columns
    x_ptrs = x_ptr.to(tl.pointer_type(tl.int32)) + (tokens * (K // 2) + pairs)
    x: tl.tuple = ()
    for r in tl.static_range(8 * TILES):
        ptrs = tl.max_contiguous(x_ptrs + 4 * r, (1,))
        inside = (pairs + 4 * r < K // 2) & valid
        x += (tl.load(ptrs, inside, 0).to(tl.uint32, bitcast=True),)
    return x


@triton.jit
def load_tiles(
    words_ptr,
    scales_ptr,
    row,
    N: tl.constexpr,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    EVICT: tl.constexpr,
):
    """A row of tiles: TILES tensors of words, TILES of scales."""
    G: tl.constexpr = (K + 63) // 64
    TILES: tl.constexpr = (G + WARPS - 1) // WARPS
    element = tl.arange(0, WARPS * 128)
    thread = tl.arange(0, WARPS * 32)
    first = element // 128 * TILES
    words_ptrs = words_ptr + row * (G * 128) + (first * 128 + element % 128)
    tile = thread // 32 * TILES
    scales_ptrs = scales_ptr + row * (G * 8) + (tile * 8 + thread % 32 // 4)
    end = tl.where(row < N // 16, G, 0)  # of the row's tiles
    out: tl.tuple = ()
    for i in tl.static_range(TILES):
        words = tl.load(words_ptrs + i * 128, first < end - i, 0, eviction_policy=EVICT)
        out += (words.to(tl.uint32, bitcast=True),)
    for i in tl.static_range(TILES):
        ptrs = tl.max_contiguous(scales_ptrs + i * 8, (1,))
        scales = tl.load(ptrs, tile < end - i, 0, eviction_policy=EVICT)
        out += (scales.to(tl.uint32, bitcast=True),)
    return out


@triton.jit
def multiply_tiles(loaded, x, PTX: tl.constexpr):
    """Sums of rows g and g + 8 for tokens 2 * t and 2 * t + 1: four [THREADS]."""
    TILES: tl.constexpr = len(x) // 8
    THREADS: tl.constexpr = x[0].shape[0]
    u0 = tl.zeros((THREADS,), tl.float32)
    u1, l0, l1 = u0, u0, u0
    for i in tl.static_range(TILES):
        first, second = tl.split(tl.reshape(loaded[i], (THREADS, 2, 2)))
        upper_first, lower_first = tl.split(first)
        upper_second, lower_second = tl.split(second)
        p = registers(upper_first, upper_second)
        q = registers(lower_first, lower_second)
        s = loaded[TILES + i]
        us, ls = s & EXPONENTS, rotate_right(s, 24) & EXPONENTS
        for block in tl.static_range(2):
            c0 = tl.zeros((THREADS,), tl.float32)
            c1, c2, c3 = c0, c0, c0
            for r in tl.static_range(4 * block, 4 * block + 4, 2):
                c0, c1, c2, c3 = mma(
                    *(p[r], q[r], p[r + 1], q[r + 1]),
                    *(x[8 * i + r], x[8 * i + r + 1], c0, c1, c2, c3, PTX),
                )
            a = low(us) if block == 0 else high(us)
            b = low(ls) if block == 0 else high(ls)
            u0 += c0 * a
            u1 += c1 * a
            l0 += c2 * b
            l1 += c3 * b
    return u0, u1, l0, l1


@triton.jit
def add_warps(u0, u1, l0, l1):
    """Sums over warps: rows g and g + 8, [8, 8] each, tokens last."""
    WARPS: tl.constexpr = u0.shape[0] // 32
    all = tl.join(tl.join(u0, u1), tl.join(l0, l1))  # [threads, half, column]
    all = tl.sum(tl.reshape(all, (WARPS, 32, 2, 2)), 0) * UNSHIFT
    all = tl.reshape(all, (8, 4, 2, 2))
    upper, lower = tl.split(all)
    return tl.reshape(upper, (8, 8)), tl.reshape(lower, (8, 8))


@triton.jit
def multiply_all(
    words_ptr,
    scales_ptr,
    bias_ptr,
    loaded,
    raw,
    out_ptr,
    outs,
    valid,
    factor,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WARPS: tl.constexpr,
    PAIRED: tl.constexpr,
    AHEAD: tl.constexpr,
    EVICT: tl.constexpr,
    PTX: tl.constexpr,
):
    x: tl.tuple = ()
    for r in tl.static_range(len(raw)):
        x += (enlarge(raw[r], PTX),)
    g = tl.arange(0, 8)
    valid = valid[None, :]
    step: tl.constexpr = PROGRAMS
    for row in tl.range(tl.program_id(0), N // 16, step, num_stages=AHEAD):
        if AHEAD > 1:
            loaded = load_tiles(words_ptr, scales_ptr, row, N, K, WARPS, EVICT)
        u0, u1, l0, l1 = multiply_tiles(loaded, x, PTX)
        if AHEAD == 1:
            loaded = load_tiles(words_ptr, scales_ptr, row + step, N, K, WARPS, EVICT)
        upper, lower = add_warps(u0, u1, l0, l1)
        if PAIRED:
            units = row * 8 + g
            upper += tl.load(bias_ptr + 2 * units).to(tl.float32)[:, None]
            lower += tl.load(bias_ptr + 2 * units + 1).to(tl.float32)[:, None]
            hidden = activate(upper, lower, LIMIT, ALPHA)
            ptrs = out_ptr + (outs[None, :] * (N // 2) + units[:, None])
            tl.store(ptrs, hidden.to(out_ptr.dtype.element_ty), valid)
        else:
            rows = row * 16 + g
            upper += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
            lower += tl.load(bias_ptr + rows + 8).to(tl.float32)[:, None]
            ptrs = out_ptr + (outs[None, :] * N + rows[:, None])
            factors = factor[None, :]
            tl.store(ptrs, (upper * factors).to(out_ptr.dtype.element_ty), valid)
            tl.store(ptrs + 8, (lower * factors).to(out_ptr.dtype.element_ty), valid)


@triton.jit
def gate_up_some_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    hidden_ptr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    EVICT: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every PROGRAMS-th row of tiles for one block of up to eight pairs."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(1)
    expert = tl.load(blocks_ptr + 2 * block)  # -1 if empty
    if expert >= 0:
        words, scales, bias = weight_of(words_ptr, scales_ptr, bias_ptr, expert, N, K)
        loaded = load_tiles(words, scales, tl.program_id(0), N, K, WARPS, EVICT)
        first = tl.load(blocks_ptr + 2 * block + 1)
        end = tl.load(offsets_ptr + expert + 1)
        lanes = first + tl.arange(0, WARPS * 32) % 32 // 4
        tokens = tl.load(pairs_ptr + lanes, lanes < end, 0) // TOP_K
        raw = load_tokens(x_ptr, tokens, lanes < end, K, WARPS)
        positions = first + tl.arange(0, 8)
        multiply_all(
            *(words, scales, bias, loaded, raw, hidden_ptr, positions),
            *(positions < end, positions, LIMIT, ALPHA, N, K, PROGRAMS, WARPS),
            *(True, AHEAD, EVICT, PTX),
        )


@triton.jit
def down_some_kernel(
    hidden_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    weights_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    EVICT: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every PROGRAMS-th row of tiles for one block of up to eight pairs.

    The lists are read without waiting: `gate_up_some_kernel` lets this one start only
    when it has them.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(1)
    expert = tl.load(blocks_ptr + 2 * block)  # -1 if empty
    if expert >= 0:
        words, scales, bias = weight_of(words_ptr, scales_ptr, bias_ptr, expert, N, K)
        loaded = load_tiles(words, scales, tl.program_id(0), N, K, WARPS, EVICT)
        first = tl.load(blocks_ptr + 2 * block + 1)
        end = tl.load(offsets_ptr + expert + 1)
        positions = first + tl.arange(0, 8)
        pairs = tl.load(pairs_ptr + positions, positions < end, 0)
        factor = tl.load(weights_ptr + pairs, positions < end, 0).to(tl.float32)
        lanes = first + tl.arange(0, WARPS * 32) % 32 // 4
        if PDL:
            tl.extra.cuda.gdc_wait()
        raw = load_tokens(hidden_ptr, lanes, lanes < end, K, WARPS)
        multiply_all(
            *(words, scales, bias, loaded, raw, out_ptr, pairs),
            *(positions < end, factor, 0.0, 0.0, N, K, PROGRAMS, WARPS),
            *(False, AHEAD, EVICT, PTX),
        )
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()


class SomeTiling(NamedTuple):
    """How a kernel divides its work. None of it changes what is computed."""

    programs: int  # for each block
    warps: int = 8  # of a program, on different columns
    registers: int = 128  # the most a thread may use
    ahead: int = 1
    evict: str = ""
    tokens: int = 8


def gate_up_some(
    x: Tensor,
    weight: Packed,
    bias: Tensor,
    dispatch: Dispatch,
    limit: float,
    alpha: float,
    tiling: SomeTiling,
    pdl: bool = True,
) -> Tensor:
    _, rows, columns = weight.shape
    hidden = x.new_empty(len(dispatch.pairs), rows // 2)
    gate_up_some_kernel[(tiling.programs, len(dispatch.blocks))](
        x,
        weight.words,
        weight.scales,
        bias,
        *dispatch,
        hidden,
        LIMIT=limit,
        ALPHA=alpha,
        TOP_K=len(dispatch.pairs) // len(x),
        N=rows,
        K=columns,
        **options(tiling, x, pdl),
    )
    return hidden


def down_some(
    hidden: Tensor,
    weight: Packed,
    bias: Tensor,
    weights: Tensor,
    dispatch: Dispatch,
    tiling: SomeTiling,
    pdl: bool = True,
) -> Tensor:
    _, rows, columns = weight.shape
    out = hidden.new_empty(*weights.shape, rows)
    down_some_kernel[(tiling.programs, len(dispatch.blocks))](
        hidden,
        weight.words,
        weight.scales,
        bias,
        weights,
        *dispatch,
        out,
        N=rows,
        K=columns,
        **options(tiling, hidden, pdl),
    )
    return out


def options(tiling: SomeTiling, x: Tensor, pdl: bool) -> dict:
    """What both kernels are launched with."""
    pdl = pdl and supports_pdl(x.device)
    return dict(
        PROGRAMS=tiling.programs,
        WARPS=tiling.warps,
        AHEAD=tiling.ahead,
        EVICT=tiling.evict,
        PTX=x.is_cuda,
        PDL=pdl,
        num_warps=tiling.warps,
        launch_pdl=pdl,
        maxnreg=tiling.registers,
    )
