"""JSON schemas as grammars: nothing that doesn't fit passes, whatever the spelling.

What we refuse though it fits is listed in figures/b-schemas.json; `python
tests/json_schemas.py` writes it anew.
"""

import json
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

from json_schemas import (
    END,
    RECORD,
    disagreements,
    judge,
    matcher_of,
    spellings,
    summary,
    takes,
    verdicts,
)
from models import TOKENIZER
from random_schemas import errors

from simplellm.structured.rules import schema_rules

BIG = 2**53 + 1
# What llguidance alone would take, and the schema that it would take it for.
TRAPS: dict[str, tuple[Any, str]] = {
    "an escaped name": (
        {"properties": {"foo": {"type": "integer"}}},
        '{"\\u0066oo":"x"}',
    ),
    "an escaped name of a pattern": (
        {"patternProperties": {"^f": {"type": "integer"}}},
        '{"\\u0066":"x"}',
    ),
    "a name twice": ({"type": "object", "minProperties": 2}, '{"a":1,"a":1}'),
    "a name twice beside a required one": (
        {"type": "object", "minProperties": 3, "required": ["q"]},
        '{"q":1,"a":1,"a":1}',
    ),
    "a rounded const": ({"const": BIG}, str(BIG - 1)),
    "a rounded value of an enum": (
        {"enum": ["a", [{"b": BIG}]]},
        f'[{{"b":{BIG - 1}}}]',
    ),
    "a rounded minimum": ({"type": "integer", "minimum": BIG}, str(BIG - 1)),
    "a rounded maximum": ({"type": "integer", "maximum": -BIG}, str(-BIG + 1)),
    "an overflown multiple": (
        {"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]},
        "262147",
    ),
    "items after the last": (
        {"items": [{}], "anyOf": [{}], "additionalItems": False},
        "[1,2]",
    ),
    "an option of llguidance's": ({"not": {}, "x-guidance": {"lenient": True}}, "1"),
    "another draft inside": (
        {
            "properties": {
                "a": {
                    "$schema": "http://json-schema.org/draft-04/schema#",
                    "dependentRequired": {"b": ["c"]},
                }
            }
        },
        '{"a":{"b":1}}',
    ),
    "a circle": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, ""),
    "a circle inside": (
        {
            "properties": {"a": {"$ref": "#/$defs/b"}},
            "$defs": {
                "b": {"allOf": [{"$ref": "#/$defs/c"}]},
                "c": {"$ref": "#/$defs/b"},
            },
        },
        "",
    ),
    "another address inside": (
        {
            "$defs": {
                "a": {"$id": "b", "$ref": "#/$defs/c", "$defs": {"c": {"const": 1}}},
                "c": {"const": 2},
            },
            "$ref": "#/$defs/a",
        },
        "2",
    ),
    "a value that is a schema too": (
        {"const": {"format": "date"}, "anyOf": [{"$ref": "#/const"}, {}]},
        '{"allOf":[]}',
    ),
    "a control character left out": ({"const": "a\x01b"}, '"ab"'),
    "a control character left out of an enum": ({"enum": [["a\x7fb"]]}, '["ab"]'),
    "a control character left out of a pattern": (
        {"type": "string", "pattern": "^a\\x01b$"},
        '"ab"',
    ),
    "a 29th of February": ({"format": "date"}, '"2021-02-29"'),
    "a year 0": ({"format": "date-time"}, '"0000-01-01T00:00:00Z"'),
    "a 61st second": ({"format": "time"}, '"10:10:60Z"'),
    "a long host": ({"format": "hostname"}, f'"{"a." * 127}a"'),
    "a host that is no name": ({"format": "hostname"}, '"xn--x"'),
    "a set without a set": ({"type": "string", "pattern": "^[a-z--b]$"}, '"c"'),
    "a set and a set": ({"type": "string", "pattern": "^[a-c&&b-d]$"}, '"b"'),
    "a pattern with a flag": ({"type": "string", "pattern": "(?i)^a$"}, '"A"'),
    "white space that is none": ({"type": "string", "pattern": "^\\S$"}, '"\ufeff"'),
    "the dot": ({"type": "string", "pattern": "^.$"}, '"\\r"'),
}


