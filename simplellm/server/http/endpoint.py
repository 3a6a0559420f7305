"""Endpoints: how a body is read, answered, and the answer sent."""

import asyncio
import inspect
import logging
import re
import time
import zlib
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, dataclass, field
from reprlib import repr as short
from typing import Any, ClassVar

import orjson
from anyio import CapacityLimiter, to_thread
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from simplellm.api.llm import LLM
from simplellm.api.output_processor import END
from simplellm.api.outputs import Usage
from simplellm.api.streams import Replies
from simplellm.base.request import EngineError
from simplellm.base.request_spec import RequestSpec
from simplellm.engine.engine_client import EngineClient
from simplellm.server.http import sse
from simplellm.server.http.bodies import (
    Body,
    ValidationContext,
    parse_json,
    read_body,
    read_query,
)
from simplellm.server.http.errors import (
    UNMEANT,
    APIError,
    ErrorForm,
    as_api_error,
    openai_form,
    unavailable,
)
from simplellm.server.http.metrics import ServerMetrics
from simplellm.server.openai.responses_store import ResponseStore
from simplellm.server.remote.client import RemoteError
from simplellm.server.start import Options
from simplellm.text.dialects.dialect import HARMONY

MAX_BODY = 16 * 2**20  # bytes: a full context as text or ids, several times
# A longer body is parsed and tokenized in a worker thread, and so is what may have to
# compile a grammar: the event loop, and every other stream, would wait for it.
LARGE_BODY = 16 * 2**10
LOGGER = logging.getLogger("simplellm.server")
ENCODINGS = ("identity", "gzip", "x-gzip", "deflate")  # of bodies
MOST_WARNED = 1000  # names of ignored parameters in the log; clients can make up any
LAST_WORDS = 1.0  # seconds that a failed stream has to take its last event


class DisconnectedError(Exception):
    """The client has disconnected: there is nobody to send anything to."""


@dataclass(eq=False)
class Service:
    """What all requests of one server share."""

    llm: LLM
    options: Options
    name: str = "0"  # of this server's engine among several, in metrics
    created: int = field(default_factory=lambda: int(time.time()))
    responses: ResponseStore = field(default_factory=ResponseStore)
    # At most 4 bodies with grammars compile at once; other requests are not held up.
    compiling: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(4))
    draining: bool = False  # no new requests, while those that run finish
    running: int = 0  # HTTP requests
    # The id of the HTTP request that each of the engine's belongs to, by its id.
    calls: dict[int, str] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)  # of names that are ignored

    def __post_init__(self) -> None:
        self.metrics = ServerMetrics(self.llm, self.options.names[0], self.name)

    @property
    def engine(self) -> EngineClient:
        return self.llm.engine

    def check_model(self, name: str | None) -> str:
        """The model's name for the answer. Raises APIError for an unknown one."""
        names = self.options.names
        if name is None or name in names:
            return name or names[0]
        message = f"model is {short(name)}; expected one of {', '.join(names)}"
        raise APIError(404, message, param="model", code="model_not_found")

    def context(self) -> ValidationContext:
        """The context in which one body is validated."""
        template = self.llm.input_processor.dialect is not HARMONY
        names, strict = self.options.names, self.options.strict
        return ValidationContext(strict, names, template=template)

    def warn(self, ignored: Iterable[str]) -> None:
        """Log ignored names, each once: every request may have them."""
        for name in ignored:
            if name not in self.warned and len(self.warned) < MOST_WARNED:
                self.warned.add(name)
                LOGGER.warning("%r is ignored; --strict refuses it", name)

    def check(self) -> None:
        """Raise APIError if the server takes no requests now."""
        if self.engine.dead is not None:
            raise unavailable("the engine died", "engine_error")
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")


