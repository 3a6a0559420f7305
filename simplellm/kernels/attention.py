"""Attention over the pages of a cache, with grouped heads, a window and sinks.

T tokens, B sequences, P pages in a row of a table, H query heads, K kv heads, G = H / K
heads a group, D head_dim. Logits are in units of log2: a softmax is then made of exp2.
A place is a position counted from the first page that a table still names.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.attention import attention
from simplellm.kernels import set_carveout, supports_pdl
from simplellm.paged import gather


@dataclass(frozen=True)
class DecodeTiles:
    """How the decode kernel runs: the keys of a tile, and how Triton compiles it."""

    block: int
    warps: int
    stages: int
    least: int = 128  # keys that are worth a program of their own
    early: bool = False  # whether keys but the newest are loaded before the wait
    carveout: int = -1  # what `set_carveout` is told


@dataclass(frozen=True)
class PrefillTiles:
    """How the prefill kernel runs."""

    block: int
    warps: int
    stages: int
    tokens: int  # queries that a program takes


# By the least number of sequences, as timed in a layer on an H200 on 2026-11-21 and 22.
# Tiles of 128 keys in 2 stages made a layer with one sequence of 500 up to one
# microsecond shorter, with one of 32,768 a third of one longer. With 8 sequences, early
# keys made it half a microsecond longer, with 128 more than one.
DECODE = {
    1: DecodeTiles(64, 4, 3, least=64, early=True, carveout=64),
    5: DecodeTiles(64, 4, 4, least=128),
    16: DecodeTiles(128, 8, 2, least=256, early=True),
    32: DecodeTiles(128, 8, 2, least=512, early=True),
    64: DecodeTiles(64, 4, 3, least=1024, early=True),
    128: DecodeTiles(64, 4, 2, least=1024),
}
# 64 sequences with a window of 128 took 7.4 us in one tile, 8.7 us in two.
DECODE_WINDOW = DecodeTiles(block=128, warps=4, stages=1)
# Up to 128 registers a thread, two programs of 8 warps share a processor.
PREFILL = PrefillTiles(block=64, warps=8, stages=3, tokens=16)
PREFILL_WINDOW = PrefillTiles(block=32, warps=4, stages=3, tokens=8)
# A window's first tile of keys begins with the first key of the program's first query.
# With a query to a program, that depends on nothing else.
INVARIANT_WINDOW = PrefillTiles(block=32, warps=4, stages=3, tokens=1)
LOG2E = tl.constexpr(math.log2(math.e))
# Stands for "no key yet". Unlike -inf it can be subtracted from itself.
NO_KEY = tl.constexpr(-1e30)


@triton.jit
def find_rows(
    table_ptr, places, stop, stride_page, ROW: tl.constexpr, PAGE: tl.constexpr
):
    """Where the rows of ``places`` begin; those from ``stop`` on in page 0."""
    pages = tl.load(table_ptr + places // PAGE, mask=places < stop, other=0)
    return pages.to(tl.int64) * stride_page + places % PAGE * ROW


@triton.jit
def load_rows(pages_ptr, rows, there, D: tl.constexpr, DIMS: tl.constexpr):
    """[N, DIMS] of one kv head; 0 where nothing is ``there``."""
    d = tl.arange(0, DIMS)[None, :]
    mask = there[:, None] & (d < D)
    return tl.load(pages_ptr + rows[:, None] + d, mask=mask, other=0.0)


@triton.jit
def hide(logits, keys, queries, WINDOW: tl.constexpr):
    """-inf where a query, its place [M, 1], does not see a key, its place [1, N]."""
    seen = keys <= queries
    if WINDOW:
        seen &= keys > queries - WINDOW
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def fold(
    logits,  # [M, N], not yet scaled
    v,  # [N, D]
    top,  # float32 [M], the largest logit so far
    total,  # float32 [M], the sum of exp2(logit - top)
    acc,  # float32 [M, D], the sum of exp2(logit - top) * v
    scale,
):
    """One step of an online softmax: take the keys of one tile in."""
    new_top = tl.maximum(top, tl.max(logits, 1) * scale)
    weights = tl.exp2(logits * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def wait():
    """`gdc_wait` of Triton 3.6.

    Later versions of Triton load nothing ahead of a loop with their own.
    """
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fold_one(q, k, v, there, top, total, scale):
    """The first step of an online softmax: one key [1, D], if ``there`` [1]."""
    logit = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
    logit = tl.where(there, logit, NO_KEY)
    new_top = tl.maximum(top, logit)
    weight = tl.where(there, tl.exp2(logit - new_top), 0.0)
    total = total * tl.exp2(top - new_top) + weight
    return new_top, total, weight[:, None] * v.to(tl.float32)


@triton.jit
def initial(sinks_ptr, heads, counted, HAS_SINKS: tl.constexpr):
    """The top and the total that a softmax starts with: of its sink, or of nothing."""
    top = tl.full(heads.shape, NO_KEY, tl.float32)
    total = tl.zeros(heads.shape, tl.float32)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=counted, other=0.0).to(tl.float32)
        top = tl.where(counted, sinks * LOG2E, top)
        total = tl.where(counted, 1.0, total)
    return top, total


@triton.jit
def divide(
    length,
    splits,
    least,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The first place that is seen, the end of all shares, a share, how many have keys.

    How a sequence is split depends on its own length alone.
    """
    lowest = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    # The kernel before may still be writing the newest key.
    end = length - 1 if EARLY else length
    share = tl.maximum(tl.cdiv(end - lowest, splits), least)
    share = tl.cdiv(share, BLOCK) * BLOCK
    return lowest, end, share, tl.maximum(tl.cdiv(end - lowest, share), 1)


