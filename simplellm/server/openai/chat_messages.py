"""The messages of a chat as clients send them, made ready for `from_openai`.

Messages may have OpenAI's older form: an assistant's has one "function_call", and a
message of the role "function" brings its result. All tools become functions.
"""

import json
import re
from collections.abc import Container, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import ValidationInfo, model_validator

from simplellm.server.http.bodies import (
    TEXT_ONLY,
    Described,
    Part,
    Several,
    ValidationContext,
    an_object,
    given_fields,
    refuse,
    text_instead,
)
from simplellm.server.http.errors import APIError
from simplellm.server.openai.tools import arguments_of_call, flatten_tool, shown_name

ROLES = {"human": "user", **dict.fromkeys(("model", "ai", "bot"), "assistant")}
ROLES |= dict.fromkeys(("tool_result", "tool-response", "tool_response"), "tool")
TEXT_TYPES = ("text", "input_text", "output_text", "refusal")
THOUGHT_TYPES = ("thinking", "reasoning")
UNKNOWN = "unknown"  # the function behind a result whose call is gone
CHAT_TOOL = an_object(
    *("type", "function"),
    type={"enum": ["function"]},
    function=an_object(
        "name",
        name={"type": "string"},
        description={"type": "string"},
        parameters={"type": "object"},
        strict={"type": ["boolean", "null"]},
    ),
)
BEGUN = "prefix", "partial"  # labels of an answer's beginning: DeepSeek's, Kimi's
Tools = Annotated[list[Any], Described({"type": "array", "items": CHAT_TOOL})]


class ChatText(Part):
    """Text in a message."""

    type: Literal["text", "input_text", "output_text"] = "text"
    text: str

    @model_validator(mode="before")
    @classmethod
    def normalize(cls, data: Any, info: "ValidationInfo[ValidationContext]") -> Any:
        """Put a few words in the place of an image or a file."""
        if info.context.strict:
            return cls.without_labels(data)
        if isinstance(data, str):
            return {"text": data}
        if not isinstance(data, Mapping):
            return data
        kind = data.get("type") or "text"
        if kind == "refusal":
            return {"text": data.get("refusal")}
        if kind in TEXT_TYPES:
            text = data.get("text")
            if isinstance(text, Mapping):  # as OpenAI's assistants have it
                text = text.get("value")
            return {"type": kind, "text": "" if text is None else text}
        info.context.ignore(f"messages.content.{kind}")
        return {"text": text_instead(str(kind)[:50])}


class CalledFunction(Part):
    labels = frozenset({"parsed_arguments"})  # of OpenAI's client, as a message's

    name: str
    arguments: Any = "{}"
    """Those that are no text are put into JSON."""


class PastToolCall(Part):
    """A call that the model has made."""

    labels = frozenset({"type", "index"})

    id: str | int | None = None
    function: CalledFunction


