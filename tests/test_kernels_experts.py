"""The experts' kernels for many tokens against plain PyTorch, and the packed order."""

import pytest
import torch

from simplellm.kernels.experts import (
    INVARIANT,
    Tiling,
    down,
    down_torch,
    gate_up,
    gate_up_torch,
    repack,
    tilings,
)
from simplellm.kernels.routing import dispatch_torch
from simplellm.moe import Experts, experts
from simplellm.weights import MXFP4

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 96, 64, 5, 2


def random_weight(rows: int, columns: int, seed: int = 0) -> MXFP4:
    """All codes, and scales of 2^-9 to 2^-2."""
    generator = torch.Generator().manual_seed(seed)
    shape = (EXPERTS, rows, columns // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator)
    scales = torch.randint(118, 126, shape, generator=generator)
    return MXFP4(blocks.to(torch.uint8), scales.to(torch.uint8))


def layer() -> Experts:
    torch.manual_seed(1)
    return Experts(
        random_weight(2 * INTERMEDIATE, HIDDEN, 2),
        torch.randn(EXPERTS, 2 * INTERMEDIATE),
        random_weight(HIDDEN, INTERMEDIATE, 3),
        torch.randn(EXPERTS, HIDDEN),
        limit=7.0,
        alpha=1.702,
    )


def routing(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids that leave expert 3 out and give expert 0 most tokens."""
    torch.manual_seed(tokens)
    scores = torch.rand(tokens, EXPERTS) + torch.tensor([0.5, 0, 0, -2, 0])
    weights, ids = scores.topk(TOP_K)
    return ids.int(), weights.softmax(-1)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("columns", [32, 64, 224])
def test_repacked_weights_are_the_same_numbers(paired, columns):
    weight = random_weight(48, columns)
    packed = repack(weight, paired)
    assert packed.shape == weight.shape
    assert torch.equal(packed.dequantize(), weight.dequantize())


def test_repacking_needs_no_more_memory():
    weight = random_weight(64, 2880)
    assert repack(weight, paired=True).nbytes == weight.nbytes


def test_a_scale_that_is_too_large_is_refused():
    weight = random_weight(16, 64)
    weight.scales[2, 3, 1] = 136
    repack(weight, paired=False)
    weight.scales[2, 3, 1] = 137
    with pytest.raises(ValueError, match=r"2\^10; expected at most 2\^9"):
        repack(weight, paired=False)


def test_rows_must_fill_tiles():
    with pytest.raises(ValueError, match="multiple of 16"):
        repack(random_weight(24, 64), paired=False)


TILINGS = [
    Tiling(rows=64, tokens=16),
    Tiling(rows=128, tokens=16, unroll=2, stages=2),
    Tiling(rows=64, tokens=64, widths=3, unroll=3),
    Tiling(rows=64, tokens=8, warps=2),
    Tiling(rows=64, tokens=16, widths=2),
]


@pytest.mark.parametrize("tokens", [1, 19])
@pytest.mark.parametrize("tiles", TILINGS)
def test_experts_agree_with_the_reference(kernel_device, tokens, tiles):
    weights = layer()
    ids, odds = routing(tokens)
    x = torch.randn(tokens, HIDDEN)
    expected = experts(x, ids.long(), odds, weights)

    def there(tensor):
        return tensor.to(kernel_device)

    plan = dispatch_torch(there(ids), EXPERTS, tiles.tokens)
    up = repack(weights.gate_up.to(kernel_device), paired=True)
    hidden = gate_up(
        *(there(x), up, there(weights.gate_up_bias), plan),
        *(weights.limit, weights.alpha, tiles),
    )
    parts = down(
        *(hidden, repack(weights.down.to(kernel_device), paired=False)),
        *(there(weights.down_bias), there(odds), plan, tiles),
    )
    assert parts.shape == (tokens, TOP_K, HIDDEN)
    torch.testing.assert_close(parts.sum(1).cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_each_kernel_agrees_with_its_twin(kernel_device, dtype):
    weights = layer()
    ids, odds = routing(9)
    tiles = Tiling(rows=64, tokens=16)
    plan = dispatch_torch(ids.to(kernel_device), EXPERTS, tiles.tokens)
    x = torch.randn(9, HIDDEN, dtype=dtype, device=kernel_device)
    up = repack(weights.gate_up.to(kernel_device), paired=True)
    bias = weights.gate_up_bias.to(kernel_device)
    arguments = (x, up, bias, plan, weights.limit, weights.alpha, tiles)
    hidden = gate_up(*arguments)
    assert hidden.dtype == dtype
    tolerance = dict(rtol=2e-3, atol=2e-3) if dtype == torch.float16 else {}
    torch.testing.assert_close(hidden, gate_up_torch(*arguments), **tolerance)

    packed = repack(weights.down.to(kernel_device), paired=False)
    bias = weights.down_bias.to(kernel_device)
    rest = (hidden, packed, bias, odds.to(kernel_device), plan, tiles)
    out = down(*rest)
    assert out.dtype == dtype
    torch.testing.assert_close(out, down_torch(*rest), **tolerance)


@pytest.mark.gpu  # assembly
@pytest.mark.parametrize("tiles", TILINGS)
def test_assembly_decodes_as_plain_operations_do(tiles):
    """bfloat16 inputs take the fast path; their exact float32 copies the other."""
    weights = layer()
    ids, odds = (t.cuda() for t in routing(19))
    plan = dispatch_torch(ids, EXPERTS, tiles.tokens)
    x = torch.randn(19, HIDDEN, device="cuda").bfloat16()
    up = repack(weights.gate_up.to("cuda"), paired=True)
    first = (up, weights.gate_up_bias.cuda(), plan, 7.0, 1.702, tiles)
    fast, plain = gate_up(x, *first), gate_up(x.float(), *first)
    torch.testing.assert_close(fast.float(), plain, rtol=2**-8, atol=1e-4)
    packed = repack(weights.down.to("cuda"), paired=False)
    second = (packed, weights.down_bias.cuda(), odds, plan, tiles)
    fast, plain = down(fast, *second), down(fast.float(), *second)
    torch.testing.assert_close(fast.float(), plain, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("tiles", [TILINGS[0], INVARIANT])
def test_pairs_of_other_tokens_do_not_matter(kernel_device, tiles):
    """A token's result has the same bits alone and in a crowd."""
    weights = layer()
    ids, odds = (t.to(kernel_device) for t in routing(150))
    up = repack(weights.gate_up.to(kernel_device), paired=True)
    bias = weights.gate_up_bias.to(kernel_device)
    back = repack(weights.down.to(kernel_device), paired=False)
    bias_down = weights.down_bias.to(kernel_device)
    x = torch.randn(150, HIDDEN, device=kernel_device)

    def result(rows: slice) -> torch.Tensor:
        plan = dispatch_torch(ids[rows], EXPERTS, tiles.tokens)
        hidden = gate_up(x[rows], up, bias, plan, 7.0, 1.702, tiles)
        return down(hidden, back, bias_down, odds[rows], plan, tiles)

    together = result(slice(0, 150))
    for rows in (slice(7, 8), slice(100, 119)):
        assert torch.equal(result(rows), together[rows])


@pytest.mark.parametrize("experts", [4, 32, 128])
@pytest.mark.parametrize("tokens", [1, 2, 8, 64, 256, 2048, 16384])
def test_a_tiling_exists_for_every_number_of_tokens(tokens, experts):
    both = tilings(tokens, experts, 4)
    assert both[0].tokens == both[1].tokens  # they share their blocks of pairs
    assert all(tiles.tokens >> (tiles.widths - 1) >= 8 for tiles in both)


def test_invariant_blocks_take_one_kind_of_instruction():
    assert INVARIANT.tokens >> (INVARIANT.widths - 1) >= 16


def test_mismatched_arguments_are_refused(kernel_device):
    weights = layer()
    ids, odds = routing(4)
    tiles = Tiling(rows=64, tokens=16)
    plan = dispatch_torch(ids, EXPERTS, tiles.tokens)
    up, low = repack(weights.gate_up, True), repack(weights.down, False)
    x = torch.randn(4, HIDDEN)
    with pytest.raises(ValueError, match=r"weight\.paired is False; expected True"):
        gate_up(x, low, weights.down_bias, plan, 7.0, 1.702, tiles)
    with pytest.raises(ValueError, match=r"bias is \[5, 96\]; expected \[5, 128\]"):
        gate_up(x, up, weights.down_bias, plan, 7.0, 1.702, tiles)
    with pytest.raises(ValueError, match=r"x is \[4, 64\]; expected \[rows, 96\]"):
        gate_up(x[:, :64], up, weights.gate_up_bias, plan, 7.0, 1.702, tiles)
    with pytest.raises(ValueError, match="8 pairs; expected a multiple of x's 3"):
        gate_up(x[:3], up, weights.gate_up_bias, plan, 7.0, 1.702, tiles)
    with pytest.raises(ValueError, match="5 blocks; expected 6 of 2 pairs each"):
        narrow = Tiling(rows=64, tokens=2)
        gate_up(x, up, weights.gate_up_bias, plan, 7.0, 1.702, narrow)
    with pytest.raises(ValueError, match="hidden has 7 rows"):
        hidden = torch.randn(7, INTERMEDIATE)
        down(hidden, low, weights.down_bias, odds, plan, tiles)
