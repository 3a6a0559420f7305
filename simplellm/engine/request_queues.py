"""Who waits and who runs: how requests come in, fork, and leave.

Bookkeeping only; no tensors. `Scheduler` adds to them who computes what.
"""

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter

from simplellm.base.request import QueueFullError, Request
from simplellm.engine.page_manager import PageManager

by_queue_key = attrgetter("queue_key")


def discard(queue: list[Request], request: Request) -> bool:
    """Take ``request`` out of a queue sorted by queue_key; False if it is not in it."""
    index = bisect_left(queue, request.queue_key, key=by_queue_key)
    queued = index < len(queue) and queue[index] is request
    if queued:
        del queue[index]
    return queued


def check_waiting(number: int, most: int) -> None:
    """Raise QueueFullError if so many requests wait that no more may."""
    if number >= most:
        raise QueueFullError(
            f"{number} requests wait already; expected fewer than {most}, "
            "EngineConfig's max_waiting"
        )


@dataclass(eq=False)
class RequestQueues:
    """All requests that have not ended, in queues sorted by `Request.queue_key`."""

    manager: PageManager
    _: KW_ONLY
    max_num_seqs: int  # requests that run at once
    max_waiting: int = 10_000  # requests; more are refused
    # Earlier requests that one may overtake for each level of priority that it is ahead
    # of them: so nobody waits forever.
    overtakes: int = 100
    # False: once a running request has ended, none joins until all have.
    continuous: bool = True

    def __post_init__(self) -> None:
        self.requests: dict[int, Request] = {}  # all that have not ended, by id
        # This queue and the next one are sorted by queue_key.
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # those that hold pages of the cache
        self.deadlines: list[tuple[float, int]] = []
        self.finished: Counter[str] = Counter()  # requests by finish_reason
        self._ended = False  # one of those that run together, for static batches

    @property
    def num_waiting(self) -> int:
        """Requests that wait, samples that wait for their prompt included."""
        return len(self.requests) - len(self.running)

    @property
    def can_join(self) -> bool:
        """Whether one more request may run."""
        closed = self._ended and self.running and not self.continuous
        return len(self.running) < self.max_num_seqs and not closed

    def add(self, requests: Sequence[Request]) -> None:
        """Put requests, each with an id of its own, and their siblings in line.

        A call is taken whole, however large, or not at all: raises QueueFullError if
        ``max_waiting`` requests wait already.
        """
        check_waiting(self.num_waiting, self.max_waiting)
        for first in requests:
            for request in (first, *first.siblings):
                index = request.request_id + request.priority * self.overtakes
                request.queue_key = (index, request.priority, request.request_id)
                self.requests[request.request_id] = request
                if request.deadline < math.inf:
                    insort(self.deadlines, (request.deadline, request.request_id))
            insort(self.waiting, first, key=by_queue_key)
            if first.num_prompt == 1:  # nothing to share
                self.release_siblings(first)

    def withdraw(self, requests: Sequence[Request]) -> None:
        """Undo an `add` that was interrupted, wherever that was."""
        for first in requests:
            siblings, first.siblings = first.siblings, []
            for request in (first, *siblings):
                request.finish_reason = "abort"
                if self.requests.pop(request.request_id, None) is not None:
                    discard(self.waiting, request)
        remaining = self.requests
        self.deadlines = [entry for entry in self.deadlines if entry[1] in remaining]

    def start_running(self, request: Request) -> None:
        """Move a request to those that run; there are pages for it."""
        if not self.running:
            self._ended = False
        insort(self.running, request, key=by_queue_key)

    def requeue(self, request: Request) -> None:
        """Put a running request back in line; its queue_key says where."""
        discard(self.running, request)
        insort(self.waiting, request, key=by_queue_key)

    def finish(self, request: Request, reason: str) -> None:
        """End a request, wherever it is, and give back its pages; once only."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        self.finished[reason] += 1
        del self.requests[request.request_id]
        if request.deadline < math.inf:
            entry = (request.deadline, request.request_id)
            del self.deadlines[bisect_left(self.deadlines, entry)]
        if discard(self.running, request):
            self.manager.remove(request.request_id)
            self._ended = True
        else:
            discard(self.waiting, request)
        self.release_siblings(request)

    def expire(self, now: float) -> list[Request]:
        """End the requests whose deadline is over."""
        late = self.deadlines[: bisect_left(self.deadlines, (now, -1))]
        expired = [self.requests[request_id] for _, request_id in late]
        for request in expired:
            self.finish(request, "timeout")
        return expired

    def close(self) -> None:
        """Let go of what takes memory, once no step will come. The counts stay."""

    def release_siblings(self, request: Request) -> None:
        """Start the other samples from what is computed of their prompt, or line up."""
        siblings, request.siblings = request.siblings, []
        for sibling in siblings:
            if sibling.finish_reason is not None:
                continue
            begun = request.finish_reason is None and request.num_computed_tokens > 0
            if begun and self.can_join:
                self.manager.fork(request.request_id, sibling.request_id)
                # What it begins with is computed, by the request's own step.
                sibling.num_computed_tokens = request.num_computed_tokens
                sibling.num_cached_tokens = request.num_computed_tokens
                sibling.first_scheduled_time = request.first_scheduled_time
                self.start_running(sibling)
            else:
                insort(self.waiting, sibling, key=by_queue_key)
