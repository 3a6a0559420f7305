"""Provoke bad conditions on a GPU, and see that each is survived and said clearly.

    python tools/gpu/conditions.py

Every case prints what was said. Ends with 1 if any of them went otherwise than it
should. `tests/test_conditions.py` pretends the same on any machine.
"""

import gc
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[2]))

from accuracy import build

from simplellm import LLM, GPUConfig, SamplingParams
from simplellm.config import MODELS
from simplellm.engine import Event, Submission, Ticket
from simplellm.graphs import GraphEngine, bucket_sizes
from simplellm.kernels import forward
from simplellm.kernels.forward import FUSED, Fused
from simplellm.model import Transformer
from simplellm.paged import PagedCache

GB = 10**9
SMALL = GPUConfig(cache_bytes=GB // 2, max_model_len=16_384)
SIZES = bucket_sizes(SMALL.max_num_seqs)  # that get a graph each
SAID: list[str] = []


class Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        SAID.append(record.getMessage())


def said() -> str:
    """The only thing that was said since the last time."""
    lines = SAID.copy()
    SAID.clear()
    if len(lines) != 1:
        raise AssertionError(f"said {len(lines)} things, expected one: {lines}")
    return lines[0]


def expect(whether: bool, what: str) -> None:
    if not whether:
        raise AssertionError(what)


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


def two_layers() -> Transformer:
    """gpt-oss-20b's widths and vocabulary, with random weights."""
    config = MODELS["gpt-oss-20b"]
    types = config.layer_types[:2]
    config = replace(config, num_hidden_layers=2, layer_types=types)
    return build(config, torch.bfloat16, FUSED)


def submit(engine: GraphEngine, length: int, number: int, count: int) -> list[Event]:
    """Ask for ``count`` tokens; the list fills as the engine steps."""
    generator = torch.Generator().manual_seed(number)
    prompt = torch.randint(200_000, (length,), generator=generator).tolist()
    events: list[Event] = []
    params = SamplingParams(temperature=0)
    request = Submission(prompt, params, frozenset(), count)
    engine.submit([[Ticket(request, events.append)]])
    return events


def finish(engine: GraphEngine) -> None:
    while engine.scheduler.jobs or engine.flights:
        engine.step()
    expect(engine.scheduler.manager.usage == 0, "pages are lost")


def serve(engine: GraphEngine) -> list[list[int | None]]:
    """The tokens of eight requests, a batch that has a graph if any has."""
    asked = [submit(engine, 50 + 3 * n, n, 12) for n in range(8)]
    finish(engine)
    return [[event.token_id for event in events] for events in asked]


def full_before_the_load() -> str:
    """Somebody else has nearly all of the memory."""
    filler = torch.empty(
        torch.cuda.mem_get_info()[0] - 8 * GB, dtype=torch.uint8, device="cuda"
    )
    start, held = time.perf_counter(), torch.cuda.memory_allocated()
    try:
        LLM("gpt-oss-20b", random_weights=True)
    except torch.OutOfMemoryError as error:
        SAID.clear()
        expect(time.perf_counter() - start < 5, "it took long to refuse")
        expect(torch.cuda.memory_allocated() == held, "something was loaded")
        expect("13.8 GB for its weights" in str(error), str(error))
        return str(error)
    finally:
        del filler
    raise AssertionError("it was loaded")


def full_during_the_load() -> str:
    """More seems free than can be had."""
    before = torch.cuda.memory_allocated()
    try:
        with limited(6 * GB):
            LLM("gpt-oss-20b", random_weights=True)
    except torch.OutOfMemoryError as error:
        SAID.clear()
        expect("not enough memory" in str(error), str(error))
        expect(isinstance(error.__cause__, torch.OutOfMemoryError), "no cause")
        message = str(error)
    else:
        raise AssertionError("it was loaded")
    gc.collect()
    held = torch.cuda.memory_allocated() - before
    expect(held < GB // 10, f"{held} bytes are still held")
    return message


def full_during_the_capture() -> str:
    """There is room for the graphs of small batches only."""
    model = two_layers()
    plain = GraphEngine(model, replace(SMALL, cuda_graphs=False), Fused)
    expected = serve(plain)
    del plain

    def make(spare: int, model: Transformer, cache: PagedCache, most: int) -> Fused:
        # The cache is there; what comes next is the runner with its logits, and graphs.
        torch.cuda.empty_cache()
        logits = 4 * most * model.config.vocab_size
        room = torch.cuda.memory_reserved() + logits + spare
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(room / total)
        return Fused(model, cache, most)

    for megabytes in (80, 60, 40, 30, 20):  # until some graphs do not fit
        try:
            engine = GraphEngine(model, SMALL, partial(make, megabytes * 10**6))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        sizes = [graph.size for graph in engine.runner.captured]
        if len(sizes) < len(SIZES):
            break
    expect(0 < len(sizes) < len(SIZES), f"graphs for {sizes}")
    found = serve(engine)
    if 8 in sizes:  # else padding may change the order of summation
        expect(found == expected, "other tokens with these graphs")
    return f"{said()}\n  captured {sizes}"


class Waiting(Fused):
    """Waits for the GPU in every step, which no graph can hold."""

    def __call__(self, step: Any, previous: torch.Tensor) -> torch.Tensor:
        step.tokens.tolist()
        return super().__call__(step, previous)


def no_capture() -> str:
    """Nothing can be captured."""
    model = two_layers()
    expected = serve(GraphEngine(model, replace(SMALL, cuda_graphs=False), Fused))
    engine = GraphEngine(model, SMALL, Waiting)
    expect(not engine.runner.captured, "captured, though the host waits")
    expect(serve(engine) == expected, "other tokens without graphs")
    return said()


def full_while_serving() -> str:
    """A long prompt needs more than there is, while six others are answered."""
    engine = GraphEngine(two_layers(), replace(SMALL, max_num_seqs=16), Fused)
    serve(engine)  # what a step of small batches needs is there
    short = [submit(engine, 60 + n, n, 40) for n in range(6)]
    for _ in range(5):
        engine.step()
    with limited(100_000_000):
        long = submit(engine, 8000, 99, 3)
        for _ in range(10):
            engine.step()
        expect(bool(long) and long[-1].error is not None, "the long one went on")
        expect(all(events[-1].error is None for events in short), "others failed")
        short += [submit(engine, 30, 50, 20)]
        finish(engine)
    for events, count in zip(short, [40] * 6 + [20], strict=True):
        tokens = [e.token_id for e in events if e.token_id is not None]
        expect(events[-1].finish_reason == "length", f"{events[-1]}")
        expect(len(tokens) == count, f"{len(tokens)} tokens of {count}")
    cause = long[-1].error and long[-1].error.__cause__
    expect(isinstance(cause, torch.OutOfMemoryError), f"the cause is {cause!r}")
    again = submit(engine, 8000, 99, 3)
    finish(engine)
    expect(again[-1].finish_reason == "length", "and now there is room")
    return str(long[-1].error).partition("\n")[0]


@triton.jit
def broken_kernel(x_ptr):
    tl.static_assert(False, "as this case wants it")


def add_norm(residual: torch.Tensor, *rest: Any) -> None:
    """A launcher of a kernel that does not compile."""
    broken_kernel[(1,)](residual)


def answer(llm: LLM) -> str:
    question = [{"role": "user", "content": "What is 47 + 85?"}]
    return llm.chat(question, temperature=0).content or ""


def broken_compiler() -> str:
    """One of the kernels does not compile."""
    whole = forward.add_norm
    forward.add_norm = add_norm  # type: ignore[assignment]
    try:
        with LLM(config=SMALL) as llm:
            captured = llm.engine.runner.captured  # type: ignore[attr-defined]
            sizes = [graph.size for graph in captured]
            expect(sizes == SIZES, f"graphs for {sizes} of {SIZES}")
            expect("132" in answer(llm), "47 + 85 is not 132")
    finally:
        forward.add_norm = whole
    SAID.pop(0)  # which way was chosen
    return said()


def float32() -> str:
    """Numbers that the kernels do not compute with."""
    with LLM(config=SMALL, dtype=torch.float32) as llm:
        expect("132" in answer(llm), "47 + 85 is not 132")
    return said()


CASES: tuple[Callable[[], str], ...] = (
    full_before_the_load,
    full_during_the_load,
    full_during_the_capture,
    no_capture,
    full_while_serving,
    broken_compiler,
    float32,
)


def main() -> None:
    logger = logging.getLogger("simplellm")
    logger.setLevel(logging.INFO)
    logger.addHandler(Listener())
    logger.propagate = False
    failed = 0
    for case in CASES:
        SAID.clear()
        start = time.perf_counter()
        try:
            result = "survived", case()
        except Exception:
            failed += 1
            result = "FAILED", traceback.format_exc()
        seconds = time.perf_counter() - start
        print(f"{case.__name__} {result[0]} ({seconds:.1f} s)\n  {result[1]}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
