"""Appendix E: several GPUs. Ranks are processes here, or threads that meet."""

import math
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from math import comb
from typing import Any

import torch
import triton

from course.checks.compiled import assert_compiles
from course.checks.loads import assert_inside, beyond
from course.ranks import forked, shared
from simplellm.checkpoint.mxfp4 import MXFP4, quantize
from simplellm.model.sharded_choice import LARGEST_TOKEN

BLOCK = 32
LATE = 0.1  # seconds that a rank is behind one that has raised its first flag
PATIENCE = 1.0  # until it no longer believes that the other raises one
WAIT = 30.0  # until ranks that wait for each other are ended


# Weights


def check_part_of(part_of):
    """Parts cover the axis once, in order, and are cut between units."""
    cases = [
        (2880, 2, 32, "90 blocks, 45 for each of two ranks"),
        (2880, 4, 32, "90 blocks in four: 22 or 23 each, never half a block"),
        (201088, 2, 32, "a vocabulary in words of 32 tokens"),
        (333, 2, 32, "the last unit is shorter: 333 is 10 units and 13"),
        (96, 3, 32, "a unit for each of three ranks"),
        (8, 8, 1, "a head for each of eight ranks"),
        (10, 4, 1, "10 in four: 2 or 3 each"),
        (7, 1, 4, "one rank has all"),
    ]
    for total, size, unit, why in cases:
        parts = []
        told = f"{total} in {size} parts, units of {unit} ({why})"
        for rank in range(size):
            part = part_of(total, rank, size, unit)
            assert part is not None, "part_of returns nothing: is there a return?"
            kind = type(part).__name__
            assert isinstance(part, range) and part.step == 1, (
                "return a range(start, stop); yours "
                + (f"is {part}" if isinstance(part, range) else f"is of type {kind}")
            )
            parts.append(part)
        assert parts[0].start == 0, f"{told}: rank 0 begins at {parts[0].start}, not 0"
        for rank, (before, after) in enumerate(pairwise(parts), 1):
            assert after.start >= before.stop, (
                f"{told}: rank {rank} begins at {after.start}, in the part of the one "
                f"before, which ends at {before.stop}"
            )
            assert after.start == before.stop, (
                f"{told}: nobody has {before.stop} to {after.start}"
            )
            assert after.start % unit == 0, (
                f"{told}: rank {rank} begins at {after.start}, inside of a unit"
            )
        assert parts[-1].stop <= total, (
            f"{told}: the last part ends at {parts[-1].stop}, beyond the axis"
        )
        assert parts[-1].stop == total, (
            f"{told}: the last part ends at {parts[-1].stop}; nobody has the rest"
        )
        counts = [math.ceil(len(part) / unit) for part in parts]
        assert max(counts) - min(counts) <= 1, (
            f"{told}: units of the ranks are {counts}; they differ by more than "
            "one, and all ranks wait for the largest part"
        )
    assert part_of(10, 0, 2) == range(5), "without a unit, parts are cut anywhere"


