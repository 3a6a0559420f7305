"""Harmony, the message format of gpt-oss: render conversations, parse replies.

A message is `<|start|>HEADER<|message|>CONTENT<|end|>`; a header names the author, a
channel, a recipient and a content type. Messages are rendered as openai-harmony 0.0.8
does; which reasoning is left out follows https://github.com/openai/harmony,
docs/format.md. The parser is lenient.
"""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simplellm.tokenizer import Tokenizer, TokenizerError

ROLES = ("system", "developer", "user", "assistant", "tool")
CHANNELS = ("analysis", "commentary", "final")
EFFORTS = ("low", "medium", "high")
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|endoftext|>")
CONTROLS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", *ENDS)
IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    ``role`` is one of ROLES; a tool's ``name`` stands in its place in the header.
    ``content`` is the text as the model reads it. An assistant's message with a
    ``recipient`` is a call, "functions.calculator" for the function `calculator`; its
    ``content_type`` is "<|constrain|>json". A parsed message may hold whatever names
    the model wrote; ``channel`` is None if it wrote none.
    """

    role: str
    content: str
    name: str | None = None
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None


@dataclass(frozen=True)
class Tool:
    """A function the model may call; ``parameters`` is a JSON schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True)
class ToolCall:
    """A call the model wrote; ``arguments`` is its text, which need not be JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """New text of the message being written.

    ``call`` is None outside calls. A call begins with the first delta of its number,
    whose text may be empty.
    """

    channel: str | None
    recipient: str | None
    text: str
    call: int | None = None  # the reply's first call is 0


def system_text(
    reasoning_effort: str = "medium",
    *,
    tools: bool = False,
    model_identity: str = IDENTITY,
    knowledge_cutoff: str = "2024-06",
    current_date: str | None = None,
) -> str:
    """The system message; ``tools`` says whether functions are offered.

    ``current_date`` is written as given (openai-harmony: "2025-06-28"); None leaves
    its line out. Raises ValueError for an unknown effort.
    """
    if reasoning_effort not in EFFORTS:
        raise ValueError(
            f"reasoning_effort {reasoning_effort!r}; expected one of {EFFORTS}"
        )
    about = [model_identity, f"Knowledge cutoff: {knowledge_cutoff}"]
    if current_date is not None:
        about.append(f"Current date: {current_date}")
    channels = [
        f"# Valid channels: {', '.join(CHANNELS)}. "
        "Channel must be included for every message."
    ]
    if tools:
        channels.append(
            "Calls to these tools must go to the commentary channel: 'functions'."
        )
    effort = f"Reasoning: {reasoning_effort}"
    return "\n\n".join(["\n".join(about), effort, "\n".join(channels)])


def developer_text(instructions: str | None, tools: Sequence[Tool] = ()) -> str:
    """The developer message: what others call the system prompt, and the functions."""
    sections = ["# Instructions", instructions] if instructions else []
    if tools:
        functions = "\n".join(map(function_type, tools))
        sections += [
            "# Tools",
            "## functions",
            "namespace functions {",
            f"{functions}\n}} // namespace functions",
        ]
    return "\n\n".join(sections)


def function_type(tool: Tool) -> str:
    """The TypeScript declaration of a function under its description's lines."""
    lines = tool.description.removesuffix("\n").split("\n") if tool.description else []
    comments = "".join(f"// {line.removesuffix(chr(13))}\n" for line in lines)
    try:
        arguments = "" if tool.parameters is None else f"_: {type_of(tool.parameters)}"
    except RecursionError:
        raise ValueError(
            f"the schema of {tool.name!r} is nested too deep; expected fewer levels"
        ) from None
    return f"{comments}type {tool.name} = ({arguments}) => any;\n"


