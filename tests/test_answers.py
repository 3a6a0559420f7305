"""The embedded model is asked for JSON: its answers fit, and a record counts the right.

tools/embedded/evaluate_schemas.py writes it anew.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

from evaluate_schemas import SKILLS, WAYS, chosen, evaluate, verdict

from simplellm import LLM
from simplellm.apps.calculator import CALCULATOR

ROOT = Path(__file__).parents[1]


def test_answers_under_a_schema_are_valid() -> None:
    """Right or not, of which the record tells."""
    some = chosen(8)
    assert {problem.skill for problem, *_ in some} == {*SKILLS}
    with LLM(device="cpu") as llm:
        for how in WAYS[1:]:
            found = evaluate(llm, some, how, "medium")
            assert found["valid"] == found["of"] == 8


def test_calls_that_have_to_come_come() -> None:
    """Also from a model that would rather answer, and has its answer forbidden."""
    sums = ["What is 47 + 85?", "How much is 857 + 157?", "Hello! Who are you?"]
    products = [f"What is {n + 12} * {3 * n + 34}?" for n in range(30)]
    call: dict[str, Any] = {"tools": [CALCULATOR], "max_tokens": 600}
    chosen = {"type": "function", "function": {"name": "calculator"}}
    with LLM(device="cpu") as llm:
        for texts, temperature, choice in (
            (sums, 0, "required"),
            (sums, 0, chosen),
            (products, 0, "required"),
            (products, 0, chosen),
            (products, 1, "required"),
        ):
            chats = [[{"role": "user", "content": text}] for text in texts]
            options = {"temperature": temperature, "tool_choice": choice, "seed": 5}
            for found in llm.chat(chats, **call, **options):
                assert found.finish_reason == "tool_calls"
                assert [one.name for one in found.tool_calls] == ["calculator"]


def test_what_is_no_json_of_the_schema_is_noticed() -> None:
    asked = _, _, right = chosen(4)[0]

    def judged(text: str) -> tuple[bool, bool]:
        return verdict("response_format", asked, SimpleNamespace(content=text))

    assert judged(json.dumps(right)) == (True, True)
    assert judged(json.dumps(dict.fromkeys(right, 1998))) == (True, False)
    for text in ("132", "", '{"result": "132"}', json.dumps(right | {"b": 1})):
        assert judged(text) == (False, False)


def test_the_recorded_answers_under_schemas_are_all_valid() -> None:
    recorded = json.loads((ROOT / "figures/b-answers.json").read_text())
    for ways in recorded["efforts"].values():
        assert [*ways] == [*WAYS]
        for row in ways.values():
            assert row["valid"] == row["of"] == 200
            assert row["right"] == sum(row[skill] for skill in SKILLS)
