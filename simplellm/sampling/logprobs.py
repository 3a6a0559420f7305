"""Log-probabilities on their way to the host: of sampled tokens and of prompts.

N rows, M alternatives of each, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplellm.base.host_memory import upload
from simplellm.base.request import Request, TokenLogprobs

ROWS = 128  # of a prompt whose logits are there at a time


def score(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, ...]:
    """Logprobs, by ``logits`` [N, V], of ``tokens`` [N]: float32 [N].

    And their ranks, int64 [N]; and the ``count`` likeliest ids with their logprobs
    [N, M], best first.
    """
    logprobs = logits.log_softmax(dim=-1)
    top = logprobs.topk(min(count, logits.shape[1]), dim=-1)
    picked = logprobs.gather(1, tokens[:, None].long())
    ranks = 1 + (logprobs > picked).sum(dim=-1)
    return picked[:, 0], ranks, top.indices, top.values


class PromptScores(NamedTuple):
    """What a step found out about a part of a prompt."""

    request: Any  # the Request whose prompt it is
    first: int  # the position of the part's first token
    scores: Sequence[Tensor]  # the results of `score`


class PromptTargets(NamedTuple):
    """The tokens of a prompt that come next after some rows of a step."""

    request: Any  # a Request; None where these are not known, on other ranks
    first: int  # the position of its first token
    row: int  # the first of the rows
    tokens: Tensor  # int64 [N]
    most: int  # alternatives that are wanted


Head = Callable[[Tensor, Tensor], object]  # `Model.head`
Score = Callable[[Tensor, Tensor, int], tuple[Tensor, ...]]  # `score`


def prompt_targets(
    scheduled: Sequence[tuple[Request, int, int, bool]], device: torch.device
) -> list[PromptTargets]:
    """What to score of the prompts in a step.

    A request whose ``prompt_logprobs`` is None wants none, or has got them.
    """
    parts: list[PromptTargets] = []
    if all(chunk[0].prompt_logprobs is None for chunk in scheduled):
        return parts
    row = 0
    for request, start, length, _ in scheduled:
        count = request.params.prompt_logprobs
        stop = min(start + length, request.num_prompt - 1)
        if request.prompt_logprobs is not None and count is not None and start < stop:
            tokens = upload(request.tokens[start + 1 : stop + 1], torch.int64, device)
            parts.append(PromptTargets(request, start + 1, row, tokens, count))
        row += length
    return parts


def score_prompts(
    targets: Iterable[PromptTargets],
    hidden: Tensor,
    head: Head,
    logits: Tensor,
    score: Score = score,
) -> list[PromptScores]:
    """Score the ``targets`` of a step's ``hidden`` [T, hidden].

    ``head`` never computes a whole prompt at once: at most ROWS rows, and no more than
    ``logits`` has, which stay as they are.
    """
    found, size = [], min(ROWS, len(logits))
    for request, first, row, tokens, most in targets:
        scratch, parts = torch.empty_like(logits[:size]), []
        rows = hidden[row : row + len(tokens)]
        for some, chosen in zip(rows.split(size), tokens.split(size), strict=True):
            head(some, scratch[: len(some)])
            parts.append(score(scratch[: len(some)], chosen, most))
        scores = [*map(torch.cat, zip(*parts, strict=True))]
        found.append(PromptScores(request, first, scores))
    return found


def token_logprobs(
    counts: Sequence[int | None],
    tokens: Sequence[int],
    scores: Sequence[Tensor],
    full: Sequence[Tensor],
) -> list[list[TokenLogprobs] | None]:
    """Each row's log-probabilities, as many as its request asked for.

    ``scores``, on the host, are those of `score`, or nothing if no row asked. ``full``
    has the ids and the values of the rows that asked for the vocabulary.
    """
    entries: list[list[TokenLogprobs] | None] = [None] * len(tokens)
    if not scores:
        return entries
    chosen, ranks, ids, values = (column.tolist() for column in scores)
    rest = zip(*(column.tolist() for column in full), strict=True)
    for row, count in enumerate(counts):
        if count is not None:
            some = ids[row][:count], values[row][:count]
            top = tuple(zip(*(next(rest) if count < 0 else some), strict=True))
            entries[row] = [TokenLogprobs(tokens[row], chosen[row], top, ranks[row])]
    return entries


def prompt_entries(part: PromptScores) -> list[TokenLogprobs]:
    """The log-probabilities of a part of a prompt whose scores are on the host."""
    request, first, scores = part
    tokens = request.tokens[first : first + len(scores[0])]
    columns = (column.tolist() for column in scores)
    return [
        TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True)), rank)
        for token, logprob, rank, ids, values in zip(tokens, *columns, strict=True)
    ]
