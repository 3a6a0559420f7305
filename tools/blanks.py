"""The blanks of the course, and what a reader has made of them.

A reader's chapter is not run as a whole, which would take a minute: imports,
definitions and exported cells are, and the cells of blanks. Each blank is judged with
ours in place of those before it that are missing or wrong.

    python tools/blanks.py FILE CHAPTER [NAME ...]      judge all, or all but NAMEs

prints a line of JSON for each blank. `judged` runs this in a process for each chapter,
since a reader's code may end the process or never end.
"""

import ast
import contextlib
import dis
import functools
import hashlib
import importlib
import io
import json
import linecache
import os
import platform
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import cells
import course
import torch
from cells import Cell, chapter_files, committed

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CHAPTERS = ROOT / "chapters"
OWN = ".workbook"  # the folder in a workbook of what the reader need not see
ENGINE = f"{OWN}/engine"  # what holds the package with the reader's functions
CACHE = ROOT / ".cache/judged"
SECONDS = 90  # that a blank may take with the imports of its chapter
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class WorkbookError(Exception):
    """One line that says what is wrong and what was expected."""


class Blank(NamedTuple):
    """A function, or `Class.method`, that the reader writes."""

    name: str
    chapter: str  # the stem of its file
    stub: str
    kept: str  # the source of our version, of several cells perhaps
    module: str  # that our version is exported to, simplellm.model.attention; or ""

    @property
    def root(self) -> str:
        """The function or the class."""
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        return self.name

    @property
    def is_kernel(self) -> bool:
        return "@triton.jit" in self.kept

    @property
    def minutes(self) -> int:
        """How long it may take to write."""
        return course.about()[self.name]["minutes"]

    @property
    def lines(self) -> int:
        """The lines of our version below its signature, without text and comments."""
        lines = self.kept.splitlines()
        count = 0
        for top in ast.parse(self.kept).body:
            for node in top.body if isinstance(top, ast.ClassDef) else [top]:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    body = node.body[ast.get_docstring(node) is not None :]
                    own = lines[first_line(body[0]) - 1 : node.end_lineno]
                    code = (line.strip() for line in own)
                    count += sum(bool(s) and not s.startswith("#") for s in code)
        return count

    @property
    def effort(self) -> str:
        """ "about 9 lines, 20 minutes"."""
        lines = f"about {self.lines} lines" if self.lines > 1 else "one line"
        return f"{lines}, {self.minutes} minutes"


def blanks_of(chapter: str, contents: list[Cell]) -> list[Blank]:
    """The blanks of one chapter of the course, in order."""
    stubs: dict[str, str] = {}
    kept: dict[str, str] = {}
    modules: dict[str, str] = {}
    default = ""
    for cell in contents:
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
        for path in chapter_files(CHAPTERS)
        for blank in blanks_of(path.stem, cells.cells(committed(path)))
    ]


def by_chapter(blanks: list[Blank]) -> dict[str, list[Blank]]:
    """The blanks of each chapter by its stem, in order."""
    chapters: dict[str, list[Blank]] = {}
    for blank in blanks:
        chapters.setdefault(blank.chapter, []).append(blank)
    return chapters


def same(one: str, other: str) -> bool:
    """Whether two sources are equal but for blank lines and trailing spaces."""
    lines = ([s.rstrip() for s in t.splitlines() if s.strip()] for t in (one, other))
    return next(lines) == next(lines)


def written(blank: Blank, contents: list[Cell]) -> str:
    """What a reader's chapter has in the place of ``blank``; "" if it is the stub.

    A reader may have deleted the directive: then it is the cell before the check that
    defines the name.
    """
    before: list[Cell] = []
    for cell in contents:
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


# Source


def first_line(node: ast.stmt) -> int:
    """The number of a statement's first line, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def text_of(node: ast.stmt, source: str) -> str:
    """The lines of a statement, its decorators included, without their indent."""
    lines = source.splitlines()[first_line(node) - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines))


def is_definition(node: ast.stmt) -> bool:
    """Whether a statement only names something and computes nothing."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        parts = ast.walk(node)
        return not any(isinstance(p, ast.Call | ast.Await | ast.BinOp) for p in parts)
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    return isinstance(node, kinds | ast.AsyncFunctionDef)


