"""Ten cases: the symptom is there and nowhere else, and only the culprit solves it."""

import re
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cells
import pytest
from course.cases import (
    SickEngine,
    case,
    functions,
    healthy,
    infect,
    mutation,
    solve,
    watch,
)
from course.integrity import check_integrity
from course.widgets.live import LiveEngine
from test_mutations import CASES as SEEDED

from simplellm.engine.page_manager import PageManager

PAGE = Path(__file__).parents[2] / "chapters/cases.md"
TEXT = PAGE.read_text(encoding="utf-8")
NUMBERS = range(1, 11)
every_case = pytest.mark.parametrize("number", NUMBERS)


def culprit(number: int) -> str:
    function = mutation(number).function
    return f"{function.__module__}.{function.__qualname__}"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page defines; none of its engines is opened."""
    names: dict[str, Any] = {}
    for cell in cells.cells(TEXT):
        source = re.sub(r"^(look|solve)\(.*\)$", "", cell.source, flags=re.MULTILINE)
        exec(source, names)
    return names


@every_case
def test_the_symptom_is_in_this_engine_alone(number: int, page: dict[str, Any]) -> None:
    symptom: Callable[[Any], tuple[Any, Any]] = page[f"symptom_{number}"]
    should_be, is_ = symptom(partial(case, number))
    assert is_ != should_be
    should_be, is_ = symptom(healthy)  # after it, and in the same process
    assert is_ == should_be


@every_case
def test_the_culprit_solves_it(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    name, function = culprit(number), mutation(number).function
    file, lines = functions()[name]
    assert solve(number, name)
    assert solve(number, function)
    assert solve(number, f"{file}:{lines[-1]}")
    told = capsys.readouterr().out
    assert f"Case {number} is solved" in told
    assert mutation(number).new in told


@every_case
def test_nothing_else_does(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    others = {culprit(other) for other in NUMBERS} - {culprit(number)}
    others |= {"PageManager.allocate", "route", "no_such_function", "", "nowhere.py:1"}
    for other in others:
        assert not solve(number, other)
    told = capsys.readouterr().out
    assert "solved" not in told
    assert mutation(number).new not in told
    assert culprit(number) not in told


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("", "Case 3 is open."),
        ("hash_pages", "the package has no function hash_pages."),
        ("page_manager.py:1", "no function of the package has the line page_mana"),
        ("snapshot", "which one?"),
        ("PageManager.commit", "does what it should. But that's the file."),
        ("Scheduler.update_from_output", "does what it should.\n"),
        (PageManager.allocate, "PageManager.allocate does what it should."),
    ],
)
def test_a_wrong_answer_gets_a_reason(
    answer: Any, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not solve(3, answer)
    assert told in capsys.readouterr().out


def test_there_are_ten() -> None:
    assert len({culprit(number) for number in NUMBERS}) == len(NUMBERS)
    for number in (0, 11):
        with pytest.raises(LookupError, match="expected 1 to 10"):
            mutation(number)


def test_some_are_those_that_the_tests_seed() -> None:
    seeded = {seed for _, seed, _ in SEEDED}
    assert sum(mutation(number) in seeded for number in NUMBERS) == 4


@every_case
def test_each_has_hints_a_story_and_a_source(number: int) -> None:
    (part,) = re.findall(rf"^## Case {number}: .*?(?=^## )", TEXT, re.M | re.S)
    report, *folds = re.split(r"^<details><summary>", part, flags=re.MULTILINE)
    *hints, solution = folds
    assert len(hints) >= 2
    assert all(re.match(r"Hint \d</summary>", hint) for hint in hints)
    assert solution.startswith("Solution</summary>")
    assert re.search(rf"`[\w.]*\b{mutation(number).function.__name__}`", solution)
    assert re.search(r"^In the wild\b.*\]\(https://", solution, re.M | re.S)
    name = culprit(number).rpartition(".")[2]
    assert not re.search(rf"\b{name}\b", report)
    assert mutation(number).new not in report.replace("`", "")


def test_nobody_reads_a_mistake_by_accident() -> None:
    folder = PAGE.parent / "course"
    for path in folder.glob("cases.*"):
        text = path.read_text(encoding="utf-8")
        for number in NUMBERS:
            assert mutation(number).old not in text
            assert f'"{mutation(number).function.__qualname__}"' not in text


def test_other_engines_stay_as_they_are() -> None:
    with healthy(num_pages=50) as llm, case(10, num_pages=50) as sick:
        ours, theirs = (type(x.engine_core.scheduler.manager) for x in (llm, sick))
        assert ours is PageManager
        assert theirs is not PageManager
        options = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}
        for one in (llm, sick):
            one.generate("Once", **options).result()
        check_integrity(llm.engine_core.scheduler.manager)
        with pytest.raises(AssertionError, match="reference counts"):
            check_integrity(sick.engine_core.scheduler.manager)


def test_parts_of_other_modules_are_left_alone() -> None:
    with healthy() as llm:
        before = vars(llm.engine_core.runner.model.ops).copy()
        infect(llm.engine, mutation(3))
        assert vars(llm.engine_core.runner.model.ops) == before


def test_the_live_view_shows_it() -> None:
    def texts(engine: LiveEngine) -> dict[int, str]:
        told = [engine.start(3, 64)["first"], *iter(engine.step, None)]
        found: dict[int, str] = defaultdict(str)
        for event in (event for step in told for event in step["events"]):
            found[event["request_id"]] += event["text"]
        return found

    right, wrong = texts(LiveEngine(healthy())), texts(SickEngine(2))
    assert "132" in right[0]
    assert right != wrong
    assert "case 2" in repr(watch(2))
