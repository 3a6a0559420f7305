"""Measure what it brings to serve many requests at once: figures/09-serving.json.

All requests are there from the start, with prompts and answers of mixed lengths, and
run greedily on the embedded model in float32 on the CPU. Answers do not end early, so
everyone computes the same number of tokens. A time to first token includes the wait
for a free place.

    python tools/bench_serving.py                 everything, some minutes
    python tools/bench_serving.py --only gaps     one part of the record
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    GptOssForCausalLM,
    Mxfp4Config,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import ContinuousBatchingConfig

from simplellm import LLM, SamplingParams
from simplellm.cpu import CPU
from simplellm.engine import EngineConfig
from simplellm.model import EMBEDDED, TORCH, Backend
from simplellm.paged import PageManager
from simplellm.scheduler import Job as SchedulerJob
from simplellm.scheduler import Scheduler
from simplellm.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "figures/09-serving.json"
REQUESTS = 32
LENGTHS = {"short": (40, 256), "medium": (100, 640), "long": (200, 1024)}  # of tokens
SETTINGS = (("short", 8), ("short", 32), ("medium", 32), ("long", 32))  # and how many
LONG_PROMPT = 4000
CHUNK = 128
MEMORY = 260  # pages; a request of 270 tokens holds 17 full and 9 sliding ones


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

    def length() -> int:
        return min(longest, max(4, round(median * rng.lognormvariate(0, 1))))

    jobs = []
    for _ in range(count):
        start = rng.randrange(len(source) - longest)
        prompt = source[start : start + length()]
        jobs.append(Job(prompt, length()))
    return jobs


def some_long_jobs(count: int) -> list[Job]:
    """Prompts of up to 20 tokens; answers of 5 to 20, and one in ten of 150 to 250."""
    rng = random.Random(1)
    return [
        Job(
            job.prompt[:20],
            rng.randint(*((150, 250) if rng.random() < 0.1 else (5, 20))),
        )
        for job in mixed_jobs(count, seed=1)
    ]


# transformers


class Clock(StoppingCriteria):
    """Stops nothing; notes when each step of generate() ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load_transformers() -> Any:
    """The embedded checkpoint in float32, its experts dequantized."""
    model = GptOssForCausalLM.from_pretrained(
        EMBEDDED,
        dtype=torch.float32,
        quantization_config=Mxfp4Config(dequantize=True),
    ).eval()
    return model


def transformers_static(model: Any, jobs: Sequence[Job], batch: int) -> Served:
    """Left-padded batches in the order of arrival, each as long as its longest answer.

    Tokens beyond what a request asked for do not count. A token counts as received
    when its step ends, although generate() only returns at the end.
    """
    model.generation_config.eos_token_id = None  # answers do not end early
    served = Served([], [])
    begin = time.perf_counter()
    for start in range(0, len(jobs), batch):
        part = jobs[start : start + batch]
        width = max(len(job.prompt) for job in part)
        pads = [width - len(job.prompt) for job in part]
        ids = [[0] * pad + job.prompt for pad, job in zip(pads, part, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in pads]
        clock = Clock()
        output = model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max(job.new_tokens for job in part),
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        for job, row in zip(part, output[:, width:].tolist(), strict=True):
            served.tokens.append(row[: job.new_tokens])
            served.times.append([t - begin for t in clock.times[: job.new_tokens]])
    return served


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


def params(job: Job) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=job.new_tokens, ignore_eos=True)


def serve(config: EngineConfig, jobs: Sequence[Job], backend: Backend = CPU) -> Served:
    """Every request a client that reads its own stream, all submitted at once.

    The engine is a new one, so that no prompt is in its cache.
    """
    with (
        warm(LLM(device="cpu", config=config, backend=backend)) as llm,
        ThreadPoolExecutor(len(jobs)) as pool,
    ):
        before, begin = llm.stats(), time.perf_counter()

        def read(job: Job) -> tuple[list[int], list[float]]:
            tokens, times = [], []
            for output in llm.stream(job.prompt, params(job)):
                tokens += output.token_ids
                times.append(time.perf_counter() - begin)
            return tokens, times

        tokens, times = zip(*pool.map(read, jobs), strict=True)
        after = llm.stats()
    counts = {
        "steps": after.steps - before.steps,
        "preemptions": after.preemptions - before.preemptions,
    }
    return Served(list(tokens), list(times), counts)


