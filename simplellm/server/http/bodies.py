"""Bodies of requests: pydantic models, and the one reader of them.

What a body may hold is declared in one place, in three classes. What is *taken* is a
field, with its type and its bounds. What is *mapped* becomes such a field: another name
of it, or a value that means nearly the same; null is absent. What is *refused* stands
in ``unsupported`` with a sentence that says what to do, since without it the answer
would be another one. Any other name is ignored, and a header of the answer names it. A
strict server maps nothing and refuses what it doesn't know, within messages and tools
too. The OpenAPI document is made from the same models.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from reprlib import repr as short
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetPydanticSchema,
    Tag,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from simplellm.api.checks import with_integer_keys
from simplellm.api.input_processor import MAX_PRIORITY, MAX_SAMPLES
from simplellm.base.config import ParameterError, check_number, expect
from simplellm.base.sampling_params import MAX_LOGPROBS, SamplingParams
from simplellm.server.http.errors import APIError

MAX_NAME = 100  # characters of a name that comes from a client, where it is repeated
MOST_IGNORED = 32  # names that an answer repeats


@dataclass
class ValidationContext:
    """The context in which a body is validated, and the names that it ignored."""

    strict: bool = False
    models: Sequence[str] = ()  # what the model goes by
    template: bool = False  # whether the model's chats are written by a template
    ignored: dict[str, None] = field(default_factory=dict)  # names, in their order

    def ignore(self, name: str) -> None:
        """Note that ``name``, a path in the body, is ignored."""
        if len(self.ignored) < MOST_IGNORED:
            self.ignored[re.sub(r"\[\d+\]", "", name)[:MAX_NAME]] = None

    @property
    def header(self) -> str:
        """The ignored names as a header's value."""
        names = (re.sub(r"[^\x21-\x2b\x2d-\x7e]", "_", name) for name in self.ignored)
        return ", ".join(names)


@dataclass(frozen=True)
class Unsupported:
    """A parameter of other servers that this one does not support.

    ``ignored_values`` ask for nothing. Any other value is refused, unless the parameter
    is a ``hint``: without it the answer may come later or cost more, but is the same.
    Only a strict server refuses hints, the others ignore them. One that is ``mapped``
    is refused by a strict server alone, too: the others take it as what ``why`` names.
    """

    why: str  # that it isn't supported, in words for whoever asks for it
    ignored_values: tuple[Any, ...] = ()
    hint: bool = False
    mapped: bool = False


NOT_HERE = "this server does not support it"
# Parameters that OpenAI and vLLM give to completions and chats alike.
SHARED_UNSUPPORTED = {
    "use_beam_search": Unsupported(NOT_HERE, (False,)),
    "length_penalty": Unsupported("it belongs to beam search", (1, 1.0), hint=True),
    "truncate_prompt_tokens": Unsupported(NOT_HERE),
    "spaces_between_special_tokens": Unsupported(NOT_HERE, (True,), hint=True),
    **{
        f"guided_{name}": Unsupported(f"use {name} of structured_outputs", mapped=True)
        for name in ("json", "regex", "choice", "grammar")
    },
    "logits_processors": Unsupported(NOT_HERE, ([],)),
    "kv_transfer_params": Unsupported(NOT_HERE, hint=True),
    "cache_salt": Unsupported(NOT_HERE, hint=True),
}
TEXT_ONLY = "this model reads text only"
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
EFFORTS |= dict.fromkeys(("", "auto", "default"), "medium")
NUMBERS = (int, float, int | None, float | None)  # annotations of fields
BOOLEANS = (bool, bool | None)  # likewise
# A number that may stand in quotes.
QUOTED_NUMBER = re.compile(r"-?(\d{1,15}\.?\d{0,15}|\.\d{1,15})([eE][+-]?\d{1,2})?")


def text_instead(what: str) -> str:
    """The text that stands for content without text, such as an image."""
    return f"[{what}: {TEXT_ONLY}]"


def nearest_effort(value: Any, info: "ValidationInfo[ValidationContext]") -> Any:
    """The nearest of the efforts that models know."""
    if (info.context or STRICT).strict or not isinstance(value, str):
        return value
    return EFFORTS.get(value.lower(), value.lower())


def an_object(*required: str, **properties: Any) -> dict[str, Any]:
    """The JSON schema of an object, for bodies' documents."""
    return {"type": "object", "required": [*required], "properties": properties}


