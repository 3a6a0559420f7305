"""The body of /v1/chat/completions: what a client may ask for."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Self

import orjson
from pydantic import Field, model_validator

from simplellm.base.config import MAX_SIZE, expect
from simplellm.server.http.bodies import (
    NOT_HERE,
    SHARED_UNSUPPORTED,
    Effort,
    LabeledBody,
    ResponseFormat,
    Several,
    Unsupported,
    ValidationContext,
    refuse,
)
from simplellm.server.openai.chat_messages import (
    BEGUN,
    TEXT_TYPES,
    ChatMessage,
    Tools,
    as_list,
    as_text,
    from_blocks,
    refuse_unread,
    role_of,
)
from simplellm.server.openai.tools import KINDS

SWITCHES = {"reasoning_effort", "enable_thinking", "thinking"}
CHOICES = {"any": "required"}
MODES = ("auto", "none", "required", *CHOICES)
NO_TEMPLATES = "a model's chats have one format, its own"


class ChatBody(LabeledBody):
    """What /v1/chat/completions takes."""

    unsupported: ClassVar = SHARED_UNSUPPORTED | {
        "modalities": Unsupported("it writes text only", (["text"],)),
        "audio": Unsupported("it writes text only"),
        "prediction": Unsupported(NOT_HERE, hint=True),
        "verbosity": Unsupported(NOT_HERE, ("medium",), hint=True),
        "web_search_options": Unsupported(NOT_HERE, hint=True),
        "store": Unsupported("nothing is stored", (False,), hint=True),
        "service_tier": Unsupported(NOT_HERE, ("auto", "default"), hint=True),
        "chat_template": Unsupported(NO_TEMPLATES),
        "add_generation_prompt": Unsupported(NO_TEMPLATES, (True,)),
        "documents": Unsupported("put them into a message", ([],)),
        "echo": Unsupported(NOT_HERE, (False,)),
        "add_special_tokens": Unsupported(NO_TEMPLATES, (False,), hint=True),
        "include_reasoning": Unsupported(
            "the answer always has it", (True,), hint=True
        ),
    }

    messages: Several[ChatMessage]
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    """None: "auto" where there are tools."""
    functions: Several[dict[str, Any]] | None = None
    """OpenAI's older name for tools. Answers have a function_call then."""
    function_call: str | dict[str, Any] | None = None
    """Their tool_choice."""
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_SIZE)
    """Reasoning included; None: as many as there is room for."""
    logprobs: bool = False
    return_tokens_as_token_ids: bool = False
    """As vLLM has it: log-probabilities name tokens by their ids."""
    continue_final_message: bool = False
    """The model goes on with the last message, the beginning of its own answer."""

    @classmethod
    def apply_aliases(
        cls, data: dict[str, Any], context: ValidationContext
    ) -> dict[str, Any]:
        if data.get("messages") in (None, []) and "input" in data:
            data = from_response(data)
        if "messages" not in data and "prompt" in data:
            refuse("prompt", Unsupported("it is for /v1/completions"))
        data = with_format(data)
        data = with_effort(super().apply_aliases(data, context), context)
        data = with_pairs(data, context)
        if isinstance(tools := data.get("tools"), list):
            data["tools"] = offered_tools(tools, context)
        messages = as_list(data.get("messages"))
        if isinstance(messages, list):
            messages = [one for message in messages for one in from_blocks(message)]
            data["messages"] = messages
            data = with_begun_answer(data)
            refuse_unread(messages, "messages", TEXT_TYPES)
        return data

    @model_validator(mode="after")
    def check(self) -> Self:
        alone = self.logprobs or not self.top_logprobs
        expect(alone, "top_logprobs", self.top_logprobs, "0 without logprobs")
        most = self.max_completion_tokens
        twice = most is not None and "max_tokens" in self.sampling
        expect(not twice, "max_completion_tokens", most, "none beside max_tokens")
        choice = self.tool_choice
        ok = choice in (None, "none") or self.tools is not None
        expect(ok, "tool_choice", choice, "none without tools")
        alone = self.tools is None or self.functions is None
        expect(alone, "functions", self.functions, "none beside tools")
        last = self.messages[-1] if self.messages else None
        begun = last is not None and last.begins_answer
        expected = "false unless the last message is a text of the assistant's"
        ok = begun or not self.continue_final_message
        expect(ok, "continue_final_message", True, expected)
        choice = self.function_call
        ok = choice in (None, "none") or self.functions is not None
        expect(ok, "function_call", choice, "none without functions")
        return self

    @property
    def compiles(self) -> bool:
        options = self.response_format or self.tools or self.functions
        return super().compiles or bool(options)


