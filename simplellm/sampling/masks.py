"""The tokens that a step's rows may get, as masks on the device.

V vocabulary, W = ceil(V / 32) words. allowed_tokens.py makes the bits on the host, and
they go to the device when they change.
"""

from collections.abc import Sequence
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from simplellm.base.grammar import BitmaskFiller
from simplellm.base.request import Request
from simplellm.base.transfer import pinned, upload
from simplellm.sampling.allowed_tokens import AllowedTokens
from simplellm.sampling.filters import Mask

# Rows of a step in which a request may append several forced tokens. In larger ones the
# step then takes longer by more than is saved: of 256 constrained requests an H200 made
# 8,732 tokens a second so, and 9,518 without (figures/b-structured-h200.json).
FORCING = 128


def on_device(choices: AllowedTokens, request: Request, device: torch.device) -> Tensor:
    """The bits for the next token, int32 [W]: the same tensor while they stay."""
    state = choices.now(request)
    if choices.row is None or choices.state != state:
        bits = choices.bits(*state).view(np.int32)
        choices.row, choices.state = upload(bits, torch.int32, device), state
    row: Tensor = choices.row
    return row


class Masks:
    """The masks of steps of at most ``most`` requests.

    They stay on the device while nothing in them changes.
    """

    def __init__(self, vocab_size: int, most: int, device: torch.device) -> None:
        self.vocab_size, self.most, self.device = vocab_size, most, device
        # A request may sit out for a step, and then goes on with what it had.
        self.known: WeakKeyDictionary[Request, AllowedTokens] = WeakKeyDictionary()
        self.rows: dict[int, Tensor] = {}  # of a mask that may serve again
        self.mask: Mask | None = None
        self.filler = BitmaskFiller()

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
        several = len(requests) <= FORCING
        for place, request in enumerate(requests):
            if not request.restricted or request.finish_reason is not None:
                continue
            if (choices := self.known.get(request)) is None:
                choices = self.known[request] = AllowedTokens(request, self.vocab_size)
            if choices.walk is None:
                rows[place] = on_device(choices, request, self.device)
                continue
            request.forced = choices.advance(request, several)
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
