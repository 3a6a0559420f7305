"""From weights by their names to a model: which of them its layers are made of."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from simplellm.base.config import LAYER_TYPES, ModelConfig
from simplellm.checkpoint.mxfp4 import Weight
from simplellm.checkpoint.names import is_expert_weight, tensor_names
from simplellm.checkpoint.scaled import Scaled
from simplellm.model.layers import (
    Attention,
    Dense,
    Experts,
    Layer,
    LayerNorm,
    Norm,
    SandwichNorm,
)
from simplellm.model.model import Model
from simplellm.model.ops import Ops
from simplellm.model.rope_cache import rotations, score_scale

# Gives a weight by its name, on the right device: a Tensor, or what is packed. Below
# `build` it gives None for one that the model does not have.
Take = Callable[[str], Any]

LOGGER = logging.getLogger("simplellm")


def noting_ends(take: Take, ends: dict[str, Tensor]) -> Take:
    """``take``, which notes the smallest and the largest number of each weight.

    Or of its scales; their sum is finite if all numbers are. Experts on a CPU are left
    out: they may be on a file that nobody has read yet.
    """

    def take_noted(name: str) -> Any:
        weight = take(name)
        numbers: Any = getattr(weight, "scales", weight)
        ours = isinstance(numbers, Tensor) and numbers.is_floating_point()
        if ours and (numbers.is_cuda or not is_expert_weight(name)):
            # A sum of all takes 20 times as long in float16 on a CPU.
            low, high = numbers.aminmax()
            ends[name] = low.float() + high.float()
        return weight

    return take_noted


def warn_of_nan(ends: Mapping[str, Tensor]) -> None:
    """Log which weights have NaN or infinity in them, by their ``ends``, if any."""
    finite = torch.stack([*ends.values()]).isfinite().tolist()
    broken = [name for name, ok in zip(ends, finite, strict=True) if not ok]
    if broken:
        text = "NaN or infinity in %d of the weights, first in %s: the checkpoint may "
        text += "be damaged, and what the model writes mean nothing"
        LOGGER.warning(text, len(broken), broken[0])


def take_norm(take: Take, name: str, post: Any = None) -> Norm:
    """A norm, as far as its family has the parts; ``post`` is for the update before."""
    weight, bias = take(f"{name}.weight"), take(f"{name}.bias")
    if bias is not None:
        return LayerNorm(weight, bias)
    return weight if post is None else SandwichNorm(post, weight)


def plain_norm(weight: Tensor, name: str, config: ModelConfig) -> Tensor:
    """The float32 weight of a norm as the operations want it, whatever the family's.

    It may be stored less 1. And where scores aren't divided by the root of head_dim,
    the norm of q makes up for it: all that follows up to the scores is linear. So does
    the last norm for logits that are divided by a number.
    """
    if not name.endswith(".weight"):
        return weight
    factor = 1 / config.logits_scaling if name == "norm.weight" else 1.0
    if name.endswith("q_norm.weight"):
        factor = score_scale(config)
    return (weight + config.norm_offset) * factor


def embed_transform(
    config: ModelConfig, dtype: torch.dtype, table: Tensor | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """What turns embedded tokens into the input of the first layer, in ``dtype``.

    ``table`` [positions, hidden] are learned positions, which are added. A scale is
    rounded to ``dtype`` first, as transformers does.
    """
    if table is not None:
        return lambda x, positions: x.to(dtype) + table[positions]
    scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
    return lambda x, positions: x.to(dtype) if scale == 1 else x.to(dtype) * scale


def take_mlp(take: Take, config: ModelConfig) -> Experts | Dense:
    """The feed-forward part of a layer: experts, if it has a router."""
    router = take("router.weight")
    if router is None:
        return Dense(
            gate_up=take("mlp.gate_up.weight"),
            gate_up_bias=take("mlp.gate_up.bias"),
            down=take("mlp.down.weight"),
            down_bias=take("mlp.down.bias"),
            activation=config.activation,
        )
    return Experts(
        router=router,
        router_bias=take("router.bias"),
        gate_up=take("experts.gate_up"),
        gate_up_bias=take("experts.gate_up_bias"),
        down=take("experts.down"),
        down_bias=take("experts.down_bias"),
        top_k=config.num_experts_per_tok,
        limit=config.swiglu_limit,
        alpha=config.swiglu_alpha,
        activation=config.activation,
        normalized=config.norm_topk_prob,
        first=config.held_experts.start if config.held_experts else 0,
    )


def layer_rotations(
    config: ModelConfig, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """cos and sin for each layer, float32 [positions, D/2]; equal ones are shared."""
    tables: dict[Any, Any] = dict.fromkeys(LAYER_TYPES, rotations(config, device))
    if config.local_rope_theta is not None:
        local = replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
        tables["sliding_attention"] = rotations(local, device)
    if config.nope_layers:  # turn by no angle
        cos, sin = tables["full_attention"]
        tables[None] = torch.ones_like(cos), torch.zeros_like(sin)
    kinds = enumerate(config.layer_types)
    return [tables[None if n in config.nope_layers else kind] for n, kind in kinds]


def scaled_output(weight: Weight, scale: float) -> tuple[Weight, float]:
    """The output projection with ``scale`` multiplied into it, and ``scale``.

    One whose format has no room for that comes back as it is, with 1.
    """
    if scale == 1 or not isinstance(weight, Tensor | Scaled):
        return weight, 1.0
    if isinstance(weight, Scaled):
        return replace(weight, scales=weight.scales * scale), scale
    return (weight.float() * scale).to(weight.dtype), scale


def build(
    config: ModelConfig,
    take: Take,
    ops: Ops,
    scales: Sequence[tuple[float, float]] | None = None,
    dtype: torch.dtype | None = None,
) -> Model:
    """A model of the weights that ``take`` delivers, as ``ops`` wants them.

    ``scales`` of keys and values, of each layer, are for a cache of FP8 numbers. It
    computes in ``dtype``, by default the embedding's.
    """
    names, ends = tensor_names(config), dict[str, Tensor]()
    take = noting_ends(take, ends)

    def optional(name: str) -> Any:
        return take(name) if name in names else None

    embed_tokens = take("embed_tokens.weight")
    dtype = dtype or embed_tokens.dtype
    positions = optional("embed_positions.weight")
    post, layers = None, []
    for index, (cos, sin) in enumerate(layer_rotations(config, embed_tokens.device)):

        def part(name: str, layer: str = f"layers.{index}") -> Any:
            return optional(f"{layer}.{name}")

        attn_norm = take_norm(part, "attn_norm", post)
        full = config.window(index) is None
        k_scale, v_scale = scales[index] if scales and full else (1.0, 1.0)
        o, v_scale = scaled_output(part("attn.o.weight"), v_scale)
        attn = Attention(
            qkv=part("attn.qkv.weight"),
            qkv_bias=part("attn.qkv.bias"),
            o=o,
            o_bias=part("attn.o.bias"),
            sinks=part("attn.sinks"),
            q_norm=part("attn.q_norm.weight"),
            k_norm=part("attn.k_norm.weight"),
            cos=cos,
            sin=sin,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            dtype=dtype,
            kv_scales=(k_scale, v_scale),
        )
        mlp_norm = take_norm(part, "mlp_norm", part("attn_post_norm.weight"))
        layer = Layer(attn_norm, attn, mlp_norm, take_mlp(part, config))
        layers.append(ops.prepare(layer))
        post = part("mlp_post_norm.weight")
    tied = config.tie_word_embeddings and "lm_head.weight" not in config.formats
    model = Model(
        config,
        ops,
        embed_tokens=embed_tokens,
        layers=layers,
        norm=take_norm(optional, "norm", post),
        lm_head=embed_tokens if tied else take("lm_head.weight"),
        embed_transform=embed_transform(config, dtype, positions),
    )
    model.dtype = dtype  # the embedding may be stored in fewer bits
    warn_of_nan(ends)
    return model
