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
from json_schemas import matcher_of, takes
from models import CONFIG, TOKENIZER
from random_schemas import TooMuchAtOnce, Walker, documents, errors, large_tokenizer

MOST = 150  # tokens of a walk; one that gets there is counted, not judged
WALKER = Walker(TOKENIZER, CONFIG.vocab_size)
RELAXED = settings(
    suppress_health_check=[*HealthCheck], derandomize=True, database=None
)


def judged(schema: Any, seed: int) -> str:
    """What became of a walk; raises AssertionError where its text doesn't fit."""
    try:
        matcher = matcher_of(schema)
    except ValueError:
        return "refused"
    try:
        text = WALKER.walk(matcher, random.Random(seed), MOST)
    except TooMuchAtOnce:
        return "too much at once"
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


def test_what_does_not_fit_is_noticed() -> None:
    text = WALKER.walk(matcher_of({"type": "integer"}), random.Random(0), MOST)
    assert text is not None
    assert errors({"type": "integer"}, text) == []
    assert errors({"type": "string"}, text) == [f"{text} is not of type 'string'"]
    exclusive = {"exclusiveMaximum": 1}
    assert errors(exclusive, "0.99999999999999999999") == []  # 1.0 for a double
    assert errors({"format": "date"}, '"2023-02-29"') != []


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_walks_over_many_tokens_end_in_what_fits() -> None:
    """As many as gpt-oss has, many of which cross what the grammar tells apart."""
    size = 201_088
    tokenizer = large_tokenizer(size)
    walker = Walker(tokenizer, size)
    ends: Counter[bool] = Counter()

    @settings(RELAXED, max_examples=100)
    @given(documents(), st.integers(0, 2**32))
    def one(schema: Any, seed: int) -> None:
        try:
            matcher = matcher_of(schema, tokenizer, size)
        except ValueError:
            return
        text = walker.walk(matcher, random.Random(seed), MOST)
        ends[text is not None] += 1
        assert text is None or errors(schema, text) == [], (json.dumps(schema), text)

    one()
    assert ends[True] > 30, ends


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_many_random_walks_end_in_what_fits() -> None:
    count = walked(750)
    assert count["fits"] > 0.3 * count.total(), count
    # Definitions that hold themselves twice, so that no text of theirs ever ends.
    assert count["too much at once"] < 0.003 * count.total(), count
