"""Measure the course's techniques on a GPU: figures/gpu-ledger.json.

    python tools/bench_ledger.py                      all parts, three minutes
    python tools/bench_ledger.py --only mxfp4,cache   some, printed and not written

Each part is for the ledger of one chapter and compares the technique with what it
replaces, in the shapes of gpt-oss with random weights. Chapters 3 to 7 run the PyTorch
code that they show, chapters 8 to 10 the engine with all kernels where it says so.
"""

import argparse
import gc
import json
import random
import shlex
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from heapq import nlargest
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from simplellm.attention import attention
from simplellm.bench import (
    Bench,
    Plan,
    Recorder,
    engine_config,
    shortest,
)
from simplellm.checkpoint import RandomCheckpoint
from simplellm.config import GPT_OSS_20B
from simplellm.engine import LLM as PlainLLM
from simplellm.engine import EngineConfig
from simplellm.graphs import GPUConfig
from simplellm.llm import LLM
from simplellm.model import load_model
from simplellm.moe import Experts, experts, route
from simplellm.weights import MXFP4, VALUES, decode_scales, linear
from simplellm.report import describe_device, versions
from simplellm.sampler import SamplingParams, gumbel_noise

ROOT = Path(__file__).resolve().parents[1]
MODEL = "gpt-oss-20b"
CUDA = torch.device("cuda")
Result = dict[str, Any]


def milliseconds(work: Callable[[], object], repeats: int = 10) -> float:
    return 1e3 * shortest(work, CUDA, repeats)


def random_experts(layer: int = 0) -> tuple[Tensor, Tensor, Experts]:
    """A layer's router weight and bias, and its experts."""
    source = RandomCheckpoint(GPT_OSS_20B, device=CUDA)
    name = f"layers.{layer}"

    def take(part: str) -> Any:
        return source[f"{name}.experts.{part}"]

    weights = Experts(
        gate_up=MXFP4(*take("gate_up")),
        gate_up_bias=take("gate_up_bias"),
        down=MXFP4(*take("down")),
        down_bias=take("down_bias"),
        limit=GPT_OSS_20B.swiglu_limit,
        alpha=GPT_OSS_20B.swiglu_alpha,
    )
    router = source[f"{name}.router.weight"], source[f"{name}.router.bias"]
    return *router, weights  # type: ignore[return-value]


def gathers(weight: MXFP4) -> Tensor:
    """Dequantize as chapter 3 does at first: look up both nibbles, then scale."""
    sixteen = torch.tensor(VALUES, device=CUDA, dtype=torch.bfloat16)
    out = sixteen.new_empty(*weight.scales.shape, 32)
    out[..., 0::2] = sixteen[(weight.blocks & 15).int()]
    out[..., 1::2] = sixteen[(weight.blocks >> 4).int()]
    return (out * decode_scales(weight.scales, out.dtype)[..., None]).flatten(-2)


def mxfp4() -> Result:
    """Chapter 3: dequantize eight experts; multiply one by a token."""
    packed = random_experts()[2].gate_up
    assert isinstance(packed, MXFP4)
    eight, one = packed[:8], packed[0]
    assert torch.equal(gathers(one), one.dequantize())
    count = 32 * eight.scales.numel()
    plain = one.dequantize()
    x = torch.randn(1, plain.shape[1], device=CUDA, dtype=torch.bfloat16)
    seconds = shortest(eight.dequantize, CUDA, 10)
    return {
        "elements": count,
        "table_ms": 1e3 * seconds,
        "gathers_ms": milliseconds(lambda: gathers(eight)),
        "read_and_written": (eight.nbytes + 2 * count) / seconds,
        "packed_linear_us": 1e3 * milliseconds(lambda: linear(x, one)),
        "plain_linear_us": 1e3 * milliseconds(lambda: linear(x, plain)),
    }


def every_expert(x: Tensor, ids: Tensor, scores: Tensor, weights: Experts) -> Tensor:
    """All experts on all tokens; most of it is thrown away."""
    table = scores.new_zeros(len(x), len(weights.gate_up_bias)).scatter_(1, ids, scores)
    out = torch.zeros_like(x)
    everyone = torch.zeros(len(x), 1, dtype=torch.int64, device=x.device)
    for expert in range(table.shape[1]):
        one = torch.ones_like(everyone, dtype=x.dtype)
        y = experts(x, everyone + expert, one, weights)
        out += y * table[:, expert : expert + 1]
    return out


