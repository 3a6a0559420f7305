"""gpt-oss, which the course is about. `checkpoint/names.py` has its table of names."""

from dataclasses import replace
from typing import Any

from simplellm.base.config import LAYER_TYPES, MAX_SIZE, ModelConfig, check_number
from simplellm.checkpoint.families.family import Data, Family
from simplellm.checkpoint.formats import formats, read_mxfp4
from simplellm.checkpoint.names import NAMES

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def alternating(data: Data) -> dict[str, Any]:
    """Every other layer has the window, beginning with the first."""
    check_number("num_local_experts", data["num_local_experts"], int, 1, MAX_SIZE)
    count, biases = data["num_hidden_layers"], {"mlp_bias": True}
    if data.get("layer_types"):
        return biases
    return biases | {"layer_types": tuple(LAYER_TYPES[n % 2] for n in range(count))}


GPT_OSS = Family(
    name="gpt-oss",
    model_types=("gpt_oss",),
    architectures=("GptOssForCausalLM",),
    names=NAMES,
    defaults={
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "rope_theta": 150_000.0,
        "rope_scaling": YARN,
        "max_position_embeddings": 131_072,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    activation="clamped_swiglu",
    fields=alternating,
    fixed={"attention_bias": (True,)},
    extra_keys=("swiglu_limit", "swiglu_alpha"),
    # The same as other fields say.
    ignores=("experts_per_token", "initial_context_length"),
)


def published(config: ModelConfig) -> ModelConfig:
    """A gpt-oss as OpenAI publishes it: the experts in MXFP4, the rest as trained."""
    return replace(config, formats=formats(config, read_mxfp4({})))


ENDS = 200002, 199999, 200012  # <|return|>, <|endoftext|>, <|call|>
LARGE = {"model_type": "gpt_oss", "eos_token_id": [*ENDS]}
SMALL = {"num_hidden_layers": 24, "num_local_experts": 32}
GPT_OSS_120B = published(GPT_OSS.config(LARGE))
GPT_OSS_20B = published(GPT_OSS.config(LARGE | SMALL))
MODELS = {"gpt-oss-20b": GPT_OSS_20B, "gpt-oss-120b": GPT_OSS_120B}
