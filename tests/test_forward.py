"""A dense model through the one forward pass.

A model with norms of q and k, without biases, sinks and windows is nothing but
other records: transformers' Qwen3 is the reference.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from simplellm.config import GPT_OSS_20B
from simplellm.layers import Attention, Dense, Layer
from simplellm.model import PAGE, Model, one_sequence
from simplellm.ops import PLAIN, Ops
from simplellm.ops_numpy import NUMPY
from simplellm.pages import KVPool
from simplellm.rope import rotations

CPU = torch.device("cpu")
CONFIG = replace(
    GPT_OSS_20B,
    vocab_size=101,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_local_experts=0,
    num_experts_per_tok=0,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,  # not hidden size / heads, which is 8
    sliding_window=None,
    layer_types=("full_attention",) * 2,
    rope_theta=10_000.0,
    rope_scaling=None,
    max_position_embeddings=512,
    eos_token_ids=(),
    attention_bias=False,
    qk_norm=True,
)


@pytest.fixture(scope="module")
def oracle() -> Qwen3ForCausalLM:
    """transformers' Qwen3 with all its parameters drawn at random, norms too."""
    settings = Qwen3Config(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.hidden_size,
        intermediate_size=CONFIG.intermediate_size,
        num_hidden_layers=CONFIG.num_hidden_layers,
        num_attention_heads=CONFIG.num_attention_heads,
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
    torch.testing.assert_close(ours(oracle, ops).logits(tokens), logits)
    assert expected.std() > 1, "every part is felt in the logits"
