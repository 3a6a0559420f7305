"""Several engines as one: where requests go, and what happens if one of them ends."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import GREEDY, PATIENCE, SMALL, until
from serving import ROOT, Served, events_of, serving

from simplellm import LLM, EngineConfig, EngineError, QueueFullError
from simplellm.base.grammar import GrammarError
from simplellm.base.request import Event, Request
from simplellm.engine.joins import join_records
from simplellm.engine.stats import Stats
from simplellm.server.remote import prefixes, replicas
from simplellm.server.remote.client import load_remote
from simplellm.server.remote.prefixes import digests_of
from simplellm.server.remote.replicas import (
    PendingRequest,
    Replicas,
    ReplicaSlot,
)
from simplellm.server.start import spawn

COMPLETE = "/v1/completions"
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
WATCHDOG = 8.0  # seconds after which an engine hangs
# Steps take a while, and some prompts end the process, or hang once they have tokens.
SLOW = """
import os, time
from simplellm.engine.runner import Runner
from simplellm.engine.scheduler import Scheduler
start, add = Runner.start_forward, Scheduler.add

def starting(self, works, sampling):
    time.sleep(0.02)
    while any(w.request.tokens[0] == 14 and w.request.num_output > 18 for w in works):
        time.sleep(1)
    start(self, works, sampling)

def adding(self, requests):
    if any(request.tokens[:1] == [13] for request in requests):
        os._exit(9)
    add(self, requests)

Runner.start_forward, Scheduler.add = starting, adding
"""


def together(folder: Path, config: EngineConfig = SMALL, **options: Any) -> LLM:
    engine = Replicas([spawn] * 2, **options)
    return LLM.of(load_remote(engine, str(folder), config, device="cpu"))


@pytest.fixture(scope="module")
def both(folder: Path, tmp_path_factory: Any) -> Iterator[LLM]:
    """Two engines as one, whose steps are slow."""
    patched = tmp_path_factory.mktemp("patched")
    (patched / "sitecustomize.py").write_text(SLOW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(patched), str(ROOT)]))
        with together(folder, watchdog_timeout=WATCHDOG) as llm:
            yield llm
            until(lambda: not llm._output_processor.readers)
            until(lambda: not (replicas_of(llm).slot_of or replicas_of(llm).pending))


@pytest.fixture(scope="module")
def near(folder: Path) -> Iterator[LLM]:
    with LLM(folder, SMALL, device="cpu") as llm:
        yield llm


@pytest.fixture
def served(both: LLM) -> Iterator[Served]:
    """A server of both, which are there."""
    until(lambda: all(slot.ready for slot in replicas_of(both).slots))
    with serving(both) as found:
        yield found


def replicas_of(llm: LLM) -> Replicas:
    assert isinstance(llm.engine, Replicas)
    return llm.engine


def prompt(number: int, length: int = 40) -> list[int]:
    """A prompt that has no beginning in common with those of other numbers."""
    return [number + 100] * length


# Where a request goes


def engines(*loads: int) -> Replicas:
    """Engines with so many requests each; None runs."""
    found = Replicas([spawn] * len(loads))
    for slot, load in zip(found.slots, loads, strict=True):
        engine: Any = SimpleNamespace(open=set(range(load)))
        slot.engine, slot.ready = engine, True
    return found


def choice(engine: Replicas, tokens: list[int], *tried: ReplicaSlot) -> int:
    """Where a prompt would go."""
    pending = PendingRequest(Request(tokens, 1))
    pending.tried = {*tried}
    slot = engine._choose(pending)
    assert slot is not None
    return engine.slots.index(slot)


def note(slot: ReplicaSlot, tokens: list[int]) -> None:
    slot.num_submitted += 1
    slot.prefixes.remember(digests_of(tokens))


def test_a_new_prompt_goes_to_whoever_has_least_to_do() -> None:
    engine = engines(3, 1, 2)
    assert choice(engine, prompt(1)) == 1
    assert choice(engine, prompt(1), engine.slots[1]) == 2
    engine.slots[1].ready = False
    assert choice(engine, prompt(1)) == 2


def test_among_equals_they_take_turns() -> None:
    engine = engines(0, 0)
    found = []
    for number in range(4):
        found.append(choice(engine, prompt(number)))
        note(engine.slots[found[-1]], prompt(number))
    assert found == [0, 1, 0, 1]


def test_an_equal_beginning_goes_where_it_was_unless_that_is_overloaded() -> None:
    engine = engines(8, 0)
    note(engine.slots[0], prompt(1))
    assert choice(engine, prompt(1) + prompt(2, 20)) == 0
    engine.slots[0].engine.open.add(8)  # one more than the slack
    assert choice(engine, prompt(1) + prompt(2, 20)) == 1
    # In proportion: with 100 there, 158 are not too many here.
    for slot, load in zip(engine.slots, (158, 100), strict=True):
        slot.engine.open = set(range(load))
    assert choice(engine, prompt(1)) == 0
    engine.slots[0].engine.open.add(158)
    assert choice(engine, prompt(1)) == 1


def test_the_longest_beginning_counts_if_it_is_half_of_the_prompt() -> None:
    engine = engines(1, 2, 0)
    note(engine.slots[0], prompt(1, 32) + prompt(2, 64))
    note(engine.slots[1], prompt(1, 64))
    assert choice(engine, prompt(1, 64) + prompt(3, 32)) == 1
    assert choice(engine, prompt(1, 64) + prompt(3, 64)) == 1
    assert choice(engine, prompt(1, 64) + prompt(3, 96)) == 2
    assert choice(engine, prompt(1, 15)) == 2  # too short to be told apart


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prefixes are kept for longer than the long ones behind them."""
    monkeypatch.setattr(prefixes, "MOST_PREFIXES", 5)
    slot = ReplicaSlot(spawn)
    for number in (1, 2):
        note(slot, prompt(number, 64))
        assert len(slot.prefixes.digests) <= 5
    found = [slot.prefixes.match(digests_of(prompt(n, 64))) for n in (1, 2)]
    assert found == [1, 4]
    slot.ended()
    assert not slot.prefixes.digests and not slot.ready


