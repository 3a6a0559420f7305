"""transformers' GptOssForCausalLM with random weights that make every part matter."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

REAL_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def oracle_config(**changes: Any) -> GptOssConfig:
    """A small gpt-oss, in everything but its sizes like the real one."""
    settings: dict[str, Any] = {
        "vocab_size": 211,
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 128,
        "rope_parameters": REAL_YARN,
        "eos_token_id": [0],
        "pad_token_id": None,
        "attn_implementation": "eager",
    }
    return GptOssConfig(**settings | changes)


def random_state(config: GptOssConfig, seed: int) -> dict[str, Tensor]:
    """Weights, all of them felt in the logits: float32, by transformers' own names.

    Attention is peaked (scores with a standard deviation around 2), sinks take a share
    that differs from head to head, no bias is zero, about one gate in fifty is beyond
    the clamp at 7, the router's logits differ by about 1, the logits by about 3.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    heads_width = config.num_attention_heads * config.head_dim
    scale = {
        "embed_tokens.weight": 1.0,
        "q_proj.weight": 1.1 / math.sqrt(hidden),
        "k_proj.weight": 1.1 / math.sqrt(hidden),
        "v_proj.weight": 1.0 / math.sqrt(hidden),
        "o_proj.weight": 1.0 / math.sqrt(heads_width),
        "router.weight": 1.5 / math.sqrt(hidden),
        "gate_up_proj": 3.0 / math.sqrt(hidden),
        "down_proj": 0.2 / math.sqrt(inner),
        "lm_head.weight": 3.0 / math.sqrt(hidden),
        "sinks": 2.0,
        "norm.weight": 0.2,
    }
    with torch.device("meta"):
        shapes = GptOssForCausalLM(config).state_dict()
    state = {}
    for name, shape in shapes.items():
        # The longest suffix, and for every bias 0.3.
        fits = [suffix for suffix in scale if name.endswith(suffix)]
        std = scale[max(fits, key=len)] if fits else 0.3
        state[name] = std * torch.randn(shape.shape, generator=generator)
        if name.endswith("norm.weight"):
            state[name] += 1
        if name.endswith("sinks"):
            state[name] += 2
    return state


def save_dense(path: Path, config: GptOssConfig, seed: int) -> GptOssForCausalLM:
    """Write a bf16 checkpoint with dense experts to ``path``; the model it holds."""
    with torch.device("meta"):
        model = GptOssForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.load_state_dict(random_state(config, seed))
    model.to(torch.bfloat16).save_pretrained(path)
    return load_oracle(path)


def save_mxfp4(path: Path, config: GptOssConfig, seed: int) -> GptOssForCausalLM:
    """Write a checkpoint in the layout of openai/gpt-oss-20b; the model it holds."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in random_state(config, seed).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor.bfloat16()
            continue
        experts, inputs, outputs = tensor.shape
        blocks = experts, outputs, inputs // 32
        # 16 values of standard deviation 2.9 times a power of two.
        exponent = round(math.log2(tensor.std().item() / 2.9))
        tensors[f"{name}_blocks"] = torch.randint(
            256, (*blocks, 16), generator=generator, dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(
            exponent + 126, exponent + 128, blocks, generator=generator
        ).to(torch.uint8)
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads(config.to_json_string()) | {
        "architectures": ["GptOssForCausalLM"],
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (path / "config.json").write_text(json.dumps(settings))
    return load_oracle(path)


def load_oracle(path: Path, dtype: torch.dtype = torch.float32) -> GptOssForCausalLM:
    """The checkpoint as transformers reads it, all of it computed in plain PyTorch."""
    packed = "quantization_config" in (path / "config.json").read_text()
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if packed else {}
    model = GptOssForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        **options,
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # some versions leave experts bf16
    return model.eval()


def prompt(config: GptOssConfig, length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (length,), generator=generator)
    return ids.tolist()


def relative_errors(logits: Tensor, expected: Tensor) -> Tensor:
    """Of each position, the norm of the difference over the norm of ``expected``."""
    return (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
