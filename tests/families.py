"""Small random checkpoints of other families, written by transformers itself."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from simplellm.checkpoint.families import FAMILIES

Changes = Mapping[str, Any]

# No square among the sizes, no head_dim that is hidden size / heads.
SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 7,
}
GPT2_SIZES = {
    "vocab_size": 101,
    "n_embd": 48,
    "n_inner": 80,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 256,
    "bos_token_id": None,
    "eos_token_id": 7,
}
# With these lengths one pair of dimensions is on the ramp from fast to slow.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}
LONGROPE = {  # five pairs; a text of more than 100 tokens has the second list
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0],
    "factor": 4.0,
    "original_max_position_embeddings": 100,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 200,
}


def rope(theta: float, **entry: Any) -> dict[str, Any]:
    """transformers 5's spelling of rotations."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **entry}}


GEMMA_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}


@dataclass(frozen=True)
class Case:
    """A model of transformers: the beginning of its classes' names, and its config."""

    kind: str
    config: str  # of its config's class
    changes: Changes

    @property
    def family(self) -> str:
        """What its family is called here."""
        return FAMILIES[getattr(transformers, self.config).model_type].name

    def build(self, seed: int = 0) -> Any:
        """The model with each of its parameters drawn at random."""
        settings = getattr(transformers, self.config)(
            **self.changes, attn_implementation="eager"
        )
        return drawn(settings, seed)


