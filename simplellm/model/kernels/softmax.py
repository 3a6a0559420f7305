"""What attention's kernels are made of: where keys lie, and a softmax tile by tile.

N keys, M rows of queries, D head_dim, S parts. Logits are in units of log2: a softmax
is then made of exp2. A place is a position counted from the first page that a table
still names.
"""

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
# Stands for "no key yet". Unlike -inf it can be subtracted from itself.
NO_KEY = tl.constexpr(-1e30)


@triton.jit
def find_rows(
    table_ptr, positions, stop, stride_page, ROW: tl.constexpr, PAGE: tl.constexpr
):
    """Where the rows of ``positions`` begin; those from ``stop`` on in page 0."""
    pages = tl.load(table_ptr + positions // PAGE, mask=positions < stop, other=0)
    return pages.to(tl.int64) * stride_page + positions % PAGE * ROW


@triton.jit
def load_pair(keys_ptr, values_ptr, rows, there, D: tl.constexpr, DIMS: tl.constexpr):
    """Keys and values [N, DIMS] of one kv head; 0 where nothing is ``there``."""
    d = tl.arange(0, DIMS)[None, :]
    mask = there[:, None] & (d < D)
    k = tl.load(keys_ptr + rows[:, None] + d, mask=mask, other=0.0)
    return k, tl.load(values_ptr + rows[:, None] + d, mask=mask, other=0.0)


@triton.jit
def init_acc(sinks_ptr, heads, valid, DIMS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The state before the first tile, top, total and acc: a sink, or nothing."""
    top = tl.full(heads.shape, NO_KEY, tl.float32)
    total = tl.zeros(heads.shape, tl.float32)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=valid, other=0.0).to(tl.float32)
        top = tl.where(valid, sinks * LOG2E, top)
        total = tl.where(valid, 1.0, total)
    return top, total, tl.zeros([heads.shape[0], DIMS], tl.float32)


@triton.jit
def softmax_update(
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
def join_parts(
    sums,  # float32 [S, N], log2 of each part's sum; NO_KEY for one that isn't there
    parts,  # float32 [S, N, D], the parts' outputs; 0 for one that isn't there
):
    """One output [N, D] of S parts, as if a single softmax had seen all keys."""
    weights = tl.exp2(sums - tl.max(sums, 0)[None, :])
    return tl.sum(weights[:, :, None] * parts, 0) / tl.sum(weights, 0)[:, None]
