"""What a text must be: the rules, the grammar of a turn, and what is refused.

Whole turns go through llguidance's matcher, which is the mask's source in the engine.
"""

import json
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import HELLO, SMALL, TOKENIZER

from simplellm import LLM, Message, SamplingParams, StructuredOutputs, Tool
from simplellm.api.chat_options import as_format, text_constraint, turn_constraint
from simplellm.api.input_processor import InputProcessor
from simplellm.base.grammar import GrammarError
from simplellm.structured.rules import output_rules, rules_text
from simplellm.structured.schemas import innermost_refused
from simplellm.text.harmony import parse, tool_calls

llguidance = pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

SIZE = TOKENIZER.vocab_size
ENDS = [TOKENIZER.special[name] for name in ("<|return|>", "<|endoftext|>", "<|call|>")]
START = TOKENIZER.encode("<|start|>assistant", special=True)
RESULT = {
    "type": "object",
    "properties": {"result": {"type": "integer"}},
    "required": ["result"],
    "additionalProperties": False,
}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
}
CITY |= {"required": ["city"], "additionalProperties": False}
ADD = Tool("add", "Add numbers.", RESULT, strict=True)
FIND = Tool("find", "Find a city.", CITY, strict=True)
FREE = Tool("note", "Write something down.", CITY)
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": RESULT}}


class Words:
    """The tokens of a tokenizer, for llguidance."""

    eos_token_id, bos_token_id = ENDS[0], None
    tokens = tuple(TOKENIZER.token_bytes(id) for id in range(SIZE))
    special_token_ids = tuple(id for id in range(SIZE) if TOKENIZER.is_special(id))

    def __call__(self, text: Any) -> list[int]:
        return TOKENIZER.encode(text if isinstance(text, str) else text.decode())


WORDS = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Words()), eos_token=ENDS)


