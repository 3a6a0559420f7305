"""Compile kernels in several threads, each kernel in one of them."""

import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton

THREADS = 8


def hash_kernels() -> None:
    """Have Triton compute the keys of all kernels' sources, in the order they stand in.

    In 3.6 a key depends on whether the functions that a kernel calls have theirs. Did
    threads come to them in any order, a later process would not find all in the cache.
    """
    for name, module in sorted(sys.modules.items()):
        if name.startswith("simplellm.kernels."):
            for value in vars(module).values():
                if isinstance(value, triton.JITFunction):
                    value.cache_key  # noqa: B018 (computes and keeps it)


def compile_in_threads(jobs: Iterable[Callable[[], object]]) -> None:
    """Do ``jobs``, which launch kernels, in threads that compile them side by side.

    Triton would compile a kernel in every thread that comes to it. Here others wait for
    the first one, and find in the cache on disk what it made. A job ends early if the
    GPU has no memory for it; other errors are raised.
    """
    hash_kernels()
    locks: dict[tuple[triton.JITFunction, str], threading.Lock] = {}
    held = threading.local()

    def release(**_: Any) -> None:
        lock, held.lock = getattr(held, "lock", None), None
        if lock is not None:
            lock.release()

    def acquire(*, fn: Any, key: str, **_: Any) -> bool:
        release()  # that of a kernel which does not compile
        lock = locks.setdefault((fn.jit_function, key), threading.Lock())
        lock.acquire()
        held.lock = lock
        return False  # go on

    def do(job: Callable[[], object]) -> None:
        try:
            job()
        except torch.OutOfMemoryError:
            pass
        finally:
            release()

    runtime = triton.knobs.runtime
    before = runtime.jit_cache_hook, runtime.jit_post_compile_hook
    runtime.jit_cache_hook, runtime.jit_post_compile_hook = acquire, release
    try:
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(do, jobs))
    finally:
        runtime.jit_cache_hook, runtime.jit_post_compile_hook = before
