"""Which replica Ray Serve sends a request to."""

import random
from dataclasses import dataclass, field
from zlib import crc32

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from simplellm.base.replica_choice import rank_replicas


@dataclass(frozen=True)
class RoutingHints:
    """What an `Ingress` knows of a request. Plain data: it crosses to the replica."""

    digests: list[int] = field(default_factory=list)  # of the prompt's prefixes
    matches: dict[str, int] = field(default_factory=dict)  # of these at each replica
    owner: str | None = None  # the one replica that can answer, if it lives
    tried: list[str] = field(default_factory=list)  # replicas that could not


class PrefixRouter(RequestRouter):
    """Prefers the replica that has computed a prefix of the prompt."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replicas in the order in which they are asked, each by itself.

        The next one is asked where the one before has no room.
        """
        if pending_request is None:
            return [candidate_replicas]
        # Else Ray Serve would ask again and again without a pause.
        pending_request.routing_context.should_backoff = True
        hints = RoutingHints(**pending_request.kwargs["hints"])
        replicas = {
            replica.replica_id.unique_id: replica for replica in candidate_replicas
        }
        if hints.owner in replicas:
            return [[replicas[hints.owner]]]
        fresh = {name: replicas[name] for name in replicas if name not in hints.tried}
        cache = self.replica_queue_len_cache
        loads = {
            name: cache.get(replica.replica_id) or 0
            for name, replica in (fresh or replicas).items()
        }

        def tie(name: str) -> float:
            """Equal prompts meet, whichever `Ingress` sends them; others are spread."""
            last = hints.digests[-1:]
            return crc32(f"{name} {last}".encode()) if last else random.random()

        order = rank_replicas(loads, hints.matches, len(hints.digests), tie)
        return [[replicas[name]] for name in order]
