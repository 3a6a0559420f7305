"""What each tensor is called by us and on disk, and what shape it has, of any family.

NAMES is the table of gpt-oss; those of the others are in families/. V vocabulary, H
query heads, D head_dim, Q rows of all query heads, KV rows of all key heads, QKV = Q +
2 * KV, E experts, I intermediate size, F that of a dense network, P positions. A
weight's output axis comes before its input axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from simplellm.base.config import BLOCK, ModelConfig, expect


class Name(NamedTuple):
    """One tensor, in every layer ``{n}`` that it is in."""

    ours: str
    shape: str  # its axes, as `axes` measures them
    stored: str  # on the hub; {q,k,v}: three tensors; {e}: one for each expert
    split: str = ""  # the axis that several devices share out; "": each has all of it
    needs: str = ""  # the field of ModelConfig that has to be true for it
    turned: bool = False  # [in, out] in a file, if it is not packed

    def at(self, layer: int) -> "Name":
        ours, stored = (x.replace("{n}", str(layer)) for x in (self.ours, self.stored))
        return self._replace(ours=ours, stored=stored)


def layer_name(
    ours: str, shape: str, stored: str, split: str = "", **more: Any
) -> Name:
    """A tensor of layers, by what its names have behind the layer's."""
    ours, stored = f"layers.{{n}}.{ours}", f"model.layers.{{n}}.{stored}"
    return Name(ours, shape, stored, split, **more)


# Attention is split by its heads (of QKV each part for itself), experts by their
# intermediate columns: of experts dealt out whole, two devices' busier one would have
# 2.74 of the 4 chosen on average. After `o` and after the experts what the devices have
# is added up; a bias that is not split belongs to that sum once (sharding.py).
NAMES = (
    Name("embed_tokens.weight", "V hidden", "model.embed_tokens.weight", "V"),
    layer_name("attn_norm.weight", "hidden", "input_layernorm.weight"),
    layer_name("attn.qkv.weight", "QKV hidden", "self_attn.{q,k,v}_proj.weight", "QKV"),
    layer_name("attn.qkv.bias", "QKV", "self_attn.{q,k,v}_proj.bias", "QKV"),
    layer_name("attn.o.weight", "hidden Q", "self_attn.o_proj.weight", "Q"),
    layer_name("attn.o.bias", "hidden", "self_attn.o_proj.bias"),
    layer_name("attn.sinks", "H", "self_attn.sinks", "H"),
    layer_name("mlp_norm.weight", "hidden", "post_attention_layernorm.weight"),
    layer_name("router.weight", "E hidden", "mlp.router.weight"),
    layer_name("router.bias", "E", "mlp.router.bias"),
    layer_name(
        "experts.gate_up", "E 2I hidden", "mlp.experts.gate_up_proj", "2I", turned=True
    ),
    layer_name("experts.gate_up_bias", "E 2I", "mlp.experts.gate_up_proj_bias", "2I"),
    layer_name("experts.down", "E hidden I", "mlp.experts.down_proj", "I", turned=True),
    layer_name("experts.down_bias", "E hidden", "mlp.experts.down_proj_bias"),
    Name("norm.weight", "hidden", "model.norm.weight"),
    Name("lm_head.weight", "V hidden", "lm_head.weight", "V"),
)


def is_expert_weight(ours: str) -> bool:
    """Whether the tensor that we call ``ours`` is a weight of experts, and no bias."""
    return ours.endswith((".gate_up", ".down"))


def stored_names(name: Name, experts: int = 1) -> list[str]:
    """What is on disk for one of our tensors: one name, or those of its parts.

    The parts are q, k and v, or gate and up, of each of the experts if these lie apart.
    """
    count = experts if "{e}" in name.stored else 1
    each = (name.stored.replace("{e}", str(n)) for n in range(count))
    return [part for text in each for part in parts_of(text)]


def parts_of(text: str) -> list[str]:
    """The names that one with a list in braces stands for."""
    before, _, rest = text.partition("{")
    parts, _, after = rest.partition("}")
    return [before + part + after for part in parts.split(",")]


Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of one tensor; ``name`` is the name on disk."""

    name: str
    dtype: str  # as the file spells it: a key of DTYPES or, of GGUF, a name in TYPES
    shape: Shape
    nbytes: int
    file: Path
    offset: int  # of its first byte in the file


def axes(config: ModelConfig) -> dict[str, int]:
    """The sizes that the name table's shapes speak of."""
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    dense = config.dense_intermediate_size or config.intermediate_size
    return {
        "V": config.vocab_size,
        "hidden": config.hidden_size,
        "H": config.num_attention_heads,
        "Q": q,
        "KV": kv,
        "QKV": q + 2 * kv,
        "E": config.num_local_experts,
        "I": config.intermediate_size,
        "2I": 2 * config.intermediate_size,
        "D": config.head_dim,
        "F": dense,
        "2F": 2 * dense,
        "P": config.max_position_embeddings,
    }


