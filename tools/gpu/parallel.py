"""One GPU against several, for one model: tensor parallelism, in turns.

    python tools/gpu/parallel.py --json figures/e-tensor-parallel.json
    python tools/gpu/parallel.py --models Llama-3.1-8B --json OUT
    python tools/gpu/parallel.py --data-parallel --models gpt-oss-120b --batch 64,256
    python tools/gpu/parallel.py --expert-parallel --models gpt-oss-120b
    python tools/gpu/parallel.py --large --models Llama-3.3-70B --batch 1,8,64

With --expert-parallel each GPU has whole experts, where otherwise it has its part of
each. With --data-parallel each GPU has so many requests of its own, and they share the
experts: then "times" is against as many replicas. With --large the model fits no single
GPU, and steps stand beside the time in which each GPU reads its share of the bytes.

Random weights in real shapes; a model is gpt-oss's or one of speeds.py's. Both engines
are there at once where they fit, else one after the other. What they say of the same
tokens is compared first.
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
sys.path.append(str(Path(__file__).parents[1]))

import torch
from compare import full_steps, generate
from records import argument_parser, header, save
from speeds import config_of, model_argument

from simplellm import LLM, EngineConfig
from simplellm.apps.peaks import read_speed
from simplellm.apps.roofline import read_bytes

DEVICE = "cuda:0"  # and those behind it
CACHE = 10**10  # bytes
LENGTH = 128  # tokens of prompts and answers
PREFILL = 32, 2048
DRAWN = {"temperature": 1.0, "top_p": 0.9}


def opened(model: str, ranks: int, own: bool = False, whole: bool = False) -> LLM:
    """An LLM on so many GPUs, each with its ``own`` requests or ``whole`` experts."""
    sizes: Any = {"tensor_parallel_size": ranks}
    if ranks > 1:
        if own:
            sizes = {"data_parallel_size": ranks}
        sizes["enable_expert_parallel"] = own or whole
    config = EngineConfig(
        max_num_seqs=256 if own else 64,
        max_num_batched_tokens=8192,
        max_model_len=PREFILL[1] + LENGTH,
        cache_bytes=CACHE,
        enable_prefix_caching=False,
        **sizes,
    )
    begin = time.perf_counter()
    llm = LLM(model_argument(model), config, device=DEVICE, random_weights=True)
    print(f"{model}, {ranks}: {time.perf_counter() - begin:.1f} s", flush=True)
    return llm


def scores(llm: LLM) -> list[float]:
    """Log-probabilities of a prompt's tokens."""
    prompt = [(31 * n) % 997 for n in range(200)]
    (output,) = llm.generate(prompt, max_tokens=1, prompt_logprobs=0).result()
    return [entry.logprob for entry in output.prompt_logprobs or () if entry]


def step(llm: LLM, batch: int, **params: Any) -> tuple[float, list[int]]:
    """Milliseconds of a step, and the first tokens."""
    generate(llm, batch, LENGTH, 4, seed=1, **params)
    outputs, _ = generate(llm, batch, LENGTH, LENGTH, **params)
    return 1e3 * median(full_steps(llm, batch)), [one.token_ids[0] for one in outputs]


def prefill(llm: LLM, share: int) -> float:
    """Tokens a second of many prompts, ``share`` times as many."""
    count, length = share * PREFILL[0], PREFILL[1]
    seconds = min(generate(llm, count, length, 1, seed)[1] for seed in (1, 2, 3))
    return count * length / seconds


class Engines:
    """Engines of one model by their ranks, as many at once as fit."""

    def __init__(self, model: str, own: bool, whole: bool) -> None:
        self.model, self.shared = model, (own, whole)
        self.there = dict[int, LLM]()

    def __getitem__(self, ranks: int) -> LLM:
        if ranks not in self.there:
            try:
                self.there[ranks] = opened(self.model, ranks, *self.shared)
            except torch.OutOfMemoryError:
                self.close()
                self.there[ranks] = opened(self.model, ranks, *self.shared)
        return self.there[ranks]

    def close(self) -> None:
        """End all that are there."""
        for llm in self.there.values():
            llm.close()
        self.there.clear()


