"""Qwen3: Qwen2.5 with norms of each head of q and k in place of the biases."""

from simplellm.families.decoder import BIASES, MAYBE, QK_NORMS, decoder
from simplellm.families.family import Family
from simplellm.families.qwen2 import QWEN, upper_windows

QWEN3 = Family(
    name="Qwen3",
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    names=decoder(*BIASES, *QK_NORMS),
    defaults=QWEN | {"head_dim": 128},
    fields=lambda data: {
        "activation": "swiglu",
        "attention_bias": bool(data.get("attention_bias")),
        **upper_windows(data),
    },
    fixed={
        "hidden_act": ("silu",),
        "attention_bias": MAYBE,
        "use_sliding_window": MAYBE,
    },
)
