"""The engine in a process of its own: what crosses, and what happens if one ends."""

import asyncio
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from models import GREEDY, HELLO, PATIENCE, SMALL, until
from serving import ROOT, serving

from simplellm import (
    LLM,
    ConfigError,
    EngineConfig,
    EngineError,
    QueueFullError,
    SamplingParams,
)
from simplellm.base.grammar import Grammar, GrammarError
from simplellm.base.request import Event, Request, TokenLogprobs
from simplellm.base.request_spec import RequestSpec
from simplellm.engine.engine_client import RequestGrammarError
from simplellm.server.remote import client as remote_module
from simplellm.server.remote import wire
from simplellm.server.remote.client import RemoteEngine, load_remote
from simplellm.server.start import spawn

COMPLETE, RESPONSES = "/v1/completions", "/v1/responses"
MANY = replace(
    SMALL, num_pages=2000, max_num_seqs=256, max_num_batched_tokens=512, max_waiting=256
)
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}


def remote(folder: Path, config: EngineConfig = SMALL, **options: Any) -> LLM:
    return LLM.of(
        load_remote(
            RemoteEngine(*spawn()), str(folder), config, device="cpu", **options
        )
    )


@pytest.fixture(scope="module")
def far(folder: Path) -> Iterator[LLM]:
    """An LLM whose engine is in another process."""
    with remote(folder, MANY) as llm:
        yield llm
        until(lambda: not llm._output_processor.readers)
        assert not far_engine(llm).open and not far_engine(llm).results
        assert llm.stats().cache_usage == 0


@pytest.fixture(scope="module")
def near(folder: Path) -> Iterator[LLM]:
    with LLM(folder, MANY, device="cpu") as llm:
        yield llm


# What crosses


def far_engine(llm: LLM) -> RemoteEngine:
    assert isinstance(llm.engine, RemoteEngine)
    return llm.engine