def test_nobody_tries_again_what_nobody_wants() -> None:
    """A request that is refused and aborted at the same time."""
    engine = engines(0, 0)
    sent: list[Any] = []
    for name, slot in zip("ab", engine.slots, strict=True):
        own: Any = slot.engine
        own.submit = lambda _, name=name: sent.append(name)
        own.abort = lambda number, *_, name=name: sent.append((name, number))
    engine.submit([Request(prompt(1), 1, request_id=7)])
    full = Event(7, finish_reason="error", error=QueueFullError("full"))
    engine._relay(engine.slots[0], full)
    assert sent == ["a", "b"] and engine.slot_of[7] is engine.slots[1]
    engine._relay(engine.slots[0], full)  # it has nothing to say any more
    engine.abort(7)
    assert sent == ["a", "b", ("b", 7)]
    engine._relay(engine.slots[1], full)
    assert engine.queue.get_nowait() == full and engine.queue.empty()
    assert not engine.slot_of and not engine.pending and engine.refused == 1


# The same as one engine


def test_the_same_tokens_as_of_one_engine(near: LLM, both: LLM) -> None:
    given = [slot.num_submitted for slot in replicas_of(both).slots]
    prompts = [[n, 7, 8] for n in range(20, 32)]
    options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "seed": 3, "n": 2}
    wanted, found = (
        [out.token_ids for out in llm.generate(prompts, **options).result(PATIENCE)]
        for llm in (near, both)
    )
    assert found == wanted
    counts = [
        p.num_submitted - g for p, g in zip(replicas_of(both).slots, given, strict=True)
    ]
    assert sum(counts) == 12 and min(counts) == 6  # the samples of a prompt together


def test_an_equal_beginning_is_found_in_the_cache(both: LLM) -> None:
    for _ in range(3):
        (output,) = both.generate(prompt(60), max_tokens=2, **GREEDY).result(PATIENCE)
    assert output.num_cached_tokens >= 36
    (slot,) = (
        p
        for p in replicas_of(both).slots
        if p.prefixes.match(digests_of(prompt(60))) == 2
    )
    assert slot.ready


