"""The arrays of a step, and how decodes are read together."""

from typing import Any

import numpy as np
import pytest
import torch

from simplellm.model.batch import Batch
from simplellm.model.kv_gather import READ, bucket_by_length


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_the_arrays_of_a_step_do_not_overlap(windows: tuple[int | None, ...]) -> None:
    flat = torch.arange(Batch.size(5, 3, 4, len(windows)), dtype=torch.int32)
    batch = Batch.of(flat, 5, 3, 4, 1, windows, 16)
    parts = [
        batch.tokens,
        batch.positions,
        batch.lengths,
        batch.query_start_loc,
        batch.logits_indices,
    ]
    for group, window in zip(batch.groups, windows, strict=True):
        assert (group.window, group.page_size, group.decodes) == (window, 16, 1)
        assert (
            group.lengths is batch.lengths
            and group.query_start_loc is batch.query_start_loc
        )
        parts += [group.slots, group.tables, group.offsets]
    every = torch.cat([part.flatten() for part in parts])
    assert sorted(every.tolist()) == flat.tolist()
    assert batch.groups[-1].tables.shape == (3, 4) and len(batch.query_start_loc) == 4


def test_numpy_s_views_are_those_of_torch() -> None:
    flat = torch.arange(Batch.size(5, 3, 4, 2), dtype=torch.int32)
    shape: tuple[Any, ...] = (5, 3, 4, 1, (None, 8), 16)
    there, here = Batch.of(flat, *shape), Batch.of(flat.numpy(), *shape)
    here.pad()
    assert there.groups[1].slots.tolist() == [-1] * 5
    assert there.num_tokens.tolist() == [0] and there.tokens.sum() == 0
    here.query_start_loc[-1] = 4
    assert there.num_tokens.tolist() == [4]


def test_rows_of_equal_length_go_together() -> None:
    assert [len(rows) for rows in bucket_by_length(np.full(65, 30))] == [64, 1]


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_like_lengths(seed: int) -> None:
    lengths = np.random.default_rng(seed).lognormal(5, 2, 200).astype(int) + 1
    batches = list(bucket_by_length(lengths))
    assert sorted(np.concatenate(batches)) == list(range(200))
    for rows in batches:
        longest = lengths[rows].max()
        assert longest <= max(64, 2 * lengths[rows].min())
        assert len(rows) == 1 or len(rows) * longest <= READ
