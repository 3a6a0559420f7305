"""An engine of the reader's own: the package with the reader's functions in it.

`build` copies the package and puts each function that the reader has written, and that
is right, in the place of ours. What a function needs of the reader's chapter besides,
imports and helpers, comes along. Each is checked once more where it stands now, in the
copy, and ours comes back if it is not right there. The functions are those of a whole
workbook (`ask`, for `make mine`) or of one notebook (`ask_here`, for `run_mine`), which
for some appendices also has what `appendices.py` adds.

    python tools/mine.py PROMPTS HOW YOURS OURS    in a process that imports the copy

answers; all are JSON. YOURS and OURS are lists of blanks, by name, whose calls are
counted.
"""

import ast
import builtins
import contextlib
import dis
import inspect
import json
import linecache
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import cells
import course
from appendices import ANSWER, MASKS, NEEDED, How, form_of, placed
from blanks import (
    CHAPTERS,
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
from cells import Cell, committed

HIGH: dict[str, Any] = {"reasoning_effort": "high"}  # for the embedded model
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 12}  # for any other
# What only several ranks call.
SHARDED = {"simplellm.checkpoint.slices", "simplellm.model.sharded_choice"}
SHOWN = 3  # answers
RESUME = dis.opmap["RESUME"]  # where a function begins, and a generator goes on
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


def text_of_appendix(contents: list[Cell], roots: set[str]) -> str:
    """The module of a page: ``roots`` in our versions, and what they need."""
    offered: dict[str, str] = {}
    module = ""
    for cell in contents:
        directives = cell.directives()
        module = directives.get("default_exp", module)
        if cell.folded or cell.checks or {"blank", "exercise"} & {*directives}:
            continue
        with contextlib.suppress(SyntaxError):  # a page's cells may await
            for name, code in bindings(cell.body).items():
                if "export" in directives:
                    home = directives["export"] or module
                    code = f"from simplellm.{home} import {name}"
                elif name in offered and code.startswith(f"class {name}({name})"):
                    (target,) = definitions(code, name)
                    code = with_members(offered[name], target, code)
                offered[name] = code
    needed, waiting = set[str](), [*roots]
    while waiting:
        name = waiting.pop()
        if name in offered and name not in needed:
            needed.add(name)
            waiting += used(offered[name])
    return "\n\n".join(dict.fromkeys(offered[n] for n in offered if n in needed)) + "\n"


class Part(NamedTuple):
    """A function of the reader's for the engine."""

    blank: Blank
    source: str  # of the cell that defines it
    chapter: list[Cell]  # that the cell stands in


def build(folder: Path, parts: list[Part], appendix: str = "") -> dict[str, str]:
    """Write the package into ``folder``; by name, why a part is not in it.

    What the page ``appendix`` has besides becomes a module of it.
    """
    copy_package(folder / "simplellm")
    if appendix:
        blanks = [b for b in engine_blanks(appendix) if b.chapter == appendix]
        own = [b for b in blanks if "simplellm.appendices." in b.module]
        contents = cells.cells(committed(CHAPTERS / f"{appendix}.md"))
        text = text_of_appendix(contents, {b.root for b in own} | NEEDED[appendix])
        path = folder / f"{own[0].module.replace('.', '/')}.py"
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8")
    out: dict[str, str] = {}
    for blank, source, chapter in parts:
        path = folder / f"{blank.module.replace('.', '/')}.py"
        text = path.read_text(encoding="utf-8")
        try:
            made = spliced(text, blank, source, chapter)
            ast.parse(made)
        except (Unfit, SyntaxError) as error:
            out[blank.name] = f"{blank.name}: {error}"
            continue
        path.write_text(made, encoding="utf-8")
    return out


