"""From a GGUF file's metadata to the config.json that the same model has on the hub.

The families then read that, as they read any other. What a field says of how something
is computed is translated or refused by name, never skipped.
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from simplellm.base.config import (
    MAX_SIZE,
    ConfigError,
    ModelConfig,
    check_number,
    expect,
    one_of,
    reraise_as,
)
from simplellm.checkpoint.families import FAMILIES, family_config
from simplellm.checkpoint.formats import MXFP4_EXPERTS, NumberFormat, is_matrix
from simplellm.checkpoint.gguf.container import Container
from simplellm.checkpoint.gguf.names import stored_as
from simplellm.checkpoint.names import is_expert_weight, tensor_names

# What llama.cpp calls an architecture, and the model_type that computes the same.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
    "smollm3": "smollm3",
    "granite": "granite",
    "gpt2": "gpt2",
}
# A field behind "llama." or another architecture, and its name in config.json.
FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
}
SCALES = {  # of Granite
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
# Values that change nothing; whatever else a file says there is refused.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.layer_norm_epsilon": (1e-5, 1e-6),  # beside that of RMSNorms
    "attention.scale": (0.0,),
    "attention.shared_kv_layers": (0,),
    "embedding_scale": (0.0, 1.0),
    "expert_gating_func": (1,),  # a softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "moe_every_n_layers": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
}
# Read below, or without any meaning for what is computed: of YaRN, llama.cpp reads
# yarn_attn_factor, ext_factor and log_multiplier in other architectures only.
KNOWN = {
    *FIELDS,
    *NEUTRAL,
    "attention.sliding_window_pattern",
    "attention.value_length",
    "expert_feed_forward_length",
    "expert_weights_norm",
    "rope.dimension_count",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
    "tensor_data_layout",
    "vocab_size",
}
ROPE_FACTORS = "rope_freqs.weight"
# Gemma 3 has one full layer of six; the largest one's scores are scaled by another
# number, and no field says so: llama.cpp knows it by its 62 layers.
GEMMA_PATTERN, GEMMA_LARGEST = 6, 62

# Types that keep their bits, as weights of layers: products on a CPU read them as they
# are. On a GPU, kernels have no scales for so few columns as Q8_0's.
KEPT = {
    "Q8_0": NumberFormat("Q8_0", ("", "_scale"), "int8", (1, 32), inputs=False),
    "MXFP4": MXFP4_EXPERTS,
}
KEPT_ON_GPU = {"MXFP4": KEPT["MXFP4"]}


def read_gguf_config(
    container: Container, kept: Mapping[str, NumberFormat] = KEPT
) -> ModelConfig:
    """The config of a GGUF file, of which some types are ``kept``.

    Raises ConfigError, which names it.
    """
    data = config_data(container)
    with reraise_as(ConfigError, container.path):
        config = family_config(data)
        # llama.cpp's norms have what the family adds to their weights, added.
        config = replace(config, norm_offset=0.0)
        scaling = config.rope_scaling
        if scaling and scaling.rope_type == "linear":  # its factor is in that length
            name = "max_position_embeddings"
            config = replace(config, **{name: data.get(name, getattr(config, name))})
        return replace(config, formats=formats_of(config, container, kept))


def formats_of(
    config: ModelConfig, container: Container, kept: Mapping[str, NumberFormat]
) -> dict[str, NumberFormat]:
    """Formats of the weights that aren't made ordinary numbers, by our names."""
    formats = {}
    for ours, name in tensor_names(config).items():
        types = types_of(ours, config, container)
        form = kept.get(types.pop()) if len(types) == 1 else None
        experts = is_expert_weight(ours) and form is MXFP4_EXPERTS
        if form and ours.startswith("layers.") and (is_matrix(name) or experts):
            formats[ours] = form
    return formats


