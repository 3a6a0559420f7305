"""`simplellm serve`: uvicorn, its signals, and the line that says it is ready.

The event loop runs in the main thread, the engine and its text in threads of their own.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn

from simplellm.config import expect
from simplellm.llm import LLM
from simplellm.server.app import ACCESS, make_app
from simplellm.server.endpoint import LOGGER, Service

# Seconds that answers have to leave once the server ends: streams get their last event.
FLUSH_SECONDS = 2


@dataclass(frozen=True)
class Options:
    """What the command line says of a server."""

    names: Sequence[str]  # that clients call the model
    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    key: str | None = None  # that clients must send
    timeout: float = 600.0
    grace: float = 30.0  # seconds for running requests once it is to end
    log_level: str = "warning"
    access_log: str = "off"  # or "requests" or "prompts"

    def __post_init__(self) -> None:
        expect(self.key != "", "the API key", self.key, "one that is not empty")


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
        tell: Callable[[str], object],
    ) -> None:
        super().__init__(config)
        self.service, self.grace, self.tell = service, grace, tell
        self.deadline = float("inf")  # by time.monotonic()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came. Uvicorn would raise it again at its end; this is ours."""
        now = time.monotonic()
        self.deadline = now if self.service.draining else now + self.grace
        self.service.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop now; asked ten times a second."""
        await super().on_tick(counter)
        service = self.service
        dead = service.llm.engine.dead is not None
        idle = service.draining and not service.running
        late = time.monotonic() >= self.deadline
        if not (dead or idle or late):
            return False
        if late:  # what still runs is told so, and its pages are free
            await asyncio.to_thread(service.llm.close, cancel=True)
        return True

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        listener = self.servers[0].sockets[0]
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        name = self.service.names[0]
        self.tell(f"{name} is served at http://{shown}:{port}")


def write_access_log() -> None:
    """Let the access log's lines go to standard error as they are."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    ACCESS.addHandler(handler)
    ACCESS.setLevel(logging.INFO)
    ACCESS.propagate = False


def serve(llm: LLM, options: Options, tell: Callable[[str], object]) -> int:
    """Answer requests until a signal comes or the engine dies; the exit status.

    ``tell`` is given the line that says where the server is, once it listens.
    """
    logging.basicConfig(level=options.log_level.upper())
    if options.access_log != "off":
        write_access_log()
    service = Service(
        llm,
        options.names,
        options.key,
        options.timeout,
        log_prompts=options.access_log == "prompts",
    )
    config = uvicorn.Config(
        make_app(service),
        host=options.host,
        port=options.port,
        log_config=None,
        access_log=False,  # ours has the tokens too
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    DrainingServer(config, service, options.grace, tell).run()
    if llm.engine.dead is not None:
        LOGGER.error("the engine died: %r", llm.engine.dead)
        return 1
    return 0
