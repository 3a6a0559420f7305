"""The items of OpenAI's responses: what a client sends, and what the model writes.

Data in, data out. An item is a message, a reasoning, a call of a function or what came
of one; a response's input and output are lists of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from simplellm.config import expect, expect_type, one_of
from simplellm.harmony import Delta, Message, Tool, developer_text, result_message
from simplellm.harmony.message import HEADER_WORD
from simplellm.harmony.openai import call_message, function_name
from simplellm.outputs import ChatChoice
from simplellm.reply import ChatReply, is_reasoning
from simplellm.request import Event, Request, TokenLogprobs
from simplellm.server.bodies import NOT_HERE
from simplellm.server.errors import APIError
from simplellm.server.logprobs import chat_logprobs
from simplellm.tokenizer import Tokenizer

Item = dict[str, Any]
TEXTS = ("input_text", "output_text", "text")  # parts of a message that are text
# Kinds of items, and how their ids begin.
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


def unsupported(name: str, what: str) -> APIError:
    """What to raise for ``what`` the API has and this server doesn't."""
    message = f"{name}: {what} is known, but not supported: {NOT_HERE}"
    return APIError(400, message, param=name, code="unsupported_parameter")


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
            raise unsupported(f"{where}.type", repr(kind))
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
            if kind not in (*TEXTS, "reasoning_text", "refusal"):
                raise unsupported(f"{place}.type", repr(kind))
            expect_type(f"{place}.{key}", part.get(key), str, "a string")
            texts.append(part[key])
        return "".join(texts)


def text_of(item: Item) -> str:
    """The text of a message or a reasoning."""
    return "".join(part["text"] for part in item["content"])


def to_harmony(
    items: Sequence[Item], instructions: str | None, tools: Sequence[Tool]
) -> list[Message]:
    """The conversation as the model is shown it.

    ``instructions`` stand in front and tell of the ``tools``. Without them the first
    item does, if it is the developer's. Raises ValueError for results of no call.
    """
    items = list(items)
    leads = items and items[0].get("role") in ("system", "developer")
    if instructions is None and leads:
        instructions = text_of(items.pop(0))
    lead = developer_text(instructions, tools)
    found = [Message("developer", lead)] if lead else []
    called: dict[str, str] = {}  # the function behind each call_id
    for item in items:
        match item["type"]:
            case "message":
                found.append(message_of(item))
            case "reasoning":
                text = text_of(item)
                thought = Message("assistant", text, channel="analysis")
                found += [thought] if text else []
            case "function_call":
                called[item["call_id"]] = item["name"]
                function = {"name": item["name"], "arguments": item["arguments"]}
                found.append(call_message({"function": function}, "input"))
            case "function_call_output":
                id = item["call_id"]
                wanted = f"the id of a call before it ({list(called) or 'none'})"
                expect(id in called, "the call_id of an input", id, wanted)
                found.append(result_message(called[id], item["output"]))
    return found


def message_of(item: Item) -> Message:
    """A message as the model is shown it."""
    role, text = item["role"], text_of(item)
    if role == "assistant":
        commentary = item.get("phase") == "commentary"
        channel = "commentary" if commentary else "final"
        return Message(role, text, channel=channel)
    if role == "user":
        return Message(role, text)
    return Message("developer", developer_text(text))


def kind_of(part: Delta) -> tuple[str, int]:
    """What kind of item ``part`` belongs to; equal neighbors make one item.

    The number tells calls apart, and commentary from other text.
    """
    if part.call is not None:
        return "function_call", part.call
    if is_reasoning(part):
        return "reasoning", 0
    return "message", int(part.channel == "commentary")


