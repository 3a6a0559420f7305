"""Other designs of the decode kernel, to be timed against the package's.

In all of them each warp has keys of its own, and a softmax of its own: nothing is
exchanged among warps before the end.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.kernels import supports_pdl
from simplellm.kernels.attention import (
    LOG2E,
    LOWEST,
    Scratch,
    choose_splits,
    find_rows,
    join,
)
from simplellm.kernels.linear import prefetch


@dataclass(frozen=True)
class Apart:
    """How the kernel runs; ``ahead`` keys of a program are fetched before its wait."""

    block: int
    warps: int
    stages: int
    least: int = 128
    chunk: int = 32
    ahead: int = 0
    early: bool = True  # whether the next kernel may begin with this one's first load
    tokens: int = 1


@triton.jit(
    do_not_specialize=["least", "stride_table"],
    do_not_specialize_on_alignment=["tables_ptr", "offsets_ptr", "lengths_ptr"],
)
def apart_kernel(
    q_ptr,  # [B, H, D]
    keys_ptr,  # [pages, PAGE, K, D]
    values_ptr,
    tables_ptr,  # int32 [B, P]
    offsets_ptr,  # int32 [B]
    lengths_ptr,  # int32 [B]
    sinks_ptr,  # [H]
    out_ptr,  # [B, H, D]
    parts_ptr,  # float32 [B, K, splits, G, D]
    sums_ptr,  # float32 [B, K, splits, G]
    counters_ptr,  # int32 [B, K], all 0 before and after
    scale,
    least,
    stride_q,
    stride_page,
    stride_table,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    JOINS: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    WARPS: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    head, split = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1).to(tl.int64)
    end = tl.load(lengths_ptr + row) - tl.load(offsets_ptr + row)
    lowest = tl.maximum(end - WINDOW, 0) if WINDOW else 0
    splits = tl.num_programs(2)
    share = tl.maximum(tl.cdiv(end - lowest, splits), least)
    share = tl.cdiv(share, BLOCK) * BLOCK
    used = tl.maximum(tl.cdiv(end - lowest, share), 1)
    if split >= used:
        return
    start = lowest + split * share
    stop = tl.minimum(start + share, end)
    table_ptr = tables_ptr + row * stride_table
    keys_ptr += head * D
    values_ptr += head * D
    if AHEAD:
        soon = start + tl.arange(0, AHEAD)
        ahead = find_rows(table_ptr, soon, stop, stride_page, K * D, PAGE)
        size = D * keys_ptr.dtype.element_ty.primitive_bitwidth // 8
        sizes = tl.where(soon < stop, size, 0)
        prefetch(keys_ptr + ahead, sizes)
        prefetch(values_ptr + ahead, sizes)

    EACH: tl.constexpr = BLOCK // WARPS
    warp, group, d = tl.arange(0, WARPS), tl.arange(0, ROWS), tl.arange(0, DIMS)
    n = warp[:, None] * EACH + tl.arange(0, EACH)[None, :]  # [WARPS, EACH]
    inside = group < G
    heads = head * G + group
    cell = inside[:, None] & (d < D)[None, :]
    rows = find_rows(table_ptr, start + n, stop, stride_page, K * D, PAGE)
    # The sinks are counted once, by the first warp of the first split.
    counted = inside[None, :] & ((warp == 0)[:, None] & (split == 0))
    top = tl.full([WARPS, ROWS], LOWEST, tl.float32)
    total = tl.zeros([WARPS, ROWS], tl.float32)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=inside, other=0.0).to(tl.float32)
        top = tl.where(counted, sinks[None, :] * LOG2E, top)
        total = tl.where(counted, 1.0, total)
    acc = tl.zeros([WARPS, ROWS, DIMS], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    q_at = row * stride_q + (heads * D)[:, None] + d[None, :]
    q = tl.load(q_ptr + q_at, mask=cell, other=0.0)
    q = tl.broadcast_to(q[None, :, :], (WARPS, ROWS, DIMS))
    for first in range(start, stop, BLOCK):
        at = first + n
        there = at < stop
        mask = there[:, :, None] & (d < D)[None, None, :]
        k = tl.load(keys_ptr + rows[:, :, None] + d[None, None, :], mask, 0.0)
        v = tl.load(values_ptr + rows[:, :, None] + d[None, None, :], mask, 0.0)
        rows = find_rows(table_ptr, at + BLOCK, stop, stride_page, K * D, PAGE)
        logits = tl.dot(q, tl.trans(k, (0, 2, 1)), input_precision="ieee")
        logits = tl.where(there[:, None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 2) * scale)
        weights = tl.exp2(logits * scale - new_top[:, :, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 2)
        acc = acc * shrink[:, :, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    # From one softmax a warp to one of all.
    highest = tl.max(top, 0)
    shrink = tl.exp2(top - highest[None, :])
    whole = tl.sum(total * shrink, 0)
    part = tl.sum(acc * shrink[:, :, None], 0)
    part = part / tl.where(whole > 0, whole, 1.0)[:, None]

    out_at = row * (K * G * D) + (heads * D)[:, None] + d[None, :]
    if (not JOINS) | (used == 1):
        tl.store(out_ptr + out_at, part.to(out_ptr.dtype.element_ty), mask=cell)
        return
    first_sum = (row * K + head) * (splits * G)
    mine = first_sum + split * G + group
    tl.store(sums_ptr + mine, highest + tl.log2(whole), mask=inside)
    tl.store(parts_ptr + (mine * D)[:, None] + d[None, :], part, mask=cell)
    # All threads have stored before one of them counts this program in.
    tl.debug_barrier()
    counter_ptr = counters_ptr + row * K + head
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == used - 1:
        sums_ptr += first_sum
        parts_ptr += first_sum * D
        joined = join(sums_ptr, parts_ptr, used, G, D, ROWS, DIMS, CHUNK)
        tl.store(out_ptr + out_at, joined.to(out_ptr.dtype.element_ty), mask=cell)
        tl.store(counter_ptr, 0)


def launch_apart(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    window: int | None,
    scratch: Scratch,
    out: Tensor | None,
    tiles: Apart,
) -> Tensor:
    (batch, heads, dim), (page_size, kv_heads) = q.shape, keys.shape[1:3]
    out = torch.empty_like(q) if out is None else out
    splits = scratch.splits or choose_splits(batch, kv_heads)
    longest = tables.shape[1] * page_size
    longest = longest if window is None else min(longest, window)
    splits = min(splits, -(-longest // tiles.least))
    pdl = supports_pdl(q.device)
    apart_kernel[kv_heads, batch, splits](
        q,
        keys,
        values,
        tables,
        offsets,
        lengths,
        sinks,
        out,
        scratch.parts,
        scratch.sums,
        scratch.counters,
        LOG2E.value * dim**-0.5,
        tiles.least,
        q.stride(0),
        keys.stride(0),
        tables.stride(0),
        K=kv_heads,
        G=heads // kv_heads,
        D=dim,
        PAGE=page_size,
        WINDOW=window or 0,
        JOINS=splits > 1,
        ROWS=triton.next_power_of_2(heads // kv_heads),
        DIMS=max(16, triton.next_power_of_2(dim)),
        BLOCK=tiles.block,
        WARPS=tiles.warps,
        CHUNK=min(tiles.chunk, splits),
        AHEAD=tiles.ahead if pdl else 0,
        EARLY=tiles.early,
        HAS_SINKS=sinks is not None,
        PDL=pdl,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_pdl=pdl,
    )
    return out
