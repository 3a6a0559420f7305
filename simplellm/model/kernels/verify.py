"""Attention of a few new tokens of each sequence: drafts that a step checks.

Keys are read once for all of a sequence's queries, and split among programs as in
`simplellm.model.kernels.decode`, whose names and layout these are. A query sees the
drafts before it, whose keys the same step has written: so no key is loaded ahead.

T tokens, at most QUERIES of them in each of B rows.
"""

from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.batch import KVGroup
from simplellm.model.kernels.decode import (
    DecodePlan,
    DecodeTiles,
    Scratch,
    decode_tiles,
    make_plan,
    store_joined,
    store_result,
)
from simplellm.model.kernels.key_tiles import (
    AttentionSizes,
    init_acc,
    load_pair,
)
from simplellm.model.kernels.launch import power_of_two
from simplellm.model.kernels.prefill import ANYWHERE, VARIED
from simplellm.model.kernels.softmax import find_rows, softmax_update


@triton.jit
def find_queries(starts_ptr, offsets_ptr, lengths_ptr, row):
    """The row's first token, how many it has, and its length from its first page on."""
    begin = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - begin
    return begin, count, tl.load(lengths_ptr + row) - tl.load(offsets_ptr + row)


@triton.jit
def divide_keys(
    length, count, splits, least, WINDOW: tl.constexpr, BLOCK: tl.constexpr
):
    """The first position that a query sees, a share of keys, and how many have keys."""
    lowest = tl.maximum(length - count + 1 - WINDOW, 0) if WINDOW else 0
    share = tl.maximum(tl.cdiv(length - lowest, splits), least)
    share = tl.cdiv(share, BLOCK) * BLOCK
    return lowest, share, tl.maximum(tl.cdiv(length - lowest, share), 1)


@triton.jit
def mask_unseen(logits, at, position, stop, WINDOW: tl.constexpr):
    """-inf for keys, ``at`` positions that a query at ``position`` does not see."""
    visible = (at < stop)[None, :] & (at[None, :] <= position)
    if WINDOW:
        visible &= at[None, :] > position - WINDOW
    return tl.where(visible, logits, float("-inf"))


@triton.jit
def clear_padding(
    out_ptr,
    starts_ptr,
    row,
    num_tokens,
    query,
    group,
    heads,
    d,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Zeros for the token of the row's number, if it lies behind all rows' tokens."""
    last = tl.load(starts_ptr + tl.num_programs(1))
    empty = (row >= last) & (row < num_tokens)
    empty = (query == 0) & (group < tl.where(empty, G, 0))
    if PDL:
        tl.extra.cuda.gdc_wait()
    out_at = row * (H * D) + (heads * D)[:, None] + d[None, :]
    nothing = tl.zeros([query.shape[0], d.shape[0]], out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at, nothing, mask=empty[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=VARIED, do_not_specialize_on_alignment=ANYWHERE)
def verify_kernel(
    # Pointers
    q_ptr,  # [T, H, D]
    keys_ptr,  # [pages, PAGE, K, D]
    values_ptr,
    tables_ptr,  # int32 [B, P]
    offsets_ptr,  # int32 [B]
    lengths_ptr,  # int32 [B]
    query_start_loc_ptr,  # int32 [B + 1]
    sinks_ptr,  # [H]
    out_ptr,  # [T, H, D]
    parts_ptr,  # float32 [T, K, splits, G, D]
    sums_ptr,  # float32 [T, K, splits, G]
    # Sizes and strides, in elements
    scale,  # log2(e) / sqrt(D)
    least,  # keys that are worth a split
    num_tokens,
    stride_page,
    stride_table,
    # Sizes and switches, as in decode_kernel
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,  # of a row at most, a power of two
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """For the queries of a row, the G heads of a kv head, and one of the splits:

    as `decode_kernel`, but each query sees the keys up to its own position alone.

    The rows of all matrices are (query, head) pairs. Tokens after the last row's get
    zeros, each from the row of its number, which has no tokens.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head, split = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1).to(tl.int64)
    starts = query_start_loc_ptr
    begin, count, length = find_queries(starts, offsets_ptr, lengths_ptr, row)
    splits = tl.num_programs(2)
    lowest, share, used = divide_keys(length, count, splits, least, WINDOW, BLOCK)
    if split >= used:
        return
    pair = tl.arange(0, QUERIES * ROWS)
    query, group = pair // ROWS, pair % ROWS
    d, n = tl.arange(0, DIMS), tl.arange(0, BLOCK)
    heads = head * G + group
    if count == 0:
        clear_padding(
            *(out_ptr, query_start_loc_ptr, row, num_tokens, query, group, heads, d),
            *(K * G, G, D, PDL),
        )
        return

    start = lowest + split * share
    stop = tl.minimum(start + share, length)
    token = (begin + query).to(tl.int64)
    inside = (query < count) & (group < G)
    cell = inside[:, None] & (d < D)[None, :]
    position = (length - count + query)[:, None]
    table_ptr = tables_ptr + row * stride_table
    rows = find_rows(table_ptr, start + n, stop, stride_page, K * D, PAGE)
    # The sinks are counted once, in the first split.
    valid = inside & (group < tl.where(split == 0, G, 0))
    top, total, acc = init_acc(sinks_ptr, heads, valid, DIMS, HAS_SINKS)
    offsets = (token * (K * G * D) + heads * D)[:, None] + d[None, :]
    keys_ptr += head * D
    values_ptr += head * D
    if PDL:
        tl.extra.cuda.gdc_wait()
    q = tl.load(q_ptr + offsets, mask=cell, other=0.0)
    for first in range(start, stop, BLOCK):
        at = first + n
        k, v = load_pair(keys_ptr, values_ptr, rows, at < stop, D, DIMS)
        # The next tile's rows are on their way while this one is computed with.
        rows = find_rows(table_ptr, at + BLOCK, stop, stride_page, K * D, PAGE)
        k, v = k.to(q.dtype), v.to(q.dtype)  # if they are stored in FP8
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = mask_unseen(logits, at, position, stop, WINDOW)
        top, total, acc = softmax_update(logits, v, top, total, acc, scale)
    part = (token * K + head) * splits + split
    # Only heads below G are stored.
    group = tl.where(inside, group, G)
    store_result(
        *(acc, top, total, used == 1, out_ptr, parts_ptr, sums_ptr),
        *(offsets, part, group, cell, d, G, D),
    )