def test_grammars(near: LLM, both: LLM) -> None:
    pytest.importorskip("llguidance")
    options: dict[str, Any] = {"structured_outputs": {"regex": "[ab]{3}"}, "seed": 4}
    texts = [
        [o.text for o in llm.generate(["x", "y"], **options).result(PATIENCE)]
        for llm in (near, both)
    ]
    assert texts[0] == texts[1] and all({*text} <= {*"ab"} for text in texts[1])
    with pytest.raises(GrammarError):
        replicas_of(both).compile("start: missing")


def test_what_is_told_of_them_adds_up(both: LLM, served: Served) -> None:
    before = both.stats()
    futures = [both.generate(prompt(n), **LONG) for n in (1, 2)]
    until(lambda: both.stats().prompt_tokens == before.prompt_tokens + 80)
    snapshot, pages = both.engine.snapshot(), SMALL.num_pages
    assert [slot.load for slot in replicas_of(both).slots] == [1, 1]
    told = snapshot["pages"]
    assert told["num_pages"] == 2 * pages == len(told["references"])
    assert len(snapshot["running"]) == len(told["tables"]) == 2
    held = [
        {p // pages for g in t for p in g if p >= 0} for t in told["tables"].values()
    ]
    assert sorted(map(tuple, held)) == [(0,), (1,)]
    for table in told["tables"].values():
        assert all(told["references"][p] == 1 for g in table for p in g if p >= 0)
    metrics = served.client.get("/metrics").text
    assert 'num_requests_running{engine="0",model_name="tiny"} 2.0' in metrics
    with served.client.stream("GET", "/live") as answer:
        assert b'"running":2' in next(answer.iter_bytes())
    health = served.client.get("/health").json()
    assert health == {"status": "ok", "replicas": {"alive": 2, "wanted": 2}}
    assert all(future.cancel() for future in futures)
    until(lambda: both.stats().finished.get("abort", 0) >= 2)
    after = both.stats()
    assert after.running == 0 and after.cache_usage == 0


def test_statistics_of_several_are_joined_as_each_field_says() -> None:
    one = Stats(1, 2, {"stop": 1}, 3, 4, 10, 5, 6, 7.0, 0.5, 8, 0.1, 0.4, None, None)
    two = replace(one, finished={"stop": 2, "length": 0}, ttft=0.2, cached_tokens=0)
    found = join_records(Stats, [one, two])
    assert found.finished == {"stop": 3, "length": 0} and found.tokens_per_second == 14
    assert (found.ttft, found.itl) == (0.2, None) and found.cache_hit_rate == 5 / 20
    assert found.cache_usage == 0.5
    later = join_records(Stats, [one], [two])  # two's counts stay, what it did is over
    now = {"waiting": 1, "running": 2, "tokens_per_second": 7.0, "cache_usage": 0.5}
    assert asdict(later) == asdict(found) | now
    none = Stats(0, 0, {}, 0, 0, 0, 0, 0, 0.0, 0.0, 0, None, None, None, None)
    assert join_records(Stats, []) == none


# Limits


@pytest.mark.exhaustive
def test_a_full_queue_is_full_in_all_of_them(folder: Path) -> None:
    config = replace(SMALL, max_num_seqs=1, max_waiting=2)
    with together(folder, config) as llm:
        running = [llm.generate(prompt(n), **LONG) for n in (1, 2)]
        until(lambda: llm.stats().running == 2)
        # All of them would be at home where prompt 1 is, whose queue has one place.
        waiting = [llm.generate(prompt(1), max_tokens=1) for _ in range(2)]
        until(lambda: llm.stats().waiting == 2)
        with pytest.raises(QueueFullError, match="wait already"):
            llm.generate(prompt(1), n=2, max_tokens=1).result(PATIENCE)
        with serving(llm) as served:
            answer = served.post(COMPLETE, {"prompt": "x"})
            assert answer.status_code == 429 and answer.headers["retry-after"]
        assert llm.stats().refused == 3
        assert [slot.num_submitted for slot in replicas_of(llm).slots] == [5, 4]
        for one in running:
            one.cancel()
        assert [len(one.result(PATIENCE)) for one in waiting] == [1, 1]
        until(lambda: not replicas_of(llm).slot_of)


# One of them ends


def home_of(llm: LLM, tokens: list[int]) -> ReplicaSlot:
    """Where a request with this prompt runs."""
    numbers = {r.request.request_id for r in llm._output_processor.readers.values()
               if r.request.tokens[: len(tokens)] == tokens}  # fmt: skip
    (slot,) = {p for n, p in replicas_of(llm).slot_of.items() if n in numbers}
    return slot


def killed(slot: ReplicaSlot, sent: int = signal.SIGKILL) -> None:
    assert slot.engine is not None
    slot.engine.process.send_signal(sent)


def body(tokens: list[int], **options: Any) -> dict[str, Any]:
    return {"prompt": tokens, "ignore_eos": True, "return_token_ids": True, **options}


def text_of(served: Served, asked: dict[str, Any]) -> str:
    """All of a stream, however it ends."""
    with served.client.stream("POST", COMPLETE, json=asked | {"stream": True}) as found:
        assert found.status_code == 200
        return found.read().decode()


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        pytest.param(signal.SIGKILL, "ended", id="killed"),
        pytest.param(
            signal.SIGSTOP,
            "made no progress in 8 seconds",
            id="stopped",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_replica_that_is_lost(
    near: LLM, both: LLM, served: Served, sent: int, words: str
) -> None:
    """What has streamed ends with an error; all else is answered as if nothing were."""
    first, other, before = prompt(70 + sent), prompt(120 + sent), both.stats()
    options: dict[str, Any] = {"max_tokens": 60, "seed": 5}
    with ThreadPoolExecutor(4) as clients:
        streamed = clients.submit(text_of, served, body(first, **options))
        until(lambda: both.stats().running == 1)
        slot = home_of(both, first)
        whole = clients.submit(served.post, COMPLETE, body(first, n=2, **options))
        until(lambda: slot.load == 3)
        rests = clients.submit(text_of, served, body(other, **options))
        until(lambda: both.stats().running == 4 and slot.load == 3)
        time.sleep(0.2)  # all have tokens
        lost = slot.engine
        killed(slot, sent)
        *_, last = events_of(streamed.result(PATIENCE), done=False)
        assert f"the engine died: its process {words}" in last["error"]["message"]
        assert served.client.get("/health").status_code == 200
        answer = whole.result(PATIENCE)
        events = events_of(rests.result(PATIENCE))
    assert answer.status_code == 200
    wanted = near.generate([first, other], ignore_eos=True, n=2, **options)
    outputs = [output.token_ids for output in wanted.result(PATIENCE)]
    assert [c["token_ids"] for c in answer.json()["choices"]] == outputs[:2]
    found = [id for event in events for id in event["choices"][0]["token_ids"]]
    assert found == outputs[2]
    until(lambda: slot.ready)  # another one came
    assert lost is not None and lost.process.wait(PATIENCE) == -signal.SIGKILL
    assert served.client.get("/health").json()["replicas"]["alive"] == 2
    after = both.stats()  # nothing is forgotten
    assert after.finished["error"] >= before.finished.get("error", 0) + 3
    assert after.generated_tokens >= before.generated_tokens + 3 * 60
    assert slot.load == slot.prefixes.match(digests_of(first)) == 0


@pytest.mark.exhaustive
def test_a_prompt_that_hangs_its_engine(both: LLM, served: Served) -> None:
    """The engine is killed as if it had been stopped; the other one goes on."""
    streamed = text_of(served, body([14, 15], max_tokens=60))
    *events, last = events_of(streamed, done=False)
    assert sum(len(e["choices"][0]["token_ids"]) for e in events) == 19
    assert "its process made no progress in 8 seconds" in last["error"]["message"]
    assert served.post(COMPLETE, body([15], max_tokens=2)).status_code == 200
    until(lambda: all(slot.ready for slot in replicas_of(both).slots))


KINDS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "g", "max_output_tokens": 100},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "g"}],
        "max_tokens": 100,
    },
}


