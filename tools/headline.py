"""The engine's speed beside vLLM's and the GPU's limit, for README.md.

`tables.py` writes what `section` returns and calls `draw` when the picture is old.
"""

import json
import sys
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

RECORDS = {"gpt-oss-120b": "12-bench", "gpt-oss-20b": "12-bench-20b"}
PICTURE = "headline"
TABULATED = (1, 8, 64, 256)  # batch sizes; the picture has all


class Point(NamedTuple):
    """Tokens a second at one batch size: this engine's, vLLM's, and the most."""

    batch: int
    ours: float
    vllm: float
    limit: float

    def share(self, whose: str) -> float:
        """Percent of the limit that "ours" or "vllm" reaches."""
        return 100 * getattr(self, whose) / self.limit


def read(figures: Path, name: str) -> Any:
    return json.loads((figures / f"{name}.json").read_text(encoding="utf-8"))


def faster(row: dict[str, Any]) -> float:
    """Of vLLM's two kernels for the experts."""
    return max(row["triton"], row["marlin"])


def points(report: dict[str, Any], vllm: dict[str, Any]) -> list[Point]:
    """Decoding, at each batch size that both engines ran."""
    theirs = {
        row["batch"]: faster(row)
        for row in vllm["decode"]
        if row["model"] == report["model"]
    }
    return [
        Point(r["batch"], r["tokens_per_second"], theirs[r["batch"]], r["limit"])
        for r in report["decode"]
        if r["batch"] in theirs
    ]


def prefill(report: dict[str, Any], vllm: dict[str, Any]) -> Point:
    """The prompts that vLLM was given, all at once."""
    (row,) = (r for r in vllm["prefill"] if r["model"] == report["model"])
    size = row["batch"], row["input_len"]
    (ours,) = (r for r in report["prefill"] if (r["batch"], r["input_len"]) == size)
    return Point(row["batch"], ours["tokens_per_second"], faster(row), ours["limit"])


