"""MXFP4: weights of 4 bits, each block of 32 sharing one power of two.

The format of the OCP Microscaling Formats specification, v1.0 (2023), described in
Rouhani et al., "Microscaling Data Formats for Deep Learning", arXiv:2310.10537. An
element is e2m1: a sign, two bits of exponent, one of mantissa, no infinity, no NaN. A
scale is e8m0: the byte s stands for 2^(s - 127), 255 for NaN.

G = in / 32 blocks of a row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from simplellm.base.config import BLOCK
from simplellm.checkpoint.cpu_weights import CPUMatrix
from simplellm.checkpoint.scaled import Scaled

EMAX = 2  # exponent of the largest e2m1 value, 6 = 1.5 * 2^2
BIAS = 127  # a scale byte minus this is the exponent

VALUES = (
    *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
)

# The two values that each byte holds: the low nibble is the even element.
PAIRS = torch.tensor([[VALUES[b & 15], VALUES[b >> 4]] for b in range(256)])


def decode_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The powers of two that uint8 ``scales`` stand for; 255 is NaN."""
    return scales.view(torch.float8_e8m0fnu).to(dtype)


@dataclass(frozen=True, eq=False)
class MXFP4:
    """A packed weight [..., out, in]; leading dimensions, if any, are experts.

    blocks uint8 [..., out, G, 16], two elements a byte, the even one in the low nibble;
    scales uint8 [..., out, G]. Raises TypeError or ValueError for anything else.
    """

    blocks: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        for name, tensor in (("blocks", self.blocks), ("scales", self.scales)):
            if tensor.dtype != torch.uint8:
                raise TypeError(f"{name} are {tensor.dtype}; expected torch.uint8")
        expected = (*self.scales.shape, BLOCK // 2)
        if self.blocks.shape != expected:
            raise ValueError(
                f"blocks are {list(self.blocks.shape)}; expected {list(expected)}, 16 "
                f"bytes for each of the scales {list(self.scales.shape)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantized weight."""
        *leading, groups = self.scales.shape
        return (*leading, groups * BLOCK)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, 4.25 bits an element."""
        return self.blocks.nbytes + self.scales.nbytes

    def __getitem__(self, index: Any) -> "MXFP4":
        """One expert, or several: any index into the leading dimensions."""
        return MXFP4(self.blocks[index], self.scales[index])

    def to(self, device: torch.device | str) -> "MXFP4":
        """This weight on another device."""
        return MXFP4(self.blocks.to(device), self.scales.to(device))

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight [..., out, in] as ordinary numbers.

        Exact in bfloat16 and float32, except that scales 253 and 254 overflow to
        infinity where the element is too large for them, and 255 gives NaN.
        """
        # Unless it overflows, bfloat16 and float32 hold a product exactly. A pair of
        # either is one integer wide, so that one lookup per byte moves two elements.
        work = dtype if dtype == torch.bfloat16 else torch.float32
        wide = torch.int32 if dtype == torch.bfloat16 else torch.int64
        table = PAIRS.to(self.blocks.device, work).view(wide).flatten()  # [256]
        pairs = table.index_select(0, self.blocks.flatten().int())
        values = pairs.view(work).view(*self.scales.shape, BLOCK)  # [..., out, G, 32]
        values *= decode_scales(self.scales, work)[..., None]
        return values.view(self.shape).to(dtype)


def choose_scales(values: Tensor) -> Tensor:
    """The scale bytes, uint8 [..., G], of blocks ``values`` float32 [..., G, 32].

    They stand for 2^(floor(log2 of the block's largest magnitude) - 2), within e8m0's
    2^-127 to 2^127. A block of zeros gets the smallest.
    """
    largest = values.abs().amax(-1)  # [..., G]
    # frexp's mantissa is in [0.5, 1): exponent - 1 is floor(log2), with no rounding.
    shared = torch.frexp(largest).exponent - 1 - EMAX
    shared = shared.masked_fill(largest == 0, -BIAS).clamp(-BIAS, BIAS)
    return (shared + BIAS).to(torch.uint8)


def quantize(weight: Tensor) -> MXFP4:
    """Round ``weight`` [..., out, in] to MXFP4 as the specification says (section 6.3).

    Each block has the scale of `choose_scales`; elements go to the nearest e2m1 value,
    ties to the even code, and saturate at 6 times the scale.

    Raises TypeError for integers, ValueError for NaN, infinity, or a last dimension
    that is not a multiple of 32.
    """
    if not weight.is_floating_point():
        raise TypeError(f"weight is {weight.dtype}; expected floating point")
    if weight.dim() == 0 or weight.shape[-1] == 0 or weight.shape[-1] % BLOCK:
        raise ValueError(
            f"weight is {list(weight.shape)}; expected a last dimension that is a "
            f"multiple of {BLOCK}"
        )
    values = weight.detach().float().unflatten(-1, (-1, BLOCK))  # [..., out, G, 32]
    if not values.isfinite().all():
        raise ValueError("weight has NaN or infinity; expected finite numbers")
    scales = choose_scales(values)
    size = values.abs() / decode_scales(scales, torch.float32)[..., None]  # below 8
    # Codes 0 to 4 are 0.5 apart, 4 to 6 are 1 apart, 6 and 7 are 2 apart. Each range
    # starts at an even code, so rounding halves to even is rounding to even codes.
    # Rounding comes before the shift: the shift could round a number onto a tie.
    codes = torch.where(
        size < 2,
        (size * 2).round(),
        torch.where(size < 4, size.round() + 2, (size / 2).round() + 4),
    ).clamp(max=7)
    codes = codes.to(torch.uint8) | (values.signbit().to(torch.uint8) << 3)
    return MXFP4(codes[..., 0::2] | (codes[..., 1::2] << 4), scales)


StoredWeight = Tensor | MXFP4 | Scaled
Weight = StoredWeight | CPUMatrix
