"""Write simplellm/*.py from the exported cells of the chapters.

A cell whose leading directive lines hold ``#| export`` goes to the chapter's default
module, set by ``#| default_exp NAME``; ``#| export NAME`` names another one. Imports
are hoisted, pruned and sorted; the rest keeps its order. One module is written by
exactly one chapter. In the chapter itself all code gets ruff's format, so that both
read the same, and the phrase "writes `simplellm/NAME.py` (N lines)" gets its number.

    python tools/export.py                           every chapter
    python tools/export.py chapters/03-mxfp4.md      only these chapters
    python tools/export.py --check                   print a diff, exit 1 on drift
"""

import argparse
import ast
import difflib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jupytext

PACKAGE = "simplellm"
HEADER = "# Exported from {}; edit there."
MODULE_NAME = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)*")
LINE_COUNT = re.compile(rf"(writes\s+`({PACKAGE}/[\w/]+\.py)`\s+\()\d+(\s+lines?\))")

IMPORT_CHECK = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
failed = {}
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""


class ExportError(Exception):
    """One line that says where, what is wrong and what was expected."""


@dataclass(frozen=True)
class Cell:
    """The exported source of one cell and the line of the chapter it starts at."""

    chapter: str
    line: int
    module: str
    source: str


def directives(source: str) -> list[list[str]]:
    """The words of a cell's leading ``#|`` lines, one list per line."""
    found = []
    for line in source.splitlines():
        if not line.startswith("#|"):
            break
        found.append(line.removeprefix("#|").split())
    return found


def exported_cells(root: Path, chapter: Path) -> Iterator[Cell]:
    """The cells of one chapter that carry ``#| export``, in order."""
    text = chapter.read_text(encoding="utf-8")
    name = chapter.relative_to(root).as_posix()
    default, end = None, 0
    for cell in jupytext.reads(text, fmt="md").cells:
        if cell.cell_type != "code":
            continue
        start = max(text.find(cell.source, end), end)
        end = start + len(cell.source)
        line = text.count("\n", 0, start) + 1
        lines = directives(cell.source)
        for words in lines:
            if words[:1] == ["default_exp"]:
                default = " ".join(words[1:])
        for words in lines:
            if words[:1] != ["export"]:
                continue
            module = " ".join(words[1:]) or default
            if module is None:
                raise ExportError(
                    f"{name}:{line}: `#| export` without a module; expected "
                    "`#| export NAME` or `#| default_exp NAME` before it"
                )
            module = module.replace("/", ".")
            if not MODULE_NAME.fullmatch(module):
                raise ExportError(
                    f"{name}:{line}: {module!r} is not a module name; expected "
                    "something like `moe` or `kernels.moe`"
                )
            body = "\n".join(cell.source.splitlines()[len(lines) :])
            yield Cell(name, line + len(lines), module, body)


def collect(root: Path) -> dict[str, list[Cell]]:
    """Every module's cells, over all chapters, with one chapter per module."""
    modules: dict[str, list[Cell]] = {}
    for chapter in sorted((root / "chapters").glob("[0-9][0-9]-*.md")):
        for cell in exported_cells(root, chapter):
            cells = modules.setdefault(cell.module, [])
            if cells and cells[0].chapter != cell.chapter:
                raise ExportError(
                    f"{cell.chapter}:{cell.line}: writes module {cell.module!r}, "
                    f"which {cells[0].chapter} writes; expected one chapter per module"
                )
            cells.append(cell)
    return modules


def defined_names(node: ast.stmt) -> list[str]:
    """The top-level names that a statement defines (overloads aside)."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            overload = any("overload" in ast.unparse(d) for d in node.decorator_list)
            return [] if overload else [node.name]
        case ast.Assign(targets=targets):
            found = [n for target in targets for n in ast.walk(target)]
        case ast.AnnAssign(target=ast.Name() as target):
            found = [target]
        case _:
            return []
    return [
        n.id for n in found if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    ]


def ruff(root: Path, path: Path, source: str, *arguments: str) -> str:
    """ruff's standard output for ``source``, checked as if it stood at ``path``."""
    result = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", path, "-"],
        cwd=root,
        input=source,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    if result.returncode:
        raise ExportError(f"{path}: ruff failed: {result.stderr.strip()}")
    return result.stdout


