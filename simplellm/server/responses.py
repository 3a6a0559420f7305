"""/v1/responses: OpenAI's newer way to ask, with items in place of messages."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from simplellm.config import declared, expect, expect_type, one_of
from simplellm.harmony import Delta
from simplellm.harmony.schema import as_tools
from simplellm.outputs import ChatChoice, Usage
from simplellm.reader import Replies
from simplellm.request import MAX_LOGPROBS
from simplellm.server.bodies import (
    NEEDS_GRAMMAR,
    NOT_HERE,
    SHARED_NEUTRAL,
    Neutral,
    SampledBody,
    check_tool_choice,
)
from simplellm.server.endpoint import Call, Endpoint, Generation
from simplellm.server.errors import APIError
from simplellm.server.responses_items import (
    ItemReader,
    Output,
    output_of,
    to_harmony,
    unsupported,
)
from simplellm.server.responses_store import Kept, ResponseStore

LOGPROBS = "message.output_text.logprobs"
# What may be asked for beside a response. Our reasoning isn't encrypted: it is there.
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
NO_BACKGROUND = "no response is written in the background"
MAX_LABELS, MAX_LABEL, MAX_LABEL_TEXT = 16, 64, 512  # pairs, and their characters
# How a response ends, by the reason that the model's turn has; others: incomplete.
STATUSES = {"stop": "completed", "tool_calls": "completed", None: "cancelled"}
INPUT_TEXT: dict[str, Any] = {"type": ["string", "array"], "items": {"type": "object"}}
INPUT_ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {
            "enum": ["message", "reasoning", "function_call", "function_call_output"]
        },
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": INPUT_TEXT,
        "call_id": {"type": "string"},
        "name": {"type": "string"},
        "arguments": {"type": "string"},
        "output": INPUT_TEXT,
    },
}
INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": INPUT_ITEM}]}
TOOL: dict[str, Any] = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {
        "type": {"enum": ["function"]},
        "name": {"type": "string"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}


@dataclass(frozen=True, kw_only=True)
class Reasoning:
    """How the model is to think."""

    neutral: ClassVar[Mapping[str, Neutral]] = {
        # What the model thinks is told as it is.
        "summary": Neutral(NOT_HERE, ("auto", "concise", "detailed")),
        "generate_summary": Neutral(NOT_HERE, ("auto", "concise", "detailed")),
        "context": Neutral(NOT_HERE, ("auto",)),
        "mode": Neutral(NOT_HERE, ("standard",)),
    }

    effort: Literal["low", "medium", "high"] = "medium"


@dataclass(frozen=True, kw_only=True)
class Text:
    """What the text of the answer is to be."""

    neutral: ClassVar[Mapping[str, Neutral]] = {
        "format": Neutral(NEEDS_GRAMMAR, ({"type": "text"},)),
        "verbosity": Neutral(NOT_HERE, ("medium",)),
    }


@dataclass(frozen=True, kw_only=True)
class ResponseBody(SampledBody):
    """What /v1/responses takes."""

    neutral: ClassVar[Mapping[str, Neutral]] = SHARED_NEUTRAL | {
        "n": Neutral("a response is one turn", (1,)),
        "return_token_ids": Neutral(NOT_HERE, (False,)),
        "stream_options": Neutral(
            "the last event has the usage", ({}, {"include_obfuscation": False})
        ),
        "max_tokens": Neutral("use max_output_tokens"),
        "logprobs": Neutral(f"use top_logprobs, and {LOGPROBS!r} in include"),
        "background": Neutral(NO_BACKGROUND, (False,)),
        "truncation": Neutral("nothing is left out of the input", ("disabled",)),
        "conversation": Neutral("use previous_response_id"),
        "prompt": Neutral("there are no stored prompts"),
        "context_management": Neutral(NOT_HERE, ([],)),
        "moderation": Neutral(NOT_HERE),
        "prompt_cache_options": Neutral("equal beginnings are always found again"),
        "prompt_cache_retention": Neutral(NOT_HERE, ("in_memory",)),
        "service_tier": Neutral(NOT_HERE, ("auto", "default")),
    }

    input: str | list[dict[str, Any]] = field(metadata={"schema": INPUT})
    # What comes first; the instructions of earlier responses are not shown again.
    instructions: str | None = None
    previous_response_id: str | None = None  # one that is still kept
    store: bool = True  # keep the response for some time
    tools: list[dict[str, Any]] | None = field(
        default=None, metadata={"schema": {"type": "array", "items": TOOL}}
    )
    # None: "auto" where there are tools.
    tool_choice: str | dict[str, Any] | None = None
    # A turn of gpt-oss ends with its first call, so that there is nothing to choose.
    parallel_tool_calls: bool = True
    # Of tools that run in the server, of which there are none.
    max_tool_calls: int | None = declared(None)
    reasoning: Reasoning | None = None
    text: Text | None = None
    # Reasoning included; None: as many as there is room for.
    max_output_tokens: int | None = declared(None)
    include: list[str] | None = None
    top_logprobs: int = declared(0, low=0, high=MAX_LOGPROBS)
    # OpenAI's labels, with which nothing is done.
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tool_choice(self.tool_choice, self.tools)
        check_include(self.include)
        alone = self.logprobs or not self.top_logprobs
        wanted = f"0 without {LOGPROBS!r} in include"
        expect(alone, "top_logprobs", self.top_logprobs, wanted)
        for number, tool in enumerate(self.tools or ()):
            where = f"tools[{number}]"
            expect_type(where, tool, Mapping, "an object")
            if tool.get("type") != "function":
                raise unsupported(f"{where}.type", repr(tool.get("type")))
            expect_type(f"{where}.name", tool.get("name"), str, "a string")
        check_labels(self.metadata or {})

    @property
    def logprobs(self) -> bool:
        """Whether those of the messages' tokens are to be told."""
        return LOGPROBS in (self.include or ())

    @property
    def effort(self) -> str:
        return (self.reasoning or Reasoning()).effort

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model is told of, as chats have them."""
        if self.tool_choice == "none":
            return []
        return [{"type": "function", "function": tool} for tool in self.tools or ()]


def check_include(include: Any) -> None:
    """Raise TypeError or ValueError for what can't be asked for."""
    expect_type("include", include, list | None, "a list of strings")
    for entry in include or ():
        one_of("an entry of include", entry, INCLUDABLE)


