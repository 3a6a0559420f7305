"""What a rank that has a part of the vocabulary computes together with the others.

T tokens, S rows of logits, W tokens of this rank, N hidden size.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels.argmax_keys import index_of, ordered
from simplellm.model.kernels.exchange import Peers, exchange, exchange_largest
from simplellm.model.kernels.launch import Launcher, launcher, pdl_wait, power_of_two
from simplellm.model.parallel import VocabularyShard


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
    PDL: tl.constexpr,  # False, as in `embed_kernel`
):
    """`embed_kernel`, of a table that has ``count`` tokens, from the ``first`` on."""
    row = tl.program_id(0)
    token = tl.load(tokens_ptr + row)
    if token < 0:
        token = tl.load(previous_ptr - 1 - token)
    place = token - first
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    end = tl.where((place >= 0) & (place < count), N, 0)  # others are zeros here
    x = tl.load(table_ptr + place.to(tl.int64) * N + columns, columns < end, 0)
    dtype = out_ptr.dtype.element_ty
    total = exchange(
        *(x.to(tl.float32), columns, inside, row, peers_ptr),
        *(N, RANK, RANKS, ROWS, dtype),
    )
    tl.store(out_ptr + row * N + columns, total.to(dtype), inside)


@triton.jit
def largest_kernel(
    values_ptr,
    places_ptr,
    peers_ptr,
    ids_ptr,
    width,
    first,
    N: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: the token of the greatest of all ranks' numbers at places."""
    pdl_wait(PDL)
    row = tl.program_id(0)
    place = tl.load(places_ptr + row).to(tl.int64)
    value = tl.load(values_ptr + row.to(tl.int64) * width + place)
    key = ordered(value, place + first)
    key = exchange_largest(key, row, peers_ptr, N, RANK, RANKS, ROWS)
    tl.store(ids_ptr + row, index_of(key))


@cache
def embed_part_launcher(size: int, peers: Peers) -> Launcher:
    """For rows of ``size`` numbers."""
    options = {"N": size, "BLOCK": power_of_two(size), **peers.constants()}
    return launcher(embed_part_kernel, pdl=False, **options, num_warps=4)


@cache
def largest_launcher(peers: Peers) -> Launcher:
    """For one number of each row and rank."""
    options = {"N": peers.words, **peers.constants()}
    return launcher(largest_kernel, **options, num_warps=1)


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

    def _largest(self, values: Tensor, places: Tensor) -> Tensor:
        rows, width = values.shape
        if rows > self.peers.rows:
            return super()._largest(values, places)
        ids = places.new_empty(rows, dtype=torch.int32)
        inputs = values, places, self.peers.addresses, ids
        sizes = width, self.tokens.start
        largest_launcher(self.peers)((rows, 1, 1), *inputs, *sizes)
        return ids
