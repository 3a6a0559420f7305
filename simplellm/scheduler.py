"""Who computes how many tokens in the next step: iteration-level scheduling.

Plain Python, no tensors. A step takes one token from each job that decodes and chunks
of the prompts of others, all under one budget (Orca, Yu et al. 2022; Sarathi-Serve,
Agrawal et al. 2024). When the cache runs full, the last in line gives up its room and
computes its tokens again later.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from simplellm.cache import Manager

UNKNOWN = -1  # stands for a token that is being computed


class QueueFullError(RuntimeError):
    """More requests would wait than the queue may hold."""


@dataclass(eq=False)
class Job:
    """One sequence: its tokens, how many of them are computed, its place in line."""

    tokens: list[int]  # the prompt; the output is appended in place
    max_tokens: int  # of output
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0  # the lower, the sooner, as in vLLM
    deadline: float = math.inf  # by the clock that `Scheduler.expire` is told
    siblings: "list[Job]" = field(default_factory=list)  # more samples of its prompt
    number: int = -1  # given by `Scheduler.add`; names it in the cache
    rank: tuple[int, ...] = ()  # its place in line: the least goes first
    computed: int = 0  # tokens that the cache holds
    cached: int | None = None  # how many of the prompt it held when the job came
    preemptions: int = 0
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one can be sampled: 1 in a decode."""
        return len(self.tokens) - self.computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def complete(self) -> bool:
        """Its last token is there, or at least being computed."""
        return self.num_output >= self.max_tokens


class Work(NamedTuple):
    """One job's part in a step: ``length`` of its tokens from ``start`` on."""

    job: Job
    start: int
    length: int
    samples: bool  # these are its last ones, so that the step gives it a new token


by_rank = attrgetter("rank")


def discard(queue: list[Job], job: Job) -> bool:
    """Take ``job`` out of a queue sorted by rank; False if it is not in it."""
    place = bisect_left(queue, job.rank, key=by_rank)
    found = place < len(queue) and queue[place] is job
    if found:
        del queue[place]
    return found


