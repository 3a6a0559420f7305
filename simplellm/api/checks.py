"""What is asked for, checked: prompts, conversations, token ids, lengths."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from simplellm.base.config import ParameterError, expect, expect_type
from simplellm.base.sampling_params import SamplingParams
from simplellm.text.harmony import Message

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any] | Message]


class ContextLengthError(ValueError):
    """A prompt is longer than the model's context, or than this engine's cache.

    Clients know it by these phrases, which are OpenAI's, vLLM's and Anthropic's, and
    shorten their conversations.
    """

    def __init__(self, tokens: int, most: int, limit: int, words: str) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, the "
            f"prompt is too long: {tokens} tokens > {most} maximum; expected {words}"
        )
        self.param = "prompt"


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list. Raises TypeError or ValueError."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = as_list(prompts)
    if isinstance(prompts, Mapping):
        return [as_prompt(prompts)]
    expected = "text, a list of token ids, or a list of these"
    expect_type("prompts", prompts, list | tuple, expected)
    one = all(isinstance(item, int) or type(as_list(item)) is int for item in prompts)
    return [list(prompts)] if prompts and one else [*map(as_prompt, prompts)]


def as_prompt(prompt: Any) -> Any:
    """What a dict has in it, vLLM's form of a prompt; all else as it is."""
    if not isinstance(prompt, Mapping):
        return prompt
    expected = "'prompt' or 'prompt_token_ids' alone"
    known = len(prompt) == 1 and {*prompt} <= {"prompt", "prompt_token_ids"}
    expect(known, "the keys of a prompt", [*prompt], expected, param="prompt")
    return next(iter(prompt.values()))


def is_several(messages: Any) -> bool:
    """Whether these are conversations, and not the messages of one."""
    listed = isinstance(messages, list | tuple) and len(messages) > 0
    return listed and isinstance(messages[0], list | tuple)


@contextmanager
def annotate_errors(name: str, index: int, all_of_it: bool = False) -> Iterator[None]:
    """Put ``name[index]`` in front of an error raised inside: which prompt it is of.

    Only errors about prompts or messages get it or, with ``all_of_it``, all.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if all_of_it or getattr(error, "param", "").startswith(("prompt", "messages")):
            error.args = (f"{name}[{index}]: {error}",)
        raise


def as_list(value: Any) -> Any:
    """A NumPy or PyTorch array as a list; all else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def token_ids(prompt: Any) -> list[int]:
    """A prompt that is no text, in Python's integers. Raises TypeError, ValueError."""
    prompt = as_list(prompt)
    expect_type("a prompt", prompt, list | tuple, "text or token ids", "prompt")
    if not prompt:
        wrong = "a prompt is empty; expected at least one token"
        raise ParameterError(wrong, "prompt")
    # NumPy and PyTorch have integers of their own.
    ids = [token if type(token) is int else as_list(token) for token in prompt]
    odd = next((token for token in ids if type(token) is not int), 0)
    name, ok = "a token id of a prompt", type(odd) is int
    expect(ok, name, odd, "an integer", TypeError, "prompt")
    return ids


def check_token_ids(
    ids: Sequence[int], params: SamplingParams, vocab_size: int
) -> None:
    """Raise ValueError for a token id that the model doesn't have."""
    named = {
        "prompt": ids,
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    most = vocab_size - 1
    for name, tokens in named.items():
        odd = next((token for token in tokens if not 0 <= token <= most), None)
        expect(odd is None, f"a token id of {name}", odd, f"0 to {most}", param=name)


def with_integer_keys(bias: Mapping[str, Any]) -> dict[Any, Any]:
    """A logit_bias by token ids, where it comes from JSON, whose keys are text."""
    number = re.compile("[0-9]{1,10}")  # int() takes the digits of every script
    return {int(key) if number.fullmatch(key) else key: bias[key] for key in bias}
