"""A step of several sequences as a `Batch`, made by hand, before chapter 10 does.

What the engine's runner does: here it's short rather than quick.
"""

from collections.abc import Sequence

import torch

from simplellm.engine.page_pool import PagePool
from simplellm.model.batch import Batch


def pack(
    manager: PagePool,
    steps: Sequence[tuple[int, Sequence[int], int]],
    device: torch.device,
) -> Batch:
    """A batch of (sequence, its tokens, up to where to compute), decodes first.

    ``manager`` has made room for all of it.
    """
    tables = [manager.tables[name] for name, _, _ in steps]
    spans = [
        (t.num_computed_tokens, end)
        for t, (_, _, end) in zip(tables, steps, strict=True)
    ]
    total, size = sum(end - start for start, end in spans), manager.page_size
    widest = max(len(table.groups[0]) for table in tables)
    decodes = next((n for n, (a, b) in enumerate(spans) if b - a > 1), len(spans))
    shape = total, len(steps), widest
    flat = torch.zeros(Batch.size(*shape, len(manager.windows)), dtype=torch.int32)
    rest = decodes, manager.windows, size
    batch, first = Batch.of(flat, *shape, *rest), 0
    every = zip(tables, spans, steps, strict=True)
    for row, (table, (start, end), (_, ids, _)) in enumerate(every):
        new = slice(first, first + end - start)
        first = new.stop
        batch.tokens[new] = torch.tensor(ids[start:end])
        batch.positions[new] = torch.arange(start, end)
        batch.lengths[row], batch.query_start_loc[row + 1] = end, first
        batch.logits_indices[row] = first - 1
        parts = zip(batch.groups, table.groups, table.first, strict=True)
        for group, pages, unused in parts:
            live = torch.tensor(pages[unused:], dtype=torch.int32)
            group.tables[row, : len(live)] = live
            group.offsets[row] = unused * size
            index = batch.positions[new] - unused * size
            group.slots[new] = live[index // size] * size + index % size
    return Batch.of(flat.to(device), *shape, *rest)
