"""What a rank that has a part of the vocabulary computes together with the others.

T tokens, S rows of logits, W tokens of this rank, N hidden size.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels.argmax_keys import LOWEST, index_of, ordered
from simplellm.model.kernels.draw import draw
from simplellm.model.kernels.exchange import (
    Peers,
    exchange,
    exchange_largest,
    load_addresses,
)
from simplellm.model.kernels.filters import LogitsShard
from simplellm.model.kernels.launch import Launcher, launcher, pdl_wait, power_of_two
from simplellm.model.parallel import VocabularyShard
from simplellm.sampling.filters import Filters


@triton.jit(do_not_specialize_on_alignment=["tokens_ptr", "previous_ptr"])
def embed_part_kernel(
    tokens_ptr,
    previous_ptr,
    table_ptr,
    out_ptr,
    peers_ptr,
    first,
    count,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,  # False, as in `embed_kernel`
):
    """`embed_kernel`, of a table that has ``count`` tokens, from the ``first`` on."""
    row = tl.program_id(0)
    token = tl.load(tokens_ptr + row)
    if token < 0:
        token = tl.load(previous_ptr - 1 - token)
    local = token - first
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    addresses = load_addresses(peers_ptr, RANKS)
    end = tl.where((local >= 0) & (local < count), N, 0)  # others are zeros here
    x = tl.load(table_ptr + local.to(tl.int64) * N + columns, columns < end, 0)
    dtype = out_ptr.dtype.element_ty
    total = exchange(
        *(x.to(tl.float32), columns, inside, row, addresses),
        *(WORDS, RANK, RANKS, ROWS, dtype),
    )
    tl.store(out_ptr + row * N + columns, total.to(dtype), inside)


@triton.jit
def largest_kernel(
    values_ptr,
    local_ptr,
    peers_ptr,
    ids_ptr,
    width,
    first,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: the token of the greatest number of all ranks."""
    addresses = load_addresses(peers_ptr, RANKS)
    pdl_wait(PDL)
    row = tl.program_id(0)
    local = tl.load(local_ptr + row).to(tl.int64)
    value = tl.load(values_ptr + row.to(tl.int64) * width + local)
    key = ordered(value, local + first)
    key = exchange_largest(key, row, addresses, WORDS, RANK, RANKS, ROWS)
    tl.store(ids_ptr + row, index_of(key))


@triton.jit
def peak_kernel(
    logits_ptr,
    best_ptr,
    peers_ptr,
    peaks_ptr,
    width,
    first,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: the logit of its best token, which one of the ranks has."""
    addresses = load_addresses(peers_ptr, RANKS)
    pdl_wait(PDL)
    row = tl.program_id(0)
    local = tl.load(best_ptr + row) - first
    here = (local >= 0) & (local < width)
    logits = logits_ptr + row.to(tl.int64) * width
    value = tl.load(logits + tl.where(here, local, 0))
    key = tl.where(here, ordered(value, local), LOWEST)
    key = exchange_largest(key, row, addresses, WORDS, RANK, RANKS, ROWS)
    bits = (key >> 32).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    tl.store(peaks_ptr + row, bits.to(tl.float32, bitcast=True))


@cache
def embed_part_launcher(size: int, peers: Peers) -> Launcher:
    """For rows of ``size`` numbers."""
    options = {"N": size, "BLOCK": power_of_two(size), **peers.constants()}
    return launcher(embed_part_kernel, pdl=False, **options, num_warps=4)


@cache
def largest_launcher(peers: Peers) -> Launcher:
    """For one number of each row and rank."""
    return launcher(largest_kernel, **peers.constants(), num_warps=1)


@cache
def peak_launcher(peers: Peers) -> Launcher:
    """For one number of each row."""
    return launcher(peak_kernel, **peers.constants(), num_warps=1)


@dataclass(frozen=True)
class ExchangingShard(VocabularyShard):
    """A `VocabularyShard` whose GPU exchanges few rows with its ``peers``."""

    peers: Peers

    def embed(self, tokens: Tensor, previous: Tensor, table: Tensor) -> Tensor:
        rows, size = len(tokens), table.shape[1]
        if rows > self.peers.rows:
            return super().embed(tokens, previous, table)
        out, part = table.new_empty(rows, size), (self.tokens.start, len(self.tokens))
        inputs = tokens, previous, table, out, self.peers.addresses
        embed_part_launcher(size, self.peers)((rows, 1, 1), *inputs, *part)
        return out

    def _largest(self, values: Tensor, local: Tensor) -> Tensor:
        rows, width = values.shape
        if rows > self.peers.rows:
            return super()._largest(values, local)
        ids = local.new_empty(rows, dtype=torch.int32)
        inputs = values, local, self.peers.addresses, ids
        sizes = width, self.tokens.start
        largest_launcher(self.peers)((rows, 1, 1), *inputs, *sizes)
        return ids

    def draw(
        self,
        logits: Tensor,
        best: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        steps: Tensor,
        filters: Filters | None = None,
    ) -> Tensor:
        rows, width = logits.shape
        columns = temperature, seeds, steps, filters
        if rows > self.peers.rows or self.ops.draw is not draw:
            return super().draw(logits, best, *columns)
        peaks, first = logits.new_empty(rows), self.tokens.start
        inputs = logits, best, self.peers.addresses, peaks, width, first
        peak_launcher(self.peers)((rows, 1, 1), *inputs)
        add_up, leads = self.group.sum, self.group.rank == 0
        shard = LogitsShard(first, self.vocab_size, peaks, add_up, leads)
        return draw(logits, best, *columns, shard, self.peers)
