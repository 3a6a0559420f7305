"""Every check refuses the stub and each wrong answer, and accepts the kept version.

What only a lesson has, and no module, is accepted or not where the chapter runs as a
notebook: conftest.py repeats each check behind the kept version. Without a GPU, kernels
run in Triton's interpreter.
"""

import ast
import importlib
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import cells
import course
import pytest
import torch
from course import checks
from wrong import ANSWERS, Answer

from simplellm.model import kv_gather

ROOT = Path(__file__).parents[2]
CHECKS = sorted((ROOT / "chapters/course/checks").glob("*.py"))
PACKAGE = "simplellm"


def about_kernels(path: Path) -> bool:
    return "import triton" in path.read_text(encoding="utf-8")


for path in sorted((ROOT / "tests/course/wrong").glob("ch*.py")):
    if not about_kernels(path) or torch.cuda.is_available():
        importlib.import_module(f"wrong.{path.stem}")
    elif find_spec("triton"):
        from kernels_interpreter import interpreted

        with interpreted():  # Triton decides where it decorates
            importlib.import_module(f"wrong.{path.stem}")


class Asked(NamedTuple):
    """A blank or an exercise of a chapter whose check is in chapters/course/checks."""

    name: str
    blank: bool  # or an exercise
    stub: str
    module: str  # that the kept version is exported to, or ""

    def __str__(self) -> str:
        return self.name


def asked() -> list[Asked]:
    found = []
    for path in cells.chapter_files(ROOT / "chapters"):
        stubs: dict[str, tuple[bool, str]] = {}
        modules: dict[str, str] = {}
        checked: dict[str, None] = {}
        default = ""
        for cell in cells.read(path):
            directives = cell.directives()
            default = directives.get("default_exp", default)
            if name := directives.get("blank", directives.get("exercise", "")):
                stubs[name] = "blank" in directives, cell.body
            if (name := directives.get("solution", "")) and "export" in directives:
                modules[name] = f"{PACKAGE}.{directives['export'] or default}"
            if cell.raises and cell.checks:
                checked[cell.checks] = None
        for name in checked:
            found.append(
                Asked(name, *stubs.get(name, (False, "")), modules.get(name, ""))
            )
    return found


ASKED = asked()
EXPORTED = [thing for thing in ASKED if thing.module]


def prepare(name: str, request: pytest.FixtureRequest) -> None:
    """Let kernels run, if the check of ``name`` is about one."""
    home = checks.homes()[name.replace(".", "_")]
    if about_kernels(ROOT / f"chapters/course/checks/{home}.py"):
        request.getfixturevalue("kernel_device")


def define(source: str, names: dict[str, Any], file: Path) -> None:
    """Run ``source`` as a file, in which Triton finds its kernels' code."""
    file.write_text(source, encoding="utf-8")
    exec(compile(source, str(file), "exec"), names)


@pytest.mark.parametrize("thing", ASKED, ids=str)
def test_each_has_a_stub_and_a_check(thing: Asked) -> None:
    assert thing.stub, f"no `#| blank {thing.name}` or `#| exercise {thing.name}`"
    assert thing.name.replace(".", "_") in checks.homes()


def test_names_are_unique_over_the_course() -> None:
    counts = Counter(thing.name for thing in ASKED)
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "chapters/course/checks").glob("*.py")),
    ids=lambda path: path.stem,
)
def test_every_assertion_teaches(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    silent = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) and node.msg is None
    ]
    assert silent == [], "an assertion without a message"


def test_every_check_is_asked_for() -> None:
    names = {thing.name.replace(".", "_") for thing in ASKED}
    assert set(checks.homes()) <= names


@pytest.mark.parametrize("thing", EXPORTED, ids=str)
def test_stubs_are_refused_and_kept_versions_pass(
    thing: Asked,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    prepare(thing.name, request)
    names = dict(vars(importlib.import_module(thing.module)))
    root = thing.name.partition(".")[0]
    course.check(thing.name, names[root])
    right, *rest = capsys.readouterr().out.splitlines()
    assert right == f"{thing.name}: right"
    assert rest == ["Your own engine is written in the workbook: `make lab` opens it."]
    define(thing.stub, names, tmp_path / "stub.py")
    with pytest.raises(course.NotYours, match=f"^{thing.name}: not written yet$"):
        course.check(thing.name, names[root])


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_wrong_answers_are_refused_with_a_reason(
    answer: Answer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(answer.name, request)
    if answer.word == "still wait for each other":  # however long one lets them
        monkeypatch.setattr("course.checks.chE.WAIT", 2.0)
    with pytest.raises(course.Wrong, match=re.escape(answer.word)) as refused:
        course.check(answer.name, answer.thing)
    assert str(refused.value).startswith(f"{answer.name}: ")
    assert answer.word not in answer.name


def test_wrong_answers_are_enough() -> None:
    """Two of each blank, one of each exercise, none of anything else."""
    counts = Counter(answer.name for answer in ANSWERS)
    assert set(counts) <= {thing.name for thing in ASKED}
    for thing in ASKED:
        assert counts[thing.name] >= 1 + thing.blank, thing.name


def test_a_mask_that_hides_nothing_is_accepted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def plan_gathers(*arguments: Any, **options: Any) -> list[kv_gather.GatherPlan]:
        return [
            plan if plan.masked is not None else plan._replace(masked=plan.slots < 0)
            for plan in kv_gather.plan_gathers(*arguments, **options)
        ]

    course.check("plan_gathers", plan_gathers)
    assert capsys.readouterr().out.startswith("plan_gathers: right\n")