SCHEMA_FIELDS: dict[str, Any] = {
    "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    "description": {"type": ["string", "null"]},
    "schema": {"type": "object"},
    "strict": {"type": ["boolean", "null"]},
}
FORMATS = {"enum": ["text", "json_object", "json_schema"]}
RESPONSE_FORMAT = an_object(
    "type", type=FORMATS, json_schema=an_object("name", "schema", **SCHEMA_FIELDS)
)
Effort = Annotated[Literal["low", "medium", "high"], BeforeValidator(nearest_effort)]

Some = TypeVar("Some")
Several = Annotated[  # whose first error is enough: there may be a million
    list[Some],
    GetPydanticSchema(lambda kind, handler: {**handler(kind), "fail_fast": True}),
]
STRICT = ValidationContext(strict=True)  # of what no client has sent
UNNAMED = "unnamed"  # an error: a name that is not in a JSON schema


def unnamed(value: Any, schema: Mapping[str, Any]) -> str:
    """The path of the first name in ``value`` that ``schema`` does not have, or "".

    An object of another type than those in it is for others to judge.
    """
    inside: Iterable[tuple[str, Any, Any]] = ()
    if isinstance(value, list) and "items" in schema:
        inside = ((f"[{n}]", one, schema["items"]) for n, one in enumerate(value))
    elif isinstance(value, Mapping) and (known := schema.get("properties")):
        kinds = known.get("type", {}).get("enum")
        if kinds and value.get("type") not in kinds:
            return ""
        given = {name: one for name, one in value.items() if one is not None}
        if odd := next((name for name in given if name not in known), ""):
            return f".{odd[:MAX_NAME]}"
        inside = ((f".{name}", one, known[name]) for name, one in given.items())
    paths = ((step, unnamed(one, inner)) for step, one, inner in inside)
    return next((f"{step}{path}" for step, path in paths if path), "")


@dataclass(frozen=True, eq=False)
class Described:
    """For the annotation of data that a JSON ``schema`` describes in the document.

    Of the schema a strict server checks here that there are no other names.
    """

    schema: Mapping[str, Any]

    def check(self, value: Any, info: "ValidationInfo[ValidationContext]") -> Any:
        strict = (info.context or STRICT).strict
        if strict and (path := unnamed(value, self.schema)):
            raise PydanticCustomError(UNNAMED, "no such name", {"path": path})
        return value

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> Any:
        inner = handler(kind)
        return core_schema.with_info_after_validator_function(self.check, inner)

    def __get_pydantic_json_schema__(self, _: Any, handler: Any) -> Any:
        return {**self.schema}


ResponseFormat = Annotated[dict[str, Any], Described(RESPONSE_FORMAT)]


