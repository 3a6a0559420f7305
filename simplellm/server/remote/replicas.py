"""Several engines as one: which one gets a request, and what happens if one ends.

A prompt goes to the engine that has computed most of its prefix, since its pages are
there and nowhere else, unless that engine has much more to do than another one. An
engine whose queue is full passes a request on, so that it is refused only where all are
full.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from simplellm.base.grammar import Grammar
from simplellm.base.replica_choice import rank_replicas
from simplellm.base.request import EngineError, Event, QueueFullError, Request
from simplellm.engine.engine_client import EngineBase
from simplellm.engine.joins import join_records, sum_by_key
from simplellm.engine.snapshot import Snapshot, join_pages
from simplellm.engine.stats import Stats
from simplellm.server.remote.client import EventStream, RemoteEngine, RemoteError
from simplellm.server.remote.prefixes import Prefixes, digests_of
from simplellm.server.start import WATCHDOG_TIMEOUT, Spawn

LOGGER = logging.getLogger("simplellm")
Result = TypeVar("Result")
MOST_EVENTS = 1024  # that wait here; more wait, joined, where they come from
LOOK_AGAIN = 0.1  # seconds between two looks at whether all is over
PAUSE = 1.0  # seconds after a replica that could not begin


class ReplicaSlot:
    """One of the replicas: its engine, and after that engine's end the next one.

    ``spawn`` starts a process for it.
    """

    def __init__(self, spawn: Spawn) -> None:
        self.spawn = spawn
        self.engine: RemoteEngine | None = None
        self.ready = False  # whether it can be asked
        self.loading: list[Future[Any]] = [Future(), Future()]  # of the first engine
        self.num_submitted = 0  # requests so far
        self.prefixes = Prefixes()  # that the engine has had
        self.stats: Stats | None = None  # the engine's last ones
        self.past: list[Stats] = []  # the counts of the engines before it

    @property
    def load(self) -> int:
        """The number of requests that haven't ended."""
        return 0 if self.engine is None else len(self.engine.open)

    def set_loaded(self, phase: int, facts: Any) -> None:
        """Mark this loading phase of the first engine done.

        Later engines' phases are not awaited.
        """
        if not self.loading[phase].done():
            self.loading[phase].set_result(facts)

    def ended(self) -> None:
        """Note that its engine has ended, and all that it had computed is lost."""
        self.ready, self.prefixes = False, Prefixes()
        if self.stats is not None:
            self.past = [join_records(Stats, [], [*self.past, self.stats])]
            self.stats = None


class PendingRequest:
    """A request that no engine has begun yet, with its siblings."""

    def __init__(self, first: Request) -> None:
        self.first = first
        self.request_ids = [one.request_id for one in (first, *first.siblings)]
        self.digests = digests_of(first.tokens)
        self.tried: set[ReplicaSlot] = set()  # that are full, or gone