@triton.jit(
    do_not_specialize=["least", "stride_table"],
    do_not_specialize_on_alignment=["tables_ptr", "offsets_ptr", "lengths_ptr"],
)
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
    stride_q,
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

    weights = exp2(q @ k.T * scale), and one more, exp2(sink), in the first split
    part, sum = weights @ v / sum(weights), log2(sum(weights))

    The part of an only split is the output. Others are left to `join_kernel`.
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
    inside = group < G
    heads = head * G + group
    cell = inside[:, None] & (d < D)[None, :]
    table_ptr = tables_ptr + row * stride_table
    rows = find_rows(table_ptr, start + n, stop, stride_page, K * D, PAGE)
    # The sinks are counted once, in the first split.
    counted = group < tl.where(split == 0, G, 0)
    top, total = initial(sinks_ptr, heads, counted, HAS_SINKS)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    q_ptr += row * stride_q + (heads * D)[:, None] + d[None, :]
    keys_ptr += head * D
    values_ptr += head * D
    last = stop
    if EARLY:
        q = tl.zeros([ROWS, DIMS], q_ptr.dtype.element_ty)
        # The newest key, [1], is counted once as well; nobody goes without a step.
        newest = tl.maximum(end, 0) + tl.arange(0, 1)
        is_mine = newest < tl.where(split == 0, length, 0)
        newest_row = find_rows(table_ptr, newest, length, stride_page, K * D, PAGE)
        last = tl.maximum(stop, start + 1)
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        q = tl.load(q_ptr, mask=cell, other=0.0)
    for first in range(start, last, BLOCK):
        at = first + n
        there = at < stop
        k = load_rows(keys_ptr, rows, there, D, DIMS)
        v = load_rows(values_ptr, rows, there, D, DIMS)
        # The next tile's rows are on their way while this one is computed with.
        rows = find_rows(table_ptr, at + BLOCK, stop, stride_page, K * D, PAGE)
        if EARLY:  # noqa: SIM102 (known when it is compiled)
            # Not ahead of the loop, where Triton puts the loads of the first steps.
            if first == start:
                if PDL:
                    wait()
                q = tl.load(q_ptr, mask=cell, other=0.0)
                k_new = load_rows(keys_ptr, newest_row, is_mine, D, DIMS)
                v_new = load_rows(values_ptr, newest_row, is_mine, D, DIMS)
                top, total, acc = fold_one(q, k_new, v_new, is_mine, top, total, scale)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = tl.where(there[None, :], logits, float("-inf"))
        top, total, acc = fold(logits, v, top, total, acc, scale)
    # Without keys there is the sink alone, or nothing at all.
    part = acc / tl.where(total > 0, total, 1.0)[:, None]

    if used == 1:
        out_at = row * (K * G * D) + (heads * D)[:, None] + d[None, :]
        tl.store(out_ptr + out_at, part.to(out_ptr.dtype.element_ty), mask=cell)
        return
    mine = ((row * K + head) * splits + split) * G + group
    tl.store(sums_ptr + mine, top + tl.log2(total), mask=inside)
    tl.store(parts_ptr + (mine * D)[:, None] + d[None, :], part, mask=cell)


