"""Who may ask an engine, wherever it is: what an `Engine` and its stand-ins share."""

import os

from simplellm.base.grammar import GrammarError
from simplellm.base.request import EngineError


class UnfitError(EngineError):
    """A request failed by what it has to fit: another engine would fail as well."""


def failure(what: str, cause: BaseException) -> EngineError:
    """The error for whoever waits, with what went wrong as its cause."""
    kind = UnfitError if isinstance(cause, GrammarError) else EngineError
    error = kind(f"{what}: {cause!r}")
    error.__cause__ = cause
    return error


class Access:
    """Who may ask an engine: its own process, while it is alive and open."""

    def __init__(self) -> None:
        self.dead: BaseException | None = None  # what it died of
        self.closing = self.cancelling = False
        self.pid = os.getpid()

    def check_process(self) -> None:
        """Raise EngineError in a fork of the engine's process."""
        if os.getpid() != self.pid:
            raise EngineError(
                f"this LLM belongs to process {self.pid} and does not work in "
                f"{os.getpid()}, a fork of it; expected processes that are spawned, "
                "not forked, each with its own LLM"
            )

    def check(self) -> None:
        """Raise EngineError if the engine cannot answer any more."""
        self.check_process()
        if self.dead is not None:
            raise failure("the engine died", self.dead)

    def check_open(self) -> None:
        """Raise EngineError if the engine takes no more requests."""
        self.check()
        if self.closing:
            raise EngineError("this LLM is closed; expected one that is open")
