"""Which of several engines, or ranks, gets a prompt."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Replica = TypeVar("Replica")
# A replica is overloaded if it has more requests than this share of those of another
# one, and so many on top.
TOO_MUCH, MARGIN = 1.5, 8


def rank_replicas(
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
