"""Quantized weights (`MXFP4`, `Scaled`): made of stored tensors, or by rounding."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from simplellm.base.config import BLOCK, expect
from simplellm.checkpoint.cpu_weights import CPUWeight
from simplellm.checkpoint.formats import NumberFormat
from simplellm.checkpoint.mxfp4 import MXFP4, StoredWeight, quantize
from simplellm.checkpoint.scaled import Scaled, join

Coded = Scaled | MXFP4


def decode_weight(form: NumberFormat, parts: Sequence[Tensor]) -> Coded:
    """The weight of a format, from its tensors on disk. Only words are copied.

    Raises TypeError or ValueError for tensors of another format.
    """
    values, scales, *shape = parts
    if form.is_mxfp4:
        return MXFP4(values.view(*scales.shape, BLOCK // 2), scales)
    if values.dtype == torch.int32:  # four a word, the first lowest, all plus 128
        values = (values.view(torch.uint8) ^ 128).view(torch.int8)
        values = values[..., : int(shape[0][-1])]
    expected = f"torch.{form.dtype}"
    ok = str(values.dtype) == expected
    expect(ok, "a weight", values.dtype, expected, TypeError)
    tile = form.tile[0], form.tile[1] or values.shape[-1]
    if form.one_scale:
        scales = scales.reshape(1, 1).expand(values.shape[0], 1)
    elif tile[0] == 1:
        scales = scales.reshape(*values.shape[:-1], -1)  # some files lack the last axis
    return Scaled(values, scales.float(), tile, form.inputs)


def decode_weights(form: NumberFormat, parts: Sequence[Tensor]) -> list[Coded]:
    """The weights of a format whose tensors on disk follow one another."""
    count = len(form.suffixes)
    starts = range(0, len(parts), count)
    return [decode_weight(form, parts[start : start + count]) for start in starts]


def encode_weight(form: NumberFormat, weight: Tensor) -> Coded:
    """``weight`` [..., out, in] rounded to a format."""
    if form.is_mxfp4:
        return quantize(weight)
    return Scaled.of(weight, form.tile, getattr(torch, form.dtype), form.inputs)


def tensors(weight: Coded) -> tuple[Tensor, Tensor]:
    """The numbers of a weight and its scales."""
    if isinstance(weight, MXFP4):
        return weight.blocks, weight.scales
    return weight.values, weight.scales


def move_weight(
    weight: Coded | CPUWeight, send: Callable[[Tensor], Tensor]
) -> Coded | CPUWeight:
    """``weight`` where ``send`` brings its tensors. Those for a CPU are there."""
    if isinstance(weight, CPUWeight):
        return weight
    numbers, scales = map(send, tensors(weight))
    if isinstance(weight, MXFP4):
        return MXFP4(numbers, scales)
    return replace(weight, values=numbers, scales=scales)


def concat_weights(parts: Sequence[StoredWeight], axis: int) -> StoredWeight:
    """Parts of one weight, one after the other along ``axis``; copied once."""
    if len(parts) == 1:
        return parts[0]
    if packed := [part for part in parts if isinstance(part, MXFP4)]:
        blocks = torch.cat([part.blocks for part in packed], axis - 1)
        return MXFP4(blocks, torch.cat([part.scales for part in packed], axis))
    if scaled := [part for part in parts if isinstance(part, Scaled)]:
        return join(scaled)
    return torch.cat([part for part in parts if isinstance(part, Tensor)], axis)


def join_weights(weights: Sequence[Coded], shape: Sequence[int]) -> Coded:
    """Weights of one format, one below the other, as one of ``shape`` [..., out, in].

    One alone is not copied.
    """
    whole = concat_weights(weights, -2)
    if isinstance(whole, MXFP4):
        groups = *shape[:-1], shape[-1] // BLOCK
        return MXFP4(whole.blocks.view(*groups, BLOCK // 2), whole.scales.view(groups))
    assert isinstance(whole, Scaled)
    return whole.view(*shape)
