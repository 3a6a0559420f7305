"""Drafts of a smaller model with the same tokenizer, for one request at a time.

It computes each text with keys and values of its own, between two steps, and so it pays
where the large model's steps are slow and requests are few.
"""

from collections.abc import Sequence
from functools import partial

import torch

from simplellm.engine.step_times import fastest
from simplellm.model.kv_pool import KVPool
from simplellm.model.model import CHUNK, Model
from simplellm.model.one_sequence import PAGE, one_sequence


class ModelDrafter:
    """Says what a small model would: greedily, whatever the sampling parameters."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.tokens: list[int] = []  # whose keys and values are there
        self.length = 0  # of the last text
        self.pages = 0
        self.pool: KVPool | None = None

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
        """Up to ``most`` tokens that may follow ``tokens``, and 0: all as sure.

        ``tokens`` begin with those of the last call.
        """
        if len(tokens) + most > self.model.config.max_position_embeddings:
            return [], 0
        # Of the last drafts, those that were right needn't be computed again.
        known = min(self.length, len(tokens) - 1)
        limit = min(len(self.tokens), len(tokens) - 1)
        while known < limit and self.tokens[known] == tokens[known]:
            known += 1
        if -(-(len(tokens) + most) // PAGE) > self.pages:
            known = self._grow(len(tokens) + most)
        for start in range(known, len(tokens), CHUNK):
            draft = self._next(tokens[start : start + CHUNK], start)
        drafts = [draft]
        while len(drafts) < most:
            drafts.append(self._next(drafts[-1:], len(tokens) + len(drafts) - 1))
        self.length, self.tokens = len(tokens), [*tokens, *drafts[:-1]]
        return drafts, 0

    def _grow(self, count: int) -> int:
        """Room for twice as many as ``count`` tokens, of which none is there then."""
        model, self.pages = self.model, 2 * -(-count // PAGE)
        pages = self.pages * len(model.config.windows)
        self.pool = KVPool(model.config, pages, PAGE, model.dtype, model.device)
        return 0

    def _next(self, tokens: Sequence[int], start: int) -> int:
        """The likeliest token after these, which are at positions from ``start`` on."""
        model, pool = self.model, self.pool
        assert pool is not None
        windows, device = model.config.windows, model.device
        batch = one_sequence(torch.tensor(tokens), start, self.pages, windows, device)
        hidden = model.forward(batch, pool, batch.tokens[:1])
        logits = torch.empty(1, model.lm_head.shape[0], device=device)
        return int(model.head(hidden[-1:], logits))


def seconds_per_draft(model: Model) -> float:
    """What a draft takes, after a short text."""
    # Each time, the text's last token is computed anew, and one draft.
    run = partial(ModelDrafter(model).propose, [0, 1, 2], 2)
    return fastest(run, model.device) / 2