def check_labels(labels: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for what OpenAI wouldn't take as metadata."""
    most = f"at most {MAX_LABELS} pairs"
    expect(len(labels) <= MAX_LABELS, "metadata", f"{len(labels)} pairs", most)
    for key, text in labels.items():
        name = f"metadata.{key}"
        expect_type(name, text, str, "a string")
        short = len(key) <= MAX_LABEL and len(text) <= MAX_LABEL_TEXT
        wanted = f"keys of at most {MAX_LABEL} characters, texts of {MAX_LABEL_TEXT}"
        expect(short, name, text, wanted)


def usage_of(usage: Usage) -> dict[str, Any]:
    """The usage as responses tell it. What the cache didn't hold is put into it."""
    cached = usage.cached_tokens
    details = {"cached_tokens": cached}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": details
        | {"cache_write_tokens": usage.prompt_tokens - cached},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class Response(Generation):
    """One turn of the assistant, as items.

    ``last``, ``whole`` and ``failure`` also put the response where it is kept: who has
    read the last event may ask for it at once.
    """

    def __init__(self, call: Call) -> None:
        body: ResponseBody = call.body
        door = call.service.llm.door
        self.store = call.service.responses
        self.model = call.service.check_model(body.model)
        self.key = uuid.uuid4().hex
        self.id, self.created = f"resp_{self.key}", int(time.time())
        before = history(self.store, body.previous_response_id)
        self.asked = before + ItemReader(self.key).read(body.input)
        expect(self.asked, "input", body.input, "at least one item")
        tools = as_tools(body.offered)
        params = {"max_tokens": door.max_model_len, **body.sampling}
        if body.max_output_tokens is not None:
            params["max_tokens"] = body.max_output_tokens
        if body.logprobs:
            params["logprobs"] = body.top_logprobs
        asked = door.ask_chat(
            to_harmony(self.asked, body.instructions, tools),
            tools=tools,
            reasoning_effort=body.effort,
            priority=body.priority,
            **params,
        )
        super().__init__([asked], chat=True, stream=body.stream)
        self.body, self.tokenizer = body, door.need_tokenizer()
        self.output = Output(self.key, self.tokenizer)
        self.replies: Replies | None = None  # while they come
        self.status = "in_progress"
        self.kept = body.store

    def object(
        self,
        status: str,
        usage: Usage | None = None,
        *,
        error: dict[str, Any] | None = None,
        why: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The response as it stands; ``why`` it is incomplete, if it is."""
        body, params = self.body, self.requests[0].params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": why,
            "model": self.model,
            "output": self.output.items,
            "usage": None if usage is None else usage_of(usage),
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "store": body.store,
            "background": False,
            "tools": [tool_of(tool) for tool in body.tools or ()],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls,
            "max_tool_calls": body.max_tool_calls,
            "reasoning": {"effort": body.effort, "summary": None},
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "max_output_tokens": body.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "top_logprobs": body.top_logprobs,
            "truncation": "disabled",
            "service_tier": "default",
            "metadata": body.metadata or {},
            "user": body.user,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
        }

    def begin(self, replies: Replies) -> None:
        self.replies = replies
        if self.kept and self.stream:  # nobody knows the id of another one yet
            self.store.begin(self.id, self)

    def end(self) -> None:
        if self.replies is not None and self.stream:  # the client is gone
            self.output.close("incomplete")
            self.settle(self.object("cancelled", self.replies.usage()))

    def settle(self, response: dict[str, Any]) -> dict[str, Any]:
        """``response`` is what there is from now on."""
        self.status, self.replies = response["status"], None
        self.store.end(self.id, Kept(response, self.asked) if self.kept else None)
        return response

    def now(self) -> dict[str, Any]:
        return self.object(self.status)

    async def cancel(self, *, forget: bool = False) -> None:
        """End it; what is written by then stays, unless it is to be forgotten."""
        self.status = "cancelled"
        self.kept = self.kept and not forget
        if self.replies is not None:
            await self.replies.aclose()

    def first(self) -> list[dict[str, Any]]:
        found = self.object(self.status)
        kinds = ("response.created", "response.in_progress")
        return [self.output.event(kind, response=found) for kind in kinds]

    def part(self, index: int, part: Delta) -> list[dict[str, Any]]:
        return self.output.push(part)

    def last(self, outputs: Sequence[ChatChoice], usage: Usage) -> list[dict[str, Any]]:
        response, events = self.finish(outputs[0], usage)
        completed = response["status"] == "completed"
        kind = "response.completed" if completed else "response.incomplete"
        return [*events, self.output.event(kind, response=response)]

    def whole(self, outputs: Sequence[ChatChoice], usage: Usage) -> dict[str, Any]:
        choice, asked = outputs[0], self.requests[0]
        self.output = output_of(choice, asked, self.key, self.tokenizer)
        return self.finish(choice, usage)[0]

    def finish(
        self, choice: ChatChoice, usage: Usage
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The response at its end, and the events that end its last item."""
        reason = choice.finish_reason
        status = STATUSES.get(reason, "incomplete")
        done = "completed" if status == "completed" else "incomplete"
        events = self.output.close(done)
        why = {"reason": "max_output_tokens"} if reason == "length" else None
        return self.settle(self.object(status, usage, why=why)), events

    def failure(self, error: APIError) -> dict[str, Any]:
        told = {"code": "server_error", "message": error.message}
        response = self.settle(self.object("failed", error=told))
        return self.output.event("response.failed", response=response)


def tool_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as the response tells it. Nothing holds the model to its parameters."""
    names = ("type", "name", "description", "parameters")
    return {name: tool.get(name) for name in names} | {"strict": False}


def history(store: ResponseStore, id: str | None) -> list[dict[str, Any]]:
    """What a response that follows response ``id`` begins with. Raises APIError."""
    if id is None:
        return []
    found = store.find(id)
    if isinstance(found, Kept):
        return found.items
    why = "is not here, or no longer" if found is None else "is still being written"
    message = f"previous_response_id: response {id!r} {why}"
    name, code = "previous_response_id", "previous_response_not_found"
    raise APIError(400, message, param=name, code=code)


def found_response(call: Call) -> Kept | Response:
    """The response that a path names. Raises APIError."""
    id = call.request.path_params["response"]
    found: Any = call.service.responses.find(id)
    if found is None:
        message = f"response {id!r} is not here, or no longer"
        raise APIError(404, message, code="response_not_found")
    return found


@dataclass(frozen=True, kw_only=True)
class ResponseQuery:
    """How a response is shown."""

    neutral: ClassVar[Mapping[str, Neutral]] = {
        "stream": Neutral(NO_BACKGROUND, ("false",)),
        "starting_after": Neutral(NO_BACKGROUND),
        "include_obfuscation": Neutral(NOT_HERE, ("false",)),
    }

    include: list[str] | None = None  # all that there is, is there

    def __post_init__(self) -> None:
        check_include(self.include)


def get_response(call: Call) -> dict[str, Any]:
    found = found_response(call)
    return found.response if isinstance(found, Kept) else found.now()


async def cancel_response(call: Call) -> dict[str, Any]:
    """End a response; one that is over stays as it is."""
    found = found_response(call)
    if isinstance(found, Kept):
        return found.response
    await found.cancel()
    return found.now()


async def delete_response(call: Call) -> dict[str, Any]:
    """Forget a response; one that is being written ends."""
    found = found_response(call)
    if isinstance(found, Response):
        await found.cancel(forget=True)
    id = call.request.path_params["response"]
    call.service.responses.end(id, None)
    return {"id": id, "object": "response", "deleted": True}


@dataclass(frozen=True, kw_only=True)
class ItemsQuery:
    """Which items of a response's input are shown."""

    limit: int = declared(20, high=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None  # the id of the item before the first one
    include: list[str] | None = None  # all that there is, is there

    def __post_init__(self) -> None:
        check_include(self.include)


def list_items(call: Call) -> dict[str, Any]:
    """All that the model was asked, the items of earlier responses first."""
    query: ItemsQuery = call.query
    items = found_response(call).asked
    if query.order == "desc":
        items = items[::-1]
    if query.after is not None:
        ids = [item["id"] for item in items]
        expect(query.after in ids, "after", query.after, "the id of an item")
        items = items[ids.index(query.after) + 1 :]
    shown = items[: query.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else "",
        "last_id": shown[-1]["id"] if shown else "",
        "has_more": len(items) > len(shown),
    }


ONE = "/v1/responses/{response}"
ENDPOINTS = [
    Endpoint(
        path="/v1/responses",
        answer=Response,
        body=ResponseBody,
        summary="The assistant's next turn, as items.",
    ),
    Endpoint(
        method="GET",
        path=ONE,
        answer=get_response,
        query=ResponseQuery,
        summary="A response that is kept or being written.",
    ),
    Endpoint(
        method="DELETE",
        path=ONE,
        answer=delete_response,
        summary="Forget a response.",
    ),
    Endpoint(
        path=f"{ONE}/cancel",
        answer=cancel_response,
        summary="End a response that is being written.",
    ),
    Endpoint(
        method="GET",
        path=f"{ONE}/input_items",
        answer=list_items,
        query=ItemsQuery,
        summary="What the model was asked for a response.",
    ),
]
