"""The files of an EAGLE-3 head: a folder with config.json and safetensors.

Two layouts are public: the flat one of SpecForge, lmsys and NVIDIA, and that of
RedHatAI's speculators, which has the layer's own config inside.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from simplellm.base.config import (
    CheckpointError,
    ConfigError,
    ModelConfig,
    RopeScaling,
    check,
    declared,
    expect,
    read_json,
    reraise_as,
)
from simplellm.checkpoint.checkpoint import find_shards, map_shard
from simplellm.checkpoint.families.family import HARMLESS, PRIVATE, rope, sizes

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# What may stand in a config without changing what is computed here.
IGNORED = HARMLESS | {
    *("architectures", "auto_map", "embed_requires_grad", "eos_token_id"),
    *("experts_per_token", "layer_types", "max_window_layers", "model_type"),
    *("num_experts_per_tok", "num_local_experts", "speculators_config"),
    *("speculators_model_type", "speculators_version", "swiglu_limit"),
    *("target_model_type", "tie_word_embeddings", "ttt_steps"),
}
# What only one value of is known here.
FIXED: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1,),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "has_lm_head": (True,),
    "quantization_config": (None,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (None, 1),
}
NESTED = ("transformer_layer_config", "eagle_config")
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What an EAGLE-3 head is made of. Raises ConfigError for what is no head."""

    hidden_size: int = declared()
    intermediate_size: int = declared()
    num_attention_heads: int = declared()
    num_key_value_heads: int = declared()
    head_dim: int = declared()
    vocab_size: int = declared()  # of the model that it drafts for
    draft_vocab_size: int = declared()
    target_hidden_size: int = declared()
    max_position_embeddings: int = declared(131_072)
    rms_norm_eps: float = declared(1e-5, above=0, high=1)
    rope_theta: float = declared(10_000.0, above=1, high=1e18)
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    # Which layers' outputs it reads, counted from 0; None: as `layers` says.
    layer_ids: tuple[int, ...] | None = None
    norm_before_residual: bool = False  # the layer adds to the normed state
    norm_before_fc: bool = False  # the states together are normed first
    fc_norm: bool = False  # or each by itself
    norm_output: bool = False  # the next draft reads the normed state

    @reraise_as(ConfigError)
    def __post_init__(self) -> None:
        check(self)
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        expected = f"a multiple of num_key_value_heads, {groups}"
        expect(heads % groups == 0, "num_attention_heads", heads, expected)
        expect(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number")
        most, size = self.vocab_size, self.draft_vocab_size
        expect(size <= most, "draft_vocab_size", size, f"at most vocab_size, {most}")

    def layers(self, count: int) -> tuple[int, ...]:
        """Which of ``count`` layers' outputs the head reads; default: SGLang's."""
        return self.layer_ids or (1, count // 2 - 1, count - 4)

    @reraise_as(ConfigError)
    def check_fits(self, model: ModelConfig) -> None:
        """Raise ConfigError, which names the field, if it is another model's head."""
        pairs = {"vocab_size": self.vocab_size, "hidden_size": self.target_hidden_size}
        for name, value in pairs.items():
            wanted = getattr(model, name)
            what = "target_hidden_size" if name == "hidden_size" else name
            expect(value == wanted, what, value, f"{wanted}, the model's {name}")
        last = model.num_hidden_layers - 2  # what follows the last is no layer's input
        for layer in self.layers(model.num_hidden_layers):
            ok = 0 <= layer <= last
            expect(ok, f"an entry of {LAYER_IDS}", layer, f"a layer from 0 to {last}")


def read_head_config(path: Path) -> HeadConfig:
    """The config of a head's folder. Raises ConfigError for what isn't known here."""
    with reraise_as(ConfigError, path / "config.json"):
        return head_config(read_json(path / "config.json"))


def head_config(data: Mapping[str, Any]) -> HeadConfig:
    """A parsed config.json, of either layout. Raises ValueError."""
    names = data.get("architectures") or [None]
    expected = f"one of {', '.join(ARCHITECTURES)}"
    expect(names[0] in ARCHITECTURES, "architectures", names, expected)
    flat = {name: value for name, value in data.items() if name not in NESTED}
    for name in NESTED:
        inner = data.get(name) or {}
        expect(isinstance(inner, dict), name, inner, "an object", TypeError)
        flat = {**inner, **{k: v for k, v in flat.items() if v is not None}}
    known = {spec.name for spec in fields(HeadConfig)} - {"layer_ids"}
    read = {*known, *IGNORED, *ROPE, LAYER_IDS}
    for name, value in flat.items():
        if name in FIXED:
            allowed = " or ".join(map(repr, FIXED[name]))
            expect(value in FIXED[name], name, value, allowed)
        elif name not in read and not PRIVATE.search(name):
            wanted = "no such field in an EAGLE-3 head's config"
            expect(value is None, name, value, wanted)
    values = {name: value for name, value in sizes(flat).items() if name in known}
    expect("vocab_size" in values, "vocab_size", None, "an integer")
    values.setdefault("target_hidden_size", values["hidden_size"])
    values.setdefault("draft_vocab_size", values["vocab_size"])
    values["rope_scaling"], theta = rope(flat)
    values |= {} if theta is None else {"rope_theta": theta}
    if (ids := flat.get(LAYER_IDS)) is not None:
        ok = isinstance(ids, list) and [*map(type, ids)] == [int] * 3
        expect(ok, LAYER_IDS, ids, "three layers' numbers")
        # The flat layout names the layers that end there, speculators the next ones.
        values["layer_ids"] = tuple(i - (LAYER_IDS in data) for i in ids)
    return HeadConfig(**values)


def head_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a head must have, and those that it may have, by our names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    shared = config.num_key_value_heads * config.head_dim
    wide = 3 * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, wide),
        "layer.input_layernorm.weight": (hidden,),
        "layer.hidden_norm.weight": (hidden,),
        "layer.post_attention_layernorm.weight": (hidden,),
        "layer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "layer.self_attn.k_proj.weight": (shared, 2 * hidden),
        "layer.self_attn.v_proj.weight": (shared, 2 * hidden),
        "layer.self_attn.o_proj.weight": (hidden, queries),
        "layer.mlp.gate_proj.weight": (inner, hidden),
        "layer.mlp.up_proj.weight": (inner, hidden),
        "layer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "embed_tokens.weight": (config.vocab_size, hidden),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "d2t": (config.draft_vocab_size,),
    }
    if config.attention_bias:
        for name, size in zip("qkvo", (queries, shared, shared, hidden), strict=True):
            shapes[f"layer.self_attn.{name}_proj.bias"] = (size,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (wide,)
    if config.fc_norm:
        for index in range(3):
            shapes[f"fc_norm.{index}.weight"] = (config.target_hidden_size,)
    return shapes


def may_lack(config: HeadConfig) -> set[str]:
    """The tensors of `head_shapes` that the model has as well."""
    lacking = set()
    if config.hidden_size == config.target_hidden_size:
        lacking.add("embed_tokens.weight")
    if config.draft_vocab_size == config.vocab_size:
        lacking |= {"d2t"} | ({"lm_head.weight"} if lacking else set())
    return lacking


def read_head(path: Path, config: HeadConfig) -> dict[str, Tensor]:
    """The tensors of a head's folder by our names. Raises CheckpointError."""
    shapes, tensors = head_shapes(config), dict[str, Tensor]()
    with reraise_as(CheckpointError, path):
        for file in find_shards(path)[0]:
            map_shard(file)  # which checks it
            with safe_open(file, framework="pt") as opened:
                for stored in opened.keys():  # noqa: SIM118
                    name = stored.removeprefix("model.")
                    for spelled in ("midlayer.", "layers.0."):
                        name = name.replace(spelled, "layer.")
                    if name in shapes:
                        tensors[name] = opened.get_tensor(stored)
                    elif not name.startswith(("t2d", "rotary_emb", "verifier_")):
                        wanted = "no such tensor in an EAGLE-3 head"
                        expect(False, "a tensor", stored, wanted)
        for name, shape in shapes.items():
            if name not in tensors:
                expect(name in may_lack(config), name, None, f"a tensor {list(shape)}")
            else:
                size = list(tensors[name].shape)
                expect(size == list(shape), f"{name}'s shape", size, f"{list(shape)}")
    return tensors
