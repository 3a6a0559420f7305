"""Which tokens a request may get, by allowed_token_ids, bad words and the like.

Bit v % 32 of word v // 32 allows token v. V vocabulary, W = ceil(V / 32) words. All
that they depend on is known without the device.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from simplellm.base.request import Request
from simplellm.base.sample_position import SamplePosition
from simplellm.text.tokenizer import Tokenizer

Bits = np.ndarray  # uint32 [W]
# From so many tokens left on, the grammar is asked what would close the text that the
# output is in. That takes some masks, so that it isn't asked at each token.
CLOSE_FROM = 32
# A string is closed so many tokens early: the next may be one that needs others.
SPARE = 2


def bad_sequences(words: Iterable[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The tokens of each of ``words`` at the beginning of a text and after a space."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for text in (bare, " " + bare) if bare else (word,):
            sequences[tuple(tokenizer.encode(text))] = None
    return [*sequences]


def pack(allowed: np.ndarray) -> Bits:
    """bool [V] as bits; those behind the last token are 0."""
    padding = np.zeros(-len(allowed) % 32, dtype=bool)
    packed = np.packbits(np.concatenate([allowed, padding]), bitorder="little")
    return packed.view("<u4")


def without(bits: Bits, tokens: Collection[int]) -> Bits:
    """A copy of ``bits`` that does not allow ``tokens``."""
    ids = np.fromiter(tokens, dtype=np.uint32, count=len(tokens))
    left = bits.copy()
    np.bitwise_and.at(left, ids // 32, ~(np.uint32(1) << ids % 32))
    return left


class AllowedTokens:
    """The tokens that one request may get next. It does not keep the request."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        ids = request.params.allowed_token_ids
        allowed = np.full(vocab_size, ids is None)
        allowed[[*(ids or ())]] = True
        allowed[request.params.banned] = False
        # Bad words of several tokens, by the last token but one: all tokens before the
        # last one, and the last one.
        self.bad_words: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for *beginning, last in request.bad_sequences:
            if beginning:
                self.bad_words[beginning[-1]].append((beginning, last))
            else:
                allowed[last] = False
        self.restricts_statically = not allowed.all()
        self.always = pack(allowed)
        self.before_min = without(self.always, request.stop_ids)  # before min_tokens
        # What masks.py has sent to the device, and what it is for.
        self.row: Any = None
        self.state: object = None
        grammar = request.grammar
        self.grammar_state = (
            None if grammar is None else grammar.start(request.request_id)
        )
        params = request.params
        self.restricts = params.restricts
        # A forced token is not sampled: it has no logprob, and no penalty counts it.
        sampled = params.logprobs is not None or params.penalizes or self.restricts
        self.forces = not sampled
        # Tokens that the grammar forces next, and the request has not been given yet.
        self.pending_forced: list[int] = []
        # Tokens that close its text, once they have to come, and with how many tokens
        # left the grammar is asked for them again.
        self.closing: list[int] = []
        self.ask_at = CLOSE_FROM

    def completed(self, request: SamplePosition) -> frozenset[int]:
        """The tokens that would complete a bad word of several tokens."""
        return self._completing(request.tokens, request.num_output)

    def _completing(self, tokens: Sequence[int], longest: int) -> frozenset[int]:
        """The same behind ``tokens``, of which the last ``longest`` are output."""
        if (begun := self.bad_words.get(tokens[-1])) is None:
            return frozenset()
        return frozenset(
            last
            for beginning, last in begun
            if len(beginning) <= longest and tokens[-len(beginning) :] == beginning
        )

    def bits(self, before_min: bool, completed: Collection[int]) -> Bits:
        """The bits, ``before_min`` or not, without the tokens ``completed``.

        If that forbids every token, bad words are ignored for this step.
        `InputProcessor.process` refuses what leaves none from the beginning.
        """
        bits = self.before_min if before_min else self.always
        left = without(bits, completed) if completed else bits
        return left if left.any() else bits

    def advance(self, request: Request, several: bool) -> list[int]:
        """Tell the grammar the request's new tokens. Returns those that it forces next.

        Without ``several`` it returns one at most, and the next call another one, so
        that the text is cut into the same tokens either way. Called again without new
        tokens it returns the same: a step that fails is tried again.
        """
        assert self.grammar_state is not None
        new = request.tokens[request.num_prompt + self.grammar_state.length :]
        self.grammar_state.advance(new)
        self.pending_forced = self.pending_forced[len(new) :]
        self.closing = self.closing[len(new) :]
        self.close_in_time(request)
        if self.forces and not self.pending_forced:
            self.pending_forced = self.grammar_state.forced()
        count = request.max_tokens - request.num_output if several else 1
        return self.pending_forced[:count]

    def close_in_time(self, request: Request) -> None:
        """Close the output's text if the tokens left are just enough for it.

        With one more the model still chooses: what it would say may fit. The finish
        reason stays "length": ``max_tokens`` is lowered to where the text is closed. It
        stays open if the model begins an element that needs more tokens than are left.
        The outcome doesn't depend on how many forced tokens a step adds: they are the
        first ones of what closes the text.
        """
        left = request.max_tokens - request.num_output
        if self.closing or left > self.ask_at or self.grammar_state is None:
            return
        tokens = self.grammar_state.closing(left + 1)  # no end token has to follow
        while tokens and tokens[-1] in request.stop_ids:
            tokens.pop()
        spare = left - len(tokens) if tokens else 0
        # A token that needs another one takes two of those that are spare.
        self.ask_at = left - max(1, (spare - SPARE) // 2)
        early = (
            SPARE if 0 < spare <= SPARE and self.grammar_state.in_string(tokens) else 0
        )
        if tokens and 0 <= spare <= early and self._may_follow(request, tokens):
            self.closing = tokens
            self.pending_forced = tokens if self.forces else []
            request.max_tokens = request.num_output + len(tokens)

    def _may_follow(self, request: Request, tokens: Sequence[int]) -> bool:
        """Whether all that a request rules out but its grammar allows ``tokens``."""
        text, count = [*request.tokens], request.num_output
        if count + len(tokens) < request.params.min_tokens:
            return False
        for number, token in enumerate(tokens, start=count):
            allowed = self.always[token // 32] >> np.uint32(token % 32) & 1
            if not allowed or token in self._completing(text, number):
                return False
            text.append(token)
        return True

    def mask_state(self, request: SamplePosition) -> tuple[bool, Collection[int]]:
        """What `bits` depend on."""
        before_min = request.num_output < request.params.min_tokens
        return before_min, self.completed(request)

    def restrict(self, bits: Bits, request: SamplePosition) -> bool:
        """Clear in ``bits``, the grammar's, what else the request may not get.

        Where only the end of a complete text is left it may come, be it ruled out or
        not. False if nothing is left: ``bits`` are then as they were.
        """
        before_min, completed = self.mask_state(request)
        if before_min or completed or self.restricts_statically:
            ruled = self.before_min if before_min else self.always
            left = bits & without(ruled, completed)
            if not left.any():
                left = bits & ~without(bits, request.stop_ids)
            if not left.any():
                return False
            bits[:] = left
        return True