def is_in(name: Name, sparse: bool) -> bool:
    """Whether a layer has this tensor; a ``sparse`` one is a layer with experts."""
    if ".experts." in name.ours or ".router." in name.ours:
        return sparse
    return not sparse or ".mlp." not in name.ours


def tensor_names(config: ModelConfig) -> dict[str, Name]:
    """The name table written out for every layer, by our name, in model order."""
    table = [
        name for name in config.names if not name.needs or getattr(config, name.needs)
    ]
    names: list[Name] = []
    for repeated, group in groupby(table, key=lambda name: "{n}" in name.ours):
        rows = list(group)
        for n in range(config.num_hidden_layers) if repeated else [0]:
            sparse = config.num_local_experts > 0 and n not in config.dense_layers
            names += (row.at(n) for row in rows if is_in(row, sparse))
    by_name = {name.ours: name for name in names}
    if config.tie_word_embeddings:  # stored once, under the embedding's name
        embedding, head = by_name["embed_tokens.weight"], by_name["lm_head.weight"]
        by_name[head.ours] = embedding._replace(ours=head.ours, split=head.split)
    return by_name


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The logical shape of each tensor by our name: [out, in], experts unpacked."""
    size, held = axes(config), config.held_experts
    shapes = {
        ours: tuple(size[axis] for axis in name.shape.split())
        for ours, name in tensor_names(config).items()
    }
    if held is None:
        return shapes
    return {
        ours: (len(held), *shape[1:]) if ".experts." in ours else shape
        for ours, shape in shapes.items()
    }


def packed_shapes(shape: Shape) -> tuple[Shape, Shape]:
    """The shapes of blocks and scales that hold an MXFP4 weight [..., out, in].

    Raises ValueError if the blocks do not fill its rows.
    """
    *rows, columns = shape
    name = "the input columns of an MXFP4 weight"
    expect(columns % BLOCK == 0, name, columns, f"a multiple of {BLOCK}")
    return (*rows, columns // BLOCK, BLOCK // 2), (*rows, columns // BLOCK)


# The parts of axes that some checkpoints store apart.
PARTS_OF = {"QKV": ("Q", "KV", "KV"), "2I": ("I", "I"), "2F": ("F", "F")}


def stored_shapes(config: ModelConfig) -> dict[str, dict[str, Shape]]:
    """For each of our names, the names and shapes on disk that make it up.

    What has a format, as packed experts have, is stored as several tensors. Of the
    rest, what is `turned` is [in, out], and all else [out, in].
    """
    size, shapes = axes(config), tensor_shapes(config)
    stored: dict[str, dict[str, Shape]] = {}
    for ours, name in tensor_names(config).items():
        names = stored_names(name, config.num_local_experts)
        form = config.formats.get(ours)
        parts: Sequence[Shape] = [shapes[ours]]
        if "{" in name.stored:
            first, *rest = name.shape.split()
            if "{e}" in name.stored:
                first, *rest = rest
            firsts = PARTS_OF[first] if "," in name.stored else (first,)
            parts = [tuple(size[axis] for axis in (axis0, *rest)) for axis0 in firsts]
            parts *= len(names) // len(parts)
        if name.turned and form is None:
            parts = [(*shape[:-2], shape[-1], shape[-2]) for shape in parts]
        stored[ours] = dict(zip(names, parts, strict=True))
        if form is not None:
            stored[ours] = {
                form.stored_name(part, suffix): shape
                for part, whole in stored[ours].items()
                for suffix, shape in form.stored_shapes(whole).items()
            }
    return stored


# A kind of weights by a part of our name; the first that fits counts, so that a norm
# before attention is a norm.
PARTS = {
    "norm": "norms",
    "experts": "experts",
    "router": "router",
    "attn": "attention",
    "mlp": "feed-forward",
    "embed_positions": "positions",
    "embed_tokens": "embedding",
    "lm_head": "lm_head",
}


def part_of_model(ours: str) -> str:
    """Which part of the model a tensor belongs to, by our name."""
    return next(kind for part, kind in PARTS.items() if part in ours)
