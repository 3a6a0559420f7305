"""OpenAI's chat-completions messages: to harmony's and back."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from simplellm.harmony.message import ROLES, Message, Tool
from simplellm.harmony.parse import ToolCall
from simplellm.harmony.render import developer_text
from simplellm.harmony.schema import as_tools


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
            found += assistant_messages(message, text, where)
            for call in message.get("tool_calls") or ():
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


def assistant_messages(
    message: Mapping[str, Any], text: str, where: str
) -> list[Message]:
    """What an assistant's message is in harmony; ``text`` is its content."""
    thought = message.get("reasoning") or message.get("reasoning_content")
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise TypeError(f"{where} has tool_calls {calls!r}; expected a list")
    found = []
    if thought:
        found.append(Message("assistant", thought, channel="analysis"))
    if text or not (thought or calls):
        channel = "commentary" if calls else "final"
        found.append(Message("assistant", text, channel=channel))
    return found + [call_message(call, where) for call in calls]


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
    match call:
        case {"function": {"name": str() as name, "arguments": arguments}}:
            pass
        case _:
            raise ValueError(
                f"{where} has tool call {call!r}; expected id and function: name, "
                "arguments"
            )
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


def to_openai(
    reasoning: str, content: str, calls: Sequence[ToolCall]
) -> dict[str, Any]:
    """An assistant's turn as a message that `from_openai` takes.

    Calls get the ids "call_0", "call_1" and so on, which the results name.
    """
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {
                    "name": function_name(call.name),
                    "arguments": call.arguments,
                },
            }
            for number, call in enumerate(calls)
        ]
    return message


def function_name(name: str) -> str:
    """``name``, which the model wrote, as a header of the next prompt can hold it."""
    return re.sub(r"[^\w.-]", "_", name.removeprefix("functions.")) or "_"