def with_begun_answer(data: dict[str, Any]) -> dict[str, Any]:
    """The body with continue_final_message, for which others label the message."""
    last = data["messages"][-1] if data["messages"] else None
    if isinstance(last, Mapping) and role_of(last) == "assistant":
        labels = [last.get(label) for label in BEGUN]
        if True in labels:
            data.setdefault("continue_final_message", True)
    if (
        data.get("continue_final_message")
        and data.get("add_generation_prompt") is False
    ):
        del data["add_generation_prompt"]
    return data


def with_effort(data: dict[str, Any], context: ValidationContext) -> dict[str, Any]:
    """The body with one reasoning_effort, whichever field a client has set for it.

    Models with a chat template of their own get enable_thinking, too.
    """
    reasoning = data.pop("reasoning", None)
    if not isinstance(reasoning, Mapping):  # which may stand there itself
        reasoning = {"effort": reasoning, "enabled": reasoning}
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
    if context.template:
        if thinks is not None:
            data["chat_template_kwargs"] = {"enable_thinking": thinks, **variables}
    elif isinstance(given, Mapping):
        for name in variables.keys() - SWITCHES:
            context.ignore(f"chat_template_kwargs.{name}")
        del data["chat_template_kwargs"]
    return data


def with_pairs(data: dict[str, Any], context: ValidationContext) -> dict[str, Any]:
    """The body without parameters that mean something only beside another one.

    max_completion_tokens and max_tokens become one limit, the smaller.
    """
    count = data.get("logprobs")
    if isinstance(count, int) and not isinstance(count, bool):
        data["logprobs"] = count > 0  # as completions have it
        if count > 0:
            data.setdefault("top_logprobs", count)
    for name, other in (("stream_options", "stream"), ("top_logprobs", "logprobs")):
        if name in data and not data.get(other):
            del data[name]
            context.ignore(name)
    one, two = data.get("max_tokens"), data.get("max_completion_tokens")
    if isinstance(one, int | float) and isinstance(two, int | float):
        data["max_completion_tokens"] = min(one, two)
        del data["max_tokens"]
    for name in ("tools", "functions"):
        if data.get(name) in ([], {}):
            del data[name]
    data = with_choice(data)
    if not data.get("tools") and not data.get("functions"):
        for name in ("tool_choice", "function_call"):
            if data.get(name) in ("auto", "none"):
                del data[name]
    return data


def with_choice(data: dict[str, Any]) -> dict[str, Any]:
    """The body with OpenAI's tool_choice; other interfaces write it otherwise."""
    choice = data.get("tool_choice")
    if isinstance(choice, Mapping):
        kind = choice.get("type", "tool")
        if kind in MODES:
            choice = kind
        elif kind == "tool":  # Anthropic's
            data["tool_choice"] = {**choice, "type": "function"}
    if choice == "":
        del data["tool_choice"]
    elif isinstance(choice, str):
        named = {"type": "function", "name": choice}
        mode = CHOICES.get(choice, choice)
        data["tool_choice"] = mode if choice in MODES else named
    return data


