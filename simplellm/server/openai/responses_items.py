"""The items that a client sends to /v1/responses, and the conversation they make.

An item is a message, a reasoning, a call of a tool or what came of one; a response's
input and output are lists of them.
"""

from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Any

from simplellm.base.config import expect, expect_type, one_of
from simplellm.server.http.bodies import Unsupported, refuse
from simplellm.server.http.errors import APIError
from simplellm.server.openai.responses_store import ResponseStore
from simplellm.server.openai.tools import arguments_of_call, shown_name
from simplellm.text.harmony import Message, Tool, result_message
from simplellm.text.harmony.openai import call_message
from simplellm.text.harmony.schema import Lead

Item = dict[str, Any]
TEXT_PARTS = ("input_text", "output_text", "text")  # parts of a message that are text
LOGPROBS = "message.output_text.logprobs"
# What may be asked for beside a response. Our reasoning isn't encrypted: it is there.
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
# Kinds of items, and how their ids begin.
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
    "additional_tools": "at",
    "tool_search_output": "tso",
}
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
TOOL_ITEMS = ("additional_tools", "tool_search_output")  # which bring tools


def refuse_kind(name: str, kind: object) -> None:
    """Raise APIError: the API has such a thing, or may have it, and this server not."""
    refuse(name, Unsupported(f"this server takes no {kind!r}"))


