"""An engine in another process, for whoever has a use for an `Engine` in this one."""

import itertools
import logging
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Protocol

from simplellm.api.input_processor import InputProcessor, LoadedModel
from simplellm.base.config import EngineConfig
from simplellm.base.grammar import Grammar
from simplellm.base.request import EngineError, Event, Request
from simplellm.checkpoint.folder import open_config, path_of
from simplellm.engine.engine_client import EngineBase, EngineClient, failure
from simplellm.engine.snapshot import Snapshot
from simplellm.engine.stats import Stats
from simplellm.server.remote.wire import (
    as_error,
    as_frame,
    as_plain,
    event_of,
    frames,
    request_as_plain,
)
from simplellm.server.start import WATCHDOG_TIMEOUT

LOGGER = logging.getLogger("simplellm")
RESULT_SECONDS = 60.0  # that a result may take: a first grammar needs some
END_SECONDS = 5.0  # between the end of a link and that of its process
LOOK_SECONDS = 0.5  # between two looks at whether the process hangs


class RemoteError(Exception):
    """What went wrong in another process, as it describes it."""

    def __repr__(self) -> str:
        return str(self)


class EventStream:
    """An `EventSource` of what an iterator gives."""

    def __init__(self, events: Iterator[Event]) -> None:
        self.iterator = events

    def get(self) -> Event | None:
        return next(self.iterator, None)


class RemoteClient(EngineClient, Protocol):
    """An `EngineClient` whose engine loads, and compiles grammars, elsewhere."""

    def load(self, options: dict[str, Any]) -> None:
        """Let the process load a model. Then call `wait_loaded` twice."""

    def wait_loaded(self) -> dict[str, Any]:
        """Wait for the next of two messages of loading. Raises what loading raised."""

    def compile(self, text: str) -> Grammar:
        """A grammar that the engine's process keeps. Raises GrammarError."""


