"""Chapter 10: CUDA graphs."""

import random
import time
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from simplellm.base.request import Request
from simplellm.engine.page_manager import PageManager
from simplellm.engine.runner import StepOutput
from simplellm.engine.scheduler import Scheduler
from simplellm.model.batch import Batch

STEPS = 500  # more than any of these schedules takes


def whole(candidate, ours):
    """The reader's class, with our methods where it has none of its own yet."""
    if issubclass(candidate, ours):
        return candidate
    return type(candidate.__name__, (candidate, ours), {})


class Ticks:
    """A runner that notes when steps are launched and waited for."""

    def __init__(self, stops=()):
        self.log: list[Any] = []
        self.stops = dict(stops)  # request -> token after which 0 comes, a stop token
        self.given: dict[int, int] = {}

    def launch(self, scheduled):
        number = sum(kind == "launch" for kind, _ in self.log)
        for request, start, _, _ in scheduled:
            assert request.num_computed_tokens == start, (
                "`update_after_launch` was called before `launch`: it books that a "
                "step was started"
            )
        self.log.append(("launch", number))
        sampling = [chunk.request.request_id for chunk in scheduled if chunk.samples]

        def wait():
            self.log.append(("wait", number))
            tokens = []
            for request in sampling:
                self.given[request] = self.given.get(request, 0) + 1
                last = self.given[request] >= self.stops.get(request, STEPS)
                tokens.append([0 if last else 7])
            return StepOutput(tokens, [None] * len(tokens))

        return wait


def requests_of(*sizes):
    return [
        Request([number + 1] * prompt, most, request_id=number, stop_ids=frozenset([0]))
        for number, (prompt, most) in enumerate(sizes)
    ]


def scheduler_of(requests):
    manager = PageManager(200, 4, enable_caching=False)
    scheduler = Scheduler(manager, max_num_seqs=8, max_num_batched_tokens=64)
    scheduler.add(requests)
    return scheduler


def check_step_ahead(step_ahead):
    """The order of launches and waits, and that all is booked in the end."""
    requests = requests_of((3, 4), (5, 6))
    scheduler, runner = scheduler_of(requests), Ticks()
    flights: list[Any] = []
    for step in range(3):
        step_ahead(scheduler, runner, flights)
        launches = [number for kind, number in runner.log if kind == "launch"]
        waits = [number for kind, number in runner.log if kind == "wait"]
        assert launches == list(range(step + 1)), "each call starts one step"
        assert waits == list(range(step)), (
            f"after {step + 1} calls the steps {waits} have been waited for; expected "
            "all but the last one, which is in flight"
        )
        assert len(flights) == 1, f"one step is in flight, not {len(flights)}"
    assert runner.log[3:] == [("launch", 2), ("wait", 1)], (
        "the next step is launched before the host waits for the one before; "
        f"yours: {runner.log}"
    )
    assert requests[0].tokens[3:] == [7, 7, -1], (
        "two steps were collected and one is in flight: two tokens and a placeholder, "
        "which `update_after_launch` puts there; "
        f"the request has {requests[0].tokens[3:]}"
    )
    for _ in range(STEPS):
        if not (scheduler.requests or flights):
            break
        step_ahead(scheduler, runner, flights)
    assert not scheduler.requests and not flights, (
        "nothing is left to schedule, and the last step is still in flight: collect "
        "it, and launch nothing"
    )
    assert [request.tokens[request.num_prompt :] for request in requests] == [
        [7] * 4,
        [7] * 6,
    ], "the tokens of each step belong to the chunks of the same step"
    launched = sum(kind == "launch" for kind, _ in runner.log)
    assert launched == 6, f"the longest has 6 tokens, so 6 steps; launched {launched}"


def storage(x):
    return x.untyped_storage().data_ptr()


class Recorder(TorchDispatchMode):
    """A tape of our own."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        assert torch.Tag.data_dependent_output not in func.tags, (
            "your step makes a Python number of a tensor: the host would have to wait "
            "for it, and a replay would never ask again"
        )
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self.calls:
            new = func(*args, **kwargs)
            several = not isinstance(out, Tensor)
            for old, fresh in zip(
                out if several else [out], new if several else [new], strict=True
            ):
                if storage(old) != storage(fresh):
                    old.copy_(fresh)


def check_Tape_replay(Tape):
    """New numbers in the old buffers, and the old outputs."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator)

    weight, x = numbers(4, 4), numbers(3, 4)
    with Tape() as tape:
        y = (x @ weight).relu() + 1
    place = storage(y)
    for _ in range(2):
        x.copy_(numbers(3, 4))
        tape.replay()
        assert storage(y) == place, (
            "the output has moved to other memory, and a CUDA graph cannot move "
            "anything: copy the numbers to where the first ones were"
        )
        assert torch.allclose(y, (x @ weight).relu() + 1), (
            "x has new numbers, and the output that was kept doesn't fit them: each "
            "result has to be copied to where the first one was, also those in the "
            "middle, which later calls read"
        )
    x = numbers(3, 4)
    with Tape() as tape:
        values, places = x.max(dim=1)
        twice = values * 2
    x.copy_(numbers(3, 4))
    tape.replay()
    assert torch.equal(twice, 2 * x.amax(1)) and torch.equal(places, x.argmax(1)), (
        "max along a dimension has two outputs, values and places: its `out` is a "
        "tuple, and each of them has to be copied"
    )
    counter = torch.zeros(1)
    with Tape() as tape:
        counter.add_(1)
    for _ in range(4):
        tape.replay()
    assert counter.item() == 5, (
        "`counter.add_(1)` ran once while it was recorded and four times replayed; the "
        f"counter says {counter.item():g}: each call runs once in a replay"
    )
    x = torch.zeros(2, 3)
    with Tape() as tape:
        row = x[1]
        total = row.sum()
    x.copy_(torch.ones(2, 3))
    tape.replay()
    assert total.item() == 3, "a view is on the tape too; its memory is x's"
    x = numbers(2, 3)
    with Tape() as tape:
        y = torch.add(x, x, alpha=3)
    x.copy_(numbers(2, 3))
    tape.replay()
    assert torch.allclose(y, 4 * x), (
        "`torch.add(x, x, alpha=3)` came out different: calls have kwargs, too"
    )


