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
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from simplellm.checkpoint import Packed, RandomCheckpoint
from simplellm.config import MODELS
from simplellm.engine import Event, Submission, Ticket
from simplellm.graphs import GPUConfig, GraphEngine
from simplellm.kernels import experts
from simplellm.kernels.experts import Tiling, down, gate_up, repack
from simplellm.kernels.forward import FUSED, Fused
from simplellm.kernels.routing import dispatch
from simplellm.model import Transformer
from simplellm.weights import MXFP4
from simplellm.sampler import SamplingParams

MODEL = MODELS["gpt-oss-120b"]
REQUESTS = 64
started = time.perf_counter()


def say(text: str) -> None:
    print(f"{time.perf_counter() - started:6.1f} {text}", flush=True)


def build(layers: int) -> Transformer:
    """A random model of so many layers."""
    types = MODEL.layer_types[:layers]
    config = replace(MODEL, num_hidden_layers=layers, layer_types=types)
    checkpoint = RandomCheckpoint(config, dtype=torch.bfloat16, device="cuda")

    def take(name: str) -> Any:
        weight = checkpoint[name]
        if isinstance(weight, Packed):
            return MXFP4(weight.blocks, weight.scales)
        exact = name.endswith("norm.weight")
        return weight.to(torch.float32 if exact else torch.bfloat16)

    return Transformer(config, take, FUSED)


def make_engine(model: Transformer, invariant: bool, **options: Any) -> GraphEngine:
    config = GPUConfig(
        **{
            "max_num_seqs": REQUESTS,
            "max_model_len": 2304,
            "share_prefixes": False,
            "batch_invariant": invariant,
        }
        | ({} if "num_pages" in options else {"cache_bytes": 4 * 2**30})
        | options
    )
    forward = partial(Fused, batch_invariant=config.batch_invariant)
    return GraphEngine(model, config, forward)


def make_prompts(prefix: int, step: int, other_step: int) -> list[list[int]]:
    """Half of them with a common beginning of ``prefix`` tokens, taking turns.

    Within each half a prompt is one step longer than the last.
    """
    generator = torch.Generator().manual_seed(0)

    def some(length: int) -> list[int]:
        tokens = torch.randint(MODEL.vocab_size, (length,), generator=generator)
        return tokens.tolist()

    shared, half = some(prefix), REQUESTS // 2
    prompts = [shared + some(1 + step * n) for n in range(half)]
    prompts += [some(1 + other_step * n) for n in range(half)]
    return [prompts[n // 2 + n % 2 * half] for n in range(REQUESTS)]


def submit(
    engine: GraphEngine, prompts: Sequence[Sequence[int]], lengths: Sequence[int]
) -> list[list[Event]]:
    """Queue greedy requests; the lists that get their events."""
    received: list[list[Event]] = [[] for _ in prompts]
    for prompt, length, events in zip(prompts, lengths, received, strict=True):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        request = Submission(list(prompt), params, frozenset(), length)
        engine.submit([[Ticket(request, events.append)]])
    return received


def answers(
    engine: GraphEngine, prompts: Sequence[Sequence[int]], batch: int
) -> list[list[int]]:
    """Greedy continuations, ``batch`` prompts at once."""
    lengths = [24 + n % 3 * 12 for n in range(len(prompts))]
    found = []
    for first in range(0, len(prompts), batch):
        part = slice(first, first + batch)
        received = submit(engine, prompts[part], lengths[part])
        while engine.scheduler.jobs or engine.flights:
            engine.step()
        for events in received:
            if events[-1].error:
                raise events[-1].error
            found.append([e.token_id for e in events if e.token_id is not None])
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
    model: Transformer,
    invariant: bool,
    prompts: Sequence[Sequence[int]],
    company: Company,
) -> list[dict[str, Any]]:
    """How many answers are others in company than alone.

    Raises RuntimeError if the company is not what its name says.
    """
    alone = answers(make_engine(model, invariant), prompts, 1)
    tokens = {token for answer in alone for token in answer}
    say(f"{len(tokens)} distinct tokens in {sum(map(len, alone))} alone")
    rows = []
    for name, batch, options, times in company:
        engine = make_engine(model, invariant, **options)
        for _ in range(times):
            got = answers(engine, prompts, batch)
        stats = engine.meter.stats(engine.scheduler)
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
            f"batch_invariant={invariant!s:<5} {name:<18} {len(wrong):3} of "
            f"{len(prompts)} differ, {stats.preemptions} preemptions, "
            f"{stats.cache_hit_rate:.0%} hits"
        )
        if "few" in name and not stats.preemptions:
            raise RuntimeError(f"FAILED: {name}: nothing was preempted")
        if "shared" in name and not stats.cache_hit_rate:
            raise RuntimeError(f"FAILED: {name}: no page was found again")
        del engine
        gc.collect()  # it refers to itself
    return rows


