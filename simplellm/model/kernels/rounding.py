"""Inputs rounded to 8 bits, and products with them that cuBLAS computes.

Rounding takes a kernel about as long as starting it. So kernels that make an input, an
activation or a norm, round it before they write it where they can: a `Rounded`. Others'
inputs are rounded by `round_kernel`.

T tokens, N out, K in, C scales of a token.
"""

import logging
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.checkpoint.mxfp4 import Weight
from simplellm.checkpoint.scaled import (
    E4M3,
    LARGEST,
    LEAST_TILE,
    Scaled,
    multiply_tiles,
)
from simplellm.model.kernels.fragments import fragment_order
from simplellm.model.kernels.launch import Launcher, launcher, pdl_wait, power_of_two

LOGGER = logging.getLogger("simplellm")
BEFORE_CUBLAS = 128  # more tokens are for cuBLAS, where it can


class Rounding(NamedTuple):
    """To what a product rounds its input, and how many columns share a scale."""

    columns: int
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Scaled) -> "Rounding":
        """What a product with ``weight`` wants."""
        return cls(weight.tile[1], weight.values.dtype)


def rounding_of(weight: Weight, block: int) -> Rounding | None:
    """How a kernel rounds its output for the product with ``weight`` [N, K] to read.

    None if the format doesn't round inputs, or if numbers that share a scale come from
    several of the kernel's programs, which make ``block`` numbers each.
    """
    if not isinstance(weight, Scaled) or not weight.inputs:
        return None
    whole = weight.tile[1] >= weight.shape[1]
    if block < weight.shape[1] if whole else block % weight.tile[1] != 0:
        return None
    return Rounding.of(weight)


@dataclass(frozen=True, eq=False)
class Rounded:
    """An input x [T, K] of a product, rounded to 8 bits as `Scaled.round_inputs` does.

    Behind the last token may be rows of anything.
    """

    values: Tensor  # e4m3 or int8 [T or more, K]
    scales: Tensor  # float32 [C, as many]
    tokens: int
    columns: int  # that share a scale
    dtype: torch.dtype  # of x, and of its product

    def __len__(self) -> int:
        """How many tokens there are."""
        return self.tokens

    @property
    def device(self) -> torch.device:
        """The device of the numbers."""
        return self.values.device

    def dequantize(self) -> Tensor:
        """x [T, K] as ordinary numbers again."""
        values, scales = self.values[: self.tokens], self.scales.T[: self.tokens]
        return multiply_tiles(values, scales, (1, self.columns)).to(self.dtype)


