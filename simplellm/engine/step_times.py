"""What steps cost: measured once, when an engine that checks drafts is loaded."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import torch

from simplellm.engine.graphs import CaptureShape
from simplellm.engine.runner import Runner
from simplellm.model.batch import Batch

# Tokens of a step that is measured, and how often it runs, of which the fastest counts.
# On a CPU steps are long, and from some tokens on each takes as long as the last one.
MOST_TOKENS, REPEATS = {"cuda": 1024, "cpu": 64}, {"cuda": 5, "cpu": 2}
STRIDE = 7919  # between tokens; a prime, so that they differ in any vocabulary


@torch.inference_mode()
def time_steps(runner: Runner) -> dict[int, float]:
    """Seconds of a step, by its number of sequences, each of one token.

    Measured for 1, 2, 4, ... sequences, and for as many as each CUDA graph has. A step
    between two graphs is padded to the larger one and takes as long: so the number
    right after the smaller one has the time of the larger. Steps write to the cache's
    first position, which must be empty.
    """
    most = min(len(runner.sampled_tokens), MOST_TOKENS[runner.device.type])
    graphs = runner.verify_graphs or runner.decode_graphs
    padded = [graph.size for graph in graphs if 1 < graph.size <= most]
    doubled = [1 << power for power in range(most.bit_length())]
    seconds = {
        size: fastest(dummy_step(runner, size), runner.device)
        for size in sorted({*doubled, *padded})  # as on every other rank
    }
    for below, size in pairwise([1, *padded]):
        seconds[below + 1] = seconds[size]
    return dict(sorted(seconds.items()))


def fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``run`` takes on the device, at least.

    A CPU runs it in a thread of its own, as an engine runs steps: PyTorch's workers of
    the first thread wait so eagerly that they slow OpenBLAS's down by nine times.
    """
    times = []

    @torch.inference_mode()
    def measure() -> None:
        for _ in range(1 + REPEATS[device.type]):  # the first one may compile
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)

    if device.type == "cuda":
        measure()
    else:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(measure).result()
    return min(times[1:])


def dummy_step(runner: Runner, size: int) -> Callable[[], object]:
    """A step of ``size`` sequences with one token each, ready to run."""
    device, shape, flat = runner.device, CaptureShape(size, size), runner.inputs
    graphs = (size > 1 and runner.verify_graphs) or runner.decode_graphs
    graph = next((graph for graph in graphs if graph.size >= size), None)
    pages = runner.table_width if device.type == "cuda" else 1
    if graph is not None:
        shape = graph.shape
    else:
        numbers = Batch.size(size, size, pages, len(runner.pool.windows))
        flat = torch.zeros(numbers, dtype=torch.int32, device=device)
    rows = shape.tokens
    batch = runner.view(flat, (rows, rows, pages, rows, shape.queries))
    batch.pad()
    # Different tokens, as in a real step: equal ones would share their experts.
    batch.tokens[:] = torch.arange(rows) * STRIDE % runner.model.config.vocab_size
    batch.lengths[:size] = 1
    batch.query_start_loc[:] = torch.arange(rows + 1).clamp(max=size)
    batch.logits_indices[:size] = torch.arange(size)
    return graph.replay if graph else partial(runner.captured_step, batch, shape)
