"""rope.py: the angles of every position, against transformers and closed forms."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

from simplellm.base.config import ModelConfig, RopeScaling
from simplellm.checkpoint.families.gpt_oss import GPT_OSS_20B
from simplellm.model.rope import yarn_frequencies
from simplellm.model.rope_cache import rotations

CPU = torch.device("cpu")
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


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 150_000.0), (22, 10_000.0)])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_angles_equal_transformers_bit_for_bit(scaling, head_dim, theta):
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        rope |= {"rope_type": "yarn", **vars(scaling)}
    ours: ModelConfig = replace(
        GPT_OSS_20B, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling
    )
    theirs = GptOssConfig(head_dim=head_dim, rope_parameters=rope)
    frequencies, concentration = yarn_frequencies(ours)
    oracle = GptOssRotaryEmbedding(theirs)
    assert torch.equal(frequencies, oracle.inv_freq)
    assert concentration == oracle.attention_scaling
    expected = oracle(torch.zeros(1), POSITIONS[None])
    for mine, other in zip(rotations(ours, CPU), expected, strict=True):
        assert mine.dtype == torch.float32
        assert mine.shape == (131_072, head_dim // 2)
        assert torch.equal(mine[POSITIONS], other[0])


def test_the_constants_of_gpt_oss():
    frequencies, concentration = yarn_frequencies(GPT_OSS_20B)
    plain, one = yarn_frequencies(replace(GPT_OSS_20B, rope_scaling=None))
    assert one == 1.0
    assert concentration == 0.1 * math.log(32) + 1
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


def test_length_grows_by_the_concentration():
    cos, sin = rotations(GPT_OSS_20B, CPU)
    length = (cos[POSITIONS].square() + sin[POSITIONS].square()).sqrt()
    concentration = yarn_frequencies(GPT_OSS_20B)[1]
    torch.testing.assert_close(length, torch.full_like(length, concentration))
    assert (sin[0] == 0).all() and (cos[0] == concentration).all()