class Part(BaseModel):
    """A part of a conversation. Its fields are *taken*; null is absent.

    Other names in it are ignored without a note: they are labels of the client's. A
    strict server takes those ``labels`` only that come with answers or mean nothing.
    """

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    labels: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def apply_aliases(
        cls, data: dict[str, Any], context: ValidationContext
    ) -> dict[str, Any]:
        """``data`` with what is *mapped* in place of what clients wrote.

        Values of unexpected types stay: the types of the fields refuse them.
        """
        return data

    @model_validator(mode="before")
    @classmethod
    def normalize(cls, data: Any, info: "ValidationInfo[ValidationContext]") -> Any:
        """Map, ignore and refuse names; the rest is for the fields."""
        if not isinstance(data, dict):
            return data
        data = {key: value for key, value in data.items() if value is not None}
        context = info.context or STRICT
        if context.strict:
            cls.check_labels(data)
            data = cls.without_labels(data)
        else:
            data = cls.apply_aliases(data, context)
        return cls.collect_fields(data)

    @classmethod
    def without_labels(cls, data: Any) -> Any:
        """``data`` as a strict server reads it, which refuses unknown names."""
        if not isinstance(data, dict):
            return data
        given = (item for item in data.items() if item[1] is not None)
        return {key: value for key, value in given if key not in cls.labels}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> Any:
        schema = handler(core)
        about = {"description": "Nothing is done with it."}
        properties = handler.resolve_ref_schema(schema).setdefault("properties", {})
        properties |= {name: about for name in sorted(cls.labels)}
        return schema

    @classmethod
    def check_labels(cls, data: Mapping[str, Any]) -> None:
        """Refuse labels that ask for another answer, of a server that maps none."""

    @classmethod
    def collect_fields(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Move what `normalize` has left into the fields that hold it."""
        return data


class Body(Part):
    """A body, or a part of one, in which every unknown name is noted or refused."""

    model_config = ConfigDict(extra="forbid")

    unsupported: ClassVar[Mapping[str, Unsupported]] = {}  # what is *refused*
    prefix: ClassVar[str] = ""  # the path of a part, with a dot

    @classmethod
    def known(cls) -> set[str]:
        """Every parameter that the body takes."""
        return {*cls.model_fields}

    @classmethod
    @cache
    def fields_of(cls, kinds: tuple[Any, ...]) -> frozenset[str]:
        """The parameters that have one of these annotations."""
        fields = cls.model_fields.items()
        return frozenset(name for name, one in fields if one.annotation in kinds)

    @model_validator(mode="before")
    @classmethod
    def normalize(cls, data: Any, info: "ValidationInfo[ValidationContext]") -> Any:
        if not isinstance(data, dict):
            return data
        context = info.context or STRICT
        known = cls.known()
        if not context.strict:
            switches, numbers = cls.fields_of(BOOLEANS), cls.fields_of(NUMBERS)
            given = {
                key: said_switch(value) if key in switches else value
                for key, value in data.items()
                if value is not None and not (key in numbers and value == "")
            }
            data = cls.apply_aliases(given, context)
        fields = {}
        for key, value in data.items():
            if key in known:
                if not context.strict:
                    value = number_in(value) if key in numbers else whole_number(value)
                    if key in switches and value in (0, 1):
                        value = bool(value)
                if value is not None:
                    fields[key] = value
                continue
            name, entry = f"{cls.prefix}{key}", cls.unsupported.get(key)
            if entry is not None and (value is None or value in entry.ignored_values):
                continue
            if context.strict or (entry is not None and not entry.hint):
                refuse(name, entry)
            elif value is not None:
                context.ignore(name)
        return cls.collect_fields(fields)


def whole_number(value: Any) -> Any:
    """A whole number as an integer, however it was written."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def number_in(value: Any) -> Any:
    """A number, also one in quotes, which forms and automations send."""
    written = isinstance(value, str) and QUOTED_NUMBER.fullmatch(value)
    return whole_number(float(value) if written else value)


def said_switch(value: Any) -> Any:
    """True or false, which may be written in quotes."""
    words = {"true": True, "false": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


def json_field(spec: Any) -> tuple[Any, Any]:
    """A field of `SamplingParams` as JSON gives it: annotation and default."""
    kind = JSON_TYPES.get(spec.name, spec.type)
    limits: Any = {}
    if (bounds := spec.metadata.get("bounds")) is not None:
        above, high = bounds["above"], bounds["high"]
        low = {"ge": bounds["low"]} if above is None else {"gt": above}
        limits = {**low, "le": high}
    default = None if spec.default is MISSING or spec.default == () else spec.default
    return kind, Field(default, **limits)


ONE_OR_MORE = str | Several[str]
BIAS = 100  # the most either way, as with OpenAI
LOGIT_BIAS: dict[str, Any] = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": {"type": "number", "minimum": -BIAS, "maximum": BIAS},
}
STRUCTURED_OUTPUTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "json": {"type": ["string", "object", "null"]},
        "regex": {"type": ["string", "null"]},
        "choice": {"type": ["array", "null"], "items": {"type": "string"}},
        "grammar": {"type": ["string", "null"]},
    },
    "additionalProperties": False,
}


def checked_biases(given: Mapping[str, Any]) -> dict[Any, Any]:
    """A logit_bias of JSON as Python has it. Raises TypeError or ValueError."""
    for token, bias in given.items():
        name = f"logit_bias of token {token[:MAX_NAME]}"
        check_number(name, bias, float, -BIAS, BIAS, param="logit_bias")
    return with_integer_keys(given)


