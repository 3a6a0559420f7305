"""What decodes read of the pages, for operations that have no kernel to look it up."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy import ndarray
from torch import Tensor

READ = 4096  # positions at most that decodes read together, to bound the copy


class GatherPlan(NamedTuple):
    """What n decodes of similar length read: S positions each."""

    rows: ndarray  # int64 [n], which of the decodes
    slots: ndarray  # int64 [n, S], page * page_size + row of each position
    masked: ndarray | None  # bool [n, S]: what is read, but not to be seen


def bucket_by_length(lengths: ndarray) -> Iterator[ndarray]:
    """The rows of ``lengths`` [B] in batches of similar length.

    Padding at most doubles a row, or fills it up to 64. A batch of several rows reads
    at most READ positions. Rows of no length, which are padding, are in none of them.
    """
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    start = 0
    while start < len(order):
        longest = max(64, 2 * lengths[order[start]])  # below 64 a call costs more
        stop = np.searchsorted(lengths[order], longest, "right")
        stop = min(stop, start + max(1, READ // longest))
        yield order[start:stop]
        start = stop


def plan_gathers(
    tables: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    *,
    window: int | None,
    page_size: int,
) -> list[GatherPlan]:
    """What decodes read whose tables, offsets and lengths are those of a `KVGroup`."""
    pages_of = tables.cpu().numpy().astype(np.int64)
    firsts = offsets.cpu().numpy()[:, None]
    ends = lengths.cpu().numpy()[:, None] - 1  # the newest position
    oldest = np.zeros_like(ends)
    if window is not None:
        oldest = np.maximum(ends + 1 - window, 0)
    counts = (ends + 1 - oldest)[:, 0]
    plans = []
    for rows in bucket_by_length(counts):
        positions = oldest[rows] + np.arange(counts[rows].max())
        masked = positions > ends[rows]
        # What is masked gets weight 0 and must be a number: the row's newest.
        indices = np.minimum(positions, ends[rows]) - firsts[rows]
        pages = pages_of[rows[:, None], indices // page_size]
        slots = pages * page_size + indices % page_size
        plans.append(GatherPlan(rows, slots, masked if masked.any() else None))
    return plans
