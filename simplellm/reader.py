"""What becomes of requests, brought to whoever waits: futures, iterators, coroutines.

The three are the same `Reader` with another way to deliver. One thread takes the
engine's events and makes the replies, one event at a time.
"""

import asyncio
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar

from simplellm.engine import Engine
from simplellm.inbox import END, Bell, Inbox, is_end
from simplellm.outputs import Usage, merge
from simplellm.reply import Reply
from simplellm.request import Event, Request

LOGGER = logging.getLogger("simplellm")
Part = TypeVar("Part")
Families = Sequence[Sequence[tuple[Request, Reply]]]  # samples, prompt by prompt


class Reader:
    """Makes one request's events into parts of a reply, and hands them to ``deliver``.

    After the last one comes END, or what went wrong: an exception.
    """

    def __init__(
        self, request: Request, reply: Reply, deliver: Callable[[Any], object]
    ) -> None:
        self.request, self.reply, self.deliver = request, reply, deliver
        self.cached_tokens = 0

    def push(self, event: Event) -> bool:
        """Pass on what came; whether that was the last of it."""
        self.cached_tokens = event.cached_tokens
        if event.error is not None:
            with suppress(Exception):
                self.deliver(event.error)
            return True
        try:
            for part in self.reply.push(event):
                self.deliver(part)
            if self.reply.finish_reason is None:
                return False
            self.deliver(END)
        except Exception as error:  # an event loop that is closed, for example
            LOGGER.exception("what a request gives cannot be delivered; it ends")
            with suppress(Exception):
                self.deliver(error)
        return True


