"""The engine whose steps overlap, with a forward pass of plain PyTorch.

Without a GPU nothing is captured and nothing truly overlaps, but steps are scheduled
before the tokens of the ones before them are known, which is what can go wrong.
"""

import random
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from simplellm import graphs
from simplellm.engine import Engine, EngineConfig, Event, Submission, Ticket
from simplellm.graphs import (
    CaptureError,
    GPUConfig,
    GraphEngine,
    Group,
    Step,
    bucket_sizes,
)
from simplellm.kernels.attention import paged_prefill_torch
from simplellm.model import Transformer, load_model
from simplellm.paged import PagedCache
from simplellm.sampler import Columns, SamplingParams, gumbel_noise


class Pages:
    """A cache as the model wants it, over the arrays of a step."""

    def __init__(self, step: Step, cache: PagedCache) -> None:
        self.step, self.cache = step, cache

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        window: int | None,
    ) -> Tensor:
        group, place = self.cache.places[layer]
        where = self.step.groups[group]
        keys, values = self.cache.k[place], self.cache.v[place]
        real = where.slots >= 0
        for pages, new in ((keys, k), (values, v)):
            pages.flatten(0, 1)[where.slots[real].long()] = new[real]
        return paged_prefill_torch(
            q,
            keys,
            values,
            where.tables,
            where.offsets,
            self.step.lengths,
            self.step.queries,
            sinks,
            window,
        )


class PlainForward:
    def __init__(
        self, model: Transformer, cache: PagedCache, max_num_seqs: int
    ) -> None:
        self.model, self.cache = model, cache
        self.vocab_size = model.config.vocab_size

    def compile(self, steps: Iterable[Callable[[], object]]) -> None:
        for step in steps:
            step()

    def __call__(self, step: Step, previous: Tensor) -> Tensor:
        unseen = previous[(-1 - step.tokens).clamp(min=0)]
        tokens = torch.where(step.tokens < 0, unseen, step.tokens)
        return self.model(tokens.long(), step.positions, Pages(step, self.cache))

    def head(self, hidden: Tensor, logits: Tensor) -> Tensor:
        logits.copy_(self.model.lm_head(hidden))
        return logits.argmax(-1).int()

    def draw(
        self, logits: Tensor, best: Tensor, columns: Columns, steps: Tensor
    ) -> Tensor:
        scores = logits - logits.gather(1, best.long()[:, None])
        scores = scores / columns.temperature
        noise = gumbel_noise(columns.seeds, steps, self.vocab_size)
        drawn = (scores + noise).argmax(-1)
        return torch.where(columns.temperature[:, 0] > 0, drawn.int(), best)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_model(device="cpu")


def make(model: Transformer, **options: Any) -> GraphEngine:
    config = GPUConfig(**{"cuda_graphs": False, "page_size": 16} | options)
    return GraphEngine(model, config, PlainForward)


def submit(
    engine: Engine, prompt: list[int], params: SamplingParams, n: int = 1
) -> list[tuple[Ticket, list[Event]]]:
    group = []
    for sample in range(n):
        events: list[Event] = []
        own = params if not sample else SamplingParams(**vars(params) | {"seed": 77})
        request = Submission(prompt, own, frozenset(own.stop_token_ids), own.max_tokens)
        group.append((Ticket(request, events.append), events))
    engine.submit([[ticket for ticket, _ in group]])
    return group


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


KINDS: list[dict[str, Any]] = [
    dict(temperature=0),
    dict(temperature=0, stop_token_ids=tuple(range(0, 1000, 20))),
    dict(temperature=0.8, seed=3),
    dict(temperature=1.0, seed=4, top_p=0.9),
    dict(temperature=0.7, seed=5, repetition_penalty=1.3, frequency_penalty=0.2),
    dict(temperature=0, logprobs=2),
    dict(temperature=0, logit_bias={5: 100.0}),
]


