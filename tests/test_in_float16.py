"""Checkpoints whose matrices of 16 bits a CPU multiplies as such."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Case, case, change, rewrite, sparse, write
from gguf_files import write_gguf
from heads import write_head
from test_formats_loaded import PROMPTS
from test_grouped import WAYS
from test_grouped import written as grouped
from torch import Tensor

from simplellm import LLM, EngineConfig
from simplellm.api import choose_operations
from simplellm.api.load import read_weights
from simplellm.checkpoint import in_float16 as module
from simplellm.checkpoint.checkpoint import open_weights
from simplellm.checkpoint.cpu_weights import PackedExperts
from simplellm.checkpoint.families import read_config
from simplellm.checkpoint.float16 import Float16, has_float16_product
from simplellm.checkpoint.in_float16 import InFloat16
from simplellm.checkpoint.source import Source
from simplellm.model.layers import Experts
from simplellm.model.memory import Need
from simplellm.model.model import Model
from simplellm.model.ops import PLAIN

pytestmark = [
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.skipif(
        not has_float16_product(),
        reason="PyTorch has no product with float16 weights for this processor",
    ),
]
CPU = torch.device("cpu")
IDS = torch.randint(101, (90,), generator=torch.Generator().manual_seed(1)).tolist()
MODELS: dict[str, Callable[[], Case]] = {
    "Llama": lambda: case("Llama"),
    "tied": lambda: case("Llama", tie_word_embeddings=True),
    "biases": lambda: case("Qwen2"),
    "experts": lambda: sparse("Qwen3Moe", norm_topk_prob=True),
    "turned": lambda: case("GPT2"),
    "Gemma": lambda: case("Gemma3", sliding_window=19),
}


@pytest.fixture(autouse=True)
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_NUMBERS", 0)


def written(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A folder whose tensors are all in ``dtype``."""
    write(folder, MODELS[name]().build())
    rewrite(folder, lambda tensors: {k: t.to(dtype) for k, t in tensors.items()})
    return folder


def model_of(source: Source) -> Model:
    return read_weights(source, torch.float32, CPU, PLAIN)


def opened(path: Path, packed: bool = True) -> Source:
    return open_weights(path, torch.float32, CPU, False, None, packed)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def matrices(model: Model) -> list[Any]:
    found: list[Any] = [model.lm_head]
    for layer in model.layers:
        found += [layer.attn.qkv, layer.attn.o, layer.mlp.gate_up, layer.mlp.down]
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_float32(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = written(name, tmp_path, dtype)
    source, exact = opened(path), model_of(opened(path, packed=False))
    model = model_of(source)
    held = matrices(model)
    if name != "turned":  # of which the head alone is no Conv1D
        assert {type(one) for one in held} <= {Float16, PackedExperts}
    assert isinstance(held[0], Float16)
    # Each number of float16 is itself; of bfloat16, those below 2^-17 are rounded.
    assert error(model.logits(IDS), exact.logits(IDS)) < 2e-5
    for layer in model.layers:
        held += [layer.attn_norm, layer.mlp_norm, layer.attn.q_norm, layer.attn.k_norm]
        held += [layer.attn.qkv_bias, layer.attn.o_bias]
        if isinstance(layer.mlp, Experts):
            held.append(layer.mlp.router)
    if name in ("Llama", "tied", "biases", "experts"):
        held += [model.embed_tokens, model.norm]
        counted = Need.of(source.config, EngineConfig().resolved("cpu"), 4).weights
        assert counted == sum(weight.nbytes for weight in held if weight is not None)


@pytest.mark.parametrize("way", ["AWQ", "GPTQ act-order", "INT4"])
def test_numbers_of_4_bits_are_rounded_to_16(way: str, tmp_path: Path) -> None:
    grouped("Llama", WAYS[way], tmp_path)
    model, exact = (model_of(opened(tmp_path, packed)) for packed in (True, False))
    assert isinstance(model.layers[0].attn.qkv, Float16)
    assert isinstance(model.lm_head, Tensor)  # stored in float32
    assert error(model.logits(PROMPTS[0]), exact.logits(PROMPTS[0])) < 3e-3


def test_a_gguf_file_of_16_bits(tmp_path: Path) -> None:
    write(tmp_path, MODELS["tied"]().build())
    kinds = {"blk.0.ffn_down.weight": "F32", "blk.1.attn_k.weight": "F16"}
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path, lambda name, _: kinds.get(name, "BF16"))
    model, exact = (model_of(opened(path, packed)) for packed in (True, False))
    assert error(model.logits(IDS), exact.logits(IDS)) < 2e-5
    first, second = model.layers[:2]
    assert isinstance(first.mlp.down, Tensor) and isinstance(second.mlp.down, Float16)
    assert isinstance(second.attn.qkv, Float16)  # joined from both


def test_a_head_drafts_beside_them(tmp_path: Path) -> None:
    """It has the model's own embedding, whose rows become float32."""
    path, head = written("tied", tmp_path), tmp_path / "head"
    head.mkdir()
    write_head(head, read_config(path / "config.json"))
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4}
    found = []
    for more in ({}, {"speculative": str(head), "num_speculative_tokens": 2}):
        with LLM(path, **options, **more) as llm:
            assert llm.model.embed_tokens.dtype == torch.bfloat16
            assert llm.model.dtype == torch.float32
            output = llm.generate([IDS[:9]], max_tokens=12, temperature=0).result()[0]
            found.append(output.token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize("broken", [7e4, -7e4, float("inf"), float("nan")])
def test_what_float16_lacks_stays_as_it_is(
    broken: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written("Llama", tmp_path)

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.layers.0.mlp.down_proj.weight"][3, 5] = broken
        return tensors

    rewrite(path, spoil)
    model = model_of(opened(path))
    down = model.layers[0].mlp.down
    assert isinstance(down, Tensor) and isinstance(model.layers[1].mlp.down, Float16)
    wanted = torch.tensor(broken).bfloat16().float()
    assert torch.equal(down[3, 5].nan_to_num(1.0), wanted.nan_to_num(1.0))
    assert ("NaN or infinity" in caplog.text) == (abs(broken) not in (7e4,))


def test_small_models_and_float32_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written("Llama", tmp_path)
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4}
    change(path, lambda data: {**data, "eos_token_id": None})

    def first_type(**more: Any) -> type:
        with LLM(path, **options, **more) as llm:
            output = llm.generate([IDS[:5]], max_tokens=3).result()[0]
            assert len(output.token_ids) == 3
            return type(llm.model.layers[0].attn.o)

    assert first_type() is Float16
    assert first_type(dtype="float32") is first_type(operations="plain") is Tensor
    monkeypatch.setattr(module, "MIN_NUMBERS", 10**6)
    assert first_type() is Tensor
    monkeypatch.setattr(module, "MIN_NUMBERS", 0)
    monkeypatch.setattr(choose_operations, "has_float16_product", lambda: False)
    assert first_type() is Tensor
    whole = written("Llama", tmp_path / "whole", torch.float32)
    assert isinstance(InFloat16(opened(whole, False))["layers.0.attn.o.weight"], Tensor)
