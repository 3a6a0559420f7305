"""Parts of replies on their way from the text thread to whoever reads them.

A slow reader holds up nobody and fills no memory: what waits is merged. An event loop
is woken once for all that comes before it gets to run.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from simplellm.outputs import merge

END = object()  # behind the last part of an answer
MANY = 64  # parts of a reply that wait as they came
LONG = 4096  # characters and tokens of a part that takes in no more


def is_end(part: object) -> bool:
    """Whether nothing follows: END, or what went wrong."""
    return part is END or isinstance(part, Exception)


class Inbox:
    """Parts that wait for their reader, by the index of their reply.

    ``wake`` is called for each of them, in the thread that puts; whoever reads sets it
    before anything comes. Once it is ``quiet`` only ends are kept.
    """

    wake: Callable[[], object]

    def __init__(self) -> None:
        self.quiet = False
        self.waiting: dict[int, list[Any]] = {}
        self.lock = threading.Lock()

    def put(self, index: int, part: Any) -> None:
        """Add a part of reply ``index``."""
        if self.quiet and not is_end(part):
            return
        with self.lock:
            parts = self.waiting.setdefault(index, [])
            if len(parts) >= MANY and not is_end(part):
                last = parts.pop()
                short = len(last.text) + len(last.token_ids) < LONG
                parts += merge([last, part]) if short else [last, part]
            else:
                parts.append(part)
        self.wake()

    def take(self) -> dict[int, list[Any]]:
        """All that waits; then nothing does."""
        with self.lock:
            taken, self.waiting = self.waiting, {}
        return taken


class Bell:
    """Wakes an event loop from another thread, once for all that rings meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.rung: dict[asyncio.Event, None] = {}
        self.pending = False  # a call of `answer`, which will see to all in `rung`

    def ring(self, event: asyncio.Event) -> None:
        """Set ``event``, soon, in the loop. RuntimeError if that is closed."""
        self.rung[event] = None
        if self.pending and not self.loop.is_closed():
            return
        self.pending = True
        self.loop.call_soon_threadsafe(self.answer)

    def answer(self) -> None:
        """In the loop: set what was rung."""
        self.pending = False  # first: who rings from now on gets another call
        while self.rung:
            event, _ = self.rung.popitem()
            event.set()
