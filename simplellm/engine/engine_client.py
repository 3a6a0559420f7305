"""What an engine is to whoever uses it, wherever it runs: an `EngineClient`."""

import os
import threading
from collections.abc import Sequence
from typing import Protocol

from simplellm.base.grammar import GrammarError
from simplellm.base.request import EngineError, Event, Request
from simplellm.engine.snapshot import Snapshot
from simplellm.engine.stats import Stats


class RequestGrammarError(EngineError):
    """Its grammar failed; a retry on another replica would fail too."""


def failure(what: str, cause: BaseException) -> EngineError:
    """The error for whoever waits, with what went wrong as its cause."""
    kind = RequestGrammarError if isinstance(cause, GrammarError) else EngineError
    error = kind(f"{what}: {cause!r}")
    error.__cause__ = cause
    return error


class EventSource(Protocol):
    """The queue that an engine's events come from."""

    def get(self) -> Event | None:
        """Wait for the next event; None once no more will come."""


class EngineClient(Protocol):
    """An engine: in a thread of this process, in another process, or several as one.

    Requests go in by `submit`, and what becomes of them comes out of ``events``, which
    one thread reads. All methods may be called from any thread, and none waits for a
    step.
    """

    dead: BaseException | None  # what it died of, or why nobody reads its events

    @property
    def events(self) -> EventSource:
        """What becomes of requests; the last event of each has a finish_reason."""

    @property
    def thread(self) -> threading.Thread | None:
        """The thread of this process that runs the steps, if one does."""

    def start(self) -> None:
        """Begin to compute."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, each with an id of its own, and their siblings.

        Raises QueueFullError or EngineError and then has taken none of them. An engine
        in another process tells by the first event of each that its queue is full.
        """

    def abort(self, request_id: int, reason: str = "abort") -> None:
        """End a request soon; nothing if it has ended. Finalizers may call it."""

    def stats(self) -> Stats:
        """How the engine is doing. Raises EngineError if it can't say."""

    def snapshot(self) -> Snapshot:
        """Who waits, who runs and who holds which pages, as plain data.

        Raises EngineError if the engine can't say.
        """

    def health(self) -> dict[str, dict[str, int]]:
        """Extra fields for /health; empty by default."""

    def check(self) -> None:
        """Raise EngineError if the engine cannot answer any more."""

    def check_process(self) -> None:
        """Raise EngineError in a fork of the process that the client belongs to."""

    def shutdown(self, cancel: bool, timeout: float | None = None) -> None:
        """Take no more requests; finish those there are, or ``cancel`` them now.

        Waits until that is done, for at most ``timeout`` seconds. Then the memory that
        the engine had is free, but for what others hold.
        """


class EngineBase:
    """What all engines have in common: they are open, closing or dead."""

    def __init__(self) -> None:
        self.dead: BaseException | None = None
        self.closing = self.cancelling = False
        self.pid = os.getpid()

    def check_process(self) -> None:
        if os.getpid() != self.pid:
            raise EngineError(
                f"this LLM belongs to process {self.pid} and does not work in "
                f"{os.getpid()}, a fork of it; expected processes that are spawned, "
                "not forked, each with its own LLM"
            )

    def check(self) -> None:
        self.check_process()
        if self.dead is not None:
            raise failure("the engine died", self.dead)

    def check_open(self) -> None:
        """Raise EngineError if the engine takes no more requests."""
        self.check()
        if self.closing:
            raise EngineError("this LLM is closed; expected one that is open")

    def health(self) -> dict[str, dict[str, int]]:
        return {}
