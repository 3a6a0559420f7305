"""Products with weights of 8 bits: half the bytes of bfloat16, twice the arithmetic.

T tokens, N out, K in, S parts along K, C scales of a token.

As in `linear`, one kernel is for very few tokens and holds rows of the weight in
registers, the other is for any number and multiplies on the tensor cores. Both compute
what the format says, `Scaled.product`. Inputs that are to be rounded are so where they
were made, a `Rounded`; else the first kernel does so by itself, and `round_kernel` in
front of the other one, once for all rows of the weight. Sums are float32, and int32 of
integers. On the tensor cores the sums of e4m3 keep fewer bits than float32 has, so what
each step of up to 128 columns adds is taken out of them. More tokens than
`BEFORE_CUBLAS` go to cuBLAS, where it has the format.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.checkpoint.mxfp4 import Weight
from simplellm.checkpoint.scaled import LARGEST, Scaled
from simplellm.model.kernels.head import head as head_dense
from simplellm.model.kernels.launch import Launcher, launcher
from simplellm.model.kernels.linear import (
    MOST_PARTS,
    Dot,
    Gemv,
    Product,
    Scaling,
    count_parts,
    product_launcher,
)
from simplellm.model.kernels.linear import project as project_dense
from simplellm.model.kernels.rounding import (
    BEFORE_CUBLAS,
    Rounded,
    Rounding,
    input_arguments,
    library_suits,
    multiply_by_library,
    round_rows,
)
from simplellm.model.kernels.scales import load_scales

WAVE = 3 * 132  # programs of 64 rows that all processors of an H200 hold at once
# Rows of a weight from which on all processors get a program with 128 of them.
MANY_ROWS = 128 * 132


# `dot_kernel` scales the sums of a step behind the loads of the next one. With inputs
# wider than the weight, 64 tokens then took 8 % longer on an H100, and 512 up to 6 %:
# figures/11-one-product.json.
@triton.jit(do_not_specialize=["tokens"])
def wide_dot_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    stride_x,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `dot_kernel`, for a weight of 8 bits and inputs that are not rounded.

    COLUMNS share a scale, a multiple of DEPTH or K. bias may be None.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(1)
    LENGTH: tl.constexpr = tl.cdiv(tl.cdiv(K, DEPTH), PARTS) * DEPTH
    start = part * LENGTH
    stop = tl.minimum(start + LENGTH, K)
    has_row, has_token = (rows < N)[:, None], (t < tokens)[None, :]
    scales_ptrs = scales_ptr + (rows // TILE_ROWS * tl.cdiv(K, COLUMNS))[:, None]
    y = tl.zeros([ROWS, TOKENS], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    weight_rows = weight_ptr + rows[:, None].to(tl.int64) * K
    x_rows = x_ptr + t[:, None].to(tl.int64) * stride_x
    scales, _ = load_scales(scales_ptrs, None, start, t, 0, has_row, K, COLUMNS)
    for k in range(start, stop, DEPTH):
        at = (k + tl.arange(0, DEPTH))[None, :]
        w = tl.load(weight_rows + at, has_row & (at < K), 0.0)
        x = tl.trans(tl.load(x_rows + at, (t < tokens)[:, None] & (at < K), 0.0))
        y += tl.dot(w.to(x.dtype), x, input_precision="ieee") * scales
        # Those of the next step are on their way while this one is multiplied.
        scales, _ = load_scales(scales_ptrs, None, k + DEPTH, t, 0, has_row, K, COLUMNS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, rows < N, 0).to(tl.float32)
        y += tl.where(part == 0, bias, 0.0)[:, None]
    where = (t[None, :].to(tl.int64) * PARTS + part) * N + rows[:, None]
    tl.store(y_ptr + where, y.to(y_ptr.dtype.element_ty), has_row & has_token)


@lru_cache(8192)
def choose_scaled(
    tokens: int,
    size_out: int,
    size_in: int,
    tile: tuple[int, int],
    parts: bool,
    rounded: bool = False,
) -> Product:
    """The way to multiply ``tokens`` tokens, in parts along K if that helps and may.

    ``rounded``: x is. Else all programs of a `Gemv` do it, which takes too long for
    longer rows. More tokens than one are for tensor cores in any case: what is
    converted one by one takes too long then.
    """
    gemv = Gemv(rows=2, warps=4) if rounded else Gemv(rows=16, warps=8)
    longest = 16384 if rounded else 4096
    fits = size_in <= longest and (tile[1] >= size_in or tile[0] % gemv.rows == 0)
    if tokens == 1 and fits:
        return gemv
    if tokens > BEFORE_CUBLAS:
        return Dot(rows=128, depth=128, parts=1, warps=8, stages=3)
    if tokens > 16:
        most = WAVE // -(-size_out // 64) if parts else 1
        count = max(1, min(most, MOST_PARTS, size_in // 128))
        rows = 64 if size_out <= 64 * WAVE else 128  # no program waits for a place
        return Dot(rows=rows, depth=128, parts=count, warps=4, stages=3)
    if size_out >= MANY_ROWS:
        return Dot(rows=128, depth=128, parts=1, warps=8, stages=4)
    count = count_parts(size_out, size_in) if parts else 1
    return Dot(rows=64, depth=128, parts=count, warps=4, stages=6)


def choose_scaled_invariant(
    size_out: int, size_in: int, tile: tuple[int, int], parts: bool
) -> Product:
    """The way for any number of tokens, each summed in the same order."""
    config = choose_scaled(64, size_out, size_in, tile, parts)
    assert isinstance(config, Dot)
    return config._replace(width=64)


def scaling_of(weight: Scaled, rounds: bool, config: Product) -> Scaling:
    """How the kernel of ``config`` scales; ``rounds``: and rounds its inputs itself.

    That is for a `Gemv`: on the tensor cores inputs have been rounded before.
    """
    rows, columns = weight.tile
    # Wider inputs are scaled at each step: what uses its sums waits for the tensor
    # cores, and the next weights go to registers that these still read, see
    # `experts.wait_for_wgmma`.
    whole = columns >= weight.shape[1] and (weight.inputs or isinstance(config, Gemv))
    most = int(LARGEST[weight.values.dtype]) if rounds else 0
    return Scaling(rows, 0 if whole else columns, most)


@lru_cache(8192)
def wide_launcher(
    config: Product, tokens: int, size_out: int, size_in: int, scaling: Scaling
) -> tuple[Launcher, tuple[int, int, int]]:
    """For so many tokens that are not rounded; and the grid."""
    start, grid = product_launcher(config, tokens, size_out, size_in, scaling)
    options = dict(start.options)
    del options["AHEAD"], options["ACTIVATION"], options["JOINED"]
    return launcher(wide_dot_kernel, pdl=start.pdl, **options), grid


def multiply_scaled(
    y: Tensor,
    x: Tensor | Rounded,
    weight: Scaled,
    bias: Tensor | None,
    config: Product,
) -> None:
    """Fill y [T, N], or the float32 parts [T, S, N] of ``config``: `Scaled.product`.

    x [T, K] has contiguous rows; all else is contiguous.
    """
    size_out, size_in = weight.shape
    if not weight.inputs and isinstance(config, Dot):
        assert isinstance(x, Tensor)
        scaling = scaling_of(weight, False, config)
        start, grid = wide_launcher(config, len(x), size_out, size_in, scaling)
        start(grid, x, weight.values, weight.scales, bias, y, x.stride(0), len(x))
        return
    rounds = weight.inputs and isinstance(x, Tensor)
    if rounds and isinstance(config, Dot):
        assert isinstance(x, Tensor)
        to = Rounding.of(weight)
        x = Rounded(*round_rows(x, to), len(x), to.columns, x.dtype)
        rounds = False
    scaling = scaling_of(weight, rounds, config)
    start, grid = product_launcher(config, len(x), size_out, size_in, scaling)
    values, scales, room = input_arguments(x)
    count = (len(x),) if isinstance(config, Dot) else ()
    args = values, scales, weight.values, weight.scales, bias, y, None
    start(grid, *args, values.stride(0), *count, room)


def project(
    x: Tensor | Rounded,
    weight: Weight,
    bias: Tensor | None,
    batch_invariant: bool = False,
) -> Tensor:
    """x [T, K] times ``weight`` [N, K], transposed, plus ``bias`` [N].

    [T, N] in x's dtype, or float32 parts [T, S, N] for the next kernel to add up. With
    ``batch_invariant`` no token's result depends on the others.
    """
    if isinstance(weight, Tensor):
        assert isinstance(x, Tensor)
        return project_dense(x, weight, bias, batch_invariant)
    assert isinstance(weight, Scaled)
    tokens, (size_out, size_in), tile = len(x), weight.shape, weight.tile
    if bias is None and not batch_invariant and library_suits(x, weight):
        return multiply_by_library(x, weight)
    if batch_invariant:
        config = choose_scaled_invariant(size_out, size_in, tile, True)
    else:
        rounded = isinstance(x, Rounded)
        config = choose_scaled(tokens, size_out, size_in, tile, True, rounded)
    shape: tuple[int, ...] = (tokens, size_out)
    dtype = x.dtype
    if config.parts > 1:
        shape, dtype = (tokens, config.parts, size_out), torch.float32
    y = torch.empty(shape, dtype=dtype, device=x.device)
    multiply_scaled(y, x, weight, bias, config)
    return y


def head(
    hidden: Tensor, weight: Weight, logits: Tensor, batch_invariant: bool = False
) -> Tensor:
    """The likeliest token of each row: hidden [S, N], weight [V, N] -> int32 [S].

    Fills ``logits``, float32 [S, V]. With ``batch_invariant`` no row's logits depend on
    the others.
    """
    if isinstance(weight, Tensor):
        return head_dense(hidden, weight, logits, batch_invariant)
    assert isinstance(weight, Scaled)
    rows, (size_out, size_in) = hidden.shape[0], weight.shape
    if batch_invariant:
        config = choose_scaled_invariant(size_out, size_in, weight.tile, False)
    else:
        config = choose_scaled(rows, size_out, size_in, weight.tile, False)
    multiply_scaled(logits, hidden, weight, None, config)
    return logits.argmax(-1).int()
