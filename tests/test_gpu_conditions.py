"""Bad conditions on a real GPU: each is survived, and said clearly.

test_conditions pretends the same on any machine.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from cases import random_model
from client import Client, make_engine, random_prompt

from simplellm import LLM, EngineConfig
from simplellm.engine.engine import Engine
from simplellm.engine.graphs import bucket_sizes
from simplellm.model.kernels import triton_ops
from simplellm.model.model import Model

pytestmark = pytest.mark.gpu

GB = 10**9
SMALL: dict[str, Any] = {"cache_bytes": GB // 2, "max_model_len": 16_384}
SIZES = bucket_sizes(EngineConfig().resolved("cuda").max_num_seqs)  # with a graph each
EAGER: dict[str, Any] = SMALL | {"cuda_graphs": False}


def said(caplog: pytest.LogCaptureFixture) -> str:
    """The only warning since the last time."""
    (line,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    caplog.clear()
    return line


@contextmanager
def limited(more: int) -> Iterator[None]:
    """PyTorch gets at most ``more`` bytes beyond those that it holds."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + more) / total
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def two_layers() -> Model:
    """gpt-oss-20b's widths and vocabulary, with random weights."""
    return random_model("gpt-oss-20b", 2)


def serve(engine: Engine) -> list[list[int]]:
    """The tokens of eight requests, a batch that has a graph if any has."""
    client = Client(engine)
    numbers = [client.ask(random_prompt(50 + 3 * n, n), 12) for n in range(8)]
    client.finish()
    assert engine.stats().cache_usage == 0, "pages are lost"
    return [client.tokens(number) for number in numbers]


def test_full_before_the_load() -> None:
    """Somebody else has nearly all of the memory."""
    filler = torch.empty(
        torch.cuda.mem_get_info()[0] - 8 * GB, dtype=torch.uint8, device="cuda"
    )
    start, held = time.perf_counter(), torch.cuda.memory_allocated()
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"13\.8 GB for its weights"):
            LLM("gpt-oss-20b", random_weights=True)
    finally:
        del filler
    assert time.perf_counter() - start < 5, "it took long to refuse"
    assert torch.cuda.memory_allocated() <= held, "something was loaded"


def test_full_during_the_load() -> None:
    """More seems free than can be had."""
    before = torch.cuda.memory_allocated()
    with (
        limited(6 * GB),
        pytest.raises(torch.OutOfMemoryError, match="not enough memory") as error,
    ):
        LLM("gpt-oss-20b", random_weights=True)
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    del error  # its traceback holds memory
    gc.collect()
    held = torch.cuda.memory_allocated() - before
    assert held < GB // 10, f"{held} bytes are still held"


def test_full_during_the_capture(caplog: pytest.LogCaptureFixture) -> None:
    """There is room for the graphs of small batches only."""
    model = two_layers()
    expected = serve(make_engine(model, **EAGER))
    gc.collect()
    for megabytes in (80, 60, 40, 30, 20):  # until some graphs do not fit
        engine = make_engine(model, **EAGER)
        with limited(megabytes * 10**6):
            engine.runner.capture(SIZES)
        sizes = [graph.size for graph in engine.runner.decode_graphs]
        if len(sizes) < len(SIZES):
            break
    assert 0 < len(sizes) < len(SIZES), f"graphs for {sizes}"
    found = serve(engine)
    if 8 in sizes:  # else padding may change the order of summation
        assert found == expected, "other tokens with these graphs"
    assert f"for {len(sizes)} of {len(SIZES)} sizes" in said(caplog)


def test_no_capture(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing can be captured: each step waits for the GPU, which no graph can hold."""
    model = two_layers()
    expected = serve(make_engine(model, **EAGER))
    embed = model.ops.embed

    def waiting(tokens: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        tokens.tolist()
        return embed(tokens, *rest)

    model.ops = replace(model.ops, embed=waiting)
    engine = make_engine(model, **SMALL)
    assert not engine.runner.decode_graphs, "captured, though the host waits"
    assert serve(engine) == expected, "other tokens without graphs"
    assert "CUDA graphs for 0 of" in said(caplog)


def test_full_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt needs more than there is, while six others are answered."""
    # It is computed in one step.
    monkeypatch.setattr("simplellm.engine.scheduler.PREFILL_BESIDE_DECODES", 8192)
    engine = make_engine(two_layers(), **SMALL, max_num_seqs=16)
    serve(engine)  # what a step of small batches needs is there
    client = Client(engine)
    counts = [40] * 6 + [20]
    short = [client.ask(random_prompt(60 + n, n), 40) for n in range(6)]
    for _ in range(5):
        client.step()
    prompt = random_prompt(8000, 99)
    with limited(100_000_000):
        long = client.ask(prompt, 3)
        for _ in range(10):
            client.step()
        events = client.events[long]
        error = events[-1].error if events else None
        assert error is not None, "the long one went on"
        short += [client.ask(random_prompt(30, 50), 20)]
        client.finish()
    for number, count in zip(short, counts, strict=True):
        found = len(client.tokens(number))
        assert found == count, f"{found} tokens of {count}"
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    again = client.ask(prompt, 3)
    client.finish()
    assert len(client.tokens(again)) == 3, "and now there is room"


@triton.jit
def broken_kernel(x_ptr):
    tl.static_assert(False, "as this case wants it")


def broken_norm(residual: torch.Tensor, *rest: Any) -> None:
    """A launcher of a kernel that does not compile."""
    broken_kernel[(1,)](residual)


def answer(llm: LLM) -> str:
    question = [{"role": "user", "content": "What is 47 + 85?"}]
    return llm.chat(question, temperature=0).content or ""


def test_broken_compiler(caplog: pytest.LogCaptureFixture) -> None:
    """One of the kernels does not compile."""
    with (
        mock.patch.object(triton_ops, "add_norm", broken_norm),
        LLM(config=EngineConfig(**SMALL)) as llm,
    ):
        sizes = [graph.size for graph in llm.engine_core.runner.decode_graphs]
        assert sizes == SIZES, f"graphs for {sizes} of {SIZES}"
        assert "132" in answer(llm), "47 + 85 is not 132"
    assert "add_norm" in said(caplog)


def test_float32() -> None:
    """Numbers that the kernels do not compute with."""
    with LLM(config=EngineConfig(**SMALL), dtype=torch.float32) as llm:
        assert "dtype is torch.float32" in llm.backend_reason
        assert "132" in answer(llm), "47 + 85 is not 132"