def check_sliced(sliced):
    """Ordinary and packed weights, on either axis, with experts and without."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((5,), (12, 96), (3, 12, 96)):
        weight = torch.randn(shape, generator=generator)
        for axis in (-1, -2)[: len(shape)]:
            part = range(1, 4) if axis == -2 or len(shape) == 1 else range(32, 96)
            found, told = sliced(weight, axis, part), f"{list(shape)}, axis {axis}"
            assert found is not None, "sliced returns nothing: is there a return?"
            assert isinstance(found, torch.Tensor), f"{told}: a Tensor stays a Tensor"
            index = torch.tensor(part)
            expected = weight.index_select(axis, index)
            assert found.shape == expected.shape, (
                f"{told}: expected {list(expected.shape)}, got {list(found.shape)}"
            )
            assert torch.equal(found, expected), f"{told}: these are other numbers"
            assert found.data_ptr() != 0 and same_memory(found, weight), (
                f"{told}: yours is a copy; a view costs nothing"
            )
    for shape in ((12, 96), (3, 12, 96)):
        numbers = torch.randn(shape, generator=generator)
        stored = quantize(numbers * torch.logspace(-3, 3, 12)[:, None])
        for axis, part in ((-1, range(32, 96)), (-1, range(32)), (-2, range(3, 10))):
            try:
                packed = sliced(stored, axis, part)
            except (RuntimeError, IndexError, ValueError) as error:
                blocks = "inputs of MXFP4 are counted in blocks of 32: "
                told = f"MXFP4 {list(shape)}, axis {axis}, {part}: "
                raise AssertionError(told + blocks + str(error)) from None
            told = f"MXFP4 {list(shape)}, axis {axis}, {part}"
            assert isinstance(packed, MXFP4), f"{told}: it stays packed, an MXFP4"
            expected = stored.dequantize(torch.float32)
            expected = expected.index_select(axis, torch.tensor(part))
            assert packed.shape == tuple(expected.shape), (
                f"{told}: expected a weight {list(expected.shape)}, got "
                f"{list(packed.shape)}; inputs are counted in blocks of 32"
            )
            assert torch.equal(packed.dequantize(torch.float32), expected), (
                f"{told}: these are other numbers; blocks and scales have to be cut on "
                "the same rows and columns"
            )
            both = same_memory(packed.blocks, stored.blocks)
            assert both and same_memory(packed.scales, stored.scales), (
                f"{told}: yours is a copy; a view costs nothing"
            )


def same_memory(view, whole):
    return view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


# The kernel


def summed(kernel, numbers, late, calls=1, slow=None, block=128):
    """What the ranks have after each call: [R, calls, N], and if the margins stayed.

    numbers: [R, calls, N]; late: by call, the rank that begins once the others wait;
    slow: a rank whose first store takes that long.
    """
    size, _, length = numbers.shape
    programs = -(-length // block)
    room = programs * block + 64
    buffers = shared(size, 2, room, dtype=numbers.dtype)
    flags = shared(size, programs, dtype=torch.int32)
    buffers.fill_(math.nan)

    def wait(rank, call):
        """Until another rank has raised its first flag in this call, and a while."""
        end = time.monotonic() + PATIENCE
        while int(flags[rank - 1, 0]) < call and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(LATE)

    def work(rank):
        if rank == slow:
            before_first_store(lambda: wait(rank, 1))
        outs = []
        for call in range(1, calls + 1):
            here = [buffers[r, call % 2] for r in range(size)]
            pointers = [torch.tensor([t.data_ptr() for t in x]) for x in (here, flags)]
            if late.get(call) == rank:
                wait(rank, call)
            x = torch.full((room,), math.nan, dtype=numbers.dtype)
            x[:length] = numbers[rank, call - 1]
            out = torch.full_like(x, math.nan)
            guards = {"x": (x, x[:length])}
            for r, buffer in enumerate(here):
                guards[f"rank {r}'s buffer"] = buffer, buffer[:length]
            with beyond(**guards) as outside:
                kernel[(programs,)](
                    x, out, *pointers, rank, call, length, RANKS=size, BLOCK=block
                )
            assert out[length:].isnan().all(), (
                "a store goes beyond N in out: the last program's tile needs its mask"
            )
            told = f"N = {length} in programs of {block} numbers: "
            assert_inside(told, outside)
            outs.append(out[:length])
        return torch.stack(outs)

    try:
        outs = forked(size, work, WAIT)
    except TimeoutError:
        raise AssertionError(
            "the ranks still wait for each other after "
            f"{WAIT:.0f} s: each has to announce its numbers before it waits, and a "
            "flag holds the number of the call"
        ) from None
    assert buffers[..., length:].isnan().all(), (
        "a store goes beyond N in a buffer: the last program's tile needs its mask"
    )
    return torch.stack(outs)


def before_first_store(wait):
    """Let this process's kernels ``wait`` before they store anything."""
    from triton.runtime.interpreter import interpreter_builder

    store = interpreter_builder.create_masked_store

    def slowly(*arguments):
        interpreter_builder.create_masked_store = store
        wait()
        return store(*arguments)

    interpreter_builder.create_masked_store = slowly


