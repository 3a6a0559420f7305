"""The items that a client sends to /v1/responses, and the conversation they make.

An item is a message, a reasoning, a tool call or its output; a response's input and
output are lists of items. They are stored as plain data.
"""

from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    Field,
    ValidationInfo,
    model_validator,
)

from simplellm.base.config import expect
from simplellm.server.http.bodies import (
    Part,
    Several,
    ValidationContext,
    tagged_union,
    text_instead,
    types_of,
)
from simplellm.server.http.errors import APIError
from simplellm.server.openai.chat_messages import UNKNOWN, as_text, is_part, role_of
from simplellm.server.openai.responses_store import ResponseStore
from simplellm.server.openai.tools import (
    KINDS,
    arguments_of_call,
    flatten_tool,
    shown_name,
)
from simplellm.text.harmony import Message, Tool, result_message
from simplellm.text.harmony.openai import call_message
from simplellm.text.harmony.schema import Lead

Item = dict[str, Any]  # as it is kept
# Types of parts that are text.
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "refusal")
MAX_UNKNOWN_CHARS = 500  # characters of an item that nobody here knows
# The items of calls, and of what came of them, with the types of their tools.
CALLS = {
    "function_call": "function",
    "custom_tool_call": "custom",
    "local_shell_call": "local_shell",
    "shell_call": "shell",
    "apply_patch_call": "apply_patch",
}
CALL_OF_KIND = {kind: name for name, kind in CALLS.items()}
OUTPUTS = {f"{name}_output": kind for name, kind in CALLS.items()}
# Kinds of items, and how their ids begin.
PREFIXES = dict(zip(CALLS, ("fc", "ctc", "lsh", "sh", "apc"), strict=True))
PREFIXES |= {f"{name}_output": f"{prefix}o" for name, prefix in PREFIXES.items()}
PREFIXES |= {"message": "msg", "reasoning": "rs"}
PREFIXES |= {"additional_tools": "at", "tool_search_output": "tso"}


