"""Random texts under the masks of random schemas are JSON that jsonschema accepts."""

import json
import random
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from json_schemas import END, matcher_of, takes
from models import TOKENIZER
from random_schemas import Walker, documents, errors

MOST = 150  # tokens of a walk; one that gets there is counted, not judged
WALKER = Walker(TOKENIZER, END)
RELAXED = settings(
    deadline=None, suppress_health_check=[*HealthCheck], derandomize=True, database=None
)


def judged(schema: Any, seed: int) -> str:
    """What became of a walk; raises AssertionError where its text doesn't fit."""
    try:
        matcher = matcher_of(schema)
    except ValueError:
        return "refused"
    text = WALKER.walk(matcher, random.Random(seed), MOST)
    if text is None:
        return "cut off"
    assert takes(matcher, text), "other tokens of the same text do not fit"
    assert errors(schema, text) == [], (json.dumps(schema), text)
    return "fits"


def walked(examples: int) -> Counter[str]:
    """How many walks ended in which way."""
    count: Counter[str] = Counter()

    @settings(RELAXED, max_examples=examples)
    @given(documents(), st.integers(0, 2**32))
    def one(schema: Any, seed: int) -> None:
        end = judged(schema, seed)
        event(end)
        count[end] += 1

    one()
    return count


def test_random_walks_end_in_what_fits() -> None:
    count = walked(120)
    assert count["fits"] > 0.3 * count.total(), count


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_many_random_walks_end_in_what_fits() -> None:
    count = walked(10_000)
    assert count["fits"] > 0.3 * count.total(), count
