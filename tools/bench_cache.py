"""Measure what a KV cache saves: figures/07-cache.json.

One prompt is continued greedily by the embedded model, in float32 on the CPU, with no
cache, with one that concatenates, and with slots. All three must say the same. Then
transformers' generate() continues it with the same checkpoint and threads, in turns
with our decode: transformers in float32 and in bfloat16, which is what it loads unless
told otherwise; we in float32, with our experts packed as on disk, and unpacked. All
run on one thread, and CPU time is measured, which other programs disturb least.

    python tools/bench_cache.py                      1,000 tokens, a few minutes
    python tools/bench_cache.py --new-tokens 100     quicker
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from operator import eq
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GptOssForCausalLM, Mxfp4Config

from simplellm.attention import NoCache, attention
from simplellm.cache import Chunk, SlotCache
from simplellm.model import EMBEDDED, TORCH, Transformer, load_model
from simplellm.moe import Experts, experts, swiglu
from simplellm.mxfp4 import linear
from simplellm.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "<|start|>user<|message|>What is 478 + 856?<|end|><|start|>assistant"
ROUNDS = 5  # of all but recomputing, which takes minutes; medians count


class ConcatCache:
    """The naive cache: each step copies everything into tensors one token longer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        window: int | None,
    ) -> Tensor:
        if layer in self.layers:
            old_k, old_v = self.layers[layer]
            k, v = torch.cat([old_k, k]), torch.cat([old_v, v])
        self.layers[layer] = k, v
        return attention(q, k, v, sinks, window=window)


def column_major(weight: Tensor) -> Tensor:
    """The same numbers; a single row times this is one pass over whole cache lines."""
    return weight.transpose(-1, -2).contiguous().transpose(-1, -2)


def unpack(weights: Experts) -> Experts:
    """All experts as float32: 7.5 times the memory, no decoding in every step."""
    gate_up, down = (
        w if isinstance(w, Tensor) else w.dequantize(torch.float32)
        for w in (weights.gate_up, weights.down)
    )
    return replace(weights, gate_up=column_major(gate_up), down=column_major(down))


def few_experts(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, weights: Experts
) -> Tensor:
    """What `experts` does; for one token, without sorting and with one SwiGLU."""
    if len(x) > 1:
        return experts(x, expert_ids, expert_weights, weights)
    chosen = expert_ids[0].tolist()
    gate_up = [linear(x, weights.gate_up[e], weights.gate_up_bias[e]) for e in chosen]
    hidden = swiglu(torch.cat(gate_up), weights.limit, weights.alpha).split(1)
    down = [
        linear(h, weights.down[e], weights.down_bias[e])
        for h, e in zip(hidden, chosen, strict=True)
    ]
    return expert_weights @ torch.cat(down)


UNPACKED = replace(TORCH, experts=few_experts, prepare=unpack)

Step = Callable[[list[int]], int]  # all tokens so far -> the next one


def greedy(model: Transformer, cache: Any, tokens: list[int], start: int) -> int:
    """The next token after ``tokens``, of which the cache holds ``start``."""
    hidden = model(
        torch.tensor(tokens[start:]), torch.arange(start, len(tokens)), cache
    )
    return int(model.lm_head(hidden[-1:]).argmax())


def recompute(model: Transformer) -> Step:
    return lambda tokens: greedy(model, NoCache([len(tokens)]), tokens, 0)


def concat(model: Transformer) -> Step:
    cache, done = ConcatCache(), 0

    def step(tokens: list[int]) -> int:
        nonlocal done
        start, done = done, len(tokens)
        return greedy(model, cache, tokens, start)

    return step


def slot(model: Transformer, capacity: int) -> Step:
    cache, done = SlotCache(model.config, max_num_seqs=1, max_model_len=capacity), 0

    def step(tokens: list[int]) -> int:
        nonlocal done
        start, done = done, len(tokens)
        if start == 0:
            cache.manager.add(0, tokens)
        cache.manager.grow(0, done)
        chunk = Chunk(0, start, done - start)
        token = greedy(model, cache.step([chunk]), tokens, start)
        cache.manager.commit(0, tokens, done)
        return token

    return step