def engine_config(batch: int, **changes: Any) -> EngineConfig:
    return replace(EngineConfig(max_num_seqs=batch, max_waiting=2000), **changes)


def warm(llm: LLM) -> LLM:
    llm.generate([1, 2, 3], max_tokens=3).result()
    return llm


# The parts


def best(way: Callable[[], Served], rounds: int) -> Served:
    """The quickest of some runs."""
    return min((way() for _ in range(rounds)), key=lambda run: run.seconds)


def best_in_turns(
    ways: Mapping[str, Callable[[], Served]], rounds: int
) -> dict[str, Served]:
    """The quickest run of each way; taking turns, all meet the same slow minutes."""
    runs = [{name: way() for name, way in ways.items()} for _ in range(rounds)]
    return {
        name: min((r[name] for r in runs), key=lambda r: r.seconds) for name in ways
    }


def against_transformers(rounds: int) -> list[dict[str, Any]]:
    """The same requests through theirs and ours; ours over theirs in `speedup`.

    Each way runs ``rounds`` times on short requests, and once on longer ones, which
    take minutes.
    """
    model = load_transformers()
    transformers_static(model, mixed_jobs(1), 1)  # warms up
    found = []
    for lengths, batch in SETTINGS:
        jobs = mixed_jobs(REQUESTS, lengths=lengths)
        ways = {
            "transformers static": partial(transformers_static, model, jobs, batch),
            "transformers continuous": partial(
                transformers_continuous, model, jobs, batch
            ),
            "ours": partial(serve, engine_config(batch), jobs),
        }
        runs = best_in_turns(ways, rounds if lengths == "short" else 1)
        rows = {name: run.summary() for name, run in runs.items()}
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
                    name: rows["ours"]["tokens_per_second"] / row["tokens_per_second"]
                    for name, row in rows.items()
                },
                "ttft": {
                    name: row["ttft_median"] / rows["ours"]["ttft_median"]
                    for name, row in rows.items()
                },
            }
        )
    return found


def against_static(rounds: int) -> dict[str, list[dict[str, Any]]]:
    """`continuous_over_static` with the backend of a small model and of a large one.

    They differ in what a step of few sequences costs: `CPU` has unpacked the experts
    and takes short paths, `TORCH` decodes the experts of every token.
    """
    backends = {"CPU": CPU, "TORCH": TORCH}
    return {n: continuous_over_static(b, rounds) for n, b in backends.items()}


def continuous_over_static(backend: Backend, rounds: int) -> list[dict[str, Any]]:
    """Continuous and static batching in our engine, for lengths of several kinds.

    Our static batches compute nothing at places that are empty, so what they lose is
    less in seconds than in steps.
    """
    long, mixed = some_long_jobs(256), mixed_jobs(128, seed=1)
    equal = [Job(job.prompt[:4], 40) for job in mixed]
    found = []
    for name, jobs, batch in (
        ("one in ten long", long[:96], 8),
        ("one in ten long", long, 32),
        ("log-normal", mixed[:64], 8),
        ("log-normal", mixed, 32),
        ("equal", equal[:64], 8),
        ("log-normal", mixed[:16], 1),
    ):
        config = engine_config(batch)
        ways = {
            "continuous": partial(serve, config, jobs, backend),
            "static": partial(serve, replace(config, continuous=False), jobs, backend),
        }
        rows = {n: run.summary() for n, run in best_in_turns(ways, rounds).items()}
        ratios = {
            what: rows["static"][what] / rows["continuous"][what]
            for what in ("seconds", "steps", "ttft_median")
        }
        found.append({"lengths": name, "batch": batch, "runs": rows, **ratios})
    return found


