"""Mixtral: Mistral with two experts of eight for each token."""

from simplellm.checkpoint.families.decoder import decoder
from simplellm.checkpoint.families.family import Family
from simplellm.checkpoint.families.mistral import MISTRAL_SIZES, same_windows
from simplellm.checkpoint.names import layer_name

EXPERT = "block_sparse_moe.experts.{e}"

MIXTRAL = Family(
    name="Mixtral",
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM",),
    names=decoder(
        mlp=(
            layer_name("router.weight", "E hidden", "block_sparse_moe.gate.weight"),
            layer_name(
                "experts.gate_up", "E 2I hidden", f"{EXPERT}.w{{1,3}}.weight", "2I"
            ),
            layer_name("experts.down", "E hidden I", f"{EXPERT}.w2.weight", "I"),
        )
    ),
    defaults=MISTRAL_SIZES
    | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    # The softmax over all experts, whose chosen weights are made to add up to 1, is
    # that over the chosen alone.
    fields=same_windows,
    fixed={"layer_types": (None,)},
)
