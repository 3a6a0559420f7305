"""What leaves the engine: plain data, an event for each thing that happens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one step, from the model's logits as they came."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest (token id, logprob), best first


class Event(NamedTuple):
    """What happened to request ``number``: tokens, its end, or both."""

    number: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None
    error: Exception | None = None
    time: float = 0.0  # time.monotonic() of the step that gave the tokens
