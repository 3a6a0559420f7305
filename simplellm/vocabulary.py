"""Grammars over the tokens of a model: what llguidance has to know of them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from simplellm.grammar import Grammar, GrammarError, llguidance
from simplellm.tokenizer import Tokenizer

# What llguidance may spend, on a grammar and on a step in it. Schemas that people use
# need a hundredth of it; what needs more would hold up the others.
LIMITS = {
    "max_grammar_size": 500_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
}


class Vocabulary:
    """A tokenizer as llguidance wants it: every id's bytes, and a way to encode."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int):
        self.tokenizer, self.eos_token_id = tokenizer, eos_token_id
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        self.special_token_ids = [
            id for id in range(vocab_size) if tokenizer.is_special(id)
        ]

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        return self.tokenizer.encode(text)


@dataclass(frozen=True)
class Grammars:
    """Compiles grammars over the ``vocab_size`` tokens of a model."""

    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: frozenset[int]  # one of them follows what is complete

    @cached_property
    def vocabulary(self) -> Any:
        """llguidance's tokenizer, which takes a second to make for 200,000 tokens."""
        library, ends = llguidance(), sorted(self.eos_token_ids)
        given = Vocabulary(self.tokenizer, self.vocab_size, ends[0])
        wrapped = library.TokenizerWrapper(given)
        return library.LLTokenizer(wrapped, self.vocab_size, ends)

    def compile(self, text: str) -> "Grammar":
        """``text`` is Lark or JSON, as llguidance takes it. Raises GrammarError."""
        library = llguidance()
        limits = library.LLParserLimits(**LIMITS)
        matcher = library.LLMatcher(self.vocabulary, text, log_level=0, limits=limits)
        # Some that allow no text at all, or too much at once, show it with a mask only.
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            reason = first.get_error().partition("<state>")[0].strip().splitlines()
            raise GrammarError(" ... ".join(dict.fromkeys([reason[0], reason[-1]])))
        return Grammar(text, matcher)
