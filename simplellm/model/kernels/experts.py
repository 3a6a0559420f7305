"""The experts of a layer: for many tokens, on tensor cores, and the choice of a way.

Weights are the left operand, as `fragments` has ordered them. Tokens are the right
operand, 8 at least, so that few padding tokens are multiplied when an expert has only
one or two. For 8 tokens Triton 3.6 takes mma, which needs no wait for products under
way, else wgmma; later versions take it only with fewer than 4 warps.

T tokens, E experts, k experts a token, n = T * k (token, choice) pairs, N rows and K
columns of a weight, I intermediate size.
"""

import math
from functools import cache, lru_cache
from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.checkpoint.scaled import E4M3
from simplellm.model.kernels.expert_blocks import ExpertBlocks, nearest
from simplellm.model.kernels.experts_one import FEW_TOKENS, experts_one
from simplellm.model.kernels.fragments import (
    SPARE,
    UNSHIFT,
    UNSHIFT_FP8,
    ExpertSizes,
    Fragments,
    activate,
    decode_fp8,
    decode_weights,
    fragment_order,
    hidden_scale,
)
from simplellm.model.kernels.launch import Launcher, launcher, pdl_wait
from simplellm.model.kernels.rounding import Rounding, round_rows
from simplellm.model.kernels.routing import room, route_tokens, sort_pairs
from simplellm.model.layers import Experts