def matcher(text: str) -> Any:
    found = llguidance.LLMatcher(WORDS, text, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def fits(start: Any, text: str) -> bool:
    """Whether ``text``, control tokens by name, is what a grammar says, to its end."""
    walk = start.deep_copy()
    ids = TOKENIZER.encode(text, special=True)
    return all(walk.consume_token(id) for id in ids) and walk.is_accepting()


def turn(
    response_format: Any = None,
    tools: Sequence[Tool] = (),
    choice: Any = None,
    outputs: StructuredOutputs | None = None,
) -> Any:
    """The matcher of a turn."""
    constraint = turn_constraint(as_format(response_format), tools, choice, outputs)
    assert constraint is not None
    return matcher(constraint.text)


def plain(**given: Any) -> Any:
    """The matcher of a text that is no chat."""
    return matcher(rules_text(output_rules(StructuredOutputs(**given))))


THOUGHT = "<|channel|>analysis<|message|>Well: {<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I'll add.<|end|><|start|>assistant"
JSON = "<|constrain|>json"


def final(text: str, kind: str = "") -> str:
    return f"<|channel|>final{kind}<|message|>{text}<|return|>"


def call(name: str, text: str, kind: str = f" {JSON}") -> list[str]:
    """Both spellings of a call."""
    return [
        f"<|channel|>commentary to=functions.{name}{kind}<|message|>{text}<|call|>",
        f" to=functions.{name}<|channel|>commentary{kind}<|message|>{text}<|call|>",
    ]


def test_a_turn_with_a_format() -> None:
    start = turn(FORMAT)
    good = final('{"result": 132}')
    for before in ("", THOUGHT, THOUGHT + PREAMBLE, PREAMBLE + THOUGHT * 2):
        assert fits(start, before + good)
    for kind in (JSON, f" {JSON}"):
        assert fits(start, THOUGHT + final('{"result":-1}', kind))
    for bad in (
        final('{"result": "132"}'),
        final("132"),
        final('{"result": 1, "more": 2}'),
        final('{"result": 1} '),
        final('{"result": 1}').replace("<|return|>", "<|end|>"),
        final('{"result": 1}').replace("<|return|>", "<|endoftext|>"),
        final('{"result": 1}').replace("final", "finally"),
        final('{"result": 1}', " code"),
        THOUGHT,
        THOUGHT.removesuffix("<|start|>assistant") + good,
        call("add", '{"result": 1}')[0],
        "",
    ):
        assert not fits(start, bad), bad


def test_a_turn_with_tools() -> None:
    tools = [ADD, FIND, FREE]
    fitting = [*call("add", '{"result":5}'), *call("find", '{"city": "Rome"}', "")]
    anything = call("note", '{"anything": [1, {}]}', JSON)
    wrong = [*call("add", '{"city": "Rome"}'), *call("find", '{"city": "Bonn"}')]
    wrong += [*call("note", "[]"), *call("other", "{}"), *call("ad", '{"result":5}')]
    wrong += [call("add", '{"result":5}')[0].replace("<|call|>", "<|end|>")]
    text = final("Anything at all, {")
    for choice, answers in ((None, True), ("auto", True), ("required", False)):
        start = turn(None, tools, choice)
        assert all(fits(start, THOUGHT + one) for one in fitting)
        assert all(fits(start, one) == answers for one in anything)
        assert not any(fits(start, THOUGHT + one) for one in wrong)
        assert fits(start, text) == answers
    start = turn(None, tools, "required")
    one = fitting[0]
    assert all(
        fits(start, before + one) for before in ("", PREAMBLE, THOUGHT + PREAMBLE)
    )
    for before in (THOUGHT * 2, PREAMBLE * 2, PREAMBLE + THOUGHT):
        assert not fits(start, before + one), "a model at a loss would go on for ever"
        assert fits(turn(None, tools), before + one)
    for named in (
        {"type": "function", "function": {"name": "add"}},
        {"type": "function", "name": "add"},
    ):
        start = turn(None, tools, named)
        assert [fits(start, one) for one in fitting] == [True, True] + [False] * 2
        assert not fits(start, text)


def test_a_format_beside_tools() -> None:
    """A final answer fits the one, a call the other."""
    start = turn(FORMAT, [FREE])
    assert fits(start, THOUGHT + final('{"result": 5}'))
    assert fits(start, THOUGHT + call("note", '{"x": 1}')[1])
    assert not fits(start, final("five"))


def test_names_of_tools_are_text() -> None:
    """Whatever stands in a name, it is no part of the grammar."""
    for name in ('a"|', "a\\", "a|b", "/a/", "%a", "@a", "ä"):
        tool = Tool(name, "", RESULT, strict=True)
        start = turn(None, [tool])
        assert all(fits(start, one) for one in call(name, '{"result": 1}'))
        assert not fits(start, call("a", '{"result": 1}')[0])


def test_nothing_is_asked_for() -> None:
    for choice in (None, "auto", "none"):
        assert turn_constraint(None, [FREE], choice, None) is None
    assert turn_constraint(None, [], None, None) is None
    assert turn_constraint(None, [ADD], "none", None) is None
    assert as_format({"type": "text"}).rules is None


GBNF = r"""
# Of a program: GBNF's comments and names aren't Lark's.
root ::= the-name " = " value
the-name ::= [a-z]+
value ::= [0-9]{1,3} | "(" value (
  "," value )* ")"
"""


def test_plain_texts() -> None:
    for start, good, bad in (
        (plain(json=RESULT), ['{"result": 3}', '{"result":3}'], ['{"result": "3"}']),
        (plain(json=json.dumps(RESULT)), ['{"result": 3}'], ["3"]),
        (plain(json={"type": "integer", "format": "int32"}), ["3"], ["3.5"]),
        (plain(json={}), ["3", "[]", '"x"'], ["x"]),
        (plain(regex="[a-c]+/x"), ["ab/x"], ["abd/x", "ab/xx", "ab"]),
        (plain(regex="^a/b$"), ["a/b"], ["a", "^a/b$"]),
        (plain(regex=r"a\/\$"), ["a/$"], ["a/"]),
        (plain(regex="^$"), [""], ["a"]),
        (plain(regex=r"\d+"), ["05"], ["٣", "5٣", ""]),
        (plain(regex=r"[\w.-]+"), ["a_-9."], ["é", "a٣", " "]),
        (plain(regex=r"[^\d]"), ["٣", "a"], ["3"]),
        (plain(regex=r"\D\W[\W_]"), ["٣é_", "a é"], ["3é_", "aa_", "aéa"]),
        (plain(regex=r"\p{Nd}\p{L}"), ["٣é", "3a"], ["é3"]),
        (plain(regex=r"\\d"), [r"\d"], ["1", r"\1"]),
        (plain(regex=r"[+-\d]+"), ["+5-"], [",", "A]", "5]"]),
        (plain(regex=r"[+--\d]\--\w[.-\s]"), [",--_-", "5--a "], ["6-/a.", "5--a/"]),
        (
            plain(json={"type": "string", "pattern": r"^[+-\d][.-\s]$"}),
            ['"5-"', '"+ "', '"-."'],
            ['",."', '"5/"', '"A]"'],
        ),
        (
            plain(json={"type": "string", "pattern": r"^\d\w$"}),
            ['"1a"'],
            ['"٣a"', '"1é"'],
        ),
        (plain(choice=["yes", "no", 'a"\\\x7f\né😀']), ["yes", 'a"\\\x7f\né😀'], ["y"]),
        (plain(choice="yes"), ["yes"], ["no"]),
        (plain(grammar='start: "a" b\nb: /[<~@%]/ "<|call|>" // ~'), [], ["a"]),
        (plain(grammar='%llguidance {}\n\nstart: "a"'), ["a"], ["b"]),
        (plain(grammar=GBNF), ["x = 1", "ab = (2,(33))"], ["x = ", "x = 1 "]),
    ):
        assert all(fits(start, text) for text in good)
        assert not any(fits(start, text) for text in bad)


def test_control_tokens_stay_out_of_texts() -> None:
    """Names of control tokens are text where a grammar has them as text."""
    start = plain(grammar='start: "a<|call|>"')
    assert all(start.consume_token(id) for id in TOKENIZER.encode("a<|call|>"))
    assert start.is_accepting()
    start = plain(json={"const": "<|end|>"})
    assert all(start.consume_token(id) for id in TOKENIZER.encode('"<|end|>"'))


WRITTEN: dict[str, Any] = {"a": [1, {"b": "x, y: z"}, []], "c": {}, "d": [{}, None]}


def test_json_is_written_as_most_do() -> None:
    """A space or none behind a comma and a colon, and no other between the signs."""
    for start in (plain(json={"type": "object"}), plain(json={"const": WRITTEN})):
        compact = json.dumps(WRITTEN, separators=(",", ":"))
        assert fits(start, compact)
        for comma, colon in ((", ", ": "), (",", ": "), (", ", ":")):
            assert fits(start, json.dumps(WRITTEN, separators=(comma, colon)))
        for odd in (
            json.dumps(WRITTEN, indent=2),
            compact.replace("{", "{ ", 1),
            compact.replace(",", " ,", 1),
            compact.replace(":", " :", 1),
            compact.replace(":", ":  ", 1),
            compact.replace(":", ":\n", 1),
            compact + " ",
        ):
            assert not fits(start, odd), odd


def test_structured_outputs_are_for_the_final_answer() -> None:
    start = turn(outputs=StructuredOutputs(regex="[0-9]+"))
    assert fits(start, THOUGHT + final("132"))
    assert not fits(start, final("x"))


LARK = "structured_outputs.grammar"
SCHEMA = "structured_outputs.json"
LIST: Any = {"items": {"$ref": "#"}}
REFUSED: list[tuple[Any, str, str]] = [
    ({}, "structured_outputs", "exactly one of"),
    ({"regex": "a", "choice": ["b"]}, "structured_outputs", "exactly one of"),
    ({"pattern": "a"}, "structured_outputs", "one of 'json'"),
    ("a", "structured_outputs", "a dict"),
    ({"regex": 5}, "structured_outputs.regex", "a string"),
    ({"regex": ""}, "structured_outputs.regex", "not empty"),
    ({"regex": "a" * 2**18}, "structured_outputs.regex", "131072"),
    ({"regex": "(?=a)b"}, "structured_outputs", "error: look-around, including"),
    ({"regex": "a("}, "structured_outputs", "error: unclosed group"),
    ({"choice": []}, "structured_outputs.choice", "at least one"),
    ({"choice": ["a", 5]}, "structured_outputs.choice", "list of str"),
    ({"choice": [""]}, "structured_outputs.choice", "not empty"),
    ({"choice": ["a"] * 10_001}, "structured_outputs.choice", "10000"),
    ({"grammar": "start: <|call|>"}, LARK, "no special tokens"),
    ({"grammar": 'start: "a"\n  | ( <[5]> )'}, LARK, "no special tokens"),
    ({"grammar": "start: <[^5]>"}, LARK, "no special tokens"),
    ({"grammar": 'start: "\\"" <|call|> "\\""'}, LARK, "no special tokens"),
    ({"grammar": "start: /\\// <|call|> /a/"}, LARK, "no special tokens"),
    ({"grammar": "start: A\nA: ~/a/"}, LARK, "'~'"),
    ({"grammar": "start: @other"}, LARK, "'@'"),
    ({"grammar": "start: W\nW: /a*/ & /b*/"}, LARK, "'&'"),
    ({"grammar": "start: %json {}"}, LARK, "%json"),
    (
        {"grammar": '%llguidance {"no_forcing": true}\nstart: "a"'},
        LARK,
        "%llguidance",
    ),
    ({"grammar": 'a ::= "a"'}, LARK, "No 'root' rule"),
    ({"grammar": f"root ::= {'(' * 3000}"}, LARK, "from GBNF"),
    ({"grammar": "root ::= <|call|>"}, LARK, "from GBNF"),
    ({"grammar": "root ::= " + '"a" | "b" | ' * 300 + '"c"'}, LARK, "of them"),
    ({"grammar": 'start: "a"' + "\n" * 500}, LARK, "500 lines"),
    ({"grammar": f"start: {'(' * 500}/[(]/{')' * 500}"}, LARK, "501 of them"),
    ({"grammar": 'begin: "a"'}, "structured_outputs", "start"),
    ({"json": 5}, SCHEMA, "an object"),
    ({"json": "{"}, SCHEMA, "expected JSON that can be read"),
    ({"json": "[1]"}, SCHEMA, "an object"),
    ({"json": {"enum": {1, 2}}}, SCHEMA, "expected JSON that can be read"),
    ({"json": {"type": "string", "description": "a" * 2**18}}, SCHEMA, "131072"),
    ({"json": {"anyOf": []}}, "structured_outputs", "Unsatisfiable"),
    (
        {"json": {"type": "integer", "minimum": 2, "maximum": 1}},
        "structured_outputs",
        "Un",
    ),
    ({"json": {"not": {}}}, SCHEMA, f"{SCHEMA}.not"),
    ({"json": {"x-guidance": {"lenient": True}}}, SCHEMA, f"{SCHEMA}.x-guidance"),
    ({"json": {"items": [{}, {"not": {}}]}}, SCHEMA, f"{SCHEMA}.items[1].not"),
    (
        {"json": {"properties": {"a": {"additionalProperties": {"contains": {}}}}}},
        SCHEMA,
        f"{SCHEMA}.properties.a.additionalProperties.contains",
    ),
    (
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"uniqueItems": True}}}},
        SCHEMA,
        f"{SCHEMA}.$defs.a.uniqueItems",
    ),
    ({"json": {"type": ["null", "string"], "format": []}}, SCHEMA, "format is []"),
    ({"json": {"format": "phone"}}, SCHEMA, f"{SCHEMA}.format is 'phone'"),
    ({"json": {"$ref": "http://a/b"}}, SCHEMA, f"{SCHEMA}.$ref is 'http://a/b'"),
    ({"json": {"$ref": "#/$defs/a"}}, SCHEMA, f"{SCHEMA}.$ref"),
    ({"json": {"items": {"$id": "a", **LIST}}}, SCHEMA, f"{SCHEMA}.items.$id"),
    ({"json": {"multipleOf": 99_991}}, SCHEMA, "least common multiple"),
    (
        {"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}},
        SCHEMA,
        "least common multiple",
    ),
    (
        {"json": {"properties": {f"p{n}": {} for n in range(401)}}},
        SCHEMA,
        "at most 400",
    ),
    (
        {"json": {"patternProperties": {f"^{n}$": {} for n in range(17)}}},
        SCHEMA,
        "at most 16",
    ),
]


