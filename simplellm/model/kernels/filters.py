"""How deep top_k and top_p reach into each row of logits, without sorting any.

S rows, V vocabulary. A token's depth is an integer: how many steps its score, the logit
over the temperature, lies below the best one (`sampling/filters.py`). Three passes over
the logits find the depth of the last kept token. The first counts how many tokens are
in each of 256 ranges of depths, which a program does by itself before it adds to what
the others found. For top_p the counts only bound what the tokens weigh, but so closely
that few ranges are left. The second divides those into 4,096 bins and adds up what is
in each, token by token; the third does the same with the depths of one bin, which most
programs have no token of. The sums are integers, so that it does not matter in which
order programs add to them.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels.launch import Launcher, launcher, pdl_wait
from simplellm.sampling.filters import LAST, STEPS, WEIGHT, Filters

TALLY_BLOCK = 4096  # logits a program looks at
RANGES = tl.constexpr(256)
RANGE_BITS = tl.constexpr(16)  # of a depth's 24, which are the index in a range
RANGE_WIDTH = tl.constexpr(2**16 / STEPS)  # as a difference of scores
BINS = tl.constexpr(4096)
LEAST_SHIFT = tl.constexpr(4)  # BINS that are 2^4 depths wide make up a range
# A row's tallies are those of its bins and two more:
ABOVE = tl.constexpr(BINS.value)  # what is less deep than the bins
TOTAL = tl.constexpr(BINS.value + 1)  # what is anywhere
STEPS_A_UNIT = tl.constexpr(STEPS)
FARTHEST = tl.constexpr(LAST / STEPS)
BEST_WEIGHT = tl.constexpr(WEIGHT)
# These may begin anywhere in what a step came with, and are read number by number.
COLUMNS = ["best_ptr", "temperature_ptr", "seeds_ptr", "steps_ptr"]
COLUMNS += ["top_k_ptr", "top_p_ptr", "floors_ptr", "deepest_ptr", "peaks_ptr"]


class LogitsShard(NamedTuple):
    """The tokens that one rank of several has logits of."""

    first: int
    vocabulary: int  # tokens of all ranks
    peaks: Tensor  # float32 [S], the greatest logits of all
    add_up: Callable[[Tensor], Tensor]  # all ranks' sum
    leads: bool  # of the ranks one does


@triton.jit
def peak_of(logits_ptr, best_ptr, peaks_ptr, row):
    """The greatest logit of a row, whose logits begin at logits; or of all ranks'."""
    if peaks_ptr is None:
        return tl.load(logits_ptr + tl.load(best_ptr + row))
    else:
        return tl.load(peaks_ptr + row)


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
    peaks_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    floors_ptr,
    deepest_ptr,
    starts_ptr,
    shifts_ptr,
    tallies_ptr,
    width,
    vocabulary,
    WEIGHTS: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    LIBRARY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program adds BLOCK of a row's ``width`` logits to its tallies.

    They are int64 [S, TOTAL + 1].

    The FIRST pass counts tokens by ranges. In the others each token adds 1 to its bin
    or, with WEIGHTS, its weight. With WEIGHTS these are only the tokens that are left
    by min_p, from the row's floor on, and by top_k, down to its deepest. The third,
    whose bins are single depths, finds what is outside of them in the tallies.
    """
    pdl_wait(PDL)
    row = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    limited = is_limited(top_k_ptr, top_p_ptr, row, vocabulary, WEIGHTS)
    if limited & (temperature > 0):
        tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        logits = logits_ptr + row.to(tl.int64) * width
        tallies = tallies_ptr + row * (TOTAL + 1)
        score = tl.load(logits + tokens, tokens < width, -float("inf"))
        score -= peak_of(logits, best_ptr, peaks_ptr, row)
        score = tl.div_rn(score, temperature + tl.zeros([BLOCK], tl.float32))
        depth = depth_of(score)
        counted = tokens < width
        if WEIGHTS:
            counted &= depth <= tl.load(deepest_ptr + row)
            counted &= score >= tl.load(floors_ptr + row)
        if FIRST:
            counts = tl.histogram(depth >> RANGE_BITS, RANGES, counted).to(tl.int64)
            ranges = tl.arange(0, RANGES)
            tl.atomic_add(tallies + ranges, counts, counts > 0, sem="relaxed")
        else:
            shift = tl.load(shifts_ptr + row)
            bin_index = (depth - tl.load(starts_ptr + row)) >> shift
            inside = counted & (bin_index >= 0) & (bin_index < BINS)
            if (shift > 0) | (tl.max(inside.to(tl.int32), 0) > 0):
                amount = counted.to(tl.int64)
                if WEIGHTS:
                    amount = tl.where(counted, weigh(score, LIBRARY), 0)
                if shift > 0:
                    if WEIGHTS:
                        tl.atomic_add(tallies + TOTAL, tl.sum(amount, 0), sem="relaxed")
                    above = tl.sum(tl.where(bin_index < 0, amount, 0), 0)
                    tl.atomic_add(tallies + ABOVE, above, sem="relaxed")
                tl.atomic_add(tallies + bin_index, amount, inside, sem="relaxed")


@triton.jit
def bracket(counts, top_p):
    """The first and the last range that the last kept token of top_p may be in.

    ``counts`` are those of the ranges. A token weighs at least what one at the far end
    of its range does, and at most what one at the near end does.
    """
    ranges = tl.arange(0, RANGES).to(tl.float32)
    # A thousandth is more than all the rounding here, but for that to a whole weight.
    near = tl.exp(-ranges * RANGE_WIDTH) * 1.001
    far = tl.exp(-(ranges + 1) * RANGE_WIDTH) * 0.999 - 1 / BEST_WEIGHT
    most = counts.to(tl.float64) * near
    least = counts.to(tl.float64) * tl.maximum(far, 0.0)
    most_kept, least_kept = tl.cumsum(most, 0), tl.cumsum(least, 0)
    most_dropped = tl.sum(most, 0) - most_kept
    least_dropped = tl.sum(least, 0) - least_kept
    # Enough is kept if kept >= top_p * (kept + dropped).
    rest = 1 - top_p
    too_few = most_kept * rest < least_dropped * top_p
    maybe_too_few = least_kept * rest < most_dropped * top_p
    return tl.sum(too_few.to(tl.int32), 0), tl.sum(maybe_too_few.to(tl.int32), 0)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def pick_kernel(
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    deepest_ptr,
    starts_ptr,
    shifts_ptr,
    tallies_ptr,
    vocabulary,
    leads,
    WEIGHTS: tl.constexpr,
    FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: where the bins of the next pass start, and how wide they are.

    Starts are depths, and shifts the bits of a bin's width. After the FIRST pass the
    bins are those of the ranges that may have the last kept token. After the second
    they are the depths of the bin with it, and the next tallies get what is outside of
    these, if this rank ``leads`` and not another: they are added up. After the third
    they start at its depth. A row without a limit keeps its deepest.
    """
    pdl_wait(PDL)
    row = tl.program_id(0)
    limited = is_limited(top_k_ptr, top_p_ptr, row, vocabulary, WEIGHTS)
    start = tl.load((deepest_ptr if FIRST else starts_ptr) + row)
    shift = 0
    if limited & (tl.load(temperature_ptr + row) > 0):
        tallies = tallies_ptr + row * (TOTAL + 1)
        if FIRST:
            counts = tl.load(tallies + tl.arange(0, RANGES))
            if WEIGHTS:
                first, last = bracket(counts, tl.load(top_p_ptr + row).to(tl.float64))
            else:
                short = tl.cumsum(counts, 0) < tl.load(top_k_ptr + row)
                first = tl.sum(short.to(tl.int32), 0)
                last = first
            start = first << RANGE_BITS
            # So many bits more number the ranges from the first to the last.
            more = last - first >= (1 << tl.arange(0, 8))
            shift = tl.sum(more.to(tl.int32), 0) + LEAST_SHIFT
        else:
            bins, above = (
                tl.load(tallies + tl.arange(0, BINS)),
                tl.load(tallies + ABOVE),
            )
            total = tl.load(tallies + TOTAL)
            if WEIGHTS:
                limit = tl.load(top_p_ptr + row).to(tl.float64) * total.to(tl.float64)
            else:
                limit = tl.load(top_k_ptr + row).to(tl.float64)
            short = (tl.cumsum(bins, 0) + above).to(tl.float64) < limit
            bin_index = tl.minimum(tl.sum(short.to(tl.int32), 0), BINS - 1)
            width = tl.load(shifts_ptr + row)
            start += bin_index << width
            if (width > 0) & (leads > 0):
                above += tl.sum(tl.where(tl.arange(0, BINS) < bin_index, bins, 0), 0)
                following = tallies + tl.num_programs(0) * (TOTAL + 1)
                tl.store(following + ABOVE, above)
                tl.store(following + TOTAL, total)
    tl.store(starts_ptr + row, start)
    tl.store(shifts_ptr + row, shift)


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
    logits: Tensor,
    best: Tensor,
    temperature: Tensor,
    filters: Filters,
    shard: LogitsShard | None = None,
) -> tuple[Tensor, Tensor]:
    """The greatest depth, int32 [S], and the least score, float32 [S, 1], to be kept.

    The first is top_k's and top_p's, the second min_p's. ``logits`` are float32 [S, V],
    ``best`` int32 [S] their likeliest tokens, ``temperature`` float32 [S]; a row at 0
    gets any depth. All are contiguous. What is kept is what `filter_tokens` of
    `sampling/filters.py` keeps: weights are the same to the bit where the exponential
    comes from the same library, as it does on a GPU. With a ``shard`` they are float32
    [S, W], and all ranks' count.
    """
    rows, width = logits.shape
    vocabulary = width if shard is None else shard.vocabulary
    peaks, leads = (None, 1) if shard is None else (shard.peaks, int(shard.leads))
    searches = [False] * filters.some_top_k + [True] * filters.some_top_p
    deepest, shifts = best.new_full([rows], LAST), torch.empty_like(best)
    shape = len(searches), 3, rows, TOTAL.value + 1
    tallies = logits.new_zeros(shape, dtype=torch.int64)
    floors, grid = filters.min_p.log(), (-(-width // TALLY_BLOCK), rows, 1)
    columns = temperature, filters.top_k, filters.top_p
    for weights, passes in zip(searches, tallies, strict=True):
        bins = torch.empty_like(best), shifts
        for number, sums in enumerate(passes):
            tally, pick = filter_launchers(weights, number == 0, logits.is_cuda)
            inputs = logits, best, peaks, *columns, floors, deepest
            tally(grid, *inputs, *bins, sums, width, vocabulary)
            if shard is not None:
                sums.copy_(shard.add_up(sums))
            pick((rows, 1, 1), *columns, deepest, *bins, sums, vocabulary, leads)
        deepest = bins[0]
    return deepest, floors
