"""Attention of one new token of each sequence over the pages of a cache.

B sequences, P pages in a row of a table, H query heads, K kv heads, G = H / K heads a
group, D head_dim. Positions and units are those of `simplellm.model.kernels.softmax`.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.batch import KVGroup
from simplellm.model.kernels.key_tiles import (
    LOG2E,
    NO_KEY,
    AttentionSizes,
    init_acc,
    load_pair,
)
from simplellm.model.kernels.launch import (
    Launcher,
    launcher,
    power_of_two,
    set_carveout,
)
from simplellm.model.kernels.prefill import ANYWHERE, VARIED, block_of
from simplellm.model.kernels.softmax import find_rows, join_parts, softmax_update


class DecodeTiles(NamedTuple):
    """How the decode kernel runs: the keys of a tile, and how Triton compiles it."""

    block: int
    warps: int
    stages: int
    least: int = 128  # keys that are worth a program of their own
    early: bool = False  # whether keys but the newest are loaded before the wait
    carveout: int = -1  # what `set_carveout` is given


# By the least number of sequences, as timed in a layer on an H200 on 2026-11-21 and 22.
# Tiles of 128 keys in 2 stages made a layer with one sequence of 500 up to one
# microsecond shorter, with one of 32,768 a third of one longer. With 8 sequences, early
# keys made it half a microsecond longer, with 128 more than one.
DECODE_TILES = {
    1: DecodeTiles(64, 4, 3, least=64, early=True, carveout=64),
    5: DecodeTiles(64, 4, 4, least=128),
    16: DecodeTiles(128, 8, 2, least=256, early=True),
    32: DecodeTiles(128, 8, 2, least=512, early=True),
    64: DecodeTiles(64, 4, 3, least=1024, early=True),
    128: DecodeTiles(64, 4, 2, least=1024),
}
# Those of heads of 128, as timed alone on an H100 on 2026-11-25. Blocks are for heads
# of 64, as above: half as many keys of 128.
WIDE_TILES = {
    1: DecodeTiles(128, 4, 2, least=64, early=True, carveout=64),
    5: DecodeTiles(128, 4, 3, least=64, early=True),
    16: DecodeTiles(128, 8, 3, least=256, early=True),
    32: DecodeTiles(128, 8, 3, least=512, early=True),
    64: DecodeTiles(64, 4, 4, least=1024, early=True),
}
# 64 sequences with a window of 128 took 7.4 us in one tile, 8.7 us in two.
DECODE_WINDOW = DecodeTiles(block=128, warps=4, stages=1)


@cache
def decode_tiles(batch: int, dim: int, window: int | None) -> DecodeTiles:
    """What the kernel runs with for so many sequences, and heads of ``dim``."""
    table = DECODE_TILES if dim <= 64 else WIDE_TILES
    tiles = table[max(least for least in table if least <= batch)]
    if window is not None and window <= DECODE_WINDOW.block:
        tiles = DECODE_WINDOW
    return tiles._replace(block=block_of(tiles.block, dim))


def choose_splits(batch: int, kv_heads: int) -> int:
    """The largest number of programs that may share a sequence and kv head.

    Nearly four programs for each of 132 processors, but always some, for one long
    sequence among short ones.
    """
    return max(4, min(64, 512 // (batch * kv_heads)))


@dataclass(frozen=True)
class Scratch:
    """Buffers in which programs that share a sequence leave their parts for the join.

    Launches that use the same scratch must not overlap.
    """

    parts: Tensor  # float32, room for [B, K, splits, G, D]
    sums: Tensor  # float32, room for [B, K, splits, G]

    @classmethod
    def create(
        cls,
        max_batch: int,
        num_heads: int,
        kv_heads: int,
        dim: int,
        device: torch.device | str,
    ) -> "Scratch":
        """Enough for batches of up to ``max_batch`` sequences."""
        rows = num_heads * max(
            batch * choose_splits(batch, kv_heads) for batch in range(1, max_batch + 1)
        )
        return cls(
            parts=torch.empty(rows * dim, dtype=torch.float32, device=device),
            sums=torch.empty(rows, dtype=torch.float32, device=device),
        )


@triton.jit
def divide(
    length,
    splits,
    least,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The first position seen, the end of all shares, a share, how many have keys.

    How a sequence is split depends on its own length alone.
    """
    lowest = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    # The kernel before may still be writing the newest key.
    end = length - 1 if EARLY else length
    share = tl.maximum(tl.cdiv(end - lowest, splits), least)
    share = tl.cdiv(share, BLOCK) * BLOCK
    return lowest, end, share, tl.maximum(tl.cdiv(end - lowest, share), 1)


