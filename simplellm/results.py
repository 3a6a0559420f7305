"""What calls return, once their replies are done: outputs, turns of chats, usage."""

from collections.abc import Sequence
from typing import Any

from simplellm.outputs import ChatOutput, RequestOutput, Usage
from simplellm.reader import Reader

Readers = Sequence[Sequence[Reader]]  # of samples, prompt by prompt


def usage(families: Readers) -> Usage:
    """How many tokens some prompts and all their samples took, so far."""
    firsts = [family[0] for family in families]
    replies = [reader.reply for family in families for reader in family]
    return Usage(
        prompt_tokens=sum(len(first.reply.prompt_token_ids) for first in firsts),
        completion_tokens=sum(len(reply.token_ids) for reply in replies),
        cached_tokens=sum(first.cached_tokens for first in firsts),
        reasoning_tokens=sum(reply.reasoning_tokens for reply in replies),
    )


def outputs(families: Readers) -> list[RequestOutput | None]:
    """What `LLM.generate` gives; None for a sample that failed."""
    readers = [reader for family in families for reader in family]
    found: Any = [None if r.error else r.reply.output() for r in readers]
    return found


def turns(families: Readers) -> list[ChatOutput | None]:
    """What `LLM.chat` gives for several conversations; None for one that failed."""
    return [turn([family]) for family in families]


def turn(families: Readers) -> ChatOutput | None:
    """What `LLM.chat` gives for one; None if it failed."""
    if any(reader.error for reader in families[0]):
        return None
    choices: list[Any] = [reader.reply.output() for reader in families[0]]
    return ChatOutput(choices, usage(families))
