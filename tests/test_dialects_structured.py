"""Turns of other families that have to fit: the grammars, and random walks in them."""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families_text import KINDS, TEMPLATES, open_folder, write_text_side
from hypothesis import given, settings
from hypothesis import strategies as st
from models import saying, write_model
from serving import Served, noted, serving
from test_dialects import CALL, USER, turn_of
from test_dialects_served import family_llm
from test_structured import ADD, CITY, FIND, FORMAT, FREE, RESULT, SCHEMAS

from simplellm import LLM, StructuredOutputs, Tool
from simplellm.api.chat_options import as_format, turn_constraint
from simplellm.base.grammar import BitmaskFiller, GrammarError, GrammarState
from simplellm.structured.compiler import Grammars
from simplellm.structured.rules import rules_text
from simplellm.text.harmony import ToolCall

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

CLOSERS = {b'"', b"}", b"]", b",", b'"}', b'":', b"1", b"true"}
NAMED = ["qwen", "coder", "llama", "mistral", "tekken"]  # whose calls have a form


class Opened:
    """A family's text side, and walks in the grammars of its turns."""

    def __init__(self, folder: Path, kind: str) -> None:
        write_text_side(folder, kind)
        self.tokenizer, self.dialect = open_folder(folder)
        special = self.tokenizer.special
        ends = frozenset(special[name] for name in self.dialect.ends if name in special)
        self.grammars = Grammars(self.tokenizer, self.tokenizer.vocab_size, ends)
        closers = (id for id, text in self.tokenizer.tokens.items() if text in CLOSERS)
        self.brief = [*special.values(), *closers]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, special=True)

    def turn(
        self,
        form: Any = None,
        tools: Sequence[Tool] = (),
        choice: Any = None,
        outputs: StructuredOutputs | None = None,
        prompt: str = "",
        alone: bool = False,
    ) -> Any:
        """The grammar of a turn behind ``prompt``."""
        ids = self.encode(prompt)
        make = partial(self.dialect.grammar, self.tokenizer, ids, alone=alone)
        constraint = turn_constraint(
            as_format(form), tools, choice, outputs, make, alone
        )
        assert constraint is not None
        return self.grammars.compile(constraint.text)

    def fits(self, grammar: Any, text: str) -> bool:
        """Whether a turn may be ``text``, control tokens by name, and end behind it."""
        matcher, ids = grammar.start().matcher, self.encode(text)
        taken: int = matcher.try_consume_tokens(ids)
        return taken == len(ids) and matcher.is_accepting()

    def wander(
        self, state: GrammarState, rng: random.Random, most: int = 400
    ) -> list[int]:
        """A random turn, with what is forced; cut if it goes on for too long."""
        ids: list[int] = []
        while not state.matcher.is_stopped() and len(ids) < most:
            if not (new := state.forced() if rng.random() < 0.7 else []):
                bits = np.frombuffer(state.matcher.compute_bitmask(), dtype=np.uint8)
                allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
                some = np.intersect1d(allowed, self.brief)
                hurry = len(some) and rng.random() < 0.3 + len(ids) / most
                new = [int(rng.choice(some if hurry else allowed))]
            state.advance(new)  # or it raises
            ids += new
        return ids if state.matcher.is_stopped() else []


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Opened]:
    return {
        kind: Opened(tmp_path_factory.mktemp(kind.replace(" ", "-")), kind)
        for kind in KINDS
    }


ADDED, FOUND = '{"result": 5}', '{"city":"Rome"}'
# How each family writes a call, and two of them (Llama one).
ONE = {
    "qwen": f'<tool_call>\n{{"name": "add", "arguments": {ADDED}}}\n</tool_call>',
    "coder": "<tool_call>\n<function=add>\n<parameter=result>\n5\n</parameter>\n"
    "</function>\n</tool_call>",
    "llama": f'{{"name": "add", "parameters": {ADDED}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "add", "arguments": {ADDED}}}]',
    "tekken": f"[TOOL_CALLS]add[ARGS]{ADDED}",
}
WRITTEN = {
    "qwen": ONE["qwen"]
    + f'\n<tool_call>\n{{"name": "find", "arguments": {FOUND}}}\n</tool_call>',
    "coder": ONE["coder"]
    + "\n<tool_call>\n<function=find>\n<parameter=city>\nRome\n</parameter>\n"
    "</function>\n</tool_call>",
    "llama": ONE["llama"],
    "mistral": ONE["mistral"][:-1]
    + f', {{"name": "find", "arguments": {FOUND}, "id": "a1b2c3d4e"}}]',
    "tekken": ONE["tekken"] + f"[TOOL_CALLS]find[CALL_ID]a1b2c3d4e[ARGS]{FOUND}",
}
MADE = [ToolCall("add", ADDED), ToolCall("find", FOUND)]


