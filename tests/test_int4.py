"""Weights of 4 bits that a CPU multiplies as they are."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from families import case, write
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from test_gguf import IDS, MODELS, SIZES, Written, random_blocks, worst
from torch import Tensor
from torch.nn import functional

from simplellm import LLM, EngineConfig
from simplellm.api import choose_operations
from simplellm.api.load import read_weights
from simplellm.checkpoint import int4
from simplellm.checkpoint.gguf.packed import READERS, pack_rows
from simplellm.checkpoint.gguf.source import GGUFCheckpoint
from simplellm.checkpoint.int4 import (
    MAX_PACKED_TOKENS,
    ROWS,
    Int4,
    as_bfloat16,
    dequantized_bytes,
    has_float16_product,
    has_int4_product,
)
from simplellm.model.layers import Dense
from simplellm.model.memory import Need
from simplellm.model.ops import PLAIN
from simplellm.server.remote.client import RemoteEngine, load_remote
from simplellm.server.start import spawn

KINDS = list(READERS)
ULP = 2**-7  # of bfloat16, at most


@pytest.fixture
def packing() -> None:
    if not has_int4_product():
        pytest.skip("PyTorch has no fast product of 4 bits for this processor")


def weights(kind: str, rows: int, columns: int) -> tuple[Tensor, Int4, Int4]:
    """A weight's numbers as ggml says, and packed, without and with numbers."""
    blocks = random_blocks(kind, rows, columns)
    meant = torch.from_numpy(gguf.dequantize(blocks, GGMLQuantizationType[kind]))
    bits = torch.from_numpy(blocks)
    return meant, pack_rows(bits, kind, False), pack_rows(bits, kind, True)


def numbers(weight: Int4) -> Tensor:
    """What is kept of it for many tokens, float32 [out, in]."""
    kept = weight.dequantized
    if isinstance(kept, Tensor):
        return kept
    found: Tensor = torch.ops.quantized.linear_unpack_fp16(kept)[0].float()
    return found


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
    bias = inputs(1, rows)[0]
    for count in (1, 2, 5, MAX_PACKED_TOKENS, MAX_PACKED_TOKENS + 1, 40):
        x = inputs(count, columns)
        exact = functional.linear(as_bfloat16(x), numbers(with_numbers))
        size = float(exact.std())
        for weight in (packed, with_numbers):
            found = weight.product(x)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, exact, rtol=ULP, atol=ULP * size)
            assert torch.equal(weight.product(x, bias), found + bias)


def test_without_float16_products_numbers_are_kept_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a processor that FBGEMM has no kernels for."""
    weight, x = torch.randn(64, 96), inputs(9, 96)
    monkeypatch.setattr(int4, "has_float16_product", lambda: False)
    assert int4.keep_numbers(weight) is weight and dequantized_bytes(10) == 40
    assert torch.equal(int4.kept_product(x, weight), functional.linear(x, weight))


@pytest.mark.parametrize("count", [1, 9, 64, 200])
def test_float16_products_are_those_of_the_rounded_numbers(count: int) -> None:
    if not has_float16_product():
        pytest.skip("PyTorch has no product with float16 weights for this processor")
    weight, x = torch.randn(64, 96) / 10, inputs(count, 96)
    found = int4.kept_product(x, int4.keep_numbers(weight))
    exact = functional.linear(x.double(), weight.half().double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert dequantized_bytes(10) == 20


@pytest.mark.bits
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_any_company(kind: str, packing: None) -> None:
    _, packed, with_numbers = weights(kind, 80, 256)
    x = inputs(40, 256)
    alone = torch.cat([packed.product(row[None]) for row in x])
    assert torch.equal(packed.product(x), alone)
    if with_numbers.parts:
        x, alone = x[:MAX_PACKED_TOKENS], alone[:MAX_PACKED_TOKENS]
    else:
        alone = torch.cat([with_numbers.product(row[None]) for row in x])
    for count in range(1, len(x) + 1):
        assert torch.equal(with_numbers.product(x[:count]), alone[:count])


@pytest.mark.bits
def test_rows_have_the_same_bits_however_many_float16_multiplies() -> None:
    if not has_float16_product():
        pytest.skip("PyTorch has no product with float16 weights for this processor")
    kept, x = int4.keep_numbers(torch.randn(80, 96)), inputs(int4.FEW, 96)
    every = int4.kept_product(x, kept)
    for count in range(1, int4.FEW + 1):
        assert torch.equal(int4.kept_product(x[:count], kept), every[:count])


@pytest.mark.parametrize("name", ["Llama", "Llama tied", "Qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_as_near_as_in_bfloat16(
    name: str, kind: str, packing: None, tmp_path: Path
) -> None:
    written = Written(name, tmp_path, lambda name, tensor: kind)
    source = GGUFCheckpoint(written.path, packed=True)
    model = read_weights(source, torch.float32, torch.device("cpu"), PLAIN)
    for layer in model.layers:
        assert isinstance(layer.attn.qkv, Int4) and isinstance(layer.attn.o, Int4)
    assert model.embed_tokens.dtype == torch.float32
    theirs = written.logits()
    rounded = GGUFCheckpoint(written.path, torch.bfloat16)
    half = read_weights(rounded, torch.bfloat16, torch.device("cpu"), PLAIN)
    bound = 1.5 * worst(half.logits(IDS.tolist()), theirs)
    assert bound < 0.2
    for count in (MAX_PACKED_TOKENS, len(IDS)):
        assert worst(model.logits(IDS[:count].tolist()), theirs[:count]) < bound


def test_what_is_packed(packing: None, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "blk.1.attn_k.weight": "Q4_0",
        "blk.0.ffn_down.weight": "F16",
    }
    write(tmp_path, MODELS["Llama tied"]().build())
    write_gguf(
        tmp_path / "a.gguf", tmp_path, lambda name, tensor: sizes.get(name, "Q4_1")
    )
    source = GGUFCheckpoint(tmp_path / "a.gguf", packed=True)
    formats = source.config.formats
    assert "layers.0.attn.qkv.weight" in formats
    assert "layers.1.attn.qkv.weight" not in formats  # its parts are joined
    assert "layers.0.mlp.down.weight" not in formats
    packed = source["layers.0.mlp.gate_up.weight"]
    assert isinstance(packed, Int4) and packed.dequantized is not None
    stored = sum(i.nbytes for i in source.stored("layers.0.mlp.gate_up.weight"))
    assert packed.nbytes - dequantized_bytes(math.prod(packed.shape)) == stored


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_forecast_of_memory_counts_what_is_there_twice(
    tied: bool,
    kind: str,
    packing: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: dict[str, Any] = {**SIZES, "vocab_size": 7 * ROWS}
    sizes["tie_word_embeddings"] = tied
    monkeypatch.setitem(MODELS, "Llama", lambda: case("Llama", **sizes))
    source = GGUFCheckpoint(
        Written("Llama", tmp_path, lambda *_: kind).path, packed=True
    )
    model = read_weights(source, torch.float32, torch.device("cpu"), PLAIN)
    assert isinstance(model.lm_head, Int4)
    held: list[Any] = [model.embed_tokens, model.lm_head, model.norm]
    for layer in model.layers:
        assert isinstance(layer.mlp, Dense)
        held += [layer.attn_norm, layer.mlp_norm]
        held += [layer.attn.qkv, layer.attn.o, layer.mlp.gate_up, layer.mlp.down]
    counted = Need.of(source.config, EngineConfig().resolved("cpu"), 4).weights
    assert counted == sum(weight.nbytes for weight in held)


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
