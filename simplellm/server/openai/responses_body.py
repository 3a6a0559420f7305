"""The body of /v1/responses: what a client may ask for."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from simplellm.api.chat_options import Format, as_format
from simplellm.base.config import MAX_SIZE, expect, expect_type, one_of
from simplellm.server.http.bodies import (
    FORMATS,
    NOT_HERE,
    SCHEMA_FIELDS,
    SHARED_UNSUPPORTED,
    Body,
    Described,
    Effort,
    LabeledBody,
    Several,
    Unsupported,
    ValidationContext,
    an_object,
)
from simplellm.server.http.response_schemas import list_of
from simplellm.server.openai.chat_body import named_schema, offered_tools, with_choice
from simplellm.server.openai.chat_messages import as_list, refuse_unread
from simplellm.server.openai.responses_items import (
    TEXT_PARTS,
    ItemReference,
    SomeItem,
    known_items,
)
from simplellm.server.openai.tools import KINDS

LOGPROBS = "message.output_text.logprobs"
# What may be asked for beside a response. Our reasoning isn't encrypted: it is there.
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
MAX_LABELS, MAX_LABEL, MAX_LABEL_TEXT = 16, 64, 512  # pairs, and their characters
TOOL = an_object(
    "type",
    type={"enum": [*KINDS]},
    name={"type": "string"},
    description={"type": ["string", "null"]},
    parameters={"type": ["object", "null"]},
    strict={"type": ["boolean", "null"]},
    format={},  # of a custom tool
    tools={},  # of a namespace
)
TEXT_FORMAT = an_object("type", type=FORMATS, **SCHEMA_FIELDS)


# What the model thinks comes as it is.
SUMMARIES = ("auto", "concise", "detailed", "none")
NO_SUMMARY = Unsupported(NOT_HERE, SUMMARIES, hint=True)


class Reasoning(Body):
    """How much the model is to think."""

    unsupported: ClassVar = {
        "summary": NO_SUMMARY,
        "generate_summary": NO_SUMMARY,
        "context": Unsupported(NOT_HERE, ("auto",), hint=True),
        "mode": Unsupported(NOT_HERE, ("standard",), hint=True),
    }

    prefix = "reasoning."

    effort: Effort | None = None


class Text(Body):
    """What form the answer's text is to have."""

    unsupported: ClassVar = {"verbosity": Unsupported(NOT_HERE, ("medium",), hint=True)}

    prefix = "text."

    format: Annotated[dict[str, Any], Described(TEXT_FORMAT)] | None = None