@triton.jit
def store_result(
    acc,  # float32 [ROWS, DIMS], as in `softmax_update`
    top,  # float32 [ROWS], likewise
    total,
    is_only,  # whether the sequence has no other part
    out_ptr,
    parts_ptr,
    sums_ptr,
    offsets,  # [ROWS, DIMS], in the output
    part,  # the part's number
    group,  # [ROWS], query heads of the kv head
    cell,  # [ROWS, DIMS]
    columns,  # [DIMS], of a head
    G: tl.constexpr,
    D: tl.constexpr,
):
    """An only part is the output. Others are left to `join_kernel`."""
    # Without keys there is the sink alone, or nothing at all.
    mean = acc / tl.where(total > 0, total, 1.0)[:, None]
    if is_only:
        tl.store(out_ptr + offsets, mean.to(out_ptr.dtype.element_ty), mask=cell)
    else:
        mine = part * G + group
        tl.store(sums_ptr + mine, top + tl.log2(total), mask=group < G)
        tl.store(parts_ptr + (mine * D)[:, None] + columns[None, :], mean, mask=cell)


@triton.jit
def wait():
    """`gdc_wait` of Triton 3.6.

    Later versions of Triton load nothing ahead of a loop with their own.
    """
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def find_newest(
    table_ptr, end, length, split, stride_page, ROW: tl.constexpr, PAGE: tl.constexpr
):
    """Where the newest key begins, and whether it is there, [1] both.

    Like the sinks it is counted once, in the first split.
    """
    newest = tl.maximum(end, 0) + tl.arange(0, 1)
    is_mine = newest < tl.where(split == 0, length, 0)
    return find_rows(table_ptr, newest, length, stride_page, ROW, PAGE), is_mine


