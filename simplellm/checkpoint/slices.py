"""Which rows and columns of a weight a rank has, and how they are cut out."""

from torch import Tensor

from simplellm.base.config import BLOCK
from simplellm.checkpoint.mxfp4 import MXFP4


def part_of(total: int, rank: int, size: int, unit: int = 1) -> range:
    """Which of ``total`` rows or columns ``rank`` of ``size`` ranks has.

    Cuts lie between units of so many: parts differ by one unit at most, but for what
    the last unit lacks.
    """
    units = -(-total // unit)
    start, stop = (units * n // size for n in (rank, rank + 1))
    return range(start * unit, min(stop * unit, total))


def sliced(weight: Tensor | MXFP4, axis: int, part: range) -> Tensor | MXFP4:
    """The rows or columns ``part`` of a weight, as views.

    ``axis`` is negative, of an MXFP4 [..., out, in] it is -1 or -2; a part of its
    inputs is whole blocks.
    """
    start, size = part.start, len(part)
    if isinstance(weight, Tensor):
        return weight.narrow(axis, start, size)
    if axis == -1:
        start, size = start // BLOCK, size // BLOCK
    blocks = weight.blocks.narrow(axis - 1, start, size)
    return MXFP4(blocks, weight.scales.narrow(axis, start, size))
