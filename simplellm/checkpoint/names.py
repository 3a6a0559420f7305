"""What each tensor of gpt-oss is called by us and on disk, and what shape it has.

V vocabulary, H query heads, D head_dim, Q rows of all query heads, KV rows of all key
heads, QKV = Q + 2 * KV, E experts, I intermediate size, F that of a dense network, P
positions. A weight's output axis comes before its input axis.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from simplellm.base.config import BLOCK, ModelConfig, expect


class Name(NamedTuple):
    """One tensor, in every layer ``{n}`` that it is in."""

    ours: str
    shape: str  # its axes, as `axes` measures them
    split: str  # the axis that several devices share out; "": each has all of it
    stored: str  # in a file; {q,k,v}: three tensors; {e}: one for each expert
    needs: str = ""  # the field of ModelConfig that has to be true for it
    turned: bool = False  # [in, out] in a file, if it is not packed

    def at(self, layer: int) -> "Name":
        ours, stored = (
            name.replace("{n}", str(layer)) for name in (self.ours, self.stored)
        )
        return self._replace(ours=ours, stored=stored)


# Attention is split by its heads (of QKV each part for itself), experts by their
# intermediate columns: of experts dealt out whole, two devices' busier one would have
# 2.74 of the 4 chosen on average. After `o` and after the experts what the devices have
# is added up; a bias that is not split belongs to that sum once (sharding.py).
# fmt: off
NAMES = (
    Name("embed_tokens.weight", "V hidden", "V",
         "model.embed_tokens.weight"),
    Name("layers.{n}.attn_norm.weight", "hidden", "",
         "model.layers.{n}.input_layernorm.weight"),
    Name("layers.{n}.attn.qkv.weight", "QKV hidden", "QKV",
         "model.layers.{n}.self_attn.{q,k,v}_proj.weight"),
    Name("layers.{n}.attn.qkv.bias", "QKV", "QKV",
         "model.layers.{n}.self_attn.{q,k,v}_proj.bias"),
    Name("layers.{n}.attn.o.weight", "hidden Q", "Q",
         "model.layers.{n}.self_attn.o_proj.weight"),
    Name("layers.{n}.attn.o.bias", "hidden", "",
         "model.layers.{n}.self_attn.o_proj.bias"),
    Name("layers.{n}.attn.sinks", "H", "H",
         "model.layers.{n}.self_attn.sinks"),
    Name("layers.{n}.mlp_norm.weight", "hidden", "",
         "model.layers.{n}.post_attention_layernorm.weight"),
    Name("layers.{n}.router.weight", "E hidden", "",
         "model.layers.{n}.mlp.router.weight"),
    Name("layers.{n}.router.bias", "E", "",
         "model.layers.{n}.mlp.router.bias"),
    Name("layers.{n}.experts.gate_up", "E 2I hidden", "2I",
         "model.layers.{n}.mlp.experts.gate_up_proj", turned=True),
    Name("layers.{n}.experts.gate_up_bias", "E 2I", "2I",
         "model.layers.{n}.mlp.experts.gate_up_proj_bias"),
    Name("layers.{n}.experts.down", "E hidden I", "I",
         "model.layers.{n}.mlp.experts.down_proj", turned=True),
    Name("layers.{n}.experts.down_bias", "E hidden", "",
         "model.layers.{n}.mlp.experts.down_proj_bias"),
    Name("norm.weight", "hidden", "",
         "model.norm.weight"),
    Name("lm_head.weight", "V hidden", "V",
         "lm_head.weight"),
)
# fmt: on


def is_expert_weight(ours: str) -> bool:
    """Whether the tensor that we call ``ours`` may be stored as MXFP4."""
    return ours.endswith((".gate_up", ".down"))


def stored_names(name: Name, experts: int = 1) -> list[str]:
    """What is on disk for one of our tensors: one name, or those of its parts.

    The parts are q, k and v, or gate and up, of each of the experts if these lie apart.
    """
    count = experts if "{e}" in name.stored else 1
    names = []
    for text in (name.stored.replace("{e}", str(n)) for n in range(count)):
        before, _, rest = text.partition("{")
        parts, _, after = rest.partition("}")
        names += [before + part + after for part in parts.split(",")]
    return names


Shape = tuple[int, ...]


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
