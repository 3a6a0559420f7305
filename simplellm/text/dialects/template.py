"""A model's chat template: messages to the token ids of a prompt.

What a template writes itself may be control tokens, what it copies from messages never
is: `Encoder.mixed` says how they are told apart. A template still finds tags in
messages, as Qwen's looks for `</think>`: see `sandbox.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from jinja2 import nodes

from simplellm.base.config import (
    ConfigError,
    ParameterError,
    expect,
    expect_type,
    one_of,
    parse_object,
    reraise_as,
)
from simplellm.base.files import SmallFiles
from simplellm.text.dialects.encoder import Encoder, reraise_any_as
from simplellm.text.dialects.sandbox import (
    CallArguments,
    compile_template,
    map_text,
    parse_template,
    render_template,
)
from simplellm.text.harmony import EFFORTS, Message, Tool
from simplellm.text.tokenizer import Tokenizer, TokenizerError

TOOL_USE = "tool_use"  # what a template is called that is for chats with tools


@dataclass(frozen=True)
class TemplateSource:
    """The templates of a folder, parsed, by their names; most have one, "default".

    ``path`` is their file and field.
    """

    trees: Mapping[str, nodes.Template]
    path: Path

    @classmethod
    def read(
        cls, files: SmallFiles, config: Mapping[str, Any]
    ) -> "TemplateSource | None":
        """The templates of a checkpoint, if it has any. Raises ConfigError.

        ``config`` is what its tokenizer_config.json says.
        """
        given: Any = config.get("chat_template")
        path = files.path_of("tokenizer_config.json")
        if not given:  # of models that see images, before chat_template.jinja
            name = "chat_template.json"
            with reraise_as(ConfigError, files.path_of(name)):
                given = (files.json(name) or {}).get("chat_template")
            path = files.path_of(name) if given else path
        path = path.with_name(f"{path.name}: chat_template")
        if (own := files.text("chat_template.jinja")) is not None:
            given, path = own, files.path_of("chat_template.jinja")
        if not given:
            return None
        if isinstance(given, str):
            given = [{"name": "default", "template": given}]
            beside = files.text(f"additional_chat_templates/{TOOL_USE}.jinja")
            given += [] if beside is None else [{"name": TOOL_USE, "template": beside}]
        with reraise_any_as(ConfigError, path):
            expected = "text or a list of named ones"
            expect_type("a chat template", given, list, expected)
            trees = {}
            for one in given:
                expect_type("a named chat template", one, Mapping, "an object")
                source = one.get("template")
                expect_type("a named chat template's text", source, str, "text")
                trees[one.get("name")] = parse_template(source)
        return cls(trees, path)

    def texts(self) -> list[str]:
        """The texts that stand in the templates, which name control tokens."""
        parts = list[str]()
        for tree in self.trees.values():
            parts += [node.data for node in tree.find_all(nodes.TemplateData)]
            values = [node.value for node in tree.find_all(nodes.Const)]
            parts += [value for value in values if isinstance(value, str)]
        return parts


@dataclass(frozen=True)
class ChatTemplate:
    """A folder's templates, compiled.

    ``tokens`` are what the special tokens are called (`bos_token` and so on). Those
    templates that write ``tools`` go by these names.
    """

    templates: Mapping[str, CodeType]
    tools: frozenset[str]
    path: str
    tokens: Mapping[str, str]
    encoder: Encoder

    @classmethod
    def of(
        cls, source: TemplateSource, tokens: Mapping[str, str], encoder: Encoder
    ) -> "ChatTemplate":
        """Compile ``source``. Raises ConfigError."""
        tools, templates = set[str](), {}
        with reraise_any_as(ConfigError, source.path):
            for name, tree in source.trees.items():
                if any(node.name == "tools" for node in tree.find_all(nodes.Name)):
                    tools.add(name)
                templates[name] = compile_template(tree, encoder.hidden)
        path = source.path.name  # for clients, who don't know the folder
        return cls(templates, frozenset(tools), path, tokens, encoder)

    def render(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        *,
        reasoning_effort: str | None = None,
        tools: Sequence[Tool] = (),
        current_date: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation, for the model to continue.

        ``variables`` are what else a template looks at, as Qwen's does at
        enable_thinking; of what is here, an effort alone leaves them precedence. Raises
        ValueError for what the template cannot write, or refuses.
        """
        one_of("reasoning_effort", reasoning_effort, (None, *EFFORTS))
        effort = {"reasoning_effort": reasoning_effort} if reasoning_effort else {}
        name = TOOL_USE if tools and TOOL_USE in self.templates else "default"
        one_of("a chat template", name, [*self.templates])
        expected = "none: this model's chat template has no place for tools"
        named = [tool.name for tool in tools]
        expect(name in self.tools or not tools, "tools", named, expected)
        given: dict[str, Any] = {
            **effort,
            **(variables or {}),
            "messages": conversation(messages),
            "tools": [function_of(tool) for tool in tools] or None,
        }
        if current_date is not None:
            given["date_string"] = current_date  # Llama's name for it
        variables = {
            **self.tokens,
            **hide_text(given, self.encoder.hidden),
            "documents": None,
            "add_generation_prompt": True,
        }
        with reraise_any_as(partial(ParameterError, param="messages"), self.path):
            template, hidden = self.templates[name], self.encoder.hidden
            text = render_template(template, variables, hidden)
        return self.encoder.mixed(text)


