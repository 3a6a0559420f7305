"""Qwen2.5 and Qwen2: Llama with biases of q, k and v, and windows on demand."""

from typing import Any

from simplellm.base.config import MAX_SIZE, check_number
from simplellm.checkpoint.families.decoder import COMMON, QKV_BIAS, decoder
from simplellm.checkpoint.families.family import Data, Family


def upper_windows(data: Data) -> dict[str, Any]:
    """The window, and which layers have it: those from max_window_layers on."""
    if not data.get("use_sliding_window") or data["sliding_window"] is None:
        return {"sliding_window": None}
    first = data["max_window_layers"]
    check_number("max_window_layers", first, int, 0, MAX_SIZE)
    if data.get("layer_types"):
        return {}
    count = data["num_hidden_layers"]
    full = min(first, count)
    types = ("full_attention",) * full + ("sliding_attention",) * (count - full)
    return {"layer_types": types}


QWEN2 = Family(
    name="Qwen2.5",
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM",),
    names=decoder(*QKV_BIAS),
    defaults=COMMON
    | {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    fields=upper_windows,
    fixed={"use_sliding_window": (None, True, False), "use_mrope": (None, False)},
)
