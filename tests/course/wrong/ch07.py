"""Wrong answers to chapter 7."""

import numpy as np
import torch

from simplellm.model.attention import attention
from simplellm.model.kv_gather import GatherPlan, bucket_by_length
from simplellm.model.memory import kv_bytes
from wrong import wrong


class Layers:
    def __init__(self):
        self.layers = {}


@wrong("ConcatCache.attend", "separately for each layer")
class ForgetsTheOld(Layers):
    def attend(self, layer, q, k, v, sinks, window):
        self.layers[layer] = k, v
        return attention(q, k, v, sinks, window=window)


@wrong("ConcatCache.attend", "in the order of the tokens")
class NewOnesFirst(Layers):
    def attend(self, layer, q, k, v, sinks, window):
        if layer in self.layers:
            old_k, old_v = self.layers[layer]
            k, v = torch.cat([k, old_k]), torch.cat([v, old_v])
        self.layers[layer] = k, v
        return attention(q, k, v, sinks, window=window)


@wrong("ConcatCache.attend", "window")
class NoWindow(Layers):
    def attend(self, layer, q, k, v, sinks, window):
        if layer in self.layers:
            old_k, old_v = self.layers[layer]
            k, v = torch.cat([old_k, k]), torch.cat([old_v, v])
        self.layers[layer] = k, v
        return attention(q, k, v, sinks)


@wrong("ConcatCache.attend", "self.layers has nothing")
class OneForAllLayers(Layers):
    def attend(self, layer, q, k, v, sinks, window):
        if 0 in self.layers:
            old_k, old_v = self.layers[0]
            k, v = torch.cat([old_k, k]), torch.cat([old_v, v])
        self.layers[0] = k, v
        return attention(q, k, v, sinks, window=window)


def read_all(
    tables,
    offsets,
    lengths,
    window,
    size,
    *,
    pad=np.minimum,
    shift=0,
    back=1,
    batches=bucket_by_length,
):
    """Reads, with a mistake perhaps."""
    tables = tables.numpy().astype(np.int64)
    firsts = offsets.numpy()[:, None] * back
    ends = lengths.numpy()[:, None] - 1
    oldest = np.zeros_like(ends)
    if window is not None:
        oldest = np.maximum(ends + 1 - window + shift, 0)
    counts = (ends + 1 - oldest)[:, 0]
    found = []
    for rows in batches(counts):
        positions = oldest[rows] + np.arange(counts[rows].max())
        hidden = positions > ends[rows]
        places = pad(positions, ends[rows]) - firsts[rows]
        columns = np.minimum(places // size, tables.shape[1] - 1)
        pages = tables[rows[:, None], columns]
        mask = hidden if hidden.any() else None
        found.append(GatherPlan(rows, pages * size + places % size, mask))
    return found


@wrong("plan_gathers", "1 position, its own included, and you give 2")
def one_more_than_the_window(tables, offsets, lengths, *, window, page_size):
    return read_all(tables, offsets, lengths, window, page_size, shift=-1)


@wrong("plan_gathers", "begins at position")
def without_offsets(tables, offsets, lengths, *, window, page_size):
    return read_all(tables, offsets, lengths, window, page_size, back=0)


@wrong("plan_gathers", "masked slot")
def reads_beyond_the_end(tables, offsets, lengths, *, window, page_size):
    return read_all(
        tables,
        offsets,
        lengths,
        window,
        page_size,
        pad=lambda positions, ends: positions,
    )


@wrong("plan_gathers", "padding among them")
def hides_nothing(tables, offsets, lengths, *, window, page_size):
    reads = read_all(tables, offsets, lengths, window, page_size)
    return [read._replace(masked=None) for read in reads]


def size_of(config, tokens, sequences, windowed=True):
    return sequences * kv_bytes(config, tokens, windowed=windowed)


@wrong("7.1", "do not take more")
def without_windows(config, weight_bytes, sequences):
    each = size_of(config, 1, sequences, windowed=False)
    return int(weight_bytes // each) + 1


@wrong("7.1", "all sequences count")
def one_sequence(config, weight_bytes, sequences):
    tokens = 1
    while size_of(config, tokens, 1) <= weight_bytes:
        tokens = tokens + max(1, tokens // 1000)
    return tokens


@wrong("7.2", "lies there")
def from_position_0(slot, tables, offsets, lengths, page_size):
    page, row = divmod(slot, page_size)
    for sequence, pages in enumerate(tables):
        if page in pages:
            position = pages.index(page) * page_size + row
            return (sequence, position) if position < lengths[sequence] else None
    return None


@wrong("7.2", "has written there")
def whatever_the_length(slot, tables, offsets, lengths, page_size):
    page, row = divmod(slot, page_size)
    for sequence, pages in enumerate(tables):
        if page in pages:
            return sequence, offsets[sequence] + pages.index(page) * page_size + row
    return None


@wrong("7.3", "was overwritten")
def one_too_many(count, window, size):
    return count - 1 if count <= size else min(count - 1, size - window + 2)


@wrong("7.3", "lost nothing")
def as_if_always_full(count, window, size):
    return min(count - 1, size - window + 1)


@wrong("plan_gathers", "are read together")
def one_at_a_time(tables, offsets, lengths, *, window, page_size):
    found = []
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        parts = tables[one], offsets[one], lengths[one]
        for read in read_all(*parts, window, page_size):
            found.append(read._replace(rows=read.rows + row))
    return found


@wrong("plan_gathers", "as much padding")
def all_in_one(tables, offsets, lengths, *, window, page_size):
    def every(counts):
        return [rows] if len(rows := counts.nonzero()[0]) else []

    return read_all(tables, offsets, lengths, window, page_size, batches=every)


@wrong("plan_gathers", "with a window is not its length")
def alike_by_length(tables, offsets, lengths, *, window, page_size):
    def by_length(counts):
        return bucket_by_length(lengths.numpy())

    return read_all(tables, offsets, lengths, window, page_size, batches=by_length)


@wrong("plan_gathers", "return a list")
def one_after_the_other(tables, offsets, lengths, *, window, page_size):
    yield from read_all(tables, offsets, lengths, window, page_size)
