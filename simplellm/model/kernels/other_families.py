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
from simplellm.model.kernels.gated import gate_activation
from simplellm.model.kernels.launch import Launcher, launcher, pdl_wait, power_of_two
from simplellm.model.kernels.linear import (
    choose,
    choose_invariant,
    multiply_into,
)
from simplellm.model.kernels.norm import sum_parts
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
from simplellm.model.kernels.scaled_linear import project
from simplellm.model.layers import Dense, Layer, Norm

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def rounded_norm(norm: Norm, weight: Weight) -> Any:
    """``norm`` in front of a product with ``weight`` [N, K].

    A `RoundedNorm` if it is an RMSNorm alone, and the product rounds its input.
    """
    if not isinstance(norm, Tensor):
        return norm
    rounding = rounding_of(weight, power_of_two(len(norm)))
    return RoundedNorm(norm, rounding) if rounding else norm


def prepare(layer: Layer, fp8: bool = False) -> Layer:
    """``layer`` as `fragments.prepare` has it, with norms that round where they can."""
    layer = prepare_weights(layer, fp8)
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


def multiply_gated(
    x: Tensor | Rounded, mlp: Dense, batch_invariant: bool
) -> Tensor | None:
    """[T, I] in x's dtype of x [T, K]; None where the product has no such ending.

    That is one whose weight is of 8 bits or has biases, or that is summed in parts or
    by PyTorch. With ``batch_invariant`` no token's result depends on the others.
    """
    weight = mlp.gate_up
    if isinstance(x, Rounded) or not isinstance(weight, Tensor):
        return None
    if mlp.gate_up_bias is not None:
        return None
    if mlp.activation == "gelu":  # it has no gate
        return None
    tokens, (size_out, size_in) = len(x), weight.shape
    pick = choose_invariant if batch_invariant else choose
    config = pick(tokens, size_out, size_in)
    if config is None or config.parts > 1:
        return None
    out = x.new_empty(tokens, size_out // 2)
    multiply_into(out, x, weight, None, config, activation=mlp.activation)
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
