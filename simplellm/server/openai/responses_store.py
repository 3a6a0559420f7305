"""Responses that can be asked for later: in memory, some of them, for some time."""

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
    """A response that can be asked for, whether it is being written or over."""

    @property
    def input_items(self) -> list[dict[str, Any]]:
        """The items that the model was given, those of earlier responses first."""

    def now(self) -> dict[str, Any]:
        """The response as it stands."""

    async def cancel(self) -> None:
        """Let it end, if it hasn't yet."""


@dataclass(frozen=True)
class FinishedResponse:
    """A response that is over."""

    response: dict[str, Any]
    input_items: list[dict[str, Any]]
    # Of ``input_items`` as JSON: they are many, and an event loop shouldn't count them.
    input_bytes: int = 0

    def own_items(self, id: str) -> list[dict[str, Any]]:
        """Items whose ids are made of the response's ``id``: nobody can guess them."""
        items = [*self.response["output"], *self.input_items]
        return [item for item in items if id.removeprefix("resp_") in item["id"]]

    def now(self) -> dict[str, Any]:
        return self.response

    async def cancel(self) -> None:
        pass


class ResponseStore:
    """Keeps responses by their ids; the oldest make room. Any thread may use it.

    A response that follows another one holds all that came before. So each can be
    forgotten by itself, and its bytes are counted with those before it.
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
        """A response is being written, and can be asked for."""
        with self.lock:
            self._running[id] = response

    def end(self, id: str, kept: FinishedResponse) -> None:
        """``kept`` is to be found under this id from now on, if anything was."""
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
        """Drop the response of this id, even if it ends later."""
        with self.lock:
            self._forget(id)

    def find(self, id: str) -> StoredResponse | None:
        """The response of this id, if there is one."""
        with self.lock:
            self._tidy()
            entry = self._finished.get(id)
            return self._running.get(id) if entry is None else entry[0]

    def find_item(self, id: str) -> dict[str, Any] | None:
        """The item of this id that a kept response was given, or has written."""
        with self.lock:
            self._tidy()
            return self._items.get(id, ("", None))[1]

    def __len__(self) -> int:
        with self.lock:
            return len(self._finished)

    def _tidy(self) -> None:
        """Forget the oldest responses while they are too old or all are too many."""
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
