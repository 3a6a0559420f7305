"""GGUF files as llama.cpp's converter writes them, by the package `gguf`, for tests."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "smollm3": "smollm3",
    "granite": "granite",
    "gpt2": "gpt2",
}
# What each kind of tokenizer of `families_text` is called.
PRE = {
    "qwen": "qwen2",
    "llama": "llama-bpe",
    "gpt2": "gpt-2",
    "tekken": "tekken",
    "gpt-oss": "gpt-4o",
}
PAIRED = "llama", "smollm3", "granite"
# Matrices of GPT-2 that the hub has as Conv1Ds, [in, out].
CONV = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
PACKED = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(_bias)?")
TypeOf = Callable[[str, Tensor], str]


def permuted(weight: Tensor, heads: int) -> Tensor:
    """As in llama.cpp's `LlamaModel.permute`: the halves of a head become pairs."""
    rows = weight.shape[0]
    halves = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def hub_tensors(folder: Path) -> dict[str, Tensor]:
    """What all files of a folder hold."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: t for file in files for name, t in load_file(file).items()}


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A folder's tensors, those of experts stacked, and gpt-oss's taken apart."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts[f"{match[1]}.{match[3]}"][int(match[2])] = tensor
        elif match := PACKED.fullmatch(name):
            stem, part, bias = match.groups()
            kind, tensor = ("bias", tensor) if bias else ("weight", tensor.mT)
            if part == "down":
                found[f"{stem}.down_proj.{kind}"] = tensor
                continue
            found[f"{stem}.gate_proj.{kind}"] = tensor[:, 0::2]
            found[f"{stem}.up_proj.{kind}"] = tensor[:, 1::2]
        else:
            found[name] = tensor
    for name, parts in experts.items():
        found[name] = torch.stack([parts[n] for n in sorted(parts)])
    return found


def converted(
    config: Mapping[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Hub tensors as a GGUF file has them, by its names."""
    arch = ARCHITECTURES[config["model_type"]]
    key = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    table = gguf.get_tensor_name_map(key, layers)
    found = {}
    for name, tensor in stacked(tensors).items():
        stem, _, kind = name.rpartition(".")
        if name.endswith("sinks"):
            stem, kind = name, "weight"
        if arch in PAIRED and ".q_proj" in name:
            tensor = permuted(tensor, config["num_attention_heads"])
        if arch in PAIRED and ".k_proj" in name:
            tensor = permuted(tensor, config["num_key_value_heads"])
        if arch == "gemma3" and "norm" in name:
            tensor = tensor + 1
        if CONV.search(name):
            tensor = tensor.mT
        theirs = table.get_name(stem)
        assert theirs is not None, name
        found[f"{theirs}.{kind}"] = tensor
    return found


def add_config(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """The keys of an architecture, as the converter of each model writes them."""
    if config["model_type"] == "gpt2":
        add_gpt2(writer, config)
        return
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        kinds = gguf.RopeScalingType
        kind = kinds.LINEAR if rope["rope_type"] == "linear" else kinds.YARN
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        length = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(length)
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        writer.add_sliding_window(window)
    if count := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if width := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(width)
    if config["model_type"] == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])


