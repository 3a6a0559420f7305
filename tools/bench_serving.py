"""Measure our engine beside transformers on a CPU.

    OMP_NUM_THREADS=1 python tools/bench_serving.py --json figures/serving-cpu.json
    OMP_NUM_THREADS=1 python tools/bench_serving.py --only alone

One request alone, and many mixed ones at once: both greedily in float32 on the embedded
model. Answers do not end early, so everyone computes the same number of tokens. A time
to first token includes the wait for a free place.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import eq
from typing import Any

import torch
import transformers
from records import argument_parser, header, save
from transformers import GptOssForCausalLM, Mxfp4Config
from transformers.generation import ContinuousBatchingConfig

from simplellm import LLM, EngineConfig
from simplellm.apps.traffic import run_traffic, to_engine
from simplellm.apps.workloads import Arrival, Workload, draw_workload
from simplellm.checkpoint.folder import EMBEDDED

REQUESTS = 32
# Lengths of prompts in words and of answers in tokens: median, least, most.
LENGTHS = {
    "short": Workload((15, 2, 100), (40, 4, 256), chat=False),
    "long": Workload((70, 2, 400), (200, 4, 1024), chat=False),
}
SETTINGS = (("short", 8), ("short", 32), ("long", 32))  # and how many at a time
PAGE = 64
NEW = 200  # tokens of one request alone


@dataclass(frozen=True)
class Run:
    """All requests served: each one's tokens, seconds in all and to first tokens."""

    tokens: list[list[int]]
    seconds: float
    firsts: list[float]

    def summary(self) -> dict[str, float]:
        return {
            "seconds": self.seconds,
            "tokens_per_second": sum(map(len, self.tokens)) / self.seconds,
            "ttft_median": statistics.median(self.firsts),
        }


def theirs() -> Any:
    """transformers' model, experts dequantized, whose answers do not end early."""
    model: Any = GptOssForCausalLM.from_pretrained(
        EMBEDDED,
        dtype=torch.float32,
        quantization_config=Mxfp4Config(dequantize=True),
    ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.do_sample = False
    return model


def ours(**options: Any) -> LLM:
    """A new engine, in whose cache no prompt is; it is warm."""
    config = EngineConfig(enable_prefix_caching=False, max_waiting=2000, **options)
    llm = LLM(device="cpu", config=config)
    llm.generate([[1, 2, 3]], max_tokens=3).result()
    return llm


# One request


def alone(rounds: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of a token at batch 1, the prompt included, in turns.

    It is CPU time, which other programs disturb least.
    """
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True}
    seconds: dict[str, list[float]] = {"transformers": [], "ours": []}
    said = {}
    with ours() as llm:
        model, prompt = theirs(), llm.tokenizer.encode("What is 478 + 856?")
        ids, start = torch.tensor([prompt]), len(prompt)
        ways: dict[str, Callable[[], list[int]]] = {
            "transformers": lambda: model.generate(ids, max_new_tokens=NEW)[
                0, start:
            ].tolist(),
            "ours": lambda: llm.generate([prompt], **greedy).result()[0].token_ids,
        }
        for _ in range(rounds + 1):  # the first one warms up
            for name, way in ways.items():
                begin = time.process_time()
                said[name] = way()
                seconds[name].append(time.process_time() - begin)
    ms = {n: 1e3 * statistics.median(t[1:]) / NEW for n, t in seconds.items()}
    yield {
        "new_tokens": NEW,
        "ms": ms,
        "speedup": ms["transformers"] / ms["ours"],
        "same_tokens": sum(map(eq, *said.values())),
    }


# Many requests


def continuous(
    model: Any, prompts: list[list[int]], arrivals: list[Arrival], batch: int
) -> Run:
    """transformers' own continuous batching, with pages for all requests at once."""
    wanted = [one.body["max_tokens"] for one in arrivals]
    pages = (-(-(len(p) + n) // PAGE) for p, n in zip(prompts, wanted, strict=True))
    # More pages or a larger batch than needed cost time: masks cover all of them.
    config = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=2 * sum(pages),  # two layer types
        max_batch_tokens=256,
        max_requests_per_batch=batch,
    )
    model.generation_config.eos_token_id = -1
    results: dict[str, Any] = {}
    with (
        torch.inference_mode(),
        model.continuous_batching_context_manager(
            continuous_batching_config=config, warmup=False
        ) as manager,
    ):
        begin = time.perf_counter()
        names = [
            manager.add_request(prompt, max_new_tokens=new, record_timestamps=True)
            for prompt, new in zip(prompts, wanted, strict=True)
        ]
        while len(results) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                results[result.request_id] = result
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped")
    outputs = [results[name] for name in names]
    if errors := [one.error for one in outputs if one.error]:
        raise RuntimeError(f"transformers' continuous batching: {errors[0]}")
    last = max(one.timestamps[-1] for one in outputs) - begin
    firsts = [one.timestamps[0] - begin for one in outputs]
    return Run([one.generated_tokens for one in outputs], last, firsts)


def serve(arrivals: list[Arrival], batch: int) -> Run:
    """Every request a client that reads its own stream, all submitted at once."""
    with ours(max_num_seqs=batch) as llm:
        outcomes = run_traffic(to_engine(llm), arrivals)
    if errors := [one.error for one in outcomes if one.error]:
        raise RuntimeError(f"ours: {errors[0]}")
    last = max(one.times[-1] - one.due for one in outcomes)
    firsts = [one.times[0] - one.due for one in outcomes]
    return Run([one.tokens for one in outcomes], last, firsts)


def best_in_turns(ways: Mapping[str, Callable[[], Run]], rounds: int) -> dict[str, Run]:
    """The quickest run of each way; taking turns, all meet the same slow minutes."""
    runs = [{name: way() for name, way in ways.items()} for _ in range(rounds)]
    return {n: min((r[n] for r in runs), key=lambda run: run.seconds) for n in ways}


def together(rounds: int) -> Iterator[dict[str, Any]]:
    """The same requests through theirs and ours; long ones once, they take minutes."""
    model = theirs()
    with ours() as llm:
        encode = llm.tokenizer.encode
    for lengths, batch in SETTINGS:
        arrivals = [
            replace(one, body=one.body | {"temperature": 0.0})
            for one in draw_workload(LENGTHS[lengths], REQUESTS, 0)
        ]
        prompts = [encode(one.body["prompt"]) for one in arrivals]
        continuous(model, prompts[:1], arrivals[:1], 1)  # warms up
        ways = {
            "transformers": partial(continuous, model, prompts, arrivals, batch),
            "ours": partial(serve, arrivals, batch),
        }
        runs = best_in_turns(ways, rounds if lengths == "short" else 1)
        rows = {name: run.summary() for name, run in runs.items()}
        rates = [row["tokens_per_second"] for row in rows.values()]
        said = (run.tokens for run in runs.values())
        yield {
            "workload": repr(LENGTHS[lengths]),
            "batch": batch,
            "runs": rows,
            "speedup": rates[1] / rates[0],
            "same_answers": sum(map(list.__eq__, *said)),
        }


PARTS = {"alone": alone, "together": together}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    record = header("transformers") | {"threads": torch.get_num_threads()}
    for name in options.only or PARTS:
        record[name] = []
        for row in PARTS[name](options.rounds):
            print(f"{name}: {row['speedup']:.2f} times as fast as transformers, {row}")
            record[name].append(row)
    save(record, options.json)


if __name__ == "__main__":
    main()
