"""Threads that need the same kernels compile each of them once, without a GPU here."""

import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernels_interpreter import kernel_modules
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from simplellm.checkpoint.scaled import E4M3, Scaled
from simplellm.model.kernels import fragments, launch
from simplellm.model.kernels.compiling import (
    THREADS,
    compile_in_threads,
    compile_kernels,
    hash_kernels,
)
from simplellm.model.kernels.other_families import prepare
from simplellm.model.kernels.rounding import Rounded, RoundedNorm, Rounding
from simplellm.model.layers import Dense
from simplellm.model.ops import PLAIN, Ops


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


def hooks() -> tuple[Any, Any]:
    runtime = triton.knobs.runtime
    return runtime.jit_cache_hook, runtime.jit_post_compile_hook


def test_each_kernel_is_compiled_once(compiled: Counter[Any]) -> None:
    together = threading.Barrier(THREADS)
    before = hooks()
    started: list[int] = []
    ended: list[int] = []

    def job(number: int, begun: list[int]) -> None:
        if not begun:
            together.wait(60)
        begun.append(number)
        for block in (64, 128, 256):
            warm_up(add_kernel, block)
        ended.append(number)

    compile_in_threads(
        [partial(job, number, []) for number in range(THREADS)],
        lambda: started.append(threading.get_ident()),
    )
    assert compiled == {("add_kernel", block): 1 for block in (64, 128, 256)}
    assert sorted(ended) == list(range(THREADS))
    assert len(set(started)) == THREADS
    assert hooks() == before


def test_who_has_waited_finds_the_kernel_in_memory(compiled: Counter[Any]) -> None:
    """A kernel that is read from disk would be in the GPU's memory twice."""
    loaded: list[int] = []
    lock = threading.Lock()

    def job() -> None:
        warm_up(add_kernel, 64)
        kernels = add_kernel.device_caches[0][0]
        with lock:
            loaded.append(id(next(iter(kernels.values()))))

    compile_in_threads([job] * THREADS)
    assert len(loaded) == THREADS
    # Who looks just before the first one is done, and asks just after, reads from disk.
    assert len(set(loaded)) < THREADS / 2


