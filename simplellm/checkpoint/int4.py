"""Weights of 4 bits that a CPU multiplies as they are, with PyTorch's product for them.

A row's numbers are in groups of 32, each with a scale and an offset. What such a weight
is multiplied with, its scales and its products are rounded to bfloat16; sums are
float32. For many tokens the numbers themselves may be kept as well, as a `Float16`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from simplellm.checkpoint.float16 import Float16, fits

GROUP_SIZE = 32
ROWS = 16  # a weight has a multiple of so many
# Tokens up to which the packed product is the faster one, with AVX2 as with AVX-512.
MAX_PACKED_TOKENS = 8


def as_bfloat16(x: Tensor) -> Tensor:
    """x rounded to bfloat16, as float32."""
    return x.to(torch.bfloat16).float()


@dataclass(frozen=True, eq=False)
class Codes:
    """A weight [out, in] of numbers from 0 to 15, before it is packed.

    ``values`` uint8 [out, in], float32 ``scales`` and ``offsets`` [out, in / 32]. A
    number is (value - 8) * scale + offset.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor

    def packed(self) -> tuple[Tensor, Tensor]:
        """What PyTorch's product reads: packed values, and bfloat16 [G, out, 2]."""
        both = torch.stack([self.scales.mT, self.offsets.mT], -1).to(torch.bfloat16)
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        return pack(self.values.int(), 1), both.contiguous()

    def dequantize(self) -> Tensor:
        """float32 [out, in], of scales and offsets as they are once packed."""
        scales, offsets = (
            as_bfloat16(x).repeat_interleave(GROUP_SIZE, -1)
            for x in (self.scales, self.offsets)
        )
        return (self.values.float() - 8) * scales + offsets


def packed_product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 x [T, in] times the packed weight [out, in], transposed, as float32."""
    return torch._weight_int4pack_mm_for_cpu(x, codes, GROUP_SIZE, scales).float()


@dataclass(frozen=True, eq=False)
class Int4:
    """A weight [out, in] of 4 bits, or of 8 as a sum of two of 4 bits."""

    parts: Sequence[tuple[Tensor, Tensor]]
    dequantized: Float16 | None  # for many tokens
    shape: tuple[int, int]

    @classmethod
    def of(cls, codes: Sequence[Codes], keep_dequantized: bool) -> "Int4":
        """Pack the sum of ``codes``, which must fit: see ROWS, GROUP_SIZE."""
        kept = None
        if keep_dequantized:
            whole = torch.stack([part.dequantize() for part in codes]).sum(0)
            kept = Float16.of(whole) if fits(whole) else None
        rows, columns = codes[0].values.shape
        return cls([part.packed() for part in codes], kept, (rows, columns))

    @property
    def scales(self) -> Tensor:
        """All scales and offsets, bfloat16 [G, out, 2] of each part."""
        return torch.stack([scales for _, scales in self.parts])

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        packed = sum(tensor.nbytes for part in self.parts for tensor in part)
        return packed + (self.dequantized.nbytes if self.dequantized else 0)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] times the weight, transposed, plus ``bias`` [out], in x's dtype.

        A row's numbers depend on the other rows only where the weight's own are kept:
        more than MAX_PACKED_TOKENS rows are multiplied with these, in float16.
        """
        rounded = x.bfloat16()
        if self.dequantized is not None and len(x) > MAX_PACKED_TOKENS:
            y = as_bfloat16(self.dequantized.product(rounded.float()))
        else:
            y = packed_product(rounded, *self.parts[0])
            for part in self.parts[1:]:
                y += packed_product(rounded, *part)
        if bias is not None:
            y += bias.float()
        return y if y.dtype == x.dtype else y.to(x.dtype)  # a call takes its time


@cache
def has_int4_product() -> bool:
    """Whether PyTorch has a fast product for `Int4` here, and it is right.

    It is fast with AVX2 and AVX-512; elsewhere, it computes one number at a time.
    """
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    order = torch.arange(80 * 4 * GROUP_SIZE).view(80, -1)
    scales = 1 + torch.arange(80 * 4).view(80, 4) % 7 / 8
    codes = Codes((order * 5 % 16).byte(), scales, scales - 1.5)
    x = (order[: MAX_PACKED_TOKENS + 1] * 3 % 17 - 8) / 4
    try:
        packed = Int4.of([codes], False).product(x)
    except (AttributeError, RuntimeError):  # of a PyTorch that has it otherwise
        return False
    exact = functional.linear(x, codes.dequantize())
    return torch.allclose(packed, exact, rtol=2**-7, atol=2**-7 * float(exact.std()))
