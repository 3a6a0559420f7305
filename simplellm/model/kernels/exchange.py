"""How kernels of several GPUs exchange numbers: by each other's memory.

Each rank has memory that all ranks' kernels write to: a slot of each rank for each row,
twice, since calls take turns. A program puts its row into its slots at all others,
raises a flag beside each, and waits for the flags of theirs in its own memory. There is
no second exchange: whoever comes through a row's call n + 1 has seen the others' flags
of it, and they raised these after all their kernels of call n were done. So nobody
reads the slots of call n any more when call n + 2 writes to them.

A row's calls are counted where its memory is, since a graph has no argument that
changes. As long as all ranks launch the same, they count the same.

R ranks, N numbers of a row, int32 words.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

STOP_WORDS = 4  # the first one is 1 once nobody shall wait any more


@dataclass(frozen=True, eq=False)
class Peers:
    """The memory of all ranks, as this ``rank`` of ``ranks`` sees it.

    Each has the flags [2, R, rows], the counts of calls [rows], the stop words, and the
    slots [2, R, rows] of ``words``, which are even; ``rows`` is a multiple of 4.
    """

    addresses: Tensor  # int64 [R]
    rank: int
    ranks: int
    rows: int
    words: int

    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        sizes = {"RANK": self.rank, "RANKS": self.ranks}
        return sizes | {"ROWS": self.rows, "WORDS": self.words}


def stop_word(ranks: int, rows: int) -> int:
    """Where the stop words begin."""
    return (2 * ranks + 1) * rows


def shared_bytes(ranks: int, rows: int, words: int) -> int:
    """What each rank has to share, for so many rows of so many words."""
    return 4 * (stop_word(ranks, rows) + STOP_WORDS + 2 * ranks * rows * words)


ALONE: dict[str, Any] = {"RANK": 0, "RANKS": 1, "ROWS": 0, "WORDS": 0}


@triton.jit
def load_addresses(peers_ptr, RANKS: tl.constexpr):
    """The addresses of all ranks' memory, a tuple; nobody ever changes them."""
    out: tl.tuple = ()
    for rank in tl.static_range(RANKS):
        out += (tl.load(peers_ptr + rank),)
    return out


@triton.jit
def words_of(address):
    """A rank's memory as words."""
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def slots_of(address, RANKS: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """A rank's slots, of numbers of DTYPE. They begin at a multiple of 16 bytes."""
    WORDS: tl.constexpr = (2 * RANKS + 1) * ROWS + 4
    # Said so, a thread moves 16 bytes at once.
    return tl.multiple_of((address + 4 * WORDS).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def wait_for(flag_ptr, call, stop_ptr):
    """Wait until a flag is that of this call; not once there is a stop.

    What was stored before the flag was raised is seen by what follows.
    """
    waiting = True
    tries = 0
    while waiting:
        waiting = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") != call
        tries += 1
        if tries % 64 == 0:
            stop = tl.atomic_add(stop_ptr, 0, sem="relaxed", scope="sys")
            waiting = waiting & (stop == 0)
    tl.debug_barrier()


@triton.jit
def begin_call(
    addresses, row, RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr
):
    """A row's next call: its number, and the first rank's slot for this turn."""
    call = tl.load(words_of(addresses[RANK]) + 2 * RANKS * ROWS + row) + 1
    return call, (call & 1) * (RANKS * ROWS) + row


@triton.jit
def raise_flags(
    addresses, first, call, RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr
):
    """Tell all others that what this program has written to their slots is there."""
    tl.debug_barrier()
    for other in tl.static_range(RANKS):
        if other != RANK:
            flag_ptr = words_of(addresses[other]) + first + RANK * ROWS
            tl.atomic_xchg(flag_ptr, call, sem="release", scope="sys")


@triton.jit
def wait_for_rank(
    addresses,
    first,
    call,
    other,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Wait until what another rank writes to its slot is there; the slot."""
    words = words_of(addresses[RANK])
    slot = first + other * ROWS
    wait_for(words + slot, call, words + (2 * RANKS + 1) * ROWS)
    return slot.to(tl.int64)


@triton.jit
def end_call(
    addresses, row, call, RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr
):
    """Count a row's call."""
    tl.store(words_of(addresses[RANK]) + 2 * RANKS * ROWS + row, call)


@triton.jit
def sum_slots(
    x,
    columns,
    inside,
    addresses,
    first,
    call,
    WORDS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """This rank's x and what the others write to its slots, added up.

    float32, in the order of the ranks; x has the dtype of a slot's numbers.
    """
    SIZE: tl.constexpr = WORDS * 32 // x.dtype.primitive_bitwidth
    own = slots_of(addresses[RANK], RANKS, ROWS, x.dtype)
    total = tl.zeros(x.shape, tl.float32)
    for other in tl.static_range(RANKS):
        if other == RANK:
            total += x.to(tl.float32)
        else:
            slot = wait_for_rank(addresses, first, call, other, RANK, RANKS, ROWS)
            theirs = own + slot * SIZE + columns
            # Not from a cache of this processor's, which nobody else's stores reach.
            total += tl.load(theirs, inside, 0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit
def exchange(
    x,
    columns,
    inside,
    row,
    addresses,
    WORDS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The sum of all ranks' x, rounded to DTYPE before, in the order of the ranks.

    float32, the same bits on each of them. One program has all of a row.
    """
    SIZE: tl.constexpr = WORDS * 32 // DTYPE.primitive_bitwidth  # of a slot
    x = x.to(DTYPE)
    call, first = begin_call(addresses, row, RANK, RANKS, ROWS)
    mine = (first + RANK * ROWS).to(tl.int64) * SIZE + columns
    for other in tl.static_range(RANKS):
        if other != RANK:
            slots = slots_of(addresses[other], RANKS, ROWS, DTYPE)
            tl.store(slots + mine, x, inside)
    raise_flags(addresses, first, call, RANK, RANKS, ROWS)
    total = sum_slots(
        *(x, columns, inside, addresses, first, call, WORDS, RANK, RANKS, ROWS)
    )
    end_call(addresses, row, call, RANK, RANKS, ROWS)
    return total


@triton.jit
def exchange_largest(
    key,
    row,
    addresses,
    WORDS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The largest of all ranks' int64 keys; slots are of so many words."""
    call, first = begin_call(addresses, row, RANK, RANKS, ROWS)
    mine = (first + RANK * ROWS).to(tl.int64) * (WORDS // 2)
    for other in tl.static_range(RANKS):
        if other != RANK:
            slots = slots_of(addresses[other], RANKS, ROWS, tl.int64)
            tl.store(slots + mine, key)
    raise_flags(addresses, first, call, RANK, RANKS, ROWS)
    own = slots_of(addresses[RANK], RANKS, ROWS, tl.int64)
    for other in tl.static_range(RANKS):
        if other != RANK:
            slot = wait_for_rank(addresses, first, call, other, RANK, RANKS, ROWS)
            theirs = own + slot * (WORDS // 2)
            key = tl.maximum(key, tl.load(theirs, cache_modifier=".cg"))
    end_call(addresses, row, call, RANK, RANKS, ROWS)
    return key