@torch.inference_mode()
def timed(step: Step, prompt: list[int], new: int) -> tuple[list[int], list[float]]:
    """The new tokens and the seconds that each one took."""
    tokens, seconds = list(prompt), []
    for _ in range(new):
        begin = time.process_time()
        token = step(tokens)
        seconds.append(time.process_time() - begin)
        tokens.append(token)
    return tokens[len(prompt) :], seconds


def against_recompute(
    model: Transformer, prompt: list[int], new: int
) -> dict[str, Any]:
    """Milliseconds of every token, and how many times as long the others take."""

    def rounds(make: Callable[[], Step], count: int) -> tuple[list[int], list[float]]:
        """The tokens, and for each one the median of its seconds."""
        said, seconds = zip(
            *(timed(make(), prompt, new) for _ in range(count)), strict=True
        )
        return said[0], [statistics.median(s) for s in zip(*seconds, strict=True)]

    runs = {
        "slot": rounds(lambda: slot(model, len(prompt) + new), ROUNDS),
        "concat": rounds(lambda: concat(model), ROUNDS),
        "recompute": rounds(lambda: recompute(model), 1),
    }
    assert runs["slot"][0] == runs["concat"][0] == runs["recompute"][0]
    total = {name: sum(seconds) for name, (_, seconds) in runs.items()}
    return {
        "positions": list(range(len(prompt), len(prompt) + new)),
        "ms": {n: [round(1e3 * s, 3) for s in times] for n, (_, times) in runs.items()},
        "seconds": total,
        "recompute_over_slot": total["recompute"] / total["slot"],
        "concat_over_slot": total["concat"] / total["slot"],
    }


def against_transformers(prompt: list[int], new: int) -> dict[str, Any]:
    """Milliseconds a token at batch 1, the prompt included: medians of all rounds."""

    def generate(dtype: torch.dtype) -> Callable[[], list[int]]:
        theirs = GptOssForCausalLM.from_pretrained(
            EMBEDDED, dtype=dtype, quantization_config=Mxfp4Config(dequantize=True)
        ).eval()
        theirs.generation_config.eos_token_id = None  # go on behind the answer's end

        def run() -> list[int]:
            output = theirs.generate(
                torch.tensor([prompt]), max_new_tokens=new, do_sample=False
            )
            return output[0, len(prompt) :].tolist()

        return run

    packed, unpacked = load_model(device="cpu"), load_model(backend=UNPACKED)
    for module in unpacked.modules():
        if isinstance(weight := getattr(module, "weight", None), Tensor):
            weight.data = column_major(weight.data) if weight.ndim == 2 else weight
    capacity = len(prompt) + new
    engines: dict[str, Callable[[], list[int]]] = {
        "transformers float32": generate(torch.float32),
        "transformers bfloat16": generate(torch.bfloat16),
        "packed": lambda: timed(slot(packed, capacity), prompt, new)[0],
        "unpacked": lambda: timed(slot(unpacked, capacity), prompt, new)[0],
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    said = {}
    for _ in range(ROUNDS + 1):
        for name, engine in engines.items():
            begin = time.process_time()
            said[name] = engine()
            seconds[name].append(time.process_time() - begin)
    median = {n: statistics.median(times[1:]) for n, times in seconds.items()}
    return {
        "new_tokens": new,
        "ms": {name: 1e3 * value / new for name, value in median.items()},
        "times_as_long": {
            f"{theirs} over {ours}": median[theirs] / median[ours]
            for theirs in ("transformers float32", "transformers bfloat16")
            for ours in ("packed", "unpacked")
        },
        "same_tokens": sum(map(eq, said["packed"], said["transformers float32"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new-tokens", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(EMBEDDED / "tokenizer.json")
    prompt = tokenizer.encode(QUESTION, special=True)
    record = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, 1 thread of a CPU",
        "clock": "CPU time of the process",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": " ".join(["python tools/bench_cache.py", *sys.argv[1:]]),
        "prompt_tokens": len(prompt),
        "new_tokens": options.new_tokens,
        "cache": against_recompute(
            load_model(device="cpu"), prompt, options.new_tokens
        ),
        "batch_1": against_transformers(prompt, min(options.new_tokens, 200)),
    }
    path = ROOT / "figures/07-cache.json"
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(f"recompute / slot {record['cache']['recompute_over_slot']:.1f}")
    print(f"concat / slot    {record['cache']['concat_over_slot']:.2f}")
    print(json.dumps(record["batch_1"], indent=1))


if __name__ == "__main__":
    main()
