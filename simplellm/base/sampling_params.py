"""What a request may ask for: how its tokens are chosen and when they stop."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from simplellm.base.config import (
    MAX_SIZE,
    as_ids,
    as_plain,
    as_texts,
    check_number,
    check_value,
    declared,
    expect,
    expect_type,
    one_of,
)
from simplellm.base.config import check as check_declared

MAX_LOGPROBS = 20  # alternatives a request may ask for, as in OpenAI's interface
# Stop strings are looked for in every new piece of text.
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_CHARACTERS = 2**16
MAX_BIAS = 1e30  # far from where penalties would make it infinite
TEXTS = (
    ("stop", MAX_STOPS, MAX_STOP_CHARACTERS),
    ("bad_words", MAX_BAD_WORDS, MAX_BAD_CHARACTERS),
)


@dataclass(frozen=True)
class StructuredOutputs:
    """What a text must be: exactly one of these. Names as in vLLM.

    Raises TypeError or ValueError unless one is given, and of its type; what is in it
    is checked where it is asked for.
    """

    json: str | dict[str, Any] | None = None  # JSON that fits this schema
    regex: str | None = None  # it matches this as a whole; no lookarounds
    choice: Sequence[str] | None = None  # one of these
    grammar: str | None = None  # in llguidance's Lark or GBNF, without special tokens

    def __post_init__(self) -> None:
        given = []
        for spec in fields(self):
            value = getattr(self, spec.name)
            check_value(f"structured_outputs.{spec.name}", value, spec)
            given += [] if value is None else [spec.name]
        expected = f"exactly one of {', '.join(spec.name for spec in fields(self))}"
        expect(len(given) == 1, "structured_outputs", given, expected)

    @classmethod
    def of(cls, value: Any) -> "StructuredOutputs | None":
        """``value`` with a dict of fields, as JSON has it, turned into this."""
        name = "structured_outputs"
        if isinstance(value, cls | None):
            return value
        expect_type(name, value, Mapping, "StructuredOutputs or a dict")
        for key in value:
            one_of(f"a name in {name}", key, [spec.name for spec in fields(cls)], name)
        return cls(**value)


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when they stop. Names as in vLLM.

    Penalties and biases change the logits first; then tokens are ruled out that
    min_tokens, bad_words, allowed_token_ids or a bias of minus infinity forbid, which
    holds at temperature 0 too; then temperature divides the logits; then min_p, top_k
    and top_p, in this order, drop tokens; then one token is drawn. Raises TypeError or
    ValueError for a parameter of the wrong type, out of range, or at odds with another.

    HTTP bodies, keywords of `LLM` and other processes take a new field by its name. Not
    so: what draws (model/ops.py, model/parallel.py, kernels, DRAWS of engine/warmup.py)
    and who knows a few (checkpoint/folder.py, checkpoint/gguf/tokens.py, apps/).
    """

    n: int = declared(1, high=1024)  # samples of the prompt
    # None: as many as there is room for. 0 needs prompt_logprobs: nothing is generated.
    max_tokens: int | None = declared(256, low=0)
    # Until there are so many, no token or stop string ends the output.
    min_tokens: int = declared(0, low=0)
    temperature: float = declared(1.0, low=0, high=100)  # 0 is greedy
    # Only the k most likely tokens; 0 or -1 keeps all.
    top_k: int = declared(0, low=-1)
    # The fewest tokens that hold this much probability.
    top_p: float = declared(1.0, above=0, high=1)
    # Tokens at least this fraction as likely as the likeliest.
    min_p: float = declared(0.0, low=0, high=1)
    # Of tokens seen so far (Keskar et al. 2019).
    repetition_penalty: float = declared(1.0, low=0.01, high=100)
    # Subtracted once from tokens in the output, and for each time in it.
    presence_penalty: float = declared(0.0, low=-2, high=2)
    frequency_penalty: float = declared(0.0, low=-2, high=2)
    stop: str | Sequence[str] = ()  # text that ends the output, left out of it
    include_stop_str_in_output: bool = False  # then it is part of the output
    stop_token_ids: Sequence[int] = ()  # None is (), here, for stop and for bad_words
    ignore_eos: bool = False
    # Texts that never come: once the output has all of one's tokens but the last, that
    # is ruled out. They are those of the text at a beginning and those after a space.
    bad_words: str | Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None  # no others are drawn; None: all
    skip_special_tokens: bool = True  # control tokens are no part of the text
    # None: a new one for each request.
    seed: int | None = declared(None, low=-(2**63), high=2**64 - 1)
    # This many alternatives beside the chosen token; -1: the whole vocabulary.
    logprobs: int | None = declared(None, low=-1, high=MAX_LOGPROBS)
    # The same for the tokens of the prompt, which is then computed anew, not looked up.
    prompt_logprobs: int | None = declared(None, low=0, high=MAX_LOGPROBS)
    # Added to the logits of these ids; minus infinity rules one out.
    logit_bias: Mapping[int, float] | None = None
    # What the text must be, or a chat's final answer; a dict of its fields is as good.
    # Where bad_words or allowed_token_ids leave none of the tokens that fit, a request
    # ends with an error; only the end of a complete text needs no permission.
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)  # past what makes it frozen
        for name, value in vars(self).items():
            put(name, as_plain(value))
        for name, *limits in TEXTS:
            put(name, as_texts(name, getattr(self, name), *limits))
        put("stop_token_ids", as_ids("stop_token_ids", self.stop_token_ids))
        put("structured_outputs", StructuredOutputs.of(self.structured_outputs))
        if self.allowed_token_ids is not None:
            some = as_ids("allowed_token_ids", self.allowed_token_ids)
            expect(some, "allowed_token_ids", some, "at least one token id, or None")
            put("allowed_token_ids", some)
        check_declared(self)
        most, least = self.max_tokens, self.min_tokens
        expected = f"at most max_tokens, {most}"
        expect(most is None or least <= most, "min_tokens", least, expected)
        ok = most != 0 or self.prompt_logprobs is not None
        expect(ok, "max_tokens", most, "1 or more, or prompt_logprobs beside it")
        ok = isinstance(self.logit_bias, Mapping | None)
        expect(ok, "logit_bias", self.logit_bias, "a dict", TypeError)
        if self.logit_bias is not None:  # a copy: nobody changes what was checked
            put("logit_bias", dict(self.logit_bias))
        for token, bias in (self.logit_bias or {}).items():
            where, param = f"logit_bias of token {token}", "logit_bias"
            check_number("a logit_bias token id", token, int, 0, MAX_SIZE, param=param)
            if bias != -math.inf:
                check_number(where, bias, float, -MAX_BIAS, MAX_BIAS, param=param)

    @property
    def banned(self) -> list[int]:
        """The tokens that have a bias of minus infinity."""
        biases = (self.logit_bias or {}).items()
        return [token for token, bias in biases if bias == -math.inf]

    @property
    def restricts(self) -> bool:
        """Whether some tokens are ruled out, be it for a while."""
        ids = self.allowed_token_ids is not None or self.banned
        return bool(ids or self.min_tokens > 0 or self.bad_words)

    @property
    def penalizes(self) -> bool:
        """Whether it matters which tokens there were."""
        penalties = self.presence_penalty, self.frequency_penalty
        return self.repetition_penalty != 1 or any(penalties)
