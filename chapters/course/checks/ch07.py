"""Chapter 7: the KV cache."""

import random

import numpy as np
import torch

from simplellm.checkpoint.checkpoint import Checkpoint
from simplellm.checkpoint.families.gpt_oss import GPT_OSS_20B, GPT_OSS_120B
from simplellm.checkpoint.folder import EMBEDDED
from simplellm.model.attention import attention
from simplellm.model.kv_gather import bucket_by_length


def attend_in_chunks(cache, sizes, compare):
    """Run random chunks of two layers, one of them sliding, through ``cache``.

    ``compare(layer, found, expected, old, keys, values)`` sees each chunk's attention,
    that of all tokens computed at once, how many tokens were there before, and the
    keys and values of all so far.
    """
    generator = torch.Generator().manual_seed(len(sizes))
    sinks = torch.randn(4, generator=generator)
    so_far: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for size in sizes:
        for layer, window in ((0, None), (1, 8)):
            q = torch.randn(size, 4, 8, generator=generator)
            k, v = torch.randn(2, size, 2, 8, generator=generator)
            keys, values = so_far.get(layer, (k[:0], v[:0]))
            old = len(keys)
            keys, values = torch.cat([keys, k]), torch.cat([values, v])
            so_far[layer] = keys, values
            found = cache.attend(layer, q, k.clone(), v.clone(), sinks, window)
            expected = attention(q, keys, values, sinks, window=window)
            compare(layer, found, expected, old, keys, values)


def check_ConcatCache_attend(ConcatCache):
    """Chunks of two layers, against the attention of all tokens at once."""
    cache = ConcatCache()

    def compare(layer, found, expected, old, keys, values):
        new = len(expected)
        assert isinstance(found, torch.Tensor) and found.shape == expected.shape, (
            f"attend returns the attention of the new tokens, {list(expected.shape)}, "
            f"not {list(found.shape) if isinstance(found, torch.Tensor) else found!r}"
        )
        assert layer in cache.layers, f"self.layers has nothing of layer {layer}"
        held = len(cache.layers[layer][0])
        assert held == old + new, (
            f"after {old + new} tokens of layer {layer} the cache holds {held} keys; "
            "keep all old keys and values, separately for each layer"
        )
        assert torch.allclose(found, expected, atol=1e-5), (
            f"wrong attention in layer {layer} for {new} tokens after {old}: old keys "
            "and values come first and in order, each layer has its own, and the "
            "window and sinks are handed on"
        )
        for mine, kept, name in zip(
            cache.layers[layer], (keys, values), ("keys", "values"), strict=True
        ):
            assert torch.equal(mine, kept), (
                f"self.layers[{layer}] is (keys, values), in the order of the tokens; "
                f"the {name} are others"
            )

    attend_in_chunks(cache, [5, 1, 1, 3, 1], compare)


def check_plan_gathers(plan_gathers):
    """What each decode sees, counted position by position."""
    rng = random.Random(7)
    for window in (None, 1, 5, 40):
        for size in (1, 4, 16):
            for count in (1, 2, 9):
                lengths = [rng.choice([0, 1, 3, 60, 70, 200, 500]) for _ in "x" * count]
                if count == 1:
                    lengths = [37]
                judge_reads(plan_gathers, rng, lengths, window, size)
    judge_reads(plan_gathers, rng, [100] * 6, None, 16)


