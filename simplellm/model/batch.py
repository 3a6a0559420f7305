"""One step of the engine: all that a forward pass needs beside the weights.

T packed tokens, B sequences, S of them sampling, P pages in a row of a block table.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from simplellm.model.chunks_as_decodes import chunks_as_decodes
from simplellm.model.kv_gather import GatherPlan, plan_gathers


@dataclass(frozen=True, eq=False)
class KVGroup:
    """Where the layers of one kind, full or sliding, find keys and values in a step.

    Rows [0, decodes) are decodes (one token, or padding); rows [decodes, B) are prefill
    chunks. The arrays after ``offsets`` are the same for all groups. Where drafts are
    checked, rows may have more tokens: see ``queries``.
    """

    slots: Tensor  # int32 [T], page * page_size + row to write to; -1 for padding
    tables: Tensor  # int32 [B, P], the block table: pages from the first one in use
    offsets: Tensor  # int32 [B], the position at which the first of them begins
    lengths: Tensor  # int32 [B], positions in the cache after this step; 0 for padding
    query_start_loc: Tensor  # int32 [B + 1], where each sequence's tokens begin
    decodes: int
    window: int | None  # positions that a query sees, itself included; None: all
    page_size: int
    queries: int = 1  # tokens of a decode at most; if more, there are no chunks

    @cached_property
    def chunks(self) -> "KVGroup":
        """The sequences after the decodes, put together once for all layers."""
        names = ("tables", "offsets", "lengths", "query_start_loc")
        rest = {name: getattr(self, name)[self.decodes :] for name in names}
        return replace(self, decodes=0, **rest)

    @cached_property
    def gather_plans(self) -> list[GatherPlan]:
        """What the decodes read, put together once for all layers of the group."""
        arrays = (self.tables, self.offsets, self.lengths)
        rows = (array[: self.decodes] for array in arrays)
        return plan_gathers(*rows, window=self.window, page_size=self.page_size)

    @cached_property
    def by_token(self) -> "KVGroup":
        """The same tokens, each as a decode, if together they read few positions."""
        return replace(self, **chunks_as_decodes(self))


@dataclass(frozen=True, eq=False)
class Batch:
    """The input of every forward pass: views of one flat int32 array.

    One array is one copy to the GPU, always to the same address, where a captured graph
    finds it; it is also all that another process would have to be sent.
    """

    tokens: Tensor  # int32 [T]; -1 - i stands for token i that the step before samples
    positions: Tensor  # int32 [T]
    lengths: Tensor  # int32 [B], as in KVGroup
    query_start_loc: Tensor  # int32 [B + 1], as in KVGroup
    logits_indices: Tensor  # int32 [S], indices of the tokens whose logits are needed
    groups: tuple[KVGroup, ...]  # one for each of the model's windows

    @cached_property
    def num_tokens(self) -> Tensor:
        """int32 [1], how many of the tokens are no padding."""
        return self.query_start_loc[-1:]

    @staticmethod
    def size(tokens: int, sequences: int, pages: int, groups: int) -> int:
        """How many numbers a step of this shape has."""
        shared = 2 * tokens + 3 * sequences + 1
        return shared + groups * (tokens + sequences * (pages + 1))

    @classmethod
    def of(
        cls,
        flat: Any,
        tokens: int,
        sequences: int,
        pages: int,
        decodes: int,
        windows: tuple[int | None, ...],
        page_size: int,
        queries: int = 1,
    ) -> "Batch":
        """The views of ``flat``, an int32 array or tensor, that make up a step."""
        offset = 0

        def take(*shape: int) -> Any:
            nonlocal offset
            count = math.prod(shape)
            offset += count
            return flat[offset - count : offset].reshape(shape)

        ids, positions = take(tokens), take(tokens)
        lengths, query_start_loc = take(sequences), take(sequences + 1)
        logits_indices = take(sequences)
        groups = tuple(
            KVGroup(
                slots=take(tokens),
                tables=take(sequences, pages),
                offsets=take(sequences),
                lengths=lengths,
                query_start_loc=query_start_loc,
                decodes=decodes,
                window=window,
                page_size=page_size,
                queries=queries,
            )
            for window in windows
        )
        return cls(ids, positions, lengths, query_start_loc, logits_indices, groups)

    def pad(self) -> None:
        """Make every row a padding row: of no length, and written nowhere."""
        self.tokens[:] = self.positions[:] = self.lengths[:] = 0
        self.query_start_loc[:] = self.logits_indices[:] = 0
        for group in self.groups:
            group.slots[:] = -1
            group.tables[:] = group.offsets[:] = 0
