"""The embedded model is asked for JSON: its answers fit, and a record counts the right.

tools/embedded/evaluate_schemas.py writes it anew.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

from evaluate_schemas import SKILLS, WAYS, chosen, evaluate, verdict

from simplellm import LLM

ROOT = Path(__file__).parents[1]


def test_answers_under_a_schema_are_valid() -> None:
    """Right or not, of which the record tells."""
    some = chosen(8)
    assert {problem.skill for problem, *_ in some} == {*SKILLS}
    with LLM(device="cpu") as llm:
        for how in WAYS[1:]:
            found = evaluate(llm, some, how, "medium")
            assert found["valid"] == found["of"] == 8


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
