"""Which pages of the KV cache there are, who holds them, and what they're called.

Bookkeeping only; no tensors. `PageManager` takes, shares and releases pages by them.
"""

from array import array
from collections import OrderedDict
from dataclasses import dataclass

from simplellm.base.config import expect
from simplellm.engine.snapshot import PagesSnapshot

NULL = -1  # in a table, in place of a page that fell behind the window


@dataclass
class PageTable:
    """The pages of one sequence: ``groups[g][i]`` holds positions from i * page_size.

    In the group of the sliding layers the entries before ``first[g]`` are NULL.
    """

    groups: "list[array[int]]"
    first: list[int]
    num_computed_tokens: int  # tokens whose keys and values are in the pages
    page_hashes: list[bytes]  # of the full pages, as far as their tokens are known
    prompt_pages: int  # full pages of the tokens that it began with
    shortened: int = 0  # times that pages were taken back for what was not computed
    # Up to so many tokens, one more changes nothing but their number: there is room in
    # a page that nobody else has, and no page gets full or falls behind the window.
    settled: int = 0


class PagePool:
    """All pages, each of them in use, free or cached, and the tables of sequences.

    A page has room for ``page_size`` positions of one group of layers: the full ones
    or, if ``window`` is given, the sliding ones, of which there may be several groups.
    All ``num_pages`` serve any group.
    With ``enable_caching``, full pages are found again by the tokens they were computed
    from, until they are evicted, the longest unused first. ``max_chunk`` is the most
    tokens that a sequence computes in one step, None any number: the smaller it is, the
    longer a sequence can get. Raises ValueError for fewer pages than a sequence needs.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        window: int | None = None,
        sliding_groups: int = 1,
        enable_caching: bool = True,
        max_chunk: int | None = None,
    ) -> None:
        self.windows = (None,) if window is None else (None, *[window] * sliding_groups)
        least = len(self.windows)
        name = f"the number of pages of {page_size} tokens"
        expected = f"at least {least}: more cache_bytes or num_pages, or a smaller "
        expect(num_pages >= least, name, num_pages, expected + "page_size")
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_caching = enable_caching
        self.max_chunk = max_chunk
        self.tables: dict[int, PageTable] = {}
        self.references = [0] * num_pages
        self.free = list(range(num_pages))[::-1]  # hold nothing that anyone could use
        self.cached: OrderedDict[int, None] = OrderedDict()  # unused, next victim first
        # Prefix-hit pages, or pages the next turn should hit: they keep normal LRU
        # order when they fall behind the window. Others are evicted first.
        self.kept_longer: set[int] = set()
        self.hash_of: dict[int, tuple[int, bytes]] = {}  # page -> (group, digest)
        self.page_of: dict[tuple[int, bytes], int] = {}  # and back
        self._copies: list[tuple[int, int]] = []
        self.loaded_tokens = 0  # of prefixes, whose pages came back from the host
        self.max_tokens = self._longest()

    def _settled(self, table: PageTable) -> int:
        """What ``table.settled`` is once there is room for one more token."""
        size, windows = self.page_size, self.windows
        full = table.num_computed_tokens // size
        if self.enable_caching and len(table.page_hashes) < full:
            return 0  # one still needs a name
        ends = [
            (first + 1) * size + window - 2  # then its first page is behind the window
            for first, window in zip(table.first, windows, strict=True)
            if window is not None
        ]
        return min([(full + 1) * size - 1, *ends])

    def _longest(self) -> int:
        """The most tokens that a sequence can have if it is alone."""
        count = self.num_pages // len(self.windows)
        if self.windows[-1] is not None and self.max_chunk is not None:
            # At worst the oldest position in view is the last one of its page.
            span = self.windows[-1] - 1 + self.max_chunk
            sliding = (span + self.page_size - 2) // self.page_size + 1
            sliding *= len(self.windows) - 1
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

    def snapshot(self) -> PagesSnapshot:
        """Who holds which pages: plain data that nobody changes later."""
        return {
            "num_pages": self.num_pages,
            "page_size": self.page_size,
            "windows": list(self.windows),
            "free": len(self.free),
            "cached": list(self.cached),
            "references": list(self.references),
            "tables": {
                number: [list(pages) for pages in table.groups]
                for number, table in self.tables.items()
            },
        }