@dataclass(eq=False)
class Call:
    """One HTTP request to an endpoint."""

    service: Service
    request: HTTPRequest
    id: str  # of the request: the client's, or a new one
    body: Any = None  # of the endpoint's kind
    model: str = ""  # that the body names, as answers repeat it
    query: Any = None  # of the endpoint's kind of query
    ignored: str = ""  # names in them that nothing is done with
    # What the access log has of it: its tokens, for example.
    facts: dict[str, Any] = field(default_factory=dict)

    def ignore(self, name: str) -> None:
        """Note that what ``name`` asks for isn't done, and warn of it once."""
        self.ignored = f"{self.ignored}, {name}" if self.ignored else name
        self.service.warn([name])

    def fail(self, error: APIError) -> None:
        """Note an error for the log; its message only where prompts are logged."""
        self.facts["error"] = error.code or error.type
        if error.param is not None:
            self.facts["param"] = error.param
        if self.service.options.access_log == "prompts":
            self.facts["message"] = error.message


class Generation:
    """The requests of a body, and how their replies become an answer.

    A reply has an index, prompt by prompt, and comes in parts: RequestOutput, or Delta
    where ``chat``. The methods do nothing but make data, so that a stream can be
    compared with the whole. ``first``, ``part`` and ``last`` are called in this order,
    and `ended` behind the last part of a reply.
    """

    ending: ClassVar[bytes] = sse.DONE  # of a stream
    # Whether `whole` is made of what `part` has kept. Others can wait for the end.
    gathers: ClassVar[bool] = False
    continuous_usage = False  # whether each event of a stream has the usage so far

    def __init__(
        self, specs: list[RequestSpec], *, n: int = 1, chat: bool, stream: bool
    ) -> None:
        self.specs, self.n = specs, n
        self.chat, self.stream = chat, stream
        # Whether it goes on when the client leaves. A client that wants no stream then
        # needn't wait: it gets `now` at the beginning.
        self.detached = False

    def begin(self, replies: Replies) -> None:
        """The requests run, and nothing is sent yet. Like `end`, this may have effects.

        Both are called once more if the answer begins again on another engine.
        """

    def end(self, started: bool) -> None:
        """End the answer; only `failure` may be called after this.

        ``started``: whether the client has got the beginning of a stream.
        """

    def first(self) -> list[dict[str, Any]]:
        """Events before any part."""
        return []

    def part(self, index: int, part: Any) -> list[dict[str, Any]]:
        """Events for a part of reply ``index``."""
        raise NotImplementedError

    def ended(self, index: int, output: Any) -> list[dict[str, Any]]:
        """Events once reply ``index`` is over; ``output`` is all of it."""
        return []

    def last(self, outputs: Sequence[Any], usage: Usage) -> list[dict[str, Any]]:
        """Events at the end; ``outputs`` are the whole replies, by index."""
        raise NotImplementedError

    def whole(self, outputs: Sequence[Any], usage: Usage) -> dict[str, Any]:
        """The answer in one object, where no stream was asked for."""
        raise NotImplementedError

    def now(self) -> dict[str, Any]:
        """The state of a detached answer."""
        raise NotImplementedError

    def failure(self, error: APIError) -> dict[str, Any]:
        """The event that ends a stream which goes wrong."""
        return openai_form(error)


