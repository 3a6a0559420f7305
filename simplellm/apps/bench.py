"""What a model does on this machine, and the least time that the machine needs.

Decode, prefill and long contexts are timed through the whole engine, `LLM.generate`
with prompts of random token ids, greedy, to a fixed length. Memory and arithmetic of
the device are timed in the same run, and each row says what share of that limit it
reaches.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Literal

import torch
from tqdm import tqdm

from simplellm.api.choose_operations import takes_packed
from simplellm.api.outputs import RequestOutput
from simplellm.apps.peaks import measure_machine
from simplellm.apps.report import circumstances, describe_memory
from simplellm.apps.roofline import (
    Machine,
    Reads,
    distinct_experts,
    read_bytes,
    step_flops,
)
from simplellm.base.config import (
    MAX_SIZE,
    EngineConfig,
    ModelConfig,
    check,
    check_number,
    declared,
    expect,
)
from simplellm.base.request import Request
from simplellm.base.sampling_params import SamplingParams
from simplellm.checkpoint.checkpoint import open_weights
from simplellm.engine.page_manager import PageManager
from simplellm.engine.scheduler import Scheduler
from simplellm.engine.stats import Meter, quantile
from simplellm.model.machine import find_device, find_dtype
from simplellm.model.memory import kv_bytes, weight_bytes

CONTEXT_STEPS = 64  # decodes at a long context, once all prompts are computed
PREFILL_RUNS = 3


# What to measure


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Decode of ``output_len`` tokens after ``input_len`` at each of ``batches``; prefill
    of (count, length) prompts at once; decode with ``contexts`` tokens in the cache at
    each of ``context_batches``. The prompts follow from ``seed``, no two alike.
    """

    batches: Sequence[int] = (1,)
    input_len: int = 128
    output_len: int = 128
    prefills: Sequence[tuple[int, int]] = ()
    contexts: Sequence[int] = ()
    context_batches: Sequence[int] = (1, 8)
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """One row to measure. Raises TypeError or ValueError for sizes below 1."""

    kind: Literal["decode", "prefill", "context"]
    batch: int = declared()
    input_len: int = declared()
    output_len: int = declared()

    def __post_init__(self) -> None:
        check(self)

    @property
    def length(self) -> int:
        return self.input_len + self.output_len

    @property
    def name(self) -> str:
        return f"{self.kind} {self.batch} x {self.input_len:,} + {self.output_len}"


def parse_sizes(
    name: str, text: str, width: int, expected: str
) -> list[tuple[int, ...]]:
    """What an option such as "1,8,64" or "32x2048,1x2048" lists; may be nothing."""
    try:
        entries = [tuple(map(int, part.split("x"))) for part in text.split(",") if text]
    except ValueError:
        entries = [()]
    right = all(len(entry) == width for entry in entries)
    expect(right, f"--{name}", text, expected)
    return entries


def plan_steps(
    batch: str, input_len: int, output_len: int, prefill: str, context: str
) -> Plan:
    """What the options ask to be measured of an engine."""
    expected = "prompts x tokens such as 32x2048,1x2048"
    return Plan(
        batches=[
            n for (n,) in parse_sizes("batch", batch, 1, "integers such as 1,8,64")
        ],
        input_len=input_len,
        output_len=output_len,
        prefills=[
            (n, length) for n, length in parse_sizes("prefill", prefill, 2, expected)
        ],
        contexts=[n for (n,) in parse_sizes("context", context, 1, "integers")],
    )


def steps_between(batch: int, length: int, config: EngineConfig) -> int:
    """How many steps a batch's first prompt is computed before its last.

    A scheduler says so: beside requests that decode, prompts come in small pieces.
    """
    scheduler = Scheduler(
        PageManager(batch, length + MAX_SIZE, enable_caching=False),
        max_num_seqs=batch,
        max_num_batched_tokens=max(config.max_num_batched_tokens, 2 * batch),
        prefill_chunk=config.prefill_chunk,
        max_waiting=batch,
    )
    prompt = [0] * length
    requests = [Request([*prompt], MAX_SIZE, request_id=n) for n in range(batch)]
    scheduler.add(requests)
    steps = 0
    while any(request.num_output == 0 for request in requests):
        scheduled = scheduler.schedule()
        scheduler.update_after_launch(scheduled)
        sampled = [[0] for chunk in scheduled if chunk.samples]
        scheduler.update_from_output(scheduled, sampled)
        steps += requests[0].num_output > 1
    return steps


