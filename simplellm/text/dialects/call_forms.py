"""How other models than gpt-oss write a turn, and the grammar of one that has to fit.

Thoughts stand between tags, and so do calls, in one of a few forms. Tags are control
tokens: whether the tokenizer has them tells which form a model knows.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simplellm.base.config import expect
from simplellm.base.grammar import LEFT_OPEN, Grammar, lark_string
from simplellm.text.dialects.whole_calls import XML, all_kinds
from simplellm.text.harmony.turn import FREE, Rules
from simplellm.text.tokenizer import Tokenizer

THINK_START, THINK_END = "<think>", "</think>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"  # Qwen
PYTHON = "<|python_tag|>"  # Llama 3.1 and later, which may as well leave it out
CALLS, ID_START, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"  # Mistral
TAGS = (
    *(THINK_START, THINK_END, CALL_START, CALL_END, PYTHON),
    *(CALLS, ID_START, ARGUMENTS),
)
# What a schema may ask of a text, beside an enum; and what one inside it may need.
HELD = "pattern format minLength maxLength const enum allOf oneOf $ref".split()
AROUND = ("$schema", "$defs", "definitions", "x-guidance")
FINAL = "final"  # the grammar of an answer that has to fit
# How such an answer stands in a turn: alone, or behind white space that is none of it.
ANSWER, GAP_ANSWER = f"@{FINAL}", f"GAP @{FINAL}"


@dataclass(frozen=True)
class CallForm:
    """How models write calls, in Lark with the names of control tokens.

    ``opening`` and ``ending`` stand around the arguments of a `call`, and ``calls`` are
    those of a turn, where MORE are the ones behind the first. In the opening, NAME is
    the function's name, and JSON_NAME that as JSON has it. A ``bare`` call may also
    make up a turn without any tag. Arguments are JSON, unless they are ``xml``.

    A form is two things: this grammar, in FORMS, with its tags in TAGS; and how it is
    read, by `TagParser` in tags.py: OPENINGS there, its tag in ``push``, or, of calls
    that come as a whole, whole_calls.py.
    """

    opening: str
    ending: str
    calls: str
    more: str = ""
    bare: bool = False
    xml: bool = False

    def tags(self) -> list[str]:
        """The control tokens that calls are written with."""
        return TAG.findall(" ".join([self.opening, self.ending, self.calls]))

    @classmethod
    def of(cls, tokenizer: Tokenizer, written: Sequence[str]) -> "CallForm | None":
        """The form that a model knows, by its tags and its template's texts."""
        special = {*tokenizer.special}
        xml = any(XML in text for text in written)
        some = [form for form in FORMS if form.xml == xml]
        return next((form for form in some if {*form.tags()} <= special), None)


TAG = re.compile(r"\[[A-Z_]+\]|</?\w+>|<\|\w+\|>")
JSON_OPENING = r'"{\"name\": " JSON_NAME ", \"%s\": "'
# The first one whose tags a tokenizer has is its model's. Qwen ends a line behind its
# calls before it stops: were that forbidden, it would call for ever.
FORMS = (
    CallForm("[TOOL_CALLS] NAME ([CALL_ID] ID)? [ARGS]", "", "call MORE", "call*"),
    CallForm(
        JSON_OPENING % "arguments",
        r'(", \"id\": \"" ID "\"")? "}"',
        '[TOOL_CALLS] " "? "[" call MORE "]"',
        '(", " call)*',
    ),
    CallForm(
        r'<tool_call> "\n" ' + JSON_OPENING % "arguments",
        r'"}\n" </tool_call>',
        r'call MORE "\n"?',
        r'("\n" call)*',
    ),
    CallForm(JSON_OPENING % "parameters", '"}"', "<|python_tag|> call", bare=True),
    CallForm(
        r'<tool_call> "\n<function=" NAME ">\n"',
        r'"\u003c/function>\n" </tool_call>',
        r'call MORE "\n"?',
        r'("\n" call)*',
        xml=True,
    ),
)
# UNLIKE is text that does not begin as a bare call. GAP is what stands before an
# answer: line breaks behind thoughts, and the space that SentencePiece begins with.
# There is none where an answer may begin with these itself, and BREAKS behind thoughts.
BREAKS = "\n\n"
SHARED_TEXTS = r"""
TEXT: /(?s:.*)/
UNLIKE: /(\s*[^{\s](?s:.*))?/
GAP: /[ \n]{0,2}/
ID: /[a-zA-Z0-9]{9}/
"""
# Arguments in XML, where nothing is asked of them, and what ends a parameter's value.
PARAMETERS = r"""
parameters: ("<parameter=" PARAMETER ">\n" value)*
PARAMETER: /[^>\n]+/
value[lazy]: /(?s:.*)\n<\/parameter>\n/
"""
VALUE_END = lark_string("\n</parameter>\n")

# An expression, and a choice whose texts don't begin with white space, as rules.py
# writes them. The parts of an expression that match none, and what else may match some.
EXPRESSION = re.compile(r"start: /(.*)/\n", re.DOTALL)
CHOICE = re.compile(r'start: CHOICE\nCHOICE:(?: (?:\| )?"(?! |\\n)(?:\\.|[^"\\])*")+\n')
PRINTED = re.compile(r"\\[dwS!-/:-@\[-^`{-~]")
BLANK = re.compile(r"[\x00- .\\]|\[[:^]")


