"""The bodies of /v1/messages, and the conversation that the model gets."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from simplellm.api.chat_options import Format, as_format
from simplellm.base.config import MAX_SIZE, as_texts, expect, expect_type
from simplellm.base.sampling_params import MAX_STOP_CHARACTERS, MAX_STOPS
from simplellm.server.anthropic.blocks import (
    DOCUMENTS,
    AssistantTurn,
    SomeTurn,
    TextBlock,
    Texts,
    known_block,
    shown_turn,
    text_in,
    with_role,
)
from simplellm.server.http.bodies import (
    NOT_HERE,
    SHARED_UNSUPPORTED,
    Body,
    Described,
    Effort,
    SampledBody,
    Several,
    Unsupported,
    ValidationContext,
    an_object,
    refuse,
)
from simplellm.server.http.errors import APIError
from simplellm.server.http.response_schemas import FLAG, TEXT, list_of
from simplellm.server.openai.chat_body import offered_tools
from simplellm.server.openai.chat_messages import refuse_unread
from simplellm.server.openai.tools import ClientTools, flatten_tool, shown_name
from simplellm.text.dialects.dialect import Dialect
from simplellm.text.harmony import Message, Tool
from simplellm.text.harmony.schema import as_tools

MOST_MESSAGES = 100_000  # as with Anthropic; to render more would take too long
THINKING = ("enabled", "adaptive", "disabled")
READABLE = ("text", "tool_result", *DOCUMENTS)  # blocks that a user may have alone
OUTPUT_FORMAT = an_object(
    *("type", "schema"), type={"enum": ["json_schema"]}, schema={"type": "object"}
)
CUSTOM_TOOL = an_object(
    "name",
    type={},  # of a tool of Anthropic's; else custom
    name=TEXT,
    description={"type": ["string", "null"]},
    input_schema={"type": "object"},
    strict={"type": ["boolean", "null"]},
    max_characters={},
    cache_control={},
)
# Tools of Anthropic's that a client runs, by how their types begin.
FILE_CHANGES = {"file_text": TEXT, "old_str": TEXT, "new_str": TEXT}
FILE_CHANGES |= {"insert_line": {"type": "integer"}, "insert_text": TEXT}
BUILT_IN_TOOLS: dict[str, dict[str, Any]] = {
    "bash_": {
        "description": "Runs a command in a shell that stays open.",
        "input_schema": an_object("command", command=TEXT, restart=FLAG),
    },
    "text_editor_": {
        "description": "Views and edits files. The commands are view, create "
        "(file_text), str_replace (old_str, new_str) and insert (insert_line, "
        "insert_text).",
        "input_schema": an_object(
            *("command", "path"),
            command=TEXT,
            path=TEXT,
            **FILE_CHANGES,
            view_range={"type": "array"},
        ),
    },
    "memory_": {
        "description": "Keeps notes as files under /memories. The commands are view, "
        "create, str_replace, insert, delete and rename.",
        "input_schema": an_object(
            "command",
            command=TEXT,
            path=TEXT,
            **FILE_CHANGES,
            old_path=TEXT,
            new_path=TEXT,
        ),
    },
}
CONVERSATION_UNSUPPORTED = {
    "container": Unsupported(NOT_HERE, hint=True),
    "context_management": Unsupported(NOT_HERE, ({"edits": []},), hint=True),
    "mcp_servers": Unsupported("offer what they can do as tools", ([],)),
    "speed": Unsupported(NOT_HERE, ("standard",), hint=True),
}


class Thinking(Body):
    """Whether the model is to think. It does as it likes; disabled means low effort."""

    unsupported: ClassVar = {
        "display": Unsupported(
            "the thoughts come as they are", ("summarized",), hint=True
        ),
    }

    prefix = "thinking."

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_SIZE)
    """Nothing is done with it."""


class OutputConfig(Body):
    """The effort and the format of the answer."""

    prefix = "output_config."

    effort: Effort | None = None
    format: Annotated[dict[str, Any], Described(OUTPUT_FORMAT)] | None = None


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
        """The tool_choice as OpenAI writes it."""
        if self.type == "tool":
            return {"type": "function", "name": shown_name(self.name or "")}
        return "required" if self.type == "any" else self.type


class Thread(Body):
    """A conversation that Anthropic stores. Here each request holds all of it.

    So a body that creates one asks for nothing. One that continues a thread is refused
    with the error code at which clients send the whole conversation.
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
    messages: Several[SomeTurn]
    system: Texts | None = None
    tools: Annotated[list[Any], Described(list_of(CUSTOM_TOOL))] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    thread: Thread | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    """Equal beginnings are always found again, so that nothing is done with it."""

    @classmethod
    def apply_aliases(
        cls, data: dict[str, Any], context: ValidationContext
    ) -> dict[str, Any]:
        data = with_output(super().apply_aliases(data, context))
        if isinstance(name := data.get("model"), str) and name not in context.models:
            del data["model"]  # clients have names of Anthropic's built in
            context.ignore("model")
        if isinstance(choice := data.get("tool_choice"), str):
            kind = "any" if choice == "required" else choice
            data["tool_choice"] = {"type": kind}
        thinking = data.get("thinking")
        if isinstance(thinking, Mapping) and thinking.get("type") not in THINKING:
            data["thinking"] = {**thinking, "type": "adaptive"}
        if isinstance(tools := data.get("tools"), list):
            tools = [as_custom(tool) for tool in tools]
            data["tools"] = offered_tools(
                tools,
                context,
                lambda kind: kind in ("function", "custom") or built_in(kind),
                needed=cls is not CountBody,  # they have no tokens here
            )
            if data.get("mcp_servers") and tools:
                del data["mcp_servers"]
                context.ignore("mcp_servers")
        if "stop" in data and "stop_sequences" not in data:
            stops = data.pop("stop")
            data["stop_sequences"] = [stops] if isinstance(stops, str) else stops
        if isinstance(stops := data.get("stop_sequences"), list):
            data["stop_sequences"] = [stop for stop in stops if stop != ""]
        if isinstance(system := data.get("system"), list):
            data["system"] = [known_block(b, "system", context) for b in system]
        if isinstance(messages := data.get("messages"), list):
            refuse_unread(messages, "messages", READABLE)
            data["messages"] = [with_role(message) for message in messages]
        return data

    @property
    def format(self) -> Format:
        """The format of the answer's text. Raises TypeError or ValueError."""
        given = (self.output_config or OutputConfig()).format
        named = given and {"name": "output", **given}
        return as_format(named, "output_config.format")

    @property
    def effort(self) -> str | None:
        """None: the model's own."""
        if self.output_config is None and self.thinking is not None:
            return "low" if self.thinking.type == "disabled" else None
        return (self.output_config or OutputConfig()).effort

    def client_tools(self) -> ClientTools:
        """The tools, with the client's names. Raises TypeError or ValueError."""
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
        """The tools that the model may call. Raises TypeError or ValueError."""
        tools = as_tools(self.client_tools().functions)
        hidden = self.tool_choice is not None and self.tool_choice.type == "none"
        return [] if hidden else tools

    @property
    def begun_answer(self) -> str:
        """The end of the last message, if it's the prefix of an answer; else "".

        As with Anthropic, that is text.
        """
        last = self.messages[-1] if self.messages else None
        ends = last.blocks()[-1:] if isinstance(last, AssistantTurn) else []
        return "".join(block.text for block in ends if isinstance(block, TextBlock))

    def shown(self, dialect: Dialect) -> dict[str, Any]:
        """The conversation as `render` takes it. Raises TypeError or ValueError."""
        tools, called = self.offered(), dict[str, str]()
        system = text_in(self.system or "")
        lead = dialect.lead(system, tools)
        messages = [Message("developer", lead)] if lead else []
        expect(self.messages, "messages", self.messages, "at least one message")
        for number, message in enumerate(self.messages):
            where = f"messages[{number}]"
            messages += shown_turn(message, where, called, dialect)
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
        "stop": Unsupported("use stop_sequences", mapped=True),
        "stream_options": Unsupported("a stream always has the usage", hint=True),
        "user": Unsupported("use metadata", hint=True),
    }

    max_tokens: int = Field(ge=0, le=MAX_SIZE)
    """Thinking included. 0 only reads the conversation, so that the next one is quick.
    """
    stop_sequences: Several[str] | None = None
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


def built_in(kind: str) -> dict[str, Any] | None:
    """The function for a tool of Anthropic's that clients run; None for other tools."""
    return next(
        (t for name, t in BUILT_IN_TOOLS.items() if kind.startswith(name)), None
    )


def with_output(data: dict[str, Any]) -> dict[str, Any]:
    """The body with effort and format in output_config."""
    form, config = data.pop("output_format", None), data.get("output_config", {})
    if not isinstance(config, Mapping):
        return data
    output = dict(config)
    if form is not None:
        output.setdefault("format", form)
    return data | ({"output_config": output} if output else {})


def as_custom(tool: Any) -> Any:
    """A tool in Anthropic's form, also made of a function in OpenAI's."""
    if not isinstance(tool, Mapping):
        return tool
    if tool.get("type", "custom") == "custom":
        schema = tool.get("input_schema") or tool.get("parameters")
        return {**tool, "input_schema": schema or {"type": "object"}}
    if tool["type"] != "function":
        return tool
    fields = {key: value for key, value in flatten_tool(tool).items() if key != "type"}
    return {"input_schema": fields.pop("parameters", None) or {}, **fields}