@pytest.mark.parametrize("kind", NAMED)
def test_calls_have_the_form_of_the_family(
    opened: dict[str, Opened], kind: str
) -> None:
    own, calls = opened[kind], WRITTEN[kind]
    wrong = calls.replace("5", '"five"', 1)
    one = own.turn(None, [ADD, FIND, FREE], {"type": "function", "name": "find"})
    for choice, free in (("required", False), ("auto", True)):
        grammar = own.turn(None, [ADD, FIND, FREE], choice)
        assert own.fits(grammar, calls)
        assert own.fits(grammar, f"{calls}\n") == (kind in ("qwen", "coder"))
        assert not own.fits(grammar, f"{calls}\n\n")
        assert not own.fits(grammar, wrong)
        assert not own.fits(grammar, calls.replace("add", "ad"))
        assert not own.fits(grammar, calls[:-1])
        assert own.fits(grammar, " 132. {") == free
        # In front of calls text is free, but not if it is itself like a call.
        before = "I'll look.\n" + "<|python_tag|>" * (kind == "llama")
        assert own.fits(grammar, before + calls) == free
    assert not own.fits(one, calls), "only the one that is named"
    ids = own.encode(calls)
    expected = MADE[: 1 if kind == "llama" else 2]
    if kind == "coder":  # where arguments are no JSON that the parser repeats
        expected = [MADE[0], ToolCall("find", json.dumps(json.loads(FOUND)))]
    assert turn_of(own.dialect, own.tokenizer, ids) == ("", "", expected)


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("form", [None, FORMAT])
def test_a_call_may_have_to_be_alone(
    opened: dict[str, Opened], kind: str, form: Any
) -> None:
    """Then there is a grammar, whatever else is asked."""
    own, tools = opened[kind], [Tool("add", "", None), Tool("find", "", None)]
    one, both = ONE[kind], WRITTEN[kind]
    tag = "<|python_tag|>" * (kind == "llama")
    for choice in (None, "required"):
        alone = own.turn(form, tools, choice, alone=True)
        assert own.fits(alone, tag + one)
        assert tag or not own.fits(alone, both)
        free = form is None and choice is None
        assert own.fits(alone, "I'll look.\n" + tag + one) == free
        asked = form is not None
        assert own.fits(alone, ADDED) == (choice is None and (asked or not tag))
    assert own.fits(own.turn(FORMAT, tools), tag + both)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_fit(opened: dict[str, Opened], kind: str) -> None:
    """At once, behind a space or line breaks, and behind thoughts if there are some."""
    own = opened[kind]
    for form in (FORMAT, {"type": "json_object"}):
        grammar = own.turn(form)
        assert own.fits(grammar, ADDED)
        assert own.fits(grammar, " " + ADDED)
        assert not own.fits(grammar, "5")
        assert not own.fits(grammar, ADDED + ADDED)
        thought = f"<think>\nHm: {{\n</think>\n\n{ADDED}"
        assert own.fits(grammar, thought) == (kind == "qwen")
    assert not own.fits(own.turn(FORMAT), FOUND)
    digits = own.turn(outputs=StructuredOutputs(regex="[0-9]+"))
    assert own.fits(digits, "132") and not own.fits(digits, "x")


BEGUN: list[tuple[dict[str, Any], str, bool]] = [
    ({"choice": [" yes", "no"]}, " yes", True),
    ({"choice": ["no", "\n\n\nyes"]}, "\n\n\nyes", True),
    ({"regex": r"\s+[ab]"}, "\n\n  a", True),
    ({"regex": "[^a]b"}, "\nb", True),
    ({"regex": r".*\.5"}, "  1.5", True),
    ({"regex": r"[\x0a-\x7e]b"}, " b", True),
    ({"grammar": 'start: " a" | "b"'}, " a", True),
    ({"choice": ["yes", 'a" | " \\']}, 'a" | " \\', False),
    ({"regex": r"^\d+\.[0-9]{2}-(?:[a-c]|\S)$"}, "1.50-a", False),
]


