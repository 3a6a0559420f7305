"""Stores responses in memory, a limited number for a limited time."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

MOST = 1000  # responses
MOST_BYTES = 256 * 2**20  # of all of them, as JSON
SECONDS = 24 * 60 * 60.0  # after which a response is forgotten


class StoredResponse(Protocol):
    """A response that clients can get, running or finished."""

    @property
    def input_items(self) -> list[dict[str, Any]]:
        """Its input items, those of earlier responses first."""

    def now(self) -> dict[str, Any]:
        """The response as it stands."""

    async def cancel(self) -> None:
        """End it, unless it has ended."""


@dataclass(frozen=True)
class FinishedResponse:
    """A response that has ended."""

    response: dict[str, Any]
    input_items: list[dict[str, Any]]
    # Of ``input_items`` as JSON: they are many, and an event loop shouldn't count them.
    input_bytes: int = 0

    def own_items(self, id: str) -> list[dict[str, Any]]:
        """The items whose ids contain the response's ``id``: nobody can guess these."""
        items = [*self.response["output"], *self.input_items]
        return [item for item in items if id.removeprefix("resp_") in item["id"]]

    def now(self) -> dict[str, Any]:
        return self.response

    async def cancel(self) -> None:
        pass


class ResponseStore:
    """Stores responses by id; the oldest are evicted first. Thread-safe.

    A response holds all items of those that it follows. So each can be evicted alone,
    and its size includes these items.
    """

    def __init__(
        self,
        most: int = MOST,
        most_bytes: int = MOST_BYTES,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most, self.most_bytes, self.seconds = most, most_bytes, seconds
        self.clock = clock
        self.bytes = 0
        self.lock = threading.Lock()
        self._running: dict[str, StoredResponse] = {}
        # With the time at which it is forgotten, and its bytes; the oldest one first.
        self._finished: dict[str, tuple[FinishedResponse, float, int]] = {}
        # The items of kept responses that have ids of ours, with their responses' ids.
        self._items: dict[str, tuple[str, dict[str, Any]]] = {}

    def begin(self, id: str, response: StoredResponse) -> None:
        """Store a running response."""
        with self.lock:
            self._running[id] = response

    def end(self, id: str, kept: FinishedResponse) -> None:
        """Store ``kept`` under this id from now on, unless it was deleted."""
        size = len(orjson.dumps(kept.response)) + kept.input_bytes
        with self.lock:
            if id not in self._running and id not in self._finished:
                return
            self._forget(id)
            self._items |= {item["id"]: (id, item) for item in kept.own_items(id)}
            self._finished[id] = kept, self.clock() + self.seconds, size
            self.bytes += size
            self._tidy()

    def forget(self, id: str) -> None:
        """Delete the response of this id, even if it ends later."""
        with self.lock:
            self._forget(id)

    def find(self, id: str) -> StoredResponse | None:
        """The response of this id, if there is one."""
        with self.lock:
            self._tidy()
            entry = self._finished.get(id)
            return self._running.get(id) if entry is None else entry[0]

    def find_item(self, id: str) -> dict[str, Any] | None:
        """The input or output item of this id of any stored response."""
        with self.lock:
            self._tidy()
            return self._items.get(id, ("", None))[1]

    def __len__(self) -> int:
        with self.lock:
            return len(self._finished)

    def _tidy(self) -> None:
        """Evict the oldest responses while they are too old, too many or too large."""
        now = self.clock()
        while self._finished:
            oldest = next(iter(self._finished))
            full = len(self._finished) > self.most or self.bytes > self.most_bytes
            if not full and now < self._finished[oldest][1]:
                break
            self._forget(oldest)

    def _forget(self, id: str) -> None:
        self._running.pop(id, None)
        if (entry := self._finished.pop(id, None)) is not None:
            self.bytes -= entry[2]
            for item in entry[0].own_items(id):
                if self._items.get(item["id"], ("",))[0] == id:
                    del self._items[item["id"]]