def crossed(content: Any) -> Any:
    """What arrives of something that is sent."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(wire.as_frame(content))
        ours.close()
        (found,) = wire.frames(theirs)
    return found


SAME = "request_id index seed stop_ids prompt_logprobs restricted".split()


def test_a_request_arrives_as_it_was() -> None:
    params = SamplingParams(
        n=3,
        max_tokens=7,
        min_tokens=2,
        temperature=0.1 + 0.2,
        top_k=5,
        top_p=1 / 3,
        seed=2**64 - 1,
        stop=["x"],
        stop_token_ids=[7],
        bad_words=["é", "\u2028"],
        allowed_token_ids=[1, 2, 3],
        logprobs=-1,
        prompt_logprobs=2,
        logit_bias={3: -1.5, 0: 1e-9, 9: -math.inf},
    )
    spec = RequestSpec(
        [5, 0, 1099],
        7,
        params,
        frozenset([7, 9]),
        bad_sequences=[(1, 2), (3,)],
        priority=-4,
        deadline=12.000000001,
        grammar=Grammar("start: /é+/", None),
    )
    first, *first.siblings = (spec.sample(index) for index in range(3))
    for number, sample in enumerate([first, *first.siblings], start=40):
        sample.request_id = number
    found = wire.request_of(
        crossed(wire.request_as_plain(first)), lambda t: Grammar(t, "c")
    )
    for ours, theirs in zip(
        [first, *first.siblings], [found, *found.siblings], strict=True
    ):
        for name in (*wire.SENT, *SAME):
            mine, other = getattr(ours, name), getattr(theirs, name)
            assert other == ([*map(list, mine)] if name == "bad_sequences" else mine)
        unsent = {"stop": (), "structured_outputs": None}
        assert vars(theirs.params) == {**vars(ours.params), **unsent}
        assert theirs.grammar is not None and theirs.grammar.text == "start: /é+/"


@pytest.mark.parametrize("error", [None, EngineError("é"), QueueFullError("7")])
def test_an_event_arrives_as_it_was(error: Exception | None) -> None:
    odd = [0.1 + 0.2, -1e-310, -3.4028234663852886e38, -math.inf]
    entries = [
        TokenLogprobs(n, value, ((n, value), (3, -0.0)), rank=n + 1)
        for n, value in enumerate(odd)
    ]
    event = Event(3, [1, 2], entries, "stop", None, 1.1, 4, [None, *entries], 2, 0.3)
    event = event._replace(draft_counts=[[3, 2], [3, 1]])
    if error is not None:
        event = event._replace(tokens=[], finish_reason="error", error=error)
    found = wire.event_of(crossed({"events": [event]})["events"][0])
    assert type(found.error) is type(error) and str(found.error) == str(error)
    assert found._replace(error=None) == event._replace(error=None)


def test_errors_stay_what_they_are_where_somebody_asks() -> None:
    kinds = {ConfigError: ValueError, torch.OutOfMemoryError: MemoryError}
    kinds |= {RequestGrammarError: RequestGrammarError}
    for ours, theirs in kinds.items():
        found = wire.as_error(crossed(ours("so")))
        assert type(found) is theirs and str(found) == "so"
    found = wire.as_error(crossed(ZeroDivisionError("so")))
    assert type(found) is EngineError and str(found) == "ZeroDivisionError('so')"


def test_events_that_wait_are_one() -> None:
    entries = [TokenLogprobs(n, -1.0, (), 1) for n in range(3)]
    first = Event(3, [0], entries[:1], None, None, 1.0, 4, [None], 0, 0.5, [(1, 0)])
    second = Event(3, [1, 2], entries[1:], "length", None, 2.0, 4, None, 1, 0.5)
    second = second._replace(draft_counts=[(2, 1)])  # all so far
    wanted = second._replace(tokens=[0, 1, 2], logprobs=entries, prompt_logprobs=[None])
    assert wire.join_events(first, second) == wanted
    assert wire.join_events(Event(3, [0]), Event(3, [1])).logprobs is None
    # An end without tokens, as at a time limit, has no log-probabilities of its own.
    assert (
        wire.join_events(first, Event(3, finish_reason="abort")).logprobs == entries[:1]
    )


def test_half_a_frame_is_none() -> None:
    for cut in (2, 6, 11):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(wire.as_frame([1]) + wire.as_frame(["cut", 2])[:cut])
            ours.close()
            assert [*wire.frames(theirs)] == [[1]]


def test_nothing_else_crosses() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        wire.as_frame([threading.current_thread()])


# The same as in one process

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"seed": 3, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "samples": {"n": 5, "seed": 1},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2, "temperature": 0},
    "everything": {"logprobs": -1, "max_tokens": 2, "seed": 5},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 1.0, "seed": 2},
    "bias": {"logit_bias": {17: 100.0, 18: -100.0}, "temperature": 0},
    "bad words": {"bad_words": ["a", "bc"], "seed": 8},
    "allowed": {"allowed_token_ids": [1, 2, 3], "min_tokens": 2, "seed": 8},
    "stop": {"stop": ["a", "b", "c", "d", "e"], "seed": 9},
    "nothing": {"max_tokens": 0, "prompt_logprobs": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_tokens_as_in_one_process(near: LLM, far: LLM, case: str) -> None:
    options = {"max_tokens": 12, "ignore_eos": True} | CASES[case]
    prompts = ["What is 47 + 85?", [5, 6, 7], "x"]
    wanted, found = (
        llm.generate(prompts, **options).result(PATIENCE) for llm in (near, far)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert replace(ours, metrics=None, num_cached_tokens=0) == replace(
            theirs, metrics=None, num_cached_tokens=0
        )


def test_a_model_is_opened_as_in_one_process() -> None:
    """With the head in its own folder, and the formats that a CPU multiplies."""
    config = replace(SMALL, max_model_len=300, speculative="head")
    model = load_remote(RemoteEngine(*spawn()), None, config, device="cpu")

    def tokens_of(llm: LLM) -> list[int]:
        future = llm.generate("What is 47 + 85?", max_tokens=20, temperature=0)
        return list(future.result(PATIENCE)[0].token_ids)

    def drafts(llm: LLM) -> bool:  # how often, measured times decide
        return bool(tokens_of(llm)) and llm.stats().drafts > 0

    with LLM.of(model) as far, LLM(None, config, device="cpu") as near:
        assert tokens_of(far) == tokens_of(near)
        until(lambda: drafts(far) and drafts(near))


@pytest.mark.parametrize("rules", [{}, {"bad_words": ["ab"], "min_tokens": 2}])
def test_grammars(near: LLM, far: LLM, rules: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    options: dict[str, Any] = {"structured_outputs": {"regex": "[ab]{3}"}, "seed": 4}
    options |= rules
    texts = [
        [o.text for o in llm.generate(["x", "y"], n=2, **options).result(PATIENCE)]
        for llm in (near, far)
    ]
    assert texts[0] == texts[1] and all({*text} <= {*"ab"} for text in texts[1])
    refusals = []
    for llm in (near, far):
        with pytest.raises(ValueError) as caught:
            llm.generate("x", structured_outputs={"grammar": "start: missing"})
        refusals.append(str(caught.value))
    assert refusals[0] == refusals[1]
    with pytest.raises(GrammarError):
        far_engine(far).compile("start: missing")


def test_a_chat_and_its_stream(near: LLM, far: LLM) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    assert far.chat(HELLO, **options).token_ids == near.chat(HELLO, **options).token_ids
    parts = [*far.stream("x", **options)]
    whole = near.generate("x", **options).result(PATIENCE)[0]
    assert "".join(part.text for part in parts) == whole.text


def test_256_streams_at_once_add_up(near: LLM, far: LLM) -> None:
    prompts = [[n % 1000, 7] for n in range(256)]
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "seed": 6}
    wanted = near.generate(prompts, **options).result(PATIENCE)

    async def read(prompt: list[int]) -> list[int]:
        stream = far.stream_async(prompt, **options)
        return [token async for part in stream for token in part.token_ids]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*map(read, prompts))

    assert asyncio.run(main()) == [output.token_ids for output in wanted]


def test_what_is_told_of_it(near: LLM, far: LLM) -> None:
    far.generate("x", max_tokens=3, **GREEDY).result(PATIENCE)
    stats, snapshot = far.stats(), far.engine.snapshot()
    assert type(stats) is type(near.stats()) and stats.generated_tokens >= 3
    assert stats.finished["length"] >= 1 and stats.ttft
    assert snapshot.keys() == near.engine.snapshot().keys()
    assert far.backend_reason == near.backend_reason and far.config == near.config
    assert far.input_processor.max_model_len == near.input_processor.max_model_len


def test_a_server_of_it(far: LLM) -> None:
    with serving(far) as served:
        body = {"prompt": "x", "max_tokens": 5, "ignore_eos": True, "n": 3}
        events = served.events(COMPLETE, body | {"return_token_ids": True})
        tokens = [id for e in events for c in e["choices"] for id in c["token_ids"]]
        assert len(tokens) == 15
        assert "simplellm:prompt_tokens_total" in served.client.get("/metrics").text
        with served.client.stream("GET", "/live") as answer:
            assert b'"totals"' in next(answer.iter_bytes())
        assert served.client.get("/health").json() == {"status": "ok"}


def test_whoever_leaves_ends_the_requests(far: LLM) -> None:
    before = far.stats().finished.get("abort", 0)
    stream = far.stream("x", **LONG)
    next(stream)
    stream.close()
    future = far.generate("x", n=3, **LONG)
    assert future.cancel()
    until(lambda: far.stats().finished.get("abort", 0) == before + 4)
    until(lambda: not far_engine(far).open)


def test_a_full_queue(folder: Path) -> None:
    config = replace(SMALL, max_num_seqs=1, max_waiting=2)
    with remote(folder, config) as llm:
        running = llm.generate([1], **LONG)
        until(lambda: llm.stats().running == 1)
        waiting = [llm.generate([2], max_tokens=1) for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 requests wait already; expected"):
            llm.generate([3], n=2, max_tokens=1).result(PATIENCE)
        with serving(llm) as served:
            for stream in (True, False):
                for path, prompt in ((COMPLETE, "prompt"), (RESPONSES, "input")):
                    answer = served.post(path, {prompt: "x", "stream": stream})
                    assert answer.status_code == 429 and answer.headers["retry-after"]
            # Nobody was told of such a response: there is none.
            assert not len(served.service.responses)
        assert llm.stats().refused == 6
        running.cancel()
        assert [len(one.result(PATIENCE)) for one in waiting] == [1, 1]
        assert not far_engine(llm).open


# One of the two ends, or does nothing

BREAK = """
from simplellm.engine.scheduler import Scheduler
schedule, calls = Scheduler.schedule, []