def empty_input(
    like: Tensor, size: int, dtype: torch.dtype, rounding: Rounding | None
) -> Tensor | Rounded:
    """Room for an input of ``dtype``, ``size`` numbers for each row of ``like``."""
    tokens = len(like)
    if rounding is None:
        return like.new_empty(tokens, size, dtype=dtype)
    # As many as `multiply_by_library` wants, where it may be asked.
    room = tokens if tokens <= BEFORE_CUBLAS else -(-tokens // 16) * 16
    values = like.new_empty(room, size, dtype=rounding.dtype)
    scales = like.new_empty(-(-size // rounding.columns), room, dtype=torch.float32)
    return Rounded(values, scales, tokens, rounding.columns, dtype)


def input_arguments(x: Tensor | Rounded) -> tuple[Tensor, Tensor | None, int]:
    """What kernels take for an input: its numbers, and if rounded scales and room."""
    if isinstance(x, Rounded):
        return x.values, x.scales, x.scales.shape[1]
    return x, None, 0


@dataclass(frozen=True, eq=False)
class RoundedNorm:
    """An RMSNorm whose kernel rounds what it makes, for the product behind it."""

    weight: Tensor  # [N]
    rounding: Rounding


@triton.jit
def round_numbers(x, largest, MOST: tl.constexpr):
    """float32 numbers of 8 bits: x, of which ``largest`` becomes MOST, rounded."""
    x = x * tl.div_rn(tl.full(largest.shape, MOST, tl.float32), largest)
    if MOST == 127:  # below 2^22, nothing after the point is left of such a sum
        return (x + 12582912.0) - 12582912.0
    else:
        return x.to(tl.float8e4nv).to(tl.float32)


@triton.jit
def store_rounded(
    x,
    token,
    first,
    values_ptr,
    scales_ptr,
    room,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """Write float32 x, a token's numbers from column ``first`` on, in 8 bits.

    COLUMNS share a scale; x, which is 0 from column K on, is a multiple of them, and
    ``first`` is, too. values [room, K], scales [C, room].
    """
    GROUPS: tl.constexpr = x.shape[0] // COLUMNS
    groups = first // COLUMNS + tl.arange(0, GROUPS)
    columns = groups[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.reshape(x, [GROUPS, COLUMNS])
    largest = tl.maximum(tl.max(tl.abs(x), 1), FLOOR)
    values = round_numbers(x, largest[:, None], MOST)
    values_ptrs = values_ptr + token * K + columns
    tl.store(values_ptrs, values.to(values_ptr.dtype.element_ty), columns < K)
    # An integer cannot be NaN.
    broken = tl.max((x != x).to(tl.int32), 1) > 0
    scales = tl.div_rn(largest, tl.full(largest.shape, MOST, tl.float32))
    scales = tl.where(broken, float("nan"), scales)
    inside = groups * COLUMNS < K
    tl.store(scales_ptr + groups.to(tl.int64) * room + token, scales, inside)


@triton.jit(do_not_specialize=["room"])
def round_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    stride_x,
    room,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    FLOOR: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token: values [room, K] of 8 bits, scales float32 [C, room].

    COLUMNS share a scale; a row, padded to BLOCK, is a multiple of them. If FRAGMENTS,
    values are in `fragment_order`, for which that is 32 or more.
    """
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * stride_x + columns, columns < K, 0).to(tl.float32)
    if FRAGMENTS:
        x = tl.reshape(fragment_order(tl.reshape(x, (BLOCK, 1))), (BLOCK,))
    store_rounded(x, token, 0, values_ptr, scales_ptr, room, K, COLUMNS, MOST, FLOOR)


def rounding_constants(
    block: int, size: int, rounding: Rounding | None
) -> dict[str, Any]:
    """What kernels ask for that may `store_rounded`, ``block`` of ``size`` numbers."""
    if rounding is None:
        return {"COLUMNS": 0, "MOST": 0, "FLOOR": 0}
    columns = block if rounding.columns >= size else rounding.columns
    most = int(LARGEST[rounding.dtype])
    return {"COLUMNS": columns, "MOST": most, "FLOOR": LEAST_TILE}


@lru_cache(8192)
def round_launcher(size: int, rounding: Rounding, fragments: bool = False) -> Launcher:
    """For inputs of ``size`` numbers, left in the order of ``fragments``."""
    block = power_of_two(size)
    options = rounding_constants(block, size, rounding)
    warps = min(16, max(1, block // 512))
    options |= {"BLOCK": block, "FRAGMENTS": fragments, "num_warps": warps}
    return launcher(round_kernel, K=size, **options)


def round_rows(
    x: Tensor, rounding: Rounding, multiple: int = 1, fragments: bool = False
) -> tuple[Tensor, Tensor]:
    """x [T, K] in another dtype, and its float32 scales [C, T].

    T is rounded up to a ``multiple``, by rows that may hold anything. The numbers of a
    row may come in the order of ``fragments``.
    """
    tokens, size = x.shape
    room = -(-tokens // multiple) * multiple
    values = x.new_empty(room, size, dtype=rounding.dtype)
    scales = x.new_empty(-(-size // rounding.columns), room, dtype=torch.float32)
    start = round_launcher(size, rounding, fragments)
    start((tokens, 1, 1), x, values, scales, x.stride(0), room)
    return values, scales


def multiply_by_library(x: Tensor | Rounded, weight: Scaled) -> Tensor:
    """`Scaled.product` by cuBLAS: [T, N] in x's dtype.

    It wants multiples of 16 in all sizes and, of squares, a C that 4 divides; of other
    tiles' scales it would read the wrong ones (docs.nvidia.com/cuda/cublas, "1D and 2D
    Block Scaling").
    """
    if isinstance(x, Rounded):
        values, scales = x.values, x.scales
    else:
        values, scales = round_rows(x, Rounding.of(weight), 16)
    factors = values, weight.values.T, scales.T, weight.scales.T
    return torch._scaled_mm(*factors, out_dtype=x.dtype)[: len(x)]


@cache
def library_multiplies(tile: tuple[int, int], device: torch.device) -> bool:
    """Whether cuBLAS has FP8 with such tiles, columns 0 for rows: from 12.9 on, Hopper.

    Finds out with a small product, which is to be right.
    """
    generator = torch.Generator(device).manual_seed(0)
    x, y = (torch.randn(256, 512, device=device, generator=generator) for _ in "xy")
    weight = Scaled.of(y, tile, E4M3, True)
    try:
        product = multiply_by_library(x.bfloat16(), weight).float()
    except (RuntimeError, ValueError) as error:
        LOGGER.info("FP8 is multiplied by Triton alone: %s", error)
        return False
    exact = weight.product(x.bfloat16().float())
    return bool((product - exact).norm() < 0.02 * exact.norm())


def library_suits(x: Tensor | Rounded, weight: Scaled) -> bool:
    """Whether cuBLAS is to multiply so many tokens with this weight."""
    (size_out, size_in), (rows, columns) = weight.shape, weight.tile
    square = weight.tile == (128, 128) and size_in % 512 == 0
    fp8 = weight.inputs and weight.values.dtype == E4M3 and x.dtype == torch.bfloat16
    whole = rows == 1 and columns >= size_in
    fits = size_out % 16 == 0 and size_in % 16 == 0 and (square or whole)
    if not fp8 or not fits or len(x) <= BEFORE_CUBLAS:
        return False
    return library_multiplies((rows, 0 if whole else columns), x.device)
