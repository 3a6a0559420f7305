"""moe.py against transformers' router, experts and MLP, and against one token alone."""

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import (
    GptOssExperts,
    GptOssMLP,
    GptOssTopKRouter,
)

import simplellm.moe
from simplellm.moe import Experts, experts, route, swiglu
from simplellm.weights import MXFP4, quantize

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LIMIT, ALPHA = 96, 64, 16, 4, 7.0, 1.702
# Relative L2. float32 measures 3e-7. bfloat16 measures 5e-3: transformers rounds a
# product before it adds the bias, we after, and a bfloat16 has 8 bits.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def oracle(seed: int = 0, std: float = 1.0) -> GptOssMLP:
    """transformers' MLP with random weights, wide enough to reach every clamp."""
    config = GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    mlp = GptOssMLP(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in mlp.parameters():
        parameter.data.normal_(0, 0.5 * std, generator=generator)
        parameter.requires_grad = False
    return mlp


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def ours(theirs: GptOssExperts) -> Experts:
    """The same weights; transformers keeps them [E, in, out]."""
    return Experts(
        gate_up=theirs.gate_up_proj.transpose(1, 2).contiguous(),
        gate_up_bias=theirs.gate_up_proj_bias,
        down=theirs.down_proj.transpose(1, 2).contiguous(),
        down_bias=theirs.down_proj_bias,
        limit=LIMIT,
        alpha=ALPHA,
    )


def relative(ours: Tensor, theirs: Tensor) -> float:
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    return error.item()


def route_like(router: GptOssTopKRouter, x: Tensor) -> tuple[Tensor, Tensor]:
    return route(x, router.weight, router.bias, TOP_K)


# The router.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route_matches_transformers(dtype):
    router = oracle(std=0.1).router.to(dtype)
    x = tokens(300).to(dtype)
    _, scores, indices = router(x)
    expert_ids, expert_weights = route_like(router, x)
    assert torch.equal(expert_ids, indices)
    assert expert_weights.dtype == dtype
    assert relative(expert_weights, scores) < TOLERANCE[dtype]


def test_route_is_softmax_over_the_chosen_logits():
    weight, bias = torch.eye(4), torch.tensor([0.0, 0.0, 0.5, 0.0])
    expert_ids, expert_weights = route(
        torch.tensor([[3.0, 2.0, 1.0, -1.0]]), weight, bias, 2
    )
    assert expert_ids.tolist() == [[0, 1]]
    expected = torch.tensor([[3.0, 2.0]]).softmax(-1)  # 0.731, 0.269
    torch.testing.assert_close(expert_weights, expected)
    # What the others scored does not matter, as it would with a softmax over all.
    _, again = route(torch.tensor([[3.0, 2.0, -9.0, -9.0]]), weight, bias, 2)
    assert torch.equal(again, expert_weights)


def test_route_uses_its_bias():
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    expert_ids, _ = route(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.eye(4), bias, 2)
    assert expert_ids.tolist() == [[3, 0]]


# The activation.


def test_swiglu_by_hand():
    """Each of gate and up below, within and beyond the limits."""
    pairs = [
        *[(g, u) for g in (-20.0, -1.0, 0.5, 9.0) for u in (-20.0, -1.0, 0.5, 9.0)]
    ]
    gate_up = torch.tensor([value for pair in pairs for value in pair])
    gate = torch.tensor([min(g, 7.0) for g, _ in pairs]).double()
    up = torch.tensor([max(-7.0, min(u, 7.0)) for _, u in pairs]).double()
    expected = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    torch.testing.assert_close(swiglu(gate_up, 7.0, 1.702), expected.float())


def test_swiglu_does_not_clamp_the_gate_from_below():
    """A gate of -8 gives -8 * sigmoid(-0.8) with alpha 0.1, not -7 * sigmoid(-0.7)."""
    out = swiglu(torch.tensor([-8.0, 0.0]), 7.0, 0.1)
    torch.testing.assert_close(out, -8 * torch.sigmoid(torch.tensor([-0.8])))


def test_swiglu_matches_transformers():
    module = oracle().experts
    gate_up = 8 * tokens(50)
    theirs = module._apply_gate(gate_up)
    assert relative(swiglu(gate_up, LIMIT, ALPHA), theirs) < TOLERANCE[torch.float32]
    gate_up = gate_up.bfloat16()
    theirs = module._apply_gate(gate_up)
    assert relative(swiglu(gate_up, LIMIT, ALPHA), theirs) < 4e-3


# The experts.


def test_inputs_reach_every_clamp():
    """The comparisons below would not see a missing clamp if nothing exceeded it."""
    module = oracle().experts
    gate_up = tokens(300) @ module.gate_up_proj + module.gate_up_proj_bias[:, None]
    gate, up = gate_up[..., 0::2], gate_up[..., 1::2]
    for beyond in (gate > LIMIT, gate < -LIMIT, up > LIMIT, up < -LIMIT):
        assert beyond.float().mean() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 17, 300])
