"""Choose the next token of each row of a batch of logits.

B rows (one sequence each), V vocabulary, P rows with penalties. Everything is
vectorized over the batch and stays on the logits' device. What a row gets depends on
its own logits, its own parameters, its seed and its step, never on the other rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from simplellm.logprobs import score
from simplellm.masks import Mask, apply_mask
from simplellm.penalties import TokenCounts
from simplellm.sampling_params import SamplingParams
from simplellm.transfer import upload


def filter_tokens(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Logits [B, V] with -inf for every token that min_p, top_k or top_p drops.

    Parameters are [B, 1]; top_k is int64 in 1..V. Each filter sees what the one before
    it left, renormalized. All three keep a head of the sorted row, so the last kept
    logit is a threshold; tokens that tie with it stay.
    """
    ordered = logits.sort(dim=-1, descending=True).values  # [B, V]
    keep = ordered >= ordered[:, :1] + min_p.log()
    keep &= torch.arange(logits.shape[1], device=logits.device) < top_k
    probs = ordered.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # mass of the tokens ranked higher
    # Rounding may carry the sum to 1 early: a row without top_p must lose nothing.
    keep &= (before < top_p) | (top_p >= 1)
    # In float32 a tiny top_p is 0 and keeps none; the likeliest token stays.
    last = (keep.sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    return logits.masked_fill(logits < ordered.gather(1, last), -torch.inf)


@dataclass(frozen=True)
class Columns:
    """A batch's parameters as columns [B, 1], and what some row needs as booleans.

    The booleans are Python's, so deciding what to skip never waits for the GPU. Built
    once for as long as a batch keeps its requests.
    """

    seeds: Tensor  # int64 [B]
    temperature: Tensor  # float32, 0 for the likeliest token
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    bias: tuple[Tensor, Tensor, Tensor] | None  # rows, token ids, values
    random: bool
    filters: bool
    logprobs: int | None  # the most that any row asks for, but for those of `whole`
    whole: Tensor | None  # rows that ask for the logprobs of the vocabulary, int64

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device
    ) -> "Columns":
        """The columns of ``params``, in which every row that draws has a seed."""

        def column(values: list[float]) -> Tensor:
            return upload(values, torch.float32, device)[:, None]

        # Python's seeds run to 2^64 - 1; the same 64 bits as a signed integer.
        seeds = [((p.seed or 0) + 2**63) % 2**64 - 2**63 for p in params]
        top_k = [
            min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params
        ]
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
        wanted = [p.logprobs for p in params if p.logprobs is not None]
        whole = [row for row, p in enumerate(params) if p.logprobs == -1]
        return cls(
            seeds=upload(seeds, torch.int64, device),
            temperature=column([p.temperature for p in params]),
            top_k=upload(top_k, torch.int64, device)[:, None],
            top_p=column([p.top_p for p in params]),
            min_p=column([p.min_p for p in params]),
            bias=bias,
            random=any(p.temperature > 0 for p in params),
            filters=any(
                p.temperature > 0
                and (0 < p.top_k < vocab_size or p.top_p < 1 or p.min_p > 0)
                for p in params
            ),
            logprobs=max(0, *wanted) if wanted else None,
            whole=upload(whole, torch.int64, device) if whole else None,
        )


@dataclass(frozen=True)
class Sampled:
    """One token a row; the other fields are None unless some row asked for logprobs."""

    tokens: Tensor  # int32 [B]
    logprobs: Tensor | None = None  # float32 [B], of the chosen tokens
    top: tuple[Tensor, Tensor] | None = None  # ids and logprobs [B, N], best first
    whole: tuple[Tensor, Tensor] | None = None  # [W, V] for W rows that want them all


def change(
    logits: Tensor, columns: Columns, counts: TokenCounts | None, mask: Mask | None
) -> Tensor:
    """Logits [B, V] with biases and penalties, and without the tokens ruled out."""
    if columns.bias is not None:
        rows, tokens, values = columns.bias
        logits = logits.index_put((rows, tokens), values, accumulate=True)
    if counts is not None:
        logits = counts.penalize(logits)
    return logits if mask is None else apply_mask(logits, mask)


def prepare(scores: Tensor, best: Tensor, columns: Columns) -> Tensor:
    """Scores [B, V] over the temperatures, without what the filters drop."""
    # The best token sits at 0, so that no temperature, however small, overflows.
    scores = scores - scores.gather(1, best[:, None].long())
    drawing = columns.temperature > 0
    scores = scores / torch.where(drawing, columns.temperature, 1.0)
    return filter_tokens(scores, columns.top_k, columns.top_p, columns.min_p)


def sample(
    logits: Tensor,
    best: Tensor,
    columns: Columns,
    steps: Tensor,
    draw: Callable[..., Tensor],
    *,
    counts: TokenCounts | None = None,
    mask: Mask | None = None,
) -> Sampled:
    """Choose one token for each row of ``logits`` float32 [B, V].

    ``best`` int32 [B] are their likeliest tokens. ``steps`` int64 [B] counts each row's
    tokens so far: with the seed it fixes the noise. ``draw`` is the operation of that
    name. ``counts`` are those of the rows with penalties; ``mask`` is that of the rows
    that may not get every token. Logprobs are those of the logits as given.

    The draw is Gumbel-max: argmax(logits / temperature + noise) has exactly the
    distribution softmax(logits / temperature).
    """
    scores = change(logits, columns, counts, mask)
    if scores is not logits:
        best = scores.argmax(dim=-1).int()
    chosen = best
    if columns.random:
        heat = columns.temperature
        if columns.filters:
            scores, heat = prepare(scores, best, columns), (heat > 0).float()
        chosen = draw(scores, best, heat[:, 0], columns.seeds, steps)
    if counts is not None:
        counts.add(chosen)
    if columns.logprobs is None:
        return Sampled(chosen)
    picked, ids, values = score(logits, chosen, columns.logprobs)
    whole = None
    if (rows := columns.whole) is not None:
        whole = score(logits[rows], chosen[rows], logits.shape[1])[1:]
    return Sampled(chosen, picked, (ids, values), whole)