def from_response(data: Mapping[str, Any]) -> dict[str, Any]:
    """Make a chat's body of one for /v1/responses, which Cursor sends to chats."""
    if "previous_response_id" in data:
        where = "previous_response_id"
        expect(False, where, data[where], "none in a chat, but at /v1/responses")
    renamed = {"max_output_tokens": "max_completion_tokens"}
    rest = {
        renamed.get(name, name): value
        for name, value in data.items()
        if name not in ("messages", "input", "instructions", "text")
    }
    text = data.get("text")
    if isinstance(text, Mapping) and isinstance(text.get("format"), Mapping):
        rest["response_format"] = text["format"]
    lead = data.get("instructions")
    leads = [{"role": "developer", "content": lead}] if lead else []
    items = as_list(data["input"])
    if isinstance(items, list):
        items = leads + [one for item in items for one in from_item(item)]
    return {**rest, "messages": items}


def from_item(item: Any) -> list[Any]:
    """An item of a response as the messages of a chat."""
    kind = (isinstance(item, Mapping) and item.get("type")) or "message"
    if kind == "reasoning":
        return []  # that of an earlier turn, which no model is shown
    if kind == "message":
        return [item]
    id = item.get("call_id")
    if kind in ("function_call", "custom_tool_call"):
        tool = kind.partition("_")[0]
        call = {"id": id, "type": tool, tool: {**item}}
        return [{"role": "assistant", "tool_calls": [call]}]
    if kind in ("function_call_output", "custom_tool_call_output"):
        content = item.get("output")
        return [{"role": "tool", "tool_call_id": id, "content": content}]
    return [{"role": "assistant", "content": f"[{str(kind)[:50]}]"}]


def offered_tools(
    tools: Sequence[Any],
    context: ValidationContext,
    is_known: Callable[[str], object] = KINDS.__contains__,
    *,
    needed: bool = True,
) -> list[Any]:
    """Drop repeated tools, and those that the provider would run, if others are left.

    Of a kind that ``is_known`` are those that the client runs. If there is none all
    stay where they are ``needed``, and are refused: an answer without them would be
    another one.
    """
    kept, left_out, seen = list[Any](), list[str](), set[Any]()
    for tool in tools:
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and not is_known(kind):
            left_out.append(f"tools.{kind}")
        elif not isinstance(text := as_text(tool), str) or text not in seen:
            kept.append(tool)
            seen.add(text if isinstance(text, str) else None)
    if needed and not kept:
        return [*tools]
    for name in left_out:
        context.ignore(name)
    return kept


def with_format(data: dict[str, Any]) -> dict[str, Any]:
    """The body with OpenAI's response_format, or with a regex in its place.

    TGI writes a schema as the value of "json", and it and others know a "regex".
    """
    form = data.pop("response_format", None)
    if isinstance(form, str):
        form = {"type": form}
    if not isinstance(form, Mapping):
        return data if form is None else {**data, "response_format": form}
    kind = form.get("type", "json_schema" if "json_schema" in form else None)
    if kind in ("text", "auto") or not form:
        return data
    if kind == "regex":
        written = form.get("pattern", form.get("value", form.get("regex")))
        return {**data, "guided_regex": written}
    if kind == "json":
        schema = form.get("schema", form.get("value"))
        form = {"type": "json_object"} | ({"schema": schema} if schema else {})
    return {**data, "response_format": named_format(form)}


def named_format(given: Mapping[str, Any]) -> dict[str, Any]:
    """A response_format whose schema has a name, which OpenAI requires.

    The schema may stand where an object with it and its name is expected.
    """
    inner = given.get("json_schema")
    if given.get("type", "json_schema") != "json_schema":
        return {**given}
    if isinstance(inner, Mapping):
        if "schema" not in inner and inner.keys() & {"type", "properties"}:
            inner = {"name": inner.get("name"), "schema": inner}
        inner = named_schema(inner) if "schema" in inner else inner
        return {**given, "type": "json_schema", "json_schema": inner}
    return named_schema(given) if "schema" in given else {**given}


def named_schema(fields: Mapping[str, Any]) -> dict[str, Any]:
    name, schema = fields.get("name"), fields["schema"]
    if isinstance(schema, str):
        with suppress(ValueError):
            fields = {**fields, "schema": orjson.loads(schema)}
    if not isinstance(name, str | None):
        return {**fields}
    return {**fields, "name": re.sub(r"[^\w-]", "_", name or "output")[:64]}
