"""Triton kernels for what the engine does in every step.

Each module holds kernels, a launcher for each, and beside the launcher a twin in plain
PyTorch with the same signature, ``NAME_torch``, which says what the kernel computes.

Kernels take a constexpr PDL, for programmatic dependent launch (Hopper and later): the
kernel is started while the one before it still runs, and waits before it first reads
what that one wrote. Until then it loads only what no kernel that may still run writes:
weights, page tables, keys of earlier steps.
"""

from functools import cache

import torch


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether programmatic dependent launch works on ``device``."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
