"""Schemas that lead to themselves: whether a text that fits them can end at all."""

import json
import time
from itertools import accumulate, repeat
from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

from hypothesis import event, given, settings
from hypothesis import strategies as st
from json_schemas import matcher_of, takes
from jsonschema import Draft202012Validator

from simplellm.structured.endings import MAX_DEMANDS, Endings

SELF = {"$ref": "#"}
A = {"$ref": "#/$defs/a"}
MUST = {"type": "object", "required": ["x"]}
LEADS = {"properties": {"x": SELF}}
NEVER: dict[str, tuple[dict[str, Any], str]] = {
    "both in allOf": (
        {**A, "$defs": {"a": {"allOf": [MUST, {"properties": {"x": A}}]}}},
        ".$defs.a",
    ),
    "one in allOf": ({**MUST, "allOf": [LEADS]}, ""),
    "the other in allOf": ({**LEADS, "allOf": [MUST]}, ""),
    "the type in allOf": (
        {**LEADS, "allOf": [{"type": "object"}, {"required": ["x"]}]},
        "",
    ),
    "allOf in allOf": ({"allOf": [{"allOf": [MUST]}, {"allOf": [LEADS]}]}, ""),
    "beside a $ref": ({**A, **LEADS, "$defs": {"a": MUST}}, ""),
    "behind two $refs": ({"allOf": [A, LEADS], "$defs": {"a": {"allOf": [MUST]}}}, ""),
    "beside anyOf": ({**MUST, "anyOf": [LEADS, {**LEADS, "title": "b"}]}, ""),
    "in oneOf": ({**LEADS, "oneOf": [MUST]}, ""),
    "a property that is named nowhere": ({**MUST, "additionalProperties": SELF}, ""),
    "the only type of a list": ({**LEADS, "required": ["x"], "type": ["object"]}, ""),
    "the one type of two lists": (
        {
            **{**LEADS, "required": ["x"], "type": ["object", "array"]},
            "allOf": [{"type": ["string", "object"]}],
        },
        "",
    ),
    "an array": ({"allOf": [{"type": "array", "minItems": 1}, {"items": SELF}]}, ""),
    "an array's second item": (
        {
            **{"type": "array", "items": SELF},
            "allOf": [{"prefixItems": [{}]}, {"minItems": 2}],
        },
        "",
    ),
    "inside of what it asks for": (
        {
            "allOf": [
                {**MUST, "properties": {"x": MUST}},
                {"properties": {"x": {"properties": {"x": SELF}}}},
            ]
        },
        "",
    ),
    "a part": ({**MUST, "properties": {"x": A}, "$defs": {"a": MUST | LEADS}}, ""),
    "what it needs": (
        {
            **{**MUST, "properties": {"x": A}},
            "$defs": {"a": {**MUST, "allOf": [{"properties": {"x": A}}]}},
        },
        ".$defs.a",
    ),
}


@pytest.mark.parametrize("case", NEVER)
def test_what_cannot_end_is_refused(case: str) -> None:
    schema, place = NEVER[case]
    with pytest.raises(ValueError, match=r"a way out of its \$refs") as error:
        matcher_of(json.loads(json.dumps(schema)))
    assert str(error.value).startswith(f"schema{place}: nothing that fits")


ENDING: list[tuple[dict[str, Any], str]] = [
    ({"allOf": [{"required": ["x"]}, LEADS]}, "1"),
    ({"allOf": [{"type": "object"}, LEADS]}, '{"x":{}}'),
    ({**MUST, "anyOf": [LEADS, {}]}, '{"x":1}'),
    ({**MUST, "allOf": [{"properties": {"y": SELF}}]}, '{"x":1}'),
    ({**MUST, "patternProperties": {"x": {}}, "additionalProperties": SELF}, '{"x":1}'),
    ({"allOf": [{"type": "array"}, {"items": SELF}]}, "[[]]"),
    (
        {
            "prefixItems": [{}],
            "items": SELF,
            "allOf": [{"type": "array", "minItems": 1}],
        },
        "[1]",
    ),
]


@pytest.mark.parametrize(("schema", "text"), ENDING, ids=str)
def test_what_can_end_does(schema: Any, text: str) -> None:
    assert takes(matcher_of(json.loads(json.dumps(schema))), text)


# Values {"x": {"x": ...}}, for schemas that speak of no other property

SHALLOW: list[Any] = [None, {}]
VALUES = [*accumulate(repeat(SHALLOW, 8), lambda last, _: [{"x": v} for v in last])]


@st.composite
def parts(draw: st.DrawFn, choices: bool, depth: int = 2) -> dict[str, Any]:
    """A schema that says little itself, but may lead to others."""
    inside = parts(choices, depth - 1)
    found: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "type": st.just("object"),
                "required": st.just(["x"]),
                "$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b"]),
            },
        )
    )
    if depth:
        more: dict[str, Any] = {
            "properties": st.fixed_dictionaries({"x": inside}),
            "allOf": st.lists(inside, min_size=1, max_size=2),
            "additionalProperties": inside,
        }
        if choices:
            more["anyOf"] = st.lists(inside, min_size=1, max_size=2)
        found |= draw(st.fixed_dictionaries({}, optional=more))
    return found


@pytest.mark.parametrize("choices", [False, True], ids=["all", "any"])
def test_of_random_schemas_those_that_nothing_fits_are_refused(choices: bool) -> None:
    ends: set[str] = set()

    @settings(deadline=None, derandomize=True, database=None, max_examples=150)
    @given(*[parts(choices)] * 3)
    def one(root: Any, a: Any, b: Any) -> None:
        schema = root | {"$defs": {"a": a, "b": b}}
        try:
            matcher = matcher_of(json.loads(json.dumps(schema)))
            end = "taken"
        except ValueError as error:
            end = "never ends" if "a way out" in str(error) else "refused"
        event(end)
        ends.add(end)
        if end == "refused":
            return
        fits = Draft202012Validator(schema).is_valid
        fitting = [value for some in VALUES for value in some if fits(value)]
        if end == "never ends" or not choices:
            assert bool(fitting) == (end == "taken"), schema
        for value in [one for some in VALUES[:4] for one in some]:
            if end == "taken":
                taken = takes(matcher, json.dumps(value, separators=(",", ":")))
                assert taken == (value in fitting), (schema, value)

    one()
    assert ends >= {"taken", "never ends"}


WIDE = [{"type": "object"} for _ in range(3600)]
NAMES = [f"{n:x}" for n in range(10_000)]


@pytest.mark.parametrize(
    "schema",
    [
        {"required": NAMES, "allOf": WIDE},
        {"$defs": {"a": {"allOf": WIDE}}, "anyOf": [{**A, "title": ""}] * 1000},
        {"required": NAMES, "type": "object", "allOf": [{"items": {}}] * 2000},
        {"anyOf": [{"type": "object", "anyOf": WIDE[:60]} for _ in range(60)]},
    ],
    ids=["names", "references", "items", "choices"],
)
def test_what_is_wide_takes_no_long_time(schema: Any) -> None:
    every = [schema, *schema.get("$defs", {}).values()]
    for one in every:
        for key in ("allOf", "anyOf"):
            every += one.get(key, ())
    begin = time.process_time()
    endings = Endings(every, {"#": schema, "#/$defs/a": every[1]})
    assert all(map(endings.has, every))
    assert time.process_time() - begin < 2.0
    assert endings.left > -MAX_DEMANDS
