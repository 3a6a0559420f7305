"""Wrong answers to chapter 7."""

import numpy as np
import torch

from simplellm.model.attention import attention
from simplellm.model.kv_gather import GatherPlan, bucket_by_length
from wrong import wrong


class Layers:
    def __init__(self):
        self.layers = {}


@wrong("ConcatCache.attend", "has to stay")
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


def sized(config, tokens, itemsize, windowed, parts=2, heads=None, full=min):
    """The bytes, with a mistake perhaps."""
    windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
    kept = sum(full(tokens, w) if w and windowed else tokens for w in windows)
    heads = heads or config.num_key_value_heads
    return parts * heads * config.head_dim * itemsize * kept


@wrong("kv_bytes", "keys and values")
def keys_only(config, tokens, *, itemsize=2, windowed=True):
    return sized(config, tokens, itemsize, windowed, parts=1)


@wrong("kv_bytes", "kv heads")
def query_heads(config, tokens, *, itemsize=2, windowed=True):
    heads = config.num_attention_heads
    return sized(config, tokens, itemsize, windowed, heads=heads)


@wrong("kv_bytes", "a short text less")
def always_the_window(config, tokens, *, itemsize=2, windowed=True):
    return sized(config, tokens, itemsize, windowed, full=lambda n, window: window)


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
        found.append(GatherPlan(rows, pages * size + places % size, hidden))
    return found


@wrong("plan_gathers", "itself included")
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


@wrong("plan_gathers", "itself included")
def hides_nothing(tables, offsets, lengths, *, window, page_size):
    reads = read_all(tables, offsets, lengths, window, page_size)
    return [read._replace(masked=None) for read in reads]


def size_of(config, tokens, sequences, windowed=True):
    return sequences * sized(config, tokens, 2, windowed)


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


@wrong("kv_bytes", "from its config")
def of_one_model(config, tokens, *, itemsize=2, windowed=True):
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    kept = layers // 2 * (tokens + (min(tokens, 128) if windowed else tokens))
    return 2 * heads * 64 * itemsize * kept


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


@wrong("kv_bytes", "multiply by itemsize")
def always_two_bytes(config, tokens, *, itemsize=2, windowed=True):
    return sized(config, tokens, 2, windowed)
