"""Where a step samples for a request that has drafts: after each of them, too."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from simplellm.base.request import Request


@dataclass(eq=False)
class DraftPosition:
    """A request as it would be if drafts were its next tokens: sampled after them."""

    request: Request
    drafts: Sequence[int]  # at least one
    # False if a token sampled there means nothing: the grammar doesn't allow the last
    # draft, or forces what comes after it.
    valid: bool = True

    def __post_init__(self) -> None:
        # What each step asks of all its rows; `__getattr__` takes longer.
        request = self.request
        self.request_id, self.params = request.request_id, request.params
        self.restricted, self.seed = request.restricted, request.seed
        self.needs_last_token = request.needs_last_token

    @cached_property
    def tokens(self) -> list[int]:
        return [*self.request.tokens, *self.drafts]

    @property
    def num_output(self) -> int:
        return self.request.num_output + len(self.drafts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)


SamplePosition = Request | DraftPosition


def output_lengths(rows: Sequence[SamplePosition]) -> list[int]:
    """How many tokens of output there are before each row's.

    A request that comes several times in a row is sampled after each of its drafts.
    """
    lengths: list[int] = []
    before: SamplePosition | None = None
    for row in rows:
        lengths.append(lengths[-1] + 1 if row is before else row.num_output)
        before = row
    return lengths
