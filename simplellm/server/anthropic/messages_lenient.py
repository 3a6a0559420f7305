"""Messages as clients send them, rewritten into what /v1/messages takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from simplellm.server.anthropic.blocks import BLOCKS, built_in
from simplellm.server.http.bodies import Reading, text_instead
from simplellm.server.openai.chat_lenient import (
    ROLES,
    UNKNOWN,
    as_text,
    refuse_alone,
)

THINKING = ("enabled", "adaptive", "disabled")
MOST_SHOWN = 2000  # characters of a block that nobody here knows


def lenient_conversation(data: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """The whole body, also of what is only counted."""
    if isinstance(name := data.get("model"), str) and name not in reading.models:
        del data["model"]  # clients have names of Anthropic's built in
        reading.ignore("model")
    thinking = data.get("thinking")
    if isinstance(thinking, Mapping) and thinking.get("type") not in THINKING:
        data["thinking"] = {**thinking, "type": "adaptive"}
    data = with_output(data)
    if isinstance(tools := data.get("tools"), list):
        data["tools"] = offered_here(tools, reading)
        if data.get("mcp_servers") and tools:
            del data["mcp_servers"]
            reading.ignore("mcp_servers")
    if "stop" in data and "stop_sequences" not in data:
        stops = data.pop("stop")
        data["stop_sequences"] = [stops] if isinstance(stops, str) else stops
    if isinstance(stops := data.get("stop_sequences"), list):
        data["stop_sequences"] = [stop for stop in stops if stop != ""]
    rewriter = BlockRewriter(reading)
    if isinstance(system := data.get("system"), list):
        data["system"] = rewriter.blocks(system, "system", "system")
    if isinstance(messages := data.get("messages"), list):
        data["messages"] = rewriter.messages(messages)
    return data


def with_output(data: dict[str, Any]) -> dict[str, Any]:
    """Effort and format where output_config has them."""
    form, config = data.pop("output_format", None), data.get("output_config", {})
    if not isinstance(config, Mapping):
        return data
    output = dict(config)
    if form is not None:
        output.setdefault("format", form)
    return data | ({"output_config": output} if output else {})


def offered_here(tools: Sequence[Any], reading: Reading) -> list[Any]:
    """The tools without those that Anthropic runs, unless there are no others."""
    kept, left_out = [], []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind != "custom" and built_in(kind) is None:
            left_out.append(kind)
        else:
            kept.append(tool)
    if not kept:
        return [*tools]
    for kind in left_out:
        reading.ignore(f"tools.{kind}")
    return kept


class BlockRewriter:
    """Gives each role the blocks that it may have, and a few words for all others."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.called: set[str] = set()  # the ids of calls so far

    def messages(self, messages: Sequence[Any]) -> list[Any]:
        kept_messages = []
        for number, message in enumerate(messages):
            if isinstance(message, Mapping):
                last = number == len(messages) - 1
                message = self.message(message, f"messages[{number}]", last)
            kept_messages.append(message)
        return kept_messages

    def message(self, given: Mapping[str, Any], where: str, last: bool) -> Any:
        """One message; the ``last`` one is what the user asks now."""
        message, role = dict(given), given.get("role")
        if isinstance(role, str):
            role = ROLES.get(role.lower(), role.lower())
            role = message["role"] = "system" if role == "developer" else role
        content = message.get("content")
        if content is None or isinstance(content, int | float):
            message["content"] = "" if content is None else str(content)
        elif isinstance(content, list) and isinstance(role, str) and role in BLOCKS:
            blocks = self.blocks(content, role, f"{where}.content")
            message["content"] = blocks
            kinds = [kind_of(block) for block in content]
            if kinds and not {*kinds} & {*BLOCKS["user"], *DOCUMENTS, None}:
                refuse_alone(role, last, f"{where}.content", [str(k) for k in kinds])
        return message

    def blocks(self, content: Sequence[Any], role: str, where: str) -> list[Any]:
        """The blocks of a content of ``role``."""
        blocks = []
        for block in content:
            if isinstance(block, str):
                block = {"type": "text", "text": block}
            kind = kind_of(block)
            if kind is None:
                blocks.append(block)
            elif kind == "tool_use" and role == "assistant":
                blocks.append(self.call(block))
            elif kind == "tool_result" and role == "user":
                blocks.append(self.result(block, where))
            elif kind in BLOCKS[role]:
                blocks.append(block)
            else:
                blocks.append({"type": "text", "text": self.text_for(block, kind)})
        return blocks

    def call(self, block: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(id := block.get("id"), str):
            self.called.add(id)
        given = block.get("input")
        return {**block, "input": {} if given is None else given}

    def result(self, block: Mapping[str, Any], where: str) -> dict[str, Any]:
        """What came of a call, as text; its call may be gone."""
        result, content = dict(block), block.get("content")
        id = block.get("tool_use_id")
        if isinstance(id, str) and id not in self.called:
            result["name"] = UNKNOWN
        if isinstance(content, list):
            result["content"] = self.blocks(content, "system", where)
        elif content is not None and not isinstance(content, str):
            result["content"] = as_text(content)
        return result

    def text_for(self, block: Mapping[str, Any], kind: str) -> str:
        """The text of a block, or a few words in its place."""
        if kind in DOCUMENTS and (text := document_text(block)):
            return text
        if kind == "tool_reference":
            return f"[tool: {str(block.get('tool_name'))[:100]}]"
        self.reading.ignore(f"messages.content.{kind}")
        if kind in PICTURES:
            return text_instead(kind)
        hidden = ("type", "cache_control", "id", "source", "encrypted_content")
        fields = {k: v for k, v in block.items() if k not in hidden}
        return f"[{kind[:50]}: {str(as_text(fields))[:MOST_SHOWN]}]"


PICTURES = ("image", "document", "container_upload")
DOCUMENTS = ("document", "search_result", "compaction")


def kind_of(block: Any) -> str | None:
    """The type of a block; None for what is none."""
    if isinstance(block, str):
        return "text"
    kind = block.get("type") if isinstance(block, Mapping) else None
    return kind if isinstance(kind, str) else None


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
