"""Who waits for answers: threads, coroutines, futures, streams; faults and the end."""

import asyncio
import gc
import logging
import os
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
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from course.integrity import check_integrity
from models import GREEDY, HELLO, PATIENCE, SMALL, saying, until
from recompute import Recompute

from simplellm import (
    LLM,
    EngineConfig,
    EngineError,
    QueueFullError,
    RequestOutput,
    SamplingParams,
    load_model,
)
from simplellm.api import streams
from simplellm.base.request import Request
from simplellm.base.request_spec import RequestSpec
from simplellm.engine.engine import Engine
from simplellm.engine.scheduler import ScheduledChunk

LONG: dict[str, Any] = {**GREEDY, "max_tokens": 100_000}


@pytest.fixture(scope="module")
def right(folder: Path) -> Callable[..., list[int]]:
    """The greedy tokens of a prompt."""
    recompute = Recompute(load_model(folder, device="cpu"))

    def tokens(prompt: Sequence[int], max_tokens: int) -> list[int]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        return recompute(prompt, params)[0]

    return tokens


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
        if llm.engine.dead is None:  # else its books are wrong
            check_empty(llm.engine)
        assert not threads_of(llm.engine)


def check_empty(engine: Engine) -> None:
    """No request and no page is left."""
    assert not engine.scheduler.requests
    assert engine.scheduler.manager.usage == 0
    check_integrity(engine.scheduler.manager)


def threads_of(engine: Engine) -> list[threading.Thread]:
    return [engine.thread] if engine.thread and engine.thread.is_alive() else []


def results(futures: Sequence[Future[list[RequestOutput]]]) -> list[list[int]]:
    return [o.token_ids for f in futures for o in f.result(PATIENCE)]


def before_each_step(
    llm: LLM, look: Callable[[Sequence[ScheduledChunk]], object]
) -> None:
    """Calls ``look``, which may raise, with the works of a step before it begins."""
    launch = llm.engine_core.runner.launch

    def watched(scheduled: Sequence[ScheduledChunk]) -> Any:
        look(scheduled)
        return launch(scheduled)

    llm.engine_core.runner.launch = watched  # type: ignore[method-assign]


def fail_at(token: int) -> Callable[[Sequence[ScheduledChunk]], None]:
    """Fails if the prompt of some request begins with ``token``."""

    def look(scheduled: Sequence[ScheduledChunk]) -> None:
        if any(work.request.tokens[0] == token for work in scheduled):
            raise ZeroDivisionError("injected")

    return look


# Stop strings


@pytest.mark.parametrize("stop", ["\n", ["=", "12"], "never said"])
def test_stop_strings_cut_what_the_engine_made_in_advance(
    start: Any, stop: Any
) -> None:
    llm = start()
    script = llm.tokenizer.encode("47 + 85 = 132\nand so on and so on")
    with saying(llm, script):
        options: dict[str, Any] = {"stop": stop, "max_tokens": 30, "ignore_eos": True}
        (output,) = llm.generate("What is 47 + 85?", **options).result(PATIENCE)
        text = {"\n": "47 + 85 = 132", "never said": None}.get(str(stop), "47 + 85 ")
        assert text is None or output.text == text
        assert output.finish_reason == ("stop" if text else "length")
        parts = list(llm.stream("What is 47 + 85?", **options))
        assert "".join(part.text for part in parts) == output.text
        assert parts[-1].finish_reason == output.finish_reason
        until(lambda: not llm.engine.scheduler.requests)
    assert llm.stats().finished == {output.finish_reason: 2}


def test_who_holds_a_stream_that_stopped_holds_up_nothing(start: Any) -> None:
    """The engine ends a request at its stop string, whatever the reader does then."""
    llm = start()
    options: dict[str, Any] = {"stop": "=", **LONG}
    with saying(llm, llm.tokenizer.encode("47 + 85 = 132")):
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


def test_many_threads_share_it(start: Any, right: Any) -> None:
    llm = start()
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
    assert [found[n] for n in range(24)] == [right([n], 5) for n in range(24)]


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


