"""Bodies of requests: declared fields, read and checked as everything else is.

`read_body` takes what a dataclass declares and refuses the rest by name. Unless the
server is strict, `lenient.py` has been there before and left out what may be ignored.
The OpenAPI document is made from the same declarations.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin

import orjson

from simplellm.api.checks import with_integer_keys
from simplellm.api.input_processor import MAX_PRIORITY, MAX_SAMPLES
from simplellm.base.config import (
    ParameterError,
    check_value,
    declared,
    expect,
    expect_type,
)
from simplellm.base.request_spec import RequestSpec
from simplellm.base.sampling_params import MAX_LOGPROBS, SamplingParams
from simplellm.server.http.errors import APIError

Body = TypeVar("Body")
MAX_NAME = 100  # characters of a name that comes from a client, where it is repeated
# Tokens of prompts that the samples of one call may hold: they are copied in the loop.
MAX_COPIES = 2**22


@dataclass(frozen=True)
class Unsupported:
    """A parameter of others, with which nothing is done.

    ``ignored_values`` ask for nothing. Any other value is refused, unless it is a
    ``hint``: without it the answer may come later or cost more, but is no other one.
    A hint is ignored, and refused only by a strict server.
    """

    why: str  # that it isn't supported, in words for whoever asks for it
    ignored_values: tuple[Any, ...] = ()
    hint: bool = False


JSON_WORDS = {str: "a string", list: "a list", dict: "an object"}
NOT_HERE = "this server does not support it"
# Parameters that OpenAI and vLLM give to completions and chats alike.
SHARED_UNSUPPORTED = {
    "use_beam_search": Unsupported(NOT_HERE, (False,)),
    "length_penalty": Unsupported("it belongs to beam search", (1, 1.0), hint=True),
    "truncate_prompt_tokens": Unsupported(NOT_HERE),
    "spaces_between_special_tokens": Unsupported(NOT_HERE, (True,), hint=True),
    "guided_json": Unsupported("use json of structured_outputs"),
    "guided_regex": Unsupported("use regex of structured_outputs"),
    "guided_choice": Unsupported("use choice of structured_outputs"),
    "guided_grammar": Unsupported("use grammar of structured_outputs"),
    "logits_processors": Unsupported(NOT_HERE, ([],)),
    "kv_transfer_params": Unsupported(NOT_HERE, hint=True),
    "cache_salt": Unsupported(NOT_HERE, hint=True),
}


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """What a stream holds beside its parts."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "include_obfuscation": Unsupported(NOT_HERE, (False,), hint=True),
    }

    include_usage: bool = False  # a last event with the usage
    continuous_usage_stats: bool = False  # with it: the usage so far in every event


