"""How much of the kernels comes out of a notebook: of their lines, of a step's time.

And the numbers that chapter 12 and the appendices tell of records are theirs.
"""

import ast
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "simplellm/kernels"
# What kernels of a recorded profile are called today.
RENAMED = {
    "gate_up_kernel": "experts_kernel",
    "down_kernel": "experts_kernel",
    "head_dot_kernel": "dot_kernel",
}
LINES, TIME = 0.55, 0.95


def written() -> set[str]:
    """The modules that chapters write."""
    table = (ROOT / "chapters/modules.toml").read_text(encoding="utf-8")
    return set(tomllib.loads(table))


def jitted() -> dict[str, tuple[str, int]]:
    """The module and the lines of each function that Triton compiles."""
    found = {}
    for path in sorted(KERNELS.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            if any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                first = min(d.lineno for d in node.decorator_list)
                module = path.relative_to(ROOT).as_posix()
                found[node.name] = module, (node.end_lineno or 0) - first + 1
    return found


def share_of_lines(modules: set[str]) -> float:
    """Of all lines of Triton, those in ``modules``."""
    lines = jitted().values()
    return sum(n for module, n in lines if module in modules) / sum(n for _, n in lines)


def share_of_time(modules: set[str]) -> float:
    """Of a recorded decode step's kernel time, that of kernels in ``modules``."""
    record = json.loads((ROOT / "figures/12-profile.json").read_text(encoding="utf-8"))
    homes = jitted()
    spent = taught = 0.0
    for row in record["kernels"]:
        name = RENAMED.get(row["name"], row["name"])
        if name.startswith(("Memcpy", "memcpy")):
            continue  # copies are no kernels of ours
        assert name in homes, f"{row['name']} of the record is no kernel of today"
        spent += row["us"]
        taught += row["us"] * (homes[name][0] in modules)
    return taught / spent


def test_most_lines_of_triton_come_from_notebooks() -> None:
    assert share_of_lines(written()) >= LINES


def test_nearly_all_of_a_step_runs_in_kernels_from_notebooks() -> None:
    assert share_of_time(written()) >= TIME


def recorded(name: str) -> Any:
    return json.loads((ROOT / f"figures/{name}.json").read_text(encoding="utf-8"))


def told() -> list[str]:
    """What chapter 12's text says, made of the records that it is about."""
    kernels = {
        (row["kernel"], row["shape"], row["version"]): row
        for row in recorded("11-kernels")["rows"]
    }

    def us(shape: str, version: str) -> float:
        return kernels["gate_up", shape, version]["us"]

    best = kernels["gate_up", "64", "8 tokens, mma, 2 warps"]
    roofline = best["bytes"] / 4650e3 + 1.2
    rows, other = (
        recorded(name)["decode"] for name in ("12-bench", "12-bench-other-card")
    )
    h200, h100 = (
        {row["batch"]: f"{100 * row['share']:.0f} %" for row in found}
        for found in (rows, recorded("12-bench-h100")["decode"])
    )
    apart = max(
        theirs["tokens_per_second"] / ours["tokens_per_second"]
        for ours, theirs in zip(rows, other, strict=True)
    )
    vllm = recorded("vllm-h200")
    ablation = {
        row["name"]: row["tokens_per_second"]
        for key in ("cumulative", "without")
        for row in recorded("12-ablation-h200")[key]
    }
    lost = ablation["+ overlap"] / ablation["- continuous batching"]
    small = {row["batch"]: row for row in recorded("12-bench-20b")["decode"]}
    prompt = small[1]["ttft_ms"] / small[8]["step_ms"]
    one = us("1", "mma, many tiles a program")
    grouped = us("1", "fragments, unroll 5")
    race = kernels["gate_up of a prompt", "4096", "4 warps, decoding while wgmmas read"]
    assert "in 100 of 100 repeats" in race["why"]
    bursts = kernels["gate_up", "64", "fragments, unroll 3"]
    assert "in bursts of 40 launches 250 us" in bursts["why"]
    steps = {
        "64": [
            ("out = tl.dot_scaled(codes, scales, x)", "tl.dot_scaled"),
            ("tl.dot(high_half, x_odd)", "two planes, two tl.dot"),
            ("UNROLL=5", "fragments, unroll 5"),
            ("UNROLL=3", "fragments, unroll 3"),
            ("# mma, 8 tokens", "8 tokens, mma, 4 warps"),
            ("num_warps=2", "8 tokens, mma, 2 warps"),
        ],
        "1": [
            ("out = tl.dot_scaled(codes, scales, x)", "tl.dot_scaled"),
            ("tl.dot(high_half, x_odd)", "two planes, two tl.dot"),
            ("UNROLL=5", "fragments, unroll 5"),
            ("x spread over its 8 columns", "mma, a tile a program"),
            ("the next one on its way", "mma, many tiles a program"),
        ],
    }
    ladder = [
        f"{change} # {us(shape, version):.{1 if shape == '1' else 0}f} µs"
        for shape, changes in steps.items()
        for change, version in changes
    ]
    last = kernels["gate_up", "1", "mma, many tiles a program"]
    return [
        *ladder,
        f"64 tokens, whose roofline is {roofline:.0f}",
        f"one token, whose roofline is {last['bytes'] / 4650e3 + 1.2:.1f}",
        f"{us('64', 'tl.dot_scaled'):.0f} µs with `tl.dot_scaled` become "
        f"{best['us']:.0f} for 64 tokens, where the roofline is {roofline:.0f}",
        f"one token take {one:.1f} µs, and {grouped:.1f} with the grouped kernel",
        f"{h200[1]} of the limit for the 120b at batch 1, {h200[64]} at 64; on an H100 "
        f"{h100[1]} and {h100[64]}",
        f"up to {100 * (apart - 1):.0f} % apart",
        f"in bursts of 40 launches, and the {bursts['us']:.0f} of the list",
        "in 100 of 100 repeats it didn't",
        "vLLM on an H200: {} where that was run, else {}.".format(*vllm["runs"]),
        f"adds up blocks reached {vllm['read_gigabytes_per_second']:,.0f}",
        f"it takes {lost:.2f} times as long",
        f"as much as {('four', 'five', 'six')[round(prompt) - 4]} decodes",
    ]


@pytest.mark.parametrize("sentence", told())
def test_numbers_in_the_text_are_those_of_the_records(sentence: str) -> None:
    text = (ROOT / "chapters/12-full-speed.md").read_text(encoding="utf-8")
    assert sentence in " ".join(text.split())


def told_of_serving() -> list[str]:
    """What appendix A's ledger says, made of its record."""
    record = recorded("a-serving")
    fast, fast_end, slow, slow_end = record["slow"]
    assert record["wasted"] == 0
    return [
        f"its first byte after {record['streamed'][3][0]:.2f} s. Naively that's "
        f"{record['naive'][3][0]:.2f}, with three answers",
        f"gets {slow} pieces, a fast one {fast}, and the slow one is done "
        f"{slow_end - fast_end:.1f} s later",
        f"take {record['box'] / 1e6:.1f} MB instead of {record['pile'] / 1e6:.1f}",
        f"no more tokens after the client has left, and naively "
        f"{record['wasted naive']}",
    ]


@pytest.mark.parametrize("sentence", told_of_serving())
def test_numbers_of_the_server_are_those_of_its_record(sentence: str) -> None:
    text = (ROOT / "chapters/a-serving.md").read_text(encoding="utf-8")
    assert sentence in " ".join(text.split())


def told_of_masks() -> list[str]:
    """What appendix B's ledger says, made of its record."""
    record = recorded("b-structured")
    fills = [record[f"fill {count}"] for count in (1, 64, 256)]
    median, worst = (
        ", ".join(f"{fill[place]:.{digits}f}" for fill in fills[:2])
        + f" and {fills[2][place]:.{digits}f} ms"
        for place, digits in ((0, 2), (1, 1))
    )
    faster = [
        record[f"every {state}"] / record[f"walk {state}"]
        for state in ("number", "string")
    ]
    return [
        f"{faster[0]:.0f} times as fast as token by token for a number, and "
        f"{faster[1]:.1f} times in a string",
        f"in a string took {1e3 * record['library string']:.1f} ms",
        f"{record['row bytes']:,} bytes a state",
        f"{1e6 * record['kept']:.1f} µs for a mask that's kept, where a walk took "
        f"{1e3 * record['walk string']:.0f} ms",
        f"256 requests a median of {median}",
        f"and {worst} in the worst step",
        f"{record['steps forced']} steps instead of {record['steps chosen']}",
    ]


@pytest.mark.parametrize("sentence", told_of_masks())
def test_numbers_of_masks_are_those_of_their_record(sentence: str) -> None:
    text = (ROOT / "chapters/b-structured-output.md").read_text(encoding="utf-8")
    assert sentence in " ".join(text.split())
