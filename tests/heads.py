"""EAGLE-3 heads for tests: written at random, and computed again in another way."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from simplellm.base.config import ModelConfig

EPS = 1e-5


def layers_of(model: ModelConfig) -> list[int]:
    """The layers that a head of `write_head` reads: all there is in a small model."""
    last = model.num_hidden_layers - 2
    return [0, last // 2, last]


def write_head(
    folder: Path, model: ModelConfig, seed: int = 0, **flags: Any
) -> dict[str, Tensor]:
    """Write a small random head for ``model``, with a draft vocabulary of half of it.

    ``flags`` are fields of its config. Returns its tensors.
    """
    hidden, heads, shared, dim, inner = model.hidden_size, 4, 2, 16, 48
    drafts = model.vocab_size // 2
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    sizes = {"q": heads * dim, "k": shared * dim, "v": shared * dim}
    tensors = {f"midlayer.self_attn.{n}_proj.weight": draw(s, 2 * hidden)
               for n, s in sizes.items()}  # fmt: skip
    tensors |= {
        "midlayer.self_attn.o_proj.weight": draw(hidden, heads * dim),
        "midlayer.mlp.gate_proj.weight": draw(inner, hidden),
        "midlayer.mlp.up_proj.weight": draw(inner, hidden),
        "midlayer.mlp.down_proj.weight": draw(hidden, inner),
        "midlayer.input_layernorm.weight": norm(hidden),
        "midlayer.hidden_norm.weight": norm(hidden),
        "midlayer.post_attention_layernorm.weight": norm(hidden),
        "norm.weight": norm(hidden),
        "fc.weight": draw(hidden, 3 * hidden),
        "lm_head.weight": draw(drafts, hidden),
        # Every second token: target = draft + d2t.
        "d2t": torch.arange(drafts),
        "t2d": torch.arange(model.vocab_size) % 2 == 0,
    }
    if flags.get("attention_bias"):
        for name, size in (sizes | {"o": hidden}).items():
            tensors[f"midlayer.self_attn.{name}_proj.bias"] = draw(size)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(3 * hidden)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{n}.weight": norm(hidden) for n in range(3)}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": drafts,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers_of(model)},
        **flags,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def drafted(
    tensors: dict[str, Tensor],
    flags: dict[str, Any],
    embeddings: Tensor,
    states: Tensor,
    tokens: list[int],
    count: int,
) -> list[int]:
    """The drafts after ``tokens``, of states [len(tokens) - 1, 3 * hidden].

    Without a cache: the whole text is computed again for every draft.
    """
    hidden = embeddings.shape[1]

    def norm(x: Tensor, name: str) -> Tensor:
        weight = tensors[f"{name}.weight"]
        return functional.rms_norm(x, weight.shape, weight, EPS)

    def project(x: Tensor, name: str) -> Tensor:
        bias = tensors.get(f"midlayer.{name}_proj.bias")
        return functional.linear(x, tensors[f"midlayer.{name}_proj.weight"], bias)

    def turned(x: Tensor) -> Tensor:
        """x [heads, T, D] as complex numbers, each pair turned by its own angle."""
        pairs = torch.complex(*x.chunk(2, dim=-1))
        size = x.shape[-1]
        speeds = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(x.shape[1])[:, None] * speeds
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], dim=-1)

    if flags.get("norm_before_fc"):
        states = norm(states, "input_norm")
    if flags.get("fc_norm"):
        parts = states.split(hidden, dim=-1)
        states = torch.cat([norm(p, f"fc_norm.{n}") for n, p in enumerate(parts)], -1)
    inputs, found = states @ tensors["fc.weight"].T, list[int]()
    while True:
        ids = torch.tensor([*tokens, *found][1:])
        h = norm(inputs, "midlayer.hidden_norm")
        x = h if flags.get("norm_before_residual") else inputs
        embedded = norm(embeddings[ids], "midlayer.input_layernorm")
        both = torch.cat([embedded, h], dim=-1)
        q, k, v = (
            project(both, f"self_attn.{n}").unflatten(-1, (-1, 16)).transpose(0, 1)
            for n in "qkv"
        )
        k, v = (part.repeat_interleave(2, dim=0) for part in (turned(k), v))
        out = functional.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
        x = x + project(out.transpose(0, 1).flatten(1), "self_attn.o")
        h = norm(x, "midlayer.post_attention_layernorm")
        gate = functional.silu(project(h, "mlp.gate"))
        x = x + project(gate * project(h, "mlp.up"), "mlp.down")
        normed = norm(x, "norm")
        best = int((normed[-1] @ tensors["lm_head.weight"].T).argmax())
        found.append(best + int(tensors["d2t"][best]))
        if len(found) == count:
            return found
        fed = normed if flags.get("norm_output") else x
        inputs = torch.cat([inputs, fed[-1:]])
