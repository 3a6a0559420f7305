"""Race the kernels of chapters 11 and 12 on this GPU, as these pages keep them.

    python tools/gpu/lessons.py --json figures/11-lessons.json

The readers' own are raced in the same way, by their checks.
"""

import ast
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "chapters"))

import cells
from course.checks import ch11, ch12
from records import argument_parser, header, save

ROOT = Path(__file__).parents[2]
PAGES = "11-triton-fusions", "12-full-speed"
RACES = {
    "softmax_kernel": ch11.race_softmax,
    "matvec_kernel": ch11.race_matvec,
    "product_kernel": ch11.race_product,
    "split_kernel": ch11.race_split,
    "grouped_kernel": ch12.race_grouped,
}


def is_wanted(node: ast.stmt) -> bool:
    """Whether it is a kernel, or a name that kernels need."""
    if isinstance(node, ast.FunctionDef):
        return any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    if isinstance(node, ast.ImportFrom):
        return str(node.module).startswith("simplellm.model.kernels")
    return isinstance(node, ast.Assign) and ast.unparse(node).startswith("VARYING")


def definitions(page: str) -> Iterator[str]:
    """The kernels of a page and what they name, and neither stubs nor measurements."""
    text = (ROOT / f"chapters/{page}.md").read_text(encoding="utf-8")
    for cell in cells.cells(text):
        if cell.folded or {"blank", "exercise"} & set(cell.directives()):
            continue
        lines = cell.source.splitlines()
        for node in filter(is_wanted, ast.parse(cell.source).body):
            above = getattr(node, "decorator_list", [])
            first = min(part.lineno for part in (node, *above))
            yield "\n".join(lines[first - 1 : node.end_lineno])


def lessons(folder: Path) -> ModuleType:
    """The kernels of both pages as a module, in a file in which Triton finds them."""
    path = folder / "lessons.py"
    code = [part for page in PAGES for part in definitions(page)]
    head = "import triton\nimport triton.language as tl"
    path.write_text("\n\n\n".join([head, *code]) + "\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("lessons", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Race them all."""
    options = argument_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = lessons(Path(folder))
        seconds = {name: race(getattr(found, name)) for name, race in RACES.items()}
    rows = [
        {"kernel": name, "us": {way: round(1e6 * s, 2) for way, s in ways.items()}}
        for name, ways in seconds.items()
    ]
    save({**header(), "rows": rows}, options.json)


if __name__ == "__main__":
    main()
