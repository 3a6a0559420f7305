"""The future of some requests, and what fills it.

One future may stand for thousands of requests, so it has no thread of its own: all that
is here but callbacks runs in the engine's text thread, or in that of whoever cancels or
waits.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from simplellm.generate import RequestOutput, TextSide, Whole
from simplellm.tokenizer import StreamDecoder

if TYPE_CHECKING:  # the engine imports this module
    from simplellm.engine import LLM, Engine, Event, Ticket

LOGGER = logging.getLogger("simplellm")


class RequestFuture(Future[list[RequestOutput]]):
    """The future of some requests. Cancelling it ends them.

    A callback is run by whoever sets the result, and a slow one would hold up all other
    requests. So each gets a thread of its own.
    """

    def __init__(self, owner: "LLM") -> None:
        super().__init__()
        # Stays open for as long as somebody waits for the result.
        self.owner: LLM | None = owner
        self.tickets: list[Ticket] = []
        self.lock = threading.RLock()  # held to cancel; a finalizer may do that inside

    def release(self) -> None:
        """Let go of the engine and its memory: a future may be kept for long."""
        self.tickets, self.owner = [], None

    def cancel(self) -> bool:
        owner, tickets = self.owner, self.tickets
        with self.lock:
            if self.cancelled():
                return True
            if not super().cancel():
                return False
            self.set_running_or_notify_cancel()  # wakes those who wait; once only
        if owner is not None:
            for ticket in tickets:
                owner.engine.abort(ticket.job)
        self.release()
        return True

    def result(self, timeout: float | None = None) -> list[RequestOutput]:
        if (owner := self.owner) is not None:
            owner.engine.check()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if (owner := self.owner) is not None:
            owner.engine.check()
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        def call(future: object) -> None:
            try:
                fn(future)
            except Exception:
                LOGGER.exception("a callback of %r raised", future)

        def start(future: object) -> None:
            threading.Thread(target=call, args=[future], daemon=True).start()

        super().add_done_callback(start)


class Completion:
    """Collects what the requests of one future give, in the engine's text thread.

    Of the parts of an answer only what they hold is kept: lists of all parts would be
    so many objects that Python's garbage collector stops every thread to go through
    them.
    """

    def __init__(
        self, engine: "Engine", future: RequestFuture, sides: Sequence[TextSide]
    ) -> None:
        self.engine = engine
        self.future = future
        self.sides = sides
        self.wholes = [Whole() for _ in sides]
        self.left = len(sides)  # requests that have not ended

    def push(self, index: int, event: "Event") -> None:
        """What came for one of the requests; the last of all sets the result."""
        side, tickets = self.sides[index], self.future.tickets
        if self.future.done() or side.request.finish_reason is not None:
            return
        ticket = tickets[index]
        request = ticket.request
        try:
            new = request.accept(event)
            self.wholes[index].add(side.push(new) if new else ending(side))
            if request.finish_reason is None:
                return
            if event.finish_reason is None:
                self.engine.abort(ticket.job, request.finish_reason)
            self.left -= 1
            if self.left:
                return
            with suppress(InvalidStateError):  # it may have been cancelled
                self.future.set_result([whole.output() for whole in self.wholes])
        except Exception as error:
            with suppress(InvalidStateError):
                self.future.set_exception(error)
            for ticket in tickets:
                self.engine.abort(ticket.job)
        self.future.release()


def ending(side: TextSide) -> RequestOutput:
    """What is left to show of a request that ended without another token."""
    request, text = side.request, ""
    if isinstance(side.decoder, StreamDecoder):
        text = side.stops.push(side.decoder.flush()) + side.stops.flush()
    return RequestOutput(
        text=text,
        token_ids=[],
        finish_reason=request.finish_reason,
        logprobs=None if request.params.logprobs is None else [],
        prompt_token_ids=request.prompt,
    )
