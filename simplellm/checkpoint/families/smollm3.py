"""SmolLM3: Llama, but every fourth layer does not rotate q and k."""

from dataclasses import replace
from typing import Any

from simplellm.base.config import MAX_SIZE, as_ids, check_number, expect
from simplellm.checkpoint.families.family import Data
from simplellm.checkpoint.families.llama import LLAMA


def without_rope(data: Data) -> dict[str, Any]:
    """``no_rope_layers`` has a 0 for a layer that does not rotate, and 1 for others."""
    count, every = data["num_hidden_layers"], data["no_rope_layer_interval"]
    check_number("no_rope_layer_interval", every, int, 1, MAX_SIZE)
    rotates = as_ids("no_rope_layers", data.get("no_rope_layers"))
    if data.get("no_rope_layers") is None:
        rotates = tuple((n + 1) % every for n in range(count))
    expected = f"0 or 1 for each of the {count} layers"
    expect(len(rotates) == count, "no_rope_layers", rotates, expected)
    still = tuple(n for n, turns in enumerate(rotates) if not turns)
    return {"nope_layers": still, "sliding_window": None}


SMOLLM3 = replace(
    LLAMA,
    name="SmolLM3",
    model_types=("smollm3",),
    architectures=("SmolLM3ForCausalLM",),
    defaults=LLAMA.defaults
    | {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
    },
    fields=without_rope,
    fixed={},
    extra_keys=(*LLAMA.extra_keys, "no_rope_layers"),
    ignores=("max_window_layers",),
)