def text_part(text: str, *, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """A part of an assistant's message that holds text."""
    fields = {"type": "output_text", "text": text, "annotations": []}
    return fields | {"logprobs": list(logprobs)}


def reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


class TextPart(Part):
    """Text in a message, a reasoning or the output of a tool."""

    # With that by which OpenAI's client says what it has read in an answer.
    labels = frozenset({"annotations", "logprobs", "parsed"})

    type: Literal["input_text", "output_text", "text", "reasoning_text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))

    @model_validator(mode="before")
    @classmethod
    def normalize(cls, data: Any, info: "ValidationInfo[ValidationContext]") -> Any:
        """Put a few words in the place of an image or a file."""
        if info.context.strict:
            return cls.without_labels(data)
        if isinstance(data, str):
            return {"type": "input_text", "text": data}
        kind = (data.get("type") or "text") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in TEXT_PARTS:
            info.context.ignore(f"input.content.{kind}")
            return {"type": "input_text", "text": text_instead(kind[:50])}
        return data if kind is None else {**data, "type": kind}


Content = str | Several[TextPart]


def joined_text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(p.text for p in content)


class InputItem(Part):
    """An item as a client sends it."""

    labels = frozenset({"status"})

    id: str | None = None
    type: str

    def kept(self, key: str, number: int) -> Item:
        """The item as it is stored, with its own id or one made of ``key``."""
        id = self.id or f"{PREFIXES[self.type]}_{key}_in{number}"
        return {"id": id, "type": self.type, "status": "completed", **self.content_kept}

    @property
    def content_kept(self) -> Item:
        """The fields of this kind of item, as they are stored."""
        return self.model_dump(exclude={"id", "type"}, exclude_none=True)


class InputMessage(InputItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    phase: Literal["commentary", "final_answer"] | None = None
    content: Content

    @classmethod
    def apply_aliases(
        cls, data: dict[str, Any], context: ValidationContext
    ) -> dict[str, Any]:
        content = data.get("content")
        if isinstance(content, int | float) and not isinstance(content, bool):
            data["content"] = str(content)
        if data.get("phase") not in ("commentary", "final_answer"):
            data.pop("phase", None)
        return data

    @property
    def content_kept(self) -> Item:
        text = joined_text(self.content)
        if self.role != "assistant":
            part = {"type": "input_text", "text": text}
            return {"role": self.role, "content": [part]}
        kept: Item = {"role": self.role, "content": [text_part(text)]}
        return kept if self.phase is None else kept | {"phase": self.phase}


class InputReasoning(InputItem):
    """A model's thoughts. The model never sees their summary, which it didn't write."""

    labels = frozenset({"status", "summary", "encrypted_content"})

    type: Literal["reasoning"]
    content: Content = ""

    @property
    def content_kept(self) -> Item:
        text = joined_text(self.content)
        return {"summary": [], "content": [reasoning_part(text)] if text else []}


class InputCall(InputItem):
    """A tool call."""

    call_id: str

    @classmethod
    def apply_aliases(
        cls, data: dict[str, Any], context: ValidationContext
    ) -> dict[str, Any]:
        """The fields of a call; it may lack arguments, and have no id but its own."""
        if data.get("type") == "function_call":
            given = data.get("arguments") or "{}"
            data["arguments"] = given if isinstance(given, str) else as_text(given)
        if "id" in data:
            data.setdefault("call_id", data["id"])
        return data


class FunctionCall(InputCall):
    labels = frozenset({"status", "parsed_arguments"})

    type: Literal["function_call"]
    name: str
    namespace: str | None = None
    arguments: str


class CustomCall(InputCall):
    type: Literal["custom_tool_call"]
    name: str
    namespace: str | None = None
    input: str


class LocalShellAction(Part):
    labels = frozenset({"timeout_ms", "user", "working_directory"})

    type: Literal["exec"] = "exec"
    env: dict[str, Any] = Field(default_factory=dict)
    command: Several[str]


class LocalShellCall(InputCall):
    type: Literal["local_shell_call"]
    action: LocalShellAction


class ShellAction(Part):
    labels = frozenset({"timeout_ms", "max_output_length"})

    commands: Several[str]


class ShellCall(InputCall):
    type: Literal["shell_call"]
    action: ShellAction


def texts_in(operation: dict[str, Any]) -> dict[str, Any]:
    return {name: text for name, text in operation.items() if isinstance(text, str)}


class ApplyPatchCall(InputCall):
    type: Literal["apply_patch_call"]
    operation: Annotated[dict[str, Any], AfterValidator(texts_in)]


class CallOutput(InputItem):
    """The output of a tool call."""

    labels = frozenset({"status", "max_output_length"})

    type: Literal[
        "function_call_output",
        "custom_tool_call_output",
        "local_shell_call_output",
        "shell_call_output",
        "apply_patch_call_output",
    ]
    call_id: str
    name: str | None = None
    namespace: str | None = None
    output: Content

    @model_validator(mode="before")
    @classmethod
    def normalize(cls, data: Any, info: "ValidationInfo[ValidationContext]") -> Any:
        """Join the chunks of a shell's output; of a patch, keep the status."""
        if not isinstance(data, dict):
            return data
        data = {key: value for key, value in data.items() if value is not None}
        kind, output = data.get("type"), data.get("output")
        if kind == "local_shell_call_output" and "id" in data:
            data.setdefault("call_id", data["id"])  # it has no other one
        if kind == "shell_call_output" and isinstance(output, list):
            data["output"] = "".join(map(shell_text, output))
        elif kind == "apply_patch_call_output" and output is None:
            data["output"] = data.get("status")
        elif not info.context.strict:
            parts = isinstance(output, list) and all(map(is_part, output))
            if not (parts or isinstance(output, str)):
                data["output"] = "" if output is None else as_text(output)
        return cls.without_labels(data)

    @property
    def content_kept(self) -> Item:
        return super().content_kept | {"output": joined_text(self.output)}


class InputTools(InputItem):
    """Tools that come with the conversation."""

    type: Literal["additional_tools", "tool_search_output"]
    tools: Several[Any]

    @classmethod
    def apply_aliases(
        cls, data: dict[str, Any], context: ValidationContext
    ) -> dict[str, Any]:
        if isinstance(tools := data.get("tools"), list):
            data["tools"] = [tool for tool in tools if type_of(tool) in KINDS]
        return data


class ItemReference(Part):
    """A reference to an item of a stored response."""

    type: Literal["item_reference"]
    id: str


ITEMS: tuple[type[Part], ...] = (
    *(InputMessage, InputReasoning, FunctionCall, CustomCall, LocalShellCall),
    *(ShellCall, ApplyPatchCall, CallOutput, InputTools, ItemReference),
)
ITEM_TYPES = [kind for model in ITEMS for kind in types_of(model, "type")]


def type_of(item: Any) -> str | None:
    """The type of an item or a similar object, if it has one."""
    kind = item.get("type") if isinstance(item, Mapping) else None
    return kind if isinstance(kind, str) else None


SomeItem = Annotated[Part, tagged_union("type", *ITEMS, default="message")]


def known_items(items: Sequence[Any], context: ValidationContext) -> list[Any]:
    """The client's items, each as one or more of the kinds that are known here."""
    known = [one for item in items for one in known_item(item, context)]
    ids = [item.get("call_id") for item in known if type_of(item) in CALLS]
    called = {id for id in ids if isinstance(id, str)}
    for number, item in enumerate(known):
        id = item.get("call_id") if type_of(item) in OUTPUTS else None
        orphan = isinstance(id, str) and id not in called  # its call may be gone
        if orphan and item.get("name") is None:
            known[number] = {**item, "name": UNKNOWN}
    return known


def known_item(item: Any, context: ValidationContext) -> list[Any]:
    """An item as items of known kinds: a chat's message may be several."""
    if not isinstance(item, Mapping):
        return [item]
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        return from_chat({**item, "type": kind})
    if not isinstance(kind, str) or kind in ITEM_TYPES:
        return [item]
    if kind in TEXT_PARTS:
        return [{"role": "user", "content": [item]}]
    context.ignore(f"input.{kind}")
    if kind == "compaction_trigger":
        return []
    fields = {k: v for k, v in item.items() if k not in ("id", "type", "status")}
    text = (
        ""
        if "encrypted_content" in fields
        else str(as_text(fields))[:MAX_UNKNOWN_CHARS]
    )
    words = f"[{kind[:50]}{': ' * bool(text)}{text}]"
    return [{"role": "assistant", "phase": "commentary", "content": words}]


def from_chat(item: Item) -> list[Any]:
    """A chat's message as items: a message, its calls, a result."""
    role, calls = role_of(item), item.pop("tool_calls", None)
    item["role"] = role
    if role in ("tool", "function"):
        ids = {"call_id": item.get("tool_call_id", role)}
        kind = "function_call_output"
        return [{"type": kind, "output": item.get("content"), **ids}]
    if role != "assistant" or not isinstance(calls, list):
        return [item]
    items = [item] if item.get("content") else []
    for call in calls:
        call = call if isinstance(call, Mapping) else {}
        named = {name: flatten_tool(call).get(name) for name in ("name", "arguments")}
        items.append({"type": "function_call", "call_id": call.get("id"), **named})
    return items


def kept_items(given: Any, key: str, store: ResponseStore) -> list[Item]:
    """A body's input, text or items, as it is stored; ``key`` makes the ids.

    Raises APIError for a reference to an item that ``store`` doesn't have.
    """
    if isinstance(given, str):
        given = [InputMessage(role="user", content=given)]
    kept = []
    for number, item in enumerate(given):
        refers = isinstance(item, ItemReference)
        found = store.find_item(item.id) if refers else item.kept(key, number)
        if found is None:
            where = f"input[{number}]"
            message = f"{where}: item {short(item.id)} is not here, or no longer"
            raise APIError(404, message, param=f"{where}.id", code="item_not_found")
        kept.append(found)
    return kept


def shell_text(chunk: Any) -> str:
    """The text that one chunk of a shell's output stands for."""
    parts = chunk if isinstance(chunk, Mapping) else {}
    return "".join(str(parts.get(name) or "") for name in ("stdout", "stderr"))


def text_of(item: Item) -> str:
    """The text of a message or a reasoning."""
    return "".join(part["text"] for part in item["content"])


def to_harmony(
    before: Sequence[Item],
    items: Sequence[Item],
    instructions: str | None,
    tools: Sequence[Tool],
    lead: Lead,
) -> list[Message]:
    """The conversation for the model: the items ``before``, then those that are given.

    ``lead`` makes a message of ``instructions`` and ``tools``, which comes first.
    Without instructions the first item takes their place, if it is the developer's.
    Raises ValueError for an output of no call.
    """
    items = [*before, *items]
    leads = items and items[0].get("role") in ("system", "developer")
    skipped = int(instructions is None and bool(leads))
    if skipped:
        instructions = text_of(items[0])
    first = lead(instructions, tools)
    messages = [Message("developer", first)] if first else []
    called: dict[str, str] = {}  # the function behind each call_id
    for number, item in enumerate(items[skipped:], start=skipped - len(before)):
        match item["type"]:
            case "message":
                messages.append(shown_message(item, lead))
            case "reasoning":
                text = text_of(item)
                thought = Message("assistant", text, channel="analysis")
                messages += [thought] if text else []
            case kind if kind in CALLS:
                id, arguments = item["call_id"], arguments_of_call(CALLS[kind], item)
                called[id] = name = shown_tool(CALLS[kind], item)
                function = {"name": name, "arguments": arguments}
                messages.append(call_message({"id": id, "function": function}, "input"))
            case kind if kind in OUTPUTS:
                id = item["call_id"]
                if id not in called and "name" not in item:
                    expected = f"the id of a call before it ({list(called) or 'none'})"
                    expect(False, f"input[{number}].call_id", id, expected)
                name = called.get(id) or shown_tool(OUTPUTS[kind], item)
                messages.append(result_message(name, item["output"], id))
    return messages


def shown_tool(kind: str, item: Item) -> str:
    """The name under which the model knows the tool of an item."""
    return shown_name(item["name"], item.get("namespace")) if "name" in item else kind


def tools_in(items: Sequence[Item]) -> list[Any]:
    """The tools that come with items."""
    return [tool for item in items for tool in item.get("tools", ())]


def shown_message(item: Item, lead: Lead) -> Message:
    """An item that is a message, as a message for the model."""
    role, text = item["role"], text_of(item)
    if role == "assistant":
        commentary = item.get("phase") == "commentary"
        channel = "commentary" if commentary else "final"
        return Message(role, text, channel=channel)
    if role == "user":
        return Message(role, text)
    return Message("developer", lead(text, ()))
