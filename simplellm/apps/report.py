"""What a benchmark says: its record, and the table, JSON and plot that show it."""

import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import torch
from rich.console import Console
from rich.table import Table

from simplellm import __version__
from simplellm.apps.roofline import Machine
from simplellm.config import EngineConfig
from simplellm.machine import name_of
from simplellm.model import Model
from simplellm.sizes import weight_bytes

FORMATS = (".svg", ".png", ".pdf")  # of a plot


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
    versions: dict[str, str | None]
    plan: Plan
    config: EngineConfig
    machine: Machine
    load_seconds: float  # weights
    engine_seconds: float  # kernels, cache and graphs
    memory: dict[str, int | None]  # bytes
    decode: list[Decode]
    context: list[Decode]
    prefill: list[Prefill]


# What it was measured on


def describe_device(device: torch.device) -> dict[str, Any]:
    """What the measurements were taken on."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        return {"name": name_of(device), "memory_bytes": total}
    threads = torch.get_num_threads()
    return {"name": f"CPU, {platform.machine()}", "threads": threads}


def versions() -> dict[str, str | None]:
    """The versions that decide how fast this is; cuda is None on a CPU."""
    found = {
        "simplellm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    with suppress(ImportError):
        from triton import __version__ as triton

        found["triton"] = triton
    return found


def describe_memory(model: Model, cache: int, packed: bool) -> dict[str, int | None]:
    """Bytes of weights and cache, and the most that PyTorch held; None: not known."""
    gpu = model.device.type == "cuda"
    weights = weight_bytes(model.config, model.dtype.itemsize, packed)
    return {
        "weights": sum(weights.values()),
        "cache": cache,
        "peak": torch.cuda.max_memory_allocated() if gpu else None,
        "free": torch.cuda.mem_get_info()[0] if gpu else None,
    }


# What the command says


def write_json(found: Mapping[str, Any], path: Path) -> None:
    """Write what was found as JSON."""
    text = json.dumps(found, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def show(report: Report, console: Console) -> None:
    """Print what was measured and on what, at most 80 columns wide."""
    machine, memory = report.machine, report.memory
    known = [f"{name} {size / 1e9:.1f}" for name, size in memory.items() if size]
    lines = (
        f"{report.model}, {report.weights} weights, {report.date}",
        f"{report.device['name']}: {report.backend}",
        f"reads {machine.bytes_per_second / 1e9:,.1f} GB/s, computes "
        f"{machine.flops_per_second / 1e12:,.2f} TFLOP/s",
        f"weights loaded in {report.load_seconds:.1f} s, engine ready in "
        f"{report.engine_seconds:.1f} s more",
        f"GB of memory: {', '.join(known)}",
    )
    for line in lines:
        console.out(line, highlight=False)
    for rows in ([*report.decode, *report.context], report.prefill):
        if rows:
            console.print()
            console.print(tabulate(rows))


def tabulate(rows: Sequence[Any]) -> Table:
    """The fields with a heading. Speeds are tokens a second."""
    hints = get_type_hints(type(rows[0]), include_extras=True)
    columns = {n: h.__metadata__ for n, h in hints.items() if get_origin(h)}
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading, _ in columns.values():
        table.add_column(heading, justify="right")
    for row in rows:
        cells = ((getattr(row, n), shown) for n, (_, shown) in columns.items())
        table.add_row(*(format(value, shown) for value, shown in cells))
    return table


def show_traffic(found: Mapping[str, Any], console: Console) -> None:
    """Print what became of a workload, at most 80 columns wide."""
    cached = found["cached_tokens"] / max(1, found["prompt_tokens"])
    lines = [
        f"{found['answered']:,} of {found['requests']:,} requests answered in "
        f"{found['seconds']:,.1f} s, {found['requests_per_second']:,.2f} a second",
        *(f"{count:,} errors: {kind}" for kind, count in found["errors"].items()),
        f"{found['prompt_tokens']:,} tokens of prompts, {cached:.1%} of them cached",
        f"{found['output_tokens']:,} new ones, {found['tokens_per_second']:,.1f} a "
        f"second, seed {found['seed']}",
    ]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("milliseconds")
    for share in ("p50", "p90", "p99"):
        table.add_column(share, justify="right", min_width=9)
    for name, times in found["milliseconds"].items():
        cells = ("" if ms is None else f"{ms:,.1f}" for ms in times.values())
        table.add_row(name, *cells)
    for line in lines:
        console.out(line, highlight=False)
    console.print()
    console.print(table)


def check_plot(path: Path) -> None:
    """Raise ValueError unless `plot` can write to ``path``."""
    if path.suffix not in FORMATS or not find_spec("matplotlib"):
        raise ValueError(
            f"the plot is {str(path)!r}; expected .svg, .png or .pdf, and matplotlib "
            "to draw it (pip install matplotlib)"
        )


def plot(report: Report, path: Path) -> None:
    """Draw tokens a second over tokens in a step, and what the machine allows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    most = report.config.max_num_batched_tokens
    decode = [row.batch for row in report.decode]
    prefill = [min(most, row.batch * row.input_len) for row in report.prefill]
    for name, tokens, rows in (
        ("decode", decode, report.decode),
        ("prefill", prefill, report.prefill),
    ):
        axes.plot(tokens, [row.tokens_per_second for row in rows], "o", label=name)
        axes.plot(tokens, [row.limit for row in rows], "_", label=f"{name}, limit")
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


def plot_traffic(milliseconds: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw which share of each kind of latency takes how long at most."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, times in milliseconds.items():
        if times:
            axes.ecdf(times, label=name)
    axes.set(xscale="log", xlabel="milliseconds", ylabel="share that takes no longer")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path)
