"""The thread that brings the engine's events to their readers, as parts of replies.

A future (`futures.py`), an iterator and a coroutine (`streams.py`) are the same
`Reader` with another way to deliver.
"""

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from simplellm.api.reply import Reply
from simplellm.base.request import Event, Request
from simplellm.engine.engine_client import EngineClient, failure

LOGGER = logging.getLogger("simplellm")
Samples = Sequence[Sequence[tuple[Request, Reply]]]  # prompt by prompt
END = object()  # behind the last part of an answer


class Reader:
    """Makes one request's events into parts of a reply, and hands them to ``deliver``.

    After the last one comes END, or what went wrong: an exception. Without ``parts``
    only this comes. It stands for whoever reads these; vLLM's RequestState.
    """

    def __init__(
        self,
        request: Request,
        reply: Reply,
        deliver: Callable[[Any], object],
        parts: bool = True,
    ) -> None:
        self.request, self.reply, self.deliver = request, reply, deliver
        self.parts = parts
        self.error: Exception | None = None  # what went wrong

    def push(self, event: Event) -> bool:
        """Pass on what came; whether that was the last of it."""
        self.error = event.error
        if event.error is not None:
            with suppress(Exception):
                self.deliver(event.error)
            return True
        try:
            if self.parts:
                for part in self.reply.push(event):
                    self.deliver(part)
            else:
                self.reply.take(event)
            if self.reply.finish_reason is None:
                return False
            self.deliver(END)
        except Exception as error:  # an event loop that is closed, for example
            LOGGER.exception("what a request gives cannot be delivered; it ends")
            self.error = error
            with suppress(Exception):
                self.deliver(error)
        return True


def readers_of(
    samples: Samples, deliver: Callable[[int, Any], object], parts: bool = True
) -> list[list[Reader]]:
    """A reader for each sample; ``deliver`` also gets its index among all."""
    index = itertools.count()
    return [
        [Reader(*sample, partial(deliver, next(index)), parts) for sample in group]
        for group in samples
    ]


class OutputProcessor:
    """Brings the engine's events to their readers, in a thread of its own."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self.readers: dict[int, Reader] = {}  # by the id of their request
        # Futures with pending callbacks, held so the caller may drop them.
        self.awaited: set[Future[Any]] = set()
        # What wakes each event loop, for as long as somebody reads in it.
        self.wakers = weakref.WeakValueDictionary[Any, Any]()
        self.request_ids = itertools.count()
        self.thread = threading.Thread(None, self._run, "simplellm-text", daemon=True)

    def start(self) -> None:
        """Let the engine and the thread for its events begin."""
        self.engine.start()
        self.thread.start()

    def submit(self, by_prompt: Sequence[Sequence[Reader]]) -> None:
        """Queue the requests of these readers, one for each sample of each prompt.

        Raises QueueFullError or EngineError and then has taken none of them.
        """
        readers = [*itertools.chain.from_iterable(by_prompt)]
        for reader in readers:
            reader.request.request_id = next(self.request_ids)
            self.readers[reader.request.request_id] = reader
        for first, *others in by_prompt:
            first.request.siblings = [reader.request for reader in others]
        try:
            self.engine.submit([first.request for first, *_ in by_prompt])
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
        """Shut the engine down, and bring its last events to their readers."""
        self.engine.shutdown(cancel, timeout)
        # A finalizer may run in either thread, and each of them waits for the other.
        threads = self.thread, self.engine.thread
        if self.thread.is_alive() and threading.current_thread() not in threads:
            self.thread.join(timeout)

    def _run(self) -> None:
        try:
            self._deliver()
        except BaseException as error:
            LOGGER.exception("the thread that reads what becomes of requests died")
            self._die(error)

    def _deliver(self) -> None:
        """Bring events to their readers, up to the engine's last one."""
        while (event := self.engine.events.get()) is not None:
            reader = self.readers.get(event.request_id)
            if reader is not None and reader.push(event):
                if event.finish_reason is None:  # it found an end of its own
                    self.drop([reader])
                self.readers.pop(event.request_id, None)
            del reader, event  # which may know an LLM that nobody else does

    def _die(self, cause: BaseException) -> None:
        """All readers get an error: no more events will come."""
        self.engine.dead = cause.with_traceback(None)  # so nobody submits more
        self.engine.shutdown(cancel=True, timeout=0)
        error = failure("what becomes of requests is not read any more", cause)
        while self.readers:
            request_id, reader = self.readers.popitem()
            reader.push(Event(request_id, finish_reason="error", error=error))