# Of the parameters that have other types in JSON than in Python. What is in them is
# checked by `SamplingParams`, as the relations between parameters are.
JSON_TYPES: dict[str, Any] = {
    "stop": ONE_OR_MORE | None,
    "bad_words": ONE_OR_MORE | None,
    "stop_token_ids": Several[int] | None,
    "allowed_token_ids": Several[int] | None,
    "logit_bias": Annotated[
        dict[str, Any], WithJsonSchema(LOGIT_BIAS), AfterValidator(checked_biases)
    ]
    | None,
    "structured_outputs": Annotated[dict[str, Any], WithJsonSchema(STRUCTURED_OUTPUTS)]
    | None,
}
SAMPLING: Any = {spec.name: json_field(spec) for spec in fields(SamplingParams)}
Sampling: type[BaseModel] = create_model("Sampling", **SAMPLING)


def given_fields(model: BaseModel) -> dict[str, Any]:
    """The fields of a model that were set."""
    return {name: getattr(model, name) for name in model.model_fields_set}


class StreamOptions(Body):
    """What a stream's events hold beside the parts of the answer."""

    unsupported: ClassVar = {
        "include_obfuscation": Unsupported(NOT_HERE, (False,), hint=True)
    }
    prefix = "stream_options."

    include_usage: bool = False
    """A last event with the usage."""
    continuous_usage_stats: bool = False
    """With it: the usage so far in every event."""


LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# What vLLM, SGLang and llama.cpp called the parts of structured_outputs.
STRUCTURED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
RENAMED = {
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
# What a client may call its requests: nothing is done with it.
LABEL_TYPES: dict[str, type] = {
    "user": str,
    "metadata": dict,
    "safety_identifier": str,
    "prompt_cache_key": str,
}
# How vLLM is to hold them, where each server has its own way.
OUTPUT_HINTS = ("disable_fallback", "disable_any_whitespace", "whitespace_pattern")


def outputs_asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of vLLM's structured_outputs that ask for something."""
    outputs = {
        name: rule
        for name, rule in given.items()
        if rule not in (None, False) and name not in OUTPUT_HINTS and name[:1] != "_"
    }
    if outputs.pop("json_object", None) is not None:
        outputs["json"] = {"type": "object"}
    return outputs


def as_biases(given: list[Any] | dict[str, Any]) -> Any:
    """OpenAI's logit_bias, made of llama.cpp's: pairs of a token and a number or false.

    What is beyond its bounds is brought there, as in vLLM. A list of anything else
    stays as it is, and is refused.
    """
    if isinstance(given, list):
        pairs = [pair for pair in given if isinstance(pair, list) and len(pair) == 2]
        if len(pairs) < len(given) or any(type(token) is not int for token, _ in pairs):
            return given
        given = {str(t): -BIAS if bias is False else bias for t, bias in pairs}
    biases = {token: number_in(bias) for token, bias in given.items()}
    return {
        token: max(-BIAS, min(bias, BIAS)) if type(bias) in (int, float) else bias
        for token, bias in biases.items()
    }


class SampledBody(Body):
    """The fields of every body that asks the model, with all of `SamplingParams`."""

    unsupported: ClassVar = SHARED_UNSUPPORTED

    model: str | None = None
    """One that is served."""
    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    return_token_ids: bool = False
    """As vLLM has it: the choices hold their token ids."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Alternatives to each token of the prompt, as vLLM has them; in no stream."""
    user: str | None = None
    """OpenAI's; nothing is done with it."""
    # The parameters of `SamplingParams` that are given and no other field has.
    sampling: Annotated[
        dict[str, Any],
        GetPydanticSchema(
            lambda _, handler: core_schema.no_info_after_validator_function(
                given_fields, handler.generate_schema(Sampling)
            )
        ),
    ] = {}

    @classmethod
    def sampling_names(cls) -> set[str]:
        """The names of the parameters that ``sampling`` may hold."""
        return {*SAMPLING} - {*cls.model_fields, *cls.unsupported}

    @classmethod
    def known(cls) -> set[str]:
        own = {*cls.model_fields} - {"sampling", *cls.unsupported}
        return own | cls.sampling_names()

    @classmethod
    @cache
    def fields_of(cls, kinds: tuple[Any, ...]) -> frozenset[str]:
        sampled = (name for name, (kind, _) in SAMPLING.items() if kind in kinds)
        return super().fields_of(kinds) | {*sampled}

    @classmethod
    def apply_aliases(
        cls, data: dict[str, Any], context: ValidationContext
    ) -> dict[str, Any]:
        if isinstance(extra := data.get("extra_body"), Mapping):
            del data["extra_body"]  # OpenAI's client would have put it beside others
            data = {**extra, **data}
        if data.get("model") == "":
            del data["model"]
        for old, new in RENAMED.items():
            if old in data:
                data.setdefault(new, data.pop(old))
        for name, kind in LABEL_TYPES.items():
            if not isinstance(data.get(name, kind()), kind):
                del data[name]
                context.ignore(name)
        if isinstance(biases := data.get("logit_bias"), list | dict):
            data["logit_bias"] = as_biases(biases)
        if data.get("top_p") == -1:  # no limit
            del data["top_p"]
        for name in LIMITS:
            if data.get(name) in (-1, -2):  # as many as there is room for
                del data[name]
        if data.get("top_p") == 0 and not isinstance(data["top_p"], bool):
            del data["top_p"]  # the best token only
            data["temperature"] = 0
        if data.get("stop") == "":
            del data["stop"]
        elif isinstance(stops := data.get("stop"), list):
            data["stop"] = [stop for stop in stops if stop not in ("", None)]
        outputs = data.setdefault("structured_outputs", {})
        if isinstance(outputs, Mapping):
            data["structured_outputs"] = outputs = outputs_asked(outputs)
        given = {new: data.pop(old) for old, new in STRUCTURED.items() if old in data}
        given = {name: rule for name, rule in given.items() if rule not in ("", {}, [])}
        if given and isinstance(outputs, dict):
            data["structured_outputs"] = {**outputs, **given}
        if data["structured_outputs"] == {}:
            del data["structured_outputs"]
        return data

    @classmethod
    def collect_fields(cls, data: dict[str, Any]) -> dict[str, Any]:
        names = cls.sampling_names() & data.keys()
        sampling = {name: data.pop(name) for name in data.keys() & names}
        return {**data, "sampling": sampling}

    @model_validator(mode="after")
    def check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            wrong = "stream_options are given; expected none without stream"
            raise ParameterError(wrong, "stream_options")
        count = self.prompt_logprobs
        ok = not self.stream or count is None
        expect(ok, "prompt_logprobs", count, "none for a stream")
        return self

    @property
    def compiles(self) -> bool:
        """Whether a grammar may have to be compiled first, which takes time."""
        return "structured_outputs" in self.sampling

    @property
    def recalls(self) -> bool:
        """Whether the prompt may be longer than the body, so that it takes time."""
        return False

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether each event of a stream has the usage so far, as in vLLM."""
        options = self.stream_options
        return self.include_usage and bool(options and options.continuous_usage_stats)


def tagged_union(key: str, *kinds: type[Part], default: str | None = None) -> Any:
    """The annotation of a field that is one of ``kinds``, chosen by its ``key``.

    A value with a role and without ``key`` is of the kind for ``default``.
    """
    models = {name: kind.__name__ for kind in kinds for name in types_of(kind, key)}

    def tag(part: Any) -> str | None:
        if not isinstance(part, Mapping):
            return kinds[0].__name__  # which says that it is no object
        name = part.get(key) or (default if "role" in part else None)
        return models.get(name) if isinstance(name, str) else None

    discriminator = Discriminator(
        tag,
        custom_error_type=OTHER_KIND,
        custom_error_message=f"one of {', '.join(models)}",
        custom_error_context={"key": key},
    )
    named = tuple(Annotated[kind, Tag(kind.__name__)] for kind in kinds)
    some: Any = Annotated[Union[named], discriminator]  # noqa: UP007
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(some))


def types_of(kind: type[Part], key: str) -> tuple[str, ...]:
    """The values that ``key`` of a part may have."""
    return get_args(kind.model_fields[key].annotation)


class LabeledBody(SampledBody):
    """A body with OpenAI's labels, such as a user: an answer repeats them at most."""

    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool = True
    """Or a turn has one call at most; that of gpt-oss ends with its first anyway."""
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)


Model = TypeVar("Model", bound=BaseModel)


def read_body(
    kind: type[Model], data: Any, context: ValidationContext, *, strict: bool = True
) -> Model:
    """A ``kind`` of parsed JSON; unless ``strict``, strings may stand for other values.

    Raises ParameterError, or APIError for a parameter that is not supported.
    """
    try:
        # Of parts too, which otherwise ignore what they don't know.
        extra: Any = "forbid" if context.strict else None
        return kind.model_validate(data, strict=strict, extra=extra, context=context)
    except ValidationError as error:
        raise as_parameter_error(error) from None


