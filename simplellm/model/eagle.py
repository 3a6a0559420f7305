"""An EAGLE-3 head in plain PyTorch: one layer that drafts what a model says next.

It reads what three of the model's layers made of each token, and the token after it
(EAGLE-3, Li et al. 2025). For the first draft that is the model's own last state; for
each further one it's what the head itself made of the draft before.

T tokens, H hidden, S positions, K kv heads, D head_dim.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from simplellm.base.config import ModelConfig
from simplellm.checkpoint.eagle import HeadConfig
from simplellm.checkpoint.mxfp4 import Weight
from simplellm.model.family_rules import dense
from simplellm.model.feed_forward import linear
from simplellm.model.layers import Attention, Dense
from simplellm.model.model import Model
from simplellm.model.ops import Ops, rms_norm
from simplellm.model.rope_cache import rotations


@dataclass(frozen=True, eq=False)
class Head:
    """The weights of an EAGLE-3 head, and what it computes with them."""

    config: HeadConfig
    layers: tuple[int, ...]  # of the model, whose outputs it reads
    embed_tokens: Tensor  # [V, H]
    fc: Tensor  # [H, 3 * target's hidden]
    fc_norms: Sequence[Tensor]  # one for all states together, or one for each, or none
    embed_norm: Tensor  # [H], of the token's row
    hidden_norm: Tensor  # [H], of the state
    attn: Attention  # whose qkv reads both, [(heads + 2K) * D, 2H]
    mlp_norm: Tensor
    mlp: Dense
    norm: Tensor
    lm_head: Weight  # [draft vocabulary, H]
    target_ids: Tensor | None  # int64, of the draft vocabulary's tokens; None: the same

    def combine(self, states: Tensor) -> Tensor:
        """What the layer is given of states [T, 3 * target's hidden]: [T, H]."""
        if self.fc_norms:
            parts = states.chunk(len(self.fc_norms), dim=-1)
            eps = self.config.rms_norm_eps
            pairs = zip(parts, self.fc_norms, strict=True)
            states = torch.cat([rms_norm(part, w, eps) for part, w in pairs], dim=-1)
        return linear(states, self.fc)

    def inputs(self, ops: Ops, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The residual [T, H] of attention, and its qkv, without bias.

        x [T, H] are states of a text, and ``tokens`` [T] those that follow each.
        """
        eps = self.config.rms_norm_eps
        embedded = functional.embedding(tokens, self.embed_tokens).to(x.dtype)
        _, embedded = ops.add_norm(embedded, None, self.embed_norm, eps)
        _, h = ops.add_norm(x, None, self.hidden_norm, eps)
        qkv = linear(torch.cat([embedded, h], dim=-1), self.attn.qkv)
        return h if self.config.norm_before_residual else x, qkv

    def outputs(self, ops: Ops, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Normed states [T, H], for `draft`, and those that the next drafts read.

        x [T, H], which is written over, is what attention adds ``out`` [T, heads, D]
        to.
        """
        eps, update = self.config.rms_norm_eps, out.flatten(1)
        update = linear(update, self.attn.o, self.attn.o_bias)
        x, h = ops.add_norm(x, update, self.mlp_norm, eps)
        x, normed = ops.add_norm(x, dense(h, self.mlp), self.norm, eps)
        return normed, normed if self.config.norm_output else x

    def draft(self, normed: Tensor) -> Tensor:
        """The likeliest token after each: normed [T, H] -> int64 [T]."""
        best = linear(normed, self.lm_head).argmax(-1)
        return best if self.target_ids is None else self.target_ids[best]


def with_taps(model: Model, taps: Mapping[int, Callable[[Tensor], object]]) -> Ops:
    """The model's operations, which give each tap what its layer gets: [T, hidden].

    The forward pass stays as it is: the norm that a layer begins with sees its input.
    """
    norms = {id(model.layers[index].attn_norm): tap for index, tap in taps.items()}
    plain = model.ops.add_norm

    def add_norm(
        residual: Tensor, update: Tensor | None, norm: Any, eps: float
    ) -> tuple[Tensor, Tensor]:
        x, h = plain(residual, update, norm, eps)
        if (tap := norms.get(id(norm))) is not None:
            tap(x)
        return x, h

    return replace(model.ops, add_norm=add_norm)


def build_head(
    config: HeadConfig,
    weights: Mapping[str, Tensor],
    model: Model,
    whole: Callable[[Weight], Any] = lambda weight: weight,
) -> Head:
    """The head of these tensors; an embedding or lm_head it lacks is the ``model``'s.

    Of these, a rank may have some rows only: ``whole`` gives all of them.
    """
    device, dtype = model.device, model.dtype

    def take(name: str) -> Tensor:
        exact = "norm" in name
        return weights[name].to(device, torch.float32 if exact else dtype)

    def joined(kind: str, *names: str) -> Tensor:
        return torch.cat([take(f"layer.{name}_proj.{kind}") for name in names])

    qkv = [f"self_attn.{name}" for name in "qkv"]
    norms = sorted(name for name in weights if name.startswith(("fc_norm", "input_n")))
    biased, positions = config.attention_bias, model.config.max_position_embeddings
    cos, sin = rotations(as_model(config, positions), device)
    shared = weights.get("d2t")
    if shared is not None:
        shared = shared.long().to(device)
        shared = shared + torch.arange(len(shared), device=device)

    def lent(name: str, rows: Weight) -> Any:
        return take(name) if name in weights else whole(rows)

    return Head(
        config,
        config.layers(model.config.num_hidden_layers),
        embed_tokens=lent("embed_tokens.weight", model.embed_tokens),
        fc=take("fc.weight"),
        fc_norms=[take(name) for name in norms],
        embed_norm=take("layer.input_layernorm.weight"),
        hidden_norm=take("layer.hidden_norm.weight"),
        attn=Attention(
            qkv=joined("weight", *qkv),
            qkv_bias=joined("bias", *qkv) if biased else None,
            o=take("layer.self_attn.o_proj.weight"),
            o_bias=take("layer.self_attn.o_proj.bias") if biased else None,
            sinks=None,
            q_norm=None,
            k_norm=None,
            cos=cos,
            sin=sin,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
        ),
        mlp_norm=take("layer.post_attention_layernorm.weight"),
        mlp=Dense(
            gate_up=joined("weight", "mlp.gate", "mlp.up"),
            gate_up_bias=None,
            down=take("layer.mlp.down_proj.weight"),
            down_bias=None,
        ),
        norm=take("norm.weight"),
        lm_head=lent("lm_head.weight", model.lm_head),
        target_ids=shared,
    )


def as_model(config: HeadConfig, positions: int) -> ModelConfig:
    """The head's layer as a model's, for what is known of models: how it rotates."""
    return ModelConfig(
        model_type="llama",
        names=(),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        num_local_experts=0,
        num_experts_per_tok=0,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        layer_types=("full_attention",),
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        max_position_embeddings=positions,
    )
