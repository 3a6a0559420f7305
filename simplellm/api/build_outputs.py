"""What calls return once their replies are done: outputs, turns of chats, usage."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from simplellm.api.output_processor import Reader
from simplellm.api.outputs import ChatOutput, RequestOutput, Usage
from simplellm.base.request import EngineError

Readers = Sequence[Sequence[Reader]]  # prompt by prompt, one for each sample


def usage(readers: Readers) -> Usage:
    """How many tokens some prompts and all their samples took, so far."""
    firsts = [first for first, *_ in readers]
    replies = [reader.reply for reader in chain.from_iterable(readers)]
    return Usage(
        prompt_tokens=sum(len(first.reply.prompt_token_ids) for first in firsts),
        completion_tokens=sum(len(reply.token_ids) for reply in replies),
        cached_tokens=sum(first.reply.cached_tokens for first in firsts),
        reasoning_tokens=sum(reply.reasoning_tokens for reply in replies),
    )


def complete(readers: Readers, results: list[Any]) -> list[Any]:
    """``results``, which has None in place of what failed.

    Raises the error of what failed; of several prompts, EngineError with the first
    one's index, and with what was found.
    """
    errors = [next((r.error for r in some if r.error), None) for some in readers]
    for index, error in enumerate(errors):
        if error is not None and len(errors) == 1:
            raise error
        if error is not None:
            several = f"of {len(errors)} prompts, the one at index {index} failed"
            failure = EngineError(f"{several}: {error}")
            failure.index, failure.outputs = index, results
            raise failure from error.__cause__ or error
    return results


def outputs(readers: Readers) -> list[RequestOutput]:
    """What `LLM.generate` gives."""
    every = chain.from_iterable(readers)
    results = [None if r.error else r.reply.output() for r in every]
    return complete(readers, results)


def turns(readers: Readers) -> list[ChatOutput]:
    """What `LLM.chat` gives for several conversations."""
    results = [None if any(r.error for r in some) else turn([some]) for some in readers]
    return complete(readers, results)


def turn(readers: Readers) -> ChatOutput:
    """What `LLM.chat` gives for one."""
    choices: list[Any] = outputs(readers)
    return ChatOutput(**vars(choices[0]), choices=choices, usage=usage(readers))