def check_one_shot_kernel(kernel):
    """Ranks that are late or slow, sums that depend on their order, short floats."""
    assert hasattr(kernel, "__getitem__"), (
        "this is no kernel, which would be started by kernel[grid](...): decorate it "
        "with @triton.jit"
    )
    assert not isinstance(kernel, triton.JITFunction), (
        "ranks are processes here: set TRITON_INTERPRET before Triton is imported"
    )
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(2, 3, 300, generator=generator)
    outs = summed(kernel, numbers, {1: 1, 2: 0, 3: 1}, calls=3)
    expected = numbers.sum(0)
    for call in range(3):
        for rank in (0, 1):
            found, told = outs[rank, call], f"rank {rank}, call {call + 1}: "
            right = torch.allclose(found, expected[call], atol=1e-5)
            assert right or not call, (
                told
                + "the first call was right, and these aren't this call's numbers. "
                "Flags of earlier calls are still raised: wait until one is at least "
                "this call's, and announce once yours are stored"
            )
            assert not found.isnan().all(), (
                told + "nothing was stored in out, or numbers were read that nobody "
                "had put there: wait for a rank's flag before you load from it, "
                "and announce once yours are stored"
            )
            assert not torch.equal(found, numbers[rank, call]), (
                told + "out has this rank's numbers alone"
            )
            assert right, (
                told + "a late rank's numbers are missing: wait for its flag before "
                "you load, and announce once yours are stored"
            )
    outs = summed(kernel, numbers[:, :1], {}, slow=0)
    assert torch.allclose(outs[1, 0], expected[0], atol=1e-5), (
        "rank 1 has read rank 0's buffer too early: announce once yours are stored"
    )
    # The order matters: 1e8 - 1e8 + 1 isn't 1e8 + 1 - 1e8 in float32.
    numbers = torch.randn(3, 1, 200, generator=generator)
    numbers[:2] *= 1e8
    outs = summed(kernel, numbers, {})
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2]), (
        "the ranks' sums differ in their last bits: all have to add in the order of "
        "the ranks, and not begin with their own numbers"
    )
    expected = numbers[0] + numbers[1] + numbers[2]
    assert torch.equal(outs[0], expected), (
        "the sum isn't (rank 0 + rank 1) + rank 2 in float32: add in the ranks' order"
    )
    short = torch.randn(3, 1, 200, generator=generator).half() * 30
    outs = summed(kernel, short, {})
    expected = (short[0].float() + short[1].float() + short[2].float()).half()
    assert torch.equal(outs[0], expected), (
        "float16 numbers were added up in float16: convert what you load, add in "
        "float32, and round once"
    )
    assert_compiles(kernel, "*bf16 *bf16 *i64 *i64 i32 i32 i32", RANKS=2, BLOCK=1024)


# Choices


def check_pack_keys(pack_keys):
    """Every pair of numbers that are near, far, equal, or none."""
    tiny, inf = 1e-45, math.inf
    values = [0.0, -0.0, 1.0, 1.0000001, -1.0, -1.0000001, 3e38, -3e38, tiny, -tiny]
    values += [inf, -inf, 17.5, -17.5, 1.0, -1.0, math.nan, math.nan, math.nan]
    numbers = torch.tensor(values)
    numbers.view(torch.int32)[-1] = -0x400000  # as inf - inf is on x86
    order = random.Random(1).sample(range(len(values)), len(values))
    tokens = torch.tensor(order) * 11000 + 5
    given = numbers.clone(), tokens.clone()
    keys = pack_keys(numbers, tokens)
    assert keys is not None, "pack_keys returns nothing: is there a return?"
    assert isinstance(keys, torch.Tensor) and keys.dtype == torch.int64, (
        "keys are int64, and yours are "
        f"{getattr(keys, 'dtype', type(keys).__name__)}: 32 bits have no room for both"
    )
    assert keys.shape == tokens.shape, f"expected {len(tokens)} keys, a number each"
    same = torch.equal(tokens, given[1]) and torch.equal(
        numbers.view(torch.int32), given[0].view(torch.int32)
    )
    assert same, "yours changed its arguments"
    found = LARGEST_TOKEN - (keys & LARGEST_TOKEN)
    assert torch.equal(found, tokens), (
        f"the lower half of the key of token {tokens[0]} says token {found[0]}: it is "
        "LARGEST_TOKEN - token, and nothing else may touch those bits"
    )
    for i, j in product(range(len(values) - 1), repeat=2):
        a, b = values[i], values[j]
        above = keys[i] > keys[j]
        told = f"{a} of token {tokens[i]} and {b} of token {tokens[j]}: "
        if a == b or (math.isnan(a) and math.isnan(b)):
            lower = tokens[i] < tokens[j]
            if a == b == 0.0 and math.copysign(1, a) != math.copysign(1, b):
                assert above == lower, told + "0.0 and -0.0 are equal"
            assert above == lower, told + "of equal numbers the lower token has to win"
        elif math.isnan(a) or math.isnan(b):
            assert above == math.isnan(a), told + "NaN counts as above all numbers"
        elif a < 0 and b < 0:
            assert above == (a > b), (
                told + "of negative numbers, the bits rise where the number falls: "
                "invert all but the sign"
            )
        else:
            assert above == (a > b), told + "the larger number has the smaller key"
    assert keys[-1] > keys[:-3].max(), (
        "NaN counts as above all numbers, also one with its sign set, as inf - inf "
        "has on x86: its bits say that it's below all. Look for it with isnan()"
    )
    wide = pack_keys(torch.zeros(2, 3), torch.arange(6).view(2, 3))
    assert wide.shape == (2, 3), "rows of values give rows of keys"