def type_of(schema: Any, indent: str = "") -> str:
    """The TypeScript type for a JSON schema, spaced exactly as gpt-oss learned it."""
    match schema:
        case {"oneOf": [*variants]}:
            return "".join(
                f"\n{indent} | {variant_of(variant, indent, variant, bare=False)}"
                for variant in variants
            )
        case {"type": [str(), *_] as names}:
            return " | ".join("number" if n == "integer" else str(n) for n in names)
        case {"type": "object"}:
            about = f"{indent}// {schema['description']}\n" if has(schema) else ""
            required = schema.get("required") or ()
            properties = "".join(
                property_of(name if name in required else f"{name}?", value, indent)
                for name, value in (schema.get("properties") or {}).items()
            )
            return f"{about}{{\n{properties}{indent}}}"
        case {"type": "string", "enum": [*values]} if values:
            names = [f'"{value}"' for value in values if isinstance(value, str)]
            return " | ".join(names) or "string"
        case {"type": "array", "items": items}:
            return f"{type_of(items, indent)}[]"
        case {"type": "array"}:
            return "Array<any>"
        case {"type": "integer" | "number"}:
            return "number"
        case {"type": "string" | "boolean" as name}:
            return name
    return "any"


def property_of(name: str, schema: Any, indent: str) -> str:
    """The lines of one property: comments, name, type and default."""
    schema = schema if isinstance(schema, dict) else {}
    variants = schema.get("oneOf")
    lines = [f"// {schema['title']}", "//"] if has(schema, "title") else []
    about = [f"// {schema['description']}"] if has(schema) else []
    examples = [f'// - "{e}"' for e in schema.get("examples", ()) if isinstance(e, str)]
    examples = ["// Examples:", *examples] if schema.get("examples") else []
    default = [f"// default: {default_of(schema)}"] if "default" in schema else []
    if not isinstance(variants, list):
        lines += about + examples
        value = nullable_of(schema, indent + "    ")
        lines.append(" ".join([f"{name}: {value},", *default]))
        return "".join(f"{indent}{line}\n" for line in lines)
    # A description that the first variant repeats is written there, and only there.
    if variants and has(variants[0]) and has(schema):
        same = variants[0]["description"] == schema["description"]
        about = [] if same else about
    lines += examples + about + default + [f"{name}:"]
    for number, variant in enumerate(variants):
        known = {} if number == 0 and about else variant
        if has(schema) and has(known) and known["description"] == schema["description"]:
            known = {}
        lines.append(f" | {variant_of(variant, indent, known)}")
    return "".join(f"{indent}{line}\n" for line in [*lines, ","])


def variant_of(
    variant: Any, indent: str, described: Mapping[str, Any], *, bare: bool = True
) -> str:
    """One variant of a oneOf, with the description of ``described`` behind it."""
    variant = variant if isinstance(variant, dict) else {}
    notes = [described["description"]] if has(described) else []
    if "default" in variant:
        notes.append(f"default: {default_of(variant, bare=bare)}")
    comment = f" // {' '.join(notes)}" if notes else ""
    return nullable_of(variant, indent + "   ") + comment


def nullable_of(schema: Mapping[str, Any], indent: str) -> str:
    """The type for a schema that may say `"nullable": true`."""
    value = type_of(schema, indent)
    nullable = schema.get("nullable") is True and "null" not in value
    return f"{value} | null" if nullable else value


def default_of(schema: Mapping[str, Any], *, bare: bool = True) -> str:
    """A schema's default as JSON; a string is not escaped, an enum's is ``bare``."""
    value = schema["default"]
    enum = bool(schema.get("enum"))
    if isinstance(value, str) and not enum:
        return f'"{value}"'
    if isinstance(value, str) and bare:
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def has(schema: Any, key: str = "description") -> bool:
    """Whether a schema has a text under ``key``."""
    return isinstance(schema, dict) and isinstance(schema.get(key), str)


