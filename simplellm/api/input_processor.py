"""What users ask for is checked here, once, and becomes requests."""

import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from simplellm.api.chat_options import (
    Constraint,
    Format,
    as_format,
    text_constraint,
    turn_constraint,
)
from simplellm.base.config import (
    ModelConfig,
    about,
    check_kind,
    check_names,
    check_number,
    expect,
    expect_type,
)
from simplellm.base.grammar import Grammar, GrammarError
from simplellm.base.request import Request
from simplellm.base.sampling_params import SamplingParams, StructuredOutputs
from simplellm.checkpoint.folder import (
    read_generation_config,
    small_files,
    turn_ends,
)
from simplellm.engine.client import EngineClient
from simplellm.sampling.allowed_tokens import AllowedTokens, bad_sequences
from simplellm.structured.rules import WHERE, rules_text
from simplellm.structured.vocabulary import Grammars, refusal
from simplellm.text.dialects.dialect import HARMONY, Dialect, open_text
from simplellm.text.harmony import Message, Tool, from_openai
from simplellm.text.harmony.schema import as_tools
from simplellm.text.parser import TurnParser
from simplellm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any] | Message]
Constrain = Callable[[StructuredOutputs | None], Constraint | None]

CHAT_MAX_TOKENS = 1024  # reasoning included
MAX_SAMPLES = 1024
MAX_PRIORITY = 1000
MAX_SECONDS = 10.0**9
MAX_GRAMMARS = 64  # that are kept
LOGGER = logging.getLogger("simplellm")
OVERRIDES = (*(spec.name for spec in fields(SamplingParams)), "priority", "timeout")
ENCODING = ("parse_special", "add_special_tokens")  # of a prompt that is text
LIKE_CONTROL = re.compile(r"<[^<>\s]{1,64}>|\[[^\[\]\s]{1,64}\]")  # in a prompt's text


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


def sample_of(asked: Request, number: int = 0) -> Request:
    """Sample ``number`` of a checked request: the same, drawn with another seed.

    The first one finds the prompt's logprobs for all of them.
    """
    seed = asked.params.seed
    assert seed is not None
    # Not by `replace`, which would check once more, for each of a thousand samples.
    params = copy(asked.params)
    object.__setattr__(params, "seed", (seed + number) % 2**64)
    sample = replace(
        asked, tokens=list(asked.tokens), params=params, siblings=[], index=number
    )
    if number > 0:
        sample.prompt_logprobs = None
    return sample


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list. Raises TypeError or ValueError."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = plain(prompts)
    wanted = "text, a list of token ids, or a list of these"
    expect_type("prompts", prompts, list | tuple, wanted)
    expect(prompts, "the list of prompts", prompts, "at least one prompt")
    one = all(isinstance(item, int) or type(plain(item)) is int for item in prompts)
    return [list(prompts)] if one else list(prompts)


def is_several(messages: Any) -> bool:
    """Whether these are conversations, and not the messages of one."""
    listed = isinstance(messages, list | tuple) and len(messages) > 0
    return listed and isinstance(messages[0], list | tuple)


def once_for_each(constrain: Constrain) -> Constrain:
    """``constrain``, which then isn't asked again for what it has been asked before."""
    known: list[tuple[StructuredOutputs | None, Constraint | None]] = []

    def found(outputs: StructuredOutputs | None) -> Constraint | None:
        for one, constraint in known:
            if one is outputs:
                return constraint
        known.append((outputs, constrain(outputs)))
        return known[-1][1]

    return found


@contextmanager
def blaming(name: str, index: int, all_of_it: bool = False) -> Iterator[None]:
    """Has an error name its prompt or, with ``all_of_it``, what came with that."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if all_of_it or getattr(error, "param", "").startswith(("prompt", "messages")):
            error.args = (f"{name}[{index}]: {error}",)
        raise


def plain(value: Any) -> Any:
    """A NumPy or PyTorch array as a list; all else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def with_integer_keys(bias: Mapping[str, Any]) -> dict[Any, Any]:
    """A logit_bias by token ids, where it comes from JSON, whose keys are text."""
    number = re.compile("[0-9]{1,10}")  # int() takes the digits of every script
    return {int(key) if number.fullmatch(key) else key: bias[key] for key in bias}