class Meeting:
    """An all-reduce by SUM of threads, which counts its calls."""

    def __init__(self, size):
        self.size, self.calls, self.largest = size, 0, 0
        self.barrier = threading.Barrier(size, timeout=5)
        self.given: list[Any] = [None] * size

    def of(self, rank):
        def add_up(x):
            self.given[rank] = x
            self.largest = max(self.largest, x[0].numel())
            self.barrier.wait()
            total = sum(self.given)
            self.barrier.wait()
            self.calls += rank == 0
            return total

        return add_up


def reached(reach, depths, weights, needed, size):
    """What each of ``size`` ranks says, and their meeting."""
    meeting = Meeting(size)
    parts = depths.chunk(size, 1), weights.chunk(size, 1)

    def rank(number):
        try:
            own = [part[number].contiguous() for part in parts]
            return reach(own[0], own[1], needed, meeting.of(number))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return [*threads.map(rank, range(size))], meeting


def least_depth(depths, weights, needed):
    """By sorting everything."""
    ordered, order = depths.long().sort(1)
    sums = weights.gather(1, order).cumsum(1).double()
    enough = sums >= needed(sums[:, -1:])
    return ordered.gather(1, enough.int().argmax(1, keepdim=True))


def check_reach(reach):
    """Counts and shares, in one bin and in many, on one rank, two and three."""
    generator = torch.Generator().manual_seed(0)
    deep = torch.randint(2**24, (4, 60), generator=generator, dtype=torch.int32)
    near = torch.randint(300, (4, 60), generator=generator, dtype=torch.int32)
    coarse = (deep >> 16) << 12  # whole bins
    ones = torch.ones(4, 60, dtype=torch.int64)
    weigh = torch.randint(1, 2**40, (4, 60), generator=generator)
    some = weigh * (torch.rand(4, 60, generator=generator) < 0.3)
    ks = torch.tensor([[1], [2], [30], [60]]).double()
    shares = torch.tensor([[0.01], [0.5], [0.9], [1.0]]).double()
    few = torch.tensor([[0, 5, 9]] * 4, dtype=torch.int32)
    heavy = torch.tensor([[1, 1, 1]] * 3 + [[2**40, 1000, 1000]])
    parts = torch.tensor([[0.5], [0.4], [0.9], [1.0]]).double()
    exactly = "compare sums and what is needed in float64, and round neither"
    cases = [
        (near, ones, lambda total: ks, "all are in the first bin"),
        (deep, ones, lambda total: ks, "top-k over many bins"),
        (coarse, ones, lambda total: ks, "depths at the beginning of a bin"),
        (deep, weigh, lambda total: shares * total, "top-p of all that weighs"),
        (near, some, lambda total: shares * total, "some tokens weigh nothing"),
        (deep * 0 + 2**24 - 1, ones, lambda total: ks, "all are as deep as can be"),
        (few, heavy, lambda total: parts * total, f"three in a bin ({exactly})"),
        (few << 12, heavy, lambda total: parts * total, f"three bins ({exactly})"),
    ]
    for size in (1, 2, 3):
        for depths, weights, needed, why in cases:
            kept = depths.clone(), weights.clone()
            found, meeting = reached(reach, depths, weights, needed, size)
            told = f"{size} ranks, {why}: "
            expected = least_depth(depths, weights, needed)
            assert found[0] is not None, "reach returns nothing: is there a return?"
            assert torch.equal(depths, kept[0]) and torch.equal(weights, kept[1]), (
                told + "yours changed its arguments"
            )
            for depth in found:
                assert isinstance(depth, torch.Tensor), "return a Tensor, int64 [S, 1]"
                assert depth.shape == (4, 1) and depth.dtype == torch.int64, (
                    f"expected int64 [4, 1], got {depth.dtype} {list(depth.shape)}"
                )
            assert meeting.calls, (
                told + "yours exchanges nothing, so a rank knows only its own tokens"
            )
            assert meeting.largest <= 2**13, (
                told + f"yours exchanges {meeting.largest} numbers a row; two tallies "
                "of 4,096 are enough"
            )
            upper = all(torch.equal(d >> 12, expected >> 12) for d in found)
            answers = [depth[:, 0].tolist() for depth in found]
            wrong = f"expected {expected[:, 0].tolist()}, got {answers[0]}"
            assert upper, told + wrong + ": the first round finds another bin"
            assert all(torch.equal(depth, expected) for depth in found), (
                told + wrong + ": the bins are right, and the places in them aren't: "
                "count only the tokens in the bin, and begin with what is before it"
            )


