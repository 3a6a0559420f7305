"""What other families compute, in Triton: each operation, then whole small models."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from families import GEMMA_ROPE, Case, case, rope, write
from test_kernels_fused import make_batch
from test_kernels_scaled_linear import FORMATS
from torch import Tensor

from simplellm.api.load import load_model
from simplellm.checkpoint.scaled import Scaled
from simplellm.model import ops
from simplellm.model.kernels.norm import add_norm
from simplellm.model.kernels.other_families import dense, multiply_gated
from simplellm.model.kernels.rounding import RoundedNorm
from simplellm.model.kernels.triton_ops import triton_ops
from simplellm.model.kv_pool import KVPool
from simplellm.model.layers import Dense, Layer, LayerNorm, SandwichNorm
from simplellm.model.model import Model
from simplellm.model.ops import PLAIN, Ops

EPS = 1e-5
PAGE = 4


def draws(device: str, seed: int = 0) -> Callable[..., Tensor]:
    """Random numbers of a shape."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device)

    return normal


def stored(weight: Tensor, kind: str | None) -> Tensor | Scaled:
    """A copy, contiguous and where kernels want it, in a format if there is one."""
    weight = weight.clone(memory_format=torch.contiguous_format)
    return Scaled.of(weight, *FORMATS[kind]) if kind else weight


# Norms


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        *((LayerNorm, parts) for parts in (0, None, 1, 4)),
        *((SandwichNorm, parts) for parts in (None, 1, 4)),
    ],
)
@pytest.mark.parametrize("size", [96, 768])
def test_add_norm_is_the_operation(kernel_device, record, parts, size):
    normal = draws(kernel_device)
    for dtype in (torch.float32, torch.float16):
        # Far from zero, as GPT-2's residuals are: the mean counts.
        residual = (normal(3, size) + 3).to(dtype)
        shape = (3, size) if parts is None else (3, parts, size)
        update = None if parts == 0 else normal(*shape).to(dtype)
        norm = record(normal(size), normal(size))
        expected = ops.add_norm(residual.clone(), update, norm, EPS)
        got = add_norm(residual, update, norm, EPS)
        assert got[0].data_ptr() == residual.data_ptr()
        close = {} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 4e-3}
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize("record", [LayerNorm, SandwichNorm])
def test_nan_spoils_its_row_and_no_other(kernel_device, record):
    normal = draws(kernel_device)
    residual, update, norm = normal(3, 96), normal(3, 96), record(*normal(2, 96))
    update[1, 7] = torch.nan
    _, normed = add_norm(residual, update, norm, EPS)
    assert normed.isnan().all(1).tolist() == [False, True, False]


# Networks


def make_dense(device: str, activation: str, kind: str | None = None) -> Dense:
    """From 96 numbers to 96, by way of 72."""
    normal = draws(device, 1)
    wide = 72 if activation == "gelu" else 144
    return Dense(
        gate_up=stored(normal(wide, 96, scale=0.2), kind),
        gate_up_bias=normal(wide),
        down=stored(normal(96, 72, scale=0.1), kind),
        down_bias=normal(96),
        activation=activation,
    )


def added(y: Tensor) -> Tensor:
    return y.sum(1) if y.ndim == 3 else y


def off(found: Tensor, expected: Tensor) -> float:
    """The largest relative error of a row."""
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gelu"])
@pytest.mark.parametrize("tokens", [1, 3, 20, 70])
@pytest.mark.parametrize("biases", [True, False])
def test_dense_is_the_operation(kernel_device, activation, tokens, biases):
    mlp = make_dense(kernel_device, activation)
    if not biases:
        mlp = replace(mlp, gate_up_bias=None, down_bias=None)
    x = draws(kernel_device)(tokens, 96)
    together = multiply_gated(x, mlp, False)
    gated = not biases and activation != "gelu" and tokens <= 64
    assert (together is not None) == gated
    for invariant in (False, True):
        got = added(dense(x, mlp, batch_invariant=invariant))
        torch.testing.assert_close(got, ops.dense(x, mlp), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("FP8 in blocks", 2), ("FP8", 5), ("INT8", 5), ("INT8, weights alone", 5)],
)
def test_dense_takes_weights_of_8_bits(kernel_device, kind, tokens):
    mlp = make_dense(kernel_device, "swiglu", kind)
    x = draws(kernel_device)(tokens, 96)
    for invariant in (False, True):
        got = added(dense(x, mlp, batch_invariant=invariant))
        # A number halfway between two of 8 bits may go either way.
        assert off(got, ops.dense(x, mlp)) < 5e-3


