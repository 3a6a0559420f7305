"""What ranks add up: the results of row-parallel weights.

T tokens, N hidden size, S parts of an update.
"""

from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels import norm as norms
from simplellm.model.kernels.exchange import Peers, shared_bytes, stop_word
from simplellm.model.kernels.launch import Launcher, launcher, pdl_wait, power_of_two
from simplellm.model.kernels.norm import sum_parts
from simplellm.model.kernels.rounding import RoundedNorm
from simplellm.model.kernels.vocabulary import ExchangingShard
from simplellm.model.layers import Norm
from simplellm.model.ops import Ops
from simplellm.model.parallel import Group, VocabularyShard, parallel_table

# Of a step, for which kernels exchange; more go by NCCL.
EXCHANGED_ROWS = 256


@triton.jit
def add_parts_kernel(
    parts_ptr,
    out_ptr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for BLOCK numbers of a row: out = the sum of its parts."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    parts = parts_ptr + row * (PARTS * N) + columns
    total = sum_parts(0.0, parts, inside, N, PARTS, tl.float32)
    tl.store(out_ptr + row * N + columns, total.to(out_ptr.dtype.element_ty), inside)


@cache
def add_parts_launcher(size: int, parts: int) -> tuple[Launcher, int]:
    """For rows of ``size`` numbers in so many parts; and the programs of a row."""
    block = min(1024, power_of_two(size))
    start = launcher(add_parts_kernel, N=size, PARTS=parts, BLOCK=block, num_warps=4)
    return start, -(-size // block)


def add_parts(update: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, N] in ``dtype`` of [T, S, N], summed in float32 and in order.

    What is [T, N] is returned as it is.
    """
    if update.ndim == 2:
        return update
    tokens, parts, size = update.shape
    out = update.new_empty(tokens, size, dtype=dtype)
    start, programs = add_parts_launcher(size, parts)
    start((tokens, programs, 1), update, out)
    return out


class Partial(NamedTuple):
    """An update [T, N] or [T, S, N] that is still to be added up over the ranks."""

    update: Tensor


def reduce(
    update: Tensor, group: Group, dtype: torch.dtype, peers: Peers | None
) -> Tensor | Partial:
    """`Ops.reduce`: of few rows it is left to `add_norm`, which sums with ``peers``.

    Of others NCCL does, what ``group`` has in ``dtype``.
    """
    if peers is not None and len(update) <= peers.rows:
        return Partial(update)
    return group.sum(add_parts(update, dtype))


def add_norm(
    residual: Tensor,
    update: Tensor | Partial | None,
    norm: Norm | RoundedNorm,
    eps: float,
    peers: Peers,
) -> tuple[Tensor, Any]:
    """`norm.add_norm`, of what `reduce` has left to it, too."""
    if isinstance(update, Partial):
        return norms.add_norm(residual, update.update, norm, eps, peers)
    return norms.add_norm(residual, update, norm, eps)


def share(group: Group, words: int, rows: int) -> Peers | None:
    """The peers of a ``group`` for rows of so many words, if GPUs share memory."""
    nbytes = shared_bytes(group.size, rows, words)
    addresses = group.share(nbytes, stop_word(group.size, rows))
    if addresses is None:
        return None
    return Peers(addresses, group.rank, group.size, rows, words)


def fuse_reduce(shard: VocabularyShard, dtype: torch.dtype, hidden_size: int) -> Ops:
    """The table of a rank that has a ``shard``, and updates of ``dtype``."""
    ops, group = shard.ops, shard.group
    peers, nbytes = None, hidden_size * dtype.itemsize
    # The norm's kernel compiles, and a row is whole keys long.
    if ops.add_norm is norms.add_norm and nbytes % 8 == 0:
        peers = share(group, nbytes // 4, EXCHANGED_ROWS)
    adding = partial(reduce, group=group, dtype=dtype, peers=peers)
    if peers is None:
        return replace(parallel_table(shard), reduce=adding)
    exchanging = ExchangingShard(**vars(shard), peers=peers)
    table = parallel_table(exchanging)
    return replace(table, reduce=adding, add_norm=partial(add_norm, peers=peers))
