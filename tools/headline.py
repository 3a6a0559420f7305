"""The engine's speed beside vLLM's and the GPU's limit, for the first pages.

`tables.py` writes what `section` and `reach` return, and calls `draw` when the picture
is old.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any, NamedTuple

from simplellm.apps.roofline import Machine, read_bytes, step_flops
from simplellm.checkpoint.families.gpt_oss import MODELS

RECORDS = {"gpt-oss-120b": "12-bench", "gpt-oss-20b": "12-bench-20b"}
H100, VLLM_H100 = "12-bench-h100", "vllm-h100"
PICTURE = "headline"
TABULATED = (1, 8, 64, 256)  # batch sizes; the picture has all
LOADS = "512 at once", "2 a second", "8 a second"
VLLM_LENGTHS = 128, 128  # of prompts and answers, as vllm-h200.json says in words


class Point(NamedTuple):
    """Tokens a second at one batch size: this engine's and vLLM's, and the most.

    Each run has its own limit: vLLM's contexts are shorter.
    """

    batch: int
    ours: float
    vllm: float
    limit: float
    vllm_limit: float

    def share(self, whose: str) -> float:
        """Percent of its limit that "ours" or "vllm" reaches."""
        limit = {"ours": self.limit, "vllm": self.vllm_limit}[whose]
        return 100 * getattr(self, whose) / limit


def read(figures: Path, name: str) -> Any:
    return json.loads((figures / f"{name}.json").read_text(encoding="utf-8"))


def fastest(row: dict[str, Any], vllm: dict[str, Any]) -> float:
    """Of vLLM's kernels for the experts, those that ran."""
    return max(row[kernel] for kernel in vllm["kernels"] if kernel in row)


