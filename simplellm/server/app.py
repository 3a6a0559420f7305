"""The application: every endpoint behind one middleware."""

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections import defaultdict
from datetime import UTC, datetime
from reprlib import repr as short

import orjson
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HTTPRequest
from starlette.routing import Route, Router, compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from simplellm.server import page
from simplellm.server.anthropic import messages
from simplellm.server.http import small_endpoints
from simplellm.server.http.endpoint import (
    LOGGER,
    Call,
    DisconnectedError,
    Endpoint,
    Service,
    as_json,
)
from simplellm.server.http.errors import (
    APIError,
    ErrorForm,
    as_api_error,
    openai_form,
)
from simplellm.server.http.live_view import SnapshotPoller
from simplellm.server.http.openapi import openapi
from simplellm.server.openai import chat, completions, responses

ACCESS = logging.getLogger("simplellm.access")
ENDPOINTS: list[Endpoint] = [
    *completions.COMPLETIONS,
    *chat.CHATS,
    *responses.RESPONSES,
    *messages.MESSAGES,
    *small_endpoints.SMALL_ENDPOINTS,
]
FORMS = {endpoint.path: endpoint.form for endpoint in ENDPOINTS}
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")  # what may go through as it is
ID_HEADERS = (b"x-request-id", b"request-id")  # OpenAI's name for it and Anthropic's
IGNORED_HEADER = b"x-ignored-parameters"
# OpenAI's names for statuses that come from routing.
ROUTING = {404: "not_found", 405: "method_not_allowed"}


def error_form(path: str) -> ErrorForm:
    """How errors look at ``path``: as at its endpoint, or the one above it."""
    above = "/".join(path.split("/")[:3])  # as /v1/messages of what is not served
    return FORMS.get(path) or FORMS.get(above, openai_form)


class RequestMiddleware:
    """The middleware that every request goes through, whatever its path.

    It gets an id, must show the key where there is one, is counted and logged, and
    whatever is raised becomes an error in the form of its endpoint. This is plain ASGI:
    a response goes through as it is written.
    """

    def __init__(self, app: ASGIApp, service: Service, endpoints: list[Endpoint]):
        self.app, self.service = app, service
        self.open = {e.path for e in endpoints if e.open}
        self.known = {e.path for e in endpoints}
        self.paths = [compile_path(path)[0] for path in self.known]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope, "path": self.meant(scope["path"])}
        request = HTTPRequest(scope)
        call = Call(self.service, request, request_id(request))
        scope["call"] = call
        scope["app"] = self  # so that routing raises its errors
        start, status = time.monotonic(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                pairs = [(name, call.id.encode()) for name in ID_HEADERS]
                if call.ignored:
                    pairs.append((IGNORED_HEADER, call.ignored.encode()))
                message = {**message, "headers": [*message.get("headers", ()), *pairs]}
            await send(message)

        self.service.running += 1
        try:
            self.check_key(request)
            await self.app(scope, receive, sending)
        except DisconnectedError:
            call.facts["gone"] = True
        except Exception as error:
            api_error = self.explain(error, call)
            call.fail(api_error)
            if status:  # the answer has begun: the connection breaks off
                LOGGER.exception("request %s failed in its answer", call.id)
                raise
            body = error_form(request.url.path)(api_error)
            answer = as_json(body, api_error.status, api_error.headers)
            await answer(scope, receive, sending)
        finally:
            self.service.running -= 1
            self.log(call, status, time.monotonic() - start)

    def meant(self, path: str) -> str:
        """The path that we know of those that clients make of their base URL.

        It may lack the "/v1" or have it twice, and slashes, too.
        """
        if path in self.known:
            return path
        plain = re.sub("/+", "/", path).rstrip("/") or "/"
        bare = plain.rpartition("/v1/")[2].removeprefix("/")
        for one in (plain, f"/v1/{bare}", f"/{bare}"):
            if any(known.match(one) for known in self.paths):
                return one
        return path

    def check_key(self, request: HTTPRequest) -> None:
        """Raise APIError unless the request may pass."""
        if self.service.options.key is None or request.url.path in self.open:
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip() if kind.lower() == "bearer" else ""
        given = given or request.headers.get("x-api-key", "")  # Anthropic's clients
        if not keys_equal(given, self.service.options.key):
            expected = "expected the header Authorization: Bearer with the server's key"
            # In OpenAI's words, which LiteLLM looks for.
            what = "Incorrect API key provided" if given else "No API key provided"
            message = f"{what}; {expected}"
            headers = {"www-authenticate": "Bearer"}
            raise APIError(401, message, code="invalid_api_key", headers=headers)

    def explain(self, error: Exception, call: Call) -> APIError:
        """The APIError for a client."""
        if isinstance(error, HTTPException):  # from routing
            path = call.request.url.path
            allowed = (error.headers or {}).get("Allow", "")
            expected = "expected OpenAI's paths or Anthropic's, as /v1/models"
            message = f"there is no {short(path)}; {expected}: /docs shows them"
            if error.status_code == 405:
                message = f"{path} takes {allowed}, not {call.request.method}"
            code = ROUTING.get(error.status_code)
            status, headers = error.status_code, dict(error.headers or {})
            return APIError(status, message, code=code, headers=headers)
        if (api_error := as_api_error(error)) is not None:
            if api_error is not error:
                LOGGER.warning("request %s: %r", call.id, error)
            return api_error
        LOGGER.error("request %s failed", call.id, exc_info=error)
        return APIError(500, "the server failed; its log says how", code="internal")

    def log(self, call: Call, status: int, seconds: float) -> None:
        """One JSON line, where somebody reads them."""
        if not ACCESS.isEnabledFor(logging.INFO):
            return
        client = call.request.client
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": call.id,
            "client": client.host if client else None,
            "method": call.request.method,
            "path": call.request.url.path,
            "status": status or None,
            "seconds": round(seconds, 4),
            **call.facts,
        }
        ACCESS.info("%s", orjson.dumps(line).decode())