def step_ms(engine: GraphEngine, batch: int) -> float:
    """Milliseconds of a step in which all requests of a batch get a token."""
    generator = torch.Generator().manual_seed(batch)
    shape = batch, 128
    prompts = torch.randint(MODEL.vocab_size, shape, generator=generator).tolist()
    received = submit(engine, prompts, [100] * batch)
    times = []
    while engine.scheduler.jobs or engine.flights:
        before = sum(map(len, received))
        start = time.perf_counter()
        engine.step()
        if sum(map(len, received)) - before == batch:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def prefill_ms(engine: GraphEngine) -> float:
    """Milliseconds until four prompts of 2,048 tokens have their first token."""
    times = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        shape = 4, 2048
        prompts = torch.randint(MODEL.vocab_size, shape, generator=generator).tolist()
        start = time.perf_counter()
        submit(engine, prompts, [1] * 4)
        while engine.scheduler.jobs or engine.flights:
            engine.step()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def measure_cost(model: Transformer) -> dict[str, dict[str, float]]:
    """Times with the switch and without, and the ratio."""
    cases: dict[str, Callable[[GraphEngine], float]] = {
        f"batch {batch}": partial(step_ms, batch=batch) for batch in (1, 8, 64)
    }
    cases["prefill 4 x 2048"] = prefill_ms
    found: dict[bool, dict[str, float]] = {}
    for invariant in (False, True):
        engine = make_engine(model, invariant)
        found[invariant] = {name: case(engine) for name, case in cases.items()}
        del engine
    rows = {}
    for name in cases:
        plain, slow = found[False][name], found[True][name]
        rows[name] = {"ms": plain, "invariant_ms": slow, "ratio": slow / plain}
        say(f"{name:<18} {plain:8.2f} ms {slow:8.2f} ms, {slow / plain:.2f} times")
    return rows


def random_weight(rows: int, columns: int) -> MXFP4:
    count, blocks = MODEL.num_local_experts, columns // 32
    shape = count, rows, blocks, 16
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    scales = torch.randint(118, 122, shape[:3], dtype=torch.uint8, device="cuda")
    return MXFP4(codes, scales)


def compare_tilings() -> dict[str, str]:
    """Whether the tilings of the experts' kernels give the bits of the invariant one.

    The rows of a prefix of the tokens are compared as well, to see whether a row's
    bits depend on how many others an expert has.
    """
    torch.manual_seed(0)
    hidden, inner = MODEL.hidden_size, MODEL.intermediate_size
    first = repack(random_weight(2 * inner, hidden), paired=True)
    second = repack(random_weight(hidden, inner), paired=False)
    count, top_k = MODEL.num_local_experts, MODEL.num_experts_per_tok
    bias = torch.randn(count, 2 * inner, device="cuda").bfloat16()
    bias_down = torch.randn(count, hidden, device="cuda").bfloat16()
    x = torch.randn(2048, hidden, device="cuda").bfloat16()
    logits = torch.randn(2048, count, device="cuda")
    scores, ids = logits.topk(top_k)
    scores, ids = scores.softmax(-1), ids.int()
    limits = 7.0, 1.702

    def run(tokens: int, up: Tiling, back: Tiling) -> torch.Tensor:
        pairs = dispatch(ids[:tokens].contiguous(), count, up.tokens)
        inner = gate_up(x[:tokens], first, bias, pairs, *limits, up)
        chosen = scores[:tokens].contiguous()
        return down(inner, second, bias_down, chosen, pairs, back)

    want = run(2048, experts.INVARIANT, experts.INVARIANT)
    rows = {}
    trials = [(experts.INVARIANT, experts.INVARIANT)]
    trials += [(up, back) for *_, up, back in experts.TUNED]
    for up, back in dict.fromkeys(trials):  # some are in several rows
        for tokens in (1, 2, 7, 64, 500, 2048):
            name = f"T{tokens} {tuple(up)} {tuple(back)}"
            got = run(tokens, up, back)
            same = (got == want[:tokens]).flatten(1).all(1)
            rows[name] = f"{int(same.sum())} of {tokens}"
            say(f"{name}: {rows[name]} rows have the same bits")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", default="compare tight cost contrast tilings")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": f"python tools/gpu/invariance.py --only '{options.only}'",
        "layers": options.layers,
    }

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(result, indent=1))

    prompts, short_prompts = make_prompts(300, 3, 23), make_prompts(40, 1, 2)
    if options.only != "tilings":
        model = build(options.layers)
        say(f"{options.layers} layers are loaded")
    if "compare" in options.only:
        result["compare"] = compare(model, True, prompts, COMPANY)
        save()
    if "tight" in options.only:
        result["tight"] = compare(model, True, short_prompts, TIGHT)
        save()
    if "cost" in options.only:
        result["cost"] = measure_cost(model)
        save()
    if "contrast" in options.only:
        result["contrast"] = compare(model, False, prompts, COMPANY)
        result["contrast tight"] = compare(model, False, short_prompts, TIGHT)
        save()
    if "tilings" in options.only:
        result["tilings"] = compare_tilings()
        save()
    rows = [*result.get("compare", []), *result.get("tight", [])]
    if any(row["differ"] for row in rows):
        sys.exit("FAILED: answers differ")
    if rows:
        print("every answer is the same in any company")


if __name__ == "__main__":
    main()
