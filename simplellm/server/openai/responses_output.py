"""Makes a response's output items of the parts of a turn, and events for its stream.

Data in, data out.
"""

from collections.abc import Sequence
from typing import Any

from simplellm.api.outputs import is_reasoning
from simplellm.base.request import TokenLogprobs
from simplellm.server.openai.logprobs import chat_logprobs
from simplellm.server.openai.responses_items import (
    CALL_OF_KIND,
    PREFIXES,
    Item,
    reasoning_part,
    text_part,
)
from simplellm.server.openai.tools import ClientTools, call_fields
from simplellm.text.harmony import Delta
from simplellm.text.tokenizer import Tokenizer


def item_kind(part: Delta) -> tuple[str, int]:
    """What kind of item ``part`` belongs to; neighbors of one kind make one item.

    The number distinguishes one call from the next, and commentary from the final text.
    """
    if part.call is not None:
        return "function_call", part.call
    if is_reasoning(part):
        return "reasoning", 0
    return "message", int(part.channel == "commentary")


class Output:
    """The output of a response: parts of a turn go in, events come out.

    ``key`` makes the ids of its items, so that the same parts make the same output,
    however they are cut. Text that is neither reasoning nor a call's arguments becomes
    a message. Each event has the next ``sequence_number``.
    """

    def __init__(
        self, key: str, tokenizer: Tokenizer, tools: ClientTools | None = None
    ) -> None:
        self.key, self.tokenizer = key, tokenizer
        self.tools = tools or ClientTools()
        self.num_events = 0  # events
        self.done: list[Item] = []
        # The item being written: its kind, what it is without its text, and the text.
        self.kind: tuple[str, int] | None = None
        self.item: Item = {}
        self.tool = "function"  # the type of the tool that it calls, if it does
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        # Those of tokens whose text is to come, and the kind of item that it begins.
        self.pending: tuple[tuple[str, int] | None, list[TokenLogprobs]] = None, []

    def items(self, status: str = "in_progress") -> list[Item]:
        """All items so far; ``status`` is that of the open one."""
        opened = [] if self.kind is None else [self.snapshot(status)]
        return self.done + opened

    def event(self, type: str, **fields: Any) -> dict[str, Any]:
        """An event with the next sequence number."""
        self.num_events += 1
        return {"type": type, "sequence_number": self.num_events - 1, **fields}

    def push(self, part: Delta) -> list[dict[str, Any]]:
        """The events for the next part of the turn.

        With log-probabilities there are also events for tokens without text, such as
        half a character.
        """
        kind = item_kind(part)
        # No channel: a message that lacks one, or perhaps a header.
        has_text = kind[0] == "message" and part.channel is not None
        entries = [*part.logprobs] if has_text and part.logprobs is not None else []
        if self.pending[0] == kind:
            entries = [*self.pending[1], *entries]
        begins = kind != self.kind
        if begins and not part.text and part.call is None:
            self.pending = kind, entries
            return []
        self.pending = None, []
        events = [*self.close(), *self.open(kind, part)] if begins else []
        if part.text or entries:
            events += self.add(part.text, entries)
        return events

    def open(self, kind: tuple[str, int], part: Delta) -> list[dict[str, Any]]:
        """Begin an item; its events."""
        type, number = self.kind = kind
        tool = self.tools.called(part.recipient)
        self.tool = tool.kind
        name = CALL_OF_KIND[tool.kind] if type == "function_call" else type
        id = f"{PREFIXES[name]}_{self.key}_{len(self.done)}"
        self.item = {"id": id, "type": name}
        if type == "function_call":
            self.item["call_id"] = f"call_{self.key}_{number}"
            if tool.kind in ("function", "custom"):
                self.item["name"] = tool.name
            if tool.namespace is not None:
                self.item["namespace"] = tool.namespace
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

    def add(self, text: str, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Add text to the open item; its events.

        The input of a tool that is no function comes at the end: until then it is JSON.
        """
        assert self.kind is not None
        self.texts.append(text)
        if self.kind[0] == "function_call":
            if self.tool != "function":
                return []
            return [self.of_item("function_call_arguments.delta", delta=text)]
        if self.kind[0] == "reasoning":
            return [self.of_item("reasoning_text.delta", delta=text)]
        scores = chat_logprobs(entries, self.tokenizer)
        logprobs = [] if scores is None else scores["content"]
        self.logprobs += logprobs
        return [self.of_item("output_text.delta", delta=text, logprobs=logprobs)]

    def close(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the open item, if there is one; its events."""
        if self.kind is None:
            return []
        item, index = self.snapshot(status), len(self.done)
        if self.kind[0] == "function_call":
            events = self.call_events(item)
        else:
            (part,) = item["content"]
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = [self.of_item(f"{part['type']}.done", **said)]
            events.append(self.of_item("content_part.done", part=part))
        events.append(
            self.event("response.output_item.done", output_index=index, item=item)
        )
        self.done.append(item)
        self.kind = None
        return events

    def call_events(self, item: Item) -> list[dict[str, Any]]:
        """The events that end a call. Items of shells and patches need none."""
        if self.tool == "function":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            return [self.of_item("function_call_arguments.done", **fields)]
        if self.tool != "custom":
            return []
        name, text = "custom_tool_call_input", item["input"]
        deltas = [self.of_item(f"{name}.delta", delta=text)] if text else []
        return [*deltas, self.of_item(f"{name}.done", input=text)]

    def snapshot(self, status: str = "in_progress") -> Item:
        """The open item as it stands."""
        assert self.kind is not None
        fields, text = self.item | {"status": status}, "".join(self.texts)
        if self.kind[0] == "function_call":
            begins = self.tool != "function" and status == "in_progress"
            return fields | call_fields(self.tool, "" if begins else text)
        if self.kind[0] == "reasoning":
            return fields | {"content": [reasoning_part(text)]}
        return fields | {"content": [text_part(text, logprobs=self.logprobs)]}

    def of_item(self, type: str, **fields: Any) -> dict[str, Any]:
        """An event of the open item."""
        where = {"item_id": self.item["id"], "output_index": len(self.done)}
        if self.kind is not None and self.kind[0] != "function_call":
            where["content_index"] = 0  # items have one part
        return self.event(f"response.{type}", **where, **fields)
