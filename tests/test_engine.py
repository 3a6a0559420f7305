"""`Engine.step` by hand: what goes in are requests, what comes out are events.

Every test runs with steps that overlap and with steps that do not: on a CPU nothing is
computed side by side, but a step is scheduled before the tokens of the one before it
are known, which is what can go wrong. Schedules at random are in test_equivalence.py.
"""

import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from clockwork import Clockwork
from course.integrity import check_integrity
from models import PATIENCE, SMALL, until
from recompute import Recompute
from stepping import drain, make_engine
from torch import Tensor

from simplellm import EngineError, SamplingParams, load_model
from simplellm.base.request import UNKNOWN, Event, QueueFullError, Request
from simplellm.engine.engine import Engine
from simplellm.engine.launch_timer import SLACK, LaunchTimer
from simplellm.engine.scheduler import ScheduledChunk
from simplellm.model.batch import Batch
from simplellm.model.kv_pool import KVPool
from simplellm.model.model import Model

GREEDY = SamplingParams(temperature=0, max_tokens=6)
numbers = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    return load_model(folder, device="cpu")


@pytest.fixture(scope="module")
def right(model: Model) -> Recompute:
    return Recompute(model)


@pytest.fixture(params=[False, True], ids=["in turns", "overlapping"])
def make(model: Model, request: pytest.FixtureRequest) -> Callable[..., Engine]:
    def make(use: Model | None = None, **changes: Any) -> Engine:
        config = replace(SMALL, **changes)
        return make_engine(use or model, config, overlap=request.param)

    return make


def ask(
    prompt: Sequence[int], params: SamplingParams = GREEDY, **fields: Any
) -> Request:
    return Request(
        tokens=list(prompt),
        max_tokens=params.max_tokens,
        params=params,
        stop_ids=frozenset(params.stop_token_ids),
        request_id=next(numbers),
        **fields,
    )


def finish(engine: Engine) -> dict[int, list[Event]]:
    """Steps until nothing is left; the events by the id of their request."""
    while engine.scheduler.requests or engine.flights:
        engine.step()
        check_integrity(engine.scheduler.manager)
    assert engine.scheduler.manager.usage == 0
    found: dict[int, list[Event]] = {}
    for event in drain(engine):
        found.setdefault(event.request_id, []).append(event)
    return found


def tokens_of(events: Sequence[Event]) -> list[int]:
    """The tokens of a request, whose last event alone says why it ended."""
    assert [event.finish_reason is None for event in events[:-1]] == [True] * (
        len(events) - 1
    )
    assert events[-1].finish_reason is not None
    return [token for event in events for token in event.tokens]


# One step after the other


def test_steps_can_be_made_by_hand(make: Any, right: Recompute) -> None:
    engine = make()
    request = ask([1, 2, 3], replace(GREEDY, max_tokens=3))
    engine.submit([request])
    events = finish(engine)[request.request_id]
    assert (tokens_of(events), "length") == right([1, 2, 3], request.params)
    assert [event.finish_reason for event in events] == [None, None, "length"]
    assert all(len(event.tokens) == 1 for event in events)
    assert [event.time for event in events] == sorted(event.time for event in events)
    with pytest.raises(RuntimeError, match="none of them can run"):
        engine.step()


def test_a_step_is_scheduled_before_the_tokens_of_the_last_one_are_read(
    model: Model,
) -> None:
    engine = make_engine(model, SMALL, overlap=True)
    request = ask([1, 2, 3], replace(GREEDY, max_tokens=3))
    engine.submit([request])
    engine.step()
    assert len(engine.flights) == 1 and not drain(engine)
    assert request.tokens[-1] == UNKNOWN
    engine.step()
    assert len(engine.flights) == 1 and len(drain(engine)) == 1
    engine.step()
    engine.step()
    assert not engine.flights and len(drain(engine)) == 2


