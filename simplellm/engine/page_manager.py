"""Who gets which page of the KV cache: plain Python, which knows no tensors.

The memory itself is `KVPool`'s, which knows no hashes and no reference counts.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256

from simplellm.engine.page_pool import NULL, PagePool, PageTable


def hash_page(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Names a full page by its tokens and, through ``parent``, all before them."""
    return sha256(parent + array("q", tokens).tobytes()).digest()


class PageManager(PagePool):
    """Which page belongs to whom. Plain Python, no tensors.

    A sequence is a number of the caller's choice. Its life: `add`; for every step
    `allocate`, the forward pass, `commit`; `remove`.
    """

    def _forget_hash(self, page: int) -> None:
        """A page that will be written to cannot be found by its tokens any more."""
        if page in self.hash_of:
            del self.page_of[self.hash_of.pop(page)]
            self.kept_longer.discard(page)

    def _take(self) -> int:
        """A page for new content, with one user; evicts if none is free."""
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.cached.popitem(last=False)
            self._forget_hash(page)
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
        if page not in self.hash_of:
            self.free.append(page)
            return
        self.cached[page] = None
        # A page behind the window helps only prompts that end near it: it is evicted
        # before all others, unless one has ended there.
        if behind and page not in self.kept_longer:
            self.cached.move_to_end(page, last=False)

    def _first_page(self, length: int, window: int | None) -> int:
        """The first page that the token at position ``length`` can see."""
        return 0 if window is None else max(0, length + 1 - window) // self.page_size

    def _hash_full_pages(self, table: PageTable, tokens: Sequence[int]) -> None:
        size = self.page_size
        for index in range(len(table.page_hashes), table.num_computed_tokens // size):
            part = tokens[index * size : (index + 1) * size]
            if part[-1] < 0:  # not known yet: the page gets its name the next time
                return
            parent = table.page_hashes[-1] if table.page_hashes else b""
            digest = hash_page(parent, part)
            table.page_hashes.append(digest)
            for group, pages in enumerate(table.groups):
                name = (group, digest)
                # Whoever computed the same page first has the name.
                if name not in self.page_of and pages[index] != NULL:
                    self.page_of[name] = pages[index]
                    self.hash_of[pages[index]] = name
                    end = table.prompt_pages
                    near = self._first_page(end * size, self.windows[group])
                    if near <= index < end:
                        self.kept_longer.add(pages[index])

    def _cached_prefix(self, tokens: Sequence[int]) -> list[bytes]:
        """The digests of the longest prefix that can be taken from cached pages."""
        size, page_hashes, usable = self.page_size, [], 0
        runs = [0] * len(self.windows)  # pages in a row, up to here, of each group
        digest = b""
        for end in range(size, len(tokens) if self.enable_caching else 0, size):
            digest = hash_page(digest, tokens[end - size : end])
            if (0, digest) not in self.page_of:
                break
            page_hashes.append(digest)
            for group in range(len(runs)):
                is_cached = (group, digest) in self.page_of
                runs[group] = runs[group] + 1 if is_cached else 0
            if all(
                run >= len(page_hashes) - self._first_page(end, window)
                for run, window in zip(runs, self.windows, strict=True)
            ):
                usable = len(page_hashes)
        return page_hashes[:usable]

    def add(self, sequence: int, tokens: Sequence[int]) -> int:
        """Register a sequence; returns how many of its first tokens are cached.

        At least one token is always left to compute.
        """
        assert sequence not in self.tables and 1 <= len(tokens) <= self.max_tokens
        size, page_hashes = self.page_size, self._cached_prefix(tokens)
        groups, firsts = [], []
        for group, window in enumerate(self.windows):
            first = self._first_page(len(page_hashes) * size, window)
            live = [self.page_of[group, digest] for digest in page_hashes[first:]]
            for page in live:
                self._hold(page)
            self.kept_longer.update(live)
            groups.append(array("i", [NULL] * first + live))
            firsts.append(first)
        computed = len(page_hashes) * size
        table = PageTable(groups, firsts, computed, page_hashes, len(tokens) // size)
        self.tables[sequence] = table
        return computed

    def commit(self, sequence: int, tokens: Sequence[int], length: int) -> None:
        """The keys and values of the first ``length`` of ``tokens`` are computed now.

        Full pages become shareable, pages behind the window are given back. The last
        token may be negative, which means that it is not known yet.
        """
        table = self.tables[sequence]
        if table.num_computed_tokens <= length <= table.settled:
            table.num_computed_tokens = length
            return
        most = min(len(table.groups[0]) * self.page_size, len(tokens))
        assert table.num_computed_tokens <= length <= most, (sequence, length)
        table.num_computed_tokens = length
        if self.enable_caching and length // self.page_size > len(table.page_hashes):
            self._hash_full_pages(table, tokens)
        for group, window in enumerate(self.windows):
            first = self._first_page(length, window)
            if first == table.first[group]:
                continue
            pages = table.groups[group]
            for index in range(table.first[group], first):
                self._release(pages[index], behind=True)
                pages[index] = NULL
            table.first[group] = first

    def fork(self, parent: int, child: int) -> None:
        """Start ``child`` with all that is computed of ``parent``, in shared pages."""
        table = self.tables[parent]
        table.settled = 0
        count = -(-table.num_computed_tokens // self.page_size)
        groups = [pages[:count] for pages in table.groups]
        for pages, first in zip(groups, table.first, strict=True):
            for page in pages[first:]:
                self._hold(page)
        copied = (
            list(table.first),
            table.num_computed_tokens,
            list(table.page_hashes),
            table.prompt_pages,
        )
        self.tables[child] = PageTable(groups, *copied)

    def remove(self, sequence: int) -> None:
        """Forget a sequence. What others may share stays until it is evicted."""
        table = self.tables.pop(sequence)
        # Last page first: a prefix is of use without its end, not the other way round.
        for index in reversed(range(len(table.groups[0]))):
            for pages in table.groups:
                if pages[index] != NULL:
                    self._release(pages[index])

    def take_copies(self) -> list[tuple[int, int]]:
        """Pages to copy, (from, to) in this order, before the next step writes."""
        copies, self._copies = self._copies, []
        return copies

    def truncate(self, sequence: int, length: int) -> bool:
        """Take back what is computed beyond the first ``length`` tokens.

        False, and nothing changed, if a page that the token at ``length`` would see has
        fallen behind the window already.
        """
        table = self.tables[sequence]
        assert 0 < length <= table.num_computed_tokens, (sequence, length)
        firsts = [self._first_page(length, window) for window in self.windows]
        if firsts != table.first:
            return False
        count = -(-length // self.page_size)
        for pages in table.groups:
            for page in reversed(pages[count:]):
                self._release(page)
            del pages[count:]
        table.num_computed_tokens, table.settled = length, 0
        del table.page_hashes[length // self.page_size :]
        return True

    def allocate(self, sequence: int, length: int) -> bool:
        """Make room for ``length`` tokens; False, and nothing changed, without space.

        A shared page that the next token would be written to is exchanged for a copy.
        """
        table = self.tables[sequence]
        if length <= table.settled:
            return True
        assert length <= self.max_tokens, (sequence, length)
        count = -(-length // self.page_size)
        open_page, filled = divmod(table.num_computed_tokens, self.page_size)
        written = table.groups if filled and length > table.num_computed_tokens else []
        split = [pages for pages in written if self.references[pages[open_page]] > 1]
        missing = max(0, count - len(table.groups[0])) * len(self.windows)
        needed = missing + len(split)
        if needed and needed > self.free_pages:
            return False
        for pages in written:
            if self.references[pages[open_page]] > 1:
                copy = self._take()
                self._copies.append((pages[open_page], copy))
                self._release(pages[open_page])
                pages[open_page] = copy
            else:  # it has a name if it was full before a `truncate`
                self._forget_hash(pages[open_page])
        for pages in table.groups if missing else ():
            while len(pages) < count:
                pages.append(self._take())
        if length > table.num_computed_tokens:
            table.settled = self._settled(table)
        return True
