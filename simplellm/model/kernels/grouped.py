"""Experts whose weights are ordinary numbers, or of 8 bits: those of other families.

As in `experts`, a kernel goes through blocks of pairs of one expert, with the weight as
the left operand and tokens as the right one, for one token or thousands. As in
`scaled_linear`, inputs are rounded where the format says so, each token's once, in
front of the product, and what each step of 128 columns of e4m3 adds is taken out of the
tensor cores.

So few pairs that hardly any two share an expert are for `grouped_few`.

T tokens, E experts, k experts a token, n = T * k (token, choice) pairs, N rows and K
columns of a weight, I intermediate size, C scales of a token.
"""

import math
from functools import cache, lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from simplellm.checkpoint.cpu_weights import PackedExperts
from simplellm.checkpoint.mxfp4 import Weight
from simplellm.checkpoint.scaled import Scaled
from simplellm.model.kernels.expert_blocks import ExpertBlocks, nearest
from simplellm.model.kernels.gated import apply_gate, gate_and_up_rows
from simplellm.model.kernels.grouped_few import are_few, experts_few
from simplellm.model.kernels.launch import Launcher, launcher
from simplellm.model.kernels.linear import dot_tile
from simplellm.model.kernels.rounding import Rounding, round_rows
from simplellm.model.kernels.routing import room, route_tokens, sort_pairs
from simplellm.model.layers import Experts