@pytest.mark.parametrize(("outputs", "text", "blank"), BEGUN)
def test_an_answer_keeps_the_white_space_it_has_to_have(
    opened: dict[str, Opened], outputs: Any, text: str, blank: bool
) -> None:
    """Where it may have some, all that is in front of it is its own."""
    for kind, own in opened.items():
        grammar = own.turn(outputs=StructuredOutputs(**outputs))

        def taken(ids: Sequence[int], grammar: Any = grammar) -> bool:
            matcher = grammar.start().matcher
            count: int = matcher.try_consume_tokens(ids)
            return count == len(ids) and matcher.is_accepting()

        def found(ids: Sequence[int], own: Any = own, grammar: Any = grammar) -> Any:
            return turn_of(own.dialect, own.tokenizer, ids, grammar)

        ids, more = spelled(own, text), spelled(own, f" {text}")
        assert taken(ids) and found(ids) == ("", text, [])
        assert taken(more) or blank
        if taken(more):
            assert found(more) == ("", f" {text}" if blank else text, [])
        if kind == "qwen":
            tags = own.tokenizer.special
            thought = [tags["<think>"], *spelled(own, "Hm.\n"), tags["</think>"]]
            ids = [*thought, *spelled(own, "\n\n"), *ids]
            assert taken(ids) and found(ids) == ("Hm.", text, [])


def spelled(own: Opened, text: str) -> list[int]:
    """The tokens of a text, byte by byte."""
    every = {token: id for id, token in own.tokenizer.tokens.items()}
    return [every[bytes([byte])] for byte in text.encode()]


def test_thoughts_that_the_prompt_begins(opened: dict[str, Opened]) -> None:
    own = opened["qwen"]
    grammar = own.turn(FORMAT, prompt="<|im_start|>assistant\n<think>\n")
    assert own.fits(grammar, f"Hm.\n</think>\n\n{ADDED}")
    assert not own.fits(grammar, ADDED)


def test_calls_without_a_form_are_refused(opened: dict[str, Opened]) -> None:
    for kind in ("gemma", "gpt2", "smollm"):
        with pytest.raises(ValueError, match="this model's calls have no tags"):
            opened[kind].turn(None, [ADD], "required")


@pytest.mark.parametrize("kind", NAMED)
def test_names_of_functions_are_text(opened: dict[str, Opened], kind: str) -> None:
    own = opened[kind]
    for name in ('a"|', "a\\", "[ARGS]", "NAME", "@a", "ä😀", "e\u0301"):
        grammar = own.turn(None, [Tool(name, "", CITY, strict=True)], "required")
        ids = own.wander(grammar.start(), random.Random(5))
        _, _, calls = turn_of(own.dialect, own.tokenizer, ids)
        assert calls and {call.name for call in calls} == {name}


def test_names_that_json_would_escape_are_refused(opened: dict[str, Opened]) -> None:
    for name in ("\x00", "a\x7f"):
        for kind in NAMED:
            with pytest.raises(ValueError, match=r"a name in tools is .* no escape"):
                opened[kind].turn(None, [Tool(name, "", None)], "required")


@pytest.mark.parametrize(
    "text", ['{"name": "f"}', "e\u0301cafe\u0301", "▁a  b", "Å", ""]
)
def test_forced_tokens_spell_their_text(opened: dict[str, Opened], text: str) -> None:
    """Though tokenizers put a space in front, or another form of a character."""
    for own in opened.values():
        lark = f"start: {json.dumps(text)}"
        state = own.grammars.compile(rules_text({"lark_grammar": lark})).start()
        ids: list[int] = []
        while new := state.forced():
            state.advance(new)
            ids += new
        assert own.tokenizer.decode(ids).startswith(text)


