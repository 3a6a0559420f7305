"""Small random checkpoints on disk for any test."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import save_file

from simplellm.base.config import LAYER_TYPES, ModelConfig, RopeScaling
from simplellm.checkpoint.checkpoint import INDEX, RandomCheckpoint
from simplellm.checkpoint.families.gpt_oss import published
from simplellm.checkpoint.mxfp4 import MXFP4
from simplellm.checkpoint.names import NAMES, stored_shapes, tensor_names, tensor_shapes

PLAIN_TINY = ModelConfig(  # its experts are ordinary numbers
    names=NAMES,
    vocab_size=97,
    hidden_size=96,
    intermediate_size=64,
    num_hidden_layers=2,
    num_local_experts=5,
    num_experts_per_tok=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    sliding_window=8,
    layer_types=LAYER_TYPES,
    rope_theta=150_000.0,
    rope_scaling=RopeScaling(32.0, 4096, 32.0, 1.0, False),
    max_position_embeddings=131072,
)
TINY = published(PLAIN_TINY)


def config_json(config: ModelConfig) -> dict[str, Any]:
    """A config.json as the hub has it."""
    same = (
        "vocab_size hidden_size intermediate_size num_hidden_layers head_dim "
        "num_attention_heads num_key_value_heads sliding_window rope_theta swiglu_limit"
    )
    data = {name: getattr(config, name) for name in same.split()}
    scaling = config.rope_scaling
    if config.formats:
        data["quantization_config"] = {"quant_method": "mxfp4"}
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        rope = {"rope_type": "yarn", **vars(scaling)}
    return data | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "eos_token_id": list(config.eos_token_ids) or None,
        "hidden_act": "silu",
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings,
        "num_experts_per_tok": config.num_experts_per_tok,
        "num_local_experts": config.num_local_experts,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": rope,
        "swiglu_alpha": config.swiglu_alpha,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": "bfloat16",
    }


def random_tensors(
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Random tensors under their names on disk; all of them, biases too, matter.

    MXFP4 nibbles are uniform and the scales 2^-9 to 2^-6. A tensor depends on the seed
    and our name alone.
    """
    source = RandomCheckpoint(config, dtype=torch.float32, seed=seed)
    tensors: dict[str, torch.Tensor] = {}
    for ours, parts in stored_shapes(config).items():
        generator = torch.Generator()
        generator.manual_seed(crc32(f"{seed} {ours}".encode()))
        if ours in config.formats:
            packed = source[ours]
            assert isinstance(packed, MXFP4)
            scales = torch.randint(
                118, 122, packed.scales.shape, generator=generator, dtype=torch.uint8
            )
            tensors |= zip(parts, (packed.blocks, scales), strict=True)
            continue
        shape = tensor_shapes(config)[ours]
        std = 1.0 if ours.endswith(("embed_tokens.weight", "sinks")) else 0.1
        full = torch.randn(shape, generator=generator) * std + ("norm" in ours)
        if tensor_names(config)[ours].turned:
            full = full.transpose(1, 2)
        rows = [part[0] for part in parts.values()]
        pieces = full.to(dtype).split(rows)
        tensors |= zip(parts, (p.contiguous() for p in pieces), strict=True)
    return tensors


def write_checkpoint(
    folder: Path,
    config: ModelConfig = TINY,
    *,
    quantized: bool = True,
    shards: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write config.json and random weights, and return the folder.

    Several shards get an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = published(config) if quantized else replace(config, formats={})
    tensors = random_tensors(config, dtype=dtype, seed=seed)
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = names[number::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return folder