def broken(self):
    calls.append(0)
    return schedule(self) if len(calls) < 20 else 1 / 0

Scheduler.schedule = broken
"""
# A prompt that begins with 13 never gets its 20th token; one with 14 isn't scheduled.
HANG = """
import time
from simplellm.engine.runner import Runner
from simplellm.engine.scheduler import Scheduler
start, schedule = Runner.start_forward, Scheduler.schedule

def starting(self, works, sampling):
    while any(w.request.tokens[0] == 13 and w.request.num_output > 18 for w in works):
        time.sleep(1)
    start(self, works, sampling)

def scheduling(self):
    while any(request.tokens[0] == 14 for request in self.requests.values()):
        time.sleep(1)
    return schedule(self)

Runner.start_forward, Scheduler.schedule = starting, scheduling
"""
# After 100 steps comes the result of a call that nobody has made.
ODD = """
from simplellm.server.remote import wire
as_frame = wire.as_frame

def odd(content):
    if isinstance(content, dict) and content.get("steps", 0) >= 100:
        content["results"] = [(99, None, None)]
    return as_frame(content)

wire.as_frame = odd
"""
SLOW = """
import time
from simplellm.engine.runner import Runner
start = Runner.start_forward
Runner.start_forward = lambda *given: (time.sleep(0.05), start(*given))[1]
"""


def gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked how."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return True
    return state == "Z"


def ask(port: int, **changes: Any) -> socket.socket:
    """A connection on which a long stream is asked for."""
    raw = httpx.Request("POST", "http://x", json={"prompt": "x", **LONG, **changes})
    head = f"POST {COMPLETE} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += "content-type: application/json\r\n"
    head += f"content-length: {len(raw.content)}\r\n\r\n"
    found = socket.create_connection(("127.0.0.1", port), PATIENCE)
    found.sendall(head.encode() + raw.content)
    return found


def rest_of(client: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    found = b""
    with client:
        while data := client.recv(65536):
            found += data
    return found


def test_an_engine_that_is_killed(folder: Path) -> None:
    with remote(folder) as llm:
        future, stream = llm.generate([1], n=2, **LONG), llm.stream([2], **LONG)
        next(stream)
        far_engine(llm).process.kill()
        for call in (future.result, lambda: [*stream]):
            with pytest.raises(EngineError, match="the engine died: its process ended"):
                call()
        calls = [llm.stats, llm.engine.snapshot, llm.engine.check]
        calls += [lambda: llm.generate([1]), lambda: far_engine(llm).compile("x")]
        for again in calls:
            with pytest.raises(EngineError, match="status -9"):
                again()


def test_an_engine_that_dies_says_why(processes: Any, folder: Path) -> None:
    process = processes(str(folder), before=BREAK)
    told = rest_of(ask(process.port, stream=True))
    assert b"the engine died: ZeroDivisionError('division by zero')" in told
    assert process.finish() == 1


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_server_whose_engine_is_killed(processes: Any, folder: Path) -> None:
    process = processes(str(folder), before=SLOW)
    clients = [ask(process.port, stream=True), ask(process.port)]
    assert clients[0].recv(12) == b"HTTP/1.1 200"
    os.kill(process.engine, signal.SIGKILL)
    streamed, whole = map(rest_of, clients)
    assert b"its process ended with status -9" in streamed
    assert b"[DONE]" not in streamed and whole.startswith(b"HTTP/1.1 503")
    assert process.finish() == 1


def patched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: str) -> None:
    """Let each process that is spawned run ``before`` at its start."""
    (tmp_path / "sitecustomize.py").write_text(before)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))


def watched(folder: Path, config: EngineConfig = SMALL) -> LLM:
    """As `remote`, with little patience."""
    engine = RemoteEngine(*spawn(), watchdog_timeout=3.0)
    return LLM.of(load_remote(engine, str(folder), config, device="cpu"))


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(13, id="step"),
        pytest.param(14, id="lock", marks=pytest.mark.exhaustive),
        pytest.param(None, id="stopped", marks=pytest.mark.exhaustive),
    ],
)
def test_an_engine_that_hangs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int | None
) -> None:
    """In a step, or with the engine's lock, or all of it stands still.

    That others ask meanwhile changes nothing, though some are told that the queue is
    full.
    """
    patched(monkeypatch, tmp_path, HANG)
    with watched(folder, replace(SMALL, max_waiting=2)) as llm:
        stream = llm.stream([1], **LONG)
        next(stream)
        if first is None:
            os.kill(far_engine(llm).process.pid, signal.SIGSTOP)
        futures = [llm.generate([first or 2], **LONG)]

        def asked_in_vain() -> bool:
            with suppress(EngineError):  # it has just ended
                futures.append(llm.generate([1], max_tokens=1))
            time.sleep(0.1)
            return llm.engine.dead is not None

        until(asked_in_vain)
        for call in (futures[0].result, lambda: [*stream], llm.engine.check):
            with pytest.raises(EngineError, match="process made no progress in 3 s"):
                call()
        for future in futures:
            future.exception(PATIENCE)
        assert far_engine(llm).process.wait(PATIENCE) == -signal.SIGKILL


def test_an_idle_engine_that_hangs(folder: Path) -> None:
    """Nobody has to ask first."""
    with watched(folder) as llm:
        os.kill(far_engine(llm).process.pid, signal.SIGSTOP)
        until(lambda: llm.engine.dead)
        assert far_engine(llm).process.wait(PATIENCE) == -signal.SIGKILL


@pytest.mark.exhaustive
def test_a_slow_engine_does_not_hang(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is told for longer than a step may take, but steps end; nor do pauses."""
    patched(monkeypatch, tmp_path, SLOW.replace("0.05", "1"))
    with watched(folder) as llm:
        for number in range(2):
            start = time.monotonic()
            future = llm.generate([number] * 80, max_tokens=1)  # in steps of 16
            assert len(future.result(PATIENCE)[0].token_ids) == 1
            assert time.monotonic() - start > far_engine(llm).watchdog_timeout + 1
            time.sleep(far_engine(llm).watchdog_timeout + 1)
        assert llm.engine.stats().steps >= 10


