"""Grammars over tokens, by llguidance: what an output may still become.

A grammar is checked and compiled once. Each request that must follow it has a state of
its own, which takes the request's tokens and says which may come next.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import count
from typing import Any

import numpy as np

# The last line of a grammar whose texts are cut where their limit comes: what is no
# JSON is worth nothing if it is closed.
LEFT_OPEN = "// not closed at max_tokens\n"


def lark_string(text: str) -> str:
    """``text`` as a string of Lark."""
    return json.dumps(text).replace("\x7f", r"\u007f")


class GrammarError(ValueError):
    """A grammar that cannot be used; ``request_id``: whose request's, if it runs."""

    request_id: int | None = None


def llguidance() -> Any:
    """The library, which is an extra. Raises GrammarError if it is not there."""
    try:
        return import_module("llguidance")
    except ImportError:
        raise GrammarError(
            "structured output needs llguidance; expected it to be installed, "
            "as by pip install 'simplellm[structured]'"
        ) from None


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, which any number of requests may follow."""

    text: str  # as llguidance takes it
    matcher: Any  # llguidance's, at the beginning; None if another process has it
    # The same compiled again. Copies of one share its lexer, behind a lock: the masks
    # of their states are made one after another, however many threads there are.
    others: Sequence[Any] = ()
    turns: Iterator[int] = field(default_factory=count)
    closers: "Closers | None" = None

    def start(self, request_id: int | None = None) -> "GrammarState":
        """The state at the beginning, of the request of this id."""
        every = self.matcher, *self.others
        matcher = every[next(self.turns) % len(every)].deep_copy()
        return GrammarState(matcher, request_id, self.closers)


@dataclass(frozen=True, eq=False)
class Closers:
    """The tokens that bring a text to its end, the quickest first."""

    tokens: np.ndarray  # int64 [N]
    quote: int | None  # the one that ends a string, if there is a token for it
    control: frozenset[int]  # the control tokens of the model, some of which end a text

    def first_allowed(self, bitmask: bytes) -> int:
        """The first of the tokens that a mask of llguidance allows, or any other."""
        bits = np.frombuffer(bitmask, dtype=np.uint8)
        allowed = bits[self.tokens // 8] >> (self.tokens % 8) & 1
        if allowed.any():
            return int(self.tokens[allowed.argmax()])
        return int(np.unpackbits(bits, bitorder="little").argmax())


def reason_of(matcher: Any) -> str:
    """Why llguidance has given up."""
    error: str = matcher.get_error()
    error = error.replace("NoExtensionBias", "there is no text that fits")
    return error.removesuffix("<non-verbose/>").strip()


class GrammarState:
    """How far one output has come in its grammar."""

    def __init__(
        self, matcher: Any, request_id: int | None, closers: Closers | None = None
    ) -> None:
        self.matcher, self.request_id, self.closers = matcher, request_id, closers
        self.length = 0  # tokens of the output that were taken

    def advance(self, new: Sequence[int]) -> None:
        """Take the output's new tokens. Raises GrammarError where they leave the way.

        Nothing comes behind a complete output but the token that ends it.
        """
        self.length += len(new)
        if not self.matcher.is_stopped():
            self.matcher.consume_tokens(list(new))
        self.check()

    def after(self, token: int, forces: bool) -> "GrammarState | None":
        """The state after ``token``, too, if what follows it is to be sampled.

        None if it may not come here, or if it ends the output, or if the grammar
        ``forces`` what comes then.
        """
        state = GrammarState(self.matcher.deep_copy(), self.request_id)
        state.length = self.length + 1
        took = state.matcher.try_consume_tokens([token])
        if took < 1 or state.matcher.is_stopped() or state.matcher.is_error():
            return None
        return None if forces and state.forced() else state

    def check(self) -> None:
        """Raise GrammarError if llguidance has given up."""
        if self.matcher.is_error():
            error = GrammarError(reason_of(self.matcher))
            error.request_id = self.request_id
            raise error

    def forced(self) -> list[int]:
        """The tokens that have to come next, as many as are sure."""
        tokens: list[int] = self.matcher.compute_ff_tokens()
        return tokens

    def in_string(self, closing: Sequence[int]) -> bool:
        """Whether the output is in a string, by what `closing` says."""
        quote = self.closers and self.closers.quote
        return closing[0] == quote and not self.forced()

    def closing(self, most: int) -> list[int]:
        """Tokens, ``most`` at most, that complete the text which the output is in.

        None where there are none, nor where more of the output would have to follow:
        thoughts are not ended for the sake of an answer that isn't begun.
        """
        matcher, tokens = self.matcher.deep_copy(), list[int]()
        while self.closers is not None and len(tokens) <= most:
            if matcher.is_error():
                return []
            if matcher.is_stopped() or matcher.is_accepting():
                return tokens
            if not self.closers.control.isdisjoint(tokens):
                return []
            new = matcher.compute_ff_tokens()
            new = new or [self.closers.first_allowed(matcher.compute_bitmask())]
            matcher.consume_tokens(new)
            tokens += new
        return []


class BitmaskFiller:
    """Fills the masks of a step, several at a time, while the device computes."""

    @cached_property
    def executor(self) -> Any:
        """Threads of llguidance's own."""
        return llguidance().LLExecutor()

    def fill(self, states: Sequence[GrammarState], bits: np.ndarray) -> None:
        """Write what may come next in each of ``states`` to a row of uint32 [N, W]."""
        rows = [(state.matcher, row) for row, state in enumerate(states)]
        size = bits.shape[1] * bits.itemsize
        self.executor.unsafe_compute_mask_ptr(rows, bits.ctypes.data, size, len(bits))
        for state in states:
            state.check()