def from_openai(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool | Mapping[str, Any]] = (),
) -> list[Message]:
    """Harmony messages for OpenAI chat-completions messages.

    "system" and "developer" become developer messages; ``tools``, as Tool or as
    `{"type": "function", "function": {...}}`, are described in the first one. An
    assistant's "reasoning" (or "reasoning_content") becomes an analysis message, its
    "tool_calls" become calls and its "content" the final answer, or commentary beside
    calls. Raises ValueError or TypeError for what is not such a message.
    """
    found: list[Message] = []
    functions = as_tools(tools)
    called: dict[Any, str] = {}  # the function behind each tool_call_id
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise TypeError(f"{where} is {type(message).__name__}; expected a dict")
        role = message.get("role")
        text = content_text(message.get("content"), where)
        if role in ("system", "developer"):
            text = developer_text(text, functions if number == 0 else ())
            found += [Message("developer", text)] if text else []
        elif role == "user":
            name = message.get("name")
            if not isinstance(name, str | None):
                raise TypeError(f"{where} has name {name!r}; expected a str")
            found.append(Message("user", text, name=name))
        elif role == "assistant":
            thought = message.get("reasoning") or message.get("reasoning_content")
            calls = message.get("tool_calls") or ()
            if not isinstance(calls, list | tuple):
                raise TypeError(f"{where} has tool_calls {calls!r}; expected a list")
            if thought:
                found.append(Message("assistant", thought, channel="analysis"))
            if text or not (thought or calls):
                channel = "commentary" if calls else "final"
                found.append(Message("assistant", text, channel=channel))
            for call in calls:
                found.append(call_message(call, where))
                called[checked_id(call.get("id"), where)] = call["function"]["name"]
        elif role == "tool":
            call_id = checked_id(message.get("tool_call_id"), where)
            name = called.get(call_id, message.get("name"))
            if name is None:
                raise ValueError(
                    f"{where} answers tool call {call_id!r}; expected the id of a call "
                    f"before it ({list(called) or 'there is none'})"
                )
            found.append(result_message(name, text))
        else:
            raise ValueError(f"{where} has role {role!r}; expected one of {ROLES}")
    if functions and not (found and found[0].role == "developer"):
        found.insert(0, Message("developer", developer_text(None, functions)))
    return found


def as_tools(tools: Sequence[Tool | Mapping[str, Any]]) -> list[Tool]:
    """``tools`` with OpenAI's dicts turned into Tool."""
    if not isinstance(tools, list | tuple):
        raise TypeError(f"tools is {tools!r}; expected a list")
    found = []
    for number, tool in enumerate(tools):
        if isinstance(tool, Tool):
            found.append(tool)
            continue
        try:
            function = tool["function"]
            name, about = function["name"], function.get("description") or ""
            found.append(Tool(name, about, function.get("parameters")))
            function_type(found[-1])  # its schema can be written
        except (AttributeError, KeyError, TypeError):
            raise ValueError(
                f"tools[{number}] is {tool!r}; expected a dict with "
                "function: name, description, parameters"
            ) from None
    return found


def content_text(content: Any, where: str) -> str:
    """The text of a message's "content": a str, None, or a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    try:
        return "".join(part["text"] for part in content)
    except (KeyError, TypeError):
        raise TypeError(
            f"{where} has content {content!r}; expected a str or a list of text parts"
        ) from None


def checked_id(call_id: Any, where: str) -> str | int | None:
    """``call_id`` if it can be that of a tool call."""
    if not isinstance(call_id, str | int | None):
        raise TypeError(f"{where} has tool call id {call_id!r}; expected a str")
    return call_id


def call_message(call: Mapping[str, Any], where: str) -> Message:
    """The message that makes one of OpenAI's "tool_calls"."""
    try:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
    except (KeyError, TypeError):
        raise ValueError(
            f"{where} has tool call {call!r}; expected id and function: name, arguments"
        ) from None
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Message(
        "assistant",
        arguments,
        channel="commentary",
        recipient=f"functions.{name}",
        content_type="<|constrain|>json",
    )


def result_message(name: str, content: str) -> Message:
    """The message that brings function ``name``'s result to the assistant."""
    return Message(
        "tool",
        content,
        name=f"functions.{name}",
        channel="commentary",
        recipient="assistant",
    )