NONE: dict[str, Any] = {"anyOf": []}
AN_A = {"type": "object", "required": ["a"]}
PLACES: list[tuple[dict[str, Any], str]] = [
    (NONE, "as a whole"),
    (AN_A | {"properties": {"b": {}, "a": NONE}}, "in schema.properties.a"),
    (
        {"type": "array", "items": {"allOf": [{}, NONE]}, "minItems": 2},
        "in schema.items.allOf[1]",
    ),
    (
        {"$ref": "#/$defs/b", "$defs": {"a": NONE, "b": {"$ref": "#/$defs/a"}}},
        "in schema.$ref.$ref",
    ),
    ({"type": "integer", "minimum": 2, "allOf": [{"maximum": 1}]}, "as a whole"),
    (
        {"properties": {"a": {"oneOf": [{"minimum": 1}, {"minimum": 2}]}}},
        "in schema.properties.a",
    ),
    ({"properties": {"a": {"maxItems": -1}, "b": {}}}, "in schema.properties.a"),
]


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(folder, SMALL) as found:
        yield found


@pytest.fixture(scope="module")
def input_processor(llm: LLM) -> InputProcessor:
    return llm.input_processor


@pytest.mark.parametrize(("outputs", "param", "word"), REFUSED)
def test_what_the_door_refuses(
    input_processor: InputProcessor, outputs: Any, param: str, word: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        input_processor.process("x", None, {"structured_outputs": outputs})
    assert getattr(caught.value, "param", None) == param, caught.value
    assert word in str(caught.value), caught.value
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("schema", "place"), PLACES)
def test_what_llguidance_refuses_has_a_place(
    input_processor: InputProcessor, schema: Any, place: str
) -> None:
    """That of the innermost schema which is refused by itself for the same reason."""
    given = FORMAT | {"json_schema": {"name": "x", "schema": schema}}
    for options in (
        {"response_format": given},
        {"response_format": given, "tools": [ADD, FREE]},
        {"structured_outputs": {"json": schema}},
    ):
        name = next(iter(options))
        with pytest.raises(ValueError, match=f"^{name}: .*, {re.escape(place)}"):
            input_processor.process_chat(HELLO, **options)