def bindings(source: str, whole: bool = True) -> dict[str, str]:
    """The names that ``source`` defines at its top level, with the code that does.

    Not ``whole``: only by statements that compute nothing.
    """
    defined: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                code = f"import {ast.unparse(alias)}"
                if isinstance(node, ast.ImportFrom):
                    code = f"from {'.' * node.level}{node.module or ''} {code}"
                defined[(alias.asname or alias.name).partition(".")[0]] = code
        elif isinstance(node, Definition):
            defined[node.name] = text_of(node, source)
        elif whole or is_definition(node):
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    defined[part.id] = text_of(node, source)
    return defined


def used(source: str) -> set[str]:
    """The names that ``source`` reads from the module it stands in."""
    names: set[str] = set()
    waiting = [compile(source, "", "exec")]
    while waiting:
        code = waiting.pop()
        waiting += [part for part in code.co_consts if isinstance(part, CodeType)]
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.add(str(step.argval))
    return names


# The verdicts


class Result(NamedTuple):
    """What became of a blank: "right", "wrong" or "missing", and why."""

    name: str
    chapter: str
    verdict: str
    message: str

    def __str__(self) -> str:
        return self.name


def saved(folder: Path, chapter: str, blanks: list[Blank]) -> Path | None:
    """The file that a reader writes ``chapter`` in: the newest that has changes."""
    paths = [folder / f"{chapter}{end}" for end in (".md", ".ipynb")]
    newest_first = sorted(
        (path for path in paths if path.exists()),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    for path in newest_first:
        contents = cells.read(path)
        if any(written(blank, contents) for blank in blanks):
            return path
    return newest_first[0] if newest_first else None


def has_gpu() -> bool:
    return torch.cuda.is_available()


def environment(*folders: Path, kernels: bool = False) -> dict[str, str]:
    """For a child that imports from ``folders`` first, then this repository."""
    paths = [*map(str, folders), str(HERE), str(CHAPTERS), str(ROOT)]
    added = {"PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "Agg"}
    if kernels and not has_gpu():
        added["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    return os.environ | added


def judge_chapter(path: Path, blanks: list[Blank]) -> Iterator[Result]:
    """The results of one chapter, from processes that a reader's code may end."""
    chapter = blanks[0].chapter
    kernels = any(blank.is_kernel for blank in blanks)
    ended: dict[str, str] = {}  # by blank: how it ended its process
    while True:
        command = [sys.executable, str(HERE / "blanks.py"), str(path), chapter, *ended]
        try:
            done = subprocess.run(
                command,
                env=environment(kernels=kernels),
                capture_output=True,
                text=True,
                timeout=SECONDS * len(blanks),
            )
            last = done.stderr.strip().rpartition("\n")[2]
            status = f"ends the process with {done.returncode} {last}".rstrip()
            printed = done.stdout
        except subprocess.TimeoutExpired as error:
            output = error.stdout or b""
            printed = output.decode() if isinstance(output, bytes) else output
            status = f"is not done after {error.timeout:.0f} s"
        lines = [json.loads(s) for s in printed.splitlines() if s.startswith("{")]
        results = {line["name"]: line for line in lines if "name" in line}
        if len(results) == len(blanks):
            break
        started = [line["start"] for line in lines if "start" in line]
        if not started or started[-1] in ended:
            raise WorkbookError(f"{path} cannot be judged: {done.stderr[-2000:]}")
        ended[started[-1]] = f"{started[-1]}: {status}"
    for blank in blanks:
        line = results[blank.name]
        if blank.name in ended:
            yield Result(blank.name, chapter, "wrong", ended[blank.name])
        else:
            yield Result(blank.name, chapter, line["verdict"], line["message"])


def judged(folder: Path, blanks: list[Blank]) -> list[Result]:
    """What became of ``blanks``, the blanks of one chapter, in a reader's folder.

    A chapter whose code has been judged before is not judged again.
    """
    chapter = blanks[0].chapter
    path = saved(folder, chapter, blanks)
    contents = cells.read(path) if path else []
    reason = "not written yet"
    if any(blank.is_kernel for blank in blanks) and not find_spec("triton"):
        reason, path = "cannot be checked here: Triton is not installed", None
    if path is None or not any(written(blank, contents) for blank in blanks):
        return [
            Result(b.name, chapter, "missing", f"{b.name}: {reason}") for b in blanks
        ]
    # Not in the reader's folder, where somebody who is graded could write it.
    cache = CACHE / f"{chapter}-{fingerprint(chapter, contents)}.json"
    if cache.exists():
        return [Result(*kept) for kept in json.loads(cache.read_text("utf-8"))]
    results = [*judge_chapter(path, blanks)]
    if not any("not done after" in result.message for result in results):
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(results), encoding="utf-8")
    return results


def fingerprint(chapter: str, contents: list[Cell]) -> str:
    """A hash of all that the verdicts on a reader's chapter depend on."""
    ours = committed(CHAPTERS / f"{chapter}.md")
    return hashlib.sha256(f"{machinery()}\0{ours}\0{contents}".encode()).hexdigest()[
        :32
    ]


@functools.cache
def machinery() -> str:
    """A hash of what judges any chapter."""
    about = platform.python_version(), torch.__version__, has_gpu()
    digest = hashlib.sha256(f"{about}".encode())
    for folder in (CHAPTERS / "course", ROOT / "simplellm"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    for name in ("blanks.py", "cells.py"):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()


# In a process of its own


def run(source: str, name: str, names: dict[str, Any]) -> None:
    """Execute ``source`` so that tracebacks and Triton find its lines as ``name``."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), names)


def define(cell: Cell, name: str, names: dict[str, Any]) -> None:
    """Run what a cell defines; an exported cell, which is a module's, as a whole."""
    with contextlib.suppress(SyntaxError):
        for node in ast.parse(cell.body).body:
            if is_definition(node) or "export" in cell.directives():
                with contextlib.suppress(Exception):
                    run(text_of(node, cell.body), f"{name}, line {node.lineno}", names)


def provide(source: str, before: list[Cell], names: dict[str, Any]) -> None:
    """Compute what ``source`` uses of the cells ``before`` and ``names`` lack."""
    offered: dict[str, str] = {}
    for cell in before:
        with contextlib.suppress(SyntaxError):
            offered |= bindings(cell.body)
    seen = set(bindings(source))

    def compute(code: str) -> None:
        for name in sorted(used(code) - seen):
            seen.add(name)
            if name in offered:
                compute(offered[name])
                if name not in names:
                    with contextlib.suppress(Exception):
                        run(offered[name], f"cell of {name}", names)

    compute(source)


def judge(path: Path, chapter: str, skipped: list[str]) -> Iterator[dict[str, str]]:
    """The verdict on each blank of a reader's ``chapter``, a "start" before each."""
    ours = cells.cells(committed(CHAPTERS / f"{chapter}.md"))
    remaining = {blank.name: blank for blank in blanks_of(chapter, ours)}
    contents = cells.read(path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for blank in remaining.values():
        if blank.module:
            names |= vars(importlib.import_module(blank.module)) | names
    sources = {name: written(blank, contents) for name, blank in remaining.items()}
    for number, cell in enumerate(contents):
        own = [name for name in sources if sources[name] and sources[name] == cell.body]
        name = cell.directives().get("blank", own[0] if own else "")
        if name not in remaining:
            if not cell.checks:
                define(cell, f"{path.name}, cell {number}", names)
            continue
        blank, source = remaining.pop(name), sources.pop(name)
        verdict, message = "missing", f"{name}: not written yet"
        before = names.get(blank.root)
        if source and name not in skipped:
            yield {"start": name}
            with contextlib.suppress(SyntaxError):
                provide(source, contents[:number], names)
            verdict, message = tried(blank, source, names)
        if verdict != "right":
            if before is not None:
                names[blank.root] = before  # for a class that ours adds to
            with contextlib.suppress(Exception):
                run(blank.kept, f"our {name}", names)
        yield {"name": name, "verdict": verdict, "message": message}
    for name in remaining:
        message = f"{name}: not written yet; its cell is gone"
        yield {"name": name, "verdict": "missing", "message": message}


def tried(blank: Blank, source: str, names: dict[str, Any]) -> tuple[str, str]:
    """Define and check what a reader has written; the verdict and what it says."""
    before = names.get(blank.root)
    try:
        with course.time_limit(course.CHECK_SECONDS):
            run(source, f"your {blank.name}", names)
    except (Exception, SystemExit, course.TooLong) as error:
        return "wrong", f"{blank.name}: the cell raises {type(error).__name__}: {error}"
    after, (_, _, member) = names.get(blank.root), blank.name.partition(".")
    if after is before or (member and member not in vars(after)):
        return "wrong", f"{blank.name}: the cell does not define it"
    try:
        course.judge(blank.name, names.get(blank.root))
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
