"""Choose the next token of each row of a batch of logits.

B rows (one sequence each), V vocabulary, P rows with penalties. Everything is
vectorized over the batch and stays on the logits' device. What a row gets depends on
its own logits, parameters, seed and number of tokens so far, never on other rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from simplellm.base.config import MAX_SIZE
from simplellm.base.host_memory import upload
from simplellm.base.sampling_params import SamplingParams
from simplellm.model.ops import Ops
from simplellm.sampling.filters import Filters
from simplellm.sampling.masks import Mask, apply_mask
from simplellm.sampling.penalties import TokenCounts


@dataclass(frozen=True)
class SamplingTensors:
    """A batch's parameters as columns [B], and what some row needs as booleans.

    The booleans are Python's, so deciding what to skip never waits for the GPU. Built
    once for as long as a batch keeps its requests.
    """

    seeds: Tensor  # int64 [B]
    temperature: Tensor  # float32, 0 for the likeliest token
    filters: Filters | None
    bias: tuple[Tensor, Tensor, Tensor] | None  # rows, token ids, values
    random: bool
    logprobs: int | None  # the most that any row asks for, but for those of `full_rows`
    full_rows: Tensor | None  # rows that ask for the logprobs of the vocabulary, int64

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        vocab_size: int,
        device: torch.device,
        seeds: Sequence[int] | None = None,  # those of params
    ) -> "SamplingTensors":
        """The columns of ``params``; every row that draws has a seed."""
        if seeds is None:
            seeds = [p.seed or 0 for p in params]
        # Python's seeds run to 2^64 - 1; the same 64 bits as a signed integer.
        seeds = [(seed + 2**63) % 2**64 - 2**63 for seed in seeds]
        biases = [
            (row, token, value)
            for row, p in enumerate(params)
            for token, value in (p.logit_bias or {}).items()
        ]
        bias = None
        if biases:
            rows, tokens, values = zip(*biases, strict=True)
            bias = (
                upload(rows, torch.int64, device),
                upload(tokens, torch.int64, device),
                upload(values, torch.float32, device),
            )
        counts = [p.logprobs for p in params if p.logprobs is not None]
        full_rows = [row for row, p in enumerate(params) if p.logprobs == -1]
        return cls(
            seeds=upload(seeds, torch.int64, device),
            temperature=upload([p.temperature for p in params], torch.float32, device),
            filters=Filters.of(params, vocab_size, device),
            bias=bias,
            random=any(p.temperature > 0 for p in params),
            logprobs=max(0, *counts) if counts else None,
            full_rows=upload(full_rows, torch.int64, device) if full_rows else None,
        )


@dataclass(frozen=True)
class SamplerOutput:
    """One token a row; the other fields are empty unless a row asked for logprobs."""

    tokens: Tensor  # int32 [B]
    logprobs: Sequence[Tensor] = ()  # what `score` tells of the tokens
    full: Sequence[Tensor] = ()  # ids and logprobs [W, V] of W rows that want them all


def adjust_logits(
    logits: Tensor,
    tensors: SamplingTensors,
    ops: Ops,
    counts: TokenCounts | None,
    mask: Mask | None,
) -> Tensor:
    """Logits [B, V] with biases and penalties, and without the tokens ruled out."""
    if tensors.bias is not None:
        rows, tokens, values = tensors.bias
        logits = logits.index_put((rows, tokens), values, accumulate=True)
    if counts is not None:
        logits = ops.penalize(counts, logits)
    return logits if mask is None else apply_mask(logits, mask)


def sample(
    logits: Tensor,
    best: Tensor,
    tensors: SamplingTensors,
    output_lengths: Tensor,
    ops: Ops,
    *,
    counts: TokenCounts | None = None,
    mask: Mask | None = None,
) -> SamplerOutput:
    """Choose one token for each row of ``logits`` float32 [B, V].

    ``best`` int32 [B] are their likeliest tokens. ``output_lengths`` int64 [B] say how
    many tokens each row has so far: with its seed, that fixes its noise. ``counts`` and
    ``mask`` are those of the rows that need some. Logprobs are of the logits as given.

    The draw is Gumbel-max: argmax(logits / temperature + noise) has exactly the
    distribution softmax(logits / temperature).
    """
    adjusted = adjust_logits(logits, tensors, ops, counts, mask)
    if adjusted is not logits:
        best = ops.argmax(adjusted)
    tokens = best
    if tensors.random:
        how = tensors.temperature, tensors.seeds, output_lengths, tensors.filters
        tokens = ops.draw(adjusted, best, *how)
    if counts is not None:
        counts.add(tokens)
    if tensors.logprobs is None:
        return SamplerOutput(tokens)
    scored = ops.score(logits, tokens, tensors.logprobs)
    full: Sequence[Tensor] = ()
    if (rows := tensors.full_rows) is not None:
        full = ops.score(logits[rows], tokens[rows], MAX_SIZE)[2:]
    return SamplerOutput(tokens, scored, full)
