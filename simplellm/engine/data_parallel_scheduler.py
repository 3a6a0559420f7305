"""Schedulers of several ranks as one: who gets a request, and what all compute next."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from simplellm.base.replica_choice import rank_replicas
from simplellm.base.request import Request
from simplellm.engine.page_manager import PageManager
from simplellm.engine.request_queues import check_waiting
from simplellm.engine.scheduler import ScheduledChunk, Scheduler
from simplellm.engine.snapshot import PagesSnapshot, join_pages


class PageManagers:
    """What is asked of the page managers of all ranks, as of one `PageManager`."""

    def __init__(self, managers: Sequence[PageManager]) -> None:
        self.managers = managers

    @property
    def usage(self) -> float:
        return sum(one.usage for one in self.managers) / len(self.managers)

    @property
    def loaded_tokens(self) -> int:
        return sum(one.loaded_tokens for one in self.managers)

    def snapshot(self) -> PagesSnapshot:
        return join_pages([one.snapshot() for one in self.managers])


def num_cached(manager: PageManager, tokens: Sequence[int]) -> int:
    """How many of the first ``tokens`` a new sequence would find."""
    # Those on the host as well, without bringing them back.
    return len(PageManager._cached_prefix(manager, tokens)) * manager.page_size


class DataParallelScheduler:
    """The `Scheduler` of each of several ``ranks``, asked as one, rank by rank.

    A request stays with its rank: where most of its prompt is cached, unless that one
    has much more to do than another, or else where the fewest requests are. If drafts
    are checked, each rank chooses its own. At most ``max_waiting`` requests wait, of
    all together.
    """

    def __init__(self, ranks: Sequence[Scheduler], max_waiting: int) -> None:
        self.ranks, self.max_waiting = ranks, max_waiting
        self.manager = PageManagers([one.manager for one in ranks])
        self.max_num_seqs = ranks[0].max_num_seqs
        self.finished = ranks[0].finished  # requests by finish_reason
        for one in ranks:
            one.finished = self.finished
        self.turn = 0  # requests so far, which break ties

    @property
    def requests(self) -> Mapping[int, Request]:
        return ChainMap(*(one.requests for one in self.ranks))

    @property
    def waiting(self) -> list[Request]:
        return [*chain(*(one.waiting for one in self.ranks))]

    @property
    def running(self) -> list[Request]:
        return [*chain(*(one.running for one in self.ranks))]

    @property
    def num_waiting(self) -> int:
        return sum(one.num_waiting for one in self.ranks)

    @property
    def speculator(self) -> Any:
        """The first rank's, which counts the drafts of all; None: nobody drafts."""
        return getattr(self.ranks[0], "speculator", None)

    @property
    def preemptions(self) -> int:
        return sum(one.preemptions for one in self.ranks)

    def _of(self, request_id: int) -> Scheduler | None:
        """The rank's that has a request; None if that has ended."""
        return next((one for one in self.ranks if request_id in one.requests), None)

    def _choose(self, request: Request) -> int:
        """The rank for a new request."""
        numbers, count = range(len(self.ranks)), len(request.tokens)
        loads = {n: len(self.ranks[n].requests) for n in numbers}
        cached = {n: num_cached(self.ranks[n].manager, request.tokens) for n in numbers}
        self.turn += 1
        order = rank_replicas(
            loads, cached, count, lambda n: (n - self.turn) % len(numbers)
        )
        return order[0]

    def add(self, requests: Sequence[Request]) -> None:
        """`Scheduler.add`: each of these with its siblings to one of the ranks."""
        check_waiting(self.num_waiting, self.max_waiting)
        for first in requests:
            self.ranks[self._choose(first)].add([first])

    def withdraw(self, requests: Sequence[Request]) -> None:
        for first in requests:
            (self._of(first.request_id) or self.ranks[0]).withdraw([first])

    def finish(self, request: Request, reason: str) -> None:
        if (one := self._of(request.request_id)) is not None:
            one.finish(request, reason)

    def expire(self, now: float) -> list[Request]:
        return [*chain(*(one.expire(now) for one in self.ranks))]

    def close(self) -> None:
        for one in self.ranks:
            one.close()

    def schedule(self) -> list[ScheduledChunk]:
        return [*chain(*(one.schedule() for one in self.ranks))]

    def update_after_launch(self, scheduled: Sequence[ScheduledChunk]) -> None:
        for one in self.ranks:
            part = [c for c in scheduled if c.request.request_id in one.requests]
            one.update_after_launch(part)

    def update_from_output(
        self, scheduled: Sequence[ScheduledChunk], tokens: Sequence[Sequence[int]]
    ) -> list[tuple[Request, Sequence[int]]]:
        new = []
        sampling = [c.request.request_id for c in scheduled if c.samples]
        sampled = dict(zip(sampling, tokens, strict=True))
        for one in self.ranks:
            part = [c for c in scheduled if c.request.request_id in one.requests]
            if part:
                numbers = [c.request.request_id for c in part if c.samples]
                new += one.update_from_output(part, [sampled[n] for n in numbers])
        return new
