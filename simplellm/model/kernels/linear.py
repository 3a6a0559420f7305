"""Products of few tokens with a weight, bounded by the time it takes to read it.

T tokens, N out, K in, S parts along K, C scales of a token.

Two kernels. `gemv_kernel` multiplies on the ordinary cores: a program holds whole rows
of the weight in registers, loaded before it waits for its input. `dot_kernel`
multiplies on the tensor cores, with the weight as the tall operand and the tokens as
the narrow one. Which one runs, and how, is looked up in `PROJECTIONS`; more tokens go
to PyTorch's matmul. Both can end by finding the largest result of each tile, which is
all that is left of a row of logits for `head`, or with the activation of a gated
network, see `gated`. And both take weights of 8 bits, see `scales` and `scaled_linear`.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from simplellm.checkpoint.scaled import LEAST_TILE
from simplellm.model.kernels.argmax_keys import LOWEST, ordered
from simplellm.model.kernels.gated import apply_gate, gate_and_up_rows
from simplellm.model.kernels.launch import Launcher, launcher, power_of_two
from simplellm.model.kernels.scales import (
    gemv_scales,
    load_scales,
    scaled_gemv_times,
)


class Gemv(NamedTuple):
    """How `gemv_kernel` runs: so many rows of the weight a program."""

    rows: int
    warps: int
    pdl: bool = True

    @property
    def parts(self) -> int:
        """A row is summed at once."""
        return 1

    @property
    def stored(self) -> int:
        """No more of them."""
        return 1


class Dot(NamedTuple):
    """How `dot_kernel` runs: a tile of rows x depth, and parts along K.

    ``ahead`` is how many steps of depth are brought to the L2 cache before the wait, of
    a weight whose rows begin at multiples of 16 bytes. ``joined`` parts are summed by
    one program, which adds them up in the order in which the kernel behind would.
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
    joined: bool = False

    @property
    def stored(self) -> int:
        """Parts that the kernel behind has to add up."""
        return 1 if self.joined else self.parts


Product = Gemv | Dot


@triton.jit
def gemv_weight(
    weight_ptr, rows, columns, N: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr
):
    """``columns`` of ``rows`` of the weight, zeros where it has none.

    A thread has WIDE in a row, as it has of x, where they have different sizes:
    otherwise all of the weight would go through shared memory, to be where x is.
    """
    inside = (rows < N)[:, None] & (columns < K)[None, :]
    where = rows[:, None].to(tl.int64) * K + columns[None, :]
    if WIDE > 0:
        where = tl.max_contiguous(where, [1, WIDE])
    return tl.load(weight_ptr + where, inside, 0.0)