JSON_ASKED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": FORMAT}, "response_format"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [ADD]}, "tools[0].parameters"),
    ({"tools": [FREE], "tool_choice": "required"}, "tools[0].parameters"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
]


@pytest.mark.parametrize(("options", "param"), JSON_ASKED, ids=str)
def test_no_schema_is_to_blame_without_llguidance(
    input_processor: InputProcessor, options: dict[str, Any], param: str
) -> None:
    def missing(text: str) -> Any:
        raise GrammarError("structured output needs llguidance; expected it")

    with pytest.raises(ValueError) as caught:
        replace(input_processor, compiler=missing).process_chat(HELLO, **options)
    said = f"{param}: structured output needs llguidance; expected it"
    assert str(caught.value) == said
    assert getattr(caught.value, "param", None) == param


@pytest.mark.parametrize(("options", "param"), JSON_ASKED, ids=str)
def test_a_model_without_end_tokens_has_no_grammars(
    input_processor: InputProcessor, options: dict[str, Any], param: str
) -> None:
    """All else works: its texts end where max_tokens or a stop string says."""
    bare = replace(input_processor, eos_token_ids=frozenset())
    bare.grammars.prepare()
    assert bare.process_chat(HELLO).stop_ids == frozenset()
    with pytest.raises(ValueError, match="this model has no token that ends") as caught:
        bare.process_chat(HELLO, **options)
    assert getattr(caught.value, "param", None) == param


