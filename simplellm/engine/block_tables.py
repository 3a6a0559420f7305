"""The rows of a step's block tables, kept from step to step as arrays."""

from collections.abc import Sequence

import numpy as np
from numpy import ndarray

from simplellm.engine.page_pool import PageTable


class BlockTables:
    """Which pages the rows of a step read, for each group of layers.

    Most rows are those of the step before: only one whose sequence is another, or has
    other pages, is written anew.
    """

    def __init__(self, rows: int, width: int, groups: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = np.zeros((groups, rows, width), np.int32)
        self.offsets = np.zeros((groups, rows), np.int32)
        self.invalidate()

    def invalidate(self) -> None:
        """Write all rows the next time: pages may have been exchanged."""
        self._held: Sequence[PageTable] = ()  # so that no other gets one's id
        self._keys: list[tuple[int, int, int, int]] = []

    def update(self, tables: Sequence[PageTable]) -> tuple[ndarray, ndarray]:
        """Those of ``tables``, a row each: pages [groups, rows, width], and offsets.

        An offset is the position at which a row's first page begins, [groups, rows].
        """
        keys = [
            (id(table), len(table.groups[0]), table.first[-1], table.shortened)
            for table in tables
        ]
        before, count = self._keys, len(tables)
        if keys != before:
            before = before + [(0, 0, 0, 0)] * (count - len(before))
            pairs = enumerate(zip(keys, before, strict=False))
            for row in [row for row, (key, old) in pairs if key != old]:
                self._write(row, tables[row])
            self._held, self._keys = tables, keys
        return self.pages[:, :count], self.offsets[:, :count]

    def _write(self, row: int, table: PageTable) -> None:
        for group, first in enumerate(table.first):
            held = np.frombuffer(table.groups[group], dtype=np.int32)[first:]
            self.pages[group, row, : len(held)] = held
            self.pages[group, row, len(held) :] = 0
            self.offsets[group, row] = first * self.page_size