@triton.jit
def gemv_hold(
    weight_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``rows`` of the weight in registers, as BLOCK columns and, if any, REST more."""
    first = gemv_weight(weight_ptr, rows, tl.arange(0, BLOCK), N, K, WIDE)
    rest = first
    if REST > 0:
        rest = gemv_weight(weight_ptr, rows, BLOCK + tl.arange(0, REST), N, K, WIDE)
    return first, rest


@triton.jit
def gemv_times(
    weights, x_ptr, K: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr
):
    """The rows held, times one x: float32 [rows]."""
    first, rest = weights
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


@triton.jit(do_not_specialize=["room"])
def gemv_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    best_ptr,
    stride_x,
    room,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    FLOOR: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for ROWS rows and all tokens: y[t, row] = x[t] . weight[row] + bias.

    best[t, program] is the key of the largest. With an ACTIVATION the rows are gates
    and ups: y[t, unit] = activation(gate) * up. With scales the weight has 8 bits, and
    x as `scaled_gemv_times` wants it. All pointers but those of x, weight and y may be
    None. The weight and its scales are on their way before the program waits for x.
    """
    if PDL and best_ptr is not None:
        # The kernel behind has no weight to load that would come in this one's way.
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if ACTIVATION is None:
        rows = program * ROWS + tl.arange(0, ROWS)
    else:
        units, rows = gate_and_up_rows(N, ROWS)
    # 16 bytes of x, if the weight has numbers of another size.
    WIDE: tl.constexpr = 0 if scales_ptr is None else 8 if x_scales_ptr is None else 16
    weights = gemv_hold(weight_ptr, rows, N, K, BLOCK, REST, WIDE)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, rows < N, 0).to(tl.float32)
    if scales_ptr is not None:
        scales = gemv_scales(scales_ptr, rows, N, K, BLOCK, REST, TILE_ROWS, COLUMNS)
    if PDL:
        if best_ptr is None:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for token in tl.static_range(TOKENS):
        x_row = x_ptr + token * stride_x
        if scales_ptr is None:
            y = gemv_times(weights, x_row, K, BLOCK, REST)
        else:
            y = scaled_gemv_times(
                *(weights, scales, x_row, x_scales_ptr, token, room),
                *(K, BLOCK, REST, COLUMNS, MOST, FLOOR),
            )
        if bias_ptr is not None:
            y += bias
        if ACTIVATION is None:
            tl.store(y_ptr + token * N + rows, y.to(y_ptr.dtype.element_ty), rows < N)
        else:
            y = apply_gate(y[:, None], ACTIVATION).to(y_ptr.dtype.element_ty)
            y_ptrs = y_ptr + token * (N // 2) + units[:, None]
            tl.store(y_ptrs, y, (units < N // 2)[:, None])
        if best_ptr is not None:
            keys = tl.where(rows < N, ordered(y, rows), LOWEST)
            tl.store(best_ptr + token * tl.num_programs(0) + program, tl.max(keys, 0))


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
def prefetch_rows(
    weight_ptr,
    rows,
    start,
    stop,
    N: tl.constexpr,
    K: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """AHEAD steps of DEPTH columns of the weight are on their way to the L2 cache.

    More of them than the cache can hold beside those of the other programs would be
    read twice.
    """
    weight_rows = weight_ptr + rows[:, None].to(tl.int64) * K
    BYTES: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
    for step in tl.static_range(AHEAD):
        soon = start + step * DEPTH
        left = tl.minimum(tl.maximum(stop - soon, 0), DEPTH) * BYTES
        prefetch(weight_rows + soon, tl.where((rows < N)[:, None], left, 0))


@triton.jit
def dot_tile(
    x_ptr,
    x_scales_ptr,
    x_rows,
    has_token,
    stride_x,
    room,
    weight_ptr,
    scales_ptr,
    rows,
    strips,
    has_row,
    start,
    stop,
    K: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """float32 [rows, x_rows]: weight[rows, start:stop] . x[x_rows, start:stop]^T.

    ``has_row`` and ``has_token`` say which of them there are. Scales may be None: those
    of x [C, room], and of the weight, which has ``strips`` of rows that share them.
    COLUMNS share one, a multiple of DEPTH or K; if it is 0, all do, and the sum is
    scaled.

    The next kernel may start behind the loop, when all programs of this one have long
    had a place: those of kernels to come would take theirs, and they crowd on the rest.
    """
    weight_rows = weight_ptr + rows[:, None].to(tl.int64) * K
    x_starts = x_ptr + x_rows[:, None].to(tl.int64) * stride_x
    if scales_ptr is not None:
        SCALES: tl.constexpr = tl.cdiv(K, COLUMNS) if COLUMNS > 0 else 1
        scales_ptrs = scales_ptr + (strips * SCALES)[:, None]
    if COLUMNS > 0:
        scales, x_scales = load_scales(
            scales_ptrs, x_scales_ptr, start, x_rows, room, has_row[:, None], K, COLUMNS
        )
    SUMS: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros([rows.shape[0], x_rows.shape[0]], SUMS)
    for k in range(start, stop, DEPTH):
        at = (k + tl.arange(0, DEPTH))[None, :]
        if K % DEPTH == 0:
            w = tl.load(weight_rows + at, has_row[:, None], 0.0)
            x = tl.load(x_starts + at, has_token[:, None], 0.0)
        else:
            w = tl.load(weight_rows + at, has_row[:, None] & (at < K), 0.0)
            x = tl.load(x_starts + at, has_token[:, None] & (at < K), 0.0)
        x = tl.trans(x)
        part = tl.dot(w.to(x.dtype), x, input_precision="ieee", out_dtype=SUMS)
        if COLUMNS > 0:
            part *= scales * x_scales
            # Those of the next step are on their way while this one is multiplied.
            scales, x_scales = load_scales(
                *(scales_ptrs, x_scales_ptr, k + DEPTH, x_rows, room),
                *(has_row[:, None], K, COLUMNS),
            )
        total += part
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    y = total.to(tl.float32)
    if scales_ptr is not None and COLUMNS == 0:
        y *= tl.load(scales_ptrs, has_row[:, None], 0)
        if x_scales_ptr is not None:
            y *= tl.load(x_scales_ptr + x_rows, has_token, 0)[None, :]
    return y


# Triton would compile a kernel again for numbers of tokens that 16 divides, and for 1,
# in the middle of somebody's answer.
@triton.jit(do_not_specialize=["room", "tokens"])
def dot_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    best_ptr,
    stride_x,
    tokens,
    room,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    JOINED: tl.constexpr,
    AHEAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for ROWS rows, TOKENS tokens and one of PARTS parts of K.

    y[t, part, row] = x[t, part of K] . weight[row, part of K], and in part 0 + bias;
    where there is one part, best[t, program] is the key of the largest. JOINED parts
    have one program: y[t, row] is their sum. With an ACTIVATION the rows are gates and
    ups: y[t, unit] = activation(gate) * up. With scales the weight has 8 bits, see
    `dot_tile`. All pointers but those of x, weight and y may be None.
    """
    program = tl.program_id(0)
    if ACTIVATION is None:
        rows = program * ROWS + tl.arange(0, ROWS)
    else:
        units, rows = gate_and_up_rows(N, ROWS)
    t = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    part, start, stop = 0, 0, K
    LENGTH: tl.constexpr = tl.cdiv(tl.cdiv(K, DEPTH), PARTS) * DEPTH
    STORED: tl.constexpr = 1 if JOINED else PARTS
    if PARTS > 1:
        part = tl.program_id(1)
        start = part * LENGTH
        stop = tl.minimum(start + LENGTH, K)
    if PDL:
        prefetch_rows(weight_ptr, rows, start, stop, N, K, DEPTH, AHEAD)
        tl.extra.cuda.gdc_wait()
    total = dot_tile(
        *(x_ptr, x_scales_ptr, t, t < tokens, stride_x, room),
        *(weight_ptr, scales_ptr, rows, rows // TILE_ROWS, rows < N, start, stop),
        *(K, DEPTH, COLUMNS, PDL),
    )
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows, rows < N, 0).to(tl.float32)
        total += tl.where(part == 0, bias, 0.0)[:, None]
    if JOINED:
        for later in range(1, PARTS):
            begin = later * LENGTH
            total += dot_tile(
                *(x_ptr, x_scales_ptr, t, t < tokens, stride_x, room, weight_ptr),
                *(scales_ptr, rows, rows // TILE_ROWS, rows < N),
                *(begin, tl.minimum(begin + LENGTH, K), K, DEPTH, COLUMNS, PDL),
            )
    WIDTH: tl.constexpr = N if ACTIVATION is None else N // 2
    if ACTIVATION is not None:
        total, rows = apply_gate(total, ACTIVATION), units
    where = (t[None, :].to(tl.int64) * STORED + part) * WIDTH + rows[:, None]
    inside = (rows < WIDTH)[:, None] & (t < tokens)[None, :]
    tl.store(y_ptr + where, total.to(y_ptr.dtype.element_ty), inside)
    if best_ptr is not None:
        keys = tl.where((rows < N)[:, None], ordered(total, rows[:, None]), LOWEST)
        best_ptrs = best_ptr + t * tl.num_programs(0) + program
        tl.store(best_ptrs, tl.max(keys, 0), t < tokens)


# (N, K) -> for up to so many tokens, how.
Table = tuple[tuple[int, Product], ...]
ROUTER: Table = (
    (2, Gemv(rows=4, warps=4)),
    (4, Gemv(rows=4, warps=2)),
    (64, Dot(rows=64, depth=64, parts=15, warps=4, stages=6, pdl=False)),
    (2048, Dot(rows=64, depth=64, parts=5, warps=4, stages=6)),
    (8192, Dot(rows=128, depth=64, parts=3, warps=8, stages=4)),
)
PROJECTIONS: dict[tuple[int, int], Table] = {
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
# For more tokens than a table has, where PyTorch's matmul would round the sums.
MANY_TOKENS = Dot(rows=128, depth=64, parts=1, warps=8, stages=4)
MOST_STORED = 2**22  # numbers of parts, beyond which one program joins them
ENOUGH = 264  # programs, for all processors of an H100 or H200
MOST_PARTS = 8


def count_parts(size_out: int, size_in: int) -> int:
    """Parts along K that give all processors a program of 64 rows."""
    programs = -(-size_out // 64)
    return max(1, min(MOST_PARTS, ENOUGH // programs, size_in // 128))


def other_projections(size_out: int, size_in: int) -> Table:
    """The table for a weight of another model, measured in steps of some of them."""
    parts = count_parts(size_out, size_in)
    # Of short rows, more steps are under way.
    gemv, dot = Gemv(rows=2, warps=8), Dot(64, 128, parts, warps=4, stages=3)
    if size_in < 4096:
        gemv, dot = Gemv(rows=8, warps=4), Dot(64, 64, parts, warps=4, stages=6)
    # A thread has registers for about 128 numbers of the weight.
    return ((1, gemv), (64, dot)) if size_in <= 16384 else ((64, dot),)


def choose_in(table: Table, tokens: int) -> Product | None:
    """The way for so many tokens, if the table has one."""
    return next((config for most, config in table if tokens <= most), None)


@lru_cache(8192)
def choose(tokens: int, size_out: int, size_in: int) -> Product | None:
    """The way to project ``tokens`` tokens; None for PyTorch's matmul."""
    table = PROJECTIONS.get((size_out, size_in))
    return choose_in(table or other_projections(size_out, size_in), tokens)


@lru_cache(8192)
def choose_invariant(tokens: int, size_out: int, size_in: int) -> Dot:
    """The way for so many tokens, of which each is summed in the same order.

    That order is one part after the other, and within a part column after column: parts
    and depth are always those of a few tokens. All else may change with their number.
    """
    table = PROJECTIONS.get((size_out, size_in))
    table = table or other_projections(size_out, size_in)
    few = next(config for _, config in table if isinstance(config, Dot))
    if tokens <= 64:
        return few
    if few.parts > 1 and tokens * few.parts * size_out <= MOST_STORED:
        return few._replace(width=64)
    joined, stages = few.parts > 1, 256 // few.depth
    return few._replace(rows=128, warps=8, stages=stages, pdl=True, joined=joined)


class Scaling(NamedTuple):
    """How kernels scale: so many rows and columns of a weight share a scale.

    Of 0 ``columns`` all do, and the sums are scaled; of 0 rows there are no scales.
    ``most`` is what `gemv_kernel` rounds inputs to, or 0.
    """

    rows: int = 0
    columns: int = 0
    most: int = 0


UNSCALED = Scaling()


def split_columns(size: int) -> tuple[int, int]:
    """Two powers of two that hold ``size`` numbers with less padding than one; or 0."""
    block = 1 << (size.bit_length() - 1)
    rest = size - block
    return block, power_of_two(rest) if rest else 0


@lru_cache(8192)
def product_launcher(
    config: Product,
    tokens: int,
    size_out: int,
    size_in: int,
    scaling: Scaling = UNSCALED,
    activation: str | None = None,
) -> tuple[Launcher, tuple[int, int, int]]:
    """For so many tokens; and the grid."""
    programs = -(-size_out // config.rows)
    options: dict[str, Any] = {"N": size_out, "K": size_in, "ROWS": config.rows}
    options |= {"TILE_ROWS": max(scaling.rows, 1), "COLUMNS": scaling.columns}
    options |= {"ACTIVATION": activation}
    options |= {"pdl": config.pdl, "num_warps": config.warps}
    if isinstance(config, Gemv):
        block, rest = split_columns(size_in)
        if scaling.rows > 0:  # tiles have 128 columns
            block, rest = max(block, 128), rest and max(rest, 128)
        options |= {"TOKENS": tokens, "BLOCK": block, "REST": rest}
        options |= {"MOST": scaling.most, "FLOOR": LEAST_TILE}
        return launcher(gemv_kernel, **options), (programs, 1, 1)
    width = config.width or min(max(16, power_of_two(tokens)), 128)
    options |= {"TOKENS": width, "DEPTH": config.depth, "PARTS": config.parts}
    options |= {"JOINED": config.joined, "AHEAD": config.ahead}
    options |= {"num_stages": config.stages}
    grid = programs, config.stored, -(-tokens // width)
    return launcher(dot_kernel, **options), grid


def multiply_into(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: Product,
    best: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """Fill y [T, N], or the parts [T, S, N] that ``config`` stores: x ``weight``^T +
    ``bias``.

    Products are summed in float32. x [T, K] has contiguous rows; ``weight`` [N, K],
    ``bias`` [N] and y are contiguous. ``best`` int64 [T, N / config.rows, rounded up]
    gets each tile's largest number and its row as a key of `keys.ordered`, if config
    has one part. With an ``activation`` y is [T, N / 2], of one part.
    """
    tokens, (size_out, size_in) = x.shape[0], weight.shape
    start, grid = product_launcher(
        config, tokens, size_out, size_in, activation=activation
    )
    count = () if isinstance(config, Gemv) else (tokens,)
    start(grid, x, None, weight, None, bias, y, best, x.stride(0), *count, 0)


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool = False
) -> Tensor:
    """x [T, K] times ``weight`` [N, K], transposed, plus ``bias`` [N].

    [T, N] in x's dtype, or float32 parts [T, S, N] for the next kernel to add up. With
    ``batch_invariant`` no token's result depends on the others.
    """
    tokens, (size_out, size_in) = x.shape[0], weight.shape
    pick = choose_invariant if batch_invariant else choose
    config = pick(tokens, size_out, size_in)
    if config is None:
        return functional.linear(x, weight, bias)
    if config.parts == 1:
        y = x.new_empty(tokens, size_out)
    else:
        y = x.new_empty(tokens, config.stored, size_out, dtype=torch.float32)
    multiply_into(y, x, weight, bias, config)
    return y


def project_exactly(x: Tensor, weight: Tensor, batch_invariant: bool = False) -> Tensor:
    """`project` with sums that stay float32: always parts, [T, S, N]."""
    tokens, (size_out, size_in) = x.shape[0], weight.shape
    pick = choose_invariant if batch_invariant else choose
    config = pick(tokens, size_out, size_in) or MANY_TOKENS
    y = x.new_empty(tokens, config.stored, size_out, dtype=torch.float32)
    multiply_into(y, x, weight, None, config)
    return y