def types_of(ours: str, config: ModelConfig, container: Container) -> set[str]:
    """The types of a weight's tensors; none if there is none."""
    stored = stored_as(ours, config.model_type)
    return {container.tensors[n].dtype for n in stored if n in container.tensors}


def config_data(container: Container) -> dict[str, Any]:
    """The config.json of a model. Raises ConfigError, which names file and field."""
    metadata = container.metadata
    with reraise_as(ConfigError, container.path):
        arch: Any = metadata.get("general.architecture")
        one_of("general.architecture", arch, tuple(MODEL_TYPES))
        fields = fields_of(arch, metadata)
        data = {ours: fields[key] for key, ours in FIELDS.items() if fields.get(key)}
        data |= {"model_type": model_type_of(arch, fields)}
        data |= sizes_of(arch, fields, container)
        data |= biases_of(data["model_type"], container)
        scaling = rope_scaling(arch, fields, container)
        data |= {"rope_scaling": scaling} if scaling else {}
        if more := OF_FAMILY.get(data["model_type"]):
            data |= more(fields)
        return data


def fields_of(arch: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an architecture, without its name in front.

    A list of one number for each layer is that number. Raises ValueError for what is
    not known here.
    """
    fields = {}
    for key, value in metadata.items():
        prefix, _, name = key.partition(".")
        if prefix != arch:
            continue
        expect(name in KNOWN, key, value, "no such field: nobody here knows it")
        if isinstance(value, list) and name != "attention.sliding_window_pattern":
            same = len({*value}) == 1
            expect(same, key, value, "the same number for all layers")
            value = value[0]
        if name in NEUTRAL and not (arch == "granite" and name in SCALES):
            one_of(key, value, NEUTRAL[name])
        fields[name] = value
    return fields


def model_type_of(arch: str, fields: Mapping[str, Any]) -> str:
    """The model_type; Mistral and Mixtral are "llama" in these files."""
    if arch == "llama" and fields.get("expert_count"):
        return "mixtral"
    if arch == "llama" and fields.get("attention.sliding_window"):
        return "mistral"
    return MODEL_TYPES[arch]


def sizes_of(
    arch: str, fields: Mapping[str, Any], container: Container
) -> dict[str, Any]:
    """Sizes in config.json's names, from metadata and tensors. Raises ValueError."""
    tensors = container.tensors
    expect("token_embd.weight" in tensors, "token_embd.weight", None, "the embedding")
    names = "embedding_length", "attention.head_count"
    for name in names:
        check_number(f"{arch}.{name}", fields.get(name), int, 1, MAX_SIZE)
    hidden, heads = (fields[name] for name in names)
    head_dim = fields.get("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        said = fields.get(name, head_dim)
        expect(said == head_dim, f"{arch}.{name}", said, f"{head_dim}, all of a head")
    return {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "head_dim": head_dim,
        "tie_word_embeddings": "output.weight" not in tensors,
        "sliding_window": fields.get("attention.sliding_window"),
    }


def biases_of(model_type: str, container: Container) -> dict[str, Any]:
    """Which biases there are, in config.json's names, in families that say so."""
    names = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
    said = names.keys() & FAMILIES[model_type].extra_keys
    return {name: True for name in said if names[name] in container.tensors}


def rope_scaling(
    arch: str, fields: Mapping[str, Any], container: Container
) -> dict[str, Any]:
    """How RoPE is stretched, as config.json says it; {} where it is not."""
    kind = fields.get("rope.scaling.type", "none")
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear", 1.0))
    if "rope.scaling.type" not in fields and factor != 1.0:
        kind = "linear"
    one_of(f"{arch}.rope.scaling.type", kind, ("none", "linear", "yarn"))
    attention = fields.get("rope.scaling.attn_factor") or 1.0  # of cos and sin
    if factors := rope_factors(container):  # Llama 3.1's, applied as LongRoPE's are
        expect(kind == "none", f"{arch}.rope.scaling.type", kind, "none beside factors")
        lists = dict.fromkeys(("short_factor", "long_factor"), factors)
        whole = {"rope_type": "longrope", "factor": 1.0, "attention_factor": attention}
        return {**whole, **lists}
    if kind == "yarn" and (attention != 1.0 or factor not in (0.0, 1.0)):
        return {**yarn(fields), "factor": factor or 1.0}
    name = f"{arch}.rope.scaling.attn_factor"
    expect(attention == 1.0, name, attention, "1.0 where RoPE is not YaRN's")
    if kind == "none" or factor in (0.0, 1.0):
        return {}
    return {"rope_type": "linear", "factor": factor}


def yarn(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rope_scaling of YaRN, from the fields of the same meaning."""
    length = fields.get("rope.scaling.original_context_length")
    return {
        "rope_type": "yarn",
        "factor": fields.get("rope.scaling.factor"),
        "attn_factor": fields.get("rope.scaling.attn_factor"),
        "original_max_position_embeddings": length or fields.get("context_length"),
        "beta_fast": fields.get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.get("rope.scaling.yarn_beta_slow", 1.0),
    }


def rope_factors(container: Container) -> list[float]:
    """What each frequency is divided by; [] where the file has no such tensor."""
    tensor = container.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return []
    expect(tensor.dtype == "F32", f"the type of {ROPE_FACTORS}", tensor.dtype, "F32")
    count = math.prod(tensor.shape)
    data = container.data[tensor.file]
    return [*struct.unpack_from(f"<{count}f", data, tensor.offset)]


def gemma(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp knows of Gemma 3, and what newer files say."""
    pattern = fields.get("attention.sliding_window_pattern", GEMMA_PATTERN)
    if isinstance(pattern, list):  # true for a layer with a window
        kinds = "full_attention", "sliding_attention"
        layout = {"layer_types": [kinds[bool(local)] for local in pattern]}
    else:
        layout = {"sliding_window_pattern": pattern}
    largest = fields["block_count"] == GEMMA_LARGEST
    head_dim = fields.get("attention.key_length")
    wide = fields["embedding_length"] // fields["attention.head_count"]
    return {
        **layout,
        "query_pre_attn_scalar": wide if largest else head_dim or wide,
        "rope_local_base_freq": fields.get("rope.freq_base_swa", 10_000.0),
    }


def gpt_oss(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The width of an expert, and RoPE as OpenAI's own code stretches it."""
    kind = fields.get("rope.scaling.type")
    one_of("gpt-oss.rope.scaling.type", kind, ("yarn",))
    # No field says how RoPE rounds: all of gpt-oss's checkpoints do not truncate.
    data = {"attention_bias": True, "rope_scaling": yarn(fields) | {"truncate": False}}
    width = fields.get("expert_feed_forward_length")
    return data if width is None else {**data, "intermediate_size": width}


def experts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What Qwen3-MoE has: experts in all layers, whose weights add up to 1."""
    return {
        "moe_intermediate_size": fields.get("expert_feed_forward_length"),
        "norm_topk_prob": fields.get("expert_weights_norm", True),
    }


def granite(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The multipliers. A field that turns RoPE off in llama.cpp is refused."""
    rotates = fields.get("rope.scaling.finetuned", True)
    one_of("granite.rope.scaling.finetuned", rotates, (True,))
    scale = fields.get("attention.scale")
    expect(scale, "granite.attention.scale", scale, "a number above 0")
    return {ours: fields[key] for key, ours in SCALES.items() if fields.get(key)}


def gpt2(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The epsilon of GPT-2's norms, which are LayerNorms."""
    epsilon = fields.get("attention.layer_norm_epsilon")
    return {} if epsilon is None else {"layer_norm_epsilon": epsilon}


# What a file has of a family beside what all have, by its model_type.
OF_FAMILY: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "gemma3_text": gemma,
    "gpt_oss": gpt_oss,
    "qwen3_moe": experts,
    "granite": granite,
    "gpt2": gpt2,
}
