"""Weights of a GGUF file that a CPU multiplies in 4 bits, or in float16."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families import Case, case, sparse, write
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from test_gguf import GPT_OSS, IDS, MODELS, Written, random_blocks, worst
from torch import Tensor
from torch.nn import functional

from simplellm import LLM, EngineConfig
from simplellm.api import choose_operations
from simplellm.api.load import read_weights
from simplellm.checkpoint import int4
from simplellm.checkpoint.cpu_weights import PackedExperts
from simplellm.checkpoint.float16 import Float16
from simplellm.checkpoint.gguf import packed as packed_module
from simplellm.checkpoint.gguf.packed import ADDENDS, codes_of
from simplellm.checkpoint.gguf.source import GGUFCheckpoint
from simplellm.checkpoint.int4 import (
    MAX_PACKED_TOKENS,
    ROWS,
    Int4,
    as_bfloat16,
    has_int4_product,
)
from simplellm.checkpoint.scaled import Scaled
from simplellm.model.feed_forward import linear
from simplellm.model.layers import Experts
from simplellm.model.memory import Need
from simplellm.model.model import Model
from simplellm.model.ops import PLAIN
from simplellm.server.remote.client import RemoteEngine, load_remote
from simplellm.server.start import spawn

KINDS = list(ADDENDS)
ULP = 2**-7  # of bfloat16, at most


@pytest.fixture
def packing() -> None:
    if not has_int4_product():
        pytest.skip("PyTorch has no fast product of 4 bits for this processor")


def weights(kind: str, rows: int, columns: int) -> tuple[Tensor, Int4, Int4]:
    """A weight's numbers as ggml says, and packed, without and with numbers.

    Of K-quants, whose blocks are eight times as wide, with so many times the columns.
    """
    columns *= 8 if kind.endswith("_K") else 1
    blocks = random_blocks(kind, rows, columns)
    meant = torch.from_numpy(gguf.dequantize(blocks, GGMLQuantizationType[kind]))
    codes = codes_of(torch.from_numpy(blocks), kind)
    return meant, Int4.of(codes, False), Int4.of(codes, True)


def numbers(weight: Int4) -> Tensor:
    """What is kept of it for many tokens, float32 [out, in]."""
    assert weight.dequantized is not None
    return weight.dequantized.dequantize()


def inputs(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_ggmls_but_for_rounded_scales(kind: str, packing: None) -> None:
    meant, _, packed = weights(kind, 48, 128)
    found = numbers(packed)
    assert packed.shape == meant.shape == found.shape
    # A scale is off by 1/512 at most, and multiplies 15 steps at most. A number kept in
    # float16 is off by 1/2048, or by half a step of the least ones.
    largest = meant.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
    steps = 16 if kind != "Q8_0" else 1
    bound = (steps / 256 + 2**-11) * largest + 2**-25
    assert ((found - meant).abs() <= bound).all()
    assert worst(found, meant) < 4e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns"), [(16, 32), (48, 96), (80, 256), (192, 64)]
)
def test_products_are_those_of_the_numbers(
    kind: str, rows: int, columns: int, packing: None
) -> None:
    _, packed, with_numbers = weights(kind, rows, columns)
    bias, columns = inputs(1, rows)[0], packed.shape[1]
    for count in (1, 2, 5, MAX_PACKED_TOKENS, MAX_PACKED_TOKENS + 1, 40):
        x = inputs(count, columns)
        exact = functional.linear(as_bfloat16(x), numbers(with_numbers))
        size = float(exact.std()) * ADDENDS[kind]  # each of which is rounded
        for weight in (packed, with_numbers):
            found = weight.product(x)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, exact, rtol=ULP, atol=ULP * size)
            assert torch.equal(weight.product(x, bias), found + bias)


@pytest.mark.bits
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_any_company(kind: str, packing: None) -> None:
    _, packed, with_numbers = weights(kind, 80, 256)
    x = inputs(40, packed.shape[1])
    alone = torch.cat([packed.product(row[None]) for row in x])
    assert torch.equal(packed.product(x), alone)
    for count in range(1, MAX_PACKED_TOKENS + 1):
        assert torch.equal(with_numbers.product(x[:count]), alone[:count])


def q4_k_m(name: str, tensor: Tensor) -> str:
    """The mixture that llama.cpp calls Q4_K_M, more or less."""
    finer = "attn_v" in name or "token_embd" in name or name == "blk.0.ffn_down.weight"
    return "Q6_K" if finer else "Q4_K"


STORED: dict[str, Callable[[str, Tensor], str]] = {
    **{kind: lambda *_, kind=kind: kind for kind in (*KINDS, "Q6_K")},
    "Q4_K_M": q4_k_m,
}


@pytest.fixture(params=["numbers kept", "numbers not kept"])
def keep(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    kept = request.param == "numbers kept"
    if not kept:
        monkeypatch.setattr(packed_module, "MAX_DEQUANTIZED", 0)
    return kept


def wide_model(kind: str) -> Case:
    """A model that K-quants have blocks for."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256}
    sizes |= {"num_attention_heads": 8, "head_dim": 32, "vocab_size": 7 * ROWS}
    if kind == "experts":
        sizes |= {"norm_topk_prob": True, "moe_intermediate_size": 256}
        return sparse("Qwen3Moe", **sizes)
    if kind == "gpt-oss":
        return case("GptOss", sliding_window=8, **sizes, **GPT_OSS)
    return case("Llama", tie_word_embeddings=kind == "tied", **sizes)


