"""What families compute in other ways than gpt-oss does, in Triton.

Where the product behind a norm or an activation rounds its input, to 8 bits, their
kernels do so in its place.

T tokens, N hidden size, I intermediate size, S parts of a sum.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.checkpoint.mxfp4 import Weight
from simplellm.model.kernels.fragments import prepare as prepare_weights
from simplellm.model.kernels.gated import gate_activation, multiply_gated
from simplellm.model.kernels.launch import Launcher, launcher, pdl_wait, power_of_two
from simplellm.model.kernels.norm import add_norm as add_rms_norm
from simplellm.model.kernels.norm import sum_parts
from simplellm.model.kernels.quantized import project
from simplellm.model.kernels.rounding import (
    Rounded,
    RoundedNorm,
    Rounding,
    empty_input,
    input_arguments,
    rounding_constants,
    rounding_of,
    store_rounded,
)
from simplellm.model.layers import Dense, Layer, LayerNorm, Norm, SandwichNorm

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def norm_row(row_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """N numbers as float32 [BLOCK], zeros behind them; zeros alone for None."""
    columns = tl.arange(0, BLOCK)
    if row_ptr is None:
        return tl.zeros([BLOCK], tl.float32)
    else:
        return tl.load(row_ptr + columns, columns < N, 0).to(tl.float32)


@triton.jit(do_not_specialize=["room"])
def other_norm_kernel(
    residual_ptr,
    update_ptr,
    update_weight_ptr,
    weight_ptr,
    bias_ptr,
    normed_ptr,
    scales_ptr,
    room,
    eps,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    FLOOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: residual += sum of the parts; normed = a norm of it.

    With update_weight, the sum's RMSNorm is added in its place. With bias, normed is
    a LayerNorm: (residual - mean) / sqrt(variance + eps) * weight + bias; else it is an
    RMSNorm. Without parts, nothing is added. With scales, normed is `store_rounded`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    update_weight = norm_row(update_weight_ptr, N, BLOCK)
    weight = norm_row(weight_ptr, N, BLOCK)
    bias = norm_row(bias_ptr, N, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = norm_row(residual_ptr + row * N, N, BLOCK)
    if PARTS > 0:
        parts = update_ptr + row * (PARTS * N) + columns
        update = sum_parts(0.0, parts, inside, N, PARTS, tl.float32)
        if update_weight_ptr is not None:
            scale = tl.rsqrt(tl.sum(update * update, 0) / N + eps)
            update *= scale * update_weight
        dtype = residual_ptr.dtype.element_ty
        x = (x + update).to(dtype)
        tl.store(residual_ptr + row * N + columns, x, inside)
        x = x.to(tl.float32)
    if bias_ptr is not None:
        x = tl.where(inside, x - tl.sum(x, 0) / N, 0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * weight
    if bias_ptr is not None:
        y += bias
    if scales_ptr is None:
        y = y.to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + row * N + columns, y, inside)
    else:
        y = y.to(residual_ptr.dtype.element_ty).to(tl.float32)
        store_rounded(
            *(y, row, 0, normed_ptr, scales_ptr, room, N, COLUMNS, MOST, FLOOR)
        )


@cache
def other_norm_launcher(size: int, parts: int, rounding: Rounding | None) -> Launcher:
    """For rows of ``size`` numbers, and updates in so many parts.

    With ``rounding``, the norm is rounded.
    """
    block = power_of_two(size)
    options = rounding_constants(block, size, rounding) | {"N": size, "PARTS": parts}
    return launcher(other_norm_kernel, BLOCK=block, num_warps=8, **options)


def add_norm(
    residual: Tensor, update: Tensor | None, norm: Norm | RoundedNorm, eps: float
) -> tuple[Tensor, Any]:
    """Add ``update`` to ``residual`` in place; return it and its norm, [T, N] both.

    As `norm.add_norm`, whose kernel does it for a norm that is a weight [N] alone. What
    is added is rounded once, with the sum. A `RoundedNorm` makes a `Rounded`, of which
    tables of operations know nothing.
    """
    if isinstance(norm, Tensor):
        return add_rms_norm(residual, update, norm, eps)
    size = residual.shape[1]
    rounding = norm.rounding if isinstance(norm, RoundedNorm) else None
    normed = empty_input(residual, size, residual.dtype, rounding)
    parts = 0
    if update is not None:
        parts = 1 if update.ndim == 2 else update.shape[1]
    inner = norm.update if isinstance(norm, SandwichNorm) else None
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    start = other_norm_launcher(size, parts, rounding)
    args = residual, update, inner, norm.weight, bias, *input_arguments(normed), eps
    start((len(residual), 1, 1), *args)
    return residual, normed


def rounded_norm(norm: Norm, weight: Weight) -> Any:
    """``norm`` in front of a product with ``weight`` [N, K].

    A `RoundedNorm` if it is an RMSNorm alone, and the product rounds its input.
    """
    if not isinstance(norm, Tensor):
        return norm
    rounding = rounding_of(weight, power_of_two(len(norm)))
    return RoundedNorm(norm, rounding) if rounding else norm


def prepare(layer: Layer) -> Layer:
    """``layer`` as `fragments.prepare` has it, with norms that round where they can."""
    layer = prepare_weights(layer)
    norms = {"attn_norm": rounded_norm(layer.attn_norm, layer.attn.qkv)}
    if isinstance(layer.mlp, Dense):
        norms["mlp_norm"] = rounded_norm(layer.mlp_norm, layer.mlp.gate_up)
    return replace(layer, **norms)


def plainly(value: Any) -> Any:
    """An argument of an operation as `ops` knows it: nothing is rounded ahead."""
    if isinstance(value, RoundedNorm):
        return value.weight
    return value.dequantize() if isinstance(value, Rounded) else value


@triton.jit(do_not_specialize=["room"])
def activation_kernel(
    first_ptr,
    out_ptr,
    scales_ptr,
    room,
    INNER: tl.constexpr,  # I
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    FLOOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK numbers of a token: out = gate_activation(gate) * up.

    first [T, S, 2I] are parts whose sums are all of gate, then all of up; "gelu" has
    gate alone. With scales, out in DTYPE is `store_rounded`.
    """
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INNER
    WIDTH: tl.constexpr = INNER if ACTIVATION == "gelu" else 2 * INNER
    parts = first_ptr + token * (PARTS * WIDTH) + columns
    gate = sum_parts(0.0, parts, inside, WIDTH, PARTS, tl.float32)
    y = gate_activation(gate, ACTIVATION)
    if ACTIVATION != "gelu":
        y *= sum_parts(0.0, parts + INNER, inside, WIDTH, PARTS, tl.float32)
    y = y.to(DTYPE)
    if scales_ptr is None:
        tl.store(out_ptr + token * INNER + columns, y, inside)
    else:
        first = tl.program_id(1) * BLOCK
        store_rounded(
            *(y.to(tl.float32), token, first, out_ptr, scales_ptr, room),
            *(INNER, COLUMNS, MOST, FLOOR),
        )


