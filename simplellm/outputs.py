"""What the LLM returns: samples of text and turns of a chat. Plain data."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any, Protocol

from simplellm.harmony import Delta, Message, ToolCall, is_call, to_openai
from simplellm.request import Event, Request, TokenLogprobs
from simplellm.sampling_params import MAX_LOGPROBS
from simplellm.tokenizer import Tokenizer


@dataclass(frozen=True)
class Times:
    """When things happened to a request, by time.monotonic(), in seconds."""

    arrival_time: float
    first_scheduled_time: float | None  # None: it never began
    first_token_time: float | None  # None: there was no token
    finished_time: float | None
    preemptions: int  # how often it gave its pages to others


def cumulative(logprobs: Sequence[TokenLogprobs] | None) -> float | None:
    """The log-probability of all tokens, one after the other; None of unknown ones."""
    return None if logprobs is None else sum(entry.logprob for entry in logprobs)


@dataclass(frozen=True)
class RequestOutput:
    """One sample of a request; from a stream, what one event added to it.

    ``text`` leaves out special tokens (unless skip_special_tokens is False) and the
    token that ended it, as vLLM's V1 does (unless include_stop_str_in_output);
    ``token_ids`` hold them all.
    ``finish_reason`` is "stop" (an end-of-turn token, a stop token or a stop string),
    "length", "timeout" or "abort" (cancelled, or the LLM closed); None while it goes
    on. ``logprobs`` has an entry for each token, or is None if nobody asked for it.
    ``prompt_logprobs`` has one for each token of the prompt, None for the first; of a
    prompt's samples, the first has them, and of a stream its first part.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs] | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    # The stop string or the one of stop_token_ids that ended it; None: something else.
    stop_reason: str | int | None = None
    # Equal outputs say the same; these tell where it comes from. Of a stream, the last
    # part has them.
    prompt: str | None = field(default=None, compare=False)  # if it was given as text
    index: int = field(default=0, compare=False)  # among the samples of its prompt
    num_cached_tokens: int = field(default=0, compare=False)  # of the prompt's
    metrics: Times | None = field(default=None, compare=False)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities; None if nobody asked for them."""
        return cumulative(self.logprobs)


@dataclass(frozen=True)
class ChatChoice:
    """One turn of the assistant, its parts apart; the rest as in RequestOutput.

    A turn that came to its own end and calls functions has the ``finish_reason``
    "tool_calls".
    """

    reasoning: str  # the analysis channel
    content: str  # what is meant for the user
    tool_calls: list[ToolCall]
    finish_reason: str | None
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stop_reason: str | int | None = None
    index: int = field(default=0, compare=False)
    metrics: Times | None = field(default=None, compare=False)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities; None if nobody asked for them."""
        return cumulative(self.logprobs)

    def message(self) -> dict[str, Any]:
        """The turn as an OpenAI message, for the messages of the next turn."""
        return to_openai(self.reasoning, self.content, self.tool_calls)


@dataclass(frozen=True)
class Usage:
    """How many tokens a chat took."""

    prompt_tokens: int  # once for all choices
    completion_tokens: int  # of all choices
    cached_tokens: int  # of the prompt's, those that were found in the cache
    reasoning_tokens: int  # of the completions', those of text in the analysis channel


@dataclass(frozen=True)
class ChatOutput:
    """One or more answers to the same messages; the first one's parts are at hand."""

    choices: list[ChatChoice]
    usage: Usage

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def content(self) -> str:
        return self.choices[0].content

    @property
    def tool_calls(self) -> list[ToolCall]:
        return self.choices[0].tool_calls

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def stop_reason(self) -> str | int | None:
        return self.choices[0].stop_reason

    @property
    def index(self) -> int:
        return self.choices[0].index

    @property
    def metrics(self) -> Times | None:
        return self.choices[0].metrics

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.choices[0].logprobs


