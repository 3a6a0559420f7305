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
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from cases import random_model
from client import Client, make_engine, random_prompt

from simplellm import LLM, EngineConfig
from simplellm.engine import Engine
from simplellm.graphs import bucket_sizes
from simplellm.kernels import fused
from simplellm.model import Model

GB = 10**9
SMALL: dict[str, Any] = {"cache_bytes": GB // 2, "max_model_len": 16_384}
SIZES = bucket_sizes(EngineConfig().resolved("cuda").max_num_seqs)  # with a graph each
EAGER: dict[str, Any] = SMALL | {"cuda_graphs": False}
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


def two_layers() -> Model:
    """gpt-oss-20b's widths and vocabulary, with random weights."""
    return random_model("gpt-oss-20b", 2)


def serve(engine: Engine) -> list[list[int]]:
    """The tokens of eight requests, a batch that has a graph if any has."""
    client = Client(engine)
    numbers = [client.ask(random_prompt(50 + 3 * n, n), 12) for n in range(8)]
    client.finish()
    expect(engine.stats().cache_usage == 0, "pages are lost")
    return [client.tokens(number) for number in numbers]


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
    expected = serve(make_engine(model, **EAGER))
    gc.collect()
    for megabytes in (80, 60, 40, 30, 20):  # until some graphs do not fit
        engine = make_engine(model, **EAGER)
        with limited(megabytes * 10**6):
            engine.runner.capture(SIZES)
        sizes = [graph.size for graph in engine.runner.captured]
        if len(sizes) < len(SIZES):
            break
    expect(0 < len(sizes) < len(SIZES), f"graphs for {sizes}")
    found = serve(engine)
    if 8 in sizes:  # else padding may change the order of summation
        expect(found == expected, "other tokens with these graphs")
    return f"{said()}\n  captured {sizes}"


def no_capture() -> str:
    """Nothing can be captured: each step waits for the GPU, which no graph can hold."""
    model = two_layers()
    expected = serve(make_engine(model, **EAGER))
    embed = model.ops.embed

    def waiting(tokens: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        tokens.tolist()
        return embed(tokens, *rest)

    model.ops = replace(model.ops, embed=waiting)
    engine = make_engine(model, **SMALL)
    expect(not engine.runner.captured, "captured, though the host waits")
    expect(serve(engine) == expected, "other tokens without graphs")
    return said()


def full_while_serving() -> str:
    """A long prompt needs more than there is, while six others are answered."""
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
        expect(error is not None, "the long one went on")
        short += [client.ask(random_prompt(30, 50), 20)]
        client.finish()
    for number, count in zip(short, counts, strict=True):
        found = len(client.tokens(number))
        expect(found == count, f"{found} tokens of {count}")
    cause = error and error.__cause__
    expect(isinstance(cause, torch.OutOfMemoryError), f"the cause is {cause!r}")
    again = client.ask(prompt, 3)
    client.finish()
    expect(len(client.tokens(again)) == 3, "and now there is room")
    return str(error).partition("\n")[0]


@triton.jit
def broken_kernel(x_ptr):
    tl.static_assert(False, "as this case wants it")


def broken_norm(residual: torch.Tensor, *rest: Any) -> None:
    """A launcher of a kernel that does not compile."""
    broken_kernel[(1,)](residual)


def answer(llm: LLM) -> str:
    question = [{"role": "user", "content": "What is 47 + 85?"}]
    return llm.chat(question, temperature=0).content or ""


def broken_compiler() -> str:
    """One of the kernels does not compile."""
    with (
        mock.patch.object(fused, "add_norm", broken_norm),
        LLM(config=EngineConfig(**SMALL)) as llm,
    ):
        sizes = [graph.size for graph in llm.engine.runner.captured]
        expect(sizes == SIZES, f"graphs for {sizes} of {SIZES}")
        expect("132" in answer(llm), "47 + 85 is not 132")
    SAID.pop(0)  # which way was chosen
    return said()


def float32() -> str:
    """Numbers that the kernels do not compute with."""
    with LLM(config=EngineConfig(**SMALL), dtype=torch.float32) as llm:
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
