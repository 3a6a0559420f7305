"""Compiling the Triton kernels that a model will need, before it is loaded."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from simplellm.checkpoint import RandomCheckpoint
from simplellm.config import MAX_SIZE, EngineConfig, ModelConfig
from simplellm.graphs import bucket_sizes
from simplellm.model import build
from simplellm.ops import Ops
from simplellm.pages import KVPool, PageManager
from simplellm.runner import Runner

PROMPTS = (64, 2048)  # lengths of the prompts that a start compiles kernels for


def compile_fused(
    model: ModelConfig, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> Ops:
    """The Triton kernels for this model, compiled, as far as they compile.

    A stand-in with a layer of each kind computes steps of all the sizes that choose
    among kernels. That is before an expert is loaded: whether experts are repacked
    depends on what compiles.
    """
    from simplellm.kernels.compiling import compile_kernels
    from simplellm.kernels.fused import fused

    kinds = tuple(dict.fromkeys(model.layer_types))
    small = replace(model, layer_types=kinds, num_hidden_layers=len(kinds))
    ops = fused(
        model,
        max_num_seqs=config.max_num_seqs,
        device=device,
        batch_invariant=config.batch_invariant,
    )
    source = RandomCheckpoint(small, dtype=dtype, device=device, seed=0)
    stand_in = build(small, source.__getitem__, ops)
    pool = KVPool(small, 2, config.page_size, dtype, device)
    manager = PageManager(2, config.page_size, window=small.windows[-1])
    longest = min(model.max_position_embeddings, config.max_model_len or MAX_SIZE)
    runner = Runner(stand_in, pool, manager, config, longest)
    prompts = [size for size in PROMPTS if size <= config.max_num_batched_tokens]
    # Prompts first: their kernels take the longest.
    steps: list[Callable[[Ops], object]] = [
        partial(runner.rehearse, size, 0) for size in prompts
    ]
    steps += [
        partial(runner.rehearse, size, size)
        for size in bucket_sizes(config.max_num_seqs)
    ]
    return compile_kernels(ops, steps, device, config.batch_invariant)
