"""Start kernels, and compile them in several threads.

Kernels take a constexpr PDL, for programmatic dependent launch (Hopper and later): the
kernel is started while the one before it still runs, and waits before it first reads
what that one wrote. Until then it loads only what no kernel that may still run writes:
weights, page tables, keys of earlier steps.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import torch
import triton

THREADS = 8  # with more they would wait for Python, which a part of Triton is
HOOKS = threading.Lock()  # Triton has one set of hooks
PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # of CUfunction_attribute in cuda.h


@cache
def has_pdl() -> bool:
    """Whether this process's GPU, if any, knows programmatic dependent launch."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


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


class Compiled(Exception):
    """Another thread has compiled the kernel that was to be launched."""


def hash_kernels() -> None:
    """Have Triton compute the keys of all kernels' sources, in the order they stand in.

    In 3.6 a key depends on whether the functions that a kernel calls have theirs. If
    threads came to them in any order, a later process would not find all in the cache.
    """
    for name, module in sorted(sys.modules.items()):
        if name.startswith("simplellm.kernels."):
            for value in vars(module).values():
                if isinstance(value, triton.JITFunction):
                    value.cache_key  # noqa: B018 (computes and keeps it)


def compile_in_threads(
    jobs: Iterable[Callable[[], object]], start: Callable[[], object] | None = None
) -> None:
    """Do ``jobs``, which launch kernels, in threads that compile them side by side.

    Triton would compile a kernel in every thread that comes to it. Here others wait for
    the first one, and begin their job again. ``start`` is called in every thread. A job
    ends early if the GPU has no memory for it; other errors are raised.
    """
    locks: dict[tuple[triton.JITFunction, str], threading.Lock] = {}
    held = threading.local()  # lock: of the kernel that this thread compiles, if any

    def release(**_: Any) -> None:
        lock = getattr(held, "lock", None)
        if lock is not None:
            held.lock = None
            lock.release()

    def acquire(*, fn: Any, key: str, **_: Any) -> bool:
        if hasattr(held, "lock"):  # else this is not one of these threads
            release()  # that of a kernel which does not compile
            lock = locks.setdefault((fn.jit_function, key), threading.Lock())
            if not lock.acquire(blocking=False):
                with lock:
                    raise Compiled
            held.lock = lock
        return False  # go on and compile

    def do(job: Callable[[], object]) -> None:
        held.lock = None
        while True:
            try:
                with suppress(torch.OutOfMemoryError):
                    job()
                return
            except Compiled:
                continue
            finally:
                release()

    runtime = triton.knobs.runtime
    with HOOKS:
        before = runtime.jit_cache_hook, runtime.jit_post_compile_hook
        runtime.jit_cache_hook, runtime.jit_post_compile_hook = acquire, release
        try:
            with ThreadPoolExecutor(THREADS, initializer=start) as threads:
                list(threads.map(do, jobs))
        finally:
            runtime.jit_cache_hook, runtime.jit_post_compile_hook = before