def read_query(
    kind: type[Model], pairs: Iterable[tuple[str, str]], context: ValidationContext
) -> Model:
    """A ``kind`` of a URL's query string. Raises as `read_body`.

    A list is given by its parameter several times, with or without "[]" in its name.
    """
    data: dict[str, Any] = {}
    for name, text in pairs:
        key = name.removesuffix("[]")
        spec = kind.model_fields.get(key)
        if spec is not None and list[str] in get_args(spec.annotation):
            data.setdefault(key, []).append(text)
        else:
            data[key] = text
    return read_body(kind, data, context, strict=False)


# What pydantic puts into a path beside names and numbers: which one of a union.
UNION_PART = re.compile(r"(str|int|float|bool|none|\w+(-\w+)*[\[{(].*|[A-Z]\w*)", re.S)
OTHER_KIND = "other_kind"  # an error: of a type that no part of a union has
EXPECTED = {
    "dict_type": "an object",
    "model_type": "an object",
    "list_type": "a list",
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
}


def path_of(location: Sequence[int | str]) -> str:
    """The path of an error, as "messages[0].role"."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "sampling" and not UNION_PART.fullmatch(part):
            path += f".{part[:MAX_NAME]}" if path else part[:MAX_NAME]
    return path


def as_parameter_error(error: ValidationError) -> ParameterError:
    """The error for a client: it names the deepest of the errors and its path.

    Raises APIError for a name that is unknown.
    """
    errors = error.errors(include_url=False)
    paths = [path_of(entry["loc"]) for entry in errors]
    depths = [len(re.findall(r"[.\[]", path)) for path in paths]
    first = depths.index(max(depths))
    entry, path = errors[first], paths[first]
    if isinstance(inner := entry.get("ctx", {}).get("error"), ParameterError):
        return inner
    given = entry["input"]
    if entry["type"] == UNNAMED:
        refuse(path + entry["ctx"]["path"], None)
    if entry["type"] == "extra_forbidden":
        refuse(f"{path_of(entry['loc'][:-1])}.{entry['loc'][-1]}", None)
    if entry["type"] == OTHER_KIND:
        key = entry["ctx"]["key"]
        path, given = f"{path}.{key}", given.get(key)
    name = path or "the body"
    if entry["type"] == "missing":
        return ParameterError(f"{name} is missing; expected a value", path)
    if inner is not None:
        return ParameterError(f"{name}: {inner}", path)
    expected = dict.fromkeys(
        EXPECTED.get(one["type"], one["msg"].removeprefix("Input should be "))
        for one, other in zip(errors, paths, strict=True)
        if other == paths[first]
    )
    wrong = f"{name} is {short(given)}; expected {' or '.join(expected)}"
    return ParameterError(wrong, path)


def refuse(name: str, entry: Unsupported | None) -> None:
    """Raise APIError for a parameter that is not supported."""
    name = name[:MAX_NAME]  # it may be as long as a body
    if entry is None:
        message = f"{name} is no parameter of this endpoint; expected those of /docs"
        raise APIError(400, message, param=name, code="unknown_parameter")
    message = f"{name} is known, but not supported: {entry.why}"
    raise APIError(400, message, param=name, code="unsupported_parameter")


# In JSON: an escaped backslash, a pair of surrogates, or one alone.
SURROGATES = re.compile(
    rb"\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<alone>\\u[dD][89a-fA-F]..)"
)


def mend_surrogates(raw: bytes) -> bytes:
    """JSON with U+FFFD in place of each half of a character that stands alone."""
    return SURROGATES.sub(lambda found: b"\\ufffd" if found["alone"] else found[0], raw)


def parse_json(raw: bytes) -> Any:
    """The JSON of a body, parsed. Raises APIError."""
    try:
        return orjson.loads(raw)
    except ValueError as error:
        wrong = error
    try:
        return orjson.loads(mend_surrogates(raw.removeprefix(b"\xef\xbb\xbf")))
    except ValueError:
        message = f"the body is not JSON in UTF-8: {wrong}"
        raise APIError(400, message, code="invalid_json") from None