def test_without_overlap_each_step_is_read_at_once(model: Model) -> None:
    engine = make_engine(model, SMALL)
    engine.submit([ask([1, 2, 3])])
    engine.step()
    assert not engine.flights and len(drain(engine)) == 1


PROMPTS = [[5, 6, 7], [90], list(range(40)), list(range(30)), list(range(40))]
CONFIGS: dict[str, dict[str, Any]] = {
    "pages": {},
    "tight pages": {"num_pages": 26},
    "nothing shared": {"enable_prefix_caching": False, "num_pages": 40},
    "whole prompts": {"enable_chunked_prefill": False},
    "tiny chunks": {"prefill_chunk": 1, "max_num_batched_tokens": 8},
    "static": {"continuous": False, "max_num_seqs": 2},
    "one at a time": {"max_num_seqs": 1},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_tokens_whatever_the_config(
    make: Any, right: Recompute, name: str
) -> None:
    engine = make(**CONFIGS[name])
    requests = [
        ask(prompt, SamplingParams(max_tokens=15 + n, temperature=n % 2, seed=n))
        for n, prompt in enumerate(PROMPTS)
    ]
    engine.submit(requests)
    events = finish(engine)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        expected = right(prompt, request.params)
        assert (tokens_of(events[request.request_id]), "length") == expected
    stats = engine.stats()
    assert stats.finished == {"length": 5} and stats.generated_tokens == 85
    assert stats.preemptions > 0 or name != "tight pages"


PENALIZED: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "frequency_penalty": 0.8, "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 4, "frequency_penalty": -0.8},
    {"temperature": 0.7, "seed": 5, "repetition_penalty": 0.5, "top_k": 9},
    {"temperature": 0, "presence_penalty": 2.0, "logit_bias": {7: 3.0, 8: 3.0}},
    {"temperature": 0, "repetition_penalty": 2.0, "stop_token_ids": tuple(range(9))},
]


@pytest.mark.parametrize("num_pages", [120, 24])
def test_penalties_count_as_lists_would(
    make: Any, right: Recompute, num_pages: int
) -> None:
    """On the device, with others that come and go, and preempted."""
    engine = make(num_pages=num_pages, max_num_seqs=5)
    requests = [
        ask(
            [3, 3, 9, *range(number)],
            SamplingParams(**{**PENALIZED[number % 7 % 6], "max_tokens": 8 + number}),
        )
        for number in range(12)
    ]
    requests += [ask([number] * 5) for number in range(4)]
    chance = random.Random(0)
    chance.shuffle(requests)
    prompts = {r.request_id: list(r.tokens) for r in requests}
    waiting = list(requests)
    while waiting:
        engine.submit([waiting.pop()])
        engine.step()
    events = finish(engine)
    for request in requests:
        found = tokens_of(events[request.request_id]), request.finish_reason
        assert found == right(prompts[request.request_id], request.params)
    assert (engine.stats().preemptions > 0) == (num_pages == 24)


def test_penalties_leave_the_overlap_on(model: Model) -> None:
    engine = make_engine(model, SMALL, overlap=True)
    engine.submit([ask([1, 2], SamplingParams(**PENALIZED[1], max_tokens=5))])
    flights = []
    while engine.scheduler.requests or engine.flights:
        engine.step()
        flights.append(len(engine.flights))
    assert flights == [1] * 5 + [0]


def test_a_mask_knows_the_last_token_while_the_next_step_is_computed(
    model: Model, right: Recompute
) -> None:
    """The steps overlap as ever: what came lands before the new one is sampled."""
    engine = make_engine(model, SMALL, overlap=True)
    careful = ask([1, 2, 3], bad_sequences=[(-1, -1)])
    other = ask([4, 5], replace(GREEDY, max_tokens=12))
    known, flights = [], []
    start, choose = engine.runner.start_forward, engine.runner.sample

    def watch_start(
        scheduled: Sequence[ScheduledChunk], sampling: Sequence[Request]
    ) -> None:
        flights.append(len(engine.flights))
        start(scheduled, sampling)

    def watch_choose(requests: Sequence[Request]) -> Any:
        known.append(all(UNKNOWN not in request.tokens for request in requests))
        return choose(requests)

    engine.runner.start_forward, engine.runner.sample = watch_start, watch_choose
    engine.submit([careful, other])
    events = finish(engine)
    assert tokens_of(events[careful.request_id]) == right([1, 2, 3], GREEDY)[0]
    assert tokens_of(events[other.request_id]) == right([4, 5], other.params)[0]
    steps = 6
    assert flights == [0] + [1] * 11
    assert known[:steps] == [True] * steps and not any(known[steps + 1 :])