def test_no_instance_that_does_not_fit_passes() -> None:
    wrong = {c.description: v.wrong for c, v in verdicts() if v.wrong}
    assert not wrong


def test_what_a_schema_is_refused_for_has_a_path_or_is_llguidances_reason() -> None:
    reasons = [verdict.reason for _, verdict in verdicts() if verdict.reason]
    ours = [reason for reason in reasons if reason.startswith("schema")]
    assert len(ours) > 0.8 * len(reasons)
    keywords = [reason for reason in ours if "not supported" in reason]
    assert all(reason.startswith("schema.") for reason in keywords)


def test_the_record_of_the_suite_says_what_is_so() -> None:
    record = json.loads(RECORD.read_text("utf-8"))
    known = {name: record[name] for name in record if name != "xgrammar"}
    assert known == json.loads(json.dumps(summary()))


@pytest.mark.skipif(not find_spec("xgrammar"), reason="xgrammar is not installed")
def test_the_record_says_where_xgrammar_disagrees() -> None:
    record = json.loads(RECORD.read_text("utf-8"))
    assert record["xgrammar"] == json.loads(json.dumps(disagreements()))


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_refused(name: str) -> None:
    schema, text = TRAPS[name]
    try:
        matcher = matcher_of(schema)
    except ValueError as error:
        assert "schema" in str(error)
    else:
        assert not takes(matcher, text)


# Schemas with keywords that say nothing where they stand, and the same without.
STRINGS = {"type": "array", "items": {"type": "string"}}
NOTHING = [
    (STRINGS | {"uniqueItems": False}, STRINGS),
    (STRINGS | {"additionalItems": False}, STRINGS),
    ({"additionalItems": {"not": {}}}, {}),
    ({"propertyNames": {"type": "string"}, "type": "object"}, {"type": "object"}),
    ({"propertyNames": {"type": "string", "description": "a name"}}, {}),
    ({"propertyNames": {"$schema": "x", "title": "Any"}}, {}),
    ({"unevaluatedProperties": True, "type": "object"}, {"type": "object"}),
    ({"dependencies": {}, "dependentRequired": {}}, {}),
    ({"then": {"const": 1}, "minContains": 2}, {}),
    ({"if": {"const": 1}}, {}),
    *(
        ({"properties": {"a": STRINGS | {key: "x:y"}}}, {"properties": {"a": STRINGS}})
        for key in ("$id", "id", "$schema")
    ),
    (
        {"anyOf": [{"$id": "a", "properties": {"id": {"const": 1}}}]},
        {"anyOf": [{"properties": {"id": {"const": 1}}}]},
    ),
    (
        {"anyOf": [{"$schema": "x:y", "$ref": "#/$defs/b"}], "$defs": {"b": {}}},
        {"anyOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": {}}},
    ),
]


@pytest.mark.parametrize(("schema", "same"), NOTHING, ids=str)
def test_what_says_nothing_is_dropped(schema: Any, same: Any) -> None:
    assert schema_rules(schema, "schema") == schema_rules(same, "schema")


