"""Llama 3, 3.1, 3.2 and 3.3: the decoder that others vary."""

from simplellm.checkpoint.families.decoder import BIASES, COMMON, MLP, decoder
from simplellm.checkpoint.families.family import Family
from simplellm.checkpoint.names import layer_name

MLP_BIASES = (
    layer_name(
        "mlp.gate_up.bias", "2F", "mlp.{gate,up}_proj.bias", "2F", needs="mlp_bias"
    ),
    layer_name("mlp.down.bias", "hidden", "mlp.down_proj.bias", needs="mlp_bias"),
)

LLAMA = Family(
    name="Llama 3",
    model_types=("llama",),
    architectures=("LlamaForCausalLM",),
    names=decoder(*BIASES, mlp=(*MLP, *MLP_BIASES)),
    defaults=COMMON
    | {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
    },
    fixed={"layer_types": (None,)},
    extra_keys=("attention_bias", "mlp_bias"),
    ignores=("sliding_window",),  # transformers' Llama has none
)