def test_a_step_may_land_several_tokens(model: Model, right: Recompute) -> None:
    """As where a draft was right; what is behind an end is dropped."""
    engine = make_engine(model, SMALL)
    stop = replace(GREEDY, stop_token_ids=(50,), max_tokens=9)
    requests = [ask([1], replace(GREEDY, max_tokens=3)), ask([2], stop), ask([3])]
    script = {
        r.request_id: iter(t)
        for r, t in zip(
            requests,
            ([[7, 8], [9, 10]], [[4], [5, 50, 6]], [[1, 2, 3], [4], [5, 6]]),
            strict=True,
        )
    }
    launch = engine.runner.launch

    def several(scheduled: Sequence[ScheduledChunk]) -> Any:
        output = launch(scheduled)()
        tokens = [next(script[c.request.request_id]) for c in scheduled if c.samples]
        return lambda: output._replace(tokens=tokens)

    engine.runner.launch = several
    # A request of which several tokens are known has their keys and values computed.
    engine.submit(requests)
    engine.step()
    found = {event.request_id: event.tokens for event in drain(engine)}
    assert [list(found[r.request_id]) for r in requests] == [[7, 8], [4], [1, 2, 3]]
    assert engine.stats().generated_tokens == 6
    events = finish(engine)
    first, second, third = (events[r.request_id] for r in requests)
    assert (list(first[-1].tokens), first[-1].finish_reason) == ([9], "length")
    assert (list(second[-1].tokens), second[-1].finish_reason) == ([5, 50], "stop")
    assert [t for e in third for t in e.tokens] == [4, 5, 6]
    assert engine.stats().generated_tokens == 6 + 1 + 2 + 3


def test_logprobs_come_with_their_tokens(make: Any, model: Model) -> None:
    engine = make()
    requests = [ask([5, 6, n], replace(GREEDY, logprobs=n)) for n in (0, 3, 1)] + [
        ask([8])
    ]
    engine.submit(requests)
    events = finish(engine)
    for request in requests:
        rows = model.logits(request.tokens).log_softmax(-1)[request.num_prompt - 1 :]
        for row, event in zip(rows, events[request.request_id], strict=False):
            if request.params.logprobs is None:
                assert event.logprobs is None
                continue
            (entry,) = event.logprobs
            assert [entry.token_id] == list(event.tokens)
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
            assert len(entry.top) == request.params.logprobs


def test_what_the_cache_held_is_told(make: Any) -> None:
    engine = make()
    for cached in (0, 40):
        request = ask(range(41))
        engine.submit([request])
        events = finish(engine)[request.request_id]
        assert {event.cached_tokens for event in events} == {cached}


# Ends


def test_an_abort_while_a_step_is_under_way(make: Any) -> None:
    engine = make(num_pages=40)
    first, second = (ask([5] * 20, replace(GREEDY, max_tokens=9)) for _ in range(2))
    engine.submit([first, second])
    engine.step()
    engine.end(first, "abort")
    engine.end(first, "abort")  # once is enough
    events = finish(engine)
    assert [event.finish_reason for event in events[first.request_id]] == ["abort"]
    assert len(tokens_of(events[second.request_id])) == 9
    assert engine.stats().finished == {"abort": 1, "length": 1}


