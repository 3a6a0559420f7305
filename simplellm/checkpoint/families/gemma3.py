"""Gemma 3: norms around each part, five local layers to one that sees everything.

The text part of the models that see images is the same; images are not read.
"""

from typing import Any

from simplellm.base.config import MAX_SIZE, check_number, expect, one_of
from simplellm.checkpoint.families.decoder import MLP, QK_NORMS, decoder
from simplellm.checkpoint.families.family import TEXT_PART, Data, Family
from simplellm.checkpoint.names import layer_name


def local_theta(data: Data) -> Any:
    """The base of the local layers' rotations, which are never stretched."""
    entry = data.get("rope_parameters") or {}
    local = entry.get("sliding_attention", {})
    expect(isinstance(local, dict), "sliding_attention", local, "an object")
    kinds = (None, "default")
    one_of("rope_type of sliding_attention", local.get("rope_type"), kinds)
    return local.get("rope_theta", data["local_rope_theta"])


def gemma_fields(data: Data) -> dict[str, Any]:
    """(1 + w) in every norm, the root of hidden_size, and which layers are local."""
    spelled = "sliding_window_pattern", "_sliding_window_pattern"
    pattern = next((data[name] for name in spelled if data.get(name)), 6)
    check_number("sliding_window_pattern", pattern, int, 1, MAX_SIZE)
    kinds = tuple(
        "sliding_attention" if (n + 1) % pattern else "full_attention"
        for n in range(data["num_hidden_layers"])
    )
    return {
        "norm_offset": 1.0,
        "embedding_scale": data["hidden_size"] ** 0.5,
        "local_rope_theta": local_theta(data),
        **({} if data.get("layer_types") else {"layer_types": kinds}),
    }


GEMMA3 = Family(
    name="Gemma 3",
    model_types=("gemma3_text", "gemma3"),
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    names=decoder(
        *QK_NORMS,
        layer_name(
            "attn_post_norm.weight", "hidden", "post_attention_layernorm.weight"
        ),
        mlp_norm="pre_feedforward_layernorm.weight",
        mlp=(
            *MLP,
            layer_name(
                "mlp_post_norm.weight", "hidden", "post_feedforward_layernorm.weight"
            ),
        ),
    ),
    keys={"rope_local_base_freq": "local_rope_theta"},
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1e6,
        "local_rope_theta": 1e4,
    },
    activation="geglu",
    stretched=True,
    fields=gemma_fields,
    fixed={"hidden_activation": ("gelu_pytorch_tanh",)},
    extra_keys=("sliding_window_pattern", "_sliding_window_pattern"),
    ignores=(
        *("vision_config", "mm_tokens_per_image", "image_token_index"),
        *("image_token_id", "boi_token_index", "boi_token_id"),
        *("eoi_token_index", "eoi_token_id"),
    ),
    spellings=TEXT_PART,
)
