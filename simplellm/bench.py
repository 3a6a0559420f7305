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
from dataclasses import dataclass, replace
from datetime import date
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from simplellm.cache import kv_bytes
from simplellm.checkpoint import (
    count_parameters,
    is_expert_weight,
    kind,
    packed_shapes,
    tensor_shapes,
)
from simplellm.config import MODELS, ModelConfig
from simplellm.engine import Engine, EngineConfig, Meter, quantile
from simplellm.generate import RequestOutput
from simplellm.graphs import GPUConfig
from simplellm.llm import LLM
from simplellm.model import config_of, find_device
from simplellm.paged import PagedCache
from simplellm.report import describe_device, describe_memory, versions
from simplellm.sampler import SamplingParams, check_integer

NORM_ITEMSIZE = 4  # norms are kept in float32


def weight_bytes(
    config: ModelConfig, itemsize: int = 2, packed: bool = True
) -> dict[str, int]:
    """Bytes of the loaded weights by kind, as `simplellm.checkpoint.kind` names them.

    ``itemsize`` is that of what is neither an expert nor a norm; ``packed`` experts
    are MXFP4.
    """
    found: dict[str, int] = {}
    for name, shape in tensor_shapes(config).items():
        if packed and is_expert_weight(name):
            size = sum(map(math.prod, packed_shapes(shape)))
        else:
            size = math.prod(shape)
            size *= NORM_ITEMSIZE if kind(name) == "norms" else itemsize
        found[kind(name)] = found.get(kind(name), 0) + size
    if config.tie_word_embeddings:
        del found["embedding"]  # it is the LM head
    return found


def distinct_experts(config: ModelConfig, tokens: int) -> float:
    """How many experts of a layer some of ``tokens`` choose, on average.

    A token misses an expert with probability 1 - k/E if all choices are equally
    likely, so that E * (1 - (1 - k/E) ** tokens) of them are chosen.
    """
    experts, chosen = config.num_local_experts, config.num_experts_per_tok
    return experts * (1 - (1 - chosen / experts) ** tokens)


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one step must read, however it is computed."""

    dense: float  # attention, routers, norms, the LM head, rows of the embedding
    experts: float
    kv: float

    @property
    def total(self) -> float:
        return self.dense + self.experts + self.kv


def step_bytes(
    config: ModelConfig,
    tokens: int,
    context: int = 0,
    *,
    itemsize: int = 2,
    packed: bool = True,
) -> StepBytes:
    """What a step of one new token for each of ``tokens`` sequences must read.

    All weights but the embedding once, of the experts those that are expected to be
    chosen, and the keys and values of ``context`` positions for each sequence:

        dense + layers * distinct_experts * (bytes of one expert) + tokens * kv_bytes

    Activations and what is written are left out; both are small.
    """
    found = weight_bytes(config, itemsize, packed)
    experts = found.pop("experts")
    found.pop("embedding", None)
    rows = tokens * config.hidden_size * itemsize
    share = distinct_experts(config, tokens) / config.num_local_experts
    return StepBytes(
        dense=sum(found.values()) + rows,
        experts=experts * share,
        kv=tokens * kv_bytes(config, context, itemsize=itemsize) if context else 0,
    )


def step_flops(config: ModelConfig, tokens: int, sampled: int) -> float:
    """Multiplications and additions by weights of a step with ``tokens`` tokens.

    Two for each active parameter; the LM head sees the ``sampled`` tokens alone. What
    attention computes from keys and values is left out.
    """
    counts = count_parameters(config)
    head = config.vocab_size * config.hidden_size
    return 2.0 * ((counts.active - head) * tokens + head * sampled)


@dataclass(frozen=True)
class Machine:
    """What the device does at best, measured by `measure_machine`."""

    bytes_per_second: float  # read from memory
    flops_per_second: float  # of a matmul in the model's dtype

    def least_seconds(self, nbytes: float, flops: float) -> float:
        """No program that reads and computes so much can be faster: the roofline."""
        return max(nbytes / self.bytes_per_second, flops / self.flops_per_second)


def shortest(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The shortest of some times that ``work`` takes, in seconds."""
    times = []
    work()  # compiles kernels, touches memory
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return min(times)


