"""/live: the state of the engine, a few times a second, for the page at /.

Each event is a part of `Engine.snapshot` that fits a screen, without any text: whoever
may see the engine may not read other people's conversations. This is no liveness
probe: that is /health.
"""

import asyncio
import threading
import time
from contextlib import suppress
from itertools import islice
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from simplellm.base.request import EngineError
from simplellm.engine.snapshot import Snapshot
from simplellm.server.http import sse
from simplellm.server.http.endpoint import (
    Call,
    Service,
    response_body,
    response_start,
    with_cancellation,
)
from simplellm.server.http.errors import RETRY, APIError

EVERY = 0.2  # seconds between two looks
QUIET = 15.0  # seconds without news after which a sign of life is sent
STALLED = 5.0  # seconds that a viewer may take for one event
MAX_VIEWERS = 32
MAX_ROWS = 10  # requests in an event, of those that run and of those that wait
MAX_PAGES = 240  # in an event
ALIVE = b": still here\n\n"  # a comment, which readers of events skip


def trim_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot of the engine with as many requests and pages as a screen shows.

    Its tables are {index: page} for each group, without freed pages, and ``totals``
    counts all of them.
    """
    pages = snapshot["pages"]
    running = snapshot["running"][:MAX_ROWS]
    shown = [str(r["request_id"]) for r in running]
    tables = {str(request_id): table for request_id, table in pages["tables"].items()}
    groups = len(pages["windows"])
    most = MAX_PAGES // max(1, groups * len(shown))  # of a request, in each group
    references, kept = pages["references"], pages["cached"]
    return {
        "running": running,
        "waiting": snapshot["waiting"][:MAX_ROWS],
        "pages": {
            "num_pages": pages["num_pages"],
            "page_size": pages["page_size"],
            "tables": {
                request_id: [first_pages(table, most) for table in tables[request_id]]
                for request_id in shown
                if request_id in tables
            },
            "cached": kept[-MAX_PAGES:],  # those that were used last
        },
        "totals": {
            "running": len(snapshot["running"]),
            "waiting": len(snapshot["waiting"]),
            "held": sum(count > 0 for count in references),
            "shared": sum(count > 1 for count in references),
            "kept": len(kept),
        },
    }


def first_pages(table: list[int], most: int) -> dict[str, int]:
    """The first ``most`` pages of a table, without freed ones, by their indices."""
    kept = ((str(index), page) for index, page in enumerate(table) if page >= 0)
    return dict(islice(kept, most))


class SnapshotPoller:
    """Polls the engine for all viewers at once, and only while there are any."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.viewers = 0
        self.seen: dict[str, Any] = {}
        self.looked = float("-inf")  # when, by time.monotonic()
        self.lock = threading.Lock()

    def poll(self) -> dict[str, Any]:
        """The engine's state, at most `EVERY` seconds old. Raises EngineError."""
        with self.lock:
            now = time.monotonic()
            if now - self.looked >= EVERY:
                engine = self.service.engine
                snapshot, stats = trim_snapshot(engine.snapshot()), engine.stats()
                snapshot["totals"] |= {
                    "tokens": stats.generated_tokens,
                    "found": stats.cached_tokens,
                    "preemptions": stats.preemptions,
                    "drafts": stats.draft_tokens,
                    "accepted": stats.accepted_tokens,
                }
                self.seen, self.looked = snapshot, now
            return self.seen

    def answer(self, call: Call) -> Response:
        if self.viewers >= MAX_VIEWERS:
            message = f"{self.viewers} others look already; expected fewer"
            raise APIError(429, message, code="too_many_viewers", headers=RETRY)
        return View(self, call)


class View(Response):
    """The event stream of one viewer, until it leaves or the server ends.

    Requests that were sent with the x-request-id of the view are marked as its own.
    """

    def __init__(self, poller: SnapshotPoller, call: Call) -> None:
        self.poller, self.call = poller, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.poller.viewers += 1
        try:
            # A viewer that doesn't read keeps nobody waiting but itself.
            with suppress(TimeoutError):
                await with_cancellation(receive, self.show(send))
        finally:
            self.poller.viewers -= 1

    async def show(self, send: Send) -> None:
        service = self.call.service
        await send(response_start(None))
        latest: dict[str, Any] = {}
        sent = time.monotonic()
        while not service.draining and service.engine.dead is None:
            with suppress(EngineError):
                state = await run_in_threadpool(self.state)  # the engine may be far
                data = sse.event(state) if state != latest else b""
                if not data and time.monotonic() - sent >= QUIET:
                    data = ALIVE
                if data:
                    async with asyncio.timeout(STALLED):
                        await send(response_body(data, more=True))
                    latest, sent = state, time.monotonic()
            await asyncio.sleep(EVERY)
        await send(response_body(b"", more=False))

    def state(self) -> dict[str, Any]:
        """The latest state, in which this viewer's requests are marked."""
        seen = self.poller.poll()
        calls, own = self.call.service.calls, self.call.id

        def marked(request: dict[str, Any]) -> dict[str, Any]:
            return {**request, "mine": calls.get(request["request_id"]) == own}

        marks = {name: [*map(marked, seen[name])] for name in ("running", "waiting")}
        return {**seen, **marks}
