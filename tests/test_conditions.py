"""What goes wrong on a GPU, pretended on any machine.

test_gpu_conditions provokes the same on a card. Kernels that do not compile are in
test_kernels_compiling, too little memory is in test_sizes.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint

from simplellm import graphs
from simplellm.checkpoint import Checkpoint
from simplellm.config import EngineConfig
from simplellm.engine import Engine
from simplellm.graphs import CaptureError
from simplellm.load import EMBEDDED, build_engine, choose, load_model
from simplellm.machine import find_dtype, why_not_triton
from simplellm.model import Model
from simplellm.request import Request, SamplingParams
from simplellm.runner import Runner

GPU = torch.device("cuda")
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10], [11, 12]]
NO_ROOM = "no more room"


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(device="cpu")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU as far as one can ask PyTorch for it; its attributes may be changed."""
    card = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: card.capability
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return card


class Tape:
    """Records a step as a graph does, and fails once there is no more ``room``."""

    def __init__(self, room: int, error: type[Exception]) -> None:
        self.room, self.error = room, error

    def __call__(self, run: Any, pool: Any = None) -> SimpleNamespace:
        self.room -= 1
        if self.room < 0:
            raise self.error(f"{NO_ROOM}\nand many details")

        def replay() -> None:
            for group in run.args[0].groups:  # the plain operations' own notes
                vars(group).pop("reads", None)
            run()

        return SimpleNamespace(replay=replay, pool=lambda: "pool")


def engine_of(model: Model) -> Engine:
    config = EngineConfig(max_num_seqs=8, num_pages=200).resolved("cpu")
    return build_engine(model, config)


def answers(engine: Engine) -> list[list[int]]:
    """Greedy answers to all prompts at once."""
    requests = [
        Request(list(prompt), 12, SamplingParams(temperature=0), number=number)
        for number, prompt in enumerate(PROMPTS)
    ]
    engine.submit(requests)
    while engine.scheduler.requests or engine.flights:
        engine.step()
    assert engine.stats().cache_usage == 0
    return [request.tokens[request.num_prompt :] for request in requests]


@pytest.mark.parametrize("error", [CaptureError, torch.OutOfMemoryError])
@pytest.mark.parametrize("room", [0, 2, 4])
def test_steps_without_a_graph_run_when_capturing_fails(
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
    room: int,
) -> None:
    tape = Tape(room, error)
    monkeypatch.setattr(graphs, "record", tape)
    # On a GPU all steps have block tables of one width, for the sake of graphs.
    monkeypatch.setattr(Runner, "_pages", lambda self, works: self.pages)
    engine = engine_of(model)
    engine.runner.capture([1, 2, 4, 8])
    sizes = [graph.size for graph in engine.runner.captured]
    assert sizes == [1, 2, 4, 8][4 - room :]
    if room < 4:
        (line,) = caplog.messages
        assert f"for {room} of 4 batch sizes" in line and "cache_bytes" in line
        assert NO_ROOM in line and "details" not in line
        # A driver that fails once will fail again; less memory may be enough.
        assert tape.room == (-1 if error is CaptureError else room - 4)
    assert answers(engine) == answers(engine_of(model))


@pytest.mark.parametrize("case", ["old GPU", "no CUDA", "old CUDA", "old", "missing"])
def test_old_machines_compute_with_pytorch(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    triton = pytest.importorskip("triton")
    assert why_not_triton(GPU, torch.bfloat16) is None
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
    reason = why_not_triton(GPU, torch.bfloat16)
    assert expected in (reason or "")
    found = choose(EngineConfig(), Checkpoint(EMBEDDED), torch.bfloat16, GPU)
    assert found == ("plain", f"PyTorch, since {reason}")


def test_a_gpu_without_bfloat16_gets_float32(card: SimpleNamespace) -> None:
    assert find_dtype(None, GPU) == torch.bfloat16
    card.capability = 7, 5
    assert find_dtype(None, GPU) == torch.float32
    assert "float32" in (why_not_triton(GPU, torch.float32) or "float32")


def test_unpacked_experts_are_left_to_pytorch(
    card: SimpleNamespace, tmp_path: Path
) -> None:
    dense = Checkpoint(write_checkpoint(tmp_path / "model", quantized=False))
    operations, how = choose(EngineConfig(), dense, torch.bfloat16, GPU)
    assert operations == "plain" and "the experts are not packed" in how
    packed = Checkpoint(write_checkpoint(tmp_path / "packed"))
    assert choose(EngineConfig(), packed, torch.bfloat16, GPU)[0] == "fused"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": "fused"}, "operations is 'fused'; expected 'auto', since"),
        ({"batch_invariant": True}, "batch_invariant is True; expected False, since"),
    ],
)
def test_what_only_kernels_can_do_is_not_promised_without_them(
    card: SimpleNamespace, options: dict[str, Any], message: str
) -> None:
    source, config = Checkpoint(EMBEDDED), EngineConfig(**options)
    assert choose(config, source, torch.bfloat16, GPU)[0] == "fused"
    with pytest.raises(ValueError, match=message):
        choose(config, source, torch.float32, torch.device("cpu"))


def test_operations_that_are_asked_for_are_taken(card: SimpleNamespace) -> None:
    plain, source = EngineConfig(operations="plain"), Checkpoint(EMBEDDED)
    for device in (GPU, torch.device("cpu")):
        found = choose(plain, source, torch.float32, device)
        assert found == ("plain", "PyTorch, since operations is 'plain'")