def plan_cases(plan: Plan, config: EngineConfig, limit: int) -> list[Case]:
    """The rows of a plan, with at least as many tokens a step as ``config`` has.

    Raises TypeError or ValueError for a plan without rows, and for a row whose requests
    never all run, or are longer than ``limit``, the model's context.
    """

    def checked(case: Case) -> Case:
        check_number(f"length of {case.name}", case.length, int, 2, limit)
        return case

    cases = []
    for batch in plan.batches:
        case = checked(Case("decode", batch, plan.input_len, plan.output_len))
        # Fewer, and the first request ends before the last one begins.
        least = steps_between(batch, plan.input_len, config) + 2
        name = f"output_len of {batch} requests"
        check_number(name, plan.output_len, int, least, limit)
        cases.append(case)
    for count, length in plan.prefills:
        cases.append(checked(Case("prefill", count, length, 1)))
    for context in plan.contexts:
        for batch in plan.context_batches:
            name, output = f"context of {batch} requests", CONTEXT_STEPS
            check_number(name, context, int, output + 1, limit)
            output += steps_between(batch, context, config)  # generated in this context
            check_number(name, context, int, output + 1, limit)
            cases.append(Case("context", batch, context - output, output))
    if not cases:
        raise ValueError("nothing is to be measured; expected a batch size")
    return cases


def cache_bytes(
    model: ModelConfig, config: EngineConfig, itemsize: int, case: Case
) -> int:
    """Bytes of keys and values that suffice for a case, with pages partly filled."""
    page = config.page_size
    each = kv_bytes(model, case.length + page, itemsize=itemsize)
    each += kv_bytes(model, page, itemsize=itemsize)
    step = min(config.max_num_batched_tokens, case.batch * case.input_len)
    return case.batch * each + kv_bytes(model, step, itemsize=itemsize, windowed=False)


def engine_config(cases: Sequence[Case], base: EngineConfig) -> EngineConfig:
    """``base``, resolved, for as many and as long requests as there are in a case."""
    most = max(case.batch for case in cases)
    return replace(
        base,
        max_num_seqs=most,
        max_num_batched_tokens=max(base.max_num_batched_tokens, 2 * most),
        max_model_len=max(case.length for case in cases),
    )


# How it is measured


def unbounded_meter() -> Meter:
    """A meter that keeps all times, not only the latest ones."""
    meter = Meter()
    meter.recent, meter.ttft, meter.itl = deque(), deque(), deque()
    return meter


@dataclass(frozen=True)
class Trial:
    """One batch of requests, all submitted at once."""

    outputs: list[RequestOutput]
    seconds: float  # from the first request to the last answer
    meter: Meter
    began: float  # by time.monotonic()

    def full_steps(self, batch: int) -> list[float]:
        """Seconds of each step that was one decode of every request.

        The step before gave a token to each of them too, so that no prompt is left.
        """
        return [
            end - begin
            for (begin, before), (end, count) in pairwise(self.meter.recent)
            if before == count == batch
        ]

    @property
    def last_token(self) -> float:
        """Seconds until the last token was there."""
        return max(end for end, count in self.meter.recent if count) - self.began


@dataclass(frozen=True)
class Bench:
    """Runs cases on an LLM that does nothing else."""

    llm: Any
    generator: torch.Generator  # of prompts

    def run(self, batch: int, input_len: int, output_len: int) -> Trial:
        """Generate ``output_len`` tokens after each of ``batch`` new random prompts."""
        engine = self.llm.engine
        while engine.flights:  # a step in advance, whose tokens nobody wants
            time.sleep(0.001)
        with engine.lock:
            engine.meter = meter = unbounded_meter()
        vocab_size, shape = self.llm.config.vocab_size, (batch, input_len)
        prompts = torch.randint(vocab_size, shape, generator=self.generator).tolist()
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        before, began = engine.stats().preemptions, time.monotonic()
        outputs = self.llm.generate(prompts, params).result()
        seconds = time.monotonic() - began
        assert engine.stats().preemptions == before, "the cache was too small"
        return Trial(outputs, seconds, meter, began)

    def case(self, case: Case) -> list[Trial]:
        """Run a case, a prefill several times, after a short one of the same kind."""
        if case.kind == "context":  # more than the tokens of a step
            self.run(1, min(2**13 + 1, case.input_len), 2)
        else:
            self.run(case.batch, case.input_len, min(4, case.output_len))
        times = PREFILL_RUNS if case.kind == "prefill" else 1
        shape = case.batch, case.input_len, case.output_len
        return [self.run(*shape) for _ in range(times)]


# What is found


@dataclass(frozen=True)
class Roofline:
    """What a row is compared with: the model's sizes and the machine's speed."""

    model: ModelConfig
    machine: Machine
    itemsize: int

    def step(self, tokens: int, sampled: int, context: int = 0) -> tuple[Reads, float]:
        """What a step must read, and the least seconds that it takes."""
        reads = read_bytes(self.model, tokens, context, itemsize=self.itemsize)
        flops = step_flops(self.model, tokens, sampled)
        return reads, self.machine.least_seconds(reads.total, flops)


def milliseconds(times: Sequence[float], share: float) -> float:
    """A quantile, in milliseconds, of times in seconds; nan if there are none."""
    value = quantile(times, share)
    return math.nan if value is None else 1e3 * value