def test_a_future_is_running_until_it_is_done(start: Any) -> None:
    llm = start(max_num_seqs=1)
    first, second = (llm.generate([n], **LONG) for n in (1, 2))
    assert first.running() and second.running() and not first.done()
    second.cancel()
    assert not second.running() and second.done()
    assert first.result(PATIENCE) and not first.running()


def test_a_dropped_future_ends_its_requests(start: Any) -> None:
    llm = start()
    future = llm.generate([[1], [2]], n=2, **LONG)
    until(lambda: llm.stats().running >= 4)
    del future
    until(lambda: llm.stats().finished.get("abort") == 4)


def test_giving_up_to_wait_is_not_dropping(start: Any) -> None:
    llm = start()
    future = llm.generate([1], max_tokens=50, **GREEDY)
    with suppress(TimeoutError):
        future.result(timeout=0)
    assert len(results([future])[0]) == 50


def test_who_waits_for_a_callback_need_not_keep_the_future(
    start: Any, folder: Path
) -> None:
    llm = start()
    found: list[Any] = []
    llm.generate([1], max_tokens=20, **GREEDY).add_done_callback(found.append)
    gc.collect()
    until(lambda: found)
    assert len(results(found)[0]) == 20
    found.clear()
    LLM(folder, SMALL, device="cpu").generate(
        [1], max_tokens=20, **GREEDY
    ).add_done_callback(found.append)
    gc.collect()
    until(lambda: found)
    assert len(results(found)[0]) == 20

    async def main() -> list[RequestOutput]:
        waiting = asyncio.wrap_future(llm.generate([1], max_tokens=20, **GREEDY))
        gc.collect()
        return await waiting

    assert len(asyncio.run(main())[0].token_ids) == 20


def test_a_cancelled_task_ends_its_request(start: Any) -> None:
    llm = start()

    async def main() -> None:
        streaming = asyncio.create_task(collect(llm.stream_async([1], **LONG)))
        waiting = asyncio.wrap_future(llm.generate([2], **LONG))
        chat = asyncio.create_task(llm.chat_async(HELLO, **LONG))
        turn = asyncio.create_task(collect(llm.stream_chat_async(HELLO, **LONG)))
        tasks = [streaming, waiting, chat, turn]
        while llm.stats().running < 4:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    until(lambda: llm.stats().finished.get("abort") == 4)


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
    assert "what a request gives cannot be delivered" in caplog.text


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


# Many replies in one coroutine


def asked(llm: LLM, prompt: Sequence[int], **options: Any) -> RequestSpec:
    return llm.input_processor.process(
        prompt, None, {"max_tokens": 12, **GREEDY, **options}
    )


def test_replies_come_with_their_index(start: Any) -> None:
    llm = start()
    options: dict[str, Any] = {"temperature": 1.0, "seed": 4, "logprobs": 1}
    prompts = [[5, 6], [7, 8, 9]]
    right = llm.generate(prompts, n=2, max_tokens=12, ignore_eos=True, **options)

    async def main() -> None:
        both = [asked(llm, prompt, **options) for prompt in prompts]
        async with llm.replies(both, n=2) as replies:
            parts: list[list[RequestOutput]] = [[], [], [], []]
            async for index, part in replies:
                parts[index].append(part)
        assert [o.token_ids for o in replies.outputs()] == results([right])
        for found, whole in zip(parts, replies.outputs(), strict=True):
            assert "".join(part.text for part in found) == whole.text
            assert [t for part in found for t in part.token_ids] == whole.token_ids
            assert [e for part in found for e in part.logprobs or ()] == whole.logprobs
            assert found[-1].finish_reason == whole.finish_reason
        whole = await llm.replies(both, n=2).finish()
        assert [output.text for output in whole] == [output.text for output in right]
        usage = replies.usage()
        assert (usage.prompt_tokens, usage.completion_tokens) == (5, 48)

    asyncio.run(main())