def dispatch() -> Result:
    """Chapter 4: a layer of the 20b's experts, in PyTorch."""
    router, bias, weights = random_experts()
    rows = []
    for tokens in (1, 16, 256):
        x = torch.randn(tokens, router.shape[1], device=CUDA, dtype=torch.bfloat16)
        ids, scores = route(x, router, bias, GPT_OSS_20B.num_experts_per_tok)
        kept = partial(experts, x, ids, scores, weights)
        naive = partial(every_expert, x, ids, scores, weights)
        times = {"kept_ms": milliseconds(kept, 5), "naive_ms": milliseconds(naive, 3)}
        rows.append({"tokens": tokens, **times})
    return {"rows": rows}


def windows() -> Result:
    """Chapter 5: one layer's attention over 8,192 tokens, full and sliding."""
    tokens, heads, kv_heads, dim = 8192, 64, 8, 64
    shape = (tokens, heads + 2 * kv_heads, dim)
    qkv = torch.randn(shape, device=CUDA, dtype=torch.bfloat16)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    sinks = torch.randn(heads, device=CUDA)
    full = milliseconds(lambda: attention(q, k, v, sinks), 3)
    sliding = milliseconds(lambda: attention(q, k, v, sinks, window=128), 3)
    return {"tokens": tokens, "full_ms": full, "sliding_ms": sliding}


def recompute() -> Result:
    """Chapter 6: all tokens again, PyTorch, the 20b; and the noise of 64 rows."""
    model = load_model(MODEL, device=CUDA, random_weights=True)
    vocab_size = model.config.vocab_size
    ids = torch.randint(vocab_size, (1024,), device=CUDA)
    times = {n: milliseconds(partial(model.logits, ids[:n]), 2) for n in (16, 1024)}
    seeds = torch.arange(64, device=CUDA)
    logits = torch.randn(64, vocab_size, device=CUDA)
    return {
        "step_ms": times,
        "noise_us": 1e3 * milliseconds(lambda: gumbel_noise(seeds, seeds, vocab_size)),
        "multinomial_us": 1e3
        * milliseconds(lambda: torch.multinomial(logits.softmax(-1), 1)),
    }


def step_ms(llm: Any, batch: int, length: int, tokens: int) -> float:
    """Milliseconds of a step that decodes for every request."""
    run = Bench(llm, seed=0).run(batch, length, tokens)
    return 1e3 * median(run.full_steps(batch))


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def cache() -> Result:
    """Chapters 7 and 8: the 20b in PyTorch after 1,000 tokens, in steps of 1 and 32."""
    found: Result = {"context": 1000}
    common: dict[str, Any] = {"max_model_len": 1056, "cache_bytes": 2**33}
    common |= {"max_num_batched_tokens": 8192, "prefill_chunk": 8192}
    ways = {
        "recompute": EngineConfig(cache="none", share_prefixes=False),
        "slot": EngineConfig(cache="slot", max_num_seqs=32, **common),
        "paged": EngineConfig(cache="paged", max_num_seqs=32, **common),
    }
    for name, config in ways.items():
        with PlainLLM(MODEL, config, random_weights=True) as llm:
            found[name] = {"1": step_ms(llm, 1, 1000, 8)}
            if name != "recompute":
                found[name]["32"] = step_ms(llm, 32, 1000, 12)
        del llm
        free()
    return found


def first_tokens(llm: PlainLLM, prompts: list[list[int]]) -> list[float]:
    """Milliseconds to the first token of prompts, one after the other."""
    params = SamplingParams(temperature=0, max_tokens=1)
    times = []
    for prompt in prompts:
        start = time.perf_counter()
        llm.generate([prompt], params).result()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(GPT_OSS_20B.vocab_size) for _ in range(count)]


def prefix() -> Result:
    """Chapter 8: first token with a shared beginning, all kernels, the 20b."""
    rng, found = random.Random(0), {}
    with LLM(MODEL, GPUConfig(max_num_seqs=4), random_weights=True) as llm:
        for length in (1000, 16_000):
            first_tokens(llm, [tokens(rng, length + 30) for _ in range(3)])
            shared = tokens(rng, length)
            misses = [tokens(rng, length + 30) for _ in range(5)]
            hits = [shared + tokens(rng, 30) for _ in range(6)]
            found[str(length)] = {
                "miss_ms": median(first_tokens(llm, misses)),
                "hit_ms": median(first_tokens(llm, hits)[1:]),
            }
    del llm
    free()
    return found


def served(llm: PlainLLM, prompts: list[list[int]], lengths: list[int]) -> float:
    """Seconds for all requests at once."""
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        for length in lengths
    ]
    start = time.perf_counter()
    llm.generate(prompts, params).result()
    return time.perf_counter() - start