def test_a_model_without_a_tokenizer_has_no_grammars(
    input_processor: InputProcessor,
) -> None:
    bare = replace(input_processor, tokenizer=None)
    assert bare.process([5], None, {}).tokens == [5]
    with pytest.raises(
        ValueError, match=r"this model has no tokenizer\.json"
    ) as caught:
        bare.process([5], None, {"structured_outputs": {"regex": "a"}})
    assert getattr(caught.value, "param", None) == "structured_outputs"


def test_a_place_is_not_looked_for_without_an_end() -> None:
    """In time it is the innermost, and out of time as far as the search has come."""
    schema = nested(50, NONE, lambda s: {"properties": {"a": s}, "required": ["a"]})
    asked: list[Any] = []

    def refused(one: Any) -> bool:
        asked.append(one)
        return True

    assert (
        innermost_refused(schema, refused, time.monotonic() + 60)
        == ".properties.a" * 50
    )
    assert len(asked) == 50
    assert innermost_refused(schema, refused, time.monotonic()) == ""
    assert innermost_refused({"$ref": "#"}, refused, time.monotonic() + 60) == ""
    assert len(asked) == 50


LOOP = {"$ref": "#"}
OBJECT = {"type": "object", "required": ["a"]}
D = {"$ref": "#/$defs/d"}
DOOR = "structured_outputs.json"


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (LOOP, ""),
        ({"allOf": [D], "$defs": {"d": LOOP}}, ".allOf[0]"),
        ({"anyOf": [LOOP, LOOP]}, ".anyOf[0]"),
        (
            {"properties": {"a": D}, "$defs": {"d": {"anyOf": [D, {}]}}},
            ".$defs.d.anyOf[0]",
        ),
        ({"items": {"oneOf": [D]}, "$defs": {"d": D}}, ".$defs.d"),
    ],
)
def test_a_schema_that_is_only_itself_is_refused(
    input_processor: InputProcessor, schema: Any, place: str
) -> None:
    with pytest.raises(ValueError, match="leads back to it, never inside") as error:
        input_processor.process("x", None, {"structured_outputs": {"json": schema}})
    assert str(error.value).startswith(f"{DOOR}{place}: $ref")


@pytest.mark.parametrize(
    ("schema", "begun"),
    [
        (OBJECT | {"properties": {"a": LOOP}}, '{"a":' * 50),
        ({"type": "array", "items": LOOP, "minItems": 1}, "[" * 50),
        ({"anyOf": [D, {"oneOf": [D]}]}, '{"a":' * 50),
    ],
)
def test_what_never_ends_goes_on(
    input_processor: InputProcessor, schema: Any, begun: str
) -> None:
    """As in a grammar without an end; max_tokens bounds it, and nobody is held up."""
    never = OBJECT | {"properties": {"a": D}}  # as d it needs itself
    asked = {"json": schema | {"$defs": {"d": never}}}
    grammar = input_processor.process("x", None, {"structured_outputs": asked}).grammar
    assert grammar is not None and input_processor.tokenizer is not None
    state = grammar.start()
    state.advance(input_processor.tokenizer.encode(begun))
    assert len(state.forced()) <= 1000 and not state.matcher.is_accepting()


def nested(levels: int, schema: Any, wrap: Any) -> Any:
    for _ in range(levels):
        schema = wrap(schema)
    return schema


def chain(length: int) -> dict[str, Any]:
    """Schemas, each of which leads to the next one."""
    found: dict[str, Any] = {
        f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}}
        for n in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": found | {f"d{length}": {}}}


