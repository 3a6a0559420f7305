"""What becomes of requests, brought to whoever waits: futures, iterators, coroutines.

The three are the same `Reader` with another way to deliver. One thread takes the
engine's events and makes the replies, one event at a time.
"""

import asyncio
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any

from tqdm import tqdm

from simplellm.api.reply import Reply
from simplellm.base.request import Event, Request
from simplellm.engine.client import EngineClient, failure

LOGGER = logging.getLogger("simplellm")
Samples = Sequence[Sequence[tuple[Request, Reply]]]  # prompt by prompt
END = object()  # behind the last part of an answer


class Reader:
    """Makes one request's events into parts of a reply, and hands them to ``deliver``.

    After the last one comes END, or what went wrong: an exception.
    """

    def __init__(
        self, request: Request, reply: Reply, deliver: Callable[[Any], object]
    ) -> None:
        self.request, self.reply, self.deliver = request, reply, deliver
        self.error: Exception | None = None  # what went wrong

    def push(self, event: Event) -> bool:
        """Pass on what came; whether that was the last of it."""
        self.error = event.error
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
            self.error = error
            with suppress(Exception):
                self.deliver(error)
        return True


class Delivery:
    """Brings the engine's events to their readers, in a thread of its own."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self.readers: dict[int, Reader] = {}  # by the id of their request
        # Futures with pending callbacks, held so the caller may drop them.
        self.awaited: set[RequestFuture] = set()
        # What wakes each event loop, for as long as somebody reads in it.
        self.wakers: weakref.WeakValueDictionary[Any, Any]
        self.wakers = weakref.WeakValueDictionary()
        self.request_ids = itertools.count()
        self.thread = threading.Thread(
            target=self._run, name="simplellm-text", daemon=True
        )

    def start(self) -> None:
        """Let the engine and the delivery begin."""
        self.engine.start()
        self.thread.start()

    def submit(self, samples: Sequence[Sequence[Reader]]) -> None:
        """Queue the requests of ``samples``, prompt by prompt.

        Raises QueueFullError or EngineError and then has taken none of them.
        """
        readers = [*itertools.chain.from_iterable(samples)]
        for reader in readers:
            reader.request.request_id = next(self.request_ids)
            self.readers[reader.request.request_id] = reader
        for first, *others in samples:
            first.request.siblings = [reader.request for reader in others]
        try:
            self.engine.submit([first.request for first, *_ in samples])
        except BaseException:
            for reader in readers:
                self.readers.pop(reader.request.request_id, None)
            raise

    def drop(self, readers: Sequence[Reader]) -> None:
        """End requests that nobody reads; from any thread or finalizer."""
        for reader in readers:
            if self.readers.pop(reader.request.request_id, None) is not None:
                # The reply may be over already, at a stop string.
                reason = reader.reply.finish_reason or "abort"
                self.engine.abort(reader.request.request_id, reason)

    def close(self, cancel: bool, timeout: float | None = None) -> None:
        """Shut the engine down, and bring what it has told to its readers."""
        self.engine.shutdown(cancel, timeout)
        # A finalizer may run in either thread, and each of them waits for the other.
        threads = self.thread, self.engine.thread
        if self.thread.is_alive() and threading.current_thread() not in threads:
            self.thread.join(timeout)

    def _run(self) -> None:
        try:
            self._bring()
        except BaseException as error:
            LOGGER.exception("the thread that reads what becomes of requests died")
            self._die(error)

    def _bring(self) -> None:
        """Bring events to their readers until the engine has told its last one."""
        while (event := self.engine.events.get()) is not None:
            reader = self.readers.get(event.request_id)
            if reader is not None and reader.push(event):
                if event.finish_reason is None:  # it found an end of its own
                    self.drop([reader])
                self.readers.pop(event.request_id, None)
            del reader, event  # which may know an LLM that nobody else does

    def _die(self, cause: BaseException) -> None:
        """Nobody would ever be told anything: all readers get an error."""
        self.engine.dead = cause.with_traceback(None)  # so nobody submits more
        self.engine.shutdown(cancel=True, timeout=0)
        error = failure("what becomes of requests is not read any more", cause)
        while self.readers:
            request_id, reader = self.readers.popitem()
            reader.push(Event(request_id, finish_reason="error", error=error))


class RequestFuture(Future[Any]):
    """The future of some requests. Cancelled or forgotten, it ends them.

    A callback is run by whoever sets the result, and a slow one would hold up all other
    requests. So each gets a thread of its own.
    """

    def __init__(self, owner: Any, delivery: Delivery, bar: tqdm) -> None:
        super().__init__()
        self.bar = bar  # that shows how many replies are done
        # Stays open for as long as somebody waits for the result.
        self.owner: Any = owner
        self.delivery: Delivery | None = delivery
        self.readers: list[Reader] = []
        self.lock = threading.RLock()  # held to cancel; a finalizer may do that inside

    def release(self) -> None:
        """Let go of the engine and its memory: a future may be kept for long."""
        self.bar.close()
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
    samples: Samples, deliver: Callable[[int, Any], object]
) -> list[list[Reader]]:
    """A reader for each sample; ``deliver`` also gets its index among all."""
    index = itertools.count()
    return [
        [Reader(*sample, partial(deliver, next(index))) for sample in group]
        for group in samples
    ]


class FutureResult:
    """Sets a future's result when the last of its replies is done.

    A prompt that fails leaves the others of the call alone. It knows the future weakly:
    if that is dropped, nobody can ask any more, and the requests end.
    """

    def __init__(
        self,
        future: RequestFuture,
        samples: Samples,
        result: Callable[[list[list[Reader]]], Any],
    ) -> None:
        assert future.delivery is not None
        self.delivery, self.result = future.delivery, result
        self.samples = readers_of(samples, self.deliver)
        readers = list(itertools.chain.from_iterable(self.samples))
        future.readers, self.left = readers, len(readers)  # replies to come
        self.bar = bar = future.bar
        delivery = self.delivery

        def forget(_: object) -> None:
            delivery.drop(readers)
            bar.close()

        self.future = weakref.ref(future, forget)

    def deliver(self, index: int, part: Any) -> None:
        """Take a part of a reply, which keeps what is in it, END or an exception."""
        failed = isinstance(part, Exception)
        if part is END or failed:
            self.left -= 1
            self.bar.update()
        over = self.left <= 0 or (failed and len(self.samples) == 1)
        if not over or (future := self.future()) is None:
            return
        readers = future.readers
        with suppress(InvalidStateError):  # it may have been cancelled
            try:
                future.set_result(self.result(self.samples))
            except Exception as error:  # its frames would hold memory
                future.set_exception(error.with_traceback(None))
        self.delivery.drop(readers)
        future.release()


def future_of(
    owner: Any,
    delivery: Delivery,
    samples: Samples,
    result: Callable[[list[list[Reader]]], Any],
    show: bool = False,
) -> RequestFuture:
    """A future of what ``result`` makes of the readers once all replies are done.

    To ``show`` how many are, there is a bar on standard error.
    """
    count = sum(map(len, samples))
    bar = tqdm(desc="Generating", total=count, unit=" outputs", disable=not show)
    future = RequestFuture(owner, delivery, bar)
    try:
        delivery.submit(FutureResult(future, samples, result).samples)
    except BaseException:
        bar.close()
        raise
    return future
