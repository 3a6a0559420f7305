"""Which part of each weight a rank of several has, read by slice.

As in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): a weight that reads whole
hidden states is column parallel, its output is shared out; the one that follows is row
parallel, its input is, and what the ranks compute with it adds up to the result.
Attention is cut between KV heads, each with the query heads that read it, feed-forward
networks and every expert between intermediate columns, embedding and head between
tokens. Norms and the router are on all ranks. If the experts are sharded, a rank has
some of them whole, and a token's others add nothing there: the sum is the same. Where
attention is data parallel, experts are all that is cut.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from simplellm.base.config import BLOCK, ModelConfig, expect
from simplellm.checkpoint.checkpoint import Checkpoint
from simplellm.checkpoint.cpu_weights import CPUWeight, PackedExperts
from simplellm.checkpoint.mxfp4 import MXFP4, StoredWeight, Weight
from simplellm.checkpoint.names import (
    PARTS_OF,
    Name,
    TensorInfo,
    axes,
    tensor_names,
    tensor_shapes,
)
from simplellm.checkpoint.scaled import Scaled, round_tiles
from simplellm.checkpoint.slices import part_of, sliced
from simplellm.checkpoint.source import Source
from simplellm.checkpoint.stored import concat_weights, join_weights, move_weight

OPTION, WHOLE_EXPERTS = "tensor_parallel_size", "enable_expert_parallel"
DATA_OPTION = "data_parallel_size"
MASK_BITS = 32  # tokens of a vocabulary that share a word of a mask
# Biases of row-parallel weights: the sum over all ranks gets them from the first.
PARTIAL_BIASES = (".attn.o.bias", ".down.bias", ".down_bias")


@dataclass(frozen=True)
class Shard:
    """One of the parts of a model: that of ``rank``, of ``size`` ranks.

    With ``expert_parallel`` it has whole experts. With ``data_parallel``, which needs
    that, it has all of the rest.
    """

    rank: int
    size: int
    expert_parallel: bool = False
    data_parallel: bool = False

    def part(self, total: int, unit: int = 1) -> range:
        """This rank's of ``total`` rows or columns, in whole units but for the last."""
        if self.data_parallel:
            return range(total)
        return part_of(total, self.rank, self.size, unit)

    def vocabulary(self, config: ModelConfig) -> range:
        """The tokens whose rows of embedding and head this rank has."""
        return self.part(config.vocab_size, MASK_BITS)


def split_names(
    config: ModelConfig, expert_parallel: bool, data_parallel: bool = False
) -> dict[str, Name]:
    """`tensor_names`, of which experts are split by expert, or nothing else is."""
    names = tensor_names(config)
    if not expert_parallel:
        return names
    return {
        ours: name._replace(split="E")
        if ".experts." in ours
        else name._replace(split="" if data_parallel else name.split)
        for ours, name in names.items()
    }


def column_unit(config: ModelConfig, axis: str, names: Mapping[str, Name]) -> int:
    """Where the columns called ``axis`` may be cut: between so many of them."""
    units = [1]
    for ours, name in names.items():
        form = config.formats.get(ours)
        if form is not None and name.shape.split()[-1] == axis == name.split:
            units.append(BLOCK if form.is_mxfp4 else form.tile[1] or 1)
    return math.lcm(*units)


def check_experts(config: ModelConfig, option: str, size: int) -> None:
    """Raise ValueError for experts that ``size`` ranks, an ``option``, can't share."""
    experts = config.num_local_experts
    expected = "False: the model is dense, it has no experts"
    expect(experts > 0, WHOLE_EXPERTS, True, expected)
    expected = f"a divisor of the model's {experts} experts, since "
    expected += f"{WHOLE_EXPERTS} is True"
    expect(experts % size == 0, option, size, expected)