class ChatMessage(Part):
    """A message of any role; each role uses some of these fields."""

    labels = frozenset({"refusal", "annotations", "parsed", *BEGUN})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Several[ChatText] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Several[PastToolCall] | None = None
    tool_call_id: str | int | None = None

    @classmethod
    def check_labels(cls, data: Mapping[str, Any]) -> None:
        for label in BEGUN:
            if data.get(label):
                refuse(f"messages.{label}", None)

    @classmethod
    def apply_aliases(
        cls, data: dict[str, Any], context: ValidationContext
    ) -> dict[str, Any]:
        data["role"] = role = role_of(data)
        content: Any = data.get("content")
        if isinstance(content, Mapping):
            content = [content] if "type" in content else as_text(content)
        if isinstance(content, int | float):
            spelled = role == "tool" or not isinstance(content, bool)
            content = as_text(content) if spelled else content
        if isinstance(content, list) and role == "assistant":
            data, content = with_thoughts(data, content)
        listed = isinstance(content, list) and role == "tool"
        if listed and not all(map(is_part, content)):
            content = as_text(content)  # a result that is a list
        data["content"] = content
        if role == "assistant":
            data["content"] = content or data.get("refusal") or content
            for key in ("reasoning", "reasoning_content"):
                if isinstance(thought := data.get(key), Mapping):
                    data[key] = thought.get("content", thought.get("text"))
            if isinstance(calls := data.get("tool_calls"), list):
                data["tool_calls"] = [with_arguments(call) for call in calls]
        if role == "tool":
            data.setdefault("name", UNKNOWN)  # unless its call is there
        if isinstance(name := data.get("name"), str | int):
            data["name"] = re.sub(r"[\s<]+", "_", str(name)) or None
        return data

    @classmethod
    def collect_fields(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The fields, in which every tool call is a function call."""
        data = dict(data)
        if isinstance(older := data.pop("function_call", None), Mapping):
            data["tool_calls"] = [{"id": None, "function": older}]
        if data.get("role") == "function":
            data["role"] = "tool"
        if isinstance(calls := data.get("tool_calls"), list):
            data["tool_calls"] = [in_function(call) for call in calls]
        if isinstance(name := data.get("name"), str) and name:
            data["name"] = shown_name(name)
        return data

    @property
    def begins_answer(self) -> bool:
        """Whether it may be an answer's beginning, with which the model goes on."""
        return self.role == "assistant" and bool(self.content) and not self.tool_calls

    def as_openai(self) -> dict[str, Any]:
        """The message as `from_openai` takes it."""
        message = given_fields(self)
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        if self.tool_calls is not None:
            message["tool_calls"] = [
                {"id": call.id, "function": dict(call.function)}
                for call in self.tool_calls
            ]
        return message


def as_list(messages: Any) -> Any:
    """Messages of which there is one alone, or that are their texts."""
    if isinstance(messages, str | Mapping):
        messages = [messages]
    if not isinstance(messages, list):
        return messages
    return [
        {"role": "user", "content": one} if isinstance(one, str) else one
        for one in messages
    ]


def from_blocks(message: Any) -> list[Any]:
    """The messages that say what one with Anthropic's blocks of calls and results says.

    Editors that know Anthropic's models send these blocks in chats, too.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    blocks: dict[Any, list[Any]] = {"tool_use": [], "tool_result": [], "rest": []}
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        blocks[kind if kind in ("tool_use", "tool_result") else "rest"].append(part)
    calls, results, rest = blocks.values()
    if not (calls or results):
        return [message]
    found = [
        {
            "role": "tool",
            "tool_call_id": one.get("tool_use_id"),
            "content": one.get("content"),
        }
        for one in results
    ]
    message = {**message, "content": rest or None}
    if calls:
        functions = [
            {"name": c.get("name"), "arguments": c.get("input")} for c in calls
        ]
        message["tool_calls"] = [
            {"id": call.get("id"), "function": function}
            for call, function in zip(calls, functions, strict=True)
        ]
    return [*found, message] if calls or rest else found


def role_of(message: Mapping[str, Any]) -> Any:
    """The role of a message; other names for a role count as that role."""
    role = message.get("role")
    return ROLES.get(role.lower(), role.lower()) if isinstance(role, str) else role


def with_thoughts(
    message: dict[str, Any], content: list[Any]
) -> tuple[dict[str, Any], list[Any]]:
    """An assistant's message whose first thought has become its reasoning."""
    rest, thoughts = list[Any](), list[Any]()
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        (thoughts if kind in THOUGHT_TYPES else rest).append(part)
    for part in thoughts[:1]:
        thought = part.get("thinking", part.get("text"))
        message = {"reasoning_content": thought, **message}
    return message, rest


def in_function(call: Any) -> Any:
    """A call of any kind of tool as a function call."""
    if not isinstance(call, Mapping):
        return call
    inner = flatten_tool({"type": "function", **call})
    name = inner.get("name")
    if not isinstance(name, str):
        return call
    kind, arguments = inner.pop("type"), inner.get("arguments")
    if kind == "custom" and isinstance(inner.get("input"), str):
        arguments = arguments_of_call("custom", inner)
        del inner["input"]
    elif "arguments" not in inner:
        return call
    outer = {"id": inner.pop("id", None)}
    if isinstance(kind, str) and kind in call:
        outer = {name: one for name, one in call.items() if name != kind}
    function = {**inner, "name": shown_name(name), "arguments": arguments}
    return {**outer, "function": function}


def as_text(value: Any) -> Any:
    """Data as JSON, or the data itself if it is nested too deep for that."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return value


def is_part(value: Any) -> bool:
    """Whether ``value`` is a content part: data without a type is none."""
    return isinstance(value, str) or (isinstance(value, Mapping) and "type" in value)


def with_arguments(call: Any) -> Any:
    """A function call with arguments, empty ones if it has none."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or function.get("arguments"):
        return call
    return {**call, "function": {**function, "arguments": "{}"}}


def refuse_unread(
    messages: Sequence[Any], where: str, readable: Container[str]
) -> None:
    """Raise APIError if the user's last message holds nothing but images or files.

    Parts of a type in ``readable`` are text, and so are parts without a type. Behind a
    tool's result it is the agent that sends what the tool has made: it may go on.
    """
    unread = [*takewhile(bool, (unread_type(m, readable) for m in reversed(messages)))]
    if not unread:
        return
    before = messages[-len(unread) - 1] if len(unread) < len(messages) else None
    if not is_result(before):
        where = f"{where}[{len(messages) - 1}].content"
        message = f"{where} has {unread[0][:50]} and no text; {TEXT_ONLY}"
        raise APIError(400, message, param=where, code="unsupported_content")


def unread_type(message: Any, readable: Container[str]) -> str:
    """The type of the first part of a user's message without text; else ""."""
    if not isinstance(message, Mapping) or role_of(message) != "user":
        return ""
    parts = message.get("content")
    kinds = [
        (isinstance(part, Mapping) and part.get("type")) or "text"
        for part in (parts if isinstance(parts, list) else ())
    ]
    read = not all(isinstance(kind, str) and kind not in readable for kind in kinds)
    return "" if read or not kinds else kinds[0]


def is_result(message: Any) -> bool:
    """Whether a message of a chat, or an item of a response, is a tool's result."""
    if not isinstance(message, Mapping):
        return False
    kind = message.get("type")
    ends = isinstance(kind, str) and kind.endswith("_output")
    return ends or role_of(message) in ("tool", "function")
