"""One sequence by itself: the batches of `Model.logits`, which no request needs."""

import torch
from torch import Tensor

from simplellm.base.config import ModelConfig, expect
from simplellm.model.batch import Batch

PAGE = 64  # tokens in each of its pages


def one_sequence(
    tokens: Tensor,
    start: int,
    pages: int,
    windows: tuple[int | None, ...],
    device: torch.device,
) -> Batch:
    """A step that computes ``tokens`` of one sequence from position ``start`` on.

    Each group of layers has the sequence in ``pages`` pages of its own, in order.
    """
    count = len(tokens)
    flat = torch.zeros(Batch.size(count, 1, pages, len(windows)), dtype=torch.int32)
    batch = Batch.of(flat, count, 1, pages, 0, windows, PAGE)
    batch.tokens[:] = tokens
    batch.positions[:] = torch.arange(start, start + count)
    batch.lengths[:] = start + count
    batch.query_start_loc[1] = count
    for number, group in enumerate(batch.groups):
        group.tables[:] = torch.arange(pages) + number * pages
        group.slots[:] = batch.positions + number * pages * PAGE
    return Batch.of(flat.to(device), count, 1, pages, 0, windows, PAGE)


def check_tokens(tokens: Tensor, config: ModelConfig) -> None:
    """Raise TypeError or ValueError unless the model can read ``tokens``."""
    shape, limit = list(tokens.shape), config.max_position_embeddings
    right = len(shape) == 1 and 0 < shape[0] <= limit
    expect(right, "token_ids' shape", shape, f"[T], T from 1 to {limit}")
    integers, most = tokens.dtype in (torch.int64, torch.int32), config.vocab_size - 1
    expect(integers, "token_ids' dtype", tokens.dtype, "integers", TypeError)
    low, high = (int(value) for value in tokens.aminmax())
    expect(low >= 0 and high <= most, "token_ids' range", [low, high], f"0 to {most}")
