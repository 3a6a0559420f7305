"""The application of Ray Serve: which deployments there are, and their sizes.

    SIMPLELLM_API_KEY=... serve run simplellm.server.cluster.deploy:app \
        model=/models/gpt-oss-120b tensor_parallel_size=2 max_replicas=4
"""

import os
from dataclasses import fields

from pydantic import BaseModel, Field, TypeAdapter
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from simplellm.base.config import EngineConfig
from simplellm.server.cluster.engine import EngineReplica
from simplellm.server.cluster.ingress import Ingress
from simplellm.server.cluster.router import PrefixRouter
from simplellm.server.cluster.shared_state import SharedState
from simplellm.server.start import Options

KEY = "SIMPLELLM_API_KEY"  # the variable that has it: arguments are shown to many
HEAD = {"node:__internal_head__": 0.001}  # Ray's own name of the place
MANY = 100_000  # requests at once, where nothing is computed
HEALTH_SECONDS = 5.0  # between two looks at a replica


class Arguments(BaseModel, extra="allow"):
    """What the application takes. All else is for `EngineConfig`.

    Names are those of `simplellm serve`, or Ray Serve's.
    """

    model: str | None = None  # a folder or file that each node has; None: the embedded
    served_model_name: str = "simplellm"
    device: str | None = None
    dtype: str | None = None
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    target_ongoing_requests: float | None = None  # of a replica; more get another one
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    num_ingress: int = Field(1, ge=1)  # on as many nodes, best on all
    num_cpus: float = 1.0  # of a replica
    timeout: float = 600.0
    grace: float = 600.0  # seconds for what a replica computes when it is to end
    watchdog_timeout: float = 300.0
    log_level: str = "warning"
    strict: bool = False

    @property
    def config(self) -> EngineConfig:
        """The engine's config. Raises ValueError for names that nobody knows."""
        given = self.model_extra or {}
        unknown = set(given) - {field.name for field in fields(EngineConfig)}
        if unknown:
            raise ValueError(f"arguments are {sorted(unknown)}, which nobody knows")
        config: EngineConfig = TypeAdapter(EngineConfig).validate_python(given)
        return config


def app(arguments: Arguments) -> serve.Application:
    """The application. Raises ValueError, also if there is no key."""
    config = arguments.config
    key = os.environ.get(KEY)
    if not key:
        raise ValueError(f"{KEY} is not set; expected what clients must send")
    options = Options(
        names=[arguments.served_model_name],
        key=key,
        timeout=arguments.timeout,
        grace=arguments.grace,
        log_level=arguments.log_level,
        strict=arguments.strict,
    )
    shared = serve.deployment(
        SharedState,
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": 0, "resources": HEAD},
    ).bind()
    replicas = engines(arguments, config).bind(
        shared,
        config,
        options,
        arguments.watchdog_timeout,
        path=arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
    )
    ingress = serve.deployment(
        Ingress,
        num_replicas=arguments.num_ingress,
        max_replicas_per_node=1,  # a node that fails takes one with it
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=arguments.grace,
    )
    return ingress.bind(replicas, shared)


def engines(arguments: Arguments, config: EngineConfig) -> serve.Deployment:
    """The deployment of the replicas.

    The GPUs of an engine's ranks are those of one actor, so that Ray gives all of them
    on one node or none: ranks are processes that share memory.
    """
    on_gpu = arguments.device != "cpu"
    at_once = config.resolved("cuda" if on_gpu else "cpu").max_num_seqs
    assert at_once is not None
    resources = {"num_cpus": arguments.num_cpus}
    if on_gpu:
        resources["num_gpus"] = config.num_ranks
    return serve.deployment(
        EngineReplica,
        # Twice as many as run at once: the engine's own queue is never empty.
        max_ongoing_requests=2 * at_once,
        max_queued_requests=config.max_waiting,
        autoscaling_config=AutoscalingConfig(
            min_replicas=arguments.min_replicas,
            max_replicas=arguments.max_replicas,
            target_ongoing_requests=arguments.target_ongoing_requests or at_once,
            upscale_delay_s=arguments.upscale_delay_s,
            downscale_delay_s=arguments.downscale_delay_s,
        ),
        ray_actor_options=resources,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=arguments.grace,
    )
