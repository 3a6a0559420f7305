"""What calls return once their replies are done: outputs, turns of chats, usage."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from simplellm.api.output_processor import Reader
from simplellm.api.outputs import ChatOutput, RequestOutput, Usage
from simplellm.base.request import EngineError

Readers = Sequence[Sequence[Reader]]  # of `Samples`


def usage(samples: Readers) -> Usage:
    """How many tokens some prompts and all their samples took, so far."""
    firsts = [first for first, *_ in samples]
    replies = [reader.reply for reader in chain.from_iterable(samples)]
    return Usage(
        prompt_tokens=sum(len(first.reply.prompt_token_ids) for first in firsts),
        completion_tokens=sum(len(reply.token_ids) for reply in replies),
        cached_tokens=sum(first.reply.cached_tokens for first in firsts),
        reasoning_tokens=sum(reply.reasoning_tokens for reply in replies),
    )


def complete(samples: Readers, results: list[Any]) -> list[Any]:
    """``results``, which has None in place of what failed.

    Raises the error of what failed; of several prompts, EngineError with the first
    one's index, and with what was found.
    """
    errors = [next((r.error for r in some if r.error), None) for some in samples]
    for index, error in enumerate(errors):
        if error is not None and len(errors) == 1:
            raise error
        if error is not None:
            several = f"of {len(errors)} prompts, the one at index {index} failed"
            failure = EngineError(f"{several}: {error}")
            failure.index, failure.outputs = index, results
            raise failure from error.__cause__ or error
    return results


def outputs(samples: Readers) -> list[RequestOutput]:
    """What `LLM.generate` gives."""
    readers = chain.from_iterable(samples)
    results = [None if r.error else r.reply.output() for r in readers]
    return complete(samples, results)


def turns(samples: Readers) -> list[ChatOutput]:
    """What `LLM.chat` gives for several conversations."""
    results = [None if any(r.error for r in some) else turn([some]) for some in samples]
    return complete(samples, results)


def turn(samples: Readers) -> ChatOutput:
    """What `LLM.chat` gives for one."""
    choices: list[Any] = outputs(samples)
    return ChatOutput(**vars(choices[0]), choices=choices, usage=usage(samples))
