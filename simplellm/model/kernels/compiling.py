"""Compile kernels side by side, and find out which of them do not compile."""

import ast
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from subprocess import SubprocessError
from typing import Any

import torch
import triton
from torch import Tensor

from simplellm.model.kernels.other_families import plainly, prepare_weights
from simplellm.model.layers import Experts
from simplellm.model.ops import PLAIN, Ops

LOGGER = logging.getLogger("simplellm")
THREADS = 8  # with more they would wait for Python, which a part of Triton is
HOOKS = threading.Lock()  # Triton has one set of hooks

# Triton reports a pass that failed and a missing C compiler as RuntimeErrors.
FAILURES = triton.TritonError, RuntimeError, OSError, SubprocessError
# What a RuntimeError says when there was no room for a kernel or for cuBLAS.
NO_ROOM = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
)
# How an error of the GPU begins, and what says that it only cannot run this kernel.
GPU_ERROR = "Triton Error [CUDA]"
NOT_LOADED = (
    "no kernel image",
    "invalid ptx",
    "image is invalid",
    "too many resources",
)


class Compiled(Exception):
    """Another thread, which holds ``lock``, compiles the kernel that is needed."""

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__("another thread compiles this kernel")
        self.lock = lock


def hash_kernels() -> None:
    """Have Triton compute the keys of all kernels' sources, in the order they stand in.

    In 3.6 a key depends on whether the functions that a kernel calls have theirs. If
    threads came to them in any order, a later process would not find all in the cache.
    """
    for name, module in sorted(sys.modules.items()):
        if name.startswith("simplellm.model.kernels."):
            for value in vars(module).values():
                if isinstance(value, triton.JITFunction):
                    value.cache_key  # noqa: B018 (computes and keeps it)


class Jobs:
    """What threads have to do; a job may wait for somebody else's kernel."""

    def __init__(self, jobs: Iterable[Callable[[], object]]) -> None:
        # Each with the lock of the kernel that it waits for, if any.
        self.todo: list[tuple[Callable[[], object], threading.Lock | None]]
        self.todo = [(job, None) for job in jobs]
        self.changed = threading.Condition()

    def take(self) -> Callable[[], object] | None:
        """The first job that can go on, or None if there is no job left."""
        with self.changed:
            while self.todo:
                for index, (job, lock) in enumerate(self.todo):
                    if lock is None or not lock.locked():
                        del self.todo[index]
                        return job
                self.changed.wait()
        return None

    def put_back(self, job: Callable[[], object], lock: threading.Lock) -> None:
        """``job`` can go on once ``lock`` is free."""
        with self.changed:
            self.todo.append((job, lock))

    def look_again(self) -> None:
        """A lock is free."""
        with self.changed:
            self.changed.notify_all()


