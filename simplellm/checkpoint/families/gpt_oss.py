"""gpt-oss, which the course is about. `checkpoint/names.py` has its table of names."""

from collections.abc import Mapping
from typing import Any

from simplellm.base.config import (
    HARMONY_EOS,
    LAYER_TYPES,
    MAX_SIZE,
    ConfigError,
    ModelConfig,
    RopeScaling,
    end_token_ids,
    expect,
    one_of,
    raising,
    read,
)
from simplellm.checkpoint.families.family import Family

GPT_OSS = Family(
    name="gpt-oss",
    model_types=("gpt_oss",),
    architectures=("GptOssForCausalLM",),
    names=(),
    defaults={},
)


@raising(ConfigError)
def read_gpt_oss(data: Mapping[str, Any]) -> ModelConfig:
    """Read gpt-oss's parsed config.json, Hugging Face's (old, new) or OpenAI's."""
    original = "num_experts" in data and "num_local_experts" not in data
    model_type = data.get("model_type", "gpt_oss" if original else None)
    one_of("model_type", model_type, GPT_OSS.model_types)
    method = data.get("quantization_config")
    if isinstance(method, dict):
        method = method.get("quant_method")
    one_of("quant_method", method, (None, "mxfp4"))
    one_of("attention_bias", data.get("attention_bias", True), (True,))
    one_of("hidden_act", data.get("hidden_act", "silu"), ("silu",))
    scaling, found = gpt_oss_rope(data, original)
    found = read(ModelConfig, {**data, **found})
    experts = found["num_local_experts"]
    expect(experts, "num_local_experts", experts, f"1 to {MAX_SIZE}")
    layer_types = data.get("layer_types")
    if layer_types is None:
        count = found["num_hidden_layers"]
        layer_types = [LAYER_TYPES[n % 2] for n in range(count)]
    ok = isinstance(layer_types, list)
    expect(ok, "layer_types", layer_types, "a list")
    eos = end_token_ids(data, found["vocab_size"])
    if original and not eos:  # its tokenizer knows
        eos = tuple(i for i in HARMONY_EOS if i < found["vocab_size"])
    return ModelConfig(
        **found,
        layer_types=tuple(layer_types),
        rope_scaling=scaling,
        eos_token_ids=eos,
    )


def gpt_oss_rope(
    data: Mapping[str, Any], original: bool
) -> tuple[RopeScaling | None, dict[str, Any]]:
    """The scaling, and the fields of the model that its spelling puts elsewhere."""
    if original:
        yarn = RopeScaling(**read(RopeScaling, {**data, "truncate": False}))
        context = int(yarn.original_max_position_embeddings * yarn.factor)
        return yarn, {"max_position_embeddings": context}
    entry: Any = data.get("rope_parameters") or data.get("rope_scaling")
    name = "rope_parameters (rope_scaling in older files)"
    expect(isinstance(entry, dict), name, entry, "an object with rope_type")
    theta = entry.get("rope_theta")
    return RopeScaling.from_dict(entry), {} if theta is None else {"rope_theta": theta}