def judge_reads(plan_gathers, rng, lengths, window, size):
    count = len(lengths)
    oldest = [0 if window is None else max(0, n - window) for n in lengths]
    firsts = [first // size for first in oldest]  # pages that the window has left
    widest = max(lengths) // size + 1
    numbers = rng.sample(range(10 + count * widest), count * widest)
    tables = [numbers[i * widest : (i + 1) * widest] for i in range(count)]
    reads = plan_gathers(
        torch.tensor(tables, dtype=torch.int32),
        torch.tensor([first * size for first in firsts], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        window=window,
        page_size=size,
    )
    told = f"lengths {lengths}, window {window}, pages of {size}"
    assert isinstance(reads, list), (
        f"return a list of GatherPlans; yours is of type {type(reads).__name__}"
    )
    sees = np.array([n - first for n, first in zip(lengths, oldest, strict=True)])
    seen = []
    for rows, slots, mask in reads:
        rows, slots = np.asarray(rows), np.asarray(slots)
        masked = np.zeros(slots.shape, bool) if mask is None else np.asarray(mask)
        masked = masked.astype(bool)
        assert len(rows) == len(slots) == len(masked), (
            f"{told}: one row of slots per decode"
        )
        for row, read, hide in zip(rows.tolist(), slots, masked, strict=True):
            seen.append(row)
            slot_of = {
                position: tables[row][position // size - firsts[row]] * size
                + position % size
                for position in range(firsts[row] * size, lengths[row])
            }
            expected = [slot_of[p] for p in range(oldest[row], lengths[row])]
            found = read[~hide].tolist()
            assert len(found) == len(expected), (
                f"window {window}, length {lengths[row]}: a decode should see "
                f"{len(expected)} position{'s' * (len(expected) > 1)}, its own "
                f"included, and you give {len(found)}"
                + (", padding among them" if window is None else "")
            )
            assert sorted(found) == sorted(expected), (
                f"{told}: the decode of length {lengths[row]} has the table "
                f"{tables[row][:4]}..., whose first page begins at position "
                f"{firsts[row] * size}; it should see the slots {expected[:5]}..., "
                f"yours are {found[:5]}..."
            )
            assert set(read[hide].tolist()) <= set(slot_of.values()), (
                f"{told}: a masked slot is read all the same, so it must be one that "
                "was written, such as the newest; beyond the end lies anything, NaN too"
            )
    live = [row for row, length in enumerate(lengths) if length]
    assert sorted(seen) == live, (
        f"{told}: each row that has a length is in one read, and no other is; yours "
        f"are {sorted(seen)}"
    )
    batches = sorted(sorted(rows.tolist()) for rows in bucket_by_length(sees))
    found = sorted(sorted(np.asarray(rows).tolist()) for rows, _, _ in reads)
    assert len(found) >= len(batches), (
        f"{told}: the batches of `bucket_by_length` are {batches}, yours {found}; "
        "in one batch of all, short decodes read as much padding as the longest has "
        "positions"
    )
    assert found == batches or window is not None, (
        f"{told}: the batches of `bucket_by_length` are {batches}, yours {found}; "
        "decodes of similar length are read together"
    )
    assert found == batches, (
        f"{told}: the batches of `bucket_by_length` are {batches}, yours {found}; "
        "it wants how many positions each decode sees, which with a window is not its "
        "length"
    )


def check_7_1(outweighs):
    """Against the sizes at the length and just below it."""
    embedded = Checkpoint(EMBEDDED).config
    cases = [
        (GPT_OSS_120B, 18, 8, 65.2e9, 64),
        (GPT_OSS_120B, 18, 8, 3e9, 1),
        (GPT_OSS_20B, 12, 8, 13.8e9, 256),
        (embedded, 3, 2, 2 * 3072 * 40, 1),  # below the window
        (embedded, 3, 2, 7e6, 3),
    ]
    for config, half, heads, nbytes, sequences in cases:

        def size(tokens, half=half, heads=heads, sequences=sequences):
            kept = half * (tokens + min(tokens, 128))
            return sequences * 2 * heads * 64 * 2 * kept

        found = outweighs(config, nbytes, sequences)
        told = f"{sequences} sequences against {nbytes / 1e9:g} GB, {2 * half} layers"
        assert found == int(found) and found >= 1, f"{told}: {found} is no length"
        assert size(found) > nbytes, (
            f"{told}: at the length you found they do not take more than the weights; "
            "a sliding layer stops growing at its window, and equal is not more"
        )
        assert size(found - 1) <= nbytes, (
            f"{told}: they take more at a shorter length already; all sequences count"
        )


def check_7_2(owner_of):
    """Every slot of pools whose pages are dealt out at random."""
    rng = random.Random(7)
    for size in (1, 4, 16):
        pages = rng.sample(range(14), 12)
        tables = [pages[:5], pages[5:6], pages[6:9], pages[9:]]
        offsets = [0, 0, 3 * size, size]
        spare = [2 * size, 0, size - 1, 1]  # room that is not written yet
        lengths = [
            offset + len(table) * size - unwritten
            for table, offset, unwritten in zip(tables, offsets, spare, strict=True)
        ]
        expected = {}
        for row, table in enumerate(tables):
            for position in range(offsets[row], lengths[row]):
                page = table[(position - offsets[row]) // size]
                expected[page * size + position % size] = row, position
        for slot in range(14 * size):
            given = [list(table) for table in tables], list(offsets), list(lengths)
            found = owner_of(slot, *given, size)
            told = f"slot {slot}, pages of {size}, tables {tables}, offsets {offsets}"
            right = expected.get(slot)
            if right is None:
                assert found is None, (
                    f"{told}, lengths {lengths}: no sequence has written there, so the "
                    f"answer is None, not {found!r}"
                )
            assert found == right, f"{told}: {right} lies there, not {found!r}"


def check_7_3(most_taken_back):
    """Every number of tokens tried out on a ring."""

    def works(count, window, size, n):
        stored = {}
        for position in range(count):
            stored[position % size] = position
        new = count - n
        stored[new % size] = new
        seen = range(max(0, new - window + 1), new + 1)
        return all(stored[p % size] == p for p in seen)

    for window, size in ((2, 2), (4, 4), (4, 6), (8, 11), (5, 30)):
        for count in range(1, 50):
            best = most_taken_back(count, window, size)
            told = f"{count} tokens, a window of {window}, a ring of {size} entries"
            assert 0 <= best < count, f"{told}: at least one token stays, none is added"
            assert all(works(count, window, size, n) for n in range(best + 1)), (
                f"{told}: with {best} taken back, the next token misses a position in "
                "its window that was overwritten"
            )
            assert best == count - 1 or not works(count, window, size, best + 1), (
                f"{told}: more than {best} can be taken back; the new token itself "
                "stands in its window, and a ring that is not full has lost nothing"
            )