def test_arguments_in_xml_fit_their_schema(opened: dict[str, Opened]) -> None:
    own = opened["coder"]
    properties: dict[str, Any] = {
        "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"$ref": "#/$defs/day", "type": "integer"},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["text", "days"],
        "additionalProperties": False,
        "$defs": {"day": {"type": "integer", "maximum": 7}},
    }

    def call(**given: str) -> str:
        some = (f"<parameter={key}>\n{given[key]}\n</parameter>\n" for key in given)
        return f"<tool_call>\n<function=f>\n{''.join(some)}</function>\n</tool_call>"

    for strict in (True, False):  # a call that has to come fits anyway
        tool = Tool("f", "", schema, strict=strict)
        grammar = own.turn(None, [tool], "required")
        assert own.fits(grammar, call(text="a\n\n</b>", days="7"))
        assert own.fits(grammar, call(text="", unit="F", days="7"))
        for wrong in (
            call(text="a", days="8"),
            call(text="a", days="one"),
            call(text="a", unit="K", days="7"),
            call(text="a"),
            call(text="a", days="7", more="b"),
        ):
            assert not own.fits(grammar, wrong)
    free = own.turn(None, [Tool("f", "", None)], "required")
    assert own.fits(free, call(more="b")) and own.fits(free, call())
    assert not own.fits(free, call().replace("=f", "=g"))
    properties["text"] = {"type": "string", "pattern": "a+"}
    with pytest.raises(
        ValueError, match="pattern of the parameter text is 'given'; ex"
    ):
        own.turn(None, [Tool("f", "", schema, strict=True)], "required")


def test_what_no_token_spells_fits_no_answer(opened: dict[str, Opened]) -> None:
    """SmolLM2 lacks some bytes: an answer that needs one is its request's own fault."""
    own = opened["smollm"]
    grammar = own.grammars.compile(rules_text({"lark_grammar": r'start: "a\u0004b"'}))
    state = grammar.start()
    state.advance(state.forced())
    bits = np.zeros((1, own.tokenizer.vocab_size // 32 + 1), dtype=np.uint32)
    with pytest.raises(GrammarError, match="there is no text that fits"):
        BitmaskFiller().fill([state], bits)
    free = own.grammars.compile(rules_text({"lark_grammar": r"start: /[\x00-z]*/"}))
    free.start().advance(own.encode("ab"))


def checked(calls: Sequence[ToolCall], tools: Sequence[Tool]) -> None:
    """All calls are of ``tools``, and fit them."""
    schemas = {tool.name: tool.parameters for tool in tools}
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("kind", TEMPLATES)
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    answer=st.sampled_from([None, {"type": "object"}, *SCHEMAS]),
    arguments=st.lists(st.sampled_from(SCHEMAS), max_size=2),
    must=st.booleans(),
)
def test_any_turn_is_parsed_as_it_was_meant(
    opened: dict[str, Opened],
    kind: str,
    seed: int,
    answer: Any,
    arguments: list[Any],
    must: bool,
) -> None:
    """Whatever the model would like to write, with forced tokens and without."""
    own, must = opened[kind], must and bool(arguments)
    tools = [Tool(f"f{n}", "", s, strict=True) for n, s in enumerate(arguments)]
    tools = tools if kind in NAMED else []
    must = must and bool(tools)
    if answer is None and not tools:
        return
    form = FORMAT | {"json_schema": {"name": "x", "schema": answer}}
    choice = "required" if must else None
    grammar = own.turn(form if answer else None, tools, choice)
    ids = own.wander(grammar.start(), random.Random(seed))
    if not ids:
        return
    _, content, calls = turn_of(own.dialect, own.tokenizer, ids, grammar)
    checked(calls, tools)
    assert calls or not must
    if answer is not None and not calls:
        jsonschema.validate(json.loads(content), answer)


LIKE_A_CALL = '{"name": "f", "parameters": {"x": 1}}'


def test_an_answer_like_a_call_is_an_answer(opened: dict[str, Opened]) -> None:
    """Llama's calls have a tag where answers have to fit: the parser knows."""
    own = opened["llama"]
    grammar = own.turn({"type": "json_object"}, [FREE])
    for text, expected in (
        (LIKE_A_CALL, (LIKE_A_CALL, [])),
        (
            '<|python_tag|>{"name": "note", "parameters": {}}',
            ("", [ToolCall("note", "{}")]),
        ),
    ):
        assert own.fits(grammar, text)
        ids = own.encode(text)
        found = turn_of(own.dialect, own.tokenizer, ids, grammar)
        assert found[1:] == expected
    assert turn_of(own.dialect, own.tokenizer, own.encode(LIKE_A_CALL))[2]


# Served: each endpoint has the same turns, though it spells them otherwise

PARAMETERS = {"name": "find", "description": "Find a city.", "strict": True}
CHAT_TOOL = {"type": "function", "function": {**PARAMETERS, "parameters": CITY}}
ITEM_TOOL = {"type": "function", **PARAMETERS, "parameters": CITY}
BLOCK_TOOL = {**PARAMETERS, "input_schema": CITY}
CHAT, ITEMS, BLOCKS = "/v1/chat/completions", "/v1/responses", "/v1/messages"
LIMIT = {CHAT: "max_tokens", ITEMS: "max_output_tokens", BLOCKS: "max_tokens"}


@pytest.fixture(scope="module", params=TEMPLATES)
def answering(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    folder = write_model(tmp_path_factory.mktemp("model") / "tiny")
    with family_llm(folder, request.param) as llm, serving(llm) as found:
        yield found


@pytest.fixture
def served(answering: Served) -> Served:
    """One of those that know how calls are written."""
    if not answering.service.llm.input_processor.dialect.several_calls:
        pytest.skip("its template knows no calls")
    return answering


@contextmanager
def brief(llm: LLM) -> Iterator[None]:
    """The model's random turns come to an end: it likes tags, then brackets."""
    runner = llm.engine_core.runner
    start, tokens = runner.start_forward, llm.tokenizer.tokens.items()
    closers = [id for id, text in tokens if text in CLOSERS]
    ends = [id for id, text in tokens if text in (b"}", b"]", b'"}')]

    def started(*step: Any) -> None:
        start(*step)
        with torch.inference_mode():
            runner.logits[:, closers] += 100
            runner.logits[:, ends] += 100
            runner.logits[:, [*llm.tokenizer.special.values()]] += 300

    runner.start_forward = started  # type: ignore[assignment]
    try:
        yield
    finally:
        runner.start_forward = start  # type: ignore[method-assign]


CALLED: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"tools": [CHAT_TOOL], "tool_choice": "required"},
        {"tools": [CHAT_TOOL], "tool_choice": CHAT_TOOL},
    ],
    ITEMS: [
        {"tools": [ITEM_TOOL], "tool_choice": "required"},
        {"tools": [ITEM_TOOL], "tool_choice": {"type": "function", "name": "find"}},
    ],
    BLOCKS: [
        {"tools": [BLOCK_TOOL], "tool_choice": {"type": "any"}},
        {"tools": [BLOCK_TOOL], "tool_choice": {"type": "tool", "name": "find"}},
    ],
}
FITTING: dict[str, dict[str, Any]] = {
    CHAT: {"response_format": FORMAT},
    ITEMS: {"text": {"format": {"type": "json_schema", "name": "a", "schema": RESULT}}},
    BLOCKS: {"output_config": {"format": {"type": "json_schema", "schema": RESULT}}},
}


