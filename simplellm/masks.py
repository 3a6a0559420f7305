"""Which tokens a request may get: the allowed ones, no bad words, no end too soon.

And what its grammar leaves. A mask has a bit for each token: bit v % 32 of word v // 32
allows token v. V vocabulary, W = ceil(V / 32) words. The bits are made on the host,
which knows all that they depend on, and go to the device when they change.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from simplellm.grammar import Filler
from simplellm.request import Request
from simplellm.tokenizer import Tokenizer
from simplellm.transfer import pinned, upload

Bits = np.ndarray  # uint32 [W]


@dataclass(frozen=True)
class Mask:
    """The tokens that some rows may get: bit v % 32 of word v // 32 allows token v."""

    rows: Tensor  # int64 [R], of a batch's B
    bits: Tensor  # int32 [R, ceil(V / 32)]


def apply_mask(scores: Tensor, mask: Mask) -> Tensor:
    """Scores [B, V] with -inf for what the mask of a row does not allow."""
    places = torch.arange(32, dtype=torch.int32, device=scores.device)
    bits = (mask.bits[:, :, None] >> places) & 1
    allowed = bits.flatten(1)[:, : scores.shape[1]] != 0
    left = scores[mask.rows].masked_fill(~allowed, -torch.inf)
    return scores.index_copy(0, mask.rows, left)


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
        self.narrow = not allowed.all()
        self.always = pack(allowed)
        self.early = without(self.always, request.stop_ids)  # before min_tokens
        self.row: Tensor | None = None  # the bits on the device, and what they are for
        self.state: object = None
        grammar = request.grammar
        self.walk = None if grammar is None else grammar.walk(request.number)
        params = request.params
        # A forced token is not sampled: it has no logprob, and no penalty counts it.
        sampled = params.logprobs is not None or params.penalizes or params.restricts
        self.forces = not sampled

    def completed(self, request: Request) -> frozenset[int]:
        """The tokens that would complete a bad word of several tokens."""
        tokens, longest = request.tokens, request.num_output
        if (begun := self.endings.get(tokens[-1])) is None:
            return frozenset()
        return frozenset(
            last
            for beginning, last in begun
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

    def advance(self, request: Request) -> list[int]:
        """Walk on with the request's new tokens; those that have to come next."""
        assert self.walk is not None
        self.walk.advance(request.tokens[request.num_prompt + self.walk.length :])
        room = request.max_tokens - request.num_output
        return self.walk.forced()[:room] if self.forces else []

    def now(self, request: Request) -> tuple[bool, Collection[int]]:
        """What `bits` depend on."""
        early = request.num_output < request.params.min_tokens
        return early, self.completed(request)

    def limit(self, bits: Bits, request: Request) -> None:
        """Take away from ``bits``, which its grammar left, unless none would remain."""
        early, completed = self.now(request)
        if early or completed or self.narrow:
            left = bits & self.bits(early, completed)
            bits[:] = left if left.any() else bits

    def on_device(self, request: Request, device: torch.device) -> Tensor:
        """The bits for the next token, int32 [W]: the same tensor while they stay."""
        state = self.now(request)
        if self.row is None or self.state != state:
            bits = self.bits(*state).view(np.int32)
            self.row, self.state = upload(bits, torch.int32, device), state
        return self.row


class Masks:
    """The masks of steps of at most ``most`` requests.

    They stay on the device while nothing in them changes.
    """

    def __init__(self, vocab_size: int, most: int, device: torch.device) -> None:
        self.vocab_size, self.most, self.device = vocab_size, most, device
        # A request may sit out for a step, and then goes on with what it had.
        self.known: WeakKeyDictionary[Request, Choices] = WeakKeyDictionary()
        self.rows: dict[int, Tensor] = {}  # of a mask that may serve again
        self.mask: Mask | None = None
        self.filler = Filler()

    @cached_property
    def staging(self) -> Tensor:
        """Where bits of grammars wait for the device.

        Once is enough: who writes there knows all tokens so far, and when these came,
        the device had read what was there before.
        """
        words = -(-self.vocab_size // 32)
        return pinned([self.most, words], torch.int32, self.device)

    def arrange(self, requests: Sequence[Request]) -> Mask | None:
        """The mask of a step's rows; None if each of them may get every token.

        The tokens so far are known of each request that `needs_last_token`. Where its
        grammar leaves it no choice, what has to come becomes its ``forced``.
        """
        rows: dict[int, Tensor] = {}
        walking: dict[int, Request] = {}
        for place, request in enumerate(requests):
            if not request.restricted or request.finish_reason is not None:
                continue
            if (choices := self.known.get(request)) is None:
                choices = self.known[request] = Choices(request, self.vocab_size)
            if choices.walk is None:
                rows[place] = choices.on_device(request, self.device)
                continue
            request.forced = choices.advance(request)
            if not request.forced:
                walking[place] = request
        if not (rows or walking):
            return None
        known = [(place, id(row)) for place, row in self.rows.items()]
        if walking or [(place, id(row)) for place, row in rows.items()] != known:
            parts = [torch.stack([*rows.values()])] if rows else []
            parts += [self._fill([*walking.values()])] if walking else []
            places = upload([*rows, *walking], torch.int64, self.device)
            self.mask = Mask(places, torch.cat(parts))
            self.rows = {} if walking else rows
        return self.mask

    def _fill(self, walking: Sequence[Request]) -> Tensor:
        """The bits that grammars leave, int32 [len(walking), W]."""
        staging = self.staging[: len(walking)]
        bits = staging.numpy().view(np.uint32)
        every = [self.known[request] for request in walking]
        self.filler.fill([choices.walk for choices in every if choices.walk], bits)
        for row, request, choices in zip(bits, walking, every, strict=True):
            if request.params.restricts:
                choices.limit(row, request)
        return staging.to(self.device, non_blocking=True, copy=True)