def measured(
    model: str, ranks: int, batches: list[int], own: bool = False, whole: bool = False
) -> dict[str, Any]:
    """The record of a model; ``batches`` are those of each GPU if they have ``own``."""
    share = {1: 1, ranks: ranks if own else 1}  # of an engine, beside one GPU's
    with contextlib.closing(Engines(model, own, whole)) as engines:
        both = [scores(engines[n]) for n in (ranks, 1)]
        errors = [abs(one - other) for one, other in zip(*both, strict=True)]
        print(f"  logprobs differ by {mean(errors):.4f}, {max(errors):.4f} at most")
        row: dict[str, Any] = {"model": model, "error": mean(errors), "decode": []}
        turns = [1, ranks, ranks, 1]
        if len(engines.there) < 2:
            turns = [1, 1, ranks, ranks]
        for batch in batches:
            steps = [(n, *step(engines[n], share[n] * batch)) for n in turns]
            each = {n: [ms for m, ms, _ in steps if m == n] for n in (1, ranks)}
            one, several = (next(t for m, _, t in steps if m == n) for n in (1, ranks))
            same = sum(a == b for a, b in zip(one, several, strict=False))
            times = min(each[1]) / min(each[ranks])
            row["decode"].append(
                {"batch": batch, "step_ms": [*each.values()], "times": times}
            )
            print(
                f"  batch {batch:3} {min(each[1]):8.3f} ms {min(each[ranks]):8.3f} ms"
                f" {times:6.2f} times; {same} first tokens equal",
                flush=True,
            )
        drawn = [(n, step(engines[n], 64 * share[n], **DRAWN)[0]) for n in turns]
        row["drawn_ms"] = [min(ms for m, ms in drawn if m == n) for n in (1, ranks)]
        print("  batch  64, drawn {:.3f} ms {:.3f} ms".format(*row["drawn_ms"]))
        rates = [(n, prefill(engines[n], share[n])) for n in turns]
        best = [max(rate for m, rate in rates if m == n) for n in (1, ranks)]
        times = best[1] / best[0] / share[ranks]
        row["prefill"] = {"tokens_per_second": best, "times": times}
        print(f"  prefill {best[0]:,.0f} {best[1]:,.0f} {times:.2f} times", flush=True)
    return row


def measured_large(model: str, ranks: int, batches: list[int]) -> dict[str, Any]:
    """The record of a model that fits no single GPU."""
    speed = read_speed(torch.device(DEVICE), 2**30)
    row: dict[str, Any] = {"model": model, "bytes_per_second": speed, "decode": []}
    with opened(model, ranks) as llm:
        for batch in batches:
            ms = min(step(llm, batch)[0] for _ in range(2))
            reads = read_bytes(config_of(model), batch, LENGTH + LENGTH // 2).total
            limit = 1e3 * reads / ranks / speed
            row["decode"].append({"batch": batch, "step_ms": ms, "limit_ms": limit})
            print(f"  batch {batch:3} {ms:8.3f} ms, {limit / ms:.0%} of the limit")
        row["prefill"] = max(prefill(llm, 1) for _ in range(2))
        print(f"  prefill {row['prefill']:,.0f}", flush=True)
    return row


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", default="gpt-oss-20b,Llama-3.1-8B")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--data-parallel", action="store_true")
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args()
    result = {**header(), "gpus": options.ranks, "rows": []}
    for model in options.models.split(","):
        batches = [int(batch) for batch in options.batch.split(",")]
        if options.large:
            row = measured_large(model, options.ranks, batches)
        else:
            ways = options.data_parallel, options.expert_parallel
            row = measured(model, options.ranks, batches, *ways)
        result["rows"].append(row)
        save(result, options.json)


if __name__ == "__main__":
    main()