def build(root: Path, path: Path, cells: list[Cell]) -> str:
    """The text of the module that ``cells`` make up."""
    docstring, imports, bodies = "", [], []
    seen: dict[str, int] = {}
    for number, cell in enumerate(cells):
        try:
            tree = ast.parse(cell.source)
        except SyntaxError as error:
            line = cell.line + (error.lineno or 1) - 1
            raise ExportError(
                f"{cell.chapter}:{line}: the exported cell does not parse: "
                f"{error.msg}; expected plain Python"
            ) from None
        lines = cell.source.splitlines()
        for node in reversed(tree.body):
            span = slice(node.lineno - 1, node.end_lineno)
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports += lines[span]
                del lines[span]
            elif number == 0 and node is tree.body[0] and ast.get_docstring(tree):
                docstring = "\n" + "\n".join(lines[span])
                del lines[span]
        for node in tree.body:
            line = cell.line + node.lineno - 1
            for name in defined_names(node):
                if name in seen:
                    raise ExportError(
                        f"{cell.chapter}:{line}: defines {name!r} again (first at line "
                        f"{seen[name]}); expected each name once in a module"
                    )
                seen[name] = line
        bodies.append("\n".join(lines).strip("\n"))
    parts = [HEADER.format(cells[0].chapter) + docstring, "\n".join(imports), *bodies]
    source = "\n\n".join(part for part in parts if part) + "\n"
    lint = ("check", "--quiet", "--exit-zero")
    source = ruff(root, path, source, *lint, "--select", "I,F401", "--fix")
    source = ruff(root, path, source, "format")
    undefined = ("--select", "F821", "--output-format", "json")
    for problem in json.loads(ruff(root, path, source, *lint, *undefined)):
        row = problem["location"]["row"]
        raise ExportError(
            f"{cells[0].chapter}: {path.relative_to(root)}:{row}: "
            f"{problem['message']}; expected an exported cell to define or import it"
        )
    return source


def tidy(root: Path, chapter: str, modules: dict[Path, str]) -> str:
    """The chapter with its code formatted and its modules' line counts right."""

    def phrase(match: re.Match[str]) -> str:
        source = modules.get(root / match[2])
        if source is None:
            return match[0]
        return f"{match[1]}{len(source.splitlines())}{match[3]}"

    path = root / chapter
    text = ruff(root, path, path.read_text(encoding="utf-8"), "format")
    return LINE_COUNT.sub(phrase, text)


def stale_modules(root: Path, written: set[Path]) -> list[Path]:
    """Modules with an export header that no chapter writes."""
    start = HEADER.split("{}")[0]
    return [
        path
        for path in sorted((root / PACKAGE).rglob("*.py"))
        if path not in written and path.read_text(encoding="utf-8").startswith(start)
    ]


def import_errors(root: Path, paths: list[Path]) -> dict[Path, str]:
    """What went wrong for each of the modules that does not import."""
    names = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in paths
    }
    result = subprocess.run(
        [sys.executable, "-B", "-c", IMPORT_CHECK, str(root), *names],
        cwd=root,
        capture_output=True,
        text=True,
    )
    if result.returncode:
        return dict.fromkeys(paths, result.stderr.strip().splitlines()[-1])
    failed = json.loads(result.stdout.splitlines()[-1])
    return {names[name]: message for name, message in failed.items()}


def write(root: Path, texts: dict[Path, str]) -> None:
    """Write what changed; a module that does not import gets its old text back."""
    old = {p: p.read_text(encoding="utf-8") if p.exists() else None for p in texts}
    changed = [path for path in texts if texts[path] != old[path]]
    for path in changed:
        if path.suffix == ".py" and not path.parent.exists():
            path.parent.mkdir(parents=True)
            (path.parent / "__init__.py").touch()
        path.write_text(texts[path], encoding="utf-8")
        print(f"wrote {path.relative_to(root)}")
    failed = import_errors(root, [p for p in changed if p.suffix == ".py"])
    for path in failed:
        if (text := old[path]) is None:
            path.unlink()
        else:
            path.write_text(text, encoding="utf-8")
    for path, message in failed.items():
        raise ExportError(
            f"{path.relative_to(root)}: does not import, so the old file stays: "
            f"{message}; expected a module that imports by itself"
        )


def export(root: Path, files: list[Path], check: bool) -> int:
    """Export ``files``, or every chapter; the exit status."""
    chosen = {Path(os.path.relpath(file.resolve(), root)).as_posix() for file in files}
    modules: dict[Path, str] = {}
    chapters = set()
    paths = {
        root / PACKAGE / (module.replace(".", "/") + ".py"): cells
        for module, cells in collect(root).items()
    }
    for path, cells in paths.items():
        if not chosen or cells[0].chapter in chosen:
            modules[path] = build(root, path, cells)
            chapters.add(cells[0].chapter)
    if nothing := sorted(chosen - chapters):
        raise ExportError(f"{nothing[0]}: exports nothing; expected `#| export` cells")
    if not chosen:
        for path in stale_modules(root, set(modules)):
            raise ExportError(
                f"{path.relative_to(root)}: no chapter writes it any more; "
                "expected it to be deleted"
            )
    texts = modules | {root / c: tidy(root, c, modules) for c in chapters}
    if not check:
        write(root, texts)
        return 0
    drift = False
    for path in sorted(texts):
        name = path.relative_to(root).as_posix()
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        diff = difflib.unified_diff(
            old.splitlines(True), texts[path].splitlines(True), name, f"{name} (export)"
        )
        for line in diff:
            drift = True
            print(line, end="")
    return int(drift)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="chapters (default: all)")
    parser.add_argument("--check", action="store_true", help="print a diff, write none")
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).parents[1], help="repository"
    )
    options = parser.parse_args(arguments)
    try:
        return export(options.root.resolve(), options.files, options.check)
    except ExportError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
