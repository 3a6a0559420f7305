"""Bitmasks on the device: which tokens each row of a step may get.

V vocabulary, W = ceil(V / 32) words. allowed_tokens.py makes the bits on the host, and
they go to the device when they change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from simplellm.base.grammar import BitmaskFiller, GrammarError, GrammarState
from simplellm.base.host_memory import pinned, upload
from simplellm.base.request import Request
from simplellm.base.sample_position import DraftPosition, SamplePosition
from simplellm.sampling.allowed_tokens import CLOSE_FROM, AllowedTokens

# Rows of a step in which a request may append several forced tokens. In larger ones the
# step then takes longer by more than is saved: of 256 constrained requests an H200 made
# 8,732 tokens a second so, and 9,518 without (figures/b-structured-h200.json).
FORCING = 128


def bits_on_device(
    allowed: AllowedTokens, request: SamplePosition, device: torch.device
) -> Tensor:
    """The bits for the next token, int32 [W]: the same tensor until they change."""
    state = allowed.mask_state(request)
    if allowed.row is None or allowed.state != state:
        bits = allowed.bits(*state).view(np.int32)
        allowed.row, allowed.state = upload(bits, torch.int32, device), state
    row: Tensor = allowed.row
    return row


@dataclass(frozen=True)
class Mask:
    """The tokens that some rows may get: bit v % 32 of word v // 32 allows token v."""

    rows: Tensor  # int64 [R], of a batch's B
    bits: Tensor  # int32 [R, ceil(V / 32)]


def apply_mask(scores: Tensor, mask: Mask) -> Tensor:
    """Scores [B, V] with -inf for what the mask of a row does not allow."""
    bit_values = 1 << torch.arange(8, dtype=torch.uint8, device=scores.device)
    # By bytes: a number for each bit takes a quarter of the memory.
    ruled_out = (mask.bits.view(torch.uint8)[:, :, None] & bit_values) == 0
    masked = scores[mask.rows]
    masked.masked_fill_(ruled_out.flatten(1)[:, : scores.shape[1]], -torch.inf)
    return scores.index_copy(0, mask.rows, masked)


def nothing_left(request: Request) -> GrammarError:
    """The error of a request whose grammar allows only what it rules out itself."""
    params = request.params
    given = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": params.bad_words,
        "logit_bias": params.banned,
    }
    names = " and ".join(name for name, rules_out in given.items() if rules_out)
    error = GrammarError(
        f"{names} leave no token with which the structured output could go on, "
        f"after {request.num_output} of its tokens"
    )
    error.request_id = request.request_id
    return error


class Masks:
    """The masks of steps of at most ``most`` requests.

    They stay on the device while nothing in them changes.
    """

    def __init__(self, vocab_size: int, most: int, device: torch.device) -> None:
        self.vocab_size, self.most, self.device = vocab_size, most, device
        # Kept even while a request sits out a step.
        self.allowed: WeakKeyDictionary[Request, AllowedTokens] = WeakKeyDictionary()
        self.rows: dict[int, Tensor] = {}  # of a mask that may serve again
        self.mask: Mask | None = None
        self.filler = BitmaskFiller()

    @cached_property
    def staging(self) -> Tensor:
        """Where the host writes bits of grammars, int32 [most, W]; the device reads it.

        One such buffer is enough. A grammar's bits are written once all tokens of the
        step before are known, and by then the device has read that step's bits.
        """
        words = -(-self.vocab_size // 32)
        return pinned([self.most, words], torch.int32, self.device)

    def prepare(self, requests: Sequence[SamplePosition]) -> Mask | None:
        """The mask of a step's rows; None if each of them may get every token.

        All tokens so far of each request that `needs_last_token` must be known. A
        request whose grammar leaves it no choice gets what has to come as ``forced``.
        """
        rows: dict[int, Tensor] = {}
        constrained: dict[int, tuple[SamplePosition, AllowedTokens, GrammarState]] = {}
        state: GrammarState | None = None  # of the row before
        several = len(requests) <= FORCING
        for index, request in enumerate(requests):
            if not request.restricted or request.finish_reason is not None:
                continue
            owner = request.request if isinstance(request, DraftPosition) else request
            if (allowed := self.allowed.get(owner)) is None:
                allowed = self.allowed[owner] = AllowedTokens(owner, self.vocab_size)
            if allowed.grammar_state is None:
                rows[index] = bits_on_device(allowed, request, self.device)
                continue
            if isinstance(request, DraftPosition):
                state = state and state.after(request.drafts[-1], allowed.forces)
                if owner.max_tokens - request.num_output <= CLOSE_FROM:
                    state = None  # there each token is looked at
                request.valid = state is not None
            else:
                request.forced = allowed.advance(request, several)
                state = None if request.forced else allowed.grammar_state
            if state is not None:
                constrained[index] = request, allowed, state
        if not (rows or constrained):
            return None
        before = [(index, id(row)) for index, row in self.rows.items()]
        if constrained or [(index, id(row)) for index, row in rows.items()] != before:
            parts = [torch.stack([*rows.values()])] if rows else []
            parts += [self._fill([*constrained.values()])] if constrained else []
            indices = upload([*rows, *constrained], torch.int64, self.device)
            self.mask = Mask(indices, torch.cat(parts))
            self.rows = {} if constrained else rows
        return self.mask

    def _fill(
        self, constrained: Sequence[tuple[SamplePosition, AllowedTokens, GrammarState]]
    ) -> Tensor:
        """The bits that grammars leave, int32 [len(constrained), W]."""
        staging = self.staging[: len(constrained)]
        bits = staging.numpy().view(np.uint32)
        self.filler.fill([state for _, _, state in constrained], bits)
        for row, (request, allowed, _) in zip(bits, constrained, strict=True):
            if allowed.closing:
                row[:] = 0
                row[allowed.closing[0] // 32] = np.uint32(1) << allowed.closing[0] % 32
            if allowed.restricts and not allowed.restrict(row, request):
                if isinstance(request, Request):
                    raise nothing_left(request)
                request.valid = False
        return staging.to(self.device, non_blocking=True, copy=True)