def test_what_cannot_be_read_ends_the_engine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for what will never be told; its process isn't trusted any more."""
    patched(monkeypatch, tmp_path, ODD)
    with remote(folder) as llm:
        future, stream = llm.generate([1], **LONG), llm.stream([2], **LONG)
        for call in (partial(future.result, PATIENCE), lambda: [*stream], llm.stats):
            with pytest.raises(EngineError, match="can't be read: KeyError"):
                call()
        assert far_engine(llm).process.wait(PATIENCE) == -signal.SIGKILL


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_server_that_cannot_read_its_engine(processes: Any, folder: Path) -> None:
    process = processes(str(folder), before=ODD)
    engine = process.engine
    told = rest_of(ask(process.port, stream=True))
    assert b"can't be read: KeyError" in told and b"[DONE]" not in told
    assert process.finish() == 1 and gone(engine)


def test_a_process_that_even_a_signal_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver may hold it: nobody waits."""
    monkeypatch.setattr(remote_module, "END_SECONDS", 0.1)
    killed: list[int] = []

    def wait(timeout: float | None = None) -> int:
        assert timeout is not None
        raise subprocess.TimeoutExpired("engine", timeout)

    process = SimpleNamespace(kill=lambda: killed.append(9), wait=wait)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = RemoteEngine(process, ours, watchdog_timeout=0.5)
        engine.start()
        assert engine.events.get() is None and killed
        assert "no progress in 0.5 seconds" in str(engine.dead)
        engine.shutdown(cancel=False)


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_server_whose_engine_hangs(processes: Any, folder: Path) -> None:
    """What has streamed ends with an error, and so does the server."""
    process = processes(str(folder), "--watchdog-timeout", "5", before=HANG)
    engine = process.engine
    clients = [ask(process.port, prompt=[13], stream=on) for on in (True, False)]
    streamed, whole = map(rest_of, clients)
    assert streamed.startswith(b"HTTP/1.1 200") and b"[DONE]" not in streamed
    assert b"its process made no progress in 5 seconds" in streamed
    assert whole.startswith(b"HTTP/1.1 503")
    assert process.finish() == 1 and gone(engine)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_an_engine_whose_server_is_killed(processes: Any, folder: Path) -> None:
    process = processes(str(folder), before=SLOW)
    client = ask(process.port, stream=True)
    assert client.recv(12) == b"HTTP/1.1 200"
    engine = process.engine
    process.process.kill()
    start = time.monotonic()
    until(lambda: gone(engine))
    assert time.monotonic() - start < 2
    client.close()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_ctrl_c_is_for_the_server(processes: Any, folder: Path) -> None:
    """It drains; a second one doesn't wait, not even for a step."""
    process = processes(str(folder), before=SLOW.replace("0.05", "4"))
    clients = [ask(process.port, stream=True), ask(process.port)]
    assert clients[0].recv(12) == b"HTTP/1.1 200"
    engine = process.engine
    os.killpg(process.process.pid, signal.SIGINT)
    time.sleep(0.5)
    assert process.process.poll() is None and not gone(engine)
    start = time.monotonic()
    os.killpg(process.process.pid, signal.SIGINT)
    streamed, whole = map(rest_of, clients)
    assert b"shutting_down" in streamed and whole.startswith(b"HTTP/1.1 503")
    assert process.finish() == 0 and gone(engine)
    assert time.monotonic() - start < 3


def test_the_end_of_an_llm(folder: Path) -> None:
    """Closed, it finishes; with ``cancel`` it ends now."""
    for cancel in (False, True):
        llm = remote(folder)
        future = llm.generate([1], max_tokens=60, ignore_eos=True)
        llm.close(cancel=cancel)
        (output,) = future.result(PATIENCE)
        if not cancel:
            assert len(output.token_ids) == 60
        assert output.finish_reason == ("abort" if cancel else "length")
        engine = far_engine(llm)
        assert engine.process.poll() is not None and engine.dead is None
        for call in (partial(llm.generate, [1]), llm.stats):
            with pytest.raises(EngineError, match="closed"):
                call()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_server_that_reads_nothing(folder: Path) -> None:
    """The engine finishes, and what waits is joined."""
    process, link = spawn()
    count, length = 8, 200
    wanted = {"path": str(folder), "config": asdict(MANY), "device": "cpu"}
    wanted |= dict.fromkeys(["dtype", "seed"]) | {"random_weights": False}
    with closing(link):
        link.sendall(wire.as_frame(wanted | {"log_level": "warning"}))
        arriving = wire.frames(link)
        assert next(arriving) == {} and "backend_reason" in next(arriving)
        params = SamplingParams(logprobs=20, temperature=0, seed=0)
        families = [
            wire.request_as_plain(Request([number], length, params, request_id=number))
            for number in range(count)
        ]
        link.sendall(wire.as_frame(["submit", families]))
        until(lambda: resting(process.pid))
        link.sendall(wire.as_frame(["close"]))
        events = [wire.event_of(e) for frame in arriving for e in frame["events"]]
        assert process.wait(PATIENCE) == 0
    for number in range(count):
        own = [event for event in events if event.request_id == number]
        assert sum(len(event.tokens) for event in own) == length
        assert sum(len(event.logprobs or ()) for event in own) == length
        assert own[-1].finish_reason == "length"
        assert max(len(event.tokens) for event in own) > 10


