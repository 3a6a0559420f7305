"""Starting the ranks that an engine's config asks for."""

import os
from dataclasses import asdict
from pathlib import Path

import torch

from simplellm.base.config import EngineConfig, ModelConfig, expect
from simplellm.checkpoint.sharding import (
    DATA_OPTION,
    OPTION,
    check_experts,
    check_shards,
)
from simplellm.engine.data_parallel_ranks import DataFollower, DataLeader
from simplellm.engine.ranks import (
    ALONE,
    Follower,
    Ranks,
    TensorFollower,
    TensorLeader,
    device_of,
)
from simplellm.model.machine import dtype_name


def follower_kind(config: EngineConfig) -> type[Follower]:
    """What the ranks other than 0 are for ``config``."""
    return DataFollower if config.data_parallel_size > 1 else TensorFollower


def start_ranks(
    config: EngineConfig,
    model: ModelConfig,
    path: str | Path | None,
    dtype: torch.dtype,
    device: torch.device,
    random_weights: bool = False,
    seed: int | None = None,
) -> Ranks:
    """The ranks for ``config``, which is resolved; those beside this one are started.

    The other arguments are those of `load_model`, by which they load, too. Raises
    ValueError for a model that isn't cut in so many, and for more ranks than there are
    GPUs from ``device`` on; EngineError if one of them doesn't start.
    """
    size, data_parallel = config.num_ranks, config.data_parallel_size > 1
    option = DATA_OPTION if data_parallel else OPTION
    if data_parallel:
        check_experts(model, option, size)
    elif size > 1 or config.enable_expert_parallel:
        check_shards(model, size, config.enable_expert_parallel)
    if size == 1:
        return ALONE
    if device.type == "cuda":
        count = torch.cuda.device_count() - device_of(device, 0).index
        expected = f"at most {count}: each rank has a GPU of its own, from {device} on"
        expect(size <= count, option, size, expected)
    options = {
        "path": None if path is None else os.fspath(path),
        "config": asdict(config),
        "dtype": dtype_name(dtype),
        "random_weights": random_weights,
        "seed": seed,
        "threads": torch.get_num_threads(),  # as many, for the same rounding
    }
    return (DataLeader if data_parallel else TensorLeader)(size, options, device)