def first_token(report: dict[str, Any], vllm: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds to the first token after one prompt: this engine's, vLLM's."""
    (row,) = (r for r in vllm["ttft_ms"] if r["model"] == report["model"])
    (ours,) = (
        r
        for r in report["prefill"]
        if (r["batch"], r["input_len"]) == (1, row["input_len"])
    )
    return ours["ttft_ms"], row["best"]


def rows(report: dict[str, Any], vllm: dict[str, Any]) -> list[list[str]]:
    """Three lines of the table: this engine, vLLM, the limit."""
    decode = {p.batch: p for p in points(report, vllm)}
    columns = [*(decode[batch] for batch in TABULATED), prefill(report, vllm)]
    ours_ms, vllm_ms = first_token(report, vllm)
    ours, theirs, limit = (
        [f"{getattr(column, which):,.0f}" for column in columns]
        for which in ("ours", "vllm", "limit")
    )
    return [
        [f"**{report['model']}**", *(f"**{x}**" for x in (*ours, f"{ours_ms:.0f} ms"))],
        [f"vLLM {vllm['versions']['vllm']}", *theirs, f"{vllm_ms:.0f} ms"],
        ["the GPU's limit", *limit, ""],
    ]


def described(figures: Path) -> str:
    """What the picture shows, in words: its alternative text."""
    vllm = read(figures, "vllm-h200")
    parts = []
    for model, name in RECORDS.items():
        shares = [
            f"{p.share('ours'):.0f} and {p.share('vllm'):.0f} at {p.batch}"
            for p in points(read(figures, name), vllm)
        ]
        parts.append(f"{model}: {', '.join(shares)}.")
    return (
        "Bars: percent of the GPU's limit that this engine and vLLM reach, over the "
        f"batch size. {' '.join(parts)}"
    )


def smaller(report: dict[str, Any]) -> str:
    """A sentence on a GPU with less memory."""
    decode = [
        f"{row['tokens_per_second']:,.0f} at batch {row['batch']}"
        for row in report["decode"]
    ]
    last = report["prefill"][-1]
    return (
        f"{report['model']} also fits into one {report['device']['name']}, which gives "
        f"{', '.join(decode)} and {last['tokens_per_second']:,.0f} tokens a second of "
        "prefill."
    )


def section(figures: Path) -> tuple[list[str], list[list[str]], str]:
    """Headers and rows of the table, and what stands below it."""
    vllm = read(figures, "vllm-h200")
    reports = [read(figures, name) for name in RECORDS.values()]
    headers = [
        "tokens a second",
        *(f"batch {batch}" for batch in TABULATED),
        "prefill, 32 x 2,048",
        "first token after 2,048",
    ]
    lines = [line for report in reports for line in rows(report, vllm)]
    run = reports[0]
    compiled, cached = (read(figures, "12-start")["starts"][i] for i in (0, 1))
    memory = read(figures, "12-memory")
    taken = memory["memory"]["process"] + memory["memory"]["context"]
    speed = (
        f"Recorded {run['date']} on one {run['device']['name']} with torch "
        f"{run['versions']['torch']} and triton {run['versions']['triton']}: random "
        "weights in the real shapes, distinct prompts of "
        f"{run['plan']['input_len']} tokens, {run['plan']['output_len']} new ones "
        "each, greedy; batch size over the median step. At the limit a step would "
        "take no longer than reading each of its bytes once, or than its arithmetic "
        "where that is slower, at the speeds measured in the same run. vLLM ran once, "
        f"on {vllm['date']}, on the same kind of GPU, with 128 new tokens. To repeat "
        "it: `simplellm bench`, as in [chapter 12](chapters/12-full-speed.md)."
    )
    start = (
        "From files in the page cache to the first token of gpt-oss-20b it takes "
        f"{compiled['seconds']:.0f} seconds, and {cached['seconds']:.0f} once the "
        f"kernels are compiled. {memory['batch']} sequences of {memory['length']:,} "
        f"tokens of {memory['model']} take {taken / 2**30:.0f} "
        "GiB of the GPU's memory, weights and all."
    )
    picture = f"![{described(figures)}](figures/{PICTURE}.svg)"
    parts = speed, smaller(read(figures, "12-bench-h100")), start
    text = "\n\n".join(
        [picture, *(fill(part, 88, break_on_hyphens=False) for part in parts)]
    )
    return headers, lines, text


def is_old(figures: Path) -> bool:
    """Whether the picture shows other numbers than the records have."""
    try:
        svg = (figures / f"{PICTURE}.svg").read_text(encoding="utf-8")
    except FileNotFoundError:
        return True
    return f"<title>{described(figures)}</title>" not in svg


def draw(figures: Path) -> None:
    """Draw the picture and write it."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "chapters"))
    import course  # noqa: F401  # its style
    import matplotlib.pyplot as plt

    vllm = read(figures, "vllm-h200")
    fig, axes = plt.subplots(1, 2, figsize=(7, 3.2), sharey=True)
    for ax, (model, name) in zip(axes, RECORDS.items(), strict=True):
        found = points(read(figures, name), vllm)
        places = range(len(found))
        for side, whose, label in (
            (-0.2, "ours", "this engine"),
            (0.2, "vllm", f"vLLM {vllm['versions']['vllm']}"),
        ):
            shares = [p.share(whose) for p in found]
            ax.bar([x + side for x in places], shares, 0.38, label=label)
        ax.set_xticks(places, [str(p.batch) for p in found])
        ax.set(title=model, xlabel="batch size", ylim=(0, 100))
    axes[0].set_ylabel("% of the GPU's limit")
    axes[0].legend(loc="upper left", ncols=2)
    metadata = {"Date": None, "Creator": None, "Title": described(figures)}
    fig.savefig(figures / f"{PICTURE}.svg", metadata=metadata)
    plt.close(fig)
