"""Attention of chunks of prompts over the pages of a cache.

T tokens, B sequences, P pages in a row of a table, H query heads, K kv heads, G = H / K
heads a group, D head_dim. Heads are grouped; there may be a window, and sinks.
Positions and units are those of `simplellm.model.kernels.softmax`.
"""

from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.batch import KVGroup
from simplellm.model.kernels.key_tiles import (
    LOG2E,
    AttentionSizes,
    init_acc,
    load_pair,
    padded,
)
from simplellm.model.kernels.launch import (
    Launcher,
    launcher,
    max_shared_memory,
    power_of_two,
)
from simplellm.model.kernels.softmax import find_rows, softmax_update

# Triton would compile attention again for some values of these,
VARIED = ["num_tokens", "num_sequences", "stride_table", "splits", "least"]
# and for where these begin, which is anywhere in what a step came with.
ANYWHERE = ["tables_ptr", "offsets_ptr", "lengths_ptr", "query_start_loc_ptr"]


class PrefillTiles(NamedTuple):
    """How the prefill kernel runs."""

    block: int
    warps: int
    stages: int
    tokens: int  # queries that a program takes; below, with 8 heads of each
    # Whether tiles begin at multiples of ``block`` in the sequence, and not with the
    # first key that the first query sees: what a query sees is then cut alike in any
    # company. Tiles that it does not see change nothing.
    aligned: bool = False


# Up to 128 registers a thread, two programs of 8 warps share a processor.
PREFILL = PrefillTiles(block=64, warps=8, stages=3, tokens=16)
# Longer heads leave room for one, and want keys enough for what each tile costs. With
# two stages prompts of 2,048 tokens took 1.26 times as long on an H200; without room
# for three, as on GPUs that are not for data centers, they do.
PREFILL_LONG = PrefillTiles(block=128, warps=8, stages=3, tokens=16)
LONG_ROOM = 128 * 1024  # bytes of shared memory that it takes
PREFILL_WINDOW = PrefillTiles(block=32, warps=4, stages=3, tokens=8)