def reader(device: torch.device) -> Callable[[Tensor], Tensor]:
    """The quickest way here to read a tensor of float32."""
    if device.type == "cuda" and find_spec("triton"):
        from simplellm.kernels.read import read

        return lambda x: read(x.view(torch.int32))
    return torch.sum


def read_speed(device: torch.device, nbytes: int) -> float:
    """Bytes a second at which ``nbytes`` of memory are read."""
    x = torch.ones(nbytes // 4, device=device)
    read = reader(device)
    return nbytes / shortest(lambda: read(x), device, 10)


def matmul_speed(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """FLOP/s of the product of two square matrices.

    They are random: a GPU needs less power for constants, and is then faster.
    """
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / shortest(lambda: a @ b, device, 10)


def measure_machine(device: torch.device, nbytes: int = 2**28) -> Machine:
    """Read 4 GiB and multiply 8192^3 on a GPU; ``nbytes`` and 1024^3 on a CPU.

    Of ``nbytes`` at most 256 MiB count; fewer may fit the cache, faster than memory.
    """
    if device.type == "cpu":
        return Machine(
            read_speed(device, min(nbytes, 2**28)),
            matmul_speed(device, 1024, torch.float32),
        )
    half = torch.cuda.mem_get_info(device)[0] // 2
    nbytes = min(2**32, 2 ** (half.bit_length() - 1))
    machine = Machine(
        read_speed(device, nbytes), matmul_speed(device, 8192, torch.bfloat16)
    )
    torch.cuda.empty_cache()  # the engine takes what is free
    return machine


@dataclass(frozen=True)
class Plan:
    """What to measure. Raises TypeError or ValueError.

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

    def __post_init__(self) -> None:
        numbers = {
            "batch": [*self.batches, *self.context_batches],
            "prefill": [number for pair in self.prefills for number in pair],
            "context": self.contexts,
            "input_len": [self.input_len],
            "output_len": [self.output_len],
        }
        for name, values in numbers.items():
            for value in values:
                check_integer(name, value, 1, 2**31)
        check_integer("seed", self.seed, 0, 2**32 - 1)
        if not (self.batches or self.prefills or self.contexts):
            raise ValueError("nothing is to be measured; expected a batch size")


Kind = Literal["decode", "prefill", "context"]


CONTEXT_STEPS = 64  # decodes at a long context, once all prompts are computed


PREFILL_RUNS = 3


@dataclass(frozen=True)
class Case:
    """One row to measure."""

    kind: Kind
    batch: int
    input_len: int
    output_len: int

    @property
    def length(self) -> int:
        return self.input_len + self.output_len

    @property
    def name(self) -> str:
        return f"{self.kind} {self.batch} x {self.input_len:,} + {self.output_len}"


def lag(case: Case, config: EngineConfig) -> int:
    """About how many steps a batch's first prompt is computed before its last one.

    Requests that decode meanwhile take a token each from every step.
    """
    budget = max(1, config.max_num_batched_tokens - case.batch)
    return -(-(case.batch - 1) * case.input_len // budget)


def plan_cases(plan: Plan, config: EngineConfig) -> list[Case]:
    """The rows of a plan. Raises ValueError for one whose requests never all run."""
    cases = []
    for batch in plan.batches:
        case = Case("decode", batch, plan.input_len, plan.output_len)
        if plan.output_len < (least := lag(case, config) + 2):
            raise ValueError(
                f"output_len is {plan.output_len}; expected at least {least}, or the "
                f"first of {batch} requests ends before the last one begins"
            )
        cases.append(case)
    for count, length in plan.prefills:
        cases.append(Case("prefill", count, length, 1))
    for context in plan.contexts:
        for batch in plan.context_batches:
            case = Case("context", batch, context, CONTEXT_STEPS)
            output = lag(case, config) + CONTEXT_STEPS
            if context <= output:
                raise ValueError(
                    f"context is {context}; expected more than {output}, the tokens "
                    f"that are generated in it at batch {batch}"
                )
            case = replace(case, input_len=context - output, output_len=output)
            cases.append(case)
    return cases


def check_lengths(cases: Sequence[Case], config: ModelConfig) -> None:
    """Raise ValueError for a case that is longer than the model's context."""
    limit = config.max_position_embeddings
    for case in cases:
        if case.length > limit:
            raise ValueError(
                f"{case.name} is {case.length:,} tokens a request; expected at most "
                f"{limit:,}, the model's context"
            )


def engine_config(plan: Plan, base: EngineConfig) -> EngineConfig:
    """``base`` with room for as many and as long requests as ``plan`` has."""
    batches = [*plan.batches, *(count for count, _ in plan.prefills)]
    lengths = [length + 1 for _, length in plan.prefills]
    if plan.batches:
        lengths.append(plan.input_len + plan.output_len)
    if plan.contexts:
        batches += plan.context_batches
        lengths += plan.contexts
    return replace(
        base,
        max_num_seqs=max(batches),
        max_num_batched_tokens=max(base.max_num_batched_tokens, 2 * max(batches)),
        max_model_len=max(lengths),
    )


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on ``device``; None if it does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = dict(line.split(":") for line in lines)
    return int(found["MemAvailable"].split()[0]) * 1024


def check_model(
    model: str, random_weights: bool, device: torch.device, config: ModelConfig
) -> None:
    """Raise ValueError if the weights cannot fit."""
    found = weight_bytes(config, 2 if device.type == "cuda" else 4)
    if device.type == "cpu" and not random_weights:
        del found["experts"]  # they stay in the file
    need = sum(found.values())
    free = free_memory(device)
    if free is None or need < free:
        return
    where = "the GPU" if device.type == "cuda" else "the CPU"
    none = "" if torch.cuda.is_available() else ", and there is no GPU"
    raise ValueError(
        f"{model} needs {need / 1e9:.1f} GB for its weights, and some for keys and "
        f"values; {where} has {free / 1e9:.1f} GB free{none}"
    )


def cache_bytes(
    model: ModelConfig, config: EngineConfig, itemsize: int, case: Case
) -> int:
    """Bytes of keys and values that are enough for a case, pages not full included."""
    page = config.page_size
    each = kv_bytes(model, case.length + page, itemsize=itemsize)
    each += kv_bytes(model, page, itemsize=itemsize)
    step = min(config.max_num_batched_tokens, case.batch * case.input_len)
    return case.batch * each + kv_bytes(model, step, itemsize=itemsize, windowed=False)


def check_cache(engine: Engine, cases: Sequence[Case]) -> None:
    """Raise ValueError for a case that could run out of pages on its way."""
    if not isinstance(engine.cache, PagedCache):
        return  # each request has its slot
    room = engine.cache.nbytes
    itemsize = engine.model.dtype.itemsize
    for case in cases:
        need = cache_bytes(engine.model.config, engine.config, itemsize, case)
        if need > room:
            raise ValueError(
                f"{case.name} tokens may need {need / 1e9:.2f} GB for keys and values; "
                f"expected at most {room / 1e9:.2f} GB, for which the cache has room"
            )


class TimedLLM(LLM):
    """An LLM that knows how long its weights took, and how much memory they have."""

    loaded_at = math.nan
    weights: int | None = None  # bytes on the GPU

    def _make_engine(self, config: EngineConfig | None) -> Engine:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
            self.weights = torch.cuda.memory_allocated()
        self.loaded_at = time.perf_counter()
        return super()._make_engine(config)


class Recorder(Meter):
    """A meter that forgets nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.recent, self.ttft, self.itl = deque(), deque(), deque()


@dataclass(frozen=True)
class Run:
    """One batch of requests, all submitted at once."""

    outputs: list[RequestOutput]
    seconds: float  # from the first request to the last answer
    meter: Recorder
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


class Bench:
    """Runs cases on an LLM that does nothing else."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self.generator = torch.Generator().manual_seed(seed)

    def run(self, batch: int, input_len: int, output_len: int) -> Run:
        """Generate ``output_len`` tokens after each of ``batch`` new random prompts."""
        engine = self.llm.engine
        while engine.flights:  # a step in advance, whose tokens nobody wants
            time.sleep(0.001)
        with engine.lock:
            engine.meter = meter = Recorder()
        shape = (batch, input_len)
        vocab_size = self.llm.config.vocab_size
        prompts = torch.randint(vocab_size, shape, generator=self.generator).tolist()
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        before, began = self.llm.stats().preemptions, time.monotonic()
        outputs = self.llm.generate(prompts, params).result()
        seconds = time.monotonic() - began
        if preempted := self.llm.stats().preemptions - before:
            raise RuntimeError(f"the cache was too small: {preempted} preemptions")
        return Run(outputs, seconds, meter, began)

    def decode(self, case: Case) -> Run:
        """Run a case after a short one of the same kind."""
        budget = self.llm.engine.config.max_num_batched_tokens
        if case.kind == "decode":
            self.run(case.batch, case.input_len, min(4, case.output_len))
        else:
            self.run(1, min(budget + 1, case.input_len), 2)
        return self.run(case.batch, case.input_len, case.output_len)

    def prefill(self, case: Case) -> list[Run]:
        """Run a case several times, after once more."""
        runs = [
            self.run(case.batch, case.input_len, 1) for _ in range(1 + PREFILL_RUNS)
        ]
        return runs[1:]


@dataclass(frozen=True)
class Decode:
    """How fast tokens come. Speeds are tokens a second of all requests together."""

    batch: int
    input_len: int
    output_len: int
    step_ms: float  # median, of the steps that decode for every request
    steps: int  # how many these were
    tokens_per_second: float  # batch over step
    end_to_end: float  # output tokens over the time of all, prefill included
    ttft_ms: float  # time to first token, median
    ttft_p99_ms: float
    itl_ms: float  # inter-token latency, median
    itl_p99_ms: float
    distinct_outputs: int
    distinct_experts: float  # of a layer in a step, if routing is uniform
    dense_bytes: float  # that a step must read, as the next two
    expert_bytes: float
    kv_bytes: float
    limit: float  # tokens a second that the machine allows
    share: float  # of this limit


@dataclass(frozen=True)
class Prefill:
    """How fast prompts are computed, median of some runs on an idle engine."""

    batch: int
    input_len: int
    seconds: float  # until the last of them has its first token
    tokens_per_second: float
    ttft_ms: float  # median of the prompts
    limit: float
    share: float


def milliseconds(times: Sequence[float], share: float) -> float:
    """A quantile of some times in seconds; nan of none."""
    value = quantile(times, share)
    return math.nan if value is None else 1e3 * value


def decode_row(
    case: Case, run: Run, machine: Machine, config: ModelConfig, sizes: dict[str, Any]
) -> Decode:
    """The row of a decode; ``sizes`` are what `step_bytes` wants of the model."""
    steps = run.full_steps(case.batch)
    if not steps:
        raise RuntimeError(f"{case.name}: no step ran all {case.batch} requests")
    # In the middle of the steps that count, which are the last ones.
    context = case.length - len(steps) // 2
    step = step_bytes(config, case.batch, context, **sizes)
    flops = step_flops(config, case.batch, case.batch)
    least, taken = machine.least_seconds(step.total, flops), median(steps)
    return Decode(
        batch=case.batch,
        input_len=case.input_len,
        output_len=case.output_len,
        step_ms=1e3 * taken,
        steps=len(steps),
        tokens_per_second=case.batch / taken,
        end_to_end=case.batch * case.output_len / run.seconds,
        ttft_ms=milliseconds(run.meter.ttft, 0.5),
        ttft_p99_ms=milliseconds(run.meter.ttft, 0.99),
        itl_ms=milliseconds(run.meter.itl, 0.5),
        itl_p99_ms=milliseconds(run.meter.itl, 0.99),
        distinct_outputs=len({tuple(output.token_ids) for output in run.outputs}),
        distinct_experts=distinct_experts(config, case.batch),
        dense_bytes=step.dense,
        expert_bytes=step.experts,
        kv_bytes=step.kv,
        limit=case.batch / least,
        share=least / taken,
    )


def prefill_row(
    case: Case,
    runs: Sequence[Run],
    machine: Machine,
    config: ModelConfig,
    sizes: dict[str, Any],
) -> Prefill:
    """The row of a prefill."""
    tokens = case.batch * case.input_len
    seconds = median(run.last_token for run in runs)
    step = step_bytes(config, tokens, **sizes)
    flops = step_flops(config, tokens, case.batch)
    least = machine.least_seconds(step.total, flops)
    return Prefill(
        batch=case.batch,
        input_len=case.input_len,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        ttft_ms=milliseconds([t for run in runs for t in run.meter.ttft], 0.5),
        limit=tokens / least,
        share=least / seconds,
    )


@dataclass(frozen=True)
class Report:
    """All that was measured, and on what."""

    date: str
    command: str
    model: str
    weights: str  # "random" or "checkpoint"
    backend: str
    device: dict[str, Any]
    versions: dict[str, str]
    plan: Plan
    config: EngineConfig
    machine: Machine
    load_seconds: float  # weights
    engine_seconds: float  # cache, kernels and graphs
    memory: dict[str, int | None]  # bytes
    roof: list[tuple[int, float]]  # tokens in a step, tokens a second at most
    decode: list[Decode]
    context: list[Decode]
    prefill: list[Prefill]


def find_config(model: str | None, random_weights: bool) -> ModelConfig:
    """The config of a checkpoint folder or known model. Raises ValueError."""
    if model is not None and not Path(model).is_dir():
        if model not in MODELS:
            raise ValueError(
                f"model is {model!r}; expected a checkpoint folder or one of "
                f"{', '.join(MODELS)}"
            )
        if not random_weights:
            raise ValueError(
                f"there is no folder {model!r}; expected a checkpoint folder, or "
                "random weights in this model's shapes (--random-weights)"
            )
    return config_of(model, random_weights)


def roof(
    machine: Machine, model: ModelConfig, config: EngineConfig, sizes: dict[str, Any]
) -> list[tuple[int, float]]:
    """The most tokens a second for each number of tokens in a step; no attention."""
    points = []
    most = config.max_num_batched_tokens
    for tokens in [2**n for n in range(most.bit_length())]:
        read = step_bytes(model, tokens, **sizes).total
        flops = step_flops(model, tokens, min(tokens, config.max_num_seqs))
        points.append((tokens, tokens / machine.least_seconds(read, flops)))
    return points


def measure(
    plan: Plan,
    model: str | None = None,
    *,
    random_weights: bool = False,
    device: str | None = None,
    config: EngineConfig | None = None,
    command: str = "",
) -> Report:
    """Measure all that ``plan`` asks for; the engine is that of `LLM`.

    ``model`` is a checkpoint folder or, with ``random_weights``, the name of a known
    model; None is the embedded one. ``config`` holds the engine's switches; its sizes
    of batch and length follow from the plan. A bar on standard error shows where it is.
    Raises TypeError or ValueError before anything is loaded, where it can be known.
    """
    place = find_device(device)
    shapes = find_config(model, random_weights)
    base = config or (GPUConfig() if place.type == "cuda" else EngineConfig())
    config = engine_config(plan, base)
    cases = plan_cases(plan, config)
    check_lengths(cases, shapes)
    check_model(model or "the model", random_weights, place, shapes)
    machine = measure_machine(place, sum(weight_bytes(shapes, 4).values()))
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with TimedLLM(
        model,
        config,
        device=place,
        random_weights=random_weights,
        seed=plan.seed if random_weights else None,
    ) as llm:
        ready = time.perf_counter()
        check_cache(llm.engine, cases)
        first: Any = llm.model.layers[0]
        sizes = {
            "itemsize": llm.model.dtype.itemsize,
            "packed": not isinstance(first.mlp.experts.gate_up, Tensor),
        }
        rows: dict[str, list[Any]] = {"decode": [], "context": [], "prefill": []}
        bench = Bench(llm, plan.seed)
        with tqdm(cases, unit="row", disable=None, leave=False) as progress:
            for case in progress:
                progress.set_description(case.name)
                if case.kind == "prefill":
                    runs = bench.prefill(case)
                    row: Any = prefill_row(case, runs, machine, shapes, sizes)
                else:
                    row = decode_row(case, bench.decode(case), machine, shapes, sizes)
                rows[case.kind].append(row)
        memory = describe_memory(llm)
    return Report(
        date=date.today().isoformat(),
        command=command,
        model=model or "embedded",
        weights="random" if random_weights else "checkpoint",
        backend=llm.how,
        device=describe_device(place),
        versions=versions(),
        plan=plan,
        config=config,
        machine=machine,
        load_seconds=llm.loaded_at - start,
        engine_seconds=ready - llm.loaded_at,
        memory=memory,
        roof=roof(machine, shapes, config, sizes),
        **rows,
    )
