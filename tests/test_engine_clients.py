"""What every `EngineClient` promises, and that all three engines are one."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from models import PATIENCE, SMALL
from stepping import make_engine

from simplellm import EngineError, SamplingParams, load_model
from simplellm.base.event_queue import EventQueue
from simplellm.base.request import Event, Request
from simplellm.engine.engine_client import EngineClient
from simplellm.server.remote.client import RemoteClient, RemoteEngine, load_remote
from simplellm.server.remote.replicas import Replicas
from simplellm.server.start import spawn


def near(folder: Path) -> EngineClient:
    return make_engine(load_model(folder, device="cpu"), SMALL)


def loaded(engine: RemoteClient, folder: Path) -> EngineClient:
    return load_remote(engine, str(folder), SMALL, device="cpu").engine


def far(folder: Path) -> EngineClient:
    return loaded(RemoteEngine(*spawn()), folder)


def several(folder: Path) -> EngineClient:
    return loaded(Replicas([spawn] * 2), folder)


Make = Callable[[Path], EngineClient]
numbers = count()


@pytest.fixture(params=[near, far, several], scope="module")
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.param
    return found


@pytest.fixture(scope="module")
def engine(make: Make, folder: Path) -> Iterator[EngineClient]:
    """One for all tests that leave nothing running."""
    engine = make(folder)
    engine.start()
    yield engine
    engine.shutdown(cancel=True, timeout=PATIENCE)


def ask(max_tokens: int, token: int = 7) -> Request:
    params = SamplingParams(temperature=0, seed=1)
    return Request([token] * 5, max_tokens, params, request_id=next(numbers))


def ends(engine: EngineClient, *requests: Request) -> dict[int, list[Event]]:
    """The events of requests, up to the last one of each."""
    found: dict[int, list[Event]] = {request.request_id: [] for request in requests}
    left = set(found)
    while left:
        event = engine.events.get()
        assert event is not None
        found[event.request_id].append(event)
        if event.finish_reason is not None:
            left.remove(event.request_id)
    return found


def test_what_is_asked_is_told_and_counted(engine: EngineClient) -> None:
    first, sibling, other = ask(6), ask(6), ask(3, 8)
    first.siblings = [sibling]
    engine.submit([first, other])
    found = ends(engine, first, sibling, other)
    tokens = {
        number: [token for event in events for token in event.tokens]
        for number, events in found.items()
    }
    assert tokens[first.request_id] == tokens[sibling.request_id]
    assert [len(tokens[r.request_id]) for r in (first, other)] == [6, 3]
    assert {events[-1].finish_reason for events in found.values()} == {"length"}
    engine.check()
    engine.check_process()
    assert isinstance(engine.health(), dict)


def test_an_abort_is_an_event(engine: EngineClient) -> None:
    request = ask(400)
    engine.submit([request])
    assert engine.events.get() is not None  # it runs
    engine.abort(request.request_id)
    assert ends(engine, request)[request.request_id][-1].finish_reason == "abort"
    engine.abort(request.request_id)  # once more is nothing


def test_a_closed_engine_has_a_last_event(make: Make, folder: Path) -> None:
    """What runs is finished first."""
    engine = make(folder)
    engine.start()
    request = ask(20)
    engine.submit([request])
    engine.shutdown(cancel=False, timeout=0)
    with pytest.raises(EngineError, match="this LLM is closed"):
        engine.submit([ask(1)])
    assert ends(engine, request)[request.request_id][-1].finish_reason == "length"
    assert engine.events.get() is None and engine.dead is None
    if engine.thread is not None:
        engine.thread.join(PATIENCE)


def test_who_runs_is_seen(engine: EngineClient) -> None:
    request = ask(400)
    engine.submit([request])
    assert engine.events.get() is not None  # it runs
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(lambda: (engine.snapshot(), engine.stats()))
        while not seen.done():  # an answer may come where the events are
            assert engine.events.get() is not None
        snapshot, stats = seen.result()
    assert [one["request_id"] for one in snapshot["running"]] == [request.request_id]
    assert (stats.running, stats.waiting) == (1, 0)
    assert 0 < stats.cache_usage < 1 and stats.steps > 0
    engine.abort(request.request_id)
    ends(engine, request)


def test_what_is_put_together_comes_one_by_one_and_in_order():
    events = EventQueue()
    assert events.empty()
    events.put(1)
    events.put_all([2, 3])
    events.put_all([])
    events.put(None)
    assert not events.empty()
    assert [events.get() for _ in range(3)] == [1, 2, 3]
    assert events.get_nowait() is None and events.empty()
    with pytest.raises(queue.Empty):
        events.get(timeout=0.001)
