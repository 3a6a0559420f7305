"""What all replicas know: who has computed what, responses that are kept, metrics."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
from ray.serve.handle import DeploymentHandle

from simplellm.server.http.endpoint import LOGGER
from simplellm.server.http.errors import APIError, unavailable
from simplellm.server.openai.responses_store import (
    FinishedResponse,
    ResponseStore,
    StoredResponse,
)
from simplellm.server.remote.prefixes import Prefixes, digests_of

MOST_REPLICAS = 256  # whose prefixes are remembered, those that are gone too
STORE_SECONDS = 10.0  # that an answer of `SharedState` may take
REPORT_SECONDS = 20.0  # after which a replica that says nothing has no metrics


def digest_of_id(id: str) -> list[int]:
    """The digest of a response's id, as the only prefix of what follows it."""
    return digests_of(id.encode(), max(1, len(id.encode())))


def to_bytes(kept: FinishedResponse) -> bytes:
    """A response that is over, as JSON."""
    return orjson.dumps([kept.response, kept.input_items, kept.input_bytes])


def from_bytes(raw: bytes) -> FinishedResponse:
    """The response of which `to_bytes` has made this."""
    return FinishedResponse(*orjson.loads(raw))


class SharedState:
    """What all replicas have to share, in one process on Ray's head node.

    A response counts as a prefix of the one that names it as its previous response: so
    that one goes to the replica that wrote it. If the head node ends, all is forgotten.
    """

    def __init__(self) -> None:
        self.prefixes: dict[str, Prefixes] = {}  # of replicas, the latest one last
        self.responses = ResponseStore()
        self.writers: dict[str, str] = {}  # of responses that are being written
        # Of replicas, when they came, and as Prometheus has them.
        self.metrics: dict[str, tuple[float, bytes]] = {}

    async def report(self, replica: str, metrics: bytes) -> None:
        """A replica's metrics are these now."""
        self.metrics.pop(replica, None)
        self.metrics[replica] = time.monotonic(), metrics
        while len(self.metrics) > MOST_REPLICAS:
            del self.metrics[next(iter(self.metrics))]

    async def latest_metrics(self) -> list[bytes]:
        """Those of all replicas that live."""
        now = time.monotonic()
        for name, (then, _) in [*self.metrics.items()]:
            if now - then > REPORT_SECONDS:
                del self.metrics[name]
        return [metrics for _, metrics in self.metrics.values()]

    async def match(self, digests: list[int]) -> dict[str, int]:
        """How many of these prefixes each replica has computed."""
        counts = {name: one.match(digests) for name, one in self.prefixes.items()}
        return {name: count for name, count in counts.items() if count}

    async def remember(self, replica: str, digests: list[int]) -> None:
        """A replica computes a prompt with these prefixes."""
        one = self.prefixes.pop(replica, None) or Prefixes()
        self.prefixes[replica] = one
        one.remember(digests)
        while len(self.prefixes) > MOST_REPLICAS:
            del self.prefixes[next(iter(self.prefixes))]

    async def writer(self, id: str) -> str | None:
        """The replica that writes a response, if one does."""
        return self.writers.get(id)

    async def begin(self, id: str, replica: str) -> None:
        """A replica writes a response."""
        self.writers[id] = replica
        await self.remember(replica, digest_of_id(id))

    async def end(self, id: str, raw: bytes) -> None:
        """A response is over; ``raw`` is what `to_bytes` has made of it."""
        if self.writers.pop(id, None) is not None:
            kept = from_bytes(raw)
            self.responses.begin(id, kept)
            self.responses.end(id, kept)

    async def forget(self, id: str) -> None:
        """Drop a response, even if it ends later."""
        self.writers.pop(id, None)
        self.responses.forget(id)

    async def find(self, id: str) -> bytes | None:
        """A response that is over, of `to_bytes`."""
        kept = self.responses.find(id)
        return to_bytes(kept) if isinstance(kept, FinishedResponse) else None

    async def find_item(self, id: str) -> bytes | None:
        """An item of such a response, as JSON."""
        item = self.responses.find_item(id)
        return None if item is None else orjson.dumps(item)


class SharedResponses(ResponseStore):
    """A replica's `ResponseStore`: it has what is being written, and asks for the rest.

    A thread waits for `SharedState`, since Ray Serve lets no event loop do so.
    """

    def __init__(self, shared: DeploymentHandle, replica: str) -> None:
        super().__init__()
        self.shared, self.replica = shared, replica
        self.pool = ThreadPoolExecutor(8, "simplellm-shared")

    def call(self, method: str, *arguments: Any) -> Any:
        """What `SharedState` answers. Raises APIError."""

        def answer() -> Any:
            response = getattr(self.shared, method).remote(*arguments)
            return response.result(timeout_s=STORE_SECONDS)

        try:
            return self.pool.submit(answer).result(STORE_SECONDS)
        except Exception as error:
            LOGGER.warning("the store of responses fails: %r", error)
            message = "the store of responses can't be reached"
            raise unavailable(message, "store_error") from error

    def begin(self, id: str, response: StoredResponse) -> None:
        super().begin(id, response)
        self.call("begin", id, self.replica)

    def end(self, id: str, kept: FinishedResponse) -> None:
        if super().find(id) is None:  # it was deleted
            return
        try:
            self.call("end", id, to_bytes(kept))
        except APIError:  # the answer is there, if not for later
            LOGGER.warning("response %s is not kept", id)
        finally:
            super().forget(id)

    def forget(self, id: str) -> None:
        super().forget(id)
        self.call("forget", id)

    def find(self, id: str) -> StoredResponse | None:
        running = super().find(id)
        if running is not None:
            return running
        raw = self.call("find", id)
        return None if raw is None else from_bytes(raw)

    def find_item(self, id: str) -> dict[str, Any] | None:
        raw = self.call("find_item", id)
        return None if raw is None else orjson.loads(raw)

    def remember(self, digests: Sequence[int]) -> None:
        """The replica computes a prompt with these beginnings; nobody waits."""
        self.shared.remember.remote(self.replica, list(digests))

    def report(self, metrics: bytes) -> None:
        """The replica's metrics; nobody waits."""
        self.shared.report.remote(self.replica, metrics)
