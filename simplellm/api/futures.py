"""The future of a call's outputs: what `LLM.generate` returns."""

import asyncio
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from simplellm.api.output_processor import (
    END,
    OutputProcessor,
    Reader,
    Samples,
    readers_of,
)

LOGGER = logging.getLogger("simplellm")


class RequestFuture(Future[Any]):
    """The future of some requests. Cancelled or forgotten, it ends them.

    A callback is run by whoever sets the result, and a slow one would hold up all other
    requests. So each gets a thread of its own.
    """

    def __init__(self, llm: Any, processor: OutputProcessor, bar: tqdm) -> None:
        super().__init__()
        self.bar = bar  # that shows how many replies are done
        # Stays open for as long as somebody waits for the result.
        self.llm: Any = llm
        self.processor: OutputProcessor | None = processor
        self.readers: list[Reader] = []
        self.lock = threading.RLock()  # held to cancel; a finalizer may do that inside

    def release(self) -> None:
        """Let go of the engine and its memory: a future may be kept for long."""
        self.bar.close()
        if self.processor is not None:
            self.processor.awaited.discard(self)
        self.llm = self.processor = None
        self.readers = []

    def running(self) -> bool:
        """Whether it is neither done nor cancelled: requests begin at once."""
        return not self.done()

    def cancel(self) -> bool:
        processor, readers = self.processor, self.readers
        with self.lock:
            if self.cancelled():
                return True
            if not super().cancel():
                return False
            self.set_running_or_notify_cancel()  # wakes those who wait; once only
        if processor is not None:
            processor.drop(readers)
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
        if (processor := self.processor) is not None:
            processor.engine.check_process()
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

        if (processor := self.processor) is not None:
            processor.awaited.add(self)
        super().add_done_callback(start)
        if processor is not None and self.done():
            processor.awaited.discard(self)


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
        assert future.processor is not None
        self.processor, self.result = future.processor, result
        self.by_prompt = readers_of(samples, self.deliver, parts=False)
        readers = list(itertools.chain.from_iterable(self.by_prompt))
        future.readers, self.left = readers, len(readers)  # replies to come
        self.bar = bar = future.bar
        processor = self.processor

        def forget(_: object) -> None:
            processor.drop(readers)
            bar.close()

        self.future = weakref.ref(future, forget)

    def deliver(self, index: int, part: Any) -> None:
        """Take the end of a reply, which keeps what it got: END or an exception."""
        failed = isinstance(part, Exception)
        if part is END or failed:
            self.left -= 1
            self.bar.update()
        over = self.left <= 0 or (failed and len(self.by_prompt) == 1)
        if not over or (future := self.future()) is None:
            return
        readers = future.readers
        with suppress(InvalidStateError):  # it may have been cancelled
            try:
                future.set_result(self.result(self.by_prompt))
            except Exception as error:  # its frames would hold memory
                future.set_exception(error.with_traceback(None))
        self.processor.drop(readers)
        future.release()


def future_of(
    llm: Any,
    processor: OutputProcessor,
    samples: Samples,
    result: Callable[[list[list[Reader]]], Any],
    show: bool = False,
) -> RequestFuture:
    """A future of what ``result`` makes of the readers once all replies are done.

    To ``show`` how many are, there is a bar on standard error.
    """
    count = sum(map(len, samples))
    bar = tqdm(desc="Generating", total=count, unit=" outputs", disable=not show)
    future = RequestFuture(llm, processor, bar)
    try:
        waiting = FutureResult(future, samples, result)
        if samples:
            processor.submit(waiting.by_prompt)
        else:  # nothing will come
            waiting.deliver(0, END)
    except BaseException:
        bar.close()
        raise
    return future
