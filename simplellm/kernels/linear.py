"""Projections of few tokens, bounded by the time it takes to read the weight.

T tokens, N out, K in, S parts along K.

Two kernels. ``gemv`` multiplies on the ordinary cores: a program holds whole rows of
the weight in registers, loaded before it waits for its input. ``dot`` multiplies on
the tensor cores, with the weight as the tall operand and the tokens as the narrow one.
Which one runs, and how, is looked up in `TUNED`; more tokens go to PyTorch's matmul, or
to `routing.MANY`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from simplellm.kernels import supports_pdl


@dataclass(frozen=True)
class Gemv:
    """How `gemv_kernel` runs: rows a program."""

    rows: int
    warps: int
    pdl: bool = True


@dataclass(frozen=True)
class Dot:
    """How `dot_kernel` runs: a tile of rows x depth, and parts along K.

    ``ahead`` is how many steps of depth are brought to the L2 cache before the wait.
    ``width`` is how many tokens a program takes; None: all, from 16 up to 128.
    """

    rows: int
    depth: int
    parts: int
    warps: int
    stages: int
    pdl: bool = True
    ahead: int = 0
    width: int | None = None


Config = Gemv | Dot

# (N, K) -> for up to so many tokens, how.
Table = tuple[tuple[int, Config], ...]
ROUTER: Table = (
    (2, Gemv(rows=4, warps=4)),
    (4, Gemv(rows=4, warps=2)),
    (64, Dot(rows=64, depth=64, parts=15, warps=4, stages=6, pdl=False)),
    (2048, Dot(rows=64, depth=64, parts=5, warps=4, stages=6)),
    (8192, Dot(rows=128, depth=64, parts=3, warps=8, stages=4)),
)
TUNED: dict[tuple[int, int], Table] = {
    (5120, 2880): (  # query, key and value of both models
        (2, Gemv(rows=2, warps=4)),
        (32, Dot(rows=64, depth=64, parts=3, warps=4, stages=6, pdl=False)),
        (64, Dot(rows=64, depth=64, parts=3, warps=4, stages=6, ahead=1)),
    ),
    (2880, 4096): (  # the output of attention
        (2, Gemv(rows=2, warps=4)),
        (32, Dot(rows=64, depth=64, parts=5, warps=4, stages=6, pdl=False)),
        (64, Dot(rows=64, depth=128, parts=6, warps=4, stages=3, ahead=1)),
    ),
    (128, 2880): ROUTER,  # of the 120b
    (32, 2880): ROUTER,  # of the 20b
}
# For any number of tokens: each is then summed in the same order, by the same program.
INVARIANT = Dot(rows=64, depth=64, parts=3, warps=4, stages=6, pdl=False, width=64)
OTHERS: Table = (
    (4, Gemv(rows=4, warps=4)),
    (64, Dot(rows=64, depth=64, parts=1, warps=4, stages=3)),
)


def choose(tokens: int, size_out: int, size_in: int) -> Config | None:
    """The way to project ``tokens`` tokens; None for PyTorch's matmul."""
    for most, config in TUNED.get((size_out, size_in), OTHERS):
        if tokens <= most:
            return config
    return None


