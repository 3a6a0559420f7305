"""The engine and its LLM: many requests at once, faults, threads, the end.

What the tokens are is chapter 6's business: the plain LLM says what is right. Whether
they are the same whatever surrounds a request is tested at length elsewhere; here, a
few cases for each mechanism.
"""

import asyncio
import gc
import logging
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TINY, write_checkpoint

from simplellm.engine import (
    LLM,
    Engine,
    EngineConfig,
    EngineError,
    Event,
    Submission,
    Ticket,
    quantile,
)
from simplellm.generate import LLM as PlainLLM
from simplellm.generate import RequestOutput
from simplellm.model import EMBEDDED
from simplellm.sampler import Sampled, SamplingParams
from simplellm.scheduler import QueueFullError, Work

CONFIG = replace(TINY, vocab_size=1100)
SMALL = EngineConfig(
    page_size=4,
    num_pages=120,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    prefill_chunk=16,
    max_waiting=200,
)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LONG: dict[str, Any] = {**GREEDY, "max_tokens": 100_000}
PATIENCE = 100.0  # seconds after which a test says that something hangs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with the embedded model's tokenizer."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_checkpoint(path, CONFIG)
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(EMBEDDED / name, path)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[PlainLLM]:
    with PlainLLM(folder, device="cpu") as model:
        yield model


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., LLM]]:
    """Starts LLMs and afterwards checks that they gave everything back."""
    started = []

    def start(config: EngineConfig = SMALL, **changes: Any) -> LLM:
        llm = LLM(folder, replace(config, **changes), device="cpu")
        started.append(llm)
        return llm

    yield start
    for llm in started:
        llm.close(cancel=True)
        check_empty(llm.engine)


def check_empty(engine: Engine) -> None:
    """No request, no page and no thread is left."""
    assert not engine.tickets and not engine.scheduler.jobs
    assert engine.scheduler.manager.usage == 0
    engine.scheduler.manager.check_integrity()
    assert not any(thread.is_alive() for thread in engine.threads)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "this never came true"
        time.sleep(0.005)


def results(futures: Sequence[Future[list[RequestOutput]]]) -> list[list[int]]:
    return [o.token_ids for f in futures for o in f.result(PATIENCE)]


def inject(llm: LLM, fault: Callable[[Sequence[Work]], bool]) -> None:
    """Lets a step fail, its pass already made, if ``fault`` says so of its works."""
    run = llm.engine.run

    def failing(works: Sequence[Work]) -> torch.Tensor:
        logits = run(works)
        if fault(works):
            raise ZeroDivisionError("injected")
        return logits

    llm.engine.run = failing  # type: ignore[method-assign]


# The same answers


PROMPTS = [[5, 6, 7], [900], list(range(40)), list(range(30)), list(range(40))]
CONFIGS = {
    "no cache": {"cache": "none", "num_pages": None},
    "slots": {"cache": "slot", "num_pages": None, "max_model_len": 60},
    "pages": {},
    "tight pages": {"num_pages": 26},
    "nothing shared": {"share_prefixes": False, "num_pages": 40},
    "whole prompts": {"prefill_chunk": None},
    "tiny chunks": {"prefill_chunk": 1, "max_num_batched_tokens": 8},
    "static": {"continuous": False, "max_num_seqs": 2},
    "one at a time": {"max_num_seqs": 1},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_tokens_as_the_plain_llm(
    start: Any, plain: PlainLLM, name: str
) -> None:
    llm = start(**CONFIGS[name])
    params = [
        SamplingParams(max_tokens=15 + n, temperature=n % 2, seed=n, ignore_eos=True)
        for n in range(len(PROMPTS))
    ]
    assert (
        llm.generate(PROMPTS, params).result(PATIENCE)
        == plain.generate(PROMPTS, params).result()
    )
    stats = llm.stats()
    assert stats.finished == {"length": 5} and stats.generated_tokens == 85
    if name == "tight pages":
        assert stats.preemptions > 0


def test_options_reach_the_sampler(start: Any, plain: PlainLLM) -> None:
    llm = start()
    for options in (
        {"logprobs": 3, "seed": 1},
        {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": 1.0},
        {"logit_bias": {77: 100.0}},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "temperature": 3.0, "seed": 4},
    ):
        mine = llm.generate(PROMPTS, max_tokens=6, **options).result(PATIENCE)
        right = plain.generate(PROMPTS, max_tokens=6, **options).result()
        assert [o.token_ids for o in mine] == [o.token_ids for o in right]
        for ours, theirs in zip(mine, right, strict=True):
            for a, b in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert len(a.top) == len(b.top) == 3


def test_samples_are_those_of_consecutive_seeds(start: Any) -> None:
    llm = start(max_num_seqs=3)
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1, "ignore_eos": True}
    together = llm.generate(PROMPTS, n=4, seed=10, **options).result(PATIENCE)
    assert len(together) == 20
    for number, prompt in enumerate(PROMPTS):
        for k in range(4):
            alone = llm.generate(prompt, seed=10 + k, **options).result(PATIENCE)
            assert together[4 * number + k] == alone[0]
    drawn = llm.generate(PROMPTS[2], n=4, **options).result(PATIENCE)
    assert len({tuple(o.token_ids) for o in drawn}) > 1
    last = llm.generate([5], n=2, seed=2**64 - 1, **options).result(PATIENCE)
    assert last[1] == llm.generate([5], seed=0, **options).result(PATIENCE)[0]


