"""Start kernels.

Kernels take a constexpr PDL, for programmatic dependent launch (Hopper and later): the
kernel is started while the one before it still runs, and waits before it first reads
what that one wrote. Until then it loads only what no kernel that may still run writes:
weights, page tables, keys of earlier steps.
"""

import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # of CUfunction_attribute in cuda.h


@cache
def has_pdl() -> bool:
    """Whether this process's GPU, if any, knows programmatic dependent launch."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def power_of_two(least: int) -> int:
    """The smallest power of two from ``least`` on; Triton's own takes microseconds."""
    return 1 << (least - 1).bit_length()


class Ready(NamedTuple):
    """What it takes to start a compiled kernel again."""

    compiled: Any
    run: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[Any, ...]  # the kernel's last parameters


# Triton takes two thirds of a launch to find out which of its compiled kernels is
# meant. It is found here by a key that tells apart at least as much.
READY: dict[tuple[Any, ...], Ready] = {}


def kinds(args: Iterable[Any]) -> list[Any]:
    """What a kernel is compiled for of its ordinary arguments: not their values.

    That is the dtype of a tensor and whether 16 divides its address; for an integer,
    whether it is 1, whether 16 divides it, and whether it takes more than 32 bits.
    """
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            found += (arg.dtype, arg.data_ptr() & 15 == 0)
        elif isinstance(arg, int):
            found += (arg == 1, arg & 15 == 0, arg.bit_length() // 32)
        else:
            found.append(type(arg))
    return found


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, pdl: bool = True, **options: Any
) -> Any:
    """Start ``kernel``, whose last parameter is a constexpr PDL; return what it became.

    ``args`` are its ordinary parameters, all of them and in order; the constexprs that
    follow, num_warps and num_stages are options. Without ``pdl`` it starts when the
    kernel ahead is done. Nothing is checked. The grid must not be empty.
    """
    pdl = pdl and has_pdl()
    if not isinstance(kernel, triton.JITFunction):  # Triton's interpreter runs it
        return kernel.run(*args, grid=grid, warmup=False, PDL=pdl, **options)
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    key = (kernel, device, pdl, *options, *options.values(), *kinds(args))
    ready = READY.get(key)
    if ready is None:
        return launch_first(key, kernel, grid, args, pdl, options)
    ready.run(
        *(*grid, 1, 1)[:3],
        driver.get_current_stream(device),
        ready.function,
        ready.metadata,
        *(None, None, None),  # for Triton's own profiler
        *args,
        *ready.constants,
    )
    return ready.compiled


def launch_first(
    key: tuple[Any, ...],
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    pdl: bool,
    options: dict[str, Any],
) -> Any:
    """As `launch`, through Triton, which compiles the kernel if it has to."""
    compiled = kernel.run(
        *args, grid=grid, warmup=False, PDL=pdl, launch_pdl=pdl, **options
    )
    # What is ordinary may change from launch to launch; what follows is in the key.
    ordinary, others = kernel.params[: len(args)], kernel.params[len(args) :]
    assert not any(param.is_constexpr for param in ordinary)
    assert all(param.is_constexpr for param in others)
    given = options | {"PDL": pdl}
    constants = tuple(given[param.name] for param in others)
    READY[key] = Ready(
        compiled,
        compiled.run,
        compiled.function,
        compiled.packed_metadata,
        constants,
    )
    return compiled


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
