"""A scheduler whose decodes check drafts, for as long as there is room for them."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from simplellm.base.request import UNKNOWN, Request
from simplellm.engine.scheduler import ScheduledChunk, Scheduler
from simplellm.engine.speculator import TIMED_BACKOFF_STEPS, Speculator
from simplellm.engine.verify_chunks import (
    DraftChunk,
    PlaceholderChunk,
    has_drafts,
    num_drafts,
    without_drafts,
)

MAX_INTERVAL = 1.0  # seconds between steps that follow one another


@dataclass(eq=False)
class SpeculativeScheduler(Scheduler):
    """Has the ``speculator`` choose each step's drafts.

    How many tokens a request has after a step that checks drafts isn't known before its
    results come. If its drafts are made on the device, its next step is launched all
    the same, as a `PlaceholderChunk`; else the request has no part in it.
    """

    _: KW_ONLY
    speculator: Speculator
    max_drafts: int  # that a step checks

    def __post_init__(self) -> None:
        super().__post_init__()
        # When the last results came, and of which requests, if they were decodes.
        self._last: tuple[float, Any] = (0.0, None)
        # The latest steps, and how many drafts of each request follow them.
        self._steps: deque[tuple[Any, int]] = deque(maxlen=3)
        # Of the step launched last, by requests' numbers: drafts that it checks.
        self._checking: dict[int, int] = {}
        # Requests in the step that is being launched, perhaps before the results of the
        # step in flight are there. It uses their pages, so none may be given back.
        self._launching: set[int] = set()
        self._made = 0  # drafts of each of these requests that are made after it

    def close(self) -> None:
        self.speculator.close()

    def add(self, requests: Sequence[Request]) -> None:
        for first in requests if not self.speculator.overlaps else ():
            for request in (first, *first.siblings):
                request.overlaps_drafts = False
        super().add(requests)

    def _ready(self, request: Request, busy: set[int]) -> bool:
        if not super()._ready(request, busy):
            return False
        if request.tokens[-1] != UNKNOWN:
            return True
        speculator, checking = self.speculator, self._checking
        if checking and (checked := checking.get(request.request_id, 0)):
            may_end = request.num_output + checked >= request.max_tokens
            known = not request.overlaps_drafts or speculator.proposer is None
            if known or may_end or speculator.backoff.left >= TIMED_BACKOFF_STEPS:
                return False
        return speculator.backoff.left > 0 or not speculator.should_wait(request)

    def schedule(self) -> list[ScheduledChunk]:
        """What to compute now: decodes without drafts, with them, then prompts.

        Nobody is preempted for a draft.
        """
        backs_off = self.speculator.backs_off(len(self.running))
        scheduled = super().schedule()
        if backs_off:
            self._last = (0.0, None)
        else:
            scheduled = self._with_all_drafts(scheduled)
        if self._checking or self._launching:  # else there are no drafts to drop
            self._launching = {chunk.request.request_id for chunk in scheduled}
        return scheduled

    def _with_all_drafts(self, scheduled: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """A step with the drafts that it checks."""
        decodes = [c for c in scheduled if c.length == 1 and c.samples]
        computed = sum(chunk.length for chunk in scheduled)
        max_drafts = min(self.max_num_batched_tokens - computed, self.max_drafts)
        requests = [chunk.request for chunk in decodes]
        offers: Sequence[Sequence[int]] = ()
        if decodes:
            made = self._drafts_made(requests)
            offers = self.speculator.choose(requests, computed, max_drafts, made)
        changed: dict[int, ScheduledChunk | None] = {}
        for chunk, drafts in zip(decodes, offers, strict=True):
            if drafts or chunk.request.tokens[-1] == UNKNOWN:
                own = self._with_drafts(chunk, drafts)
                if own is not chunk:
                    changed[chunk.request.request_id] = own
        if changed:
            every = (changed.get(c.request.request_id, c) for c in scheduled)
            kept = [chunk for chunk in every if chunk is not None]
            # Those with drafts come after other decodes, and before prompts.
            key = lambda c: (c.length > 1) * (2 - isinstance(c, DraftChunk))  # noqa: E731
            scheduled = sorted(kept, key=key)
        sampling = [chunk for chunk in scheduled if chunk.samples]
        ahead = self.speculator.plan([c.request for c in sampling], self.max_drafts)
        for chunk in sampling if ahead else ():
            self._allocate_ahead(chunk, ahead)
        self._steps.append((scheduled, ahead))
        return scheduled

    def _drafts_made(self, requests: Sequence[Request]) -> dict[int, int]:
        """Drafts on the device, by the numbers of the requests that can check them."""
        made = {}
        for request in requests if self._made else ():
            checked = self._checking.get(request.request_id)
            unknown = request.tokens[-1] == UNKNOWN
            if unknown and request.overlaps_drafts and checked is not None:
                # As many as it has tokens left, if the last drafts are right.
                left = request.max_tokens - request.num_output - checked - 1
                made[request.request_id] = max(0, min(left, self._made))
        return made

    def _with_drafts(
        self, chunk: ScheduledChunk, drafts: Sequence[int]
    ) -> ScheduledChunk | None:
        """The decode with its drafts, or without if there are no pages for them.

        None if it has to wait until its position is known.
        """
        request, start, _, samples = chunk
        if request.tokens[-1] != UNKNOWN:
            length = 1 + len(drafts)
            if not self.manager.allocate(request.request_id, start + length):
                return chunk
            request.drafts = drafts
            return DraftChunk(request, start, length, samples)
        checked = self._checking.get(request.request_id, 0)
        if not checked and not drafts:
            return chunk  # its position is known
        for length in (1 + len(drafts), 1):
            end = start + checked + length
            if self.manager.allocate(request.request_id, end):
                return PlaceholderChunk(request, start, length, samples)
        return None

    def _allocate_ahead(self, chunk: ScheduledChunk, count: int) -> None:
        """Pages for drafts that are made after the step, if there are any."""
        request = chunk.request
        end = chunk.start + chunk.length
        if isinstance(chunk, PlaceholderChunk):
            end += self._checking.get(request.request_id, 0)
        end = max(end, min(end + count, request.num_prompt + request.max_tokens))
        self.manager.allocate(request.request_id, end)

    def update_after_launch(self, scheduled: Sequence[ScheduledChunk]) -> None:
        """Record a step whose results will come; of drafts, nothing is sure yet."""
        proposer, drafting = self.speculator.proposer, has_drafts(scheduled)
        self._made = 0 if proposer is None else proposer.count
        sure = scheduled
        if drafting:
            sure = [without_drafts(chunk, False) for chunk in scheduled]
        super().update_after_launch(sure)
        self._launching, self._checking = set(), {}
        if drafting or self._made:
            self._checking = {
                chunk.request.request_id: num_drafts(chunk)
                for chunk in scheduled
                if chunk.samples
            }

    def _note_interval(self, scheduled: Sequence[ScheduledChunk]) -> None:
        """The results of a step have come, perhaps after those of one like it."""
        now, drafts = time.monotonic(), sum(map(num_drafts, scheduled))
        tokens = sum(chunk.length for chunk in scheduled)
        decodes = all(c.length == 1 or isinstance(c, DraftChunk) for c in scheduled)
        made = next((made for own, made in self._steps if own is scheduled), 0)
        kind = drafts > 0, made > 0
        then, before = self._last
        self._last = now, kind if decodes else None
        # One that has either drafts before it or others after it is of neither kind.
        pure = self.speculator.proposer is None or kind[0] == kind[1]
        if decodes and pure and before == kind and now - then < MAX_INTERVAL:
            self.speculator.learn_interval(tokens, drafts, now - then, made)

    @staticmethod
    def _keep(
        request: Request, first: int, tokens: Sequence[int]
    ) -> tuple[str | None, Sequence[int]]:
        """As `Scheduler._keep`; what a later step samples stays behind the tokens."""
        if len(tokens) == 1 or not request.overlaps_drafts:
            return Scheduler._keep(request, first, tokens)
        later = request.tokens[first + 1 :]
        del request.tokens[first + 1 :]
        kept = Scheduler._keep(request, first, tokens)
        request.tokens += later
        return kept

    def update_from_output(
        self, scheduled: Sequence[ScheduledChunk], tokens: Sequence[Sequence[int]]
    ) -> list[tuple[Request, Sequence[int]]]:
        """Record results of a step: of drafts, the right ones and one token more."""
        if self.speculator.backoff.left < TIMED_BACKOFF_STEPS:
            self._note_interval(scheduled)
        if not has_drafts(scheduled):
            return super().update_from_output(scheduled, tokens)
        sure = [without_drafts(chunk, True) for chunk in scheduled]
        new = super().update_from_output(sure, tokens)
        sampling = [chunk for chunk in scheduled if chunk.samples]
        for chunk, sampled in zip(sampling, tokens, strict=True):
            if not isinstance(chunk, DraftChunk):
                continue
            request, drafts = chunk.request, num_drafts(chunk)
            right = 0 if request.forced else len(sampled) - 1
            if not isinstance(chunk, PlaceholderChunk):
                request.drafts = ()
            if drafts:
                self.speculator.count_drafts(request, drafts, right)
            # Unless it was preempted meanwhile, or has ended.
            table = self.manager.tables.get(request.request_id)
            if table is None or request.finish_reason is not None:
                continue
            request.num_computed_tokens += right
            computed = request.num_computed_tokens
            self.manager.commit(request.request_id, request.tokens, computed)
            later = request.request_id in self._launching
            if not later and request.tokens[-1] != UNKNOWN:
                pages = len(table.groups[0])
                self.manager.truncate(request.request_id, computed)
                table.shortened += len(table.groups[0]) < pages
        return new
