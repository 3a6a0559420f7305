"""An engine of the reader's own: the package with the reader's functions in it.

`build` copies the package into a workbook's `ENGINE` and puts each function that the
reader has written, and that is right, in the place of ours. What a function needs of
the reader's chapter besides, imports and helpers, comes along. Each is checked once
more where it stands now, in the copy, and ours comes back if it is not right there.

    python tools/mine.py check NAME ...       in a process that imports the copy
    python tools/mine.py answer PROMPT NAME ...
"""

import ast
import builtins
import contextlib
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
    ENGINE,
    HERE,
    ROOT,
    Blank,
    Definition,
    Result,
    WorkbookError,
    bindings,
    course_blanks,
    environment,
    first_line,
    has_gpu,
    saved,
    text_of,
    used,
    written,
)
from cells import Cell

MARK = ".built"  # in a copy of the package: nothing in it is the reader's only one


class Unfit(Exception):
    """Why a function that is right cannot stand in our module."""


# One function in one module


def helpers(target: str, source: str, chapter: list[Cell], text: str) -> list[str]:
    """What the code ``target`` needs that the module ``text`` lacks, in order.

    It stands in the reader's cell ``source`` or in another one of the ``chapter``.
    Raises Unfit where a helper has a name that means something else in the module.
    """
    here = bindings(text)
    offered: dict[str, str] = {}
    for cell in chapter:
        # Other blanks are in the package, as the reader's or as ours.
        if "blank" not in cell.directives():
            with contextlib.suppress(SyntaxError):
                offered |= bindings(cell.body, whole=False)
    own = bindings(source)
    offered |= own
    needed: set[str] = set()
    waiting = used(target)
    while waiting:
        name = waiting.pop()
        code = offered.get(name)
        if code is None or code == target or name in needed or here.get(name) == code:
            continue
        if name in own and (name in here or hasattr(builtins, name)):
            raise Unfit(f"its helper {name} has the name of something of ours")
        if name not in here:
            needed.add(name)
            waiting |= used(code)
    return list(dict.fromkeys(code for name, code in offered.items() if name in needed))


def spliced(text: str, blank: Blank, source: str, chapter: list[Cell]) -> str:
    """The module ``text`` with the reader's function in the place of ours."""
    targets = definitions(source, blank.root)
    if not targets:
        raise Unfit(f"its cell defines no {blank.root}")
    code = text_of(targets[-1], source)
    needed = helpers(code, source, chapter, text)
    (ours,) = definitions(text, blank.root)
    if "." in blank.name:
        text = with_members(text, targets[-1], source)
    else:
        text = replaced(text, ours, code)
    if not needed:
        return text
    lines = text.splitlines()
    start = first_line(ours) - 1
    while start and lines[start - 1].startswith("#"):
        start -= 1
    parts = [f"{part}\n\n" for part in needed]
    return "\n".join([*lines[:start], *parts, *lines[start:]]) + "\n"


def definitions(source: str, name: str) -> list[Definition]:
    """The functions and classes of this name at the top level of ``source``."""
    return [
        node
        for node in ast.parse(source).body
        if isinstance(node, Definition) and node.name == name
    ]


def with_members(text: str, target: Definition, source: str) -> str:
    """``text`` with the members of the reader's class in ours, new ones at its end."""
    for member in target.body:
        if not isinstance(member, Definition):
            continue
        (ours,) = definitions(text, target.name)
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
    lines[first_line(node) - 1 : node.end_lineno] = [code]
    return "\n".join(lines) + "\n"


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
    """Write the package; by name, why a blank of ``right`` is not in it."""
    copy_package(folder / ENGINE / "simplellm")
    out: dict[str, str] = {}
    for blank in right:
        path = folder / ENGINE / f"{blank.module.replace('.', '/')}.py"
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
            course.judge(name, thing)
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
    variables = environment(folder / ENGINE)
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
