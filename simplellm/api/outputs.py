"""What the LLM returns: samples of text and turns of a chat. Plain data."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any

from simplellm.base.request import Event, Request, TokenLogprobs
from simplellm.base.sampling_params import MAX_LOGPROBS
from simplellm.text.harmony import Delta, Message, ToolCall, is_call, to_openai
from simplellm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Times:
    """When things happened to a request, by time.monotonic(), in seconds.

    And what became of its drafts, by position after the last sure token: nothing
    where the engine checks none.
    """

    arrival_time: float
    first_scheduled_time: float | None  # None: it never began
    first_token_time: float | None  # None: there was no token
    finished_time: float | None
    preemptions: int  # how often it gave its pages to others
    draft_tokens: tuple[int, ...] = ()  # that steps have checked
    accepted_tokens: tuple[int, ...] = ()  # of these, the right ones


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One output of a request, a text or a turn: its tokens, and why it ended.

    ``finish_reason`` is "stop" (an end-of-turn token, a stop token or a stop string),
    "length", "timeout" or "abort" (cancelled, or the LLM closed); None while it goes
    on. ``logprobs`` has an entry for each token, or is None if nobody asked for it.
    ``prompt_logprobs`` has one for each token of the prompt, None for the first; of a
    prompt's samples, the first has them, and of a stream its first part.
    """

    token_ids: list[int]  # all of them, those too that are no part of a text
    finish_reason: str | None
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    # The stop string or the one of stop_token_ids that ended it; None: something else.
    stop_reason: str | int | None = None
    # Equal samples say the same; these tell where they come from. Of a stream, the last
    # part has them.
    index: int = field(default=0, compare=False)  # among the samples of its prompt
    num_cached_tokens: int = field(default=0, compare=False)  # of the prompt's
    metrics: Times | None = field(default=None, compare=False)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities; None if nobody asked for them."""
        if self.logprobs is None:
            return None
        return sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True, kw_only=True)
class RequestOutput(Sample):
    """One sample of a request; from a stream, what one event added to it.

    ``text`` leaves out special tokens (unless skip_special_tokens is False) and the
    token that ended it, as vLLM's V1 does (unless include_stop_str_in_output).
    """

    text: str
    prompt_token_ids: list[int]
    prompt: str | None = field(default=None, compare=False)  # if it was given as text


@dataclass(frozen=True, kw_only=True)
class ChatChoice(Sample):
    """One turn of the assistant, its parts apart.

    A turn that came to its own end and calls functions has the ``finish_reason``
    "tool_calls".
    """

    reasoning: str  # the analysis channel
    content: str  # what is meant for the user
    tool_calls: list[ToolCall]

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


@dataclass(frozen=True, kw_only=True)
class ChatOutput(ChatChoice):
    """One or more answers to the same messages; it is itself the first of them."""

    choices: list[ChatChoice]
    usage: Usage


class BaseReply:
    """What text and chat replies share: token ids, logprobs, times and the end.

    ``finish_reason`` is None until the end; what comes after it is ignored.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.tokenizer, self.params = tokenizer, request.params
        self.prompt_token_ids, self.prompt = list(request.tokens), request.text
        self.index, self.arrival = request.index, request.arrival_time
        self.first_scheduled_time: float | None = None
        self.first: float | None = None
        self.finished: float | None = None
        self.cached_tokens = self.preemptions = 0
        self.draft_counts: Sequence[Sequence[int]] = ()
        self.reasoning_tokens = 0  # of the reasoning's text, without its markers
        self.token_ids: list[int] = []
        scored = request.params.logprobs is not None
        self.logprobs: list[TokenLogprobs] | None = [] if scored else None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def take(self, event: Event) -> None:
        """As a reply's ``push``, where nobody wants the parts."""
        self.push(event)

    def push(self, event: Event) -> list[Any]:
        raise NotImplementedError

    def scores(self, event: Event) -> list[TokenLogprobs] | None:
        """The log-probabilities of an event's tokens; None if nobody asked for them."""
        some = event.logprobs or ()
        return None if self.logprobs is None else self.with_text(some)

    def note(
        self,
        event: Event,
        count: int,
        scores: Sequence[TokenLogprobs] | None,
        match: str | None,
    ) -> None:
        """Take in an event, of which ``count`` tokens are part of the reply.

        ``match`` is the stop string that it completed, if any.
        """
        tokens = event.tokens
        self.token_ids += tokens if count == len(tokens) else tokens[:count]
        if self.logprobs is not None:
            self.logprobs += (scores or ())[:count]
        self.cached_tokens, self.preemptions = event.cached_tokens, event.preemptions
        self.first_scheduled_time = event.first_scheduled_time
        self.draft_counts = event.draft_counts or ()
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = self.with_text(event.prompt_logprobs)
        now = event.time or time.monotonic()
        if tokens and self.first is None:
            self.first = now
        if event.finish_reason is None and match is None:
            return
        self.finish_reason = event.finish_reason if match is None else "stop"
        if match is not None:
            self.stop_reason = match
        elif event.finish_reason == "stop" and tokens:
            last, ends = tokens[-1], self.params.stop_token_ids
            self.stop_reason = last if last in ends else None
        self.finished = now

    def with_text(self, entries: Sequence[Any]) -> list[Any]:
        """Log-probabilities, some of them None, with what their tokens are as text.

        Alternatives are left out where they are the whole vocabulary.
        """
        if self.tokenizer is None:
            return [*entries]
        spell, with_texts = self.tokenizer.token_bytes, []
        for entry in entries:
            if entry is not None:
                some = entry.top if len(entry.top) <= MAX_LOGPROBS else ()
                texts = [spell(token).decode(errors="replace") for token, _ in some]
                own = spell(entry.token_id).decode(errors="replace")
                entry = replace(entry, decoded_token=own, decoded_top=(*texts,))
            with_texts.append(entry)
        return with_texts

    def origin(self) -> dict[str, Any]:
        """The fields of a `Sample` that tell where it comes from, and why it ended."""
        times = self.arrival, self.first_scheduled_time, self.first, self.finished
        drafts = zip(*self.draft_counts, strict=True)  # checked, right
        return {
            "stop_reason": self.stop_reason,
            "index": self.index,
            "num_cached_tokens": self.cached_tokens,
            "metrics": Times(*times, self.preemptions, *drafts),
        }

    def sample(self) -> dict[str, Any]:
        """All fields of a `Sample`, as far as they are known."""
        return self.origin() | {
            "token_ids": self.token_ids.copy(),
            "finish_reason": self.finish_reason,
            "logprobs": None if self.logprobs is None else [*self.logprobs],
            "prompt_logprobs": self.prompt_logprobs,
        }


# Parts of a reply


def kind_of(part: RequestOutput | Delta) -> object:
    """A key that is equal for parts that may be merged: of deltas, their message."""
    if isinstance(part, RequestOutput):
        return None
    return part.channel, part.recipient, part.call


def merge(parts: Iterable[Any]) -> list[Any]:
    """Parts of one reply, in order, with neighbors of one kind merged."""
    groups = (list(group) for _, group in groupby(parts, key=kind_of))
    return [merge_kind(group) if len(group) > 1 else group[0] for group in groups]


def merge_kind(parts: Sequence[Any]) -> Any:
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
    """``deltas`` with one at the end that a token of ``message`` can belong to.

    One is added if there is none. A token of no message (None) always gets its own.
    """
    if message is None:
        return [*deltas, Delta(None, None, "")]
    if deltas:
        return deltas
    number = call if is_call(message) else None
    return [Delta(message.channel, message.recipient, "", number)]