def test_chat_and_stream_answer_as_before() -> None:
    messages = [{"role": "user", "content": "What is 47 + 85?"}]
    with PlainLLM() as plain, LLM() as llm:
        right = plain.chat(messages, reasoning_effort="low")
        assert llm.chat(messages, reasoning_effort="low") == right and right.content
        low = {"reasoning_effort": "low", "max_tokens": 30}
        parts = list(plain.stream_chat(messages, **low))
        assert list(llm.stream_chat(messages, **low)) == parts
        parts = list(plain.stream("What is 2 + 2?", max_tokens=40))
        assert list(llm.stream("What is 2 + 2?", max_tokens=40)) == parts


@pytest.mark.parametrize("stop", ["\n", ["=", "12"], "never said"])
def test_stop_strings_cut_what_the_engine_made_in_advance(stop: Any) -> None:
    options: dict[str, Any] = {"stop": stop, "max_tokens": 60}
    with PlainLLM() as plain, LLM() as llm:
        right = plain.generate("What is 47 + 85?", **options).result()
        assert llm.generate("What is 47 + 85?", **options).result(PATIENCE) == right
        parts = list(llm.stream("What is 47 + 85?", **options))
        assert "".join(part.text for part in parts) == right[0].text
        assert parts[-1].finish_reason == right[0].finish_reason
        until(lambda: not llm.engine.scheduler.jobs)


def test_who_holds_a_stream_that_stopped_holds_up_nothing() -> None:
    """The engine ends a request at its stop string, whatever the reader does then."""
    options: dict[str, Any] = {"stop": "=", "max_tokens": 10_000, "ignore_eos": True}
    with LLM() as llm:
        stream = llm.stream("What is 47 + 85?", **options)
        assert [part.finish_reason for part in take_until_end(stream)][-1] == "stop"
        llm.generate("What is 47 + 85?", **options).result(PATIENCE)
        until(lambda: llm.stats().finished == {"stop": 2})


def take_until_end(stream: Iterator[RequestOutput]) -> Iterator[RequestOutput]:
    """The parts of a stream, without asking for more than the last."""
    for part in stream:
        yield part
        if part.finish_reason is not None:
            return


# Many readers


