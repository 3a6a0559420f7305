"""Threads that need the same kernels compile each of them once, without a GPU here."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from simplellm.kernels.compiling import THREADS, compile_in_threads


@triton.jit
def add_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out_ptr + places, tl.load(x_ptr + places) + 1)


@triton.jit
def broken_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 1000, "it is too small")
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


class Hopper:
    """As much of a driver as it takes to compile."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Counter[Any]]:
    """How often each kernel was compiled for a GPU that is not there."""
    counts: Counter[Any] = Counter()

    def heard(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            counts[src.name, src.constants[(len(src.signature) - 1,)]] += 1

    monkeypatch.setattr(triton.knobs.compilation, "listener", heard)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    for kernel in (add_kernel, broken_kernel):
        kernel.device_caches.clear()
    monkeypatch.setattr(driver, "_active", Hopper())
    yield counts
    for kernel in (add_kernel, broken_kernel):
        kernel.device_caches.clear()


def warm_up(kernel: Any, *arguments: object) -> None:
    tensors = [torch.float32] * (len(kernel.params) - 1)
    kernel.warmup(*tensors, *arguments, grid=(1,))


def test_each_kernel_is_compiled_once(compiled: Counter[Any]) -> None:
    together = threading.Barrier(THREADS)
    hooks = triton.knobs.runtime.jit_cache_hook

    def job() -> None:
        together.wait(10)
        for block in (64, 128, 256):
            warm_up(add_kernel, block)

    compile_in_threads([job] * THREADS)
    assert compiled == {("add_kernel", block): 1 for block in (64, 128, 256)}
    assert triton.knobs.runtime.jit_cache_hook is hooks


def test_a_kernel_that_does_not_compile_stops_nobody(compiled: Counter[Any]) -> None:
    failures: list[str] = []

    def job() -> None:
        for kernel in (broken_kernel, add_kernel, broken_kernel):
            try:
                warm_up(kernel, 64)
            except triton.CompilationError as error:
                failures.append(str(error))

    compile_in_threads([job] * THREADS)
    assert len(failures) == 2 * THREADS
    assert all("it is too small" in failure for failure in failures)
    assert compiled == {("add_kernel", 64): 1}


def test_memory_may_run_out_and_other_errors_are_raised(
    compiled: Counter[Any],
) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def wrong() -> None:
        warm_up(broken_kernel, 64)

    compile_in_threads([full, lambda: warm_up(add_kernel, 64)])
    assert compiled == {("add_kernel", 64): 1}
    with pytest.raises(triton.CompilationError):
        compile_in_threads([wrong, full])