def test_a_step_in_advance_is_over_once_nobody_is_left(make: Any) -> None:
    """The last request ends at a stop token, which the next step did not know."""
    engine = make()
    every = tuple(range(TINY.vocab_size))
    request = ask([1, 2, 3], replace(GREEDY, stop_token_ids=every))
    engine.start()
    engine.submit([request])
    until(lambda: request.finish_reason and not engine.flights)
    assert request.finish_reason == "stop"
    engine.shutdown(cancel=True)
    assert not engine.thread.is_alive()


def test_a_full_queue_refuses(make: Any) -> None:
    """A call is taken whole or not at all."""
    engine = make(max_num_seqs=1, max_waiting=3)
    engine.submit([ask([number]) for number in range(5)])
    with pytest.raises(QueueFullError, match="5 requests wait already; expected fewer"):
        engine.submit([ask([9], siblings=[ask([9])])])
    assert engine.stats().refused == 2 and engine.stats().waiting == 5
    assert len(finish(engine)) == 5


def test_a_priority_goes_first(make: Any) -> None:
    engine = make(max_num_seqs=1)
    blocker = ask([1])
    engine.submit([blocker])
    engine.step()
    last, middle, first = (ask([2], priority=priority) for priority in (1, 0, -1))
    engine.submit([last])
    engine.submit([middle, first])
    ends = [number for number, events in finish(engine).items() if tokens_of(events)]
    assert ends[-3:] == [first.request_id, middle.request_id, last.request_id]


def test_ten_thousand_prompts_in_one_call(make: Any) -> None:
    engine = make(max_num_seqs=64, max_waiting=10, max_num_batched_tokens=128)
    engine.submit([ask([5], replace(GREEDY, max_tokens=1)) for _ in range(10_001)])
    assert engine.stats().waiting == 10_001
    while engine.stats().waiting > 10_000:
        engine.step()
    with engine.lock:
        for request in list(engine.scheduler.requests.values()):
            engine.scheduler.finish(request, "abort")
    assert engine.scheduler.manager.usage == 0


# Faults


def inject(engine: Engine, fault: Callable[[Sequence[ScheduledChunk]], bool]) -> None:
    """Lets a step fail, its pass already made, if ``fault`` says so of its works."""
    launch = engine.runner.launch

    def failing(scheduled: Sequence[ScheduledChunk]) -> Any:
        flight = launch(scheduled)
        if fault(scheduled):
            raise ZeroDivisionError("injected")
        return flight

    engine.runner.launch = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["pages", "tiny chunks", "tight pages"])
def test_a_request_that_makes_its_steps_fail_harms_no_other(
    make: Any, right: Recompute, name: str
) -> None:
    """The others of its batch get their tokens, and each of them once."""
    engine = make(**CONFIGS[name])
    params = replace(GREEDY, max_tokens=12, logprobs=0)
    requests = [
        ask([n] * 20, params, siblings=[ask([n] * 20, params)]) for n in range(9)
    ]
    bad = {r.request_id for r in (requests[4], *requests[4].siblings)}
    samples = [[r, *r.siblings] for r in requests]
    inject(
        engine,
        lambda scheduled: any(
            w.request.request_id in bad and w.request.num_output == 5 for w in scheduled
        ),
    )
    engine.submit(requests)
    events = finish(engine)
    for number, family in enumerate(samples):
        expected, _ = right([number] * 20, params)
        for request in family:
            found = events[request.request_id]
            if request.request_id not in bad:
                assert tokens_of(found) == expected
                continue
            assert tokens_of(found) == expected[:5]
            assert isinstance(found[-1].error, EngineError)
            assert isinstance(found[-1].error.__cause__, ZeroDivisionError)
            assert "injected" in str(found[-1].error)
    assert engine.stats().finished == {"length": 16, "error": 2}