@triton.jit(do_not_specialize=["x_count"])
def grouped_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    scores_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    out_ptr,
    x_count,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTHS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program multiplies BLOCK_N rows with one block of up to BLOCK_T pairs.

    If GATED, the first half of an expert's network:

    gate, up = both halves of weight[expert] @ x[token]
    out[position] = gate * sigmoid(gate) * up

    Else the other one, with pair = pairs[position]:

    out[pair] = weight[expert] @ x[position] * scores[pair]

    x has x_count rows. The other half may start once the first one has what is known
    of blocks: it reads that without waiting. A block that is not full is padded to
    BLOCK_T, BLOCK_T / 2, … whichever is nearest of WIDTHS such.
    """
    if PDL and GATED:
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(1)
    expert = tl.load(blocks_ptr + 2 * block)  # -1 if empty: first and end are 0
    first = tl.load(blocks_ptr + 2 * block + 1)
    end = tl.load(offsets_ptr + expert + 1)
    if PDL and not GATED:
        tl.extra.cuda.gdc_wait()
    count = tl.minimum(end - first, BLOCK_T)
    for level in tl.static_range(WIDTHS):
        if nearest(count, BLOCK_T >> level, level == WIDTHS - 1):
            multiply_group(
                *(x_ptr, x_scales_ptr, weight_ptr, scales_ptr, scores_ptr, pairs_ptr),
                *(out_ptr, x_count, expert, first, end, TOP_K, N, K, BLOCK_N),
                *(BLOCK_T >> level, DEPTH, TILE_ROWS, COLUMNS, GATED, PDL),
            )


@triton.jit
def multiply_group(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    scores_ptr,
    pairs_ptr,
    out_ptr,
    x_count,
    expert,
    first,
    end,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """`grouped_kernel` for the pairs from ``first`` to ``end``, at most BLOCK_T."""
    positions = first + tl.arange(0, BLOCK_T)
    valid = positions < end
    pairs = tl.load(pairs_ptr + positions, valid, 0)
    if GATED:
        units, rows = gate_and_up_rows(N, BLOCK_N)
    else:
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    number = expert.to(tl.int64)
    out = dot_tile(
        *(x_ptr, x_scales_ptr, pairs // TOP_K if GATED else positions, valid),
        *(K, x_count, weight_ptr, scales_ptr, number * N + rows),
        *(number * tl.cdiv(N, TILE_ROWS) + rows // TILE_ROWS, inside, 0, K),
        *(K, DEPTH, COLUMNS, PDL),
    )
    if GATED:
        out = apply_gate(out, "swiglu")
        here = units < N // 2
        where = positions.to(tl.int64)[None, :] * (N // 2) + units[:, None]
    else:
        out *= tl.load(scores_ptr + pairs, valid, 0)[None, :]
        here = inside
        where = pairs.to(tl.int64)[None, :] * N + rows[:, None]
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + where, out, here[:, None] & valid[None, :])


class Grouping(NamedTuple):
    """How the kernel divides its work. Sums are in ascending order of columns."""

    rows: int  # of weights a program
    tokens: int  # of a block, `sort_pairs`'s ``block``
    warps: int
    stages: int  # of loads under way
    widths: int = 1  # sizes that a block is padded to: tokens, tokens / 2, …


# For at most so many pairs of each expert if tokens spread evenly. With few, reading
# weights is all, and more programs read more at once; with many, the tensor cores want
# large tiles.
GROUPINGS: tuple[tuple[float, Grouping], ...] = (
    (8, Grouping(rows=64, tokens=16, warps=4, stages=6)),
    (48, Grouping(rows=128, tokens=64, warps=8, stages=4)),
    (256, Grouping(rows=128, tokens=128, warps=4, stages=3)),
    (math.inf, Grouping(rows=128, tokens=256, warps=8, stages=3, widths=2)),
)


@lru_cache(8192)
def choose_grouping(
    tokens: int, experts: int, top_k: int, scaled: bool = False
) -> Grouping:
    """A good way for so many tokens.

    Weights that are ``scaled`` need registers for sums and for what a step adds: there
    are none for the largest tiles.
    """
    mean = tokens * top_k / experts
    table = GROUPINGS[:2] if scaled else GROUPINGS
    return next((way for most, way in table if mean <= most), table[-1][1])


@cache
def grouped_launcher(
    grouping: Grouping,
    shape: tuple[int, ...],
    itemsize: int,
    tile: tuple[int, int],
    top_k: int,
    gated: bool,
) -> Launcher:
    """For a weight of this shape, [E, N, K], in numbers of ``itemsize`` bytes.

    ``tile`` is `Scaled.tile`, of 0 columns where sums are scaled.
    """
    return launcher(
        grouped_kernel,
        TOP_K=top_k,
        N=shape[1],
        K=shape[2],
        BLOCK_N=grouping.rows,
        BLOCK_T=grouping.tokens,
        DEPTH=128 // itemsize,
        TILE_ROWS=tile[0],
        COLUMNS=tile[1],
        WIDTHS=grouping.widths,
        GATED=gated,
        num_warps=grouping.warps,
        num_stages=grouping.stages,
    )


def multiply_groups(
    out: Tensor,
    x: Tensor,
    weight: Weight | PackedExperts,
    scores: Tensor | None,
    order: ExpertBlocks,
    top_k: int,
    grouping: Grouping,
) -> None:
    """One half of the experts: fill ``out``.

    The first one without ``scores``: x [T, hidden] -> [n, I], in this ``order``, whose
    blocks have grouping.tokens pairs. The other one with ``scores`` [T, k]: x [n, I],
    from the first, launched just before -> [T, k, hidden]. Padding's are not written.
    """
    values, scales, x_scales = weight, None, None
    tile, shape = (1, 0), tuple(weight.shape)
    if isinstance(weight, Scaled):
        values, scales, tile = weight.values, weight.scales, weight.tile
        if weight.inputs:
            x, x_scales = round_rows(x, Rounding.of(weight))
            # Otherwise each step is scaled: what uses its sums waits for the tensor
            # cores, and the next weights go to registers that these still read, see
            # `experts.wait_for_wgmma`.
            tile = tile if tile[1] < shape[2] else (tile[0], 0)
    assert isinstance(values, Tensor)
    gated = scores is None
    start = grouped_launcher(grouping, shape, values.itemsize, tile, top_k, gated)
    start(
        (-(-shape[1] // grouping.rows), len(order.blocks), 1),
        *(x, x_scales, values, scales, scores, *order, out, x.shape[0]),
    )


def experts(
    x: Tensor, mlp: Experts, num_tokens: Tensor, *, batch_invariant: bool = False
) -> Tensor:
    """What each chosen expert adds to each token: x [T, hidden] -> [T, k, hidden].

    Only the first ``num_tokens``, int32 [1], are no padding: no expert is read for the
    others, and nothing written. With ``batch_invariant`` no token's result depends on
    the others.
    """
    count, top_k = len(mlp.router), mlp.top_k
    router = mlp.router, mlp.router_bias, top_k
    held, normalized = mlp.held, mlp.normalized
    ids, scores = route_tokens(x, *router, batch_invariant, normalized, held)
    out = room(mlp, x, *ids.shape, mlp.down.shape[1])
    if are_few(x.shape[0], count, top_k) and not batch_invariant:
        return experts_few(x, mlp, ids, scores, num_tokens, out)
    scaled = isinstance(mlp.gate_up, Scaled)
    grouping = choose_grouping(x.shape[0], count, top_k, scaled)
    order = sort_pairs(ids, len(held), grouping.tokens, num_tokens, len(held) < count)
    hidden = x.new_empty(ids.numel(), mlp.down.shape[2])
    multiply_groups(hidden, x, mlp.gate_up, None, order, top_k, grouping)
    multiply_groups(out, hidden, mlp.down, scores, order, top_k, grouping)
    return out
