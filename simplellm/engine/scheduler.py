"""Who computes how many tokens in the next step: iteration-level scheduling.

Plain Python, no tensors. A step takes one token from each request that decodes and
chunks of the prompts of others, all under one budget (Orca, Yu et al. 2022;
Sarathi-Serve, Agrawal et al. 2024). When the cache runs full, the last in line gives up
its pages and computes its tokens again later.
"""

import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from typing import NamedTuple

from simplellm.base.request import UNKNOWN, Request
from simplellm.engine.request_queues import RequestQueues

# Tokens of prompts in a step that others decode in. On an H200 such a step of the 120b
# takes some 25 ms, and with up to 64 decodes it fits in a CUDA graph for 768 tokens.
PREFILL_BESIDE_DECODES = 704


class ScheduledChunk(NamedTuple):
    """One request's part in a step: ``length`` of its tokens from ``start`` on."""

    request: Request
    start: int
    length: int
    samples: bool  # these are its last ones, so that the step gives it a new token


@dataclass(eq=False)
class Scheduler(RequestQueues):
    """Decides for each step who computes what, and keeps track of the cache."""

    _: KW_ONLY
    max_num_batched_tokens: int  # that a step computes
    prefill_chunk: int | None = None  # tokens of a prompt in a step; None: all of them

    def __post_init__(self) -> None:
        super().__post_init__()
        self.preemptions = 0
        self._refused = (-1, 0)  # who did not fit last, and how many tokens were free

    def _ready(self, request: Request, busy: set[int]) -> bool:
        """Whether a running request can have a part in the step."""
        return not (request.request_id in busy or request.complete)

    def _num_new_tokens(self, request: Request, budget: int) -> int:
        """How many tokens of ``request`` to compute in this step."""
        missing = request.missing
        if request.siblings and missing > 1:
            missing -= 1  # each sample computes the prompt's last token
        if self.prefill_chunk is None:
            return missing if missing <= budget else 0
        most = min(missing, self.prefill_chunk, budget)
        # Decodes in this step wait for its prompt tokens, so cap those. Raise the cap
        # when many wait, since big chunks are cheaper per token.
        cap = len(self.running) + PREFILL_BESIDE_DECODES * (1 + len(self.waiting) // 2)
        cap -= self.max_num_batched_tokens - budget
        if most > cap and any(r.missing == 1 and not r.complete for r in self.running):
            most = max(0, cap)
        return most

    def _chunk(self, request: Request, length: int) -> ScheduledChunk:
        return ScheduledChunk(
            request, request.num_computed_tokens, length, length == request.missing
        )

    def _preempt(self, request: Request) -> None:
        """Take all of its pages; it keeps its tokens, and its queue_key."""
        self.manager.remove(request.request_id)
        request.num_computed_tokens = 0
        request.preemptions += 1
        self.preemptions += 1
        self.requeue(request)

    def _make_room(self, request: Request, length: int, busy: set[int]) -> bool:
        """Room for ``length`` more tokens, at the cost of who comes last if need be."""
        end = request.num_computed_tokens + length
        while not self.manager.allocate(request.request_id, end):
            behind = reversed(self.running)
            victim = next(other for other in behind if other.request_id not in busy)
            if victim is request:
                return False
            self._preempt(victim)
        return True

    def _admit(self, scheduled: list[ScheduledChunk], budget: int) -> None:
        """Let the first in line start, as long as there is room for their tokens."""
        promised = sum(map(attrgetter("missing"), self.running))
        promised -= sum(chunk.length for chunk in scheduled)
        while self.waiting and budget > 0 and self.can_join:
            request, spare = self.waiting[0], self.manager.free_tokens - promised
            if request.tokens[-1] == UNKNOWN:
                return  # preempted just now; its pages cannot be looked up yet
            refused, before = self._refused
            if self.running and refused == request.request_id and spare <= before:
                return  # no more are free than the last time
            # Prompt logprobs exist only where the prompt is computed: look nothing up.
            tokens = request.tokens if request.prompt_logprobs is None else [0]
            request.num_computed_tokens = self.manager.add(request.request_id, tokens)
            length = self._num_new_tokens(request, budget)
            fits = promised + request.missing <= self.manager.free_tokens
            fits = fits or not self.running  # alone, it may use all there is
            number, end = request.request_id, request.num_computed_tokens + length
            fits = length > 0 and fits and self.manager.allocate(number, end)
            if not fits:
                self.manager.remove(number)
                request.num_computed_tokens = 0
                if length > 0:  # it was not the budget
                    self._refused = (number, spare)
                return
            del self.waiting[0]
            self.start_running(request)
            if request.num_cached_tokens is None:
                request.num_cached_tokens = request.num_computed_tokens
                request.first_scheduled_time = time.monotonic()
            scheduled.append(self._chunk(request, length))
            promised += request.missing - length
            budget -= length
            if request.missing == 1:
                self.release_siblings(request)

    def schedule(self) -> list[ScheduledChunk]:
        """What to compute now: decodes, then prompts under way, then new requests."""
        scheduled: list[ScheduledChunk] = []
        busy: set[int] = set()
        budget = self.max_num_batched_tokens
        for decodes in (True, False):
            # If all of them decode, nothing is left for the second round.
            index = 0 if len(busy) < len(self.running) else len(busy)
            while index < len(self.running) and budget > 0:
                request = self.running[index]
                index += 1
                if (request.missing == 1) != decodes or not self._ready(request, busy):
                    continue
                length = 1 if decodes else self._num_new_tokens(request, budget)
                if length and self._make_room(request, length, busy):
                    scheduled.append(self._chunk(request, length))
                    busy.add(request.request_id)
                    budget -= length
        self._admit(scheduled, budget)
        return scheduled

    def update_after_launch(self, scheduled: Sequence[ScheduledChunk]) -> None:
        """Record a step whose results will come: what it computes counts as there.

        The tokens that it samples are UNKNOWN until `update_from_output`, unless a
        grammar forces them. The next step can be scheduled meanwhile: it needs how many
        tokens there are, not which.
        """
        for request, start, length, samples in scheduled:
            if request.finish_reason is not None:  # it was aborted meanwhile
                continue
            request.num_computed_tokens = start + length
            self.manager.commit(request.request_id, request.tokens, start + length)
            if start < request.num_prompt <= start + length:
                # A prompt is done, and whoever shares it needs fewer pages.
                self._refused = (-1, 0)
            if samples:
                request.tokens += request.forced or [UNKNOWN]
            elif request.siblings and request.missing == 1:
                self.release_siblings(request)

    @staticmethod
    def _keep(
        request: Request, first: int, tokens: Sequence[int]
    ) -> tuple[str | None, Sequence[int]]:
        """Write ``tokens`` to their positions, from ``first`` on.

        Returns why the request ends with them, if it does, and those that it keeps.
        """
        left, stops = request.num_prompt + request.max_tokens - first, request.stop_ids
        reason, kept = "length" if len(tokens) >= left else None, tokens[:left]
        if not stops.isdisjoint(kept):  # which is rare
            end = next(index for index, token in enumerate(kept) if token in stops)
            reason, kept = "stop", kept[: end + 1]
        request.tokens[first : first + len(tokens)] = kept
        return reason, kept

    def update_from_output(
        self, scheduled: Sequence[ScheduledChunk], tokens: Sequence[Sequence[int]]
    ) -> list[tuple[Request, Sequence[int]]]:
        """Record the results of a step: the ``tokens`` of each chunk that samples.

        There is one, or several if a grammar forced them or drafts were right. Then no
        later step of the request may have begun, unless a subclass's `_keep` copes. It
        returns requests with the tokens that they keep, and ends those that are over.
        """
        sampling = [chunk for chunk in scheduled if chunk.samples]
        new = []
        for (request, start, length, _), sampled in zip(sampling, tokens, strict=True):
            if request.finish_reason is not None:
                continue
            reason, kept = self._keep(request, start + length, sampled)
            new.append((request, kept))
            if reason is not None:
                self.finish(request, reason)
        return new
