"""Weights of 4 bits that a CPU multiplies as they are, with PyTorch's product for them.

A row's numbers are in groups of 32, each with a scale and an offset. What such a weight
is multiplied with, its scales and its products are rounded to bfloat16; sums are
float32. For many tokens the numbers themselves are kept as well: in float16, which
FBGEMM multiplies in less time than float32, where PyTorch has that. Of 8 bits, these
are the only ones that are used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from simplellm.checkpoint.scaled import Scaled

GROUP_SIZE = 32
ROWS = 16  # a weight has a multiple of so many
# Tokens up to which the packed product is the faster one, with AVX2 as with AVX-512. Of
# 8 bits, which are two of them, it's slower than float16's with AVX2 for one token.
MAX_PACKED_TOKENS = 8
FEW = 64  # rows, up to which all of them are summed alike in float16


def as_bfloat16(x: Tensor) -> Tensor:
    """x rounded to bfloat16, as float32."""
    return x.to(torch.bfloat16).float()


@dataclass(frozen=True, eq=False)
class Codes:
    """A weight [out, in] of numbers from 0 to 15, before it is packed.

    ``values`` int32 [out, in], float32 ``scales`` and ``offsets`` [out, in / 32]. A
    number is (value - 8) * scale + offset.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor

    def packed(self) -> tuple[Tensor, Tensor]:
        """What PyTorch's product reads: packed values, and bfloat16 [G, out, 2]."""
        both = torch.stack([self.scales.mT, self.offsets.mT], -1).to(torch.bfloat16)
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        return pack(self.values, 1), both.contiguous()

    def dequantize(self) -> Tensor:
        """float32 [out, in], of scales and offsets as they are once packed."""
        scales, offsets = (
            as_bfloat16(x).repeat_interleave(GROUP_SIZE, -1)
            for x in (self.scales, self.offsets)
        )
        return (self.values - 8) * scales + offsets


def split_int8(weight: Scaled) -> list[Codes]:
    """An int8 weight [out, in] with ``scales`` [out, in / 32], as a sum of two."""
    values, scales = weight.values.int(), weight.scales
    high, low = values >> 4, values & 15
    return [
        Codes(high + 8, 16 * scales, torch.zeros_like(scales)),
        Codes(low, scales, 8 * scales),
    ]


def packed_product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 x [T, in] times the packed weight [out, in], transposed, as float32."""
    return torch._weight_int4pack_mm_for_cpu(x, codes, GROUP_SIZE, scales).float()


@cache
def has_float16_product() -> bool:
    """Whether PyTorch has a product with float16 weights here: with FBGEMM, on x86."""
    weight = torch.arange(48 * 64).view(48, 64) % 13 / 4 - 1.5
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
        found = torch.ops.quantized.linear_dynamic_fp16(weight[:9], packed)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(found, functional.linear(weight[:9], weight))  # sums are exact


@cache
def even_counts() -> tuple[int, ...]:
    """For 0 to FEW rows, how many FBGEMM should multiply, so that all are summed alike.

    It multiplies a few rows at once. Of some counts one or two are left, and these are
    summed in another order; so there are rows of zeros behind them.
    """
    chance = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=chance) for rows in (FEW + 2, 48))
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    product = torch.ops.quantized.linear_dynamic_fp16
    alike = torch.cat([product(three, packed) for three in x.split(3)])
    even = [n for n in range(len(x)) if product(x[:n], packed).equal(alike[:n])]
    return tuple(next((n for n in even if n >= rows), rows) for rows in range(FEW + 1))


def dequantized_bytes(count: int) -> int:
    """What so many numbers take that are kept for many tokens."""
    return count * (2 if has_float16_product() else 4)


def is_never_packed(addends: int, keep_dequantized: bool) -> bool:
    """Whether the kept numbers are the faster ones, for one token as for many."""
    return addends > 1 and keep_dequantized and has_float16_product()


def keep_numbers(weight: Tensor) -> Any:
    """float32 [out, in] for `kept_product`: as FBGEMM packs its float16, or itself."""
    if not has_float16_product():
        return weight
    return torch.ops.quantized.linear_prepack_fp16(weight, None)


def kept_product(x: Tensor, kept: Any) -> Tensor:
    """float32 x [T, in] times a kept weight [out, in], transposed."""
    if isinstance(kept, Tensor):
        return functional.linear(x, kept)
    rows = len(x)
    if rows <= FEW and (more := even_counts()[rows] - rows):
        x = functional.pad(x, (0, 0, 0, more))
    product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, kept)
    return product[:rows]


@dataclass(frozen=True, eq=False)
class Int4:
    """A weight [out, in] of 4 bits, or of 8 as a sum of two of 4 bits."""

    parts: Sequence[tuple[Tensor, Tensor]]  # none where the numbers are always faster
    dequantized: Any  # of `keep_numbers`, for many tokens; None: too large
    shape: tuple[int, int]

    @classmethod
    def of(cls, codes: Sequence[Codes], keep_dequantized: bool) -> "Int4":
        """Pack the sum of ``codes``, which must fit: see ROWS, GROUP_SIZE."""
        numbers = None
        if keep_dequantized:
            every = torch.stack([part.dequantize() for part in codes])
            numbers = keep_numbers(every.sum(0))
        rows, columns = codes[0].values.shape
        if is_never_packed(len(codes), keep_dequantized):
            codes = ()
        return cls([part.packed() for part in codes], numbers, (rows, columns))

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        packed = sum(tensor.nbytes for part in self.parts for tensor in part)
        kept = 0 if self.dequantized is None else math.prod(self.shape)
        return packed + dequantized_bytes(kept)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] times the weight, transposed, plus ``bias`` [out], in x's dtype.

        A row's numbers do not depend on the other rows, of which there may be FEW; with
        more of them, the sums are in another order before they are rounded.
        """
        rounded = x.bfloat16()
        many = len(x) > MAX_PACKED_TOKENS or not self.parts
        if self.dequantized is not None and many:
            y = as_bfloat16(kept_product(rounded.float(), self.dequantized))
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
    order = torch.arange(80 * 4 * GROUP_SIZE, dtype=torch.int32).view(80, -1)
    scales = 1 + torch.arange(80 * 4).view(80, 4) % 7 / 8
    codes = Codes(order * 5 % 16, scales, scales - 1.5)
    x = (order[: MAX_PACKED_TOKENS + 1] * 3 % 17 - 8) / 4
    try:
        packed = Int4.of([codes], False).product(x)
    except (AttributeError, RuntimeError):  # of a PyTorch that has it otherwise
        return False
    exact = functional.linear(x, codes.dequantize())
    return torch.allclose(packed, exact, rtol=2**-7, atol=2**-7 * float(exact.std()))