@triton.jit
def take_newest(
    q_ptrs,
    cell,
    keys_ptr,
    values_ptr,
    row,  # [1], where the newest key begins
    there,  # [1], whether it is to be taken in
    top,
    total,
    scale,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """q [ROWS, DIMS], and the first step of an online softmax: the newest key alone.

    All of this the kernel ahead may still be writing.
    """
    if PDL:
        wait()
    q = tl.load(q_ptrs, mask=cell, other=0.0)
    k, v = load_pair(keys_ptr, values_ptr, row, there, D, DIMS)
    logit = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
    logit = tl.where(there, logit, NO_KEY)
    new_top = tl.maximum(top, logit)
    weight = tl.where(there, tl.exp2(logit - new_top), 0.0)
    total = total * tl.exp2(top - new_top) + weight
    return q, new_top, total, weight[:, None] * v.to(tl.float32)


@triton.jit(do_not_specialize=VARIED, do_not_specialize_on_alignment=ANYWHERE)
def decode_kernel(
    # Pointers
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
    # Sizes and strides, in elements
    scale,  # log2(e) / sqrt(D)
    least,  # keys that are worth a split
    stride_page,
    stride_table,
    # Sizes and switches
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 for none
    ROWS: tl.constexpr,  # G, rounded up to a power of two
    DIMS: tl.constexpr,  # D, likewise
    BLOCK: tl.constexpr,  # keys in a tile
    EARLY: tl.constexpr,  # whether keys but the newest are loaded before the wait
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """For the G query heads of a kv head, and one of the splits of their keys:

    weights = exp2(q @ k.T * scale), and one more, exp(sink), in the first split
    part, sum = weights @ v / sum(weights), log2(sum(weights))
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head, split = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + row) - tl.load(offsets_ptr + row)
    splits = tl.num_programs(2)
    lowest, end, share, used = divide(length, splits, least, WINDOW, BLOCK, EARLY)
    if split >= used:
        return
    start = lowest + split * share
    stop = tl.minimum(start + share, end)

    group, d, n = tl.arange(0, ROWS), tl.arange(0, DIMS), tl.arange(0, BLOCK)
    inside, heads = group < G, head * G + group
    cell = inside[:, None] & (d < D)[None, :]
    table_ptr = tables_ptr + row * stride_table
    rows = find_rows(table_ptr, start + n, stop, stride_page, K * D, PAGE)
    # The sinks are counted once, in the first split.
    valid = group < tl.where(split == 0, G, 0)
    top, total, acc = init_acc(sinks_ptr, heads, valid, DIMS, HAS_SINKS)
    offsets = row * (K * G * D) + (heads * D)[:, None] + d[None, :]
    q_ptr += offsets
    keys_ptr += head * D
    values_ptr += head * D
    if EARLY:
        q = tl.zeros([ROWS, DIMS], q_ptr.dtype.element_ty)
        newest_row, is_mine = find_newest(
            table_ptr, end, length, split, stride_page, K * D, PAGE
        )
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        q = tl.load(q_ptr, mask=cell, other=0.0)
    last = tl.maximum(stop, start + 1) if EARLY else stop  # a step, in which to wait
    for first in range(start, last, BLOCK):
        at = first + n
        there = at < stop
        k, v = load_pair(keys_ptr, values_ptr, rows, there, D, DIMS)
        # The next tile's rows are on their way while this one is computed with.
        rows = find_rows(table_ptr, at + BLOCK, stop, stride_page, K * D, PAGE)
        if EARLY:  # noqa: SIM102 (known when it is compiled)
            # Not ahead of the loop, where Triton puts the loads of the first steps.
            if first == start:
                q, top, total, acc = take_newest(
                    *(q_ptr, cell, keys_ptr, values_ptr, newest_row, is_mine),
                    *(top, total, scale, D, DIMS, PDL),
                )
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = tl.where(there[None, :], logits, float("-inf"))
        top, total, acc = softmax_update(logits, v, top, total, acc, scale)
    store_result(
        *(acc, top, total, used == 1, out_ptr, parts_ptr, sums_ptr),
        *(offsets, (row * K + head) * splits + split, group, cell, d, G, D),
    )


@triton.jit
def store_joined(
    parts_ptr,
    sums_ptr,
    out_ptr,
    pair,  # of a token and kv head
    splits,
    used,  # the splits that have keys
    group,  # query heads of the kv head
    split,  # [SPLITS, 1]
    d,  # columns of a head
    G: tl.constexpr,
    D: tl.constexpr,
):
    """The output of a token's heads, of the parts that `store_result` has left."""
    at = (pair * splits + split) * G + group[None, :]
    there = (split < used) & (group < G)[None, :]
    sums = tl.load(sums_ptr + at, there, NO_KEY)
    cells = there[:, :, None] & (d < D)[None, None, :]
    parts = tl.load(parts_ptr + (at * D)[:, :, None] + d[None, None, :], cells, 0.0)
    joined = join_parts(sums, parts)
    out_at = (pair * G + group) * D
    tl.store(
        out_ptr + out_at[:, None] + d[None, :],
        joined.to(out_ptr.dtype.element_ty),
        mask=(group < G)[:, None] & (d < D)[None, :],
    )


@triton.jit(do_not_specialize=VARIED, do_not_specialize_on_alignment=ANYWHERE)
def join_kernel(
    # Pointers
    parts_ptr,  # float32 [B, K, splits, G, D]
    sums_ptr,  # float32 [B, K, splits, G]
    offsets_ptr,  # int32 [B]
    lengths_ptr,  # int32 [B]
    out_ptr,  # [B, H, D]
    # Sizes
    splits,
    least,  # keys that are worth a split
    # Sizes and switches, as in decode_kernel
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,  # of a kv head's G, that a program takes
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,  # splits, rounded up to a power of two
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = sum over splits of exp2(sum) * part / sum over splits of exp2(sum)"""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    programs = tl.cdiv(G, HEADS)
    head = tl.program_id(0) // programs
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + row) - tl.load(offsets_ptr + row)
    _, _, _, used = divide(length, splits, least, WINDOW, BLOCK, EARLY)
    group = tl.program_id(0) % programs * HEADS + tl.arange(0, HEADS)
    split, d = tl.arange(0, SPLITS)[:, None], tl.arange(0, DIMS)
    # Even if there is nothing to join: the next kernel waits for this one alone.
    if PDL:
        tl.extra.cuda.gdc_wait()
    if used == 1:
        return

    store_joined(
        *(parts_ptr, sums_ptr, out_ptr, row * K + head, splits, used, group, split),
        *(d, G, D),
    )


class DecodePlan(NamedTuple):
    """How a step's rows are launched, which are decodes or drafts that it checks."""

    splits: int  # of a row and kv head
    scale: float  # of logits
    start: Launcher
    join: Launcher
    join_grid: tuple[int, int, int]


def make_plan(
    tiles: DecodeTiles,
    batch: int,
    queries: int,
    pages: int,
    sizes: AttentionSizes,
    split_kernel: tuple[Any, dict[str, Any]],
    join_kernel: tuple[Any, dict[str, Any]],
) -> DecodePlan:
    """For ``batch`` rows of at most ``queries``, whose tables have room for ``pages``.

    The kernels come with the constexprs that only they have.
    """
    longest = pages * sizes.PAGE
    if sizes.WINDOW:
        longest = min(longest, sizes.WINDOW + queries - 1)
    splits = min(choose_splits(batch, sizes.K), -(-longest // tiles.least))
    kernel, options = split_kernel
    start = launcher(
        kernel,
        **sizes._asdict(),
        **options,
        BLOCK=tiles.block,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    # A program for each head, or for each kv head if that would be too many.
    heads = 1 if batch * sizes.K * sizes.G <= 512 else sizes.ROWS
    most = power_of_two(splits)
    kernel, options = join_kernel
    join = launcher(
        kernel,
        **{name: getattr(sizes, name) for name in ("K", "G", "D", "DIMS", "WINDOW")},
        **options,
        HEADS=heads,
        SPLITS=most,
        BLOCK=tiles.block,
        # 4,096 numbers, 16 KB of parts, a warp
        num_warps=min(32, max(1, most * heads * sizes.DIMS // 4096)),
    )
    grid = sizes.K * -(-sizes.G // heads), batch, queries
    return DecodePlan(splits, LOG2E.value * sizes.D**-0.5, start, join, grid)


@cache
def decode_plan(
    tiles: DecodeTiles,
    batch: int,
    pages: int,
    sizes: AttentionSizes,
    kernel: Any,
    **others: Any,
) -> DecodePlan:
    """For ``batch`` sequences whose tables have room for so many ``pages``.

    The ``kernel`` may have ``others`` beside the constexprs of `decode_kernel`.
    """
    early = {"EARLY": tiles.early}
    kernels = (kernel, early | others), (join_kernel, early)
    return make_plan(tiles, batch, 1, pages, sizes, *kernels)


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: KVGroup,
    sinks: Tensor | None,
    out: Tensor,
    scratch: Scratch,
) -> None:
    """Put attention of the first ``group.decodes`` tokens into their rows of ``out``.

    As `simplellm.model.ops.attend`; these are the newest tokens of as many sequences.
    Keys and values are one layer's pages [pages, page_size, K, D] with the same stride;
    the rest is contiguous. ``scratch`` has room for as many sequences.

    On a GPU with dependent launches, tables, offsets, lengths, and keys and values of
    all tokens but the newest are read before the kernels ahead in the stream are done.
    They must come from before something that all later work waits for: the start of a
    graph, a copy from or to the host, a synchronization.
    """
    sizes = AttentionSizes.of(q, keys, group.window, sinks is not None)
    tiles = decode_tiles(group.decodes, sizes.D, group.window)
    shape = group.decodes, group.tables.shape[1]
    plan = decode_plan(tiles, *shape, sizes, decode_kernel)
    start_decodes(plan, tiles, q, keys, values, group, sinks, out, scratch)


def start_decodes(
    plan: DecodePlan,
    tiles: DecodeTiles,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: KVGroup,
    sinks: Tensor | None,
    out: Tensor,
    scratch: Scratch,
) -> None:
    """Launch what is planned; arguments as in `decode_attention`."""
    batch, pages_in_row = group.decodes, group.tables.shape[1]
    splits, scale, start, join, join_grid = plan
    parts, sums = scratch.parts, scratch.sums
    compiled = start(
        (keys.shape[2], batch, splits),
        *(q, keys, values, group.tables, group.offsets, group.lengths, sinks, out),
        *(parts, sums, scale, tiles.least, keys.stride(0), pages_in_row),
    )
    # The preference sticks to the compiled kernel, which other batch sizes may share:
    # so every launch sets it. It takes effect with the next launch, which is why a step
    # of each size runs once before its graph is recorded.
    set_carveout(compiled, tiles.carveout)
    if splits > 1:
        lengths = group.offsets, group.lengths
        join(join_grid, parts, sums, *lengths, out, splits, tiles.least)