@pytest.mark.parametrize("seed", range(6))
def test_overlapping_steps_give_the_same_tokens(model: Transformer, seed: int) -> None:
    chance = random.Random(seed)
    sizes = dict(
        max_num_seqs=chance.choice([3, 8]),
        max_num_batched_tokens=chance.choice([20, 64]),
        prefill_chunk=chance.choice([5, 33]),
        num_pages=chance.choice([40, 200]),
        page_size=chance.choice([4, 16]),
    )
    engines = [make(model, **sizes), Engine(model, EngineConfig(**sizes))]
    asked = []
    for number in range(12):
        prompt = [chance.randrange(900) for _ in range(chance.randint(1, 60))]
        kind = chance.choice(KINDS) | {"max_tokens": chance.randint(1, 24)}
        kind.setdefault("seed", number)
        n = chance.choice([1, 1, 3])
        when = chance.randint(0, 20)
        asked.append((when, prompt, SamplingParams(**kind), n))
    found = []
    for engine in engines:
        answers: dict[int, list] = {}
        steps = 0
        while len(answers) < len(asked) or engine.scheduler.jobs or engine.flights:
            for number, (when, prompt, params, n) in enumerate(asked):
                if when <= steps and number not in answers:
                    answers[number] = submit(engine, prompt, params, n)
            if engine.scheduler.jobs or engine.flights:
                engine.step()
                engine.scheduler.manager.check_integrity()
            steps += 1
        assert engine.scheduler.manager.usage == 0
        found.append(
            [
                [
                    (tokens_of(events), events[-1].finish_reason)
                    for _, events in answers[number]
                ]
                for number in range(len(asked))
            ]
        )
    assert found[0] == found[1]


def test_a_step_is_scheduled_before_the_tokens_of_the_last_one_are_read(
    model: Transformer,
) -> None:
    engine = make(model)
    params = SamplingParams(max_tokens=3, temperature=0)
    ((_, events),) = submit(engine, [1, 2, 3], params)
    engine.step()
    assert len(engine.flights) == 1 and not events
    engine.step()
    assert len(engine.flights) == 1 and len(events) == 1
    engine.step()
    engine.step()
    assert not engine.flights and len(events) == 3


def test_without_overlap_each_step_is_read_at_once(model: Transformer) -> None:
    engine = make(model, overlap=False)
    params = SamplingParams(max_tokens=3, temperature=0)
    ((_, events),) = submit(engine, [1, 2, 3], params)
    engine.step()
    assert not engine.flights and len(events) == 1


GREEDY = SamplingParams(max_tokens=6, temperature=0)
PROMPTS = [[number + 1] * (3 + 5 * number) for number in range(9)]


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    asked = [submit(engine, prompt, GREEDY)[0][1] for prompt in prompts]
    while engine.scheduler.jobs or engine.flights:
        engine.step()
    return [tokens_of(events) for events in asked]


class Tape:
    """Stands for `graphs.record`: it computes again instead of replaying a graph."""

    def __init__(self, room: int = 10**9, error: type[Exception] = CaptureError):
        self.room, self.error = room, error
        self.replays: list[int] = []  # batch sizes

    def __call__(self, run: partial[None], pool: Any = None) -> SimpleNamespace:
        (step,) = run.args
        if step.decodes > self.room:
            raise self.error("no more room\nand details")

        def replay() -> None:
            self.replays.append(step.decodes)
            run()

        return SimpleNamespace(replay=replay, pool=lambda: "a pool")


