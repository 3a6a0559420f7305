"""Old and new code in turns, on one GPU: is the new as fast?

    python tools/gpu/compare.py --old PATH --new PATH --json OUT
    python tools/gpu/compare.py --old PATH --new PATH --models gpt-oss-20b

The paths are two checkouts. Each turn, old, new, new, old, is a process of its own for
each model, with random weights, and uses of the package only what both have: LLM, its
config, generate, stats and the engine's meter. A checkout has a kernel cache of its own
that is empty at its first turn: that start is the cold one.

A model is gpt-oss's or one of speeds.py's, such as Qwen3-8B-FP8.

Loads are mixed: the lengths of prompts and answers are log-normal, requests come all at
once or at random times. --models, --cases and --turns make it shorter.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).parents[1]))

from records import argument_parser, header, save

MODELS = ("gpt-oss-120b", "gpt-oss-20b")
EAGER = "gpt-oss-120b"  # whose step without graphs is timed
BATCHES = (1, 2, 4, 8, 64, 256)
LENGTH = 128  # tokens of prompts and answers
PREFILL = 32, 2048
FIRST = (16, 128, 512, 1000, 2048)  # tokens of prompts that come alone
TIMES = 50
# Requests, and how many come in a second; 0: all at once.
LOADS = ((512, 0), (30, 2), (120, 8), (240, 16))
PROMPTS, ANSWERS = (400, 16, 4096), (200, 8, 1024)  # median, least and most tokens
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1},
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 50},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "logprobs": {"logprobs": 5},
}
SAMPLING["all together"] = dict(pair for s in SAMPLING.values() for pair in s.items())
TURNS = ("old", "new", "new", "old")
TOLERANCE = 0.02
Found = dict[str, float]


# One turn, in a process of its own


@contextlib.contextmanager
def opened(model: str, **options: Any) -> Iterator[Any]:
    """An LLM, whose memory is free again afterwards."""
    import torch

    import simplellm

    if not model.startswith("gpt-oss"):  # old code lacks what speeds.py imports
        from speeds import model_argument

        model = model_argument(model)
    kind = simplellm.EngineConfig
    # Old code calls it share_prefixes.
    names = {field.name for field in fields(kind)}
    prefixes = {"enable_prefix_caching", "share_prefixes"} & names
    options |= dict.fromkeys(prefixes, False)
    config = kind(
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=8192,
        max_model_len=PROMPTS[2] + ANSWERS[2],
        cache_bytes=2**34,
        **options,
    )
    with simplellm.LLM(model, config, random_weights=True) as llm:
        yield llm
    del llm
    gc.collect()
    torch.cuda.empty_cache()


def generate(
    llm: Any, batch: int, length: int, tokens: int, seed: int = 0, **options: Any
) -> Any:
    """The outputs for some random prompts, and the seconds they took."""
    import torch

    from simplellm import SamplingParams

    generator = torch.Generator().manual_seed(seed)
    shape = batch, length
    prompts = torch.randint(llm.config.vocab_size, shape, generator=generator).tolist()
    options = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True} | options
    params = SamplingParams(**options)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params).result()
    return outputs, time.perf_counter() - start


def full_steps(llm: Any, batch: int) -> list[float]:
    """Seconds of the latest steps that gave each request a token, as the one before."""
    with llm.engine.lock:
        recent = list(llm.engine.meter.recent)
    return [
        end - begin
        for (begin, before), (end, count) in pairwise(recent)
        if before == count == batch
    ]


def decode(llm: Any) -> Found:
    """Tokens a second at each batch size: batch over the median step."""
    figures: Found = {}
    for batch in BATCHES:
        generate(llm, batch, LENGTH, 4, seed=1)
        first, _ = generate(llm, batch, LENGTH, LENGTH)
        figures[f"decode {batch}, tokens/s"] = batch / median(full_steps(llm, batch))
        if batch == 1:
            again, _ = generate(llm, batch, LENGTH, LENGTH)
            assert first[0].token_ids == again[0].token_ids, "other tokens"
    return figures


def sampling(llm: Any) -> Found:
    """Milliseconds of a step of 64 requests that sample in the same way."""
    figures = {}
    for name, options in SAMPLING.items():
        generate(llm, 64, LENGTH, LENGTH, **{"temperature": 1} | options)
        figures[f"step of 64, {name}, ms"] = 1e3 * median(full_steps(llm, 64))
    return figures


def prefill(llm: Any) -> Found:
    """Tokens a second of many prompts."""
    seconds = median(generate(llm, *PREFILL, 1, seed)[1] for seed in range(1, 6))
    return {"prefill {} x {}, tokens/s".format(*PREFILL): math.prod(PREFILL) / seconds}


def first(llm: Any) -> Found:
    """Milliseconds to the first token of a prompt that comes alone."""
    figures: Found = {}
    for length in FIRST:
        generate(llm, 1, length, 2, seed=1)
        times = []
        for seed in range(TIMES):
            metrics = generate(llm, 1, length, 2, seed)[0][0].metrics
            times.append(1e3 * (metrics.first_token_time - metrics.arrival_time))
            time.sleep(0.01)
        figures |= shares(f"first token after {length}", times, (0.5, 0.9, 0.99))
    return figures


def shares(name: str, values: Sequence[float], which: Sequence[float]) -> Found:
    """Quantiles of milliseconds, by name."""
    from simplellm.engine.stats import quantile

    return {f"{name}, p{100 * q:.0f} ms": quantile(values, q) or 0.0 for q in which}


def load(llm: Any) -> Found:
    """Mixed loads: tokens a second if all come at once; TTFT and ITL of each."""
    from simplellm import SamplingParams
    from simplellm.apps.bench import unbounded_meter

    def size(median: int, least: int, most: int) -> int:
        return min(max(round(median * chance.lognormvariate(0, 1)), least), most)

    figures: Found = {}
    for count, rate in LOADS:
        chance = random.Random(count)
        futures, tokens = [], 0
        llm.engine.meter = meter = unbounded_meter()
        began = due = time.perf_counter()
        for _ in range(count):
            prompt = chance.choices(range(llm.config.vocab_size), k=size(*PROMPTS))
            new = size(*ANSWERS)
            tokens += new
            due += chance.expovariate(rate) if rate else 0
            time.sleep(max(0, due - time.perf_counter()))
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
            futures.append(llm.generate([prompt], params))
        for future in futures:
            future.result()
        seconds = time.perf_counter() - began
        name = f"{rate} a second" if rate else f"{count} at once"
        figures |= {} if rate else {f"{name}, tokens/s": tokens / seconds}
        ttft, itl = ([1e3 * x for x in times] for times in (meter.ttft, meter.itl))
        figures |= shares(f"{name}: first token", ttft, (0.5, 0.9, 0.99))
        figures |= shares(f"{name}: next token", itl, (0.5, 0.9, 0.99))
    return figures


def eager(model: str) -> Found:
    """A step of one request without graphs and overlap, and what the host does in it.

    The host works from the end of one wait for the GPU to the beginning of the next.
    """
    import torch

    waits: list[tuple[float, float]] = []
    synchronize = torch.cuda.Event.synchronize

    def waited(event: Any) -> None:
        start = time.perf_counter()
        synchronize(event)
        waits.append((start, time.perf_counter()))

    with opened(model, cuda_graphs=False, overlap=False) as llm:
        generate(llm, 1, LENGTH, 8, seed=1)
        with mock.patch.object(torch.cuda.Event, "synchronize", waited):
            generate(llm, 1, LENGTH, LENGTH)
        step = median(full_steps(llm, 1))
    host = median(start - end for (_, end), (start, _) in pairwise(waits[2:]))
    return {"eager host, ms": 1e3 * host, "eager step, ms": 1e3 * step}


CASES = {case.__name__: case for case in (decode, prefill, first, load, sampling)}


@contextlib.contextmanager
def timed(owner: Any, name: str, seconds: Found) -> Iterator[None]:
    """Note how long a function of ``owner`` takes when it is called."""
    function = getattr(owner, name)

    def noting(*args: Any) -> Any:
        start = time.perf_counter()
        result = function(*args)
        seconds[name] = time.perf_counter() - start
        return result

    with mock.patch.object(owner, name, noting):
        yield


def imported(*names: str) -> Any:
    """A module of the package by the first of its names, new and old, that there is."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            return import_module(f"simplellm.{name}")
    raise ModuleNotFoundError(" or ".join(names))


