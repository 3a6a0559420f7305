"""Weights in float16 that a CPU multiplies with float32 inputs: FBGEMM's product.

It takes less time than float32's, since half as much is read, and its sums are float32.
On x86 with AVX2, PyTorch has it.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

FEW = 64  # rows, up to which all of them are summed alike
# Numbers that are packed at once, column by column: their rows should stay in a cache.
PART = 2**24
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
    packed = pack(weight)
    product = torch.ops.quantized.linear_dynamic_fp16
    alike = torch.cat([product(three, packed) for three in x.split(3)])
    even = [n for n in range(len(x)) if product(x[:n], packed).equal(alike[:n])]
    return tuple(next((n for n in even if n >= rows), rows) for rows in range(FEW + 1))


def fits(weight: Tensor) -> bool:
    """Whether no number is too large for float16, and none is NaN."""
    return all(-MAX_FLOAT16 <= float(end) <= MAX_FLOAT16 for end in weight.aminmax())


def pack(weight: Tensor) -> Any:
    """``weight`` [out, in] as FBGEMM reads it. It changes float32 that does not fit."""
    return torch.ops.quantized.linear_prepack_fp16(weight.float(), None)


@dataclass(frozen=True, eq=False)
class Float16:
    """A weight [out, in], each number rounded to the nearest one of float16.

    What does not fit has been replaced by the largest number, NaN by the least.
    """

    packed: Sequence[Any]  # some rows each, as FBGEMM reads them
    shape: tuple[int, int]

    @classmethod
    def of(cls, weight: Tensor) -> "Float16":
        """Round ``weight``, floats [out, in]."""
        rows, columns = weight.shape
        parts = weight.split(max(1, PART // columns))
        if len(parts) == 1:
            return cls([pack(weight)], (rows, columns))
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            return cls([*pool.map(pack, parts)], (rows, columns))

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return 2 * math.prod(self.shape)

    def dequantize(self) -> Tensor:
        """The numbers, float32 [out, in]."""
        unpack = torch.ops.quantized.linear_unpack_fp16
        return torch.cat([unpack(part)[0].float() for part in self.packed])

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] times the weight, transposed, plus ``bias`` [out], in x's dtype.

        A row's numbers do not depend on the other rows, of which there may be FEW.
        """
        rows, many = len(x), x.float()
        product = torch.ops.quantized.linear_dynamic_fp16
        if rows <= FEW and (more := even_counts()[rows] - rows):
            many = functional.pad(many, (0, 0, 0, more))
        parts = [product(many, part) for part in self.packed]
        y: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        y = y[:rows]
        if bias is not None:
            y += bias.float()
        return y.to(x.dtype)
