"""The experts' kernels for few tokens against plain PyTorch."""

import pytest
import torch
from oracle_kernels import plain_products, random_experts, repacked

from simplellm.model import feed_forward, ops
from simplellm.model.kernels import experts as module
from simplellm.model.kernels.experts_one import (
    OneTiling,
    down_one,
    experts_one,
    gate_up_one,
)

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 160, 32, 5, 2
TILINGS = [
    OneTiling(programs=3, warps=4),
    OneTiling(programs=2, warps=1),
    OneTiling(programs=5, warps=2),  # gate_up has 4 rows of tiles
]


def case(device: str, hidden: int = HIDDEN, tokens: int = 1):
    """The experts, their repacked copies, x and the ids of the chosen ones."""
    size = hidden, INTERMEDIATE, EXPERTS, TOP_K, torch.bfloat16
    mlp = random_experts(device, *size)
    torch.manual_seed(0)
    ids = torch.rand(tokens, EXPERTS).topk(TOP_K).indices.int()
    x = torch.randn(tokens, hidden).bfloat16()
    return mlp, repacked(mlp), x.to(device), ids.to(device)


def count(tokens: int, like: torch.Tensor) -> torch.Tensor:
    """How many tokens are no padding."""
    return torch.full([1], tokens, dtype=torch.int32, device=like.device)


def plain_gate_up(x, mlp, ids):
    rows = x.repeat_interleave(TOP_K, 0)
    both = plain_products(rows, mlp.gate_up, mlp.gate_up_bias, ids.flatten())
    return feed_forward.swiglu(both, mlp.limit, mlp.alpha).bfloat16()


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_gate_up(kernel_device, tiling):
    mlp, ready, x, ids = case(kernel_device)
    out = gate_up_one(x, ready, ids, count(1, x), tiling)
    assert out.dtype == torch.bfloat16
    expected = plain_gate_up(x, mlp, ids)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_down(kernel_device, tiling):
    mlp, ready, _, ids = case(kernel_device)
    hidden = torch.randn(TOP_K, INTERMEDIATE).bfloat16().to(kernel_device)
    scores = torch.rand(1, TOP_K).to(kernel_device)
    out = down_one(hidden, ready, ids, scores, count(1, hidden), tiling)
    assert out.dtype == torch.float32
    y = plain_products(hidden, mlp.down, mlp.down_bias, ids.flatten())
    torch.testing.assert_close(out[0], y * scores[0, :, None], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hidden", [32, 288])
def test_columns_need_not_fill_tiles(kernel_device, hidden):
    mlp, ready, x, ids = case(kernel_device, hidden)
    out = gate_up_one(x, ready, ids, count(1, x), OneTiling(programs=1, warps=1))
    expected = plain_gate_up(x, mlp, ids)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-3)


def test_small_numbers_are_not_lost(kernel_device):
    mlp, ready, x, ids = case(kernel_device)
    ready.gate_up_bias.zero_()  # mlp's as well
    x *= 2.0**-40
    out = gate_up_one(x, ready, ids, count(1, x), OneTiling(programs=2, warps=2))
    expected = plain_gate_up(x, mlp, ids)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2.0**-50)


@pytest.mark.parametrize(("tokens", "num_tokens"), [(1, 1), (4, 3)])
def test_together_they_are_the_experts(kernel_device, tokens, num_tokens):
    """As `ops` has them, on the same numbers in float32; nothing for padding."""
    mlp, ready, x, _ = case(kernel_device, tokens=tokens)
    exact = random_experts(kernel_device, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K)
    for name in ("router", "router_bias", "gate_up_bias", "down_bias"):
        getattr(exact, name).copy_(getattr(mlp, name))
    real = count(num_tokens, x)
    expected = ops.experts(x.float(), exact, real)
    parts = experts_one(x, ready, real, OneTiling(programs=2, warps=2))
    assert parts.shape == (tokens, TOP_K, HIDDEN)
    # Between the halves, hidden is rounded to bfloat16.
    torch.testing.assert_close(
        parts.sum(1)[:num_tokens], expected[:num_tokens], rtol=0.02, atol=0.05
    )


@pytest.mark.parametrize(
    ("dtype", "tokens", "invariant", "taken"),
    [
        (torch.bfloat16, 1, False, True),
        (torch.bfloat16, 1, True, False),
        (torch.bfloat16, 4, False, True),
        (torch.bfloat16, 5, False, False),
        (torch.float32, 1, False, False),
    ],
)
def test_few_tokens_in_bfloat16_take_this_way(
    monkeypatch, dtype, tokens, invariant, taken
):
    class Taken(Exception):
        pass

    def one(*_):
        raise Taken(True)

    def many(*_):
        raise Taken(False)

    monkeypatch.setattr(module, "experts_one", one)
    monkeypatch.setattr(module, "route_tokens", many)
    mlp = random_experts("cpu", HIDDEN, INTERMEDIATE, dtype=dtype)
    x, num_tokens = torch.zeros(tokens, HIDDEN, dtype=dtype), torch.ones(1).int()
    with pytest.raises(Taken) as raised:
        module.experts(x, mlp, num_tokens, batch_invariant=invariant)
    assert raised.value.args == (taken,)
