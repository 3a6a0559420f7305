"""Keys and values in pages: a pool, tables per sequence, sharing, eviction.

The bookkeeping (`PageManager`) is plain Python and knows no tensors; the tensors
(`PagedCache`) know no hashes and no reference counts.

B sequences in a step, T packed tokens, P pages in a row of a table, S positions, H
query heads, K kv heads, G = H / K heads a group, D head_dim.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from simplellm.attention import attention, visible
from simplellm.cache import Chunk, DecodeStep, Read, decode_attention
from simplellm.config import ModelConfig

NULL = -1  # stands in a table where a page fell behind the window


def page_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Names a full page by its tokens and, through ``parent``, all before them."""
    return sha256(parent + array("q", tokens).tobytes()).digest()


@dataclass
class PageTable:
    """The pages of one sequence: ``groups[g][i]`` holds positions from i * page_size.

    In the group of the sliding layers the entries before ``first[g]`` are NULL.
    """

    groups: "list[array[int]]"
    first: list[int]
    computed: int  # tokens whose keys and values are in the pages
    hashed: int  # full pages that have a digest
    digest: bytes  # of the last of them


class PageManager:
    """Which page belongs to whom; the `Manager` of a paged cache.

    A page has room for ``page_size`` positions of one group of layers: the full ones
    or, if ``window`` is given, the sliding ones. All ``num_pages`` serve either group.
    With ``share``, full pages are found again by the tokens they were computed from,
    until they are evicted, the longest unused first. ``max_chunk`` is the most tokens
    that a sequence computes in one step, None any number; the smaller it is, the
    longer may a sequence get. Raises ValueError for sizes that are too small.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        window: int | None = None,
        share: bool = True,
        max_chunk: int | None = None,
    ) -> None:
        for name, value, least in (
            ("num_pages", num_pages, 1 if window is None else 2),
            ("page_size", page_size, 1),
            ("window", window, 1),
            ("max_chunk", max_chunk, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; expected at least {least}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.windows = (None,) if window is None else (None, window)
        self.share = share
        self.max_chunk = max_chunk
        self.tables: dict[int, PageTable] = {}
        self.references = [0] * num_pages
        self.free = list(range(num_pages))[::-1]  # hold nothing that anyone could use
        self.cached: OrderedDict[int, None] = OrderedDict()  # unused, next victim first
        self.found: set[int] = set()  # pages that some sequence was given by `add`
        self.names: dict[int, tuple[int, bytes]] = {}  # page -> (group, digest)
        self.pages: dict[tuple[int, bytes], int] = {}  # and back
        self._copies: list[tuple[int, int]] = []
        self.max_tokens = self._longest()

    def add(self, sequence: int, tokens: Sequence[int]) -> int:
        """Register a sequence; returns how many of its first tokens are cached.

        At least one token is always left to compute. Raises ValueError for a sequence
        that is here already, that has no tokens, or that can never fit.
        """
        if sequence in self.tables:
            raise ValueError(f"sequence {sequence} is here already; expected a new one")
        self._check_length(sequence, len(tokens))
        digests = self._cached_prefix(tokens)
        groups, firsts = [], []
        for group, window in enumerate(self.windows):
            first = self._first_page(len(digests) * self.page_size, window)
            live = [self.pages[group, digest] for digest in digests[first:]]
            for page in live:
                self._hold(page)
            self.found.update(live)
            groups.append(array("i", [NULL] * first + live))
            firsts.append(first)
        count, last = len(digests), digests[-1] if digests else b""
        computed = count * self.page_size
        self.tables[sequence] = PageTable(groups, firsts, computed, count, last)
        return computed

    def grow(self, sequence: int, length: int) -> bool:
        """Make room for ``length`` tokens; False, and nothing changed, without space.

        A shared page that the next token would be written to is exchanged for a copy.
        Raises ValueError for a length that can never fit.
        """
        table = self.table(sequence)
        self._check_length(sequence, length)
        count = -(-length // self.page_size)
        open_page, filled = divmod(table.computed, self.page_size)
        split = []
        if filled and length > table.computed:
            split = [p for p in table.groups if self.references[p[open_page]] > 1]
        missing = (count - len(table.groups[0])) * len(self.windows)
        if not split and missing <= 0:  # as in most decodes
            return True
        if max(0, missing) + len(split) > self.free_pages:
            return False
        for pages in split:
            copy = self._take()
            self._copies.append((pages[open_page], copy))
            self._release(pages[open_page])
            pages[open_page] = copy
        for pages in table.groups:
            while len(pages) < count:
                pages.append(self._take())
        return True

    def commit(self, sequence: int, tokens: Sequence[int], length: int) -> None:
        """The keys and values of the first ``length`` of ``tokens`` are computed now.

        Full pages become shareable, pages behind the window are given back. The last
        token may be negative, which means that it is not known yet.
        """
        table = self.table(sequence)
        most = min(len(table.groups[0]) * self.page_size, len(tokens))
        if not table.computed <= length <= most:
            raise ValueError(
                f"sequence {sequence}: commit of {length} tokens; expected at least "
                f"{table.computed}, which were computed before, and at most {most}, "
                "for which there is room"
            )
        table.computed = length
        if self.share and length // self.page_size > table.hashed:
            self._name_full_pages(table, tokens)
        for group, window in enumerate(self.windows):
            first = self._first_page(length, window)
            if first == table.first[group]:
                continue
            pages = table.groups[group]
            for index in range(table.first[group], first):
                self._release(pages[index], behind=True)
                pages[index] = NULL
            table.first[group] = first

    def fork(self, parent: int, child: int) -> bool:
        """Start ``child`` with all that is computed of ``parent``, in shared pages."""
        if child in self.tables:
            raise ValueError(f"sequence {child} is here already; expected a new one")
        table = self.table(parent)
        count = -(-table.computed // self.page_size)
        groups = [pages[:count] for pages in table.groups]
        for pages, first in zip(groups, table.first, strict=True):
            for page in pages[first:]:
                self._hold(page)
        self.tables[child] = PageTable(
            groups, list(table.first), table.computed, table.hashed, table.digest
        )
        return True

    def remove(self, sequence: int) -> None:
        """Forget a sequence. What others may share stays until it is evicted."""
        table = self.table(sequence)
        del self.tables[sequence]
        # Last page first: a prefix is of use without its end, not the other way round.
        for index in reversed(range(len(table.groups[0]))):
            for pages in table.groups:
                if pages[index] != NULL:
                    self._release(pages[index])

    def take_copies(self) -> list[tuple[int, int]]:
        """Pages to copy, (from, to) in this order, before the next step writes."""
        copies, self._copies = self._copies, []
        return copies

    def table(self, sequence: int) -> PageTable:
        """The pages of a sequence, to be read only. Raises ValueError if unknown."""
        if sequence not in self.tables:
            raise ValueError(f"sequence {sequence} is unknown; expected an added one")
        return self.tables[sequence]

    def _longest(self) -> int:
        """The most tokens that a sequence can have if it is alone."""
        count = self.num_pages // len(self.windows)
        if self.windows[-1] is not None and self.max_chunk is not None:
            # At worst the oldest position in view is the last one of its page.
            span = self.windows[-1] - 1 + self.max_chunk
            sliding = (span + self.page_size - 2) // self.page_size + 1
            count = max(count, self.num_pages - sliding)
        return count * self.page_size

    @property
    def free_pages(self) -> int:
        """Pages that can be had: those that hold nothing and those not in use."""
        return len(self.free) + len(self.cached)

    @property
    def free_tokens(self) -> int:
        """Tokens of a new sequence that find room even if no page is shared."""
        return self.free_pages // len(self.windows) * self.page_size

    @property
    def usage(self) -> float:
        """The share of all pages that sequences hold."""
        return 1 - self.free_pages / self.num_pages

    def check_integrity(self) -> None:
        """Raise AssertionError if anything contradicts anything else. For tests."""
        held = [0] * self.num_pages
        homes: dict[int, tuple[int, int]] = {}  # page -> (group, place in its table)
        for sequence, table in self.tables.items():
            for group, (pages, window) in enumerate(
                zip(table.groups, self.windows, strict=True)
            ):
                first = self._first_page(table.computed, window)
                assert table.first[group] == first, f"{sequence}: wrong first page"
                assert len(pages) == len(table.groups[0]), f"{sequence}: uneven tables"
                assert len(pages) * self.page_size >= table.computed
                assert all(page == NULL for page in pages[:first])
                for index in range(first, len(pages)):
                    page = pages[index]
                    assert 0 <= page < self.num_pages, f"{sequence}: no page {page}"
                    held[page] += 1
                    home = homes.setdefault(page, (group, index))
                    assert home == (group, index), f"page {page} is in two places"
                    if index * self.page_size >= table.computed:
                        assert self.references[page] == 1, f"page {page} is not private"
                        assert page not in self.names, (
                            f"page {page} has a name too soon"
                        )
            full = self.share * (table.computed // self.page_size)
            # The last token of the last full page may not be known yet.
            assert full - 1 <= table.hashed <= full, f"{sequence}: pages without names"
        assert held == self.references, "reference counts differ from the tables"
        unused = sorted([*self.free, *self.cached])
        assert unused == [page for page, count in enumerate(held) if count == 0]
        assert all(page in self.names for page in self.cached)
        assert not any(page in self.names for page in self.free)
        assert self.found <= set(self.names)
        assert self.pages == {name: page for page, name in self.names.items()}

    def _check_length(self, sequence: int, length: int) -> None:
        if not 1 <= length <= self.max_tokens:
            raise ValueError(
                f"sequence {sequence} has {length} tokens; expected 1 to "
                f"{self.max_tokens}, for which {self.num_pages} pages of "
                f"{self.page_size} have room"
            )

    def _first_page(self, length: int, window: int | None) -> int:
        """The first page that the token at position ``length`` can see."""
        return 0 if window is None else max(0, length + 1 - window) // self.page_size

    def _cached_prefix(self, tokens: Sequence[int]) -> list[bytes]:
        """The digests of the longest prefix that can be taken from cached pages."""
        size, digests, usable = self.page_size, [], 0
        runs = [0] * len(self.windows)  # pages in a row, up to here, of each group
        digest = b""
        for end in range(size, len(tokens) if self.share else 0, size):
            digest = page_digest(digest, tokens[end - size : end])
            if (0, digest) not in self.pages:
                break
            digests.append(digest)
            for group in range(len(runs)):
                known = (group, digest) in self.pages
                runs[group] = runs[group] + 1 if known else 0
            if all(
                run >= len(digests) - self._first_page(end, window)
                for run, window in zip(runs, self.windows, strict=True)
            ):
                usable = len(digests)
        return digests[:usable]

    def _name_full_pages(self, table: PageTable, tokens: Sequence[int]) -> None:
        size = self.page_size
        for index in range(table.hashed, table.computed // size):
            part = tokens[index * size : (index + 1) * size]
            if part[-1] < 0:  # not known yet: the page gets its name the next time
                return
            table.digest = page_digest(table.digest, part)
            table.hashed += 1
            for group, pages in enumerate(table.groups):
                name = (group, table.digest)
                # Whoever computed the same page first has the name.
                if name not in self.pages and pages[index] != NULL:
                    self.pages[name] = pages[index]
                    self.names[pages[index]] = name

    def _take(self) -> int:
        """A page for new content; evicts if none is empty."""
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.cached.popitem(last=False)
            del self.pages[self.names.pop(page)]
            self.found.discard(page)
        self.references[page] = 1
        return page

    def _hold(self, page: int) -> None:
        if self.references[page] == 0:
            del self.cached[page]
        self.references[page] += 1

    def _release(self, page: int, behind: bool = False) -> None:
        self.references[page] -= 1
        if self.references[page] > 0:
            return
        if page not in self.names:
            self.free.append(page)
            return
        self.cached[page] = None
        # Behind the window, a page is of use only to a prefix that ends near by. Unless
        # there was one before, it must not crowd out pages that any prefix needs.
        if behind and page not in self.found:
            self.cached.move_to_end(page, last=False)


PADDED = 256  # positions up to which decoding sequences are padded to one batch


@dataclass
class Alone:
    """A chunk that is attended to by itself: its tokens, and where its keys lie."""

    span: slice  # of the packed tokens
    pages: Tensor | None  # int32; None if the chunk is all there is of its sequence
    length: int  # positions in these pages


@dataclass
class Rows:
    """Where the layers of one group find everything in this step."""

    slots: Tensor  # int64 [T], page * page_size + place in it of each new token
    queries: Tensor  # int64, the only new tokens of sequences that form one batch
    pages: Tensor  # int32 [queries, P], these sequences' from the first one in use
    hidden: Tensor  # bool [queries, S], what they must not see
    alone: list[Alone]


READ = 4096  # positions up to which decodes are read together


def alike(lengths: ndarray) -> Iterator[ndarray]:
    """The rows of ``lengths`` [T] in batches, so that padding at most doubles one."""
    order = np.argsort(lengths, kind="stable")
    start = 0
    while start < len(order):
        longest = max(64, 2 * lengths[order[start]])  # below 64 a call costs more
        stop = np.searchsorted(lengths[order], longest, "right")
        stop = min(stop, start + max(1, READ // longest))
        yield order[start:stop]
        start = stop


class Gathered(NamedTuple):
    """Where some decodes find their keys in a layer of the pool, seen as [rows, D]."""

    rows: ndarray  # of the packed tokens, n of them
    cells: ndarray  # int64 [n, K, S]
    hidden: ndarray | None  # bool [n, 1, 1, S]


class PagedStep(DecodeStep):
    """One forward pass over a paged cache: writes what is new, attends over all."""

    def __init__(self, cache: "PagedCache", chunks: Sequence[Chunk]) -> None:
        super().__init__(chunks, cache.k)
        self.cache = cache

    @cached_property
    def starts(self) -> Tensor:
        """int32 [B], tokens before this step."""
        return torch.tensor([c.start for c in self.chunks], dtype=torch.int32)

    @cached_property
    def lengths(self) -> Tensor:
        """int32 [B], tokens in this step."""
        return torch.tensor([c.length for c in self.chunks], dtype=torch.int32)

    @cached_property
    def rows(self) -> list[Rows]:
        """What `attend` needs to know of each group of layers."""
        windows = enumerate(self.cache.manager.windows)
        return [self._rows(group, window) for group, window in windows]

    @cached_property
    def gathered(self) -> list[tuple[ndarray, list[Gathered]]]:
        """What `extend` needs to know of each group: where to write, and to read."""
        windows = enumerate(self.cache.manager.windows)
        return [self._gathered(group, window) for group, window in windows]

    def extend(self, layer: int, k: ndarray, v: ndarray) -> Iterable[Read]:
        """Store k and v float32 [T, K, D]; what the tokens attend to, new and old."""
        group, place = self.cache.places[layer]
        slots, parts = self.gathered[group]
        keys, values = self.cache.arrays[place]
        keys[slots], values[slots] = k, v
        for rows, cells, hidden in parts:
            yield Read(rows, keys.take(cells, 0), values.take(cells, 0), hidden)

    def _gathered(
        self, group: int, window: int | None
    ) -> tuple[ndarray, list[Gathered]]:
        manager, heads = self.cache.manager, self.cache.k.shape[3]
        size = manager.page_size
        last = np.array([chunk.start for chunk in self.chunks])
        oldest = np.maximum(last + 1 - window, 0) if window else np.zeros_like(last)
        tables = [manager.table(chunk.sequence) for chunk in self.chunks]
        firsts = np.array([table.first[group] for table in tables])
        counts = last // size + 1 - firsts
        pages = np.zeros((len(tables), counts.max()), np.int64)
        for row, (table, first, count) in enumerate(
            zip(tables, firsts, counts, strict=True)
        ):
            pages[row, :count] = table.groups[group][first : first + count]

        def find(rows: ndarray, positions: ndarray) -> ndarray:
            page = pages[rows[:, None], positions // size - firsts[rows, None]]
            place = page * size + positions % size  # [n, S]
            return place[:, None] * heads + np.arange(heads)[:, None]  # [n, K, S]

        parts = []
        lengths = last + 1 - oldest
        for rows in alike(lengths):
            positions = oldest[rows, None] + np.arange(lengths[rows].max())
            ends = last[rows, None]
            hidden = (positions > ends)[:, None, None]
            # What is hidden gets weight 0 and must be a number: the row's newest.
            cells = find(rows, np.minimum(positions, ends))
            parts.append(Gathered(rows, cells, hidden if hidden.any() else None))
        return find(np.arange(len(last)), last[:, None])[..., 0], parts

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        window: int | None,
    ) -> Tensor:
        """q [T, H, D], k and v [T, K, D] of the chunks in their order -> [T, H, D].

        Raises ValueError if T is not the sum of the chunks' lengths.
        """
        if q.shape[0] != self.num_tokens:
            raise ValueError(
                f"{q.shape[0]} packed tokens; expected {self.num_tokens}, the sum of "
                "the chunks' lengths"
            )
        group, place = self.cache.places[layer]
        rows = self.rows[group]
        keys, values = self.cache.k[place], self.cache.v[place]
        keys.flatten(0, 1).index_copy_(0, rows.slots, k.to(keys.dtype))
        values.flatten(0, 1).index_copy_(0, rows.slots, v.to(values.dtype))
        out = torch.empty_like(q)
        if len(rows.queries):
            k_all = gather(keys, rows.pages)  # [queries, S, K, D]
            v_all = gather(values, rows.pages)
            # A page's rest may hold anything, and 0 times NaN is NaN.
            v_all.masked_fill_(rows.hidden[..., None, None], 0)
            out[rows.queries] = decode_attention(
                q[rows.queries],
                k_all.transpose(1, 2),
                v_all.transpose(1, 2),
                sinks,
                rows.hidden[:, None, None],
            )
        for chunk in rows.alone:
            k_all, v_all = k[chunk.span], v[chunk.span]
            if chunk.pages is not None:
                k_all = gather(keys, chunk.pages)[: chunk.length]
                v_all = gather(values, chunk.pages)[: chunk.length]
            out[chunk.span] = attention(
                q[chunk.span], k_all, v_all, sinks, window=window
            )
        return out

    def _rows(self, group: int, window: int | None) -> Rows:
        manager, device = self.cache.manager, self.cache.k.device
        size = manager.page_size
        tables, offsets = [], []
        for chunk in self.chunks:
            table = manager.table(chunk.sequence)
            first, stop = table.first[group], -(-(chunk.start + chunk.length) // size)
            pages = table.groups[group][first:stop]
            tables.append(torch.frombuffer(pages, dtype=torch.int32))
            offsets.append(first * size)
        padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        offset = torch.tensor(offsets, dtype=torch.int32)

        ends = self.lengths.cumsum(0)
        owner = torch.arange(len(self.chunks)).repeat_interleave(self.lengths)  # [T]
        begin = self.starts - (ends - self.lengths)
        place = torch.arange(len(owner)) + (begin - offset)[owner]  # in the row's pages
        slots = padded[owner, place // size].long() * size + place % size

        batch, alone = [], []
        for number, (chunk, end) in enumerate(
            zip(self.chunks, ends.tolist(), strict=True)
        ):
            length = chunk.start + chunk.length - offsets[number]
            if chunk.length == 1 and length <= PADDED:
                batch.append(number)
                continue
            span = slice(end - chunk.length, end)
            live = None if chunk.start == 0 else tables[number].to(device)
            alone.append(Alone(span, live, length))
        rows = torch.tensor(batch, dtype=torch.int64)
        width = max((len(tables[number]) for number in batch), default=0)
        positions = offset[rows, None] + torch.arange(width * size)
        return Rows(
            slots=slots.to(device),
            queries=(ends[rows] - 1).to(device),
            pages=padded[rows, :width].to(device),
            hidden=~visible(self.starts[rows], positions, window).to(device),
            alone=alone,
        )


def gather(x: Tensor, pages: Tensor) -> Tensor:
    """x [num_pages, page_size, K, D], pages [..., P] -> [..., P*page_size, K, D]."""
    # index_select copies whole pages; indexing with a tensor is three times as slow.
    found = x.index_select(0, pages.flatten())
    return found.view(*pages.shape[:-1], -1, *x.shape[2:])


def page_bytes(config: ModelConfig, page_size: int, itemsize: int) -> int:
    """Bytes of a page: keys and values of the larger group of layers."""
    layers = max(Counter(config.layer_types).values())
    numbers = config.num_key_value_heads * config.head_dim
    return 2 * layers * page_size * numbers * itemsize


class PagedCache:
    """Keys and values of many sequences in the pages of one pool.

    ``num_pages`` or ``max_bytes`` says how large it is. A page holds ``page_size``
    positions of all full or of all sliding layers, whichever a sequence needs next:
    ``k`` and ``v`` are [layers of a page, num_pages, page_size, K, D]. ``share`` and
    ``max_chunk`` are those of `PageManager`. Raises ValueError for sizes that hold
    nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int | None = None,
        max_bytes: int | None = None,
        page_size: int = 16,
        share: bool = True,
        max_chunk: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        if (num_pages is None) == (max_bytes is None):
            raise ValueError(
                f"num_pages is {num_pages} and max_bytes {max_bytes}; expected one of "
                "them"
            )
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; expected at least 1")
        windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
        counts = [0, 0]
        self.places = []  # layer -> (group, its place in a page)
        for window in windows:
            group = int(window is not None)
            self.places.append((group, counts[group]))
            counts[group] += 1
        row = page_size, config.num_key_value_heads, config.head_dim
        self.page_nbytes = page_bytes(config, page_size, dtype.itemsize)
        if max_bytes is not None:
            num_pages = max_bytes // self.page_nbytes
        if not num_pages:
            given = f"num_pages is {num_pages}"
            if max_bytes is not None:
                given = f"the room for pages is {max_bytes} bytes"
            raise ValueError(
                f"{given}; expected at least one page of {self.page_nbytes} bytes"
            )
        window = config.sliding_window if counts[1] else None
        self.manager = PageManager(
            num_pages, page_size, window=window, share=share, max_chunk=max_chunk
        )
        shape = (2, max(counts), num_pages, *row)
        self.k, self.v = torch.zeros(shape, dtype=dtype, device=device)

    @cached_property
    def arrays(self) -> list[tuple[ndarray, ndarray]]:
        """``k`` and ``v`` for NumPy, each place as [rows, D] in the same memory.

        Only float32 on a CPU has it.
        """
        dim = self.k.shape[-1]
        return [
            (k.numpy().reshape(-1, dim), v.numpy().reshape(-1, dim))
            for k, v in zip(self.k, self.v, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, used or not."""
        return self.k.nbytes + self.v.nbytes

    def step(self, chunks: Sequence[Chunk]) -> PagedStep:
        """What the model attends with in one forward pass over ``chunks``.

        Raises ValueError for chunks that do not start where their sequence ends, or
        that no room was made for, or of unknown sequences.
        """
        if not chunks:
            raise ValueError("a step without chunks; expected at least one")
        if len({chunk.sequence for chunk in chunks}) < len(chunks):
            raise ValueError("a sequence has two chunks in one step; expected one")
        for chunk in chunks:
            table = self.manager.table(chunk.sequence)
            room = len(table.groups[0]) * self.manager.page_size
            end = chunk.start + chunk.length
            if chunk.start != table.computed or not chunk.start < end <= room:
                raise ValueError(
                    f"{chunk}: expected one that starts at {table.computed}, where its "
                    f"sequence ends, and stops by {room}, up to where it has room"
                )
        self.copy_pages()
        return PagedStep(self, chunks)

    def copy_pages(self) -> None:
        """Make the copies that the manager has promised, before anything is written."""
        for source, target in self.manager.take_copies():
            self.k[:, target] = self.k[:, source]
            self.v[:, target] = self.v[:, source]
