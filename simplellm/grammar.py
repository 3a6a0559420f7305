"""What an output may still become: a grammar over tokens, by llguidance.

A grammar is checked and compiled once. Each request that must follow it walks through
it with its own tokens, and asks before each new one which it may get.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

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


class GrammarError(ValueError):
    """A grammar that cannot be used."""


def llguidance() -> Any:
    """The library, which is an extra. Raises GrammarError if it is not there."""
    try:
        return import_module("llguidance")
    except ImportError:
        raise GrammarError(
            "structured output needs llguidance; expected it to be installed, "
            "as by pip install 'simplellm[structured]'"
        ) from None


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
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return Grammar(matcher, self.vocab_size)


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, which any number of requests may walk."""

    matcher: Any  # llguidance's, at the beginning
    vocab_size: int

    def walk(self) -> "Walk":
        return Walk(self.matcher.deep_copy())


class Walk:
    """How far one output has come in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.length = 0  # tokens of the output that were taken

    def advance(self, output: Sequence[int]) -> None:
        """Take what is new in ``output``. Raises GrammarError where it leaves the way.

        Nothing comes behind a complete output but the token that ends it.
        """
        new = output[self.length :]
        self.length += len(new)
        if not self.matcher.is_stopped():
            self.matcher.consume_tokens(list(new))
        self.check()

    def check(self) -> None:
        """Raise GrammarError if llguidance has given up."""
        if self.matcher.is_error():
            raise GrammarError(self.matcher.get_error())

    def forced(self) -> list[int]:
        """The tokens that have to come next, as many as are sure."""
        found: list[int] = self.matcher.compute_ff_tokens()
        return found


class Filler:
    """Fills the masks of a step, several at a time, while the device computes."""

    @cached_property
    def executor(self) -> Any:
        """Threads of llguidance's own."""
        return llguidance().LLExecutor()

    def fill(self, walks: Sequence[Walk], bits: np.ndarray) -> None:
        """Write what may come next in each of ``walks`` to a row of uint32 [N, W]."""
        rows = [(walk.matcher, row) for row, walk in enumerate(walks)]
        size = bits.shape[1] * bits.itemsize
        self.executor.unsafe_compute_mask_ptr(rows, bits.ctypes.data, size, len(bits))
        for walk in walks:
            walk.check()
