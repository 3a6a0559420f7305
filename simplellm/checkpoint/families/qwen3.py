"""Qwen3: Qwen2.5 with norms of each head of q and k in place of the biases."""

from dataclasses import replace

from simplellm.checkpoint.families.decoder import BIASES, QK_NORMS, decoder
from simplellm.checkpoint.families.qwen2 import QWEN2

QWEN3 = replace(
    QWEN2,
    name="Qwen3",
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    names=decoder(*BIASES, *QK_NORMS),
    defaults=QWEN2.defaults | {"head_dim": 128},
    extra_keys=("attention_bias",),
)
