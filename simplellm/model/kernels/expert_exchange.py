"""How tokens of ranks with requests of their own get to the experts, and back.

Each rank has some of the experts, and rows of its own: as many as the others, of which
the first ones count. `dispatch_kernel` brings all rows that count to every rank, one
after the other and without what is between them, so that no expert is read for padding.
`combine_kernel` brings what a rank's experts say of a row to the rank that has it, and
adds up.

T rows of a rank, R ranks, N hidden size, S parts of what is said of a row.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels import norm
from simplellm.model.kernels.exchange import (
    Peers,
    begin_call,
    end_call,
    load_addresses,
    raise_flags,
    slots_of,
    sum_slots,
    wait_for_rank,
)
from simplellm.model.kernels.launch import Launcher, launcher, pdl_wait, power_of_two
from simplellm.model.kernels.norm import sum_parts
from simplellm.model.kernels.reduce import EXCHANGED_ROWS, add_parts, share
from simplellm.model.layers import Experts
from simplellm.model.ops import Ops
from simplellm.model.parallel import ExpertExchange, Group, data_parallel_table

# Of a slot, behind a row: the first one says how many of its rank's rows count.
COUNT_WORDS = tl.constexpr(4)


@triton.jit
def count_of(slots, slot, WORDS: tl.constexpr):
    """Where a slot says how many rows of its rank count."""
    return slots.to(tl.pointer_type(tl.int32)) + (slot + 1) * WORDS - COUNT_WORDS


@triton.jit(do_not_specialize_on_alignment=["num_tokens_ptr"])
def dispatch_kernel(
    x_ptr,
    num_tokens_ptr,
    every_ptr,
    starts_ptr,
    peers_ptr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for this row of each rank: every[starts[rank] + row] = x[row] there.

    The last of starts [R + 1] is how many rows there are in all.
    """
    addresses = load_addresses(peers_ptr, RANKS)
    pdl_wait(PDL)
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    count = tl.load(num_tokens_ptr)
    inside = columns < tl.where(row < count, N, 0)
    x = tl.load(x_ptr + row.to(tl.int64) * N + columns, inside, 0)
    SIZE: tl.constexpr = WORDS * 32 // x.dtype.primitive_bitwidth  # of a slot
    call, first = begin_call(addresses, row, RANK, RANKS, ROWS)
    mine = (first + RANK * ROWS).to(tl.int64)
    for other in tl.static_range(RANKS):
        if other != RANK:
            slots = slots_of(addresses[other], RANKS, ROWS, x.dtype)
            tl.store(slots + mine * SIZE + columns, x, inside)
            tl.store(count_of(slots, mine, WORDS), count)
    raise_flags(addresses, first, call, RANK, RANKS, ROWS)
    own = slots_of(addresses[RANK], RANKS, ROWS, x.dtype)
    start = count * 0
    for other in tl.static_range(RANKS):
        theirs, some, here = x, count, inside
        if other != RANK:
            slot = wait_for_rank(addresses, first, call, other, RANK, RANKS, ROWS)
            some = tl.load(count_of(own, slot, WORDS), cache_modifier=".cg")
            some = tl.minimum(some, tl.num_programs(0))  # also after a stop
            here = columns < tl.where(row < some, N, 0)
            slot = own + slot * SIZE + columns
            theirs = tl.load(slot, here, 0, cache_modifier=".cg")
        where = (start + row).to(tl.int64) * N + columns
        tl.store(every_ptr + where, theirs, here)
        tl.store(starts_ptr + other, start, row == 0)
        start += some
    tl.store(starts_ptr + RANKS, start, row == 0)
    end_call(addresses, row, call, RANK, RANKS, ROWS)


