"""Attention of chunks of prompts over the pages of a cache.

T tokens, B sequences, P pages in a row of a table, H query heads, K kv heads, G = H / K
heads a group, D head_dim. Heads are grouped; there may be a window, and sinks. Logits
are in units of log2: a softmax is then made of exp2. A place is a position counted
from the first page that a table still names.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from simplellm.batch import KVGroup
from simplellm.kernels.launch import launch, power_of_two

LOG2E = tl.constexpr(math.log2(math.e))
# Stands for "no key yet". Unlike -inf it can be subtracted from itself.
NO_KEY = tl.constexpr(-1e30)


@dataclass(frozen=True)
class PrefillTiles:
    """How the prefill kernel runs."""

    block: int
    warps: int
    stages: int
    tokens: int  # queries that a program takes


# Up to 128 registers a thread, two programs of 8 warps share a processor.
PREFILL = PrefillTiles(block=64, warps=8, stages=3, tokens=16)
PREFILL_WINDOW = PrefillTiles(block=32, warps=4, stages=3, tokens=8)
# A window's first tile of keys begins with the first key of the program's first query.
# With a query to a program, that depends on nothing else.
INVARIANT_WINDOW = PrefillTiles(block=32, warps=4, stages=3, tokens=1)


@cache
def prefill_tiles(dims: int, window: int | None, batch_invariant: bool) -> PrefillTiles:
    """What the kernel runs with; ``dims`` is D, rounded up to a power of two."""
    tiles = PREFILL
    if window is not None:
        tiles = INVARIANT_WINDOW if batch_invariant else PREFILL_WINDOW
    # Tiles were timed with heads of 64: those of longer ones have as many numbers.
    return replace(tiles, block=max(16, tiles.block * 64 // max(dims, 64)))


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
    q_at = q_ptr + (row * (K * G * D) + heads * D)[:, None] + d[None, :]
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


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: KVGroup,
    sinks: Tensor | None,
    out: Tensor,
    *,
    skip: int = 0,
    batch_invariant: bool = False,
) -> None:
    """Put attention of the newest tokens of each sequence into ``out`` [T, H, D].

    As `simplellm.ops.attend`, for all sequences but the first ``skip``; their tokens
    are left alone. Tokens after the last sequence get zeros. Keys and values are one
    layer's pages [pages, page_size, K, D] with the same stride; the rest is contiguous.
    With
    ``batch_invariant`` the bits of a token's row depend neither on the others nor on
    where its chunk begins.
    """
    (num_tokens, heads, dim), (page_size, kv_heads) = q.shape, keys.shape[1:3]
    dims = max(16, power_of_two(dim))
    tiles = prefill_tiles(dims, group.window, batch_invariant)
    tables = group.tables[skip:]
    num_sequences, pages_in_row = tables.shape
    # No chunks need more tiles, whatever their lengths; see `find_sequence`.
    count = num_tokens // tiles.tokens + num_sequences + 1
    launch(
        prefill_kernel,
        (kv_heads, count),
        q,
        keys,
        values,
        tables,
        group.offsets[skip:],
        group.lengths[skip:],
        group.queries[skip:],
        sinks,
        out,
        LOG2E.value * dim**-0.5,
        num_tokens,
        num_sequences,
        keys.stride(0),
        pages_in_row,
        K=kv_heads,
        G=heads // kv_heads,
        D=dim,
        PAGE=page_size,
        WINDOW=group.window or 0,
        TOKENS=tiles.tokens,
        ROWS=power_of_two(heads // kv_heads),
        DIMS=dims,
        BLOCK=tiles.block,
        HAS_SINKS=sinks is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