def run(
    folder: Path,
    parts: list[Part],
    ours: list[str],
    prompts: Sequence[str],
    how: How,
) -> None:
    """Build an engine of ``parts`` in ``folder``, and let it answer all ``prompts``.

    Prints what of it is the reader's, the answer, and how often the engine called the
    parts and the blanks ``ours``. Raises WorkbookError if the engine does not run.
    """
    while True:
        out = build(folder, parts, how.appendix)
        parts = [part for part in parts if part.blank.name not in out]
        yours = [part.blank.name for part in parts]
        given = map(json.dumps, (prompts, how, yours, [*ours, *out]))
        done = subprocess.run(
            [sys.executable, str(HERE / "mine.py"), *given],
            env=environment(folder),
            cwd=folder,  # where other ranks look first
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise WorkbookError(f"the copy does not run:\n{done.stderr[-2000:]}")
        said = json.loads(done.stdout.splitlines()[-1])
        for why in (*out.values(), *said["out"].values()):
            print(f"{why}\n  The engine uses ours.")
        ours = [*ours, *out, *said["out"]]
        parts = [part for part in parts if part.blank.name not in said["out"]]
        if not said["out"]:
            break
    calls = said["calls"]
    tell("yours, in the engine", yours or ["none"])
    print()
    for prompt, answer in [*zip(prompts, said["answers"], strict=True)][:SHOWN]:
        lines = [textwrap.fill(line, course.WIDTH) for line in answer.splitlines()]
        print(prompt, *lines, "", sep="\n")
    if len(prompts) > SHOWN:
        print(f"... and {len(prompts) - SHOWN} more answers\n")
    for whose, names in (("yours", yours), ("ours", ours)):
        tell(f"calls of {whose}", [f"{n} {calls[n]:,}" for n in names if n in calls])
    tell("not called", [name for name in [*yours, *ours] if name not in calls])


def ask(folder: Path, results: list[Result], prompt: str) -> None:
    """Let an engine with all that is right in a workbook answer ``prompt``."""
    blanks = {blank.name: blank for blank in course_blanks()}
    right = [blanks[r.name] for r in results if r.verdict == "right"]
    for result in results:
        if result.verdict == "wrong":
            print(f"{result.message}\n  The engine uses ours.")
    chapters: dict[str, list[Cell]] = {}
    for name in {blank.chapter for blank in right}:
        chapter_blanks = [blank for blank in blanks.values() if blank.chapter == name]
        path = saved(folder, name, chapter_blanks)
        chapters[name] = cells.read(path) if path else []
    parts = [
        Part(blank, written(blank, chapters[blank.chapter]), chapters[blank.chapter])
        for blank in fit(right)
    ]
    run(folder / ENGINE, parts, [], [prompt], How())


def engine_blanks(appendix: str) -> list[Blank]:
    """All blanks, with their modules in a copy that the page ``appendix`` asks."""
    return [placed(blank, appendix) for blank in course_blanks()]


def ask_here(
    names: dict[str, Any],
    prompts: Sequence[str],
    model: str | None = None,
    form: Any = None,
) -> None:
    """Let an engine with the functions of a notebook answer all ``prompts``.

    ``names`` are the notebook's global names. Its blanks are those whose checks have
    run; a blank that has been refused has ours in its place by now. Raises ValueError
    for a ``form`` of another page than appendix B, or with rules.
    """
    chapter = [Cell(source) for source in names["In"]]
    checked = {cell.checks for cell in chapter}
    pages = {blank.chapter for blank in course_blanks() if blank.name in checked}
    if form is not None and not pages:  # no check has run: it is the one that has forms
        pages = {MASKS}
    appendix = next(iter(pages & NEEDED.keys()), "")
    if form is not None and appendix != MASKS:
        raise ValueError("form is for the notebook of appendix B, whose masks hold it")
    how = How(appendix, model, "" if form is None else form_of(form))
    blanks = [blank for blank in engine_blanks(appendix) if blank.name in checked]
    sources = {blank.name: source_of(names.get(blank.root), blank) for blank in blanks}
    yours = fit([blank for blank in blanks if sources[blank.name]])
    ours = [b.name for b in blanks if b.module and not sources[b.name]]
    if not yours and not course.OURS.exists():
        print("This is the reading edition, so that the engine is ours.")
    parts = [Part(blank, sources[blank.name], chapter) for blank in yours]
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), parts, ours, prompts, how)


