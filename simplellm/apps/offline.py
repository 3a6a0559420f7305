"""Answer without a server what a server would be asked: method, url and body.

These are the requests of batch files and workloads. They are read, checked and answered
as the server would do it. Needs the extra [serve].
"""

from collections.abc import Iterable, Mapping
from typing import Any

from simplellm.apps.batch_file import Line
from simplellm.base.config import expect, one_of
from simplellm.server.http.endpoint import Call, Generation, Service
from simplellm.server.http.errors import APIError, as_api_error, openai_form
from simplellm.server.openai.chat import CHATS
from simplellm.server.openai.completions import COMPLETIONS
from simplellm.server.openai.responses import RESPONSES
from simplellm.server.start import Options

FIELDS = ("method", "url", "body")  # of a request
ENDPOINTS = {one.path: one for one in (*COMPLETIONS, *CHATS, *RESPONSES[:1])}


class OfflineService(Service):
    """What endpoints need of a server. A body may name any model: there is but one."""

    def __post_init__(self) -> None:
        """Nobody asks for metrics."""

    def check_model(self, name: str | None) -> str:
        return name or "simplellm"

    def warn(self, ignored: Iterable[str]) -> None:
        """Ignore it: what is ignored of a line changes no answer."""


def read_request(
    llm: Any, request: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Generation:
    """The `Generation` that the server would make of a ``request``.

    ``defaults`` are sampling parameters for a body that leaves them open. Raises
    APIError for what the server would refuse.
    """
    kind: Any = None
    try:
        for name in request:
            one_of("a field", name, ("custom_id", *FIELDS), "")
        one_of("method", request.get("method", "POST"), ("POST",))
        one_of("url", request.get("url"), [*ENDPOINTS])
        endpoint, body = ENDPOINTS[request["url"]], request.get("body", {})
        expect(isinstance(body, dict), "body", body, "an object", TypeError)
        kind = endpoint.body
        expect(not body.get("stream"), "stream", True, "false in a batch")
        service = OfflineService(llm, Options(names=()))
        call = Call(service, request=None, id="")  # type: ignore[arg-type]
        call.body = endpoint.read_parsed(call, with_defaults(body, defaults))
        return endpoint.handler(call)
    except Exception as error:
        refused = as_api_error(error, kind.known() if kind else FIELDS)
        if refused is None:
            raise
        raise refused from None


async def answer_line(
    llm: Any, defaults: Mapping[str, Any], line: Line
) -> tuple[int, dict[str, Any]]:
    """Status and body of the response to a batch file's line; see `read_request`."""
    try:
        if line.error is not None:
            raise APIError(400, line.error)
        made = read_request(llm, line.request, defaults)
    except APIError as refused:
        return refused.status, openai_form(refused)
    replies = llm.replies(made.specs, n=made.n, chat=made.chat)
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
