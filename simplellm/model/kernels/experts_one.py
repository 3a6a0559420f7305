"""The experts for one token, when reading weights is all.

A warp multiplies 16 rows by 64 columns of a weight, 16 bytes a thread as `repack` has
ordered them: the fragments of four mma.m16n8k16 instructions are what its threads load,
so nothing passes through shared memory on the way. An mma has room for eight tokens.
With one, each of its eight columns takes the part of x that belongs to another block of
32 weights. The scales, one a block, are then applied to the sums, of which every thread
has two a row, and not to the weights.

A program has the fragments of x in registers and goes through many rows of tiles, the
next one on its way while one is multiplied.

E experts, k of them chosen, N rows and K columns of a weight, I intermediate size.
Thread 4 * g + t of a warp.
"""

from functools import cache
from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels.fragments import (
    EXPONENTS,
    MINUS_ZERO,
    SHIFT,
    ExpertSizes,
    Fragments,
    activate,
    high,
    low,
    registers,
    rotate_right,
)
from simplellm.model.kernels.launch import Launcher, launcher
from simplellm.model.kernels.routing import room, route_tokens
from simplellm.model.layers import Experts

# Weights are read as bfloat16 numbers, 2^-126 times too small. With x larger by half as
# much, products are numbers that float32 has, and so is every x below 2^63.
ENLARGED = tl.constexpr(0x5F805F80)  # 2^64 in bfloat16, in both halves
RESTORED = tl.constexpr(2.0 ** (SHIFT - 64))


@triton.jit
def enlarge(bits, PTX: tl.constexpr):
    """Two bfloat16 numbers in 32 bits, times 2^64."""
    if PTX:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;",  # before Hopper there is no mul of two
            "=r,r,r,r",
            [
                bits,
                tl.full([], ENLARGED, tl.uint32),
                tl.full([], MINUS_ZERO, tl.uint32),
            ],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    lower = (low(bits) * 2.0**64).to(tl.uint32, bitcast=True)  # exact in bfloat16
    upper = (high(bits) * 2.0**64).to(tl.uint32, bitcast=True)
    return upper | (lower >> 16)


@triton.jit
def products(a, b):
    """What a register of weights and one of x add to an mma's accumulators.

    sum over t of a[g, t] * b[column, t], for columns 2 * t and 2 * t + 1
    """
    WARPS: tl.constexpr = a.shape[0] // 32
    a = tl.reshape(a, (WARPS, 8, 1, 4))
    b = tl.reshape(b, (WARPS, 1, 8, 4))
    c = tl.sum(low(a) * low(b) + high(a) * high(b), 3)
    return tl.split(tl.reshape(c, (WARPS * 32, 2)))


@triton.jit
def mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, PTX: tl.constexpr):
    """mma.m16n8k16: 16 rows of weights times 8 columns, added to c.

    Each element is one thread's; a warp's are neighbors in the last axis.
    a: rows g, g + 8, g, g + 8; b: column g; c: rows g, g, g + 8, g + 8 and columns
    2 * t, 2 * t + 1, 2 * t, 2 * t + 1.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, "
            "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32,) * 4,
            is_pure=True,
            pack=1,
        )
    p0, p1 = products(a0, b0)
    q0, q1 = products(a2, b1)
    p2, p3 = products(a1, b0)
    q2, q3 = products(a3, b1)
    return c0 + p0 + q0, c1 + p1 + q1, c2 + p2 + q2, c3 + p3 + q3


@triton.jit
def load_x(x_ptr, K: tl.constexpr, WARPS: tl.constexpr):
    """The fragments of x for each warp's tiles: 8 tensors [WARPS * 32] a tile.

    Column c of the mmas has what belongs to block c of every 8, else zeros.
    """
    TILES: tl.constexpr = ((K + 63) // 64 + WARPS - 1) // WARPS
    thread = tl.arange(0, WARPS * 32)
    g = thread % 32 // 4
    pairs = thread // 32 * (TILES * 32) + thread % 4  # of columns
    x_ptrs = x_ptr.to(tl.pointer_type(tl.int32)) + pairs
    x: tl.tuple = ()
    for r in tl.static_range(8 * TILES):
        # Threads would otherwise load for their neighbors, and exchange.
        ptrs = tl.max_contiguous(x_ptrs + 4 * r, (1,))
        inside = (pairs + 4 * r < K // 2) & (g == r // 4 % 8)
        x += (tl.load(ptrs, inside, 0).to(tl.uint32, bitcast=True),)
    return x


@triton.jit
def weight_of(
    words_ptr, scales_ptr, bias_ptr, expert, N: tl.constexpr, K: tl.constexpr
):
    """Pointers to one expert's words, scales and bias."""
    TILES: tl.constexpr = N // 16 * ((K + 63) // 64)
    expert = expert.to(tl.int64)
    return (
        words_ptr + expert * (TILES * 128),
        scales_ptr + expert * (TILES * 8),
        bias_ptr + expert * N,
    )