# Exercises


def check_E_1(busiest):
    """By going through all choices of a few experts."""
    from itertools import combinations

    for experts, chosen, ranks in ((4, 2, 2), (8, 3, 4), (12, 4, 3), (6, 1, 2)):
        own = experts // ranks
        most = [
            max(sum(e // own == rank for e in choice) for rank in range(ranks))
            for choice in combinations(range(experts), chosen)
        ]
        expected = sum(most) / comb(experts, chosen)
        found = busiest(experts, chosen, ranks)
        assert found is not None, "busiest returns nothing"
        told = f"{experts} experts, {chosen} chosen, {ranks} ranks: "
        assert abs(found - chosen / ranks) > 1e-9 or chosen / ranks == expected, (
            told + f"{found:.3f} is the mean of any rank, not of the busiest"
        )
        assert abs(found - expected) < 1e-6, (
            told + f"expected {expected:.4f}, got {found:.4f}; choices are of "
            "different experts, each choice as likely, with no random numbers"
        )


def check_E_2(plan):
    """Steps of which the better one is known."""
    flat, steep = (lambda n: 10.0), (lambda n: 4.0 * n)
    cases = [
        (steep, lambda n: 2.5 * n, 3, 99, "shards", "the larger replica has two"),
        (flat, lambda n: 6.0, 8, 99, "shards", "their step is shorter"),
        (steep, lambda n: 3.0 * n, 8, 99, "replicas", "half of the requests cost half"),
        (
            steep,
            lambda n: 2.5 * n,
            1,
            99,
            "shards",
            "one request, one replica",
        ),
        (steep, lambda n: 3.9 * n, 3, 99, "replicas", "the larger replica has two"),
        (steep, lambda n: 3.0 * n, 3, 99, "replicas", "in 8 s, not 9"),
        (steep, lambda n: 2.0 * n, 4, 99, "replicas", "in a tie it's replicas"),
        (flat, lambda n: 6.0, 8, 5, "shards", "both are too long: the shorter one"),
        (flat, lambda n: 12.0, 8, 11, "replicas", "only theirs is short enough"),
    ]
    for one, two, requests, limit, expected, why in cases:
        found = plan(one, two, requests, limit)
        assert found in ("replicas", "shards"), (
            f'return "replicas" or "shards", not {found!r}'
        )
        steps = f"a replica's step takes {one(-(-requests // 2)):.1f} s"
        assert found == expected, (
            f"{requests} requests, limit {limit}: {steps}, the shards' "
            f"{two(requests):.1f}; expected {expected}: {why}"
        )
