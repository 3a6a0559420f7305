"""The LM head, and the likeliest token of each row found on the way.

T tokens, V vocabulary, N hidden size.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from simplellm.kernels import supports_pdl
from simplellm.kernels.keys import LOWEST, index_of, largest_key, ordered
from simplellm.kernels.linear import (
    INVARIANT,
    Config,
    Dot,
    Gemv,
    can_prefetch,
    check_linear,
    dot_tile,
    gemv_hold,
    gemv_times,
    linear_parts,
    split,
)

# For up to so many tokens, how. Above the last, PyTorch's matmul and argmax.
TUNED: tuple[tuple[int, Config], ...] = (
    (1, Gemv(rows=8, warps=4)),
    (32, Dot(rows=128, depth=128, parts=1, warps=8, stages=4, pdl=False)),
    (128, Dot(rows=128, depth=128, parts=1, warps=4, stages=3, pdl=False)),
)


@triton.jit
def head_gemv_kernel(
    x_ptr,
    weight_ptr,
    logits_ptr,
    best_ptr,
    stride_x,
    V: tl.constexpr,
    N: tl.constexpr,
    TOKENS: tl.constexpr,
    WRITE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for ROWS rows: logits = x . weight[row]; best[t, program] = their
    largest, as a key of `ordered`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    held = gemv_hold(weight_ptr, rows, V, N, BLOCK, REST)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for token in tl.static_range(TOKENS):
        y = gemv_times(held, x_ptr + token * stride_x, N, BLOCK, REST)
        if WRITE:
            tl.store(logits_ptr + token * V + rows, y, rows < V)
        keys = tl.where(rows < V, ordered(y, rows), LOWEST)
        tl.store(best_ptr + token * tl.num_programs(0) + program, tl.max(keys, 0))


@triton.jit(do_not_specialize=["tokens"])
def head_dot_kernel(
    x_ptr,
    weight_ptr,
    logits_ptr,
    best_ptr,
    stride_x,
    tokens,
    V: tl.constexpr,
    N: tl.constexpr,
    WRITE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same on the tensor cores, for TOKENS tokens."""
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    t = tl.arange(0, TOKENS)
    y = dot_tile(
        x_ptr,
        weight_ptr,
        stride_x,
        tokens,
        rows,
        t,
        0,
        N,
        V,
        N,
        DEPTH,
        AHEAD,
        PDL,
    )
    if WRITE:
        inside = (rows < V)[:, None] & (t < tokens)[None, :]
        tl.store(logits_ptr + t[None, :].to(tl.int64) * V + rows[:, None], y, inside)
    keys = tl.where((rows < V)[:, None], ordered(y, rows[:, None]), LOWEST)
    where = best_ptr + t * tl.num_programs(0) + program
    tl.store(where, tl.max(keys, 0), t < tokens)


@triton.jit
def best_kernel(best_ptr, ids_ptr, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program a token: ids[t] = the index in the largest of its keys."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0)
    best = largest_key(best_ptr + token * count, count, BLOCK)
    tl.store(ids_ptr + token, index_of(best))


def choose(tokens: int) -> Config | None:
    """How to compute the head for ``tokens`` tokens; None for PyTorch's matmul."""
    for most, config in TUNED:
        if tokens <= most:
            return config
    return None


def head(
    x: Tensor,
    weight: Tensor,
    logits: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """The likeliest token of each row: x [T, N], weight [V, N] -> int32 [T].

    Logits are sums in float32, which no rounding ties; of equal ones the lower id wins,
    and NaN wins against all numbers, so that a row of NaN yields 0. ``logits``, float32
    [T, V], is filled with them if given. With ``batch_invariant`` no row's logits
    depend on the others. Raises ValueError for other shapes.
    """
    check_head(x, weight, logits)
    if batch_invariant:
        return head_invariant(x, weight, logits)
    config = choose(x.shape[0])
    if config is None or x.shape[0] == 0:
        if not x.is_cuda or x.dtype != torch.bfloat16:
            return head_torch(x, weight, logits)
        # The sums are not rounded to bfloat16.
        y = torch.mm(x, weight.T, out_dtype=torch.float32, out=logits)
        return y.argmax(-1).int()
    return best_of(x, weight, logits, config)


def head_torch(
    x: Tensor,
    weight: Tensor,
    logits: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    return likeliest(functional.linear(x.float(), weight.float()), logits)


def likeliest(y: Tensor, logits: Tensor | None) -> Tensor:
    """The index of each row's largest number, int32; ``logits`` gets all of them."""
    if logits is not None:
        logits.copy_(y)
    return y.argmax(-1).int()


def head_invariant(x: Tensor, weight: Tensor, logits: Tensor | None) -> Tensor:
    """`head` with the same order of sums for any number of tokens."""
    y = linear_parts(x, weight, None, replace(INVARIANT, parts=1))[:, 0]
    return likeliest(y, logits)


def best_of(
    x: Tensor,
    weight: Tensor,
    logits: Tensor | None,
    config: Config,
) -> Tensor:
    """`head` in the way that ``config`` says."""
    tokens, (vocabulary, size) = x.shape[0], weight.shape
    blocks = triton.cdiv(vocabulary, config.rows)
    best = torch.empty(tokens, blocks, dtype=torch.int64, device=x.device)
    pdl = config.pdl and supports_pdl(x.device)
    block, rest = split(size)
    if isinstance(config, Gemv):
        head_gemv_kernel[(blocks,)](
            x,
            weight,
            best if logits is None else logits,
            best,
            x.stride(0),
            V=vocabulary,
            N=size,
            TOKENS=tokens,
            WRITE=logits is not None,
            ROWS=config.rows,
            BLOCK=block,
            REST=rest,
            PDL=pdl,
            num_warps=config.warps,
            launch_pdl=pdl,
        )
    else:
        head_dot_kernel[(blocks,)](
            x,
            weight,
            best if logits is None else logits,
            best,
            x.stride(0),
            tokens,
            V=vocabulary,
            N=size,
            WRITE=logits is not None,
            ROWS=config.rows,
            TOKENS=max(16, triton.next_power_of_2(tokens)),
            DEPTH=config.depth,
            AHEAD=config.ahead if can_prefetch(weight) else 0,
            PDL=pdl,
            num_warps=config.warps,
            num_stages=config.stages,
            launch_pdl=pdl,
        )
    ids = torch.empty(tokens, dtype=torch.int32, device=x.device)
    pdl = supports_pdl(x.device)
    # One token has 25,136 keys: 8.1 us in tiles of 2,048 on an H200, 3.3 in these.
    tile, warps = (2048, 8) if blocks <= 2048 else (8192, 32)
    best_kernel[(tokens,)](
        best, ids, blocks, BLOCK=tile, PDL=pdl, num_warps=warps, launch_pdl=pdl
    )
    return ids


def check_head(x: Tensor, weight: Tensor, logits: Tensor | None) -> None:
    """Raise ValueError unless the three belong together."""
    check_linear(x, weight, None)
    if logits is None:
        return
    expected = (x.shape[0], weight.shape[0])
    if (
        logits.shape != expected
        or logits.dtype != torch.float32
        or not logits.is_contiguous()
    ):
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)}; expected torch.float32 "
            f"{list(expected)}, contiguous"
        )