@triton.jit(
    do_not_specialize=["splits", "least"],
    do_not_specialize_on_alignment=["offsets_ptr", "lengths_ptr"],
)
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

    at = ((row * K + head) * splits + split) * G + group[None, :]
    there = (split < used) & (group < G)[None, :]
    sums = tl.load(sums_ptr + at, there, NO_KEY)
    cells = there[:, :, None] & (d < D)[None, None, :]
    parts = tl.load(parts_ptr + (at * D)[:, :, None] + d[None, None, :], cells, 0.0)
    weights = tl.exp2(sums - tl.max(sums, 0)[None, :])
    joined = tl.sum(weights[:, :, None] * parts, 0) / tl.sum(weights, 0)[:, None]
    out_at = ((row * K + head) * G + group) * D
    tl.store(
        out_ptr + out_at[:, None] + d[None, :],
        joined.to(out_ptr.dtype.element_ty),
        mask=(group < G)[:, None] & (d < D)[None, :],
    )


@dataclass(frozen=True)
class Scratch:
    """Where programs that share a sequence leave their parts for the join.

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

    def check(self, batch: int, heads: int, dim: int, splits: int) -> None:
        """Raise ValueError without room for the parts of such a launch."""
        rows = batch * heads * splits
        if self.sums.numel() < rows or self.parts.numel() < rows * dim:
            raise ValueError(
                f"scratch has {self.sums.numel()} sums and parts of "
                f"{self.parts.numel()} numbers; expected at least {rows} and "
                f"{rows * dim} for {batch} sequences, {heads} heads of {dim} and "
                f"{splits} splits"
            )


def decode_tiles(batch: int, window: int | None) -> DecodeTiles:
    """What `paged_decode` runs with."""
    if window is not None and window <= DECODE_WINDOW.block:
        return DECODE_WINDOW
    return DECODE[max(least for least in DECODE if least <= max(batch, 1))]


def choose_splits(batch: int, kv_heads: int) -> int:
    """The largest number of programs that may share a sequence and kv head.

    Nearly four programs for each of 132 processors, but always some, for one long
    sequence among short ones.
    """
    return max(4, min(64, 512 // (batch * kv_heads)))


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    window: int | None,
    *,
    scratch: Scratch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention [B, H, D] of the newest token of each of B sequences.

    q [B, H, D]; keys and values are one layer's pages [pages, page_size, K, D], with
    the new tokens' in them. A sequence has ``lengths`` int32 [B] tokens, the new one
    counted; 0 makes a row of zeros. Its row in ``tables`` int32 [B, P] names the pages
    from position ``offsets`` int32 [B] on. ``sinks`` [H] are logits; ``window`` counts
    the query itself. Scores are scaled by 1/sqrt(D), and float32. ``scratch`` has room
    for B sequences; it is created for this call if not given. ``out``, if given, takes
    the result; it has q's shape. All but q, the pages and the tables must be
    contiguous. Raises ValueError for what does not fit.

    On a GPU with dependent launches, tables, offsets, lengths, and keys and values of
    all tokens but the newest are read before the kernels ahead in the stream are done.
    They must come from before something that all later work waits for: the start of a
    graph, a copy from or to the host, a synchronization.
    """
    check_pages(q, keys, values, tables, offsets, lengths, sinks, window, out)
    if len(q) != len(tables):
        raise ValueError(
            f"q is {list(q.shape)}; expected one query for each of the {len(tables)} "
            "sequences"
        )
    if scratch is None:
        heads, dim = q.shape[1:]
        scratch = Scratch.create(len(q), heads, keys.shape[2], dim, q.device)
    tiles = decode_tiles(len(q), window)
    return launch_decode(
        q, keys, values, tables, offsets, lengths, sinks, window, scratch, out, tiles
    )