def vllm_limit(model: str, batch: int, vllm: dict[str, Any]) -> float:
    """Tokens a second at most in the middle of vLLM's run, on the machine of that."""
    prompt, answer = VLLM_LENGTHS
    machine = Machine(
        1e9 * vllm["read_gigabytes_per_second"], 1e12 * vllm["bf16_teraflops"]
    )
    read = read_bytes(MODELS[model], batch, prompt + answer // 2).total
    return batch / machine.least_seconds(read, step_flops(MODELS[model], batch, batch))


def points(report: dict[str, Any], vllm: dict[str, Any]) -> list[Point]:
    """Decoding, at each batch size that both engines ran."""
    model = report["model"]
    theirs = {
        row["batch"]: (fastest(row, vllm), vllm_limit(model, row["batch"], vllm))
        for row in vllm["decode"]
        if row["model"] == model
    }
    result = []
    for row in report["decode"]:
        if row["batch"] in theirs:
            speed, limit = theirs[row["batch"]]
            ours = row["tokens_per_second"]
            result.append(Point(row["batch"], ours, speed, row["limit"], limit))
    return result


def prefill(report: dict[str, Any], vllm: dict[str, Any]) -> Point:
    """The prompts that vLLM was given, all at once; the lengths are the same."""
    (row,) = (r for r in vllm["prefill"] if r["model"] == report["model"])
    size = row["batch"], row["input_len"]
    (ours,) = (r for r in report["prefill"] if (r["batch"], r["input_len"]) == size)
    speed, limit = ours["tokens_per_second"], ours["limit"]
    return Point(row["batch"], speed, fastest(row, vllm), limit, limit)


def first_token(report: dict[str, Any], vllm: dict[str, Any]) -> tuple[float, str]:
    """To the first token after one prompt: this engine's milliseconds, vLLM's cell."""
    (row,) = (r for r in vllm["ttft_ms"] if r["model"] == report["model"])
    other = row["vllm"] != version(report["model"], vllm)
    text = f"{row['best']:.0f} ms" + f" ({row['vllm']})" * other
    (ours,) = (
        r
        for r in report["prefill"]
        if (r["batch"], r["input_len"]) == (1, row["input_len"])
    )
    return ours["ttft_ms"], text


def version(model: str, vllm: dict[str, Any]) -> str:
    """The one of vLLM that all tabulated speeds of ``model`` are from."""
    return next(row["vllm"] for row in vllm["prefill"] if row["model"] == model)


def card(report: dict[str, Any]) -> str:
    """ "H100" of "NVIDIA H100 80GB HBM3"."""
    return str(report["device"]["name"]).split()[1]


def name_and_limit(report: dict[str, Any]) -> tuple[str, str]:
    """What the table calls this engine's row, and that of the limit."""
    return f"**{report['model']}, {card(report)}**", f"the {card(report)}'s limit"


def rows(report: dict[str, Any], vllm: dict[str, Any]) -> list[list[str]]:
    """Three lines of the table: this engine, vLLM, the limit."""
    decode = {p.batch: p for p in points(report, vllm)}
    columns = [*(decode[batch] for batch in TABULATED), prefill(report, vllm)]
    ours_ms, vllm_first = first_token(report, vllm)
    ours, theirs, limit = (
        [f"{getattr(column, which):,.0f}" for column in columns]
        for which in ("ours", "vllm", "limit")
    )
    name, limits = name_and_limit(report)
    return [
        [name, *(f"**{x}**" for x in (*ours, f"{ours_ms:.0f} ms"))],
        [f"vLLM {version(report['model'], vllm)}", *theirs, vllm_first],
        [limits, *limit, ""],
    ]


def rows_of_decodes(report: dict[str, Any], vllm: dict[str, Any]) -> list[list[str]]:
    """Three lines, of a card on which vLLM only decoded: ours, vLLM, the limit."""
    theirs = {row["batch"]: f"{row['marlin']:,}" for row in vllm["decode"]}
    decode = {row["batch"]: row for row in report["decode"]}
    one, many = report["prefill"][0], report["prefill"][-1]
    columns = [*(decode[batch] for batch in TABULATED), many]
    ours, limit = (
        [f"{column[which]:,.0f}" for column in columns]
        for which in ("tokens_per_second", "limit")
    )
    name, limits = name_and_limit(report)
    return [
        [name, *(f"**{x}**" for x in (*ours, f"{one['ttft_ms']:.0f} ms"))],
        [f"vLLM {vllm['vllm']}", *(theirs.get(n, "") for n in TABULATED), "", ""],
        [limits, *limit, ""],
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
        "Bars over the batch size: percent of the GPU's limit that this engine and "
        f"vLLM reach, each of the limit for its own contexts. {' '.join(parts)}"
    )


def reach(figures: Path) -> str:
    """A paragraph on the engine's speed with the larger model, for a first page."""
    report, vllm = read(figures, "12-bench"), read(figures, "vllm-h200")
    h100 = {row["batch"]: row for row in read(figures, H100)["decode"]}
    decode = {point.batch: point for point in points(report, vllm)}
    one, many = decode[TABULATED[0]], decode[TABULATED[-1]]
    alone, crowd = h100[one.batch], h100[many.batch]
    theirs = version(report["model"], vllm)
    dates = dict.fromkeys([report["date"], vllm["runs"][theirs]["date"]])
    text = (
        f"With random weights in {report['model']}'s real shapes, the engine writes "
        f"{alone['tokens_per_second']:,.0f} tokens a second on one NVIDIA H100 for one "
        f"request and {crowd['tokens_per_second']:,.0f} for {many.batch} at once, "
        f"{100 * alone['share']:.0f} % and {100 * crowd['share']:.0f} % of what the "
        f"GPU's memory and arithmetic allow. On one H200 it's {one.ours:,.0f} and "
        f"{many.ours:,.0f}, {one.share('ours'):.0f} % and {many.share('ours'):.0f} %, "
        f"and {one.ours / one.vllm:.1f} and {many.ours / many.vllm:.1f} times what "
        f"vLLM {theirs} writes there, in shorter answers "
        f"(recorded {' and '.join(dates)})."
    )
    return fill(text, 88, break_on_hyphens=False)


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
    smaller, beside = read(figures, H100), read(figures, VLLM_H100)
    lines = rows_of_decodes(smaller, beside)
    lines += [line for report in reports for line in rows(report, vllm)]
    run = reports[0]
    compiled, cached = (read(figures, "12-start")["starts"][i] for i in (0, 1))
    memory = read(figures, "12-memory")
    runs = " and ".join(
        f"{found}'s on {run['date']}" for found, run in vllm["runs"].items()
    )
    kernels = "{}, {} and {}".format(*map(str.capitalize, vllm["kernels"]))
    taken = memory["memory"]["process"] + memory["memory"]["context"]
    speed = (
        f"Recorded on one NVIDIA H100 on {smaller['date']} and on one H200 on "
        f"{run['date']} with torch "
        f"{run['versions']['torch']} and triton {run['versions']['triton']}: random "
        "weights in the real shapes, distinct prompts of "
        f"{run['plan']['input_len']} tokens, {run['plan']['output_len']} new ones "
        "each, greedy; batch size over the median step. The limit is the speed at "
        "which a step takes exactly as long as reading its bytes once or doing its "
        "arithmetic, whichever is longer, at the read and matmul speeds measured in "
        f"the same run. vLLM's numbers were recorded once, {runs}, on an H200, "
        f"and on {beside['date']} on an H100, where only Marlin decoded; not "
        "necessarily on the same cards as ours. In the picture, of the H200, the older "
        "ones fill in the batch sizes that the newer one didn't run. vLLM has several "
        f"kernels for the experts, {kernels}; each number is from the fastest of those "
        "that ran. "
        f"Its runs make {VLLM_LENGTHS[1]} new tokens, so their contexts are shorter "
        "and the picture sets them against a slightly higher limit. To repeat ours: "
        "`simplellm bench`, as in [chapter 12](12-full-speed.md)."
    )
    start = (
        "A new process gives the first token of gpt-oss-20b after "
        f"{compiled['seconds']:.0f} seconds, or {cached['seconds']:.0f} once its "
        "kernels have been compiled, with the checkpoint in the page cache. "
        f"{memory['batch']} sequences of {memory['length']:,} "
        f"tokens of {memory['model']} take {taken / 2**30:.0f} "
        "GiB of the GPU's memory, weights and all."
    )
    picture = f"![{described(figures)}](../figures/{PICTURE}.svg)"
    parts = speed, start
    text = "\n\n".join(
        [picture, *(fill(part, 88, break_on_hyphens=False) for part in parts)]
    )
    return headers, lines, text


def load(figures: Path) -> tuple[list[str], list[list[str]], str]:
    """Headers and rows of a table of mixed loads, and what stands below it."""
    vllm, record = read(figures, "vllm-h200")["load"], read(figures, "12-compare-load")
    mine = [row for row in record["rows"] if row["model"] == vllm["model"]]
    turns = [row["found"] for row in mine if row["tree"] == "new"]
    ours = {name: median(turn[name] for turn in turns) for name in vllm["found"]}
    engines = {"**SimpleLLM**": ours, f"vLLM {vllm['vllm']}": vllm["found"]}

    def cell(figures: dict[str, float], names: Sequence[str]) -> str:
        values = [figures[name] for name in names if name in figures]
        return " / ".join(f"{x:,.{int(x < 10)}f}" for x in values)

    lines = [
        [
            which,
            engine,
            cell(found, [f"{which}, tokens/s"]),
            *(
                cell(found, [f"{which}: {wait}, p{q} ms" for q in (50, 90, 99)])
                for wait in ("first token", "next token")
            ),
        ]
        for which in LOADS
        for engine, found in engines.items()
    ]
    text = (
        f"{vllm['model']} with random weights on one {record['gpu']}, {vllm['what']}. "
        f"Recorded {record['date']} by `tools/gpu/compare.py`, vLLM's on "
        f"{vllm['date']} on a card of the same kind, with {vllm['kernel'].capitalize()}"
        ", which was its steadier kernel here. Where a cell is empty, vLLM's wasn't "
        "recorded."
    )
    headers = ["mixed load", "", "tokens a second", "first token, ms", "next token, ms"]
    return headers, lines, fill(text, 88, break_on_hyphens=False)


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
    import course
    import matplotlib.pyplot as plt

    vllm = read(figures, "vllm-h200")
    fig, axes = plt.subplots(1, 2, figsize=(7, 3.2), sharey=True)
    for ax, (model, name) in zip(axes, RECORDS.items(), strict=True):
        drawn = points(read(figures, name), vllm)
        places = range(len(drawn))
        for side, whose, label in (
            (-0.2, "ours", "this engine"),
            (0.2, "vllm", "vLLM"),
        ):
            shares = [p.share(whose) for p in drawn]
            ax.bar([x + side for x in places], shares, 0.38, label=label)
        ax.set_xticks(places, [str(p.batch) for p in drawn])
        ax.set(title=model, xlabel="batch size", ylim=(0, 100))
    axes[0].set_ylabel("% of the GPU's limit")
    axes[0].legend(loc="upper left", ncols=2)
    svg = course.svg_of(fig, described(figures))
    (figures / f"{PICTURE}.svg").write_text(svg, encoding="utf-8")