@triton.jit
def load_row(
    weight,
    row,
    N: tl.constexpr,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """One row of tiles of `weight_of`, zeros if there are not so many.

    TILES tensors of words [WARPS * 128], one of scales [WARPS * 32] for every 4 tiles,
    thread 4 * g + t having those of tile t, and the bias of rows g and g + 8 where g is
    a thread of the first warp with t = 0.
    """
    words_ptr, scales_ptr, bias_ptr = weight
    G: tl.constexpr = (K + 63) // 64
    TILES: tl.constexpr = (G + WARPS - 1) // WARPS
    element = tl.arange(0, WARPS * 128)
    thread = tl.arange(0, WARPS * 32)
    first = element // 128 * TILES
    words_ptrs = words_ptr + row * (G * 128) + (first * 128 + element % 128)
    g, t = thread % 32 // 4, thread % 4
    tile = thread // 32 * TILES + t
    scales_ptrs = scales_ptr + row * (G * 8) + (tile * 8 + g)
    end = tl.where(row < N // 16, G, 0)  # of the row's tiles
    out: tl.tuple = ()
    for i in tl.static_range(TILES):
        words = tl.load(words_ptrs + i * 128, first < end - i, 0)
        out += (words.to(tl.uint32, bitcast=True),)
    for i in tl.static_range(0, TILES, 4):
        scales = tl.load(scales_ptrs + i * 8, (tile < end - i) & (t < TILES - i), 0)
        out += (scales.to(tl.uint32, bitcast=True),)
    here = (thread < 32) & (thread < end * 32) & (t == 0)
    if INTERLEAVED:
        pairs_ptr = bias_ptr.to(tl.pointer_type(tl.int32)) + row * 8
        both = tl.load(pairs_ptr + g, here, 0).to(tl.uint32, bitcast=True)
        out += (low(both), high(both))
    else:
        upper = tl.load(bias_ptr + row * 16 + g, here, 0)
        lower = tl.load(bias_ptr + row * 16 + 8 + g, here, 0)
        out += (upper.to(tl.float32), lower.to(tl.float32))
    return out


@triton.jit
def multiply_row(tiles, x, PTX: tl.constexpr):
    """What each thread has of rows g and g + 8: two tensors float32 [THREADS]."""
    TILES: tl.constexpr = len(x) // 8
    THREADS: tl.constexpr = x[0].shape[0]
    upper, lower = tiles[-2], tiles[-1]
    for group in tl.static_range(0, TILES, 4):
        c0 = tl.zeros((THREADS,), tl.float32)
        c1, c2, c3 = c0, c0, c0
        for i in tl.static_range(group, group + 4 if group + 4 < TILES else TILES):
            first, second = tl.split(tl.reshape(tiles[i], (THREADS, 2, 2)))
            upper_first, lower_first = tl.split(first)
            upper_second, lower_second = tl.split(second)
            p = registers(upper_first, upper_second)
            q = registers(lower_first, lower_second)
            for r in tl.static_range(0, 8, 2):
                c0, c1, c2, c3 = mma(
                    *(p[r], q[r], p[r + 1], q[r + 1]),
                    *(x[8 * i + r], x[8 * i + r + 1], c0, c1, c2, c3, PTX),
                )
        s = tiles[TILES + group // 4]
        upper_scales, lower_scales = s & EXPONENTS, rotate_right(s, 24) & EXPONENTS
        upper_sum = c0 * low(upper_scales) + c1 * high(upper_scales)
        lower_sum = c2 * low(lower_scales) + c3 * high(lower_scales)
        upper += upper_sum * RESTORED
        lower += lower_sum * RESTORED
    return upper, lower


@triton.jit
def add_up(upper, lower):
    """What threads have of rows g and g + 8 -> two tensors [8], the rows' sums."""
    WARPS: tl.constexpr = upper.shape[0] // 32
    both = tl.reshape(tl.join(upper, lower), (WARPS, 8, 4, 2))
    both = tl.reshape(tl.permute(both, (1, 3, 0, 2)), (8, 2, WARPS * 4))
    return tl.split(tl.sum(both, 2))


@triton.jit
def multiply_rows(
    weight,
    first,
    tiles,
    raw,
    out_ptr,
    factor,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PTX: tl.constexpr,
):
    """This program's rows of tiles times x; with INTERLEAVED, their activations.

    The ``first`` row is ``tiles``, ``raw`` is what `load_x` gave.
    """
    x: tl.tuple = ()
    for r in tl.static_range(len(raw)):
        x += (enlarge(raw[r], PTX),)
    step = tl.num_programs(0)  # not compiled in: the same kernel for all its grids
    for row in tl.range(first, N // 16, step, num_stages=1):
        upper, lower = multiply_row(tiles, x, PTX)
        # In place of those just used: what is under way cannot change registers.
        tiles = load_row(weight, row + step, N, K, WARPS, INTERLEAVED)
        upper, lower = add_up(upper, lower)
        if INTERLEAVED:
            hidden = activate(upper, lower, LIMIT, ALPHA)
            ptrs = out_ptr + row * 8 + tl.arange(0, 8)
            tl.store(ptrs, hidden.to(out_ptr.dtype.element_ty))
        else:
            ptrs = out_ptr + row * 16 + tl.arange(0, 8)
            tl.store(ptrs, (upper * factor).to(out_ptr.dtype.element_ty))
            tl.store(ptrs + 8, (lower * factor).to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize_on_alignment=["num_tokens_ptr"])
def experts_one_kernel(
    x_ptr,
    ids_ptr,
    scores_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    num_tokens_ptr,
    out_ptr,
    E: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every num_programs(0)-th row of tiles for one choice, from program_id(0) on.

    If INTERLEAVED, the first half of an expert's network:

    gate, up = weight[expert] @ x[token] + bias[expert]
    out[choice] = gate * sigmoid(ALPHA * gate) * (up + 1), clamped to LIMIT

    Else the other one:

    out[choice] = (weight[expert] @ x[choice] + bias[expert]) * scores[choice]

    The other half may start once the first one has the ids: it reads them without
    waiting. Choices of padding, and of experts from E on, are left out.
    """
    WIDTH: tl.constexpr = N // 2 if INTERLEAVED else N
    if PDL:
        if INTERLEAVED:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    choice = tl.program_id(1)
    token = choice // TOP_K
    expert = tl.load(ids_ptr + choice)
    # Of padding, and of other ranks' experts, there is no row, and nothing to read.
    here = (token < tl.load(num_tokens_ptr)) & (expert < E)
    first = tl.where(here, tl.program_id(0), N // 16)
    factor = 1.0
    if INTERLEAVED:
        raw = load_x(x_ptr + token * K, K, WARPS)
    else:
        factor = tl.load(scores_ptr + choice).to(tl.float32)
    weight = weight_of(words_ptr, scales_ptr, bias_ptr, expert, N, K)
    tiles = load_row(weight, first, N, K, WARPS, INTERLEAVED)
    if not INTERLEAVED:
        if PDL:
            tl.extra.cuda.gdc_wait()
        raw = load_x(x_ptr + choice * K, K, WARPS)
    multiply_rows(
        *(weight, first, tiles, raw, out_ptr + choice * WIDTH, factor),
        *(LIMIT, ALPHA, N, K, WARPS, INTERLEAVED, PTX),
    )


class OneTiling(NamedTuple):
    """How a kernel divides its work. It may change the last bits of a result."""

    programs: int = 66  # for each choice
    warps: int = 8  # of a program, on different columns
    registers: int = 128  # the most a thread may use


# For up to so many tokens: two programs for each of 132 processors.
ONE_TILINGS = {1: OneTiling(), 2: OneTiling(33), 4: OneTiling(16)}
FEW_TOKENS = max(ONE_TILINGS)


def one_tiling(tokens: int) -> OneTiling:
    """How so few tokens are computed."""
    return next(tiling for most, tiling in ONE_TILINGS.items() if tokens <= most)


@cache
def one_launcher(tiling: OneTiling, half: ExpertSizes, experts: int) -> Launcher:
    """For one half of so many experts in this tiling."""
    return launcher(
        experts_one_kernel,
        E=experts,
        **half._asdict(),
        WARPS=tiling.warps,
        num_warps=tiling.warps,
        maxnreg=tiling.registers,
    )


def gate_up_one(
    x: Tensor, mlp: Experts, ids: Tensor, num_tokens: Tensor, tiling: OneTiling
) -> Tensor:
    """The activations of each chosen expert: the first half of its network.

    x bfloat16 [T, hidden], ids int32 [T, k] -> bfloat16 [T * k, I]. Only the first
    ``num_tokens``, int32 [1], tokens are no padding; for the others nothing is written.
    """
    weight = cast(Fragments, mlp.gate_up)
    out = x.new_empty(ids.numel(), weight.shape[1] // 2)
    multiply_one(out, x, weight, mlp.gate_up_bias, ids, None, mlp, num_tokens, tiling)
    return out


def down_one(
    hidden: Tensor,
    mlp: Experts,
    ids: Tensor,
    scores: Tensor,
    num_tokens: Tensor,
    tiling: OneTiling,
) -> Tensor:
    """What each expert adds to its token: the other half, times the router's score.

    hidden bfloat16 [T * k, I] from `gate_up_one`, launched just before, ids int32 and
    scores [T, k] -> float32 [T, k, hidden]; the sum is the caller's to take.
    """
    weight = cast(Fragments, mlp.down)
    out = room(mlp, hidden, *ids.shape, weight.shape[1], dtype=torch.float32)
    multiply_one(
        out, hidden, weight, mlp.down_bias, ids, scores, mlp, num_tokens, tiling
    )
    return out


def multiply_one(
    out: Tensor,
    x: Tensor,
    weight: Fragments,
    bias: Tensor | None,
    ids: Tensor,
    scores: Tensor | None,
    mlp: Experts,
    num_tokens: Tensor,
    tiling: OneTiling,
) -> None:
    """One half of the experts: fill ``out``, interleaved if ``weight`` is."""
    sizes = ExpertSizes.of(weight, mlp, x.is_cuda)
    start = one_launcher(tiling, sizes, weight.shape[0])
    start(
        (tiling.programs, ids.numel(), 1),
        *(x, ids, scores, weight.words, weight.scales, bias, num_tokens, out),
    )


def experts_one(
    x: Tensor, mlp: Experts, num_tokens: Tensor, tiling: OneTiling | None = None
) -> Tensor:
    """What each chosen expert adds to each of at most FEW_TOKENS tokens.

    x bfloat16 [T, hidden] -> float32 [T, k, hidden]. Only the first ``num_tokens``,
    int32 [1], are no padding.
    """
    tiling = tiling or one_tiling(x.shape[0])
    router = mlp.router, mlp.router_bias, mlp.top_k
    ids, scores = route_tokens(x, *router, False, mlp.normalized, mlp.held)
    hidden = gate_up_one(x, mlp, ids, num_tokens, tiling)
    return down_one(hidden, mlp, ids, scores, num_tokens, tiling)
