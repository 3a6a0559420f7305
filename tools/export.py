"""Write simplellm/*.py from the exported cells of the chapters.

A cell whose leading directive lines hold ``#| export`` goes to the chapter's default
module, set by ``#| default_exp NAME``; ``#| export NAME`` names another one. A later
chapter may add to a module, and ``class NAME(NAME):`` adds to the class before it.
Imports are hoisted, pruned and sorted; the rest keeps its order. A chapter does not
import what it exports to another module itself, which would replace a reader's version
of it: the module gets that import. In the chapter itself
all code gets ruff's format, so that both read the same, and the phrase
"`simplellm/NAME.py` (N lines)" gets its number. chapters/modules.toml lists the modules
that are written in this way; all others are written by hand and left alone.

    python tools/export.py                        every chapter
    python tools/export.py chapters/03-mxfp4.md   only the modules of these
    python tools/export.py --check                print a diff, exit 1 on drift
"""

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from cells import cells as all_cells
from cells import chapter_files
from joining import Cell, ExportError, defined_names, joined, parse
from ruff import find_ruff_bin

PACKAGE = "simplellm"
ADVICE = "chapters/course/blanks.toml"
TABLE = "chapters/modules.toml"
TABLE_HEAD = """\
# The chapters that write each module; `make export` keeps this list. A module that is
# not in it is written by hand.
"""
MODULE_NAME = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)*")
LINE_COUNT = re.compile(rf"(`({PACKAGE}/[\w/]+\.py)`\s+\()\d+(\s+lines?\))")

IMPORT_CHECK = """
import importlib, sys
for path in sys.argv[1:]:
    try:
        importlib.import_module(path.removesuffix(".py").replace("/", "."))
    except BaseException as error:
        sys.exit(" ".join(f"{path}: {type(error).__name__}: {error}".split()))
"""


def exported_cells(root: Path, chapter: Path) -> Iterator[Cell]:
    """The cells of one chapter that carry ``#| export``, in order."""
    text = chapter.read_text(encoding="utf-8")
    name = chapter.relative_to(root).as_posix()
    default, end = "", 0
    for cell in all_cells(text):
        if cell.folded:
            continue
        start = text.index(cell.source, end)
        end = start + len(cell.source)
        directives = cell.directives()
        default = directives.get("default_exp", default)
        if "export" not in directives:
            continue
        line = text.count("\n", 0, start) + 1
        module = directives["export"] or default
        if not module:
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
        path = f"{PACKAGE}/{module.replace('.', '/')}.py"
        yield Cell(name, line + len(directives), path, cell.body)


def collect(root: Path) -> dict[str, list[Cell]]:
    """Every module's cells, over all chapters, by the module's path."""
    modules: dict[str, list[Cell]] = {}
    for chapter in chapter_files(root / "chapters"):
        for cell in exported_cells(root, chapter):
            modules.setdefault(cell.module, []).append(cell)
    return modules


def check_advice(root: Path) -> None:
    """Raise ExportError unless each blank, and nothing else, has minutes and a hint."""
    path = root / ADVICE
    if not path.exists():
        return
    listed = tomllib.loads(path.read_text(encoding="utf-8"))
    texts = (p.read_text(encoding="utf-8") for p in chapter_files(root / "chapters"))
    found = (cell.directives() for text in texts for cell in all_cells(text))
    named = {words["blank"] for words in found if "blank" in words}
    for name in sorted(named ^ listed.keys()):
        expected = "an entry" if name in named else "none, for there is no such blank"
        raise ExportError(f"{ADVICE}: [{name}]: expected {expected}")


def writers(cells: list[Cell]) -> list[str]:
    """The chapters that ``cells`` come from, in order."""
    return list(dict.fromkeys(cell.chapter for cell in cells))