def memory(rounds: int) -> list[dict[str, Any]]:
    """Requests in too little memory: as many as surely fit, or all and preemption."""
    long = some_long_jobs(128)
    every = [Job(job.prompt, 200) for job in long[:32]]
    found = []
    for name, jobs in (("one in ten long", long), ("all long", every)):
        rows = {}
        for way, batch in (("surely fit", MEMORY // 26), ("preemption", 64)):
            config = engine_config(batch, num_pages=MEMORY)
            rows[way] = best(partial(serve, config, jobs), rounds).summary()
        ratio = rows["surely fit"]["seconds"] / rows["preemption"]["seconds"]
        found.append({"lengths": name, "runs": rows, "seconds": ratio})
    return found


def longest_gap(llm: LLM, streams: int, prompt: list[int]) -> dict[str, Any]:
    """Running streams while a long prompt arrives: their gaps, its first token."""
    jobs = [Job(job.prompt, 10_000) for job in mixed_jobs(streams, seed=2)]
    times: list[list[float]] = [[] for _ in jobs]
    stop = False

    def read(number: int) -> None:
        job = jobs[number]
        for _ in llm.stream(job.prompt, params(job)):
            times[number].append(time.perf_counter())
            if stop:
                return  # drops the stream, which ends the request

    with ThreadPoolExecutor(streams) as pool:
        reading = [pool.submit(read, number) for number in range(streams)]
        while min(map(len, times)) < 20:
            time.sleep(0.01)
        arrival = time.perf_counter()
        output = next(iter(llm.stream(prompt, params(Job(prompt, 1)))))
        first = time.perf_counter()
        assert output.finish_reason == "length"
        time.sleep(0.3)
        stop = True
        for future in reading:
            future.result()
    gaps = [
        later - earlier
        for stream in times
        for earlier, later in pairwise(stream)
        if later >= arrival
    ]
    before = [
        later - earlier
        for stream in times
        for earlier, later in pairwise(stream[5:])
        if later < arrival
    ]
    return {
        "longest_gap": max(gaps),
        "undisturbed_gap": statistics.median(before),
        "ttft": first - arrival,
    }


def gaps(rounds: int) -> dict[str, Any]:
    rng = random.Random(3)
    found: dict[str, Any] = {"prompt": LONG_PROMPT, "streams": 8, "chunk": CHUNK}
    for name, size in (("whole", None), ("chunked", CHUNK)):
        config = engine_config(
            16, max_num_batched_tokens=LONG_PROMPT + 500, prefill_chunk=size
        )
        runs = []
        with warm(LLM(device="cpu", config=config)) as llm:
            for _ in range(rounds):  # no two prompts alike: none may hit
                prompt = [rng.randrange(1000) for _ in range(LONG_PROMPT)]
                runs.append(longest_gap(llm, 8, prompt))
        found[name] = min(runs, key=lambda run: run["longest_gap"])
    found["ratio"] = found["whole"]["longest_gap"] / found["chunked"]["longest_gap"]
    found["ttft"] = found["chunked"]["ttft"] / found["whole"]["ttft"]
    return found


def scheduler_cost() -> dict[str, Any]:
    """Seconds of schedule(), commit() and expire(), with 256 running, 1,000 waiting."""
    manager = PageManager(100_000, 16, window=128, max_chunk=512)
    scheduler = Scheduler(
        manager, max_num_seqs=256, max_num_batched_tokens=2048, prefill_chunk=512
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(1000) for _ in range(300)] for _ in range(1256)]
    deadline = time.monotonic() + 10**6
    jobs = [SchedulerJob(prompt, 10**6, deadline=deadline) for prompt in prompts]
    scheduler.add(jobs)

    def step() -> float:
        begin = time.perf_counter()
        scheduler.expire(time.monotonic())
        works = scheduler.schedule()
        middle = time.perf_counter()
        tokens = [rng.randrange(1000) for work in works if work.samples]
        end = time.perf_counter()
        scheduler.begin(works)
        scheduler.commit(works, tokens)
        return middle - begin + time.perf_counter() - end

    while len(scheduler.running) < 256 or any(j.missing > 1 for j in scheduler.running):
        step()
    found = []
    for generated in (100, 1000, 2000, 4000):
        while scheduler.running[-1].num_output < generated:
            step()
        times = sorted(step() for _ in range(200))
        found.append(
            {
                "generated": generated,
                "ms_median": 1e3 * times[100],
                "ms_p95": 1e3 * times[190],
            }
        )
    return {
        "running": len(scheduler.running),
        "waiting": scheduler.num_waiting,
        "steps": found,
        "growth": found[-1]["ms_median"] / found[0]["ms_median"],
    }


def losses(rounds: int) -> dict[str, Any]:
    """Where a mechanism brings nothing: the time with it over the time without."""
    rng = random.Random(4)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(length)]

    def seconds(config: EngineConfig, jobs: Sequence[Job]) -> float:
        return best(partial(serve, config, jobs), rounds).seconds

    alone = [Job(prompt(50), 150)]
    short = [Job(prompt(100), 1) for _ in range(64)]
    apart = [Job(prompt(200), 8) for _ in range(64)]
    long = [Job(prompt(2000), 1)]
    small, slots = engine_config(8), engine_config(8, cache="slot", max_model_len=500)
    return {
        "one request, paged over slot cache": seconds(small, alone)
        / seconds(slots, alone),
        "answers of one token, continuous over static": seconds(small, short)
        / seconds(replace(small, continuous=False), short),
        "no shared prefix, sharing over none": seconds(small, apart)
        / seconds(replace(small, share_prefixes=False), apart),
        "nobody else there, chunks of 128 over whole prompt": seconds(
            engine_config(8, prefill_chunk=128), long
        )
        / seconds(engine_config(8, prefill_chunk=None), long),
    }


