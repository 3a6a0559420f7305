"""The experts' kernels for up to eight tokens an expert against plain PyTorch."""

import pytest
import torch

from simplellm.kernels.experts import down_torch, gate_up_torch, repack, Tiling
from simplellm.kernels.experts_some import SomeTiling, down_some, gate_up_some
from simplellm.kernels.routing import Dispatch, dispatch_torch
from simplellm.mxfp4 import MXFP4

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 160, 32, 5, 2
TILINGS = [
    SomeTiling(programs=3, warps=4),
    SomeTiling(programs=2, warps=1, ahead=3),
    SomeTiling(programs=5, warps=2),
]


def random_weight(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (EXPERTS, rows, columns // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator)
    scales = torch.randint(118, 126, shape, generator=generator)
    return MXFP4(blocks.to(torch.uint8), scales.to(torch.uint8))


@pytest.mark.parametrize("tokens", [1, 3, 11])
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_both(kernel_device, tiling, tokens):
    torch.manual_seed(tokens)
    ids = torch.rand(tokens, EXPERTS).topk(TOP_K).indices.int()
    plan = Dispatch(*(t.to(kernel_device) for t in dispatch_torch(ids, EXPERTS, 8)))
    first = repack(random_weight(2 * INTERMEDIATE, HIDDEN, 1).to(kernel_device), True)
    second = repack(random_weight(HIDDEN, INTERMEDIATE, 2).to(kernel_device), False)
    x = torch.randn(tokens, HIDDEN).bfloat16().to(kernel_device)
    b1 = torch.randn(EXPERTS, 2 * INTERMEDIATE).bfloat16().to(kernel_device)
    b2 = torch.randn(EXPERTS, HIDDEN).bfloat16().to(kernel_device)
    w = torch.rand(tokens, TOP_K).to(kernel_device)
    t = Tiling(16, 8)
    h = gate_up_some(x, first, b1, plan, 7.0, 1.702, tiling)
    e = gate_up_torch(x, first, b1, plan, 7.0, 1.702, t)
    torch.testing.assert_close(h, e, rtol=2**-7, atol=1e-3)
    out = down_some(h, second, b2, w, plan, tiling)
    torch.testing.assert_close(
        out, down_torch(h, second, b2, w, plan, t), rtol=2**-7, atol=1e-3
    )
