"""Tools as clients know them, and the functions that the model sees instead.

The model knows only functions, whose names have no spaces. A function of a namespace
gets the namespace as a prefix; a custom tool, a shell and a patch become functions with
one or more texts as arguments. A call of one goes back as a call of the client's tool,
and calls of the history are translated likewise.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simplellm.base.config import expect, expect_type, parse_object
from simplellm.server.http.bodies import Unsupported, refuse
from simplellm.server.http.response_schemas import TEXT, object_of
from simplellm.text.harmony.openai import function_name


def text_arguments(**described: str) -> dict[str, Any]:
    """The JSON schema of an object whose properties are strings."""
    return object_of(**{n: TEXT | {"description": d} for n, d in described.items()})


# Tools of OpenAI's without parameters of their own, as functions for the model.
SHELL = {
    "description": "Runs a command in bash.",
    "parameters": text_arguments(command="The command."),
}
BUILT_IN: dict[str, dict[str, Any]] = {
    "local_shell": SHELL,
    "shell": SHELL,
    "apply_patch": {
        "description": "Creates, updates or deletes a file.",
        "parameters": text_arguments(
            type="create_file, update_file or delete_file",
            path="Of the file, relative.",
            diff="A unified diff; empty to delete.",
        ),
    },
}
CUSTOM = text_arguments(input="All that the tool is given.")
OPERATIONS = ("create_file", "update_file", "delete_file")
KINDS = ("function", "custom", "namespace", *BUILT_IN)


@dataclass(frozen=True)
class ClientTool:
    """A tool's name for the client; ``kind`` is its type, one of KINDS."""

    kind: str
    name: str
    namespace: str | None = None


def shown_name(name: str, namespace: str | None = None) -> str:
    """A tool's name for the model, without what a harmony header can't hold."""
    return re.sub(r"[\s<]", "_", f"{namespace}__{name}" if namespace else name) or "_"


def flatten_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool, call or tool_choice in the flat form of responses."""
    kind = tool.get("type", "function")
    inner = tool.get(kind) if isinstance(kind, str) else None
    if isinstance(inner, str):
        inner = {"name": inner}  # a choice, as some spell it
    return {**inner, "type": kind} if isinstance(inner, Mapping) else {**tool}


class ClientTools:
    """The tools of one request. Raises as `add` and `as_tools`.

    ``functions`` are what the model sees, as `as_tools` takes them; ``by_name`` has the
    client's tool for each function's name.
    """

    def __init__(self, tools: Sequence[Any] = ()) -> None:
        self.functions: list[dict[str, Any]] = []
        self.by_name: dict[str, ClientTool] = {}
        for number, tool in enumerate(tools):
            self.add(tool, f"tools[{number}]")

    def add_missing(self, tools: Sequence[Any]) -> None:
        """Add those tools of a conversation whose names are new."""
        for tool in tools:
            one = ClientTools([tool])
            for function in one.functions:
                if (name := function["function"]["name"]) not in self.by_name:
                    self.by_name[name] = one.by_name[name]
                    self.functions.append(function)

    def add(self, tool: Any, where: str, namespace: str | None = None) -> None:
        """Add a tool. Raises TypeError, ValueError or APIError."""
        expect_type(where, tool, Mapping, "an object")
        tool = flatten_tool(tool)
        kind = tool.get("type", "function")
        if kind not in KINDS or (namespace and kind not in ("function", "custom")):
            why = f"no {kind!r} runs here; offer what it does as a function"
            refuse(f"{where}.type", Unsupported(why))
        name = kind if kind in BUILT_IN else tool.get("name")
        expect_type(f"{where}.name", name, str, "a string")
        if kind == "namespace":
            inner = tool.get("tools")
            expect_type(f"{where}.tools", inner, list, "a list of tools")
            for number, one in enumerate(inner or ()):
                self.add(one, f"{where}.tools[{number}]", name)
            return
        shown = shown_name(name, namespace)
        function = {**tool, **BUILT_IN.get(kind, {}), "name": shown}
        if kind == "custom":
            function |= {"description": description_of(tool), "parameters": CUSTOM}
        expect(shown not in self.by_name, f"{where}.name", name, "a name of its own")
        self.by_name[shown] = ClientTool(kind, name, namespace)
        self.functions.append({"type": "function", "function": function})

    def choice(self, tool_choice: Any) -> Any:
        """A tool_choice with the model's names of the tools."""
        if not isinstance(tool_choice, Mapping):
            return tool_choice
        tool_choice = flatten_tool(tool_choice)
        if tool_choice.get("type") == "allowed_tools":
            inner = tool_choice.get("tools")
            some = inner if isinstance(inner, list) else []
            names = [self.choice(one) for one in some if isinstance(one, Mapping)]
            return {**tool_choice, "tools": names}
        name, namespace = tool_choice.get("name"), tool_choice.get("namespace")
        if tool_choice.get("type") in BUILT_IN:
            name = tool_choice["type"]
        if not isinstance(name, str) or tool_choice.get("type") not in KINDS:
            return tool_choice
        return {"type": "function", "name": shown_name(name, namespace)}

    def called(self, recipient: str | None) -> ClientTool:
        """The client's tool for the ``recipient`` that the model wrote."""
        word = (recipient or "").removeprefix("functions.")
        name = function_name(word)
        tool = self.by_name.get(word) or self.by_name.get(name)
        return tool or ClientTool("function", name)


def description_of(tool: Mapping[str, Any]) -> str:
    """A custom tool's description, with the grammar of its input if it has one."""
    description, form = tool.get("description") or "", tool.get("format")
    form = flatten_tool(form) if isinstance(form, Mapping) else {}
    if not isinstance(definition := form.get("definition"), str):
        return description
    syntax = form.get("syntax")
    return f"{description}\nThe input fits this {syntax} grammar:\n{definition}".strip()


def text_argument(arguments: str, name: str) -> str:
    """One argument of a call; the whole text if it isn't JSON with such an argument."""
    text = (parse_object(arguments) or {}).get(name)
    return text if isinstance(text, str) else arguments


def call_fields(kind: str, arguments: str) -> dict[str, Any]:
    """The fields of a call's item beside ids and names, by the ``kind`` of its tool."""
    match kind:
        case "custom":
            return {"input": text_argument(arguments, "input")}
        case "local_shell":
            command = ["bash", "-lc", text_argument(arguments, "command")]
            return {"action": {"type": "exec", "command": command, "env": {}}}
        case "shell":
            commands = [text_argument(arguments, "command")]
            return {"action": {"commands": commands}}
        case "apply_patch":
            names = ("type", "path", "diff")
            operation = {name: text_argument(arguments, name) for name in names}
            if operation["type"] not in OPERATIONS:
                operation["type"] = "update_file"
            if operation["type"] == "delete_file":
                del operation["diff"]
            return {"operation": operation}
    return {"arguments": arguments}


def arguments_of_call(kind: str, item: Mapping[str, Any]) -> str:
    """The arguments of a call's item as the model would write them."""
    match kind:
        case "custom":
            arguments: Any = {"input": item["input"]}
        case "local_shell":
            command = item["action"]["command"]
            arguments = {
                "command": command[2]
                if command[:2] == ["bash", "-lc"]
                else " ".join(command)
            }
        case "shell":
            arguments = {"command": "\n".join(item["action"]["commands"])}
        case "apply_patch":
            arguments = item["operation"]
        case _:
            return str(item["arguments"])
    return json.dumps(arguments, ensure_ascii=False)