def ruff(root: Path, path: str, source: str, *arguments: str) -> str:
    """ruff's standard output for ``source``, checked as if it stood at ``path``."""
    result = subprocess.run(
        [find_ruff_bin(), *arguments, "--stdin-filename", path, "-"],
        cwd=root,
        input=source,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    if result.returncode:
        raise ExportError(f"{path}: ruff failed: {result.stderr.strip()}")
    return result.stdout


def exported_names(modules: dict[str, list[Cell]]) -> dict[tuple[str, str], str]:
    """The module of each name that a chapter exports, by the chapter and the name."""
    names = {}
    for path, cells in modules.items():
        for cell in cells:
            for node in parse(cell).body:
                for name in defined_names(node):
                    names[cell.chapter, name] = path
    return names


def undefined(root: Path, path: str, source: str) -> list[tuple[str, int, str]]:
    """The names that ``source`` reads and does not define, with line and message."""
    lint = ("check", "--quiet", "--exit-zero", "--select", "F821")
    problems = json.loads(ruff(root, path, source, *lint, "--output-format", "json"))
    return [
        (p["message"].split("`")[1], p["location"]["row"], p["message"])
        for p in problems
    ]


def build(
    root: Path, path: str, cells: list[Cell], homes: dict[tuple[str, str], str]
) -> str:
    """The text of the module that ``cells`` make up.

    ``homes`` are the modules of the names that the chapters export.
    """
    source = joined(path, cells)
    imports = {
        f"from {home.removesuffix('.py').replace('/', '.')} import {name}"
        for name, _, _ in undefined(root, path, source)
        for chapter in writers(cells)
        if (home := homes.get((chapter, name), path)) != path
    }
    if imports:
        added = Cell(cells[0].chapter, cells[0].line, path, "\n".join(sorted(imports)))
        source = joined(path, [*cells, added])
    lint = ("check", "--quiet", "--exit-zero", "--select", "I,F401", "--fix")
    source = ruff(root, path, source, *lint)
    source = ruff(root, path, source, "format")
    for _, row, message in undefined(root, path, source):
        raise ExportError(
            f"{', '.join(writers(cells))}: {path}:{row}: "
            f"{message}; expected an exported cell to define or import it"
        )
    return source


def tidy(root: Path, chapter: str, modules: dict[str, str]) -> str:
    """The chapter with its code formatted and its modules' line counts right."""

    def phrase(match: re.Match[str]) -> str:
        source = modules.get(match[2])
        if source is None:
            return match[0]
        return f"{match[1]}{len(source.splitlines())}{match[3]}"

    text = (root / chapter).read_text(encoding="utf-8")
    return LINE_COUNT.sub(phrase, ruff(root, chapter, text, "format"))


def check_owners(root: Path, modules: dict[str, list[Cell]]) -> None:
    """Refuse to overwrite a module written by hand, or to let one become stale."""
    table = root / TABLE
    listed = tomllib.loads(table.read_text(encoding="utf-8")) if table.exists() else {}
    for path, cells in modules.items():
        if path not in listed and (root / path).exists():
            raise ExportError(
                f"{cells[0].chapter}:{cells[0].line}: writes {path}, which is written "
                "by hand; expected another module, or that file deleted first"
            )
    for path in listed:
        if path not in modules and (root / path).exists():
            raise ExportError(
                f"{path}: no chapter writes it any more; expected it to be deleted, "
                f"or its line in {TABLE} if it is written by hand from now on"
            )


def write(root: Path, texts: dict[str, str]) -> None:
    """Write what changed; if a module then does not import, take everything back."""
    paths = {name: root / name for name in texts}
    old = {n: p.read_text(encoding="utf-8") for n, p in paths.items() if p.exists()}
    changed = [name for name in texts if texts[name] != old.get(name)]
    for name in changed:
        if not paths[name].parent.exists():
            paths[name].parent.mkdir(parents=True)
            (paths[name].parent / "__init__.py").touch()
        paths[name].write_text(texts[name], encoding="utf-8")
    modules = [name for name in changed if name.endswith(".py")]
    result = subprocess.run(
        [sys.executable, "-B", "-c", IMPORT_CHECK, *modules],
        cwd=root,
        capture_output=True,
        text=True,
    )
    if result.returncode:
        for name in changed:
            if name in old:
                paths[name].write_text(old[name], encoding="utf-8")
            else:
                paths[name].unlink()
        reason = result.stderr.strip().rpartition("\n")[2]
        raise ExportError(
            f"{reason}; expected a module that imports by itself, so nothing is written"
        )
    for name in changed:
        print(f"wrote {name}")


def export(root: Path, files: list[Path], check: bool) -> int:
    """Export ``files``, or every chapter; the exit status."""
    chosen = {Path(os.path.relpath(file.resolve(), root)).as_posix() for file in files}
    cells = collect(root)
    check_owners(root, cells)
    check_advice(root)
    chapters = {path: writers(cells[path]) for path in sorted(cells)}
    if nothing := sorted(chosen.difference(*chapters.values())):
        raise ExportError(f"{nothing[0]}: exports nothing; expected `#| export` cells")
    homes = exported_names(cells)
    modules = {
        path: build(root, path, cells[path], homes)
        for path in chapters
        if not chosen or chosen.intersection(chapters[path])
    }
    rows = [f'"{path}" = {json.dumps(chapters[path])}\n' for path in chapters]
    texts = {TABLE: TABLE_HEAD + "\n" + "".join(rows)} | modules
    for chapter in sorted({c for path in modules for c in chapters[path]}):
        texts[chapter] = tidy(root, chapter, modules)
    if not check:
        write(root, texts)
        return 0
    drift = False
    for name, text in sorted(texts.items()):
        path = root / name
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        diff = difflib.unified_diff(
            old.splitlines(True), text.splitlines(True), name, f"{name} (export)"
        )
        for line in diff:
            drift = True
            print(line, end="")
    return int(drift)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="chapters (default: all)")
    parser.add_argument("--check", action="store_true", help="print a diff, write none")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    options = parser.parse_args(arguments)
    try:
        return export(options.root.resolve(), options.files, options.check)
    except ExportError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