class Progress:
    """What a reply notes of its request beside tokens and text."""

    def __init__(self, asked: Request, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.prompt, self.index = asked.text, asked.index
        self.arrival = asked.submitted
        self.stop_ids = asked.params.stop_token_ids
        self.begun: float | None = None
        self.first: float | None = None
        self.finished: float | None = None
        self.cached = self.preemptions = 0
        self.stop_reason: str | int | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None

    def note(self, event: Event, found: str | None) -> None:
        """Take in an event; ``found`` is the stop string that it completed, if any."""
        self.cached, self.preemptions = event.cached_tokens, event.preemptions
        self.begun = event.begun
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = self.with_text(event.prompt_logprobs)
        now = event.time or time.monotonic()
        if event.tokens and self.first is None:
            self.first = now
        if found is not None:
            self.stop_reason = found
        elif event.finish_reason == "stop" and {*event.tokens[-1:]} & {*self.stop_ids}:
            self.stop_reason = event.tokens[-1]
        if found is not None or event.finish_reason is not None:
            self.finished = now

    def with_text(self, entries: Sequence[Any]) -> list[Any]:
        """Log-probabilities, some of them None, with what their tokens are as text.

        Alternatives are left out where they are the whole vocabulary.
        """
        if self.tokenizer is None:
            return [*entries]
        spell, found = self.tokenizer.token_bytes, []
        for entry in entries:
            if entry is not None:
                some = entry.top if len(entry.top) <= MAX_LOGPROBS else ()
                texts = [spell(token).decode(errors="replace") for token, _ in some]
                own = spell(entry.token_id).decode(errors="replace")
                entry = replace(entry, decoded_token=own, decoded_top=(*texts,))
            found.append(entry)
        return found

    def metrics(self) -> Times:
        times = self.arrival, self.begun, self.first, self.finished
        return Times(*times, self.preemptions)

    def of_text(self) -> dict[str, Any]:
        """Fields of a RequestOutput."""
        own = {"prompt": self.prompt, "num_cached_tokens": self.cached}
        return self.of_chat() | own

    def of_chat(self) -> dict[str, Any]:
        """Fields of a ChatChoice."""
        return {
            "stop_reason": self.stop_reason,
            "index": self.index,
            "metrics": self.metrics(),
        }


# Parts of a reply


class TurnParser(Protocol):
    """What reads a turn, token by token, as `HarmonyParser` tells."""

    messages: list[Message]
    message: Message | None
    num_calls: int

    def push(self, token_id: int) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


def kind_of(part: RequestOutput | Delta) -> object:
    """What parts must have in common to be merged: a delta, its message."""
    if isinstance(part, RequestOutput):
        return None
    return part.channel, part.recipient, part.call


def merge(parts: Iterable[Any]) -> list[Any]:
    """Parts of one reply, in order: neighbors that can be one part are one."""
    groups = (list(group) for _, group in groupby(parts, key=kind_of))
    return [merged(group) if len(group) > 1 else group[0] for group in groups]


def merged(parts: Sequence[Any]) -> Any:
    """Parts of one kind as one part."""
    kind, last = type(parts[0].token_ids), parts[-1]
    logprobs = None
    if any(part.logprobs is not None for part in parts):
        logprobs = kind(chain.from_iterable(part.logprobs or () for part in parts))
    scored = getattr(parts[0], "prompt_logprobs", None)
    firsts = {} if scored is None else {"prompt_logprobs": scored}
    return replace(
        last,
        **firsts,
        text="".join(part.text for part in parts),
        token_ids=kind(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=logprobs,
    )


def is_reasoning(part: Message | Delta) -> bool:
    """Whether this is no call and not for the user: thoughts, or for a recipient."""
    calls = is_call(part) if isinstance(part, Message) else part.call is not None
    return not calls and (part.channel == "analysis" or part.recipient is not None)


def with_token(deltas: list[Delta], message: Message | None, call: int) -> list[Delta]:
    """``deltas``, the last of which can have a token of ``message``; None: of none."""
    if message is None:
        return [*deltas, Delta(None, None, "")]
    if deltas:
        return deltas
    number = call if is_call(message) else None
    return [Delta(message.channel, message.recipient, "", number)]
