"""Take the techniques of the course away, and look into one step: chapter 12's records.

    python tools/bench_full.py ablation
    python tools/bench_full.py ablation --model gpt-oss-20b --requests 16
    python tools/bench_full.py profile --model gpt-oss-120b --batch 64
    python tools/bench_full.py memory --model gpt-oss-120b --batch 64 --length 4096

`ablation` serves the same requests with more and more techniques, and with all but one,
and writes figures/12-ablation-cpu.json or -h200.json. `profile` writes which kernels
ran in some decode steps to figures/12-profile.json, `memory` how much of the GPU's
memory full sequences take to figures/12-memory.json; both need a GPU. A --model is one
of the known ones, with random weights; without it, it is the embedded one.
"""

import argparse
import gc
import json
import math
import random
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from simplellm.bench import (
    Bench,
    Case,
    Plan,
    TimedLLM,
    cache_bytes,
    check_cache,
    engine_config,
    find_config,
)
from simplellm.config import MODELS
from simplellm.engine import LLM as PlainLLM
from simplellm.engine import EngineConfig
from simplellm.graphs import GPUConfig
from simplellm.llm import LLM
from simplellm.model import find_device
from simplellm.report import describe_device, describe_memory, versions
from simplellm.sampler import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
SHARED = 64  # tokens that all prompts begin with
PLAIN = EngineConfig(cache="none", continuous=False, share_prefixes=False)
BATCH = 8  # requests at once, where there are batches
FEW = 3  # requests for an engine without batches on a GPU
PROFILED = 16  # decode steps
DECODED = 128  # tokens that a sequence generates until it is full
PAGE = 2**22  # bytes, more than one page of the cache


@dataclass(frozen=True)
class Way:
    """An engine: a class of `LLM` and its switches."""

    name: str
    config: EngineConfig
    kind: type[PlainLLM] = PlainLLM


def ladder(gpu: bool) -> list[Way]:
    """One technique more on each rung."""
    alone: dict[str, Any] = {"max_num_seqs": 1}
    slots: dict[str, Any] = {"cache": "slot", "max_model_len": 512}
    pages: dict[str, Any] = {"cache": "paged", "max_model_len": 512}
    batch: dict[str, Any] = {"max_num_seqs": BATCH}
    ways = [
        Way("everything again for each token", replace(PLAIN, **alone)),
        Way("+ KV cache in slots", replace(PLAIN, **slots, **alone)),
        Way("+ static batches", replace(PLAIN, **slots, **batch)),
        Way("+ continuous batching", EngineConfig(**slots, **batch)),
        Way("+ pages, shared prefixes", EngineConfig(**pages, **batch)),
    ]
    if gpu:
        fused = GPUConfig(cuda_graphs=False, overlap=False, **pages, **batch)
        ways += [
            Way("+ Triton kernels", fused, LLM),
            Way("+ CUDA graphs", replace(fused, cuda_graphs=True), LLM),
            Way("+ overlap", replace(fused, cuda_graphs=True, overlap=True), LLM),
        ]
    return ways


def without(full: Way) -> list[Way]:
    """All techniques but one. What needs another one goes with it."""
    gpu = isinstance(full.config, GPUConfig)
    changes: dict[str, dict[str, Any]] = {
        "batches": {"max_num_seqs": 1},
        "continuous batching": {"continuous": False},
        "shared prefixes": {"share_prefixes": False},
    }
    if gpu:
        changes["CUDA graphs"] = {"cuda_graphs": False}
        changes["overlap"] = {"overlap": False}
    else:
        changes["pages"] = {"cache": "slot", "share_prefixes": False}
        changes["KV cache"] = {"cache": "none", "share_prefixes": False}
    ways = [
        replace(full, name=f"- {name}", config=replace(full.config, **change))
        for name, change in changes.items()
    ]
    if gpu:
        ways.append(replace(full, name="- Triton kernels", kind=PlainLLM))
    return ways


def requests(count: int, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    """Prompts with one beginning, and how many tokens each answer gets."""
    rng = random.Random(0)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    shared = tokens(SHARED)
    prompts = [shared + tokens(rng.randint(8, 64)) for _ in range(count)]
    lengths = [round(min(200, math.exp(rng.gauss(3.2, 0.8)))) for _ in range(count)]
    return prompts, [max(2, length) for length in lengths]


def serve(way: Way, model: str | None, count: int, rounds: int) -> dict[str, Any]:
    """The quickest of some runs of the same requests by one engine.

    On a GPU, PyTorch one request at a time gets the first few of them only, once: its
    speed does not depend on how many wait, and it is slow.
    """
    gpu = torch.cuda.is_available()
    # What else a laptop does is not on the process's own clock.
    clock = time.perf_counter if gpu else time.process_time
    options: dict[str, Any] = {"random_weights": True} if model else {}
    slow = gpu and way.kind is PlainLLM and way.config.max_num_seqs == 1
    rounds = 1 if slow else rounds
    with way.kind(model, way.config, **options) as llm:
        vocab_size = llm.config.vocab_size
        prompts, lengths = requests(count, vocab_size)
        if slow:
            prompts, lengths = prompts[:FEW], lengths[:FEW]
        params = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            for length in lengths
        ]
        # Other tokens, so that no prefix of the measured prompts is in the cache.
        other = [[token ^ 1 for token in prompt] for prompt in prompts[:BATCH]]
        llm.generate(other, replace(params[0], max_tokens=4)).result()
        times = []
        for turn in range(rounds):
            fresh = [[(t + turn) % vocab_size for t in p] for p in prompts]
            start = clock()
            llm.generate(fresh, params).result()
            times.append(clock() - start)
    gc.collect()  # the next engine needs this one's memory
    torch.cuda.empty_cache()
    return {
        "name": way.name,
        "requests": len(prompts),
        "seconds": min(times),
        "tokens_per_second": sum(lengths) / min(times),
    }


