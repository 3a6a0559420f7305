"""What a step gave its requests, put together on the host."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from simplellm.base.request import Request, TokenLogprobs
from simplellm.base.sample_position import SamplePosition
from simplellm.engine.drafts import accept_drafts
from simplellm.sampling.logprobs import PromptScores, prompt_entries, token_logprobs


class StepOutput(NamedTuple):
    """What a step gave each chunk that samples, in their order."""

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]
    # Prompts that are scored, in parts: where one begins, and each token's logprobs.
    prompts: Sequence[tuple[Request, int, list[TokenLogprobs]]] = ()
    late: bool = False  # the device was done before the host came for it


def step_output(
    requests: Sequence[SamplePosition],
    forced: Sequence[list[int]],
    tokens: Sequence[int],
    logprobs: Sequence[Tensor],
    full: Sequence[Tensor],
    scores: Sequence[PromptScores],
    accepted: Mapping[int, int] | None = None,
) -> StepOutput:
    """What a step gave ``requests``, from what it has sampled, which is on the host.

    ``logprobs`` and ``full`` are those of a `SamplerOutput`; ``accepted`` is as in
    `verify_drafts`, and None if there are no drafts.
    """
    counts = [request.params.logprobs for request in requests]
    scored = token_logprobs(counts, tokens, logprobs, full)
    prompts = [(p.request, p.first, prompt_entries(p)) for p in scores]
    new = [f or [t] for f, t in zip(forced, tokens, strict=True)]
    if accepted is not None:
        new, scored = verify_drafts(requests, new, scored, accepted)
    return StepOutput(new, scored, prompts)


def verify_drafts(
    rows: Sequence[SamplePosition],
    tokens: Sequence[list[int]],
    logprobs: Sequence[list[TokenLogprobs] | None],
    accepted: Mapping[int, int],
) -> tuple[list[list[int]], list[list[TokenLogprobs] | None]]:
    """Of each request the tokens that are sure, and their logprobs.

    Those of one request stand together, the one without drafts first. How many drafts
    of some requests are ``accepted`` is known from the device, by their numbers.
    """
    new: list[list[int]] = []
    scored: list[list[TokenLogprobs] | None] = []
    parts = zip(rows, tokens, logprobs, strict=True)
    for request_id, group in groupby(parts, key=lambda part: part[0].request_id):
        (request, sampled, scores), *rest = group
        for row, more, own in rest:
            if request.forced or not getattr(row, "valid", True):
                break
            sampled = sampled + more
            if scores is not None and own is not None:
                scores = scores + own
        if request.overlaps_drafts and request_id in accepted:
            sampled = sampled[: accepted[request_id] + 1]
        elif rest and not request.forced:
            sampled = accept_drafts(request.drafts[: len(sampled) - 1], sampled)
        new.append(sampled)
        scored.append(scores if scores is None else scores[: len(sampled)])
    return new, scored