@pytest.mark.parametrize(
    "path",
    ["/v1/responses", pytest.param("/v1/messages", marks=pytest.mark.exhaustive)],
)
def test_every_kind_of_answer_begins_again(
    both: LLM, served: Served, path: str
) -> None:
    """What the lost engine had said is not in it."""
    asked = KINDS[path] | {"temperature": 0}
    whole = served.post(path, asked).json()
    before = both.stats().generated_tokens
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(served.post, path, asked)
        until(lambda: both.stats().generated_tokens > before + 70)
        (slot,) = (slot for slot in replicas_of(both).slots if slot.load)
        killed(slot)
        found = answer.result(PATIENCE)
    assert found.status_code == 200
    assert said(found.json()) == said(whole)
    if path == "/v1/responses":
        assert served.client.get(f"{path}/{found.json()['id']}").json() == found.json()


def said(answer: Any) -> Any:
    """The texts of a response or a message."""
    parts = answer["content"] if "content" in answer else answer["output"]
    assert parts
    return [{name: part[name] for name in part.keys() - {"id"}} for part in parts]


def test_a_prompt_that_ends_its_engine_is_tried_twice(
    both: LLM, served: Served
) -> None:
    lost = replicas_of(both).lost
    answer = served.post(COMPLETE, body([13, 14], max_tokens=2))
    assert answer.status_code == 503 and "status 9" in answer.text
    # Nobody is there now.
    for one in replicas_of(both).slots:
        until(lambda one=one: not one.ready)
    health = served.client.get("/health")
    assert health.status_code == 503 and "no replica lives" in health.text
    for asked in (body([1]), body([1], stream=True)):
        assert served.post(COMPLETE, asked).status_code == 503
    with pytest.raises(EngineError, match="no replica lives"):
        both.stats()
    assert served.client.get("/metrics").status_code == 200
    until(lambda: all(slot.ready for slot in replicas_of(both).slots))
    assert served.client.get("/health").status_code == 200
    assert served.post(COMPLETE, body([1], max_tokens=2)).status_code == 200
    assert replicas_of(both).lost - lost == 2