def decode_row(case: Case, run: Trial, roofline: Roofline) -> dict[str, Any]:
    """How fast tokens came. Speeds are those of all requests together."""
    steps = run.full_steps(case.batch)
    assert steps, f"{case.name}: no step ran all {case.batch} requests"
    # In the middle of the steps that count, which are the last ones.
    context = case.length - len(steps) // 2
    reads, least = roofline.step(case.batch, case.batch, context)
    taken, meter = median(steps), run.meter
    return {
        "batch": case.batch,
        "input_len": case.input_len,
        "output_len": case.output_len,
        "step_ms": 1e3 * taken,  # of the steps that ran every request
        "steps": len(steps),  # how many these were
        "tokens_per_second": case.batch / taken,
        "end_to_end": case.batch * case.output_len / run.seconds,  # prefill included
        "ttft_ms": milliseconds(meter.ttft, 0.5),  # time to first token
        "ttft_p99_ms": milliseconds(meter.ttft, 0.99),
        "itl_ms": milliseconds(meter.itl, 0.5),  # inter-token latency
        "itl_p99_ms": milliseconds(meter.itl, 0.99),
        "distinct_outputs": len({tuple(output.token_ids) for output in run.outputs}),
        # Of a layer in a step, if routing is uniform.
        "distinct_experts": distinct_experts(roofline.model, case.batch),
        "dense_bytes": reads.dense,  # that a step must read, as the next two
        "expert_bytes": reads.experts,
        "kv_bytes": reads.kv,
        "limit": case.batch / least,  # what the machine allows
        "share": least / taken,  # of this limit
    }


def prefill_row(
    case: Case, runs: Sequence[Trial], roofline: Roofline
) -> dict[str, Any]:
    """How fast prompts were computed on an idle engine, the median of some runs."""
    tokens = case.batch * case.input_len
    seconds = median(run.last_token for run in runs)
    _, least = roofline.step(tokens, case.batch)
    return {
        "batch": case.batch,
        "input_len": case.input_len,
        "seconds": seconds,  # until the last of them had its first token
        "tokens_per_second": tokens / seconds,
        "ttft_ms": milliseconds([t for run in runs for t in run.meter.ttft], 0.5),
        "limit": tokens / least,
        "share": least / seconds,
    }


def check_cache(
    capacity: int, roofline: Roofline, config: EngineConfig, cases: Sequence[Case]
) -> None:
    """Raise ValueError for a case that may need more than ``capacity`` bytes."""
    for case in cases:
        need = cache_bytes(roofline.model, config, roofline.itemsize, case)
        if need > capacity:
            raise ValueError(
                f"{case.name} tokens may need {need / 1e9:.2f} GB for keys and values; "
                f"expected at most {capacity / 1e9:.2f} GB, which the cache has"
            )


def measure_cases(
    bench: Bench, cases: Sequence[Case], roofline: Roofline
) -> dict[str, list[Any]]:
    """The rows of each kind. A bar on standard error shows where it is."""
    rows: dict[str, list[Any]] = {"decode": [], "context": [], "prefill": []}
    with tqdm(cases, unit="row", disable=None, leave=False) as progress:
        for case in progress:
            progress.set_description(case.name)
            runs = bench.case(case)
            if case.kind == "prefill":
                rows[case.kind].append(prefill_row(case, runs, roofline))
            else:
                rows[case.kind].append(decode_row(case, runs[0], roofline))
    return rows


def measure(
    plan: Plan,
    start: Callable[..., Any],
    model: str | None = None,
    *,
    random_weights: bool = False,
    device: str | None = None,
    config: EngineConfig | None = None,
    command: str = "",
) -> dict[str, Any]:
    """The record of all that ``plan`` asks for. ``start`` is the class `LLM`.

    ``model`` is a checkpoint folder or, with ``random_weights``, the name of a known
    model; None is the embedded one. ``config`` holds the engine's switches; its sizes
    of batch and length follow from the plan. Raises TypeError or ValueError before
    anything is loaded, where it can be known.
    """
    target = find_device(device)
    dtype, seed = find_dtype(None, target), plan.seed if random_weights else None
    config = (config or EngineConfig()).resolved(target.type)
    packed = takes_packed(config, None, target)
    source = open_weights(model, dtype, target, random_weights, seed, packed)
    limit = source.config.max_position_embeddings
    cases = plan_cases(plan, config, limit)
    config = engine_config(cases, config)
    machine = measure_machine(target, sum(weight_bytes(source.config, 4).values()))
    roofline = Roofline(source.config, machine, dtype.itemsize)
    if target.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    options: dict[str, Any] = {"random_weights": random_weights, "seed": seed}
    with start(model, config, device=target, **options) as llm:
        seconds = time.perf_counter() - began
        capacity = llm.engine.runner.pool.memory.nbytes
        check_cache(capacity, roofline, config, cases)
        bench = Bench(llm, torch.Generator().manual_seed(plan.seed))
        rows = measure_cases(bench, cases, roofline)
        return circumstances(model, target, command) | {
            "weights": "random" if random_weights else "checkpoint",
            "backend": llm.backend_reason,
            "plan": asdict(plan),
            "config": asdict(config),
            "machine": asdict(machine),
            "load_seconds": llm.weights_seconds,
            "engine_seconds": seconds - llm.weights_seconds,  # kernels, cache, graphs
            "memory": describe_memory(llm.model, capacity),
            **rows,
        }