def test_a_failure_after_the_pass_leaves_no_wrong_pages(make: Any) -> None:
    """Pages of a step that failed hold numbers that no later request may find."""
    engine = make()
    launch = engine.runner.launch

    def spoil(scheduled: Sequence[ScheduledChunk]) -> Any:
        launch(scheduled)
        engine.runner.pool.memory.fill_(math.nan)
        raise ZeroDivisionError("injected")

    engine.runner.launch = spoil
    first, second = (ask(range(40), replace(GREEDY, logprobs=0)) for _ in range(2))
    engine.submit([first])
    assert finish(engine)[first.request_id][-1].finish_reason == "error"
    engine.runner.launch = launch
    engine.submit([second])
    for event in finish(engine)[second.request_id]:
        assert all(math.isfinite(entry.logprob) for entry in event.logprobs or ())


class OutOfMemoryNowAndThen:
    """A model's forward pass that fails at random, now and then for one sequence."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self.forward, self.chance = forward, random.Random(0)

    def __call__(self, batch: Batch, pool: KVPool, previous: Tensor) -> Tensor:
        hidden = self.forward(batch, pool, previous)
        if self.chance.random() < (0.3 if len(batch.lengths) > 1 else 0.02):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return hidden


KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "stop_token_ids": tuple(range(0, 97, 20))},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "seed": 4, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "logit_bias": {5: 100.0}},
]


def test_steps_that_fail_to_start_are_tried_one_by_one(
    make: Any, model: Model, right: Recompute
) -> None:
    """The retries know the tokens of the step that was under way."""
    failing = replace(model)
    failing.forward = OutOfMemoryNowAndThen(model.forward)  # type: ignore
    chance = random.Random(5)
    engine = make(failing, num_pages=60, max_num_seqs=4, max_num_batched_tokens=32)
    requests = []
    for number in range(16):
        prompt = [chance.randrange(97) for _ in range(chance.randint(1, 40))]
        kind = {"seed": number, "max_tokens": 12} | KINDS[number % len(KINDS)]
        requests.append(ask(prompt, SamplingParams(**kind)))
    prompts = {r.request_id: list(r.tokens) for r in requests}
    engine.submit(requests)
    events = finish(engine)
    failed = 0
    for request in requests:
        expected, reason = right(prompts[request.request_id], request.params)
        found = events[request.request_id]
        if found[-1].finish_reason == "error":
            failed += 1
            tokens = tokens_of(found)
            assert tokens == expected[: len(tokens)]
            assert isinstance(found[-1].error.__cause__, torch.OutOfMemoryError)
        else:
            assert (tokens_of(found), found[-1].finish_reason) == (expected, reason)
    assert 0 < failed < len(requests) / 2


# What others may ask


def test_snapshots_agree_with_themselves_under_load(make: Any) -> None:
    """Plain data, between two steps, while requests come and go."""
    engine = make(num_pages=60, max_num_seqs=5)
    engine.start()
    params = replace(GREEDY, max_tokens=20)
    shots = []
    for number in range(14):
        others = [ask([number] * 9, params) for _ in range(number % 2)]
        request = ask([number] * (9 + number % 5), params, siblings=others)
        engine.submit([request])
        if number % 4 == 3:
            engine.abort(request.request_id)
        shots.append(engine.snapshot())
    while shots[-1]["running"] or shots[-1]["waiting"]:
        time.sleep(0.002)
        shots.append(engine.snapshot())
    engine.shutdown(cancel=False)
    assert engine.scheduler.manager.usage == 0
    assert any(shot["waiting"] for shot in shots)
    for shot in shots:
        pages, running = shot["pages"], shot["running"]
        assert set(pages["tables"]) == {entry["request_id"] for entry in running}
        held = [0] * pages["num_pages"]
        for tables in pages["tables"].values():
            for page in itertools.chain(*tables):
                if page >= 0:
                    held[page] += 1
        assert held == pages["references"]
        assert pages["free"] + len(pages["cached"]) == held.count(0)
        for entry in running:
            assert entry["computed"] <= entry["prompt"] + entry["output"]
            rows = len(pages["tables"][entry["request_id"]][0]) * pages["page_size"]
            assert rows >= entry["computed"]


def test_nobody_waits_for_a_step(model: Model) -> None:
    """While the engine waits for the device, others may submit and ask."""
    engine = make_engine(model, SMALL)
    launch = engine.runner.launch
    entered, release = threading.Event(), threading.Event()

    def slow(scheduled: Sequence[ScheduledChunk]) -> Any:
        flight = launch(scheduled)

        def wait() -> Any:
            entered.set()
            assert release.wait(PATIENCE)
            return flight()

        return wait

    engine.runner.launch = slow
    engine.start()
    engine.submit([ask([1])])
    assert entered.wait(PATIENCE)
    asked = threading.Event()

    def others() -> None:
        engine.submit([ask([2])])
        engine.stats()
        engine.snapshot()
        asked.set()

    threading.Thread(target=others, daemon=True).start()
    blocked = not asked.wait(PATIENCE / 2)
    release.set()
    assert not blocked
    engine.shutdown(cancel=True)


def test_stats_add_up(make: Any) -> None:
    engine = make()
    assert engine.stats().ttft is None and engine.stats().tokens_per_second == 0
    params = replace(GREEDY, max_tokens=10)
    engine.submit([ask(range(41), params)])
    finish(engine)
    assert engine.stats().cache_hit_rate == 0
    engine.submit([ask(range(41), params)])
    finish(engine)
    stats = engine.stats()
    assert stats.cache_hit_rate == pytest.approx(40 / 82)
    assert stats.finished == {"length": 2} and stats.generated_tokens == 20
    assert stats.steps == 3 + 9 + 1 + 9
    assert stats.ttft and stats.itl and stats.tokens_per_second > 0
    assert stats.ttft_p99 >= stats.ttft and stats.itl_p99 >= stats.itl


# Delayed launch: the next step is scheduled late in a long one


def played(timer: LaunchTimer, steps: Sequence[float], host: float = 0.001) -> float:
    """Steps of decodes, one after the other; seconds that the device is idle."""
    now = end = idle = 0.0
    for number, seconds in enumerate(steps):
        now += timer.remaining(now) + host
        before, end = end, max(now, end) + seconds
        if number > 0:
            idle += max(0.0, now - before)
            waited, late = max(0.0, before - now), now >= before
            now = max(now, before)
            timer.collected(now, waited, late, decodes=True)
    return idle


def test_a_delay_leaves_the_host_its_time_and_the_slack() -> None:
    timer = LaunchTimer()
    assert played(timer, [0.01] * 200) == 0
    assert timer.delay == pytest.approx(0.01 - SLACK - 0.001, abs=1e-6)
    # A step that is late costs half of it at once, one with a prompt nothing.
    before = timer.delay
    timer.collected(1.0, 0.0, late=True, decodes=True)
    assert timer.delay == before / 2 == pytest.approx(timer.remaining(1.0))
    timer.collected(2.0, 0.5, late=False, decodes=False)
    assert timer.delay == before / 2 and timer.remaining(2.0) == 0
    timer.collected(3.0, 0.5, late=False, decodes=True)  # the one with the prompt
    assert timer.delay == before / 2 == pytest.approx(timer.remaining(3.0))


def test_a_delay_ends_soon_where_steps_become_short() -> None:
    """And a step as short as the slack never has any."""
    timer = LaunchTimer()
    played(timer, [0.01] * 100)
    assert timer.delay > 0.006
    assert played(timer, [0.002] * 50) < 0.02
    assert timer.delay < 1e-4
    short = LaunchTimer()
    assert played(short, [0.0025] * 100) == 0 and short.delay <= 0


def mostly(
    decodes: float, prompts: float = 0.02
) -> Callable[[Sequence[ScheduledChunk]], float]:
    """Seconds of a step: some of decodes, others if there are prompts in it."""
    return lambda scheduled: (
        prompts if any(w.length > 1 for w in scheduled) else decodes
    )


def first_tokens(patch: pytest.MonkeyPatch, clockwork: Clockwork) -> float:
    """Mean seconds to the first token of prompts that come while others decode."""
    chance = random.Random(0)
    times = [1 + 0.2 * n + chance.uniform(0, 0.1) for n in range(60)]
    found = clockwork.run([(0, 8, 1400)] * 8 + [(when, 100, 2) for when in times])
    return mean(found[8 + n][0].time - when for n, when in enumerate(times))


def test_a_prompt_that_comes_in_a_long_step_is_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delaying = Clockwork(monkeypatch, mostly(0.01), lambda _: 0.001)
    late = first_tokens(monkeypatch, delaying)
    # Half a step is left, and the prompt's takes 20 ms; it may come in the last 3 ms.
    assert late == pytest.approx(0.005 + 0.02 + 0.3 * 0.01, abs=0.001)
    assert delaying.idle < 1e-9
    monkeypatch.setattr(LaunchTimer, "collected", lambda *_, **__: None)
    eager = Clockwork(monkeypatch, mostly(0.01), lambda _: 0.001)
    assert first_tokens(monkeypatch, eager) > late + 0.005
    assert len(eager.spans) == len(delaying.spans) and eager.idle < 1e-9


@pytest.mark.parametrize("decodes", [0.001, 0.002, 0.003])
def test_short_steps_leave_no_time_for_a_delay(
    monkeypatch: pytest.MonkeyPatch, decodes: float
) -> None:
    """As much is done in the time as if no launch were delayed."""
    ends = []
    for _ in range(2):
        clockwork = Clockwork(monkeypatch, mostly(decodes), lambda _: 0.0015)
        clockwork.run([(0, 8, 300)] * 4)
        assert clockwork.engine.timer.delay <= 0
        ends.append(clockwork.now)
        monkeypatch.setattr(LaunchTimer, "collected", lambda *_, **__: None)
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)


def test_steps_that_become_short_are_waited_for_only_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 20 ms while 32 decode, and of 2 ms once a single one is left."""

    def seconds(scheduled: Sequence[ScheduledChunk]) -> float:
        return 0.02 if len(scheduled) > 1 else 0.002

    clockwork = Clockwork(monkeypatch, seconds, lambda _: 0.001)
    clockwork.run([(0, 8, 100)] * 31 + [(0, 8, 300)])
    assert 0.01 < clockwork.idle < 0.04
    gaps = [b[0] - a[1] for a, b in itertools.pairwise(clockwork.spans)]
    assert sum(gap > 1e-9 for gap in gaps) < 10


