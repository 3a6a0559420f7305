"""Inputs rounded to 8 bits, and products with them that cuBLAS computes.

T tokens, N out, K in, C scales of a token.
"""

import logging
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.kernels.launch import Launcher, follow, launcher, power_of_two
from simplellm.scaled import E4M3, LARGEST, LEAST_TILE, Scaled

LOGGER = logging.getLogger("simplellm")
BEFORE_CUBLAS = 128  # more tokens are for cuBLAS, where it can


@triton.jit
def round_numbers(x, largest, MOST: tl.constexpr):
    """float32 numbers of 8 bits: x, of which ``largest`` becomes MOST, rounded."""
    x = x * tl.div_rn(tl.full(largest.shape, MOST, tl.float32), largest)
    if MOST == 127:  # below 2^22, nothing after the point is left of such a sum
        return (x + 12582912.0) - 12582912.0
    else:
        return x.to(tl.float8e4nv).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def round_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    stride_x,
    tokens,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    FLOOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token: values [T, K] of 8 bits, scales float32 [C, T].

    COLUMNS share a scale; a row, padded to BLOCK, is a multiple of them.
    """
    follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, BLOCK // COLUMNS)
    columns = groups[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + token * stride_x + columns, columns < K, 0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 1), FLOOR)
    values = round_numbers(x, largest[:, None], MOST)
    values_ptrs = values_ptr + token * K + columns
    tl.store(values_ptrs, values.to(values_ptr.dtype.element_ty), columns < K)
    # An integer cannot be NaN.
    broken = tl.max((x != x).to(tl.int32), 1) > 0
    scales = tl.div_rn(largest, tl.full(largest.shape, MOST, tl.float32))
    scales = tl.where(broken, float("nan"), scales)
    inside = groups * COLUMNS < K
    tl.store(scales_ptr + groups.to(tl.int64) * tokens + token, scales, inside)


@lru_cache(8192)
def round_launcher(size: int, columns: int, most: int) -> Launcher:
    """For inputs of ``size`` numbers, of which ``columns`` share a scale."""
    whole = columns >= size
    block = power_of_two(size)
    options: dict[str, Any] = {"BLOCK": block, "COLUMNS": block if whole else columns}
    options |= {"MOST": most, "FLOOR": LEAST_TILE}
    warps = min(16, max(1, block // 512))
    return launcher(round_kernel, K=size, num_warps=warps, **options)


def round_rows(x: Tensor, weight: Scaled, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """x [T, K] in the weight's dtype, and its float32 scales [C, T].

    T is rounded up to a ``multiple``, by rows that may hold anything.
    """
    (tokens, size), dtype = x.shape, weight.values.dtype
    room = -(-tokens // multiple) * multiple
    values = x.new_empty(room, size, dtype=dtype)
    scales = x.new_empty(-(-size // weight.tile[1]), room, dtype=torch.float32)
    start = round_launcher(size, weight.tile[1], int(LARGEST[dtype]))
    start((tokens, 1, 1), x, values, scales, x.stride(0), room)
    return values, scales


def multiply_by_library(x: Tensor, weight: Scaled) -> Tensor:
    """`Scaled.product` by cuBLAS: [T, N] in x's dtype.

    It wants multiples of 16 in all sizes and, of squares, a C that 4 divides; of other
    tiles' scales it would read the wrong ones (docs.nvidia.com/cuda/cublas, "1D and 2D
    Block Scaling").
    """
    values, scales = round_rows(x, weight, 16)
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
        found = multiply_by_library(x.bfloat16(), weight).float()
    except (RuntimeError, ValueError) as error:
        LOGGER.info("FP8 is multiplied by Triton alone: %s", error)
        return False
    exact = weight.product(x.bfloat16().float())
    return bool((found - exact).norm() < 0.02 * exact.norm())


def library_suits(x: Tensor, weight: Scaled) -> bool:
    """Whether cuBLAS is to multiply so many tokens with this weight."""
    (size_out, size_in), (rows, columns) = weight.shape, weight.tile
    square = weight.tile == (128, 128) and size_in % 512 == 0
    fp8 = weight.inputs and weight.values.dtype == E4M3 and x.dtype == torch.bfloat16
    whole = rows == 1 and columns >= size_in
    fits = size_out % 16 == 0 and size_in % 16 == 0 and (square or whole)
    if not fp8 or not fits or len(x) <= BEFORE_CUBLAS:
        return False
    return library_multiplies((rows, 0 if whole else columns), x.device)
