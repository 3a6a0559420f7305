"""Short soaks; `tools/soak.py` and `tools/soak_server.py` run the long ones."""

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import soak
import soak_server

from simplellm import LLM
from simplellm.base.request import Request
from simplellm.engine.engine import Engine
from simplellm.engine.scheduler import Scheduler


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No log of the faults: records that pytest keeps would hold what must be freed."""
    logger = logging.getLogger("simplellm")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(before)


def test_nothing_is_left_after_a_crowd_of_clients():
    found = soak.soak(seconds=2, threads=24, seed=1, fault_every=10, least=100)
    assert found["wrong"] == []
    ends = found["ends"]
    assert found["asked"] == sum(ends.values())
    assert found["accepted"] == sum(found["engine_ends"].values())
    assert found["steps"] > 20
    assert ends.get("length", 0) + ends.get("stop", 0) > 0, ends
    for reason in ("error", "refused: bad request", "refused: queue full"):
        assert ends.get(reason, 0) > 0, ends


def test_what_is_left_behind_is_found():
    """The soak's own checks fail when a page is lost and a client never answered."""
    ledger = soak.Ledger(asked=2)
    ledger.end(["length"])
    llm = LLM(device="cpu", config=soak.CONFIG)
    manager = llm.engine_core.scheduler.manager
    manager.add(-1, [1] * 20)
    assert manager.allocate(-1, 20)
    wrong = soak.find_leaks(llm, ledger, threading.active_count() - 2)
    assert "pages in use: 6" in wrong
    assert "sequences in the cache: 1" in wrong
    assert "requests without an end: 1" in wrong
    assert "requests the engine ended twice or never: -1" in wrong
    ledger.compare([1], [2, 3])
    ledger.compare([1], [2, 3, 4])
    assert not ledger.wrong
    ledger.compare([1], [2, 4])
    assert len(ledger.wrong) == 1


def test_a_leak_in_the_engine_is_found(monkeypatch: pytest.MonkeyPatch):
    """An engine that keeps the pages of one aborted request in two."""
    finish, aborts = Scheduler.finish, []

    def leaking(self: Scheduler, request: Request, reason: str) -> None:
        if reason == "abort" and request in self.running:
            aborts.append(request)
            if len(aborts) % 2:
                self.manager.fork(request.request_id, -len(aborts))
        finish(self, request, reason)

    monkeypatch.setattr(Scheduler, "finish", leaking)
    llm = LLM(device="cpu", config=soak.CONFIG)
    ledger = soak.Ledger(asked=4)
    threads = threading.active_count() - 2
    for _ in range(4):
        next(llm.stream([1] * 20, max_tokens=200, ignore_eos=True))
        ledger.end([f"stream {soak.DROPPED}"])
    wrong = soak.find_leaks(llm, ledger, threads)
    assert any(line.startswith("pages in use") for line in wrong), wrong
    assert "sequences in the cache: 2" in wrong


@pytest.mark.exhaustive
def test_a_fault_that_spreads_is_found(monkeypatch: pytest.MonkeyPatch):
    """An engine that fails all running requests for one of them."""
    end = Engine.end

    def spreading(self: Engine, request: Request, reason: str, *error: Any) -> None:
        others = self.scheduler.running if reason == "error" else ()
        for each in [request, *others]:
            end(self, each, reason, *error)

    monkeypatch.setattr(Engine, "end", spreading)
    found = soak.soak(seconds=2, threads=6, fault_every=4, least=60)
    assert any("requests that others made fail" in line for line in found["wrong"])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_nothing_is_left_in_a_server_after_clients_of_all_kinds(monkeypatch):
    monkeypatch.setattr(soak_server, "LIMIT", 6)  # what asks for too much ends sooner
    found = soak_server.soak_server(seconds=5, clients=8)
    # So short a run says nothing of memory.
    wrong = [line for line in found["wrong"] if not line.startswith("memory")]
    assert wrong == []
    assert {"ok: answered", "ok: left", "ok: bad"} <= set(found["ends"])


def test_what_a_server_keeps_is_found():
    before = {"mib": 100.0, "files": 14, "threads": 4}
    assert soak_server.compare(before, before, growth=0.01) == []
    after = {"mib": 120.0, "files": 15, "threads": 6}
    found = soak_server.compare(before, after, growth=0.2)
    assert found == [
        "files: 15, and 14 before",
        "threads: 6, and 4 before",
        "memory grew by 20.0%",
    ]
