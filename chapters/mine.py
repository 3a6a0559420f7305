"""An engine of the reader's own: the package with the reader's functions in it.

`build` copies the package into the workbook and puts each function that the reader has
written, and that is right, in the place of ours. What a function needs of the reader's
chapter besides, imports and helpers, comes along. Each is checked once more where it
stands now, in the copy, and ours comes back if it is not right there.

    python chapters/mine.py check NAME ...       in a process that imports the copy
    python chapters/mine.py answer PROMPT NAME ...
"""

import ast
import builtins
import dis
import json
import shutil
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import cells
import course
from blanks import (
    HERE,
    ROOT,
    Blank,
    Result,
    WorkbookError,
    course_blanks,
    environment,
    has_gpu,
    is_definition,
    saved,
    written,
)
from cells import Cell

MARK = ".built"  # in a copy of the package: nothing in it is the reader's only one

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Unfit(Exception):
    """Why a function that is right cannot stand in our module."""


# One function in one module


def text_of(node: ast.stmt, source: str) -> str:
    """The lines of a statement, its decorators included, without their indent."""
    start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    lines = source.splitlines()[start - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines))


def bound(node: ast.stmt) -> set[str]:
    """The names that a statement at the top level defines."""
    if isinstance(node, Definition):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(a.asname or a.name).partition(".")[0] for a in node.names}
    return {
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }


def used(source: str) -> set[str]:
    """The names that ``source`` reads from the module it stands in."""
    found: set[str] = set()
    waiting = [compile(source, "", "exec")]
    while waiting:
        code = waiting.pop()
        waiting += [part for part in code.co_consts if isinstance(part, CodeType)]
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                found.add(str(step.argval))
    return found


def pieces(
    blank: Blank, source: str, chapter: list[Cell], module: ast.Module
) -> tuple[Definition, list[tuple[ast.stmt, str]]]:
    """The reader's definition, and what it needs that ``module`` lacks, with sources.

    Raises Unfit where the reader's helper has a name that means something else there.
    """
    own = ast.parse(source)
    found = [n for n in own.body if isinstance(n, Definition) and n.name == blank.root]
    if not found:
        raise Unfit(f"its cell defines no {blank.root}")
    target = found[-1]
    here = {name for node in module.body for name in bound(node)} | set(dir(builtins))
    offered: dict[str, tuple[ast.stmt, str]] = {}
    for cell in chapter:
        if "blank" in cell.directives() and cell.body != source:
            continue  # other blanks are in the package, as the reader's or as ours
        try:
            nodes = ast.parse(cell.body).body
        except SyntaxError:
            continue
        for node in nodes:
            if cell.body == source or is_definition(node):
                offered |= dict.fromkeys(bound(node), (node, cell.body))
    theirs = {ast.dump(node) for node in module.body}
    needed: list[tuple[ast.stmt, str]] = []
    waiting, seen = used(text_of(target, source)), {blank.root}
    while waiting:
        name = waiting.pop()
        if name in seen or name not in offered:
            continue
        seen.add(name)
        node, text = offered[name]
        in_cell = text == source
        if ast.dump(node) in theirs or (name in here and not in_cell):
            continue
        if name in here:
            raise Unfit(f"its helper {name} has the name of something of ours")
        needed.insert(0, (node, text))
        waiting |= used(text_of(node, text))
    return target, needed


def spliced(text: str, blank: Blank, source: str, chapter: list[Cell]) -> str:
    """The module ``text`` with the reader's function in the place of ours."""
    module = ast.parse(text)
    target, needed = pieces(blank, source, chapter, module)
    (ours,) = [
        node
        for node in module.body
        if isinstance(node, Definition) and node.name == blank.root
    ]
    if isinstance(ours, ast.ClassDef) and "." in blank.name:
        text = with_members(text, ours, target, source)
    else:
        text = replaced(text, ours, text_of(target, source))
    if not needed:
        return text
    lines = text.splitlines()
    start = min([ours.lineno, *(d.lineno for d in ours.decorator_list)]) - 1
    while start and lines[start - 1].startswith("#"):
        start -= 1
    helpers = [f"{text_of(node, origin)}\n\n" for node, origin in needed]
    return "\n".join([*lines[:start], *helpers, *lines[start:]]) + "\n"


def with_members(text: str, ours: ast.ClassDef, target: ast.stmt, source: str) -> str:
    """``text`` with the members of the reader's class in ours, new ones at its end."""
    name = ours.name
    for member in getattr(target, "body", []):
        if not isinstance(member, Definition):
            continue
        (ours,) = [
            node
            for node in ast.parse(text).body
            if isinstance(node, ast.ClassDef) and node.name == name
        ]
        code = textwrap.indent(text_of(member, source), "    ")
        same = [n for n in ours.body if getattr(n, "name", None) == member.name]
        if same:
            text = replaced(text, same[-1], code)
        else:
            lines = text.splitlines()
            end = ours.end_lineno or len(lines)
            text = "\n".join([*lines[:end], "", code, *lines[end:]]) + "\n"
    return text


def replaced(text: str, node: ast.stmt, code: str) -> str:
    """``text`` with the lines of ``node`` replaced by ``code``."""
    lines = text.splitlines()
    start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "\n".join([*lines[: start - 1], code, *lines[node.end_lineno :]]) + "\n"