def add_gpt2(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """Those of GPT-2, which has no RoPE."""
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config["n_inner"] or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def rope_factors(config: Mapping[str, Any]) -> np.ndarray[Any, Any] | None:
    """What llama.cpp's converter makes of Llama 3.1's rope_parameters."""
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") != "llama3":
        return None
    half, theta = config["head_dim"] // 2, rope["rope_theta"]
    low, high, factor = (
        rope[name] for name in ("low_freq_factor", "high_freq_factor", "factor")
    )
    length = rope["original_max_position_embeddings"]
    found = []
    for n in range(half):
        wave = 2 * np.pi * theta ** (2 * n / config["head_dim"])
        if wave < length / high:
            found.append(1.0)
        elif wave > length / low:
            found.append(factor)
        else:
            smooth = (length / wave - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def add_tokenizer(
    writer: GGUFWriter, tokenizer: Tokenizer, kind: str, settings: Mapping[str, Any]
) -> None:
    """A vocabulary of `families_text`, as the converters write theirs."""
    data = json.loads(tokenizer.to_str())
    spelled = {id: text for text, id in data["model"]["vocab"].items()}
    kinds = dict.fromkeys(spelled, TokenType.NORMAL)
    wordy = kind in ("gemma", "mistral", "old mistral")
    for id, text in spelled.items():
        if wordy and re.fullmatch("<0x[0-9A-F]{2}>", text):
            kinds[id] = TokenType.BYTE
    for token in data["added_tokens"]:
        id, special = token["id"], token["special"]
        spelled[id] = token["content"].replace("▁", " ")
        kinds[id] = TokenType.CONTROL if special else TokenType.USER_DEFINED
        if token["content"] == "<unk>":
            kinds[id] = TokenType.UNKNOWN
    count = 1 + max(spelled)
    writer.add_tokenizer_model("llama" if wordy else "gpt2")
    writer.add_tokenizer_pre("default" if wordy else PRE[kind])
    writer.add_token_list([spelled.get(n, f"[PAD{n}]") for n in range(count)])
    writer.add_token_types([kinds.get(n, TokenType.UNUSED) for n in range(count)])
    if wordy:
        writer.add_token_scores([-float(n) for n in range(count)])
    else:
        merges = data["model"]["merges"]
        writer.add_token_merges([" ".join(pair) for pair in merges])
    if kind in ("gemma", "mistral"):
        writer.add_add_space_prefix(kind == "mistral")
    if "add_bos_token" in settings:
        writer.add_add_bos_token(settings["add_bos_token"])
    for name in ("bos", "eos"):
        text = settings.get(f"{name}_token")
        text = text["content"] if isinstance(text, dict) else text
        if text and (id := tokenizer.token_to_id(text)) is not None:
            getattr(writer, f"add_{name}_token_id")(id)
    if template := settings.get("chat_template"):
        writer.add_chat_template(template)


def k_scales(most: Any) -> tuple[Any, Any]:
    """Numbers [B, 8] in 6 bits, and the float16 [B] that they are multiples of."""
    step = np.float16(most.max(1) / 63)
    return np.rint(most / np.maximum(step, np.float16(1e-7))[:, None]).astype(int), step


def quantize_k(numbers: Any, five: bool) -> Any:
    """Rows of 256 n numbers as Q4_K, or Q5_K: each block of 32 has 16 or 32 steps."""
    blocks = numbers.reshape(-1, 8, 32)
    least = np.minimum(blocks.min(2), 0)
    scales, step = k_scales((blocks.max(2) - least) / (31 if five else 15))
    offsets, low = k_scales(-least)
    each, bottom = scales * step[:, None], offsets * low[:, None].astype(np.float32)
    each = np.maximum(each, 1e-7)[..., None]
    values = np.rint((blocks + bottom[..., None]) / each)
    values = values.clip(0, 31 if five else 15).astype(np.uint8)
    upper = scales[:, 4:] & 15 | (offsets[:, 4:] & 15) << 4
    parts = [scales[:, :4] | scales[:, 4:] >> 4 << 6]
    parts += [offsets[:, :4] | offsets[:, 4:] >> 4 << 6, upper]
    high = (values >> 4 << np.arange(8)[:, None]).sum(1) if five else values[:, 0, :0]
    pairs = (values & 15).reshape(-1, 4, 2, 32)
    body = [*parts, high, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)]
    floats = np.stack([step, low], 1).view(np.uint8)
    packed = np.concatenate([floats, *(part.astype(np.uint8) for part in body)], 1)
    return packed.reshape(*numbers.shape[:-1], -1)


def quantize_6k(numbers: Any) -> Any:
    """Rows of 256 n numbers as Q6_K: each 16 have 64 steps, of a scale in 8 bits."""
    blocks = numbers.reshape(-1, 16, 16)
    most = np.abs(blocks).max(2) / 31
    step = np.maximum(most.max(1) / 127, 1e-6).astype(np.float16)
    scales = np.rint(most / step[:, None]).astype(np.int8)
    each = np.maximum(scales * step[:, None].astype(np.float32), 1e-9)[..., None]
    values = (np.rint(blocks / each).clip(-32, 31) + 32).astype(np.uint8)
    halves = values.reshape(-1, 2, 4, 32)  # 128 numbers each, in quarters
    low, high = halves & 15, halves >> 4
    lower = np.concatenate(
        [low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], 2
    )
    upper = (high << 2 * np.arange(4, dtype=np.uint8)[:, None]).sum(2)
    parts = lower.reshape(-1, 128), upper.astype(np.uint8).reshape(-1, 64)
    ends = scales.view(np.uint8), step[:, None].view(np.uint8)
    packed = np.concatenate([*parts, *ends], 1)
    return packed.reshape(*numbers.shape[:-1], -1)


def quantize(numbers: Any, kind: str) -> Any:
    """``numbers`` [..., n] as ggml stores them; of K-quants, the package has none."""
    if kind in ("Q4_K", "Q5_K"):
        return quantize_k(numbers, kind == "Q5_K")
    if kind == "Q6_K":
        return quantize_6k(numbers)
    return gguf.quantize(numbers, GGMLQuantizationType[kind])


def write_gguf(
    path: Path,
    folder: Path,
    type_of: TypeOf = lambda name, tensor: "F32",
    tokenizer: Tokenizer | None = None,
    kind: str = "",
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Write a hub folder as a GGUF file; what its tensors then are, by name there.

    ``type_of`` says how each matrix is stored; all else is F32. ``options`` are the
    writer's, as split_max_tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, ARCHITECTURES[config["model_type"]], **options)
    add_config(writer, config)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, kind, settings or {})
    if (factors := rope_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    meant = {}
    for name, tensor in converted(config, hub_tensors(folder)).items():
        kind_of = type_of(name, tensor) if tensor.ndim > 1 else "F32"
        number = GGMLQuantizationType[kind_of]
        numbers = tensor.float().contiguous().numpy()
        data = quantize(numbers, kind_of)
        writer.add_tensor(name, data, raw_dtype=number)
        meant[name] = torch.from_numpy(gguf.dequantize(data, number).copy())
        meant[name] = meant[name].view(tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant
