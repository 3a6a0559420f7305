"""Steps on the device: graphs that are replayed, padding, tables of any width.

Without a GPU nothing can be captured; a graph is then a function that computes again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from recompute import Recompute
from stepping import drain, make_engine

from simplellm import EngineConfig, SamplingParams, load_model
from simplellm.base.request import Request
from simplellm.engine import graphs
from simplellm.engine.engine import Engine
from simplellm.engine.graphs import CaptureError, CaptureShape, bucket_sizes
from simplellm.engine.warmup import dummy_run
from simplellm.model.model import Model
from simplellm.model.ops import PLAIN

GREEDY = SamplingParams(max_tokens=6, temperature=0)
PROMPTS = [[number + 1] * (3 + 5 * number) for number in range(9)]
CONFIG = EngineConfig(max_num_seqs=8, num_pages=200)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    return load_model(folder, device="cpu")


@pytest.fixture(scope="module")
def right(model: Model) -> list[list[int]]:
    recompute = Recompute(model)
    return [recompute(prompt, GREEDY)[0] for prompt in PROMPTS]


def answers(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy tokens, of requests that begin together."""
    found: list[list[int]] = [[] for _ in prompts]
    engine.submit(
        [
            Request(tokens=list(prompt), max_tokens=6, params=GREEDY, request_id=number)
            for number, prompt in enumerate(prompts)
        ]
    )
    while engine.scheduler.requests or engine.flights:
        engine.step()
    for event in drain(engine):
        found[event.request_id] += event.tokens
    return found


class Tape:
    """In place of `graphs.capture_graph`: it computes again and replays no graph."""

    def __init__(self, room: int = 10**9, error: type[Exception] = CaptureError):
        self.room, self.error = room, error
        self.replays: list[CaptureShape] = []

    def __call__(self, run: partial[None], pool: Any = None) -> SimpleNamespace:
        batch, shape = run.args
        assert shape.decodes == batch.groups[0].decodes
        assert shape.tokens == len(batch.tokens)
        if shape.tokens > self.room:
            raise self.error("no more room\nand details")

        def replay() -> None:
            self.replays.append(shape)
            for group in batch.groups:  # what a graph would not have on the host
                vars(group).pop("gather_plans", None)
                vars(group).pop("by_token", None)
            run()

        return SimpleNamespace(replay=replay, pool=lambda: "a pool")


def capture(
    model: Model, overlap: bool = False, mixed: Sequence[int] = (), **options: Any
) -> Engine:
    """An engine with graphs; its tables are of one width, as on a GPU."""
    engine = make_engine(model, CONFIG.changed(options), overlap=overlap)
    engine.runner._pages = lambda scheduled: engine.runner.table_width  # type: ignore
    engine.runner.capture(bucket_sizes(len(engine.runner.sampled_tokens)), mixed)
    return engine


@pytest.mark.parametrize("overlap", [False, True])
def test_padding_rows_change_no_token(
    model: Model,
    right: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    overlap: bool,
) -> None:
    """Batches between the captured sizes give the tokens of the captured ones."""
    tape = Tape()
    monkeypatch.setattr(graphs, "capture_graph", tape)
    engine = capture(model, overlap)
    assert [graph.size for graph in engine.runner.decode_graphs] == [1, 2, 4, 8]
    for batch, bucket in ((8, 8), (1, 1), (2, 2), (3, 4), (5, 8), (7, 8)):
        tape.replays.clear()
        assert answers(engine, PROMPTS[:batch]) == right[:batch]
        assert set(tape.replays) == {CaptureShape(bucket, bucket)}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [2048, 7])
def test_captured_steps_with_prompts_change_no_token(
    model: Model,
    right: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    overlap: bool,
    chunk: int,
) -> None:
    """Prompts alone and beside decodes, whole and in parts, in padded steps."""
    tape = Tape()
    monkeypatch.setattr(graphs, "capture_graph", tape)
    sizes = (16, 64, 256)
    engine = capture(model, overlap, sizes, prefill_chunk=chunk, max_num_seqs=6)
    assert [graph.shape for graph in engine.runner.mixed_graphs] == [
        CaptureShape(16, 6, 4), CaptureShape(64, 6, 16), CaptureShape(256, 6, 64)
    ]  # fmt: skip
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[4:7]):
        tape.replays.clear()
        assert (
            answers(engine, prompts)
            == right[PROMPTS.index(prompts[0]) :][: len(prompts)]
        )
        assert any(shape.chunks for shape in tape.replays)


