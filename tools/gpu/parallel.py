"""One GPU against several, for one model: tensor parallelism, in turns.

    python tools/gpu/parallel.py --json figures/e-tensor-parallel.json
    python tools/gpu/parallel.py --models Llama-3.1-8B --json OUT

Random weights in real shapes; a model is gpt-oss's or one of speeds.py's. Both engines
are there at once where they fit, else one after the other. What they say of the same
tokens is compared first.
"""

import contextlib
import math
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
from speeds import model_argument

from simplellm import LLM, EngineConfig

DEVICE = "cuda:0"  # and those behind it
CACHE = 10**10  # bytes
LENGTH = 128  # tokens of prompts and answers
PREFILL = 32, 2048
DRAWN = {"temperature": 1.0, "top_p": 0.9}


def opened(model: str, ranks: int) -> LLM:
    """An LLM on so many GPUs."""
    config = EngineConfig(
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        max_model_len=PREFILL[1] + LENGTH,
        cache_bytes=CACHE,
        enable_prefix_caching=False,
        tensor_parallel_size=ranks,
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


def prefill(llm: LLM) -> float:
    """Tokens a second of many prompts."""
    seconds = min(generate(llm, *PREFILL, 1, seed)[1] for seed in (1, 2, 3))
    return math.prod(PREFILL) / seconds


class Engines:
    """Engines of one model by their ranks, as many at once as fit."""

    def __init__(self, model: str) -> None:
        self.model, self.there = model, dict[int, LLM]()

    def __getitem__(self, ranks: int) -> LLM:
        if ranks not in self.there:
            try:
                self.there[ranks] = opened(self.model, ranks)
            except torch.OutOfMemoryError:
                self.close()
                self.there[ranks] = opened(self.model, ranks)
        return self.there[ranks]

    def close(self) -> None:
        """End all that are there."""
        for llm in self.there.values():
            llm.close()
        self.there.clear()
        torch.cuda.empty_cache()


def measured(model: str, ranks: int, batches: list[int]) -> dict[str, Any]:
    """The record of a model."""
    with contextlib.closing(Engines(model)) as engines:
        both = [scores(engines[n]) for n in (ranks, 1)]
        errors = [abs(one - other) for one, other in zip(*both, strict=True)]
        print(f"  logprobs differ by {mean(errors):.4f}, {max(errors):.4f} at most")
        row: dict[str, Any] = {"model": model, "error": mean(errors), "decode": []}
        turns = [1, ranks, ranks, 1]
        if len(engines.there) < 2:
            turns = [1, 1, ranks, ranks]
        for batch in batches:
            steps = [(n, *step(engines[n], batch)) for n in turns]
            each = {n: [ms for m, ms, _ in steps if m == n] for n in (1, ranks)}
            one, several = (next(t for m, _, t in steps if m == n) for n in (1, ranks))
            same = sum(a == b for a, b in zip(one, several, strict=True))
            times = min(each[1]) / min(each[ranks])
            row["decode"].append(
                {"batch": batch, "step_ms": [*each.values()], "times": times}
            )
            print(
                f"  batch {batch:3} {min(each[1]):8.3f} ms {min(each[ranks]):8.3f} ms"
                f" {times:6.2f} times; {same} first tokens equal",
                flush=True,
            )
        drawn = [(n, step(engines[n], 64, **DRAWN)[0]) for n in turns]
        row["drawn_ms"] = [min(ms for m, ms in drawn if m == n) for n in (1, ranks)]
        print("  batch  64, drawn {:.3f} ms {:.3f} ms".format(*row["drawn_ms"]))
        rates = [(n, prefill(engines[n])) for n in turns]
        best = [max(rate for m, rate in rates if m == n) for n in (1, ranks)]
        times = best[1] / best[0]
        row["prefill"] = {"tokens_per_second": best, "times": times}
        print(f"  prefill {best[0]:,.0f} {best[1]:,.0f} {times:.2f} times", flush=True)
    return row


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", default="gpt-oss-20b,Llama-3.1-8B")
    parser.add_argument("--batch", default="1,8,64")
    options = parser.parse_args()
    result = {**header(), "gpus": options.ranks, "rows": []}
    for model in options.models.split(","):
        batches = [int(batch) for batch in options.batch.split(",")]
        result["rows"].append(measured(model, options.ranks, batches))
        save(result, options.json)


if __name__ == "__main__":
    main()
