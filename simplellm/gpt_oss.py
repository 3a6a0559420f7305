"""gpt-oss: which weights its layers are made of."""

from collections.abc import Callable
from typing import Any

from simplellm.config import ModelConfig
from simplellm.layers import Attention, Experts, Layer
from simplellm.model import Model
from simplellm.ops import Ops
from simplellm.rope import rotations

# Gives a weight by its name, on the right device: a Tensor, or what is packed.
Take = Callable[[str], Any]


def build(config: ModelConfig, take: Take, ops: Ops) -> Model:
    """A gpt-oss model of the weights that ``take`` delivers, as ``ops`` wants them."""
    embed_tokens = take("embed_tokens.weight")
    cos, sin = rotations(config, embed_tokens.device)
    layers = []
    for index in range(config.num_hidden_layers):

        def part(name: str, layer: str = f"layers.{index}") -> Any:
            return take(f"{layer}.{name}")

        attn = Attention(
            qkv=part("attn.qkv.weight"),
            qkv_bias=part("attn.qkv.bias"),
            o=part("attn.o.weight"),
            o_bias=part("attn.o.bias"),
            sinks=part("attn.sinks"),
            q_norm=None,
            k_norm=None,
            cos=cos,
            sin=sin,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
        )
        mlp = Experts(
            router=part("router.weight"),
            router_bias=part("router.bias"),
            gate_up=part("experts.gate_up"),
            gate_up_bias=part("experts.gate_up_bias"),
            down=part("experts.down"),
            down_bias=part("experts.down_bias"),
            top_k=config.num_experts_per_tok,
            limit=config.swiglu_limit,
            alpha=config.swiglu_alpha,
        )
        layer = Layer(part("attn_norm.weight"), attn, part("mlp_norm.weight"), mlp)
        layers.append(ops.prepare(layer))
    tied = config.tie_word_embeddings
    return Model(
        config,
        ops,
        embed_tokens=embed_tokens,
        layers=layers,
        norm=take("norm.weight"),
        lm_head=embed_tokens if tied else take("lm_head.weight"),
    )