def resting(pid: int) -> bool:
    """Whether a process has computed nothing for a while."""

    def spent() -> list[str]:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]

    before = spent()
    time.sleep(0.5)
    return spent() == before


# Loading


def test_what_cannot_be_loaded(folder: Path, tmp_path: Path) -> None:
    """The errors are those of an LLM in one process, and no process is left."""
    cases: list[tuple[Any, dict[str, Any]]] = [
        (tmp_path, {}),
        (folder, {"config": EngineConfig(num_pages=2**40)}),
    ]
    for path, options in cases:
        with pytest.raises(Exception) as theirs:
            LLM(path, device="cpu", **options)
        process, link = spawn()
        with closing(link), pytest.raises(Exception) as ours:
            load_remote(RemoteEngine(process, link), str(path), device="cpu", **options)
        kind = ValueError if isinstance(theirs.value, ValueError) else MemoryError
        assert isinstance(ours.value, kind) and isinstance(theirs.value, kind)
        # What is free changes all the time.
        said = [str(error.value).partition(" less); ")[0] for error in (ours, theirs)]
        assert said[0] == said[1]
        assert process.poll() is not None


def test_a_process_that_ends_while_it_loads(folder: Path) -> None:
    process, link = spawn()
    process.kill()
    with closing(link), pytest.raises(EngineError, match="status -9 while it loaded"):
        load_remote(RemoteEngine(process, link), str(folder))


TELL = """
import atexit, sys

def told():
    print('told', 'torch' in sys.modules, file=sys.stderr)

def making(*arguments):
    there = 'simplellm.server.remote.engine_process' in sys.orig_argv
    print('grammars', there, file=sys.stderr)
    made(*arguments)

from simplellm.structured.vocabulary import Vocabulary
made, Vocabulary.__init__ = Vocabulary.__init__, making
atexit.register(told)
"""


def test_each_process_has_its_own(processes: Any, folder: Path) -> None:
    """PyTorch is not even there where clients are answered.

    What all grammars need is made where steps are computed, before the first request.
    """
    process = processes(str(folder), before=TELL)
    assert "grammars True\n" in process.lines
    assert b"200 OK" in rest_of(ask(process.port, max_tokens=3))
    process.process.send_signal(signal.SIGTERM)
    assert process.finish() == 0
    assert "told False\n" in process.lines
    assert "grammars False\n" not in process.lines
