"""The items that a client sends to /v1/responses, and the conversation they make.

An item is a message, a reasoning, a call of a function or what came of one; a
response's input and output are lists of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from simplellm.base.config import expect, expect_type, one_of
from simplellm.server.http.bodies import Unsupported, refuse
from simplellm.text.harmony import Message, Tool, result_message
from simplellm.text.harmony.message import HEADER_WORD
from simplellm.text.harmony.openai import call_message
from simplellm.text.harmony.schema import Lead

Item = dict[str, Any]
TEXT_PARTS = ("input_text", "output_text", "text")  # parts of a message that are text
# Kinds of items, and how their ids begin.
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


def refuse_kind(name: str, kind: object) -> None:
    """Raise APIError: the API has such a thing, or may have it, and this server not."""
    refuse(name, kind, Unsupported(f"this server takes no {kind!r}"))


def text_part(text: str, *, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """Text of the assistant, as messages hold it."""
    found = {"type": "output_text", "text": text, "annotations": []}
    return found | {"logprobs": list(logprobs)}


def reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


class ItemReader:
    """Reads the input of one request: items that the client sent, as we keep them.

    ``key`` makes their ids. Raises TypeError, ValueError or APIError, with the item's
    place in the input.
    """

    def __init__(self, key: str) -> None:
        self.key = key

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
        if kind not in PREFIXES:
            refuse_kind(f"{where}.type", kind)
        id = item.get("id") or f"{PREFIXES[kind]}_{self.key}_in{number}"
        expect_type(f"{where}.id", id, str, "a string")
        found = {"id": id, "type": kind, "status": "completed"}
        match kind:
            case "message":
                return found | self.message(item, where)
            case "reasoning":
                return found | self.reasoning(item, where)
            case "function_call":
                return found | self.call(item, where)
        call_id = item.get("call_id")
        expect_type(f"{where}.call_id", call_id, str, "the id of a call")
        output = self.text(item.get("output"), f"{where}.output")
        return found | {"call_id": call_id, "output": output}

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

    def call(self, item: Mapping[str, Any], where: str) -> Item:
        for name in ("call_id", "name", "arguments"):
            expect_type(f"{where}.{name}", item.get(name), str, "a string")
        name = item["name"]
        ok = HEADER_WORD.fullmatch(name)
        expect(ok, f"{where}.name", name, "a name without spaces and '<'")
        call = {"call_id": item["call_id"], "name": name}
        return call | {"arguments": item["arguments"]}

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
            case "function_call":
                called[item["call_id"]] = item["name"]
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "function": function}
                found.append(call_message(call, "input"))
            case "function_call_output":
                id = item["call_id"]
                wanted = f"the id of a call before it ({list(called) or 'none'})"
                expect(id in called, f"input[{number}].call_id", id, wanted)
                found.append(result_message(called[id], item["output"], id))
    return found


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
