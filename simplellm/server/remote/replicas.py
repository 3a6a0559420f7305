"""Several engines as one: who gets a request, and what happens when an engine ends.

A prompt goes where most of its beginning has been computed, since its pages are there
and nowhere else, unless that engine has much more to do than another one. An engine
whose queue is full passes a request on, so that one is refused only where all are full.
"""

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import Any

from simplellm.base.config import expect
from simplellm.base.grammar import Grammar
from simplellm.base.request import EngineError, Event, QueueFullError, Request
from simplellm.engine.client import Access
from simplellm.engine.stats import Stats
from simplellm.server.remote.client import DistantError, RemoteEngine
from simplellm.server.start import WATCHDOG_TIMEOUT

LOGGER = logging.getLogger("simplellm")
STRIDE = 16  # tokens: so finely beginnings are told apart
MOST_KNOWN = 2**17  # of them that are remembered of an engine, about 15 MB
# An engine is overloaded if it has more requests than this share of those of another
# one, and so many on top.
TOO_MUCH, MARGIN = 1.5, 8
MOST_EVENTS = 1024  # that wait here; more wait, joined, where they come from
LOOK_AGAIN = 0.1  # seconds between two looks at whether all is over
PAUSE = 1.0  # seconds after an engine that could not begin


class EnginePlace:
    """Where one of the engines is, and after its end the next one."""

    def __init__(self) -> None:
        self.engine: RemoteEngine | None = None
        self.up = False  # whether it can be asked
        self.loading: list[Future[Any]] = [Future(), Future()]  # of the first one
        self.given = 0  # requests so far
        # The beginnings of prompts that the engine has had, the latest ones last.
        self.known: dict[int, None] = {}
        self.latest: Stats | None = None  # what it has told last
        self.past: list[Stats] = []  # the counts of those before it

    @property
    def load(self) -> int:
        """Requests that haven't ended."""
        return 0 if self.engine is None else len(self.engine.open)

    def tell(self, phase: int, told: Any) -> None:
        """So far is the first engine here; others nobody waits for."""
        if not self.loading[phase].done():
            self.loading[phase].set_result(told)

    def found(self, page_hashes: Sequence[int]) -> int:
        """How many of the beginnings it has had, the shortest ones first."""
        count = 0
        while count < len(page_hashes) and page_hashes[count] in self.known:
            count += 1
        return count

    def note(self, page_hashes: Sequence[int]) -> None:
        """It is given these; what is long is forgotten before what is short."""
        self.given += 1
        for digest in reversed(page_hashes):
            self.known.pop(digest, None)
            self.known[digest] = None
        while len(self.known) > MOST_KNOWN:
            del self.known[next(iter(self.known))]

    def ended(self) -> None:
        """Its engine is gone, with all that it had computed."""
        self.up, self.known = False, {}
        if self.latest is not None:
            gone = {"waiting": 0, "running": 0, "cache_usage": 0.0}
            old = Stats(**asdict(self.latest) | gone | {"tokens_per_second": 0.0})
            self.past, self.latest = [added([*self.past, old])], None


class Asked:
    """A request that no engine has begun yet, with its siblings."""

    def __init__(self, first: Request) -> None:
        self.first = first
        self.numbers = [one.number for one in (first, *first.siblings)]
        self.page_hashes = digests_of(first.tokens)
        self.tried: set[EnginePlace] = set()  # that are full, or gone


