"""Start kernels.

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
def has_pdl() -> bool:
    """Whether this process's GPU, if any, knows programmatic dependent launch."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def power_of_two(least: int) -> int:
    """The smallest power of two from ``least`` on; Triton's own takes microseconds."""
    return 1 << (least - 1).bit_length()


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, pdl: bool = True, **options: Any
) -> Any:
    """Start ``kernel``, which takes a constexpr PDL, and return what was compiled.

    ``args`` and ``options`` are the kernel's own, in the order that it names them; the
    constexprs and num_warps, num_stages are options. Without ``pdl`` it starts when the
    kernel ahead is done. Nothing is checked. The grid must not be empty.
    """
    pdl = pdl and has_pdl()
    return kernel.run(
        *args, grid=grid, warmup=False, PDL=pdl, launch_pdl=pdl, **options
    )


@cache
def cuda_driver() -> ctypes.CDLL:
    """NVIDIA's driver, which Triton has found as well."""
    return ctypes.CDLL("libcuda.so.1")


def set_carveout(compiled: Any, percent: int) -> None:
    """How much shared memory a kernel that was launched wants in each processor.

    ``percent`` is of the most that a processor can have, 228 KB on Hopper; the driver
    takes the next size that there is. What is not shared is L1 cache, also for kernels
    that start beside this one. With -1 the driver chooses, so that as many programs fit
    as registers allow. This is a wish; the kernel gets what it needs in any case. It
    counts from the next launch on, and stays until the next wish.
    """
    if not has_pdl():  # then no other kernel is there to need the cache
        return
    if getattr(compiled, "carveout", None) != percent:
        function = ctypes.c_void_p(compiled.function)
        cuda_driver().cuFuncSetAttribute(
            function, PREFERRED_SHARED_MEMORY_CARVEOUT, percent
        )
        compiled.carveout = percent