# Beginning and end


def test_whoever_leaves_ends_the_requests(both: LLM) -> None:
    until(lambda: all(slot.ready for slot in replicas_of(both).slots))
    stream = both.stream(prompt(90), **LONG)
    next(stream)
    stream.close()
    assert both.generate([prompt(91), prompt(92)], n=2, **LONG).cancel()
    until(lambda: not any(slot.load for slot in replicas_of(both).slots))


@pytest.mark.parametrize(
    "cancel", [False, pytest.param(True, marks=pytest.mark.exhaustive)]
)
def test_the_end_of_all(folder: Path, cancel: bool) -> None:
    """Closed, they finish; with ``cancel`` they end now."""
    llm = together(folder)
    future = llm.generate([prompt(1), prompt(2)], max_tokens=60, ignore_eos=True)
    llm.close(cancel=cancel)
    reason = "abort" if cancel else "length"
    assert [output.finish_reason for output in future.result(PATIENCE)] == [reason] * 2
    for slot in replicas_of(llm).slots:
        assert slot.engine is not None and slot.engine.process.poll() is not None
    for call in (lambda: llm.generate([1]), llm.stats):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    """The error is that of an engine, and no process is left."""
    engine = Replicas([spawn] * 2)
    with pytest.raises(ValueError) as ours:
        load_remote(engine, str(tmp_path), SMALL, device="cpu")
    with pytest.raises(ValueError) as theirs:
        LLM(tmp_path, SMALL, device="cpu")
    assert str(ours.value) == str(theirs.value)
    for slot in engine.slots:
        assert slot.engine is not None
        until(lambda p=slot: p.engine.process.poll() is not None)


def test_one_that_cannot_come_back_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """It is tried until it does; the other one goes on."""
    monkeypatch.setattr(replicas, "PAUSE", 0.01)
    troubles: list[Callable[[], Any]] = []

    def source() -> Any:
        return troubles.pop()() if troubles else spawn()

    def trouble() -> Any:
        raise OSError("no room")

    def stillborn() -> Any:
        process, link = spawn()
        process.kill()
        return process, link

    engine = Replicas([source])
    with LLM.of(load_remote(engine, str(folder), SMALL, device="cpu")) as llm:
        troubles += [trouble, stillborn]
        killed(engine.slots[0])
        until(lambda: not engine.slots[0].ready)
        until(lambda: engine.slots[0].ready)
        assert llm.generate([1], max_tokens=2).result(PATIENCE)
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0].partition(",")[0] for line in said] == [
        "a replica ended",
        "a replica cannot begin",
        "a replica cannot begin",
    ]