class RemoteEngine(EngineBase):
    """An engine in another process, at the other end of ``link``.

    Its frames are read by whoever takes events from ``events``, who also passes results
    on to those that wait for them. A process without progress for more than
    ``watchdog_timeout`` seconds is killed.
    """

    thread = None  # none of this process runs steps

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        link: socket.socket,
        watchdog_timeout: float = WATCHDOG_TIMEOUT,
    ) -> None:
        super().__init__()
        self.process, self.link = process, link
        self.frames = frames(link)
        self.events = EventStream(self._events())
        # A SimpleQueue may be put to from a finalizer, which may run in any thread.
        self.outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.lock = threading.Lock()  # guards what follows
        self.open: set[int] = set()  # requests that haven't ended
        self.results: dict[int, Future[Any]] = {}  # to come, of calls
        self.numbers = itertools.count()
        self.over = False  # no events will come, nor results
        self.watchdog_timeout = watchdog_timeout
        self.steps = 0  # that have ended
        self.stalled_seconds = 0.0  # since one has, or none was due
        self.hung = False

    def load(self, options: dict[str, Any]) -> None:
        with suppress(OSError):  # if it is gone, `wait_loaded` says so
            self.link.sendall(as_frame(options))

    def wait_loaded(self) -> dict[str, Any]:
        reply: dict[str, Any] | None = next(self.frames, None)
        if reply is None:
            wrong = f"the engine's process {self._end()} while it loaded"
            reply = {"failed": as_plain(EngineError(wrong))}
        if "failed" in reply:
            raise as_error(reply["failed"])
        return reply

    def start(self) -> None:
        """Begin to send requests."""
        for name, target in (("link", self._send), ("watchdog", self._watch)):
            name = f"simplellm-{name}"
            threading.Thread(target=target, name=name, daemon=True).start()

    def submit(self, requests: Sequence[Request]) -> None:
        self.check_process()
        every = [
            one.request_id for first in requests for one in (first, *first.siblings)
        ]
        frame = as_frame(["submit", [*map(request_as_plain, requests)]])
        with self.lock:
            self.check_open()
            self.open.update(every)
            self.outgoing.put(frame)

    def abort(self, request_id: int, reason: str = "abort") -> None:
        self.outgoing.put(as_frame(["abort", request_id, reason]))

    def stats(self) -> Stats:
        return Stats(**self._call("stats"))

    def snapshot(self) -> Snapshot:
        """`Engine.snapshot`; its dicts have text for keys."""
        snapshot: Snapshot = self._call("snapshot")
        return snapshot

    def compile(self, text: str) -> Grammar:
        return Grammar(self._call("compile", text), None)

    def shutdown(self, cancel: bool, timeout: float | None = None) -> None:
        if os.getpid() != self.pid:
            return
        self.closing = True
        if cancel:
            self.cancelling = True
            self._kill()
        else:
            self.outgoing.put(as_frame(["close"]))
        with suppress(subprocess.TimeoutExpired):
            # A driver may hold up even a process that was killed.
            self.process.wait(END_SECONDS if self.hung else timeout)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the engine's process. Raises EngineError, or what the process raised."""
        result: Future[Any] = Future()
        self.check_process()
        with self.lock:
            self.check()
            if self.over:
                self.check_open()
            number = next(self.numbers)
            frame = as_frame(["call", number, name, *arguments])
            self.results[number] = result
            self.outgoing.put(frame)
        try:
            return result.result(RESULT_SECONDS)
        except TimeoutError:
            wrong = f"the engine's process gives no answer in {RESULT_SECONDS} seconds"
            raise EngineError(wrong) from None

    def _send(self) -> None:
        """Send what is queued: callers never wait for a process that does not read."""
        with suppress(OSError):
            while (frame := self.outgoing.get()) is not None:
                self.link.sendall(frame)

    def _watch(self) -> None:
        """Kill a process that is silent, or that ends no step though requests wait.

        It counts its own wake-ups and reads no clock: while this process itself was
        stopped, it could not hear the other one.
        """
        while not self.over:
            time.sleep(LOOK_SECONDS)
            self.stalled_seconds += LOOK_SECONDS
            if self.stalled_seconds > self.watchdog_timeout:
                self.hung = True
                self._kill()
                return

    def _kill(self) -> None:
        self.process.kill()
        with suppress(OSError):  # nobody waits until it has given everything back
            self.link.shutdown(socket.SHUT_RDWR)

    def _events(self) -> Iterator[Event]:
        """The events of all requests; each that is open when the process ends fails."""
        orderly = False
        try:
            for frame in self.frames:
                if frame["steps"] != self.steps or not self.open:
                    self.steps, self.stalled_seconds = frame["steps"], 0.0
                for data in frame["events"]:
                    event = event_of(data)
                    if event.finish_reason is not None:
                        self.open.discard(event.request_id)
                    yield event
                for number, data, error in frame["results"]:
                    result = self.results.pop(number)
                    if error is None:
                        result.set_result(data)
                    else:
                        result.set_exception(as_error(error))
                if "dead" in frame:
                    orderly, cause = True, frame["dead"]
                    self.dead = RemoteError(cause) if cause else None
        except Exception as wrong:  # then nothing that comes can be relied on
            LOGGER.exception("the engine's process sends what can't be read")
            self._kill()
            self.dead = RemoteError(f"what its process sends can't be read: {wrong!r}")
        ended = "was ended" if self.cancelling else self._end()
        with self.lock:
            if self.dead is None and not (orderly or self.cancelling):
                self.dead = RemoteError(f"its process {ended}")
            self.over = True
            left, pending = sorted(self.open), [*self.results.values()]
        self.outgoing.put(None)
        for result in pending:
            result.set_exception(EngineError(f"the engine's process {ended}"))
        for request_id in left:
            if self.dead is None:
                yield Event(request_id, finish_reason="abort")
            else:
                error = failure("the engine died", self.dead)
                yield Event(request_id, finish_reason="error", error=error)

    def _end(self) -> str:
        """Wait for the process, whose link is closed. Returns how it ended."""
        if self.hung:
            return f"made no progress in {self.watchdog_timeout:g} seconds"
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        return f"ended with status {self.process.wait()}"


def load_remote(
    engine: RemoteClient,
    path: str | None = None,
    config: EngineConfig | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    random_weights: bool = False,
    seed: int | None = None,
    log_level: str = "warning",
) -> LoadedModel:
    """What `LLM.of` needs, for ``engine``, a `RemoteEngine` or `Replicas`.

    Other arguments and errors are those of `LLM`. This process gets the tokenizer and
    no weights, and needs no PyTorch.
    """
    options = {
        "path": path,
        "config": asdict(config or EngineConfig()),
        "device": device,
        "dtype": dtype,
        "random_weights": random_weights,
        "seed": seed,
        "log_level": log_level,
    }
    try:
        engine.load(options)
        engine.wait_loaded()  # its folder: we can read it meanwhile
        folder, config_data = path_of(path), open_config(path, random_weights)
        input_processor = InputProcessor.open(folder, config_data)
        reply = engine.wait_loaded()
    except BaseException:
        engine.shutdown(cancel=True)
        raise
    limit = reply["max_model_len"]
    limited = replace(input_processor, max_model_len=limit, compiler=engine.compile)
    return LoadedModel(
        engine, limited, reply["backend_reason"], reply["weights_seconds"]
    )
