"""Qwen3-MoE: Qwen3 with experts in all layers, or in most."""

from typing import Any

from simplellm.base.config import MAX_SIZE, as_ids, check_kind, check_number
from simplellm.checkpoint.families.decoder import BIASES, MLP, QK_NORMS, decoder
from simplellm.checkpoint.families.family import Data, Family
from simplellm.checkpoint.families.qwen2 import QWEN2
from simplellm.checkpoint.names import layer_name

EXPERTS = (
    layer_name("router.weight", "E hidden", "mlp.gate.weight"),
    layer_name(
        "experts.gate_up", "E 2I hidden", "mlp.experts.{e}.{gate,up}_proj.weight", "2I"
    ),
    layer_name("experts.down", "E hidden I", "mlp.experts.{e}.down_proj.weight", "I"),
)


def moe_fields(data: Data) -> dict[str, Any]:
    """Which layers have experts; a layer without has a network of its own size."""
    step, normed = data["decoder_sparse_step"], data["norm_topk_prob"]
    check_number("decoder_sparse_step", step, int, 1, MAX_SIZE)
    check_kind("norm_topk_prob", normed, bool)
    without = as_ids("mlp_only_layers", data.get("mlp_only_layers"))
    return {
        "norm_topk_prob": normed,
        "dense_layers": tuple(
            n
            for n in range(data["num_hidden_layers"])
            if n in without or (n + 1) % step
        ),
    }


QWEN3_MOE = Family(
    name="Qwen3-MoE",
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    names=decoder(*BIASES, *QK_NORMS, mlp=(*EXPERTS, *MLP)),
    keys={
        "num_experts": "num_local_experts",
        "intermediate_size": "dense_intermediate_size",
        "moe_intermediate_size": "intermediate_size",
    },
    defaults={
        **QWEN2.defaults,
        "hidden_size": 2048,
        "intermediate_size": 768,
        "dense_intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    fields=moe_fields,
    fixed={
        "use_sliding_window": (None, False),
        "use_qk_norm": (None, True),
        "qkv_bias": (None, False),
        "shared_expert_intermediate_size": (None, 0),
    },
    extra_keys=("attention_bias", "num_local_experts", "mlp_only_layers"),
)