class ResponsesBody(LabeledBody):
    """What /v1/responses takes."""

    unsupported: ClassVar = SHARED_UNSUPPORTED | {
        "n": Unsupported("a response is one turn", (1,)),
        "response_format": Unsupported("use format of text", mapped=True),
        "return_token_ids": Unsupported(NOT_HERE, (False,)),
        "stream_options": Unsupported(
            "the last event has the usage",
            ({}, {"include_obfuscation": False}),
            hint=True,
        ),
        "max_tokens": Unsupported("use max_output_tokens", mapped=True),
        "prompt_logprobs": Unsupported(NOT_HERE),
        "logprobs": Unsupported(f"use top_logprobs, and {LOGPROBS!r} in include"),
        "truncation": Unsupported(
            "nothing is left out of the input", ("disabled",), hint=True
        ),
        "conversation": Unsupported("use previous_response_id"),
        "prompt": Unsupported("there are no stored prompts"),
        "context_management": Unsupported(NOT_HERE, ([],), hint=True),
        "moderation": Unsupported(NOT_HERE, hint=True),
        "prompt_cache_options": Unsupported(
            "equal beginnings are always found again", hint=True
        ),
        "prompt_cache_retention": Unsupported(
            NOT_HERE, ("in_memory", "in-memory"), hint=True
        ),
        "service_tier": Unsupported(NOT_HERE, ("auto", "default"), hint=True),
    }

    input: str | Several[SomeItem]
    instructions: str | None = None
    """What comes first; those of earlier responses are not shown again."""
    previous_response_id: str | None = None
    """One that is still kept."""
    store: bool = True
    """Keep the response for some time."""
    background: bool = False
    """Write it though nobody waits: it's asked for later."""
    tools: Annotated[list[Any], Described(list_of(TOOL))] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    max_tool_calls: int | None = Field(None, ge=1, le=MAX_SIZE)
    """Of tools that run in the server, of which there are none."""
    reasoning: Reasoning | None = None
    text: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_SIZE)
    """Reasoning included; None: as many as there is room for."""
    include: list[Any] | None = None

    @classmethod
    def apply_aliases(
        cls, data: dict[str, Any], context: ValidationContext
    ) -> dict[str, Any]:
        data = with_choice(super().apply_aliases(data, context))
        data = with_included(with_text(data), context)
        effort = data.pop("reasoning_effort", None)
        if isinstance(reasoning := data.get("reasoning", {}), Mapping):
            data["reasoning"] = {"effort": effort, **reasoning}
        for name in ("max_tokens", "max_completion_tokens"):
            if name in data:
                data.setdefault("max_output_tokens", data.pop(name))
        if isinstance(labels := data.get("metadata"), Mapping):
            data["metadata"] = {
                name: str(value) if isinstance(value, int | float) else value
                for name, value in labels.items()
            }
        if isinstance(tools := data.get("tools"), list):
            data["tools"] = offered_tools(tools, context)
        if "input" not in data and "messages" in data:
            data["input"] = data.pop("messages")  # those of a chat
        items = data.get("input")
        if isinstance(items, list | Mapping):
            items = as_list(items)
            refuse_unread(items, "input", TEXT_PARTS)
            data["input"] = known_items(items, context)
        return data

    @model_validator(mode="after")
    def check(self) -> Self:
        for entry in self.include or ():
            one_of("an entry of include", entry, INCLUDABLE, "include")
        alone = self.logprobs or not self.top_logprobs
        expected = f"0 without {LOGPROBS!r} in include"
        expect(alone, "top_logprobs", self.top_logprobs, expected)
        check_labels(self.metadata or {})
        expect(self.store or not self.background, "store", False, "true in background")
        return self

    @property
    def compiles(self) -> bool:
        return super().compiles or bool(self.text or self.tools)

    @property
    def recalls(self) -> bool:
        """Whether it names a stored response or item: the prompt may then be longer."""
        items = self.input if isinstance(self.input, list) else []
        refers = any(isinstance(item, ItemReference) for item in items)
        return refers or self.previous_response_id is not None

    @property
    def format(self) -> Format:
        """The format of the answer's text. Raises TypeError or ValueError."""
        return as_format((self.text or Text()).format, "text.format")

    @property
    def format_object(self) -> dict[str, Any]:
        """The format in the form in which the response repeats it."""
        given = (self.text or Text()).format or {"type": "text"}
        if given["type"] != "json_schema":
            return {"type": given["type"]}
        fields = given.get("json_schema", given)  # which may stand as in chats
        fields = {name: fields.get(name) for name in ("name", "description", "schema")}
        return {"type": "json_schema", **fields, "strict": True}

    @property
    def logprobs(self) -> bool:
        """Whether the answer has log-probabilities of the messages' tokens."""
        return LOGPROBS in (self.include or ())

    @property
    def effort(self) -> str | None:
        return (self.reasoning or Reasoning()).effort


def check_labels(labels: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for metadata that OpenAI would refuse."""
    most = f"at most {MAX_LABELS} pairs"
    expect(len(labels) <= MAX_LABELS, "metadata", f"{len(labels)} pairs", most)
    for key, text in labels.items():
        name = f"metadata.{key}"
        expect_type(name, text, str, "a string")
        short = len(key) <= MAX_LABEL and len(text) <= MAX_LABEL_TEXT
        expected = f"keys of at most {MAX_LABEL} characters, texts of {MAX_LABEL_TEXT}"
        expect(short, name, text, expected)


def with_included(data: dict[str, Any], context: ValidationContext) -> dict[str, Any]:
    """The body with only those values of ``include`` that apply here."""
    if isinstance(include := data.get("include"), list):
        data["include"] = [one for one in include if one in INCLUDABLE]
        for one in include:
            if isinstance(one, str) and one not in INCLUDABLE:
                context.ignore(f"include.{one}")
    if "top_logprobs" in data and LOGPROBS not in (data.get("include") or ()):
        del data["top_logprobs"]
        context.ignore("top_logprobs")
    return data


def with_text(data: dict[str, Any]) -> dict[str, Any]:
    """The body with the answer's format under ``text``, and a name for its schema."""
    given, text = data.pop("response_format", None), data.get("text", {})
    if not isinstance(text, Mapping):
        return data
    given = text.get("format", given)
    if isinstance(given, Mapping):
        inner = given.get("json_schema")
        if isinstance(inner, Mapping):
            given = {"type": given.get("type"), **inner}
        named = given.get("type") == "json_schema" and "schema" in given
        data["text"] = {**text, "format": named_schema(given) if named else given}
    return data
