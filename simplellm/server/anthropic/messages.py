"""/v1/messages: Anthropic's interface, with blocks in place of channels.

A call's input must be an object, whatever the model wrote. If it wrote an object, its
text goes out as it is, without being parsed and written again. Any other text becomes
the only entry of an object, `{"_raw": text}`, and is the bare text again when it comes
back from the client. An input is sent when the call is over: half of a text may turn
out to be either.
"""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import orjson

from simplellm.api.outputs import ChatChoice, Usage
from simplellm.api.streams import Replies
from simplellm.base.config import nesting
from simplellm.server.anthropic.blocks import RAW
from simplellm.server.anthropic.messages_body import CountBody, MessageBody
from simplellm.server.http.endpoint import Call, Endpoint, Generation
from simplellm.server.http.errors import APIError, anthropic_form
from simplellm.server.http.response_schemas import ANTHROPIC_MESSAGE, INPUT_TOKENS
from simplellm.server.openai.responses_output import item_kind
from simplellm.server.openai.tools import ClientTools
from simplellm.text.harmony import Delta

PING = {"type": "ping"}
# Nothing is signed, but some clients drop thoughts whose signature is empty.
SIGNATURE = "unsigned"
MOST_LEVELS = 100  # of an input; the client's parser for streams takes 200 in all
# Why a turn ended, by the reason that it has.
STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}


def input_json(text: str) -> str:
    """A call's arguments as the JSON of an object; none at all are an empty one."""
    try:
        arguments = orjson.loads(text or "{}")
        if isinstance(arguments, dict) and nesting(arguments) <= MOST_LEVELS:
            return text or "{}"
    except (ValueError, RecursionError):
        pass
    return orjson.dumps({RAW: text}).decode()


class Blocks:
    """The content of a message: parts of a turn go in, events come out.

    ``key`` makes the ids of its calls, so that the same parts make the same blocks, and
    it doesn't matter how they are cut.
    """

    def __init__(self, key: str, tools: ClientTools | None = None) -> None:
        self.key, self.tools = key, tools or ClientTools()
        self.done: list[dict[str, Any]] = []
        # The block being written: its kind, what it begins with, and its text.
        self.kind: tuple[str, int] | None = None
        self.block: dict[str, Any] = {}
        self.texts: list[str] = []

    def push(self, part: Delta) -> list[dict[str, Any]]:
        """The events for the next part of the turn."""
        kind, events = item_kind(part), []
        if kind != self.kind:
            if not part.text and part.call is None:
                return []
            events = [*self.close(), *self.open(kind, part)]
        if part.text:
            self.texts.append(part.text)
            type = self.block["type"]
            held = type == "tool_use"
            # Who waits for an input sees that something comes.
            events.append(PING if held else self.delta(type, type, part.text))
        return events

    def open(self, kind: tuple[str, int], part: Delta) -> list[dict[str, Any]]:
        """Begin a block."""
        self.kind, self.texts = kind, []
        type, number = kind
        if type == "function_call":
            name = self.tools.called(part.recipient).name
            id = f"toolu_{self.key}_{number}"
            self.block = {"type": "tool_use", "id": id, "name": name, "input": {}}
        elif type == "reasoning":
            self.block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            self.block = {"type": "text", "text": ""}
        return [self.event("start", content_block=self.block)]

    def close(self) -> list[dict[str, Any]]:
        """End the block that is open, if one is."""
        if self.kind is None:
            return []
        text, events = "".join(self.texts), []
        type = self.block["type"]
        if type == "tool_use":
            written = input_json(text)
            ended: dict[str, Any] = {"input": orjson.Fragment(written)}
            events.append(self.delta("input_json", "partial_json", written))
        elif type == "thinking":
            ended = {"thinking": text, "signature": SIGNATURE}
            events.append(self.delta("signature", "signature", SIGNATURE))
        else:
            ended = {"text": text}
        events.append(self.event("stop"))
        self.done.append(self.block | ended)
        self.kind = None
        return events

    def delta(self, kind: str, name: str, text: str) -> dict[str, Any]:
        return self.event("delta", delta={"type": f"{kind}_delta", name: text})

    def event(self, what: str, **fields: Any) -> dict[str, Any]:
        """An event of the block that is open."""
        return {"type": f"content_block_{what}", "index": len(self.done), **fields}