def doubled(levels: int) -> dict[str, Any]:
    """A few lines that say 2 ** levels."""
    found: dict[str, Any] = {"d0": {"properties": {"a": {"type": "string"}}}}
    for n in range(1, levels):
        found[f"d{n}"] = {"allOf": [{"$ref": f"#/$defs/d{n - 1}"}] * 2}
    return {"$ref": f"#/$defs/d{levels - 1}", "$defs": found}


BOMBS: dict[str, Any] = {
    "deep objects": {"json": nested(200, {}, lambda s: {"properties": {"a": s}})},
    "deep beyond Python": {
        "json": '{"items":' * 5000 + "{}" + "}" * 5000,
    },
    "a chain of $refs": {"json": chain(1000)},
    "a chain of some": {"json": chain(150)},
    "doubled": {"json": doubled(60)},
    "a loop": {"json": {"$ref": "#"}},
    "a loop of two": {
        "json": {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        }
    },
    "an object without an end": {
        "json": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    },
    "10,000 values": {"json": {"enum": [f"v{n}" for n in range(10_000)]}},
    "10,000 choices": {"choice": [f"v{n}" for n in range(10_000)]},
    "10,000 properties": {"json": {"properties": {str(n): {} for n in range(10_000)}}},
    "5,000 variants": {"json": {"oneOf": [{"const": f"v{n}"} for n in range(5000)]}},
    "an expression that backtracks": {"regex": "(a|a)*b{1000,}"},
    "one in a schema": {"json": {"type": "string", "pattern": "(a|a)*b{1000,}"}},
    "repeated repeats": {"regex": "((((a{0,100}){0,100}){0,100}){0,100}){0,100}"},
    "a lookback": {"regex": "(.*[ab]){3}.{18}c"},
    "optional letters": {"regex": "(a|b)?" * 5000},
    "a long text": {"json": {"type": "string", "minLength": 10**9}},
    "a longer text": {"json": {"type": "string", "minLength": 10**30}},
    "many items": {"json": {"type": "array", "minItems": 10**9, "items": {}}},
    "multiples": {"json": {"multipleOf": 999_983}},
    "multiples of tiny ones": {"json": {"multipleOf": 1e-300}},
    "patterns": {
        "json": {"patternProperties": {f"^k{n}.*[a-z]{{5}}$": {} for n in range(1000)}}
    },
    "a chain of rules": {
        "grammar": "start: a0\n"
        + "".join(f'a{n}: a{n + 1} "x"\n' for n in range(5000))
        + 'a5000: "y"'
    },
    "some rules": {
        "grammar": "start: a0\n"
        + "".join(f'a{n}: (a{n + 1}) "x"\n' for n in range(240))
        + 'a240: "y"'
    },
    "doubled rules": {
        "grammar": "start: A0\n"
        + "".join(f"A{n}: A{n + 1} A{n + 1}\n" for n in range(40))
        + "A40: /x/"
    },
    "a rule that is itself": {"grammar": "start: a\na: a"},
    "an empty one": {"grammar": 'start: ("" | "" "")*'},
}


@pytest.mark.parametrize("name", BOMBS)
def test_nothing_takes_long(input_processor: InputProcessor, name: str) -> None:
    """It is refused or compiled in a few seconds of the processor's, busy or not."""
    begin = time.process_time()
    try:
        request = input_processor.process(
            "x", None, {"structured_outputs": BOMBS[name]}
        )
        assert request.grammar is not None
        said = "compiled"
    except ValueError as error:
        said = f"refused: {str(error)[:60]}"
    seconds = time.process_time() - begin
    print(f"{name:32}{seconds:8.3f} s  {said}")
    assert seconds < 10


def test_a_grammar_comes_with_the_request(input_processor: InputProcessor) -> None:
    asked = input_processor.process_chat(
        HELLO, response_format=FORMAT, max_tokens=4, n=2
    )
    assert asked.grammar is not None and asked.sample().needs_last_token
    again = input_processor.process_chat(HELLO, response_format=FORMAT, max_tokens=9)
    assert again.grammar is asked.grammar, "it is compiled once"
    assert input_processor.process_chat(HELLO, max_tokens=4).grammar is None
    params = SamplingParams(structured_outputs=StructuredOutputs(choice=["a"]))
    both = input_processor.process_all(["x", "y"], params, {})
    times = []

    def counting(outputs: Any) -> Any:
        times.append(outputs)
        return text_constraint(outputs)

    given = {"structured_outputs": {"regex": "[ab]+"}}
    many = input_processor.process_all(["x"] * 100, None, given, counting)
    assert len(times) == 1, "its rules are made once"
    assert len({id(request.grammar) for request in many}) == 1
    assert both[0].grammar is both[1].grammar is not None


