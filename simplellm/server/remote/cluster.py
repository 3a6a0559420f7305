"""Replicas behind Ray Serve, which starts them, watches them and replaces the dead.

Each gets a GPU of its own, where there are any. Nothing that is asked or told goes
through Ray, where a call takes milliseconds: a replica calls the server, and from then
on the two are linked as `spawn` links them.
"""

import logging
import os
import socket
import threading
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray import serve

from simplellm.base.config import expect

APP = "simplellm"
LOOK_AROUND = 0.5  # seconds between two looks at whether somebody still waits
LEAST_STORE = 80 * 2**20  # bytes of Ray's memory for objects, of which there are none
# Seconds between two looks at whether a replica lives.
HEALTH_SECONDS = 1.0


class EngineReplica:
    """An engine for the server at ``address``, with the process that Ray runs it in."""

    def __init__(self, address: str) -> None:
        link = socket.socket(socket.AF_UNIX)
        link.connect(address)
        threading.Thread(target=self.run, args=[link], daemon=True).start()

    def run(self, link: socket.socket) -> None:
        """Run the engine. If it fails the process ends, and Ray starts another one."""
        from simplellm.server.remote.core import (
            run_core,  # with PyTorch: not in the server
        )

        status = 1
        with suppress(ConnectionError):
            status = run_core(link)
        if status:
            os._exit(status)
        link.shutdown(socket.SHUT_WR)  # there is no more to be told


class Watched:
    """A replica's process: it ends by itself once its link is closed.

    One that stands still cannot; Ray ends it, since it does not answer.
    """

    def kill(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> str:
        return "unknown"


class Cluster:
    """``count`` replicas of Ray Serve on this machine, for as long as it is open."""

    def __init__(self, count: int, device: str | None, log_level: str) -> None:
        """Raises ValueError if there are not as many GPUs."""
        self.count = count
        self.folder = TemporaryDirectory()  # nobody else may look into it
        self.listener = socket.socket(socket.AF_UNIX)
        address = os.path.join(self.folder.name, "server")
        self.listener.bind(address)
        self.listener.listen(count)
        self.listener.settimeout(LOOK_AROUND)
        cores = max(len(os.sched_getaffinity(0)), count)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it calls nobody
        logging.getLogger("ray.serve").setLevel(log_level.upper())
        ray.init(
            address="local",
            num_cpus=cores,
            include_dashboard=False,
            object_store_memory=LEAST_STORE,
            log_to_driver=False,
            logging_level=log_level.upper(),
        )
        try:
            self.run(address, cores // count, device)
        except BaseException:
            self.close()
            raise

    def run(self, address: str, cores: int, device: str | None) -> None:
        """Let Ray Serve start the replicas."""
        gpus = 0 if device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
        if gpus:
            wanted = f"at most {gpus}, the GPUs that there are"
            expect(self.count <= gpus, "--replicas", self.count, wanted)
        serve.start(proxy_location="Disabled")
        deployment = serve.deployment(EngineReplica).options(
            name=APP,
            num_replicas=self.count,
            ray_actor_options={"num_cpus": cores, "num_gpus": int(gpus > 0)},
            health_check_period_s=HEALTH_SECONDS,
        )
        serve.run(deployment.bind(address), name=APP, route_prefix=None)

    def accept(self) -> tuple[Any, socket.socket]:
        """The next replica that calls. Raises OSError once this is closed."""
        while True:
            with suppress(TimeoutError):
                link, _ = self.listener.accept()
                link.settimeout(None)
                return Watched(), link

    def close(self) -> None:
        """End all of it."""
        self.listener.close()
        ray.shutdown()  # with all that belongs to it
        self.folder.cleanup()
