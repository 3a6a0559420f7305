"""The grammar compiler: from llguidance's text to a grammar over a model's tokens."""

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from simplellm.base.grammar import (
    LEFT_OPEN,
    Closers,
    Grammar,
    GrammarError,
    llguidance,
    reason_of,
)
from simplellm.structured.rules import rules_text
from simplellm.structured.schemas import innermost_refused
from simplellm.structured.vocabulary import Vocabulary
from simplellm.text.tokenizer import Tokenizer

# What llguidance may spend, on a grammar and on a step in it. Schemas that people use
# need a hundredth of it; what needs more would hold up the others.
LIMITS = {
    "max_grammar_size": 500_000,
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "verbose_errors": False,  # they would hold the whole grammar
}
# Lexers of a grammar, so that as many threads can make its masks at once. One that the
# processor needs longer than QUICK seconds for has one lexer only.
MOST_LEXERS, QUICK = min(8, os.cpu_count() or 1), 0.005
# Signs that end a value of JSON, and then what a missing one may be made of.
CLOSERS = b'"}],:0123456789-tfn[{ '
LISTING = re.compile(r" *(\d+ \||\^*$)")  # in an error: a line of the grammar, a mark
SEARCH_SECONDS = 1.0  # for the schema that is to blame, inside one that is refused


@dataclass(frozen=True)
class Grammars:
    """Compiles grammars over the ``vocab_size`` tokens of a model."""

    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: frozenset[int]  # one of them follows what is complete

    @cached_property
    def vocabulary(self) -> Any:
        """llguidance's tokenizer. 200,000 tokens take 0.5 s and hold the GIL."""
        library, ends = llguidance(), sorted(self.eos_token_ids)
        library_vocabulary = Vocabulary(self.tokenizer, self.vocab_size, ends[0])
        wrapped = library.TokenizerWrapper(library_vocabulary)
        return library.LLTokenizer(wrapped, self.vocab_size, ends)

    @cached_property
    def closers(self) -> Closers:
        """What ends a text: a control token, a quote, a bracket, or else a short value.

        Within a string a bracket is a letter, so that the quote goes first.
        """
        ids = range(self.vocab_size)
        control = frozenset(id for id in ids if self.tokenizer.is_special(id))
        known = {token: id for id, token in self.tokenizer.tokens.items()}
        signs = (known.get(bytes([byte])) for byte in CLOSERS)
        some = [*control, *(id for id in signs if id is not None)]
        return Closers(np.array(some, dtype=np.int64), known.get(b'"'), control)

    def compile(self, text: str) -> "Grammar":
        """The grammar of ``text``, Lark or JSON for llguidance. Raises GrammarError."""
        library, vocabulary = llguidance(), self.vocabulary
        limits, begin = library.LLParserLimits(**LIMITS), time.thread_time()
        make = partial(library.LLMatcher, vocabulary, text, log_level=0, limits=limits)
        matcher = make()
        # Some that allow no text at all, or too much at once, show it with a mask only.
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            lines = reason_of(first).splitlines()
            reason = [line for line in lines if not LISTING.match(line)] or lines
            raise GrammarError(" ... ".join(dict.fromkeys([reason[0], reason[-1]])))
        more = MOST_LEXERS - 1 if time.thread_time() - begin < QUICK else 0
        others = [make() for _ in range(more)]
        closers = None if json.dumps(LEFT_OPEN)[1:-1] in text else self.closers
        return Grammar(text, matcher, others, closers=closers)


Compile = Callable[[str], Grammar]


def refusal(rules: Mapping[str, Any], compile: Compile) -> str | None:
    """Why llguidance refuses ``rules``, and where; None if it doesn't.

    llguidance names no path. So this searches for the innermost schema that it refuses
    for a reason of the same kind, the text before a colon.
    """
    reason = reason_against(rules, compile)
    if reason is None or "json_schema" not in rules:
        return reason

    def same_reason(schema: Mapping[str, Any]) -> bool:
        other = reason_against({"json_schema": schema}, compile) or ""
        return other.partition(":")[0] == reason.partition(":")[0]

    if same_reason({}):  # it's no schema's fault: llguidance may be missing
        return reason
    until = time.monotonic() + SEARCH_SECONDS
    path = innermost_refused(rules["json_schema"], same_reason, until)
    return f"{reason}, in schema{path}" if path else f"{reason}, as a whole"


def reason_against(rules: Mapping[str, Any], compile: Compile) -> str | None:
    """The reason why llguidance refuses ``rules``; None if it doesn't."""
    try:
        compile(rules_text(rules))
    except GrammarError as error:
        return str(error)
    return None
