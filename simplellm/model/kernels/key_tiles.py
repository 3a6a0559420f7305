"""Tiles of keys and values, and the state of a softmax before the first of them.

N keys, M rows of queries, D head_dim. Logits are in units of log2: a softmax is then
made of exp2.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels.launch import power_of_two

LOG2E = tl.constexpr(math.log2(math.e))
# Stands for "no key yet". Unlike -inf it can be subtracted from itself.
NO_KEY = tl.constexpr(-1e30)


class AttentionSizes(NamedTuple):
    """What kernels of attention are compiled for, in any tiling."""

    K: int  # kv heads
    G: int  # query heads of each
    D: int  # head_dim
    DIMS: int  # columns of a tile
    WINDOW: int  # or 0
    PAGE: int  # tokens
    ROWS: int  # of a tile for each token: G rounded up
    HAS_SINKS: bool

    @classmethod
    def of(
        cls, q: Tensor, keys: Tensor, window: int | None, has_sinks: bool
    ) -> "AttentionSizes":
        """For q [T, H, D] and pages of keys [pages, page_size, K, D]."""
        _, page_size, kv_heads, dim = keys.shape
        heads, dims, group = kv_heads, padded(dim), q.shape[1] // kv_heads
        rows = power_of_two(group)
        return cls(heads, group, dim, dims, window or 0, page_size, rows, has_sinks)


def padded(dim: int) -> int:
    """Columns of the kernels' matrices for heads of ``dim``."""
    return max(16, power_of_two(dim))


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
