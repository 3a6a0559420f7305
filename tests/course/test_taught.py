"""How much of the kernels comes out of a notebook: of their lines, of a step's time."""

import ast
import json
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "simplellm/model/kernels"
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
