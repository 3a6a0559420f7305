"""Compile kernels in several threads, each kernel in one of them."""

import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
import triton

THREADS = 8  # with more they would wait for Python, which a part of Triton is
HOOKS = threading.Lock()  # Triton has one set of hooks


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
