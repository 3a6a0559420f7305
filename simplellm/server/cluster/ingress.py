"""The way into the cluster: reads a request and asks which replica has its prefixes."""

import asyncio
import logging
import re
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import orjson
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from simplellm.server.app import error_form
from simplellm.server.cluster.engine import ReplicaGoneError
from simplellm.server.cluster.router import RoutingHints
from simplellm.server.cluster.shared_state import digest_of_id
from simplellm.server.http import sse
from simplellm.server.http.endpoint import (
    LARGE_BODY,
    as_json,
    check_size,
    response_body,
)
from simplellm.server.http.errors import RETRY, APIError, ErrorForm, unavailable
from simplellm.server.http.metrics import join_texts
from simplellm.server.http.small_endpoints import PROMETHEUS
from simplellm.server.remote.prefixes import digests_of

LOGGER = logging.getLogger("ray.serve")
# What a replica gets of a request's scope. All of it is numbers and texts.
SCOPE_FIELDS = """type http_version method scheme path raw_path root_path query_string
headers client server""".split()
# What a prompt is made of, in the order in which it comes; of any endpoint.
PROMPT_PARTS = "tools system instructions prompt messages input".split()
STRIDE_BYTES = 256  # between two prefixes of a prompt; some 64 tokens
MAX_PREFIX_BYTES = 1024 * STRIDE_BYTES  # of a prompt that count
SHARED_SECONDS = 2.0  # for `SharedState`; a request can go on without hints
ONE_RESPONSE = re.compile(r"/v1/responses/([^/]+)")
# Ray's names of what a replica's end does to those who wait for it, and ours.
LOST = (RayError, ReplicaGoneError, DeploymentUnavailableError)


@serve.ingress()
class Ingress:
    """An ASGI application that has each request answered by one of the replicas."""

    def __init__(self, replicas: DeploymentHandle, shared: DeploymentHandle) -> None:
        self.replicas = replicas.options(stream=True)
        self.shared = shared

    def __serve_build_asgi_app__(self) -> Any:
        # Which also says that it has begun, as Ray Serve wants to know.
        return Router(default=self.respond, redirect_slashes=False)

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = HTTPRequest(scope, receive)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        form = error_form(path)
        try:
            body = bytearray()
            async for part in request.stream():
                body += part
                check_size(len(body))
            if (scope["method"], path) == ("GET", "/metrics"):
                answer = await self.metrics()
                await answer(scope, receive, send)
                return
            hints = await self.hints(path, bytes(body))
            await self.forward(scope, bytes(body), hints, form, send)
        except ClientDisconnect:
            return
        except APIError as error:
            answer = as_json(form(error), error.status, error.headers)
            await answer(scope, receive, send)

    async def metrics(self) -> Response:
        """Those of all replicas. Raises APIError."""
        try:
            async with asyncio.timeout(SHARED_SECONDS):
                texts = await self.shared.latest_metrics.remote()
        except (*LOST, TimeoutError) as error:
            message = "what all replicas share can't be reached"
            raise unavailable(message, "metrics_error") from error
        return Response(join_texts(texts), headers={"content-type": PROMETHEUS})

    async def hints(self, path: str, body: bytes) -> RoutingHints:
        """What is known of a request; nothing if `SharedState` doesn't answer."""
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(SHARED_SECONDS):
                if (named := ONE_RESPONSE.match(path)) is not None:
                    return RoutingHints(owner=await self.shared.writer.remote(named[1]))
                if len(body) > LARGE_BODY:
                    digests = await asyncio.to_thread(prefix_digests, body)
                else:
                    digests = prefix_digests(body)
                if digests:
                    matches = await self.shared.match.remote(digests)
                    return RoutingHints(digests=digests, matches=matches)
        return RoutingHints()

    async def forward(
        self,
        scope: Scope,
        body: bytes,
        hints: RoutingHints,
        form: ErrorForm,
        send: Send,
    ) -> None:
        """Have a replica answer. If it is lost before it begins, another one may.

        That happens once: it may have been the request that ended it. Raises APIError.
        """
        fields = {name: scope[name] for name in SCOPE_FIELDS if name in scope}
        kind = b""
        for last in (False, True):
            started = False
            messages = self.replicas.answer.remote(fields, body, hints=asdict(hints))
            try:
                async for message in messages:
                    if message["type"] == "http.response.start":
                        kind = dict(message["headers"]).get(b"content-type", b"")
                    started = True
                    await send(message)
                return
            except BackPressureError as error:
                raise APIError(
                    429, "too many requests wait", code="queue_full", headers=RETRY
                ) from error
            except LOST as error:
                LOGGER.warning("a replica is lost: %r", error)
                lost = unavailable("the replica ended", "engine_error")
                if started and kind.startswith(b"text/event-stream"):
                    await send(response_body(sse.event(form(lost)), more=False))
                    return
                if started or last:
                    raise lost from error
                if isinstance(error, ReplicaGoneError):
                    hints = replace(hints, tried=[error.replica])
            finally:
                messages.cancel()  # nothing if it is over


def prefix_digests(body: bytes) -> list[int]:
    """Digests of the prefixes of a body's prompt; none if it can't be read."""
    try:
        parsed = orjson.loads(body)
        previous = parsed.get("previous_response_id")
    except (orjson.JSONDecodeError, AttributeError):
        return []
    if isinstance(previous, str):
        return digest_of_id(previous)
    parts = [orjson.dumps(parsed[name]) for name in PROMPT_PARTS if parsed.get(name)]
    return digests_of(b"".join(parts)[:MAX_PREFIX_BYTES], STRIDE_BYTES)
