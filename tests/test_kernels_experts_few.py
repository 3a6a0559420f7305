"""The experts' kernels for one token against plain PyTorch."""

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
from simplellm.weights import MXFP4

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 160, 32, 5, 2
TILINGS = [
    FewTiling(programs=3, warps=4),
    FewTiling(programs=2, warps=1),
    FewTiling(programs=5, warps=2),  # gate_up has 4 rows of tiles
]


def random_weight(rows: int, columns: int, seed: int) -> MXFP4:
    """All codes, and scales of 2^-9 to 2^-2."""
    generator = torch.Generator().manual_seed(seed)
    shape = (EXPERTS, rows, columns // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator)
    scales = torch.randint(118, 126, shape, generator=generator)
    return MXFP4(blocks.to(torch.uint8), scales.to(torch.uint8))


def gate_up_case(device: str, columns: int = HIDDEN):
    weight = random_weight(2 * INTERMEDIATE, columns, 1).to(device)
    torch.manual_seed(0)
    x = torch.randn(1, columns).bfloat16()
    ids = torch.rand(1, EXPERTS).topk(TOP_K).indices.int()
    bias = torch.randn(EXPERTS, 2 * INTERMEDIATE).bfloat16()
    tensors = x.to(device), ids.to(device), repack(weight, paired=True)
    return *tensors, bias.to(device), 7.0, 1.702


def down_case(device: str):
    weight = random_weight(HIDDEN, INTERMEDIATE, 2).to(device)
    torch.manual_seed(0)
    hidden = torch.randn(TOP_K, INTERMEDIATE).bfloat16()
    ids = torch.rand(1, EXPERTS).topk(TOP_K).indices.int()
    weights = torch.rand(1, TOP_K)
    bias = torch.randn(EXPERTS, HIDDEN).bfloat16()
    tensors = hidden.to(device), ids.to(device), weights.to(device)
    return *tensors, repack(weight, paired=False), bias.to(device)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_gate_up(kernel_device, tiling):
    case = gate_up_case(kernel_device)
    out = gate_up_few(*case, tiling=tiling)
    assert out.dtype == torch.bfloat16
    expected = gate_up_few_torch(*case, tiling=tiling)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_down(kernel_device, tiling):
    case = down_case(kernel_device)
    out = down_few(*case, tiling=tiling)
    expected = down_few_torch(*case, tiling=tiling)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [32, 288])
def test_columns_need_not_fill_tiles(kernel_device, columns):
    case = gate_up_case(kernel_device, columns)
    tiling = FewTiling(programs=1, warps=1)
    out = gate_up_few(*case, tiling=tiling)
    torch.testing.assert_close(out, gate_up_few_torch(*case), rtol=2**-7, atol=1e-3)


def test_small_numbers_are_not_lost(kernel_device):
    x, *rest = gate_up_case(kernel_device)
    rest[2] = torch.zeros_like(rest[2])
    x *= 2.0**-40
    tiling = FewTiling(programs=2, warps=2)
    out = gate_up_few(x, *rest, tiling=tiling)
    expected = gate_up_few_torch(x, *rest)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2.0**-50)


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
    x = torch.randn(1, HIDDEN).bfloat16()
    ids = torch.rand(1, EXPERTS).topk(TOP_K).indices
    weights = torch.rand(1, TOP_K).softmax(-1)
    expected = experts(x.float(), ids, weights, layer)

    def move(tensor):
        return tensor.to(kernel_device)

    hidden = gate_up_few(
        move(x),
        move(ids.int()),
        repack(move(gate_up_weight), paired=True),
        move(layer.gate_up_bias.bfloat16()),
        layer.limit,
        layer.alpha,
        tiling=FewTiling(programs=2, warps=2),
    )
    parts = down_few(
        hidden,
        move(ids.int()),
        move(weights),
        repack(move(down_weight), paired=False),
        move(layer.down_bias.bfloat16()),
        tiling=FewTiling(programs=2, warps=1),
    )
    # Between the halves, hidden is rounded to bfloat16.
    torch.testing.assert_close(parts.sum(1).cpu(), expected, rtol=0.02, atol=0.05)


def test_two_tokens_are_too_many():
    x, ids, *rest = gate_up_case("cpu")
    with pytest.raises(ValueError, match="2 tokens; expected 1"):
        gate_up_few(x, ids.expand(2, -1), *rest)


def test_only_bfloat16():
    x, *rest = gate_up_case("cpu")
    with pytest.raises(ValueError, match=r"float32 .*expected torch\.bfloat16"):
        gate_up_few(x.float(), *rest)
