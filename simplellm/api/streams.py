"""Parts of replies as they come, for threads and for coroutines.

A slow reader holds up nobody and fills no memory: what waits is merged. An event loop
is woken once for all that comes before it gets to run.
"""

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, Self, TypeVar

from simplellm.api.build_outputs import usage
from simplellm.api.output_processor import END, OutputProcessor, Samples, readers_of
from simplellm.api.outputs import Usage, merge

Part = TypeVar("Part")
MANY = 64  # parts of a reply that wait as they came
LONG = 4096  # characters and tokens of a part that takes in no more


def is_end(part: object) -> bool:
    """Whether nothing follows: END, or what went wrong."""
    return part is END or isinstance(part, Exception)


class Inbox:
    """Parts that wait for their reader, by the index of their reply.

    ``wake`` is called for each of them, in the thread that puts; whoever reads
    sets it before anything comes. Once it is ``quiet`` only ends are kept.
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


class LoopWaker:
    """Wakes an event loop from another thread, once for all events set meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.waiting: dict[asyncio.Event, None] = {}
        self.pending = False  # a call of `set_all`, which will see to all that wait
        self.lock = threading.Lock()

    def set(self, event: asyncio.Event) -> None:
        """Set ``event``, soon, in the loop. RuntimeError if that is closed."""
        with self.lock:
            self.waiting[event] = None
            if self.pending and not self.loop.is_closed():
                return
            self.pending = True
        self.loop.call_soon_threadsafe(self.set_all)

    def set_all(self) -> None:
        """Set the events that wait for it; the loop calls this."""
        with self.lock:
            waiting, self.waiting, self.pending = self.waiting, {}, False
        for event in waiting:
            event.set()


class Parts:
    """The parts of replies as they come. Closed or dropped, it ends the requests."""

    ends = False  # whether END comes too, behind the last part of each reply

    def __init__(self, llm: Any, processor: OutputProcessor, samples: Samples) -> None:
        self.llm, self.processor = llm, processor  # which stays open meanwhile
        self.inbox = Inbox()
        self.by_prompt = readers_of(samples, self.inbox.put)
        self.readers = list(itertools.chain.from_iterable(self.by_prompt))
        self.left = len(self.readers)  # replies to come
        self.taken: deque[tuple[int, Any]] = deque()  # out of the inbox

    def take(self, join: Callable[[list[Any]], list[Any]]) -> None:
        """Empty the inbox; of each reply, the parts go through ``join``."""
        for index, parts in self.inbox.take().items():
            ends = [parts.pop()] if is_end(parts[-1]) else []
            self.left -= ends == [END]
            last = [] if ends == [END] and not self.ends else ends
            self.taken += [(index, part) for part in [*join(parts), *last]]

    def next(self) -> tuple[int, Any]:
        """The next part. What went wrong with one reply ends all, and is raised."""
        index, part = self.taken.popleft()
        if isinstance(part, Exception):
            self.close()
            raise part
        return index, part

    def outputs(self) -> list[Any]:
        """Outputs so far, even what is not read yet; of chats, ChatChoices."""
        return [reader.reply.output() for reader in self.readers]

    def output(self) -> Any:
        """The output of the first reply, which may be the only one."""
        return self.readers[0].reply.output()

    def usage(self) -> Usage:
        """How many tokens it took so far."""
        return usage(self.by_prompt)

    def close(self) -> None:
        """The reader wants no more."""
        self.left = 0
        self.taken.clear()
        self.processor.drop(self.readers)

    def __del__(self) -> None:
        if hasattr(self, "taken"):
            self.close()


class Stream(Parts, Iterator[Part]):
    """The parts of one reply, for a thread."""

    def __init__(self, llm: Any, processor: OutputProcessor, samples: Samples) -> None:
        super().__init__(llm, processor, samples)
        self.arrived = threading.Event()
        self.inbox.wake = self.arrived.set
        processor.submit(self.by_prompt)

    def __next__(self) -> Part:
        while not self.taken:
            if not self.left:
                raise StopIteration
            try:
                arrived = self.arrived.wait(timeout=1.0)
            except BaseException:  # Ctrl-C, whose traceback may keep this for long
                self.close()
                raise
            if not arrived:
                self.processor.engine.check()
            self.arrived.clear()
            self.take(list)
        return self.next()[1]


class AsyncParts(Parts):
    """Parts for a coroutine; those that waited come merged.

    They belong to one event loop, and whoever waits for one and is cancelled ends them
    all.
    """

    def __init__(self, llm: Any, processor: OutputProcessor, samples: Samples) -> None:
        super().__init__(llm, processor, samples)
        self.arrived = asyncio.Event()

    def submit(self) -> None:
        """Begin, in the event loop that will read. Raises as the processor's."""
        loop = asyncio.get_running_loop()
        waker = self.processor.wakers.setdefault(loop, LoopWaker(loop))
        self.inbox.wake = partial(waker.set, self.arrived)
        self.processor.submit(self.by_prompt)

    async def read(self) -> tuple[int, Any]:
        """Wait for the next part, and for the index of its reply."""
        while not self.taken:
            if not self.left:
                raise StopAsyncIteration
            try:
                await self.arrived.wait()
            except asyncio.CancelledError:
                self.close()
                raise
            self.arrived.clear()
            self.take(merge)
        return self.next()

    async def aclose(self) -> None:
        """The reader wants no more, nor does whoever waits at the moment."""
        self.close()
        self.arrived.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()


class Replies(AsyncParts, AsyncIterator[tuple[int, Any]]):
    """The parts of any number of replies, each with its reply's index."""

    async def __anext__(self) -> tuple[int, Any]:
        return await self.read()

    async def finish(self) -> list[Any]:
        """Wait for the end of all; the outputs. Parts that come are not read."""
        self.inbox.quiet = True
        async for _ in self:
            pass
        return self.outputs()


class AsyncStream(AsyncParts, AsyncIterator[Part]):
    """The parts of one reply, which is asked for with the first of them."""

    begun = False

    async def __anext__(self) -> Part:
        if self.left and not self.begun:
            self.submit()
            self.begun = True
        return (await self.read())[1]