def test_who_would_wait_takes_another_job(
    compiled: Counter[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that all want is there only after a job that comes last."""
    other = threading.Event()

    def slow(**_: Any) -> None:
        assert other.wait(60)

    monkeypatch.setattr(triton.knobs.compilation, "listener", slow)
    same = [partial(warm_up, add_kernel, 64)] * THREADS
    compile_in_threads([*same, other.set])


def test_two_engines_may_start_at_once(compiled: Counter[Any]) -> None:
    before = hooks()

    def engine(block: int) -> None:
        compile_in_threads([partial(warm_up, add_kernel, block)] * THREADS)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(engine, [64, 64, 128, 256]))
    assert compiled == {("add_kernel", block): 1 for block in (64, 128, 256)}
    assert hooks() == before


def test_other_threads_compile_as_ever(compiled: Counter[Any]) -> None:
    """A thread that serves meanwhile holds no lock, even if its kernel is broken."""
    meanwhile = threading.Barrier(2)

    def serve() -> None:
        meanwhile.wait(60)
        with pytest.raises(triton.CompilationError):
            warm_up(broken_kernel, 64)
        warm_up(add_kernel, 64)
        meanwhile.wait(60)

    def job() -> None:
        meanwhile.wait(60)
        meanwhile.wait(60)
        with pytest.raises(triton.CompilationError):
            warm_up(broken_kernel, 64)
        warm_up(add_kernel, 64)

    with ThreadPoolExecutor(1) as threads:
        serving = threads.submit(serve)
        compile_in_threads([job])
        serving.result()
    assert compiled == {("add_kernel", 64): 1}


INTERPRETS_FIRST = """
import sys
from kernels_interpreter import interpreted
with interpreted():
    from triton.compiler.code_generator import CodeGenerator
from triton.language import static_assert
sys.exit(static_assert not in CodeGenerator.statically_implemented_functions)
"""


def test_interpreting_leaves_the_compiler_its_assertions() -> None:
    """In a process that interprets before it has compiled anything."""
    here = Path(__file__).parent
    subprocess.run([sys.executable, "-c", INTERPRETS_FIRST], cwd=here, check=True)


def test_threads_that_parse_do_not_disturb_each_other() -> None:
    """Finalizers let another thread run in the midst of CPython's building a tree."""

    class Circle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            sum(range(1000))

    def job() -> None:
        for _ in range(200):
            Circle()
            add_kernel.parse()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        compile_in_threads([job] * THREADS)
    finally:
        sys.setswitchinterval(interval)


def test_a_kernel_that_does_not_compile_stops_nobody(compiled: Counter[Any]) -> None:
    ended: list[int] = []

    def job(number: int) -> None:
        for kernel in (broken_kernel, add_kernel, broken_kernel):
            try:
                warm_up(kernel, 64)
            except triton.CompilationError as error:
                assert "it is too small" in str(error)
                assert kernel is broken_kernel
        ended.append(number)

    compile_in_threads([partial(job, number) for number in range(THREADS)])
    assert sorted(ended) == list(range(THREADS))
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


def test_every_kernel_has_its_key() -> None:
    kernels = [
        value
        for module in kernel_modules()
        for value in vars(module).values()
        if isinstance(value, triton.JITFunction)
    ]
    for kernel in kernels:
        kernel.hash = None
    hash_kernels()
    assert len(kernels) > 20
    assert all(kernel.hash for kernel in kernels)


CPU = torch.device("cpu")
NAMES = sorted(vars(PLAIN).keys() - {"name", "prepare"})


def broken_ops(error: Exception, *names: str) -> Ops:
    """A table whose operations ``names`` raise ``error``, the others return numbers."""

    def broken(*args: Any) -> Any:
        raise error

    fine = dict.fromkeys(NAMES, lambda *args: 1)
    return Ops("broken", **(fine | dict.fromkeys(names, broken)), prepare=id)


def normalize(ops: Ops) -> Tensor:
    """A step."""
    return ops.add_norm(torch.ones(2, 3), None, torch.ones(3), 1e-5)[1]


def feed(ops: Ops) -> Tensor:
    """Another one, whose experts may have been repacked."""
    return ops.experts(torch.ones(2, 3), object(), torch.ones(1))


def test_what_does_not_compile_gives_way_to_the_plain_operation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ops = broken_ops(RuntimeError("PassManager::run failed"), "add_norm", "experts")
    seen: list[Tensor] = []
    steps = [
        lambda ops, step=step: seen.append(step(ops)) for step in (normalize, feed)
    ]
    got = compile_kernels(ops, steps * 4, CPU)
    assert got == replace(
        ops, add_norm=PLAIN.add_norm, experts=PLAIN.experts, prepare=PLAIN.prepare
    )
    assert [x.shape for x in seen] == [(2, 3)] * 8  # every step goes on
    said = [message.split()[0] for message in caplog.messages]
    assert sorted(said) == ["add_norm", "experts"]  # once each
    assert all("PassManager::run failed" in line for line in caplog.messages)


@pytest.mark.parametrize("name", ["add_norm", "project", "dense"])
def test_where_one_operation_is_plain_nothing_is_rounded_ahead(name: str) -> None:
    """Neither in the trial, nor in the model that is loaded afterwards."""
    ops = broken_ops(RuntimeError("PassManager::run failed"), name)
    ops = replace(ops, prepare=partial(prepare, fp8=True))
    weight = Scaled.of(torch.ones(8, 3), (1, 0), torch.int8, True)
    norm = RoundedNorm(torch.ones(3), Rounding(3, torch.int8))
    x = torch.ones(2, 3)
    values, scales = weight.round_inputs(x)
    ahead = Rounded(values, scales.T, 2, 3, x.dtype)
    mlp = Dense(weight, None, Scaled.of(torch.ones(3, 4), (1, 0), E4M3, True), None)
    arguments: dict[str, Any] = {
        "add_norm": (x, None, norm, 1e-5),
        "project": (ahead, weight, None),
        "dense": (ahead, mlp),
    }
    expected: dict[str, Any] = {
        "add_norm": (x, None, norm.weight, 1e-5),
        "project": (x, weight, None),
        "dense": (x, mlp),
    }
    found: list[Any] = []
    steps = [lambda ops: found.append(getattr(ops, name)(*arguments[name]))]
    table = compile_kernels(ops, steps, CPU)
    plain = getattr(PLAIN, name)(*expected[name])
    torch.testing.assert_close(found, [plain])
    assert getattr(table, name) is getattr(PLAIN, name)
    assert isinstance(table.prepare, partial)
    assert table.prepare.func is fragments.prepare
    assert table.prepare.keywords == {"fp8": True}  # and what that checks, is checked


def test_what_compiles_stays(caplog: pytest.LogCaptureFixture) -> None:
    ops = broken_ops(RuntimeError(), "draw")
    assert compile_kernels(ops, [normalize_is_one], CPU) == ops
    assert not caplog.messages


def normalize_is_one(ops: Ops) -> None:
    assert ops.add_norm() == 1


def test_a_kernel_too_large_for_the_gpu_gives_way() -> None:
    ops = broken_ops(OutOfResources(300_000, 232_448, "shared memory"), "add_norm")
    assert compile_kernels(ops, [normalize], CPU).add_norm is PLAIN.add_norm


def test_batch_invariant_kernels_do_not_give_way() -> None:
    """PyTorch would compute on, but promises no order of sums."""
    for name in NAMES:
        ops = broken_ops(RuntimeError("PassManager::run failed"), name)
        with pytest.raises(RuntimeError, match="PassManager::run failed"):
            compile_kernels(ops, [lambda ops, n=name: getattr(ops, n)()], CPU, True)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x is [2]; expected [3]"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was met"),
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
    ],
)
def test_other_errors_are_no_reason_to_give_way(error: Exception) -> None:
    ops = broken_ops(error, "add_norm")
    with pytest.raises(type(error), match=re.escape(str(error))):
        compile_kernels(ops, [normalize], CPU)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublas"),
    ],
)
def test_without_memory_a_step_ends_and_nothing_gives_way(error: Exception) -> None:
    ended: list[str] = []

    def step(ops: Ops) -> None:
        normalize(ops)
        ended.append("the step")

    ops = broken_ops(error, "add_norm")
    assert compile_kernels(ops, [step], CPU) == ops
    assert not ended


