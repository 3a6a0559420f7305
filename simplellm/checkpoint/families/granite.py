"""Granite 3: Llama, but four numbers multiply or divide what it computes.

What a layer adds is multiplied by residual_multiplier. Here everything before the next
norm is divided by it instead: the embedding, and the root of each norm's epsilon.
"""

from dataclasses import replace
from typing import Any

from simplellm.base.config import check_number
from simplellm.checkpoint.families.family import Data
from simplellm.checkpoint.families.llama import LLAMA

MULTIPLIERS = "embedding_multiplier", "residual_multiplier", "attention_multiplier"


def multiplied(data: Data) -> dict[str, Any]:
    """The multipliers as scales of our own."""
    for name in MULTIPLIERS:
        check_number(name, data[name], float, 0, 1e6, above=0)
    embedding, residual, attention = (data[name] for name in MULTIPLIERS)
    return {
        "embedding_scale": embedding / residual,
        "rms_norm_eps": data["rms_norm_eps"] / residual**2,
        "query_pre_attn_scalar": attention**-2,
        "sliding_window": None,
    }


GRANITE = replace(
    LLAMA,
    name="Granite",
    model_types=("granite",),
    architectures=("GraniteForCausalLM",),
    defaults=LLAMA.defaults | dict.fromkeys((*MULTIPLIERS, "logits_scaling"), 1.0),
    fields=multiplied,
    ignores=(),
)
