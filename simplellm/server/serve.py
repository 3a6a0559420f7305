"""`simplellm serve`: uvicorn, its signals, and the line that says it is ready.

The event loop runs in the main thread, and text is made in a thread of its own. The
engine is in another process, or also in a thread, as tests have it.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from simplellm.api.llm import LLM
from simplellm.server.app import ACCESS, make_app
from simplellm.server.http.endpoint import LOGGER, Service
from simplellm.server.start import Options, freeze_objects

# Seconds that answers have to leave once the server ends: streams get their last event.
FLUSH_SECONDS = 2
# Seconds that a connection has to bring a request's line and headers.
HEAD_SECONDS = 30


class RequestParser(httptools.HttpRequestParser):
    """Reads requests, and begins anew behind one that offers another protocol."""

    def __init__(self, connection: "TimelyConnection") -> None:
        super().__init__(connection)
        self.connection = connection

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.connection.upgrades:
                raise
            self.connection.read_again(data[upgrade.args[0] :])


class TimelyConnection(HttpToolsProtocol):
    """A connection that is closed unless the head of a request comes in time.

    Uvicorn's own limit is one between requests: it begins with the end of an answer and
    ends with any byte, so that a connection could stay silent from the beginning, or in
    the middle of a head, forever. A body's time is the endpoint's concern.

    A request may offer to go on in another protocol, as Java's client does with each:
    "Upgrade: h2c". Who doesn't want to answers it as it is. Uvicorn would answer it
    without its body, since the parser ends at the head.
    """

    seconds: float = HEAD_SECONDS
    timer: asyncio.TimerHandle | None = None  # while a head is to come

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = RequestParser(self)
        self.watch()

    @property
    def upgrades(self) -> bool:
        """Whether the request being read offers another protocol."""
        offers = any(name == b"upgrade" for name, _ in self.headers)
        return offers and self.parser.should_upgrade()

    def on_headers_complete(self) -> None:
        if not self.upgrades:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.upgrades:
            super().on_message_complete()

    def read_again(self, rest: bytes) -> None:
        """Read the head again without its offer, and then ``rest``, what follows it."""
        lines = [b"%s %s HTTP/1.1" % (self.parser.get_method(), self.url)]
        lines += [b"%s: %s" % pair for pair in self.headers if pair[0] != b"upgrade"]
        self.parser = RequestParser(self)
        self.parser.feed_data(b"\r\n".join([*lines, b"", rest]))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_watching()
        super().connection_lost(exc)

    def watch(self) -> None:
        """Begin to wait for a head, or stop if a request is there."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.stop_watching()
        elif self.timer is None:
            close = self.timeout_keep_alive_handler
            self.timer = self.loop.call_later(self.seconds, close)

    def stop_watching(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class DrainingServer(uvicorn.Server):
    """Uvicorn, which lets running requests finish while it refuses new ones.

    The first signal drains, for at most ``grace`` seconds; a second one ends all that
    still runs. The death of the engine ends the server too.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        grace: float,
        announce: Callable[[str], object],
    ) -> None:
        super().__init__(config)
        self.service, self.grace, self.announce = service, grace, announce
        self.deadline = float("inf")  # by time.monotonic()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal. Uvicorn would raise it again at its end; this one doesn't."""
        self.force_exit = self.service.draining  # waits for no slow reader
        self.deadline = time.monotonic() + (0 if self.force_exit else self.grace)
        self.service.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop now; asked ten times a second."""
        await super().on_tick(counter)
        service = self.service
        dead = service.engine.dead is not None
        idle = service.draining and not service.running
        late = time.monotonic() >= self.deadline
        if not (dead or idle or late):
            return False
        if late:  # what still runs ends as aborted, and its pages are free
            await asyncio.to_thread(service.llm.close, cancel=True)
        return True

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        listener = self.servers[0].sockets[0]
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        name = self.service.options.names[0]
        # The address comes last, where a terminal makes a link of it.
        self.announce(f"{name}, a chat and /docs: served at http://{shown}:{port}")


def write_access_log() -> None:
    """Let the access log's lines go to standard error as they are."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    ACCESS.addHandler(handler)
    ACCESS.setLevel(logging.INFO)
    ACCESS.propagate = False


def serve(
    llm: LLM, options: Options, bound: socket.socket, announce: Callable[[str], object]
) -> int:
    """Answer requests until a signal comes or the engine dies; the exit status.

    ``announce`` is given the line that says where the server is, once it listens.
    """
    logging.basicConfig(level=options.log_level.upper())
    if options.access_log != "off":
        write_access_log()
    service = Service(llm, options)
    config = uvicorn.Config(
        make_app(service),
        http=TimelyConnection,
        log_config=None,
        access_log=False,  # ours has the tokens too
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    freeze_objects()
    DrainingServer(config, service, options.grace, announce).run([bound])
    if service.engine.dead is not None:
        LOGGER.error("the engine died: %r", service.engine.dead)
        return 1
    return 0