@triton.jit
def launched_kernel(
    x_ptr, y_ptr, n, scale, N: tl.constexpr, HAS_Y: tl.constexpr, PDL: tl.constexpr
):
    x = tl.load(x_ptr + n)
    if HAS_Y:
        x += tl.load(y_ptr + n)
    tl.store(x_ptr + N, x * scale)


@pytest.fixture
def launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[list[tuple[Any, ...]]]:
    """What reaches the GPU's driver: grid, compiled kernel, whether it depends on the
    kernel ahead, arguments."""
    seen: list[tuple[Any, ...]] = []

    class Driver(Hopper):
        utils = SimpleNamespace(
            load_binary=lambda name, *rest: (None, name, 32, 0, 1024),
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 232_448},
        )

        def launcher_cls(self, src: Any, metadata: Any) -> Any:
            """Called once for each kernel that is compiled."""
            number = src.hash()

            def run(x: int, y: int, z: int, stream: int, *rest: Any) -> None:
                assert metadata.enable_fp_fusion
                seen.append(((x, y, z), number, metadata.launch_pdl, rest[5:]))

            return run

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(launch, "has_pdl", lambda: True)
    monkeypatch.setattr(driver, "_active", Driver())
    launched_kernel.device_caches.clear()
    launch.launcher.cache_clear()
    yield seen
    launched_kernel.device_caches.clear()
    launch.launcher.cache_clear()


def test_a_launch_says_whether_it_depends_on_the_kernel_ahead(
    launches: list[tuple[Any, ...]],
) -> None:
    x = torch.zeros(64)
    for pdl in (True, False, True, False):
        start = launch.launcher(launched_kernel, pdl, N=3, HAS_Y=False)
        start((2, 1, 1), x, None, 7, 0.5)
    assert [told for _, _, told, _ in launches] == [True, False] * 2
    assert [arguments[-1] for *_, arguments in launches] == [True, False] * 2
    assert launches[0] == launches[2] and launches[1] == launches[3]


def test_a_second_launch_is_what_triton_would_launch(
    launches: list[tuple[Any, ...]],
) -> None:
    """Whatever the arguments: the same compiled kernel, grid and arguments."""
    base = torch.zeros(256)
    half = base.half()
    tensors = base, base[1:], base[4:], half, half[8:], half[1:]
    numbers = 1, 2, 16, 17, 2**31 - 1, 2**31, 2**33, -16, 0
    for x, y, n in product(tensors, (None, base, base[1:]), numbers):
        options = {"N": 4, "HAS_Y": y is not None}
        for scale in (0.5, 2.0):
            launches.clear()
            for _ in range(2):
                launch.launcher(launched_kernel, **options)((3, 2, 1), x, y, n, scale)
            launched_kernel.run(
                *(x, y, n, scale),
                grid=(3, 2),
                warmup=False,
                PDL=True,
                launch_pdl=True,
                enable_fp_fusion=True,
                **options,
            )
            once, again, expected = launches
            for got in (once, again):
                assert got[:3] == expected[:3]
                pairs = zip(got[3], expected[3], strict=True)
                assert all(a is b or a == b for a, b in pairs)


def test_a_launch_makes_triton_warn_of_nothing(
    launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.9 does once in a process of what it will do by itself from 3.10 on."""
    told: list[str] = []
    monkeypatch.setattr(triton.knobs, "warn_once", told.append, raising=False)
    start = launch.launcher(launched_kernel, N=5, HAS_Y=False)
    start((1, 1, 1), torch.zeros(64), None, 7, 0.5)
    assert launches and not told


def test_options_are_told_apart(launches: list[tuple[Any, ...]]) -> None:
    x = torch.zeros(64)
    for options in ({"N": 4}, {"N": 5}, {"N": 4, "num_warps": 8}, {"N": 4}):
        start = launch.launcher(launched_kernel, HAS_Y=False, **options)
        start((1, 1, 1), x, None, 7, 0.5)
    kernels = [kernel for _, kernel, _, _ in launches]
    assert len(set(kernels[:3])) >= 2 and kernels[3] == kernels[0]
    assert [arguments[4] for *_, arguments in launches] == [4, 5, 4, 4]
    assert launch.launcher.cache_info().currsize == 3


def test_powers_of_two() -> None:
    for least in range(1, 5000):
        assert launch.power_of_two(least) == triton.next_power_of_2(least)