@dataclass(frozen=True, kw_only=True)
class SampledBody:
    """What all bodies have that ask the model; beside it all of `SamplingParams`."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = SHARED_UNSUPPORTED

    model: str | None = None  # one that is served
    n: int = declared(1, high=MAX_SAMPLES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = declared(0, low=-MAX_PRIORITY, high=MAX_PRIORITY)
    return_token_ids: bool = False  # as vLLM has it: the choices hold their token ids
    # Alternatives to each token of the prompt, as vLLM has them; in no stream.
    prompt_logprobs: int | None = declared(None, low=0, high=MAX_LOGPROBS)
    user: str | None = None  # OpenAI's; nothing is done with it
    # The parameters that `SamplingParams` declares and no field here replaces.
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def compiles(self) -> bool:
        """Whether a grammar may have to be compiled before it is answered."""
        return "structured_outputs" in self.sampling

    @property
    def recalls(self) -> bool:
        """Whether the prompt may be longer than the body, which takes time to make."""
        return False

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts(self) -> bool:
        """Whether each event of a stream has the usage so far, as vLLM has it."""
        options = self.stream_options
        return self.include_usage and bool(options and options.continuous_usage_stats)

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            wrong = "stream_options are given; expected none without stream"
            raise ParameterError(wrong, "stream_options")
        count = self.prompt_logprobs
        ok = not self.stream or count is None
        expect(ok, "prompt_logprobs", count, "none for a stream")


def own_fields(kind: Any) -> dict[str, Field[Any]]:
    """The fields that the dataclass ``kind`` declares for its bodies.

    What it inherits and has in its ``unsupported`` is none of them.
    """
    other = {"sampling", *unsupported_of(kind)}
    return {spec.name: spec for spec in fields(kind) if spec.name not in other}


def sampling_fields(kind: Any) -> dict[str, Field[Any]]:
    """Those that it takes for `SamplingParams`; none unless it is a `SampledBody`."""
    if not issubclass(kind, SampledBody):
        return {}
    other = {*own_fields(kind), *kind.unsupported}
    return {s.name: s for s in fields(SamplingParams) if s.name not in other}


def unsupported_of(kind: Any) -> Mapping[str, Unsupported]:
    """What it knows without supporting it."""
    found: Mapping[str, Unsupported] = getattr(kind, "unsupported", {})
    return found


def known_names(kind: Any) -> set[str]:
    """Every parameter that a body of this ``kind`` can hold."""
    return {*own_fields(kind), *sampling_fields(kind)}


def record_of(spec: Field[Any]) -> Any:
    """The dataclass that a field holds, or None."""
    kinds = get_args(spec.type) or (spec.type,)
    return next((kind for kind in kinds if is_dataclass(kind)), None)


def check_container(name: str, value: Any, spec: Field[Any]) -> None:
    """Raise TypeError for JSON that a field of lists or objects cannot hold.

    What is in them is checked where they are used.
    """
    options = get_args(spec.type) if isinstance(spec.type, UnionType) else (spec.type,)
    kinds = [get_origin(option) or option for option in options]
    if list in kinds or dict in kinds:
        words = [JSON_WORDS[kind] for kind in kinds if kind in JSON_WORDS]
        expect_type(name, value, tuple(kinds), " or ".join(dict.fromkeys(words)))


def read_body(kind: type[Body], data: Any, prefix: str = "") -> Body:
    """A ``kind`` from parsed JSON; null counts as absent.

    Raises TypeError, ValueError, or APIError for a parameter that is not supported.
    ``prefix`` is the path of an object inside a body.
    """
    expect_type(prefix.rstrip(".") or "the body", data, dict, "an object")
    own, sampling = own_fields(kind), sampling_fields(kind)
    found: dict[str, Any] = {}
    params: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if key not in own and key not in sampling:
            refuse(name, value, unsupported_of(kind).get(key))
        elif value is None:
            continue
        elif key in sampling:
            check_value(name, value, sampling[key])
            bias = key == "logit_bias" and isinstance(value, dict)
            params[key] = with_integer_keys(value) if bias else value
        elif (record := record_of(own[key])) is not None:
            found[key] = read_body(record, value, f"{name}.")
        else:
            check_value(name, value, own[key])
            check_container(name, value, own[key])
            found[key] = value
    for key, spec in own.items():
        absent = key not in found and spec.default is MISSING
        if absent and spec.default_factory is MISSING:
            wrong = f"{prefix}{key} is missing; expected a value"
            raise ParameterError(wrong, f"{prefix}{key}")
    if sampling:
        found["sampling"] = params
    return kind(**found)


def read_query(
    kind: type[Body], pairs: Iterable[tuple[str, str]], *, strict: bool = True
) -> Body:
    """A ``kind`` from what stands behind the "?" of a path. Raises as `read_body`.

    A list is given by its parameter several times, with or without "[]" in its name.
    Unless it is ``strict`` unknown parameters mean nothing.
    """
    data: dict[str, Any] = {}
    for name, text in pairs:
        key = name.removesuffix("[]")
        spec = own_fields(kind).get(key)
        if spec is None and not strict and key not in unsupported_of(kind):
            continue
        types = get_args(spec.type) or (spec.type,) if spec is not None else ()
        if any(get_origin(kind) is list for kind in types):
            data.setdefault(key, []).append(text)
        elif int in types and re.fullmatch(r"-?[0-9]{1,18}", text):
            data[key] = int(text)
        elif bool in types:
            data[key] = {"true": True, "false": False}.get(text, text)
        else:
            data[key] = text
    return read_body(kind, data)


def refuse(name: str, value: Any, entry: Unsupported | None) -> None:
    """Raise APIError for a parameter that means something we do not do."""
    name = name[:MAX_NAME]  # it may be as long as a body
    if entry is None:
        message = f"{name} is no parameter of this endpoint; expected those of /docs"
        raise APIError(400, message, param=name, code="unknown_parameter")
    if value is not None and value not in entry.ignored_values:
        message = f"{name} is known, but not supported: {entry.why}"
        raise APIError(400, message, param=name, code="unsupported_parameter")


def parse_json(raw: bytes) -> Any:
    """What a body says. Raises APIError."""
    try:
        return orjson.loads(raw)
    except ValueError as error:
        message = f"the body is not JSON: {error}"
        raise APIError(400, message, code="invalid_json") from None


def checked_samples(requests: list[RequestSpec], n: int) -> list[RequestSpec]:
    """The prompts of a call, if their samples are not too many.

    Each sample has a copy of its prompt, so that long prompts allow fewer.
    """
    tokens = sum(len(request.tokens) for request in requests)
    most = min(MAX_SAMPLES // len(requests), MAX_COPIES // tokens)
    wanted = f"at most {most} for {len(requests)} prompts of {tokens} tokens"
    expect(n <= most, "n", n, wanted)
    return requests


def is_optional(spec: Field[Any]) -> bool:
    """Whether a field may be null or absent."""
    return spec.default is not MISSING or NoneType in get_args(spec.type)