def test_many_threads_share_it(start: Any, plain: PlainLLM) -> None:
    llm = start()
    right = plain.generate([[n] for n in range(24)], max_tokens=5, **GREEDY).result()
    found: dict[int, list[int]] = {}

    def job(number: int) -> None:
        options: dict[str, Any] = {"max_tokens": 5, **GREEDY}
        if number % 3 == 0:
            parts = list(llm.stream([number], **options))
        elif number % 3 == 1:
            parts = llm.generate([number], **options).result(PATIENCE)
        else:
            parts = asyncio.run(collect(llm.stream_async([number], **options)))
        found[number] = [token for part in parts for token in part.token_ids]

    threads = [threading.Thread(target=job, args=[n]) for n in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [found[n] for n in range(24)] == [o.token_ids for o in right]


async def collect(stream: Any) -> list[Any]:
    return [part async for part in stream]


def test_coroutines_share_it(start: Any) -> None:
    llm = start()

    async def main() -> list[Any]:
        streams = [
            collect(llm.stream_async([n], max_tokens=5, **GREEDY)) for n in range(6)
        ]
        future = asyncio.wrap_future(llm.generate([[0], [1]], max_tokens=5, **GREEDY))
        return [*await asyncio.gather(*streams), await future]

    *streams, outputs = asyncio.run(main())
    for parts, output in zip(streams, outputs, strict=False):
        assert [t for part in parts for t in part.token_ids] == output.token_ids
        assert parts[-1].finish_reason == "length"


def test_a_stream_starts_at_once_and_needs_no_reader(start: Any) -> None:
    llm = start()
    streams = [llm.stream([n], max_tokens=30, **GREEDY) for n in range(5)]
    until(lambda: llm.stats().finished.get("length") == 5)
    assert [len(list(stream)) for stream in streams] == [30] * 5


def test_a_slow_reader_delays_nobody(start: Any) -> None:
    llm = start()
    slow = llm.stream([1], **LONG)
    next(slow)
    quick = llm.generate([[2], [3]], max_tokens=20, **GREEDY)
    assert [len(o.token_ids) for o in quick.result(PATIENCE)] == [20, 20]
    slow.close()


def test_nobody_waits_for_a_step(start: Any) -> None:
    """While the engine waits for the device, others may submit and ask."""
    llm = start()
    sample = llm.engine.sample
    entered, release = threading.Event(), threading.Event()

    class Slow(list[int]):
        def tolist(self) -> list[int]:
            entered.set()
            release.wait(PATIENCE)
            return list(self)

    def slow(works: Any, logits: Any) -> Any:
        sampled = sample(works, logits)
        return replace(sampled, tokens=Slow(sampled.tokens.tolist()))

    llm.engine.sample = slow
    futures = [llm.generate([1], max_tokens=2, **GREEDY)]
    assert entered.wait(PATIENCE)

    def ask() -> None:
        futures.append(llm.generate([2], max_tokens=2, **GREEDY))
        llm.stats()

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(PATIENCE / 2)
    blocked = asking.is_alive()
    release.set()
    assert not blocked
    assert [len(tokens) for tokens in results(futures)] == [2, 2]


def test_callbacks_that_raise_or_sleep_delay_nobody(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    llm = start()
    release, called = threading.Event(), threading.Event()
    first = llm.generate([1], max_tokens=2, **GREEDY)
    first.add_done_callback(lambda future: release.wait(PATIENCE))
    second = llm.generate([2], max_tokens=2, **GREEDY)
    second.add_done_callback(lambda future: 1 / 0)
    third = llm.generate([3], max_tokens=2, **GREEDY)
    third.add_done_callback(lambda future: called.set())
    results([first, second, third])
    assert called.wait(PATIENCE)
    until(lambda: "division by zero" in caplog.text)
    release.set()


# Ending early


def test_cancelling_a_future_ends_its_requests(start: Any) -> None:
    llm = start()
    future = llm.generate([[1], [2]], n=2, **LONG)
    other = llm.generate([3], max_tokens=40, **GREEDY)
    until(lambda: llm.stats().running >= 4)
    assert future.cancel() and future.cancel() and future.cancelled()
    assert wait([future], PATIENCE).done
    with pytest.raises(CancelledError):
        future.result(PATIENCE)
    assert results([other])[0] and not other.cancel()
    until(lambda: llm.stats().finished.get("abort") == 4)
    assert llm.stats().running == 0


def test_a_cancelled_task_ends_its_request(start: Any) -> None:
    llm = start()

    async def main() -> None:
        streaming = asyncio.create_task(collect(llm.stream_async([1], **LONG)))
        waiting = asyncio.wrap_future(llm.generate([2], **LONG))
        while llm.stats().running < 2:
            await asyncio.sleep(0.01)
        streaming.cancel()
        waiting.cancel()
        await asyncio.gather(streaming, waiting, return_exceptions=True)

    asyncio.run(main())
    until(lambda: llm.stats().finished.get("abort") == 2)


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("how", ["close", "drop"])
def test_closing_or_dropping_a_stream_ends_its_request(
    start: Any, begun: bool, how: str
) -> None:
    llm = start()
    stream = llm.stream([1], **LONG)
    if begun:
        next(stream)
    if how == "close":
        stream.close()
    del stream
    until(lambda: llm.stats().finished.get("abort") == 1)


def test_an_event_loop_that_is_gone_harms_only_its_own(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    llm = start()
    other = llm.generate([2], max_tokens=60, **GREEDY)
    loop = asyncio.new_event_loop()
    stream = llm.stream_async([1], **LONG)
    loop.run_until_complete(anext(stream))
    loop.close()
    until(lambda: llm.stats().finished.get("abort") == 1)
    assert results([other])[0]
    assert "nobody takes what a request gives" in caplog.text


def test_a_stream_that_is_left_early_ends_in_silence(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    llm = start()

    async def leave() -> None:
        async for _ in llm.stream_async([1], **LONG):
            return

    for _ in range(3):
        asyncio.run(leave())
    until(lambda: llm.stats().finished.get("abort") == 3)
    assert not caplog.text


def test_a_timeout_ends_a_request_with_what_it_has(start: Any) -> None:
    llm = start(max_num_seqs=2)
    running = llm.generate([1], timeout=0.3, **LONG)
    stream = llm.stream([2], timeout=0.3, **LONG)
    waiting = llm.generate([[3], [4]], timeout=0.05, logprobs=1, **LONG)
    for output in waiting.result(PATIENCE):
        assert output.finish_reason == "timeout"
        assert output.token_ids == [] and output.logprobs == []
    (output,) = running.result(PATIENCE)
    assert output.finish_reason == "timeout" and output.token_ids
    parts = list(stream)
    assert parts[-1].finish_reason == "timeout" and len(parts) > 1
    assert llm.stats().finished == {"timeout": 4}


def test_text_held_back_is_shown_at_a_timeout() -> None:
    with LLM() as llm:
        whole = llm.generate("What is 47 + 85?", max_tokens=200).result(PATIENCE)[0]
        assert len(whole.text) > 20
        held = whole.text[:10] + "never said"
        stream = llm.stream("What is 47 + 85?", stop=held, timeout=0.02)
        text = "".join(part.text for part in stream)
        assert whole.text.startswith(text)


@pytest.mark.parametrize(
    ("reply", "content", "call"),
    [
        ("The answer is 5", "The answer is 5", None),  # without a header
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}",
            "",
            "{}",
        ),
    ],
)
def test_a_chat_that_ends_without_a_token_keeps_what_was_under_way(
    start: Any, reply: str, content: str, call: str | None
) -> None:
    llm = start()
    ids = llm.tokenizer.encode(reply, special=True)

    def sample(works: Sequence[Work], logits: torch.Tensor) -> Sampled:
        tokens = [ids[work.job.num_output] for work in works if work.samples]
        if works[0].job.num_output == len(ids) - 1:
            llm.engine.abort(works[0].job, "timeout")
        return Sampled(torch.tensor(tokens, dtype=torch.int64))

    llm.engine.sample = sample
    messages = [{"role": "user", "content": "x"}]
    turn = llm.chat(messages)
    assert turn.finish_reason == "timeout" and turn.token_ids == ids
    assert turn.content == content
    assert [found.arguments for found in turn.tool_calls] == ([call] if call else [])
    text = "".join(delta.text for delta in llm.stream_chat(messages))
    assert text == (call or content)


@pytest.mark.parametrize("chat", [False, True])
def test_an_interrupt_ends_the_request_though_its_traceback_is_kept(
    start: Any, chat: bool
) -> None:
    llm = start()
    sample = llm.engine.sample

    def interrupt(works: Sequence[Work], logits: torch.Tensor) -> Sampled:
        if any(work.job.num_output == 3 for work in works):
            time.sleep(0.1)  # until the reader waits
            os.kill(os.getpid(), signal.SIGINT)
        return sample(works, logits)

    llm.engine.sample = interrupt
    with pytest.raises(KeyboardInterrupt) as kept:
        if chat:
            llm.chat([{"role": "user", "content": "x"}], **LONG)
        else:
            list(llm.stream([1], **LONG))
    until(lambda: llm.stats().finished.get("abort") == 1)
    del kept


def test_two_threads_may_cancel_at_once(
    start: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    future = start().generate([1], **LONG)
    cancel, both = Future.cancel, threading.Barrier(2)

    def slow(self: Future[Any]) -> bool:
        with suppress(threading.BrokenBarrierError):  # only one may be here
            both.wait(0.3)
        return cancel(self)

    monkeypatch.setattr(Future, "cancel", slow)
    threads = [threading.Thread(target=future.cancel) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert future.cancelled() and not caplog.text


# Priorities and the queue


def test_a_priority_goes_first(start: Any) -> None:
    llm = start(max_num_seqs=1)
    blocker = llm.stream([1], **LONG)
    next(blocker)
    order: list[str] = []

    def note(name: str, **options: Any) -> None:
        # Long enough that the watchers wake up one after the other.
        future = llm.generate([2], max_tokens=50, **GREEDY, **options)

        def watch() -> None:
            future.result(PATIENCE)
            order.append(name)

        threads.append(threading.Thread(target=watch))
        threads[-1].start()

    threads: list[threading.Thread] = []
    note("last", priority=1)
    note("middle")
    note("first", priority=-1)
    blocker.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert order == ["first", "middle", "last"]


def test_a_full_queue_refuses(start: Any) -> None:
    llm = start(max_num_seqs=1, max_waiting=3)
    blocker = llm.stream([1], **LONG)
    next(blocker)
    future = llm.generate([[2], [3]], max_tokens=2, **GREEDY)
    with pytest.raises(QueueFullError, match="2 requests wait and 2 came"):
        llm.generate([[4], [5]])
    with pytest.raises(QueueFullError):
        llm.generate([4], n=2)
    last = llm.stream([6], max_tokens=2, **GREEDY)
    with pytest.raises(QueueFullError):
        llm.stream([7])
    assert llm.stats().refused == 5 and llm.stats().waiting == 3
    blocker.close()
    assert [len(tokens) for tokens in results([future])] == [2, 2]
    assert len(list(last)) == 2


# Faults


def test_a_failing_step_fails_its_requests_alone(start: Any) -> None:
    llm = start()
    inject(llm, lambda works: any(work.job.tokens[0] == 13 for work in works))
    before = llm.generate([1], max_tokens=3, **GREEDY)
    right = results([before])
    bad = [llm.generate([[13], [13, 4]]), llm.generate([13, 2], n=3)]
    stream = llm.stream([13, 3])
    for future in bad:
        with pytest.raises(EngineError, match="injected") as error:
            future.result(PATIENCE)
        assert isinstance(error.value.__cause__, ZeroDivisionError)
    with pytest.raises(EngineError, match="injected"):
        list(stream)
    with pytest.raises(EngineError, match="injected"):
        asyncio.run(collect(llm.stream_async([13])))
    with pytest.raises(EngineError):
        inject(llm, lambda works: True)
        llm.chat([{"role": "user", "content": "x"}])
    del llm.engine.run
    assert results([llm.generate([1], max_tokens=3, **GREEDY)]) == right
    stats = llm.stats()
    assert stats.finished["error"] >= 6 and stats.running == stats.waiting == 0
    assert stats.cache_usage == 0


@pytest.mark.parametrize("name", ["no cache", "slots", "pages", "tiny chunks"])
def test_a_request_that_makes_its_steps_fail_harms_no_other(
    start: Any, name: str
) -> None:
    """The others of its batch get their tokens, and each of them once."""
    config: dict[str, Any] = {**CONFIGS[name]}  # type: ignore[dict-item]
    if name == "slots":  # in which a later chunk of a prompt cannot be repeated
        config["prefill_chunk"] = None
    llm = start(**config)
    options: dict[str, Any] = {"max_tokens": 12, "logprobs": 0, **GREEDY}
    prompts = [[n] * 20 for n in range(9)]
    right = llm.generate(prompts, **options).result(PATIENCE)

    def fault(works: Sequence[Work]) -> bool:
        return any(w.job.tokens[0] == 4 and w.job.num_output == 5 for w in works)

    inject(llm, fault)
    futures = [llm.generate(prompt, n=2, **options) for prompt in prompts]
    for number, (future, output) in enumerate(zip(futures, right, strict=True)):
        if number == 4:
            with pytest.raises(EngineError, match="injected"):
                future.result(PATIENCE)
            continue
        for sample in future.result(PATIENCE):
            assert sample.token_ids == output.token_ids
            for entry, wanted in zip(sample.logprobs, output.logprobs, strict=True):
                assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-4)
    until(lambda: not llm.engine.scheduler.jobs)
    assert llm.stats().finished["length"] == 9 + 8 * 2
    llm.engine.scheduler.manager.check_integrity()


def test_no_parameter_can_make_a_step_fail(start: Any, plain: PlainLLM) -> None:
    """Extremes of all parameters in one batch, beside requests that are watched."""
    llm = start(max_num_seqs=64, max_num_batched_tokens=512, num_pages=600)
    extremes: dict[str, tuple[Any, ...]] = {
        "temperature": (1e-300, 1e-42, 100),
        "top_k": (-1, 1, 2**31),
        "top_p": (1e-300, 1e-9, 1.0),
        "min_p": (1e-300, 1, 1.0),
        "repetition_penalty": (0.01, 100),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "seed": (-(2**63), 2**64 - 1),
        "logprobs": (0, 20),
        "logit_bias": ({}, {0: -100.0, 1099: 100.0}, dict.fromkeys(range(1100), -100)),
    }
    odd = [{name: value} for name, values in extremes.items() for value in values]
    chance = random.Random(0)
    odd += [{k: chance.choice(v) for k, v in extremes.items()} for _ in range(20)]
    params = [
        SamplingParams(**{"temperature": 1.0, "max_tokens": 6, **options})
        for options in odd
    ]
    watched = [llm.generate([n], max_tokens=9, **GREEDY) for n in range(8)]
    llm.generate([[5, 6, 7]] * len(params), params).result(PATIENCE)
    right = plain.generate([[n] for n in range(8)], max_tokens=9, **GREEDY).result()
    assert results(watched) == [output.token_ids for output in right]
    assert "error" not in llm.stats().finished


def test_a_bias_that_is_changed_too_late_changes_nothing(start: Any) -> None:
    llm = start()
    bias = {77: 100.0}
    future = llm.generate([[1], [2]], max_tokens=20, logit_bias=bias, **GREEDY)
    bias[10**9] = bias.pop(77)
    assert results([future]) == [[77] * 20] * 2


def test_others_survive_a_failing_step_they_wait_through(start: Any) -> None:
    llm = start(max_num_seqs=1)
    inject(llm, lambda works: works[0].job.tokens[0] == 13)
    futures = [llm.generate([n], max_tokens=4, **GREEDY) for n in (1, 13, 2, 13, 3)]
    failed = [future.exception(PATIENCE) is not None for future in futures]
    assert failed == [False, True, False, True, False]


def test_a_failure_after_the_pass_leaves_no_wrong_pages(start: Any) -> None:
    """Pages of a step that failed hold numbers that no later request may find."""
    llm = start()
    prompt = list(range(40))
    run = llm.engine.run

    def spoil(works: Sequence[Work]) -> torch.Tensor:
        run(works)
        for tensor in (llm.engine.cache.k, llm.engine.cache.v):
            tensor.fill_(math.nan)
        raise ZeroDivisionError("injected")

    llm.engine.run = spoil
    with pytest.raises(EngineError):
        llm.generate(prompt).result(PATIENCE)
    llm.engine.run = run
    options: dict[str, Any] = {"max_tokens": 6, "logprobs": 0, **GREEDY}
    (output,) = llm.generate(prompt, **options).result(PATIENCE)
    assert all(math.isfinite(entry.logprob) for entry in output.logprobs)


def test_a_dead_engine_says_so(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    llm = start()
    stream = llm.stream([1], **LONG)
    future = llm.generate([2], **LONG)
    next(stream)

    def broken(*arguments: object) -> Any:
        raise ZeroDivisionError("the books are wrong")

    llm.engine.scheduler.commit = broken
    with pytest.raises(EngineError, match="the engine died: ZeroDivisionError"):
        future.result(PATIENCE)
    with pytest.raises(EngineError, match="died"):
        list(stream)
    for call in (lambda: llm.generate([1]), lambda: llm.stream([1])):
        with pytest.raises(EngineError, match="died") as error:
            call()
        assert isinstance(error.value.__cause__, ZeroDivisionError)
    llm.close()
    # Its books are wrong, but no thread is left; the fixture must not look further.
    assert not any(thread.is_alive() for thread in llm.engine.threads)
    llm.engine.tickets.clear()
    for job in list(llm.engine.scheduler.jobs.values()):
        llm.engine.scheduler.finish(job, "error")


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n is 0; expected 1 to 1024"),
        ({"n": 1.0}, "n is 1.0; expected an integer"),
        ({"n": 10_000}, "n is 10000"),
        ({"priority": "high"}, "priority is 'high'"),
        ({"priority": 10_000}, "priority is 10000"),
        ({"timeout": -1}, "timeout is -1"),
        ({"timeout": math.nan}, "timeout is nan"),
        ({"timeout": "1s"}, "timeout is '1s'"),
        ({"stop": ["x"] * 10_000}, "stop has 10000 texts of 10000 characters; expec"),
        ({"stop": "x" * 10_000}, "stop has 1 texts of 10000 characters"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temprature": 1}, "temprature"),
        ({"foo": 1}, "'foo' is no sampling parameter; expected one of max_tokens, "),
        ({"foo": 1}, "logit_bias, priority, timeout"),
    ],
)
def test_bad_options_are_refused_at_once(
    start: Any, options: dict[str, Any], message: str
) -> None:
    llm = start()
    with pytest.raises((TypeError, ValueError)) as error:
        llm.generate([1], **options)
    assert message in str(error.value)
    assert llm.stats().waiting == 0


def test_what_does_not_fit_is_refused_or_cut(start: Any) -> None:
    llm = start(num_pages=20)
    room = llm.engine.max_model_len
    assert room < 100
    for prompt in ([1] * room, [1] * 5000):
        with pytest.raises(ValueError, match=f"{len(prompt)} tokens; expected fewer"):
            llm.generate(prompt)
    (output,) = llm.generate([1] * (room - 3), **LONG).result(PATIENCE)
    assert len(output.token_ids) == 3 and output.finish_reason == "length"
    (output,) = llm.generate([1], **LONG).result(PATIENCE)
    assert len(output.token_ids) == room - 1
    short = start(max_model_len=10)
    with pytest.raises(ValueError, match="expected fewer than 10"):
        short.generate([1] * 10)
    whole = start(prefill_chunk=None, max_num_batched_tokens=32)
    with pytest.raises(ValueError, match="expected fewer than 32"):
        whole.generate([1] * 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "ring"}, "cache is 'ring'; expected 'none', 'slot' or 'paged'"),
        ({"page_size": 0}, "page_size is 0; expected 1 to"),
        ({"num_pages": 2.5}, "num_pages is 2.5; expected an integer"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"max_waiting": None}, "max_waiting is None"),
        ({"overtakes": -1}, "overtakes is -1; expected 0 to"),
        ({"share_prefixes": 1}, "share_prefixes is 1; expected True or False"),
        ({"max_num_seqs": 4000}, "max_num_batched_tokens is 2048; expected at least"),
        ({"num_pages": 8, "cache_bytes": 1000}, "both num_pages and cache_bytes"),
        ({"num_pages": 8, "cache": "slot"}, "num_pages is 8 and cache is 'slot'; exp"),
        ({"num_pages": 8, "cache": "none"}, "num_pages is 8 and cache is 'none'; exp"),
        ({"cache_bytes": 1, "cache": "none"}, "cache_bytes is 1 and cache is 'none'"),
    ],
)
def test_bad_configs_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        EngineConfig(**options)
    assert message in str(error.value)


