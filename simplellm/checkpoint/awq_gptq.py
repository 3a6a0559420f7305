"""Weights of 4 and 8 bits in groups, as AWQ, GPTQ and compressed-tensors store them.

AWQ: Lin et al. 2023, arXiv:2306.00978; GPTQ: Frantar et al. 2022, arXiv:2210.17323. Of
both only how the numbers lie in files is here: a number is (value - zero) * scale.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from simplellm.base.config import expect
from simplellm.checkpoint.formats import GroupedInt

# In which of a word's eight values AWQ has the first to the last of eight columns.
AWQ_REVERSE_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


def unpack(words: Tensor, bits: int = 4) -> Tensor:
    """The values of so many bits in int32 ``words`` [..., N], lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def unpack_awq(words: Tensor) -> Tensor:
    """`unpack` of AWQ's words, whose values lie even columns first."""
    return unpack(words).unflatten(-1, (-1, 8))[..., AWQ_REVERSE_ORDER].flatten(-2)


def dequantize_each(form: GroupedInt, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The numbers of weights whose tensors follow each other."""
    count = len(form.suffixes)
    starts = range(0, len(tensors), count)
    return [dequantize_groups(form, tensors[at : at + count]) for at in starts]


def dequantize_groups(form: GroupedInt, parts: Sequence[Tensor]) -> Tensor:
    """float32 numbers [out, in] from the tensors of ``form``, in its suffixes' order.

    Raises ValueError for an input of a group that has no scale.
    """
    stored, bits = dict(zip(form.suffixes, parts, strict=True)), form.bits
    if form.is_awq:
        values, zeros = (unpack_awq(stored[name]).mT for name in ("qweight", "qzeros"))
        width = values.shape[1]
    elif "qweight" in stored:
        values = unpack(stored["qweight"].mT, bits)
        zeros = unpack(stored["qzeros"], bits).mT
        width = len(stored.get("g_idx", values[0]))
    else:
        values, width = unpack(stored["_packed"], bits), int(stored["_shape"][-1])
        zeros = torch.full_like(stored["_scale"], 2 ** (bits - 1))
        if "_zero_point" in stored:
            zeros = unpack(stored["_zero_point"].mT, bits).mT
    scales = stored["_scale"] if "_scale" in stored else stored["scales"].mT
    scales, (height, groups) = scales.float(), scales.shape
    of_group = torch.arange(width) // (form.group_size or width)
    if (index := stored.get("g_idx", stored.get("_g_idx"))) is not None:
        of_group = index.long()
    for group in (int(of_group.min()), int(of_group.max())):
        expected = f"0 to {groups - 1}, which have scales"
        expect(0 <= group < groups, "the group of an input", group, expected)
    offsets = (zeros[:height] + form.zero).float() * scales
    weight = values[:height, :width] * scales[:, of_group]
    return weight.sub_(offsets[:, of_group])
