"""The experts' kernels for one to eight tokens against plain PyTorch."""

import pytest
import torch

from simplellm.kernels.experts import repack
from simplellm.kernels.experts_few import (
    FewTiling,
    down_few,
    down_few_torch,
    gate_up_few,
    gate_up_few_torch,
)
from simplellm.moe import Experts, experts
from simplellm.mxfp4 import MXFP4

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 160, 32, 5, 2
TILINGS = [
    FewTiling(),
    FewTiling(warps=1),
    FewTiling(rows=3, ahead=1, warps=2),
    FewTiling(ahead=3, warps=8, cache=".cg"),
]


def random_weight(rows: int, columns: int, seed: int) -> MXFP4:
    """All codes, and scales of 2^-9 to 2^-2."""
    generator = torch.Generator().manual_seed(seed)
    shape = (EXPERTS, rows, columns // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator)
    scales = torch.randint(118, 126, shape, generator=generator)
    return MXFP4(blocks.to(torch.uint8), scales.to(torch.uint8))


def gate_up_case(tokens: int, device: str, columns: int = HIDDEN):
    weight = random_weight(2 * INTERMEDIATE, columns, 1).to(device)
    torch.manual_seed(tokens)
    x = torch.randn(tokens, columns).bfloat16()
    ids = torch.rand(tokens, EXPERTS).topk(TOP_K).indices.int()
    bias = torch.randn(EXPERTS, 2 * INTERMEDIATE).bfloat16()
    tensors = x.to(device), ids.to(device), repack(weight, paired=True)
    return *tensors, bias.to(device), 7.0, 1.702


def down_case(tokens: int, device: str):
    weight = random_weight(HIDDEN, INTERMEDIATE, 2).to(device)
    torch.manual_seed(tokens)
    hidden = torch.randn(tokens * TOP_K, INTERMEDIATE).bfloat16()
    ids = torch.rand(tokens, EXPERTS).topk(TOP_K).indices.int()
    weights = torch.rand(tokens, TOP_K)
    bias = torch.randn(EXPERTS, HIDDEN).bfloat16()
    tensors = hidden.to(device), ids.to(device), weights.to(device)
    return *tensors, repack(weight, paired=False), bias.to(device)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
def test_gate_up(kernel_device, tokens, tiling):
    case = gate_up_case(tokens, kernel_device)
    out = gate_up_few(*case, tiling=tiling)
    assert out.dtype == torch.bfloat16
    expected = gate_up_few_torch(*case, tiling=tiling)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
def test_down(kernel_device, tokens, tiling):
    case = down_case(tokens, kernel_device)
    out = down_few(*case, tiling=tiling)
    expected = down_few_torch(*case, tiling=tiling)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [32, 64])
def test_columns_need_not_fill_tiles(kernel_device, columns):
    case = gate_up_case(2, kernel_device, columns)
    out = gate_up_few(*case)
    torch.testing.assert_close(out, gate_up_few_torch(*case), rtol=2**-7, atol=1e-3)


def test_every_token_may_choose_the_same_experts(kernel_device):
    x, ids, *rest = gate_up_case(8, kernel_device)
    ids = torch.tensor([[4, 1]] * 8, dtype=torch.int32, device=kernel_device)
    out = gate_up_few(x, ids, *rest)
    expected = gate_up_few_torch(x, ids, *rest)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-3)


def test_a_token_does_not_see_the_others(kernel_device):
    x, ids, *rest = gate_up_case(4, kernel_device)
    out = gate_up_few(x, ids, *rest)
    x[1] = 100
    again = gate_up_few(x, ids, *rest)
    keep = [pair for pair in range(4 * TOP_K) if pair // TOP_K != 1]
    assert torch.equal(out[keep], again[keep])


def test_together_they_are_the_experts(kernel_device):
    gate_up_weight = random_weight(2 * INTERMEDIATE, HIDDEN, 1)
    down_weight = random_weight(HIDDEN, INTERMEDIATE, 2)
    torch.manual_seed(0)
    layer = Experts(
        gate_up_weight,
        torch.randn(EXPERTS, 2 * INTERMEDIATE),
        down_weight,
        torch.randn(EXPERTS, HIDDEN),
        limit=7.0,
        alpha=1.702,
    )
    x = torch.randn(3, HIDDEN).bfloat16()
    ids = torch.rand(3, EXPERTS).topk(TOP_K).indices
    weights = torch.rand(3, TOP_K).softmax(-1)
    expected = experts(x.float(), ids, weights, layer)

    def move(tensor):
        return tensor.to(kernel_device)

    hidden = gate_up_few(
        move(x),
        move(ids.int()),
        repack(move(gate_up_weight), paired=True),
        move(layer.gate_up_bias),
        layer.limit,
        layer.alpha,
    )
    parts = down_few(
        hidden,
        move(ids.int()),
        move(weights),
        repack(move(down_weight), paired=False),
        move(layer.down_bias),
    )
    # Between the halves, hidden is rounded to bfloat16.
    torch.testing.assert_close(parts.sum(1).cpu(), expected, rtol=0.02, atol=0.05)


def test_nine_tokens_are_too_many():
    with pytest.raises(ValueError, match="9 tokens; expected 1 to 8"):
        gate_up_few(*gate_up_case(9, "cpu"))


def test_only_bfloat16():
    x, *rest = gate_up_case(1, "cpu")
    with pytest.raises(ValueError, match=r"float32 .*expected torch\.bfloat16"):
        gate_up_few(x.float(), *rest)
