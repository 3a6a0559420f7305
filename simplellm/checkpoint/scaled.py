"""Weights of 8 bits, FP8 or INT8: each tile of them shares a scale.

FP8 is e4m3: a sign, four bits of exponent, three of mantissa, no infinity, from
Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433. Two tilings are
in use: squares of 128 x 128 numbers, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3),
and whole rows. Where the inputs of a product are rounded to 8 bits as well, each token
has a scale for as many columns as a tile has.

R and C: how many tiles a weight is high and wide.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

E4M3 = torch.float8_e4m3fn
LARGEST = {E4M3: 448.0, torch.int8: 127.0}
# The least that a tile's largest magnitude counts as: zeros need a scale as well.
LEAST_TILE = 1e-10
CACHED_ROWS = 128  # of a weight that are numbers at once, which stay in a CPU's cache


def round_tiles(
    x: Tensor, tile: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``x`` [..., out, in] in ``dtype``, and float32 scales [..., R, C] of its tiles.

    A number is its value times its tile's scale. The largest of a tile becomes the
    largest that ``dtype`` has; the others go to the nearest, ties to even.
    """
    (rows, columns), (height, width) = tile, x.shape[-2:]
    x = functional.pad(x.float(), (0, -width % columns, 0, -height % rows))
    x = x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))  # [..., R, r, C, c]
    largest = x.abs().amax((-3, -1), keepdim=True).clamp(min=LEAST_TILE)
    # A number over or under a tensor may be rounded twice.
    most = torch.full_like(largest, LARGEST[dtype])
    x = x * (most / largest)
    values = (x.round_() if dtype == torch.int8 else x).to(dtype)
    values = values.flatten(-4, -3).flatten(-2)[..., :height, :width]
    return values.contiguous(), (largest / most).squeeze(-3).squeeze(-1)


def as_numbers(values: Tensor) -> Tensor:
    """float32 numbers that int8 or e4m3 ``values`` stand for, without their scales.

    A NaN of e4m3, which nobody writes on purpose, becomes 480. (PyTorch's own
    conversion of e4m3 is exact there, too, and takes ten times as long on a CPU.)
    """
    if values.dtype == torch.int8:
        return values.float()
    # float16 has one more bit of exponent, of which e4m3's are the lower ones, and its
    # zero is at 15, not at 7: so what is read there is 2^8 times too small. The sign
    # fills the upper bits of a wider integer; only one of them may stay.
    bits = (values.view(torch.int8).to(torch.int16) << 7) & ~0x4000
    return bits.view(torch.float16).float() * 256


def multiply_tiles(values: Tensor, scales: Tensor, tile: tuple[int, int]) -> Tensor:
    """float32 numbers of ``values`` [..., out, in] times their tiles' scales."""
    x, (rows, columns) = as_numbers(values), tile
    height, width = x.shape[-2:]
    scales = scales.repeat_interleave(rows, -2)[..., :height, :]
    whole = width // columns
    full = x[..., : whole * columns].unflatten(-1, (whole, columns))
    full *= scales[..., :whole, None]
    x[..., whole * columns :] *= scales[..., whole:]  # of a tile that is cut off
    return x