def activation_block(size: int) -> int:
    """How many of a row's ``size`` numbers a program makes."""
    return min(1024, power_of_two(size))


@cache
def activation_launcher(
    size: int,
    parts: int,
    activation: str,
    dtype: torch.dtype,
    rounding: Rounding | None,
) -> tuple[Launcher, int]:
    """For rows of ``size`` numbers, from so many parts; and the programs of a row.

    With ``rounding``, what is made of ``dtype`` is rounded.
    """
    block = activation_block(size)
    options = {"INNER": size, "PARTS": parts, "ACTIVATION": activation}
    options |= {"DTYPE": TRITON_DTYPES[dtype]} | rounding_constants(
        block, size, rounding
    )
    start = launcher(activation_kernel, BLOCK=block, num_warps=4, **options)
    return start, -(-size // block)


def activate_parts(first: Tensor, mlp: Dense, dtype: torch.dtype) -> Tensor | Rounded:
    """[T, I] in ``dtype`` of the first product's [T, 2I] or parts [T, S, 2I]."""
    size = mlp.down.shape[-1]
    parts = 1 if first.ndim == 2 else first.shape[1]
    rounding = rounding_of(mlp.down, activation_block(size))
    out = empty_input(first, size, dtype, rounding)
    options = size, parts, mlp.activation, dtype, rounding
    start, programs = activation_launcher(*options)
    start((len(first), programs, 1), first, *input_arguments(out))
    return out


def dense(x: Tensor | Rounded, mlp: Dense, batch_invariant: bool = False) -> Tensor:
    """A feed-forward network for all tokens: x [T, N] -> [T, N] or parts [T, S, N].

    Each of the two products goes the way that `project` chooses for it, with ordinary
    weights or those of 8 bits. With ``batch_invariant`` no token's result depends on
    the others.
    """
    hidden: Tensor | Rounded | None = multiply_gated(x, mlp, batch_invariant)
    if hidden is None:
        first = project(x, mlp.gate_up, mlp.gate_up_bias, batch_invariant)
        hidden = activate_parts(first, mlp, x.dtype)
    return project(hidden, mlp.down, mlp.down_bias, batch_invariant)