class Output:
    """The output of a response: parts of a turn go in, events come out.

    ``key`` makes the ids of its items, so that the same parts make the same output, and
    it doesn't matter how they are cut. Text that isn't reasoning or a call's arguments
    is in a message. Each event has the next ``sequence_number``.
    """

    def __init__(self, key: str, tokenizer: Tokenizer) -> None:
        self.key, self.tokenizer = key, tokenizer
        self.told = 0  # events
        self.done: list[Item] = []
        # The item being written: its kind, what it is without its text, and the text.
        self.kind: tuple[str, int] | None = None
        self.item: Item = {}
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        # Those of tokens whose text is to come, and the kind of item that it begins.
        self.held: tuple[tuple[str, int] | None, list[TokenLogprobs]] = None, []

    @property
    def items(self) -> list[Item]:
        """All there is; the last item may be in progress."""
        return self.done if self.kind is None else [*self.done, self.snapshot()]

    def event(self, type: str, **fields: Any) -> dict[str, Any]:
        """An event with the next number."""
        self.told += 1
        return {"type": type, "sequence_number": self.told - 1, **fields}

    def push(self, part: Delta) -> list[dict[str, Any]]:
        """The events for the next part of the turn.

        Without log-probabilities there are those of its text. With them, a token may
        come before its text, when it is half a character.
        """
        kind = kind_of(part)
        # No channel: a message that lacks one, or perhaps a header.
        told = kind[0] == "message" and part.channel is not None
        entries = [*part.logprobs] if told and part.logprobs is not None else []
        if self.held[0] == kind:
            entries = [*self.held[1], *entries]
        begins = kind != self.kind
        if begins and not part.text and part.call is None:
            self.held = kind, entries
            return []
        self.held = None, []
        events = [*self.close(), *self.open(kind, part)] if begins else []
        if part.text or entries:
            events.append(self.add(part.text, entries))
        return events

    def open(self, kind: tuple[str, int], part: Delta) -> list[dict[str, Any]]:
        """Begin an item."""
        type, number = self.kind = kind
        id = f"{PREFIXES[type]}_{self.key}_{len(self.done)}"
        self.item = {"id": id, "type": type}
        if type == "function_call":
            name = function_name((part.recipient or "").removeprefix("functions."))
            self.item |= {"call_id": f"call_{self.key}_{number}", "name": name}
        elif type == "message":
            phase = "commentary" if number else "final_answer"
            self.item |= {"role": "assistant", "phase": phase}
        else:
            self.item |= {"summary": []}
        self.texts, self.logprobs = [], []
        index = len(self.done)
        empty = self.snapshot()
        parts = empty.get("content", ())
        shown = empty | {"content": []} if parts else empty
        events = [
            self.event("response.output_item.added", output_index=index, item=shown)
        ]
        if parts:
            events.append(self.of_item("content_part.added", part=parts[0]))
        return events

    def add(self, text: str, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """More text for the item that is open."""
        assert self.kind is not None
        self.texts.append(text)
        if self.kind[0] == "function_call":
            return self.of_item("function_call_arguments.delta", delta=text)
        if self.kind[0] == "reasoning":
            return self.of_item("reasoning_text.delta", delta=text)
        told = chat_logprobs(entries, self.tokenizer)
        logprobs = [] if told is None else told["content"]
        self.logprobs += logprobs
        return self.of_item("output_text.delta", delta=text, logprobs=logprobs)

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the item that is open, if one is."""
        if self.kind is None:
            return []
        item, type = self.snapshot(status), self.kind[0]
        if type == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            events = [self.of_item("function_call_arguments.done", **told)]
        elif type == "reasoning":
            (part,) = item["content"]
            events = [self.of_item("reasoning_text.done", text=part["text"])]
            events.append(self.of_item("content_part.done", part=part))
        else:
            (part,) = item["content"]
            told = {"text": part["text"], "logprobs": part["logprobs"]}
            events = [self.of_item("output_text.done", **told)]
            events.append(self.of_item("content_part.done", part=part))
        index = len(self.done)
        events.append(
            self.event("response.output_item.done", output_index=index, item=item)
        )
        self.done.append(item)
        self.kind = None
        return events

    def snapshot(self, status: str = "in_progress") -> Item:
        """The item that is open, as it stands."""
        assert self.kind is not None
        found, text = self.item | {"status": status}, "".join(self.texts)
        if self.kind[0] == "function_call":
            return found | {"arguments": text}
        if self.kind[0] == "reasoning":
            return found | {"content": [reasoning_part(text)]}
        return found | {"content": [text_part(text, logprobs=self.logprobs)]}

    def of_item(self, type: str, **fields: Any) -> dict[str, Any]:
        """An event of the item that is open."""
        place = {"item_id": self.item["id"], "output_index": len(self.done)}
        if self.kind is not None and self.kind[0] != "function_call":
            place["content_index"] = 0  # items have one part
        return self.event(f"response.{type}", **place, **fields)


def output_of(
    choice: ChatChoice, asked: Request, key: str, tokenizer: Tokenizer
) -> Output:
    """The output that the parts of a whole turn make, read from its tokens again."""
    reply, output = ChatReply(asked, tokenizer), Output(key, tokenizer)
    event = Event(0, choice.token_ids, choice.logprobs, choice.finish_reason)
    for part in reply.push(event):
        output.push(part)
    return output
