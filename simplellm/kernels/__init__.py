"""Triton kernels for what the engine does in every step.

A module holds kernels and a launcher for each. Beside a launcher stands its twin,
``NAME_torch``, the same in plain PyTorch, which says what the kernel computes and takes
its place where it does not compile. `forward` puts them together.

Kernels take a constexpr PDL, for programmatic dependent launch (Hopper and later): the
kernel is started while the one before it still runs, and waits before it first reads
what that one wrote. Until then it loads only what no kernel that may still run writes:
weights, page tables, keys of earlier steps.
"""

import ctypes
from functools import cache
from typing import Any

import torch

PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # of CUfunction_attribute in cuda.h


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether programmatic dependent launch works on ``device``."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def cuda_driver() -> ctypes.CDLL:
    """NVIDIA's driver, which Triton has found as well."""
    return ctypes.CDLL("libcuda.so.1")


def set_carveout(kernel: Any, percent: int) -> None:
    """How much shared memory a compiled kernel wants in each processor.

    ``percent`` is of the most that a processor can have, 228 KB on Hopper; the driver
    takes the next size that there is. What is not shared is L1 cache, also for kernels
    that start beside this one. With -1 the driver chooses, so that as many programs fit
    as registers allow. This is a wish; the kernel gets what it needs in any case.
    """
    function = ctypes.c_void_p(kernel.function)
    cuda_driver().cuFuncSetAttribute(
        function, PREFERRED_SHARED_MEMORY_CARVEOUT, percent
    )