def test_a_slow_host_delays_less_and_not_longer_and_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 10 ms a step it needs 7, and then 12."""
    for host, idle in ((0.007, 0.0), (0.012, 0.002)):
        clockwork = Clockwork(monkeypatch, mostly(0.01), lambda _, h=host: h)
        clockwork.run([(0, 8, 500)] * 4)
        assert clockwork.idle / 500 == pytest.approx(idle, abs=1e-4)
        assert clockwork.engine.timer.delay < 0.0011


def test_who_needs_the_last_token_is_not_delayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clockwork = Clockwork(monkeypatch, mostly(0.01), lambda _: 0.001, settles=True)
    clockwork.run([(0, 8, 100)] * 4)
    assert clockwork.engine.timer.delay == 0
    assert clockwork.engine.timer.remaining(clockwork.now) == 0


def test_an_abort_is_carried_out_in_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    clockwork = Clockwork(monkeypatch, mostly(0.05), lambda _: 0.001)
    found = clockwork.run([(0, 8, 90)] * 2, aborts=[(3.001, 0)])
    assert [len(found[n]) for n in (0, 1)] == [61, 90]
    assert found[0][-1].finish_reason == "abort"
    ended = [len(scheduled) for scheduled in clockwork.scheduled].index(1)
    assert clockwork.spans[ended][0] < 3.001 + 0.05
