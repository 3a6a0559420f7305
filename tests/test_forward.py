"""model.py: the angles of every position, and a dense model through the one forward.

A dense model with norms of q and k, without biases, sinks and windows is nothing but
other records: transformers' Qwen3 is the reference.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

from simplellm.config import GPT_OSS_20B, ModelConfig, RopeScaling
from simplellm.layers import Attention, Dense, Layer
from simplellm.model import PAGE, Model, one_sequence, rotations, yarn_frequencies
from simplellm.ops import PLAIN, Ops
from simplellm.ops_numpy import NUMPY
from simplellm.pages import KVPool

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


@dataclass(frozen=True)
class DenseConfig:
    """What the forward pass and the pages want to know of a dense model."""

    vocab_size: int = 101
    num_hidden_layers: int = 2
    num_key_value_heads: int = 2
    head_dim: int = 16  # not hidden size / heads, which is 8
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: None = None
    max_position_embeddings: int = 512
    windows: tuple[None] = (None,)

    def window(self, layer: int) -> None:
        return None


CONFIG = DenseConfig()


@pytest.fixture(scope="module")
def oracle() -> Qwen3ForCausalLM:
    """transformers' Qwen3 with all its parameters drawn at random, norms too."""
    settings = Qwen3Config(
        vocab_size=CONFIG.vocab_size,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=CONFIG.num_hidden_layers,
        num_attention_heads=6,
        num_key_value_heads=CONFIG.num_key_value_heads,
        head_dim=CONFIG.head_dim,
        rms_norm_eps=CONFIG.rms_norm_eps,
        max_position_embeddings=CONFIG.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_theta},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(settings).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = False
        if "norm" in name:
            parameter.normal_(1, 0.3, generator=generator)
        else:
            std = 2 / parameter.shape[1] ** 0.5
            parameter.normal_(0, 1 if "embed" in name else std, generator=generator)
    return model


def ours(theirs: Qwen3ForCausalLM, ops: Ops) -> Model:
    """The same weights as layer records."""
    cos, sin = rotations(CONFIG, CPU)
    layers = []
    for layer in theirs.model.layers:
        block, mlp = layer.self_attn, layer.mlp
        parts = block.q_proj.weight, block.k_proj.weight, block.v_proj.weight
        attn = Attention(
            qkv=torch.cat(parts),
            qkv_bias=None,
            o=block.o_proj.weight.data,
            o_bias=None,
            sinks=None,
            q_norm=block.q_norm.weight.data,
            k_norm=block.k_norm.weight.data,
            cos=cos,
            sin=sin,
            head_dim=CONFIG.head_dim,
            eps=CONFIG.rms_norm_eps,
        )
        dense = Dense(
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            gate_up_bias=None,
            down=mlp.down_proj.weight.data,
            down_bias=None,
        )
        norms = layer.input_layernorm, layer.post_attention_layernorm
        attn_norm, mlp_norm = (norm.weight.data for norm in norms)
        layers.append(ops.prepare(Layer(attn_norm, attn, mlp_norm, dense)))
    return Model(
        CONFIG,
        ops,
        embed_tokens=theirs.model.embed_tokens.weight.data,
        layers=layers,
        norm=theirs.model.norm.weight.data,
        lm_head=theirs.lm_head.weight.data,
    )


@torch.inference_mode()
def logits_of(model: Model, tokens: Tensor, chunks: Sequence[int]) -> Tensor:
    """The logits of one sequence, computed in chunks of these lengths."""
    pages = -(-len(tokens) // PAGE)
    pool = KVPool(CONFIG, pages, PAGE, torch.float32, CPU)
    logits = torch.full((len(tokens), CONFIG.vocab_size), torch.nan)
    previous = torch.zeros(1, dtype=torch.int32)
    start = 0
    for length in chunks:
        stop = start + length
        batch = one_sequence(tokens[start:stop], start, pages, CONFIG.windows, CPU)
        hidden = model.forward(batch, pool, previous)
        best = model.head(hidden, logits[start:stop])
        assert torch.equal(best, logits[start:stop].argmax(-1).int())
        start = stop
    return logits


@pytest.mark.parametrize("ops", [PLAIN, NUMPY], ids=lambda ops: ops.name)
@pytest.mark.parametrize("chunks", [[150], [70, 1, 1, 60, 18], [149, 1]])
def test_a_dense_model_is_other_records(oracle, ops, chunks) -> None:
    """Worst relative error of a position's logits in float32: 1e-4 at most."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(CONFIG.vocab_size, (150,), generator=generator)
    with torch.inference_mode():
        expected = oracle(tokens[None]).logits[0]
    logits = logits_of(ours(oracle, ops), tokens, chunks)
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.max() < 1e-4
    assert expected.std() > 1, "every part is felt in the logits"
