"""Measure what CUDA graphs and overlapped steps bring: figures/10-graphs.json.

Decode steps of a model with random weights, at several batch sizes, in all four ways:
graphs on and off, overlap on and off. And what it takes to launch a kernel that does
nothing: from Python, and inside a graph. Needs a GPU that the kernels run on.

    python tools/bench_graphs.py                        gpt-oss-120b, 80 GB of memory
    python tools/bench_graphs.py --model gpt-oss-20b
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

from simplellm.engine import Event, Submission, Ticket
from simplellm.graphs import Captured, GPUConfig, GraphEngine
from simplellm.kernels.forward import FUSED, Fused
from simplellm.model import load_model
from simplellm.sampler import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
PROMPT = 128
LAUNCHES = 1000


@triton.jit
def empty_kernel(x_ptr):
    pass


class Timed(GraphEngine):
    """Adds up how long it waits for tokens."""

    waited = 0.0

    def land(self, works, tickets, flight):
        start = time.perf_counter()
        sampled = flight()
        self.waited += time.perf_counter() - start
        super().land(works, tickets, lambda: sampled)


def submit(
    engine: GraphEngine, batch: int, tokens: int, seed: int
) -> list[list[Event]]:
    """Queue ``batch`` greedy requests, all random; the lists that get their events."""
    generator = torch.Generator().manual_seed(seed)
    vocab = engine.model.config.vocab_size
    prompts = torch.randint(vocab, (batch, PROMPT), generator=generator).tolist()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    received: list[list[Event]] = [[] for _ in prompts]
    engine.submit(
        [
            [Ticket(Submission(prompt, params, frozenset(), tokens), events.append)]
            for prompt, events in zip(prompts, received, strict=True)
        ]
    )
    return received


def decode(engine: Timed, batch: int, tokens: int, seed: int) -> dict[str, Any]:
    """Median step in which all of ``batch`` decode, and the host's own share of it."""
    received = submit(engine, batch, tokens, seed)
    steps, busy = [], []
    while engine.scheduler.jobs or engine.flights:
        before = [len(events) for events in received]
        engine.waited = 0.0
        start = time.perf_counter()
        engine.step()
        step = time.perf_counter() - start
        new = sum(map(len, received)) - sum(before)
        # No prompt under way, and the next step begun if steps overlap.
        begun = engine.flights or not engine.config.overlap
        if new == batch and min(before) > 3 and begun:
            steps.append(step)
            busy.append(step - engine.waited)
    if any(len(events) != tokens for events in received):
        raise RuntimeError(f"a request has failed: {received[0][-1]}")
    step = statistics.median(steps)
    return {
        "batch": batch,
        "step_ms": 1e3 * step,
        "host_ms": 1e3 * statistics.median(busy),
        "tokens_per_second": batch / step,
        "steps": len(steps),
    }


def four_ways(model_name: str, batches: list[int], tokens: int) -> dict[str, Any]:
    """All batch sizes, with and without graphs and overlap, on one loaded model."""
    start = time.perf_counter()
    model = load_model(model_name, random_weights=True, device="cuda", backend=FUSED)
    torch.cuda.synchronize()
    loaded = time.perf_counter() - start
    config = GPUConfig(
        cuda_graphs=False,
        cache_bytes=4 * 2**30,
        max_num_seqs=max(batches),
        max_model_len=PROMPT + tokens + 64,
        share_prefixes=False,
    )
    engine = Timed(model, config, Fused)
    start = time.perf_counter()
    engine.runner.capture(batches)
    torch.cuda.synchronize()
    captured = time.perf_counter() - start
    print(f"loaded in {loaded:.0f} s, captured in {captured:.0f} s", flush=True)
    graphs = engine.runner.captured
    without: list[Captured] = []
    rows = []
    for batch in batches:
        for replays in (False, True):
            for overlap in (False, True):
                engine.runner.captured = graphs if replays else without
                engine.config = replace(config, overlap=overlap)
                decode(engine, batch, 8, seed=batch)  # compiles what is missing
                row = decode(engine, batch, tokens, seed=1000 + batch)
                rows.append({"graphs": replays, "overlap": overlap} | row)
                print(
                    f"batch {batch:3}  graphs {replays!s:5}  overlap {overlap!s:5}  "
                    f"{row['step_ms']:7.3f} ms  host {row['host_ms']:6.3f} ms  "
                    f"{row['tokens_per_second']:8.1f} tok/s",
                    flush=True,
                )
    return {"load_s": loaded, "capture_s": captured, "decode": rows}


def microseconds(fn: Callable[[], object], count: int, repeat: int = 5) -> float:
    """Median time of ``fn``, the GPU's part included, over ``count`` launches."""
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times) / count


def launch_costs() -> dict[str, float]:
    """Microseconds of a launch: from Python through Triton and PyTorch, in a graph."""
    x = torch.zeros(1, device="cuda")

    def with_triton() -> None:
        for _ in range(LAUNCHES):
            empty_kernel[(1,)](x)

    def with_torch() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    with_triton()
    with_torch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with_triton()
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    graph.replay()
    replay = 1e6 * (time.perf_counter() - start)
    with torch.inference_mode():
        return {
            "triton_us": microseconds(with_triton, LAUNCHES),
            "torch_us": microseconds(with_torch, LAUNCHES),
            "graph_us": microseconds(graph.replay, LAUNCHES),
            "replay_host_us": replay,  # of the host, for the whole graph
            "launches": LAUNCHES,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt-oss-120b")
    parser.add_argument("--batch", default="1,8,64", help="batch sizes, ascending")
    parser.add_argument("--tokens", type=int, default=64, help="generated per request")
    parser.add_argument("--out", type=Path, default=ROOT / "figures/10-graphs.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here; expected one that CUDA knows")
    start = time.perf_counter()
    result = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": "python " + " ".join(["tools/bench_graphs.py", *sys.argv[1:]]),
        "model": f"{options.model}, random weights",
        "prompt_tokens": PROMPT,
        "launch": launch_costs(),
    }
    batches = [int(batch) for batch in options.batch.split(",")]
    result |= four_ways(options.model, batches, options.tokens)
    result["seconds"] = time.perf_counter() - start
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {options.out} after {result['seconds']:.0f} s")


if __name__ == "__main__":
    main()