def text_part(text: str, *, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """Text of the assistant, as messages hold it."""
    found = {"type": "output_text", "text": text, "annotations": []}
    return found | {"logprobs": list(logprobs)}


def reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


class ItemReader:
    """Reads the input of one request: items that the client sent, as we keep them.

    ``key`` makes their ids, ``store`` has the items that are only referred to. Raises
    TypeError, ValueError or APIError, with the item's place in the input.
    """

    def __init__(self, key: str, store: ResponseStore) -> None:
        self.key, self.store = key, store

    def read(self, given: Any) -> list[Item]:
        """The items of a body's input: text, or a list of items."""
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        found = []
        for number, item in enumerate(given):
            where = f"input[{number}]"
            expect_type(where, item, Mapping, "an object")
            found.append(self.item(item, where, number))
        return found

    def item(self, item: Mapping[str, Any], where: str, number: int) -> Item:
        """One item; it keeps its id, if it has one."""
        kind = item.get("type", "message" if "role" in item else None)
        expect_type(f"{where}.type", kind, str, f"one of {', '.join(PREFIXES)}")
        if kind == "item_reference":
            return self.referred(item.get("id"), where)
        if kind not in PREFIXES:
            refuse_kind(f"{where}.type", kind)
        id = item.get("id") or f"{PREFIXES[kind]}_{self.key}_in{number}"
        expect_type(f"{where}.id", id, str, "a string")
        found = {"id": id, "type": kind, "status": "completed"}
        if kind in TOOL_ITEMS:
            tools = item.get("tools")
            expect_type(f"{where}.tools", tools, list, "a list of tools")
            return found | {"tools": tools}
        if kind in CALLS:
            return found | self.call(item, where, CALLS[kind])
        if kind in OUTPUTS:
            return found | self.output(item, where, OUTPUTS[kind])
        if kind == "reasoning":
            return found | self.reasoning(item, where)
        return found | self.message(item, where)

    def referred(self, id: Any, where: str) -> Item:
        """The item of this id that a kept response has."""
        expect_type(f"{where}.id", id, str, "the id of an item")
        if (found := self.store.find_item(id)) is None:
            message = f"{where}: item {short(id)} is not here, or no longer"
            raise APIError(404, message, param=f"{where}.id", code="item_not_found")
        return found

    def message(self, item: Mapping[str, Any], where: str) -> Item:
        role, phase = item.get("role"), item.get("phase")
        one_of(f"{where}.role", role, ("user", "assistant", "system", "developer"))
        one_of(f"{where}.phase", phase, (None, "commentary", "final_answer"))
        text = self.text(item.get("content"), f"{where}.content")
        if role != "assistant":
            return {"role": role, "content": [{"type": "input_text", "text": text}]}
        found: Item = {"role": role, "content": [text_part(text)]}
        return found if phase is None else found | {"phase": phase}

    def reasoning(self, item: Mapping[str, Any], where: str) -> Item:
        """Its summary isn't shown to the model, which wrote none."""
        content = item.get("content")
        text = "" if content is None else self.text(content, f"{where}.content")
        return {"summary": [], "content": [reasoning_part(text)] if text else []}

    def call(self, item: Mapping[str, Any], where: str, kind: str) -> Item:
        """What a call of a tool has beside its id: it is whatever ``kind`` needs."""
        expect_type(f"{where}.call_id", item.get("call_id"), str, "a string")
        found = {"call_id": item["call_id"]} | self.named(item, where, kind)
        match kind:
            case "function" | "custom":
                key = "arguments" if kind == "function" else "input"
                expect_type(f"{where}.{key}", item.get(key), str, "a string")
                return found | {key: item[key]}
            case "apply_patch":
                given: Any = item.get("operation")
                expect_type(f"{where}.operation", given, Mapping, "an object")
                texts = {k: v for k, v in given.items() if isinstance(v, str)}
                return found | {"operation": texts}
        key = "command" if kind == "local_shell" else "commands"
        action: Any = item.get("action")
        expect_type(f"{where}.action", action, Mapping, "an object")
        words = action.get(key)
        ok = isinstance(words, list) and all(isinstance(word, str) for word in words)
        expect(ok, f"{where}.action.{key}", words, "a list of strings", TypeError)
        kept = {"type": "exec", "env": {}} if kind == "local_shell" else {}
        return found | {"action": {**kept, key: words}}

    def named(self, item: Mapping[str, Any], where: str, kind: str) -> Item:
        """What an item says of the tool that is called, or was."""
        found = {}
        for key in ("name", "namespace"):
            if kind in ("function", "custom") and item.get(key) is not None:
                expect_type(f"{where}.{key}", item[key], str, "a string")
                found[key] = item[key]
        if item["type"] in CALLS and kind in ("function", "custom"):
            expect_type(f"{where}.name", item.get("name"), str, "a string")
        return found

    def output(self, item: Mapping[str, Any], where: str, kind: str) -> Item:
        """What came of a call. A shell's chunks are joined."""
        # A local shell's output has no other id than that of its call.
        call_id = item.get("call_id", item.get("id") if kind == "local_shell" else None)
        expect_type(f"{where}.call_id", call_id, str, "the id of a call")
        output = item.get("output")
        if kind == "apply_patch" and output is None:
            output = item.get("status")
        if kind == "shell" and isinstance(output, list):
            texts = [shell_text(chunk) for chunk in output]
            output = "".join(texts)
        text = self.text(output, f"{where}.output")
        return {"call_id": call_id, "output": text} | self.named(item, where, kind)

    def text(self, content: Any, where: str) -> str:
        """The text of a content: a string, or a list of parts that have text."""
        if isinstance(content, str):
            return content
        wanted = "a string or a list of text parts"
        expect_type(where, content, list, wanted)
        texts = []
        for number, part in enumerate(content):
            place = f"{where}[{number}]"
            expect_type(place, part, Mapping, "an object")
            kind = part.get("type")
            key = "refusal" if kind == "refusal" else "text"
            if kind not in (*TEXT_PARTS, "reasoning_text", "refusal"):
                refuse_kind(f"{place}.type", kind)
            expect_type(f"{place}.{key}", part.get(key), str, "a string")
            texts.append(part[key])
        return "".join(texts)


def shell_text(chunk: Any) -> str:
    """What a shell wrote, of one chunk."""
    parts = chunk if isinstance(chunk, Mapping) else {}
    return "".join(str(parts.get(name) or "") for name in ("stdout", "stderr"))


def text_of(item: Item) -> str:
    """The text of a message or a reasoning."""
    return "".join(part["text"] for part in item["content"])


def to_harmony(
    before: Sequence[Item],
    given: Sequence[Item],
    instructions: str | None,
    tools: Sequence[Tool],
    lead: Lead,
) -> list[Message]:
    """The conversation as the model is shown it: what came ``before``, what is given.

    ``instructions`` stand in front and tell of the ``tools``, as ``lead`` writes it.
    Without them the first item does, if it is the developer's. Raises ValueError for
    results of no call.
    """
    items = [*before, *given]
    leads = items and items[0].get("role") in ("system", "developer")
    skipped = int(instructions is None and bool(leads))
    if skipped:
        instructions = text_of(items[0])
    first = lead(instructions, tools)
    found = [Message("developer", first)] if first else []
    called: dict[str, str] = {}  # the function behind each call_id
    for number, item in enumerate(items[skipped:], start=skipped - len(before)):
        match item["type"]:
            case "message":
                found.append(shown_message(item, lead))
            case "reasoning":
                text = text_of(item)
                thought = Message("assistant", text, channel="analysis")
                found += [thought] if text else []
            case kind if kind in CALLS:
                id, arguments = item["call_id"], arguments_of_call(CALLS[kind], item)
                called[id] = name = shown_tool(CALLS[kind], item)
                function = {"name": name, "arguments": arguments}
                found.append(call_message({"id": id, "function": function}, "input"))
            case kind if kind in OUTPUTS:
                id = item["call_id"]
                wanted = f"the id of a call before it ({list(called) or 'none'})"
                ok = id in called or "name" in item
                expect(ok, f"input[{number}].call_id", id, wanted)
                name = called.get(id) or shown_tool(OUTPUTS[kind], item)
                found.append(result_message(name, item["output"], id))
    return found


def shown_tool(kind: str, item: Item) -> str:
    """What the model calls the tool of an item."""
    return shown_name(item["name"], item.get("namespace")) if "name" in item else kind


def tools_in(items: Sequence[Item]) -> list[Any]:
    """The tools that items bring with them."""
    return [tool for item in items for tool in item.get("tools", ())]


def shown_message(item: Item, lead: Lead) -> Message:
    """A message as the model is shown it."""
    role, text = item["role"], text_of(item)
    if role == "assistant":
        commentary = item.get("phase") == "commentary"
        channel = "commentary" if commentary else "final"
        return Message(role, text, channel=channel)
    if role == "user":
        return Message(role, text)
    return Message("developer", lead(text, ()))