def render(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    reasoning_effort: str = "medium",
    tools: Sequence[Tool | Mapping[str, Any]] = (),
    current_date: str | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """The token ids of a conversation, for the model to continue.

    A system message goes in front if there is none. ``tools`` are the functions
    offered; a developer message that is there must already describe them (as
    `from_openai` and `developer_text` do), else one is added. Analysis is left out
    where a final answer follows it. All messages end with `<|end|>`, calls with
    `<|call|>`.

    Without ``add_generation_prompt`` the ids are a finished conversation, as for
    training: a last final answer keeps its analysis and ends with `<|return|>`.

    Raises ValueError for unknown roles or channels and for names with spaces or "<",
    TypeError and TokenizerError as `Tokenizer.encode`.
    """
    control = controls(tokenizer)
    messages = list(messages)
    functions = as_tools(tools)
    if functions and not any(message.role == "developer" for message in messages):
        front = 1 if messages and messages[0].role == "system" else 0
        text = developer_text(None, functions)
        messages.insert(front, Message("developer", text))
    offered = any("namespace functions {" in m.content for m in developers(messages))
    if functions and not offered:
        raise ValueError(
            "the developer message does not describe the tools; expected its content "
            "from developer_text(instructions, tools)"
        )
    if not messages or messages[0].role != "system":
        text = system_text(reasoning_effort, tools=offered, current_date=current_date)
        messages.insert(0, Message("system", text))
    finals = [i for i, message in enumerate(messages) if message.channel == "final"]
    finished = bool(finals) and finals[-1] == len(messages) - 1
    if finished and not add_generation_prompt:
        finals.pop()
    ids: list[int] = []
    for number, message in enumerate(messages):
        if message.channel == "analysis" and finals and number < finals[-1]:
            continue
        ids += render_message(message, tokenizer)
    if add_generation_prompt:
        return [*ids, control["<|start|>"], *tokenizer.encode("assistant")]
    if finished:
        ids[-1] = control["<|return|>"]
    return ids


def render_message(message: Message, tokenizer: Tokenizer) -> list[int]:
    """The token ids of one message, from `<|start|>` to `<|end|>` or `<|call|>`."""
    check_message(message)
    control = controls(tokenizer)
    author = message.name if message.role == "tool" else message.role
    if message.name and message.role != "tool":
        author = f"{message.role}:{message.name}"
    ids = [control["<|start|>"], *tokenizer.encode(author or "")]
    if message.recipient:
        ids += tokenizer.encode(f" to={message.recipient}")
    if message.channel:
        ids += [control["<|channel|>"], *tokenizer.encode(message.channel)]
    if message.content_type:
        name = message.content_type.removeprefix("<|constrain|>")
        if name == message.content_type:
            ids += tokenizer.encode(f" {name}")
        else:
            ids += [*tokenizer.encode(" "), control["<|constrain|>"]]
            ids += tokenizer.encode(name)
    ids += [control["<|message|>"], *tokenizer.encode(message.content)]
    call = message.role == "assistant" and message.recipient
    return [*ids, control["<|call|>" if call else "<|end|>"]]


def check_message(message: Message) -> None:
    """Raise ValueError if a header cannot be written for ``message``."""
    if message.role not in ROLES:
        raise ValueError(f"role {message.role!r}; expected one of {ROLES}")
    if message.channel is not None and message.channel not in CHANNELS:
        raise ValueError(f"channel {message.channel!r}; expected one of {CHANNELS}")
    if message.role == "tool" and not message.name:
        raise ValueError("tool message without a name; expected 'functions.NAME'")
    content_type = (message.content_type or "").removeprefix("<|constrain|>")
    for word in (message.name, message.recipient, content_type):
        if word and not re.fullmatch(r"[^\s<]+", word):
            raise ValueError(f"{word!r} in a header; expected no spaces and no '<'")


def developers(messages: Iterable[Message]) -> list[Message]:
    """The developer messages among ``messages``."""
    return [message for message in messages if message.role == "developer"]


def controls(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of harmony's control tokens; TokenizerError if one is missing."""
    if missing := [name for name in CONTROLS if name not in tokenizer.special]:
        raise TokenizerError(
            f"the tokenizer has no {missing[0]}; expected harmony's control tokens"
        )
    return {name: tokenizer.special[name] for name in CONTROLS}


class HarmonyParser:
    """Parses what the model writes behind `<|start|>assistant`, token by token.

    `push` returns the text that a token adds, complete characters only, and says where
    a call begins; `messages` holds the messages that have ended. Whatever the ids are,
    nothing is raised:

    - a header is read word by word, and words that mean nothing are passed over;
    - a header that never reaches `<|message|>` gives its remaining text as content;
    - `<|start|>` or `<|channel|>` within a content begins the next message;
    - other control tokens out of place, and reserved ids, are passed over.

    The deltas' texts add up to the messages' contents.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.messages: list[Message] = []
        self._tokenizer = tokenizer
        self._control = {id: name for name, id in controls(tokenizer).items()}
        self._message: Message | None = None  # None while in a header
        self._num_calls = 0
        self._text: list[str] = []
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # What a header holds: each marker with the bytes that follow it.
        self._header: list[tuple[str, bytearray]] = [("", bytearray())]

    def push(self, token_id: int) -> list[Delta]:
        """Take one token; what it adds, at most one delta."""
        name = self._control.get(token_id)
        if name is None:
            if self._tokenizer.is_special(token_id):
                return []
            token = self._tokenizer.token_bytes(token_id)
            if self._message is not None:
                return self._add(self._utf8.decode(token))
            self._header[-1][1].extend(token)
        elif name in ENDS:
            return self._end()
        elif name == "<|start|>":
            deltas = self._end()
            self._header = [(name, bytearray())]
            return deltas
        elif name == "<|channel|>" and self._message is not None:
            deltas = self._end()
            self._header.append((name, bytearray()))
            return deltas
        elif self._message is None:
            if name == "<|message|>":
                self._message, _ = read_header(self._header, complete=True)
                return self._add("", begins=True)
            self._header.append((name, bytearray()))
        return []

    def finish(self) -> list[Delta]:
        """The model has stopped: end the message that is under way, if any."""
        return self._end()

    def _add(self, text: str, *, begins: bool = False) -> list[Delta]:
        message = self._message
        if message is None:
            return []
        call = None
        if message.role == "assistant" and message.recipient:
            self._num_calls += begins
            call = self._num_calls - 1
        if not text and (call is None or not begins):
            return []
        self._text.append(text)
        return [Delta(message.channel, message.recipient, text, call)]

    def _end(self) -> list[Delta]:
        if self._message is not None:
            deltas = self._add(self._utf8.decode(b"", final=True))
        else:
            message, rest = read_header(self._header, complete=False)
            self._message = message if rest.strip() else None
            deltas = self._add(rest, begins=True)
        if self._message is not None:
            content = "".join(self._text)
            self.messages.append(replace(self._message, content=content))
        self._message = None
        self._text = []
        self._header = [("", bytearray())]
        return deltas


def read_header(
    header: Sequence[tuple[str, bytes | bytearray]], *, complete: bool
) -> tuple[Message, str]:
    """The message that a header announces, and the text in it that is content.

    ``header`` holds each marker with the bytes behind it; the first marker is "" where
    the assistant was announced by the prompt. Only a header that never reached
    `<|message|>` (not ``complete``) can hold content.
    """
    message = Message("assistant", "")
    if not complete and len(header) == 1 and not header[0][0]:
        return message, header[0][1].decode(errors="replace")
    rest = ""
    for marker, data in header:
        text = data.decode(errors="replace")
        for number, match in enumerate(re.finditer(r"\S+", text)):
            word = match[0]
            if word.startswith("to="):
                message = replace(message, recipient=word.removeprefix("to="))
            elif number == 0 and marker == "<|start|>":
                role, _, name = word.partition(":")
                if role not in ROLES:  # a tool goes by its name
                    role, name = "tool", word
                message = replace(message, role=role, name=name or None)
            elif number == 0 and marker == "<|channel|>":
                message = replace(message, channel=word)
            elif number == 0 and marker == "<|constrain|>":
                message = replace(message, content_type=marker + word)
            elif word.startswith("functions."):
                message = replace(message, recipient=word)
            elif not complete and (marker or word != "assistant"):
                rest += text[match.start() :]
                break
            elif marker == "<|channel|>" and message.content_type is None:
                message = replace(message, content_type=word)
    return message, rest


def parse(token_ids: Iterable[int], tokenizer: Tokenizer) -> list[Message]:
    """The messages in ``token_ids``: a reply of the model, or a whole conversation."""
    parser = HarmonyParser(tokenizer)
    for token_id in token_ids:
        parser.push(token_id)
    parser.finish()
    return parser.messages


def tool_calls(messages: Iterable[Message]) -> list[ToolCall]:
    """The function calls among the assistant's messages."""
    return [
        ToolCall(message.recipient.removeprefix("functions."), message.content)
        for message in messages
        if message.role == "assistant" and message.recipient
    ]