def check_Batch_pad(candidate):
    """Numbers of an earlier step in all of the arrays."""
    kind = whole(candidate, Batch)
    size = Batch.size(4, 3, 2, groups=2)
    for flat in (
        torch.arange(1, size + 1, dtype=torch.int32),
        np.arange(1, size + 1, dtype=np.int32),
    ):
        batch = kind.of(flat, 4, 3, 2, 3, windows=(None, 128), page_size=16)
        batch.pad()
        for group in batch.groups:
            slots = group.slots.tolist()
            assert slots == [-1] * 4, (
                "a padding row writes nowhere: slot -1 in every group. Slot 0 is the "
                f"first of page 0, and somebody's; {slots}"
            )
            assert not group.tables.any() and not group.offsets.any(), (
                "what a table held in an earlier step may be too large for the pool or "
                "somebody's page: zeros, in every group"
            )
        assert not batch.lengths.any(), "a padding row attends to nothing: length 0"
        assert not batch.query_start_loc.any(), "no row has tokens, and none is real"
        assert not batch.tokens.any(), (
            "a token of an earlier step may be a placeholder for a row that is gone: 0"
        )
        assert not batch.positions.any() and not batch.logits_indices.any(), (
            "positions and logits_indices are indices: 0 is always there"
        )


def check_10_1(idle_time):
    """A queue played in steps of a quarter of a microsecond."""

    def played(kernels, launch):
        now, idle, running, begun, left = 0.0, 0.0, 0.0, 0, len(kernels)
        while left or running > 0:
            queued = int(now // launch) - begun  # launched and not started
            if running <= 0 and left and queued > 0:
                running, begun, left = kernels[begun], begun + 1, left - 1
            if running > 0:
                running -= 0.25
            elif begun:
                idle += 0.25
            now += 0.25
        return idle

    cases = [
        ([2.0] * 10, 5.0),
        ([8.0] * 10, 5.0),
        ([50.0] + [2.0] * 10, 5.0),
        ([2.0] * 10 + [50.0], 5.0),
        ([3.0, 20.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 6.0], 4.0),
    ]
    for kernels, launch in cases:
        found, expected = idle_time(list(kernels), launch), played(kernels, launch)
        assert abs(found - expected) < 1e-6, (
            f"kernels of {kernels} us at {launch:g} us a launch: the GPU isn't idle "
            f"for {found:g} us between the first start and the last end. A kernel "
            "starts when it is launched and the one before it has ended"
        )


def check_10_2(make_step):
    """A step recorded once and replayed nine times."""
    table = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    token, place = torch.tensor([7]), torch.tensor([0])
    history = torch.full([12], -1)
    step = make_step(table, token, place, history)
    with Recorder() as tape:  # on a CPU recording is also the first step
        step()
    expected = [int(table[7])]
    assert history[0] == expected[0], (
        f"the first step writes the token after 7 at place 0: {expected[0]}, not "
        f"{int(history[0])}"
    )
    for _ in range(9):
        tape.replay()
        expected.append(int(table[expected[-1]]))
    assert history.tolist() == [*expected, -1, -1], (
        "replayed nine times, the history is not the next nine tokens: is a Python "
        f"number on the tape, or a buffer that is replaced? {history.tolist()}"
    )


def check_10_3(best_sizes):
    """All choices tried, for batches that are few."""

    def rows(sizes, batches):
        assert list(sizes) == sorted(sizes), "sizes ascend"
        assert max(batches) <= max(sizes), "the largest batch has no bucket"
        return sum(min(s for s in sizes if s >= batch) for batch in batches)

    rng = random.Random(10)
    for most in (1, 2, 3):
        for _ in range(10):
            batches = [rng.randint(1, 12) for _ in range(15)]
            largest = max(batches)
            below = range(1, largest)
            fewest = min(
                rows([*sizes, largest], batches)
                for sizes in combinations(below, min(most - 1, len(below)))
            )
            found = list(best_sizes(list(batches), most))
            assert len(found) <= most, f"{len(found)} sizes where {most} are allowed"
            assert rows(found, batches) == fewest, (
                f"batches {sorted(batches)}: {found} need {rows(found, batches)} rows, "
                f"and with {most} sizes {fewest} are possible"
            )
    day = [min(256, 1 + int(rng.expovariate(1 / 30))) for _ in range(5000)]
    start = time.perf_counter()
    found = list(best_sizes(day, 9))
    seconds = time.perf_counter() - start
    assert seconds < 10, f"{seconds:.0f} s: too slow, there are only 256 sizes"
    powers = [2**n for n in range(9)]
    assert len(found) <= 9, f"{len(found)} sizes where 9 are allowed"
    assert rows(found, day) < rows(powers, day), (
        f"a day in your sizes takes {rows(found, day):,} rows, in powers of two "
        f"{rows(powers, day):,}"
    )