def hide_text(value: Any, hidden: Mapping[int, int]) -> Any:
    """Plain data with all its text put through ``hidden``. Raises TokenizerError."""

    def hide(text: str) -> str:
        with reraise_as(TokenizerError, "a message"):
            text.encode()  # nothing stands in for a character already
        return text.translate(hidden)

    return map_text(value, hide)


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """What a tokenizer_config.json calls special tokens: `bos_token` and so on."""
    names = {}
    for name, value in config.items():
        if isinstance(value, Mapping):  # with flags
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            names[name] = value
    return names


def special_names(config: Mapping[str, Any]) -> list[str]:
    """The names of all that a tokenizer_config.json calls special."""
    special: list[Any] = [*special_tokens(config).values()]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        some = config.get(key)
        if isinstance(some, list | Mapping):
            special += some.values() if isinstance(some, Mapping) else some
    known = config.get("added_tokens_decoder")
    tokens = known.values() if isinstance(known, Mapping) else ()
    added = [one for one in tokens if isinstance(one, Mapping)]
    special += [one for one in added if one.get("special")]
    names = [one.get("content") if isinstance(one, Mapping) else one for one in special]
    return [name for name in names if isinstance(name, str)]


def function_of(tool: Tool) -> dict[str, Any]:
    """A tool as templates know it, which is as in OpenAI's chats."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates know them, which is as in OpenAI's chats.

    What the assistant thinks, says and calls in a row is one message. Calls have ids of
    nine digits, as Mistral wants them. A result has that of the call whose ``call_id``
    it names; without one, of the first call of its function that has no result yet.
    """
    turns: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's, under way
    waiting: list[tuple[Message, dict[str, Any]]] = []  # calls without a result
    for message in messages:
        text, name = message.content, (message.name or "").removeprefix("functions.")
        if message.role == "assistant":
            thinks = message.channel == "analysis" and not message.recipient
            begun = turn is not None and (turn["content"] or "tool_calls" in turn)
            if turn is None or thinks or (begun and not message.recipient):
                turn = {"role": "assistant", "content": ""}
                turns.append(turn)
            if message.recipient:
                name = message.recipient.removeprefix("functions.")
                # Most templates write arguments as an object, if they are one.
                fields = parse_object(text)
                arguments = text if fields is None else CallArguments(fields, text)
                function = {"name": name, "arguments": arguments}
                number = sum(len(one.get("tool_calls", ())) for one in turns)
                call = {"id": f"{number:09}", "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
                waiting.append((message, call))
            else:
                turn["reasoning_content" if thinks else "content"] = text
            continue
        turn = None
        one = {"role": message.role, "content": text}
        if message.role == "tool":
            own = [pair for pair in waiting if is_result_of(message, pair[0])]
            one |= {"name": name, "tool_call_id": own[0][1]["id"] if own else ""}
            waiting = [pair for pair in waiting if pair not in own[:1]]
        elif message.role == "developer":
            one["role"] = "system"
        turns.append(one)
    return turns


def is_result_of(result: Message, call: Message) -> bool:
    """Whether a tool's message is the result of ``call``."""
    if None not in (result.call_id, call.call_id):
        return result.call_id == call.call_id
    names = [name or "" for name in (result.name, call.recipient)]
    return len({name.removeprefix("functions.") for name in names}) == 1
