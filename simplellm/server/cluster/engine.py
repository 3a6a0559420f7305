"""A replica: a whole server around an engine, without a port of its own."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from simplellm.api.llm import LLM
from simplellm.base.config import EngineConfig
from simplellm.server.app import make_app
from simplellm.server.cluster.shared_state import SharedResponses
from simplellm.server.http.endpoint import Service
from simplellm.server.remote.client import RemoteEngine, load_remote
from simplellm.server.start import Options, freeze_objects, spawn


class ReplicaGoneError(Exception):
    """This replica's engine is dead, and nothing of an answer was sent."""

    def __init__(self, replica: str) -> None:
        super().__init__(replica)
        self.replica = replica


class EngineReplica:
    """Answers requests that come as the scope and the body of an HTTP request.

    Its engine is in a process of its own, as on one machine, and sees the GPUs that Ray
    gives this actor. That process ends with this one. ``model`` is what `load_remote`
    is to load, and where.
    """

    def __init__(
        self,
        shared: DeploymentHandle,
        config: EngineConfig,
        options: Options,
        watchdog_timeout: float,
        **model: Any,
    ) -> None:
        self.name = serve.get_replica_context().replica_id.unique_id
        self.responses = SharedResponses(shared, self.name)
        engine = RemoteEngine(*spawn(), watchdog_timeout)
        loaded = load_remote(
            engine, config=config, log_level=options.log_level, **model
        )
        self.service = Service(
            LLM.of(loaded), options, name=self.name, responses=self.responses
        )
        self.app = make_app(self.service)
        self.tasks: set[asyncio.Task[None]] = set()  # also those nobody listens to
        self.reporting: asyncio.Task[None] | None = None  # of the metrics
        freeze_objects()

    async def check_health(self) -> None:
        """Raises what the engine died of: then Ray Serve has another replica come.

        Which asks every few seconds, so that `SharedState` knows the metrics of all.
        """
        self.service.engine.check()
        if self.reporting is None or self.reporting.done():
            self.reporting = asyncio.create_task(self._report())

    async def _report(self) -> None:
        self.responses.report(await asyncio.to_thread(self.service.metrics.text))

    async def answer(
        self, scope: dict[str, Any], body: bytes, *, hints: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        """The messages of the answer, as ASGI has them; parts that wait are joined.

        Raises ReplicaGoneError if there is none because the engine has ended.
        """
        if hints["digests"]:
            self.responses.remember(hints["digests"])
        given: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        given.put_nowait({"type": "http.request", "body": body, "more_body": False})
        sent: asyncio.Queue[Any] = asyncio.Queue()  # None ends it

        async def run() -> None:
            try:
                await self.app(scope, given.get, sent.put)
            finally:
                sent.put_nowait(None)

        task = asyncio.create_task(run())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    if self.service.engine.dead is not None:
                        raise ReplicaGoneError(self.name)
                    yield message
                    continue
                while message.get("more_body") and not sent.empty():
                    after = sent.get_nowait()
                    if after is None:
                        break
                    message = {**after, "body": message["body"] + after["body"]}
                yield message
            await task
        finally:  # whoever asked may be gone
            given.put_nowait({"type": "http.disconnect"})
