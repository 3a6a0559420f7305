"""Start kernels.

Kernels take a constexpr PDL, for programmatic dependent launch (Hopper and later): the
kernel is started while the one before it still runs, and waits before it first reads
what that one wrote. Until then it loads only what nobody is still writing: weights,
page tables, keys of earlier steps.
"""

import ctypes
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # of CUfunction_attribute in cuda.h
# Sums of products round once, whatever a version of Triton does by itself: 3.9 warns
# that from 3.10 on they would round twice.
FUSED = {"enable_fp_fusion": True}


@cache
def has_pdl() -> bool:
    """Whether this process's GPU, if any, knows programmatic dependent launch."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@cache
def max_shared_memory() -> int:
    """Bytes that a program may have on this process's GPU; without one, a Hopper's."""
    if not torch.cuda.is_available():
        return 227 * 1024
    return torch.cuda.get_device_properties().shared_memory_per_block_optin


def power_of_two(least: int) -> int:
    """The smallest power of two from ``least`` on; Triton's own takes microseconds."""
    return 1 << (least - 1).bit_length()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Let the next kernel start, and wait for the one ahead."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@lru_cache(4096, typed=True)
def number_kind(value: float | None) -> Any:
    """What a kernel is compiled for of an argument that is no tensor: not its value.

    For an integer, whether it is 1, whether 16 divides it, and whether it takes more
    than 32 bits.
    """
    if isinstance(value, int):
        return value == 1, value % 16 == 0, value.bit_length() // 32
    return type(value)


class Launcher:
    """Starts a kernel, whose last parameter is a constexpr PDL.

    ``options`` are the constexprs before it, num_warps and num_stages. Without ``pdl``
    the kernel starts when the one ahead is done.

    Triton takes two thirds of a launch to find out which of its compiled kernels is
    meant. It is found here by a key that tells apart at least as much.
    """

    def __init__(self, kernel: Any, pdl: bool, options: dict[str, Any]) -> None:
        self.kernel = kernel
        self.pdl = pdl
        self.options = options
        self.ready: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> Any:
        """Start the kernel with ``args``, its ordinary parameters, all and in order.

        The first is a tensor of the current device. Nothing is checked. The grid must
        not be empty. Returns the compiled kernel.
        """
        device = args[0].get_device()
        # A dtype: of a tensor whose address 16 divides; in a tuple: of another.
        kinds = [
            (arg.dtype if arg.data_ptr() & 15 == 0 else (arg.dtype,))
            if isinstance(arg, Tensor)
            else number_kind(arg)
            for arg in args
        ]
        key = device, *kinds
        ready = self.ready.get(key)
        if ready is None:
            return self.start_first(key, grid, args)
        compiled, run, get_stream, first, last = ready
        run(*grid, get_stream(device), *first, *args, *last)
        return compiled

    def start_first(
        self, key: tuple[Any, ...], grid: tuple[int, int, int], args: tuple[Any, ...]
    ) -> Any:
        """Start it through Triton, which compiles it if it has to; remember as what."""
        pdl = self.pdl and has_pdl()
        constants = self.options | {"PDL": pdl}
        if not isinstance(self.kernel, triton.JITFunction):  # the interpreter runs it
            return self.kernel.run(*args, grid=grid, warmup=False, **constants)
        compiled = self.kernel.run(
            *args, grid=grid, warmup=False, launch_pdl=pdl, **FUSED, **constants
        )
        # What is ordinary may change from launch to launch; what follows does not.
        params = self.kernel.params
        ordinary, others = params[: len(args)], params[len(args) :]
        assert not any(param.is_constexpr for param in ordinary)
        assert all(param.is_constexpr for param in others)
        self.ready[key] = (
            compiled,
            compiled.run,
            triton.runtime.driver.active.get_current_stream,
            # None for Triton's own profiler
            (compiled.function, compiled.packed_metadata, None, None, None),
            tuple(constants[param.name] for param in others),
        )
        return compiled


@cache
def launcher(kernel: Any, pdl: bool = True, **options: Any) -> Launcher:
    """The one `Launcher` of a kernel with these options, whoever asks."""
    return Launcher(kernel, pdl, options)


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
