"""Which of several engines gets a prompt: the one that has computed a prefix of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Replica = TypeVar("Replica")
STRIDE = 16  # tokens between two prefixes of a prompt
MOST_PREFIXES = 2**17  # that are remembered of a replica, about 15 MB
# A replica is overloaded if it has more requests than this share of those of another
# one, and so many on top.
TOO_MUCH, MARGIN = 1.5, 8


class Prefixes:
    """The prefixes of prompts that an engine has computed, as digests."""

    def __init__(self) -> None:
        self.digests: dict[int, None] = {}  # the latest ones last

    def match(self, digests: Sequence[int]) -> int:
        """How many of these prefixes, the shortest first, it has computed."""
        count = 0
        while count < len(digests) and digests[count] in self.digests:
            count += 1
        return count

    def remember(self, digests: Sequence[int]) -> None:
        """Note a prompt with these prefixes; long ones are forgotten before short."""
        for digest in reversed(digests):
            self.digests.pop(digest, None)
            self.digests[digest] = None
        while len(self.digests) > MOST_PREFIXES:
            del self.digests[next(iter(self.digests))]


def digests_of(prompt: Sequence[int], stride: int = STRIDE) -> list[int]:
    """A digest of each prefix whose length is a multiple of ``stride`` tokens or bytes.

    They are the same in all processes.
    """
    digests, before = [], 0
    for end in range(stride, len(prompt) + 1, stride):
        before = hash((before, *prompt[end - stride : end]))
        digests.append(before)
    return digests


def ranked(
    loads: Mapping[Replica, int],
    matches: Mapping[Replica, int],
    total: int,
    tie: Callable[[Replica], Any],
) -> list[Replica]:
    """The replicas in the order in which a prompt should try them.

    The first is the one with most of its ``total`` prefixes, if it has half of them
    and isn't overloaded; then come the least busy ones. ``loads`` are the requests of
    each. Of two that are equal the one with the smaller ``tie`` is first.
    """
    idle = sorted(loads, key=lambda replica: (loads[replica], tie(replica)))
    most = TOO_MUCH * min(loads.values(), default=0) + MARGIN
    free = [replica for replica in idle if loads[replica] <= most]
    best = max(free, key=lambda replica: matches.get(replica, 0), default=None)
    if best is None or not 2 * matches.get(best, 0) >= total > 0:
        return idle
    return [best, *(replica for replica in idle if replica != best)]