def test_experts_match_transformers(dtype, count):
    mlp = oracle().to(dtype)
    x = tokens(count).to(dtype)
    # Routing of its own, so that the router's rounding plays no part.
    expert_ids, expert_weights = route(
        x.float(), mlp.router.weight.float() / 10, mlp.router.bias.float(), TOP_K
    )
    expert_weights = expert_weights.to(dtype)
    theirs = mlp.experts(x, expert_ids, expert_weights)
    out = experts(x, expert_ids, expert_weights, ours(mlp.experts))
    assert out.dtype == dtype
    assert relative(out, theirs) < TOLERANCE[dtype]


@pytest.mark.parametrize("seed", range(3))
def test_whole_mlp_matches_transformers(seed):
    mlp = oracle(seed, std=0.3)
    x = tokens(64, seed + 10)
    theirs, _ = mlp(x[None])
    out = experts(x, *route_like(mlp.router, x), ours(mlp.experts))
    assert relative(out, theirs[0]) < TOLERANCE[torch.float32]


def test_packed_experts_match_transformers_on_their_values():
    mlp = oracle()
    weights = ours(mlp.experts)
    assert isinstance(weights.gate_up, Tensor) and isinstance(weights.down, Tensor)
    gate_up, down = quantize(weights.gate_up), quantize(weights.down)
    mlp.experts.gate_up_proj.data = gate_up.dequantize(torch.float32).transpose(1, 2)
    mlp.experts.down_proj.data = down.dequantize(torch.float32).transpose(1, 2)
    packed = Experts(
        gate_up, weights.gate_up_bias, down, weights.down_bias, LIMIT, ALPHA
    )
    x = tokens(40)
    expert_ids, expert_weights = route_like(mlp.router, x)
    theirs = mlp.experts(x, expert_ids, expert_weights)
    out = experts(x, expert_ids, expert_weights, packed)
    assert relative(out, theirs) < TOLERANCE[torch.float32]


def test_only_touched_experts_are_dequantized_one_at_a_time(monkeypatch):
    dequantized = []
    original = MXFP4.dequantize

    def count(self, dtype=torch.bfloat16):
        dequantized.append(self.shape)
        return original(self, dtype)

    monkeypatch.setattr(MXFP4, "dequantize", count)
    weights = ours(oracle().experts)
    assert isinstance(weights.gate_up, Tensor) and isinstance(weights.down, Tensor)
    packed = Experts(
        quantize(weights.gate_up),
        weights.gate_up_bias,
        quantize(weights.down),
        weights.down_bias,
        LIMIT,
        ALPHA,
    )
    expert_ids = torch.tensor([[3, 9], [9, 15], [3, 15]])
    experts(tokens(3), expert_ids, torch.full((3, 2), 0.5), packed)
    assert dequantized == [(2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)] * 3


def test_weights_apply_after_the_down_bias():
    """With zero weights a token gets its experts' biases times the router's weights."""
    bias = torch.arange(1.0, 5.0)[:, None].expand(4, 3)  # expert e says e + 1
    weights = Experts(
        torch.zeros(4, 2, 3), torch.zeros(4, 2), torch.zeros(4, 3, 1), bias, 7.0, 1.702
    )
    expert_ids = torch.tensor([[1, 3], [2, 0]])
    expert_weights = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    out = experts(torch.randn(2, 3), expert_ids, expert_weights, weights)
    assert out.tolist() == [[2.5] * 3, [2.0] * 3]


def test_no_tokens():
    empty = torch.zeros(0, TOP_K)
    out = experts(tokens(0), empty.long(), empty, ours(oracle().experts))
    assert out.shape == (0, HIDDEN)


# Neighbors.


def test_neighbors_change_nothing_but_the_rounding_of_the_matmul():
    mlp = oracle()
    x = tokens(33)
    weights = ours(mlp.experts)
    expert_ids, expert_weights = route_like(mlp.router, x)
    whole = experts(x, expert_ids, expert_weights, weights)
    for i in (0, 16, 32):
        alone = experts(
            x[i : i + 1], expert_ids[i : i + 1], expert_weights[i : i + 1], weights
        )
        assert relative(whole[i : i + 1], alone) < 1e-6


def test_neighbors_change_nothing_at_all_when_rows_are_multiplied_alone(monkeypatch):
    """The order of the sums is ours and fixed; only a matmul may round by its shape."""

    def row_by_row(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.cat([torch.mv(weight, row)[None] + bias for row in x])

    monkeypatch.setattr(simplellm.moe, "linear", row_by_row)
    mlp = oracle()
    x = tokens(33)
    weights = ours(mlp.experts)
    expert_ids, expert_weights = route_like(mlp.router, x)
    whole = experts(x, expert_ids, expert_weights, weights)
    for rows in ([5], [32, 0], [9, 8, 7, 6, 5]):
        part = experts(x[rows], expert_ids[rows], expert_weights[rows], weights)
        assert torch.equal(part, whole[rows])
