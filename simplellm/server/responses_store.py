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


class Running(Protocol):
    """A response that is being written."""

    def now(self) -> dict[str, Any]:
        """What there is of it."""

    async def cancel(self) -> None:
        """Let it end."""


@dataclass(frozen=True)
class Kept:
    """A response that is over.

    ``asked`` are the items that the model was given, those of earlier responses first.
    """

    response: dict[str, Any]
    asked: list[dict[str, Any]]

    @property
    def items(self) -> list[dict[str, Any]]:
        """What a response that follows it begins with."""
        return self.asked + self.response["output"]


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
        self._running: dict[str, Running] = {}
        # With the time at which it is forgotten, and its bytes; the oldest one first.
        self._kept: dict[str, tuple[Kept, float, int]] = {}

    def begin(self, id: str, response: Running) -> None:
        """A response is being written, and can be asked for."""
        with self.lock:
            self._running[id] = response

    def end(self, id: str, kept: Kept | None) -> None:
        """It no longer is; ``kept`` is to be found under its id from now on."""
        size = 0 if kept is None else len(orjson.dumps([kept.response, kept.asked]))
        with self.lock:
            self._running.pop(id, None)
            self._forget(id)
            if kept is not None:
                self._kept[id] = kept, self.clock() + self.seconds, size
                self.bytes += size
            self._tidy()

    def find(self, id: str) -> Kept | Running | None:
        """The response of this id, if there is one."""
        with self.lock:
            self._tidy()
            found = self._kept.get(id)
            return self._running.get(id) if found is None else found[0]

    def __len__(self) -> int:
        with self.lock:
            return len(self._kept)

    def _tidy(self) -> None:
        """Forget the oldest responses while they are too old or all are too many."""
        now = self.clock()
        while self._kept:
            oldest = next(iter(self._kept))
            full = len(self._kept) > self.most or self.bytes > self.most_bytes
            if not full and now < self._kept[oldest][1]:
                break
            self._forget(oldest)

    def _forget(self, id: str) -> None:
        if (found := self._kept.pop(id, None)) is not None:
            self.bytes -= found[2]
