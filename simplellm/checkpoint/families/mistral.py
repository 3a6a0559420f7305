"""Mistral 7B: Llama, in the first release with a window."""

from typing import Any

from simplellm.checkpoint.families.decoder import COMMON, decoder
from simplellm.checkpoint.families.family import Data, Family

MISTRAL_SIZES: Data = COMMON | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


def same_windows(data: Data) -> dict[str, Any]:
    """All layers have the window, if there is one."""
    if data["sliding_window"] is None:
        return {}
    return {"layer_types": ("sliding_attention",) * data["num_hidden_layers"]}


MISTRAL = Family(
    name="Mistral",
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    names=decoder(),
    defaults=MISTRAL_SIZES | {"sliding_window": 4096},
    fields=same_windows,
    fixed={"layer_types": (None,)},
)
