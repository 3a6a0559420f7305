"""Lines of a batch file in OpenAI's form: custom_id, method, url and body.

They are read, checked and answered as the server would answer the same body. Needs the
extra [serve].
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from simplellm.base.config import expect, one_of

LINE_FIELDS = ("method", "url", "body")  # of a line, beside its custom_id
RESULT_PREFIX = "batch_req_"  # of a result's id, before the digest of its request


@dataclass(frozen=True)
class OfflineService:
    """What endpoints need of a server. A body may name any model: there is but one."""

    llm: Any
    responses: Any  # a store, in which nothing is found
    strict: bool = False

    def check_model(self, name: str | None) -> str:
        return name or "simplellm"

    def reading(self) -> Any:
        from simplellm.server.http.endpoint import reading_of

        return reading_of(self.llm, (), self.strict)

    def warn(self, ignored: Iterable[str]) -> None:
        """Ignore it: what is ignored of a line changes no answer."""


def result_of(digest: str, custom_id: str | int, status: int, body: Any) -> Any:
    """A line of the output."""
    name = f"{RESULT_PREFIX}{digest}"
    response = {"status_code": status, "request_id": name, "body": body}
    return {"id": name, "custom_id": custom_id, "response": response, "error": None}


def read_request(
    llm: Any, request: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Any:
    """The `Generation` that the server would make of a line's ``request``.

    Raises APIError for what it would refuse.
    """
    # Most batch files do without it, and the extra may not be installed.
    from simplellm.server.http.endpoint import Call
    from simplellm.server.http.errors import as_api_error
    from simplellm.server.openai.chat import CHATS
    from simplellm.server.openai.completions import COMPLETIONS
    from simplellm.server.openai.responses import RESPONSES
    from simplellm.server.openai.responses_store import ResponseStore

    every = (*COMPLETIONS, *CHATS, *RESPONSES[:1])
    endpoints = {endpoint.path: endpoint for endpoint in every}
    kind: Any = None
    try:
        for name in request:
            one_of("a field", name, ("custom_id", *LINE_FIELDS), "")
        one_of("method", request.get("method", "POST"), ("POST",))
        one_of("url", request.get("url"), [*endpoints])
        endpoint, body = endpoints[request["url"]], request.get("body", {})
        kind = endpoint.body
        expect(isinstance(body, dict), "body", body, "an object", TypeError)
        expect(not body.get("stream"), "stream", True, "false in a batch")
        service: Any = OfflineService(llm, ResponseStore())
        call = Call(service=service, request=None, id="")  # type: ignore[arg-type]
        call.body = endpoint.read_parsed(call, with_defaults(body, defaults))
        return endpoint.handler(call)
    except Exception as error:
        refused = as_api_error(error, kind.known() if kind else LINE_FIELDS)
        if refused is None:
            raise
        raise refused from None


async def answer_body(
    llm: Any, request: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Status and body of the response to a line's ``request``."""
    from simplellm.server.http.errors import APIError, openai_form

    try:
        made = read_request(llm, request, defaults)
    except APIError as refused:
        return refused.status, openai_form(refused)
    replies = llm.replies(made.requests, n=made.n, chat=made.chat)
    made.begin(replies)
    if made.gathers:
        async for index, part in replies:
            made.part(index, part)
        outputs = replies.outputs()
    else:
        outputs = await replies.finish()
    return 200, made.whole(outputs, replies.usage())


def with_defaults(
    body: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """A body with the ``defaults`` for parameters that it leaves open."""
    names = {name for name, value in body.items() if value is not None}
    if names & {"max_completion_tokens", "max_output_tokens"}:
        names.add("max_tokens")
    return {**body, **{k: v for k, v in defaults.items() if k not in names}}
