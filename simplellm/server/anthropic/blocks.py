"""The messages of a conversation as Anthropic's clients send them, and their blocks."""

from collections.abc import Mapping
from itertools import groupby
from reprlib import repr as short
from typing import Annotated, Any, Literal

from simplellm.base.config import ParameterError, parse_object
from simplellm.server.http.bodies import (
    Part,
    Several,
    ValidationContext,
    tagged_union,
    text_instead,
    types_of,
)
from simplellm.server.openai.chat_messages import UNKNOWN, as_text, role_of
from simplellm.server.openai.tools import shown_name
from simplellm.text.dialects.dialect import Dialect
from simplellm.text.harmony import Message, result_message
from simplellm.text.harmony.openai import call_message

RAW = "_raw"  # holds what the model wrote as a call's input, if that is no object
MOST_SHOWN = 2000  # characters of a block that nobody here knows
PICTURES = ("image", "document", "container_upload")
DOCUMENTS = ("document", "search_result", "compaction")


class TextBlock(Part):
    labels = frozenset({"cache_control", "citations"})

    type: Literal["text"]
    text: str


class ThinkingBlock(Part):
    """A thought, whatever its signature."""

    labels = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str


class RedactedThinking(Part):
    """A thought that none but its writer can read."""

    labels = frozenset({"data"})

    type: Literal["redacted_thinking"]


class ToolUse(Part):
    """A call of a tool."""

    labels = frozenset({"cache_control", "caller"})

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    @classmethod
    def apply_aliases(
        cls, data: dict[str, Any], context: ValidationContext
    ) -> dict[str, Any]:
        if isinstance(text := data.get("input"), str):  # as a client stored it
            fields = parse_object(text)
            data["input"] = {RAW: text} if fields is None else fields
        return {"input": {}, **data}

    def shown(self) -> Message:
        raw = self.input.get(RAW)
        arguments = raw if isinstance(raw, str) and len(self.input) == 1 else self.input
        function = {"name": shown_name(self.name), "arguments": arguments}
        return call_message({"id": self.id, "function": function}, "messages")


KINDS_OF_ROLE: dict[str, tuple[type[Part], ...]] = {
    "system": (TextBlock,),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinking, ToolUse),
}
Texts = str | Several[Annotated[Part, tagged_union("type", TextBlock)]]


class ToolResult(Part):
    """The result of a tool call."""

    labels = frozenset({"cache_control"})

    type: Literal["tool_result"]
    tool_use_id: str
    name: str | None = None
    content: Texts = ""
    is_error: Any = None

    @classmethod
    def apply_aliases(
        cls, data: dict[str, Any], context: ValidationContext
    ) -> dict[str, Any]:
        """The fields with the content as text; its call may be gone."""
        content = data.get("content", "")
        if isinstance(content, list):
            data["content"] = [known_block(b, "system", context) for b in content]
        elif not isinstance(content, str):
            data["content"] = as_text(content)
        return {**data, "name": UNKNOWN}

    def shown(self, called: Mapping[str, str], where: str) -> Message:
        """The message for the model; ``called`` has the tool's name by call id."""
        id = self.tool_use_id
        if (name := called.get(id, self.name)) is None:
            wrong = f"{where}.tool_use_id is {short(id)}; expected the id of a call"
            wrong = f"{wrong} before it ({short(list(called))})"
            raise ParameterError(wrong, f"{where}.tool_use_id")
        text = text_in(self.content)
        # Harmony has no place for errors.
        return result_message(name, f"Error: {text}" if self.is_error else text, id)


KINDS_OF_ROLE["user"] = (TextBlock, ToolResult)


class InputTurn(Part):
    """A message: text, or the blocks that its role may have."""

    role: str
    content: Any

    @classmethod
    def apply_aliases(
        cls, data: dict[str, Any], context: ValidationContext
    ) -> dict[str, Any]:
        content, role = data.get("content", ""), data["role"]
        if isinstance(content, list):
            content = [known_block(block, role, context) for block in content]
        elif isinstance(content, int | float):
            content = str(content)
        return {**data, "content": content}

    def blocks(self) -> list[Any]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return list(self.content)


