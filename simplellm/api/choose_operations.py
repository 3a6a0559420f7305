"""Which operations compute a model on this machine, and why.

One of `TABLES`, or the Triton kernels; the choice is made while loading, once.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from simplellm.base.config import MAX_SIZE, EngineConfig, ModelConfig, expect
from simplellm.checkpoint.families import title
from simplellm.checkpoint.float16 import has_float16_product
from simplellm.checkpoint.int4 import has_int4_product
from simplellm.checkpoint.source import Source
from simplellm.engine.warmup import warm_up
from simplellm.model.machine import capability, why_not_triton
from simplellm.model.ops import PLAIN, Ops
from simplellm.model.ops_cpu import CPU
from simplellm.model.ops_numpy import NUMPY, is_small

TABLES = {table.name: table for table in (PLAIN, CPU, NUMPY)}
FP8_GPU = (8, 9)  # compute capability: the first whose instructions know e4m3


def takes_packed(config: EngineConfig, dtype: object, device: torch.device) -> bool:
    """Whether weights are multiplied in 4 bits or in float16 where they can be.

    ``dtype`` is what was asked for: products of float32 are rounded nowhere.
    """
    free = config.operations == "auto" and dtype in (None, "auto")
    alone = config.num_ranks == 1  # the packed order of rows isn't ours
    if not free or not alone or device.type != "cpu":
        return False
    return has_float16_product() and has_int4_product()


def choose_operations(
    config: EngineConfig, source: Source, dtype: torch.dtype, device: torch.device
) -> tuple[str, str]:
    """Which operations compute, "fused" or one of `TABLES`, and a reason in words.

    Raises ValueError for what ``config`` demands and this machine cannot do.
    """
    reason, model = why_not_triton(device, dtype), source.config
    kind = config.kv_cache_dtype
    if kind == "fp8" and device.type == "cuda":
        have, wanted = capability(device), FP8_GPU
        expected = f"'auto' on a GPU of compute capability {have}, below {wanted}"
        expect(have >= wanted, "kv_cache_dtype", kind, expected)
    packed = model.has_mxfp4
    interleaved = model.activation == "clamped_swiglu"  # as gpt-oss's experts are
    if config.operations == "plain":
        reason = "operations is 'plain'"
    elif reason is None and interleaved and not packed:
        reason = "the experts are not packed, and the kernels read MXFP4"
    elif reason is None and packed and not interleaved:
        reason = f"of MXFP4 the kernels read gpt-oss alone, not {title(model)}"
    backend, why = config.attention_backend, reason
    if backend == "flash_attn" and why is None:
        none = "no flash-attn is installed" if flash_library(device) is None else None
        why = "batch_invariant is True" if config.batch_invariant else none
    ok = backend == "auto" or why is None
    expect(ok, "attention_backend", backend, f"'auto', since {why}")
    if config.moe_activation_dtype == "fp8":
        why = why_not_rounded(config, model, reason, device)
        expect(why is None, "moe_activation_dtype", "fp8", f"'auto', since {why}")
    if reason is None:
        return "fused", "Triton kernels"
    operations, expected = config.operations, f"'auto', since {reason}"
    expect(operations != "fused", "operations", operations, expected)
    expected = "False, since PyTorch computes and promises no order of sums "
    invariant = config.batch_invariant
    expect(not invariant, "batch_invariant", invariant, f"{expected}({reason})")
    few = device.type == "cpu" and dtype == torch.float32 and is_small(model)
    few = few and config.kv_cache_dtype == "auto"  # NumPy has no numbers of 8 bits
    if few and config.operations == "auto":
        return NUMPY.name, f"NumPy and PyTorch, since {reason}"
    plain = config.operations == "plain" or device.type != "cpu"
    return (PLAIN if plain else CPU).name, f"PyTorch, since {reason}"


def why_not_rounded(
    config: EngineConfig,
    model: ModelConfig,
    reason: str | None,
    device: torch.device,
) -> str | None:
    """Why experts cannot be multiplied in FP8, None if they can.

    ``reason`` says why there are no Triton kernels.
    """
    if not model.has_mxfp4:
        return "there are no experts in MXFP4"
    if config.batch_invariant:
        return "batch_invariant is True, and how many tokens there are decides"
    if reason is None and device.type == "cuda" and capability(device) < FP8_GPU:
        return f"the GPU's compute capability is {capability(device)}, below {FP8_GPU}"
    return reason


def fused_operations(
    model: ModelConfig, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> Ops:
    """The Triton kernels, each of which compiles or has a plain twin in its place."""
    from simplellm.model.kernels.triton_ops import triton_ops  # where Triton is

    ops = triton_ops(
        model,
        max_num_seqs=config.max_num_seqs + config.max_drafts,
        device=device,
        batch_invariant=config.batch_invariant,
        fp8=config.moe_activation_dtype == "fp8",
    )
    ops = warm_up(ops, model, config, dtype, device)
    expected = "'auto', since the kernels of the experts do not compile (see the log)"
    ok = config.moe_activation_dtype == "auto" or ops.experts is not PLAIN.experts
    expect(ok, "moe_activation_dtype", config.moe_activation_dtype, expected)
    return replace(ops, attend=choose_attend(ops.attend, model, config, dtype, device))


def choose_attend(
    attend: Callable[..., Tensor],
    model: ModelConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[..., Tensor]:
    """``attend``, or an operation whose prompts go through flash-attn.

    That is where ``config`` asks for it, or it's there and known to be faster.
    """
    backend, library = config.attention_backend, None
    if backend != "triton_attn" and not config.batch_invariant:
        library = flash_library(device)
    if library is None:
        return attend
    from simplellm.model.kernels.flash import with_flash

    auto = backend == "auto"
    least = library.least_keys(model, capability(device)) if auto else 0
    longest = min(model.max_position_embeddings, config.max_model_len or MAX_SIZE)
    if least is None or longest < least:
        return attend
    windows = (None,) if auto else model.windows
    able = [w for w in windows if library.computes(model, w, dtype, device)]
    return with_flash(attend, library, able, least)


def flash_library(device: torch.device) -> Any:
    """The `simplellm.model.kernels.flash.Library` for this GPU; None: there is none."""
    from simplellm.model.kernels.flash import find_library

    return find_library(capability(device))