@pytest.mark.bits
@pytest.mark.parametrize("kind", [None, "FP8 in blocks"])
def test_a_row_has_the_same_bits_among_any_number_of_others(kernel_device, kind):
    mlp = make_dense(kernel_device, "swiglu", kind)
    x = draws(kernel_device)(70, 96)
    together = dense(x, mlp, batch_invariant=True)
    for rows in (slice(0, 1), slice(63, 65), slice(20, 69)):
        assert torch.equal(dense(x[rows], mlp, batch_invariant=True), together[rows])


# Whole models

MODELS: dict[str, Callable[[], Case]] = {
    "Qwen3": lambda: case("Qwen3", head_dim=16, num_hidden_layers=2, **rope(1e6)),
    "Gemma3": lambda: case(
        "Gemma3", head_dim=16, num_hidden_layers=2, query_pre_attn_scalar=20,
        layer_types=["sliding_attention", "full_attention"], sliding_window=6,
        **GEMMA_ROPE,
    ),
    "GPT2": lambda: case("GPT2", n_head=3, n_layer=2),
}  # fmt: skip


def with_weights(layer: Layer, kind: str | None) -> Layer:
    """``layer`` with its matrices in a format."""
    attn, mlp = layer.attn, layer.mlp
    attn = replace(attn, qkv=stored(attn.qkv, kind), o=stored(attn.o, kind))
    mlp = replace(mlp, gate_up=stored(mlp.gate_up, kind), down=stored(mlp.down, kind))
    return replace(layer, attn=attn, mlp=mlp)


def computed(model: Model, table: Ops) -> Tensor:
    """The logits of a step of prompts and of one that has a decode, without padding."""
    model = replace(model, ops=table, layers=[*map(table.prepare, model.layers)])
    config, device = model.config, model.device
    make = partial(make_batch, str(device), windows=config.windows)
    pool = KVPool(config, 16, PAGE, model.dtype, device)
    previous = torch.tensor([7, 8], dtype=torch.int32, device=device)
    found = []
    for step in (
        make([(range(9), 0), (range(20, 25), 0)], padding=3),
        make([([-2], 9), (range(30, 37), 5)]),
    ):
        hidden = model.forward(step, pool, previous)[: int(step.num_tokens)]
        logits = hidden.new_empty(len(hidden), config.vocab_size)
        assert torch.equal(model.head(hidden, logits).long(), logits.argmax(-1))
        found.append(logits)
    return torch.cat(found)


@pytest.mark.parametrize(
    ("name", "kind", "invariant"),
    [
        ("Qwen3", None, True),
        ("Qwen3", "FP8 in blocks", False),
        pytest.param("Qwen3", "INT8", True, marks=pytest.mark.exhaustive),
        ("Gemma3", None, False),
        ("GPT2", None, False),
    ],
)
def test_whole_models(kernel_device, tmp_path: Path, name, kind, invariant):
    folder = write(tmp_path, MODELS[name]().build())
    model = load_model(folder, torch.float32, kernel_device)
    model.layers = [with_weights(layer, kind) for layer in model.layers]
    device = torch.device(kernel_device)
    table = triton_ops(
        model.config, max_num_seqs=2, device=device, batch_invariant=invariant
    )
    ahead = [table.prepare(layer) for layer in model.layers]
    norms = [norm for layer in ahead for norm in (layer.attn_norm, layer.mlp_norm)]
    assert {isinstance(norm, RoundedNorm) for norm in norms} == {kind is not None}
    found, expected = computed(model, table), computed(model, PLAIN)
    # On tensor cores sums of FP8 products keep fewer bits than float32 has. An input of
    # the next product that lies about halfway between two numbers of 8 bits may then go
    # the other way, and a few of those turn this small random model's logits far: with
    # 2^-12 of a row's root mean square as noise in each plain product, the worst row is
    # off by 0.12 in the median of 40 draws, and by 0.19 at most.
    turned = kind is not None and "FP8" in kind and kernel_device == "cuda"
    bound = 0.25 if turned else 1e-2 if kind else 1e-4
    assert off(found, expected) < bound
