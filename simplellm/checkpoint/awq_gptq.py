"""Weights of 4 bits in groups, as AWQ, GPTQ and compressed-tensors store them.

AWQ: Lin et al. 2023, arXiv:2306.00978; GPTQ: Frantar et al. 2022, arXiv:2210.17323. Of
both only how the numbers lie in files is here: a number is (value - zero) * scale.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from simplellm.base.config import expect
from simplellm.checkpoint.formats import AWQ, GPTQ, WORD, GroupedInt4

# In which of a word's eight values AWQ has the first to the last of eight columns.
AWQ_REVERSE_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


def unpack(words: Tensor) -> Tensor:
    """The eight values of each of int32 ``words`` [..., N], lowest bits first."""
    shifts = torch.arange(0, 4 * WORD, 4, dtype=torch.int32)
    return ((words[..., None] >> shifts) & 15).flatten(-2)


def unpack_awq(words: Tensor) -> Tensor:
    """`unpack` of AWQ's words, whose values lie even columns first."""
    return unpack(words).unflatten(-1, (-1, WORD))[..., AWQ_REVERSE_ORDER].flatten(-2)


def dequantize_each(form: GroupedInt4, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The numbers of weights whose tensors follow each other."""
    count = len(form.suffixes)
    starts = range(0, len(tensors), count)
    return [dequantize_groups(form, tensors[at : at + count]) for at in starts]


def dequantize_groups(form: GroupedInt4, parts: Sequence[Tensor]) -> Tensor:
    """float32 numbers [out, in] from the tensors of ``form``, in its suffixes' order.

    Raises ValueError for an input of a group that has no scale.
    """
    words, scales, third, *index = parts
    if form.suffixes == AWQ:
        values, zeros = unpack_awq(words).mT, unpack_awq(third).mT
    elif form.suffixes == GPTQ:
        values, zeros = unpack(words.mT)[:, : len(index[0])], unpack(third).mT
    else:
        values = unpack(words)[:, : int(third[-1])]
        scales, zeros = scales.mT, torch.full_like(scales, 8, dtype=torch.int32)
    height, width, groups = scales.shape[1], values.shape[1], len(scales)
    size = form.group_size or width
    of_group = index[0].long() if index else torch.arange(width) // size
    for group in (int(of_group.min()), int(of_group.max())):
        expected = f"0 to {groups - 1}, which have scales"
        expect(0 <= group < groups, "the group of an input", group, expected)
    offsets = (zeros[:height] + form.zero).float() * scales.float().mT
    weight = values[:height] * scales.float().mT[:, of_group]
    return weight.sub_(offsets[:, of_group])
