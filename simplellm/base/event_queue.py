"""The queue that an engine's events leave through."""

import queue
from collections import deque
from collections.abc import Sequence
from typing import Any


class EventQueue:
    """A queue for one reader, who gets one item after the other, also of many at once.

    Whoever waits is woken for each thing that is put, and then both threads want
    Python's lock: hundreds of events of a step are put together.
    """

    def __init__(self) -> None:
        self._put: queue.SimpleQueue[Sequence[Any]] = queue.SimpleQueue()
        self._taken: deque[Any] = deque()  # the reader's

    def put(self, item: Any) -> None:
        self._put.put((item,))

    def put_all(self, items: Sequence[Any]) -> None:
        """Put ``items``, which nobody changes any more; nothing if there are none."""
        if items:
            self._put.put(items)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next item. Raises queue.Empty as `queue.SimpleQueue` does."""
        while not self._taken:
            self._taken.extend(self._put.get(block, timeout))
        return self._taken.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._taken and self._put.empty()
