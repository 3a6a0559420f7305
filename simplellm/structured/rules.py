"""Makes llguidance's rules of JSON schemas, regular expressions, choices, grammars.

Rules are a dict, `{"json_schema": ...}` or `{"lark_grammar": ...}`. What is too large
for llguidance, or would let the model write control tokens, is refused here; the limits
of its parser bound the rest.
"""

import json
import re
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from simplellm.base.config import ParameterError, as_texts, expect
from simplellm.base.grammar import LEFT_OPEN, lark_string, llguidance
from simplellm.base.sampling_params import StructuredOutputs
from simplellm.structured.schemas import HYPHEN, JSON_ESCAPES, problem_of

# The longest that a schema, an expression or a grammar may be, in characters.
MAX_TEXT = 2**17
# Lines of a Lark grammar and brackets in them. llguidance recurses: 2,000 of them take
# some of the 8 MB that a thread's stack has, 5,000 crash the process.
MAX_RULES = 500
MAX_CHOICES = 10_000
WHERE = "structured_outputs"  # where they stand, for what is said of them
# How JSON is written: as most do it, with a space or none behind a comma or a colon.
# Where any white space may stand a model that is at a loss fills its answer with it,
# and after every sign it has to be asked whether it wants some.
COMPACT = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": JSON_ESCAPES,
}

# Strings, regular expressions and comments of a Lark grammar, as llguidance reads them.
LARK_TEXTS = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(?:#|//)[^\n]*')
# Control tokens by name or id, another grammar, a negation (which control tokens fit
# too), an intersection (of eight short words it takes a GB), or a directive: a schema
# would go unchecked, an option would loosen the rules. Guidance begins with no options.
LARK_REFUSED = re.compile(r"<\S*|[@~&]|%(?!ignore\b|import\b|llguidance\s*\{\s*\})\w*")
# What a regular expression has otherwise than Lark's, where a slash would end it. As in
# ECMA-262 and XGrammar: llguidance's digits and letters are those of all scripts.
IN_LARK = {"/": r"\/", "-": r"\-", r"\d": "[0-9]", r"\D": "[^0-9]"}
IN_LARK |= {r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
# How a grammar begins in GBNF, which is llama.cpp's notation, XGrammar's and vLLM's.
GBNF = re.compile(r"(?:\s|#[^\n]*\n)*[\w-]+\s*::=")


def output_rules(outputs: StructuredOutputs) -> dict[str, Any]:
    """The rules for the text that ``outputs`` describes. Raises ValueError."""
    if outputs.json is not None:
        return schema_rules(outputs.json, f"{WHERE}.json")
    if outputs.regex is not None:
        return regex_rules(outputs.regex)
    if outputs.choice is not None:
        return choice_rules(outputs.choice)
    return lark_rules(outputs.grammar or "")


def rules_text(*rules: Mapping[str, Any]) -> str:
    """Rules as the text that llguidance takes: the first may name those after it."""
    return json.dumps({"grammars": rules})


def any_spelling(text: str) -> str:
    """A text for llguidance that any tokens may spell.

    Where only one text can follow, llguidance otherwise allows a single token: the one
    with which the tokenizer would begin it.
    """
    first, *rest = json.loads(text)["grammars"]
    if "lark_grammar" not in first:
        rest = [{"name": "whole", **first}, *rest]
        first = {"lark_grammar": "start: @whole"}
    lark = first["lark_grammar"]  # its rule of a turn is read again: it stays in front
    first = {"lark_grammar": f'{lark}\n%llguidance {{"no_forcing": true}}\n'}
    return rules_text(first, *rest)


def checked_text(text: str, where: str) -> str:
    """``text`` if it is neither empty nor too long. Raises ValueError."""
    expect(text, where, text, "a text that is not empty")
    count = f"{len(text)} characters"
    expect(len(text) <= MAX_TEXT, where, count, f"at most {MAX_TEXT} characters")
    return text


def regex_rules(regex: str) -> dict[str, Any]:
    """The rules of a text that ``regex`` matches as a whole.

    So a "^" in front and a "$" at the end are dropped; elsewhere llguidance has none.
    Digits and word characters are those of ASCII, as in a schema's pattern.
    """
    where = f"{WHERE}.regex"
    bare = checked_text(regex, where).removeprefix("^")
    if re.search(r"(?<!\\)(?:\\\\)*\$$", bare):
        bare = bare[:-1]
    odd = rf"{HYPHEN}|\\.|/"
    written = re.sub(odd, lambda m: IN_LARK.get(m[0], m[0]), bare, flags=re.S)
    return {"lark_grammar": f"start: /{written or '(?:)'}/\n{LEFT_OPEN}"}


def choice_rules(choice: Any) -> dict[str, Any]:
    """The rules of one text among ``choice``."""
    where = f"{WHERE}.choice"
    texts = as_texts(where, choice, MAX_CHOICES, MAX_TEXT)
    expect(texts, where, choice, "at least one text")
    choices = " | ".join(map(lark_string, texts))
    return {"lark_grammar": f"start: CHOICE\nCHOICE: {choices}\n{LEFT_OPEN}"}


def lark_rules(grammar: str) -> dict[str, Any]:
    """The rules of ``grammar``, which is written in Lark, or in GBNF."""
    where = f"{WHERE}.grammar"
    if GBNF.match(checked_text(grammar, where)):
        try:
            grammar = llguidance().grammar_from("gbnf", grammar)
        except ValueError as error:
            raise ParameterError(f"{where}: {error}", where) from None
    bare = LARK_TEXTS.sub(" ", grammar)
    count = len(re.findall(r"[(\[\n]", bare)) + 1
    most = f"at most {MAX_RULES} lines and brackets"
    expect(count <= MAX_RULES, where, f"{count} of them", most)
    odd = LARK_REFUSED.search(bare)
    expected = "no special tokens, no '@', '~' or '&', no '%' but %ignore and %import"
    expect(odd is None, f"what {where} has", odd and odd[0], expected, param=where)
    return {"lark_grammar": f"{grammar}\n{LEFT_OPEN}"}


def schema_rules(schema: Any, where: str) -> dict[str, Any]:
    """The rules of JSON that fits ``schema``, text or a dict.

    Raises ValueError with the path of what can't be done; it begins with ``where``.
    """
    problem = None
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        if len(text) <= MAX_TEXT:
            schema = json.loads(text)
            problem = problem_of(schema, where)
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"{where} is {short(schema)}; expected JSON that can be read: {error}"
    if problem is not None:
        raise ParameterError(problem, where)
    checked_text(text, where)
    return {"json_schema": schema | {"x-guidance": COMPACT}}