PARTS: dict[str, Callable[[int], Any]] = {
    "transformers": against_transformers,
    "static": against_static,
    "gaps": gaps,
    "memory": memory,
    "scheduler": lambda rounds: scheduler_cost(),
    "losses": losses,
}


def table(record: dict[str, Any]) -> Iterable[str]:
    """What was measured, a line each."""
    rows: list[tuple[str, float, str]] = []
    for case in record.get("transformers", []):
        for way in ("transformers static", "transformers continuous"):
            load = f"{case['lengths']}, {case['batch']} at a time"
            name = f"tokens/s against {way}, {load}"
            rows.append((name, case["speedup"][way], "x"))
            rows.append(("  and sooner to its first token", case["ttft"][way], "x"))
    for backend, cases in record.get("static", {}).items():
        for case in cases:
            lengths = f"{case['lengths']}, {case['batch']} at a time"
            name = f"static over continuous, {backend}, {lengths}: seconds"
            rows.append((name, case["seconds"], "x"))
            rows.append(("  steps", case["steps"], "x"))
            rows.append(("  time to first token", case["ttft_median"], "x"))
    for case in record.get("memory", []):
        name = f"memory: surely fit over preemption, {case['lengths']}: seconds"
        rows.append((name, case["seconds"], "x"))
        rows.append(("  preemptions", case["runs"]["preemption"]["preemptions"], ""))
    if found := record.get("gaps"):
        rows.append(("longest gap, whole prompt over chunks", found["ratio"], "x"))
        rows.append(("  its first token, chunks over whole", found["ttft"], "x"))
    for case in record.get("scheduler", {}).get("steps", []):
        name = f"scheduler's step after {case['generated']:,} tokens"
        rows.append((name, case["ms_median"], " ms"))
    for name, ratio in record.get("losses", {}).items():
        rows.append((name, ratio, "x"))
    for name, value, unit in rows:
        yield f"{name:<72}{value:9.2f}{unit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    setting: dict[str, Any] = {
        "machine": f"{platform.machine()}, {options.threads} thread(s) of a CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "command": "python tools/bench_serving.py",
        "requests": REQUESTS,
    }
    record = setting | {"dates": {}}
    if options.only:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
        if changed := [name for name in setting if record[name] != setting[name]]:
            raise SystemExit(f"not as in the record: {changed}; measure all parts")
    for name in options.only or PARTS:
        print(f"measuring: {name}", file=sys.stderr)
        record[name] = PARTS[name](options.rounds)
        record["dates"][name] = date.today().isoformat()
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(record)))


if __name__ == "__main__":
    main()
