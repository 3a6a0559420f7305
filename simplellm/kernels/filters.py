"""How deep top_k and top_p reach into each row of logits, without sorting any.

S rows, V vocabulary. A token's depth is an integer: how many steps its score, the
logit over the temperature, lies below the best one (`simplellm.filters`). A first pass
over the logits adds up, for each of 4,096 ranges of depths, how many tokens are in it,
or how much they weigh. That tells in which range the last kept token is, and a second
pass does the same with the 4,096 depths in there. The sums are integers, so that it
does not matter in which order programs add to them.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.filters import LAST, STEPS, WEIGHT, Filters
from simplellm.kernels.launch import Launcher, follow, launcher

TALLY_BLOCK = 2048  # logits a program looks at
BITS = tl.constexpr(12)  # of a depth's 24, which a pass finds out
BINS = tl.constexpr(1 << 12)
STEPS_A_UNIT = tl.constexpr(STEPS)
FARTHEST = tl.constexpr(LAST / STEPS)
BEST_WEIGHT = tl.constexpr(WEIGHT)
# These may begin anywhere in what a step came with, and are read number by number.
COLUMNS = ["best_ptr", "temperature_ptr", "seeds_ptr", "steps_ptr"]
COLUMNS += ["top_k_ptr", "top_p_ptr", "floors_ptr", "deepest_ptr"]


@triton.jit
def depth_of(score):
    """int32: how many steps the scores lie below 0, the best one's; at most LAST."""
    below = tl.minimum(tl.maximum(0.0 - score, 0.0), FARTHEST)
    return (below * STEPS_A_UNIT).to(tl.int32)


@triton.jit
def weigh(score, LIBRARY: tl.constexpr):
    """int64: e^score in fixed point, whose rounding PyTorch shares."""
    if LIBRARY:  # the exponential that PyTorch uses; tl.exp is less exact
        return (tl.extra.cuda.libdevice.exp(score) * BEST_WEIGHT).to(tl.int64)
    else:
        return (tl.exp(score) * BEST_WEIGHT).to(tl.int64)


