"""The engine: one thread that runs steps for as long as there are requests.

Any number of other threads submit requests and end them; what becomes of these leaves
as plain data through one queue, `Engine.events`. Nobody outside can hold a step up.
"""

import logging
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from simplellm.base.event_queue import EventQueue
from simplellm.base.grammar import GrammarError
from simplellm.base.request import EngineError, Event, QueueFullError, Request
from simplellm.engine.data_parallel_scheduler import DataParallelScheduler
from simplellm.engine.engine_client import EngineBase, failure
from simplellm.engine.launch_timer import LaunchTimer
from simplellm.engine.runner import Flight, Runner
from simplellm.engine.scheduler import ScheduledChunk, Scheduler
from simplellm.engine.snapshot import RequestSnapshot, Snapshot
from simplellm.engine.stats import Meter, Stats
from simplellm.model.machine import empty_cache, on

LOGGER = logging.getLogger("simplellm")


class Engine(EngineBase):
    """Runs many requests at once, a step at a time.

    With ``overlap`` a step is scheduled while the one before is still computed. Without
    `start`, whoever holds it calls `step`. Requests are at most ``max_model_len`` long.
    """

    def __init__(
        self,
        scheduler: Scheduler | DataParallelScheduler,
        runner: Runner,
        max_model_len: int,
        overlap: bool,
    ) -> None:
        super().__init__()
        self.scheduler, self.runner = scheduler, runner
        runner.finish_steps_in_flight = partial(self.collect, 0)
        self.max_model_len = max_model_len
        self.depth = int(overlap)  # steps under way while the next one is scheduled
        self.meter = Meter()
        # Guards the scheduler and the meter. A signal handler may ask for `stats` in a
        # thread that holds it.
        self.lock = threading.RLock()
        # Aborts, and None to wake the thread. Finalizers may put, too, in any thread.
        self.aborts: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self.events = EventQueue()  # of Event, and None after the last
        self.thread: threading.Thread | None = None
        # Steps under way, the oldest first.
        self.flights: deque[tuple[Sequence[ScheduledChunk], Flight]] = deque()
        self.timer = LaunchTimer()
        runner.ranks.watch(partial(self.aborts.put, None))

    def step(self) -> None:
        """Launch the next forward pass, and collect those that are over."""
        with self.lock:
            scheduled = self.scheduler.schedule()
        if scheduled:
            self.launch(scheduled)
        elif not self.flights:
            raise RuntimeError("requests wait, but none of them can run")
        self.collect(self.depth if scheduled else 0)

    def collect(self, depth: int) -> None:
        """Record the results of all steps but the last ``depth``, and emit them."""
        while len(self.flights) > depth:
            scheduled, flight = self.flights[0]
            begin = time.monotonic()
            output = flight()  # waits for the device, and without the lock
            self.flights.popleft()
            now = time.monotonic()
            running = self.flights[0][0] if self.flights else ()
            decodes = bool(running) and all(chunk.length == 1 for chunk in running)
            self.timer.collected(now, now - begin, output.late, decodes)
            with self.lock:
                new = self.scheduler.update_from_output(scheduled, output.tokens)
                self.meter.step(new, now)
            for request, first, entries in output.prompts:
                if (so_far := request.prompt_logprobs) is not None:
                    so_far += entries[len(so_far) - first :]  # some may come again
            logprobs = {}
            if any(output.logprobs):
                sampling = [c.request.request_id for c in scheduled if c.samples]
                logprobs = dict(zip(sampling, output.logprobs, strict=True))
            given = ((r, kept, logprobs.get(r.request_id)) for r, kept in new)
            self.emit([self._event(*one, now) for one in given])

    def emit(self, events: Sequence[Event]) -> None:
        """Send out what became of requests."""
        self.events.put_all(events)

    @staticmethod
    def _event(
        request: Request,
        tokens: Sequence[int] = (),
        logprobs: Sequence[Any] | None = None,
        now: float = 0.0,
        error: EngineError | None = None,
    ) -> Event:
        """What became of a request."""
        if logprobs is not None:
            logprobs = logprobs[: len(tokens)]
        if (scores := request.prompt_logprobs) is not None:
            # They leave once, and nothing of the prompt is scored again.
            request.prompt_logprobs = None
        fields = (  # in order: by name, or checked, they would take three times as long
            request.request_id,
            tokens,
            logprobs,
            request.finish_reason,
            error,
            now,
            request.num_cached_tokens or 0,
            scores,
            request.preemptions,
            request.first_scheduled_time,
            request.draft_counts or None,
        )
        return tuple.__new__(Event, fields)

    def launch(self, scheduled: Sequence[ScheduledChunk]) -> None:
        """Start a step. If one request is to blame that it fails, that one ends.

        The others are scheduled anew; if nobody knows which it is, each by itself.
        """
        try:
            flight = self.runner.launch(scheduled)
        except Exception as error:
            self.runner.ranks.check(error)
            LOGGER.error("a step failed, whose requests are tried again: %s", error)
            # The frames hold memory, and whoever gets the error may keep it for long.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
            self.collect(0)  # what is tried again must know its last token
            self.runner.invalidate()
            guilty = error.request_id if isinstance(error, GrammarError) else None
            alone = len(scheduled) == 1
            blamed = [c for c in scheduled if alone or c.request.request_id == guilty]
            for chunk in blamed:
                why = failure("the step of this request failed", error)
                self.end(chunk.request, "error", why)
            for request, _, length, samples in () if blamed else scheduled:
                if request.finish_reason is None:  # else it has ended with a flight
                    start = request.num_computed_tokens
                    length = min(length, request.missing)  # without its drafts
                    self.launch([ScheduledChunk(request, start, length, samples)])
                    self.collect(self.depth)
            return
        with self.lock:
            self.scheduler.update_after_launch(scheduled)
        self.flights.append((scheduled, flight))

    def end(
        self, request: Request, reason: str, error: EngineError | None = None
    ) -> None:
        """End a request that has not ended by itself; nothing if it has."""
        with self.lock:
            if request.finish_reason is not None:
                return
            self.scheduler.finish(request, reason)
        self.emit([self._event(request, error=error)])

    # From here on: what other threads call, and the thread that calls step().

    def submit(self, requests: Sequence[Request]) -> None:
        self.check_process()  # first: a fork may have copied the lock as it was, taken
        with self.lock:
            self.check_open()
            if not self.scheduler.requests:
                self.meter.begin()
            try:
                self.scheduler.add(requests)
            except QueueFullError:
                self.meter.refused += sum(1 + len(r.siblings) for r in requests)
                raise
            except BaseException:  # Ctrl-C: a call is taken whole or not at all
                self.scheduler.withdraw(requests)
                raise
        self.aborts.put(None)

    def abort(self, request_id: int, reason: str = "abort") -> None:
        self.aborts.put((request_id, reason))

    def stats(self) -> Stats:
        self.check()
        with self.lock:
            return self.meter.stats(self.scheduler)

    def snapshot(self) -> Snapshot:
        """Who waits, who runs and who holds which pages, between two steps.

        Plain data that nobody changes later. Raises EngineError if the engine is dead.
        """
        self.check()

        def describe(request: Request) -> RequestSnapshot:
            return {
                "request_id": request.request_id,
                "prompt": request.num_prompt,
                "output": request.num_output,
                "computed": request.num_computed_tokens,
                "preemptions": request.preemptions,
            }

        with self.lock:
            return {
                "running": [describe(r) for r in self.scheduler.running],
                "waiting": [describe(r) for r in self.scheduler.waiting],
                "pages": self.scheduler.manager.snapshot(),
            }

    def start(self) -> None:
        """Run steps in a thread of its own until `shutdown`."""
        thread = threading.Thread(None, self._loop, "simplellm-engine", daemon=True)
        thread.start()
        self.thread = thread  # now others may wait for its end

    def shutdown(self, cancel: bool, timeout: float | None = None) -> None:
        if os.getpid() != self.pid:
            return
        self.closing = True
        self.cancelling = self.cancelling or cancel
        self.aborts.put(None)
        if self.thread is not None and threading.current_thread() is not self.thread:
            self.thread.join(timeout)

    def _loop(self) -> None:
        with on(device := self.runner.device):  # a thread begins on the first GPU
            try:
                while self._drain_aborts_until_launch():
                    with self.lock:
                        expired = self.scheduler.expire(time.monotonic())
                    self.emit([*map(self._event, expired)])
                    if self.scheduler.requests or self.flights:
                        self.step()
            except BaseException as error:
                LOGGER.exception("the engine died")
                self._die(error)
            self.runner.ranks.close()
            self.flights.clear()  # there are some if it died
            self.scheduler.close()
            del self.runner  # its pages, graphs and weights: others may need the memory
            empty_cache(device)
            self.events.put(None)

    def _drain_aborts_until_launch(self) -> bool:
        """Carry out what other threads asked for; wait while no step is due."""
        while True:
            self.runner.ranks.check()
            with self.lock:  # whoever came before the closing is among the requests
                idle = not (self.scheduler.requests or self.flights)
                over = self.cancelling or (self.closing and idle)
                requests = dict(self.scheduler.requests) if over else {}
            if over:
                for request in requests.values():
                    self.end(request, "abort")
                return False
            timeout = None if idle else self.timer.remaining(time.monotonic())
            try:
                abort = self.aborts.get(timeout=timeout)
            except queue.Empty:
                return True
            if abort is not None:
                request_id, reason = abort
                if (aborted := self.scheduler.requests.get(request_id)) is not None:
                    self.end(aborted, reason)

    def _die(self, cause: BaseException) -> None:
        """All requests get an error: the engine runs no more steps."""
        with self.lock:
            self.dead = cause.with_traceback(None)  # which would hold memory
            orphans = list(self.scheduler.requests.values())
            self.scheduler.finished["error"] += len(orphans)
        for request in orphans:
            request.finish_reason = "error"
            error = failure("the engine died", cause)
            self.emit([self._event(request, error=error)])