@triton.jit
def wait_for_wgmma(out):
    """``out`` itself, as an instruction that needs it and does nothing.

    Triton would leave wgmmas under way while the next weights are decoded, and ptxas
    before 13.3 decodes them into registers that those wgmmas have yet to read
    (https://github.com/triton-lang/triton/issues/9433). With a use it waits for them.
    `decodes_ahead` says where that isn't needed.
    """
    return tl.inline_asm_elementwise(
        "", "=f,0", [out], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def layout_barrier(weight):
    """``weight`` itself, bfloat16, as an instruction that nobody looks behind.

    For an mma, Triton 3.6 looks for joins in what made an operand and then wants its
    columns in another order. They are in the right one; another would have every
    register exchanged between threads. Not pure, since Triton looks through what is.
    """
    return tl.inline_asm_elementwise(
        "", "=r,0", [weight], dtype=tl.bfloat16, is_pure=False, pack=2
    )


@triton.jit
def multiply(
    x_ptr,
    x_rows,
    loaded,
    words_ptr,
    scales_ptr,
    expert,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    TILES: tl.constexpr,
    PTX: tl.constexpr,
):
    """float32 [BLOCK_N, BLOCK_T]: this program's rows of the expert's weight times the
    rows ``x_rows`` of x, which are ordinary numbers, or e4m3 in `fragment_order`. Those
    that aren't ``loaded`` are zeros.

    A weight's next TILES tiles are decoded at once. If AHEAD, that is while those
    before are multiplied. Tiles beyond a row's end are of the next row, or of
    `Fragments`'s spare ones: whatever they are, it is finite, and times zeros of x.
    """
    tl.static_assert(UNROLL * TILES <= 1 + SPARE)
    FP8: tl.constexpr = x_ptr.dtype.element_ty == tl.float8e4nv
    ROWS16: tl.constexpr = BLOCK_N // 16
    ROW_TILES: tl.constexpr = (K + 63) // 64
    MASKED: tl.constexpr = ROW_TILES % (UNROLL * TILES) != 0 or K % 64 != 0
    base = expert.to(tl.int64) * (N // 16) * ROW_TILES
    each = tl.arange(0, ROWS16 * TILES)
    rows = tl.minimum(tl.program_id(0) * ROWS16 + each // TILES, N // 16 - 1)
    tiles = (rows * ROW_TILES + each % TILES)[:, None]
    words_ptrs = words_ptr + base * 128 + (tiles * 128 + tl.arange(0, 128))
    scales_ptrs = scales_ptr + base * 8 + (tiles * 8 + tl.arange(0, 8))
    columns = tl.arange(0, 64 * TILES)
    x_ptrs = x_ptr + (x_rows[None, :] * K + columns[:, None])
    out = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in tl.range(0, ROW_TILES, UNROLL * TILES, num_stages=STAGES):
        for part in tl.static_range(UNROLL):
            tile = start + part * TILES
            inside = loaded[None, :]
            if MASKED:
                inside = inside & (columns < K - tile * 64)[:, None]
            words = tl.load(words_ptrs + tile * 128)
            scales = tl.load(scales_ptrs + tile * 8)
            x = tl.load(x_ptrs + tile * 64, inside, 0.0)
            if FP8:
                weight = decode_fp8(words, scales, TILES, PTX)
            else:
                weight = decode_weights(words, scales, TILES, PTX)
            if PTX:
                if not FP8:
                    weight = layout_barrier(weight)
                out = tl.dot(weight, x, out)
            else:
                out = tl.dot(weight, x.to(tl.float32), out, input_precision="ieee")
        if PTX and not AHEAD:
            out = wait_for_wgmma(out)
    return out * (UNSHIFT_FP8 if FP8 and PTX else UNSHIFT)


@triton.jit
def multiply_block(
    x_ptr,
    x_scales_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    scores_ptr,
    pairs_ptr,
    out_ptr,
    expert,
    first,
    end,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FULL: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    TILES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HIDDEN_SCALE: tl.constexpr,
    PTX: tl.constexpr,
):
    """BLOCK_N rows for the pairs from ``first`` to ``end`` or BLOCK_T of them, which
    is known if the block is FULL."""
    positions = first + tl.arange(0, BLOCK_T)
    valid = positions < end
    loaded = valid
    if FULL:  # Nothing is left to ask at each load.
        loaded = tl.full((BLOCK_T,), True, tl.int1)
    pairs = tl.load(pairs_ptr + positions, loaded, 0)
    if INTERLEAVED:
        x_rows = pairs // TOP_K
    else:
        x_rows = positions
        scores = tl.load(scores_ptr + pairs, valid, 0).to(tl.float32)
    out = multiply(
        *(x_ptr, x_rows, loaded, words_ptr, scales_ptr, expert),
        *(N, K, BLOCK_N, BLOCK_T, UNROLL, STAGES, AHEAD, TILES, PTX),
    )
    if x_scales_ptr is not None:
        out *= tl.load(x_scales_ptr + x_rows, valid, 0)[None, :]
    if INTERLEAVED:
        # A tile's rows are 8 gates and their 8 ups; a thread has both of a unit.
        HALF: tl.constexpr = BLOCK_N // 2
        out = tl.reshape(out, (BLOCK_N // 16, 2, 8, BLOCK_T))
        gate, up = tl.split(tl.permute(out, (0, 2, 3, 1)))
        gate = tl.reshape(gate, (HALF, BLOCK_T))
        up = tl.reshape(up, (HALF, BLOCK_T))
        units = tl.program_id(0) * HALF + tl.arange(0, HALF)
        inside = units < N // 2
        bias_ptrs = bias_ptr + expert * N + 2 * units
        gate += tl.load(bias_ptrs, inside, 0).to(tl.float32)[:, None]
        up += tl.load(bias_ptrs + 1, inside, 0).to(tl.float32)[:, None]
        out = activate(gate, up, LIMIT, ALPHA) * HIDDEN_SCALE
        if out_ptr.dtype.element_ty == tl.float8e4nv:
            out = fragment_order(out)
        ptrs = out_ptr + (positions.to(tl.int64)[None, :] * (N // 2) + units[:, None])
    else:
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = rows < N
        bias = tl.load(bias_ptr + expert * N + rows, inside, 0).to(tl.float32)
        out = (out * (1 / HIDDEN_SCALE) + bias[:, None]) * scores[None, :]
        ptrs = out_ptr + (pairs.to(tl.int64)[None, :] * N + rows[:, None])
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(ptrs, out, valid[None, :] & inside[:, None])


@triton.jit
def experts_kernel(
    x_ptr,
    x_scales_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    scores_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    out_ptr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDTHS: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    TILES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HIDDEN_SCALE: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program multiplies BLOCK_N rows with one block of pairs.

    If INTERLEAVED, the first half of an expert's network:

    g, u = even and odd rows of (weight[expert] @ x[token] + bias[expert])
    g = min(g, LIMIT); u = clamp(u, -LIMIT, LIMIT)
    out[position] = g * sigmoid(ALPHA * g) * (u + 1)

    Else the other one, with pair = pairs[position]:

    out[pair] = (weight[expert] @ x[position] + bias[expert]) * scores[pair]

    A block that is not full is padded to BLOCK_T, BLOCK_T / 2, … whichever is nearest
    of WIDTHS such. In FP8 x has scales in the first half, one a token, and is times
    HIDDEN_SCALE in the other.
    """
    pdl_wait(PDL)
    block = tl.program_id(1)
    expert = tl.load(blocks_ptr + 2 * block)  # -1 if empty: first and end are 0
    first = tl.load(blocks_ptr + 2 * block + 1)
    end = tl.load(offsets_ptr + expert + 1)
    count = tl.minimum(end - first, BLOCK_T)
    SELDOM_FULL: tl.constexpr = BLOCK_T < 64
    if SELDOM_FULL:
        pass
    elif count == BLOCK_T:
        multiply_block(
            *(x_ptr, x_scales_ptr, words_ptr, scales_ptr, bias_ptr, scores_ptr),
            *(pairs_ptr, out_ptr, expert, first, end, LIMIT, ALPHA, TOP_K, N, K),
            *(BLOCK_N, BLOCK_T, True, UNROLL, STAGES, AHEAD, TILES, INTERLEAVED),
            *(HIDDEN_SCALE, PTX),
        )
        count -= BLOCK_T  # and none is left
    for level in tl.static_range(WIDTHS):
        if nearest(count, BLOCK_T >> level, level == WIDTHS - 1):
            multiply_block(
                *(x_ptr, x_scales_ptr, words_ptr, scales_ptr, bias_ptr, scores_ptr),
                *(pairs_ptr, out_ptr, expert, first, end, LIMIT, ALPHA, TOP_K, N, K),
                *(BLOCK_N, BLOCK_T >> level, False, UNROLL, STAGES, AHEAD, TILES),
                *(INTERLEAVED, HIDDEN_SCALE, PTX),
            )


class Tiling(NamedTuple):
    """How a kernel divides its work. Sums are in ascending order of columns."""

    rows: int  # of weights a program
    tokens: int  # of a block, `sort_pairs`'s ``block``
    widths: int = 1  # sizes that a block is padded to: tokens, tokens / 2, …
    unroll: int = 1  # times that it decodes before it waits for the products
    stages: int = 4  # of loads under way
    warps: int = 4
    tiles: int = 1  # of 64 columns, that it decodes at once
    ahead: bool = False  # never waits: decodes while the weights before are multiplied


SHORT = Tiling(rows=32, tokens=8, unroll=3, stages=4, warps=2)
NARROW = Tiling(rows=128, tokens=16, widths=2, unroll=3, stages=3)
LEAN = Tiling(rows=128, tokens=8, unroll=3, stages=3, warps=2)
# Two stages leave room for four programs on a processor.
HALF = Tiling(rows=128, tokens=32, widths=2, unroll=3, stages=2)
MIDDLE = Tiling(rows=128, tokens=64, widths=3)
WIDE = Tiling(rows=128, tokens=128, widths=3)
# The tilings of gate_up and down for at most so many experts in use, with at most so
# many pairs each if tokens spread evenly: from 8 tokens of 128 experts on the fastest
# on an H200 on 2026-11-21, at its power limit (HALF: 2026-11-29). Few experts need more
# warps, to have some for all processors; 16 tokens have up to 64. Fewer than 5 go
# another way, unless they are to be summed as among others: the tensor cores of an H200
# do so alike in any tiling, see figures/12-invariance.json.
TILINGS: tuple[tuple[float, float, Tiling, Tiling], ...] = (
    (16, 1, SHORT, SHORT),
    (76, 12, NARROW, NARROW),
    (math.inf, 6, LEAN, LEAN),
    (math.inf, 12, NARROW, NARROW),
    (math.inf, 24, HALF, HALF),
    (math.inf, 96, MIDDLE, MIDDLE),
    (math.inf, math.inf, WIDE, WIDE),
)


# Pairs an expert from which on a way is the fastest, on an H200 at its power limit on
# 2026-11-30. Where weights are decoded ahead, a block may have 256.
WIDE_FROM = 384  # WIDE_AHEAD, before it AHEAD, if WIDE would do
FP8_PAIRS = 48  # those that are rounded
FP8_WIDE_FROM = 192  # FP8_WIDE, before it FP8_AHEAD; FP8_WAITING where none are ahead
AHEAD = WIDE._replace(ahead=True)
WIDE_AHEAD = Tiling(rows=128, tokens=256, widths=4, stages=3, warps=8, ahead=True)
FP8_WIDE = WIDE_AHEAD._replace(widths=5, tiles=2)
FP8_AHEAD = Tiling(rows=128, tokens=128, widths=4, stages=3, tiles=2, ahead=True)
FP8_WAITING = FP8_AHEAD._replace(widths=3, ahead=False)


@cache
def assembler() -> tuple[int, int]:
    """The version of the ptxas that Triton takes for a Hopper GPU."""
    from triton.backends.nvidia.compiler import get_ptxas

    major, minor = get_ptxas(90).version.split(".")[:2]
    return int(major), int(minor)


@cache
def decodes_ahead() -> bool:
    """Whether wgmmas may be under way here while weights are decoded into registers.

    The GPU has to be a Hopper, and the ptxas that Triton takes for it 13.3 or newer:
    see `wait_for_wgmma`. Triton 3.9 has such a one.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    return assembler() >= (13, 3)


@lru_cache(8192)
def tilings(
    tokens: int, experts: int, top_k: int, fp8: bool = False
) -> tuple[Tiling, Tiling]:
    """Good tilings of `gate_up` and `down`; both want blocks of the same size."""
    pairs = tokens * top_k
    used, mean = min(pairs, experts), pairs / experts
    if fp8:
        tiling = FP8_WAITING
        if decodes_ahead():
            tiling = FP8_WIDE if mean >= FP8_WIDE_FROM else FP8_AHEAD
        return tiling, tiling
    fits = ((up, back) for u, m, up, back in TILINGS if used <= u and mean <= m)
    both = next(fits)
    if WIDE in both and decodes_ahead():
        tiling = WIDE_AHEAD if mean >= WIDE_FROM else AHEAD
        return tiling, tiling
    return both


@cache
def experts_launcher(
    tiling: Tiling, half: ExpertSizes, hidden_scale: float = 1.0
) -> Launcher:
    """For one half of the experts in this tiling."""
    return launcher(
        experts_kernel,
        **half._asdict(),
        HIDDEN_SCALE=hidden_scale,
        BLOCK_N=tiling.rows,
        BLOCK_T=tiling.tokens,
        WIDTHS=tiling.widths,
        UNROLL=tiling.unroll,
        STAGES=tiling.stages,
        AHEAD=tiling.ahead,
        TILES=tiling.tiles,
        num_warps=tiling.warps,
    )


class Tokens(NamedTuple):
    """The experts' input x [T, hidden], or that of their other half, [n, I]."""

    values: Tensor  # in the model's dtype, or e4m3 in `fragment_order`
    scales: Tensor | None = None  # float32 [T], of e4m3 tokens
    hidden_scale: float = 1.0  # what the activations are multiplied by


def round_tokens(x: Tensor, mlp: Experts) -> Tokens:
    """``x`` in FP8, with a scale for each token.

    Activations need none: limits bound them. With gpt-oss's 7 that is 56, and e4m3
    keeps all of its bits down to 1/512.
    """
    rounding = Rounding(x.shape[1], E4M3)
    values, scales = round_rows(x, rounding, fragments=True)
    return Tokens(values, scales[0], hidden_scale(mlp))


def gate_up(x: Tokens, mlp: Experts, order: ExpertBlocks, tiling: Tiling) -> Tokens:
    """The activations of every pair: the first half of its expert's network.

    x [T, hidden] -> [n, I] in x's dtype, in this ``order``, whose blocks
    have tiling.tokens pairs. Padding's are not written.
    """
    weight = cast(Fragments, mlp.gate_up)
    out = x.values.new_empty(order.pairs.shape[0], weight.shape[1] // 2)
    multiply_pairs(out, x, weight, mlp.gate_up_bias, None, mlp, order, tiling)
    return Tokens(out, None, x.hidden_scale)


def down(
    hidden: Tokens, mlp: Experts, scores: Tensor, order: ExpertBlocks, tiling: Tiling
) -> Tensor:
    """What each expert adds to each token: the other half, times the router's score.

    hidden [n, I] from `gate_up`, scores [T, k] from `route` -> [T, k, hidden] in the
    biases' dtype; the token's sum is the caller's to take. What padding would get is
    not written, and of other ranks' experts it is zeros.
    """
    weight, bias = cast(Fragments, mlp.down), cast(Tensor, mlp.down_bias)
    out = room(mlp, bias, *scores.shape, weight.shape[1])
    multiply_pairs(out, hidden, weight, bias, scores, mlp, order, tiling)
    return out


def multiply_pairs(
    out: Tensor,
    x: Tokens,
    weight: Fragments,
    bias: Tensor | None,
    scores: Tensor | None,
    mlp: Experts,
    order: ExpertBlocks,
    tiling: Tiling,
) -> None:
    """One half of the experts: fill ``out``, interleaved if ``weight`` is."""
    values = x.values
    ptx = values.is_cuda and values.dtype in (torch.bfloat16, E4M3)
    half = ExpertSizes.of(weight, mlp, ptx)
    start = experts_launcher(tiling, half, x.hidden_scale)
    start(
        (-(-weight.shape[1] // tiling.rows), order.blocks.shape[0], 1),
        *(values, x.scales, weight.words, weight.scales, bias, scores, *order, out),
    )


def experts(
    x: Tensor,
    mlp: Experts,
    num_tokens: Tensor,
    *,
    batch_invariant: bool = False,
    fp8: bool = False,
) -> Tensor:
    """What each chosen expert adds to each token: x [T, hidden] -> [T, k, hidden].

    Only the first ``num_tokens``, int32 [1], are no padding: no expert is read for the
    others, and nothing written. With ``batch_invariant`` no token's result depends on
    the others. With ``fp8`` more than FP8_PAIRS tokens an expert, as those of prompts,
    are rounded to e4m3, and so are their activations: of fewer, reading the weights
    takes the time.
    """
    if x.shape[0] <= FEW_TOKENS and x.dtype == torch.bfloat16 and not batch_invariant:
        return experts_one(x, mlp, num_tokens)
    count, held = len(mlp.router), mlp.held
    fp8 = fp8 and x.shape[0] * mlp.top_k > FP8_PAIRS * count
    first, second = tilings(x.shape[0], count, mlp.top_k, fp8)
    router = mlp.router, mlp.router_bias, mlp.top_k
    ids, scores = route_tokens(x, *router, batch_invariant, mlp.normalized, held)
    others = len(held) < count
    pairs = sort_pairs(ids, len(held), first.tokens, num_tokens, others)
    tokens = round_tokens(x, mlp) if fp8 else Tokens(x)
    hidden = gate_up(tokens, mlp, pairs, first)
    return down(hidden, mlp, scores, pairs, second)
