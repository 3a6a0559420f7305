"""/v1/responses: OpenAI's newer interface, with items in place of messages."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import orjson
from pydantic import Field
from starlette.responses import Response as EventStream

from simplellm.api.input_processor import ContextLengthError
from simplellm.api.outputs import ChatChoice, Usage
from simplellm.api.streams import Replies
from simplellm.base.config import expect
from simplellm.server.http import sse
from simplellm.server.http.bodies import NOT_HERE, Body, Unsupported
from simplellm.server.http.endpoint import Call, Endpoint, Generation
from simplellm.server.http.errors import TOO_LONG, APIError, as_api_error
from simplellm.server.http.response_schemas import (
    DELETED,
    INPUT_ITEMS,
    RESPONSE,
    RESPONSE_INPUT,
)
from simplellm.server.openai.responses_body import ResponsesBody
from simplellm.server.openai.responses_items import kept_items, to_harmony, tools_in
from simplellm.server.openai.responses_output import Output
from simplellm.server.openai.responses_store import (
    FinishedResponse,
    ResponseStore,
    StoredResponse,
)
from simplellm.server.openai.tools import ClientTools, flatten_tool
from simplellm.text.harmony import Delta
from simplellm.text.harmony.schema import as_tools

ASK_AGAIN = "only who made a response has its stream; ask again until it's over"
# How a response ends, by the reason that the model's turn has; others: incomplete.
STATUS_OF_REASON = {"stop": "completed", "tool_calls": "completed", None: "cancelled"}


def usage_of(usage: Usage) -> dict[str, Any]:
    """The usage in a response's fields; what the cache didn't hold is written to it."""
    cached = usage.cached_tokens
    written = {"cache_write_tokens": usage.prompt_tokens - cached}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, **written},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class Response(Generation):
    """One turn of the assistant, as the items of a response.

    ``last``, ``whole`` and ``failure`` also store the response: a client that has read
    the last event may ask for it at once.
    """

    gathers: ClassVar[bool] = True

    def __init__(self, call: Call) -> None:
        body: ResponsesBody = call.body
        input_processor = call.service.llm.input_processor
        self.store, self.model = call.service.responses, call.model
        self.key = uuid.uuid4().hex
        self.id, self.created = f"resp_{self.key}", int(time.time())
        before = items_before(self.store, body.previous_response_id)
        given = kept_items(body.input, self.key, self.store)
        self.input_items = before + given
        self.input_bytes = len(orjson.dumps(self.input_items))
        expect(self.input_items, "input", body.input, "at least one item")
        self.tools = ClientTools(body.tools or ())
        self.tools.add_missing(tools_in(self.input_items))
        offered = [] if body.tool_choice == "none" else self.tools.functions
        tools = as_tools(offered)
        params = {"max_tokens": input_processor.max_model_len, **body.sampling}
        if body.max_output_tokens is not None:
            params["max_tokens"] = body.max_output_tokens
        if body.logprobs:
            params["logprobs"] = body.top_logprobs
        spec = input_processor.process_chat(
            to_harmony(
                before, given, body.instructions, tools, input_processor.dialect.lead
            ),
            tools=tools,
            tool_choice=self.tools.choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls,
            response_format=body.format,
            reasoning_effort=body.effort,
            priority=body.priority,
            **params,
        )
        super().__init__([spec], chat=True, stream=body.stream)
        self.body, self.detached = body, body.background
        self.output = Output(self.key, input_processor.need_tokenizer(), self.tools)
        self.replies: Replies | None = None  # while they come
        self.status = "in_progress"

    def object(
        self,
        status: str,
        usage: Usage | None = None,
        *,
        error: dict[str, Any] | None = None,
        why: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The response as it stands; ``why`` is the reason if it is incomplete."""
        body, params = self.body, self.specs[0].params
        choice = body.tool_choice  # a chat's form is translated
        unfinished = status if status == "in_progress" else "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": why,
            "model": self.model,
            "output": self.output.items(unfinished),
            "usage": None if usage is None else usage_of(usage),
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "store": body.store,
            "background": body.background,
            "tools": [tool_of(tool) for tool in body.tools or ()],
            "tool_choice": choice if isinstance(choice, str) else flatten_tool(choice),
            "parallel_tool_calls": body.parallel_tool_calls,
            "max_tool_calls": body.max_tool_calls,
            "reasoning": {"effort": body.effort or "medium", "summary": None},
            "text": {"format": body.format_object, "verbosity": "medium"},
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
        self.output = Output(self.key, self.output.tokenizer, self.tools)
        if self.body.store:
            self.store.begin(self.id, self)

    def end(self, started: bool) -> None:
        if self.replies is None or self.detached:  # it is over, or the error was sent
            return
        if started:  # the client is gone
            self.finalize(self.object("cancelled", self.replies.usage()))
        else:  # nobody knows its id
            self.store.forget(self.id)

    def finalize(self, response: dict[str, Any]) -> dict[str, Any]:
        """Store ``response`` as the final state, and return it."""
        self.status, self.replies = response["status"], None
        self.store.end(
            self.id, FinishedResponse(response, self.input_items, self.input_bytes)
        )
        return response

    def now(self) -> dict[str, Any]:
        return self.object(self.status)

    async def cancel(self) -> None:
        """End the response; what is written by then stays."""
        self.status = "cancelled"
        if self.replies is not None:
            await self.replies.aclose()

    def first(self) -> list[dict[str, Any]]:
        response = self.object(self.status)
        kinds = ("response.created", "response.in_progress")
        return [self.output.event(kind, response=response) for kind in kinds]

    def part(self, index: int, part: Delta) -> list[dict[str, Any]]:
        return self.output.push(part)

    def last(self, outputs: Sequence[ChatChoice], usage: Usage) -> list[dict[str, Any]]:
        response, events = self.finish(outputs[0], usage)
        completed = response["status"] == "completed"
        kind = "response.completed" if completed else "response.incomplete"
        return [*events, self.output.event(kind, response=response)]

    def whole(self, outputs: Sequence[ChatChoice], usage: Usage) -> dict[str, Any]:
        return self.finish(outputs[0], usage)[0]

    def finish(
        self, choice: ChatChoice, usage: Usage
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The final response, and the events that end its last item."""
        reason = choice.finish_reason
        status = STATUS_OF_REASON.get(reason, "incomplete")
        done = "completed" if status == "completed" else "incomplete"
        events = self.output.close(done)
        why = {"reason": "max_output_tokens"} if reason == "length" else None
        return self.finalize(self.object(status, usage, why=why)), events

    def failure(self, error: APIError) -> dict[str, Any]:
        code = TOO_LONG if error.code == TOO_LONG else "server_error"
        details = {"code": code, "message": error.message}
        response = self.finalize(self.object("failed", error=details))
        return self.output.event("response.failed", response=response)


def answer_response(call: Call) -> Any:
    """The assistant's next turn, as items.

    A stream whose prompt is too long begins and then fails, as with OpenAI: Codex
    compacts its history at this event, and at no HTTP status.
    """
    try:
        return Response(call)
    except ContextLengthError as error:
        api_error = as_api_error(error, {"input"})
        if api_error is None or not call.body.stream:
            raise
        call.fail(api_error)
        return failed_stream(call, api_error)


def failed_stream(call: Call, error: APIError) -> EventStream:
    """The whole stream of a response that fails before it begins."""
    short = call.body.model_copy(
        update={
            "input": "?",
            "previous_response_id": None,
            "instructions": None,
            "tools": None,
            "tool_choice": "auto",
            "text": None,
        }
    )
    made = Response(replace(call, body=short))
    made.body = call.body
    events = [made.first()[0], made.failure(error)]
    data = b"".join(map(sse.event, events)) + made.ending
    return EventStream(data, headers=sse.HEADERS)


def tool_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form in which a response repeats it."""
    tool = flatten_tool(tool)
    if tool.get("type", "function") != "function":
        return tool
    names = ("name", "description", "parameters")
    fields = {"type": "function", **{name: tool.get(name) for name in names}}
    return fields | {"strict": bool(tool.get("strict"))}


def stored_response(
    store: ResponseStore, id: str, previous: bool = False
) -> StoredResponse:
    """The stored response of this ``id``. Raises APIError if there is none.

    The error of a ``previous`` response names the body's parameter, any other the path.
    """
    stored = store.find(id)
    if stored is None:
        param = "previous_response_id" if previous else None
        code = f"{'previous_' * previous}response_not_found"
        message = f"response {id!r} is not here, or no longer"
        raise APIError(400 if previous else 404, message, param=param, code=code)
    return stored


def items_before(store: ResponseStore, id: str | None) -> list[dict[str, Any]]:
    """The items with which a response that follows response ``id`` begins."""
    if id is None:
        return []
    stored = stored_response(store, id, previous=True)
    response, expected = stored.now(), "one that is no longer being written"
    expect(response["status"] != "in_progress", "previous_response_id", id, expected)
    output: list[dict[str, Any]] = response["output"]
    return stored.input_items + output


def named_response(call: Call) -> StoredResponse:
    """The response whose id is in the path. Raises APIError."""
    return stored_response(call.service.responses, call.request.path_params["response"])


def count_input_tokens(call: Call) -> dict[str, Any]:
    """How many tokens the model would be asked for a response, which isn't made."""
    count = len(Response(call).specs[0].tokens)
    return {"object": "response.input_tokens", "input_tokens": count}


class ResponseQuery(Body):
    """The query of a GET of a response."""

    unsupported: ClassVar = {
        "stream": Unsupported(ASK_AGAIN, ("false",)),
        "starting_after": Unsupported(ASK_AGAIN),
        "include_obfuscation": Unsupported(NOT_HERE, ("false",)),
    }

    include: list[str] | None = None
    """Whatever it says: all that there is, is there."""


def get_response(call: Call) -> dict[str, Any]:
    """A response that is kept or being written."""
    return named_response(call).now()


async def cancel_response(call: Call) -> dict[str, Any]:
    """End a running response; a finished one stays as it is."""
    stored = named_response(call)
    await stored.cancel()
    return stored.now()


async def delete_response(call: Call) -> dict[str, Any]:
    """Forget a response; a running one ends."""
    stored = named_response(call)
    id = stored.now()["id"]
    call.service.responses.forget(id)
    await stored.cancel()
    return {"id": id, "object": "response", "deleted": True}


class ItemsQuery(Body):
    """The query of a list of a response's input items: which page of them."""

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    """The id of the item before the first one."""
    include: list[str] | None = None
    """Whatever it says: all that there is, is there."""


def list_items(call: Call) -> dict[str, Any]:
    """A response's input items, those of earlier responses first."""
    query: ItemsQuery = call.query
    items = named_response(call).input_items
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
RESPONSES = [
    Endpoint(
        "POST", "/v1/responses", answer_response, body=ResponsesBody, result=RESPONSE
    ),
    Endpoint(
        "POST",
        "/v1/responses/input_tokens",
        count_input_tokens,
        body=ResponsesBody,
        result=RESPONSE_INPUT,
    ),
    Endpoint("GET", ONE, get_response, query=ResponseQuery, result=RESPONSE),
    Endpoint("DELETE", ONE, delete_response, result=DELETED),
    Endpoint("POST", f"{ONE}/cancel", cancel_response, result=RESPONSE),
    Endpoint(
        "GET", f"{ONE}/input_items", list_items, query=ItemsQuery, result=INPUT_ITEMS
    ),
]
