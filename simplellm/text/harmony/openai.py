"""Convert OpenAI's chat-completions messages to harmony's and back."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from simplellm.base.config import ParameterError, expect, expect_type, one_of
from simplellm.text.harmony.message import ROLES, Message, ToolCall
from simplellm.text.harmony.schema import Lead, Tool, as_tools, developer_text


def from_openai(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool | Mapping[str, Any]] = (),
    lead: Lead = developer_text,
) -> list[Message]:
    """Harmony messages for OpenAI chat-completions messages.

    "system" and "developer" become developer messages; ``tools``, as Tool or as
    `{"type": "function", "function": {...}}`, are described in the first one, which
    ``lead`` writes. An assistant's "reasoning" (or "reasoning_content") becomes an
    analysis message, its "tool_calls" become calls and its "content" the final answer,
    or commentary beside calls. Raises ValueError or TypeError for what is not such a
    message.
    """
    result: list[Message] = []
    functions = as_tools(tools)
    called: dict[str | None, str] = {}  # the function behind each tool_call_id
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        expect_type(where, message, Mapping, "a dict")
        role = message.get("role")
        one_of(f"{where}.role", role, ROLES)
        text = content_text(message.get("content"), where)
        name: Any = message.get("name")
        if role in ("system", "developer"):
            text = lead(text, functions if number == 0 else ())
            result += [Message("developer", text)] if text else []
        elif role == "user":
            ok = isinstance(name, str | None)
            expect(ok, f"{where}.name", name, "a str", TypeError)
            result.append(Message("user", text, name=name))
        elif role == "assistant":
            result += assistant_messages(message, text, where)
            for call in message.get("tool_calls") or ():
                called[checked_id(call.get("id"), where)] = call["function"]["name"]
        else:
            call_id = checked_id(message.get("tool_call_id"), where)
            name = called.get(call_id, name)
            if name is None:
                ids = [*filter(None, called)]  # a call may have none
                expected = f"the id of a call before it ({ids or 'none'})"
                expect(False, f"{where}.tool_call_id", call_id, expected)
            result.append(result_message(name, text, call_id))
    text = lead(None, functions)
    if text and not (result and result[0].role == "developer"):
        result.insert(0, Message("developer", text))
    return result


def assistant_messages(
    message: Mapping[str, Any], text: str, where: str
) -> list[Message]:
    """An assistant's message in harmony; ``text`` is its content."""
    thought: Any = None
    for name in ("reasoning_content", "reasoning"):
        value = message.get(name)
        ok = isinstance(value, str | None)
        expect(ok, f"{where}.{name}", value, "a str", TypeError)
        thought = value or thought
    calls: Any = message.get("tool_calls")
    ok = isinstance(calls, list | tuple | None)
    expect(ok, f"{where}.tool_calls", calls, "a list", TypeError)
    calls = calls or ()
    messages = []
    if thought:
        messages.append(Message("assistant", thought, channel="analysis"))
    if text or not (thought or calls):
        channel = "commentary" if calls else "final"
        messages.append(Message("assistant", text, channel=channel))
    return messages + [call_message(call, where) for call in calls]


def content_text(content: Any, where: str) -> str:
    """The text of a message's "content": a str, None, or a list of text parts."""
    if isinstance(content, str | None):
        return content or ""
    parts = content if isinstance(content, list | tuple) else [None]
    texts: Any = [
        part.get("text") if isinstance(part, Mapping) else None for part in parts
    ]
    ok = all(isinstance(text, str) for text in texts)
    expected = "a str or a list of text parts"
    expect(ok, f"{where}.content", content, expected, TypeError)
    return "".join(texts)


def checked_id(call_id: Any, where: str) -> str | None:
    """``call_id`` if it can be that of a tool call."""
    ok = isinstance(call_id, str | int | None) and not isinstance(call_id, bool)
    expect(ok, f"a tool call id of {where}", call_id, "a str", TypeError, where)
    return None if call_id is None else str(call_id)


def call_message(call: Mapping[str, Any], where: str) -> Message:
    """The message that makes one of OpenAI's "tool_calls"."""
    function = call.get("function") if isinstance(call, Mapping) else None
    function = function if isinstance(function, Mapping) else {}
    name, arguments = function.get("name"), function.get("arguments")
    ok = isinstance(name, str) and "arguments" in function
    expected = "id and function: name, arguments"
    expect(ok, f"a tool call of {where}", call, expected, param=where)
    if not isinstance(arguments, str):
        try:
            arguments = json.dumps(arguments, ensure_ascii=False)
        except RecursionError:
            wrong = f"arguments of {where} are nested too deep; expected fewer levels"
            raise ParameterError(wrong, where) from None
    return Message(
        "assistant",
        arguments,
        channel="commentary",
        recipient=f"functions.{name}",
        content_type="<|constrain|>json",
        call_id=checked_id(call.get("id"), where),
    )


def result_message(name: str, content: str, call_id: str | None = None) -> Message:
    """The message that brings function ``name``'s result to the assistant."""
    return Message(
        "tool",
        content,
        name=f"functions.{name}",
        channel="commentary",
        recipient="assistant",
        call_id=call_id,
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