def drawn(settings: Any, seed: int = 0) -> Any:
    """A model of these settings, all parameters random: norms and biases, too."""
    model = transformers.AutoModelForCausalLM.from_config(
        settings, attn_implementation="eager", dtype=torch.float32
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    gemma, gpt2 = "gemma" in settings.model_type, settings.model_type == "gpt2"
    # A tied head says the same token again and again unless the layers are louder.
    embedding, gain = 0.05 if gemma else 0.7, 4 if gpt2 else 2
    for name, parameter in model.named_parameters():
        parameter.requires_grad = False
        if "norm" in name or ".ln_" in name or name.endswith("bias"):
            around = 0 if name.endswith("bias") or gemma else 1
            around += 4 * (gemma and name == "model.norm.weight")
            parameter.normal_(around, 0.3, generator=generator)
        else:
            std = 1 if parameter.ndim < 2 else gain / parameter.shape[-1] ** 0.5
            small = "wte" in name or "wpe" in name or "embed" in name
            parameter.normal_(0, embedding if small else std, generator=generator)
    return model


def case(kind: str, **changes: Any) -> Case:
    sizes = GPT2_SIZES if kind == "GPT2" else SIZES
    config = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    return Case(kind, config, {**sizes, **changes})


def sparse(kind: str, **changes: Any) -> Case:
    many = {"num_local_experts": 5, "num_experts": 5, "num_experts_per_tok": 2}
    del many["num_experts" if kind == "Mixtral" else "num_local_experts"]
    return case(kind, **{**many, **changes})


WINDOW = {"sliding_window": 19}
GRANITE = {  # an epsilon that can be measured
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.5,
    "rms_norm_eps": 0.01,
}
MOE = {"moe_intermediate_size": 56}
CASES: dict[str, Callable[[], Case]] = {
    "Llama": lambda: case("Llama", **rope(5e5)),
    "Llama llama3": lambda: case("Llama", **rope(5e5, **LLAMA3)),
    "Llama linear": lambda: case("Llama", **rope(1e4, rope_type="linear", factor=4.0)),
    "Llama dynamic": lambda: case(  # a text of 150 tokens is the longest
        "Llama",
        max_position_embeddings=75,
        **rope(1e4, rope_type="dynamic", factor=2.0),
    ),
    "Llama longrope": lambda: case("Llama", **rope(1e4, **LONGROPE)),
    "Llama longrope short": lambda: case(
        "Llama", **rope(1e4, **LONGROPE | {"original_max_position_embeddings": 256})
    ),
    "Llama tied": lambda: case("Llama", tie_word_embeddings=True, **rope(5e5)),
    "Llama biases": lambda: case("Llama", attention_bias=True, mlp_bias=True),
    "Qwen2": lambda: case("Qwen2", **rope(1e6)),
    "Qwen2 YaRN": lambda: case("Qwen2", **rope(1e6, **YARN)),
    "Qwen2 YaRN attention": lambda: case(
        "Qwen2", **rope(1e6, **YARN, attention_factor=1.3)
    ),
    "Qwen2 YaRN mscale": lambda: case(
        "Qwen2", **rope(1e6, **YARN, mscale=1.2, mscale_all_dim=0.7)
    ),
    "Qwen2 windows": lambda: case(
        "Qwen2", use_sliding_window=True, max_window_layers=1, **WINDOW
    ),
    "Qwen3": lambda: case("Qwen3", **rope(1e6)),
    "Qwen3 tied": lambda: case("Qwen3", tie_word_embeddings=True, **rope(1e6, **YARN)),
    "Qwen3 biases": lambda: case("Qwen3", attention_bias=True),
    "Mistral": lambda: case("Mistral", sliding_window=None),
    "Mistral windows": lambda: case("Mistral", **WINDOW),
    "Mixtral": lambda: sparse("Mixtral", **rope(1e6)),
    "Mixtral windows": lambda: sparse("Mixtral", **WINDOW),
    "Qwen3-MoE": lambda: sparse("Qwen3Moe", norm_topk_prob=True, **MOE),
    "Qwen3-MoE unnormed": lambda: sparse(
        "Qwen3Moe", norm_topk_prob=False, mlp_only_layers=[1], **MOE
    ),
    "Qwen3-MoE steps": lambda: sparse("Qwen3Moe", decoder_sparse_step=2, **MOE),
    "Gemma3": lambda: case(
        "Gemma3", **GEMMA_ROPE, **WINDOW, query_pre_attn_scalar=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "SmolLM3": lambda: case("SmolLM3", no_rope_layers=[1, 0, 1], **rope(2e6)),
    "SmolLM3 interval": lambda: case(
        "SmolLM3", no_rope_layer_interval=3, tie_word_embeddings=False,
        attention_bias=True, mlp_bias=True,
    ),
    "Granite": lambda: case("Granite", **GRANITE, **rope(1e4)),
    "Granite biases": lambda: case(
        "Granite", attention_bias=True, mlp_bias=True, residual_multiplier=0.5,
        tie_word_embeddings=True,
    ),
    "GPT2": lambda: case("GPT2"),
    "GPT2 untied": lambda: case("GPT2", tie_word_embeddings=False, n_inner=None),
}  # fmt: skip


def older(data: dict[str, Any]) -> dict[str, Any]:
    """A config.json of transformers 5 in the words that the hub's files use."""
    data = dict(data)
    data.pop("dtype", None)
    entry = data.pop("rope_parameters", None) or {}
    if data["model_type"] == "gemma3_text":
        full, local = entry["full_attention"], entry["sliding_attention"]
        data["rope_local_base_freq"] = local["rope_theta"]
        data["sliding_window_pattern"] = data.pop("_sliding_window_pattern")
        entry = full
    if "rope_theta" in entry:
        entry = dict(entry)
        data["rope_theta"] = entry.pop("rope_theta")
        plain = entry["rope_type"] == "default"
        # The very oldest say "type"; Llama 3.1 and later say "rope_type".
        spelled = "rope_type" if entry["rope_type"] == "llama3" else "type"
        kind = {spelled: entry.pop("rope_type")}
        data["rope_scaling"] = None if plain else kind | entry
    if "num_local_experts" in data and data["model_type"] == "qwen3_moe":
        data["num_experts"] = data.pop("num_local_experts")
    if every := data.get("no_rope_layer_interval"):
        count = data["num_hidden_layers"]
        if data["no_rope_layers"] == [int((n + 1) % every > 0) for n in range(count)]:
            del data["no_rope_layers"]
    if data.get("layer_types") and data["model_type"].startswith("qwen"):
        del data["layer_types"]
    return data


def write(folder: Path, model: Any, *, old: bool = False, shards: int = 1) -> Path:
    """Let transformers save ``model``, in so many shards; return the folder."""
    size = sum(p.numel() * 4 for p in model.parameters())
    limit = "10GB" if shards == 1 else size // shards + 30_000
    model.save_pretrained(folder, max_shard_size=limit)
    if old:
        change(folder, lambda data: older(data))
    return folder


def change(folder: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Rewrite a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(edit(json.loads(file.read_text()))))


def rewrite(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    """Rewrite the tensors of a folder with one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    save_file(edit(tensors), file, metadata={"format": "pt"})


# What Mixtral calls the parts of an expert.
MIXTRAL_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def put(state: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    """Put a tensor of the hub's layout into a state dict with its experts in one."""
    if ".experts." not in name:
        state[name].copy_(tensor)
        return
    before, after = name.replace("block_sparse_moe", "mlp").split(".experts.")
    number, part, _ = after.split(".")
    part = MIXTRAL_PARTS.get(part, part)
    joined = "down_proj" if part == "down_proj" else "gate_up_proj"
    target = state[f"{before}.experts.{joined}"][int(number)]
    if part != "down_proj":
        target = target.chunk(2)[part == "up_proj"]
    target.copy_(tensor)
