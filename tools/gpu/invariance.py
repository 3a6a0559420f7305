"""Show that `batch_invariant` keeps its promise, and what it costs, on one GPU.

    python3 tools/gpu/invariance.py --json OUT
    python3 tools/gpu/invariance.py --layers 36 --only cost --json OUT
    python3 tools/gpu/invariance.py --only tight --json OUT

A model with random weights in the widths of gpt-oss-120b answers the same greedy
prompts alone and in many kinds of company. Prints how many answers differ from those
given alone, with the switch and without, and the times with it over those without.
Ends with 1 if an answer differs with the switch, or if requests that were to be
preempted were not, or to find shared pages found none.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from cases import random_model
from client import Client, make_engine, random_prompt

from simplellm.engine import Engine
from simplellm.model import Model

MODEL = "gpt-oss-120b"
REQUESTS = 64
started = time.perf_counter()


def say(text: str) -> None:
    print(f"{time.perf_counter() - started:6.1f} {text}", flush=True)


def engine_of(model: Model, **options: Any) -> Engine:
    """``model`` says by its operations whether they are batch-invariant."""
    common: dict[str, Any] = {
        "max_num_seqs": REQUESTS,
        "max_model_len": 2304,
        "share_prefixes": False,
    }
    common |= {} if "num_pages" in options else {"cache_bytes": 4 * 2**30}
    return make_engine(model, **(common | options))


def make_prompts(prefix: int, step: int, other_step: int) -> list[list[int]]:
    """Half of them with a common beginning of ``prefix`` tokens, taking turns.

    Within each half a prompt is one step longer than the last.
    """
    shared, half = random_prompt(prefix, 0), REQUESTS // 2
    prompts = [shared + random_prompt(1 + step * n, 1 + n) for n in range(half)]
    prompts += [random_prompt(1 + other_step * n, 1000 + n) for n in range(half)]
    return [prompts[n // 2 + n % 2 * half] for n in range(REQUESTS)]


def answers(
    engine: Engine, prompts: Sequence[Sequence[int]], batch: int
) -> list[list[int]]:
    """Greedy continuations, ``batch`` prompts at once."""
    lengths = [24 + n % 3 * 12 for n in range(len(prompts))]
    found: list[list[int]] = []
    for first in range(0, len(prompts), batch):
        client, part = Client(engine), slice(first, first + batch)
        numbers = list(map(client.ask, prompts[part], lengths[part]))
        client.finish()
        found += map(client.tokens, numbers)
    assert list(map(len, found)) == lengths
    return found


# Name, requests at once, what the engine is told, how often all of it is asked.
Company = list[tuple[str, int, dict[str, Any], int]]
COMPANY: Company = [
    ("alone, once more", 1, {}, 1),
    ("2 at once", 2, {}, 1),
    ("5 at once", 5, {}, 1),
    ("16 at once", 16, {}, 1),
    ("64 at once", 64, {}, 1),
    ("chunks of 33", 64, {"prefill_chunk": 33}, 1),
    ("97 tokens a step", 64, {"max_num_batched_tokens": 97}, 1),
    ("shared prefixes", 16, {"share_prefixes": True}, 2),
    ("no graphs", 64, {"cuda_graphs": False, "overlap": False}, 1),
]
# A prompt enters when there is room for it, so that only answers which grow by much
# more than their prompts had are sure to run out of pages.
FEW = {"page_size": 16, "num_pages": 200, "prefill_chunk": 128}
TIGHT: Company = [
    ("alone, once more", 1, {}, 1),
    ("few pages", 64, FEW, 1),
    ("few shared pages", 64, FEW | {"share_prefixes": True}, 2),
]


def compare(
    model: Model, prompts: Sequence[Sequence[int]], company: Company
) -> list[dict[str, Any]]:
    """How many answers are others in company than alone.

    Raises RuntimeError if the company is not what its name says.
    """
    alone = answers(engine_of(model), prompts, 1)
    tokens = {token for answer in alone for token in answer}
    say(f"{len(tokens)} distinct tokens in {sum(map(len, alone))} alone")
    rows = []
    for name, batch, options, times in company:
        engine = engine_of(model, **options)
        for _ in range(times):
            got = answers(engine, prompts, batch)
        stats = engine.stats()
        wrong = [n for n in range(len(prompts)) if got[n] != alone[n]]
        rows.append(
            {
                "company": name,
                "differ": len(wrong),
                "of": len(prompts),
                "which": wrong,
                "preemptions": stats.preemptions,
                "hit_rate": stats.cache_hit_rate,
            }
        )
        say(
            f"{name:<18} {len(wrong):3} of {len(prompts)} differ, "
            f"{stats.preemptions} preemptions, {stats.cache_hit_rate:.0%} hits"
        )
        if "few" in name and not stats.preemptions:
            raise RuntimeError(f"FAILED: {name}: nothing was preempted")
        if "shared" in name and not stats.cache_hit_rate:
            raise RuntimeError(f"FAILED: {name}: no page was found again")
        del engine
        gc.collect()  # it refers to itself
    return rows


def step_ms(engine: Engine, batch: int) -> float:
    """Milliseconds of a step in which all requests of a batch get a token."""
    client, times = Client(engine), []
    for number in range(batch):
        client.ask(random_prompt(128, number), 100)
    while client.busy:
        start = time.perf_counter()
        if client.step() == batch:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def prefill_ms(engine: Engine) -> float:
    """Milliseconds until four prompts of 2,048 tokens have their first token."""
    times = []
    for seed in range(3):
        client, start = Client(engine), time.perf_counter()
        for number in range(4):
            client.ask(random_prompt(2048, 10 * seed + number), 1)
        client.finish()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def measure_cost(models: dict[bool, Model]) -> dict[str, dict[str, float]]:
    """Times with the switch and without, and the ratio."""
    cases: dict[str, Callable[[Engine], float]] = {
        f"batch {batch}": partial(step_ms, batch=batch) for batch in (1, 8, 64)
    }
    cases["prefill 4 x 2048"] = prefill_ms
    found: dict[bool, dict[str, float]] = {}
    for invariant, model in models.items():
        engine = engine_of(model)
        found[invariant] = {name: case(engine) for name, case in cases.items()}
        del engine
        gc.collect()
    rows = {}
    for name in cases:
        plain, slow = found[False][name], found[True][name]
        rows[name] = {"ms": plain, "invariant_ms": slow, "ratio": slow / plain}
        say(f"{name:<18} {plain:8.2f} ms {slow:8.2f} ms, {slow / plain:.2f} times")
    return rows


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", default="compare tight cost contrast")
    options = parser.parse_args()
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": f"python tools/gpu/invariance.py --only '{options.only}'",
        "layers": options.layers,
    }
    models = {
        invariant: random_model(MODEL, options.layers, batch_invariant=invariant)
        for invariant in (False, True)
    }
    say(f"{options.layers} layers are loaded")
    prompts, short_prompts = make_prompts(300, 3, 23), make_prompts(40, 1, 2)
    parts: dict[str, Callable[[], Any]] = {
        "compare": lambda: compare(models[True], prompts, COMPANY),
        "tight": lambda: compare(models[True], short_prompts, TIGHT),
        "cost": lambda: measure_cost(models),
        "contrast": lambda: compare(models[False], prompts, COMPANY),
    }
    for name in options.only.split():
        result[name] = parts[name]()
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    rows = [*result.get("compare", []), *result.get("tight", [])]
    if any(row["differ"] for row in rows):
        sys.exit("FAILED: answers differ")
    if rows:
        print("every answer is the same in any company")


if __name__ == "__main__":
    main()
