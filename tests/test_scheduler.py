"""The scheduler by itself: no model, no tensors, tokens made up.

Most properties are checked in one place, `Run`, which drives a scheduler step by step
and knows what must hold after each of them.
"""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from simplellm.cache import Manager, SlotManager
from simplellm.engine import Unlimited
from simplellm.paged import PageManager
from simplellm.scheduler import Job, QueueFullError, Scheduler, Work

REASONS = {"stop", "length", "abort", "timeout", "error"}


class Pool:
    """The least that a `Manager` can be: some tokens of room, nothing shared."""

    usage = 0.0

    def __init__(self, room: int) -> None:
        self.room = self.max_tokens = room
        self.lengths: dict[int, int] = {}
        self.computed: dict[int, int] = {}

    @property
    def free_tokens(self) -> int:
        return self.room - sum(self.lengths.values())

    def add(self, sequence: int, tokens: Sequence[int]) -> int:
        assert sequence not in self.lengths
        assert len(tokens) <= self.room
        self.lengths[sequence] = self.computed[sequence] = 0
        return 0

    def grow(self, sequence: int, length: int) -> bool:
        wanted = max(length - self.lengths[sequence], 0)
        if wanted > self.free_tokens:
            return False
        self.lengths[sequence] += wanted
        return True

    def commit(self, sequence: int, tokens: Sequence[int], length: int) -> None:
        assert self.computed[sequence] < length <= self.lengths[sequence]
        assert length <= len(tokens)
        self.computed[sequence] = length

    def fork(self, parent: int, child: int) -> bool:
        return False

    def remove(self, sequence: int) -> None:
        del self.lengths[sequence], self.computed[sequence]

    def check_integrity(self) -> None:
        pass


