"""What a benchmark says: its record, and the table, JSON and plot that show it."""

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import torch
from rich.table import Table
from torch import Tensor

from simplellm import __version__
from simplellm.apps.roofline import Machine
from simplellm.config import EngineConfig, check_number
from simplellm.model import Model
from simplellm.pages import KVPool

MAX_BATCH = 2**31
FORMATS = (".svg", ".png", ".pdf")  # of a plot


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
                check_number(name, value, int, 1, MAX_BATCH)
        check_number("seed", self.seed, int, 0, 2**32 - 1)
        if not (self.batches or self.prefills or self.contexts):
            raise ValueError("nothing is to be measured; expected a batch size")


# What is found: a field with a heading and a format is a column of the printed table


@dataclass(frozen=True)
class Decode:
    """How fast tokens come. Speeds are tokens a second of all requests together."""

    batch: Annotated[int, "batch", "d"]
    input_len: Annotated[int, "in", "d"]
    output_len: Annotated[int, "out", "d"]
    step_ms: Annotated[float, "step\nms", ".2f"]  # median, of steps for every request
    steps: int  # how many these were
    tokens_per_second: Annotated[float, "tok/s", ".0f"]  # batch over step
    end_to_end: Annotated[float, "end to\nend", ".0f"]  # over all time, with prefill
    ttft_ms: Annotated[float, "TTFT\nms", ".0f"]  # time to first token, median
    ttft_p99_ms: float
    itl_ms: float  # inter-token latency, median
    itl_p99_ms: Annotated[float, "ITL p99\nms", ".1f"]
    distinct_outputs: int
    distinct_experts: float  # of a layer in a step, if routing is uniform
    dense_bytes: float  # that a step must read, as the next two
    expert_bytes: float
    kv_bytes: float
    limit: Annotated[float, "limit\ntok/s", ".0f"]  # what the machine allows
    share: Annotated[float, "of it", ".1%"]  # of this limit


@dataclass(frozen=True)
class Prefill:
    """How fast prompts are computed, median of some runs on an idle engine."""

    batch: Annotated[int, "prompts", "d"]
    input_len: Annotated[int, "tokens", ",d"]
    seconds: float  # until the last of them has its first token
    tokens_per_second: Annotated[float, "tok/s", ",.0f"]
    ttft_ms: Annotated[float, "TTFT ms", ",.1f"]  # median of the prompts
    limit: Annotated[float, "limit", ",.0f"]
    share: Annotated[float, "of it", ".1%"]


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
    engine_seconds: float  # kernels, cache and graphs
    memory: dict[str, int | None]  # bytes
    roof: list[tuple[int, float]]  # tokens in a step, tokens a second at most
    decode: list[Decode]
    context: list[Decode]
    prefill: list[Prefill]


# What it was measured on


def describe_device(device: torch.device) -> dict[str, Any]:
    """What the measurements were taken on."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return {
            "name": found.name,
            "compute_capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "memory_bytes": found.total_memory,
        }
    threads = torch.get_num_threads()
    return {"name": f"CPU, {platform.machine()}", "threads": threads}


def versions() -> dict[str, str]:
    """The versions that decide how fast this is."""
    found = {
        "simplellm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if find_spec("triton"):
        from triton import __version__ as triton

        found["triton"] = triton
    return found


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in some records."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)
    elif is_dataclass(value):
        yield from tensors([getattr(value, part.name) for part in fields(value)])


def describe_memory(model: Model, pool: KVPool) -> dict[str, int | None]:
    """Bytes of weights and cache, and the most that PyTorch held; None: not known."""
    held = tensors([model.embed_tokens, *model.layers, model.norm, model.lm_head])
    found: dict[str, int | None] = {
        "weights": sum({x.data_ptr(): x.nbytes for x in held}.values()),
        "cache": pool.memory.nbytes,
        "peak": None,
        "free": None,
    }
    if model.device.type == "cuda":
        found["peak"] = torch.cuda.max_memory_allocated()
        found["free"] = torch.cuda.mem_get_info()[0]
    return found


# What the command says


def write_json(report: Report, path: Path) -> None:
    """Write a report as JSON, the names those of its fields."""
    text = json.dumps(asdict(report), indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def summary(report: Report) -> Iterator[str]:
    """What was measured and on what, some lines of text."""
    machine, memory = report.machine, report.memory
    yield f"{report.model}, {report.weights} weights, {report.date}"
    yield f"{report.device['name']}: {report.backend}"
    yield (
        f"reads {machine.bytes_per_second / 1e9:,.1f} GB/s, computes "
        f"{machine.flops_per_second / 1e12:,.2f} TFLOP/s"
    )
    yield (
        f"weights loaded in {report.load_seconds:.1f} s, engine ready in "
        f"{report.engine_seconds:.1f} s more"
    )
    known = [f"{name} {size / 1e9:.1f}" for name, size in memory.items() if size]
    yield f"GB of memory: {', '.join(known)}"


def tables(report: Report) -> Iterator[Table]:
    """What was measured, at most 80 columns wide. Speeds are tokens a second."""
    decodes = [*report.decode, *report.context]
    both: list[tuple[Any, list[Any]]] = [(Decode, decodes), (Prefill, report.prefill)]
    for kind, rows in both:
        if not rows:
            continue
        hints = get_type_hints(kind, include_extras=True)
        columns = {n: h.__metadata__ for n, h in hints.items() if get_origin(h)}
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for heading, _ in columns.values():
            table.add_column(heading, justify="right")
        for row in rows:
            cells = ((getattr(row, n), shown) for n, (_, shown) in columns.items())
            table.add_row(*(format(value, shown) for value, shown in cells))
        yield table


def check_plot(path: Path) -> None:
    """Raise ValueError unless `plot` can write to ``path``."""
    if not find_spec("matplotlib"):
        raise ValueError(
            "a plot needs matplotlib, which is not installed; expected it from "
            "pip install matplotlib"
        )
    if path.suffix not in FORMATS:
        raise ValueError(f"the plot is {str(path)!r}; expected .svg, .png or .pdf")


def plot(report: Report, path: Path) -> None:
    """Draw tokens a second over tokens in a step, under the roof of the machine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*report.roof, strict=True), color="black", label="limit")
    most = report.config.max_num_batched_tokens
    steps: dict[tuple[str, str], list[tuple[int, Any]]] = {
        ("decode", "o"): [(row.batch, row) for row in report.decode],
        ("prefill", "s"): [
            (min(most, row.batch * row.input_len), row) for row in report.prefill
        ],
    }
    for (label, mark), rows in steps.items():
        if rows:
            points = [(tokens, row.tokens_per_second) for tokens, row in rows]
            axes.plot(*zip(*points, strict=True), mark, label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens in a step",
        ylabel="tokens a second",
        title=f"{report.model} on {report.device['name']}",
    )
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path)
