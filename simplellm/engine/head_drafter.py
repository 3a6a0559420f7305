"""Drafts of an EAGLE-3 head, from what the model made of a request's tokens."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from simplellm.model.eagle import Head, HeadCache, tapped
from simplellm.model.model import Model


class AuxHiddenStates:
    """The states that a head reads, of the tokens of the step under way."""

    def __init__(self, model: Model, layers: Sequence[int], most: int) -> None:
        width = model.config.hidden_size
        self.states = model.embed_tokens.new_zeros(most, len(layers) * width)
        parts = [*zip(layers, self.states.split(width, dim=1), strict=True)]
        own = {layer: [part for n, part in parts if n == layer] for layer in {*layers}}
        taps = {layer + 1: partial(self.put, some) for layer, some in own.items()}
        model.ops = tapped(model, taps)

    @staticmethod
    def put(parts: Sequence[Tensor], x: Tensor) -> None:
        """Keep what a layer gave, as far as a step of the engine has tokens."""
        for part in parts:
            count = min(len(x), len(part))
            part[:count] = x[:count]


class HeadDrafter:
    """Guesses how one request goes on, by a head with keys and values of its own.

    It knows the request from the first token on that was computed for it: of tokens
    whose keys and values were cached it has seen no states.
    """

    def __init__(self, head: Head) -> None:
        self.head = head
        self._reset(0)

    def _reset(self, first: int) -> None:
        """Begin with the state at position ``first``."""
        self.cache = HeadCache(self.head.config, self.head.fc)
        self.first = first
        self.waiting: Tensor | None = None  # states behind those in the cache
        self.latest: tuple[Tensor, Tensor] | None = None  # what the cache ends with

    def observe(self, start: int, states: Tensor) -> None:
        """The model has computed tokens from position ``start`` on, drafts among them.

        states [n, 3 * hidden], which are copied. Those of wrong drafts are replaced by
        what comes at their places.
        """
        done = self.first + self.cache.size
        waiting = self.waiting
        if start > done + (0 if waiting is None else len(waiting)):
            self._reset(start)
            done, waiting = start, None
        kept = [] if waiting is None else [waiting[: max(start - done, 0)]]
        self.waiting = torch.cat([*kept, states[max(done - start, 0) :]])

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
        """Up to ``most`` tokens that may follow ``tokens``, and 0: all as sure.

        All tokens but the last must have been computed.
        """
        head, done = self.head, self.first + self.cache.size
        count = len(tokens) - 1 - done
        most = min(most, len(head.cos) - len(tokens))
        there = 0 if self.waiting is None else len(self.waiting)
        if count < 0 or count > there or most <= 0:
            return [], 0
        if count:
            assert self.waiting is not None
            x = head.combine(self.waiting[:count])
            ids = torch.tensor(tokens[done + 1 :], device=x.device)
            normed, x = head.forward(x, ids, done, self.cache)
            self.waiting, self.latest = self.waiting[count:], (normed[-1:], x[-1:])
        if self.latest is None:
            return [], 0
        normed, x = self.latest
        size, drafts = self.cache.size, [head.draft(normed)]
        for position in range(len(tokens) - 1, len(tokens) - 2 + most):
            normed, x = head.forward(x, drafts[-1], position, self.cache)
            drafts.append(head.draft(normed))
        self.cache.size = size
        return torch.cat(drafts).tolist(), 0