@dataclass(frozen=True, eq=False)
class Scaled:
    """A weight [..., out, in] of 8-bit numbers; leading dimensions are experts.

    ``values`` e4m3 or int8 [..., out, in]; ``scales`` float32 [..., R, C], for tiles of
    so many rows and columns as ``tile`` says, the last of which may be cut off.
    ``inputs``: whether what it is multiplied with is rounded to the same 8 bits.
    Raises TypeError or ValueError for what does not fit together.
    """

    values: Tensor
    scales: Tensor
    tile: tuple[int, int]
    inputs: bool

    def __post_init__(self) -> None:
        dtypes = self.values.dtype, self.scales.dtype
        if dtypes[0] not in LARGEST or dtypes[1] != torch.float32:
            raise TypeError(
                f"values and scales are {dtypes[0]} and {dtypes[1]}; expected "
                "torch.float8_e4m3fn or torch.int8, and torch.float32"
            )
        *leading, height, width = self.shape
        rows, columns = self.tile
        expected = [*leading, -(-height // rows), -(-width // columns)]
        if list(self.scales.shape) != expected:
            raise ValueError(
                f"scales are {list(self.scales.shape)}; expected {expected}, one for "
                f"{rows} x {columns} of the values {list(self.shape)}"
            )

    @classmethod
    def of(
        cls, weight: Tensor, tile: tuple[int, int], dtype: torch.dtype, inputs: bool
    ) -> "Scaled":
        """Round ``weight`` [..., out, in] to ``dtype``. Tiles of 0 columns are rows."""
        tile = tile[0], tile[1] or weight.shape[-1]
        return cls(*round_tiles(weight, tile, dtype), tile, inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, as in a Tensor."""
        return tuple(self.values.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.values.nbytes + self.scales.nbytes

    def __getitem__(self, index: Any) -> "Scaled":
        """One expert, or several: any index into the leading dimensions."""
        return replace(self, values=self.values[index], scales=self.scales[index])

    def view(self, *shape: int) -> "Scaled":
        """The rows in another shape [..., out, in]; no tile in two matrices."""
        scales = self.scales.view(*shape[:-2], -1, self.scales.shape[-1])
        return replace(self, values=self.values.view(shape), scales=scales)

    def to(self, device: torch.device | str) -> "Scaled":
        """This weight on another device."""
        values, scales = self.values.to(device), self.scales.to(device)
        return replace(self, values=values, scales=scales)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight [..., out, in] as ordinary numbers, rounded from float32."""
        return multiply_tiles(self.values, self.scales, self.tile).to(dtype)

    def round_inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., in] in the values' dtype, and its float32 scales [..., C]."""
        tile = 1, self.tile[1]
        values, scales = round_tiles(x[..., None, :], tile, self.values.dtype)
        return values.squeeze(-2), scales.squeeze(-2)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] times the weight [out, in], transposed, plus ``bias`` [out].

        In x's dtype, of sums in float32 or, on a CPU, of integers.
        """
        whole = self.inputs and self.values.dtype == torch.int8
        times = integer_product if whole and x.device.type == "cpu" else float_product
        y = times(x.flatten(0, -2), self).unflatten(0, x.shape[:-1])
        return (y if bias is None else y + bias.float()).to(x.dtype)


def float_product(x: Tensor, weight: Scaled) -> Tensor:
    """x [T, in] times the ``weight`` [out, in], transposed: float32 [T, out].

    Of numbers and sums in float32: with ``weight.inputs``, x is rounded before.
    """
    x, (rows, columns) = x.float(), weight.tile
    if weight.inputs:
        x = multiply_tiles(*weight.round_inputs(x), (1, columns))
    values = weight.values.split(CACHED_ROWS)
    scales = weight.scales.split(CACHED_ROWS // rows)
    parts = zip(values, scales, strict=True)
    products = [functional.linear(x, multiply_tiles(*p, weight.tile)) for p in parts]
    return torch.cat(products, dim=-1)


HAS_VNNI = torch.cpu._is_vnni_supported()
EXACT_COLUMNS = 1024  # whose products of int8 add up to less than 2^24


def exact_sums(values: Tensor, weight: Tensor) -> Tensor:
    """int8 values [T, in] times weight [out, in], transposed, as float32 [T, out].

    The sums are exact, and rounded once if they have more than 24 bits.
    """
    if HAS_VNNI:
        return torch._int_mm(values, weight.t()).float()
    chunks = values.float().split(EXACT_COLUMNS, dim=-1)
    parts = []
    for rows in weight.split(CACHED_ROWS):
        pairs = zip(chunks, rows.split(EXACT_COLUMNS, dim=-1), strict=True)
        sums = [functional.linear(x, w.float()) for x, w in pairs]
        parts.append(torch.stack(sums).sum(0, dtype=torch.float64).float())
    return torch.cat(parts, dim=-1)


def integer_product(x: Tensor, weight: Scaled) -> Tensor:
    """`float_product` of int8 ``weight`` and inputs, but the sums are exact."""
    values, scales = weight.round_inputs(x)
    return exact_sums(values, weight.values) * scales * weight.scales.flatten()


def join(weights: Sequence[Scaled]) -> Scaled:
    """Weights [..., out, in] of one format, one below the other.

    Where one ends within a tile, all tiles are cut lower, so that each row keeps its
    scale.
    """
    rows, columns = weights[0].tile
    lower = math.gcd(rows, *(weight.shape[-2] for weight in weights[:-1]))
    scales = [
        weight.scales.repeat_interleave(rows // lower, -2)[
            ..., : -(-weight.shape[-2] // lower), :
        ]
        for weight in weights
    ]
    values = torch.cat([weight.values for weight in weights], dim=-2)
    return Scaled(values, torch.cat(scales, -2), (lower, columns), weights[0].inputs)
