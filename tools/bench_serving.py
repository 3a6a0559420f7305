"""Measure our engine beside transformers on a CPU: figures/serving-cpu.json.

One prompt after the other, and many mixed requests at once, greedily on the embedded
model in float32. Answers do not end early, so everyone computes the same number of
tokens. A time to first token includes the wait for a free place.

    OMP_NUM_THREADS=1 python tools/bench_serving.py        everything, some minutes
    python tools/bench_serving.py --only alone             one part, not recorded
    python tools/bench_serving.py --only dense             figures/c-dense-cpu.json

The last is for a random model in the shape of Qwen2.5-0.5B, with one thread and two.
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    GptOssForCausalLM,
    Mxfp4Config,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.generation import ContinuousBatchingConfig

from simplellm import LLM, EngineConfig
from simplellm.apps.traffic import run_traffic, to_engine
from simplellm.apps.workloads import Arrival, draw_length
from simplellm.load import EMBEDDED
from simplellm.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "figures/serving-cpu.json"
DENSE_RECORD = ROOT / "figures/c-dense-cpu.json"
DENSE_PROMPT, DENSE_NEW = 32, 32  # tokens of one request
QUESTION = "<|start|>user<|message|>What is 478 + 856?<|end|><|start|>assistant"
NEW_TOKENS = 200  # of one request alone
REQUESTS = 32
LENGTHS = {"short": (40, 256), "medium": (100, 640), "long": (200, 1024)}  # of tokens
SETTINGS = (("short", 8), ("short", 32), ("medium", 32), ("long", 32))  # and how many


@dataclass(frozen=True)
class Job:
    """One request: its prompt and how many tokens it generates."""

    prompt: list[int]
    new_tokens: int


@dataclass
class Served:
    """One way to run all jobs: each one's tokens and when they came, in seconds."""

    tokens: list[list[int]]
    times: list[list[float]]
    counts: dict[str, int] = field(default_factory=dict)  # of steps, for example

    @property
    def seconds(self) -> float:
        return max(times[-1] for times in self.times)

    def summary(self) -> dict[str, float]:
        firsts = sorted(times[0] for times in self.times)
        return self.counts | {
            "seconds": self.seconds,
            "tokens_per_second": sum(map(len, self.tokens)) / self.seconds,
            "ttft_median": statistics.median(firsts),
            "ttft_p95": firsts[int(0.95 * (len(firsts) - 1))],
        }


def mixed_jobs(count: int, seed: int = 0, lengths: str = "short") -> list[Job]:
    """Log-normal lengths of prompts and answers; `LENGTHS` has median and maximum."""
    rng = random.Random(seed)
    median, longest = LENGTHS[lengths]
    tokenizer = Tokenizer.from_file(EMBEDDED / "tokenizer.json")
    text = (ROOT / "chapters/glossary.md").read_text(encoding="utf-8")
    source = tokenizer.encode(text)

    jobs = []
    for _ in range(count):
        start = rng.randrange(len(source) - longest)
        prompt = source[start : start + draw_length(rng, median, 4, longest)]
        jobs.append(Job(prompt, draw_length(rng, median, 4, longest)))
    return jobs


# transformers