def check_shards(config: ModelConfig, size: int, expert_parallel: bool = False) -> None:
    """Raise ValueError, which says why, for a model that is not cut in ``size``."""
    if expert_parallel:
        check_experts(config, OPTION, size)
    heads = config.num_key_value_heads
    expected = f"a divisor of the model's {heads} KV heads (num_key_value_heads)"
    expect(heads % size == 0, OPTION, size, expected)
    measure, names = axes(config), split_names(config, expert_parallel)
    for axis in {name.split for name in names.values()} & {"I", "F", "V"}:
        unit = MASK_BITS if axis == "V" else column_unit(config, axis, names)
        units = -(-measure[axis] // unit)
        what = "tokens of its vocabulary" if axis == "V" else "intermediate columns"
        expected = f"at most {units}: the model has {measure[axis]} {what}, which are "
        expect(size <= units, OPTION, size, expected + f"cut in blocks of {unit}")
    columns, unit = measure["Q"] // size, column_unit(config, "Q", names)
    expected = (
        f"one that leaves each rank whole blocks of {unit} columns of its heads' "
    )
    expected += f"{measure['Q']}, as the weights of o_proj are stored"
    expect(columns % unit == 0, OPTION, size, expected)


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """``config`` of what one rank computes: fewer heads, and columns or experts.

    Its vocabulary is whole. Raises ValueError as `check_shards` does.
    """
    if shard.data_parallel:
        check_experts(config, DATA_OPTION, shard.size)
    else:
        check_shards(config, shard.size, shard.expert_parallel)
    kv_heads = len(shard.part(config.num_key_value_heads))
    group = config.num_attention_heads // config.num_key_value_heads
    inner, dense = (len(inner_part(config, shard, axis)) for axis in "IF")
    apart = config.dense_intermediate_size is not None or shard.expert_parallel
    return replace(
        config,
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        dense_intermediate_size=dense if apart else None,
        held_experts=held_experts(config, shard),
    )


def held_experts(config: ModelConfig, shard: Shard) -> range | None:
    """The experts that a rank has whole; None if it has parts of all."""
    if not shard.expert_parallel:
        return None
    return part_of(config.num_local_experts, shard.rank, shard.size)


def inner_part(config: ModelConfig, shard: Shard, axis: str) -> range:
    """A rank's intermediate columns, of experts ("I") or dense networks ("F")."""
    names = split_names(config, shard.expert_parallel)
    units = [column_unit(config, axis, names)]
    if config.dense_intermediate_size is None:  # both are intermediate_size
        units = [column_unit(config, axis, names) for axis in "IF"]
    total = axes(config)[axis]
    if axis == "I" and shard.expert_parallel:
        return range(total)
    return shard.part(total, math.lcm(*units))


def parts_of_axes(config: ModelConfig, shard: Shard) -> dict[str, list[range]]:
    """What a rank has of each axis; one range for each part, as q, k and v are."""
    kv = shard.part(config.num_key_value_heads)
    group = config.num_attention_heads // config.num_key_value_heads

    def times(part: range, factor: int) -> range:
        return range(part.start * factor, part.stop * factor)

    heads = times(kv, group)
    q, kv = times(heads, config.head_dim), times(kv, config.head_dim)
    inner, dense = (inner_part(config, shard, axis) for axis in "IF")
    # Rows of gate and up alternate in gpt-oss; in others all of gate come first.
    alternate = config.activation == "clamped_swiglu"
    return {
        "E": [held_experts(config, shard) or range(config.num_local_experts)],
        "H": [heads],
        "Q": [q],
        "QKV": [q, kv, kv],
        "I": [inner],
        "2I": [times(inner, 2)] if alternate else [inner, inner],
        "F": [dense],
        "2F": [dense, dense],
        "V": [shard.vocabulary(config)],
    }


def narrow_weight(weight: StoredWeight, axis: int, part: range) -> StoredWeight:
    """Rows (axis -2), columns (-1), experts (-3) of a weight [..., out, in], as views.

    Of an ordinary tensor any axis. Columns of packed weights are whole blocks; where
    rows end within a tile, all tiles are cut lower, so that each row keeps its scale.
    """
    if not isinstance(weight, Scaled):
        return sliced(weight, axis, part)
    start, stop, size = part.start, part.stop, len(part)
    values, (rows, columns) = weight.values.narrow(axis, start, size), weight.tile
    scales, (height, width) = weight.scales, weight.shape[-2:]
    if axis == -3:
        scales = scales.narrow(axis, start, size)
        return Scaled(values, scales, weight.tile, weight.inputs)
    if axis == -2:
        lower = math.gcd(rows, start, 0 if stop == height else stop)
        scales = scales.repeat_interleave(rows // lower, -2)
        scales = scales[..., start // lower : -(-stop // lower), :]
        return Scaled(values, scales, (lower, columns), weight.inputs)
    if columns < width:
        scales = scales[..., start // columns : -(-stop // columns)]
    return Scaled(values, scales, (rows, min(columns, size)), weight.inputs)


def as_contiguous(weight: StoredWeight) -> Weight | PackedExperts:
    """A weight whose numbers lie one after the other; copied if they don't."""
    if isinstance(weight, Tensor):
        return weight.contiguous()
    return move_weight(weight, Tensor.contiguous)


@dataclass(frozen=True, eq=False)
class RowParallel(Scaled):
    """Some columns of a weight whose inputs are rounded by one scale for all columns.

    ``largest`` is an all-reduce: of each number, the greatest that a rank has.
    """

    largest: Callable[[Tensor], Tensor]

    def round_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`Scaled.round_inputs`, as if the columns of the other ranks were there."""
        x = x.float()
        # One column stands for all that decides the scale.
        x = torch.cat([x, self.largest(x.abs().amax(-1, keepdim=True))], dim=-1)
        tile = 1, x.shape[-1]
        values, scales = round_tiles(x[..., None, :], tile, self.values.dtype)
        return values.squeeze(-2)[..., :-1], scales.squeeze(-2)


class ShardedSource:
    """A rank's part of a model: a `Source` of slices, whose ``config`` is the rank's.

    Of safetensors files a rank reads its slices only. ``largest`` is that of
    `RowParallel`. Raises ValueError as `check_shards` does.
    """

    def __init__(
        self, source: Source, shard: Shard, largest: Callable[[Tensor], Tensor]
    ) -> None:
        self.source, self.shard, self.largest = source, shard, largest
        self.files = source.files
        self.config = shard_config(source.config, shard)
        how = shard.expert_parallel, shard.data_parallel
        self.table = split_names(source.config, *how)
        self.parts = parts_of_axes(source.config, shard)
        self.totals = axes(source.config)
        self.shapes = tensor_shapes(self.config)

    @property
    def mapped(self) -> bool:
        """Whether all experts are views of a file: slices of them are copied."""
        return self.shard.expert_parallel and self.source.mapped

    def names(self) -> list[str]:
        return self.source.names()

    def stored(self, ours: str) -> list[TensorInfo]:
        """What is stored for the tensor that we call ``ours``, for all ranks."""
        return self.source.stored(ours)

    def __getitem__(self, ours: str) -> Weight | PackedExperts:
        """This rank's part of a weight; of a bias that all share, zeros but on one."""
        weight, form = self._cut(ours), self.source.config.formats.get(ours)
        name = self.table[ours]
        if form is None or name.split != name.shape.split()[-1]:
            return weight
        if isinstance(weight, Scaled) and form.inputs and not form.tile[1]:
            parts = weight.values, weight.scales, weight.tile, weight.inputs
            return RowParallel(*parts, self.largest)
        return weight

    def _cut(self, ours: str) -> Weight | PackedExperts:
        split, named = self.table[ours].split, self.table[ours].shape.split()
        if not split:
            weight = self.source[ours]
            summed = self.shard.rank and not self.shard.data_parallel
            if summed and ours.endswith(PARTIAL_BIASES):
                assert isinstance(weight, Tensor)
                return torch.zeros_like(weight)
            return weight
        axis, ranges = named.index(split) - len(named), self.parts[split]
        whole = self.totals[split]
        starts = [0, *accumulate(self.totals[n] for n in PARTS_OF.get(split, ()))]
        cuts = []
        for number, part in enumerate(self.stored_parts(ours)):
            if split == "E" and len(part.shape) < len(named):  # one, or its half
                cuts.append(as_contiguous(part))
                continue
            if part.shape[axis] == whole:  # several parts in one
                shifts = zip(starts, ranges, strict=False)
                moved = [range(s + r.start, s + r.stop) for s, r in shifts]
            else:
                moved = [ranges[number % len(ranges)]]
            pieces = [narrow_weight(part, axis, one) for one in moved]
            cuts.append(as_contiguous(concat_weights(pieces, axis)))
        if len(cuts) == 1:
            return cuts[0]
        shape = self.shapes[ours]
        coded = [cut for cut in cuts if isinstance(cut, MXFP4 | Scaled)]
        if coded:
            return join_weights(coded, shape)
        return torch.cat([cut for cut in cuts if isinstance(cut, Tensor)]).view(shape)

    def stored_parts(self, ours: str) -> Sequence[StoredWeight]:
        """The parts of a weight that lie apart, if they can be had so."""
        if isinstance(self.source, Checkpoint):
            held = self.parts["E"][0] if self.table[ours].split == "E" else None
            return self.source.parts(ours, held)
        weight = self.source[ours]
        assert not isinstance(weight, CPUWeight)  # see `takes_packed`
        return [weight]
