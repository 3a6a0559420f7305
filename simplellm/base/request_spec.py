"""A checked prompt with its parameters, from which each sample's `Request` is made."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from simplellm.base.grammar import Grammar
from simplellm.base.request import Request
from simplellm.base.sampling_params import SamplingParams


@dataclass(frozen=True)
class RequestSpec:
    """What the samples of a prompt have in common; fields are those of `Request`.

    It never runs: `sample` makes the requests that do.
    """

    tokens: list[int]
    max_tokens: int
    params: SamplingParams  # with a seed
    stop_ids: frozenset[int] = frozenset()
    bad_sequences: Sequence[Sequence[int]] = ()
    priority: int = 0
    deadline: float = math.inf
    grammar: Grammar | None = None
    arrival_time: float = field(default_factory=time.monotonic)
    text: str | None = None
    # For what reads a chat's turn: the tools, and whether the prompt begins the answer.
    tools: Sequence[Any] = ()
    begun: bool = False

    def sample(self, index: int = 0) -> Request:
        """A request for sample ``index``, which draws with a seed of its own."""
        shared = {one.name: getattr(self, one.name) for one in fields(self)}
        del shared["tools"], shared["begun"]
        return Request(**shared | {"tokens": list(self.tokens)}, index=index)
