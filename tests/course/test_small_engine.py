"""The page "A serving engine in 150 lines": whatever comes, answers stay the same."""

import ast
from pathlib import Path
from typing import Any

import cells
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

PAGE = Path(__file__).parents[2] / "chapters/small-engine.md"
CODE = [cell.body for cell in cells.cells(PAGE.read_text(encoding="utf-8"))]
ENGINE = CODE[1:6]  # request, pages, scheduler, forward pass, engine
# Tokens of prompts, most tokens of answers. Some begin alike.
REQUEST = st.tuples(st.integers(0, 2), st.integers(1, 70), st.integers(1, 6))


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page defines, before it runs anything."""
    names: dict[str, Any] = {}
    for source in CODE[:6]:
        exec(source, names)
    names["alone"] = {}
    return names


def lines_of_code(source: str) -> int:
    """Lines that are neither empty, nor comments, nor docstrings."""
    told: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            told |= {*range(node.body[0].lineno, 1 + (node.body[0].end_lineno or 0))}
    return sum(
        number not in told and bool(line.strip()) and not line.strip().startswith("#")
        for number, line in enumerate(source.splitlines(), 1)
    )


def test_it_has_150_lines_of_code() -> None:
    assert 120 < sum(map(lines_of_code, ENGINE)) <= 150


def answer(page: dict[str, Any], prompt: tuple[int, ...], count: int) -> list[int]:
    """What the model says, computed anew for each token."""
    known = page["alone"].setdefault(prompt, [])
    while len(known) < count and known[-1:] != [page["DONE"]]:
        logits = page["model"].logits([*prompt, *known])
        known.append(int(logits[-1].argmax()))
    return known[:count]


@pytest.mark.exhaustive
@settings(max_examples=12)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=6),
    spare=st.integers(0, 6),
    budget=st.integers(1, 80),
    most=st.integers(1, 4),
    gap=st.integers(0, 3),
)
def test_answers_are_those_of_a_model_alone(
    page: dict[str, Any],
    requests: list[tuple[int, int, int]],
    spare: int,
    budget: int,
    most: int,
    gap: int,
) -> None:
    """With any number of pages, budgets and arrivals; and no page is lost."""
    pages = -(-max(length + count for _, length, count in requests) // 16) + spare
    engine = page["Engine"](num_pages=pages, budget=budget, max_running=most)
    running = []
    for family, length, count in requests:
        prompt = tuple((7 * family + n * n) % 200 for n in range(length))
        running.append((prompt, count, engine.add(prompt, count)))
        for _ in range(gap):
            if engine.scheduler.waiting or engine.scheduler.running:
                assert sum(engine.step().values()) <= budget
    for _ in range(2000):
        if not (engine.scheduler.waiting or engine.scheduler.running):
            break
        assert 0 < sum(engine.step().values()) <= budget
    for prompt, count, request in running:
        assert request.tokens[len(prompt) :] == answer(page, prompt, count)
    manager = engine.manager
    assert not any(manager.users)
    assert sorted(manager.unused) == list(range(pages))
    assert {manager.page_of[name]: name for name in manager.page_of} == manager.hash_of