def continuous() -> Result:
    """Chapter 9: 128 requests at most 32 at a time, all kernels, the 20b."""
    rng = random.Random(0)
    prompts = [tokens(rng, rng.randint(16, 256)) for _ in range(128)]
    lengths = {
        "log-normal": [
            min(1000, max(4, round(60 * rng.lognormvariate(0, 1)))) for _ in prompts
        ],
        "one in ten long": [
            rng.randint(600, 1000) if rng.random() < 0.1 else rng.randint(20, 80)
            for _ in prompts
        ],
    }
    found: Result = {name: {"tokens": sum(each)} for name, each in lengths.items()}
    for way in ("static", "continuous"):
        config = GPUConfig(max_num_seqs=32, continuous=way == "continuous")
        with LLM(MODEL, config, random_weights=True) as llm:
            served(llm, prompts[:40], [8] * 40)
            for turn, (name, each) in enumerate(lengths.items()):
                fresh = [[token ^ (turn + 1) for token in p] for p in prompts]
                found[name][way] = served(llm, fresh, each)
        del llm
        free()
    return found


def gaps_beside(llm: PlainLLM, rng: random.Random, length: int) -> Result:
    """The gaps of 8 streams while a prompt of ``length`` tokens arrives."""
    engine = llm.engine

    def record() -> Recorder:
        with engine.lock:
            engine.meter = meter = Recorder()
        return meter

    prompt = tokens(rng, length)
    before = record()
    many = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    running = llm.generate([tokens(rng, 100) for _ in range(8)], many)
    while engine.stats().steps < 200:
        time.sleep(0.001)
    meanwhile = record()  # the streams' own beginning is none of their gaps
    (first,) = first_tokens(llm, [prompt])
    with engine.lock:
        found = set(meanwhile.itl)  # in a step all streams have the same gap
    running.cancel()
    while engine.stats().running:
        time.sleep(0.001)
    return {
        "gap_ms": 1e3 * max(found),
        "longest_ms": [1e3 * gap for gap in nlargest(4, found)],
        "median_ms": 1e3 * median(before.itl),
        "first_token_ms": first,
    }


def gaps() -> Result:
    """Chapter 9: the longest gap of 8 streams while 32,000 tokens arrive."""
    rng, length = random.Random(0), 32_000
    found: Result = {"prompt": length, "streams": 8}
    ways = {"whole": (33_000, None), "chunks of 8192": (8192, 8192)}
    ways["chunks of 1024"] = (1032, 1024)
    for name, (budget, chunk) in ways.items():
        config = GPUConfig(
            max_num_seqs=16, max_num_batched_tokens=budget, prefill_chunk=chunk
        )
        with LLM(MODEL, config, random_weights=True) as llm:
            # Decodes beside chunks may need kernels that neither needs alone.
            gaps_beside(llm, rng, length)
            found[name] = gaps_beside(llm, rng, length)
        del llm
        free()
    return found


def padding() -> Result:
    """Chapter 10: a batch just above a bucket, all kernels, the 20b."""
    config = engine_config(Plan((64,), 128, 64), GPUConfig())
    with LLM(MODEL, config, random_weights=True) as llm:
        step_ms(llm, 32, 128, 16)
        sizes = (16, 17, 24, 32, 33, 48)
        return {"step_ms": {size: step_ms(llm, size, 128, 64) for size in sizes}}


PARTS: dict[str, Callable[[], Result]] = {
    "mxfp4": mxfp4,
    "dispatch": dispatch,
    "windows": windows,
    "recompute": recompute,
    "cache": cache,
    "prefix": prefix,
    "continuous": continuous,
    "gaps": gaps,
    "padding": padding,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help=f"renew these of {','.join(PARTS)}")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU is there to be measured")
    chosen = options.only.split(",") if options.only else list(PARTS)
    about: Result = {
        "date": date.today().isoformat(),
        "device": describe_device(CUDA),
        "versions": versions(),
        "command": shlex.join(["python", "tools/bench_ledger.py", *sys.argv[1:]]),
        "model": MODEL,
    }
    path = ROOT / "figures/gpu-ledger.json"
    record = about
    if options.only:  # the other parts stay as they were recorded
        record = json.loads(path.read_text(encoding="utf-8"))
        renewed = record.setdefault("renewed", {})
        renewed.update(dict.fromkeys(chosen, about))
    for name in chosen:
        start = time.perf_counter()
        try:
            record[name] = PARTS[name]()
        except Exception as error:  # the other parts are worth having
            record[name] = {"failed": repr(error)}
        free()
        seconds = time.perf_counter() - start
        print(f"{name} ({seconds:.0f} s): {json.dumps(record[name])}", flush=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