class Replicas(Access):
    """What `Delivery` and the server need of an engine; there are ``count`` of them.

    ``source`` gives a process for one, and the link to it, as `spawn` does: at the
    beginning and whenever one has ended, or hung for ``watchdog_timeout`` seconds. It
    may block.
    """

    thread = None  # none of this process runs steps

    def __init__(
        self,
        source: Callable[[], tuple[Any, socket.socket]],
        count: int,
        watchdog_timeout: float = WATCHDOG_TIMEOUT,
    ) -> None:
        super().__init__()
        self.source, self.watchdog_timeout = source, watchdog_timeout
        self.places = [EnginePlace() for _ in range(count)]
        self.queue: queue.Queue[Event] = queue.Queue(MOST_EVENTS)
        self.events = SimpleNamespace(get=self._next)
        self.phases = iter(range(2))  # of loading, as `RemoteEngine.loaded` has them
        self.pool = ThreadPoolExecutor(2 * count)  # for questions to all of them
        self.where: dict[int, EnginePlace] = {}  # requests that haven't ended
        self.asked: dict[int, Asked] = {}  # those of them that haven't begun
        self.refused = self.lost = 0
        self.lock = threading.RLock()  # guards the choice of a place, and closing

    # The engines

    def load(self, wanted: dict[str, Any]) -> None:
        """Let each of them load what is ``wanted``; together they have one queue."""
        config = wanted["config"]
        share = -(-config["max_waiting"] // len(self.places))
        wanted = {**wanted, "config": {**config, "max_waiting": share}}
        for place in self.places:
            threading.Thread(
                target=self._keep,
                args=[place, wanted],
                name="simplellm-replica",
                daemon=True,
            ).start()

    def loaded(self) -> dict[str, Any]:
        """Wait for what all say next of loading. Raises what that has raised."""
        phase = next(self.phases)
        told = [place.loading[phase].result() for place in self.places]
        first: dict[str, Any] = told[0]
        return first

    def start(self) -> None:
        """Each of them has begun when it was loaded."""

    def _keep(self, place: EnginePlace, wanted: dict[str, Any]) -> None:
        """Have an engine at ``place``, and another one whenever that ends."""
        while not self.closing:
            try:
                engine = self._load(place, wanted)
            except Exception as error:
                for future in place.loading:
                    if not future.done():
                        future.set_exception(error)
                if place.engine is not None:
                    place.engine.shutdown(cancel=True)
                if not self.closing:
                    LOGGER.error("a replica cannot begin: %s", error)
                    time.sleep(PAUSE)
                continue
            while (event := engine.events.get()) is not None:
                self._pass(place, event)
            place.ended()
            if not self.closing:
                LOGGER.error("a replica ended, %r; another one comes", engine.dead)

    def _load(self, place: EnginePlace, wanted: dict[str, Any]) -> RemoteEngine:
        engine = RemoteEngine(*self.source(), self.watchdog_timeout)
        with self.lock:
            place.engine = engine
            late = self.closing
        if late:
            engine.shutdown(cancel=True)
        engine.load(wanted)
        place.tell(0, engine.loaded())
        told = engine.loaded()
        engine.start()
        with self.lock:
            place.up = not self.closing
        place.tell(1, told)
        return engine

    # Requests

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, each with a number of its own, and their siblings.

        Raises EngineError and then has taken none of them. That too many wait is the
        first event of each.
        """
        self.check_open()
        for first in requests:
            asked = Asked(first)
            self.asked |= dict.fromkeys(asked.numbers, asked)
            if not self._place(asked):
                for one in requests:
                    for sample in (one, *one.siblings):
                        self.abort(sample.number)
                        self.where.pop(sample.number, None)
                expect_one([])

    def abort(self, number: int, reason: str = "abort") -> None:
        """End a request soon, from any thread or finalizer."""
        self.asked.pop(number, None)  # so that nobody tries it again
        place = self.where.get(number)
        if place is not None and place.engine is not None:
            place.engine.abort(number, reason)

    def _place(self, asked: Asked) -> bool:
        """Give a request to one of those that haven't been tried."""
        numbers = asked.numbers
        with self.lock:
            while (place := self._choose(asked)) is not None and place.engine:
                self.where |= dict.fromkeys(numbers, place)
                try:
                    place.engine.submit([asked.first])
                except EngineError:  # it has just ended
                    asked.tried.add(place)
                    continue
                place.note(asked.page_hashes)
                for number in numbers:  # nobody may want it any more
                    if number not in self.asked:
                        place.engine.abort(number)
                return True
        return False

    def _choose(self, asked: Asked) -> EnginePlace | None:
        """Where most of the prompt is known, if half is; else who has least to do."""
        there = [p for p in self.places if p.up and p not in asked.tried]
        if not there:
            return None
        most = TOO_MUCH * min(p.load for p in there) + MARGIN
        known = {p: p.found(asked.page_hashes) for p in there if p.load <= most}
        best = max(known, key=lambda p: (known[p], -p.load, -p.given))
        if 2 * known[best] >= len(asked.page_hashes) > 0:
            return best
        return min(there, key=lambda p: (p.load, p.given))

    def _pass(self, place: EnginePlace, event: Event) -> None:
        """Pass on what an engine tells of a request that is still its own."""
        number, error = event.number, event.error
        if self.where.get(number) is not place:
            return
        if isinstance(error, QueueFullError):
            if (asked := self.asked.get(number)) is not None:
                asked.tried.add(place)
                if self._place(asked):
                    return
                self.where |= dict.fromkeys(asked.numbers, place)
                for one in asked.numbers:
                    self.asked.pop(one, None)
            self.refused += 1
        self.lost += error is not None and isinstance(error.__cause__, DistantError)
        self.asked.pop(number, None)
        if event.finish_reason is not None:
            self.where.pop(number, None)
        self.queue.put(event)

    def _next(self) -> Event | None:
        """The next event; None once all engines have ended for good."""
        while True:
            over = self.closing and not any(place.up for place in self.places)
            with suppress(queue.Empty):
                return self.queue.get(timeout=0 if over else LOOK_AGAIN)
            if over:
                return None

    # What is told of them

    def check(self) -> None:
        """Raise EngineError if no engine can answer now."""
        super().check()
        self._there()

    def health(self) -> dict[str, Any]:
        """How many engines there are, and how many there should be."""
        up = sum(place.up for place in self.places)
        return {"replicas": {"alive": up, "wanted": len(self.places)}}

    def _there(self) -> list[tuple[EnginePlace, RemoteEngine]]:
        """Those that can be asked. Raises EngineError if there are none."""
        found = [(p, p.engine) for p in self.places if p.up and p.engine]
        expect_one(found or self.closing)
        return found

    def _each(self, name: str, *question: Any) -> list[tuple[EnginePlace, Any]]:
        """What each of them answers, but for those that end meanwhile."""

        def ask(
            one: tuple[EnginePlace, RemoteEngine],
        ) -> tuple[EnginePlace, Any] | None:
            with suppress(EngineError):
                return one[0], getattr(one[1], name)(*question)
            return None

        self.check_process()
        found = [*filter(None, self.pool.map(ask, self._there()))]
        if not found:
            self.check_open()
            expect_one(found)
        return found

    def stats(self) -> Stats:
        """How they are doing together; quantiles are those of the slowest one."""
        for place, told in self._each("stats"):
            place.latest = told
        every = [told for place in self.places for told in place.past]
        every += [place.latest for place in self.places if place.latest is not None]
        found = asdict(added(every)) | {"refused": self.refused}
        up = [p.latest.cache_usage for p in self.places if p.latest is not None]
        found["cache_usage"] = sum(up) / max(1, len(up))
        finished = found["finished"]
        if self.lost:
            finished["error"] = finished.get("error", 0) + self.lost
        return Stats(**found)

    def snapshot(self) -> dict[str, Any]:
        """`Engine.snapshot` of all; their pages are numbered one after the other."""
        found = [told for _, told in self._each("snapshot")]
        first = 0
        for one in found:
            pages = one["pages"]
            for table in pages["tables"].values():
                table[:] = [[p + first if p >= 0 else p for p in g] for g in table]
            pages["cached"] = [page + first for page in pages["cached"]]
            first += pages["num_pages"]
        whole: dict[str, Any] = found[0]
        for one in found[1:]:
            for name in ("running", "waiting"):
                whole[name] += one[name]
            for name in ("num_pages", "free", "cached", "references"):
                whole["pages"][name] += one["pages"][name]
            whole["pages"]["tables"] |= one["pages"]["tables"]
        return whole

    def compile(self, text: str) -> Grammar:
        """A grammar that each engine's process keeps. Raises GrammarError."""
        found: Grammar = self._each("compile", text)[0][1]
        return found

    def shutdown(self, cancel: bool, timeout: float | None = None) -> None:
        """Take no more requests; finish those there are, or ``cancel`` them now."""
        if os.getpid() != self.pid:
            return
        with self.lock:
            self.closing = True
            self.cancelling = self.cancelling or cancel
            there = [(p.engine, cancel or not p.up) for p in self.places if p.engine]
        for seconds in (0, timeout):  # all are told before one is waited for
            for engine, now in there:
                engine.shutdown(now, seconds)


def expect_one(found: object) -> None:
    """Raise EngineError unless any engine is ``found``."""
    wanted = "one or more; others are on their way"
    expect(found, "the number of living replicas", 0, wanted, EngineError)


def digests_of(tokens: Sequence[int]) -> list[int]:
    """A digest of each beginning of a prompt that has a multiple of STRIDE tokens."""
    found, before = [], 0
    for end in range(STRIDE, len(tokens) + 1, STRIDE):
        before = hash((before, *tokens[end - STRIDE : end]))
        found.append(before)
    return found


def added(every: Sequence[Stats]) -> Stats:
    """The sums of what engines count; of the times, the longest."""
    found: dict[str, Any] = {}
    for name in (spec.name for spec in fields(Stats)):
        values = [value for one in every if (value := getattr(one, name)) is not None]
        if name == "finished":
            reasons = {reason for counts in values for reason in counts}
            found[name] = {r: sum(c.get(r, 0) for c in values) for r in reasons}
        elif name.startswith(("ttft", "itl")):
            found[name] = max(values, default=None)
        else:
            found[name] = sum(values)
    hits, prompts = found["cached_tokens"], found["prompt_tokens"]
    return Stats(**found | {"cache_hit_rate": hits / max(1, prompts)})
