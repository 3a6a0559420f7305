"""Reports of benchmarks: a record, and the table, JSON and plot that show it.

A record is plain data, whether it was measured just now or read from a file.
"""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill, shorten
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from simplellm import __version__
from simplellm.model.machine import name_of
from simplellm.model.memory import weight_bytes
from simplellm.model.model import Model

FORMATS = (".svg", ".png", ".pdf")  # of a plot

Headings = Mapping[str, tuple[str, str]]  # by field, a heading and a format
DECODE_ROWS: Headings = {
    "batch": ("batch", "d"),
    "input_len": ("in", "d"),
    "output_len": ("out", "d"),
    "step_ms": ("step ms", ".2f"),
    "tokens_per_second": ("tok/s", ".0f"),
    "end_to_end": ("e2e", ".0f"),
    "ttft_ms": ("TTFT ms", ".0f"),
    "itl_p99_ms": ("ITL p99 ms", ".1f"),
    "limit": ("limit", ".0f"),
    "share": ("of it", ".1%"),
}
PREFILL_ROWS: Headings = {
    "batch": ("prompts", "d"),
    "input_len": ("tokens", ",d"),
    "tokens_per_second": ("tok/s", ",.0f"),
    "ttft_ms": ("TTFT ms", ",.1f"),
    "limit": ("limit", ",.0f"),
    "share": ("of it", ".1%"),
}


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
    versions_of = {
        "simplellm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    with suppress(ImportError):
        from triton import __version__ as triton

        versions_of["triton"] = triton
    return versions_of


def circumstances(
    model: str | None, device: torch.device, command: str
) -> dict[str, Any]:
    """The fields that every record of a measurement begins with."""
    return {
        "date": date.today().isoformat(),
        "command": command,
        "model": model or "embedded",
        "device": describe_device(device),
        "versions": versions(),
    }


def describe_memory(model: Model, cache: int) -> dict[str, int | None]:
    """Bytes of weights and cache, and the most that PyTorch held; None: not known."""
    gpu = model.device.type == "cuda"
    weights = weight_bytes(model.config, model.dtype.itemsize)
    return {
        "weights": sum(weights.values()),
        "cache": cache,
        "peak": torch.cuda.max_memory_allocated() if gpu else None,
        "free": torch.cuda.mem_get_info()[0] if gpu else None,
    }


# What the command says


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Write what was found as JSON."""
    text = json.dumps(report, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def in_bytes(count: int) -> str:
    """A size as people say it: in MB below a GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def show(record: Mapping[str, Any], console: Console) -> None:
    """Print what was measured of an engine and on what, at most 80 columns wide."""
    machine, memory = record["machine"], record["memory"]
    sizes = [f"{name} {in_bytes(size)}" for name, size in memory.items() if size]
    lines = (
        f"{record['model']}, {record['weights']} weights, {record['date']}",
        f"{record['device']['name']}: {record['backend']}",
        f"reads {machine['bytes_per_second'] / 1e9:,.1f} GB/s, computes "
        f"{machine['flops_per_second'] / 1e12:,.2f} TFLOP/s",
        f"weights loaded in {record['load_seconds']:.1f} s, engine ready in "
        f"{record['engine_seconds']:.1f} s more",
        f"memory: {', '.join(sizes)}",
    )
    for line in lines:
        console.out(line, highlight=False)
    decodes = [*record["decode"], *record["context"]]
    for rows, columns in ((decodes, DECODE_ROWS), (record["prefill"], PREFILL_ROWS)):
        if rows:
            console.print()
            console.print(tabulate(rows, columns))


def tabulate(rows: Sequence[Mapping[str, Any]], columns: Headings) -> Table:
    """A table of ``rows``, with the fields that are in ``columns``."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading, _ in columns.values():
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(format(row[n], shown) for n, (_, shown) in columns.items()))
    return table


def show_traffic(report: Mapping[str, Any], console: Console) -> None:
    """Print what became of a workload, at most 80 columns wide."""
    cached = report["cached_tokens"] / max(1, report["prompt_tokens"])
    lines = [
        f"{report['answered']:,} of {report['requests']:,} requests answered in "
        f"{report['seconds']:,.1f} s, {report['requests_per_second']:,.2f} a second",
        *(f"{count:,} errors: {kind}" for kind, count in report["errors"].items()),
        *(f"{n:,} x {shorten(why, 300)}" for why, n in report["reasons"].items()),
        f"{report['prompt_tokens']:,} tokens of prompts, {cached:.1%} of them cached",
        f"{report['output_tokens']:,} new ones, {report['tokens_per_second']:,.1f} a "
        f"second, seed {report['seed']}",
        f"workload {report['load']}",
    ]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("milliseconds")
    for share in ("p50", "p90", "p99"):
        table.add_column(share, justify="right", min_width=9)
    for name, times in report["milliseconds"].items():
        cells = ("" if ms is None else f"{ms:,.1f}" for ms in times.values())
        table.add_row(name, *cells)
    for line in lines:
        console.out(fill(line, 80, subsequent_indent="    "), highlight=False)
    console.print()
    console.print(table)


def check_plot(path: Path) -> None:
    """Raise ValueError unless `plot` can write to ``path``."""
    if path.suffix not in FORMATS or not find_spec("matplotlib"):
        raise ValueError(
            f"the plot is {str(path)!r}; expected .svg, .png or .pdf, and matplotlib "
            "to draw it (pip install matplotlib)"
        )


@contextmanager
def drawing(path: Path, **settings: Any) -> Iterator[Any]:
    """Axes to draw on, which are written to a file in the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.set(xscale="log", **settings)
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path)


def plot(record: Mapping[str, Any], path: Path) -> None:
    """Draw tokens a second over tokens in a step, and what the machine allows."""
    most = record["config"]["max_num_batched_tokens"]
    title = f"{record['model']} on {record['device']['name']}"
    labels = {"xlabel": "tokens in a step", "ylabel": "tokens a second", "title": title}
    with drawing(path, yscale="log", **labels) as axes:
        for name in ("decode", "prefill"):
            rows = record[name]
            each = [1 if name == "decode" else row["input_len"] for row in rows]
            tokens = [
                min(most, r["batch"] * n) for r, n in zip(rows, each, strict=True)
            ]
            axes.plot(tokens, [r["tokens_per_second"] for r in rows], "o", label=name)
            axes.plot(tokens, [r["limit"] for r in rows], "_", label=f"{name}, limit")


def plot_traffic(milliseconds: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw which share of each kind of latency takes how long at most."""
    labels = {"xlabel": "milliseconds", "ylabel": "share that takes no longer"}
    with drawing(path, **labels) as axes:
        for name, times in milliseconds.items():
            if times:
                axes.ecdf(times, label=name)