def load_transformers(dtype: torch.dtype = torch.float32) -> Any:
    """The embedded checkpoint, its experts dequantized; answers do not end early."""
    model = GptOssForCausalLM.from_pretrained(
        EMBEDDED, dtype=dtype, quantization_config=Mxfp4Config(dequantize=True)
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def transformers_continuous(model: Any, jobs: Sequence[Job], batch: int) -> Served:
    """transformers' own continuous batching, with pages for all requests at once."""
    size = 64
    lengths = [len(job.prompt) + job.new_tokens for job in jobs]
    # More pages or a larger batch than needed cost time: masks cover all of them.
    config = ContinuousBatchingConfig(
        page_size=size,
        num_blocks=2 * sum(-(-tokens // size) for tokens in lengths),  # two layer types
        max_batch_tokens=256,
        max_requests_per_batch=batch,
    )
    model.generation_config.eos_token_id = -1
    model.generation_config.do_sample = False
    results: dict[str, Any] = {}
    with (
        torch.inference_mode(),
        model.continuous_batching_context_manager(
            continuous_batching_config=config, warmup=False
        ) as manager,
    ):
        begin = time.perf_counter()
        names = [
            manager.add_request(
                job.prompt, max_new_tokens=job.new_tokens, record_timestamps=True
            )
            for job in jobs
        ]
        while len(results) < len(jobs):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                results[result.request_id] = result
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped")
    ordered = [results[name] for name in names]
    if errors := [result.error for result in ordered if result.error]:
        raise RuntimeError(f"transformers' continuous batching: {errors[0]}")
    return Served(
        [result.generated_tokens for result in ordered],
        [[t - begin for t in result.timestamps] for result in ordered],
    )


# Ours


def asked(job: Job) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": job.new_tokens, "ignore_eos": True}


def opened(**options: Any) -> LLM:
    """A new engine on the CPU, so that no prompt is in its cache; it is warm."""
    llm = LLM(device="cpu", config=EngineConfig(max_waiting=2000, **options))
    llm.generate([1, 2, 3], max_tokens=3).result()
    return llm


def serve(jobs: Sequence[Job], **options: Any) -> Served:
    """Every request a client that reads its own stream, all submitted at once."""
    arrivals = [
        Arrival(str(number), "/v1/completions", {"prompt": job.prompt} | asked(job))
        for number, job in enumerate(jobs)
    ]
    with opened(**options) as llm:
        before = llm.stats()
        found = run_traffic(to_engine(llm), arrivals)
        after = llm.stats()
    if errors := [one.error for one in found if one.error]:
        raise RuntimeError(f"ours: {errors[0]}")
    counts = {
        "steps": after.steps - before.steps,
        "preemptions": after.preemptions - before.preemptions,
    }
    times = [[when - one.due for when in one.times] for one in found]
    return Served([one.tokens for one in found], times, counts)


# The parts


def best_in_turns(
    ways: Mapping[str, Callable[[], Served]], rounds: int
) -> dict[str, Served]:
    """The quickest run of each way; taking turns, all meet the same slow minutes."""
    runs = [{name: way() for name, way in ways.items()} for _ in range(rounds)]
    return {
        name: min((r[name] for r in runs), key=lambda r: r.seconds) for name in ways
    }


def alone(rounds: int) -> dict[str, Any]:
    """Milliseconds of a token at batch 1, the prompt included, in CPU time.

    Other programs disturb that least. transformers' model is in float32, and in
    bfloat16, which is what it loads unless told otherwise.
    """
    tokenizer = Tokenizer.from_file(EMBEDDED / "tokenizer.json")
    prompt = tokenizer.encode(QUESTION, special=True)
    # The prompt is the same in each round; its pages must not be found again.
    llm, job = opened(share_prefixes=False), Job(prompt, NEW_TOKENS)

    def generate(dtype: torch.dtype) -> Callable[[], list[int]]:
        model = load_transformers(dtype)
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        return lambda: model.generate(ids, **options)[0, len(prompt) :].tolist()

    ways: dict[str, Callable[[], list[int]]] = {
        "transformers float32": generate(torch.float32),
        "transformers bfloat16": generate(torch.bfloat16),
        "ours": lambda: llm.generate([prompt], **asked(job)).result()[0].token_ids,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    said = {}
    for _ in range(rounds + 1):  # the first one warms up
        for name, way in ways.items():
            begin = time.process_time()
            said[name] = way()
            seconds[name].append(time.process_time() - begin)
    llm.close()
    ours = seconds["ours"][1:]
    return {
        "new_tokens": NEW_TOKENS,
        "ms": {
            n: 1e3 * statistics.median(t[1:]) / NEW_TOKENS for n, t in seconds.items()
        },
        "speedup": {
            name: statistics.median(a / b for a, b in zip(times[1:], ours, strict=True))
            for name, times in seconds.items()
        },
        "same_tokens": sum(map(eq, said["ours"], said["transformers float32"])),
    }


def together(rounds: int) -> list[dict[str, Any]]:
    """The same requests through theirs and ours; ours over theirs in `speedup`.

    Each way runs ``rounds`` times on short requests, and once on longer ones, which
    take minutes.
    """
    model = load_transformers()
    transformers_continuous(model, mixed_jobs(1), 1)  # warms up
    found = []
    for lengths, batch in SETTINGS:
        jobs = mixed_jobs(REQUESTS, lengths=lengths)
        ways = {
            "transformers": partial(transformers_continuous, model, jobs, batch),
            "ours": partial(serve, jobs, max_num_seqs=batch),
            "ours, static": partial(serve, jobs, max_num_seqs=batch, continuous=False),
        }
        runs = best_in_turns(ways, rounds if lengths == "short" else 1)
        rows = {name: run.summary() for name, run in runs.items()}
        ours = rows["ours"]
        found.append(
            {
                "lengths": lengths,
                "median_and_maximum": LENGTHS[lengths],
                "batch": batch,
                "runs": rows,
                "same_answers": {
                    name: sum(map(list.__eq__, run.tokens, runs["ours"].tokens))
                    for name, run in runs.items()
                },
                "speedup": {
                    name: ours["tokens_per_second"] / row["tokens_per_second"]
                    for name, row in rows.items()
                },
            }
        )
    return found


def write_dense(folder: Path) -> None:
    """A random checkpoint in the shape of Qwen2.5-0.5B, in float32."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def in_turns(folder: Path, rounds: int) -> dict[str, Any]:
    """Tokens a second at batch 1: theirs, ours, ours, theirs, ``rounds`` times."""
    prompt = torch.arange(100, 100 + DENSE_PROMPT)
    theirs = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None
    job = Job(prompt.tolist(), DENSE_NEW)
    options = {"max_new_tokens": DENSE_NEW, "do_sample": False}
    with LLM(folder, EngineConfig(share_prefixes=False), device="cpu") as llm:
        ways: dict[str, Callable[[], list[int]]] = {
            "transformers": lambda: theirs.generate(prompt[None], **options)[
                0, DENSE_PROMPT:
            ].tolist(),
            "ours": lambda: (
                llm.generate([job.prompt], **asked(job)).result()[0].token_ids
            ),
        }
        said = {name: way() for name, way in ways.items()}  # warms up
        runs: dict[str, list[float]] = {name: [] for name in ways}
        for name in ("transformers", "ours", "ours", "transformers") * rounds:
            begin = time.perf_counter()
            ways[name]()
            runs[name].append(DENSE_NEW / (time.perf_counter() - begin))
    return {
        "tokens_per_second": runs,
        "speedup": statistics.median(runs["ours"])
        / statistics.median(runs["transformers"]),
        "same_tokens": sum(map(eq, *said.values())),
    }


def dense(rounds: int) -> dict[str, Any]:
    """A dense model for one request, with one thread and with two, prompt included."""
    found: dict[str, Any] = {"prompt": DENSE_PROMPT, "new_tokens": DENSE_NEW}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        write_dense(Path(folder))
        for threads in (1, 2):
            os.environ["OMP_NUM_THREADS"] = str(threads)  # for a new process
            load = os.getloadavg()[0]
            with ProcessPoolExecutor(1, context) as pool:
                run = pool.submit(in_turns, Path(folder), rounds).result()
            found[f"threads: {threads}"] = {"load_average": load, **run}
    return found


PARTS: dict[str, Callable[[int], Any]] = {
    "alone": alone,
    "together": together,
    "dense": dense,
}


def table(record: dict[str, Any]) -> Iterator[str]:
    """What was measured, a line each."""
    rows: list[tuple[str, float]] = []
    for name, ratio in record.get("alone", {}).get("speedup", {}).items():
        rows.append((f"one request, CPU time, {name} over ours", ratio))
    for case in record.get("together", []):
        for name, ratio in case["speedup"].items():
            load = f"{case['lengths']}, {case['batch']} at a time"
            rows.append((f"tokens/s, ours over {name}, {load}", ratio))
    for name, run in record.get("dense", {}).items():
        if isinstance(run, dict):
            load = f"0.5B, {name}, load {run['load_average']:.1f}"
            rows.append((f"tokens/s, ours over transformers, {load}", run["speedup"]))
    for name, value in rows:
        yield f"{name:<72}{value:9.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {options.threads} thread(s) of a CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "command": "python tools/bench_serving.py",
        "requests": REQUESTS,
    }
    for name in options.only or ("alone", "together"):
        record[name] = PARTS[name](options.rounds)
    print("\n".join(table(record)))
    target = {None: RECORD, ("dense",): DENSE_RECORD}
    if path := target.get(options.only and tuple(options.only)):
        record["command"] += " --only dense" * (path == DENSE_RECORD)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
