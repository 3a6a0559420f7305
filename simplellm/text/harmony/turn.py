"""The grammar of a turn: free thoughts, then an answer or a call that fits.

One grammar covers all that the model writes after `<|start|>assistant`, headers too.
So a mask need not know where reasoning ends, and no header can go wrong.
"""

import json
from collections.abc import Mapping
from typing import Any

# Of a text: a JSON schema or a Lark grammar, in the words of llguidance.
Rules = dict[str, Any]

# Those of all text: control tokens are none.
FREE: Rules = {"lark_grammar": "start: /(?s:.*)/\n"}

SHARED_RULES = """
analysis: <|channel|> "analysis" <|message|> TEXT <|end|> <|start|> "assistant"
preamble: <|channel|> "commentary" <|message|> TEXT <|end|> <|start|> "assistant"
json: " "? <|constrain|> "json"
TEXT: /(?s:.*)/
"""


def final_rule(name: str) -> str:
    """The rule of an answer whose content is the text ``name``."""
    return f'<|channel|> "final" json? <|message|> @{name} <|return|>'


def call_rule(function: str, name: str) -> str:
    """The rule of a call of ``function`` whose arguments are the text ``name``.

    Its header names the function before the channel or after it: gpt-oss writes both.
    """
    before = json.dumps(f" to=functions.{function}")
    after = json.dumps(f"commentary to=functions.{function}")
    header = f'({before} <|channel|> "commentary" | <|channel|> {after})'
    return f"{header} json? <|message|> @{name} <|call|>"


def turn_grammar(answer: Rules | None, calls: Mapping[str, Rules]) -> str:
    """The grammar of a turn, as llguidance takes it.

    ``answer`` are the rules of a final answer, None where there can be none; ``calls``
    those of the arguments of each function that can be called.
    """
    texts: dict[str, Rules] = {}
    endings = []
    if answer is not None:
        texts["final"] = answer
        endings.append(final_rule("final"))
    for number, (function, arguments) in enumerate(calls.items()):
        texts[name := f"call_{number}"] = arguments
        endings.append(call_rule(function, name))
    ends = "\nend: " + "\n  | ".join(endings)
    before = "(analysis | preamble)*" if answer is not None else "analysis? preamble?"
    start = f"start: {before} end"
    turn = {"lark_grammar": start + ends + SHARED_RULES}
    named = [{"name": name, **rules} for name, rules in texts.items()]
    return json.dumps({"grammars": [turn, *named]})
