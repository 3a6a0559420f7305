"""What a benchmark says: what it ran on, tables, a JSON file, a plot."""

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from simplellm import __version__

if TYPE_CHECKING:  # it imports this module
    from simplellm.bench import Report, TimedLLM


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


def describe_memory(llm: "TimedLLM") -> dict[str, int | None]:
    """Bytes of weights and cache, and the most that PyTorch held; None: not known."""
    cache = llm.engine.cache
    found = {"weights": llm.weights, "cache": cache.nbytes if cache else 0}
    found |= {"peak": None, "free": None}
    if llm.model.device.type == "cuda":
        found["peak"] = torch.cuda.max_memory_allocated()
        found["free"] = torch.cuda.mem_get_info()[0]
    return found


def write_json(report: "Report", path: Path) -> None:
    """Write a report as JSON, the names those of its fields."""
    text = json.dumps(asdict(report), indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def summary(report: "Report") -> Iterator[str]:
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


def make_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for header in headers:
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def tables(report: "Report") -> Iterator[Table]:
    """What was measured, at most 80 columns wide. Speeds are tokens a second."""
    decodes = [*report.decode, *report.context]
    if decodes:
        headers = "batch,in,out,step\nms,tok/s,end to\nend,limit\ntok/s,of it,"
        headers += "TTFT\nms,ITL p99\nms"
        yield make_table(
            headers.split(","),
            [
                (
                    str(row.batch),
                    str(row.input_len),
                    str(row.output_len),
                    f"{row.step_ms:.2f}",
                    f"{row.tokens_per_second:.0f}",
                    f"{row.end_to_end:.0f}",
                    f"{row.limit:.0f}",
                    f"{row.share:.1%}",
                    f"{row.ttft_ms:.0f}",
                    f"{row.itl_p99_ms:.1f}",
                )
                for row in decodes
            ],
        )
    if report.prefill:
        yield make_table(
            ["prompts", "tokens", "tok/s", "limit", "of it", "TTFT ms"],
            [
                (
                    str(row.batch),
                    f"{row.input_len:,}",
                    f"{row.tokens_per_second:,.0f}",
                    f"{row.limit:,.0f}",
                    f"{row.share:.1%}",
                    f"{row.ttft_ms:,.1f}",
                )
                for row in report.prefill
            ],
        )


def check_plot(path: Path) -> None:
    """Raise ValueError unless `plot` can write to ``path``."""
    if not find_spec("matplotlib"):
        raise ValueError(
            "a plot needs matplotlib, which is not installed; expected it from "
            "pip install matplotlib"
        )
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"the plot is {str(path)!r}; expected .svg, .png or .pdf")


def plot(report: "Report", path: Path) -> None:
    """Draw tokens a second over tokens in a step, under the roof of the machine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*report.roof, strict=True), color="black", label="limit")
    decodes = [(row.batch, row.tokens_per_second) for row in report.decode]
    most = report.config.max_num_batched_tokens
    prefills = [
        (min(most, row.batch * row.input_len), row.tokens_per_second)
        for row in report.prefill
    ]
    for label, mark, points in (("decode", "o", decodes), ("prefill", "s", prefills)):
        if points:
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
