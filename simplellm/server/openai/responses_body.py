"""The body of /v1/responses: what a client may ask for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from simplellm.api.chat_options import Format, as_format
from simplellm.base.config import declared, expect, expect_type, one_of
from simplellm.base.sampling_params import MAX_LOGPROBS
from simplellm.server.http.bodies import (
    NOT_HERE,
    SHARED_UNSUPPORTED,
    SampledBody,
    Unsupported,
)
from simplellm.server.openai.responses_items import PREFIXES
from simplellm.server.openai.tools import KINDS, flat

LOGPROBS = "message.output_text.logprobs"
# What may be asked for beside a response. Our reasoning isn't encrypted: it is there.
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
MAX_LABELS, MAX_LABEL, MAX_LABEL_TEXT = 16, 64, 512  # pairs, and their characters
INPUT_TEXT: dict[str, Any] = {"type": ["string", "array"], "items": {"type": "object"}}
INPUT_ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"enum": [*PREFIXES, "item_reference"]},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": INPUT_TEXT,
        "call_id": {"type": "string"},
        "name": {"type": "string"},
        "arguments": {"type": "string"},
        "output": INPUT_TEXT,
    },
}
INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": INPUT_ITEM}]}
TOOL: dict[str, Any] = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": [*KINDS]},
        "name": {"type": "string"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}
TEXT_FORMAT: dict[str, Any] = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "name": {"type": "string"},
        "description": {"type": ["string", "null"]},
        "schema": {"type": "object"},
        "strict": {"type": ["boolean", "null"]},
    },
}


@dataclass(frozen=True, kw_only=True)
class Reasoning:
    """How the model is to think."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        # What the model thinks is told as it is.
        "summary": Unsupported(
            NOT_HERE, ("auto", "concise", "detailed", "none"), hint=True
        ),
        "generate_summary": Unsupported(
            NOT_HERE, ("auto", "concise", "detailed", "none"), hint=True
        ),
        "context": Unsupported(NOT_HERE, ("auto",), hint=True),
        "mode": Unsupported(NOT_HERE, ("standard",), hint=True),
    }

    effort: Literal["low", "medium", "high"] = "medium"


@dataclass(frozen=True, kw_only=True)
class Text:
    """What the text of the answer is to be."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "verbosity": Unsupported(NOT_HERE, ("medium",), hint=True),
    }

    format: dict[str, Any] | None = field(
        default=None, metadata={"schema": TEXT_FORMAT}
    )


@dataclass(frozen=True, kw_only=True)
class ResponseBody(SampledBody):
    """What /v1/responses takes."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = SHARED_UNSUPPORTED | {
        "n": Unsupported("a response is one turn", (1,)),
        "response_format": Unsupported("use format of text"),
        "return_token_ids": Unsupported(NOT_HERE, (False,)),
        "stream_options": Unsupported(
            "the last event has the usage",
            ({}, {"include_obfuscation": False}),
            hint=True,
        ),
        "max_tokens": Unsupported("use max_output_tokens"),
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

    input: str | list[dict[str, Any]] = field(metadata={"schema": INPUT})
    # What comes first; the instructions of earlier responses are not shown again.
    instructions: str | None = None
    previous_response_id: str | None = None  # one that is still kept
    store: bool = True  # keep the response for some time
    background: bool = False  # write it though nobody waits: it's asked for later
    tools: list[dict[str, Any]] | None = field(
        default=None, metadata={"schema": {"type": "array", "items": TOOL}}
    )
    tool_choice: str | dict[str, Any] = "auto"
    # Or a turn has one call at most; that of gpt-oss ends with its first one anyway.
    parallel_tool_calls: bool = True
    # Of tools that run in the server, of which there are none.
    max_tool_calls: int | None = declared(None)
    reasoning: Reasoning | None = None
    text: Text | None = None
    # Reasoning included; None: as many as there is room for.
    max_output_tokens: int | None = declared(None)
    include: list[str] | None = None
    top_logprobs: int = declared(0, low=0, high=MAX_LOGPROBS)
    # OpenAI's labels, with which nothing is done.
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_include(self.include)
        alone = self.logprobs or not self.top_logprobs
        wanted = f"0 without {LOGPROBS!r} in include"
        expect(alone, "top_logprobs", self.top_logprobs, wanted)
        check_labels(self.metadata or {})
        expect(self.store or not self.background, "store", False, "true in background")

    @property
    def compiles(self) -> bool:
        return super().compiles or bool(self.text or self.tools)

    @property
    def recalls(self) -> bool:
        """Whether items are meant that the body doesn't hold, however short it is."""
        items = self.input if isinstance(self.input, list) else []
        refers = any(
            isinstance(item, dict) and item.get("type") == "item_reference"
            for item in items
        )
        return refers or self.previous_response_id is not None

    @property
    def format(self) -> Format:
        """What the answer's text is to fit. Raises TypeError or ValueError."""
        return as_format((self.text or Text()).format, "text.format")

    @property
    def told_format(self) -> dict[str, Any]:
        """The format as the response tells it."""
        given = (self.text or Text()).format or {"type": "text"}
        if given["type"] != "json_schema":
            return {"type": given["type"]}
        fields = given.get("json_schema", given)  # which may stand as in chats
        told = {name: fields.get(name) for name in ("name", "description", "schema")}
        return {"type": "json_schema", **told, "strict": True}

    @property
    def told_choice(self) -> str | dict[str, Any]:
        """The choice as the response tells it, also one that is spelled as in chats."""
        if isinstance(self.tool_choice, str):
            return self.tool_choice
        return flat(self.tool_choice)

    @property
    def logprobs(self) -> bool:
        """Whether those of the messages' tokens are to be told."""
        return LOGPROBS in (self.include or ())

    @property
    def effort(self) -> str:
        return (self.reasoning or Reasoning()).effort


def check_include(include: Any) -> None:
    """Raise TypeError or ValueError for what can't be asked for."""
    expect_type("include", include, list | None, "a list of strings")
    for entry in include or ():
        one_of("an entry of include", entry, INCLUDABLE, "include")


def check_labels(labels: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for what OpenAI wouldn't take as metadata."""
    most = f"at most {MAX_LABELS} pairs"
    expect(len(labels) <= MAX_LABELS, "metadata", f"{len(labels)} pairs", most)
    for key, text in labels.items():
        name = f"metadata.{key}"
        expect_type(name, text, str, "a string")
        short = len(key) <= MAX_LABEL and len(text) <= MAX_LABEL_TEXT
        wanted = f"keys of at most {MAX_LABEL} characters, texts of {MAX_LABEL_TEXT}"
        expect(short, name, text, wanted)