WIDE = "dense", "tied", "experts", "gpt-oss"


@pytest.fixture(autouse=True)
def wide_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in WIDE:
        monkeypatch.setitem(MODELS, kind, lambda kind=kind: wide_model(kind))


def of_layers(model: Any) -> list[Any]:
    """The matrices of a model's layers that may be packed."""
    found = []
    for layer in model.layers:
        found += [layer.attn.qkv, layer.attn.o, layer.mlp.gate_up, layer.mlp.down]
    return found


def packed_model(written: Written) -> tuple[GGUFCheckpoint, Model]:
    source = GGUFCheckpoint(written.path, packed=True)
    return source, read_weights(source, torch.float32, torch.device("cpu"), PLAIN)


@pytest.mark.parametrize("name", ["dense", "tied"])
@pytest.mark.parametrize("stored", STORED)
def test_logits_are_as_near_as_in_bfloat16(
    name: str, stored: str, keep: bool, packing: None, tmp_path: Path
) -> None:
    written = Written(name, tmp_path, STORED[stored])
    _, model = packed_model(written)
    kinds = {type(weight) for weight in [*of_layers(model), model.lm_head]}
    addends = ADDENDS.get(stored, 0)
    fourbit = addends == 1 or (addends == 2 and not keep)
    both = {Int4, Float16}
    assert kinds == (both if stored == "Q4_K_M" else {Int4 if fourbit else Float16})
    assert model.embed_tokens.dtype == torch.float16 and model.dtype == torch.float32
    theirs = written.logits()
    rounded = GGUFCheckpoint(written.path, torch.bfloat16)
    half = read_weights(rounded, torch.bfloat16, torch.device("cpu"), PLAIN)
    bound = 1.5 * worst(half.logits(IDS.tolist()), theirs)
    assert bound < 0.2
    for count in (MAX_PACKED_TOKENS, len(IDS)):
        assert worst(model.logits(IDS[:count].tolist()), theirs[:count]) < bound


@pytest.mark.parametrize("name", ["experts", "gpt-oss"])
@pytest.mark.parametrize("stored", STORED)
def test_experts_are_those_of_the_file(
    name: str, stored: str, keep: bool, packing: None, tmp_path: Path
) -> None:
    """Not compared by logits, since rounding may have a token choose another one."""
    source, model = packed_model(Written(name, tmp_path, STORED[stored]))
    exact = GGUFCheckpoint(source.path)
    for index in range(len(model.layers)):
        for ours in (f"layers.{index}.experts.{n}" for n in ("gate_up", "down")):
            packed, whole = source[ours], exact[ours]
            assert isinstance(packed, PackedExperts)
            assert isinstance(whole, Tensor | Scaled) and packed.shape == whole.shape
            meant = (
                whole if isinstance(whole, Tensor) else whole.dequantize(torch.float32)
            )
            x = inputs(3, meant.shape[-1])
            for one, numbers in zip(packed.each, meant, strict=True):
                wanted = functional.linear(x, numbers)
                assert worst(one.product(x), wanted) < 2e-2
    assert model.logits(IDS.tolist()).isfinite().all()


def write_scale(path: Path, stored: str, scale: float) -> None:
    """Replace a scale of blk.1.ffn_down.weight in a GGUF file of one type."""
    tensor = GGUFCheckpoint(path).container.tensors["blk.1.ffn_down.weight"]
    data = bytearray(path.read_bytes())
    at = tensor.offset + (208 if stored == "Q6_K" else 0)
    data[at : at + 2] = np.float16(scale).tobytes()
    path.write_bytes(data)


