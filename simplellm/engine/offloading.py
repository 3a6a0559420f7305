"""Evicted pages go to the memory of the host, and come back when a prefix hits them."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from simplellm.engine.page_manager import PageManager


class OffloadingPageManager(PageManager):
    """A `PageManager` with ``host_pages`` more pages, which lie in the host's memory.

    They are numbered after the others, no sequence holds one, and `take_copies` says
    what is brought to them and back. What came back stays there too: once more evicted,
    it needs no copy. Of the host's pages, too, the longest unused is the next victim.
    """

    def __init__(
        self, num_pages: int, page_size: int, *, host_pages: int, **rules: Any
    ) -> None:
        super().__init__(num_pages, page_size, **rules)
        self.num_host_pages = host_pages
        self.host_free = list(range(num_pages, num_pages + host_pages))[::-1]
        # The host's page of each name, the next victim first. `page_of` has it only
        # where no page of the device has that name.
        self.on_host: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self.passed: set[int] = set()  # named pages that fell behind the window

    def _release(self, page: int, behind: bool = False) -> None:
        super()._release(page, behind)
        if behind and page in self.hash_of and self.references[page] == 0:
            self.passed.add(page)

    def _forget_hash(self, page: int) -> None:
        name = self.hash_of.get(page)
        super()._forget_hash(page)
        self.passed.discard(page)
        if name is not None and name in self.on_host:
            self.page_of[name] = self.on_host[name]

    def _take(self) -> int:
        if not self.free:
            victim = next(iter(self.cached))
            # Behind the window, only what a prefix has needed is worth its bytes.
            if victim not in self.passed or victim in self.kept_longer:
                self._offload(victim)
        return super()._take()

    def _offload(self, page: int) -> None:
        """Bring a page to the host, unless it's there; evicts if none is free."""
        name = self.hash_of[page]
        if name in self.on_host:
            self.on_host.move_to_end(name)
            return
        if self.host_free:
            there = self.host_free.pop()
        elif self.on_host:
            old, there = self.on_host.popitem(last=False)
            if self.page_of[old] == there:
                del self.page_of[old]
        else:  # all of them are on their way back
            return
        self.on_host[name] = there
        self._copies.append((page, there))

    def _cached_prefix(self, tokens: Sequence[int]) -> list[bytes]:
        """As in `PageManager`; what lies on the host of it gets pages of the device."""
        page_hashes = super()._cached_prefix(tokens)
        names = []
        for group, window in enumerate(self.windows):
            first = self._first_page(len(page_hashes) * self.page_size, window)
            names += [(group, digest) for digest in page_hashes[first:]]
        missing = [name for name in names if self.page_of[name] >= self.num_pages]
        if not missing:
            return page_hashes
        held = [self.page_of[n] for n in names if self.page_of[n] < self.num_pages]
        for page in held:  # so that nothing of the prefix is evicted for the rest of it
            self._hold(page)
        if len(missing) > self.free_pages:  # nor is there room to compute it
            page_hashes, missing = [], []
        sources = [self.on_host.pop(name) for name in missing]
        for name, source in zip(missing, sources, strict=True):
            page = self._take()
            self._copies.append((source, page))
            self.page_of[name], self.hash_of[page] = page, name
            held.append(page)
            self.loaded_tokens += self.page_size if name[0] == 0 else 0
        self.on_host.update(zip(missing, sources, strict=True))
        for page in reversed(held):
            self._release(page)
        return page_hashes
