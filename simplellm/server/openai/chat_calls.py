"""A chat's calls as the client knows them: of custom tools, or as "function_call"."""

from typing import Any

from simplellm.api.outputs import ChatChoice
from simplellm.server.openai.deltas import Turn, message_of_choice
from simplellm.server.openai.tools import ClientTool, ClientTools, text_argument
from simplellm.text.harmony import Delta


def called_name(tool: ClientTool, shown: str) -> str:
    """The name of a tool in a chat, where a namespace is part of the name."""
    return tool.name if tool.namespace is None else shown


class ClientTurn:
    """One choice of a streamed chat: a `Turn` whose deltas fit the client's ``tools``.

    The input of a custom tool comes in one delta when the call is over: until then its
    text is JSON. In the ``older`` form a message has one "function_call".
    """

    def __init__(self, tools: ClientTools, *, older: bool) -> None:
        self.turn, self.tools, self.older = Turn(), tools, older
        self.custom: tuple[int, list[str]] | None = None  # the call that is under way

    def push(self, part: Delta) -> dict[str, Any]:
        """The delta that ``part`` adds to the message."""
        delta = self.turn.push(part)
        if "tool_calls" not in delta:
            return delta
        (call,) = delta["tool_calls"]
        ended = []
        if "id" in call:
            ended = self.close().get("tool_calls", [])
            tool = self.tools.called(part.recipient)
            call["function"]["name"] = called_name(tool, call["function"]["name"])
            if tool.kind == "custom":
                self.custom = part.call or 0, []
                custom = {"name": tool.name, "input": ""}
                begun = {"index": call["index"], "id": call["id"], "type": "custom"}
                call = begun | {"custom": custom}
        if self.older:
            return {"function_call": call["function"]}
        if self.custom is not None:
            self.custom[1].append(part.text)
            begins = "custom" in call
            return {"tool_calls": [*ended, call]} if begins else {}
        return {"tool_calls": [*ended, call]}

    def close(self) -> dict[str, Any]:
        """The delta that the end of a call adds to the message."""
        if self.custom is None:
            return {}
        (index, texts), self.custom = self.custom, None
        written = text_argument("".join(texts), "input")
        return {"tool_calls": [{"index": index, "custom": {"input": written}}]}


def client_message(
    choice: ChatChoice, tools: ClientTools, *, older: bool
) -> dict[str, Any]:
    """A whole turn as `message_of_choice` makes it, with the client's tool names."""
    message = message_of_choice(choice)
    calls = message.get("tool_calls", [])
    for call in calls:
        function = call["function"]
        tool = tools.called(function["name"])
        function["name"] = called_name(tool, function["name"])
        if tool.kind == "custom":
            written = text_argument(function["arguments"], "input")
            call |= {"type": "custom", "custom": {"name": tool.name, "input": written}}
            del call["function"]
    if older and calls:
        message["function_call"] = message.pop("tool_calls")[0]["function"]
    return message
