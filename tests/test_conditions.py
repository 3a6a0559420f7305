"""What goes wrong on a GPU, pretended on any machine.

test_gpu_conditions.py provokes the same on a card. That graphs may be missing is in
test_runner.py, that kernels may not compile in test_kernels_compiling.py.
"""

import gc
import json
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from families import CASES, write

from simplellm import LLM, EngineConfig
from simplellm.api import load
from simplellm.apps.quantize import quantize_checkpoint
from simplellm.base.request import EngineError
from simplellm.checkpoint.families import read_config
from simplellm.checkpoint.families.gpt_oss import MODELS
from simplellm.checkpoint.folder import EMBEDDED
from simplellm.model.kv_pool import KVPool
from simplellm.model.memory import Need, enough, weight_bytes
from simplellm.model.ops import PLAIN

GPU = torch.device("cuda")


class NothingIsLoaded(Exception):
    """In place of what would need a GPU."""


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU as far as one can ask PyTorch for it; its attributes may be changed.

    ``asked`` is what would have been loaded: the dtype, and how it would compute.
    """
    card = SimpleNamespace(capability=(9, 0), free=20 * 10**9, asked={})
    for name, answer in (
        ("get_device_capability", lambda device: card.capability),
        ("device", lambda device: nullcontext()),
        ("current_device", lambda: 0),
        ("get_device_name", lambda device: "a card"),
        ("mem_get_info", lambda device: (card.free, 80 * 10**9)),
        ("memory_reserved", lambda device: 0),
        ("memory_allocated", lambda device: 0),
        ("is_available", lambda: True),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def read(
        source: Any, dtype: torch.dtype, device: torch.device, ops: Any, *others: Any
    ) -> None:
        card.asked |= {"dtype": dtype, "ops": ops}
        raise NothingIsLoaded

    monkeypatch.setattr(load, "read_weights", read)
    monkeypatch.setattr(
        load, "fused_operations", lambda *arguments: replace(PLAIN, name="Triton")
    )
    return card


@pytest.fixture
def open_llm(
    card: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> Callable[..., str]:
    """What the log says when an LLM would be opened on the card."""
    caplog.set_level(logging.INFO, "simplellm")

    def open_llm(path: Path | None = None, **options: Any) -> str:
        caplog.clear()
        with pytest.raises(NothingIsLoaded):
            LLM(path, device="cuda", **options)
        (line,) = caplog.messages
        return line

    return open_llm


def test_a_card_computes_with_kernels(open_llm: Any, card: SimpleNamespace) -> None:
    assert open_llm() == "computing gpt-oss (MXFP4) on a card with Triton kernels"
    assert card.asked["dtype"] == torch.bfloat16
    assert card.asked["ops"].name == "Triton"
    assert "'plain'" in open_llm(config=EngineConfig(operations="plain"))
    assert card.asked["ops"] is PLAIN


OLD = {
    "old GPU": "capability is 7.5, below 8.0",
    "no CUDA": "built with CUDA None, not 12.0",
    "old CUDA": "built with CUDA 11.8, not 12.0",
    "old Triton": "Triton is 3.5.1, below 3.6",
    "no Triton": "Triton cannot be imported",
    "float32": "dtype is torch.float32, and the kernels",
}


@pytest.mark.parametrize("case", OLD)
def test_old_machines_compute_with_pytorch(
    open_llm: Any, card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    triton = pytest.importorskip("triton")
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    match case:
        case "old GPU":
            card.capability = 7, 5
        case "no CUDA":
            monkeypatch.setattr(torch.version, "cuda", None)
        case "old CUDA":
            monkeypatch.setattr(torch.version, "cuda", "11.8")
        case "old Triton":
            monkeypatch.setattr(triton, "__version__", "3.5.1")
        case "no Triton":
            monkeypatch.setitem(sys.modules, "triton", None)
        case _:
            options["dtype"] = torch.float32
    line = open_llm(**options)
    assert "a card with PyTorch, since" in line and OLD[case] in line
    assert card.asked["ops"] is PLAIN
    for name in ("fused", "batch_invariant"):
        config = EngineConfig(operations="fused")
        if name == "batch_invariant":
            config = EngineConfig(batch_invariant=True)
        with pytest.raises(ValueError, match=name) as error:
            LLM(device="cuda", config=config, **options)
        assert OLD[case] in str(error.value)


def test_a_gpu_without_bfloat16_gets_float32_and_one_line(
    open_llm: Any, card: SimpleNamespace
) -> None:
    card.capability = 7, 5
    assert "float32, and the kernels compute with bfloat16" in open_llm()
    assert card.asked["dtype"] == torch.float32


def test_unpacked_experts_are_left_to_pytorch(open_llm: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", quantized=False)
    assert "the experts are not packed" in open_llm(folder)
    assert "Triton kernels" in open_llm(write_checkpoint(tmp_path / "packed"))


def test_experts_multiply_in_fp8_where_it_is_there(
    open_llm: Any, card: SimpleNamespace, tmp_path: Path
) -> None:
    config = EngineConfig(moe_activation_dtype="fp8")
    assert "Triton kernels" in open_llm(config=config)
    unpacked = write_checkpoint(tmp_path / "model", quantized=False)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("there are no experts in MXFP4", {"model": unpacked, "config": config}),
        ("batch_invariant", {"config": replace(config, batch_invariant=True)}),
        ("operations is 'plain'", {"config": replace(config, operations="plain")}),
        (r"capability is \(8, 6\), below \(8, 9\)", {"config": config}),
    ]
    for why, options in cases:
        card.capability = (8, 6) if "capability" in why else (9, 0)
        with pytest.raises(ValueError, match="moe_activation_dtype.*'auto'.*" + why):
            LLM(device="cuda", **options)


SPARSE = {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 100}


@pytest.mark.parametrize("form", ["", "FP8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_other_experts_have_kernels(
    open_llm: Any, tmp_path: Path, family: str, form: str
) -> None:
    """Ordinary numbers, or 8 bits."""
    config: dict[str, Any] = {"model_type": family, **SPARSE}
    if form:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "gate"],
        }
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = open_llm(tmp_path, random_weights=True)
    assert "Triton kernels" in line and form in line


def test_others_in_mxfp4_are_left_to_pytorch(open_llm: Any, tmp_path: Path) -> None:
    config = {"model_type": "mixtral", **SPARSE}
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = open_llm(tmp_path, random_weights=True)
    assert "PyTorch, since of MXFP4 the kernels read gpt-oss alone, not Mixtral" in line


@pytest.mark.parametrize("name", ["Qwen3", "Gemma3", "GPT2"])
def test_dense_families_compute_with_kernels(
    open_llm: Any, tmp_path: Path, name: str
) -> None:
    folder = write(tmp_path / name, CASES[name]().build())
    assert "with Triton kernels" in open_llm(folder)
    if name != "GPT2":
        quantize_checkpoint(folder, tmp_path / "small", "int8")
        assert "(INT8) on a card with Triton kernels" in open_llm(tmp_path / "small")


def test_a_config_that_kernels_have_no_room_for_is_refused_before_the_load(
    card: SimpleNamespace,
) -> None:
    """Also where the machine fills in one of the two."""
    with pytest.raises(ValueError, match="expected less than 65,535 together with max"):
        LLM(config=EngineConfig(max_num_batched_tokens=2**16 - 2), device="cuda")
    assert not card.asked


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_need_for_weights_is_that_of_the_shapes(name: str, packed: bool) -> None:
    config = EngineConfig().resolved("cuda")
    model = MODELS[name] if packed else replace(MODELS[name], formats={})
    need = Need.of(model, config)
    assert need.weights == sum(weight_bytes(model).values())
    mapped = Need.of(model, config, mapped=True)
    assert mapped.weights < need.weights / 3


def test_the_need_for_the_cache_is_that_of_its_pages() -> None:
    config = read_config(EMBEDDED / "config.json")
    pool = KVPool(config, 3, 8, torch.bfloat16, torch.device("cpu"))
    need = Need.of(config, EngineConfig(num_pages=3, page_size=8).resolved("cuda"))
    assert need.cache == pool.memory.nbytes


def test_a_model_too_large_is_refused_before_it_loads(card: SimpleNamespace) -> None:
    with pytest.raises(torch.OutOfMemoryError) as error:
        LLM("gpt-oss-120b", random_weights=True, device="cuda")
    message = str(error.value)
    weights = sum(weight_bytes(MODELS["gpt-oss-120b"]).values()) / 1e9
    for part in (f"{weights:.1f} GB for its weights", "20.0 of 80.0 GB", "cache_bytes"):
        assert part in message
    assert not card.asked


def test_a_cache_too_large_is_refused_before_the_load(card: SimpleNamespace) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"30\.0 for keys and values"):
        LLM(config=EngineConfig(cache_bytes=30 * 10**9), device="cuda")
    assert not card.asked


def test_what_is_held_for_nobody_is_given_back_before_the_check(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.free = 10**9
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: setattr(card, "free", 20 * 10**9)
    )
    with enough(Need(weights=10**10, cache=10**9, step=10**8), GPU):
        assert card.free == 20 * 10**9


def tensors() -> dict[int, torch.Tensor]:
    """All there are, once those are gone that nobody can reach."""
    gc.collect()
    return {id(x): x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)}


@pytest.mark.parametrize("drafts", [None, "suffix", "head", str(EMBEDDED)])
def test_a_closed_llm_has_no_memory_any_more(drafts: str | None) -> None:
    """Who runs a notebook's cell again makes an LLM while the last one has a name."""
    options: dict[str, Any]
    options = {"speculative": drafts, "num_speculative_tokens": 2} if drafts else {}
    before = tensors()
    with LLM(device="cpu", **options) as llm:
        future = llm.generate("12 + 34 =", max_tokens=12, temperature=0)
        text, model = future[0].text, llm.model
        assert len(tensors()) > len(before) + 100
    logits = model.logits([1, 2, 3])  # what others hold stays whole
    del model
    assert [x.shape for key, x in tensors().items() if key not in before] == [
        logits.shape
    ]
    assert future.result()[0].text == text and llm.tokenizer.encode(text)
    stats = llm.stats()
    assert sum(stats.finished.values()) == 1
    assert stats.drafts > 0 or drafts in (None, "suffix")
    assert not any(llm.engine.snapshot()["pages"]["references"])
    with pytest.raises(EngineError, match="this LLM is closed"):
        llm.model  # noqa: B018
    with pytest.raises(EngineError, match="this LLM is closed"):
        llm.generate("12 + 34 =")


def test_an_engine_that_died_has_no_memory_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = tensors()
    llm = LLM(device="cpu")
    monkeypatch.setattr(llm.engine_core, "collect", lambda depth: 1 / 0)
    with pytest.raises(EngineError, match="division by zero"):
        llm.generate("12 + 34 =").result()
    assert llm.engine_core.thread is not None
    llm.engine_core.thread.join()
    assert tensors().keys() <= before.keys()
    with pytest.raises(EngineError, match="division by zero"):
        llm.model  # noqa: B018
    llm.close()


def test_memory_that_runs_out_during_the_load_is_explained(
    card: SimpleNamespace,
) -> None:
    need = Need.of(MODELS["gpt-oss-20b"], EngineConfig().resolved("cuda"))
    with (
        pytest.raises(torch.OutOfMemoryError, match="not enough memory") as error,
        enough(need, GPU),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert "CUDA out of memory" in str(error.value.__cause__)


@pytest.mark.parametrize(
    ("name", "found"), [("cuda_graphs", 1), ("overlap", None), ("operations", "fast")]
)
def test_a_switch_of_the_wrong_kind_is_refused(name: str, found: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{name} is {found!r}; expected"):
        EngineConfig(**{name: found})
