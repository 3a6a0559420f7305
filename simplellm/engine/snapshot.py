"""What an engine says of its requests and pages, as plain data."""

from collections.abc import Sequence
from typing import TypedDict


class RequestSnapshot(TypedDict):
    """A request that waits or runs; counts of tokens but for its id."""

    request_id: int
    prompt: int
    output: int
    computed: int
    preemptions: int


class PagesSnapshot(TypedDict):
    """Who holds which pages."""

    num_pages: int
    page_size: int
    windows: list[int | None]  # of each group of layers
    free: int
    cached: list[int]  # pages of no request, the oldest first
    references: list[int]  # how many requests hold each page
    # Of requests by their ids, each group's pages; as JSON has it, texts.
    tables: dict[int, list[list[int]]]


class Snapshot(TypedDict):
    """An engine between two steps, as plain data."""

    running: list[RequestSnapshot]
    waiting: list[RequestSnapshot]
    pages: PagesSnapshot


def join_pages(every: Sequence[PagesSnapshot]) -> PagesSnapshot:
    """The pages of several as one's, numbered one after the other."""
    whole = every[0]
    for one in every[1:]:
        first = whole["num_pages"]
        for table in one["tables"].values():
            table[:] = [[p + first if p >= 0 else p for p in pages] for pages in table]
        whole["num_pages"] += one["num_pages"]
        whole["free"] += one["free"]
        whole["cached"] += [page + first for page in one["cached"]]
        whole["references"] += one["references"]
        whole["tables"] |= one["tables"]
    return whole