class Replicas(EngineBase):
    """Several engines, one for each of ``spawns``, as an `EngineClient`.

    Each of ``spawns`` starts a process and returns it with the link to it. It is called
    at the beginning and whenever an engine has ended, or hung for ``watchdog_timeout``
    seconds.
    """

    thread = None  # none of this process runs steps

    def __init__(
        self, spawns: Sequence[Spawn], watchdog_timeout: float = WATCHDOG_TIMEOUT
    ) -> None:
        super().__init__()
        self.watchdog_timeout = watchdog_timeout
        self.slots = [ReplicaSlot(spawn) for spawn in spawns]
        self.queue: queue.Queue[Event] = queue.Queue(MOST_EVENTS)
        self.events = EventStream(self._events())
        self.phases = iter((0, 1))  # of loading, as in `RemoteEngine.wait_loaded`
        self.pool = ThreadPoolExecutor(2 * len(spawns))  # for questions to all of them
        self.slot_of: dict[int, ReplicaSlot] = {}  # of requests that haven't ended
        self.pending: dict[int, PendingRequest] = {}  # those that haven't begun
        self.refused = self.lost = 0
        self.lock = threading.RLock()  # guards the choice of a slot, and closing

    # The engines

    def load(self, options: dict[str, Any]) -> None:
        """Let each engine load a model with ``options``; they share one queue."""
        config = options["config"]
        share = -(-config["max_waiting"] // len(self.slots))
        options = {**options, "config": {**config, "max_waiting": share}}
        for slot in self.slots:
            threading.Thread(
                target=self._keep,
                args=[slot, options],
                name="simplellm-replica",
                daemon=True,
            ).start()

    def wait_loaded(self) -> dict[str, Any]:
        phase = next(self.phases)
        facts = [slot.loading[phase].result() for slot in self.slots]
        first: dict[str, Any] = facts[0]
        return first

    def start(self) -> None:
        """Nothing: each engine was started when it was loaded."""

    def _keep(self, slot: ReplicaSlot, options: dict[str, Any]) -> None:
        """Keep an engine in ``slot``: start another one whenever it ends."""
        while not self.closing:
            try:
                engine = self._load(slot, options)
            except Exception as error:
                for future in slot.loading:
                    if not future.done():
                        future.set_exception(error)
                if slot.engine is not None:
                    slot.engine.shutdown(cancel=True)
                if not self.closing:
                    LOGGER.error("a replica cannot begin: %s", error)
                    time.sleep(PAUSE)
                continue
            while (event := engine.events.get()) is not None:
                self._relay(slot, event)
            slot.ended()
            if not self.closing:
                LOGGER.error("a replica ended, %r; another one comes", engine.dead)

    def _load(self, slot: ReplicaSlot, options: dict[str, Any]) -> RemoteEngine:
        engine = RemoteEngine(*slot.spawn(), self.watchdog_timeout)
        with self.lock:
            slot.engine = engine
            late = self.closing
        if late:
            engine.shutdown(cancel=True)
        engine.load(options)
        slot.set_loaded(0, engine.wait_loaded())
        facts = engine.wait_loaded()
        engine.start()
        with self.lock:
            slot.ready = not self.closing
        slot.set_loaded(1, facts)
        return engine

    # Requests

    def submit(self, requests: Sequence[Request]) -> None:
        self.check_open()
        for first in requests:
            pending = PendingRequest(first)
            self.pending |= dict.fromkeys(pending.request_ids, pending)
            if not self._dispatch(pending):
                for one in requests:
                    for sample in (one, *one.siblings):
                        self.abort(sample.request_id)
                        self.slot_of.pop(sample.request_id, None)
                expect_one([])

    def abort(self, request_id: int, reason: str = "abort") -> None:
        self.pending.pop(request_id, None)  # so that nobody tries it again
        slot = self.slot_of.get(request_id)
        if slot is not None and slot.engine is not None:
            slot.engine.abort(request_id, reason)

    def _dispatch(self, pending: PendingRequest) -> bool:
        """Give a request to a replica that it hasn't tried; False if none is left."""
        request_ids = pending.request_ids
        with self.lock:
            while (slot := self._choose(pending)) is not None and slot.engine:
                self.slot_of |= dict.fromkeys(request_ids, slot)
                try:
                    slot.engine.submit([pending.first])
                except EngineError:  # it has just ended
                    pending.tried.add(slot)
                    continue
                slot.num_submitted += 1
                slot.prefixes.remember(pending.digests)
                for request_id in request_ids:  # nobody may want it any more
                    if request_id not in self.pending:
                        slot.engine.abort(request_id)
                return True
        return False

    def _choose(self, pending: PendingRequest) -> ReplicaSlot | None:
        """The slot with most of the prompt cached, if half is; else the least busy."""
        ready = [s for s in self.slots if s.ready and s not in pending.tried]
        if not ready:
            return None
        loads = {s: s.load for s in ready}
        cached = {s: s.prefixes.match(pending.digests) for s in ready}
        return rank_replicas(
            loads, cached, len(pending.digests), lambda slot: slot.num_submitted
        )[0]

    def _relay(self, slot: ReplicaSlot, event: Event) -> None:
        """Pass on an event of a request that is still in ``slot``."""
        request_id, error = event.request_id, event.error
        if self.slot_of.get(request_id) is not slot:
            return
        if isinstance(error, QueueFullError):
            if (pending := self.pending.get(request_id)) is not None:
                pending.tried.add(slot)
                if self._dispatch(pending):
                    return
                self.slot_of |= dict.fromkeys(pending.request_ids, slot)
                for one in pending.request_ids:
                    self.pending.pop(one, None)
            self.refused += 1
        self.lost += error is not None and isinstance(error.__cause__, RemoteError)
        self.pending.pop(request_id, None)
        if event.finish_reason is not None:
            self.slot_of.pop(request_id, None)
        self.queue.put(event)

    def _events(self) -> Iterator[Event]:
        """The events of all requests, until all engines have ended for good."""
        while True:
            over = self.closing and not any(slot.ready for slot in self.slots)
            try:
                yield self.queue.get(timeout=0 if over else LOOK_AGAIN)
            except queue.Empty:
                if over:
                    return

    # Questions to all of them

    def check(self) -> None:
        super().check()
        self._ready()

    def health(self) -> dict[str, dict[str, int]]:
        """How many engines run, and how many should."""
        alive = sum(slot.ready for slot in self.slots)
        return {"replicas": {"alive": alive, "wanted": len(self.slots)}}

    def _ready(self) -> list[tuple[ReplicaSlot, RemoteEngine]]:
        """Slots whose engines can be asked. Raises EngineError if there are none."""
        ready = [(s, s.engine) for s in self.slots if s.ready and s.engine]
        expect_one(ready or self.closing)
        return ready

    def _call_all(
        self, question: Callable[[RemoteEngine], Result]
    ) -> list[tuple[ReplicaSlot, Result]]:
        """Ask each engine; those that end meanwhile have no answer."""

        def ask(
            one: tuple[ReplicaSlot, RemoteEngine],
        ) -> tuple[ReplicaSlot, Result] | None:
            slot, engine = one
            with suppress(EngineError):
                return slot, question(engine)
            return None

        self.check_process()
        answers = [*filter(None, self.pool.map(ask, self._ready()))]
        if not answers:
            self.check_open()
            expect_one(answers)
        return answers

    def stats(self) -> Stats:
        """The `Stats` of all together; quantiles are those of the slowest engine."""
        for slot, stats in self._call_all(RemoteEngine.stats):
            slot.stats = stats
        past = [stats for slot in self.slots for stats in slot.past]
        latest = [slot.stats for slot in self.slots if slot.stats is not None]
        whole = join_records(Stats, latest, past)
        lost = {"error": self.lost} if self.lost else {}
        finished = sum_by_key([whole.finished, lost])
        return replace(whole, refused=self.refused, finished=finished)

    def snapshot(self) -> Snapshot:
        """`Engine.snapshot` of all; their pages are numbered one after the other."""
        snapshots = [snapshot for _, snapshot in self._call_all(RemoteEngine.snapshot)]
        return {
            "running": [r for one in snapshots for r in one["running"]],
            "waiting": [r for one in snapshots for r in one["waiting"]],
            "pages": join_pages([one["pages"] for one in snapshots]),
        }

    def compile(self, text: str) -> Grammar:
        return self._call_all(lambda engine: engine.compile(text))[0][1]

    def shutdown(self, cancel: bool, timeout: float | None = None) -> None:
        if os.getpid() != self.pid:
            return
        with self.lock:
            self.closing = True
            self.cancelling = self.cancelling or cancel
            engines = [
                (s.engine, cancel or not s.ready) for s in self.slots if s.engine
            ]
        for seconds in (0, timeout):  # all begin before one is waited for
            for engine, now in engines:
                engine.shutdown(now, seconds)


def expect_one(replicas: object) -> None:
    """Raise EngineError unless there are any ``replicas``."""
    if not replicas:
        raise EngineError("no replica lives; expected one, and others are on their way")
