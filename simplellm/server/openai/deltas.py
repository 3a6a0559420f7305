"""Parts of a turn as the deltas of OpenAI's chats. Data in, data out."""

import uuid
from typing import Any

from simplellm.api.outputs import ChatChoice, is_reasoning
from simplellm.text.harmony import Delta
from simplellm.text.harmony.openai import function_name


def new_call_id() -> str:
    """A name for a tool call, which its result will go by."""
    return f"call_{uuid.uuid4().hex[:24]}"


class Turn:
    """One choice of a streamed chat: what each part adds to the message.

    Reasoning, content and each call's arguments add up to those of
    `message_of_choice`. A call begins with its id and name.
    """

    def __init__(self) -> None:
        self.calls = 0  # that have begun

    def push(self, part: Delta) -> dict[str, Any]:
        """What ``part`` adds; nothing if it only holds tokens without text."""
        if part.call is None:
            if not part.text:
                return {}
            return {"reasoning" if is_reasoning(part) else "content": part.text}
        call: dict[str, Any] = {
            "index": part.call,
            "function": {"arguments": part.text},
        }
        if part.call >= self.calls:
            self.calls = part.call + 1
            name = (part.recipient or "").removeprefix("functions.")
            call |= {"id": new_call_id(), "type": "function"}
            call["function"] = {"name": function_name(name), "arguments": part.text}
        elif not part.text:
            return {}
        return {"tool_calls": [call]}


def message_of_choice(choice: ChatChoice) -> dict[str, Any]:
    """A whole turn as OpenAI's message. Only one with calls may lack content."""
    message = choice.message() | {"refusal": None}
    for call in message.get("tool_calls", ()):
        call["id"] = new_call_id()
    if not choice.content and choice.tool_calls:
        message["content"] = None
    return message