@dataclass(frozen=True)
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    handler: Callable[[Call], Any]  # a dict, a Response, a Generation, or awaits one
    _: KW_ONLY
    body: type[Body] | None = None
    query: type[Body] | None = None  # what stands behind the "?"; None: it's ignored
    open: bool = False  # whether it needs no key, and answers while the server drains
    media: str = "application/json"  # what it answers with, streams aside
    result: Mapping[str, Any] = field(default_factory=dict)  # its JSON schema
    form: ErrorForm = openai_form  # of errors

    @property
    def summary(self) -> str:
        """What its handler says of itself in one line."""
        return (inspect.getdoc(self.handler) or "").partition("\n")[0]

    async def respond(
        self, call: Call, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer one request. Raises if something fails before anything was sent."""
        service = call.service
        if not self.open:
            service.check()
        raw = b""
        if self.body is not None:
            raw = await receive_json(call.request, service.options.timeout)
        call.facts["bytes"] = len(raw)
        try:
            if len(raw) > LARGE_BODY:
                await run_in_threadpool(self.read, call, raw)
            else:
                self.read(call, raw)
            if getattr(call.body, "compiles", False):
                limiter = service.compiling
                answer = await to_thread.run_sync(self.handler, call, limiter=limiter)
            elif len(raw) > LARGE_BODY or getattr(call.body, "recalls", False):
                answer = await run_in_threadpool(self.handler, call)
            else:
                answer = self.handler(call)
            if inspect.isawaitable(answer):
                answer = await answer
        except Exception as error:
            kinds = [kind for kind in (self.body, self.query) if kind is not None]
            known = {name for kind in kinds for name in kind.known()}
            if (api_error := as_api_error(error, known)) is None:
                raise
            if isinstance(error, UNMEANT):
                LOGGER.warning(
                    "request %s is refused by accident", call.id, exc_info=True
                )
            raise api_error from None
        if isinstance(answer, Generation):
            work = write_answer(call, answer, send)
            await (work if answer.detached else with_cancellation(receive, work))
            return
        response = answer if isinstance(answer, Response) else as_json(answer)
        await response(scope, receive, send)

    def read(self, call: Call, raw: bytes) -> None:
        """Read and check the body and the query."""
        if self.body is not None:
            parsed = parse_json(raw)
            if call.service.options.access_log == "prompts":
                call.facts["body"] = parsed
            call.body = self.read_parsed(call, parsed)
        if self.query is not None:
            pairs = call.request.query_params.multi_items()
            call.query = read_query(self.query, pairs, call.service.context())

    def read_parsed(self, call: Call, parsed: Any) -> Any:
        """The body of parsed JSON. Raises as `read_body`."""
        assert self.body is not None
        context = call.service.context()
        body = read_body(self.body, parsed, context)
        call.model = call.service.check_model(getattr(body, "model", None))
        call.ignored = context.header
        call.service.warn(context.ignored)
        return body


def as_json(
    data: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A response of plain data."""
    return Response(orjson.dumps(data), status, headers, "application/json")


async def receive_json(request: HTTPRequest, seconds: float) -> bytes:
    """The JSON body of a request, of limited size; reading it may take ``seconds``."""
    given = request.headers.get("content-type", "")
    kind = re.split("[;,]", given)[0].strip().lower()  # some send it twice
    # A page of another site can send anything else without asking the browser first.
    if kind != "application/json":
        message = f"the content-type is {short(kind)}; expected application/json"
        raise APIError(415, message, code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ENCODINGS:
        message = f"the content-encoding is {short(encoding)}; expected gzip or none"
        headers = {"accept-encoding": "gzip"}  # as RFC 9110 has it
        raise APIError(415, message, code="unsupported_media_type", headers=headers)
    said = request.headers.get("content-length", "")
    check_size(int(said) if said.isdecimal() else 0)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                check_size(len(body))
    except ClientDisconnect:
        raise DisconnectedError from None
    except TimeoutError:
        message = f"the body did not come within {seconds} seconds"
        raise APIError(408, message, code="timeout") from None
    if encoding == "identity":
        return bytes(body)
    return await run_in_threadpool(decompressed, bytes(body))


def decompressed(raw: bytes) -> bytes:
    """A body that came as gzip or deflate. Raises APIError.

    Decompression stops at the size limit, however small the compressed body was.
    """
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # knows both by their head
    try:
        body = unpacker.decompress(raw, MAX_BODY + 1)
    except zlib.error as error:
        message = f"the body is not what its content-encoding says: {error}"
        raise APIError(400, message, code="invalid_encoding") from None
    check_size(len(body))
    if not unpacker.eof or unpacker.unused_data:
        message = "the compressed body is incomplete, or something follows it"
        raise APIError(400, message, code="invalid_encoding")
    return body


def check_size(length: int) -> None:
    """Raise APIError if a body of so many bytes is too long."""
    if length > MAX_BODY:
        message = f"the body has more than {MAX_BODY:,} bytes; expected fewer"
        raise APIError(413, message, code="body_too_large")


async def with_cancellation(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Await ``work``, or raise DisconnectedError as soon as the client disconnects."""
    task = asyncio.create_task(work)
    leaves = asyncio.create_task(listen_for_disconnect(receive))
    try:
        await asyncio.wait([task, leaves], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise DisconnectedError
        task.result()
    finally:
        for one in (task, leaves):
            one.cancel()
        await asyncio.gather(task, leaves, return_exceptions=True)


async def listen_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def write_answer(call: Call, answer: Generation, send: Send) -> None:
    """Run the requests of ``answer`` and send what it makes of them.

    Nothing is sent before the first event exists: until then an error can still be an
    HTTP status. Afterwards it is the stream's last event.
    """
    service, started = call.service, False
    try:
        # Whatever ends this ends the generator too, and with it the requests.
        async with (
            asyncio.timeout(service.options.timeout),
            aclosing(chunks_with_retry(call, answer)) as written,
        ):
            async for data in written:
                if not started:
                    started = True
                    await send(response_start(None if answer.stream else len(data)))
                # Waits while the client reads slowly; parts merge meanwhile.
                await send(response_body(data, more=answer.stream))
    except Exception as error:
        api_error = as_api_error(error)
        if not started or api_error is None:
            raise
        call.fail(api_error)
        if not answer.stream:  # the object is there, for whoever reads it
            if answer.detached:
                answer.failure(api_error)
            return
        # If the client has stopped reading, this can't be sent either.
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                await send(
                    response_body(sse.event(answer.failure(api_error)), more=False)
                )
        return
    if answer.stream:
        await send(response_body(b"", more=False))


def response_start(length: int | None) -> dict[str, Any]:
    """The message that starts a response: an object of this ``length``, or a stream."""
    headers = sse.HEADERS
    if length is not None:
        headers = {"content-type": "application/json", "content-length": str(length)}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": pairs}


def response_body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def chunks_with_retry(
    call: Call, answer: Generation
) -> AsyncGenerator[bytes, None]:
    """The chunks of a body: one object, or the events of a stream, part by part.

    If an engine's process ends before anything was sent, another engine begins again.
    That happens once: the request itself may have ended the first one.
    """
    for last in (False, True):
        started = False
        try:
            async with aclosing(chunks(call, answer)) as written:
                async for data in written:
                    started = True
                    yield data
            return
        except EngineError as error:
            if started or last or not isinstance(error.__cause__, RemoteError):
                raise


async def chunks(call: Call, answer: Generation) -> AsyncGenerator[bytes, None]:
    """The chunks of a body, from one engine."""
    llm = call.service.llm
    timer = call.service.metrics.timer(answer.specs, answer.n)
    replies = llm.replies(answer.specs, n=answer.n, chat=answer.chat)
    replies.ends = answer.stream
    request_ids = [reader.request.request_id for reader in replies.readers]
    call.service.calls |= dict.fromkeys(request_ids, call.id)
    started = False
    try:
        answer.begin(replies)
        waiting = answer.first()
        if answer.detached and not answer.stream:
            started = True
            yield orjson.dumps(answer.now())
        if not (answer.stream or answer.gathers):
            await replies.finish()
        async for index, part in replies:
            if part is END:
                waiting += answer.ended(index, replies.readers[index].reply.output())
            else:
                waiting += answer.part(index, part)
                if answer.stream:
                    timer.part(index)
            if waiting and answer.stream:
                if answer.continuous_usage:
                    so_far = {"usage": usage_fields(replies.usage())}
                    waiting = [event | so_far for event in waiting]
                started = True
                yield b"".join(map(sse.event, waiting))
            waiting = []
        outputs, usage = replies.outputs(), replies.usage()
        reasons = [output.finish_reason for output in outputs]
        timer.done(outputs, usage)
        call.facts |= facts_of(reasons, usage)
        if "abort" in reasons:
            raise unavailable("the server is shutting down", "shutting_down")
        if answer.stream:
            waiting += answer.last(outputs, usage)
            yield b"".join(map(sse.event, waiting)) + answer.ending
        else:
            whole = answer.whole(outputs, usage)
            if not started:
                yield orjson.dumps(whole)
    finally:
        answer.end(started)
        for request_id in request_ids:
            del call.service.calls[request_id]
        await replies.aclose()


def facts_of(reasons: Sequence[str | None], usage: Usage) -> dict[str, Any]:
    """The facts about an answer for the access log."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "finish_reasons": list(reasons),
    }


def usage_fields(usage: Usage) -> dict[str, Any]:
    """The usage in the fields of OpenAI's completions and chats."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
