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

from simplellm.base.config import ModelConfig
from simplellm.checkpoint.eagle import HeadConfig
from simplellm.checkpoint.mxfp4 import Weight
from simplellm.model.attention import attention
from simplellm.model.feed_forward import dense, linear
from simplellm.model.layers import Dense
from simplellm.model.model import Model
from simplellm.model.ops import Ops, rms_norm
from simplellm.model.rope import rotate
from simplellm.model.rotations import rotations

FIRST_ROOM = 256  # positions that a new cache has room for


class HeadCache:
    """The head's keys and values of one text, [S, K, D] each.

    A row is for the position after it: what is known of a text but its last token.
    """

    def __init__(self, config: HeadConfig, like: Tensor) -> None:
        shape = 2, FIRST_ROOM, config.num_key_value_heads, config.head_dim
        self.memory = like.new_empty(shape)
        self.size = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of more tokens; all that there are."""
        first, self.size = self.size, self.size + len(keys)
        room = self.memory.shape[1]
        if self.size > room:
            shape = [2, max(2 * room, self.size), *self.memory.shape[2:]]
            old, self.memory = self.memory, self.memory.new_empty(shape)
            self.memory[:, :first] = old[:, :first]
        self.memory[0, first : self.size] = keys
        self.memory[1, first : self.size] = values
        return self.memory[0, : self.size], self.memory[1, : self.size]


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
    qkv: Tensor  # [(heads + 2K) * D, 2H]
    qkv_bias: Tensor | None
    o: Tensor  # [H, heads * D]
    o_bias: Tensor | None
    mlp_norm: Tensor
    mlp: Dense
    norm: Tensor
    lm_head: Weight  # [draft vocabulary, H]
    target_ids: Tensor | None  # int64, of the draft vocabulary's tokens; None: the same
    cos: Tensor
    sin: Tensor

    def combine(self, states: Tensor) -> Tensor:
        """What the layer is given of states [T, 3 * target's hidden]: [T, H]."""
        if self.fc_norms:
            parts = states.chunk(len(self.fc_norms), dim=-1)
            eps = self.config.rms_norm_eps
            pairs = zip(parts, self.fc_norms, strict=True)
            states = torch.cat([rms_norm(part, w, eps) for part, w in pairs], dim=-1)
        return linear(states, self.fc)

    def forward(
        self, x: Tensor, tokens: Tensor, position: int, cache: HeadCache
    ) -> tuple[Tensor, Tensor]:
        """Normed states [T, H], for `draft`, and those that the next drafts read.

        x [T, H] are states of a text from ``position`` on, and ``tokens`` int64 [T]
        those that follow each. ``cache`` has the keys and values before them.
        """
        config, eps = self.config, self.config.rms_norm_eps
        embedded = rms_norm(self.embed_tokens[tokens], self.embed_norm, eps)
        h = rms_norm(x, self.hidden_norm, eps)
        x = h if config.norm_before_residual else x
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        qkv = linear(torch.cat([embedded, h], dim=-1), self.qkv, self.qkv_bias)
        parts = qkv.unflatten(-1, (-1, config.head_dim))
        q, k, v = parts.split([heads, shared, shared], dim=1)
        where = slice(position, position + len(x))
        cos, sin = self.cos[where], self.sin[where]
        keys, values = cache.append(rotate(k, cos, sin), v)
        out = attention(rotate(q, cos, sin), keys, values, None)
        x = x + linear(out.flatten(1), self.o, self.o_bias)
        x = x + dense(rms_norm(x, self.mlp_norm, eps), self.mlp)
        normed = rms_norm(x, self.norm, eps)
        return normed, normed if config.norm_output else x

    def draft(self, normed: Tensor) -> Tensor:
        """The likeliest token after each: normed [T, H] -> int64 [T]."""
        best = linear(normed, self.lm_head).argmax(-1)
        return best if self.target_ids is None else self.target_ids[best]


def tapped(model: Model, taps: Mapping[int, Callable[[Tensor], object]]) -> Ops:
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


def build_head(config: HeadConfig, weights: Mapping[str, Tensor], model: Model) -> Head:
    """The head of these tensors, with what ``model`` lends it."""
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
    embedded = "embed_tokens.weight" in weights
    return Head(
        config,
        config.layers(model.config.num_hidden_layers),
        embed_tokens=take("embed_tokens.weight") if embedded else model.embed_tokens,
        fc=take("fc.weight"),
        fc_norms=[take(name) for name in norms],
        embed_norm=take("layer.input_layernorm.weight"),
        hidden_norm=take("layer.hidden_norm.weight"),
        qkv=joined("weight", *qkv),
        qkv_bias=joined("bias", *qkv) if biased else None,
        o=take("layer.self_attn.o_proj.weight"),
        o_bias=take("layer.self_attn.o_proj.bias") if biased else None,
        mlp_norm=take("layer.post_attention_layernorm.weight"),
        mlp=Dense(
            gate_up=joined("weight", "mlp.gate", "mlp.up"),
            gate_up_bias=None,
            down=take("layer.mlp.down_proj.weight"),
            down_bias=None,
        ),
        norm=take("norm.weight"),
        lm_head=take("lm_head.weight")
        if "lm_head.weight" in weights
        else model.lm_head,
        target_ids=shared,
        cos=cos,
        sin=sin,
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
