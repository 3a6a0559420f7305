"""The blanks of the course, and what a reader has made of them.

A reader's chapter is not run as a whole, which would take a minute: imports,
definitions and exported cells are, and the cells of blanks. Each blank is judged with
ours in place of those before it that are missing or wrong.

    python chapters/blanks.py FILE CHAPTER [NAME ...]      judge all, or all but NAMEs

prints a line of JSON for each blank. `workbook.py` runs it in a process of its own,
since a reader's code may end the process or never end.
"""

import ast
import contextlib
import importlib
import io
import json
import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cells
import course
from cells import Cell

HERE = Path(__file__).resolve().parent
CHAPTER = re.compile(r"(\d\d|[a-z])-[\w-]+")  # the stems of chapters and appendices


class Blank(NamedTuple):
    """A function, or `Class.method`, that the reader writes."""

    name: str
    chapter: str  # the stem of its file
    stub: str
    kept: str  # the source of our version, of several cells perhaps
    module: str  # that our version is exported to, simplellm.ops; or ""

    @property
    def root(self) -> str:
        """The function or the class."""
        return self.name.partition(".")[0]

    @property
    def is_kernel(self) -> bool:
        return "@triton.jit" in self.kept


def chapter_files(folder: Path) -> list[Path]:
    """The chapters, then the appendices, saved as Markdown or as notebooks."""
    found = [
        path
        for path in folder.iterdir()
        if path.suffix in (".md", ".ipynb") and CHAPTER.fullmatch(path.stem)
    ]
    return sorted(found, key=lambda path: (not path.name[0].isdigit(), path.name))


def blanks_of(chapter: str, found: list[Cell]) -> list[Blank]:
    """The blanks of one chapter of the course, in order."""
    stubs: dict[str, str] = {}
    kept: dict[str, str] = {}
    modules: dict[str, str] = {}
    default = ""
    for cell in found:
        directives = cell.directives()
        default = directives.get("default_exp", default)
        if name := directives.get("blank", ""):
            stubs[name] = cell.body
        if (name := directives.get("solution", "")) in stubs:
            kept[name] = f"{kept[name]}\n\n{cell.body}" if name in kept else cell.body
            if "export" in directives:
                modules[name] = f"simplellm.{directives['export'] or default}"
    return [
        Blank(name, chapter, stubs[name], kept[name], modules.get(name, ""))
        for name in stubs
    ]


def course_blanks() -> list[Blank]:
    """All blanks of the course, in order."""
    return [
        blank
        for path in chapter_files(HERE)
        for blank in blanks_of(path.stem, cells.read(path))
    ]


def same(one: str, other: str) -> bool:
    """Whether two sources are equal but for blank lines and trailing spaces."""
    lines = ([s.rstrip() for s in t.splitlines() if s.strip()] for t in (one, other))
    return next(lines) == next(lines)


def written(blank: Blank, found: list[Cell]) -> str:
    """What a reader's chapter has in the place of ``blank``; "" if it is the stub.

    A reader may have deleted the directive: then it is the cell before the check that
    defines the name.
    """
    before: list[Cell] = []
    for cell in found:
        if cell.directives().get("blank") == blank.name:
            return "" if same(cell.body, blank.stub) else cell.body
        if cell.checks == blank.name:
            break
        before.append(cell)
    defines = re.compile(rf"^(async def|def|class) {blank.root}\b", re.MULTILINE)
    for cell in reversed(before):
        if defines.search(cell.source) and "export" not in cell.directives():
            return "" if same(cell.body, blank.stub) else cell.body
    return ""


# Running


def run(source: str, name: str, names: dict[str, Any]) -> None:
    """Execute ``source`` so that tracebacks and Triton find its lines as ``name``."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), names)


def is_definition(node: ast.stmt) -> bool:
    """Whether a statement only names something and computes nothing."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        parts = ast.walk(node)
        return not any(isinstance(p, ast.Call | ast.Await | ast.BinOp) for p in parts)
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    return isinstance(node, kinds | ast.AsyncFunctionDef)


def define(cell: Cell, name: str, names: dict[str, Any]) -> None:
    """Run what a cell defines; an exported cell, which is a module's, as a whole."""
    with contextlib.suppress(SyntaxError):
        for node in ast.parse(cell.body).body:
            if is_definition(node) or "export" in cell.directives():
                # Line numbers stay, for Triton reads a kernel's source by them.
                source = "\n" * (node.lineno - 1) + (
                    ast.get_source_segment(cell.body, node) or ""
                )
                if decorators := getattr(node, "decorator_list", []):
                    lines = cell.body.splitlines()
                    start = decorators[0].lineno - 1
                    source = "\n" * start + "\n".join(lines[start : node.end_lineno])
                with contextlib.suppress(Exception):
                    run(source, f"{name}, line {node.lineno}", names)


def judge(path: Path, chapter: str, skipped: list[str]) -> Iterator[dict[str, str]]:
    """The verdict on each blank of a reader's ``chapter``, a "start" before each."""
    ours = HERE / f"{chapter}.md"
    asked = {blank.name: blank for blank in blanks_of(chapter, cells.read(ours))}
    found = cells.read(path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for blank in asked.values():
        if blank.module:
            names |= vars(importlib.import_module(blank.module)) | names
    sources = {name: written(blank, found) for name, blank in asked.items()}
    for number, cell in enumerate(found):
        own = [name for name in sources if sources[name] and sources[name] == cell.body]
        name = cell.directives().get("blank", own[0] if own else "")
        if name not in asked:
            if not cell.checks:
                define(cell, f"{path.name}, cell {number}", names)
            continue
        blank, source = asked.pop(name), sources.pop(name)
        verdict, message = "missing", f"{name}: not written yet"
        before = names.get(blank.root)
        if source and name not in skipped:
            yield {"start": name}
            verdict, message = tried(blank, source, names)
        if verdict != "right":
            if before is not None:
                names[blank.root] = before  # for a class that ours adds to
            with contextlib.suppress(Exception):
                run(blank.kept, f"our {name}", names)
        yield {"name": name, "verdict": verdict, "message": message}
    for name in asked:
        message = f"{name}: not written yet; its cell is gone"
        yield {"name": name, "verdict": "missing", "message": message}


def tried(blank: Blank, source: str, names: dict[str, Any]) -> tuple[str, str]:
    """Define and check what a reader has written; the verdict and what it says."""
    try:
        with course.time_limit(course.CHECK_SECONDS):
            run(source, f"your {blank.name}", names)
    except (Exception, SystemExit, course.TooLong) as error:
        return "wrong", f"{blank.name}: the cell raises {type(error).__name__}: {error}"
    try:
        course.check(blank.name, names.get(blank.root))
    except course.NotYours as error:
        return "missing", str(error)
    except course.Wrong as error:
        return "wrong", str(error)
    return "right", ""


def main() -> None:
    path, chapter, *skipped = sys.argv[1:]
    out = sys.stdout
    with contextlib.redirect_stdout(io.StringIO()):  # readers print
        for line in judge(Path(path), chapter, skipped):
            print(json.dumps(line), file=out, flush=True)


if __name__ == "__main__":
    main()
