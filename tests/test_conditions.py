"""What goes wrong on a GPU, pretended on any machine.

`tools/gpu/conditions.py` provokes the same on a card.
"""

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from test_graphs import PROMPTS, Tape, answers, make

from simplellm import graphs, llm
from simplellm.bench import weight_bytes
from simplellm.config import MODELS, ModelConfig
from simplellm.engine import Engine, EngineConfig
from simplellm.graphs import CaptureError, GPUConfig, GraphEngine
from simplellm.llm import LLM, why_not_fused
from simplellm.memory import Need, enough
from simplellm.model import EMBEDDED, TORCH, Transformer, load_model
from simplellm.paged import PagedCache

GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_model(device="cpu")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU as far as one can ask PyTorch for it; its attributes may be changed."""
    card = SimpleNamespace(capability=(9, 0), free=20 * 10**9)
    for name, answer in (
        ("get_device_capability", lambda device: card.capability),
        ("device", lambda device: nullcontext()),
        ("get_device_name", lambda device: "a card"),
        ("mem_get_info", lambda device: (card.free, 80 * 10**9)),
        ("memory_reserved", lambda device: 0),
        ("memory_allocated", lambda device: 0),
        ("is_available", lambda: True),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return card


@pytest.mark.parametrize("error", [CaptureError, torch.OutOfMemoryError])
@pytest.mark.parametrize("room", [0, 3])
def test_steps_without_a_graph_run_when_capturing_fails(
    model: Transformer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
    room: int,
) -> None:
    monkeypatch.setattr(graphs, "record", Tape(room, error))
    engine = make(model, cuda_graphs=True, max_num_seqs=8, num_pages=200)
    sizes = [graph.size for graph in engine.runner.captured]
    # A driver that fails once will fail again; less memory may be enough.
    assert sizes == ([1, 2] if room and error is torch.OutOfMemoryError else [])
    (line,) = caplog.messages
    assert f"for {len(sizes)} of 4 batch sizes" in line and "cache_bytes" in line
    assert "no more room" in line and "details" not in line
    assert answers(engine, PROMPTS) == answers(Engine(model), PROMPTS)


@pytest.mark.parametrize("case", ["old GPU", "no CUDA", "old CUDA", "old", "missing"])
def test_old_machines_compute_with_pytorch(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    triton = pytest.importorskip("triton")
    assert why_not_fused(GPU, None, GPUConfig()) is None
    match case:
        case "old GPU":
            card.capability = 7, 5
            expected = "capability is 7.5, below 8.0"
        case "no CUDA":
            monkeypatch.setattr(torch.version, "cuda", None)
            expected = "built with CUDA None, not 12.0"
        case "old CUDA":
            monkeypatch.setattr(torch.version, "cuda", "11.8")
            expected = "built with CUDA 11.8, not 12.0"
        case "old":
            monkeypatch.setattr(triton, "__version__", "3.5.1")
            expected = "Triton is 3.5.1, below 3.6"
        case _:
            monkeypatch.setitem(sys.modules, "triton", None)
            expected = "Triton cannot be imported"
    assert expected in (why_not_fused(GPU, None, GPUConfig()) or "")


def test_a_gpu_without_bfloat16_gets_float32_and_one_line(
    card: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    card.capability = 7, 5
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        llm.PlainLLM, "__init__", lambda self, path, config, **o: asked.update(o)
    )
    with caplog.at_level(logging.INFO, "simplellm"):
        LLM(device="cuda")
    assert asked["dtype"] == torch.float32
    (line,) = caplog.messages
    assert "a card with PyTorch, since the GPU's compute capability is 7.5" in line


def test_unpacked_experts_are_left_to_pytorch(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model", quantized=False)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        llm.PlainLLM, "__init__", lambda self, path, config, **o: asked.update(o)
    )
    assert "the experts are not packed" in LLM(folder, device="cuda").how
    assert "backend" not in asked
    assert LLM(write_checkpoint(tmp_path / "packed"), device="cuda").how.startswith(
        "Triton"
    )


def test_a_config_that_kernels_have_no_room_for_is_refused_before_the_load(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.PlainLLM, "__init__", lambda *arguments, **options: 1 / 0)
    with pytest.raises(ValueError, match="expected less than 65,535 together"):
        LLM(config=EngineConfig(max_num_batched_tokens=2**16), device="cuda")


def test_a_backend_that_is_given_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "why_not_fused", lambda *arguments: None)
    with LLM(device="cpu", backend=TORCH) as given:
        assert type(given.engine) is Engine
        assert type(given.model) is Transformer


@pytest.mark.parametrize("name", MODELS)
def test_the_need_for_weights_is_that_of_the_shapes(name: str) -> None:
    exact = sum(weight_bytes(MODELS[name]).values())
    assert Need.of(MODELS[name], GPUConfig()).weights == pytest.approx(exact, rel=2e-3)
    exact = sum(weight_bytes(MODELS[name], packed=False).values())
    need = Need.of(MODELS[name], GPUConfig(), packed=False)
    assert need.weights == pytest.approx(exact, rel=2e-3)


def test_the_need_for_the_cache_is_that_of_its_pages() -> None:
    config = ModelConfig.from_file(EMBEDDED / "config.json")
    cache = PagedCache(config, num_pages=3, page_size=8, dtype=torch.bfloat16)
    need = Need.of(config, GPUConfig(num_pages=3, page_size=8))
    assert need.cache == cache.nbytes


def test_a_model_too_large_is_refused_before_it_loads(card: SimpleNamespace) -> None:
    with pytest.raises(torch.OutOfMemoryError) as error:
        LLM("gpt-oss-120b", random_weights=True, device="cuda")
    message = str(error.value)
    weights = sum(weight_bytes(MODELS["gpt-oss-120b"]).values()) / 1e9
    for part in (f"{weights:.1f} GB for its weights", "20.0 of 80.0 GB", "cache_bytes"):
        assert part in message


def test_a_cache_too_large_is_refused_before_the_load(card: SimpleNamespace) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"30\.0 for keys and values"):
        LLM(config=EngineConfig(cache_bytes=30 * 10**9), device="cuda")


def test_memory_that_runs_out_during_the_load_is_explained(
    card: SimpleNamespace,
) -> None:
    with (
        pytest.raises(torch.OutOfMemoryError, match="not enough memory") as error,
        enough(MODELS["gpt-oss-20b"], GPUConfig(), GPU),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert "CUDA out of memory" in str(error.value.__cause__)


@pytest.fixture
def forward() -> Any:
    pytest.importorskip("triton")
    from simplellm.kernels import forward

    return forward


def test_without_any_kernel_the_twins_give_the_same_tokens(
    model: Transformer,
    forward: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from triton.runtime.errors import OutOfResources

    def broken(name: str) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> Any:
            raise OutOfResources(300_000, 232_448, "shared memory")

        launch.__name__ = name
        return launch

    names = list(vars(forward.Kernels()))
    for name in names:
        monkeypatch.setattr(forward, name, broken(name))
    packed = load_model(device="cpu", backend=forward.FUSED)
    config = GPUConfig(cuda_graphs=False, page_size=16, num_pages=200)
    engine = GraphEngine(packed, config, forward.Fused)
    assert answers(engine, PROMPTS) == answers(Engine(model), PROMPTS)
    said = [message.split()[0] for message in caplog.messages]
    # A batch of one in bfloat16 takes three kernels of its own; nothing was drawn.
    assert sorted(said) == sorted(
        set(names) - {"route", "gate_up_few", "down_few", "draw"}
    )
    assert all("OutOfResources: out of resource" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ValueError("x is [2]; expected [3]"), ValueError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (RuntimeError("Triton Error [CUDA]: out of memory"), torch.OutOfMemoryError),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublas"),
            torch.OutOfMemoryError,
        ),
        (
            RuntimeError("Triton Error [CUDA]: an illegal memory access was met"),
            RuntimeError,
        ),
    ],
)
def test_other_errors_of_a_launch_are_no_reason_to_fall_back(
    forward: Any, error: Exception, raised: type[Exception]
) -> None:
    errors = [error]

    def launch(x: int) -> int:
        if errors:
            raise errors.pop()
        return x

    guarded = forward.Fallback(launch, lambda x: -x)
    with pytest.raises(raised):
        guarded(1)
    assert guarded(1) == 1


def test_a_kernel_that_does_not_compile_is_tried_once(
    forward: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def launch(x: int) -> int:
        calls.append(x)
        raise RuntimeError("PassManager::run failed")

    guarded = forward.Fallback(launch, lambda x: -x)
    assert [guarded(x) for x in (1, 2, 3)] == [-1, -2, -3]
    assert calls == [1]
    assert "launch does not compile" in caplog.text
    assert "PassManager::run failed" in caplog.text


def test_batch_invariant_kernels_do_not_give_way(
    forward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch would compute on, but promises no order of sums."""
    names = list(vars(forward.Kernels()))

    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("PassManager::run failed")

    for name in names:
        monkeypatch.setattr(forward, name, broken)
    kernels = forward.Kernels(batch_invariant=True)
    for name in names:
        with pytest.raises(RuntimeError, match="PassManager::run failed"):
            getattr(kernels, name)()


def test_threads_that_fail_together_warn_once(
    forward: Any, caplog: pytest.LogCaptureFixture
) -> None:
    together = threading.Barrier(4)

    def launch(x: int) -> int:
        together.wait(10)
        raise RuntimeError("PassManager::run failed")

    guarded = forward.Fallback(launch, lambda x: -x)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(guarded, [1, 2, 3, 4])) == [-1, -2, -3, -4]
    assert len(caplog.messages) == 1