def message_usage(usage: Usage) -> dict[str, Any]:
    """The usage in Anthropic's fields: cached tokens don't count as input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,  # the cache needs no orders
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


class AnthropicMessage(Generation):
    """One turn of the assistant, as blocks."""

    ending: ClassVar[bytes] = b""
    gathers: ClassVar[bool] = True

    def __init__(self, call: Call) -> None:
        body: MessageBody = call.body
        self.model = call.model
        choice = body.tool_choice
        input_processor = call.service.llm.input_processor
        dialect = input_processor.dialect
        spec = input_processor.process_chat(
            **body.shown(dialect),
            tool_choice=None if choice is None else choice.as_openai,
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
            response_format=replace(body.format, text=""),  # that is shown
            max_tokens=max(1, body.max_tokens),
            stop=body.stop_sequences or (),
            priority=body.priority,
            **body.sampling,
        )
        if begun := body.begun_answer:
            closed, spec = spec, input_processor.reopened(spec, begun)
            if spec is closed:  # the answer begins anew
                call.ignore("messages.prefill")
        super().__init__([spec], chat=True, stream=body.stream)
        # Whether nothing is to be answered; what the model then writes is nobody's.
        self.silent = body.max_tokens == 0
        # Whether the context ends before as many tokens as may come.
        self.short = spec.max_tokens < body.max_tokens
        self.key = uuid.uuid4().hex
        self.tools = body.client_tools()
        self.blocks = Blocks(self.key, self.tools)

    def begin(self, replies: Replies) -> None:
        self.blocks = Blocks(self.key, self.tools)

    def object(
        self, content: list[dict[str, Any]], end: dict[str, Any], usage: Usage
    ) -> dict[str, Any]:
        """The message with this content."""
        return {
            "id": f"msg_{self.key}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **end,
            "usage": self.usage(usage),
        }

    def usage(self, usage: Usage) -> dict[str, Any]:
        if self.silent:
            usage = replace(usage, completion_tokens=0, reasoning_tokens=0)
        return message_usage(usage)

    def end_of(self, choice: ChatChoice) -> dict[str, Any]:
        """Why the turn ended."""
        if isinstance(choice.stop_reason, str) and not self.silent:
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        cut = "model_context_window_exceeded" if self.short else "max_tokens"
        ended = "" if self.silent else choice.finish_reason or ""
        reason = STOP_REASONS.get(ended, cut)
        return {"stop_reason": reason, "stop_sequence": None}

    def first(self) -> list[dict[str, Any]]:
        so_far = Usage(len(self.specs[0].tokens), 0, 0, 0)  # as far as is known
        end = {"stop_reason": None, "stop_sequence": None}
        message = self.object([], end, so_far)
        return [{"type": "message_start", "message": message}, PING]

    def part(self, index: int, part: Delta) -> list[dict[str, Any]]:
        return [] if self.silent else self.blocks.push(part)

    def last(self, outputs: Sequence[ChatChoice], usage: Usage) -> list[dict[str, Any]]:
        delta, fields = self.end_of(outputs[0]), self.usage(usage)
        return [
            *self.blocks.close(),
            {"type": "message_delta", "delta": delta, "usage": fields},
            {"type": "message_stop"},
        ]

    def whole(self, outputs: Sequence[ChatChoice], usage: Usage) -> dict[str, Any]:
        self.blocks.close()
        return self.object(self.blocks.done, self.end_of(outputs[0]), usage)

    def failure(self, error: APIError) -> dict[str, Any]:
        return anthropic_form(error)


def count_message_tokens(call: Call) -> dict[str, Any]:
    """How many tokens a conversation has, even if that is too many to answer."""
    body: CountBody = call.body
    input_processor = call.service.llm.input_processor
    shown = body.shown(input_processor.dialect)
    ids = input_processor.dialect.render(
        tokenizer=input_processor.need_tokenizer(), **shown
    )
    return {"input_tokens": len(ids)}


MESSAGES = [
    Endpoint(
        "POST",
        "/v1/messages",
        AnthropicMessage,
        body=MessageBody,
        result=ANTHROPIC_MESSAGE,
        form=anthropic_form,
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        count_message_tokens,
        result=INPUT_TOKENS,
        body=CountBody,
        form=anthropic_form,
    ),
]