def test_the_library_is_missing(
    input_processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install 'simplellm\[structured\]'"):
        input_processor.process_chat(HELLO, tools=[ADD, FIND], tool_choice="required")
    with pytest.raises(ValueError, match="structured_outputs: structured output needs"):
        input_processor.process("x", None, {"structured_outputs": {"regex": "library"}})


CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": 5}, "response_format", "an object"),
    ({"response_format": {}}, "response_format.type", "json_object"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "is None; expected an object",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": 5}},
        "response_format.json_schema",
        "an object",
    ),
    (
        {"response_format": FORMAT | {"json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
        "64 letters",
    ),
    (
        {"response_format": FORMAT | {"json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "an object",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "a",
                    "schema": {"properties": {"a": {"not": {}}}},
                },
            }
        },
        "response_format.json_schema.schema",
        "response_format.json_schema.schema.properties.a.not: ",
    ),
    (
        {"response_format": FORMAT, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "beside response_format",
    ),
    ({"tool_choice": "required"}, "tool_choice", "tools to choose from"),
    ({"tool_choice": "some", "tools": [ADD]}, "tool_choice", "'required'"),
    ({"tool_choice": {"type": "x"}, "tools": [ADD]}, "tool_choice.type", "function"),
    (
        {"tool_choice": {"type": "function", "name": "x"}, "tools": [ADD]},
        "tool_choice",
        "['add']",
    ),
    (
        {"tools": [FREE, Tool("f", "", {"type": "string"}, strict=True)]},
        "tools[1].parameters.type",
        "'object'",
    ),
    (
        {"tools": [Tool("f", "", RESULT | {"not": {}}, strict=True)]},
        "tools[0].parameters",
        "tools[0].parameters.not",
    ),
    (
        {
            "tools": [
                ADD,
                Tool("f", "", {"type": "object", "minProperties": -1}, strict=True),
            ]
        },
        "tools[1].parameters",
        "minProperties",
    ),
    (
        {"tools": [{"function": {"name": "f", "strict": "yes"}}]},
        "tools[0].strict",
        "true or false",
    ),
    ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos", "False"),
]


@pytest.mark.parametrize(("options", "param", "word"), CHATS)
def test_what_a_chat_is_refused(
    input_processor: InputProcessor, options: dict[str, Any], param: str, word: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        input_processor.process_chat(HELLO, max_tokens=4, **options)
    assert getattr(caught.value, "param", None) == param, caught.value
    assert word in str(caught.value), caught.value


UNHELD: list[Any] = [
    None,
    {},
    {"type": "object", "not": {"required": ["a"]}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}},
    # What llguidance alone refuses.
    {
        "type": "object",
        "properties": {"a": {"oneOf": [{"minimum": 1}, {"minimum": 2}]}},
        "required": ["a"],
    },
]


@pytest.mark.parametrize("schema", UNHELD, ids=str)
def test_a_call_that_has_to_come_fits_what_can_be_held(
    input_processor: InputProcessor, schema: Any
) -> None:
    """Of a tool that isn't strict: else it's any object."""
    must: dict[str, Any] = {"tool_choice": "required"}
    asked = input_processor.process_chat(HELLO, tools=[Tool("f", "", schema)], **must)
    assert asked.grammar is not None
    if schema:
        strict = Tool("f", "", schema, strict=True)
        with pytest.raises(ValueError, match=r"tools\[0\]\.parameters"):
            input_processor.process_chat(HELLO, tools=[strict], **must)


def test_a_call_that_has_to_come_has_no_arguments_without_a_name() -> None:
    """Unless its schema may name more, or has them by itself."""
    open_one = {name: CITY[name] for name in ("type", "properties", "required")}
    more = call("note", '{"city":"Rome","more":1}', JSON)
    for schema, allowed in (
        (open_one, False),
        (open_one | {"additionalProperties": True}, True),
        (open_one | {"patternProperties": {"^m": {}}}, True),
        (open_one | {"properties": {}, "required": []}, True),
    ):
        start = turn(None, [Tool("note", "", schema)], "required")
        assert all(fits(start, one) == allowed for one in more), schema
        assert all(fits(start, one) for one in call("note", '{"city":"Rome"}', JSON))


def test_a_turn_has_only_so_many_tools() -> None:
    many = [Tool(f"f{number}", "", None) for number in range(129)]
    assert turn_constraint(None, many, None, None) is None, "free, they may be more"
    assert turn_constraint(None, many[:128], "required", None) is not None
    with pytest.raises(ValueError, match="at most 128"):
        turn_constraint(None, many, "required", None)
    long = RESULT | {"title": "x" * 2**16}
    some = [Tool(f"f{number}", "", long, strict=True) for number in range(5)]
    assert turn_constraint(None, some[:3], None, None) is not None
    with pytest.raises(ValueError, match="at most 262144 characters"):
        turn_constraint(None, some, None, None)


def shown(input_processor: InputProcessor, messages: Any, **options: Any) -> str:
    ids = input_processor.process_chat(messages, max_tokens=4, **options).tokens
    return TOKENIZER.decode(ids)


SECTION = '# Response Formats\n\n## sum\n\n{"type":"object","properties":'
SECTION += '{"result":{"type":"integer"}},"required":["result"],'
SECTION += '"additionalProperties":false}<|end|><|start|>user'


def test_the_model_is_told_the_format(input_processor: InputProcessor) -> None:
    """At the end of the developer message, as harmony's documentation has it."""
    system = {"role": "system", "content": "Be short."}
    told = shown(input_processor, [system, *HELLO], response_format=FORMAT)
    lead = "<|start|>developer<|message|># Instructions\n\nBe short.\n\n"
    assert lead + SECTION in told
    assert f"developer<|message|>{SECTION}" in shown(
        input_processor, HELLO, response_format=FORMAT
    )
    told = shown(input_processor, HELLO, response_format=FORMAT, tools=[FREE])
    assert "} // namespace functions\n\n" + SECTION in told
    late = [*HELLO, system]
    assert f"developer<|message|>{SECTION}" in shown(
        input_processor, late, response_format=FORMAT
    )
    harmony = [Message("user", "Hello")]
    assert SECTION in shown(
        input_processor, harmony, response_format=FORMAT, tools=[FREE]
    )
    described = {"name": "sum", "schema": RESULT, "description": "A sum.\nOf two."}
    told = shown(
        input_processor,
        HELLO,
        response_format={"type": "json_schema", "json_schema": described},
    )
    assert '## sum\n\n// A sum.\n// Of two.\n{"type"' in told
    for unsaid in ({"type": "text"}, {"type": "json_object"}):
        assert "Response Formats" not in shown(
            input_processor, HELLO, response_format=unsaid
        )


CLOSERS = {b'"', b"}", b"]", b",", b'"}', b'":', b"1", b"true"}
BRIEF = [
    id
    for id in range(SIZE)
    if TOKENIZER.is_special(id) or TOKENIZER.token_bytes(id) in CLOSERS
]


def wander(start: Any, rng: random.Random, most: int = 600) -> list[int] | None:
    """A random text of a grammar; None if it goes on for too long."""
    walk = start.deep_copy()
    ids: list[int] = []
    while not walk.is_stopped():
        bits = np.frombuffer(walk.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[:SIZE]
        some = [id for id in BRIEF if allowed[id]]
        hurry = some and rng.random() < 0.3 + len(ids) / most
        ids.append(int(rng.choice(some if hurry else np.flatnonzero(allowed))))
        assert walk.consume_token(ids[-1]), walk.get_error()
        if len(ids) > most:
            return None
    return ids


SCHEMAS: list[dict[str, Any]] = [
    RESULT,
    {"type": "object", "properties": {"a": CITY, "b": {"type": "boolean"}}},
    {
        "type": "object",
        "properties": {
            "names": {"type": "array", "items": {"type": "string"}, "maxItems": 3}
        },
        "required": ["names"],
        "additionalProperties": False,
    },
]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    answer=st.sampled_from([None, *SCHEMAS]),
    arguments=st.lists(st.sampled_from(SCHEMAS), max_size=2),
    must=st.booleans(),
)
def test_any_turn_is_parsed_as_it_was_meant(
    seed: int, answer: Any, arguments: list[Any], must: bool
) -> None:
    """Whatever the model would like to write: headers hold, and ends fit."""
    tools = [
        Tool(f"f{number}", "", schema, strict=True)
        for number, schema in enumerate(arguments)
    ]
    given = FORMAT | {"json_schema": {"name": "x", "schema": answer}}
    form = as_format(given if answer else None)
    choice = "required" if must and tools else None
    constraint = turn_constraint(form, tools, choice, None)
    if constraint is None:
        return
    ids = wander(matcher(constraint.text), random.Random(seed))
    if ids is None:
        return
    messages = parse([*START, *ids], TOKENIZER)
    last, calls = messages[-1], tool_calls(messages)
    assert all(one.channel in ("analysis", "commentary") for one in messages[:-1])
    assert all(one.recipient is None for one in messages[:-1])
    if calls:
        (made,) = calls
        schema = tools[int(made.name.removeprefix("f"))].parameters or {}
        assert last.recipient == f"functions.{made.name}"
        jsonschema.validate(json.loads(made.arguments), schema)
    else:
        assert last.channel == "final" and choice is None
        if answer is not None:
            jsonschema.validate(json.loads(last.content), answer)