class Run:
    """A scheduler under observation. The token after k others is 1000 + k."""

    def __init__(self, manager: Manager, **limits: int | bool | None) -> None:
        defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "prefill_chunk": 6}
        self.scheduler = Scheduler(manager, **(defaults | limits))  # type: ignore
        self.manager = manager
        self.ended: list[Job] = []
        self.steps: list[list[Work]] = []

    def add(self, length: int, max_tokens: int = 3, **options: int | float) -> Job:
        samples = int(options.pop("samples", 1))
        prompt = list(range(length))
        first, *rest = (
            Job(list(prompt), max_tokens, **options) for _ in range(samples)
        )
        first.siblings = rest
        self.scheduler.add([first])
        return first

    def step(self) -> list[Work]:
        scheduler = self.scheduler
        works = scheduler.schedule()
        self.steps.append(works)
        self.check(works)
        assert works or not scheduler.jobs, "somebody waits, and nobody runs"
        self.commit(works)
        return works

    def commit(self, works: list[Work]) -> None:
        tokens = [1000 + len(work.job.tokens) for work in works if work.samples]
        before = set(self.scheduler.jobs.values())
        self.scheduler.begin(works)
        new = self.scheduler.commit(works, tokens)
        assert all(job.tokens[-1] == token for job, token in new)
        self.ended += before - set(self.scheduler.jobs.values())

    def check(self, works: Sequence[Work]) -> None:
        scheduler = self.scheduler
        assert sum(work.length for work in works) <= scheduler.max_num_batched_tokens
        assert len({work.job for work in works}) == len(works)
        assert len(scheduler.running) <= scheduler.max_num_seqs
        for work in works:
            job = work.job
            assert job in scheduler.running and work.start == job.computed
            assert 1 <= work.length <= job.missing
            assert work.length <= (scheduler.prefill_chunk or math.inf)
            assert work.samples == (work.start + work.length == len(job.tokens))
        for queue in (scheduler.waiting, scheduler.running):
            ranks = [job.rank for job in queue]
            assert ranks == sorted(ranks)
        assert all(job.computed == 0 for job in scheduler.waiting)
        self.manager.check_integrity()

    def finish(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.jobs:
                break
            self.step()
        assert not self.scheduler.jobs, "starved"
        assert not self.scheduler.running and not self.scheduler.waiting
        assert not self.scheduler.deadlines
        self.manager.check_integrity()


def first_steps(run: Run) -> dict[Job, int]:
    """The step in which each job computed something for the first time."""
    found: dict[Job, int] = {}
    for number, works in enumerate(run.steps):
        for work in works:
            found.setdefault(work.job, number)
    return found


def spans(run: Run, job: Job) -> list[tuple[int, int]]:
    return [(w.start, w.length) for works in run.steps for w in works if w.job is job]


# One step


def test_decodes_and_chunks_share_the_budget() -> None:
    run = Run(Unlimited(), max_num_batched_tokens=10, prefill_chunk=8)
    short, long = run.add(2, max_tokens=9), run.add(30)
    lengths = [[(w.job, w.length) for w in run.step()] for _ in range(5)]
    assert lengths == [
        [(short, 2), (long, 8)],
        [(short, 1), (long, 8)],
        [(short, 1), (long, 8)],
        [(short, 1), (long, 6)],
        [(short, 1), (long, 1)],
    ]


def test_several_prompts_fit_one_step() -> None:
    run = Run(Unlimited(), max_num_batched_tokens=16, prefill_chunk=6)
    jobs = [run.add(5) for _ in range(4)]
    assert [(w.job, w.length) for w in run.step()] == [
        *((job, 5) for job in jobs[:3]),
        (jobs[3], 1),
    ]


def test_prompts_stay_whole_without_chunks() -> None:
    run = Run(Unlimited(), max_num_batched_tokens=20, prefill_chunk=None)
    first, second = run.add(15), run.add(12)
    assert [w.job for w in run.step()] == [first]
    run.finish()
    assert spans(run, second)[0] == (0, 12)


def test_static_batches_take_no_newcomers() -> None:
    run = Run(Unlimited(), max_num_seqs=2, continuous=False)
    jobs = [run.add(2, max_tokens=n) for n in (1, 8, 1, 1)]
    run.finish()
    starts = first_steps(run)
    assert starts[jobs[0]] == starts[jobs[1]] == 0
    assert starts[jobs[2]] == starts[jobs[3]] == 8
    run = Run(Unlimited(), max_num_seqs=2)
    jobs = [run.add(2, max_tokens=n) for n in (1, 8, 1, 1)]
    run.finish()
    assert [first_steps(run)[job] for job in jobs] == [0, 0, 1, 2]


def test_static_batches_take_no_samples_either() -> None:
    """A sample that would start in an emptied place waits for the next batch."""
    run = Run(PageManager(100, 4), continuous=False)
    short, long = run.add(3, max_tokens=1), run.add(20, max_tokens=6, samples=3)
    samples = list(long.siblings)
    run.finish()
    starts = first_steps(run)
    assert starts[short] == starts[long] == 0
    last = max(n for n, works in enumerate(run.steps) for w in works if w.job is long)
    assert [starts[job] for job in samples] == [last + 1] * 2


# Ends


def test_a_job_ends_at_its_last_token() -> None:
    run = Run(Unlimited())
    stopped = Job([1, 2], 10, stop_ids=frozenset({1004}))
    run.scheduler.add([stopped])
    long = run.add(2, max_tokens=5)
    run.finish()
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == [1, 2, 1002, 1003, 1004]
    assert long.finish_reason == "length" and long.num_output == 5


def test_deadlines_end_jobs_wherever_they_are() -> None:
    run = Run(Unlimited(), max_num_seqs=1)
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
    jobs = [run.add(3, max_tokens=4) for _ in range(3)]
    works = run.scheduler.schedule()
    run.scheduler.finish(jobs[1], "abort")
    run.commit(works)
    assert [job.num_output for job in jobs] == [1, 0, 1]
    run.finish()
    assert [job.finish_reason for job in jobs] == ["length", "abort", "length"]
    assert manager.usage == 0


def test_finish_counts_once() -> None:
    run = Run(Unlimited())
    job = run.add(2)
    run.scheduler.finish(job, "abort")
    run.scheduler.finish(job, "error")
    assert job.finish_reason == "abort"


# The queue


def test_a_full_queue_takes_all_or_nothing() -> None:
    scheduler = Scheduler(
        Unlimited(), max_num_seqs=1, max_num_batched_tokens=4, max_waiting=3
    )
    scheduler.add([Job([1], 1), Job([1], 1)])
    with pytest.raises(QueueFullError, match="2 requests wait and 2 came"):
        scheduler.add([Job([1], 1), Job([1], 1)])
    with pytest.raises(QueueFullError):
        scheduler.add([Job([1, 2], 1, siblings=[Job([1, 2], 1)])])
    assert scheduler.num_waiting == 2
    scheduler.add([Job([1], 1)])
    scheduler.schedule()
    scheduler.add([Job([1], 1)])  # one runs, so that there is room for one


def test_fifo_within_a_priority() -> None:
    run = Run(Unlimited(), max_num_seqs=1)
    jobs = [run.add(2, priority=n % 2) for n in range(6)]
    run.finish()
    starts = first_steps(run)
    order = sorted(jobs, key=starts.__getitem__)
    assert order == jobs[::2] + jobs[1::2]


def test_a_priority_overtakes_so_many_and_no_more() -> None:
    run = Run(Unlimited(), max_num_seqs=1, overtakes=3)
    patient = run.add(2, priority=1)
    urgent = [run.add(2) for _ in range(6)]
    run.finish()
    starts = first_steps(run)
    assert sum(starts[job] < starts[patient] for job in urgent) == 3


@pytest.mark.parametrize(("seqs", "tokens"), [(0, 4), (5, 4), (-1, 0)])
def test_limits_that_let_nothing_run_are_refused(seqs: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_num_seqs is {seqs}"):
        Scheduler(Unlimited(), max_num_seqs=seqs, max_num_batched_tokens=tokens)


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_of_nothing_is_refused(chunk: int) -> None:
    with pytest.raises(ValueError, match=f"prefill_chunk is {chunk}; expected at l"):
        Scheduler(
            Unlimited(), max_num_seqs=1, max_num_batched_tokens=4, prefill_chunk=chunk
        )


# Memory


def test_admission_waits_for_room_for_the_whole_prompt() -> None:
    run = Run(Pool(20))
    first, second = run.add(12, max_tokens=4), run.add(12, max_tokens=1)
    while first.finish_reason is None:
        assert second.computed == 0
        run.step()
    run.finish()
    assert run.scheduler.preemptions == 0


def test_the_last_in_line_gives_way_and_comes_back() -> None:
    run = Run(Pool(16))
    first, second = run.add(6, max_tokens=8), run.add(6, max_tokens=8)
    run.finish()
    assert first.preemptions == 0 and second.preemptions == 1
    assert first.num_output == second.num_output == 8
    assert second.tokens[6:] == list(range(1006, 1014))
    restarts = [start for start, _ in spans(run, second)].count(0)
    assert restarts == 2


def test_who_gave_way_keeps_his_place() -> None:
    run = Run(Pool(16))
    run.add(6, max_tokens=8)
    second = run.add(6, max_tokens=8)
    third = run.add(5, max_tokens=1)  # would fit when the second has given way
    run.finish()
    assert second.preemptions == 1
    again = [n for n, works in enumerate(run.steps) for w in works if w.job is second]
    assert first_steps(run)[third] >= again[3]  # two steps before, then from the start


def test_a_low_priority_gives_way_first() -> None:
    run = Run(Pool(16))
    low = run.add(6, max_tokens=8, priority=1)
    high = run.add(6, max_tokens=8)
    run.finish()
    assert (low.preemptions, high.preemptions) == (1, 0)


def test_who_finds_no_room_waits_and_keeps_what_he_has() -> None:
    run = Run(PageManager(4, 4, share=False), prefill_chunk=16)
    first, second = run.add(5, max_tokens=3), run.add(7, max_tokens=4)
    third = run.add(1, max_tokens=1)
    run.step()  # both prompts; all four pages are taken
    assert [w.job for w in run.step()] == [first, second]
    assert [w.job for w in run.step()] == [first]  # the second would need a page
    assert first.finish_reason == "length"
    run.finish()
    assert second.preemptions == third.preemptions == 0


def test_a_prompt_that_needs_most_of_the_room_runs_alone() -> None:
    manager = PageManager(40, 4, window=8, max_chunk=6)
    assert manager.free_tokens < 120 < manager.max_tokens
    run = Run(manager)
    jobs = [run.add(3), run.add(120), run.add(3)]
    run.finish()
    assert all(job.finish_reason == "length" for job in jobs)
    assert jobs[1].preemptions == 0


def test_a_blocked_head_is_not_asked_again_in_vain() -> None:
    class Counting(Pool):
        added = 0

        def add(self, sequence: int, tokens: Sequence[int]) -> int:
            self.added += 1
            return super().add(sequence, tokens)

    manager = Counting(40)
    run = Run(manager)
    run.add(5, max_tokens=30)
    run.add(38, max_tokens=1)
    for _ in range(20):
        run.step()
    # The first job once; the second at first, and when a prompt is done it might share.
    assert manager.added == 3


def test_a_blocked_head_starts_as_soon_as_there_is_room() -> None:
    run = Run(Pool(20), prefill_chunk=12)
    run.add(6, max_tokens=1)
    run.add(4, max_tokens=9)
    blocked = run.add(11, max_tokens=1)
    run.step()
    assert blocked.computed == 0
    assert [work.job for work in run.step()][-1] is blocked


@pytest.mark.parametrize(
    ("manager", "jobs", "start"),
    [
        (SlotManager(2, 200), [(150, 50), (150, 50)], 6),
        (PageManager(120, 16, window=128, max_chunk=16), [(600, 300), (500, 20)], 26),
    ],
)
def test_a_blocked_head_starts_once_less_is_promised(
    manager: Manager, jobs: list[tuple[int, int]], start: int
) -> None:
    """What is promised shrinks with each chunk, what is free does not or less."""
    run = Run(manager, max_num_batched_tokens=64, prefill_chunk=16)
    for number, (length, most) in enumerate(jobs):
        prompt = list(range(1000 * number, 1000 * number + length))  # nothing shared
        run.scheduler.add([Job(prompt, most)])
    run.finish()
    assert sorted(first_steps(run).values()) == [0, start]


# Samples of one prompt


def test_samples_start_from_one_prompt() -> None:
    manager = PageManager(40, 4, window=8)
    run = Run(manager, max_num_batched_tokens=64, prefill_chunk=64)
    job = run.add(11, samples=3, max_tokens=4)
    family = [job, *job.siblings]
    lengths = [[w.length for w in run.step()] for _ in range(2)]
    assert lengths == [[10], [1, 1, 1]]
    run.finish()
    assert all(j.finish_reason == "length" and j.num_output == 4 for j in family)
    assert manager.usage == 0


@pytest.mark.parametrize("manager", [SlotManager(4, 64), Unlimited(), Pool(200)])
def test_samples_compute_their_prompt_where_it_cannot_be_shared(
    manager: Manager,
) -> None:
    run = Run(manager)
    job = run.add(11, samples=3)
    family = [job, *job.siblings]
    run.finish()
    assert all(spans(run, j)[0][0] == 0 and j.num_output == 3 for j in family)


def test_samples_go_on_without_the_first() -> None:
    run = Run(PageManager(40, 4, window=8))
    job = run.add(30, samples=3)
    siblings = list(job.siblings)
    run.step()
    run.scheduler.finish(siblings[0], "abort")
    run.scheduler.finish(job, "abort")
    run.finish()
    assert siblings[1].finish_reason == "length"


def test_samples_of_a_prompt_that_is_cached_but_for_a_token() -> None:
    run = Run(PageManager(40, 4))
    run.add(9, samples=1)
    run.finish()
    job = run.add(9, samples=3)
    family = [job, *job.siblings]
    assert [w.job for w in run.step()] == [job]
    assert {w.job for w in run.step()} == set(family)
    run.finish()
    assert [j.cached for j in family] == [8, 8, 8]


# Any order of things


def managers() -> st.SearchStrategy[Manager]:
    """All kinds of bookkeeping, tight ones above all."""
    page_managers = st.builds(
        PageManager,
        st.integers(22, 60),
        st.sampled_from([1, 2, 4]),
        window=st.sampled_from([None, 3, 8]),
        share=st.booleans(),
        max_chunk=st.just(6),
    )
    return st.one_of(
        page_managers,
        st.builds(Pool, st.integers(24, 80)),
        st.builds(SlotManager, st.integers(1, 3), st.just(24)),
        st.builds(Unlimited),
    )


class Anything(RuleBasedStateMachine):
    """Requests come, run, are aborted and expire in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.run_: Run | None = None
        self.jobs: list[Job] = []
        self.now = 0.0

    @precondition(lambda self: self.run_ is None)
    @rule(
        manager=managers(),
        seqs=st.integers(1, 5),
        budget=st.integers(5, 20),
        overtakes=st.integers(0, 4),
        continuous=st.booleans(),
    )
    def begin(
        self, manager: Manager, seqs: int, budget: int, overtakes: int, continuous: bool
    ) -> None:
        self.run_ = Run(
            manager,
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
    )
    def submit(
        self, share: float, output: int, priority: int, samples: int, seconds: float
    ) -> None:
        assert self.run_ is not None
        length = max(1, round(share * (self.room - output)))
        job = self.run_.add(
            length,
            output,
            priority=priority,
            samples=samples,
            deadline=self.now + seconds,
        )
        family = [j for j in self.run_.scheduler.jobs.values() if j not in self.jobs]
        assert len(family) == samples and job in family
        self.jobs += family

    @precondition(lambda self: self.run_ is not None and self.run_.scheduler.jobs)
    @rule(count=st.integers(1, 6))
    def advance(self, count: int) -> None:
        assert self.run_ is not None
        for _ in range(count):
            self.run_.step()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), in_between=st.booleans())
    def abort(self, data: st.DataObject, in_between: bool) -> None:
        assert self.run_ is not None
        job = data.draw(st.sampled_from(self.jobs))
        works = self.run_.scheduler.schedule() if in_between else []
        alive = job.finish_reason is None
        self.run_.scheduler.finish(job, "abort")
        assert (job.finish_reason == "abort") or not alive
        self.run_.commit(works)

    @precondition(lambda self: self.run_ is not None)
    @rule()
    def tick(self) -> None:
        assert self.run_ is not None
        self.now += 1.0
        for job in self.run_.scheduler.expire(self.now):
            assert job.deadline < self.now and job.finish_reason == "timeout"

    @invariant()
    def nothing_is_lost(self) -> None:
        if self.run_ is None:
            return
        scheduler = self.run_.scheduler
        alive = {job for job in self.jobs if job.finish_reason is None}
        assert set(scheduler.jobs.values()) == alive
        parked = {s for job in alive for s in job.siblings if s in alive}
        placed = [*scheduler.waiting, *scheduler.running]
        assert len(placed) == len(set(placed))
        assert set(placed) | parked == alive and not set(placed) & parked
        for job in self.jobs:
            assert job.finish_reason in REASONS or job in alive
            assert job.num_output <= job.max_tokens
            # Whatever was recomputed, the tokens are those of an undisturbed run.
            assert job.tokens == [
                *range(job.num_prompt),
                *range(1000 + job.num_prompt, 1000 + len(job.tokens)),
            ]
        self.run_.manager.check_integrity()

    def teardown(self) -> None:
        if self.run_ is None:
            return
        self.run_.finish()
        self.nothing_is_lost()
        manager = self.run_.manager
        assert manager.usage == 0, "something was not given back"
        if isinstance(manager, PageManager):
            assert manager.free_pages == manager.num_pages
            assert not manager.tables
        if isinstance(manager, Pool):
            assert not manager.lengths


Anything.TestCase.settings = settings(
    max_examples=120, stateful_step_count=25, deadline=None
)
TestAnything = Anything.TestCase


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), max_size=12),
    st.integers(1, 6),
    st.integers(0, 20),
)
def test_decodes_never_wait_for_prompts(
    jobs: list[tuple[int, int]], seqs: int, spare: int
) -> None:
    """With memory for all, whoever decodes gets a token in every step."""
    run = Run(Unlimited(), max_num_seqs=seqs, max_num_batched_tokens=seqs + spare)
    for length, output in jobs:
        run.add(length, output)
        decoding = [j for j in run.scheduler.running if j.missing == 1]
        assert set(decoding) <= {work.job for work in run.step()}
    while run.scheduler.jobs:
        decoding = [j for j in run.scheduler.running if j.missing == 1]
        works = run.step()
        assert set(decoding) <= {work.job for work in works}
        prefills = [j for j in run.scheduler.running if j.missing > 1]
        if prefills and not works[-1].samples:
            assert sum(w.length for w in works) > len(decoding)  # these go on, too


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=2, max_size=40),
    st.integers(0, 5),
)
def test_nobody_is_overtaken_too_often(
    arrivals: list[tuple[int, int]], overtakes: int
) -> None:
    """A job is overtaken `overtakes` times a level of priority, and never by less."""
    run = Run(Unlimited(), max_num_seqs=2, overtakes=overtakes)
    jobs = []
    for priority, steps in arrivals:
        jobs.append(run.add(2, 2, priority=priority))
        for _ in range(steps - 1):
            run.step()
    run.finish()
    starts = first_steps(run)
    for place, job in enumerate(jobs):
        for ahead in (0, 1, 2):
            passed = [
                other
                for other in jobs[place + 1 :]
                if starts[other] < starts[job]
                if job.priority - other.priority == ahead
            ]
            assert len(passed) <= ahead * overtakes
        assert all(
            starts[other] >= starts[job]
            for other in jobs[place + 1 :]
            if other.priority >= job.priority
        )


def test_who_shares_a_prompt_starts_once_it_is_computed() -> None:
    """Before that, each of them would need all the pages of its own."""
    scheduler = Scheduler(
        PageManager(60, 16),
        max_num_seqs=8,
        max_num_batched_tokens=256,
        prefill_chunk=64,
    )
    jobs = [Job(list(range(600)), 100) for _ in range(3)]
    scheduler.add(jobs)
    started: dict[Job, int] = {}
    for step in range(12):
        works = scheduler.schedule()
        for work in works:
            started.setdefault(work.job, step)
        scheduler.begin(works)
        scheduler.commit(works, [5] * sum(work.samples for work in works))
    assert [started[job] for job in jobs] == [0, 10, 10]