# The whole package


def copy_package(target: Path) -> None:
    """Make a fresh copy of the package; WorkbookError if something else is there."""
    if target.exists():
        if not (target / MARK).exists():
            raise WorkbookError(f"{target} is not ours; expected nothing there")
        shutil.rmtree(target)
    target.mkdir(parents=True)
    (target / MARK).touch()
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "simplellm", target, ignore=ignored, dirs_exist_ok=True)


def build(
    folder: Path, right: list[Blank], chapters: dict[str, list[Cell]]
) -> dict[str, str]:
    """Write ``folder``/simplellm; by name, why a blank of ``right`` is not in it."""
    copy_package(folder / "simplellm")
    out: dict[str, str] = {}
    for blank in right:
        path = folder / f"{blank.module.replace('.', '/')}.py"
        chapter = chapters[blank.chapter]
        text = path.read_text(encoding="utf-8")
        try:
            made = spliced(text, blank, written(blank, chapter), chapter)
            ast.parse(made)
        except (Unfit, SyntaxError) as error:
            out[blank.name] = str(error)
            continue
        path.write_text(made, encoding="utf-8")
    return out


def recheck(names: list[str]) -> dict[str, str]:
    """What the checks say of ``names`` in the package that this process imports."""
    blanks = {blank.name: blank for blank in course_blanks()}
    told: dict[str, str] = {}
    for name in names:
        try:
            thing = getattr(import_module(blanks[name].module), blanks[name].root)
            course.check(name, thing)
        except Exception as error:
            told[name] = str(error)
    return told


def ask(folder: Path, results: list[Result], prompt: str) -> int:
    """Build the reader's engine, say what of it is the reader's, and let it answer."""
    blanks = {blank.name: blank for blank in course_blanks()}
    right = [blanks[r.name] for r in results if r.verdict == "right"]
    for result in results:
        if result.verdict == "wrong":
            print(f"{result.message}\n  The engine uses ours.")
    gpu = has_gpu()
    chapters: dict[str, list[Cell]] = {}
    for name in {blank.chapter for blank in right}:
        asked = [blank for blank in blanks.values() if blank.chapter == name]
        path = saved(folder, name, asked)
        chapters[name] = cells.read(path) if path else []
    lessons = [blank.name for blank in right if not blank.module]
    kernels = [b.name for b in right if b.module and b.is_kernel and not gpu]
    chosen = [b for b in right if b.name not in {*lessons, *kernels}]
    variables = environment(folder)
    tool = [sys.executable, str(HERE / "mine.py")]
    while True:
        out = build(folder, chosen, chapters)
        names = [blank.name for blank in chosen if blank.name not in out]
        done = subprocess.run(
            [*tool, "check", *names],
            env=variables,
            capture_output=True,
            text=True,
        )
        told = done.stdout.splitlines()
        if done.returncode or not told:
            raise WorkbookError(f"the copy does not run:\n{done.stderr[-2000:]}")
        out |= json.loads(told[-1])
        for name, why in out.items():
            print(f"{name}: right, but ours is used: {why}")
        if not out:
            break
        chosen = [blank for blank in chosen if blank.name not in out]
    tell("yours, in the engine", names)
    tell("yours, for a lesson that no engine needs", lessons)
    tell("yours, checked in the interpreter; without a GPU not used", kernels)
    print(flush=True)
    return subprocess.run([*tool, "answer", prompt, *names], env=variables).returncode


def tell(what: str, names: list[str]) -> None:
    if names or what.endswith("engine"):
        print(textwrap.fill(f"{what}: {', '.join(names) or 'none yet'}", course.WIDTH))


# In the process that imports the copy


def code_of(blank: Blank) -> CodeType | None:
    thing: Any = import_module(blank.module)
    for part in blank.name.split("."):
        thing = getattr(thing, part)
    return getattr(course.unwrapped(thing), "__code__", None)


def answer(prompt: str, names: list[str]) -> None:
    """Print the engine's answer, and how often it called each of ``names``."""
    from simplellm import LLM, EngineConfig

    blanks = [blank for blank in course_blanks() if blank.name in names]
    codes = {code_of(blank): blank.name for blank in blanks}
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in codes:
            calls[codes[frame.f_code]] += 1

    kernels = any(blank.is_kernel for blank in blanks)
    # NumPy's and Triton's operations are other functions than the chapters' plain ones.
    config = EngineConfig(operations="auto" if kernels else "plain")
    threading.setprofile(count)
    sys.setprofile(count)
    with LLM(config=config) as llm:
        messages = [{"role": "user", "content": prompt}]
        reply = llm.chat(messages, reasoning_effort="high").choices[0]
    sys.setprofile(None)
    threading.setprofile(None)
    print(f"{prompt}\n{reply.content}")
    called = [name for name in names if calls[name]]
    if called:
        told = ", ".join(f"{name} {calls[name]:,}" for name in called)
        print("\n" + textwrap.fill(f"Calls of yours: {told}.", course.WIDTH))


def main() -> None:
    command, *arguments = sys.argv[1:]
    if command == "check":
        print(json.dumps(recheck(arguments)))
    else:
        answer(arguments[0], arguments[1:])


if __name__ == "__main__":
    main()
