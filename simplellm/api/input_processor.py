"""Checks what users ask for, once, and makes requests of it."""

import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from simplellm.api.chat_options import (
    Format,
    as_format,
    text_constraint,
    turn_constraint,
)
from simplellm.api.checks import (
    ContextLengthError,
    Prompt,
    annotate_errors,
    as_prompts,
    check_token_ids,
    is_several,
    token_ids,
)
from simplellm.api.grammars import Constrain, GrammarCompiler, memoized
from simplellm.base.config import (
    ModelConfig,
    check_kind,
    check_names,
    check_number,
    expect,
    expect_type,
)
from simplellm.base.grammar import Grammar
from simplellm.base.request_spec import RequestSpec
from simplellm.base.sampling_params import SamplingParams, StructuredOutputs
from simplellm.checkpoint.folder import read_generation_config, small_files, turn_ends
from simplellm.engine.engine_client import EngineClient
from simplellm.sampling.allowed_tokens import AllowedTokens, bad_sequences
from simplellm.text.dialects.dialect import HARMONY, Dialect, load_tokenizer_and_dialect
from simplellm.text.harmony import Message, Tool, from_openai
from simplellm.text.harmony.schema import as_tools
from simplellm.text.parser import TurnParser
from simplellm.text.tokenizer import Tokenizer

CHAT_MAX_TOKENS = 1024  # reasoning included
MAX_SAMPLES = 1024
MAX_PRIORITY = 1000
MAX_SECONDS = 10.0**9
LOGGER = logging.getLogger("simplellm")
OVERRIDES = (*(spec.name for spec in fields(SamplingParams)), "priority", "timeout")
ENCODING = ("parse_special", "add_special_tokens")  # of a prompt that is text
LIKE_CONTROL = re.compile(r"<[^<>\s]{1,64}>|\[[^\[\]\s]{1,64}\]")  # in a prompt's text


