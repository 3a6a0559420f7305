"""Measure what a KV cache saves: figures/07-cache.json.

One prompt is continued greedily by the embedded model, in float32 on the CPU, with no
cache, with one that concatenates, and with slots. All three must say the same. Then
transformers' generate() continues it with the same checkpoint and threads, in turns
with ours: transformers in float32 and in bfloat16, which is what it loads unless told
otherwise; we in float32, with our experts packed as on disk, with the CPU's backend,
and with that behind the LLM of chapter 9. All run on one thread, and CPU time is
measured, which other programs disturb least.

    OMP_NUM_THREADS=1 python tools/bench_cache.py              all, minutes
    OMP_NUM_THREADS=1 python tools/bench_cache.py --batch-1    only transformers
    python tools/bench_cache.py --batch-1 --threads 2          that, elapsed, no record
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
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
from simplellm.cpu import CPU
from simplellm.engine import LLM, EngineConfig
from simplellm.model import EMBEDDED, Transformer, load_model
from simplellm.sampler import SamplingParams
from simplellm.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "figures/07-cache.json"
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


def against_transformers(
    prompt: list[int], new: int, clock: Callable[[], float] = time.process_time
) -> dict[str, Any]:
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

    packed = load_model(device="cpu")
    cpu = load_model(device="cpu", backend=CPU)
    # The prompt is the same in each round; its pages must not be found again.
    llm = LLM(config=EngineConfig(share_prefixes=False), device="cpu")
    greedy = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    capacity = len(prompt) + new
    engines: dict[str, Callable[[], list[int]]] = {
        "transformers float32": generate(torch.float32),
        "transformers bfloat16": generate(torch.bfloat16),
        "packed": lambda: timed(slot(packed, capacity), prompt, new)[0],
        "CPU": lambda: timed(slot(cpu, capacity), prompt, new)[0],
        "LLM": lambda: llm.generate([prompt], greedy).result()[0].token_ids,
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    said = {}
    for _ in range(ROUNDS + 1):
        for name, engine in engines.items():
            begin = clock()
            said[name] = engine()
            seconds[name].append(clock() - begin)
    llm.close()

    def ratio(theirs: str, ours: str) -> float:
        rounds = zip(seconds[theirs][1:], seconds[ours][1:], strict=True)
        return statistics.median(a / b for a, b in rounds)

    theirs, ours = list(engines)[:2], list(engines)[2:]
    median = {n: statistics.median(times[1:]) for n, times in seconds.items()}
    return {
        "new_tokens": new,
        "ms": {name: 1e3 * value / new for name, value in median.items()},
        "times_as_long": {f"{a} over {b}": ratio(a, b) for a in theirs for b in ours},
        "same_tokens": {
            name: sum(map(eq, said[name], said["transformers float32"]))
            for name in ours
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new-tokens", type=int, default=1000)
    parser.add_argument("--batch-1", action="store_true", help="only transformers")
    parser.add_argument("--threads", type=int, default=1, help="for --batch-1")
    options = parser.parse_args()
    torch.set_num_threads(options.threads if options.batch_1 else 1)
    tokenizer = Tokenizer.from_file(EMBEDDED / "tokenizer.json")
    prompt = tokenizer.encode(QUESTION, special=True)
    new = options.new_tokens
    if options.batch_1 and options.threads > 1:
        found = against_transformers(prompt, min(new, 200), time.perf_counter)
        print(json.dumps(found, indent=1))
        return
    record: dict[str, Any] = {
        "machine": f"{platform.machine()}, 1 thread of a CPU",
        "clock": "CPU time of the process",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": "python tools/bench_cache.py",
        "prompt_tokens": len(prompt),
        "new_tokens": new,
        "dates": {},
    }
    parts: dict[str, Callable[[], Any]] = {
        "cache": lambda: against_recompute(load_model(device="cpu"), prompt, new),
        "batch_1": lambda: against_transformers(prompt, min(new, 200)),
    }
    if options.batch_1:
        old = json.loads(RECORD.read_text(encoding="utf-8"))
        if changed := [n for n in record if n != "dates" and record[n] != old[n]]:
            raise SystemExit(f"not as in the record: {changed}; measure all parts")
        record = old
        del parts["cache"]
    for name, measure in parts.items():
        record[name] = measure()
        record["dates"][name] = date.today().isoformat()
    RECORD.write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(f"recompute / slot {record['cache']['recompute_over_slot']:.1f}")
    print(f"concat / slot    {record['cache']['concat_over_slot']:.2f}")
    print(json.dumps(record["batch_1"], indent=1))


if __name__ == "__main__":
    main()
