"""What attention's kernels do tile by tile: find keys, take them in, join parts.

N keys, M rows of queries, D head_dim, S parts. Logits are in units of log2. Positions
count from the first page that a table still names.
"""

import triton
import triton.language as tl


@triton.jit
def find_rows(
    table_ptr,  # int32, the sequence's pages in order
    positions,  # int32 [N]
    stop,  # positions from here on have no page
    stride_page,  # numbers in a page
    ROW: tl.constexpr,  # numbers in a row
    PAGE: tl.constexpr,  # rows in a page
):
    """int64 [N]: where the rows of ``positions`` begin; from ``stop`` on in page 0."""
    pages = tl.load(table_ptr + positions // PAGE, mask=positions < stop, other=0)
    return pages.to(tl.int64) * stride_page + positions % PAGE * ROW


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