@triton.jit
def prefetch(pointers, sizes):
    """Ask for so many bytes at each pointer to be brought into the L2 cache.

    Pointers and sizes are multiples of 16; size 0 asks for nothing. A request for a
    whole range takes one instruction, and what follows it in memory is read once.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred some;
        setp.ne.s32 some, $2, 0;
        @some cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [pointers, sizes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def gemv_weight(
    weight_ptr,
    rows,
    columns,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """``columns`` of ``rows`` of the weight, zeros where it has none."""
    inside = (rows < N)[:, None] & (columns < K)[None, :]
    where = rows[:, None].to(tl.int64) * K + columns[None, :]
    return tl.load(weight_ptr + where, inside, 0)


@triton.jit
def gemv_hold(
    weight_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """``rows`` of the weight in registers, as BLOCK columns and, if any, REST more."""
    first = gemv_weight(weight_ptr, rows, tl.arange(0, BLOCK), N, K)
    rest = first
    if REST > 0:
        rest = gemv_weight(weight_ptr, rows, BLOCK + tl.arange(0, REST), N, K)
    return first, rest


@triton.jit
def gemv_times(held, x_ptr, K: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """The rows held, times one x: float32 [rows]."""
    first, rest = held
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + columns, columns < K, 0).to(tl.float32)
    if REST > 0:
        others = BLOCK + tl.arange(0, REST)
        more = tl.load(x_ptr + others, others < K, 0).to(tl.float32)
        return tl.sum(first.to(tl.float32) * x[None, :], 1) + tl.sum(
            rest.to(tl.float32) * more[None, :], 1
        )
    else:
        return tl.sum(first.to(tl.float32) * x[None, :], 1)


@triton.jit
def gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    stride_x,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for ROWS rows and all tokens: y[t, row] = x[t] . weight[row] + bias.

    The weight is on its way before the program waits for x.
    """
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    held = gemv_hold(weight_ptr, rows, N, K, BLOCK, REST)
    bias = tl.zeros([ROWS], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, rows < N, 0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for token in tl.static_range(TOKENS):
        y = gemv_times(held, x_ptr + token * stride_x, K, BLOCK, REST) + bias
        tl.store(y_ptr + token * N + rows, y.to(y_ptr.dtype.element_ty), rows < N)


@triton.jit
def dot_tile(
    x_ptr,
    weight_ptr,
    stride_x,
    tokens,
    rows,
    columns_t,
    start,
    stop,
    N: tl.constexpr,
    K: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """float32 [rows, tokens]: weight[rows, start:stop] . x[tokens, start:stop]^T.

    With PDL, AHEAD steps of the weight are on their way to the L2 cache before the
    wait for x. More of them than the cache can hold beside those of the other programs
    would be read twice.
    """
    depth = tl.arange(0, DEPTH)
    weight_rows = weight_ptr + rows[:, None].to(tl.int64) * K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        BYTES: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
        for step in tl.static_range(AHEAD):
            soon = start + step * DEPTH
            left = tl.minimum(tl.maximum(stop - soon, 0), DEPTH) * BYTES
            prefetch(weight_rows + soon, tl.where((rows < N)[:, None], left, 0))
        tl.extra.cuda.gdc_wait()
    x_rows = x_ptr + columns_t[:, None].to(tl.int64) * stride_x
    total = tl.zeros([rows.shape[0], columns_t.shape[0]], tl.float32)
    for k in range(start, stop, DEPTH):
        at = k + depth
        if K % DEPTH == 0:
            w = tl.load(weight_rows + at[None, :], (rows < N)[:, None], 0)
            x = tl.load(x_rows + at[None, :], (columns_t < tokens)[:, None], 0)
        else:
            inside = at[None, :] < K
            w = tl.load(weight_rows + at[None, :], (rows < N)[:, None] & inside, 0)
            x = tl.load(x_rows + at[None, :], (columns_t < tokens)[:, None] & inside, 0)
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tokens"])  # as in routing
def dot_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    stride_x,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for ROWS rows, TOKENS tokens and one of PARTS parts of K.

    y[t, part, row] = x[t, part of K] . weight[row, part of K], and in part 0 + bias
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    t = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    LENGTH: tl.constexpr = tl.cdiv(tl.cdiv(K, DEPTH), PARTS) * DEPTH
    start = part * LENGTH
    stop = tl.minimum(start + LENGTH, K)
    total = dot_tile(
        x_ptr,
        weight_ptr,
        stride_x,
        tokens,
        rows,
        t,
        start,
        stop,
        N,
        K,
        DEPTH,
        AHEAD,
        PDL,
    )
    if HAS_BIAS:
        bias = tl.load(bias_ptr + rows, rows < N, 0).to(tl.float32)
        total += tl.where(part == 0, bias, 0.0)[:, None]
    where = (t[None, :].to(tl.int64) * PARTS + part) * N + rows[:, None]
    inside = (rows < N)[:, None] & (t < tokens)[None, :]
    tl.store(y_ptr + where, total.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def add_parts_kernel(
    parts_ptr,
    y_ptr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[t] = parts[t, 0] + parts[t, 1] + …, in this order."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        where = parts_ptr + (token * PARTS + part) * N + columns
        total += tl.load(where, columns < N, 0)
    y = total.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token * N + columns, y, columns < N)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] times ``weight`` [N, K], transposed, plus ``bias`` [N]: [T, N].

    Products are summed in float32. All three have one dtype; weight is contiguous, and
    so is each row of x. Raises ValueError for other shapes.
    """
    check_linear(x, weight, bias)
    config = choose(x.shape[0], *weight.shape)
    if config is None or x.shape[0] == 0:
        return functional.linear(x, weight, bias)
    return project(x, weight, bias, config)


def linear_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = functional.linear(x.float(), weight.float())
    return (y if bias is None else y + bias.float()).to(x.dtype)


def project(x: Tensor, weight: Tensor, bias: Tensor | None, config: Config) -> Tensor:
    """`linear` in the way that ``config`` says."""
    if isinstance(config, Gemv):
        return gemv(x, weight, bias, config, x.dtype)
    if config.parts == 1:
        return linear_parts(x, weight, bias, config, x.dtype)[:, 0]
    parts = linear_parts(x, weight, bias, config, torch.float32)
    return add_parts(parts, x.dtype, config.pdl)


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: Gemv, dtype: torch.dtype
) -> Tensor:
    """`linear` on the ordinary cores, its result in ``dtype``."""
    size_out, size_in = weight.shape
    y = torch.empty(x.shape[0], size_out, dtype=dtype, device=x.device)
    block, rest = split(size_in)
    pdl = config.pdl and supports_pdl(x.device)
    gemv_kernel[(triton.cdiv(size_out, config.rows),)](
        x,
        weight,
        weight if bias is None else bias,
        y,
        x.stride(0),
        N=size_out,
        K=size_in,
        TOKENS=x.shape[0],
        HAS_BIAS=bias is not None,
        ROWS=config.rows,
        BLOCK=block,
        REST=rest,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return y


def split(size: int) -> tuple[int, int]:
    """Two powers of two that hold ``size`` numbers with less padding than one; or 0."""
    block = 1 << (size.bit_length() - 1)
    rest = size - block
    return block, triton.next_power_of_2(rest) if rest else 0


def can_prefetch(weight: Tensor) -> bool:
    """Whether each row of ``weight`` begins at a multiple of 16 bytes."""
    row = weight.shape[1] * weight.element_size()
    return row % 16 == 0 and weight.data_ptr() % 16 == 0


def linear_parts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: Dot,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`linear` as parts [T, S, N] whose sum over S is the result.

    `add_norm` takes them as its update, which saves adding them up first.
    """
    check_linear(x, weight, bias)
    tokens, (size_out, size_in) = x.shape[0], weight.shape
    y = torch.empty(tokens, config.parts, size_out, dtype=dtype, device=x.device)
    width = config.width or min(max(16, triton.next_power_of_2(tokens)), 128)
    grid = (
        triton.cdiv(size_out, config.rows),
        config.parts,
        triton.cdiv(tokens, width),
    )
    pdl = config.pdl and supports_pdl(x.device)
    dot_kernel[grid](
        x,
        weight,
        weight if bias is None else bias,
        y,
        x.stride(0),
        tokens,
        N=size_out,
        K=size_in,
        HAS_BIAS=bias is not None,
        ROWS=config.rows,
        TOKENS=width,
        DEPTH=config.depth,
        PARTS=config.parts,
        AHEAD=config.ahead if can_prefetch(weight) else 0,
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=pdl,
    )
    return y


def add_parts(parts: Tensor, dtype: torch.dtype, pdl: bool = True) -> Tensor:
    """parts float32 [T, S, N], contiguous -> their sums over S, [T, N] in ``dtype``."""
    tokens, count, size = parts.shape
    y = torch.empty(tokens, size, dtype=dtype, device=parts.device)
    block = 512
    pdl = pdl and supports_pdl(parts.device)
    add_parts_kernel[(triton.cdiv(size, block), tokens)](
        parts,
        y,
        N=size,
        PARTS=count,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return y


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless the three belong together."""
    if weight.ndim != 2 or not weight.is_contiguous():
        raise ValueError(
            f"weight is {list(weight.shape)} with strides {list(weight.stride())}; "
            "expected [N, K], contiguous"
        )
    size_out, size_in = weight.shape
    if x.ndim != 2 or x.shape[1] != size_in or x.stride(1) != 1:
        raise ValueError(
            f"x is {list(x.shape)} with strides {list(x.stride())}; expected "
            f"[T, {size_in}], rows contiguous"
        )
    if bias is not None and bias.shape != (size_out,):
        raise ValueError(f"bias is {list(bias.shape)}; expected [{size_out}]")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype != x.dtype:
            raise ValueError(f"{name} is {other.dtype}; expected x's {x.dtype}")
