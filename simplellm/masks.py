"""Which tokens a request may get: the allowed ones, no bad words, no end too soon.

A mask has a bit for each token: bit v % 32 of word v // 32 allows token v. B rows, one
request each, V vocabulary, W = ceil(V / 32) words. The bits are made on the host, which
knows all that they depend on, and go to the device when they change.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from simplellm.request import Request
from simplellm.tokenizer import Tokenizer
from simplellm.transfer import upload

Bits = np.ndarray  # uint32 [W]


def bad_sequences(words: Iterable[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The tokens of each of ``words`` at the beginning of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for text in (bare, " " + bare) if bare else (word,):
            found[tuple(tokenizer.encode(text))] = None
    return [*found]


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


class Choices:
    """The tokens that one request may get next. It does not keep the request."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        ids = request.params.allowed_token_ids
        allowed = np.full(vocab_size, ids is None)
        allowed[[*(ids or ())]] = True
        # Bad words by their last token but one: what is before the last one, and that.
        self.endings: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for *beginning, last in request.bad_sequences:
            if beginning:
                self.endings[beginning[-1]].append((beginning, last))
            else:
                allowed[last] = False
        self.always = pack(allowed)
        self.early = without(self.always, request.stop_ids)  # before min_tokens
        self.row: Tensor | None = None  # the bits on the device, and what they are for
        self.state: object = None

    def completed(self, request: Request) -> frozenset[int]:
        """The tokens that would complete a bad word of several tokens."""
        tokens, longest = request.tokens, request.num_output
        return frozenset(
            last
            for beginning, last in self.endings.get(tokens[-1], ())
            if len(beginning) <= longest and tokens[-len(beginning) :] == beginning
        )

    def bits(self, early: bool, completed: Collection[int]) -> Bits:
        """The bits, ``early`` or not, without the tokens ``completed``.

        Should that leave none, such a token may complete its word: something has to
        come. `Door.ask` refuses what leaves none from the beginning.
        """
        bits = self.early if early else self.always
        left = without(bits, completed) if completed else bits
        return left if left.any() else bits

    def on_device(self, request: Request, device: torch.device) -> Tensor:
        """The bits for the next token, int32 [W]: the same tensor while they stay."""
        early = request.num_output < request.params.min_tokens
        state = early, self.completed(request)
        if self.row is None or self.state != state:
            bits = self.bits(*state).view(np.int32)
            self.row, self.state = upload(bits, torch.int32, device), state
        return self.row


class Masks:
    """The masks of steps, which stay on the device while nothing in them changes."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        words = -(-vocab_size // 32)
        self.all = torch.full([words], -1, dtype=torch.int32, device=device)
        # A request may sit out for a step, and then goes on with what it had.
        self.known: WeakKeyDictionary[Request, Choices] = WeakKeyDictionary()
        self.rows: list[Tensor] = []
        self.mask = torch.empty(0)

    def row(self, request: Request) -> Tensor:
        """The bits for a request's next token, int32 [W]."""
        if not request.params.restricts:
            return self.all
        if (choices := self.known.get(request)) is None:
            choices = self.known[request] = Choices(request, self.vocab_size)
        return choices.on_device(request, self.device)

    def arrange(self, requests: Sequence[Request]) -> Tensor:
        """The mask of a step's rows, int32 [B, W]: that of `apply_mask`.

        The last token of a request with a bad word of several tokens is known.
        """
        rows = [self.row(request) for request in requests]
        if [*map(id, rows)] != [*map(id, self.rows)]:
            self.rows, self.mask = rows, torch.stack(rows)
        return self.mask