def launch_decode(
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
    tiles: DecodeTiles,
) -> Tensor:
    (batch, heads, dim), (page_size, kv_heads) = q.shape, keys.shape[1:3]
    out = torch.empty_like(q) if out is None else out
    if not batch:
        return out
    splits = choose_splits(batch, kv_heads)
    longest = tables.shape[1] * page_size
    longest = longest if window is None else min(longest, window)
    splits = min(splits, -(-longest // tiles.least))
    if splits > 1:
        scratch.check(batch, heads, dim, splits)
    group, pdl = heads // kv_heads, supports_pdl(q.device)
    rows = triton.next_power_of_2(group)
    common: dict[str, Any] = {
        "K": kv_heads,
        "G": group,
        "D": dim,
        "WINDOW": window or 0,
        "DIMS": max(16, triton.next_power_of_2(dim)),
        "BLOCK": tiles.block,
        "EARLY": tiles.early,
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    kernel = decode_kernel[kv_heads, batch, splits](
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
        LOG2E.value * dim**-0.5,
        tiles.least,
        q.stride(0),
        keys.stride(0),
        tables.stride(0),
        PAGE=page_size,
        ROWS=rows,
        HAS_SINKS=sinks is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **common,
    )
    if pdl:  # without, no other kernel is there to need the cache
        # A wish stays until the next one, and tiles for other batch sizes may be the
        # same compiled kernel. It counts from the next launch on: a graph is recorded
        # after a step of its own size, whose wish it finds.
        set_carveout(kernel, tiles.carveout)
    if splits > 1:
        # A program for each head, or for each kv head if that would be too many.
        taken = 1 if batch * heads <= 512 else rows
        most = triton.next_power_of_2(splits)
        join_kernel[kv_heads * triton.cdiv(group, taken), batch](
            scratch.parts,
            scratch.sums,
            offsets,
            lengths,
            out,
            splits,
            tiles.least,
            HEADS=taken,
            SPLITS=most,
            # 4,096 numbers, 16 KB of parts, a warp
            num_warps=min(32, max(1, most * taken * common["DIMS"] // 4096)),
            **common,
        )
    return out


def paged_decode_torch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    window: int | None,
    *,
    scratch: Scratch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The same in plain PyTorch."""
    queries = torch.arange(len(q) + 1)
    return paged_prefill_torch(
        q, keys, values, tables, offsets, lengths, queries, sinks, window, out=out
    )


@triton.jit(
    do_not_specialize=["num_tokens", "num_sequences", "stride_table"],
    do_not_specialize_on_alignment=[
        "tables_ptr",
        "offsets_ptr",
        "lengths_ptr",
        "queries_ptr",
    ],
)
def prefill_kernel(
    # Pointers
    q_ptr,  # [T, H, D]
    keys_ptr,  # [pages, PAGE, K, D]
    values_ptr,
    tables_ptr,  # int32 [B, P]
    offsets_ptr,  # int32 [B]
    lengths_ptr,  # int32 [B]
    queries_ptr,  # int32 [B + 1]
    sinks_ptr,  # [H]
    out_ptr,  # [T, H, D]
    # Sizes and strides, in elements
    scale,  # log2(e) / sqrt(D)
    num_tokens,
    num_sequences,
    stride_q,
    stride_page,
    stride_table,
    # Sizes and switches
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 for none
    TOKENS: tl.constexpr,  # of one sequence that a program takes
    ROWS: tl.constexpr,  # G, rounded up to a power of two
    DIMS: tl.constexpr,  # D, likewise
    BLOCK: tl.constexpr,  # keys in a tile
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """For TOKENS queries in a row of a sequence, and the G query heads of a kv head:

    weights = exp2(q @ k.T * scale) of the keys that each query sees, and exp2(sink)
    out = weights @ v / sum(weights)

    The rows of all matrices are (query, head) pairs, the heads of a query together.
    Tokens after the last sequence get zeros.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    # The last queries of a sequence see the most keys: they are begun with.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, begin, end, base = find_sequence(
        queries_ptr, tile, num_tokens, num_sequences, TOKENS
    )
    if (base < begin) | (base >= end):
        return
    pair = tl.arange(0, TOKENS * ROWS)
    token, group = base + pair // ROWS, pair % ROWS
    d, n = tl.arange(0, DIMS), tl.arange(0, BLOCK)
    inside = (token < end) & (group < G)
    cell = inside[:, None] & (d < D)[None, :]
    heads = head * G + group
    row = token.to(tl.int64)
    out_at = out_ptr + (row * (K * G * D) + heads * D)[:, None] + d[None, :]
    if sequence == num_sequences:
        if PDL:
            tl.extra.cuda.gdc_wait()
        nothing = tl.zeros([TOKENS * ROWS, DIMS], out_ptr.dtype.element_ty)
        tl.store(out_at, nothing, mask=cell)
        return

    # From a token's number among all to its place in the sequence.
    shift = tl.load(lengths_ptr + sequence) - tl.load(offsets_ptr + sequence) - end
    table_ptr = tables_ptr + sequence * stride_table
    first_query, place = base + shift, (token + shift)[:, None]
    stop = tl.minimum(base + TOKENS, end) + shift
    lowest = tl.maximum(first_query - WINDOW + 1, 0) if WINDOW else 0
    # The first query sees all keys up to here, and the others see at least these.
    clear = lowest + (first_query + 1 - lowest) // BLOCK * BLOCK
    rows = find_rows(table_ptr, lowest + n, stop, stride_page, K * D, PAGE)
    top, total = initial(sinks_ptr, heads, inside, HAS_SINKS)
    acc = tl.zeros([TOKENS * ROWS, DIMS], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    q_at = q_ptr + (row * stride_q + heads * D)[:, None] + d[None, :]
    q = tl.load(q_at, mask=cell, other=0.0)
    keys_ptr += head * D
    values_ptr += head * D
    for first in range(lowest, stop, BLOCK):
        at = first + n
        k = load_rows(keys_ptr, rows, at < stop, D, DIMS)
        v = load_rows(values_ptr, rows, at < stop, D, DIMS)
        # The next tile's rows are on their way while this one is computed with.
        rows = find_rows(table_ptr, at + BLOCK, stop, stride_page, K * D, PAGE)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        # Most tiles are seen whole, and the masks would be a fifth of its work.
        partly = first >= clear
        if WINDOW:
            partly |= first + WINDOW < stop
        if partly:
            logits = hide(logits, at[None, :], place, WINDOW)
        top, total, acc = fold(logits, v, top, total, acc, scale)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=cell)


@triton.jit
def find_sequence(queries_ptr, tile, num_tokens, num_sequences, TOKENS: tl.constexpr):
    """Whose tile this is, where its tokens begin and end, and where the tile begins.

    The tiles of a sequence are numbered from queries[sequence] // TOKENS + sequence, so
    that any number of tokens fits in before the next one's. Some of these tiles begin
    outside their sequence and are nobody's. What comes after the last sequence
    counts as one more.
    """
    low, high = 0, num_sequences
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(queries_ptr + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    begin = tl.load(queries_ptr + low)
    end = num_tokens
    if low < num_sequences:
        end = tl.load(queries_ptr + low + 1)
    return low, begin, end, begin + (tile - begin // TOKENS - low) * TOKENS


def paged_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    queries: Tensor,
    sinks: Tensor | None,
    window: int | None,
    *,
    out: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Attention [T, H, D] of the newest tokens, one or more, of each of B sequences.

    As `paged_decode`, but sequence i has the tokens from ``queries[i]`` up to
    ``queries[i + 1]``, int32 [B + 1], of q [T, H, D]: the last of its ``lengths[i]``.
    Tokens before the first sequence are left alone in ``out``, those after the last one
    become zeros. With ``batch_invariant`` the bits of a token's row depend neither
    on the others nor on where its chunk begins.
    """
    check_pages(q, keys, values, tables, offsets, lengths, sinks, window, out, queries)
    tiles = PREFILL
    if window is not None:
        tiles = INVARIANT_WINDOW if batch_invariant else PREFILL_WINDOW
    return launch_prefill(
        q, keys, values, tables, offsets, lengths, queries, sinks, window, out, tiles
    )


def launch_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    queries: Tensor,
    sinks: Tensor | None,
    window: int | None,
    out: Tensor | None,
    tiles: PrefillTiles,
) -> Tensor:
    (num_tokens, heads, dim), (page_size, kv_heads) = q.shape, keys.shape[1:3]
    out = torch.empty_like(q) if out is None else out
    if not num_tokens:
        return out
    pdl = supports_pdl(q.device)
    # No chunks need more tiles, whatever their lengths; see `find_sequence`.
    count = num_tokens // tiles.tokens + len(tables) + 1
    prefill_kernel[kv_heads, count](
        q,
        keys,
        values,
        tables,
        offsets,
        lengths,
        queries,
        sinks,
        out,
        LOG2E.value * dim**-0.5,
        num_tokens,
        len(tables),
        q.stride(0),
        keys.stride(0),
        tables.stride(0),
        K=kv_heads,
        G=heads // kv_heads,
        D=dim,
        PAGE=page_size,
        WINDOW=window or 0,
        TOKENS=tiles.tokens,
        ROWS=triton.next_power_of_2(heads // kv_heads),
        DIMS=max(16, triton.next_power_of_2(dim)),
        BLOCK=tiles.block,
        HAS_SINKS=sinks is not None,
        PDL=pdl,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_pdl=pdl,
    )
    return out


def paged_prefill_torch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    queries: Tensor,
    sinks: Tensor | None,
    window: int | None,
    *,
    out: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """The same in plain PyTorch."""
    out = torch.empty_like(q) if out is None else out
    out[int(queries[0]) :] = 0
    rows = zip(tables, offsets.tolist(), lengths.tolist(), strict=True)
    chunks = zip(queries.tolist(), queries[1:].tolist(), strict=False)
    for (table, offset, length), (begin, end) in zip(rows, chunks, strict=True):
        if length == 0 or begin == end:
            continue
        start = length - (end - begin)
        lowest = 0 if window is None else max(0, start - window + 1)
        # What is outside of this may hold anything, and nothing times NaN is NaN.
        k, v = (
            gather(x, table)[lowest - offset : length - offset] for x in (keys, values)
        )
        # It takes the queries in pieces: their scores might not fit all at once.
        out[begin:end] = attention(q[begin:end], k, v, sinks, window=window)
    return out


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    queries: Tensor,
    decodes: int,
    sinks: Tensor | None,
    window: int | None,
    *,
    scratch: Scratch | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """`paged_prefill` of sequences of which the first ``decodes`` have one token each.

    These are the first ``decodes`` tokens, and go through `paged_decode`, unless
    ``batch_invariant`` asks for the same order of sums for every token.
    """
    if batch_invariant:
        decodes = 0
    out = torch.empty_like(q)
    if decodes:
        paged_decode(
            q[:decodes],
            keys,
            values,
            tables[:decodes],
            offsets[:decodes],
            lengths[:decodes],
            sinks,
            window,
            scratch=scratch,
            out=out[:decodes],
        )
    if decodes < len(q):
        paged_prefill(
            q,
            keys,
            values,
            tables[decodes:],
            offsets[decodes:],
            lengths[decodes:],
            queries[decodes:],
            sinks,
            window,
            out=out,
            batch_invariant=batch_invariant,
        )
    return out


def check_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    window: int | None,
    out: Tensor | None,
    queries: Tensor | None = None,
) -> None:
    """Raise ValueError for tensors that do not fit each other."""
    if keys.ndim != 4 or keys.shape != values.shape:
        raise ValueError(
            f"keys is {list(keys.shape)} and values {list(values.shape)}; expected one "
            "shape [pages, page_size, K, D]"
        )
    if not (keys[0].is_contiguous() and values[0].is_contiguous()):
        raise ValueError("keys and values are strided; expected contiguous pages")
    if keys.stride(0) != values.stride(0):
        raise ValueError(
            f"a page of keys has the stride {keys.stride(0)} and one of values "
            f"{values.stride(0)}; expected the same"
        )
    kv_heads, dim = keys.shape[2:]
    if q.ndim != 3 or q.shape[2] != dim or q.shape[1] % kv_heads:
        raise ValueError(
            f"q is {list(q.shape)}; expected [tokens, a multiple of {kv_heads}, {dim}]"
        )
    if not q[:1].is_contiguous():
        raise ValueError(f"q has strides {list(q.stride())}; expected contiguous rows")
    if tables.ndim != 2 or tables.stride(1) != 1:
        raise ValueError(f"tables is {list(tables.shape)}; expected rows [B, P]")
    for name, tensor, shape in (
        ("offsets", offsets, [len(tables)]),
        ("lengths", lengths, [len(tables)]),
        ("queries", queries, [len(tables) + 1]),
        ("sinks", sinks, [q.shape[1]]),
        ("out", out, list(q.shape)),
    ):
        if tensor is None:
            continue
        if list(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {list(tensor.shape)} with strides {list(tensor.stride())}; "
                f"expected {shape}, contiguous"
            )
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; expected at least 1")
