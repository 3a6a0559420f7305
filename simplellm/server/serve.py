"""`simplellm serve`: uvicorn, its signals, and the line that says it is ready.

The event loop runs in the main thread, the engine and its text in threads of their own.
"""

import asyncio
import logging
import sys
import time
from types import FrameType
from typing import Any

import uvicorn

from simplellm.request import EngineError
from simplellm.server.app import ACCESS, make_app
from simplellm.server.endpoint import Service

LOGGER = logging.getLogger("simplellm.server")
LOG_LEVELS = ("debug", "info", "warning", "error")
# Seconds that answers have to leave once the server ends: streams get their last event.
FLUSH_SECONDS = 2


class DrainingServer(uvicorn.Server):
    """Uvicorn, which lets running requests finish while it refuses new ones.

    The first signal drains, for at most ``grace`` seconds; a second one ends all that
    still runs. The death of the engine ends the server too.
    """

    def __init__(self, config: uvicorn.Config, service: Service, grace: float) -> None:
        super().__init__(config)
        self.service, self.grace = service, grace
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
        print(f"simplellm: serving {name} at http://{shown}:{port}", file=sys.stderr)


def write_access_log() -> None:
    """Let the access log's lines go to standard error as they are."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    ACCESS.addHandler(handler)
    ACCESS.setLevel(logging.INFO)
    ACCESS.propagate = False


def serve(
    service: Service, *, host: str, port: int, grace: float, log_level: str
) -> int:
    """Answer requests until a signal comes or the engine dies; the exit status."""
    config = uvicorn.Config(
        make_app(service),
        host=host,
        port=port,
        log_level=log_level,
        access_log=False,  # ours has the tokens too
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    server = DrainingServer(config, service, grace)
    server.run()
    try:
        service.llm.engine.check()
    except EngineError as error:
        LOGGER.error("%s", error)
        return 1
    return 0
