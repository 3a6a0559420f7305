"""What calls return, once their replies are done: outputs, turns of chats, usage."""

from collections.abc import Sequence
from typing import Any

from simplellm.outputs import ChatOutput, RequestOutput, Usage
from simplellm.reader import Reader
from simplellm.request import EngineError

Readers = Sequence[Sequence[Reader]]  # of samples, prompt by prompt


def usage(families: Readers) -> Usage:
    """How many tokens some prompts and all their samples took, so far."""
    firsts = [family[0] for family in families]
    replies = [reader.reply for family in families for reader in family]
    return Usage(
        prompt_tokens=sum(len(first.reply.prompt_token_ids) for first in firsts),
        completion_tokens=sum(len(reply.token_ids) for reply in replies),
        cached_tokens=sum(first.reply.cached_tokens for first in firsts),
        reasoning_tokens=sum(reply.reasoning_tokens for reply in replies),
    )


def complete(families: Readers, found: list[Any]) -> list[Any]:
    """``found``, which has None in place of what failed.

    Raises the error of what failed; of several prompts, EngineError with the first
    one's index, and with what was found.
    """
    errors = [next((r.error for r in family if r.error), None) for family in families]
    for index, error in enumerate(errors):
        if error is not None and len(errors) == 1:
            raise error
        if error is not None:
            several = f"of {len(errors)} prompts, the one at index {index} failed"
            failure = EngineError(f"{several}: {error}")
            failure.index, failure.outputs = index, found
            raise failure from error.__cause__ or error
    return found


def outputs(families: Readers) -> list[RequestOutput]:
    """What `LLM.generate` gives."""
    readers = [reader for family in families for reader in family]
    found = [None if r.error else r.reply.output() for r in readers]
    return complete(families, found)


def turns(families: Readers) -> list[ChatOutput]:
    """What `LLM.chat` gives for several conversations."""
    found = [
        None if any(r.error for r in family) else turn([family]) for family in families
    ]
    return complete(families, found)


def turn(families: Readers) -> ChatOutput:
    """What `LLM.chat` gives for one."""
    choices: list[Any] = outputs(families)
    return ChatOutput(**vars(choices[0]), choices=choices, usage=usage(families))