class Scheduler:
    """Decides for each step who computes what, and keeps the cache's books.

    ``max_num_seqs`` jobs run at once. A step computes at most
    ``max_num_batched_tokens`` tokens, and at most ``prefill_chunk`` of one prompt; None
    leaves prompts whole. ``max_waiting`` jobs may wait. A job overtakes at most
    ``overtakes`` earlier ones for each level of priority that it is ahead of them, so
    that nobody waits forever. Without ``continuous``, no job joins once a running one
    has ended, until all have. Raises ValueError for limits that let nothing run.
    """

    def __init__(
        self,
        manager: Manager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_chunk: int | None = None,
        max_waiting: int = 10_000,
        overtakes: int = 100,
        continuous: bool = True,
    ) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs is {max_num_seqs} and max_num_batched_tokens "
                f"{max_num_batched_tokens}; expected at least one sequence, and a "
                "token for each of them"
            )
        if prefill_chunk is not None and prefill_chunk < 1:
            raise ValueError(
                f"prefill_chunk is {prefill_chunk}; expected at least 1, or None"
            )
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefill_chunk = prefill_chunk
        self.max_waiting = max_waiting
        self.overtakes = overtakes
        self.continuous = continuous
        self.jobs: dict[int, Job] = {}  # all that have not ended, by number
        self.waiting: list[Job] = []  # this queue and the next one are sorted by rank
        self.running: list[Job] = []  # those that hold room in the cache
        self.deadlines: list[tuple[float, int]] = []
        self.preemptions = 0
        self._count = 0
        self._closed = False  # to newcomers, until the running jobs have ended
        self._refused = (-1, 0)  # who did not fit last, and how much room was spare

    @property
    def num_waiting(self) -> int:
        """Jobs that wait, samples that wait for their prompt included."""
        return len(self.jobs) - len(self.running)

    def add(self, jobs: Sequence[Job]) -> None:
        """Put jobs and their siblings in line. Raises QueueFullError, taking none."""
        families = [[job, *job.siblings] for job in jobs]
        count = sum(map(len, families))
        if self.num_waiting + count > self.max_waiting:
            raise QueueFullError(
                f"{self.num_waiting} requests wait and {count} came; expected at most "
                f"{self.max_waiting} to wait"
            )
        for family in families:
            for job in family:
                job.number = self._count
                place = job.number + job.priority * self.overtakes
                job.rank = (place, job.priority, job.number)
                self.jobs[job.number] = job
                self._count += 1
                if job.deadline < math.inf:
                    insort(self.deadlines, (job.deadline, job.number))
            insort(self.waiting, family[0], key=by_rank)
            if family[0].num_prompt == 1:  # nothing to share
                self._release_siblings(family[0])

    def schedule(self) -> list[Work]:
        """What to compute now: decodes, then prompts under way, then new jobs."""
        works: list[Work] = []
        busy: set[int] = set()
        budget = self.max_num_batched_tokens
        for decodes in (True, False):
            place = 0
            while place < len(self.running) and budget > 0:
                job = self.running[place]
                place += 1
                if (job.missing == 1) != decodes or job.number in busy or job.complete:
                    continue
                length = self._chunk(job, budget)
                if length and self._make_room(job, length, busy):
                    works.append(self._work(job, length))
                    busy.add(job.number)
                    budget -= length
        if not self.running:
            self._closed = False
        if not self._closed:
            self._admit(works, budget)
        return works

    def begin(self, works: Sequence[Work]) -> None:
        """Book a step whose results will come: what it computes counts as there.

        The tokens that it samples are UNKNOWN until `commit`. The next step can be
        scheduled meanwhile, since it takes their number and not their names.
        """
        for job, start, length, samples in works:
            if job.finish_reason is not None:  # it was aborted meanwhile
                continue
            job.computed = start + length
            self.manager.commit(job.number, job.tokens, job.computed)
            if samples:
                job.tokens.append(UNKNOWN)
                if length > 1:  # a prompt is done, and who shares it needs less room
                    self._refused = (-1, 0)
            elif job.siblings and job.missing == 1:
                self._release_siblings(job)

    def commit(
        self, works: Sequence[Work], tokens: Sequence[int]
    ) -> list[tuple[Job, int]]:
        """Book the results of a step: one of ``tokens`` for each work that samples.

        Returns the jobs that got a token, and ends those that it was the last of.
        """
        sampling = [work for work in works if work.samples]
        new = []
        for (job, start, length, _), token in zip(sampling, tokens, strict=True):
            if job.finish_reason is not None:
                continue
            place = start + length
            job.tokens[place] = token
            new.append((job, token))
            if token in job.stop_ids:
                self.finish(job, "stop")
            elif place + 1 - job.num_prompt == job.max_tokens:
                self.finish(job, "length")
        return new

    def finish(self, job: Job, reason: str) -> None:
        """End a job, wherever it is, and give back its room; once only."""
        if job.finish_reason is not None:
            return
        job.finish_reason = reason
        del self.jobs[job.number]
        if job.deadline < math.inf:
            del self.deadlines[bisect_left(self.deadlines, (job.deadline, job.number))]
        if discard(self.running, job):
            self.manager.remove(job.number)
            self._closed = not self.continuous
        else:
            discard(self.waiting, job)
        self._release_siblings(job)

    def expire(self, now: float) -> list[Job]:
        """End the jobs whose deadline is over."""
        late = self.deadlines[: bisect_left(self.deadlines, (now, -1))]
        expired = [self.jobs[number] for _, number in late]
        for job in expired:
            self.finish(job, "timeout")
        return expired

    def _work(self, job: Job, length: int) -> Work:
        return Work(job, job.computed, length, length == job.missing)

    def _chunk(self, job: Job, budget: int) -> int:
        """How many tokens of ``job`` to compute in this step."""
        wanted = job.missing
        if job.siblings and wanted > 1:  # each sample computes the prompt's last token
            wanted -= 1
        if self.prefill_chunk is None:
            return wanted if wanted <= budget else 0
        return min(wanted, self.prefill_chunk, budget)

    def _make_room(self, job: Job, length: int, busy: set[int]) -> bool:
        """Room for ``length`` more tokens, at the cost of who comes last if need be."""
        while not self.manager.grow(job.number, job.computed + length):
            behind = reversed(self.running)
            victim = next(other for other in behind if other.number not in busy)
            if victim is job:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, job: Job) -> None:
        discard(self.running, job)
        self.manager.remove(job.number)
        job.computed = 0
        job.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, job, key=by_rank)

    def _admit(self, works: list[Work], budget: int) -> None:
        """Let the first in line start, as long as there is room for their tokens."""
        promised = sum(map(attrgetter("missing"), self.running))
        promised -= sum(work.length for work in works)
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            job, spare = self.waiting[0], self.manager.free_tokens - promised
            if job.tokens[-1] == UNKNOWN:
                return  # preempted just now; its pages cannot be looked up yet
            refused, room = self._refused
            if self.running and refused == job.number and spare <= room:
                return  # as little room as the last time
            job.computed = self.manager.add(job.number, job.tokens)
            length = self._chunk(job, budget)
            fits = promised + job.missing <= self.manager.free_tokens
            fits = fits or not self.running  # alone, it may use all there is
            end = job.computed + length
            if length == 0 or not fits or not self.manager.grow(job.number, end):
                self.manager.remove(job.number)
                job.computed = 0
                if length > 0:  # it was not the budget
                    self._refused = (job.number, spare)
                return
            del self.waiting[0]
            insort(self.running, job, key=by_rank)
            if job.cached is None:
                job.cached = job.computed
            works.append(self._work(job, length))
            promised += job.missing - length
            budget -= length
            if job.missing == 1:
                self._release_siblings(job)

    def _release_siblings(self, job: Job) -> None:
        """Start the other samples from what is computed of their prompt, or line up."""
        siblings, job.siblings = job.siblings, []
        for sibling in siblings:
            if sibling.finish_reason is not None:
                continue
            if (
                job.finish_reason is None
                and job.computed > 0
                and not self._closed
                and len(self.running) < self.max_num_seqs
                and self.manager.fork(job.number, sibling.number)
            ):
                sibling.computed = sibling.cached = job.computed
                insort(self.running, sibling, key=by_rank)
            else:
                insort(self.waiting, sibling, key=by_rank)
