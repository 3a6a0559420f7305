"""Responses as clients ask for them, rewritten into what /v1/responses takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from simplellm.server.http.bodies import Reading, text_instead
from simplellm.server.openai.chat_lenient import (
    ROLES,
    UNKNOWN,
    as_text,
    is_part,
    named_schema,
    offered_tools,
    refuse_alone,
    with_choice,
)
from simplellm.server.openai.responses_items import (
    CALLS,
    INCLUDABLE,
    LOGPROBS,
    OUTPUTS,
    PREFIXES,
    TEXT_PARTS,
    TOOL_ITEMS,
    shell_text,
)
from simplellm.server.openai.tools import KINDS, flat

TEXTS = (*TEXT_PARTS, "reasoning_text", "refusal")  # types of parts that are text
MOST_TOLD = 500  # characters of an item that nobody here knows


def lenient_response(data: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """The whole body."""
    data = with_included(with_text(with_choice(data)), reading)
    effort, reasoning = data.pop("reasoning_effort", None), data.get("reasoning", {})
    if isinstance(reasoning, Mapping):
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
        data["tools"] = offered_tools(tools, reading)
    if isinstance(items := data.get("input"), list):
        whole = "previous_response_id" not in data
        data["input"] = lenient_items(items, reading, whole=whole)
    return data


def lenient_items(items: Sequence[Any], reading: Reading, *, whole: bool) -> list[Any]:
    """The input; ``whole``: no calls can be elsewhere than in it."""
    found: list[Any] = []
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            found.append(item)
            continue
        last = number == len(items) - 1
        reader = ItemRewriter(dict(item), f"input[{number}]", last, reading)
        found += reader.read()
    return without_orphans(found, whole)


def without_orphans(items: list[Any], whole: bool) -> list[Any]:
    """Items whose outputs say what to call them if the call is gone."""
    ids = [item.get("call_id") for item in items if type_of(item) in CALLS]
    called = {id for id in ids if isinstance(id, str)}
    whole = whole and not any(type_of(item) == "item_reference" for item in items)
    found = []
    for item in items:
        kind = type_of(item)
        id = item.get("call_id") if kind in OUTPUTS else None
        if isinstance(id, str) and id not in called and item.get("name") is None:
            item = {**item, "name": UNKNOWN}
            # Shells and patches go without names.
            item["type"] = "function_call_output" if whole else kind
        found.append(item)
    return found


def type_of(item: Any) -> str | None:
    kind = item.get("type") if isinstance(item, Mapping) else None
    return kind if isinstance(kind, str) else None


class ItemRewriter:
    """One item of the input; the ``last`` one is what the user asks now."""

    def __init__(
        self, item: dict[str, Any], where: str, last: bool, reading: Reading
    ) -> None:
        self.item, self.where, self.last = item, where, last
        self.reading = reading

    def read(self) -> list[Any]:
        """It as `ItemReader` takes it, or several for it."""
        item = {name: value for name, value in self.item.items() if value is not None}
        kind = item.get("type", "message" if "role" in item else None)
        if not isinstance(kind, str):
            return [item]
        if kind in TOOL_ITEMS and isinstance(tools := item.get("tools"), list):
            kept = [tool for tool in tools if type_of(tool) in KINDS]
            return [item | {"tools": kept}]
        if kind in CALLS:
            return [self.call(item, kind)]
        if kind in OUTPUTS:
            return [self.output(item, kind)]
        if kind in PREFIXES or kind == "item_reference":
            return self.message(item) if kind == "message" else [item]
        self.reading.ignore(f"input.{kind}")
        return [] if kind == "compaction_trigger" else [self.in_text(item, kind)]

    def in_text(self, item: Mapping[str, Any], kind: str) -> dict[str, Any]:
        """An item that nobody here knows, as a few words of the assistant."""
        told = {k: v for k, v in item.items() if k not in ("id", "type", "status")}
        text = "" if "encrypted_content" in told else str(as_text(told))[:MOST_TOLD]
        words = f"[{kind[:50]}{': ' * bool(text)}{text}]"
        return {"role": "assistant", "phase": "commentary", "content": words}

    def call(self, item: dict[str, Any], kind: str) -> dict[str, Any]:
        """A call, which may have no arguments, and no id but its own."""
        if kind == "function_call" and not item.get("arguments"):
            item["arguments"] = "{}"
        if kind == "function_call" and not isinstance(item["arguments"], str):
            item["arguments"] = as_text(item["arguments"])
        if "call_id" not in item and "id" in item:
            item["call_id"] = item["id"]
        return item

    def output(self, item: dict[str, Any], kind: str) -> dict[str, Any]:
        """What came of a call: text, or data, or parts that may be pictures."""
        given = item.get("output")
        if isinstance(given, list) and kind == "shell_call_output":
            item["output"] = "".join(map(shell_text, given))
        elif isinstance(given, list):
            item["output"] = (
                self.parts(given) if all(map(is_part, given)) else as_text(given)
            )
        elif given is None and kind != "apply_patch_call_output":
            item["output"] = ""
        elif not isinstance(given, str | list | None):
            item["output"] = as_text(given)
        return item

    def message(self, item: dict[str, Any]) -> list[Any]:
        """A message; that of a chat may be calls and a result, too."""
        role = item.get("role")
        if isinstance(role, str):
            role = item["role"] = ROLES.get(role.lower(), role.lower())
        content = item.get("content")
        if role in ("tool", "function"):
            output = {"output": content, "call_id": item.get("tool_call_id", role)}
            kind = "function_call_output"
            return [self.output({"type": kind, **output}, kind)]
        if isinstance(content, int | float) and not isinstance(content, bool):
            item["content"] = str(content)
        elif isinstance(content, list):
            item["content"] = self.parts(content, role)
        if item.get("phase") not in (None, "commentary", "final_answer"):
            del item["phase"]
        calls = item.pop("tool_calls", None)
        if role != "assistant" or not isinstance(calls, list):
            return [item]
        found = [item] if item.get("content") else []
        for call in calls:
            call = call if isinstance(call, Mapping) else {}
            one = {"type": "function_call", "call_id": call.get("id")}
            one |= {name: flat(call).get(name) for name in ("name", "arguments")}
            found.append(self.call(one, "function_call"))
        return found

    def parts(self, content: Sequence[Any], role: Any = None) -> list[Any]:
        """The parts of a content, with a few words for what is no text."""
        found, others = [], []
        for part in content:
            if isinstance(part, str):
                part = {"type": "input_text", "text": part}
            kind = part.get("type", "input_text") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind not in TEXTS:
                others.append(kind)
                self.reading.ignore(f"input.content.{kind}")
                part = {"type": "input_text", "text": text_instead(kind[:50])}
            elif kind is not None:
                part = {**part, "type": kind}
            found.append(part)
        if others and len(others) == len(content):
            refuse_alone(role, self.last, f"{self.where}.content", others)
        return found


def with_included(data: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """A body that asks for what there can be beside a response."""
    if isinstance(include := data.get("include"), list):
        data["include"] = [one for one in include if one in INCLUDABLE]
        for one in include:
            if isinstance(one, str) and one not in INCLUDABLE:
                reading.ignore(f"include.{one}")
    if "top_logprobs" in data and LOGPROBS not in (data.get("include") or ()):
        del data["top_logprobs"]
        reading.ignore("top_logprobs")
    return data


def with_text(data: dict[str, Any]) -> dict[str, Any]:
    """The format of the answer where responses have it, its schema with a name."""
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
