"""The scheduler by itself: no model, no tensors, tokens made up.

Most properties are checked in one place, `Run`, which drives a scheduler step by step
and knows what must hold after each of them.
"""

import math
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from course.integrity import check_integrity
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from simplellm.base.request import UNKNOWN, QueueFullError, Request
from simplellm.engine.page_manager import PageManager
from simplellm.engine.scheduler import (
    PREFILL_BESIDE_DECODES,
    ScheduledChunk,
    Scheduler,
)

REASONS = {"stop", "length", "abort", "timeout", "error"}


def room(tokens: int) -> PageManager:
    """Room for so many tokens, of which none are shared."""
    return PageManager(tokens, 1, enable_caching=False)


def plenty() -> PageManager:
    """Room for everybody."""
    return PageManager(500, 4, enable_caching=False)


class Run:
    """A scheduler under observation. The token after k others is 1000 + k.

    With ``overlap`` a step is scheduled and begun before the one before is committed.
    """

    def __init__(
        self,
        manager: PageManager,
        *,
        overlap: bool = False,
        **limits: int | bool | None,
    ) -> None:
        defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "prefill_chunk": 6}
        self.scheduler = Scheduler(manager, **(defaults | limits))
        self.manager = manager
        self.depth = int(overlap)
        self.flights: list[list[ScheduledChunk]] = []
        self.numbers = count()
        self.steps: list[list[ScheduledChunk]] = []
        self.outputs: dict[Request, list[int]] = {}
        # How many tokens a step gives a request without overlap, and how many a grammar
        # forces of those in `forcing`.
        self.drafts = self.forced = 1
        self.forcing: set[Request] = set()

    def request(
        self,
        prompt: int | list[int],
        max_tokens: int,
        forces: bool = False,
        **options: Any,
    ) -> Request:
        """A request with an id of its own."""
        tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
        number = next(self.numbers)
        request = Request(tokens, max_tokens, request_id=number, **options)
        self.outputs[request] = []
        if forces:
            self.forcing.add(request)
        return request

    def add(
        self,
        prompt: int | list[int],
        max_tokens: int = 3,
        *,
        samples: int = 1,
        **options,
    ) -> Request:
        first, *rest = (
            self.request(prompt, max_tokens, **options) for _ in range(samples)
        )
        first.siblings = rest
        self.scheduler.add([first])
        return first

    def step(self) -> list[ScheduledChunk]:
        scheduled = self.scheduler.schedule()
        self.steps.append(scheduled)
        self.check(scheduled)
        busy = scheduled or self.flights or not self.scheduler.requests
        assert busy, "somebody waits, and nobody runs"
        self.begin(scheduled)
        return scheduled

    def begin(self, scheduled: list[ScheduledChunk]) -> None:
        """Go on with a step that is scheduled."""
        if any(chunk.request in self.forcing for chunk in scheduled):
            while self.flights:  # what is forced depends on the tokens before it
                self.commit(self.flights.pop(0))
        for request, start, length, _ in scheduled:
            room = min(self.forced, request.max_tokens - request.num_output)
            first = 1000 + start + length
            if request in self.forcing:
                request.forced = [*range(first, first + room)]
        self.scheduler.update_after_launch(scheduled)
        if scheduled:
            self.flights.append(scheduled)
        while len(self.flights) > (self.depth if scheduled else 0):
            self.commit(self.flights.pop(0))

    def commit(self, scheduled: list[ScheduledChunk]) -> None:
        tokens = []
        for request, start, length, samples in scheduled:
            first = 1000 + start + length
            several = self.drafts if self.depth == 0 else 1
            if samples:
                found = list(range(first, first + several))
                tokens.append(request.forced or found)
        alive = set(self.scheduler.requests.values())
        sampling = [chunk.request for chunk in scheduled if chunk.samples]
        new = self.scheduler.update_from_output(scheduled, tokens)
        assert [request for request, _ in new] == [r for r in sampling if r in alive]
        for request, kept in new:
            self.outputs[request] += kept

    def check(self, scheduled: Sequence[ScheduledChunk]) -> None:
        scheduler = self.scheduler
        assert (
            sum(chunk.length for chunk in scheduled) <= scheduler.max_num_batched_tokens
        )
        assert len({chunk.request for chunk in scheduled}) == len(scheduled)
        assert len(scheduler.running) <= scheduler.max_num_seqs
        for chunk in scheduled:
            request = chunk.request
            assert (
                request in scheduler.running
                and chunk.start == request.num_computed_tokens
            )
            assert 1 <= chunk.length <= request.missing
            assert chunk.length <= (scheduler.prefill_chunk or math.inf)
            assert chunk.samples == (chunk.start + chunk.length == len(request.tokens))
            assert UNKNOWN not in request.tokens[:-1]
        for queue in (scheduler.waiting, scheduler.running):
            keys = [request.queue_key for request in queue]
            assert keys == sorted(keys)
        assert all(request.num_computed_tokens == 0 for request in scheduler.waiting)
        check_integrity(self.manager)

    def finish(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.requests:
                break
            self.step()
        assert not self.scheduler.requests, "starved"
        assert not self.scheduler.running and not self.scheduler.waiting
        assert not self.scheduler.deadlines
        check_integrity(self.manager)


def first_steps(run: Run) -> dict[Request, int]:
    """The step in which each request computed something for the first time."""
    found: dict[Request, int] = {}
    for number, scheduled in enumerate(run.steps):
        for chunk in scheduled:
            found.setdefault(chunk.request, number)
    return found


def spans(run: Run, request: Request) -> list[tuple[int, int]]:
    scheduled = (chunk for scheduled in run.steps for chunk in scheduled)
    return [(w.start, w.length) for w in scheduled if w.request is request]


# One step


def test_decodes_and_chunks_share_the_budget() -> None:
    run = Run(plenty(), max_num_batched_tokens=10, prefill_chunk=8)
    short, long = run.add(2, max_tokens=9), run.add(30)
    lengths = [[(w.request, w.length) for w in run.step()] for _ in range(5)]
    assert lengths == [
        [(short, 2), (long, 8)],
        [(short, 1), (long, 8)],
        [(short, 1), (long, 8)],
        [(short, 1), (long, 6)],
        [(short, 1), (long, 1)],
    ]


def test_several_prompts_fit_one_step() -> None:
    run = Run(plenty(), max_num_batched_tokens=16, prefill_chunk=6)
    requests = [run.add(5) for _ in range(4)]
    assert [(w.request, w.length) for w in run.step()] == [
        *((request, 5) for request in requests[:3]),
        (requests[3], 1),
    ]


def test_prompts_stay_whole_without_chunks() -> None:
    run = Run(plenty(), max_num_batched_tokens=20, prefill_chunk=None)
    first, second = run.add(15), run.add(12)
    assert [w.request for w in run.step()] == [first]
    run.finish()
    assert spans(run, second)[0] == (0, 12)


def test_static_batches_take_no_newcomers() -> None:
    run = Run(plenty(), max_num_seqs=2, continuous=False)
    requests = [run.add(2, max_tokens=n) for n in (1, 8, 1, 1)]
    run.finish()
    starts = first_steps(run)
    assert starts[requests[0]] == starts[requests[1]] == 0
    assert starts[requests[2]] == starts[requests[3]] == 8
    run = Run(plenty(), max_num_seqs=2)
    requests = [run.add(2, max_tokens=n) for n in (1, 8, 1, 1)]
    run.finish()
    assert [first_steps(run)[request] for request in requests] == [0, 0, 1, 2]


def test_static_batches_take_no_samples_either() -> None:
    """A sample that would start in an emptied place waits for the next batch."""
    run = Run(PageManager(100, 4), continuous=False)
    short, long = run.add(3, max_tokens=1), run.add(20, max_tokens=6, samples=3)
    samples = list(long.siblings)
    run.finish()
    starts = first_steps(run)
    assert starts[short] == starts[long] == 0
    last = max(
        n
        for n, scheduled in enumerate(run.steps)
        for w in scheduled
        if w.request is long
    )
    assert [starts[request] for request in samples] == [last + 1] * 2


# Ends


def test_a_request_ends_at_its_last_token() -> None:
    run = Run(plenty())
    stopped = run.request([1, 2], 10, stop_ids=frozenset({1004}))
    run.scheduler.add([stopped])
    long = run.add(2, max_tokens=5)
    run.finish()
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == [1, 2, 1002, 1003, 1004]
    assert long.finish_reason == "length" and long.num_output == 5


def collect(request: Request, tokens: Sequence[int]) -> list[Sequence[int]]:
    """Let the one step of ``request`` give ``tokens``; what it keeps of them."""
    scheduler = Scheduler(plenty(), max_num_seqs=1, max_num_batched_tokens=8)
    scheduler.add([request])
    scheduled = scheduler.schedule()
    scheduler.update_after_launch(scheduled)
    new = scheduler.update_from_output(scheduled, [tokens])
    assert all(found is request for found, _ in new)
    assert request.request_id in scheduler.requests or request.finish_reason
    check_integrity(scheduler.manager)
    return [list(kept) for _, kept in new]


@pytest.mark.parametrize(
    ("tokens", "kept", "reason"),
    [
        ([10], [10], None),
        ([10, 11], [10, 11], None),
        ([10, 11, 12], [10, 11, 12], "length"),
        ([10, 11, 12, 13, 14], [10, 11, 12], "length"),
        ([99], [99], "stop"),
        ([10, 99, 12], [10, 99], "stop"),
        ([10, 99, 98, 12, 13], [10, 99], "stop"),
        ([10, 11, 99], [10, 11, 99], "stop"),  # the last one that it may have
        ([10, 11, 12, 99], [10, 11, 12], "length"),  # beyond it
    ],
)
def test_of_several_tokens_those_up_to_the_end_are_kept(
    tokens: list[int], kept: list[int], reason: str | None
) -> None:
    request = Request([1, 2, 3], 3, stop_ids=frozenset({98, 99}), request_id=7)
    assert collect(request, tokens) == [kept]
    assert request.tokens == [1, 2, 3, *kept]
    assert request.num_output == len(kept)
    assert request.finish_reason == reason


def test_after_several_tokens_the_rest_of_them_is_computed() -> None:
    """A step computes the last token it knows; what a draft added comes next."""
    run = Run(PageManager(20, 4), prefill_chunk=6)
    run.drafts = 3
    request = run.add(5, max_tokens=9)
    run.finish()
    assert spans(run, request) == [(0, 5), (5, 3), (8, 3)]
    assert run.outputs[request] == list(range(1005, 1014))


def test_forced_tokens_are_computed_in_one_step() -> None:
    """They are known when their step begins: the next one takes them all."""
    run = Run(plenty(), overlap=True)
    run.forced = 3
    forced = run.add(4, max_tokens=8, forces=True)
    other = run.add(4, max_tokens=8)
    run.finish()
    assert spans(run, forced) == [(0, 4), (4, 3), (7, 3)]
    assert spans(run, other) == [(0, 4), *((n, 1) for n in range(4, 11))]
    assert run.outputs[forced] == run.outputs[other] == [*range(1004, 1012)]


def test_forced_tokens_end_at_max_tokens_and_at_a_stop() -> None:
    run = Run(plenty(), overlap=True)
    run.forced = 4
    short = run.add(2, max_tokens=3, forces=True)
    stops = run.add(2, max_tokens=9, forces=True, stop_ids=frozenset({1004}))
    run.finish()
    assert run.outputs[short] == run.outputs[stops] == [1002, 1003, 1004]
    assert [short.finish_reason, stops.finish_reason] == ["length", "stop"]


def test_a_step_that_was_begun_too_early_gives_nothing() -> None:
    """With overlap the end shows only after one step more has begun."""
    run = Run(plenty(), overlap=True)
    request = run.request(2, 9, stop_ids=frozenset({1003}))
    run.scheduler.add([request])
    run.finish()
    assert spans(run, request) == [(0, 2), (2, 1), (3, 1)]
    for scheduled in run.flights:
        run.commit(scheduled)
    assert run.outputs[request] == [1002, 1003]
    assert run.manager.usage == 0


def test_deadlines_end_requests_wherever_they_are() -> None:
    run = Run(plenty(), max_num_seqs=1)
    running = run.add(2, max_tokens=100, deadline=5.0)
    waiting = run.add(2, deadline=3.0)
    patient = run.add(2, deadline=math.inf)
    run.step()
    assert run.scheduler.expire(3.0) == []
    assert run.scheduler.expire(4.0) == [waiting]
    assert run.scheduler.expire(6.0) == [running]
    assert waiting.finish_reason == running.finish_reason == "timeout"
    run.finish()
    assert patient.finish_reason == "length"
    assert run.scheduler.expire(math.inf) == []


def test_an_abort_between_schedule_and_commit_loses_only_its_job() -> None:
    manager = PageManager(20, 4, window=8)
    run = Run(manager)
    requests = [run.add(3, max_tokens=4) for _ in range(3)]
    scheduled = run.scheduler.schedule()
    run.scheduler.finish(requests[1], "abort")
    run.commit(scheduled)
    assert [request.num_output for request in requests] == [1, 0, 1]
    run.finish()
    assert [request.finish_reason for request in requests] == [
        "length",
        "abort",
        "length",
    ]
    assert manager.usage == 0


def test_finish_counts_once() -> None:
    run = Run(plenty())
    request = run.add(2)
    run.scheduler.finish(request, "abort")
    run.scheduler.finish(request, "error")
    assert request.finish_reason == "abort"


# The queue


def test_a_call_is_taken_whole_or_not_at_all() -> None:
    """However large it is, it is taken if the queue is not full."""
    run = Run(plenty(), max_num_seqs=1, max_waiting=3)
    run.add(1)
    run.add(2)
    many = [run.request(2, 1) for _ in range(7)]
    many[0].siblings = [run.request(2, 1) for _ in range(5)]
    run.scheduler.add(many)
    assert run.scheduler.num_waiting == 14
    refused = run.request(1, 1)
    with pytest.raises(QueueFullError, match="14 requests wait already; expected few"):
        run.scheduler.add([refused])
    assert run.scheduler.num_waiting == 14
    assert refused.request_id not in run.scheduler.requests
    run.finish()


def test_who_runs_does_not_wait() -> None:
    run = Run(plenty(), max_num_seqs=1, max_waiting=1)
    run.add(1)
    with pytest.raises(QueueFullError, match="EngineConfig's max_waiting"):
        run.add(1)
    run.step()
    run.add(1)  # one runs, so that there is room for one
    with pytest.raises(QueueFullError):
        run.add(1)
    run.finish()


def test_samples_that_wait_for_their_prompt_wait() -> None:
    run = Run(plenty(), max_waiting=2)
    run.add(30, samples=3)
    run.step()
    assert run.scheduler.num_waiting == 2
    with pytest.raises(QueueFullError):
        run.add(1)


def test_fifo_within_a_priority() -> None:
    run = Run(plenty(), max_num_seqs=1)
    requests = [run.add(2, priority=n % 2) for n in range(6)]
    run.finish()
    starts = first_steps(run)
    order = sorted(requests, key=starts.__getitem__)
    assert order == requests[::2] + requests[1::2]


def test_a_priority_overtakes_so_many_and_no_more() -> None:
    run = Run(plenty(), max_num_seqs=1, overtakes=3)
    patient = run.add(2, priority=1)
    urgent = [run.add(2) for _ in range(6)]
    run.finish()
    starts = first_steps(run)
    assert sum(starts[request] < starts[patient] for request in urgent) == 3


# Memory


def test_admission_waits_for_room_for_the_whole_prompt() -> None:
    run = Run(room(20))
    first, second = run.add(12, max_tokens=4), run.add(12, max_tokens=1)
    while first.finish_reason is None:
        assert second.num_computed_tokens == 0
        run.step()
    run.finish()
    assert run.scheduler.preemptions == 0


def test_the_last_in_line_gives_way_and_comes_back() -> None:
    run = Run(room(16))
    first, second = run.add(6, max_tokens=8), run.add(6, max_tokens=8)
    run.finish()
    assert first.preemptions == 0 and second.preemptions == 1
    assert first.num_output == second.num_output == 8
    assert second.tokens[6:] == list(range(1006, 1014))
    restarts = [start for start, _ in spans(run, second)].count(0)
    assert restarts == 2


def test_who_gave_way_keeps_his_place() -> None:
    run = Run(room(16))
    run.add(6, max_tokens=8)
    second = run.add(6, max_tokens=8)
    third = run.add(5, max_tokens=1)  # would fit when the second has given way
    run.finish()
    assert second.preemptions == 1
    again = [
        n
        for n, scheduled in enumerate(run.steps)
        for w in scheduled
        if w.request is second
    ]
    assert first_steps(run)[third] >= again[3]  # two steps before, then from the start


def test_a_low_priority_gives_way_first() -> None:
    run = Run(room(16))
    low = run.add(6, max_tokens=8, priority=1)
    high = run.add(6, max_tokens=8)
    run.finish()
    assert (low.preemptions, high.preemptions) == (1, 0)


def test_who_finds_no_room_waits_and_keeps_what_he_has() -> None:
    run = Run(PageManager(4, 4, enable_caching=False), prefill_chunk=16)
    first, second = run.add(5, max_tokens=3), run.add(7, max_tokens=4)
    third = run.add(1, max_tokens=1)
    run.step()  # both prompts; all four pages are taken
    assert [w.request for w in run.step()] == [first, second]
    assert [w.request for w in run.step()] == [first]  # the second would need a page
    assert first.finish_reason == "length"
    run.finish()
    assert second.preemptions == third.preemptions == 0


def test_a_prompt_that_needs_most_of_the_room_runs_alone() -> None:
    manager = PageManager(40, 4, window=8, max_chunk=6)
    assert manager.free_tokens < 120 < manager.max_tokens
    run = Run(manager)
    requests = [run.add(3), run.add(120), run.add(3)]
    run.finish()
    assert all(request.finish_reason == "length" for request in requests)
    assert requests[1].preemptions == 0


def test_a_blocked_head_is_not_asked_again_in_vain() -> None:
    class Counting(PageManager):
        added = 0

        def add(self, sequence: int, tokens: Sequence[int]) -> int:
            self.added += 1
            return super().add(sequence, tokens)

    manager = Counting(40, 1, enable_caching=False)
    run = Run(manager)
    run.add(5, max_tokens=30)
    run.add(38, max_tokens=1)
    for _ in range(20):
        run.step()
    # The first once; the second at first, and when a prompt is done it might share.
    assert manager.added == 3


def test_a_blocked_head_starts_as_soon_as_there_is_room() -> None:
    run = Run(room(20), prefill_chunk=12)
    run.add(6, max_tokens=1)
    run.add(4, max_tokens=9)
    blocked = run.add(11, max_tokens=1)
    run.step()
    assert blocked.num_computed_tokens == 0
    assert [chunk.request for chunk in run.step()][-1] is blocked


def test_a_blocked_head_starts_once_less_is_promised() -> None:
    """What is promised shrinks with each chunk, what is free does not or less."""
    manager = PageManager(120, 16, window=128, max_chunk=16)
    run = Run(manager, max_num_batched_tokens=64, prefill_chunk=16)
    for number, (length, most) in enumerate([(600, 300), (500, 20)]):
        run.add(list(range(1000 * number, 1000 * number + length)), most)
    run.finish()
    assert sorted(first_steps(run).values()) == [0, 26]


# Samples of one prompt


def test_samples_start_from_one_prompt() -> None:
    manager = PageManager(40, 4, window=8)
    run = Run(manager, max_num_batched_tokens=64, prefill_chunk=64)
    request = run.add(11, samples=3, max_tokens=4)
    family = [request, *request.siblings]
    lengths = [[w.length for w in run.step()] for _ in range(2)]
    assert lengths == [[10], [1, 1, 1]]
    run.finish()
    assert all(j.finish_reason == "length" and j.num_output == 4 for j in family)
    assert manager.usage == 0


def test_samples_that_find_no_seat_compute_their_prompt_later() -> None:
    run = Run(room(200), max_num_seqs=1)
    first = run.add(11, samples=3)
    family = [first, *first.siblings]
    run.finish()
    assert all(spans(run, r)[0][0] == 0 and r.num_output == 3 for r in family)


def test_samples_go_on_without_the_first() -> None:
    run = Run(PageManager(40, 4, window=8))
    request = run.add(30, samples=3)
    siblings = list(request.siblings)
    run.step()
    run.scheduler.finish(siblings[0], "abort")
    run.scheduler.finish(request, "abort")
    run.finish()
    assert siblings[1].finish_reason == "length"


def test_samples_of_a_prompt_that_is_cached_but_for_a_token() -> None:
    run = Run(PageManager(40, 4))
    run.add(9, samples=1)
    run.finish()
    request = run.add(9, samples=3)
    family = [request, *request.siblings]
    assert [w.request for w in run.step()] == [request]
    assert {w.request for w in run.step()} == set(family)
    run.finish()
    assert [j.num_cached_tokens for j in family] == [8, 8, 8]


# Any order of things


def managers() -> st.SearchStrategy[PageManager]:
    """Tight ones above all."""
    return st.builds(
        PageManager,
        st.integers(22, 60),
        st.sampled_from([1, 2, 4]),
        window=st.sampled_from([None, 3, 8]),
        enable_caching=st.booleans(),
        max_chunk=st.just(6),
    )


class Anything(RuleBasedStateMachine):
    """Requests come, run, are aborted and expire in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.run_: Run | None = None
        self.now = 0.0

    @property
    def requests(self) -> list[Request]:
        return [] if self.run_ is None else list(self.run_.outputs)

    @precondition(lambda self: self.run_ is None)
    @rule(
        manager=managers(),
        seqs=st.integers(1, 5),
        budget=st.integers(5, 20),
        overtakes=st.integers(0, 4),
        continuous=st.booleans(),
        overlap=st.booleans(),
    )
    def start(
        self,
        manager: PageManager,
        seqs: int,
        budget: int,
        overtakes: int,
        continuous: bool,
        overlap: bool,
    ) -> None:
        self.run_ = Run(
            manager,
            overlap=overlap,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            overtakes=overtakes,
            continuous=continuous,
        )
        self.room = min(manager.max_tokens, 24)

    @precondition(lambda self: self.run_ is not None)
    @rule(
        share=st.floats(0, 1),
        output=st.integers(1, 9),
        priority=st.integers(-1, 2),
        samples=st.integers(1, 3),
        seconds=st.sampled_from([math.inf, 2.0, 10.0]),
        stop=st.none() | st.integers(1000, 1030),
        needs=st.booleans(),
    )
    def submit(
        self,
        share: float,
        output: int,
        priority: int,
        samples: int,
        seconds: float,
        stop: int | None,
        needs: bool,
    ) -> None:
        assert self.run_ is not None
        before = len(self.requests)
        first = self.run_.add(
            max(1, round(share * (self.room - output))),
            output,
            priority=priority,
            samples=samples,
            deadline=self.now + seconds,
            stop_ids=frozenset(() if stop is None else {stop}),
            forces=needs,
        )
        family = self.requests[before:]
        assert len(family) == samples and first in family

    @precondition(lambda self: self.run_ is not None and self.run_.scheduler.requests)
    @rule(count=st.integers(1, 6), drafts=st.integers(1, 4), forced=st.integers(1, 4))
    def advance(self, count: int, drafts: int, forced: int) -> None:
        assert self.run_ is not None
        self.run_.drafts, self.run_.forced = drafts, forced
        for _ in range(count):
            self.run_.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), in_between=st.booleans())
    def abort(self, data: st.DataObject, in_between: bool) -> None:
        assert self.run_ is not None
        request = data.draw(st.sampled_from(self.requests))
        scheduled = self.run_.scheduler.schedule() if in_between else []
        alive = request.finish_reason is None
        self.run_.scheduler.finish(request, "abort")
        assert (request.finish_reason == "abort") or not alive
        self.run_.begin(scheduled)

    @precondition(lambda self: self.run_ is not None)
    @rule()
    def tick(self) -> None:
        assert self.run_ is not None
        self.now += 1.0
        for request in self.run_.scheduler.expire(self.now):
            assert request.deadline < self.now
            assert request.finish_reason == "timeout"

    @invariant()
    def nothing_is_lost(self) -> None:
        if self.run_ is None:
            return
        scheduler = self.run_.scheduler
        alive = {r for r in self.requests if r.finish_reason is None}
        assert set(scheduler.requests.values()) == alive
        parked = {s for r in alive for s in r.siblings if s in alive}
        placed = [*scheduler.waiting, *scheduler.running]
        assert len(placed) == len(set(placed))
        assert set(placed) | parked == alive and not set(placed) & parked
        check_integrity(self.run_.manager)

    @invariant()
    def outputs_are_those_of_an_undisturbed_run(self) -> None:
        """Whatever was preempted and computed again."""
        if self.run_ is None:
            return
        for request, output in self.run_.outputs.items():
            start, reason = request.num_prompt, request.finish_reason
            assert reason is None or reason in REASONS
            assert request.num_output <= request.max_tokens
            assert output == list(range(1000 + start, 1000 + start + len(output)))
            known = [*range(start), *output]
            assert request.tokens[: len(known)] == known
            for position, token in enumerate(request.tokens[len(known) :], len(known)):
                forced = request in self.run_.forcing and token == 1000 + position
                assert token == UNKNOWN or forced
            assert not request.stop_ids & set(output[:-1])
            if output and output[-1] in request.stop_ids:
                assert reason == "stop"
            elif len(output) == request.max_tokens:
                assert reason == "length"
            else:
                assert reason not in ("stop", "length")

    def teardown(self) -> None:
        if self.run_ is None:
            return
        self.run_.finish()
        self.nothing_is_lost()
        self.outputs_are_those_of_an_undisturbed_run()
        manager = self.run_.manager
        assert manager.free_pages == manager.num_pages, "something was not given back"
        assert not manager.tables


Anything.TestCase.settings = settings(max_examples=200, stateful_step_count=25)
TestAnything = Anything.TestCase


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), max_size=12),
    st.integers(1, 6),
    st.integers(0, 20),
)
def test_decodes_never_wait_for_prompts(
    requests: list[tuple[int, int]], seqs: int, spare: int
) -> None:
    """With memory for all, whoever decodes gets a token in every step."""
    run = Run(plenty(), max_num_seqs=seqs, max_num_batched_tokens=seqs + spare)
    for length, output in requests:
        run.add(length, output)
        decoding = [j for j in run.scheduler.running if j.missing == 1]
        assert set(decoding) <= {chunk.request for chunk in run.step()}
    while run.scheduler.requests:
        decoding = [j for j in run.scheduler.running if j.missing == 1]
        scheduled = run.step()
        assert set(decoding) <= {chunk.request for chunk in scheduled}
        prefills = [j for j in run.scheduler.running if j.missing > 1]
        if prefills and not scheduled[-1].samples:
            assert sum(w.length for w in scheduled) > len(decoding)  # these go on, too


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=2, max_size=40),
    st.integers(0, 5),
)
def test_nobody_is_overtaken_too_often(
    arrivals: list[tuple[int, int]], overtakes: int
) -> None:
    """Who comes later overtakes `overtakes` times a level of priority, no more."""
    run = Run(plenty(), max_num_seqs=2, overtakes=overtakes)
    requests = []
    for priority, steps in arrivals:
        requests.append(run.add(2, 2, priority=priority))
        for _ in range(steps - 1):
            run.step()
    run.finish()
    starts = first_steps(run)
    for place, request in enumerate(requests):
        for ahead in (0, 1, 2):
            passed = [
                other
                for other in requests[place + 1 :]
                if starts[other] < starts[request]
                if request.priority - other.priority == ahead
            ]
            assert len(passed) <= ahead * overtakes
        assert all(
            starts[other] >= starts[request]
            for other in requests[place + 1 :]
            if other.priority >= request.priority
        )


def test_who_shares_a_prompt_starts_once_it_is_computed() -> None:
    """Before that, each of them would need all the pages of its own."""
    run = Run(
        PageManager(60, 16),
        max_num_seqs=8,
        max_num_batched_tokens=256,
        prefill_chunk=64,
    )
    requests = [run.add(600, 100) for _ in range(3)]
    for _ in range(12):
        run.step()
    assert [first_steps(run)[request] for request in requests] == [0, 10, 10]


@pytest.mark.parametrize("decodes", [1, PREFILL_BESIDE_DECODES + 9])
@pytest.mark.parametrize("waiting", [1, 4])
def test_prompts_beside_decodes_share_what_the_line_allows(
    decodes: int, waiting: int
) -> None:
    """Not less, however many decode; not more, however long the prompts are."""
    scheduler = Scheduler(
        PageManager(60_000, 1, enable_caching=False),
        max_num_seqs=2000,
        max_num_batched_tokens=8192,
        prefill_chunk=8192,
    )
    scheduler.add([Request([1], 9, request_id=number) for number in range(decodes)])
    scheduler.update_after_launch(scheduler.schedule())
    late = range(decodes, decodes + waiting)
    scheduler.add([Request([1] * 5000, 9, request_id=number) for number in late])
    lengths = [chunk.length for chunk in scheduler.schedule()]
    assert lengths[:decodes] == [1] * decodes
    assert lengths[decodes:] == [PREFILL_BESIDE_DECODES * (1 + waiting // 2)]


def test_decodes_keep_their_pace_beside_a_prompt_that_ranks_before_them() -> None:
    scheduler = Scheduler(
        PageManager(60_000, 1, enable_caching=False),
        max_num_seqs=100,
        max_num_batched_tokens=8192,
        prefill_chunk=8192,
    )
    scheduler.add([Request([1], 99, request_id=number) for number in range(1, 33)])
    scheduler.update_after_launch(scheduler.schedule())
    urgent = Request([1] * 50_000, 9, request_id=33, priority=-1)
    scheduler.add([urgent])
    for _ in range(3):
        scheduled = scheduler.schedule()
        scheduler.update_after_launch(scheduled)
        scheduler.update_from_output(scheduled, [[2]] * 32)
        assert [chunk.length for chunk in scheduled[:-1]] == [1] * 32
        assert 0 < scheduled[-1].length <= PREFILL_BESIDE_DECODES + 1
        assert scheduled[-1].request is urgent is scheduler.running[0]


def test_decodes_keep_their_pace_beside_an_older_one_that_is_computed_again() -> None:
    """It gave way, comes back, and ranks before them all."""
    run = Run(
        PageManager(1814, 16, enable_caching=False),
        max_num_seqs=100,
        max_num_batched_tokens=8192,
        prefill_chunk=4096,
    )
    old = run.add(20_000, max_tokens=40)
    urgent = run.add(9_000, max_tokens=40, priority=-1)
    while urgent.finish_reason is None:
        run.step()
    assert old.preemptions == 1 and old in run.scheduler.waiting
    run.add(2, samples=32, max_tokens=99)
    assert [chunk.length for chunk in run.step()] == [4096, 1]  # 32 samples join
    for _ in range(10):
        assert run.scheduler.running[0] is old
        *decodes, again = run.step()
        assert again.request is old
        assert 0 < again.length <= PREFILL_BESIDE_DECODES + 1
        assert [chunk.length for chunk in decodes] == [1] * 32


def test_a_prompt_is_alone_while_the_last_token_of_others_is_on_its_way() -> None:
    """They wait for nothing that comes with it."""
    scheduler = Scheduler(
        PageManager(20_000, 1, enable_caching=False),
        max_num_seqs=100,
        max_num_batched_tokens=8192,
        prefill_chunk=8192,
    )
    scheduler.add([Request([1], 1, request_id=1)])
    scheduler.update_after_launch(scheduler.schedule())
    scheduler.add([Request([1] * 10_000, 9, request_id=2)])
    assert [chunk.length for chunk in scheduler.schedule()] == [8192]


def test_a_step_of_long_answers_costs_no_more_than_one_of_short_answers() -> None:
    scheduler = Scheduler(
        PageManager(100_000, 16, window=128),
        max_num_seqs=256,
        max_num_batched_tokens=2048,
    )
    scheduler.add([Request([n] * 8, 10**6, request_id=n) for n in range(1256)])

    def step() -> float:
        begin = time.perf_counter()
        scheduled = scheduler.schedule()
        scheduler.update_after_launch(scheduled)
        sampled = sum(chunk.samples for chunk in scheduled)
        scheduler.update_from_output(scheduled, [[7]] * sampled)
        return time.perf_counter() - begin

    def step_after(generated: int) -> float:
        while not scheduler.running or scheduler.running[0].num_output < generated:
            step()
        return min(step() for _ in range(15))  # what else the machine does is left out

    early, late = step_after(50), step_after(1000)
    assert len(scheduler.running) == 256 and scheduler.num_waiting == 1000
    assert late < 3 * early  # a step that copied the tokens would be far beyond