@triton.jit(do_not_specialize=VARIED, do_not_specialize_on_alignment=ANYWHERE)
def verify_join_kernel(
    # Pointers
    parts_ptr,  # float32 [T, K, splits, G, D]
    sums_ptr,  # float32 [T, K, splits, G]
    offsets_ptr,  # int32 [B]
    lengths_ptr,  # int32 [B]
    query_start_loc_ptr,  # int32 [B + 1]
    out_ptr,  # [T, H, D]
    # Sizes
    splits,
    least,
    # Sizes and switches, as in verify_kernel
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,  # of a kv head's G, that a program takes
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,  # splits, rounded up to a power of two
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = sum over splits of exp2(sum) * part / sum over splits of exp2(sum)"""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    programs = tl.cdiv(G, HEADS)
    head = tl.program_id(0) // programs
    row, query = tl.program_id(1), tl.program_id(2)
    begin, count, length = find_queries(
        query_start_loc_ptr, offsets_ptr, lengths_ptr, row
    )
    _, _, used = divide_keys(length, count, splits, least, WINDOW, BLOCK)
    group = tl.program_id(0) % programs * HEADS + tl.arange(0, HEADS)
    split, d = tl.arange(0, SPLITS)[:, None], tl.arange(0, DIMS)
    token = (begin + query).to(tl.int64)
    # Even if there is nothing to join: the next kernel waits for this one alone.
    if PDL:
        tl.extra.cuda.gdc_wait()
    if (used == 1) | (query >= count):
        return

    store_joined(
        *(parts_ptr, sums_ptr, out_ptr, token * K + head, splits, used, group, split),
        *(d, G, D),
    )


@cache
def verify_plan(
    tiles: DecodeTiles, batch: int, queries: int, pages: int, sizes: AttentionSizes
) -> DecodePlan:
    """For ``batch`` rows of ``queries``, whose tables have room for ``pages``."""
    split = verify_kernel, {"QUERIES": power_of_two(queries)}
    join = verify_join_kernel, dict[str, Any]()
    return make_plan(tiles, batch, queries, pages, sizes, split, join)


def verify_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: KVGroup,
    sinks: Tensor | None,
    out: Tensor,
    scratch: Scratch,
) -> None:
    """Put attention of a step that is nothing but decodes into ``out`` [T, H, D].

    As `simplellm.model.ops.attend`; the step has T rows of at most ``group.queries``
    tokens each, of which those at the end have none. ``scratch`` has room for T rows.
    """
    num_tokens = len(q)
    sizes = AttentionSizes.of(q, keys, group.window, sinks is not None)
    batch, pages_in_row = group.decodes, group.tables.shape[1]
    assert batch == num_tokens == len(group.lengths), "rows for all tokens, no chunks"
    tiles = decode_tiles(batch, sizes.D, group.window)
    splits, scale, start, join, join_grid = verify_plan(
        tiles, batch, group.queries, pages_in_row, sizes
    )
    arrays = group.offsets, group.lengths, group.query_start_loc
    parts, sums, least = scratch.parts, scratch.sums, tiles.least
    start(
        (sizes.K, batch, splits),
        *(q, keys, values, group.tables, *arrays, sinks, out, parts, sums),
        *(scale, least, num_tokens, keys.stride(0), pages_in_row),
    )
    if splits > 1:
        join(join_grid, parts, sums, *arrays, out, splits, least)