def test_a_step_takes_the_smallest_graph_that_has_room(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "capture_graph", Tape())
    runner = capture(model, mixed=(16, 64), max_num_seqs=12).runner
    small, large = (graph.shape for graph in runner.mixed_graphs)
    assert (small, large) == (CaptureShape(16, 8, 4), CaptureShape(64, 12, 16))
    for real, shape in (
        (CaptureShape(16, 0, 1), small),
        (CaptureShape(17, 0, 1), large),
        (CaptureShape(12, 8, 2), small),
        (CaptureShape(13, 9, 2), large),  # more decodes than the small one has room for
        (CaptureShape(10, 0, 5), large),  # more chunks
        (CaptureShape(40, 0, 17), None),
        (CaptureShape(65, 0, 1), None),
        (CaptureShape(9, 9, 0), None),  # parts of prompts of one token each
    ):
        graph = runner._mixed(real)
        assert (graph and graph.shape) == shape


def test_prompts_in_captured_steps_are_scored(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "capture_graph", Tape())
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=1)
    found = []
    for mixed in ((), (16, 64, 256)):
        engine = capture(model, mixed=mixed, prefill_chunk=9)
        engine.submit(
            [
                Request(list(prompt), 3, params, request_id=number)
                for number, prompt in enumerate(PROMPTS[:4])
            ]
        )
        while engine.scheduler.requests:
            engine.step()
        scored = {
            event.request_id: [
                entry.logprob for entry in event.prompt_logprobs if entry
            ]
            for event in drain(engine)
            if event.prompt_logprobs is not None
        }
        assert [len(scored[n]) for n in range(4)] == [len(p) - 1 for p in PROMPTS[:4]]
        found.append([score for n in range(4) for score in scored[n]])
    assert found[1] == pytest.approx(found[0], abs=1e-4)


@pytest.mark.parametrize("error", [CaptureError, torch.OutOfMemoryError])
@pytest.mark.parametrize("room", [0, 3])
def test_steps_without_a_graph_run_when_capturing_fails(
    model: Model,
    right: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
    room: int,
) -> None:
    monkeypatch.setattr(graphs, "capture_graph", Tape(room, error))
    engine = capture(model)
    sizes = [graph.size for graph in engine.runner.decode_graphs]
    # A driver that fails once will fail again; less memory may be enough.
    assert sizes == ([1, 2] if room and error is torch.OutOfMemoryError else [])
    (line,) = caplog.messages
    assert f"for {len(sizes)} of 4 sizes" in line and "cache_bytes" in line
    assert "no more room" in line and "details" not in line
    assert answers(engine, PROMPTS) == right


def test_a_rehearsal_changes_nothing(model: Model, right: list[list[int]]) -> None:
    """It is a step of nothing but padding, by the operations it is given."""
    engine = make_engine(model, CONFIG)
    engine.runner.pool.memory.fill_(7.0)
    seen: list[int] = []

    def project(*args: Any) -> Any:
        seen.append(len(args[0]))
        return PLAIN.project(*args)

    ops = type(PLAIN)("counting", project=project)
    for shape in (
        CaptureShape(1, 1),
        CaptureShape(8, 8),
        CaptureShape(64, 0, 1),
        CaptureShape(32, 8, 8),
    ):
        seen.clear()
        dummy_run(engine.runner, shape, ops)
        assert set(seen) == {shape.tokens}
    assert engine.runner.pool.memory.eq(7.0).all()
    assert answers(engine, PROMPTS[:3]) == right[:3]


@pytest.mark.parametrize("most", [1, 2, 7, 64, 200, 256, 300, 1000])
def test_bucket_sizes_reach_the_largest_batch(most: int) -> None:
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most


def test_parameters_are_read_again_when_a_batch_changes(model: Model) -> None:
    """Columns are kept while a batch keeps its requests, and only then."""
    engine = make_engine(model, CONFIG)
    bias: Callable[[int], SamplingParams] = lambda token: SamplingParams(  # noqa: E731
        temperature=0, max_tokens=4, logit_bias={token: 100.0}
    )
    for token in (5, 6):
        requests = [
            Request([1, 2], 4, bias(token + n), request_id=10 * token + n)
            for n in (0, 1)
        ]
        engine.submit(requests)
        while engine.scheduler.requests:
            engine.step()
        assert [r.tokens[2:] for r in requests] == [[token] * 4, [token + 1] * 4]
    assert TINY.vocab_size > 7
