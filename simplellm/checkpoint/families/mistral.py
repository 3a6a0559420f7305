"""Mistral 7B: Llama, in the first release with a window.

Mistral Small 3.1 and later see images as well; of these the text part runs.
"""

from typing import Any

from simplellm.checkpoint.families.decoder import COMMON, decoder
from simplellm.checkpoint.families.family import TEXT_PART, Data, Family

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
    model_types=("mistral", "mistral3"),
    architectures=("MistralForCausalLM", "Mistral3ForConditionalGeneration"),
    names=decoder(),
    defaults=MISTRAL_SIZES | {"sliding_window": 4096},
    fields=same_windows,
    fixed={"layer_types": (None,)},
    ignores=(
        *("vision_config", "image_token_index", "image_token_id", "spatial_merge_size"),
        *("projector_hidden_act", "multimodal_projector_bias", "vision_feature_layer"),
    ),
    spellings=TEXT_PART,
)
