"""An engine in a time of its own, which passes only where somebody would wait.

Nothing is computed: a step takes as long on the device as one says, and the host as
long to launch it. The device works through what is launched, one step after the other.
"""

import queue
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import simplellm.engine.engine
import simplellm.engine.scheduler
from simplellm.base.request import Event, Request
from simplellm.engine.engine import Engine
from simplellm.engine.page_manager import PageManager
from simplellm.engine.ranks import ALONE
from simplellm.engine.runner import Flight, StepOutput
from simplellm.engine.scheduler import ScheduledChunk, Scheduler

Seconds = Callable[[Sequence[ScheduledChunk]], float]


class Clockwork:
    """Runs an engine's loop, and is its runner, its queue of aborts and its clock.

    ``device`` gives the seconds of a step, ``host`` those of its launch. With
    ``settles`` each launch waits for the step before, as some masks need it.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        device: Seconds,
        host: Seconds,
        settles: bool = False,
        **limits: Any,
    ) -> None:
        self.seconds, self.host, self.settles = device, host, settles
        self.now = self.free = 0.0  # the time, and when all that is launched is done
        # Begin and end of each step on the device.
        self.spans: list[tuple[float, float]] = []
        self.scheduled: list[Sequence[ScheduledChunk]] = []
        self.device = torch.device("cpu")
        self.finish_steps_in_flight: Callable[[], None] = lambda: None
        self.mail: list[tuple[float, Request | tuple[int, str]]] = []
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in (simplellm.engine.engine, simplellm.engine.scheduler):
            patch.setattr(module, "time", clock)
        sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
        sizes["prefill_chunk"] = 8192
        manager = PageManager(20_000, 64, enable_caching=False)
        scheduler = Scheduler(manager, **(sizes | limits))
        self.ranks = ALONE
        self.engine = Engine(scheduler, self, 131072, overlap=True)  # type: ignore[arg-type]
        self.engine.aborts = self  # type: ignore[assignment]

    def run(
        self,
        arrivals: Sequence[tuple[float, int, int]],
        aborts: Sequence[tuple[float, int]] = (),
    ) -> dict[int, list[Event]]:
        """The events of requests: when they come, tokens of prompt and answer.

        ``aborts`` are times and places of requests among the arrivals.
        """
        self.mail = [
            (when, Request([0] * prompt, new, arrival_time=when, request_id=number))
            for number, (when, prompt, new) in enumerate(arrivals)
        ]
        self.mail += [(when, (number, "abort")) for when, number in aborts]
        self.mail.sort(key=itemgetter(0))
        self.engine._loop()
        assert self.engine.dead is None
        found: dict[int, list[Event]] = {}
        while (event := self.engine.events.get()) is not None:
            found.setdefault(event.request_id, []).append(event)
        return found

    @property
    def idle(self) -> float:
        """Seconds of the device between its first step and its last."""
        began, ended = self.spans[0][0], self.spans[-1][1]
        return ended - began - sum(end - begin for begin, end in self.spans)

    def get(self, timeout: float | None) -> tuple[int, str] | None:
        """Time passes until something comes, or until nobody waits any longer."""
        until = self.now if timeout is None else self.now + timeout
        if not self.mail or (timeout is not None and self.mail[0][0] > until):
            self.now = until
            if timeout is None:
                self.engine.closing = True
                return None
            raise queue.Empty
        when, what = self.mail.pop(0)
        self.now = max(self.now, when)
        if not isinstance(what, Request):
            return what
        self.engine.submit([what])
        return None

    def put(self, asked: object) -> None:
        """Nobody has to be woken: whoever submits a request is the one who waits."""

    def launch(self, scheduled: Sequence[ScheduledChunk]) -> Flight:
        self.now += self.host(scheduled)
        begin = max(self.now, self.free)
        end = self.free = begin + self.seconds(scheduled)
        self.spans.append((begin, end))
        self.scheduled.append(scheduled)
        if self.settles:
            self.finish_steps_in_flight()

        def wait() -> StepOutput:
            late = self.now >= end
            self.now = max(self.now, end)
            count = sum(chunk.samples for chunk in scheduled)
            return StepOutput([[0]] * count, [None] * count, late=late)

        return wait