class SystemTurn(InputTurn):
    role: Literal["system"]
    content: Texts


class UserTurn(InputTurn):
    role: Literal["user"]
    content: (
        str | Several[Annotated[Part, tagged_union("type", *KINDS_OF_ROLE["user"])]]
    )


class AssistantTurn(InputTurn):
    role: Literal["assistant"]
    content: (
        str
        | Several[Annotated[Part, tagged_union("type", *KINDS_OF_ROLE["assistant"])]]
    )


SomeTurn = Annotated[
    InputTurn, tagged_union("role", SystemTurn, UserTurn, AssistantTurn)
]


def with_role(message: Any) -> Any:
    """A message whose role is one of ours."""
    if not isinstance(message, Mapping):
        return message
    role = role_of(message)
    return {**message, "role": "system" if role == "developer" else role}


def known_block(block: Any, role: str, context: ValidationContext) -> Any:
    """A block that ``role`` may have, with a few words for all others."""
    if isinstance(block, str):
        return {"type": "text", "text": block}
    kind = block.get("type") if isinstance(block, Mapping) else None
    known = {name for one in KINDS_OF_ROLE[role] for name in types_of(one, "type")}
    if not isinstance(kind, str) or kind in known:
        return block
    return {"type": "text", "text": text_of_block(block, kind, context)}


def text_of_block(
    block: Mapping[str, Any], kind: str, context: ValidationContext
) -> str:
    """The text of a block, or a few words in its place."""
    if kind in DOCUMENTS and (text := document_text(block)):
        return text
    if kind == "tool_reference":
        return f"[tool: {str(block.get('tool_name'))[:100]}]"
    context.ignore(f"messages.content.{kind}")
    if kind in PICTURES:
        return text_instead(kind)
    hidden = ("type", "cache_control", "id", "source", "encrypted_content")
    shown = {k: v for k, v in block.items() if k not in hidden}
    return f"[{kind[:50]}: {str(as_text(shown))[:MOST_SHOWN]}]"


def document_text(block: Mapping[str, Any]) -> str:
    """The title and the text of a block that may hold some; "" if it doesn't."""
    source, content = block.get("source"), block.get("content")
    if isinstance(source, Mapping):  # of a document
        is_text = source.get("type") == "text"
        content = source.get("data") if is_text else source.get("content")
    parts = [{"text": content}] if isinstance(content, str) else content
    parts = [part for part in parts or () if isinstance(part, Mapping)]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    if not texts:
        return ""
    title = block.get("title")
    return "\n\n".join([*([title] if isinstance(title, str) else []), *texts])


def text_in(content: Any) -> str:
    """The text of blocks that are text, which are as much apart as paragraphs."""
    if isinstance(content, str):
        return content
    return "\n\n".join(block.text for block in content)


def shown_turn(
    turn: InputTurn, where: str, called: dict[str, str], dialect: Dialect
) -> list[Message]:
    """A message for the model; ``called`` has the tool's name by call id."""
    blocks, messages = turn.blocks(), list[Message]()
    if turn.role == "system":
        return [Message("developer", dialect.lead(text_in(blocks), ()))]
    if turn.role == "user":
        numbered = enumerate(blocks)
        for kind, group in groupby(numbered, key=lambda pair: pair[1].type):
            if kind == "text":
                messages.append(Message("user", text_in([block for _, block in group])))
            else:
                messages += [b.shown(called, f"{where}.content[{n}]") for n, b in group]
        return messages
    calls = any(isinstance(block, ToolUse) for block in blocks)
    for block in blocks:
        match block:
            case TextBlock():
                channel = "commentary" if calls else "final"
                messages.append(Message("assistant", block.text, channel=channel))
            case ThinkingBlock() if block.thinking:
                thought = block.thinking
                messages.append(Message("assistant", thought, channel="analysis"))
            case ToolUse():
                called[block.id] = shown_name(block.name)
                messages.append(block.shown())
    return messages
