"""The first product of a gated feed-forward network, which ends with its activation.

The weight holds all rows of gate, then all of up. A program takes rows of both that
belong together, so that gate and up of a unit meet in its registers: nothing of twice
the intermediate size is written and read again, and a launch is saved.

T tokens, N = 2I rows and K columns of the weight, I intermediate size.
"""

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels.launch import Launcher, launcher, pdl_wait
from simplellm.model.kernels.linear import (
    Gemv,
    Product,
    choose,
    choose_invariant,
    dot_tile,
    gemv_hold,
    gemv_times,
    product_options,
)
from simplellm.model.kernels.rounding import Rounded
from simplellm.model.layers import Dense


@triton.jit
def gate_and_up_rows(N: tl.constexpr, ROWS: tl.constexpr):
    """This program's units, and the rows of their gates and ups; N where there is none.

    Up to 8 gates, then their ups, and so on: of a tensor core's results a thread has
    those of two rows that are 8 apart.
    """
    HALF: tl.constexpr = ROWS // 2
    WIDTH: tl.constexpr = min(8, HALF)
    row = tl.arange(0, ROWS)
    units = tl.program_id(0) * HALF + row // (2 * WIDTH) * WIDTH + row % WIDTH
    rows = tl.where(units < N // 2, units + row // WIDTH % 2 * (N // 2), N)
    return tl.program_id(0) * HALF + tl.arange(0, HALF), rows


@triton.jit
def split_gate_and_up(both):
    """Gates and ups [ROWS / 2, T] of `gate_and_up_rows` [ROWS, T]."""
    HALF: tl.constexpr = both.shape[0] // 2
    WIDTH: tl.constexpr = min(8, HALF)
    T: tl.constexpr = both.shape[1]
    both = tl.reshape(both, (HALF // WIDTH, 2, WIDTH, T))
    gate, up = tl.split(tl.permute(both, (0, 2, 3, 1)))
    return tl.reshape(gate, (HALF, T)), tl.reshape(up, (HALF, T))


@triton.jit
def gate_activation(gate, ACTIVATION: tl.constexpr):
    """gate * sigmoid(slope), with gate as slope; or GELU.

    Of which sqrt(8 / pi) * (gate + 0.044715 * gate^3) is the slope: its tanh form in
    other words.
    """
    slope = gate
    if ACTIVATION != "swiglu":
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1 + tl.exp(-slope))


@triton.jit
def gated_gemv_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    stride_x,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for ROWS / 2 units, all tokens: out[t, unit] = activation(gate) * up.

    As in `gemv_kernel`, the weight is on its way before the program waits for x.
    """
    units, rows = gate_and_up_rows(N, ROWS)
    held = gemv_hold(weight_ptr, rows, N, K, BLOCK, REST)
    pdl_wait(PDL)
    for token in tl.static_range(TOKENS):
        both = gemv_times(held, x_ptr + token * stride_x, K, BLOCK, REST)
        gate, up = split_gate_and_up(both[:, None])
        y = (gate_activation(gate, ACTIVATION) * up).to(out_ptr.dtype.element_ty)
        where = token * (N // 2) + units[:, None]
        tl.store(out_ptr + where, y, (units < N // 2)[:, None])


@triton.jit(do_not_specialize=["tokens"])
def gated_dot_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    stride_x,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,  # 1: parts of a sum have no activation
    AHEAD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `gated_gemv_kernel` for TOKENS tokens: out[t, unit] = activation(gate) * up.

    On the tensor cores, as `dot_kernel`.
    """
    units, rows = gate_and_up_rows(N, ROWS)
    t = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    both = dot_tile(
        *(x_ptr, weight_ptr, stride_x, tokens, rows, t, 0, K),
        *(N, K, DEPTH, AHEAD, PDL),
    )
    gate, up = split_gate_and_up(both)
    y = (gate_activation(gate, ACTIVATION) * up).to(out_ptr.dtype.element_ty)
    where = t[None, :].to(tl.int64) * (N // 2) + units[:, None]
    tl.store(out_ptr + where, y, (units < N // 2)[:, None] & (t < tokens)[None, :])


@lru_cache(8192)
def gated_launcher(
    config: Product, tokens: int, shape: tuple[int, int], activation: str
) -> tuple[Launcher, tuple[int, int, int]]:
    """For so many tokens and a weight of this shape, [N, K]; and the grid."""
    options, grid = product_options(config, tokens, *shape)
    kernel = gated_gemv_kernel if isinstance(config, Gemv) else gated_dot_kernel
    return launcher(kernel, ACTIVATION=activation, **options), grid


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
    config: Product | None = choose_invariant(size_out)
    if not batch_invariant:
        config = choose(tokens, size_out, size_in)
    if config is None or config.parts > 1:
        return None
    out = x.new_empty(tokens, size_out // 2)
    start, grid = gated_launcher(config, tokens, (size_out, size_in), mlp.activation)
    if isinstance(config, Gemv):
        start(grid, x, weight, out, x.stride(0))
    else:
        start(grid, x, weight, out, x.stride(0), tokens)
    return out