def test_a_config_is_no_dict(folder: Path) -> None:
    with pytest.raises(TypeError, match="expected an EngineConfig"):
        LLM(folder, {"cache": "slot"}, device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("cache", ["slot", "paged"])
def test_too_little_memory_is_refused(folder: Path, cache: Any) -> None:
    message = r"^cache_bytes is 100;|^the room for pages is 100 bytes;"
    with pytest.raises(ValueError, match=message):
        LLM(folder, EngineConfig(cache=cache, cache_bytes=100), device="cpu")


def test_a_slot_cache_fills_its_bytes(start: Any) -> None:
    config = EngineConfig(cache="slot", cache_bytes=2**20, max_num_seqs=4)
    llm = start(config)
    cache = llm.engine.cache
    assert 0.95 * 2**20 < cache.nbytes <= 2**20
    assert cache.manager.max_model_len == llm.engine.max_model_len
    room = llm.engine.max_model_len
    assert start(config, max_model_len=room + 1).engine.cache.nbytes == cache.nbytes
    assert start(config, max_model_len=10).engine.max_model_len == 10


# The end


def test_close_finishes_what_was_asked_for(start: Any) -> None:
    llm = start(max_num_seqs=2)
    futures = [llm.generate([n], max_tokens=10, **GREEDY) for n in range(6)]
    stream = llm.stream([7], max_tokens=10, **GREEDY)
    llm.close()
    assert all(future.done() for future in futures)
    assert [len(tokens) for tokens in results(futures)] == [10] * 6
    assert len(list(stream)) == 10
    llm.close()
    for call in (
        lambda: llm.generate([1]),
        lambda: llm.stream([1]),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: asyncio.run(collect(llm.stream_async([1]))),
    ):
        with pytest.raises(EngineError, match="this LLM is closed"):
            call()


def test_close_with_cancel_ends_at_once_with_what_there_is(start: Any) -> None:
    llm = start(max_num_seqs=1)
    stream = llm.stream([1], **LONG)
    next(stream)
    future = llm.generate([2], **LONG)
    llm.close(cancel=True)
    assert future.result(PATIENCE)[0].finish_reason == "abort"
    assert list(stream)[-1].finish_reason == "abort"


def test_whoever_got_in_before_the_end_is_answered(start: Any) -> None:
    """A request that arrives while `close` sets in is taken and finished."""
    llm = start()
    add = llm.engine.scheduler.add

    def slow(jobs: Any) -> None:
        closing.start()
        until(lambda: llm.engine.closing)
        time.sleep(0.05)  # for the engine to see it
        add(jobs)

    closing = threading.Thread(target=llm.close)
    llm.engine.scheduler.add = slow
    assert len(results([llm.generate([1], max_tokens=5, **GREEDY)])[0]) == 5
    closing.join(PATIENCE)


def test_a_close_that_cancels_ends_one_that_waits(start: Any) -> None:
    llm = start()
    stream = llm.stream([1], **LONG)
    next(stream)
    waiting = [threading.Thread(target=llm.close) for _ in range(3)]
    for thread in waiting:
        thread.start()
    until(lambda: llm.engine.closing)
    llm.close(cancel=True)
    for thread in waiting:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert list(stream)[-1].finish_reason in ("abort", "length")


def test_an_exception_leaves_the_context_at_once(folder: Path) -> None:
    with pytest.raises(KeyError), LLM(folder, SMALL, device="cpu") as llm:
        future = llm.generate([2], **LONG)
        raise KeyError
    assert future.result(PATIENCE)[0].finish_reason == "abort"
    check_empty(llm.engine)


def test_a_dropped_llm_stops_its_threads(folder: Path) -> None:
    llm = LLM(folder, SMALL, device="cpu")
    engine, gone = llm.engine, weakref.ref(llm)
    llm.generate([1], max_tokens=3).result(PATIENCE)
    del llm
    until(lambda: gc.collect() >= 0 and gone() is None)
    until(lambda: not any(thread.is_alive() for thread in engine.threads))
    check_empty(engine)


def test_a_finished_future_keeps_nothing(folder: Path) -> None:
    """Who keeps the answers does not keep the memory of the model and its cache."""
    llm = LLM(folder, SMALL, device="cpu")
    futures = [llm.generate([n], max_tokens=2, **GREEDY) for n in range(4)]
    futures.append(llm.generate([1], **LONG))
    futures[-1].cancel()
    inject(llm, lambda works: any(work.job.tokens[0] == 13 for work in works))
    futures.append(llm.generate([13]))
    assert results(futures[:4]) and futures[-1].exception(PATIENCE)
    futures.pop()  # its traceback keeps what failed
    gone = weakref.ref(llm.engine)
    llm.close()
    del llm
    until(lambda: gc.collect() >= 0 and gone() is None)


def test_a_finished_future_goes_at_once(start: Any) -> None:
    """No reference cycle keeps it until the garbage collector comes."""
    llm = start()
    gc.collect()
    gc.disable()
    try:
        future = llm.generate([1], max_tokens=2, **GREEDY)
        gone = weakref.ref(future)
        future.result(PATIENCE)
        del future
        until(lambda: gone() is None)
    finally:
        gc.enable()


def test_a_future_keeps_its_llm(folder: Path) -> None:
    future = LLM(folder, SMALL, device="cpu").generate([1], max_tokens=30, **GREEDY)
    gc.collect()
    assert len(future.result(PATIENCE)[0].token_ids) == 30


SCRIPT = """
import asyncio, os, signal, sys, threading
from simplellm.engine import LLM, EngineConfig
config = EngineConfig(page_size=4, num_pages=60, max_num_seqs=4)
llm = LLM({folder!r}, config, device="cpu")
LONG = dict(max_tokens=100000, temperature=0, ignore_eos=True)
{body}
"""
EXITS = {
    "pending futures": "futures = [llm.generate([n], **LONG) for n in range(9)]",
    "a stream half read": "stream = llm.stream([1], **LONG); next(stream)",
    "a full inbox of aborts": """
        for n in range(50):
            llm.generate([n], **LONG).cancel()
    """,
    "an exception": "future = llm.generate([1], **LONG); raise SystemExit(0)",
    "a callback": """
        future = llm.generate([1], max_tokens=3)
        future.add_done_callback(lambda f: print("called"))
        future.result()
    """,
    "a thread that waits": """
        future = llm.generate([1], max_tokens=50, ignore_eos=True)
        wait = lambda: print(len(future.result()[0].token_ids))
        threading.Thread(target=wait).start()
    """,
    "an interrupt": """
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        try:
            while True:
                llm.generate([1], **LONG, n=4).result()
        except KeyboardInterrupt:
            print("interrupted")
    """,
    "an async generator left open": """
        async def main():
            stream = llm.stream_async([1], **LONG)
            await anext(stream)
        asyncio.run(main())
    """,
}


def run_script(folder: Path, body: str) -> str:
    script = SCRIPT.format(folder=str(folder), body=textwrap.dedent(body))
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", script],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXITS)
def test_the_interpreter_exits_without_close(folder: Path, name: str) -> None:
    out = run_script(folder, EXITS[name])
    printed = {"a thread that waits": "50\n", "an interrupt": "interrupted\n"}
    assert out == printed.get(name, out)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_is_told_to_load_its_own(folder: Path) -> None:
    body = """
        future = llm.generate([1], **LONG)
        stream = llm.stream([2], **LONG)
        next(stream)
        llm.engine.lock.acquire()  # as another thread may have it at a fork
        if (child := os.fork()) == 0:
            errors = 0
            calls = [lambda: llm.generate([1]), lambda: llm.stream([1])]
            calls += [future.result, future.exception, llm.stats]
            calls += [lambda: [None for _ in stream]]
            for call in calls:
                try:
                    call()
                except RuntimeError as error:
                    assert "expected processes that are spawned" in str(error), error
                    errors += 1
            llm.close()
            sys.exit(errors)
        llm.engine.lock.release()
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), len(future.result()))
    """
    assert run_script(folder, body) == "6 1\n"


# By hand, and in numbers


def test_steps_can_be_made_by_hand(plain: PlainLLM) -> None:
    engine = Engine(plain.model, SMALL)
    events: list[Event] = []
    params = SamplingParams(temperature=0, max_tokens=3)
    request = Submission([1, 2, 3], params, frozenset(), 3)
    engine.submit([[Ticket(request, events.append)]])
    while engine.scheduler.jobs:
        engine.step()
    right = plain.generate([1, 2, 3], params, ignore_eos=True).result()[0]
    assert [event.token_id for event in events] == right.token_ids
    assert [event.finish_reason for event in events] == [None, None, "length"]
    with pytest.raises(RuntimeError, match="none of them can run"):
        engine.step()


def test_stats_add_up(start: Any) -> None:
    llm = start()
    assert llm.stats().ttft is None and llm.stats().tokens_per_second == 0
    prompt = list(range(41))
    llm.generate(prompt, max_tokens=10, **GREEDY).result(PATIENCE)
    assert llm.stats().cache_hit_rate == 0
    llm.generate(prompt, max_tokens=10, **GREEDY).result(PATIENCE)
    stats = llm.stats()
    assert stats.cache_hit_rate == pytest.approx(40 / 82)
    assert stats.finished == {"length": 2} and stats.generated_tokens == 20
    assert stats.steps == 3 + 9 + 1 + 9
    assert stats.ttft and stats.itl and stats.tokens_per_second > 0
    assert stats.ttft_p99 >= stats.ttft and stats.itl_p99 >= stats.itl


def test_a_pause_does_not_count_for_the_speed(start: Any) -> None:
    llm = start()
    llm.generate([1], max_tokens=20, **GREEDY).result(PATIENCE)
    time.sleep(0.5)
    begin = time.monotonic()
    llm.generate([1], max_tokens=20, **GREEDY).result(PATIENCE)
    assert llm.stats().tokens_per_second >= 20 / (time.monotonic() - begin)


def test_quantiles() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert quantile(values, 0.5) == 50 and quantile(values, 0.99) == 99
    assert quantile([3.0], 0.99) == 3 and quantile([], 0.5) is None


def test_the_log_stays_quiet(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "simplellm")
    llm = start()
    llm.generate([1], max_tokens=2).result(PATIENCE)
    llm.generate([1], **LONG).cancel()
    assert caplog.text == ""
