"""The bodies of /v1/messages: what a client may ask for, and how the model is shown it.

A message's content is text or a list of blocks: text, thinking, calls of tools
("tool_use") and what came of them ("tool_result").
"""

from collections.abc import Mapping
from itertools import groupby
from reprlib import repr as short
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, WithJsonSchema, model_validator

from simplellm.api.chat_options import Format, as_format
from simplellm.base.config import MAX_SIZE, as_texts, expect, expect_type, one_of
from simplellm.base.sampling_params import MAX_STOP_CHARACTERS, MAX_STOPS
from simplellm.server.anthropic.blocks import (
    BLOCKS,
    CUSTOM_TOOL,
    SOME_CONTENT,
    SOME_MESSAGE,
    built_in,
)
from simplellm.server.anthropic.messages_lenient import lenient_conversation
from simplellm.server.http.answers import list_of
from simplellm.server.http.bodies import (
    NOT_HERE,
    SHARED_UNSUPPORTED,
    Body,
    Effort,
    Reading,
    SampledBody,
    Unsupported,
    refuse,
)
from simplellm.server.http.errors import APIError
from simplellm.server.openai.tools import ClientTools, shown_name
from simplellm.text.dialects.dialect import Dialect
from simplellm.text.harmony import Message, Tool, result_message
from simplellm.text.harmony.openai import call_message
from simplellm.text.harmony.schema import as_tools

MOST_MESSAGES = 100_000  # as with Anthropic; to render more would take too long
RAW = "_raw"  # holds what the model wrote as a call's input, if that is no object
OUTPUT_FORMAT: dict[str, Any] = {
    "type": "object",
    "required": ["type", "schema"],
    "properties": {"type": {"enum": ["json_schema"]}, "schema": {"type": "object"}},
}
CONVERSATION_UNSUPPORTED = {
    "container": Unsupported(NOT_HERE, hint=True),
    "context_management": Unsupported(NOT_HERE, ({"edits": []},), hint=True),
    "mcp_servers": Unsupported("offer what they can do as tools", ([],)),
    "speed": Unsupported(NOT_HERE, ("standard",), hint=True),
}


class Thinking(Body):
    """Whether the model is to think. It does if it wants to; its effort can be low."""

    unsupported: ClassVar = {
        "display": Unsupported(
            "the thoughts are told as they are", ("summarized",), hint=True
        ),
    }

    prefix = "thinking."

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_SIZE)
    """Nothing is done with it."""


class OutputConfig(Body):
    """How the model is to answer."""

    prefix = "output_config."

    effort: Effort = "medium"
    format: Annotated[dict[str, Any], WithJsonSchema(OUTPUT_FORMAT)] | None = None


class ToolChoice(Body):
    """Whether the model may call tools."""

    prefix = "tool_choice."

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    """Of the tool, and of no other type."""
    disable_parallel_tool_use: bool = False
    """A turn has one call at most; that of gpt-oss ends with its first one anyway."""

    @model_validator(mode="after")
    def check(self) -> Self:
        ok = (self.name is not None) == (self.type == "tool")
        expect(ok, "tool_choice.name", self.name, "a name with the type 'tool'")
        return self

    @property
    def as_openai(self) -> str | dict[str, Any]:
        """The same in the words of OpenAI."""
        if self.type == "tool":
            return {"type": "function", "name": shown_name(self.name or "")}
        return "required" if self.type == "any" else self.type


class Thread(Body):
    """A conversation that Anthropic keeps. Here each request has all of it.

    So to create one asks for nothing. To continue one is refused with the code at which
    the client sends the whole.
    """

    prefix = "thread."

    type: Literal["create", "continue"]
    previous_message_id: str | None = None

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.type == "continue":
            message = "no thread is kept here; expected the whole conversation"
            details = {"error_code": "thread_not_found"}
            raise APIError(404, message, param="thread", details=details)
        return self


