"""The words and records of harmony, the message format of gpt-oss.

A message is `<|start|>HEADER<|message|>CONTENT<|end|>`; a header names the author, a
channel, a recipient and a content type.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from simplellm.base.config import expect
from simplellm.text.tokenizer import Tokenizer, TokenizerError

ROLES = ("system", "developer", "user", "assistant", "tool")
CHANNELS = ("analysis", "commentary", "final")
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|endoftext|>")
MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", *ENDS)


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    ``role`` is one of ROLES; a tool's ``name`` takes its place in the header.
    ``content`` is the text as the model reads it. An assistant's message with a
    ``recipient`` is a call, "functions.calculator" for the function `calculator`; its
    ``content_type`` is "<|constrain|>json". A parsed message may hold whatever names
    the model wrote; ``channel`` is None if it wrote none. ``call_id`` is what a client
    calls a call, and the result that belongs to it; harmony doesn't write it.
    """

    role: str
    content: str
    name: str | None = None
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    call_id: str | None = None


HEADER_WORD = re.compile(r"[^\s<]+")  # a space would begin another word, "<" a marker


def markers(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of harmony's control tokens; TokenizerError if one is missing."""
    if missing := [name for name in MARKERS if name not in tokenizer.special]:
        raise TokenizerError(
            f"the tokenizer has no {missing[0]}; expected harmony's control tokens"
        )
    return {name: tokenizer.special[name] for name in MARKERS}


def check_message(message: Message) -> None:
    """Raise ValueError if a header cannot be written for ``message``."""
    role, channel, name = message.role, message.channel, message.name
    expect(role in ROLES, "role", role, f"one of {ROLES}")
    expect(channel in (None, *CHANNELS), "channel", channel, f"one of {CHANNELS}")
    expect(name or role != "tool", "a tool message's name", name, "'functions.NAME'")
    content_type = (message.content_type or "").removeprefix("<|constrain|>")
    for word in (name, message.recipient, content_type):
        ok = not word or HEADER_WORD.fullmatch(word)
        expect(ok, "a word of a header", word, "no spaces and no '<'")


def is_call(message: Message) -> bool:
    """Whether the assistant calls a function with ``message``."""
    return message.role == "assistant" and bool(message.recipient)


@dataclass(frozen=True)
class ToolCall:
    """A call the model wrote; ``arguments`` is its text, which need not be JSON."""

    name: str
    arguments: str


def tool_calls(messages: Iterable[Message]) -> list[ToolCall]:
    """The function calls among the assistant's messages."""
    return [
        ToolCall((message.recipient or "").removeprefix("functions."), message.content)
        for message in messages
        if is_call(message)
    ]


@dataclass(frozen=True)
class Delta:
    """New text of the message being written.

    ``call`` is None outside calls. A call begins with the first delta of its number,
    whose text may be empty.
    """

    channel: str | None
    recipient: str | None
    text: str
    call: int | None = None  # the reply's first call is 0
    # Set where log-probabilities are asked for: its tokens, with an entry for each.
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Any, ...] | None = None