def xml_parameters(
    schema: Mapping[str, Any], name: str
) -> tuple[str, dict[str, Rules]]:
    """Lark of the parameters in XML that fit a tool's ``schema``, and what it names.

    They come in the schema's order. Texts are free, or one of an enum. Raises
    ValueError for a text that has to fit something else.
    """
    around = {key: schema[key] for key in AROUND if key in schema}
    needed, parts = schema.get("required") or (), list[str]()
    texts = dict[str, Rules]()
    for number, (key, one) in enumerate((schema.get("properties") or {}).items()):
        one = one if isinstance(one, dict) else {}
        kinds, listing = all_kinds(one), one.get("enum")
        words = listing if isinstance(listing, list) else []
        if words and all(isinstance(word, str) for word in words):
            value = f"({' | '.join(map(lark_string, words))}) {VALUE_END}"
        elif kinds and "string" not in kinds:
            texts[own := f"{name}_{number}"] = {"json_schema": one | around}
            value = f"@{own} {VALUE_END}"
        else:
            every = [one, *(one.get("anyOf") or ())]
            odd = next((key for key in HELD for part in every if key in part), None)
            expected = "none where arguments are XML, which bounds no text"
            expect(odd is None, f"{odd} of the parameter {key}", "given", expected)
            value = "value"
        opening = lark_string(f"<parameter={key}>\n")
        parts.append(f"{opening} {value}" if key in needed else f"({opening} {value})?")
    return " ".join(parts), texts


def may_begin_blank(answer: Rules) -> bool:
    """Whether a text may begin with a space or a line break, for all that is known."""
    lark = answer.get("lark_grammar", "").removesuffix(LEFT_OPEN)
    if expression := EXPRESSION.fullmatch(lark):
        return BLANK.search(PRINTED.sub("", expression[1])) is not None
    return "json_schema" not in answer and not CHOICE.fullmatch(lark)


def fill_control_tokens(
    lark: str, special: Mapping[str, int], function: str = ""
) -> str:
    """Lark with the control tokens of ``lark`` by their ids, and a function's name."""
    names = {"NAME": function, "JSON_NAME": json.dumps(function, ensure_ascii=False)}

    def replacement(match: re.Match[str]) -> str:
        name = names.get(match[0])
        return f"<[{special[match[0]]}]>" if name is None else lark_string(name)

    return re.sub(f"(?:JSON_)?NAME|{TAG.pattern}", replacement, lark)


def is_thinking(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether a turn behind ``prompt`` begins within thoughts."""
    control = (id for id in reversed(prompt) if tokenizer.is_special(id))
    return next(control, None) == tokenizer.special.get(THINK_START, -1)


def tags_grammar(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    answer: Rules | None,
    calls: Mapping[str, Rules],
    alone: bool = False,
    form: CallForm | None = None,
) -> str:
    """The grammar of a turn behind ``prompt``, as `turn_grammar` for harmony.

    Thoughts are free; calls have the ``form``, and one is ``alone`` where there may be
    no other. Raises ValueError where it is unknown how calls are written.
    """
    special = tokenizer.special
    expected = "none where something has to fit: this model's calls have no tags"
    expect(form or not calls, "tools", list(calls), expected)
    odd = next((name for name in calls if not name.isprintable()), None)
    expect(odd is None, "a name in tools", odd, "characters that need no escape")
    texts, some = dict[str, Rules](), list[str]()
    free, turns, rules = answer == FREE, list[str](), list[str]()
    for number, (function, arguments) in enumerate(calls.items()):
        assert form is not None
        written = f"@call_{number}"
        if not form.xml:
            texts[f"call_{number}"] = arguments
        elif "properties" in (schema := arguments["json_schema"]):
            written, own = xml_parameters(schema, f"call_{number}")
            texts |= own
        else:
            written = "parameters"
        parts = [
            fill_control_tokens(part, special, function)
            for part in (form.opening, form.ending)
        ]
        some.append(f"{parts[0]} {written} {parts[1]}")
    if form and calls:
        several = form.calls.replace("MORE", "" if alone else form.more)
        rules = [
            f"calls: {fill_control_tokens(several, special)}",
            f"call: {' | '.join(some)}",
        ]
        text = "UNLIKE" if form.bare else "TEXT"
        turns = [f"{text} calls?" if free else "calls"]
        turns += ["call"] if form.bare and (free or answer is None) else []
    gap = "GAP"
    if answer is not None and not (free and turns):
        exact = not free and may_begin_blank(answer)
        gap = lark_string(BREAKS) if exact else gap
        texts[FINAL] = answer
        turns.append(ANSWER if exact else GAP_ANSWER)
    thoughts = ""
    if is_thinking(tokenizer, prompt):
        thoughts = fill_control_tokens(f"TEXT {THINK_END} {gap}", special)
    elif THINK_END in special:
        thoughts = fill_control_tokens(
            f"({THINK_START} TEXT {THINK_END} {gap})?", special
        )
    start = f"start: {thoughts} ({' | '.join(turns)})"
    shared = SHARED_TEXTS + PARAMETERS * bool(form and form.xml)
    turn = {"lark_grammar": "\n".join([start, *rules, shared])}
    named = [{"name": name, **given} for name, given in texts.items()]
    return json.dumps({"grammars": [turn, *named]})


def turn_rule(grammar: Grammar | None) -> str:
    """What a turn is made of in a grammar that `tags_grammar` made; "" without one."""
    if grammar is None:
        return ""
    turn = json.loads(grammar.text)["grammars"][0]["lark_grammar"]
    return str(turn.partition("\n")[0])
