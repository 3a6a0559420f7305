"""rope.py against transformers' GptOssRotaryEmbedding and closed forms."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import (
    GptOssRotaryEmbedding,
    apply_rotary_pos_emb,
)

from simplellm.config import GPT_OSS_20B, ModelConfig, RopeScaling
from simplellm.rope import Rope, apply_rope, yarn_frequencies

POSITIONS = torch.tensor([0, 1, 2, 127, 128, 4095, 4096, 4097, 70_001, 131_071])

SCALINGS = {
    "gpt-oss": RopeScaling(32.0, 4096, 32.0, 1.0, False),
    "truncated": RopeScaling(32.0, 4096, 32.0, 1.0, True),
    "short": RopeScaling(4.0, 64, 8.0, 2.0, False),
    "low below zero": RopeScaling(8.0, 128, 64.0, 1.0, False),
    "ramp of no width": RopeScaling(8.0, 6, 4.0, 1.0, True),
    "factor one": RopeScaling(1.0, 4096, 32.0, 1.0, False),
    "none": None,
}


def configs(
    scaling: RopeScaling | None, head_dim: int, theta: float
) -> tuple[ModelConfig, GptOssConfig]:
    """The same rotary embedding for us and for transformers."""
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        rope |= {"rope_type": "yarn", **vars(scaling)}
    ours = replace(
        GPT_OSS_20B, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling
    )
    return ours, GptOssConfig(head_dim=head_dim, rope_parameters=rope)


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 150_000.0), (22, 10_000.0)])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_equals_transformers_bit_for_bit(scaling, head_dim, theta):
    ours, theirs = configs(scaling, head_dim, theta)
    rope, oracle = Rope(ours), GptOssRotaryEmbedding(theirs)
    assert torch.equal(rope.frequencies, oracle.inv_freq)
    assert rope.concentration == oracle.attention_scaling
    expected = oracle(torch.zeros(1), POSITIONS[None])
    for mine, other in zip(rope.cos_sin(POSITIONS), expected, strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, other[0])


def test_the_constants_of_gpt_oss():
    frequencies, concentration = yarn_frequencies(GPT_OSS_20B)
    plain, one = yarn_frequencies(replace(GPT_OSS_20B, rope_scaling=None))
    assert one == 1.0
    assert concentration == pytest.approx(1.34657, abs=1e-5)
    # The ramp runs from 8.093 to 17.398: pair 8 is left alone, pair 9 is not, pair 17
    # is not yet divided by 32, pair 18 is.
    share = plain / frequencies
    assert torch.equal(frequencies[:9], plain[:9])
    torch.testing.assert_close(share[18:], torch.full((14,), 32.0))
    assert 1 < share[9] < share[17] < 31
    low, high = 8.093, 17.398
    pairs = torch.arange(9, 18)
    keep = 1 - (pairs - low) / (high - low)
    expected = plain[9:18] * (keep + (1 - keep) / 32)
    torch.testing.assert_close(frequencies[9:18], expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotates_as_transformers_does(dtype):
    ours, theirs = configs(SCALINGS["gpt-oss"], 64, 150_000.0)
    torch.manual_seed(0)
    q, k = torch.randn(10, 6, 64, dtype=dtype), torch.randn(10, 2, 64, dtype=dtype)
    cos, sin = Rope(ours).cos_sin(POSITIONS)
    mine = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    # In float32: transformers rounds cos, sin and every product to bf16, we only the
    # result.
    heads_first = [x.float().transpose(0, 1)[None] for x in (q, k)]
    c, s = GptOssRotaryEmbedding(theirs)(torch.zeros(1), POSITIONS[None])
    for x, y in zip(mine, apply_rotary_pos_emb(*heads_first, c, s), strict=True):
        assert x.dtype == dtype
        assert torch.equal(x, y[0].transpose(0, 1).to(dtype))


def test_scores_depend_on_the_distance_alone():
    torch.manual_seed(1)
    rope = Rope(GPT_OSS_20B)
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)

    def score(query: int, key: int) -> float:
        rotated = [
            apply_rope(x, *rope.cos_sin(torch.tensor([position])))
            for x, position in ((q, query), (k, key))
        ]
        return (rotated[0] * rotated[1]).sum().item()

    # The angles are float32: at position 5,000 the fastest pair's is off by up to
    # 2.4e-4 radians.
    assert score(5137, 5000) == pytest.approx(score(137, 0), abs=2e-2)
    assert abs(score(138, 0) - score(137, 0)) > 0.1


def test_length_grows_by_the_concentration():
    torch.manual_seed(2)
    rope = Rope(GPT_OSS_20B)
    x = torch.randn(10, 3, 64)
    turned = apply_rope(x, *rope.cos_sin(POSITIONS))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1) * rope.concentration)
    assert rope.concentration == 0.1 * math.log(32) + 1
    assert torch.equal(turned[0], x[0] * rope.concentration)  # position 0 turns nothing