def request_id(request: HTTPRequest) -> str:
    """The client's name for its request, if it has a good one."""
    given = request.headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def keys_equal(given: str, key: str) -> bool:
    """Whether two keys are equal, in a time independent of where they differ."""
    sent = given.encode("latin-1")  # as headers come
    known = key.encode(errors="surrogateescape")  # as arguments do
    digests = [hashlib.sha256(text).digest() for text in (sent, known)]
    return hmac.compare_digest(*digests)


def no_compaction(_: Call) -> None:
    """OpenAI's way to shorten a conversation. Agents have others where it's missing."""
    message = "no conversation is compacted here; expected a request for a summary"
    raise APIError(404, f"{message}, at /v1/responses", code="not_found")


class Methods(dict[str, Endpoint]):
    """The endpoints of a path, by method, as an ASGI application.

    Starlette would take a function of three arguments for another kind.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        call: Call = scope["call"]
        call.request = HTTPRequest(scope, receive)
        await self[method].respond(call, scope, receive, send)


def make_app(service: Service) -> ASGIApp:
    """The whole server as an ASGI application."""
    document, live = openapi(service, ENDPOINTS), SnapshotPoller(service).answer
    endpoints = [
        *ENDPOINTS,  # and those that aren't documented
        Endpoint("GET", "/openapi.json", lambda _: document, open=True),
        Endpoint("GET", "/live", live),
        Endpoint("POST", "/v1/responses/compact", no_compaction),
        *page.FILES,
    ]
    paths: dict[str, Methods] = defaultdict(Methods)
    for endpoint in endpoints:
        paths[endpoint.path][endpoint.method] = endpoint
    routes = [Route(path, to, methods=[*to]) for path, to in paths.items()]
    router = Router(routes, redirect_slashes=False)
    app = RequestMiddleware(router, service, endpoints)
    if not service.options.allowed_origins:
        return app
    shown = [name.decode() for name in (*ID_HEADERS, IGNORED_HEADER)]
    return CORSMiddleware(
        app,
        allow_origins=service.options.allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=shown,
    )