def source_of(thing: Any, blank: Blank) -> str:
    """The cell that made ``thing``, a version of ``blank``; "" if that is ours."""
    _, _, member = blank.name.partition(".")
    if member and thing is not None:
        thing = inspect.getattr_static(thing, member, None)
    code = getattr(course.unwrapped(thing), "__code__", None)
    if code is None or code.co_filename.startswith(("our ", course.PACKAGE)):
        return ""
    source = "".join(linecache.getlines(code.co_filename))
    return "" if "solution" in Cell(source).directives() else source


def fit(right: list[Blank]) -> list[Blank]:
    """Those of ``right`` that an engine uses here; tells which ones it does not."""
    kernels = [b for b in right if b.module and b.is_kernel and not has_gpu()]
    lessons = [b for b in right if not b.module and b.chapter not in NEEDED]
    others = [b for b in right if not b.module and b.chapter in NEEDED]
    tell("yours, for a lesson that no engine needs", map(str, lessons))
    tell("yours, which the end of their own page runs", map(str, others))
    tell("yours, checked in the interpreter; without a GPU not used", map(str, kernels))
    return [blank for blank in right if blank not in [*lessons, *others, *kernels]]


def tell(what: str, names: Iterable[str]) -> None:
    if text := ", ".join(names):
        print(textwrap.fill(f"{what}: {text}", course.WIDTH))


# In the process that imports the copy


def code_of(blank: Blank) -> CodeType | None:
    thing: Any = import_module(blank.module)
    for part in blank.name.split("."):
        thing = getattr(thing, part)
    return getattr(course.unwrapped(thing), "__code__", None)


def recheck(names: list[str], how: How) -> dict[str, str]:
    """What the checks say of ``names`` in the package that this process imports."""
    blanks = {blank.name: blank for blank in engine_blanks(how.appendix)}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            thing = getattr(import_module(blanks[name].module), blanks[name].root)
            course.judge(name, thing)
        except Exception as error:
            reasons[name] = str(error)
    return reasons


def answer(
    prompts: Sequence[str], how: How, names: list[str]
) -> tuple[list[str], dict[str, int]]:
    """The engine's answers, and how often it called each of ``names``."""
    from simplellm import LLM, EngineConfig

    blanks = [blank for blank in engine_blanks(how.appendix) if blank.name in names]
    codes = {code_of(blank): blank.name for blank in blanks}
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in codes:
            step = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 2]
            if step[:1] != bytes([RESUME]) or step[1:] == b"\0":  # no generator goes on
                calls[codes[frame.f_code]] += 1

    kernels = any(blank.is_kernel for blank in blanks)
    # NumPy's and Triton's operations are other functions than the chapters' plain ones.
    config = EngineConfig(operations="auto" if kernels else "plain")
    modules = {blank.module for blank in blanks}
    if "simplellm.engine.drafts" in modules:
        config = config.changed({"speculative": "suffix"})
    options = HIGH if how.model is None else SHORT
    device = None
    if modules & SHARDED and not kernels:
        config, device = config.changed({"tensor_parallel_size": 2}), "cpu"
        options = options | {"top_p": 0.95} if how.model is None else options
    start = partial(LLM, config=config, device=device)
    threading.setprofile(count)
    sys.setprofile(count)
    said = ANSWER.get(how.appendix, answer_chats)(how, prompts, start, options)
    sys.setprofile(None)
    threading.setprofile(None)
    return said, calls


def answer_chats(
    how: How, prompts: Sequence[str], start: Any, options: dict[str, Any]
) -> list[str]:
    """The answers to chats of one prompt each."""
    with start(how.model) as llm:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        found = llm.chat(chats, **options)
    return [one.choices[0].content or "" for one in found]


def main() -> None:
    prompts, given, yours, ours = map(json.loads, sys.argv[1:])
    how = How(*given)
    said: dict[str, Any] = {"out": recheck(yours, how)}
    if not said["out"]:
        said["answers"], said["calls"] = answer(prompts, how, yours + ours)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
