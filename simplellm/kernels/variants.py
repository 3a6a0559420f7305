"""What families compute in other ways than gpt-oss does, in Triton.

T tokens, N hidden size, I intermediate size, S parts of a sum.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.kernels.launch import Launcher, follow, launcher, power_of_two
from simplellm.kernels.norm import add_norm as add_rms_norm
from simplellm.kernels.norm import sum_parts
from simplellm.kernels.quantized import project
from simplellm.layers import Dense, LayerNorm, Norm, SandwichNorm


@triton.jit
def norm_row(row_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """N numbers as float32 [BLOCK], zeros behind them; zeros alone for None."""
    columns = tl.arange(0, BLOCK)
    if row_ptr is None:
        return tl.zeros([BLOCK], tl.float32)
    else:
        return tl.load(row_ptr + columns, columns < N, 0).to(tl.float32)


@triton.jit
def other_norm_kernel(
    residual_ptr,
    update_ptr,
    update_weight_ptr,
    weight_ptr,
    bias_ptr,
    normed_ptr,
    eps,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: residual += sum of the parts; normed = a norm of it.

    With update_weight, the sum's RMSNorm is added in its place. With bias, normed is
    a LayerNorm: (residual - mean) / sqrt(variance + eps) * weight + bias; else it is an
    RMSNorm. Without parts, nothing is added.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    update_weight = norm_row(update_weight_ptr, N, BLOCK)
    weight, bias = norm_row(weight_ptr, N, BLOCK), norm_row(bias_ptr, N, BLOCK)
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
    y = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * weight + bias
    tl.store(normed_ptr + row * N + columns, y.to(normed_ptr.dtype.element_ty), inside)


@cache
def other_norm_launcher(size: int, parts: int) -> Launcher:
    """For rows of ``size`` numbers, and updates in so many parts."""
    block = power_of_two(size)
    return launcher(other_norm_kernel, N=size, PARTS=parts, BLOCK=block, num_warps=8)


def add_norm(
    residual: Tensor, update: Tensor | None, norm: Norm, eps: float
) -> tuple[Tensor, Tensor]:
    """Add ``update`` to ``residual`` in place; return it and its norm, [T, N] both.

    As `norm.add_norm`, whose kernel does it for a norm that is a weight [N] alone. What
    is added is rounded once, with the sum.
    """
    if isinstance(norm, Tensor):
        return add_rms_norm(residual, update, norm, eps)
    tokens, size = residual.shape
    normed = torch.empty_like(residual)
    parts = 0
    if update is not None:
        parts = 1 if update.ndim == 2 else update.shape[1]
    inner = norm.update if isinstance(norm, SandwichNorm) else None
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    start = other_norm_launcher(size, parts)
    grid = tokens, 1, 1
    start(grid, residual, update, inner, norm.weight, bias, normed, eps)
    return residual, normed


@triton.jit
def activation_kernel(
    first_ptr,
    out_ptr,
    INNER: tl.constexpr,  # I
    PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK numbers of a token: out = curve(gate) * up.

    first [T, S, 2I] are parts whose sums are all of gate, then all of up; curve(gate) =
    gate * sigmoid(slope), with gate as slope, or for "geglu" sqrt(8 / pi) * (gate +
    0.044715 * gate^3), which is GELU's tanh in other words. "gelu" has gate alone.
    """
    follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INNER
    WIDTH: tl.constexpr = INNER if ACTIVATION == "gelu" else 2 * INNER
    parts = first_ptr + token * (PARTS * WIDTH) + columns
    gate = sum_parts(0.0, parts, inside, WIDTH, PARTS, tl.float32)
    slope = gate
    if ACTIVATION != "swiglu":
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    y = gate / (1 + tl.exp(-slope))
    if ACTIVATION != "gelu":
        y *= sum_parts(0.0, parts + INNER, inside, WIDTH, PARTS, tl.float32)
    y = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * INNER + columns, y, inside)


@cache
def activation_launcher(size: int, parts: int, activation: str) -> tuple[Launcher, int]:
    """For rows of ``size`` numbers, from so many parts; and the programs of a row."""
    block = min(1024, power_of_two(size))
    options = {"INNER": size, "PARTS": parts, "ACTIVATION": activation}
    start = launcher(activation_kernel, BLOCK=block, num_warps=4, **options)
    return start, -(-size // block)


def activate_parts(first: Tensor, mlp: Dense, dtype: torch.dtype) -> Tensor:
    """[T, I] in ``dtype`` of the first product's [T, 2I] or parts [T, S, 2I]."""
    tokens, size = first.shape[0], mlp.down.shape[-1]
    parts = 1 if first.ndim == 2 else first.shape[1]
    out = first.new_empty(tokens, size, dtype=dtype)
    start, programs = activation_launcher(size, parts, mlp.activation)
    start((tokens, programs, 1), first, out)
    return out


def dense(x: Tensor, mlp: Dense, batch_invariant: bool = False) -> Tensor:
    """A feed-forward network for all tokens: x [T, N] -> [T, N] or parts [T, S, N].

    Each of the two products goes the way that `project` chooses for it, with ordinary
    weights or those of 8 bits. With ``batch_invariant`` no token's result depends on
    the others.
    """
    first = project(x, mlp.gate_up, mlp.gate_up_bias, batch_invariant)
    hidden = activate_parts(first, mlp, x.dtype)
    return project(hidden, mlp.down, mlp.down_bias, batch_invariant)
