"""A step's chunks, written into the arrays of its batch.

All is done for all rows at once where that can be: a call costs more than a number.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from simplellm.base.request import UNKNOWN
from simplellm.base.sample_position import SamplePosition
from simplellm.engine.block_tables import BlockTables
from simplellm.engine.page_pool import PageTable
from simplellm.engine.scheduler import ScheduledChunk
from simplellm.engine.verify_chunks import PlaceholderChunk, has_drafts, num_drafts


def split_chunks(
    scheduled: Sequence[ScheduledChunk], most: int
) -> list[ScheduledChunk]:
    """The chunks, cut into parts of at most ``most`` tokens."""
    parts = []
    for chunk in scheduled:
        end = chunk.start + chunk.length
        for start in range(chunk.start, end, most):
            parts.append(chunk._replace(start=start, length=min(most, end - start)))
    return parts


def fill_batch(
    batch: Any,
    scheduled: Sequence[ScheduledChunk],
    decodes: int,
    sampling: Sequence[SamplePosition],
    held: Mapping[int, PageTable],
    block_tables: BlockTables,
) -> None:
    """Write ``scheduled`` into ``batch``, whose arrays are NumPy's.

    The first ``decodes`` of them have one token each. Where the batch's rows take more,
    all are decodes with their drafts. ``sampling`` is whose tokens the step before
    samples, row by row; ``held`` are the requests' pages, of which ``block_tables`` has
    those of the step before.
    """
    page_size, queries = block_tables.page_size, batch.groups[0].queries
    batch.pad()
    if not scheduled:
        return
    parts = scheduled
    tokens, positions = step_tokens(scheduled, sampling)
    _, starts, sizes, samples = zip(*scheduled, strict=True)
    lengths = np.array(sizes)
    counts: Any = lengths
    if queries > 1:
        parts = split_chunks(scheduled, queries)
        decodes = len(parts)
        _, starts, counts, _ = zip(*parts, strict=True)
    rows = np.arange(len(parts))
    # Chunks come after all rows for decodes.
    rows[decodes:] += batch.groups[0].decodes - decodes
    tables = [held[chunk.request.request_id] for chunk in parts]
    pages, offsets = block_tables.update(tables)
    count = len(tokens)
    batch.tokens[:count], batch.positions[:count] = tokens, positions
    batch.lengths[rows] = np.add(starts, counts)
    batch.query_start_loc[1 + rows] = counts
    np.cumsum(batch.query_start_loc, out=batch.query_start_loc, dtype=np.int32)
    # The last token of each, and those that its drafts follow.
    ends = np.cumsum(lengths)
    if not all(samples):
        ends = ends[[*samples]]
    index = ends - 1
    if has_drafts(scheduled):
        wanted = [1 + num_drafts(chunk) for chunk in scheduled if chunk.samples]
        index = np.arange(sum(wanted)) - np.repeat(np.cumsum(wanted), wanted)
        index += np.repeat(ends, wanted)
    batch.logits_indices[: len(index)] = index
    owners = np.repeat(rows, counts)
    for number, group in enumerate(batch.groups):
        group.tables[rows] = pages[number, :, : group.tables.shape[1]]
        group.offsets[rows] = offsets[number]
        index = batch.positions[:count] - group.offsets[owners]
        where = group.tables[owners, index // page_size]
        group.slots[:count] = where * page_size + index % page_size


def step_tokens(
    scheduled: Sequence[ScheduledChunk], sampling: Sequence[SamplePosition]
) -> tuple[Sequence[int] | ndarray, Sequence[int]]:
    """The tokens of a step, its drafts among them, and their positions."""
    requests, starts, lengths, _ = zip(*scheduled, strict=True)
    if sum(lengths) == len(lengths) and [*requests] == sampling:
        last = [r.tokens[start] for r, start in zip(requests, starts, strict=True)]
        if last.count(UNKNOWN) == len(last):  # those of the step before, in order
            return -1 - np.arange(len(last)), starts
    tokens: list[int] = []
    positions: list[int] = []
    rows = {request.request_id: row for row, request in enumerate(sampling)}
    for chunk in scheduled:
        request, start, length, _ = chunk
        positions += range(start, start + length)
        if isinstance(chunk, PlaceholderChunk):  # the device puts them in
            tokens += [0] * length
            continue
        tokens += request.tokens[start : start + length]
        if tokens[-1] == UNKNOWN:
            tokens[-1] = -1 - rows[request.request_id]
        tokens += request.drafts[: num_drafts(chunk)]
    return tokens, positions
