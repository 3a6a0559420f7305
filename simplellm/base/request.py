"""One request: what it asks for, how far it is, and its events. Plain data."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from simplellm.base.grammar import Grammar
from simplellm.base.sampling_params import SamplingParams

UNKNOWN = -1  # stands for a token that is being computed


class EngineError(RuntimeError):
    """A request failed inside the engine, or the engine takes no more requests.

    If it was one of several prompts of a call, ``index`` says which, the first such,
    and ``outputs`` is what the call gave, with None in place of what failed.
    """

    index: int | None = None
    outputs: Sequence[Any] | None = None


class QueueFullError(RuntimeError):
    """The queue of waiting requests is full."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one step, from the model's logits as they came."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest (token id, logprob), best first
    rank: int  # one more than there are likelier tokens
    # What the tokens are as text, the chosen one and those of ``top``: see `BaseReply`.
    decoded_token: str | None = field(default=None, compare=False)
    decoded_top: tuple[str, ...] = field(default=(), compare=False)


@dataclass(eq=False)
class Request:
    """One sequence: its tokens, how many of them are computed, its place in line.

    It belongs to the engine once it is submitted; others learn of it by `Event`.
    """

    tokens: list[int]  # the prompt; the output is appended in place
    max_tokens: int  # of output
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()  # tokens that end it
    bad_sequences: Sequence[Sequence[int]] = ()  # the tokens of bad words
    priority: int = 0  # the lower, the sooner, as in vLLM
    deadline: float = math.inf  # by time.monotonic()
    siblings: "list[Request]" = field(default_factory=list)  # more samples of a prompt
    grammar: Grammar | None = None  # that its output must follow
    arrival_time: float = field(default_factory=time.monotonic)
    text: str | None = None  # of the prompt, if it was given as text
    index: int = 0  # among the samples of its prompt
    request_id: int = -1  # given by who submits it

    # What the scheduler writes down.
    queue_key: tuple[int, ...] = ()  # its place in line: the least goes first
    num_computed_tokens: int = 0  # tokens that the cache holds
    num_cached_tokens: int | None = None  # of the prompt, when it was first scheduled
    first_scheduled_time: float | None = None  # by time.monotonic()
    preemptions: int = 0
    finish_reason: str | None = None
    # Guesses of its next tokens, which the step under way checks; () if they were made
    # on the device, and the host needn't know them.
    drafts: Sequence[int] = ()
    draft_counts: tuple[tuple[int, int], ...] = ()  # by position: checked, and right
    last_token_time: float | None = None  # when its latest token came
    # What has to come next by its grammar, whatever is sampled.
    forced: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)
        # The prompt's so far, if asked for, until an event takes them. The first token
        # has None: nothing predicts it. Of several samples, the first has them for all.
        scored = self.params.prompt_logprobs is not None and self.index == 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None
        self.prompt_logprobs = [None] if scored else None

    @property
    def seed(self) -> int:
        """Seed of the noise that its tokens are drawn with, 0 to 2^64 - 1."""
        return ((self.params.seed or 0) + self.index) % 2**64

    @cached_property
    def restricted(self) -> bool:
        """Whether some tokens are ruled out for it."""
        return self.params.restricts or self.grammar is not None

    @cached_property
    def needs_last_token(self) -> bool:
        """Whether its mask depends on its last token, which may begin a bad word."""
        several = any(len(sequence) > 1 for sequence in self.bad_sequences)
        return several or self.grammar is not None

    @cached_property
    def overlaps_drafts(self) -> bool:
        """Whether its next step is launched before the drafts of the last are checked.

        It can be where nothing on the host depends on its tokens.
        """
        bound = self.restricted or self.params.penalizes
        return not bound and self.params.logprobs is None

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one can be sampled: 1 in a decode."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def complete(self) -> bool:
        """Whether its last token is there, or at least being computed.

        One is sampled even if none is wanted: it ends the request and is dropped.
        """
        return len(self.tokens) - self.num_prompt >= (self.max_tokens or 1)


class Event(NamedTuple):
    """What happened to a request: all that leaves the engine, and plain data."""

    request_id: int
    tokens: Sequence[int] = ()  # new ones
    logprobs: Sequence[TokenLogprobs] | None = None  # theirs, if they were asked for
    finish_reason: str | None = None  # "stop", "length", "timeout", "abort", "error"
    error: Exception | None = None
    time: float = 0.0  # time.monotonic() when the tokens came
    cached_tokens: int = 0  # of the prompt that the cache held when it began
    # Of the prompt's tokens, if they were asked for: with the first event.
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    preemptions: int = 0  # so far
    first_scheduled_time: float | None = None  # `Request.first_scheduled_time`
    draft_counts: Sequence[Sequence[int]] | None = None  # `Request.draft_counts`