class CountBody(Body):
    """What /v1/messages/count_tokens takes: a conversation."""

    unsupported: ClassVar = CONVERSATION_UNSUPPORTED

    model: str | None = None
    """One that is served."""
    messages: Annotated[list[Any], WithJsonSchema(list_of(SOME_MESSAGE))]
    system: Annotated[str | list[Any], WithJsonSchema(SOME_CONTENT)] | None = None
    tools: Annotated[list[Any], WithJsonSchema(list_of(CUSTOM_TOOL))] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    thread: Thread | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    """Equal beginnings are always found again, so that nothing is done with it."""

    @classmethod
    def mapped(cls, data: dict[str, Any], reading: Reading) -> dict[str, Any]:
        return lenient_conversation(super().mapped(data, reading), reading)

    @property
    def format(self) -> Format:
        """What the answer's text is to fit. Raises TypeError or ValueError."""
        given = (self.output_config or OutputConfig()).format
        named = given and {"name": "output", **given}
        return as_format(named, "output_config.format")

    @property
    def effort(self) -> str:
        if self.output_config is None and self.thinking is not None:
            return "low" if self.thinking.type == "disabled" else "medium"
        return (self.output_config or OutputConfig()).effort

    def client_tools(self) -> ClientTools:
        """The tools, in the client's words too. Raises TypeError or ValueError."""
        functions = []
        for number, tool in enumerate(self.tools or ()):
            where = f"tools[{number}]"
            expect_type(where, tool, Mapping, "an object")
            kind = tool.get("type") or "custom"
            known = built_in(kind) if isinstance(kind, str) else None
            if kind != "custom" and known is None:
                why = f"no {kind!r} runs here; offer what it does as a tool"
                refuse(f"{where}.type", Unsupported(why))
            schema = (known or tool).get("input_schema")
            expect_type(f"{where}.name", tool.get("name"), str, "a string")
            expect_type(f"{where}.input_schema", schema, dict, "an object")
            given = {**(known or {}), **tool, "type": "function", "parameters": schema}
            functions.append(given)
        return ClientTools(functions)

    def offered(self) -> list[Tool]:
        """The tools that the model is told of. Raises TypeError or ValueError."""
        tools = as_tools(self.client_tools().functions)
        hidden = self.tool_choice is not None and self.tool_choice.type == "none"
        return [] if hidden else tools

    @property
    def begins_answer(self) -> bool:
        """Whether the last message is the beginning of an answer, to be gone on with.

        As Anthropic has it, it is text.
        """
        last = self.messages[-1] if self.messages else {}
        content = last.get("content")
        ends = content[-1:] if isinstance(content, list) else [{"type": "text"}]
        is_text = any(block.get("type") == "text" for block in ends)
        return last.get("role") == "assistant" and is_text

    def shown(self, dialect: Dialect) -> dict[str, Any]:
        """The conversation as `render` takes it. Raises TypeError or ValueError."""
        tools, called = self.offered(), dict[str, str]()
        system = "" if self.system is None else text_in(self.system, "system")
        lead = dialect.lead(system, tools)
        messages = [Message("developer", lead)] if lead else []
        expect(self.messages, "messages", self.messages, "at least one message")
        for number, message in enumerate(self.messages):
            where = f"messages[{number}]"
            expect_type(where, message, Mapping, "an object")
            one_of(f"{where}.role", message.get("role"), tuple(BLOCKS))
            messages += shown_messages(message, where, called, dialect)
        count, most = len(messages), MOST_MESSAGES
        ok, expected = count <= most, f"at most {most}"
        expect(ok, "the number of messages", count, expected, param="messages")
        if text := self.format.text:
            messages = [*dialect.with_format(messages, tools, text)]
        return {"messages": messages, "tools": tools, "reasoning_effort": self.effort}