@triton.jit
def is_limited(top_k_ptr, top_p_ptr, row, vocabulary, WEIGHTS: tl.constexpr):
    """Whether the row has a limit on its tokens or, with WEIGHTS, on their weight."""
    if WEIGHTS:
        return tl.load(top_p_ptr + row) < 1
    else:
        return tl.load(top_k_ptr + row) < vocabulary


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def tally_kernel(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    floors_ptr,
    deepest_ptr,
    ranges_ptr,
    tallies_ptr,
    vocabulary,
    WEIGHTS: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    LIBRARY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program adds BLOCK logits of a row to its tallies, int64 [S, BINS].

    The tallies of the FIRST pass are those of ranges of depths, by the depths' upper
    bits; those of the second are of the depths in the row's range, by the lower ones.
    Each token counts 1 or, with WEIGHTS, its weight. These are the weights of what is
    left by min_p, which is from the row's floor on, and by top_k, down to its deepest.
    """
    follow(PDL)
    row = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    limited = is_limited(top_k_ptr, top_p_ptr, row, vocabulary, WEIGHTS)
    if limited & (temperature > 0):
        tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        logits = logits_ptr + row.to(tl.int64) * vocabulary
        tallies = tallies_ptr + row * BINS
        score = tl.load(logits + tokens, tokens < vocabulary, -float("inf"))
        score -= tl.load(logits + tl.load(best_ptr + row))
        score = tl.div_rn(score, temperature + tl.zeros([BLOCK], tl.float32))
        depth = depth_of(score)
        counted = tokens < vocabulary
        amount = tl.full([BLOCK], 1, tl.int64)
        if WEIGHTS:
            counted &= depth <= tl.load(deepest_ptr + row)
            counted &= score >= tl.load(floors_ptr + row)
            amount = tl.where(counted, weigh(score, LIBRARY), 0)
        if FIRST:
            place = depth >> BITS
            if WEIGHTS:
                # A vocabulary of such tokens would not weigh half of what top_p drops:
                # they are behind the last kept one, wherever, and are added up at once.
                rest = 1 - tl.load(top_p_ptr + row)
                rare = amount.to(tl.float32) * vocabulary < rest * (BEST_WEIGHT / 2)
                together = tl.sum(tl.where(rare, amount, 0), 0)
                tl.atomic_add(tallies + BINS - 1, together, sem="relaxed")
                counted &= ~rare
        else:
            counted &= (depth >> BITS) == tl.load(ranges_ptr + row)
            place = depth & (BINS - 1)
        tl.atomic_add(tallies + place, amount, counted, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def pick_kernel(
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    deepest_ptr,
    ranges_ptr,
    above_ptr,
    limits_ptr,
    tallies_ptr,
    vocabulary,
    WEIGHTS: tl.constexpr,
    FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: where its tallies, added up, first reach its limit.

    After the FIRST pass, that range, what the ranges above it come to, and the limit;
    after the second, the deepest depth that is kept.
    """
    follow(PDL)
    row = tl.program_id(0)
    limited = is_limited(top_k_ptr, top_p_ptr, row, vocabulary, WEIGHTS)
    if limited & (tl.load(temperature_ptr + row) > 0):
        bins = tl.arange(0, BINS)
        tallies = tl.load(tallies_ptr + row * BINS + bins)
        sums = tl.cumsum(tallies, 0)
        if not FIRST:
            sums += tl.load(above_ptr + row)
            limit = tl.load(limits_ptr + row)
        elif WEIGHTS:
            limit = tl.load(top_p_ptr + row).to(tl.float64)
            limit *= tl.sum(tallies, 0).to(tl.float64)
        else:
            limit = tl.load(top_k_ptr + row).to(tl.float64)
        short = sums.to(tl.float64) < limit
        place = tl.minimum(tl.sum(short.to(tl.int32), 0), BINS - 1)
        if FIRST:
            tl.store(ranges_ptr + row, place)
            tl.store(above_ptr + row, tl.max(tl.where(short, sums, 0), 0))
            tl.store(limits_ptr + row, limit)
        else:
            tl.store(deepest_ptr + row, tl.load(ranges_ptr + row) * BINS + place)


@cache
def filter_launchers(
    weights: bool, first: bool, on_gpu: bool
) -> tuple[Launcher, Launcher]:
    """For the tallies, and for what is picked from them."""
    kind = {"WEIGHTS": weights, "FIRST": first}
    options = {"BLOCK": TALLY_BLOCK, "LIBRARY": on_gpu, "num_warps": 8}
    tally = launcher(tally_kernel, **kind, **options)
    return tally, launcher(pick_kernel, **kind, num_warps=8)


def bounds(
    logits: Tensor, best: Tensor, temperature: Tensor, filters: Filters
) -> tuple[Tensor, Tensor]:
    """The greatest depth, int32 [S], and the least score, float32 [S, 1], to be kept.

    The first is top_k's and top_p's, the second min_p's. ``logits`` are float32 [S, V],
    ``best`` int32 [S] their likeliest tokens, ``temperature`` float32 [S]; a row at 0
    gets any depth. All are contiguous. What is kept is what
    `simplellm.filters.filter_tokens` keeps: weights are the same to the bit where the
    exponential comes from the same library, as it does on a GPU.
    """
    rows, vocabulary = logits.shape
    searches = [False] * filters.some_top_k + [True] * filters.some_top_p
    found = best.new_full([rows], LAST)
    tallies = logits.new_zeros(len(searches), 2, rows, BINS.value, dtype=torch.int64)
    ranges, above = torch.empty_like(best), tallies.new_empty(rows)
    limits = logits.new_empty(rows, dtype=torch.float64)
    floors, blocks = filters.min_p.log(), -(-vocabulary // TALLY_BLOCK)
    columns = temperature, filters.top_k, filters.top_p
    for weights, passes in zip(searches, tallies, strict=True):
        for first, sums in zip((True, False), passes, strict=True):
            tally, pick = filter_launchers(weights, first, logits.is_cuda)
            given = logits, best, *columns, floors, found
            tally((blocks, rows, 1), *given, ranges, sums, vocabulary)
            places = found, ranges, above, limits
            pick((rows, 1, 1), *columns, *places, sums, vocabulary)
    return found, floors