class Delivery:
    """Brings the engine's events to their readers, in a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.readers: dict[int, Reader] = {}  # by the number of their request
        # Those with callbacks to come: who waits for one need not keep the future.
        self.awaited: set[RequestFuture] = set()
        # Of each event loop, for as long as somebody reads in it.
        self.bells: weakref.WeakValueDictionary[Any, Bell]
        self.bells = weakref.WeakValueDictionary()
        self.numbers = itertools.count()
        self.thread = threading.Thread(
            target=self._run, name="simplellm-text", daemon=True
        )

    def start(self) -> None:
        """Let the engine and the delivery begin."""
        self.engine.start()
        self.thread.start()

    def submit(self, families: Sequence[Sequence[Reader]]) -> None:
        """Queue the requests of ``families``, each the samples of one prompt.

        Raises QueueFullError or EngineError and then has taken none of them.
        """
        readers = [reader for family in families for reader in family]
        for reader in readers:
            reader.request.number = next(self.numbers)
            self.readers[reader.request.number] = reader
        for first, *others in families:
            first.request.siblings = [reader.request for reader in others]
        try:
            self.engine.submit([family[0].request for family in families])
        except BaseException:
            for reader in readers:
                self.readers.pop(reader.request.number, None)
            raise

    def drop(self, readers: Sequence[Reader]) -> None:
        """End requests that nobody reads; from any thread or finalizer."""
        for reader in readers:
            if self.readers.pop(reader.request.number, None) is not None:
                # The reply may be over already, at a stop string.
                reason = reader.reply.finish_reason or "abort"
                self.engine.abort(reader.request.number, reason)

    def close(self, cancel: bool, timeout: float | None = None) -> None:
        """Shut the engine down, and bring what it has told to its readers."""
        self.engine.shutdown(cancel, timeout)
        # A finalizer may run in either thread, and each of them waits for the other.
        own = self.thread, self.engine.thread
        if self.thread.is_alive() and threading.current_thread() not in own:
            self.thread.join(timeout)

    def _run(self) -> None:
        while (event := self.engine.events.get()) is not None:
            reader = self.readers.get(event.number)
            if reader is not None and reader.push(event):
                if event.finish_reason is None:  # it found an end of its own
                    self.drop([reader])
                self.readers.pop(event.number, None)
            del reader, event  # which may know an LLM that nobody else does


class RequestFuture(Future[Any]):
    """The future of some requests. Cancelled or forgotten, it ends them.

    A callback is run by whoever sets the result, and a slow one would hold up all other
    requests. So each gets a thread of its own.
    """

    def __init__(self, owner: Any, delivery: Delivery) -> None:
        super().__init__()
        # Stays open for as long as somebody waits for the result.
        self.owner: Any = owner
        self.delivery: Delivery | None = delivery
        self.readers: list[Reader] = []
        self.lock = threading.RLock()  # held to cancel; a finalizer may do that inside

    def release(self) -> None:
        """Let go of the engine and its memory: a future may be kept for long."""
        if self.delivery is not None:
            self.delivery.awaited.discard(self)
        self.owner = self.delivery = None
        self.readers = []

    def running(self) -> bool:
        """Whether it is neither done nor cancelled: requests begin at once."""
        return not self.done()

    def cancel(self) -> bool:
        delivery, readers = self.delivery, self.readers
        with self.lock:
            if self.cancelled():
                return True
            if not super().cancel():
                return False
            self.set_running_or_notify_cancel()  # wakes those who wait; once only
        if delivery is not None:
            delivery.drop(readers)
        self.release()
        return True

    def result(self, timeout: float | None = None) -> Any:
        return self._wait(super().result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._wait(super().exception, timeout)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.result())

    def __getitem__(self, index: Any) -> Any:
        return self.result()[index]

    def __len__(self) -> int:
        return len(self.result())

    def __bool__(self) -> bool:
        return True  # without waiting for its length

    def _wait(self, wait: Callable[[float | None], Any], timeout: float | None) -> Any:
        if (delivery := self.delivery) is not None:
            delivery.engine.check_process()
        try:
            return wait(timeout)
        except Exception:
            raise
        except BaseException:  # Ctrl-C: nobody will ask again
            self.cancel()
            raise

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        def call(future: object) -> None:
            try:
                fn(future)
            except Exception:
                LOGGER.exception("a callback of %r raised", future)

        def start(future: object) -> None:
            try:
                threading.Thread(target=call, args=[future], daemon=True).start()
            except RuntimeError:  # no more threads, or the interpreter ends
                call(future)

        if (delivery := self.delivery) is not None:
            delivery.awaited.add(self)
        super().add_done_callback(start)
        if delivery is not None and self.done():
            delivery.awaited.discard(self)


def readers_of(
    families: Families, deliver: Callable[[int, Any], object]
) -> list[list[Reader]]:
    """A reader for each sample; ``deliver`` also gets its index among all."""
    index = itertools.count()
    return [
        [
            Reader(request, reply, partial(deliver, next(index)))
            for request, reply in family
        ]
        for family in families
    ]


def usage(families: Sequence[Sequence[Reader]]) -> Usage:
    """How many tokens some prompts and all their samples took, so far."""
    firsts = [family[0] for family in families]
    replies = [reader.reply for family in families for reader in family]
    return Usage(
        prompt_tokens=sum(len(first.reply.prompt_token_ids) for first in firsts),
        completion_tokens=sum(len(reply.token_ids) for reply in replies),
        cached_tokens=sum(first.cached_tokens for first in firsts),
        reasoning_tokens=sum(reply.reasoning_tokens for reply in replies),
    )


class Collector:
    """Sets a future's result when the last of its replies is done.

    It knows the future weakly: if that is dropped, nobody can ask any more, and the
    requests end.
    """

    def __init__(
        self,
        future: RequestFuture,
        families: Families,
        result: Callable[[list[list[Reader]]], Any],
    ) -> None:
        assert future.delivery is not None
        self.delivery, self.result = future.delivery, result
        self.families = readers_of(families, self.deliver)
        readers = list(itertools.chain.from_iterable(self.families))
        future.readers, self.left = readers, len(readers)  # replies to come
        delivery = self.delivery
        self.future = weakref.ref(future, lambda _: delivery.drop(readers))

    def deliver(self, index: int, part: Any) -> None:
        """Take a part of a reply, which keeps what is in it, END or an exception."""
        self.left -= part is END
        failed = isinstance(part, Exception)
        if (self.left and not failed) or (future := self.future()) is None:
            return
        readers = future.readers
        with suppress(InvalidStateError):  # it may have been cancelled
            if failed:
                future.set_exception(part)
            else:
                future.set_result(self.result(self.families))
        self.delivery.drop(readers)
        future.release()


def future_of(
    owner: Any,
    delivery: Delivery,
    families: Families,
    result: Callable[[list[list[Reader]]], Any],
) -> RequestFuture:
    """A future of what ``result`` makes of the readers once all replies are done."""
    future = RequestFuture(owner, delivery)
    delivery.submit(Collector(future, families, result).families)
    return future


class Parts:
    """The parts of replies as they come. Closed or dropped, it ends the requests."""

    def __init__(self, owner: Any, delivery: Delivery, families: Families) -> None:
        self.owner, self.delivery = owner, delivery  # the owner stays open meanwhile
        self.inbox = Inbox()
        self.families = readers_of(families, self.inbox.put)
        self.readers = list(itertools.chain.from_iterable(self.families))
        self.left = len(self.readers)  # replies to come
        self.taken: deque[tuple[int, Any]] = deque()  # out of the inbox

    def take(self, join: Callable[[list[Any]], list[Any]]) -> None:
        """Empty the inbox; of each reply, the parts go through ``join``."""
        for index, parts in self.inbox.take().items():
            ends = [parts.pop()] if is_end(parts[-1]) else []
            self.left -= ends == [END]
            failures = [] if ends == [END] else ends
            self.taken += [(index, part) for part in [*join(parts), *failures]]

    def next(self) -> tuple[int, Any]:
        """The next part. What went wrong with one reply ends all, and is raised."""
        index, part = self.taken.popleft()
        if isinstance(part, Exception):
            self.close()
            raise part
        return index, part

    def outputs(self) -> list[Any]:
        """All so far, even what is not read yet; of chats, ChatChoices."""
        return [reader.reply.output() for reader in self.readers]

    def usage(self) -> Usage:
        """How many tokens it took so far."""
        return usage(self.families)

    def close(self) -> None:
        """The reader wants no more."""
        self.left = 0
        self.taken.clear()
        self.delivery.drop(self.readers)

    def __del__(self) -> None:
        if hasattr(self, "taken"):
            self.close()


class Stream(Parts, Iterator[Part]):
    """The parts of one reply, for a thread."""

    def __init__(self, owner: Any, delivery: Delivery, families: Families) -> None:
        super().__init__(owner, delivery, families)
        self.arrived = threading.Event()
        self.inbox.wake = self.arrived.set
        delivery.submit(self.families)

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
                self.delivery.engine.check()
            self.arrived.clear()
            self.take(list)
        return self.next()[1]

    def output(self) -> Any:
        """All so far, even what is not read yet; of a chat, a ChatChoice."""
        return self.outputs()[0]


class Replies(Parts, AsyncIterator[tuple[int, Any]]):
    """The parts of any number of replies, for a coroutine, each with its reply's index.

    Parts that waited come merged. They belong to one event loop, and whoever waits for
    one and is cancelled ends them all.
    """

    def __init__(self, owner: Any, delivery: Delivery, families: Families) -> None:
        super().__init__(owner, delivery, families)
        self.arrived = asyncio.Event()

    def submit(self) -> None:
        """Begin, in the event loop that will read. Raises as `Delivery.submit`."""
        loop = asyncio.get_running_loop()
        bell = self.delivery.bells.setdefault(loop, Bell(loop))
        self.inbox.wake = partial(bell.ring, self.arrived)
        self.delivery.submit(self.families)

    async def __anext__(self) -> tuple[int, Any]:
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

    async def finish(self) -> list[Any]:
        """Wait for the end of all; the outputs. Parts that come are not read."""
        self.inbox.quiet = True
        async for _ in self:
            pass
        return self.outputs()

    async def aclose(self) -> None:
        """The reader wants no more, nor does whoever waits at the moment."""
        self.close()
        self.arrived.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()


class AsyncStream(AsyncIterator[Part]):
    """The parts of one reply, for a coroutine; it is asked for with the first."""

    def __init__(self, replies: Replies) -> None:
        self.replies, self.begun = replies, False

    async def __anext__(self) -> Part:
        if not self.begun:
            self.replies.submit()
            self.begun = True
        return (await anext(self.replies))[1]

    def output(self) -> Any:
        """All so far, even what is not read yet; of a chat, a ChatChoice."""
        return self.replies.outputs()[0]

    def usage(self) -> Usage:
        """How many tokens it took so far."""
        return self.replies.usage()

    async def aclose(self) -> None:
        """The reader wants no more."""
        self.begun = True
        await self.replies.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()