def turn(model: str, cases: list[str], began: float, cold: bool) -> Found:
    """All that is measured of one model by the package that is imported here."""
    import torch

    import simplellm

    load, runner = imported("api.load", "load"), imported("engine.runner", "runner")
    print(f"  {Path(simplellm.__file__).parent}, torch {torch.__version__}")
    parts: Found = {}
    with (
        timed(load, "fused_operations", parts),
        timed(runner.Runner, "capture", parts),
        opened(model) as llm,
    ):
        ready = time.time() - began
        generate(llm, 1, LENGTH, 1)
        name = "cold" if cold else "cached"
        figures = {
            f"start {name}, s": ready,
            f"start {name} to first token, s": time.time() - began,
            **{f"start {name}: {part}, s": value for part, value in parts.items()},
        }
        for case, measure in CASES.items():
            figures |= measure(llm) if case in cases else {}
        if preemptions := llm.stats().preemptions:
            raise RuntimeError(f"the cache was too small: {preemptions} preemptions")
        figures["peak memory, GB"] = torch.cuda.max_memory_allocated() / 1e9
    del llm  # two of the larger model do not fit
    if "eager" in cases and model == EAGER:
        figures |= eager(model)
    return figures


# All turns


def start(tree: Path, cache: Path, arguments: list[str]) -> Found:
    """Run a turn with the package of ``tree``; its numbers."""
    cold = not cache.exists()
    command = [sys.executable, __file__, "--turn", *arguments]
    command += ["--began", str(time.time()), *(["--cold"] if cold else [])]
    environment = os.environ | {
        "PYTHONPATH": str(tree.resolve()),
        "TRITON_CACHE_DIR": str(cache),
    }
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("  "):
                print(line, end="", flush=True)
    if process.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {process.returncode}")
    return json.loads(lines[-1])


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Old and new side by side; "slower" if by more than old differs from itself."""
    yield f"{'':44}{'old':>10}{'new':>10}{'new/old':>9}{'bar':>7}"
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        short = model.removeprefix("gpt-oss-")[-8:]
        for name in dict.fromkeys(name for row in mine for name in row["found"]):
            having = [row for row in mine if name in row["found"]]
            old, new = (
                [row["found"][name] for row in having if row["tree"] == tree]
                for tree in ("old", "new")
            )
            if not (old and new):
                continue
            ratio = mean(new) / mean(old)
            bar = max(TOLERANCE, max(old) / min(old) - 1)
            worse = 1 / ratio if name.endswith("tokens/s") else ratio
            verdict = "  slower" if worse > 1 + bar else ""
            yield (
                f"{short:9}{name:35}{mean(old):10.2f}{mean(new):10.2f}"
                f"{ratio:9.3f}{bar:7.1%}{verdict}"
            )


def compare(options: argparse.Namespace, save: Callable[[list[Any]], None]) -> None:
    """Take all turns; ``save`` gets the rows after each."""
    trees = {"old": options.old, "new": options.new}
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as caches:
        for model in options.models.split(","):
            for tree in options.turns.split(","):
                print(f"[{time.perf_counter() - began:4.0f} s] {model} {tree}")
                cache = Path(caches, tree, model)
                try:
                    figures = start(trees[tree], cache, [model, options.cases])
                except Exception as error:  # the other turns are worth having
                    print(f"  FAILED: {error}", flush=True)
                    continue
                rows.append({"model": model, "tree": tree, "found": figures})
                for name, value in figures.items():
                    print(f"  {name:40}{value:12.3f}", flush=True)
                save(rows)
    print("\n".join(table(rows)))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cases", default=",".join([*CASES, "eager"]))
    parser.add_argument("--turns", default=",".join(TURNS))
    parser.add_argument("--turn", nargs=2, metavar=("MODEL", "CASES"))
    parser.add_argument("--began", type=float)
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    if options.turn:
        model, cases = options.turn
        found = turn(model, cases.split(","), options.began, options.cold)
        print(json.dumps(found))
        return
    if not (options.old and options.new):
        parser.error("expected --old and --new, two checkouts")
    record = header()
    compare(options, lambda rows: save(record | {"rows": rows}, options.json))


if __name__ == "__main__":
    main()
