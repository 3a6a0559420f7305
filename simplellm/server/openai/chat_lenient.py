"""Chats as clients send them, rewritten into what /v1/chat/completions takes."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from simplellm.server.http.bodies import (
    TEXT_ONLY,
    Reading,
    text_instead,
)
from simplellm.server.http.errors import APIError
from simplellm.server.openai.tools import KINDS

ROLES = {"model": "assistant", "human": "user", "ai": "assistant"}
SWITCHES = {"reasoning_effort", "enable_thinking", "thinking"}
CHOICES = {"any": "required"}
TEXT_TYPES = ("text", "input_text", "output_text")
THOUGHT_TYPES = ("thinking", "reasoning")
UNKNOWN = "unknown"  # the function behind a result whose call is gone


def lenient_chat(data: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """The whole body. Raises APIError for a picture that is all a user says."""
    data = with_pairs(with_effort(data, reading), reading)
    if isinstance(tools := data.get("tools"), list):
        data["tools"] = offered_tools(tools, reading)
    if isinstance(form := data.get("response_format"), Mapping):
        data["response_format"] = named_format(form)
    if isinstance(messages := data.get("messages"), list):
        data["messages"] = lenient_messages(messages, reading)
    return data


def with_effort(data: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """What its many fields say of thinking, as the effort of it."""
    reasoning = data.pop("reasoning", None)
    reasoning = reasoning if isinstance(reasoning, Mapping) else {}
    thinking = data.pop("thinking", None)
    if isinstance(thinking, Mapping):
        thinking = thinking.get("type") != "disabled"
    think, switch = data.pop("think", None), data.pop("enable_thinking", None)
    budget = data.pop("thinking_token_budget", None)
    given = data.get("chat_template_kwargs")
    variables = dict(given) if isinstance(given, Mapping) else {}
    efforts = [data.get("reasoning_effort"), reasoning.get("effort")]
    efforts += [think, variables.get("reasoning_effort")]
    effort = next((one for one in efforts if isinstance(one, str)), None)
    switches = [reasoning.get("enabled"), thinking, think, switch]
    switches += [variables.get("enable_thinking"), variables.get("thinking")]
    thinks = next((one for one in switches if isinstance(one, bool)), None)
    if budget == 0 or effort == "none":
        thinks = False
    if effort is None and thinks is False:
        effort = "low"
    if effort is not None:
        data["reasoning_effort"] = effort
    if reading.template:
        if thinks is not None:
            data["chat_template_kwargs"] = {"enable_thinking": thinks, **variables}
    elif isinstance(given, Mapping):
        for name in variables.keys() - SWITCHES:
            reading.ignore(f"chat_template_kwargs.{name}")
        del data["chat_template_kwargs"]
    return data


def with_pairs(data: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """Parameters that mean something only beside another one."""
    for name, other in (("stream_options", "stream"), ("top_logprobs", "logprobs")):
        if name in data and not data.get(other):
            del data[name]
            reading.ignore(name)
    one, two = data.get("max_tokens"), data.get("max_completion_tokens")
    if isinstance(one, int | float) and isinstance(two, int | float):
        data["max_completion_tokens"] = min(one, two)
        del data["max_tokens"]
    data = with_choice(data)
    if not data.get("tools") and not data.get("functions"):
        for name in ("tool_choice", "function_call"):
            if data.get(name) in ("auto", "none"):
                del data[name]
    return data


def with_choice(data: dict[str, Any]) -> dict[str, Any]:
    """The tool_choice as OpenAI has it."""
    choice = data.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") in ("auto", "any", "none"):
        choice = choice["type"]
    if isinstance(choice, str):
        data["tool_choice"] = CHOICES.get(choice, choice)
    return data


def offered_tools(
    tools: Sequence[Any], reading: Reading, where: str = "tools"
) -> list[Any]:
    """The tools without those that others run themselves, unless there are no others.

    An answer without them would be another one where nothing can take their place.
    """
    kept, left_out = [], []
    for tool in tools:
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind not in KINDS:
            left_out.append(f"{where}.{kind}")
        else:
            kept.append(tool)
    if not kept:
        return [*tools]
    for name in left_out:
        reading.ignore(name)
    return kept


def named_format(given: Mapping[str, Any]) -> dict[str, Any]:
    """A response_format whose schema has a name as OpenAI wants it."""
    fields = dict(given)
    if given.get("type") != "json_schema":
        return fields
    inner = given.get("json_schema")
    if isinstance(inner, Mapping) and "schema" in inner:
        return fields | {"json_schema": named_schema(inner)}
    return named_schema(fields) if "schema" in fields else fields


def named_schema(fields: Mapping[str, Any]) -> dict[str, Any]:
    name = fields.get("name")
    if not isinstance(name, str | None):
        return {**fields}
    return {**fields, "name": re.sub(r"[^\w-]", "_", name or "output")[:64]}


def lenient_messages(messages: Sequence[Any], reading: Reading) -> list[Any]:
    result, called = [], set[Any]()
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            result.append(message)
            continue
        last = number == len(messages) - 1
        reader = MessageReader(message, f"messages[{number}]", last, reading)
        result.append(reader.read(called))
    return result


class MessageReader:
    """One message of a chat; the ``last`` one is what the user asks now."""

    def __init__(
        self, message: Mapping[str, Any], where: str, last: bool, reading: Reading
    ) -> None:
        self.message, self.where, self.last = dict(message), where, last
        self.reading = reading

    def read(self, called: set[Any]) -> dict[str, Any]:
        """The message as `from_openai` takes it; ``called`` has the ids of calls."""
        message = self.message
        role = message.get("role")
        if isinstance(role, str):
            role = message["role"] = ROLES.get(role.lower(), role.lower())
        content = message.get("content")
        if isinstance(content, Mapping):
            content = [content] if "type" in content else as_text(content)
        if isinstance(content, int | float) and not isinstance(content, bool):
            content = str(content)
        if isinstance(content, list):
            content = self.parts(content)
        message["content"] = content
        if role == "assistant":
            self.assistant(called)
        if role == "tool" and message.get("name") is None:
            id = message.get("tool_call_id")
            if str(id) not in called:
                message["name"] = UNKNOWN
        if isinstance(name := message.get("name"), str | int):
            message["name"] = re.sub(r"[\s<]+", "_", str(name)) or None
        return message

    def parts(self, content: list[Any]) -> Any:
        """The parts of a content as texts."""
        role = self.message.get("role")
        if role == "tool" and not all(map(is_part, content)):
            return as_text(content)  # a result that is a list
        texts, others = [], []
        for part in content:
            if isinstance(part, str):
                part = {"type": "text", "text": part}
            kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
            if kind == "refusal":
                texts.append({"type": "text", "text": part.get("refusal")})
            elif kind in THOUGHT_TYPES and role == "assistant":
                thought = part.get("thinking", part.get("text"))
                self.message.setdefault("reasoning_content", thought)
            elif kind in TEXT_TYPES:
                texts.append(part)
            else:
                others.append(str(kind))
                self.reading.ignore(f"{self.where}.content.{kind}"[:100])
                texts.append({"type": "text", "text": text_instead(str(kind)[:50])})
        if others and len(others) == len(content):
            refuse_alone(role, self.last, f"{self.where}.content", others)
        return texts

    def assistant(self, called: set[Any]) -> None:
        """What an assistant's message has beside its content."""
        message = self.message
        if not message.get("content") and isinstance(message.get("refusal"), str):
            message["content"] = message["refusal"]
        for name in ("reasoning", "reasoning_content"):
            if isinstance(given := message.get(name), Mapping):
                message[name] = given.get("content", given.get("text"))
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            return
        message["tool_calls"] = [with_arguments(call) for call in calls]
        for call in calls:
            id = call.get("id") if isinstance(call, Mapping) else None
            if isinstance(id, str | int):
                called.add(str(id))


def as_text(value: Any) -> Any:
    """Data as JSON; itself if it is nested too deep for that."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return value


def is_part(value: Any) -> bool:
    """Whether a content can hold ``value``: what has no type is data."""
    return isinstance(value, str) or (isinstance(value, Mapping) and "type" in value)


def with_arguments(call: Any) -> Any:
    """A call of a function, which may have none."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or function.get("arguments"):
        return call
    return {**call, "function": {**function, "arguments": "{}"}}


def refuse_alone(role: Any, last: bool, where: str, kinds: Sequence[str]) -> None:
    """Raise APIError if all that a user asks is something else than text."""
    if role == "user" and last:
        message = f"{where} has {kinds[0][:50]} and no text; {TEXT_ONLY}"
        raise APIError(400, message, param=where, code="unsupported_content")
