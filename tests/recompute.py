"""What a request's tokens have to be: each one chosen from logits computed anew.

No cache, no batch, no scheduler; penalties are counted from lists. A token drawn with a
seed is that of the same noise.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from simplellm.base.noise import gumbel_noise
from simplellm.base.request import Request
from simplellm.base.sampling_params import SamplingParams
from simplellm.model.model import Model
from simplellm.sampling.filters import filter_tokens


def forbidden(
    tokens: Sequence[int], num_prompt: int, request: Request, vocab_size: int
) -> set[int]:
    """What must not follow ``tokens``."""
    params, output = request.params, list(tokens[num_prompt:])
    found: set[int] = set()
    if params.allowed_token_ids is not None:
        found = {*range(vocab_size)} - {*params.allowed_token_ids}
    if len(output) < params.min_tokens:
        found |= request.stop_ids
    ends = [
        bad[-1]
        for bad in request.bad_sequences
        if output[len(output) - len(bad) + 1 :] == list(bad[:-1])
        and len(bad) <= len(output) + 1
    ]
    found |= {token for token in ends if (token,) in request.bad_sequences}
    return found if len(found.union(ends)) == vocab_size else found.union(ends)


def choose(
    logits: Tensor, tokens: Sequence[int], num_prompt: int, request: Request
) -> int:
    """The token that follows ``tokens``, of logits [V]."""
    params = request.params
    scores = logits.clone()
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    for token in set(tokens):
        factor = params.repetition_penalty
        scores[token] *= 1 / factor if scores[token] > 0 else factor
    for token, count in Counter(tokens[num_prompt:]).items():
        scores[token] -= count * params.frequency_penalty + params.presence_penalty
    scores[[*forbidden(tokens, num_prompt, request, len(scores))]] = -torch.inf
    if params.temperature == 0:
        return int(scores.argmax())
    scores = (scores - scores.max()) / params.temperature
    size = len(scores)
    top_k = torch.tensor([[params.top_k if 0 < params.top_k < size else size]])
    top_p, min_p = (torch.tensor([[p]]) for p in (params.top_p, params.min_p))
    scores = filter_tokens(scores[None], top_k, top_p, min_p)
    seed = ((params.seed or 0) + 2**63) % 2**64 - 2**63  # 64 bits, with a sign
    step = len(tokens) - num_prompt
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([step]), size)
    return int((scores + noise).argmax())


def recompute(
    model: Model,
    prompt: Sequence[int],
    params: SamplingParams,
    stop_ids: Collection[int] = (),
    bad_sequences: Sequence[Sequence[int]] = (),
) -> tuple[list[int], str]:
    """A request's tokens, and why it ends."""
    stops, tokens = frozenset([*stop_ids, *params.stop_token_ids]), list(prompt)
    most = params.max_tokens
    assert most is not None
    request = Request([0], most, params, stops, bad_sequences=bad_sequences)
    for _ in range(most):
        logits = model.logits(tokens)[-1]
        tokens.append(choose(logits, tokens, len(prompt), request))
        if tokens[-1] in stops:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


class Recompute:
    """`recompute` of one model, which keeps what it has found."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.known: dict[Any, tuple[list[int], str]] = {}

    def __call__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        bad_sequences: Sequence[Sequence[int]] = (),
    ) -> tuple[list[int], str]:
        key = tuple(prompt), repr(params), repr(bad_sequences)
        if key not in self.known:
            self.known[key] = recompute(
                self.model, prompt, params, bad_sequences=bad_sequences
            )
        return self.known[key]