class MessageBody(CountBody, SampledBody):
    """What /v1/messages takes."""

    unsupported: ClassVar = {
        **SHARED_UNSUPPORTED,
        **CONVERSATION_UNSUPPORTED,
        "logprobs": Unsupported(NOT_HERE),
        "prompt_logprobs": Unsupported(NOT_HERE),
        "n": Unsupported("a message is one turn", (1,)),
        "return_token_ids": Unsupported(NOT_HERE, (False,)),
        "response_format": Unsupported("use format of output_config"),
        "service_tier": Unsupported(NOT_HERE, ("auto", "standard_only"), hint=True),
        "stop": Unsupported("use stop_sequences"),
        "stream_options": Unsupported("a stream always tells the usage", hint=True),
        "user": Unsupported("use metadata", hint=True),
    }

    max_tokens: int = Field(ge=0, le=MAX_SIZE)
    """Thinking included. 0 only reads the conversation, so that the next one is quick.
    """
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    """Nothing is done with it."""

    @property
    def compiles(self) -> bool:
        return super().compiles or bool(self.tools or self.output_config)

    @model_validator(mode="after")
    def check(self) -> Self:
        limits = MAX_STOPS, MAX_STOP_CHARACTERS
        as_texts("stop_sequences", self.stop_sequences, *limits)
        return self


def blocks_in(
    content: Any, where: str, role: str
) -> list[tuple[str, Mapping[str, Any]]]:
    """The blocks of a content with their places, checked. Raises as `shown`."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    expect_type(where, content, list, "a string or a list of blocks")
    kinds, blocks = BLOCKS[role], []
    for number, block in enumerate(content):
        path = f"{where}[{number}]"
        expect_type(path, block, Mapping, "an object")
        one_of(f"{path}.type", block.get("type"), tuple(kinds))
        for name in kinds[block["type"]]:
            expect_type(f"{path}.{name}", block.get(name), str, "a string")
        blocks.append((path, block))
    return blocks


def joined(blocks: Any) -> str:
    """The text of some blocks, which are as much apart as paragraphs."""
    return "\n\n".join(block["text"] for _, block in blocks)


def text_in(content: Any, where: str) -> str:
    """The text of a content that may hold nothing else."""
    return joined(blocks_in(content, where, "system"))


def shown_messages(
    message: Mapping[str, Any], where: str, called: dict[str, str], dialect: Dialect
) -> list[Message]:
    """A message as the model is shown it; ``called`` has the tool behind each id."""
    role, where = message["role"], f"{where}.content"
    blocks = blocks_in(message.get("content"), where, role)
    if role == "system":
        return [Message("developer", dialect.lead(joined(blocks), ()))]
    messages = []
    if role == "user":
        for kind, group in groupby(blocks, key=lambda pair: pair[1]["type"]):
            if kind == "text":
                messages.append(Message("user", joined(group)))
            else:
                messages += [shown_result(block, path, called) for path, block in group]
        return messages
    calls = any(block["type"] == "tool_use" for _, block in blocks)
    for path, block in blocks:
        match block["type"]:
            case "text":
                channel = "commentary" if calls else "final"
                messages.append(Message("assistant", block["text"], channel=channel))
            case "thinking" if block["thinking"]:
                thought = block["thinking"]
                messages.append(Message("assistant", thought, channel="analysis"))
            case "tool_use":
                called[block["id"]] = shown_name(block["name"])
                messages.append(shown_call(block, path))
    return messages  # without what is redacted: none but its writer can read it


def shown_call(block: Mapping[str, Any], where: str) -> Message:
    name: str = block["name"]
    given: Any = block.get("input")
    expect_type(f"{where}.input", given, Mapping, "an object")
    raw = given.get(RAW)
    arguments = raw if isinstance(raw, str) and len(given) == 1 else given
    function = {"name": shown_name(name), "arguments": arguments}
    return call_message({"id": block["id"], "function": function}, where)


def shown_result(
    block: Mapping[str, Any], where: str, called: Mapping[str, str]
) -> Message:
    id, content = block["tool_use_id"], block.get("content")
    expected = f"the id of a call before it ({short(list(called))})"
    name = called.get(id, block.get("name"))
    expect(isinstance(name, str), f"{where}.tool_use_id", id, expected)
    text = "" if content is None else text_in(content, f"{where}.content")
    if block.get("is_error"):  # harmony has no place for that
        text = f"Error: {text}"
    return result_message(str(name), text, id)