def compile_in_threads(
    jobs: Iterable[Callable[[], object]], start: Callable[[], object] | None = None
) -> None:
    """Do ``jobs``, which launch kernels, in threads that compile them side by side.

    Triton would compile a kernel in every thread that comes to it. Here the first one
    does; others put their job back, to be begun again once the kernel is there, and
    take another. ``start`` is called in every thread. A job ends early if the GPU has
    no memory for it; other errors are raised.
    """
    locks: dict[tuple[triton.JITFunction, str], threading.Lock] = {}
    held = threading.local()  # lock: of the kernel that this thread compiles, if any
    todo = Jobs(jobs)

    def release(**_: Any) -> None:
        lock = getattr(held, "lock", None)
        if lock is not None:
            held.lock = None
            lock.release()
            todo.look_again()

    def acquire(*, fn: Any, key: str, **_: Any) -> bool:
        if hasattr(held, "lock"):  # else this is not one of these threads
            release()  # that of a kernel which does not compile
            lock = locks.setdefault((fn.jit_function, key), threading.Lock())
            if not lock.acquire(blocking=False):
                raise Compiled(lock)
            held.lock = lock
        return False  # go on and compile

    def work(_: int) -> None:
        held.lock = None
        while (job := todo.take()) is not None:
            try:
                with suppress(torch.OutOfMemoryError):
                    job()
            except Compiled as error:
                todo.put_back(job, error.lock)
            finally:
                release()

    parse, parsing = triton.JITFunction.parse, threading.Lock()

    def parse_alone(self: triton.JITFunction) -> ast.AST:
        with parsing:
            return parse(self)

    runtime = triton.knobs.runtime
    with HOOKS:
        before = runtime.jit_cache_hook, runtime.jit_post_compile_hook
        runtime.jit_cache_hook, runtime.jit_post_compile_hook = acquire, release
        # Up to Python 3.11.7 and 3.12.1 threads that parse share a counter of depth, so
        # that one of them may get a SystemError (CPython's issue 106905).
        triton.JITFunction.parse = parse_alone
        began = time.monotonic()
        try:
            with ThreadPoolExecutor(THREADS, initializer=start) as threads:
                list(threads.map(work, range(THREADS)))
        finally:
            runtime.jit_cache_hook, runtime.jit_post_compile_hook = before
            triton.JITFunction.parse = parse
        seconds = time.monotonic() - began
        LOGGER.info("%d kernels were made ready in %.1f s", len(locks), seconds)


def raise_others(error: Exception) -> None:
    """Raise ``error`` unless it says that a kernel does not compile, or load."""
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        raise error
    message = str(error)
    if any(words in message for words in NO_ROOM):
        raise torch.OutOfMemoryError(message) from error
    loaded = not any(words in message for words in NOT_LOADED)
    if message.startswith(GPU_ERROR) and loaded:
        raise error


def no_experts(x: Tensor, mlp: Experts, num_tokens: Tensor) -> Tensor:
    """As many numbers as `Ops.experts` gives, of weights that may be repacked."""
    return torch.zeros_like(x)


def compile_kernels(
    ops: Ops,
    steps: Iterable[Callable[[Ops], object]],
    device: torch.device,
    batch_invariant: bool = False,
) -> Ops:
    """``ops``, with plain operations in place of those whose kernels do not compile.

    Each of ``steps`` computes with the table that it is given; together they need every
    kernel that will be needed. A line in the log says what was replaced, and why. With
    ``batch_invariant`` nothing is, since PyTorch promises no order of sums: what does
    not compile is raised. Errors of arguments and of the GPU are raised in any case; a
    step for which there is no memory ends early.
    """
    broken: dict[str, Exception] = {}

    def attempt(name: str, *args: Any) -> Any:
        if name not in broken:
            try:
                return getattr(ops, name)(*args)
            except FAILURES as error:
                raise_others(error)
                broken.setdefault(name, error)
        plain = no_experts if name == "experts" else getattr(PLAIN, name)
        return plain(*map(plainly, args))

    trial = ops
    if not batch_invariant:
        names = vars(ops).keys() - {"name", "prepare"}
        attempts: dict[str, Any] = {name: partial(attempt, name) for name in names}
        trial = replace(ops, **attempts)
    hash_kernels()
    on_gpu = device.type == "cuda"
    # A thread begins on the first GPU.
    start = partial(torch.cuda.set_device, device) if on_gpu else None
    compile_in_threads([partial(step, trial) for step in steps], start)
    if on_gpu:
        # What each thread had cuBLAS work in would stay.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    for name, error in broken.items():
        LOGGER.warning(
            "%s does not compile, so that PyTorch computes it, which is slower: %s: %s",
            name,
            type(error).__name__,
            str(error).strip().partition("\n")[0],
        )
    # Plain experts read the checkpoint's layout; others' inputs are not rounded ahead.
    plain = {*broken, "prepare"} if "experts" in broken else {*broken}
    if plain & {"add_norm", "project", "dense"}:
        options = getattr(ops.prepare, "keywords", {})
        ops = replace(ops, prepare=partial(prepare_weights, **options))
    return replace(ops, **{name: getattr(PLAIN, name) for name in plain})
