"""The words and records of harmony, the message format of gpt-oss.

A message is `<|start|>HEADER<|message|>CONTENT<|end|>`; a header names the author, a
channel, a recipient and a content type.
"""

import re
from dataclasses import dataclass

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
