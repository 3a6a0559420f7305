"""Weights in float16 that a CPU multiplies with float32 inputs: FBGEMM's product.

It takes less time than float32's, since half as much is read, and its sums are float32.
On x86 with AVX2, PyTorch has it.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

FEW = 64  # rows, up to which all of them are summed alike
MAX_FLOAT16 = torch.finfo(torch.float16).max


@cache
def has_float16_product() -> bool:
    """Whether PyTorch has the product here, and it is right."""
    weight = torch.arange(48 * 64).view(48, 64) % 13 / 4 - 1.5
    try:
        found = Float16.of(weight).product(weight[:9])
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


def fits(weight: Tensor) -> bool:
    """Whether no number is too large for float16, and none is NaN."""
    return all(-MAX_FLOAT16 <= float(end) <= MAX_FLOAT16 for end in weight.aminmax())


@dataclass(frozen=True, eq=False)
class Float16:
    """A weight [out, in], each number rounded to the nearest one of float16.

    What does not fit has been replaced by the largest number, NaN by the least.
    """

    packed: Any  # as FBGEMM reads it
    shape: tuple[int, int]

    @classmethod
    def of(cls, weight: Tensor) -> "Float16":
        """Round ``weight``, float32 [out, in]."""
        rows, columns = weight.shape
        packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
        return cls(packed, (rows, columns))

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return 2 * math.prod(self.shape)

    def dequantize(self) -> Tensor:
        """The numbers, float32 [out, in]."""
        weight: Tensor = torch.ops.quantized.linear_unpack_fp16(self.packed)[0]
        return weight.float()

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] times the weight, transposed, plus ``bias`` [out], in x's dtype.

        A row's numbers do not depend on the other rows, of which there may be FEW.
        """
        rows, many = len(x), x.float()
        if rows <= FEW and (more := even_counts()[rows] - rows):
            many = functional.pad(many, (0, 0, 0, more))
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(many, self.packed)[:rows]
        if bias is not None:
            y += bias.float()
        return y.to(x.dtype)
