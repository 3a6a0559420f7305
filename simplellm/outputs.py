"""What the LLM returns: samples of text and turns of a chat. Plain data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

from simplellm.harmony import Delta, ToolCall, to_openai
from simplellm.request import TokenLogprobs


@dataclass(frozen=True)
class RequestOutput:
    """One sample of a request; from a stream, what one event added to it.

    ``text`` leaves special tokens out, ``token_ids`` hold them, the last one included.
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
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.choices[0].logprobs


# Parts of a reply


def kind_of(part: RequestOutput | Delta) -> object:
    """What parts must have in common to be merged: a delta, its message."""
    if isinstance(part, RequestOutput):
        return None
    return part.channel, part.recipient, part.call


def merge(parts: Iterable[Any]) -> list[Any]:
    """Parts of one reply, in order: neighbours that can be one part are one."""
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
