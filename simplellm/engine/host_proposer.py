"""What the host does for drafts that a device makes after a step.

It says for which requests, where these have their pages, and who gets what. Where ranks
have requests of their own, rank 0 does this for all of them: the others have the states
that a head reads, and their `HeadProposer` the rest.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from simplellm.base.host_memory import pinned
from simplellm.base.request import UNKNOWN, Request
from simplellm.engine.graphs import StepUnderWay
from simplellm.engine.page_manager import PageManager
from simplellm.engine.scheduler import ScheduledChunk
from simplellm.engine.verify_chunks import PlaceholderChunk, has_drafts, num_drafts


class DraftTask(NamedTuple):
    """What a device does for drafts, once a step is computed: it reads it, and drafts.

    Plain numbers, but for the ``columns`` of the host, int32 [4, rows]: of each request
    its first sample, its drafts that the step checks, its row in the block table, and
    for how many positions that has pages; 0 for padding. None if there are no requests.
    """

    samples: int  # of the step
    ends: Sequence[int]  # tokens after which it doesn't sample, though a chunk ends
    following: Sequence[int]  # those that the text has there
    requests: int  # to draft for
    number: int  # of drafts for each of them
    columns: Tensor | None


class DraftedRequest(NamedTuple):
    """A request for which a step drafts."""

    request: Request
    # How many tokens it has computed then, without its drafts. Where that isn't known
    # it's negative: at least so many.
    length: int
    capacity: int  # tokens that its pages can hold


class HostProposer:
    """Has drafts made after each step of one rank, for up to ``rows`` requests.

    What comes of them goes to ``deliver``: a request, how long its text is and the last
    token of it, and its drafts. The rank's keys and values have ``page_size`` positions
    a page, and the host copies to ``device``.
    """

    def __init__(self, rows: int, page_size: int, device: torch.device) -> None:
        self.rows, self.page_size = rows, page_size
        self.count = 0  # drafts to make after the step that comes now
        self.deliver: Callable[[Request, int, int, list[int]], object]
        self.deliver = lambda request, length, last, drafts: None
        # Two, since one may be on its way.
        shape = 4, rows
        self.staging = [pinned(shape, torch.int32, device) for _ in range(2)]
        self.index = 0

    def reads(self, scheduled: Sequence[ScheduledChunk]) -> bool:
        """Whether the coming step will be read: drafts follow, or it has prompts."""
        if not scheduled:
            return False
        _, _, lengths, samples = zip(*scheduled, strict=True)
        prompts = max(lengths) > 1 or not all(samples)
        return prompts or self.count > 0 or has_drafts(scheduled)

    def task(
        self, step: StepUnderWay, manager: PageManager, samples: int
    ) -> tuple[DraftTask, list[DraftedRequest]]:
        """What is to be done after ``step``, which has so many samples, and for whom.

        As many drafts as `count` says; ``manager`` has the requests' pages.
        """
        self.index ^= 1
        scheduled, (_, _, width, rows_of_decodes, queries) = step
        drafted, rows = list[DraftedRequest](), list[tuple[int, int, int, int]]()
        ends, following = list[int](), list[int]()
        follow = self.count > 0 or has_drafts(scheduled)
        decodes = next((n for n, c in enumerate(scheduled) if c.length > 1), 0)
        row = sample = end = 0
        for number, chunk in enumerate(scheduled):
            request, start, length, samples_here = chunk
            if queries == 1 and number == decodes and length > 1:
                row = rows_of_decodes  # chunks come after all rows for decodes
            drafts = num_drafts(chunk)
            ended = request.finish_reason is not None  # while the step was launched
            end += length
            if not samples_here:
                ends.append(end - 1)
                following.append(request.tokens[start + length])
            elif follow and not ended:
                pages = manager.tables[request.request_id].groups[0]
                capacity = min(len(pages), width) * self.page_size
                rows.append((sample, drafts, row, capacity))
                sign = -1 if isinstance(chunk, PlaceholderChunk) else 1
                known = sign * (start + length - drafts)
                drafted.append(DraftedRequest(request, known, capacity))
            sample += (1 + drafts) * samples_here
            row += 1 if queries == 1 else -(-length // queries)
        columns = self._columns(rows) if rows else None
        numbers = samples, ends, following, len(rows), self.count
        return DraftTask(*numbers, columns), drafted

    def _columns(self, rows: Sequence[tuple[int, int, int, int]]) -> Tensor:
        staging = self.staging[self.index]
        columns = staging.numpy()
        columns[:] = 0
        columns[:, : len(rows)] = np.array(rows, dtype=np.int32).T
        return staging

    def hand_out(
        self, task: DraftTask, drafted: Sequence[DraftedRequest], results: Tensor
    ) -> dict[int, int]:
        """Deliver what came of a ``task``: ``results`` of `HeadProposer.draft_after`.

        Returns how many of the drafts that the step has checked were right, by the
        requests' numbers.
        """
        accepted, rows = {}, results[:, : 2 + task.number].tolist()
        for entry, row in zip(drafted, rows, strict=True):
            request, length, capacity = entry
            right, last, *drafts = row
            accepted[request.request_id] = right
            if request.finish_reason or request.tokens[-2:] == [UNKNOWN, UNKNOWN]:
                continue  # the next step has them already
            if length < 0:  # it wasn't known
                length = request.tokens.index(UNKNOWN, -length)
            length += right + 1
            # A draft has read those before it, if there were pages for them.
            good = drafts[: max(0, capacity - length + 2)]
            self.deliver(request, length, last, good)
        return accepted
