"""Blocks of equally spaced values that share a scale: Q4_0 to Q8_0, Q4_K to Q6_K.

Of 32 values, in Q6_K of 16. N rows of C columns, G blocks a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from simplellm.base.config import BLOCK

# What the values of a type are around: half of as many as there are.
MIDDLES = dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), 8)
MIDDLES |= dict.fromkeys(("Q5_0", "Q5_1", "Q5_K"), 16)
MIDDLES |= {"Q6_K": 32, "Q8_0": 128}


class Blocks(NamedTuple):
    """The numbers of a matrix: value * scale + least.

    Where ``least`` is None, (value - middle) * scale.
    """

    values: Tensor  # uint8 [N, C]
    scales: Tensor  # float32 [N, G]
    least: Tensor | None
    middle: int

    @property
    def offsets(self) -> Tensor:
        """What the middle stands for, float32 [N, G]."""
        if self.least is None:
            return torch.zeros_like(self.scales)
        return self.least + self.middle * self.scales

    def numbers(self) -> Tensor:
        """float32 [N, C]."""
        values = self.values.float().unflatten(-1, (self.scales.shape[-1], -1))
        if self.least is None:
            values -= self.middle
        values *= self.scales[..., None]
        if self.least is not None:
            values += self.least[..., None]
        return values.flatten(-2)


def float16_at(blocks: Tensor, start: int) -> Tensor:
    """The float16 number that begins at a byte of each block [..., bytes]."""
    two = blocks[..., start : start + 2].contiguous()
    return two.view(torch.float16).squeeze(-1).float()


def nibbles(packed: Tensor) -> Tensor:
    """The values of ``packed`` [..., n] -> [..., 2n]: low halves come first."""
    return torch.cat([packed & 15, packed >> 4], -1)


def bits(packed: Tensor) -> Tensor:
    """The bits of ``packed`` [..., n] -> [..., 8, n], lowest first."""
    return (packed[..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1


def read_blocks(rows: Tensor, kind: str) -> Blocks:
    """The blocks of uint8 ``rows`` [N, bytes] of one of the types of `MIDDLES`."""
    if kind == "Q6_K":
        return read_6k(rows)
    read = read_k if kind.endswith("_K") else read_legacy
    return read(rows, kind, MIDDLES[kind])


def read_legacy(rows: Tensor, kind: str, middle: int) -> Blocks:
    """A block is its scale, perhaps the least number, perhaps high bits, and values."""
    has_least, five = kind.endswith("_1"), middle == 16
    start = 4 if has_least else 2
    if kind == "Q8_0":
        blocks = rows.unflatten(-1, (-1, start + BLOCK))
        values = blocks[..., start:] ^ 128  # they are signed there
    else:
        blocks = rows.unflatten(-1, (-1, start + 4 * five + BLOCK // 2))
        values = nibbles(blocks[..., start + 4 * five :])
        if five:
            high = blocks[..., start : start + 4]
            values += bits(high).mT.flatten(-2) << 4
    least = float16_at(blocks, 2) if has_least else None
    return Blocks(values.flatten(-2), float16_at(blocks, 0), least, middle)


def read_k(rows: Tensor, kind: str, middle: int) -> Blocks:
    """Of Q4_K and Q5_K: 8 blocks share two float16 numbers.

    Each block has two numbers of 6 bits to multiply them with, packed into 12 bytes.
    """
    five = middle == 16
    blocks = rows.unflatten(-1, (-1, 16 + BLOCK * five + 4 * BLOCK))  # [N, B, bytes]
    scale, least = float16_at(blocks, 0), float16_at(blocks, 2)  # [N, B]
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)  # [N, B, 8]
    leasts = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)
    body = blocks[..., 16:]
    # 32 bytes hold two blocks, one in the low halves and one in the high ones.
    values = nibbles(body[..., BLOCK * five :].unflatten(-1, (4, BLOCK)))
    values = values.unflatten(-1, (2, BLOCK)).flatten(-3, -2)  # [N, B, 8, 32]
    if five:
        values += bits(body[..., :BLOCK]) << 4
    scales, leasts = scale[..., None] * scales, least[..., None] * leasts
    return Blocks(values.flatten(1), scales.flatten(1), -leasts.flatten(1), middle)


def read_6k(rows: Tensor) -> Blocks:
    """Of Q6_K: 16 blocks share a float16 number, which their scales of 8 bits multiply.

    Of each 128 values, lower halves of 64 bytes have the first 64 lower 4 bits; then,
    32 bytes have all upper 2 bits, those of the first 32 values lowest.
    """
    blocks = rows.unflatten(-1, (-1, 210))  # [N, B, bytes]
    low, high = blocks[..., :128], blocks[..., 128:192]
    low, high = low.unflatten(-1, (2, 64)), high.unflatten(-1, (2, 1, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    values = nibbles(low) | ((high >> shifts & 3) << 4).flatten(-2)  # [N, B, 2, 128]
    scales = blocks[..., 192:208].contiguous().view(torch.int8)  # [N, B, 16]
    scales = scales * float16_at(blocks, 208)[..., None]
    return Blocks(values.flatten(1), scales.flatten(1), None, MIDDLES["Q6_K"])