def test_a_slow_coroutine_gets_everything_and_little_waits(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start(num_pages=600, page_size=4)
    monkeypatch.setattr(streams, "MANY", 3)
    monkeypatch.setattr(streams, "LONG", 20)

    async def main() -> None:
        replies = llm.replies([asked(llm, [n], max_tokens=100) for n in (1, 2)])
        waiting = replies.inbox.waiting
        until(lambda: llm.stats().finished.get("length") == 2)  # blocks the loop
        until(lambda: not llm._output_processor.readers)
        assert [len(parts) for parts in waiting.values()] < [50, 50]
        merged = [len(part.token_ids) for part in waiting[0][:-1]]
        assert merged[:2] == [1, 1] and max(merged) > 5 and sum(merged) == 100
        found: dict[int, list[int]] = {0: [], 1: []}
        async for index, part in replies:
            found[index] += part.token_ids
        assert found == {n: replies.outputs()[n].token_ids for n in (0, 1)}

    asyncio.run(main())


def test_a_loop_is_woken_once_for_all_that_comes_meanwhile(start: Any) -> None:
    llm = start()

    async def main() -> None:
        loop, woken = asyncio.get_running_loop(), []
        wake = loop.call_soon_threadsafe

        def noted(*call: Any) -> Any:
            woken.append(call)
            return wake(*call)

        loop.call_soon_threadsafe = noted  # type: ignore[assignment, method-assign]
        every = [llm.replies(asked(llm, [n])) for n in range(5)]
        every.append(llm.replies([asked(llm, [n]) for n in range(3)], n=2))
        until(lambda: llm.stats().finished.get("length") == 11)
        until(lambda: not llm._output_processor.readers)
        assert len(woken) == 1
        for replies in every:
            assert {o.finish_reason for o in await replies.finish()} == {"length"}

    asyncio.run(main())


@pytest.mark.parametrize("how", ["aclose", "with", "drop", "cancel", "error"])
def test_whoever_leaves_replies_ends_them(start: Any, how: str) -> None:
    llm = start()
    before_each_step(llm, fail_at(13))

    async def read() -> None:
        replies = llm.replies([asked(llm, [n], **LONG) for n in (1, 2, 3)])
        await anext(replies)
        if how == "aclose":
            await replies.aclose()
            assert [part async for part in replies] == []
        elif how == "with":
            with suppress(KeyError):
                async with replies:
                    raise KeyError
        elif how == "cancel":
            await collect(replies)
        elif how == "error":
            both = llm.replies([asked(llm, [n], **LONG) for n in (4, 13)])
            with pytest.raises(EngineError, match="injected"):
                await collect(both)
            await replies.aclose()

    async def main() -> None:
        task = asyncio.create_task(read())
        while not task.done() and llm.stats().generated_tokens < 30:
            await asyncio.sleep(0.01)
        if how == "cancel":
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        else:
            await task

    asyncio.run(main())
    until(lambda: llm.stats().finished.get("abort") == (4 if how == "error" else 3))
    until(lambda: gc.collect() >= 0 and not llm._output_processor.wakers)
    assert not llm._output_processor.readers


def test_who_waits_learns_that_another_task_closed_the_replies(start: Any) -> None:
    llm = start(max_num_seqs=1)

    async def main() -> None:
        running = llm.replies(asked(llm, [1], **LONG))
        waiting = llm.replies(asked(llm, [2]))
        task = asyncio.create_task(collect(waiting))
        await asyncio.sleep(0)
        await waiting.aclose()
        assert await task == []
        await running.aclose()

    asyncio.run(main())


def test_a_streamed_turn_tells_its_end_and_its_usage(start: Any) -> None:
    llm = start()

    async def main() -> None:
        whole = llm.chat(HELLO, max_tokens=20, **GREEDY)
        stream = llm.stream_chat_async(HELLO, max_tokens=20, **GREEDY)
        assert stream.output().finish_reason is None and not stream.output().token_ids
        async for _ in stream:
            pass
        assert stream.output() == whole.choices[0]
        assert replace(stream.usage(), cached_tokens=0) == whole.usage
        unread = llm.stream_chat_async(HELLO)
        await unread.aclose()
        assert [part async for part in unread] == []
        refused = llm.stream_async([1], timeout=0, n=1, **LONG)
        async with refused:
            assert [part.finish_reason async for part in refused] == ["timeout"]

    asyncio.run(main())
    assert llm.stats().finished == {"length": 2, "timeout": 1}


def test_a_future_is_awaited_and_iterated(start: Any) -> None:
    llm = start()
    future = llm.generate([[1], [2]], max_tokens=4, **GREEDY)
    outputs = future.result()
    assert list(future) == outputs and len(future) == 2 and future[-1] is outputs[-1]

    async def main() -> None:
        assert await llm.generate([[1], [2]], max_tokens=4, **GREEDY) == outputs
        both = (llm.generate([n], max_tokens=4, **GREEDY) for n in (1, 2))
        assert [*map(list, await asyncio.gather(*both))] == [[o] for o in outputs]
        task = asyncio.ensure_future(llm.generate([3], **LONG))
        while not llm.stats().running:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert llm.generate([3], **LONG)  # true at once
    until(lambda: llm.stats().finished.get("abort") == 2)


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


def test_text_held_back_is_shown_at_a_timeout(start: Any) -> None:
    llm = start()
    with saying(llm, llm.tokenizer.encode("one two three four")):
        stream = llm.stream("x", stop="one two three four five", timeout=0.3, **LONG)
        parts = list(stream)
    assert parts[-1].finish_reason in ("timeout", "length")
    assert "".join(part.text for part in parts).startswith("one two three four")


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

    def end(scheduled: Sequence[ScheduledChunk]) -> None:
        if (request := scheduled[0].request).num_output == len(ids):
            llm.engine.end(request, "timeout")

    before_each_step(llm, end)
    with saying(llm, reply):
        turn = llm.chat(HELLO)
        assert turn.finish_reason == "timeout" and turn.token_ids == ids
        assert turn.content == content
        assert [c.arguments for c in turn.tool_calls] == ([call] if call else [])
        text = "".join(delta.text for delta in llm.stream_chat(HELLO))
        assert text == (call or content)


@pytest.mark.parametrize("how", ["stream", "chat", "result", "exception"])
def test_an_interrupt_ends_the_request_though_its_traceback_is_kept(
    start: Any, how: str
) -> None:
    llm = start(num_pages=2000)
    future = (
        llm.generate([[1], [2]], **LONG) if how in ("result", "exception") else None
    )
    waiting = threading.Event()

    def interrupt() -> None:
        waiting.wait(PATIENCE)
        until(lambda: llm.stats().generated_tokens > 5)
        time.sleep(0.1)  # until the reader waits
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt) as kept:
        waiting.set()
        if how == "chat":
            llm.chat(HELLO, **LONG)
        elif how == "stream":
            list(llm.stream([1], **LONG))
        else:
            getattr(future, how)()
    count = 2 if future is not None else 1
    until(lambda: llm.stats().finished.get("abort") == count)
    assert future is None or future.cancelled()
    del kept


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="has no timer's signal")
def test_a_signal_handler_may_ask_for_stats_inside_of_a_call(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread it interrupts holds the engine's lock already."""
    llm, seen = start(), []
    add = llm.engine.scheduler.add

    def interrupted(requests: Sequence[Request]) -> None:
        add(requests)
        signal.raise_signal(signal.SIGINT)

    def give_up(*_: object) -> None:
        raise TimeoutError("the handler waits for the lock of its own thread")

    monkeypatch.setattr(llm.engine.scheduler, "add", interrupted)
    before = {
        signal.SIGINT: signal.signal(
            signal.SIGINT, lambda *_: seen.append(llm.stats())
        ),
        signal.SIGALRM: signal.signal(signal.SIGALRM, give_up),
    }
    signal.alarm(10)
    try:
        future = llm.generate([[1], [2]], max_tokens=3, **GREEDY)
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen[0].waiting == 2
    assert [len(tokens) for tokens in results([future])] == [3, 3]


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


def test_a_full_queue_refuses(start: Any) -> None:
    llm = start(max_num_seqs=1, max_waiting=3)
    blocker = llm.stream([1], **LONG)
    next(blocker)
    future = llm.generate([[2], [3], [4]], max_tokens=2, **GREEDY)
    refused: tuple[Callable[[], Any], ...] = (
        lambda: llm.generate([[4], [5]]),
        lambda: llm.generate([4], n=2),
        lambda: llm.stream([7]),
        lambda: llm.chat(HELLO),
        lambda: asyncio.run(collect(llm.stream_async([7]))),
    )
    for call in refused:
        with pytest.raises(QueueFullError, match="3 requests wait already; expected f"):
            call()
    assert llm.stats().refused == 7 and llm.stats().waiting == 3
    blocker.close()
    assert [len(tokens) for tokens in results([future])] == [2, 2, 2]


# Faults


def test_a_failing_step_fails_its_requests_alone(start: Any) -> None:
    llm = start()
    right = results([llm.generate([1], max_tokens=3, **GREEDY)])
    before_each_step(llm, fail_at(13))
    bad = [llm.generate([[13], [13, 4]]), llm.generate([13, 2], n=3)]
    stream = llm.stream([13, 3])
    good = llm.generate([1], max_tokens=3, **GREEDY)
    for future in bad:
        with pytest.raises(EngineError, match="injected") as error:
            future.result(PATIENCE)
        assert isinstance(error.value.__cause__, ZeroDivisionError)
    with pytest.raises(EngineError, match="injected"):
        list(stream)
    with pytest.raises(EngineError, match="injected"):
        asyncio.run(collect(llm.stream_async([13])))
    assert results([good]) == right
    chat = llm.chat(HELLO, max_tokens=1).token_ids
    before_each_step(llm, lambda scheduled: 1 / 0)
    for call in (
        lambda: llm.chat(HELLO),
        lambda: asyncio.run(llm.chat_async(HELLO)),
        lambda: list(llm.stream_chat(HELLO)),
    ):
        with pytest.raises(EngineError, match="division by zero"):
            call()
    del llm.engine.runner.launch
    assert llm.chat(HELLO, max_tokens=1).token_ids == chat
    until(lambda: llm.stats().running == llm.stats().waiting == 0)
    assert llm.stats().finished["error"] >= 6 and llm.stats().cache_usage == 0


def test_a_failing_prompt_of_many_fails_alone(start: Any) -> None:
    """The others are computed; the error says which one failed, and has the rest."""
    llm = start()
    prompts: list[list[int]] = [[1], [13, 4], [2, 3], [13]]
    right = [results([llm.generate(p, max_tokens=3, **GREEDY)]) for p in prompts]
    chats = [HELLO, [{"role": "user", "content": "What is 47 + 85?"}]]
    turns = llm.chat(chats, max_tokens=2, **GREEDY)
    before_each_step(llm, fail_at(13))
    with pytest.raises(EngineError, match="of 4 prompts, the one at index 1") as error:
        llm.generate(prompts, max_tokens=3, **GREEDY).result(PATIENCE)
    assert error.value.index == 1
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    first, wrong, third, also_wrong = error.value.outputs or ()
    assert wrong is also_wrong is None
    assert [[first.token_ids], [third.token_ids]] == right[::2]

    two = llm.generate([[13], [2, 3]], max_tokens=3, n=2, **GREEDY)
    with pytest.raises(EngineError, match="index 0") as error:
        two.result(PATIENCE)
    assert [one and one.token_ids for one in error.value.outputs or ()] == [
        *[None, None],
        *[right[2][0]] * 2,
    ]

    lengths = [turn.usage.prompt_tokens for turn in turns]
    assert lengths[0] != lengths[1]

    def fail(scheduled: Sequence[ScheduledChunk]) -> None:
        if any(work.request.num_prompt == lengths[0] for work in scheduled):
            raise ZeroDivisionError("injected")

    del llm.engine.runner.launch
    before_each_step(llm, fail)
    with pytest.raises(EngineError, match="injected") as error:
        llm.chat(chats, max_tokens=2, **GREEDY)
    assert error.value.index == 0
    assert error.value.outputs is not None and error.value.outputs[0] is None
    assert error.value.outputs[1].content == turns[1].content
    with pytest.raises(EngineError, match="injected") as error:
        asyncio.run(llm.chat_async(chats[0]))
    assert error.value.index is None and error.value.outputs is None


def test_a_dead_engine_says_so(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    llm = start()
    stream = llm.stream([1], **LONG)
    future = llm.generate([2], **LONG)
    next(stream)

    def broken(*arguments: object) -> Any:
        raise ZeroDivisionError("the books are wrong")

    llm.engine.scheduler.update_from_output = broken
    with pytest.raises(EngineError, match="the engine died: ZeroDivisionError"):
        future.result(PATIENCE)
    with pytest.raises(EngineError, match="died"):
        list(stream)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: llm.generate([1]),
        lambda: llm.stream([1]),
        lambda: llm.chat(HELLO),
        llm.stats,
        llm.engine.snapshot,
    )
    for call in calls:
        with pytest.raises(EngineError, match="died") as error:
            call()
        assert isinstance(error.value.__cause__, ZeroDivisionError)
    llm.close()


def test_without_a_thread_that_reads_events_nobody_waits(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As when one of them is none."""
    llm = start()
    futures = [llm.generate([1], **LONG), llm.generate([[2], [3]], n=2, **LONG)]
    stream = llm.stream([2], **LONG)
    next(stream)
    llm.engine.events.put("odd")
    waiting: tuple[Callable[[], Any], ...] = (
        *(partial(future.result, PATIENCE) for future in futures),
        lambda: list(stream),
    )
    asking = (llm.engine.check, llm.stats, lambda: llm.generate([1]))
    for call in (*waiting, *asking):
        with pytest.raises(EngineError) as error:
            call()
        assert isinstance(error.value.__cause__, AttributeError)
    assert "the thread that reads what becomes of requests died" in caplog.text
    until(lambda: not threads_of(llm.engine))


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

    def slow(requests: Sequence[Request]) -> None:
        closing.start()
        until(lambda: llm.engine.closing)
        time.sleep(0.05)  # for the engine to see it
        add(requests)

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
    until(lambda: not threads_of(engine))
    check_empty(engine)


def test_a_finished_future_keeps_nothing(folder: Path) -> None:
    """Who keeps the answers does not keep the memory of the model and its cache."""
    llm = LLM(folder, SMALL, device="cpu")
    futures = [llm.generate([n], max_tokens=2, **GREEDY) for n in range(4)]
    futures.append(llm.generate([1], **LONG))
    futures[-1].cancel()
    before_each_step(llm, fail_at(13))
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
from simplellm import LLM, EngineConfig
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


FIRST = ("pending futures",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FIRST else [pytest.mark.exhaustive])
        for name in EXITS
    ],
)
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


# What is told of it


def test_a_pause_does_not_count_for_the_speed(start: Any) -> None:
    llm = start()
    llm.generate([1], max_tokens=20, **GREEDY).result(PATIENCE)
    time.sleep(0.5)
    begin = time.monotonic()
    llm.generate([1], max_tokens=20, **GREEDY).result(PATIENCE)
    assert llm.stats().tokens_per_second >= 20 / (time.monotonic() - begin)


def test_the_log_stays_quiet(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    """But for the lines that say what computes, and how long texts may get."""
    caplog.set_level(logging.DEBUG, "simplellm")
    llm = start()
    started = caplog.messages[:]
    how, room = started
    assert llm.backend_reason in how and "CPU" in how
    assert f"room for texts of {llm.engine.max_model_len} tokens" in room
    llm.generate([1], max_tokens=2).result(PATIENCE)
    llm.generate([1], **LONG).cancel()
    assert caplog.messages == started