@pytest.mark.parametrize(
    "schema",
    [
        STRINGS | {"uniqueItems": True},
        {"items": [{}], "additionalItems": False},
        {"propertyNames": {"pattern": "^a"}},
        {"propertyNames": {"type": "integer"}},
        {"unevaluatedProperties": False},
        {"dependentRequired": {"a": ["b"]}},
        {"if": {"const": 1}, "then": {"const": 2}},
        {"contains": {"const": 1}, "minContains": 2},
        {"not": {}},
        {"properties": {"a": {"$id": "x:y", "items": {"$ref": "#/properties/a"}}}},
    ],
    ids=str,
)
def test_what_says_something_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match="schema"):
        schema_rules(schema, "schema")


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"format": "date"}, ['"2024-02-29"', '"2000-02-29"', '"0001-12-31"']),
        ({"format": "time"}, ['"23:59:59.123+23:59"', '"00:00:00z"']),
        ({"format": "date-time"}, ['"2021-12-31T10:10:10Z"']),
        ({"format": "hostname"}, ['"a-b.c"', '"a"', '"abc--d"', f'"{"a" * 63}"']),
        (
            {"type": "string", "format": "date", "pattern": "^2", "maxLength": 10},
            ['"2024-02-29"'],
        ),
        ({"minProperties": 1}, ['{"a":1}']),
        ({"minProperties": 2, "required": ["q"]}, ['{"q":1,"a":1}']),
        ({"type": "string", "pattern": "^[^\\s]\\S[\\S ]$"}, ['"ab "', '"é€x"']),
        ({"type": "string", "pattern": "^\\[\\]\\\\.$"}, ['"[]\\\\x"']),
        ({"const": 'a\n\t\b\f\r"\\/'}, ['"a\\n\\t\\b\\f\\r\\"\\\\/"']),
        ({"enum": [2**53, -(2**53)]}, [str(2**53), str(-(2**53))]),
        (
            {"type": "integer"},
            ["0", "-7", "1234567890123456789", "-8999999999999999999"],
        ),
        ({"type": "integer", "minimum": 2**53}, [str(2**53), "1234567890123456789"]),
        ({"type": "integer", "multipleOf": 3, "maximum": -1}, ["-3", "-999"]),
        ({"type": ["integer", "string"]}, ["5", '"5"']),
        ({"type": "integer", "const": 2**53}, [str(2**53)]),
        ({"type": "number"}, ["6.02214076e23", "-0.50", "1" * 50]),
        ({"type": "number", "minimum": 0}, ["0.0", "1.50", "8" * 18, "0.0123456789"]),
        ({"type": "number", "minimum": 0.03, "maximum": 0.03}, ["0.03"]),
        ({"type": "number", "minimum": 0, "enum": [0.03, 0.06]}, ["0.03", "0.06"]),
        ({"minimum": 1, "allOf": [{"multipleOf": 7}]}, ["7", "70", '"a"']),
    ],
    ids=str,
)
def test_the_cure_of_a_trap_leaves_what_fits(schema: Any, texts: list[str]) -> None:
    matcher = matcher_of(schema)
    assert [text for text in texts if not takes(matcher, text)] == []


@pytest.mark.parametrize(
    ("schema", "most"),
    [
        ({"type": "integer"}, 19),
        ({"type": "integer", "exclusiveMinimum": 12}, 19),
        ({"type": ["null", "integer"], "maximum": 12}, 20),
        ({"type": "integer", "maximum": 12, "minimum": 0}, 2),
        ({"type": "integer", "multipleOf": 7}, 20),
        ({"type": "number", "minimum": 0}, 30),
        ({"type": "number", "exclusiveMaximum": 1, "minimum": -1}, 13),
        ({"maximum": 2.5}, 31),
        ({"type": "number", "multipleOf": 0.01}, 23),
        ({"allOf": [{"type": "number", "minimum": 0}, {"maximum": 9}]}, 12),
    ],
    ids=str,
)
@pytest.mark.parametrize("digit", ["1", "9", "0"])
def test_a_number_ends_for_a_model_that_likes_digits(
    schema: Any, most: int, digit: str
) -> None:
    """It takes its favorite one wherever it may, else another, else another sign."""
    matcher, text = matcher_of(schema), ""
    likes = [TOKENIZER.encode(sign)[0] for sign in f"{digit}0123456789-."]
    while not matcher.is_stopped():
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")
        token = next((id for id in likes if allowed[id]), END)
        text += TOKENIZER.decode([token]) if token != END else ""
        assert allowed[token] and matcher.consume_token(token)
        assert len(text) <= most, text
    assert errors(schema, text) == []


def test_spellings_say_the_same() -> None:
    value = {"a": [1, -2.5, 0, 1e9], "é": {"😀": None, "b": True}, "": "\x00"}
    texts = spellings(value)
    assert len(texts) > 60
    assert all(json.loads(text) == value for text in texts)


def test_a_grammar_that_lets_too_much_through_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = next(c for c, _ in verdicts() if c.file.endswith("/properties.json"))
    monkeypatch.setattr("json_schemas.matcher_of", lambda schema: matcher_of({}))
    assert len(judge(case).wrong) > 0