@triton.jit
def combine_kernel(
    parts_ptr,
    starts_ptr,
    out_ptr,
    peers_ptr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for this row of each rank: out[row] = the sum of all ranks' parts.

    Each rank's own are summed first, and rounded, so that a row's numbers don't depend
    on where it is. Of a row that doesn't count, out is 0.
    """
    addresses = load_addresses(peers_ptr, RANKS)
    pdl_wait(PDL)
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    SIZE: tl.constexpr = WORDS * 32 // dtype.primitive_bitwidth  # of a slot
    call, first = begin_call(addresses, row, RANK, RANKS, ROWS)
    mine = (first + RANK * ROWS).to(tl.int64) * SIZE + columns
    x, inside = tl.zeros([BLOCK], dtype), columns < N
    for other in tl.static_range(RANKS):
        where = tl.load(starts_ptr + other) + row
        end = tl.load(starts_ptr + other + 1)
        here = columns < tl.where(where < end, N, 0)
        parts = parts_ptr + where.to(tl.int64) * (PARTS * N) + columns
        total = sum_parts(0.0, parts, here, N, PARTS, tl.float32).to(dtype)
        if other == RANK:
            x, inside = total, here
        else:
            slots = slots_of(addresses[other], RANKS, ROWS, dtype)
            tl.store(slots + mine, total, here)
    raise_flags(addresses, first, call, RANK, RANKS, ROWS)
    total = sum_slots(
        *(x, columns, inside, addresses, first, call, WORDS, RANK, RANKS, ROWS)
    )
    out = out_ptr + row.to(tl.int64) * N + columns
    tl.store(out, total.to(dtype), columns < N)
    end_call(addresses, row, call, RANK, RANKS, ROWS)


@cache
def dispatch_launcher(size: int, peers: Peers) -> Launcher:
    """For rows of ``size`` numbers."""
    options = {"N": size, "BLOCK": power_of_two(size), **peers.constants()}
    return launcher(dispatch_kernel, **options, num_warps=4)


@cache
def combine_launcher(size: int, parts: int, peers: Peers) -> Launcher:
    """For rows of ``size`` numbers, each in so many parts."""
    options = {"N": size, "PARTS": parts, "BLOCK": power_of_two(size)}
    return launcher(combine_kernel, **options, **peers.constants(), num_warps=8)


@dataclass(frozen=True)
class PeerExpertExchange(ExpertExchange):
    """An `ExpertExchange` whose GPU exchanges few rows with its ``peers``."""

    peers: Peers

    def experts(self, x: Tensor, mlp: Experts, num_tokens: Tensor) -> Tensor:
        rows, size = x.shape
        if rows > self.peers.rows:
            ops = replace(self.ops, experts=self._whole)
            return ExpertExchange(ops, self.group).experts(x, mlp, num_tokens)
        ranks, addresses = self.peers.ranks, self.peers.addresses
        every, out = x.new_empty(ranks * rows, size), torch.empty_like(x)
        starts = x.new_empty(ranks + 1, dtype=torch.int32)
        inputs = x, num_tokens, every, starts, addresses
        dispatch_launcher(size, self.peers)((rows, 1, 1), *inputs)
        parts = self.ops.experts(every, mlp, starts[ranks:])
        start = combine_launcher(size, parts.numel() // every.numel(), self.peers)
        start((rows, 1, 1), parts, starts, out, addresses)
        return out

    def _whole(self, x: Tensor, mlp: Experts, num_tokens: Tensor) -> Tensor:
        # Parts are added in the order in which `combine_kernel` adds them.
        return add_parts(self.ops.experts(x, mlp, num_tokens), x.dtype)


def fuse_expert_exchange(
    ops: Ops, group: Group, dtype: torch.dtype, hidden_size: int
) -> Ops:
    """`data_parallel_table`, by kernels if GPUs share memory and the norm's compile."""
    nbytes = hidden_size * dtype.itemsize
    if ops.add_norm is norm.add_norm and nbytes % 8 == 0:
        peers = share(group, nbytes // 4 + COUNT_WORDS.value, EXCHANGED_ROWS)
        if peers is not None:
            return replace(ops, experts=PeerExpertExchange(ops, group, peers).experts)
    return data_parallel_table(ops, group)