@pytest.mark.parametrize("stored", [*KINDS, "Q6_K"])
def test_a_damaged_file_is_noticed(
    stored: str,
    keep: bool,
    packing: None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    written = Written("dense", tmp_path, STORED[stored])
    write_scale(written.path, stored, np.nan)
    _, model = packed_model(written)
    assert "NaN or infinity in 1 of the weights" in caplog.text
    assert "layers.1.mlp.down.weight" in caplog.text
    assert not model.logits(IDS[:4].tolist()).isfinite().all()


@pytest.mark.parametrize("stored", ["Q4_0", "Q5_0", "Q6_K"])
def test_what_float16_lacks_becomes_float32(
    stored: str, packing: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Or stays in 4 bits, without the numbers that are kept for many tokens."""
    written = Written("dense", tmp_path, STORED[stored])
    write_scale(written.path, stored, 60000)
    source, model = packed_model(written)
    down = model.layers[1].mlp.down
    if stored == "Q4_0":
        assert isinstance(down, Int4) and down.dequantized is None
    else:
        assert isinstance(down, Tensor) and down.abs().max() > 65504
    exact: Any = GGUFCheckpoint(source.path)["layers.1.mlp.down.weight"]
    for count in (MAX_PACKED_TOKENS, MAX_PACKED_TOKENS + 1):
        x = as_bfloat16(inputs(count, 256))
        assert worst(linear(x, down), linear(x, exact)) < 2e-2
    assert not caplog.text


def test_what_is_packed(packing: None, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "blk.1.attn_k.weight": "Q4_0",
        "blk.2.attn_k.weight": "F16",
        "blk.0.ffn_down.weight": "F16",
    }
    write(tmp_path, MODELS["Llama tied"]().build())
    write_gguf(
        tmp_path / "a.gguf", tmp_path, lambda name, tensor: sizes.get(name, "Q4_1")
    )
    source = GGUFCheckpoint(tmp_path / "a.gguf", packed=True)
    formats = source.config.formats
    assert formats["layers.0.attn.qkv.weight"].dtype == "int4"
    # Parts of a weight that are stored in several ways are joined as numbers.
    assert formats["layers.1.attn.qkv.weight"].dtype == "float16"
    assert isinstance(source["layers.1.attn.qkv.weight"], Float16)
    assert "layers.2.attn.qkv.weight" not in formats
    assert "layers.0.mlp.down.weight" not in formats
    packed = source["layers.0.mlp.gate_up.weight"]
    assert isinstance(packed, Int4) and packed.dequantized is not None
    stored = sum(i.nbytes for i in source.stored("layers.0.mlp.gate_up.weight"))
    assert packed.nbytes - 2 * math.prod(packed.shape) == stored


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("stored", STORED)
def test_the_forecast_of_memory_counts_what_is_there_twice(
    name: str, stored: str, keep: bool, packing: None, tmp_path: Path
) -> None:
    source, model = packed_model(Written(name, tmp_path, STORED[stored]))
    held = [model.embed_tokens, model.lm_head, model.norm, *of_layers(model)]
    for layer in model.layers:
        held += [layer.attn_norm, layer.mlp_norm, layer.attn.q_norm, layer.attn.k_norm]
        held += [layer.attn.qkv_bias, layer.attn.o_bias, layer.attn.sinks]
        if isinstance(layer.mlp, Experts):
            held += [layer.mlp.router, layer.mlp.router_bias]
            held += [layer.mlp.gate_up_bias, layer.mlp.down_bias]
    counted = Need.of(source.config, EngineConfig().resolved("cpu"), 4).weights
    assert counted == sum(weight.nbytes for weight in held if weight is not None)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    write(tmp_path, MODELS["Llama tied"]().build())
    write_gguf(tmp_path / "a.gguf", tmp_path, lambda name, tensor: "Q4_1")
    yield tmp_path / "a.gguf"


def packed_in(llm: LLM) -> set[bool]:
    """Whether the matrices of an LLM are packed."""
    return {isinstance(layer.attn.o, Int4) for layer in llm.model.layers}


def test_numbers_that_are_asked_for_stay_numbers(
    file: Path, packing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4}
    with LLM(file, **options) as llm:
        assert packed_in(llm) == {True}
        output = llm.generate([IDS[:5].tolist()], max_tokens=3).result()[0]
        assert 1 <= len(output.token_ids) <= 3
    with LLM(file, dtype="float32", **options) as llm:
        assert packed_in(llm) == {False}
    with LLM(file, operations="plain", **options) as llm:
        assert packed_in(llm) == {False}
    monkeypatch.setattr(choose_operations, "has_int4_product", lambda: False)
    with LLM(file, **options) as llm:
        assert packed_in(llm) == {False}


def test_a_server_takes_them_packed_as_well(file: Path, packing: None) -> None:
    config = EngineConfig(max_num_seqs=4)
    ask: dict[str, Any] = {"max_tokens": 3, "prompt_logprobs": 0, "temperature": 0}
    model = load_remote(RemoteEngine(*spawn()), str(file), config, device="cpu")
    with LLM.of(model) as far, LLM(file, config, device="cpu") as near:
        found, packed = (
            llm.generate([IDS[:5].tolist()], **ask).result()[0].prompt_logprobs
            for llm in (far, near)
        )
    with LLM(file, config, device="cpu", dtype="float32") as exact:
        others = exact.generate([IDS[:5].tolist()], **ask).result()[0].prompt_logprobs
    assert found == packed != others


def test_a_wrong_product_is_not_used(
    packing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = int4.packed_product
    broken: dict[str, Any] = {
        "another row": lambda x, *weight: right(x, *weight).roll(1, -1),
        "no scale": lambda x, codes, scales: right(x, codes, scales.sign()),
        "zeros": lambda x, *weight: 0 * right(x, *weight),
    }
    for wrong in broken.values():
        monkeypatch.setattr(int4, "packed_product", wrong)
        has_int4_product.cache_clear()
        assert not has_int4_product()
    monkeypatch.undo()
    has_int4_product.cache_clear()
    assert has_int4_product()
