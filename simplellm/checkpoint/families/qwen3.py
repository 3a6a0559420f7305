"""Qwen3: Qwen2.5 with norms of each head of q and k in place of the biases."""

from simplellm.checkpoint.families.decoder import BIASES, QK_NORMS, decoder
from simplellm.checkpoint.families.family import Family
from simplellm.checkpoint.families.qwen2 import QWEN, QWEN2, upper_windows

QWEN3 = Family(
    name="Qwen3",
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    names=decoder(*BIASES, *QK_NORMS),
    defaults=QWEN | {"head_dim": 128},
    fields=upper_windows,
    fixed=QWEN2.fixed,
    extra_keys=("attention_bias",),
)
