"""Tiles of keys and values, and the state of a softmax before the first of them.

N keys, M rows of queries, D head_dim. Logits are in units of log2: a softmax is then
made of exp2.
"""

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
# Stands for "no key yet". Unlike -inf it can be subtracted from itself.
NO_KEY = tl.constexpr(-1e30)


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