@dataclass(frozen=True)
class InputProcessor:
    """Turns prompts and chats into checked `RequestSpec`s, for one model and engine.

    Each prompt of a call becomes one. All of it raises TypeError or ValueError for what
    cannot run. A call of several prompts is taken whole or not at all; the error names
    the first one to blame.
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
    def open(cls, path: Path, config: ModelConfig) -> "InputProcessor":
        """The processor of the checkpoint at ``path``, with the model's own limits."""
        files = small_files(path)
        tokenizer, dialect = load_tokenizer_and_dialect(files, config)
        params, listed = read_generation_config(files, config.vocab_size)
        ends = turn_ends(config, tokenizer, listed, dialect.ends)
        limit = config.max_position_embeddings
        return cls(config, tokenizer, params, ends, limit, dialect=dialect)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler of grammars that outputs must fit."""
        size, ends = self.config.vocab_size, self.eos_token_ids
        return GrammarCompiler(self.tokenizer, size, ends, self.compiler)

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ValueError if there is none."""
        if self.tokenizer is None:
            raise ValueError(
                "this model has no tokenizer.json; expected prompts of token ids and "
                "no stop strings. From older files, transformers makes one by "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
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
            name = next((name for name in names if name in tokenizer.special), None)
            if name is not None:
                self.warned.append(name)
                LOGGER.warning(
                    "a prompt has %r, a control token's name, which is taken as text; "
                    "with parse_special=True it would be the control token",
                    name,
                )
        if add_special_tokens and ids[: len(begin)] != begin:
            ids = begin + ids
        return ids

    def parser(self, spec: RequestSpec) -> TurnParser:
        """What reads the turn that a chat asks for."""
        parts = self.need_tokenizer(), spec.tokens, spec.grammar
        return self.dialect.parser(*parts, spec.tools, spec.begun)

    def process_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None,
        overrides: Mapping[str, Any],
        constrain: Constrain = text_constraint,
    ) -> list[RequestSpec]:
        """One prompt or several, with parameters for all or for each."""
        every = as_prompts(prompts)
        each = isinstance(sampling_params, list | tuple)
        if isinstance(sampling_params, SamplingParams | None):
            sampling_params = [sampling_params] * len(every)
        expected = "SamplingParams or a list of them"
        expect_type("sampling_params", sampling_params, list | tuple, expected)
        count, name = len(sampling_params), "the number of sampling_params"
        expected = f"1 for all prompts or {len(every)}, one each"
        expect(count == len(every), name, count, expected, param="sampling_params")
        if (outputs := overrides.get("structured_outputs")) is not None:
            made = StructuredOutputs.of(outputs)  # the same for all
            overrides = {**overrides, "structured_outputs": made}
        constrain, specs = memoized(constrain), []
        several = len(every) > 1
        for index, prompt in enumerate(every):
            with annotate_errors("prompts", index, each) if several else nullcontext():
                params = sampling_params[index]
                specs.append(self.process(prompt, params, overrides, constrain))
        return specs

    def process_chats(
        self, messages: Any, options: Mapping[str, Any]
    ) -> list[RequestSpec]:
        """One conversation or several, with the same options."""
        if not is_several(messages):
            return [self.process_chat(messages, **options)]
        specs = []
        for index, one in enumerate(messages):
            with annotate_errors("messages", index):
                specs.append(self.process_chat(one, **options))
        return specs

    def process_chat(
        self,
        messages: Any,  # Messages, once checked
        *,
        tools: Sequence[Tool | Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        response_format: Format | Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        current_date: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        sampling_params: SamplingParams | None = None,
        **overrides: Any,
    ) -> RequestSpec:
        """A conversation, rendered; arguments are those of `LLM.chat`."""
        ok = isinstance(messages, list | tuple) and messages
        expect(ok, "messages", messages, "a list of at least one message")
        # A message is a token at least: to render more of them would only take time.
        self.check_length(len(messages), 0, "fewer messages")
        expected = "an object"
        variables: Any = chat_template_kwargs
        expect_type("chat_template_kwargs", variables, Mapping | None, expected)
        check_kind("parallel_tool_calls", parallel_tool_calls, bool)
        odd = next((key for key in ENCODING if key in overrides), None)
        expected = "it beside a text that is no chat: messages hold no control tokens"
        expect(odd is None, str(odd), "given", expected)
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
        options = wanted_format, functions, tool_choice
        constrain = partial(turn_constraint, *options, grammar=grammar, alone=alone)
        spec = self.process(ids, sampling_params, overrides, constrain)
        return replace(spec, tools=functions)

    def reopened(self, spec: RequestSpec, text: str) -> RequestSpec:
        """``spec`` of a chat whose last message, the assistant's ``text``, stays open.

        It's the same where a grammar has to begin with the answer, or where a template
        shows the text in other words.
        """
        if spec.grammar is not None:
            return spec
        tokenizer = self.need_tokenizer()
        tokens = self.dialect.reopen_answer(tokenizer, spec.tokens)
        # A template may strip the text, or leave white space at its end.
        end = tokenizer.decode(tokens[-len(text.encode()) - 1 :]).rstrip()
        shown = end.endswith(text.strip())
        return replace(spec, tokens=tokens, begun=True) if shown else spec

    def check_length(self, tokens: int, needed: int, expected: str = "fewer") -> None:
        """Raise ContextLengthError unless a prompt leaves as many as are ``needed``."""
        limit = self.max_model_len
        if tokens + needed > limit:
            raise ContextLengthError(tokens, limit - needed, limit, expected)

    def process(
        self,
        prompt: object,
        params: SamplingParams | None,
        overrides: Mapping[str, Any],
        constrain: Constrain = text_constraint,
    ) -> RequestSpec:
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
        text = prompt if isinstance(prompt, str) else None
        ids = token_ids(prompt if text is None else self.encode(text, **encoding))
        limit = self.max_model_len
        self.check_length(len(ids), int(params.max_tokens != 0))
        check_token_ids(ids, params, self.config.vocab_size)
        ends = frozenset() if params.ignore_eos else self.eos_token_ids
        bad: list[tuple[int, ...]] = []
        if params.bad_words:
            bad = bad_sequences(params.bad_words, self.need_tokenizer())
        grammar = None
        if (constraint := constrain(params.structured_outputs)) is not None:
            expected = "False where the text has to fit something: it ends then"
            expect(not params.ignore_eos, "ignore_eos", True, expected)
            if params.allowed_token_ids is not None or params.banned:
                constraint = constraint.any_spelling()
            grammar = self.grammars.compile_constraint(constraint)
        available, most = limit - len(ids), params.max_tokens
        spec = RequestSpec(
            tokens=ids,
            text=text,
            max_tokens=available if most is None else min(most, available),
            params=params,
            stop_ids=ends.union(params.stop_token_ids),
            bad_sequences=bad,
            grammar=grammar,
            priority=priority,
            deadline=deadline,
        )
        if params.restricts:
            free = replace(spec, grammar=None)  # which may be in another process
            choices = AllowedTokens(free.sample(), self.config.vocab_size)
            left = choices.bits(params.min_tokens > 0, ()).any()
            some = "allowed_token_ids, bad_words, logit_bias and min_tokens"
            name = f"the tokens that {some} leave"
            expect(left, name, 0, "at least one", param="allowed_token_ids")
        return spec

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


@dataclass(frozen=True)
class LoadedModel:
    """All that an LLM is made of."""

    engine: EngineClient
    input_processor: InputProcessor
    backend_reason: str  # which operations compute, and why
    weights_seconds: float  # that it took to read the weights