def test_padding_rows_change_no_token(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches between the captured sizes give the tokens of the captured ones."""
    tape = Tape()
    monkeypatch.setattr(graphs, "record", tape)
    engine = make(model, cuda_graphs=True, max_num_seqs=8, num_pages=200)
    assert [graph.size for graph in engine.runner.captured] == [1, 2, 4, 8]
    expected = answers(engine, PROMPTS[:8])
    assert set(tape.replays) == {8}
    for batch, bucket in ((1, 1), (2, 2), (3, 4), (5, 8), (7, 8)):
        tape.replays.clear()
        assert answers(engine, PROMPTS[:batch]) == expected[:batch]
        assert set(tape.replays) == {bucket}


class Failing(PlainForward):
    """Runs out of memory at random, now and then even for a single sequence."""

    def __init__(
        self, model: Transformer, cache: PagedCache, max_num_seqs: int
    ) -> None:
        super().__init__(model, cache, max_num_seqs)
        self.chance = random.Random(0)
        self.activations: list[weakref.ref[Tensor]] = []

    def __call__(self, step: Step, previous: Tensor) -> Tensor:
        assert not [kept for kept in self.activations if kept() is not None]
        hidden = super().__call__(step, previous)
        if self.chance.random() < (0.3 if len(step.lengths) > 1 else 0.02):
            self.activations.append(weakref.ref(hidden))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return hidden


def test_a_step_that_fails_to_start_while_another_is_under_way(
    model: Transformer,
) -> None:
    """Its retries know the tokens of the one under way, and hold none of its memory."""
    chance = random.Random(5)
    sizes = dict(max_num_seqs=4, max_num_batched_tokens=32, prefill_chunk=16)
    config = GPUConfig(cuda_graphs=False, page_size=4, num_pages=60, **sizes)
    asked = [
        (
            [chance.randrange(900) for _ in range(chance.randint(1, 40))],
            SamplingParams(**KINDS[i % len(KINDS)] | {"seed": i, "max_tokens": 20}),
        )
        for i in range(24)
    ]
    failing = GraphEngine(model, config, Failing)
    found = []
    for engine in (failing, Engine(model, EngineConfig(**sizes))):
        groups = [submit(engine, *request)[0] for request in asked]
        while engine.scheduler.jobs or engine.flights:
            engine.step()
            engine.scheduler.manager.check_integrity()
        assert engine.scheduler.manager.usage == 0
        found.append([events for _, events in groups])
    failed = 0
    for events, expected in zip(*found, strict=True):
        tokens = tokens_of(events)
        assert tokens == tokens_of(expected)[: len(tokens)]
        if events[-1].finish_reason == "error":
            failed += 1
            assert isinstance(events[-1].error.__cause__, torch.OutOfMemoryError)
        else:
            assert len(tokens) == len(tokens_of(expected))
    assert 0 < failed < len(asked) / 2


def test_an_abort_while_a_step_is_under_way(model: Transformer) -> None:
    engine = make(model, num_pages=40)
    first, second = (
        submit(engine, [5] * 20, SamplingParams(max_tokens=9, temperature=0))[0]
        for _ in range(2)
    )
    engine.step()
    engine.end(first[0].job, "abort")
    while engine.scheduler.jobs or engine.flights:
        engine.step()
    assert first[1][-1].finish_reason == "abort" and len(first[1]) == 1
    assert len(second[1]) == 9
    assert engine.scheduler.manager.usage == 0


def test_the_arrays_of_a_step_do_not_overlap() -> None:
    flat = torch.arange(Step.size(5, 3, 4), dtype=torch.int32)
    step = Step.of(flat, 5, 3, 4, 1)
    parts = [step.tokens, step.positions, step.lengths, step.queries, step.samples]
    for group in step.groups:
        assert isinstance(group, Group)
        parts += [group.slots, group.tables, group.offsets]
    every = torch.cat([part.flatten() for part in parts])
    assert sorted(every.tolist()) == flat.tolist()
    assert step.groups[1].tables.shape == (3, 4) and len(step.queries) == 4


@pytest.mark.parametrize("most", [1, 2, 7, 64, 200, 256, 300, 1000])
def test_bucket_sizes_reach_the_largest_batch(most: int) -> None:
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most


def test_a_cache_without_pages_is_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match="cache is 'slot'; expected 'paged'"):
        make(model, cache="slot")


@pytest.mark.parametrize("name", ["cuda_graphs", "overlap", "batch_invariant"])
def test_a_switch_that_is_no_bool_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is 1; expected True or False"):
        GPUConfig(**{name: 1})  # type: ignore[arg-type]


def test_a_step_in_advance_is_over_once_nobody_is_left(model: Transformer) -> None:
    """The last request ends at a stop token, which the next step did not know."""
    engine = make(model)
    params = SamplingParams(
        temperature=0,
        max_tokens=9,
        stop_token_ids=tuple(range(model.config.vocab_size)),
    )
    engine.start()
    [(_, events)] = submit(engine, [1, 2, 3], params)
    end = time.monotonic() + 20
    while (not events or engine.flights) and time.monotonic() < end:
        time.sleep(0.01)
    assert events[-1].finish_reason == "stop"
    assert not engine.flights
    engine.shutdown(stop=True)


def test_a_step_that_no_launch_has_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="expected less than 65,535 together"):
        GPUConfig(max_num_batched_tokens=2**16 - 2, max_num_seqs=1)
    GPUConfig(max_num_batched_tokens=2**16 - 3, max_num_seqs=1)
