"""Whether the books of a `PageManager` agree with each other. For tests and lessons."""

from simplellm.engine.offloading import OffloadingPageManager
from simplellm.engine.page_manager import PageManager
from simplellm.engine.page_pool import NULL


def check_integrity(manager: PageManager) -> None:
    """Raise AssertionError if anything contradicts anything else."""
    held = [0] * manager.num_pages
    homes: dict[int, tuple[int, int]] = {}  # page -> (group, place in its table)
    for sequence, table in manager.tables.items():
        groups = zip(table.groups, manager.windows, strict=True)
        for group, (pages, window) in enumerate(groups):
            first = manager._first_page(table.num_computed_tokens, window)
            assert table.first[group] == first, f"{sequence}: wrong first page"
            assert len(pages) == len(table.groups[0]), f"{sequence}: uneven tables"
            assert len(pages) * manager.page_size >= table.num_computed_tokens
            assert all(page == NULL for page in pages[:first])
            for index, page in enumerate(pages[first:], first):
                assert 0 <= page < manager.num_pages, f"{sequence}: no page {page}"
                held[page] += 1
                home = homes.setdefault(page, (group, index))
                assert home == (group, index), f"page {page} is in two places"
                if index * manager.page_size >= table.num_computed_tokens:
                    assert manager.references[page] == 1, f"page {page} is not private"
                    assert page not in manager.hash_of, f"page {page} is named too soon"
        full = manager.enable_caching * (table.num_computed_tokens // manager.page_size)
        named = len(table.page_hashes)
        # The last token of the last full page may not be known yet.
        assert full - 1 <= named <= full, f"{sequence}: pages without names"
    assert held == manager.references, "reference counts differ from the tables"
    unused = sorted([*manager.free, *manager.cached])
    assert unused == [page for page, count in enumerate(held) if count == 0]
    assert all(page in manager.hash_of for page in manager.cached)
    assert not any(page in manager.hash_of for page in manager.free)
    assert manager.kept_longer <= set(manager.hash_of)
    found = {name: page for page, name in manager.hash_of.items()}
    if isinstance(manager, OffloadingPageManager):
        there = manager.on_host
        last = manager.num_pages + manager.num_host_pages
        hosts = sorted([*manager.host_free, *there.values()])
        assert hosts == [*range(manager.num_pages, last)], "a host's page is lost"
        assert manager.passed <= set(manager.hash_of)
        found = {**there, **found}
    assert manager.page_of == found, "page_of and hash_of disagree"
