"""Attention of one new token of each sequence over pages of FP8 numbers.

As `simplellm.model.kernels.decode`, but for how keys and values are read. Tensor cores
want them in bfloat16, and values turned: with a key's number beside the next key's,
which instructions do for numbers of two bytes only. So two columns that lie beside each
other, an even and an odd one, are read as one number of two bytes, and taken apart
where a tensor core gets them. All matrices have the even columns apart from the odd.

On an H200, 64 sequences of 16,384 tokens with 8 kv heads of 128 took 568 us; read byte
by byte, 1,167 us, and in bfloat16, 999 us.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.batch import KVGroup
from simplellm.model.kernels.decode import (
    DecodeTiles,
    Scratch,
    decode_plan,
    divide,
    find_newest,
    start_decodes,
    store_result,
    wait,
)
from simplellm.model.kernels.key_tiles import (
    NO_KEY,
    AttentionSizes,
    init_acc,
    load_pair,
    padded,
)
from simplellm.model.kernels.prefill import ANYWHERE, VARIED
from simplellm.model.kernels.softmax import find_rows

# By the least number of sequences, as timed alone on an H200 on 2026-11-28.
FP8_TILES = {
    1: DecodeTiles(128, 4, 2, least=64, early=True, carveout=64),
    5: DecodeTiles(128, 4, 4, least=64, early=True),
    16: DecodeTiles(128, 4, 3, least=256, early=True),
    32: DecodeTiles(64, 4, 3, least=512, early=True),
    64: DecodeTiles(64, 4, 3, least=1024, early=True),
}


@cache
def fp8_tiles(batch: int, dim: int) -> DecodeTiles:
    """What the kernel runs with for so many sequences, and heads of ``dim``."""
    tiles = FP8_TILES[max(least for least in FP8_TILES if least <= batch)]
    return tiles._replace(block=min(tiles.block, 128 * 128 // padded(dim)))


@triton.jit
def even_columns(pairs, PTX: tl.constexpr):
    """The numbers in the lower bytes of int16 ``pairs``: bfloat16, or float32.

    The bits of an e4m3 number, moved into those of bfloat16, are 2^-120 times it. NaN,
    which nobody writes on purpose, becomes 480.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x, sign, factor, zero;
            mov.b32 factor, 0x7b807b80;
            mov.b32 zero, 0x80008000;
            shl.b32 x, $1, 4;
            shl.b32 sign, $1, 8;
            and.b32 x, x, 0x07f007f0;
            lop3.b32 x, sign, zero, x, 0xea;
            fma.rn.bf16x2 $0, x, factor, zero;
            }""",
            "=r,r",
            [pairs],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return numbers_of(pairs.to(tl.int32) & 0xFF)


@triton.jit
def odd_columns(pairs, PTX: tl.constexpr):
    """The numbers in the upper bytes, likewise."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x, factor, zero;
            mov.b32 factor, 0x7b807b80;
            mov.b32 zero, 0x80008000;
            shr.b32 x, $1, 4;
            and.b32 x, x, 0x07f007f0;
            lop3.b32 x, $1, zero, x, 0xea;
            fma.rn.bf16x2 $0, x, factor, zero;
            }""",
            "=r,r",
            [pairs],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return numbers_of((pairs.to(tl.int32) >> 8) & 0xFF)


@triton.jit
def numbers_of(bits):
    """float32 numbers of int32 ``bits``, 0 to 255, of e4m3, by the same move."""
    moved = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return moved.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def softmax_weights(logits, top, total, scale):
    """The first half of `softmax_update`.

    Returns the new top and total, the tile's weights [M, N], and the factor [M, 1] by
    which older ones shrink.
    """
    new_top = tl.maximum(top, tl.max(logits, 1) * scale)
    weights = tl.exp2(logits * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    return new_top, total * shrink + tl.sum(weights, 1), weights, shrink[:, None]


@triton.jit
def newest_softmax_weight(q0, q1, k, there, top, total, scale, PTX: tl.constexpr):
    """The new top, the new total and the weight of the newest key, as `take_newest`."""
    logit = tl.sum(q0.to(tl.float32) * even_columns(k, PTX).to(tl.float32), 1)
    logit += tl.sum(q1.to(tl.float32) * odd_columns(k, PTX).to(tl.float32), 1)
    logit = tl.where(there, logit * scale, NO_KEY)
    new_top = tl.maximum(top, logit)
    weight = tl.where(there, tl.exp2(logit - new_top), 0.0)
    return new_top, total * tl.exp2(top - new_top) + weight, weight[:, None]


@triton.jit(do_not_specialize=VARIED, do_not_specialize_on_alignment=ANYWHERE)
def decode_fp8_kernel(
    # Pointers
    q_ptr,  # [B, H, D]
    keys_ptr,  # int16 [pages, PAGE, K, D/2]
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
    # Sizes and switches, as in decode_kernel
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,  # always
    HAS_SINKS: tl.constexpr,
    PTX: tl.constexpr,  # whether pairs are taken apart by instructions of a GPU
    PDL: tl.constexpr,
):
    """What `decode_kernel` does."""
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

    HALF: tl.constexpr = max(DIMS // 2, 16)  # tl.dot's least
    WIDTH: tl.constexpr = D // 2  # of a head's row of pairs
    group, d, n = tl.arange(0, ROWS), 2 * tl.arange(0, HALF), tl.arange(0, BLOCK)
    heads = head * G + group
    cell = (group < G)[:, None] & (d < D)[None, :]
    table_ptr = tables_ptr + row * stride_table
    rows = find_rows(table_ptr, start + n, stop, stride_page, K * WIDTH, PAGE)
    # The sinks are counted once, in the first split.
    valid = group < tl.where(split == 0, G, 0)
    top, total, acc0 = init_acc(sinks_ptr, heads, valid, HALF, HAS_SINKS)
    acc1 = acc0
    offsets = row * (K * G * D) + (heads * D)[:, None] + d[None, :]
    keys_ptr += head * WIDTH
    values_ptr += head * WIDTH
    q0 = tl.zeros([ROWS, HALF], q_ptr.dtype.element_ty)
    q1 = q0
    newest, is_mine = find_newest(
        table_ptr, end, length, split, stride_page, K * WIDTH, PAGE
    )
    for first in range(start, tl.maximum(stop, start + 1), BLOCK):
        at = first + n
        there = at < stop
        k, v = load_pair(keys_ptr, values_ptr, rows, there, WIDTH, HALF)
        # The next tile's rows are on their way while this one is computed with.
        rows = find_rows(table_ptr, at + BLOCK, stop, stride_page, K * WIDTH, PAGE)
        if first == start:
            if PDL:
                wait()
            q0 = tl.load(q_ptr + offsets, mask=cell, other=0.0)
            q1 = tl.load(q_ptr + offsets + 1, mask=cell, other=0.0)
            new, u = load_pair(keys_ptr, values_ptr, newest, is_mine, WIDTH, HALF)
            top, total, weight = newest_softmax_weight(
                q0, q1, new, is_mine, top, total, scale, PTX
            )
            acc0 = weight * even_columns(u, PTX).to(tl.float32)
            acc1 = weight * odd_columns(u, PTX).to(tl.float32)
        logits = tl.dot(q0, tl.trans(even_columns(k, PTX)), input_precision="ieee")
        k1 = tl.trans(odd_columns(k, PTX))
        logits = tl.dot(q1, k1, logits, input_precision="ieee")
        logits = tl.where(there[None, :], logits, float("-inf"))
        top, total, weights, shrink = softmax_weights(logits, top, total, scale)
        v0, v1 = even_columns(v, PTX), odd_columns(v, PTX)
        weights = weights.to(v0.dtype)
        acc0 = tl.dot(weights, v0, acc0 * shrink, input_precision="ieee")
        acc1 = tl.dot(weights, v1, acc1 * shrink, input_precision="ieee")
    part = (row * K + head) * splits + split
    where = top, total, used == 1, out_ptr, parts_ptr, sums_ptr
    store_result(acc0, *where, offsets, part, group, cell, d, G, D)
    store_result(acc1, *where, offsets + 1, part, group, cell, d + 1, G, D)


def decode_fp8_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: KVGroup,
    sinks: Tensor | None,
    out: Tensor,
    scratch: Scratch,
) -> None:
    """`simplellm.model.kernels.decode.decode_attention` of FP8 keys and values."""
    sizes = AttentionSizes.of(q, keys, group.window, sinks is not None)
    tiles = fp8_tiles(group.decodes, sizes.D)
    shape = group.decodes, group.tables.shape[1]
    plan = decode_plan(tiles, *shape, sizes, decode_fp8_kernel, PTX=q.is_cuda)
    pairs = keys.view(torch.int16), values.view(torch.int16)
    start_decodes(plan, tiles, q, *pairs, group, sinks, out, scratch)