def header() -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "device": describe_device(find_device(None)),
        "versions": versions(),
        "command": shlex.join(["python", "tools/bench_full.py", *sys.argv[1:]]),
    }


def ablation(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The ladder, and all but one; seconds for the same requests."""
    gpu = torch.cuda.is_available()
    rungs = ladder(gpu)
    rows: dict[str, list[dict[str, Any]]] = {"cumulative": [], "without": []}
    for part, ways in (("cumulative", rungs), ("without", without(rungs[-1]))):
        for way in ways:
            row = serve(way, options.model, options.requests, options.rounds)
            rows[part].append(row)
            speed = row["tokens_per_second"]
            print(f"{way.name:34} {speed:9.1f} tokens/s", flush=True)
    clock = "wall" if gpu else "CPU time of the process"
    record = {
        "clock": clock,
        "model": options.model or "embedded",
        "requests": options.requests,
    }
    name = "12-ablation-h200" if gpu else "12-ablation-cpu"
    return name, header() | record | {"batch": BATCH} | rows


def profile(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Which kernels run in decode steps, and for how long; needs a GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("no GPU is there to be profiled")
    plan = Plan(batches=(options.batch,), output_len=8000)
    config = engine_config(plan, GPUConfig())
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with LLM(options.model, config, random_weights=bool(options.model)) as llm:
        steps = Bench(llm, seed=0).run(options.batch, 128, 64).full_steps(options.batch)
        with torch.profiler.profile(activities=activities):  # starting it takes long
            torch.zeros(1, device="cuda")
        vocab_size = llm.config.vocab_size
        prompts = torch.randint(vocab_size, (options.batch, 128)).tolist()
        params = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)
        future = llm.generate(prompts, params)
        begun = llm.stats().steps
        wait(llm, begun + 10)
        with torch.profiler.profile(activities=activities) as seen:
            wait(llm, llm.stats().steps + PROFILED)
        future.cancel()
    events = [e for e in seen.key_averages() if e.self_device_time_total > 0]
    # The trace cuts a step at either end, so that no kernel counts whole steps.
    layers = llm.config.num_hidden_layers
    count = next(e.count for e in events if e.key == "gate_up_kernel") / layers
    rows = [
        {
            "name": event.key,
            "calls": event.count / count,
            "us": event.self_device_time_total / count,
        }
        for event in events
    ]
    return "12-profile", header() | {
        "model": options.model or "embedded",
        "batch": options.batch,
        "step_us": 1e6 * median(steps),
        "kernels": sorted(rows, key=lambda row: -row["us"]),
    }


def memory(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The most GPU memory that is taken while long sequences run; needs a GPU.

    PyTorch may not take more than --limit GiB, so that what it needs is not mixed up
    with what it keeps because there is plenty.
    """
    if not torch.cuda.is_available():
        raise SystemExit("no GPU is there whose memory could be filled")
    total = torch.cuda.get_device_properties(0).total_memory
    outside = total - torch.cuda.mem_get_info()[0]  # CUDA itself, and other processes
    torch.cuda.set_per_process_memory_fraction(min(1, options.limit * 2**30 / total))
    length, batch = options.length, options.batch
    case = Case("decode", batch, length - DECODED, DECODED)
    plan = Plan((batch,), input_len=case.input_len, output_len=case.output_len)
    config = engine_config(plan, GPUConfig())
    shapes = find_config(options.model, bool(options.model))
    config = replace(config, cache_bytes=cache_bytes(shapes, config, 2, case) + PAGE)
    with TimedLLM(options.model, config, random_weights=bool(options.model)) as llm:
        check_cache(llm.engine, [case])
        run = Bench(llm, seed=0).run(batch, case.input_len, case.output_len)
        found = describe_memory(llm) | {
            "limit": options.limit * 2**30,
            "reserved": torch.cuda.max_memory_reserved(),
            "process": total - torch.cuda.mem_get_info()[0] - outside,
            "context": outside,
        }
    steps = run.full_steps(batch)
    for name, size in found.items():
        print(f"{name:10} {size / 2**30:7.2f} GiB")
    return "12-memory", header() | {
        "model": options.model or "embedded",
        "batch": batch,
        "length": length,
        "step_ms": 1e3 * median(steps) if steps else None,
        "seconds": run.seconds,
        "memory": found,
    }


def wait(llm: PlainLLM, steps: int) -> None:
    """Until the engine has done so many steps in all."""
    while llm.stats().steps < steps:
        time.sleep(0.002)


PARTS: dict[str, Callable[[argparse.Namespace], tuple[str, dict[str, Any]]]] = {
    "ablation": ablation,
    "profile": profile,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="of profile, memory")
    parser.add_argument("--length", type=int, default=4096, help="of memory, tokens")
    parser.add_argument("--limit", type=float, default=78, help="of memory, GiB")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch on a CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    name, record = PARTS[options.part](options)
    path = ROOT / f"figures/{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
