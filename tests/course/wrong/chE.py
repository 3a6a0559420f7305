"""Wrong answers to appendix E."""

from math import comb

import torch
import triton
import triton.language as tl

from simplellm.checkpoint.mxfp4 import MXFP4
from simplellm.model.sharded_choice import BIN_BITS, LARGEST_TOKEN, reach, tally
from wrong import wrong


@wrong("part_of", "nobody has the rest")
def drops_the_rest(total, rank, size, unit=1):
    part = total // size // unit * unit
    return range(rank * part, (rank + 1) * part)


@wrong("part_of", "inside of a unit")
def forgets_the_unit(total, rank, size, unit=1):
    return range(total * rank // size, total * (rank + 1) // size)


@wrong("part_of", "beyond the axis")
def ends_with_a_whole_unit(total, rank, size, unit=1):
    units = -(-total // unit)
    return range(units * rank // size * unit, units * (rank + 1) // size * unit)


@wrong("part_of", "they differ by more than one")
def gives_the_last_one_all_that_is_left(total, rank, size, unit=1):
    part = total // unit // size * unit
    return range(rank * part, total if rank == size - 1 else (rank + 1) * part)


@wrong("part_of", "return a range(start, stop)")
def gives_a_pair(total, rank, size, unit=1):
    units = -(-total // unit)
    return units * rank // size * unit, min(units * (rank + 1) // size * unit, total)


@wrong("part_of", "yours is of type list")
def gives_a_list(total, rank, size, unit=1):
    units = -(-total // unit)
    start, stop = (units * r // size * unit for r in (rank, rank + 1))
    return [*range(start, min(stop, total))]


@wrong("part_of", "in the part of the one before")
def rounds_up_and_does_not_look(total, rank, size, unit=1):
    part = -(-total // size)
    start = rank * part // unit * unit
    return range(start, min(total, (rank + 1) * part))


def both(weight, axis, part, of_blocks):
    start, size = part.start, len(part)
    if isinstance(weight, torch.Tensor):
        return weight.narrow(axis, start, size)
    if axis == -1:
        start, size = start // 32, size // 32
    blocks = weight.blocks.narrow(of_blocks(axis), start, size)
    return MXFP4(blocks, weight.scales.narrow(axis, start, size))


@wrong("sliced", "counted in blocks of 32")
def counts_inputs_one_by_one(weight, axis, part):
    if isinstance(weight, torch.Tensor):
        return weight.narrow(axis, part.start, len(part))
    blocks = weight.blocks.narrow(axis - 1, part.start, len(part))
    return MXFP4(blocks, weight.scales.narrow(axis, part.start, len(part)))


@wrong("sliced", "MXFP4 [12, 96]")
def gives_blocks_the_axes_of_scales(weight, axis, part):
    return both(weight, axis, part, lambda axis: axis)


@wrong("sliced", "it stays packed")
def unpacks(weight, axis, part):
    if isinstance(weight, MXFP4):
        weight = weight.dequantize(torch.float32)
    return weight.narrow(axis, part.start, len(part))


@wrong("sliced", "yours is a copy")
def copies(weight, axis, part):
    found = both(weight, axis, part, lambda axis: axis - 1)
    if isinstance(found, MXFP4):
        return MXFP4(found.blocks.clone(), found.scales.clone())
    return found.clone()


@wrong("sliced", "expected [")
def always_cuts_the_first_axis(weight, axis, part):
    if isinstance(weight, torch.Tensor):
        return weight[part.start : part.stop]
    return weight


@wrong("sliced", "sliced returns nothing")
def forgets_to_return(weight, axis, part):
    both(weight, axis, part, lambda axis: axis - 1)


# Kernels. Their helpers are those of the page.


@triton.jit
def buffer_of(buffers_ptr, rank, x_ptr):
    return tl.load(buffers_ptr + rank).to(x_ptr.dtype)


@triton.jit
def announce(flags_ptr, rank, call):
    tl.debug_barrier()
    flags = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags + tl.program_id(0), call, sem="release", scope="sys")


@triton.jit
def wait_for(flags_ptr, rank, call):
    flags = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32))
    while tl.atomic_add(flags + tl.program_id(0), 0, sem="acquire", scope="sys") < call:
        pass
    tl.debug_barrier()


@wrong("one_shot_kernel", "wait for")
@triton.jit
def does_not_wait(
    x_ptr, out_ptr, buffers_ptr, flags_ptr, rank, call, N,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < N
    own = buffer_of(buffers_ptr, rank, x_ptr)
    tl.store(own + offsets, tl.load(x_ptr + offsets, inside), inside)
    announce(flags_ptr, rank, call)
    total = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        theirs = buffer_of(buffers_ptr, other, x_ptr)
        total += tl.load(theirs + offsets, inside).to(tl.float32)
    tl.store(out_ptr + offsets, total, inside)


@wrong("one_shot_kernel", "at least this call's")
@triton.jit
def takes_any_raised_flag(
    x_ptr, out_ptr, buffers_ptr, flags_ptr, rank, call, N,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < N
    own = buffer_of(buffers_ptr, rank, x_ptr)
    tl.store(own + offsets, tl.load(x_ptr + offsets, inside), inside)
    announce(flags_ptr, rank, 1)
    total = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        wait_for(flags_ptr, other, 1)
        theirs = buffer_of(buffers_ptr, other, x_ptr)
        total += tl.load(theirs + offsets, inside).to(tl.float32)
    tl.store(out_ptr + offsets, total, inside)


@wrong("one_shot_kernel", "announce once yours are stored")
@triton.jit
def announces_before_it_stores(
    x_ptr, out_ptr, buffers_ptr, flags_ptr, rank, call, N,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < N
    own = buffer_of(buffers_ptr, rank, x_ptr)
    x = tl.load(x_ptr + offsets, inside)
    if rank == 0:
        announce(flags_ptr, rank, call)
    tl.store(own + offsets, x, inside)
    if rank != 0:
        announce(flags_ptr, rank, call)
    total = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        wait_for(flags_ptr, other, call)
        theirs = buffer_of(buffers_ptr, other, x_ptr)
        total += tl.load(theirs + offsets, inside).to(tl.float32)
    tl.store(out_ptr + offsets, total, inside)


@wrong("one_shot_kernel", "in the order of")
@triton.jit
def begins_with_its_own(
    x_ptr, out_ptr, buffers_ptr, flags_ptr, rank, call, N,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < N
    own = buffer_of(buffers_ptr, rank, x_ptr)
    x = tl.load(x_ptr + offsets, inside)
    tl.store(own + offsets, x, inside)
    announce(flags_ptr, rank, call)
    total = x.to(tl.float32)
    for step in tl.static_range(1, RANKS):
        other = (rank + step) % RANKS
        wait_for(flags_ptr, other, call)
        theirs = buffer_of(buffers_ptr, other, x_ptr)
        total += tl.load(theirs + offsets, inside).to(tl.float32)
    tl.store(out_ptr + offsets, total, inside)


@wrong("one_shot_kernel", "added up in float16")
@triton.jit
def adds_short_floats(
    x_ptr, out_ptr, buffers_ptr, flags_ptr, rank, call, N,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < N
    own = buffer_of(buffers_ptr, rank, x_ptr)
    tl.store(own + offsets, tl.load(x_ptr + offsets, inside), inside)
    announce(flags_ptr, rank, call)
    total = tl.zeros([BLOCK], x_ptr.dtype.element_ty)
    for other in tl.static_range(RANKS):
        wait_for(flags_ptr, other, call)
        total += tl.load(buffer_of(buffers_ptr, other, x_ptr) + offsets, inside)
    tl.store(out_ptr + offsets, total, inside)


@wrong("one_shot_kernel", "its mask")
@triton.jit
def stores_without_a_mask(
    x_ptr, out_ptr, buffers_ptr, flags_ptr, rank, call, N,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < N
    own = buffer_of(buffers_ptr, rank, x_ptr)
    tl.store(own + offsets, tl.load(x_ptr + offsets, inside, 0.0))
    announce(flags_ptr, rank, call)
    total = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        wait_for(flags_ptr, other, call)
        theirs = buffer_of(buffers_ptr, other, x_ptr)
        total += tl.load(theirs + offsets, inside).to(tl.float32)
    tl.store(out_ptr + offsets, total, inside)


@wrong("one_shot_kernel", "reads beyond rank 0's buffer and rank 1's buffer")
@triton.jit
def loads_without_a_mask(
    x_ptr, out_ptr, buffers_ptr, flags_ptr, rank, call, N,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < N
    own = buffer_of(buffers_ptr, rank, x_ptr)
    tl.store(own + offsets, tl.load(x_ptr + offsets, inside), inside)
    announce(flags_ptr, rank, call)
    total = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        wait_for(flags_ptr, other, call)
        theirs = buffer_of(buffers_ptr, other, x_ptr)
        total += tl.load(theirs + offsets).to(tl.float32)
    tl.store(out_ptr + offsets, total, inside)


@wrong("one_shot_kernel", "reads beyond x")
@triton.jit
def loads_its_own_without_a_mask(
    x_ptr, out_ptr, buffers_ptr, flags_ptr, rank, call, N,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < N
    own = buffer_of(buffers_ptr, rank, x_ptr)
    tl.store(own + offsets, tl.load(x_ptr + offsets), inside)
    announce(flags_ptr, rank, call)
    total = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        wait_for(flags_ptr, other, call)
        theirs = buffer_of(buffers_ptr, other, x_ptr)
        total += tl.load(theirs + offsets, inside).to(tl.float32)
    tl.store(out_ptr + offsets, total, inside)


@wrong("one_shot_kernel", "still wait for each other")
@triton.jit
def waits_before_it_announces(
    x_ptr, out_ptr, buffers_ptr, flags_ptr, rank, call, N,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for other in tl.static_range(RANKS):
        wait_for(flags_ptr, other, call)
    announce(flags_ptr, rank, call)


# Choices


def keys_of(bits, tokens):
    return (bits << 32) | (LARGEST_TOKEN - tokens)


@wrong("pack_keys", "of negative numbers")
def takes_bits_as_they_are(values, tokens):
    return keys_of((values + 0.0).view(torch.int32).long(), tokens)


@wrong("pack_keys", "0.0 and -0.0 are equal")
def knows_two_zeros(values, tokens):
    bits = values.view(torch.int32).long()
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return keys_of(torch.where(values.isnan(), 0x7FFFFFFF, bits), tokens)


@wrong("pack_keys", "says token")
def lets_the_higher_token_win(values, tokens):
    bits = (values + 0.0).view(torch.int32).long()
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits << 32) | tokens


@wrong("pack_keys", "NaN counts as above all")
def forgets_nan(values, tokens):
    values = torch.nan_to_num(values, nan=0.5, posinf=torch.inf, neginf=-torch.inf)
    bits = (values + 0.0).view(torch.int32).long()
    return keys_of(torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits), tokens)


@wrong("pack_keys", "also one with its sign set")
def trusts_the_bits_of_nan(values, tokens):
    bits = (values + 0.0).view(torch.int32).long()
    return keys_of(torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits), tokens)


@wrong("pack_keys", "also one with its sign set")
def looks_for_nan_above_infinity(values, tokens):
    bits = (values + 0.0).view(torch.int32).long()
    nan = bits > 0x7F800000
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return keys_of(torch.where(nan, 0x7FFFFFFF, bits), tokens)


@wrong("pack_keys", "keys are int64")
def gives_floats(values, tokens):
    return values.double() * 2**31 - tokens


@wrong("pack_keys", "keys are int64")
def shifts_in_32_bits(values, tokens):
    return ((values + 0.0).view(torch.int32) << 16) | (LARGEST_TOKEN - tokens).int()


@wrong("pack_keys", "the larger number has the smaller key")
def rounds_the_number(values, tokens):
    near = values.nan_to_num(nan=2**31 - 1).clamp(-(2**31), 2**31 - 1)
    return keys_of(torch.where(values.isnan(), 2**31 - 1, near.long()), tokens)


def in_bins(depths, weights, needed, add_up):
    bins = (depths >> BIN_BITS).long()
    sums = tally(bins, weights, add_up)
    enough = needed(sums[:, -1:].double())
    return bins, sums, enough, (sums.double() >= enough).int().argmax(1, keepdim=True)


def lower(depths):
    return (depths & (2**BIN_BITS - 1)).long()


@wrong("reach", "begin with what is before it")
def forgets_what_is_before(depths, weights, needed, add_up):
    bins, _, enough, chosen = in_bins(depths, weights, needed, add_up)
    sums = tally(lower(depths), weights * (bins == chosen), add_up)
    last = (sums.double() >= enough).int().argmax(1, keepdim=True)
    return (chosen << BIN_BITS) | last


@wrong("reach", "count only the tokens in the bin")
def counts_all_bins_again(depths, weights, needed, add_up):
    _, sums, enough, chosen = in_bins(depths, weights, needed, add_up)
    before = sums.gather(1, (chosen - 1).clamp(min=0)) * (chosen > 0)
    sums = before + tally(lower(depths), weights, add_up)
    last = (sums.double() >= enough).int().argmax(1, keepdim=True)
    return (chosen << BIN_BITS) | last


@wrong("reach", "exchanges nothing")
def looks_at_its_own(depths, weights, needed, add_up):
    ordered, order = depths.long().sort(1)
    sums = weights.gather(1, order).cumsum(1).double()
    enough = sums >= needed(sums[:, -1:])
    return ordered.gather(1, enough.int().argmax(1, keepdim=True))


@wrong("reach", "expected")
def wants_more_than_enough(depths, weights, needed, add_up):
    bins, sums, enough, _ = in_bins(depths, weights, needed, add_up)
    chosen = (sums.double() > enough).int().argmax(1, keepdim=True)
    before = sums.gather(1, (chosen - 1).clamp(min=0)) * (chosen > 0)
    sums = before + tally(lower(depths), weights * (bins == chosen), add_up)
    last = (sums.double() > enough).int().argmax(1, keepdim=True)
    return (chosen << BIN_BITS) | last


@wrong("reach", "expected")
def stops_at_the_bin(depths, weights, needed, add_up):
    return in_bins(depths, weights, needed, add_up)[-1] << BIN_BITS


@wrong("reach", "round neither")
def cuts_off_what_is_needed(depths, weights, needed, add_up):
    return reach(depths, weights, lambda total: needed(total).floor(), add_up)


@wrong("reach", "round neither")
def rounds_what_is_needed(depths, weights, needed, add_up):
    return reach(depths, weights, lambda total: needed(total).round(), add_up)


@wrong("reach", "round neither")
def compares_in_float32(depths, weights, needed, add_up):
    bins, sums, enough, _ = in_bins(depths, weights, needed, add_up)
    chosen = (sums.float() >= enough.float()).int().argmax(1, keepdim=True)
    before = sums.gather(1, (chosen - 1).clamp(min=0)) * (chosen > 0)
    sums = before + tally(lower(depths), weights * (bins == chosen), add_up)
    last = (sums.float() >= enough.float()).int().argmax(1, keepdim=True)
    return (chosen << BIN_BITS) | last


@wrong("reach", "numbers a row")
def makes_one_large_histogram(depths, weights, needed, add_up):
    own = weights.new_zeros(len(depths), 2**24)
    sums = add_up(own.scatter_add_(1, depths.long(), weights)).cumsum(1)
    enough = sums.double() >= needed(sums[:, -1:].double())
    return enough.int().argmax(1, keepdim=True)


@wrong("reach", "reach returns nothing")
def finds_it_and_keeps_it(depths, weights, needed, add_up):
    in_bins(depths, weights, needed, add_up)


# Exercises


@wrong("E.1", "not of the busiest")
def gives_a_fair_share(experts, chosen, ranks):
    return chosen / ranks


@wrong("E.1", "choices are of different experts")
def lets_an_expert_be_chosen_twice(experts, chosen, ranks):
    from itertools import product

    every = list(product(range(ranks), repeat=chosen))
    return sum(max(map(choice.count, range(ranks))) for choice in every) / len(every)


@wrong("E.1", "expected")
def takes_the_chance_of_all_on_one(experts, chosen, ranks):
    return chosen * ranks * comb(experts // ranks, chosen) / comb(experts, chosen)


@wrong("E.2", "the larger replica has two")
def gives_a_replica_half_a_request(one, two, requests, limit):
    steps = {"replicas": one(requests / 2), "shards": two(requests)}
    fit = {name: step for name, step in steps.items() if step <= limit} or steps
    return min(fit, key=fit.get)


@wrong("E.2", "only theirs is short enough")
def prefers_shards_in_a_hurry(one, two, requests, limit):
    steps = {"replicas": one(-(-requests // 2)), "shards": two(requests)}
    return "shards" if limit < 12 else min(steps, key=steps.get)


@wrong("E.2", "the larger replica has two")
def wants_twice_the_speed(one, two, requests, limit):
    return "shards" if two(requests) < one(requests) / 2 else "replicas"