def block_of(block: int, dim: int) -> int:
    """The keys of a tile that was timed with heads of 64 and ``block`` keys.

    Tiles of longer heads have as many numbers.
    """
    return max(16, block * 64 // max(padded(dim), 64))


@cache
def prefill_tiles(
    dim: int, heads: int, window: int | None, batch_invariant: bool
) -> PrefillTiles:
    """What the kernel runs with for heads of ``dim``, so many of a kv head.

    With fewer heads a program takes more queries: the tensor cores want 128 rows, or
    some of 8 warps would have none.
    """
    tiles = PREFILL
    if padded(dim) == 128:
        stages = PREFILL_LONG.stages if max_shared_memory() >= LONG_ROOM else 2
        tiles = PREFILL_LONG._replace(stages=stages)
    if window is not None:
        tiles = PREFILL_WINDOW._replace(aligned=batch_invariant)
    tokens = max(1, tiles.tokens * 8 // power_of_two(heads))
    return tiles._replace(block=block_of(tiles.block, dim), tokens=tokens)


@triton.jit
def apply_mask(logits, keys, queries, first, clear, stop, WINDOW: tl.constexpr):
    """-inf where a query, position [M, 1], does not see a key, position [1, N].

    Most tiles are seen whole, and the masks would be a fifth of the work. All queries
    see a tile that begins at ``first`` unless that is from ``clear`` on, or a window
    before ``stop``.
    """
    partly = first >= clear
    if WINDOW:
        partly |= first + WINDOW < stop
    if partly:
        visible = keys <= queries
        if WINDOW:
            visible &= keys > queries - WINDOW
        logits = tl.where(visible, logits, float("-inf"))
    return logits


@triton.jit
def find_sequence(
    query_start_loc_ptr, tile, num_tokens, num_sequences, TOKENS: tl.constexpr
):
    """Whose tile this is, where its tokens begin and end, and where the tile begins.

    The tiles of a sequence are numbered from query_start_loc[sequence] // TOKENS +
    sequence, so that any number of tokens fits in before the next one's. Some of these
    tiles begin outside their sequence and are nobody's. What comes after the last
    sequence counts as one more.
    """
    low, high = 0, num_sequences
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc_ptr + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    begin = tl.load(query_start_loc_ptr + low)
    end = num_tokens
    if low < num_sequences:
        end = tl.load(query_start_loc_ptr + low + 1)
    return low, begin, end, begin + (tile - begin // TOKENS - low) * TOKENS


@triton.jit
def find_lowest(
    first_query,
    offset,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Where the first tile begins; perhaps below 0, where pages that held it are gone.

    Its keys before those that the first query sees are masked like all that is unseen.
    """
    lowest = tl.maximum(first_query - WINDOW + 1, 0) if WINDOW else 0
    if ALIGNED:
        lowest -= (lowest + offset) % BLOCK
    return lowest


@triton.jit
def tile_rows(
    table_ptr,
    first,
    n,  # int32 [N]: 0, 1, ...
    stop,
    stride_page,
    ROW: tl.constexpr,
    PAGE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Where the tile of the keys from ``first`` on begins, and its rows from there.

    One that lies as a WHOLE in a page needs one address; else each row has its own.
    """
    if WHOLE:
        start = find_rows(table_ptr, first, stop, stride_page, ROW, PAGE)
        rows = n * ROW
    else:
        start = tl.zeros([], tl.int64)
        places = tl.maximum(first + n, 0)
        rows = find_rows(table_ptr, places, stop, stride_page, ROW, PAGE)
    return start, rows


@triton.jit(do_not_specialize=VARIED, do_not_specialize_on_alignment=ANYWHERE)
def prefill_kernel(
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
    ALIGNED: tl.constexpr,  # whether tiles of a window begin at multiples of that
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """For TOKENS queries in a row of a sequence, and the G query heads of a kv head:

    weights = exp2(q @ k.T * scale) of the keys that each query sees, and exp(sink)
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
        query_start_loc_ptr, tile, num_tokens, num_sequences, TOKENS
    )
    if (base < begin) | (base >= end):
        return
    pair = tl.arange(0, TOKENS * ROWS)
    token, group = base + pair // ROWS, pair % ROWS
    d, n = tl.arange(0, DIMS), tl.arange(0, BLOCK)
    inside, heads = (token < end) & (group < G), head * G + group
    cell = inside[:, None] & (d < D)[None, :]
    places = (token.to(tl.int64) * (K * G * D) + heads * D)[:, None] + d[None, :]
    out_ptr += places
    if sequence == num_sequences:
        if PDL:
            tl.extra.cuda.gdc_wait()
        nothing = tl.zeros([TOKENS * ROWS, DIMS], out_ptr.dtype.element_ty)
        tl.store(out_ptr, nothing, mask=cell)
        return

    # From a token's index among all to its position in the sequence.
    offset = tl.load(offsets_ptr + sequence)
    shift = tl.load(lengths_ptr + sequence) - offset - end
    table_ptr = tables_ptr + sequence * stride_table
    first_query, queries = base + shift, (token + shift)[:, None]
    stop = tl.minimum(base + TOKENS, end) + shift
    lowest = find_lowest(first_query, offset, WINDOW, BLOCK, ALIGNED)
    # The first query sees all keys up to here, and the others see at least these.
    clear = lowest + (first_query + 1 - lowest) // BLOCK * BLOCK
    WHOLE: tl.constexpr = (WINDOW == 0 or ALIGNED) and PAGE % BLOCK == 0
    start, rows = tile_rows(table_ptr, lowest, n, stop, stride_page, K * D, PAGE, WHOLE)
    top, total, acc = init_acc(sinks_ptr, heads, inside, DIMS, HAS_SINKS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    q = tl.load(q_ptr + places, mask=cell, other=0.0)
    keys_ptr, values_ptr = keys_ptr + head * D, values_ptr + head * D
    for first in range(lowest, stop, BLOCK):
        at = first + n
        own = at < stop
        k, v = load_pair(keys_ptr + start, values_ptr + start, rows, own, D, DIMS)
        # The next tile's rows are on their way while this one is computed with.
        start, rows = tile_rows(
            table_ptr, first + BLOCK, n, stop, stride_page, K * D, PAGE, WHOLE
        )
        k, v = k.to(q.dtype), v.to(q.dtype)  # if they are stored in FP8
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = apply_mask(logits, at[None, :], queries, first, clear, stop, WINDOW)
        top, total, acc = softmax_update(logits, v, top, total, acc, scale)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=cell)


@cache
def prefill_launcher(tiles: PrefillTiles, sizes: AttentionSizes) -> Launcher:
    """For attention of these sizes."""
    return launcher(
        prefill_kernel,
        **sizes._asdict(),
        TOKENS=tiles.tokens,
        BLOCK=tiles.block,
        ALIGNED=tiles.aligned,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: KVGroup,
    sinks: Tensor | None,
    out: Tensor,
    *,
    batch_invariant: bool = False,
) -> None:
    """Put attention of the newest tokens of each sequence into ``out`` [T, H, D].

    As `simplellm.model.ops.attend`, whatever ``group.decodes`` is. Tokens before the
    first sequence's are left alone, those after the last one's get zeros. Keys and
    values are one layer's pages [pages, page_size, K, D] with the same stride; the rest
    is contiguous. With ``batch_invariant`` the bits of a token's row depend neither on
    the others nor on where its chunk begins.
    """
    num_tokens, _, dim = q.shape
    sizes = AttentionSizes.of(q, keys, group.window, sinks is not None)
    tiles = prefill_tiles(dim, sizes.G, group.window, batch_invariant)
    start = prefill_launcher(tiles, sizes)
    num_sequences, pages_in_row = group.tables.shape
    # No chunks need more tiles, whatever their lengths; see `find_sequence`.
    count = num_tokens // tiles.tokens + num_sequences + 1
    start(
        (sizes.K, count, 1),
        *(
            q,
            keys,
            values,
            group.tables,
            group.offsets,
            group.lengths,
            group.query_start_loc,
        ),
        *(sinks, out, LOG2E.value * dim**-0.5),
        *(num_tokens, num_sequences, keys.stride(0), pages_in_row),
    )