@dataclass(frozen=True)
class InputProcessor:
    """What a model and its engine accept. Whatever is refused loses nothing.

    A checked call becomes a request that never runs; `sample_of` makes those that do.
    All of it raises TypeError or ValueError for what cannot run. A call of several
    prompts is taken whole or not at all; the error names the first one to blame.
    """

    config: ModelConfig
    tokenizer: Tokenizer | None
    default_params: SamplingParams  # for whoever gives none
    eos_token_ids: frozenset[int]  # what ends a turn
    max_model_len: int  # tokens of a prompt and its output
    compiler: Callable[[str], Grammar] | None = None  # of text; None: its own
    dialect: Dialect = HARMONY  # of chats
    warned: list[str] = field(default_factory=list)  # control tokens' names

    @classmethod
    def open(cls, place: Path, config: ModelConfig) -> "InputProcessor":
        """That of a checkpoint at its place, with room for all that the model has."""
        files = small_files(place)
        tokenizer, dialect = open_text(files, config)
        params, listed = read_generation_config(files, config.vocab_size)
        ends = turn_ends(config, tokenizer, listed, dialect.ends)
        limit = config.max_position_embeddings
        return cls(config, tokenizer, params, ends, limit, dialect=dialect)

    @cached_property
    def grammars(self) -> Grammars:
        """What compiles them."""
        tokenizer, size = self.need_tokenizer(), self.config.vocab_size
        return Grammars(tokenizer, size, self.eos_token_ids)

    def prepare(self) -> None:
        """Make what all grammars need now, if there can be any, and not for the first.

        All requests that run would wait for it. What fails will be told by the first.
        """
        if self.tokenizer is not None and find_spec("llguidance"):
            with suppress(Exception):
                self.grammars.vocabulary  # noqa: B018  (it is kept)

    @cached_property
    def compile(self) -> Callable[[str], Grammar]:
        """Text to a grammar. Agents send the same schema again and again."""
        return lru_cache(MAX_GRAMMARS)(self._compile)

    def _compile(self, text: str) -> Grammar:
        """The same, of which nothing is kept."""
        return (self.compiler or self.grammars.compile)(text)

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ValueError if there is none."""
        if self.tokenizer is None:
            raise ValueError(
                "this model has no tokenizer.json; expected prompts of token ids and "
                "no stop strings"
            )
        return self.tokenizer

    def encode(
        self,
        text: str,
        parse_special: bool | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """The token ids of a text that is no chat, with what has to stand in front.

        With ``parse_special`` the names of control tokens in it are these, as in the
        text of a chat that a template has written; it is llama.cpp's word. Without,
        they are text, and unless that is said, the first such prompt logs a warning.
        ``add_special_tokens`` says whether what stands in front is added, if it isn't
        there yet; it is vLLM's word.
        """
        if parse_special is not None:
            check_kind("parse_special", parse_special, bool)
        check_kind("add_special_tokens", add_special_tokens, bool)
        tokenizer, begin = self.need_tokenizer(), [*self.dialect.begin]
        ids = tokenizer.encode(text, special=bool(parse_special))
        if parse_special is None and not self.warned:
            names = (match[0] for match in LIKE_CONTROL.finditer(text))
            found = next((name for name in names if name in tokenizer.special), None)
            if found is not None:
                self.warned.append(found)
                LOGGER.warning(
                    "a prompt has %r, a control token's name, which is taken as text; "
                    "with parse_special=True it would be the control token",
                    found,
                )
        return (
            ids if not add_special_tokens or ids[: len(begin)] == begin else begin + ids
        )

    def parser(self, asked: Request) -> TurnParser:
        """What reads the turn that a chat's request asks for."""
        known = self.need_tokenizer(), asked.tokens, asked.grammar
        return self.dialect.parser(*known, asked.tools)

    def process_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None,
        overrides: Mapping[str, Any],
        constrain: Constrain = text_constraint,
    ) -> list[Request]:
        """One prompt or several, with parameters for all or for each."""
        every = as_prompts(prompts)
        each = isinstance(sampling_params, list | tuple)
        if isinstance(sampling_params, SamplingParams | None):
            sampling_params = [sampling_params] * len(every)
        wanted = "SamplingParams or a list of them"
        expect_type("sampling_params", sampling_params, list | tuple, wanted)
        given = len(sampling_params)
        wanted = f"1 for all prompts or {len(every)}, one each"
        expect(given == len(every), "the number of sampling_params", given, wanted)
        if (outputs := overrides.get("structured_outputs")) is not None:
            made = StructuredOutputs.of(outputs)  # the same for all
            overrides = {**overrides, "structured_outputs": made}
        constrain, asked = once_for_each(constrain), []
        for index, prompt in enumerate(every):
            with blaming("prompts", index, each) if len(every) > 1 else nullcontext():
                params = sampling_params[index]
                asked.append(self.process(prompt, params, overrides, constrain))
        return asked

    def process_chats(self, messages: Any, options: Mapping[str, Any]) -> list[Request]:
        """One conversation or several, with the same options."""
        if not is_several(messages):
            return [self.process_chat(messages, **options)]
        asked = []
        for index, one in enumerate(messages):
            with blaming("messages", index):
                asked.append(self.process_chat(one, **options))
        return asked

    def process_chat(
        self,
        messages: Any,  # Messages, once checked
        *,
        tools: Sequence[Tool | Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        response_format: Format | Mapping[str, Any] | None = None,
        reasoning_effort: str = "medium",
        current_date: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        sampling_params: SamplingParams | None = None,
        **overrides: Any,
    ) -> Request:
        ok = isinstance(messages, list | tuple) and messages
        expect(ok, "messages", messages, "a list of at least one message")
        # None is less than a token: to render them all would only take time.
        self.check_length(len(messages), 0, "fewer messages")
        wanted = "an object"
        given: Any = chat_template_kwargs
        expect_type("chat_template_kwargs", given, Mapping | None, wanted)
        check_kind("parallel_tool_calls", parallel_tool_calls, bool)
        odd = next((key for key in ENCODING if key in overrides), None)
        wanted = "it beside a text that is no chat: messages hold no control tokens"
        expect(odd is None, str(odd), "given", wanted)
        functions = [] if tool_choice == "none" else as_tools(tools or ())
        wanted_format = as_format(response_format)
        harmony = [message for message in messages if isinstance(message, Message)]
        if len(harmony) < len(messages):
            harmony = from_openai(messages, functions, self.dialect.lead)
        if text := wanted_format.text:
            harmony = [*self.dialect.with_format(harmony, functions, text)]
        tokenizer = self.need_tokenizer()
        ids = self.dialect.render(
            harmony,
            tokenizer,
            reasoning_effort=reasoning_effort,
            tools=functions,
            current_date=current_date,
            variables=chat_template_kwargs,
        )
        if sampling_params is None:
            sampling_params = replace(self.default_params, max_tokens=CHAT_MAX_TOKENS)
        alone = self.dialect.several_calls and not parallel_tool_calls
        grammar = partial(self.dialect.grammar, tokenizer, ids, alone=alone)
        asked = wanted_format, functions, tool_choice
        constrain = partial(turn_constraint, *asked, grammar=grammar, alone=alone)
        request = self.process(ids, sampling_params, overrides, constrain)
        request.tools = functions
        return request

    def check_length(self, tokens: int, needed: int, wanted: str = "fewer") -> None:
        """Raise ContextLengthError unless a prompt leaves as many as are ``needed``."""
        limit = self.max_model_len
        if tokens + needed > limit:
            raise ContextLengthError(tokens, limit - needed, limit, wanted)

    def process(
        self,
        prompt: object,
        params: SamplingParams | None,
        overrides: Mapping[str, Any],
        constrain: Constrain = text_constraint,
    ) -> Request:
        """A prompt, and what its samples have in common.

        ``constrain`` says what they must fit, given the structured_outputs.
        """
        options = dict(overrides)
        priority, timeout = options.pop("priority", 0), options.pop("timeout", None)
        check_number("priority", priority, int, -MAX_PRIORITY, MAX_PRIORITY)
        deadline = math.inf
        if timeout is not None:
            check_number("timeout", timeout, float, 0, MAX_SECONDS)
            deadline = time.monotonic() + timeout
        encoding = {key: options.pop(key) for key in ENCODING if key in options}
        params = self._params(params, options)
        ids = self._prompt_ids(prompt, encoding)
        limit = self.max_model_len
        self.check_length(len(ids), int(params.max_tokens != 0))
        self._check_ids(ids, params)
        ends = frozenset() if params.ignore_eos else self.eos_token_ids
        bad: list[tuple[int, ...]] = []
        if params.bad_words:
            bad = bad_sequences(params.bad_words, self.need_tokenizer())
        grammar = None
        if (constraint := constrain(params.structured_outputs)) is not None:
            wanted = "False where the text has to fit something: it ends then"
            expect(not params.ignore_eos, "ignore_eos", True, wanted)
            grammar = self._grammar(constraint)
        room, most_tokens = limit - len(ids), params.max_tokens
        request = Request(
            tokens=ids,
            text=prompt if isinstance(prompt, str) else None,
            max_tokens=room if most_tokens is None else min(most_tokens, room),
            params=params,
            stop_ids=ends.union(params.stop_token_ids),
            bad_sequences=bad,
            grammar=grammar,
            priority=priority,
            deadline=deadline,
        )
        if params.restricts:
            choices = AllowedTokens(request, self.config.vocab_size)
            left = choices.bits(params.min_tokens > 0, ()).any()
            restricting = "allowed_token_ids, bad_words and min_tokens"
            expect(left, f"the tokens that {restricting} leave", 0, "at least one")
        return request

    def _grammar(self, constraint: Constraint) -> Grammar:
        """The compiled grammar. Raises ValueError that names the part to blame."""
        parts = constraint.parts
        name = " and ".join(parts) or "tool_choice"
        lacks = "token that ends a text" if self.tokenizer else "tokenizer.json"
        ok = self.tokenizer and self.eos_token_ids
        expect(ok, name, "given", f"none: this model has no {lacks}")
        try:
            found = self.compile(constraint.text)
            if "lark_grammar" in (outputs := parts.get(WHERE, {})):
                # Behind free thoughts that no text fits it would come out too late.
                self.compile(rules_text(outputs))
            return found
        except GrammarError as error:
            wrong = f"{name}: {error}"
        for part, rules in parts.items():
            if (reason := refusal(rules, self._compile)) is not None:
                name, wrong = part, f"{part}: {reason}"
                break
        raise about(ValueError(wrong), name)

    def _check_ids(self, ids: Sequence[int], params: SamplingParams) -> None:
        """Raise ValueError for a token id that the model doesn't have."""
        named = {
            "the prompt": ids,
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias or (),
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        most = self.config.vocab_size - 1
        for name, tokens in named.items():
            odd = next((token for token in tokens if not 0 <= token <= most), None)
            expect(odd is None, f"a token id of {name}", odd, f"0 to {most}")

    def _params(
        self, params: SamplingParams | None, options: Mapping[str, Any]
    ) -> SamplingParams:
        """Checked sampling parameters, with a seed."""
        params = self.default_params if params is None else params
        expect_type("sampling_params", params, SamplingParams, "SamplingParams")
        check_names("sampling parameter", options, OVERRIDES)
        if options.get("seed", params.seed) is None:
            options = {**options, "seed": secrets.randbits(63)}
        params = replace(params, **options)
        if params.stop:
            self.need_tokenizer()
        return params

    def _prompt_ids(self, prompt: Any, encoding: Mapping[str, Any]) -> list[int]:
        if isinstance(prompt, str):
            prompt = self.encode(prompt, **encoding)
        prompt = plain(prompt)
        expect_type("a prompt", prompt, list | tuple, "text or token ids")
        if not prompt:
            wrong = "a prompt is empty; expected at least one token"
            raise about(ValueError(wrong), "prompt")
        # NumPy and PyTorch have integers of their own.
        ids = [token if type(token) is int else plain(token) for token in prompt]
        odd = next((token for token in ids if type(token) is not int), 0)
        expect(type(odd) is int, "a token id of a prompt", odd, "an integer", TypeError)
        return ids


@dataclass(frozen=True)
class Loaded:
    """All that an LLM is made of."""

    engine: EngineClient
    input_processor: InputProcessor
    how: str  # which operations compute, and why
    weights_seconds: float  # that it took to read the weights
