"""What the kernels of experts compute, in plain PyTorch, and layers to test them on."""

from dataclasses import replace

import torch
from torch import Tensor

from simplellm.checkpoint.mxfp4 import MXFP4
from simplellm.model.kernels.expert_blocks import ExpertBlocks
from simplellm.model.kernels.fragments import repack
from simplellm.model.kernels.routing import max_blocks
from simplellm.model.layers import Experts


def plain_sort(
    ids: Tensor, experts: int, block: int, num_tokens: Tensor | None = None
) -> ExpertBlocks:
    """`routing.sort_pairs`: the pairs sorted by expert, and its blocks."""
    ids = ids.long()
    if num_tokens is not None:
        padding = torch.arange(len(ids), device=ids.device) >= num_tokens
        ids = ids.masked_fill(padding[:, None], experts)  # after every expert
    flat = ids.flatten()
    counts = flat.bincount(minlength=experts + 1)[:experts]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    entries = [
        (expert, first)
        for expert in range(experts)
        for first in range(int(offsets[expert]), int(offsets[expert + 1]), block)
    ]
    entries += [(-1, 0)] * (max_blocks(len(flat), experts, block) - len(entries))
    blocks = torch.tensor(entries, dtype=torch.int32, device=ids.device).view(-1, 2)
    return ExpertBlocks(flat.argsort(stable=True).int(), offsets, blocks)


def plain_products(x: Tensor, weight: MXFP4, bias: Tensor, ids: Tensor) -> Tensor:
    """float32 [n, N]: each row of x [n, K] through the matrix of its expert."""
    out = torch.empty(len(x), weight.shape[1], device=x.device)
    for expert in ids.unique().tolist():
        rows = (ids == expert).nonzero()[:, 0]
        matrix = weight[expert].dequantize(torch.float32)
        out[rows] = x[rows].float() @ matrix.T + bias[expert].float()
    return out


def random_weight(experts: int, rows: int, columns: int, seed: int = 0) -> MXFP4:
    """All codes, and scales of 2^-9 to 2^-2."""
    generator = torch.Generator().manual_seed(seed)
    shape = (experts, rows, columns // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator)
    scales = torch.randint(118, 126, shape, generator=generator)
    return MXFP4(blocks.to(torch.uint8), scales.to(torch.uint8))


def random_experts(
    device: str,
    hidden: int,
    intermediate: int,
    experts: int = 5,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Experts:
    """The experts of one layer, as a checkpoint has them; the last is never chosen."""
    generator = torch.Generator().manual_seed(hidden)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    router, router_bias = normal(experts, hidden), normal(experts)
    router_bias[-1] = -1000
    return Experts(
        router,
        router_bias,
        random_weight(experts, 2 * intermediate, hidden, 1).to(device),
        normal(experts, 2 * intermediate),
        random_weight(experts, hidden, intermediate, 2).to(device),
        normal(experts, hidden),
        top_k,
        limit=7.0,
        alpha=1.702,
    )


def repacked(mlp: Experts) -> Experts:
    """The same experts in the order that the kernels read."""
    first, second = (
        repack(mlp.gate_up, interleaved=True),
        repack(mlp.down, interleaved=False),
    )
    return replace(mlp, gate_up=first, down=second)
