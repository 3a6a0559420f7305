"""Whether a model and what it works with fit into a GPU's memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from simplellm.cache import kv_bytes
from simplellm.checkpoint import count_parameters
from simplellm.config import ModelConfig
from simplellm.engine import EngineConfig
from simplellm.paged import page_bytes

MXFP4_BYTES = 17 / 32  # of a number: 4 bits, and 8 for each 32 of them


@dataclass(frozen=True)
class Need:
    """Bytes that a model takes on a GPU."""

    weights: int
    cache: int  # for the keys and values asked for, or those of one step
    step: int  # about, for what a step computes

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        config: EngineConfig,
        itemsize: int = 2,
        packed: bool = True,
    ) -> "Need":
        """``itemsize`` is that of all numbers but ``packed`` experts', MXFP4."""
        counts = count_parameters(model)
        experts = counts.by_kind["experts"]
        each = MXFP4_BYTES if packed else itemsize
        weights = int(experts * each) + (counts.total - experts) * itemsize
        tokens = config.max_num_batched_tokens
        if config.num_pages is not None:
            cache = config.num_pages * page_bytes(model, config.page_size, itemsize)
        else:
            cache = config.cache_bytes or kv_bytes(model, tokens, itemsize=itemsize)
        rows = model.num_experts_per_tok * (model.intermediate_size + model.hidden_size)
        rows += 3 * model.hidden_size
        rows += 2 * model.num_attention_heads * model.head_dim
        logits = 4 * config.max_num_seqs * model.vocab_size  # float32
        return cls(weights, cache, tokens * rows * itemsize + logits)


def free_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes that this process can still take on a GPU, and bytes that the GPU has."""
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + kept, total


@contextmanager
def enough(
    model: ModelConfig,
    config: EngineConfig,
    device: torch.device,
    itemsize: int = 2,
    packed: bool = True,
) -> Iterator[None]:
    """Load a model inside of this, which says what is missing if memory is.

    Raises torch.OutOfMemoryError before anything is loaded if the weights and the cache
    asked for cannot fit, and also for one that happens inside.
    """
    need = Need.of(model, config, itemsize, packed)
    free, total = free_bytes(device)
    message = (
        f"{torch.cuda.get_device_name(device)} has not enough memory: the model takes "
        f"{need.weights / 1e9:.1f} GB for its weights, {need.cache / 1e9:.1f} for keys "
        f"and values and about {need.step / 1e9:.1f} for a step; {free / 1e9:.1f} of "
        f"{total / 1e9:.1f} GB are free. Stop other programs on this GPU, or choose a "
        "smaller model, cache_bytes, max_num_seqs or max_num_batched_tokens"
    )
    if need.weights + need.cache > free:
        raise torch.OutOfMemoryError(message)
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(message) from error