def ask(served: Served, path: str, options: dict[str, Any]) -> Any:
    said = {"input": USER["content"]} if path == ITEMS else {"messages": [USER]}
    answer = served.post(path, {**said, LIMIT[path]: 300, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def parts_of(path: str, answer: Any) -> tuple[str, list[ToolCall]]:
    """The text of an answer, and its calls."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        made = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [ToolCall(one["name"], one["arguments"]) for one in made]
        return message["content"] or "", calls
    if path == ITEMS:
        items = answer["output"]
        texts = [i["content"][0]["text"] for i in items if i["type"] == "message"]
        made = [item for item in items if item["type"] == "function_call"]
        return "".join(texts), [ToolCall(one["name"], one["arguments"]) for one in made]
    blocks = answer["content"]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    made = [block for block in blocks if block["type"] == "tool_use"]
    return "".join(texts), [ToolCall(m["name"], json.dumps(m["input"])) for m in made]


@pytest.mark.parametrize("path", LIMIT)
def test_what_is_asked_for_is_served(served: Served, path: str) -> None:
    with brief(served.service.llm):
        for options in CALLED[path]:
            text, calls = parts_of(path, ask(served, path, options))
            checked(calls, [FIND])
            assert calls and not text


def test_answers_that_fit_are_served(
    answering: Served, request: pytest.FixtureRequest, record_property: Any
) -> None:
    """Then a turn ends, by the model's own token for it."""
    record_property("kind", request.node.callspec.params["answering"])
    llm = answering.service.llm
    for path in LIMIT:
        with brief(llm):
            text, calls = parts_of(path, ask(answering, path, FITTING[path]))
        jsonschema.validate(json.loads(text), RESULT)
        assert not calls
    special = llm.tokenizer.special
    end = next(
        name for name in reversed(llm.input_processor.dialect.ends) if name in special
    )
    with saying(llm, ADDED + end):
        found = llm.chat([USER], response_format=FORMAT)
    assert (found.content, found.finish_reason) == (ADDED, "stop")
    assert found.token_ids[-1] == special[end]


@pytest.mark.parametrize("path", LIMIT)
def test_calls_without_a_form_are_refused_as_served(
    answering: Served, path: str
) -> None:
    llm = answering.service.llm
    if llm.input_processor.dialect.several_calls:
        pytest.skip("its calls have a form")
    said = {"input": USER["content"]} if path == ITEMS else {"messages": [USER]}
    said |= {LIMIT[path]: 4}
    strict = {"tools": CALLED[path][0]["tools"]}
    for options in (*CALLED[path], strict, TOOLS[path] | FITTING[path], TOOLS[path]):
        error = answering.post(path, said | options).json()["error"]
        assert "this model's chat template has no place for tools" in error["message"]
        assert path == BLOCKS or error["param"] == "tools"
    none: Any = {"type": "none"} if path == BLOCKS else "none"
    ask(answering, path, TOOLS[path] | {"tool_choice": none, LIMIT[path]: 4})


def test_a_model_without_a_template_has_no_chats(tmp_path: Path) -> None:
    with family_llm(write_model(tmp_path / "tiny"), "gpt2") as llm:
        with pytest.raises(ValueError, match="expected chat_template"):
            llm.chat([USER], response_format=FORMAT)
        found = llm.generate("5 + 5 =", structured_outputs={"choice": ["10"]})
        assert found.result()[0].text == "10"


TWO_TOOLS = ({"name": "add"}, {"name": "find"})
TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {"tools": [{"type": "function", "function": one} for one in TWO_TOOLS]},
    ITEMS: {"tools": [{"type": "function", **one} for one in TWO_TOOLS]},
    BLOCKS: {
        "tools": [{**one, "input_schema": {"type": "object"}} for one in TWO_TOOLS]
    },
}
ALONE: dict[str, dict[str, Any]] = {
    CHAT: {"parallel_tool_calls": False},
    ITEMS: {"parallel_tool_calls": False},
    BLOCKS: {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}


@pytest.mark.parametrize("path", LIMIT)
def test_a_second_call_is_served_if_it_may_be(
    served: Served, request: pytest.FixtureRequest, path: str
) -> None:
    llm, kind = served.service.llm, request.node.callspec.params["answering"]
    written = f"{ONE[kind]}; {ONE[kind]}" if kind == "llama" else WRITTEN[kind]
    with saying(llm, written + llm.input_processor.dialect.ends[0]):
        _, calls = parts_of(path, ask(served, path, TOOLS[path]))
        _, alone = parts_of(path, ask(served, path, TOOLS[path] | ALONE[path]))
        options = {"tools": TOOLS[CHAT]["tools"], "max_tokens": 300, "temperature": 0}
        told = llm.chat([USER], parallel_tool_calls=False, **options)
    assert len(calls) == 2
    first = [json.loads(one.arguments) for one in (*alone, *told.tool_calls)]
    assert first == [json.loads(ADDED)] * 2
    assert told.finish_reason == "tool_calls"
    with pytest.raises(TypeError, match="parallel_tool_calls is None"):
        llm.chat([USER], parallel_tool_calls=None)


def test_a_streamed_call_adds_up(served: Served) -> None:
    llm = served.service.llm
    options = {"tools": [CHAT_TOOL], "tool_choice": "required", "temperature": 0}
    with brief(llm):
        _, calls = parts_of(CHAT, ask(served, CHAT, options))
        body = {"messages": [USER], "max_tokens": 300, **options}
        events = served.events(CHAT, body)
    texts: dict[int, str] = {}
    for event in events:
        for call in event["choices"][0]["delta"].get("tool_calls") or ():
            added = call["function"]["arguments"]
            texts[call["index"]] = texts.get(call["index"], "") + added
    assert [*texts.values()] == [call.arguments for call in calls]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("restricted", [False, True])
def test_an_answer_like_a_call_is_served_as_an_answer(
    served: Served, restricted: bool
) -> None:
    """Also where its grammar is the one of allowed tokens, which spell as they like."""
    llm = served.service.llm
    options: dict[str, Any] = {"response_format": {"type": "json_object"}}
    options["logprobs"] = True
    if restricted:
        options["allowed_token_ids"] = [*range(llm.tokenizer.vocab_size)]
    with saying(llm, LIKE_A_CALL + llm.input_processor.dialect.ends[0]):
        assert parts_of(CHAT, ask(served, CHAT, options)) == (LIKE_A_CALL, [])


ORDER = ("rome", "paris")  # the second call's result comes first


@pytest.mark.parametrize("kind", ["qwen", "mistral"])
def test_results_of_parallel_calls_keep_their_calls(
    opened: dict[str, Opened], kind: str, tmp_path: Path
) -> None:
    """In whatever order they come back, by each endpoint; Mistral is shown ids."""
    with family_llm(write_model(tmp_path / "tiny"), kind) as llm, serving(llm) as own:
        made = [{"id": name, "name": "find"} for name in ("paris", "rome")]
        calls = [
            {"id": one["id"], "type": "function"}
            | {"function": {"name": "find", "arguments": "{}"}}
            for one in made
        ]
        told = [{"role": "tool", "tool_call_id": n, "content": n} for n in ORDER]
        chat = [USER, {"role": "assistant", "tool_calls": calls}, *told]
        items = [
            {"type": "function_call", "call_id": one["id"], "name": "find"}
            | {"arguments": "{}"}
            for one in made
        ]
        items += [
            {"type": "function_call_output", "call_id": name, "output": name}
            for name in ORDER
        ]
        used = [{"type": "tool_use", "input": {}, **one} for one in made]
        results = [
            {"type": "tool_result", "tool_use_id": name, "content": name}
            for name in ORDER
        ]
        blocks = [USER, {"role": "assistant", "content": used}]
        blocks += [{"role": "user", "content": results}]
        with noted(llm) as prompts:
            ask(own, CHAT, {"messages": chat, "max_tokens": 1})
            ask(own, ITEMS, {"input": [USER, *items], "max_output_tokens": 1})
            ask(own, BLOCKS, {"messages": blocks, "max_tokens": 1})
    shown = opened[kind].tokenizer.decode(prompts[0])
    assert prompts[0] == prompts[1] == prompts[2]
    assert shown.index("rome") < shown.index("paris")
    if kind == "mistral":
        rome, paris = shown.index("000000001", shown.index("rome")), len(shown)
        assert rome < shown.index("paris") < shown.index("000000000", rome) < paris


THOUGHT, SKY = "I'll look.", '{"sky": "blue"}'


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_what_was_called_is_shown_alike(served: Served, key: str) -> None:
    """Thoughts, calls and results of earlier turns, by each endpoint."""
    llm, arguments = served.service.llm, CALL["function"]["arguments"]
    made = {**CALL, "function": {**CALL["function"], "name": "find"}}
    system = {"role": "system", "content": "Be brief."}
    assistant: dict[str, Any] = {"role": "assistant", key: THOUGHT}
    assistant["tool_calls"] = [made]
    result = {"role": "tool", "tool_call_id": made["id"], "content": SKY}
    chat = {"messages": [system, USER, assistant, result], "tools": [CHAT_TOOL]}
    reasoning: dict[str, Any] = {"type": "reasoning", "summary": []}
    reasoning["content"] = [{"type": "reasoning_text", "text": THOUGHT}]
    given = {"type": "function_call", "call_id": "c", "name": "find"}
    output = {"type": "function_call_output", "call_id": "c", "output": SKY}
    items = [USER, reasoning, {**given, "arguments": arguments}, output]
    blocks = [
        {"type": "thinking", "thinking": THOUGHT, "signature": ""},
        {"type": "tool_use", "id": "c", "name": "find", "input": json.loads(arguments)},
    ]
    told = {"type": "tool_result", "tool_use_id": "c", "content": SKY}
    messages = [USER, {"role": "assistant", "content": blocks}]
    messages += [{"role": "user", "content": [told]}]
    with noted(llm) as prompts:
        ask(served, CHAT, {**chat, "max_tokens": 1})
        body = {"instructions": "Be brief.", "input": items, "tools": [ITEM_TOOL]}
        ask(served, ITEMS, {**body, "max_output_tokens": 1})
        body = {"system": "Be brief.", "messages": messages, "tools": [BLOCK_TOOL]}
        ask(served, BLOCKS, {**body, "max_tokens": 1})
    assert prompts[0] == prompts[1] == prompts[2]
    shown, special = llm.tokenizer.decode(prompts[0]), llm.tokenizer.special
    assert "find" in shown and "Rome" in shown and "blue" in shown
    begin = llm.input_processor.dialect.begin
    assert sum(id in begin for id in prompts[0]) == len(begin), "once"
    assert (THOUGHT in shown) == ("<think>" in special)
