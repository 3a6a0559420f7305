"""The engine in a process of its own, as `simplellm serve` runs it: `spawn` starts it.

Whoever answers clients wants Python's lock all the time, and a step needs it several
times in its few milliseconds. Here nobody else wants it for long: one thread runs the
steps, one sends what became of them, and one does what the server asks.
"""

import logging
import os
import queue
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Any

from simplellm.api.input_processor import InputProcessor
from simplellm.api.load import load_engine, open_model
from simplellm.base.config import EngineConfig
from simplellm.base.event_queue import EventQueue
from simplellm.base.grammar import Grammar
from simplellm.base.request import Event
from simplellm.checkpoint.folder import path_of
from simplellm.engine.engine import Engine
from simplellm.engine.start_ranks import start_ranks
from simplellm.model.machine import find_device
from simplellm.server.remote.wire import as_frame, frames, join_events, request_of
from simplellm.server.start import freeze_objects

LOGGER = logging.getLogger("simplellm")
LOOK = 0.1  # seconds between two looks at what else there is, while nobody reads
BEAT = 1.0  # seconds after which a frame leaves even if there is no news


class EngineProcess:
    """The engine of a server, at the other end of ``link``.

    It waits for nobody: what a server that is slow has not read yet is joined, so that
    it takes no more memory than the tokens themselves.
    """

    engine: Engine

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        # Events, results of calls, and None behind the last event.
        self.outgoing = EventQueue()
        self.events: dict[int, Event] = {}  # that wait, by their request's id
        self.results: list[Any] = []  # that wait, of what the server has called
        self.over = False  # nothing more will come
        self.pool = ThreadPoolExecutor(4)  # for what nobody else should wait for

    def load(self, path: str | None, config: dict[str, Any], **options: Any) -> Any:
        """Load the engine. Returns what the server has to know of it."""
        device = find_device(options["device"])
        asked, random = options["dtype"], (options["random_weights"], options["seed"])
        source, resolved, dtype = open_model(
            path, EngineConfig(**config), asked, device, *random
        )
        self.link.sendall(as_frame({}))  # the server may read the folder, too
        self.path = path_of(path)
        self.config = source.config
        # Beside the weights: the first grammar would stop everybody.
        prepared = self.pool.submit(lambda: self.input_processor.grammars.prepare())
        ranks = start_ranks(resolved, source.config, path, dtype, device, *random)
        with ranks.guard_load():
            self.engine, backend_reason, seconds = load_engine(
                source, resolved, dtype, device, ranks
            )
        self.engine.events = self.outgoing
        prepared.result()
        limit = self.engine.max_model_len
        return {
            "backend_reason": backend_reason,
            "weights_seconds": seconds,
            "max_model_len": limit,
        }

    # What the server calls

    def listen(self, calls: Iterator[Any]) -> None:
        """Do what the server asks for, until it closes the link."""
        methods = self.submit, self.abort, self.call, self.close
        by_name = {method.__name__: method for method in methods}
        try:
            for name, *arguments in calls:
                by_name[name](*arguments)
        except BaseException:
            LOGGER.exception("the engine's process failed")
        os._exit(1)  # there is nobody left to compute for

    def submit(self, prompts: list[dict[str, Any]]) -> None:
        """Queue requests; those that are refused get an event that says so."""
        every = [request_id for spec in prompts for _, request_id in spec["samples"]]
        try:
            self.engine.submit([request_of(spec, self.compile) for spec in prompts])
        except Exception as error:
            for request_id in every:
                event = Event(request_id, finish_reason="error", error=error)
                self.outgoing.put(event)

    def abort(self, request_id: int, reason: str) -> None:
        """End a request soon."""
        self.engine.abort(request_id, reason)

    def close(self) -> None:
        """Take no more requests, finish the running ones, and end."""
        self.engine.shutdown(cancel=False, timeout=0)

    def call(self, number: int, name: str, *arguments: Any) -> None:
        """Send a function's result: stats, snapshot, or whether a grammar compiles."""
        functions: dict[str, Callable[..., Any]] = {
            "stats": self.engine.stats,
            "snapshot": self.engine.snapshot,
            "compile": lambda text: self.compile(text).text,
        }

        def compute() -> None:
            result = error = None
            try:
                result = functions[name](*arguments)
            except Exception as raised:
                error = raised
            self.outgoing.put((number, result, error))

        self.pool.submit(compute)

    def compile(self, text: str) -> Grammar:
        """A grammar. Raises GrammarError."""
        return self.input_processor.grammars.compile(text)

    @cached_property
    def input_processor(self) -> InputProcessor:
        """The tokenizer, which only grammars need in this process."""
        return InputProcessor.open(self.path, self.config)

    # What it sends

    def run(self) -> None:
        """Run steps and send their events, until the engine ends."""
        self.engine.start()
        while not self.over:
            self.drain_outgoing(wait=not (self.events or self.results))
            self.send({})
        self.send({"dead": self.engine.dead and repr(self.engine.dead)})

    def drain_outgoing(self, wait: bool) -> None:
        """Take all that waits to be sent; events of one request are joined.

        It waits for BEAT seconds at most: the server has to see that this process
        lives.
        """
        with suppress(queue.Empty):
            while True:
                item = self.outgoing.get(wait, BEAT)
                wait = False
                if item is None:
                    self.over = True
                elif isinstance(item, Event):
                    before = self.events.get(item.request_id)
                    event = item if before is None else join_events(before, item)
                    self.events[item.request_id] = event
                else:
                    self.results.append(item)

    def send(self, more: dict[str, Any]) -> None:
        """Send what waits, and ``more``. What comes meanwhile waits for the next."""
        frame = {"events": [*self.events.values()], "results": self.results, **more}
        # Not `Engine.stats`, which waits for a lock that a step may never give back.
        frame["steps"] = self.engine.meter.steps
        self.events, self.results = {}, []
        data = memoryview(as_frame(frame))
        while data:
            _, ready, _ = select.select([], [self.link], [], LOOK)
            if ready:
                data = data[self.link.send(data, socket.MSG_DONTWAIT) :]
            else:
                self.drain_outgoing(wait=False)


def run_process(link: socket.socket) -> int:
    """Load what the server asks for and run it. Returns the exit status."""
    calls = frames(link)
    if (options := next(calls, None)) is None:
        return 1
    logging.basicConfig(level=options.pop("log_level").upper())
    process = EngineProcess(link)
    threading.Thread(target=process.listen, args=[calls], daemon=True).start()
    try:
        reply = process.load(**options)
    except Exception as error:
        reply = {"failed": error}
    freeze_objects()
    link.sendall(as_frame(reply))
    if "failed" in reply:
        return 1
    process.run()
    return int(process.engine.dead is not None)


if __name__ == "__main__":
    status = 1
    try:
        status = run_process(socket.socket(fileno=int(sys.argv[1])))
    except ConnectionError:
        pass  # the server is gone
    except BaseException:
        LOGGER.exception("the engine's process failed")
    # Everything is sent: to take CUDA and Python apart would only take time.
    os._exit(status)
