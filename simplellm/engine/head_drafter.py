"""Drafts of an EAGLE-3 head, for all requests of a step at once.

The head is a layer more: its keys and values lie in pages of its own, under the numbers
of the model's. After each step it reads what the model made of the step's tokens and
which tokens follow them; then it drafts, a token of every request at a time. All of it
happens on the device, without waiting for what the step has sampled.

T tokens of a step, n requests that it samples for, K kv heads, D head_dim.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from simplellm.base.host_memory import pinned, upload
from simplellm.base.sample_position import SamplePosition
from simplellm.engine.graphs import (
    MOST_VERIFIED,
    CaptureError,
    CaptureShape,
    capture_graph,
)
from simplellm.engine.host_proposer import DraftTask, HostProposer
from simplellm.engine.runner import Runner
from simplellm.engine.scheduler import ScheduledChunk
from simplellm.engine.step_times import fastest
from simplellm.engine.verify_chunks import PlaceholderChunk
from simplellm.model.batch import Batch, KVGroup
from simplellm.model.eagle import Head, with_taps
from simplellm.model.kv_pool import KVPool
from simplellm.model.model import Model
from simplellm.model.ops import Ops


class AuxHiddenStates:
    """The states that a head reads, of the tokens of the step under way.

    They are kept if they are ``wanted``: a graph that is recorded does what was wanted
    then.
    """

    def __init__(self, model: Model, layers: Sequence[int], most: int) -> None:
        self.wanted = True
        width = model.config.hidden_size
        sizes = most, len(layers) * width
        self.states = torch.zeros(sizes, dtype=model.dtype, device=model.device)
        parts = [*zip(layers, self.states.split(width, dim=1), strict=True)]
        own = {layer: [part for n, part in parts if n == layer] for layer in {*layers}}
        taps = {layer + 1: partial(self.put, some) for layer, some in own.items()}
        model.ops = with_taps(model, taps)

    def put(self, parts: Sequence[Tensor], x: Tensor) -> None:
        """Keep what a layer gave, as far as a step of the engine has tokens."""
        for part in parts if self.wanted else ():
            count = min(len(x), len(part))
            part[:count] = x[:count]


def drafts_match(drafts: Tensor, sampled: Tensor) -> Tensor:
    """Which drafts are the tokens that were sampled at their positions."""
    return drafts == sampled


class HeadProposer(HostProposer):
    """A head with its pages, which drafts after each step.

    ``aux`` has the states of the step's tokens [T, 3 * hidden]; ``ops`` compute, and
    attend with room for ``rows`` requests. ``pool`` has keys and values of one layer,
    the head's. At most ``most`` drafts are made for a request.
    """

    def __init__(
        self,
        head: Head,
        ops: Ops,
        aux: AuxHiddenStates,
        pool: KVPool,
        rows: int,
        width: int,
        most: int,
    ) -> None:
        device, empty, config = aux.states.device, head.fc.new_zeros, head.config
        super().__init__(rows, pool.page_size, device)
        self.head, self.ops, self.aux, self.most = head, ops, aux, most
        self.states, self.pool = aux.states, pool
        self.cache = pool.keys[0], pool.values[0]
        self.count = most

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def on_host(*shape: int) -> list[Tensor]:  # one may be on its way
            return [pinned(shape, torch.int32, device) for _ in range(2)]

        self.columns = numbers(4, rows)  # see `DraftTask`
        # What the first draft is made of.
        self.q = empty(rows, config.num_attention_heads, config.head_dim)
        self.residual = empty(rows, config.hidden_size)
        self.positions = numbers(rows)
        self.tables = numbers(rows, width)
        self.width = width  # of it, that the step has
        self.zeros = numbers(rows)
        self.starts = torch.arange(rows + 1, device=device).int()
        self.offsets = torch.arange(most, device=device).int()
        # Of each request: how many drafts were right, the token after these, and the
        # new drafts. `row_of` says where they are, by the requests' numbers.
        self.results = numbers(rows, 2 + most)
        self.row_of: dict[int, int] = {}
        self.host = on_host(rows, 2 + most)
        # What the device computes now, and by which graph, if by any.
        self.batch: Batch
        self.shape: CaptureShape | None = None
        # Of each token of a step: its request's row in the results of the step before,
        # or -1; if it has one, where it stands among its chunk's; its row of the batch.
        # And of each row of the batch: its request's row in the results, or -1.
        longest = max(len(self.states), MOST_VERIFIED, rows)
        self.link_staging = on_host(longest, 4)
        self.links = numbers(longest, 4) - 1
        self.linked = False  # whether any token of the step has a row
        self.resolve_graphs: dict[CaptureShape, Callable[[], None]] = {}
        self.read_graphs: dict[CaptureShape, Callable[[], None]] = {}
        # By numbers of requests, of which `sizes` are captured, and of drafts.
        self.draft_graphs: dict[tuple[int, int], Callable[[], None]] = {}
        self.sizes: Sequence[int] = ()

    # On the device

    def _read(
        self, batch: Batch, following: Tensor, sampled: Tensor, count: int
    ) -> None:
        """Read the step's tokens, and get ready to draft for ``count`` requests.

        ``following`` [T] are the tokens after each.
        """
        tokens, ops = batch.tokens, self.ops
        x = self.head.combine(self.states[: len(tokens)])
        residual, qkv = self.head.inputs(ops, x, following)
        group, where = batch.groups[0], (batch.positions, *self.cache)
        q = ops.rope_and_cache(qkv, self.head.attn, *where, group.slots)
        if count == 0:
            return
        first, checked, owners, _ = self.columns[:, :count]
        last = min(len(batch.logits_indices), len(sampled)) - 1
        samples = (first[:, None] + self.offsets).clamp(max=last)
        after = (batch.logits_indices[samples] + 1).clamp(max=len(tokens) - 1)
        right = drafts_match(tokens[after], sampled[samples])
        right &= self.offsets < checked[:, None]
        accepted = right.int().cumprod(1).sum(1, dtype=torch.int32)
        ends = (first + accepted).clamp(max=last)
        at = batch.logits_indices[ends]
        self.results[:count, 0], self.results[:count, 1] = accepted, sampled[ends]
        self.q[:count], self.residual[:count] = q[at], residual[at]
        self.positions[:count] = batch.positions[at]
        self.tables[:count, : group.tables.shape[1]] = group.tables[owners]

    def _draft(self, count: int, number: int) -> None:
        """A ``number`` of drafts for each of ``count`` requests, one after another."""
        size, attn, cache = self.page_size, self.head.attn, self.cache
        capacity, tables = self.columns[3, :count], self.tables[:count, : self.width]
        # Of each draft: where the token lies that it follows.
        positions = self.positions[:count] + self.offsets[:number, None]
        lengths = torch.minimum(positions + 1, capacity)
        positions = positions.clamp(max=len(attn.cos) - 1)
        index = (positions // size).clamp(max=self.width - 1).long()
        pages = tables.T.gather(0, index)
        # Beyond the pages that there are, a draft's keys are not written.
        slots = torch.where(positions < capacity, pages * size + positions % size, -1)
        q, x = self.q[:count], self.residual[:count]
        for turn in range(number):
            group = KVGroup(
                slots=self.zeros[:0],
                tables=tables,
                offsets=self.zeros[:count],
                lengths=lengths[turn],
                query_start_loc=self.starts[: count + 1],
                decodes=count,
                window=None,
                page_size=size,
            )
            out = self.ops.attend(q, *cache, group, None)
            normed, hidden = self.head.outputs(self.ops, x, out)
            tokens = self.head.draft(normed)
            self.results[:count, 2 + turn] = tokens
            if turn + 1 < number:  # the next one reads it
                x, qkv = self.head.inputs(self.ops, hidden, tokens)
                where = positions[turn + 1], *cache, slots[turn + 1]
                q = self.ops.rope_and_cache(qkv, attn, *where)

    def _resolve(self, batch: Batch) -> None:
        """Write tokens and positions that depend on how many drafts were right.

        ``batch`` has the first positions that there may be.
        """
        count, results = len(batch.tokens), self.results
        source, place, owners, _ = self.links[:count].long().unbind(1)
        rows = self.links[: len(batch.lengths), 3].long()
        accepted, linked = results[:, 0], source >= 0
        shifts = torch.where(linked, accepted[source.clamp(min=0)], 0)
        tokens = results[source.clamp(min=0), 1 + place.clamp(min=0)]
        batch.tokens.copy_(torch.where(linked, tokens, batch.tokens))
        batch.positions.add_(shifts)
        batch.lengths.add_(torch.where(rows >= 0, accepted[rows.clamp(min=0)], 0))
        owners = owners.clamp(min=0)
        for group in batch.groups:
            size, width = group.page_size, group.tables.shape[1]
            index = batch.positions - group.offsets[owners]
            pages = group.tables[owners, (index // size).clamp(0, width - 1)]
            slots = pages * size + index % size
            group.slots.copy_(torch.where(linked, slots, group.slots))

    @torch.inference_mode()
    def capture(
        self,
        views: Mapping[CaptureShape, Batch],
        sampled: Tensor,
        sizes: Sequence[int],
        numbers: Sequence[int],
    ) -> None:
        """Record what is done after captured steps without prompts.

        ``views`` are their batches, ``sizes`` numbers of requests, in ascending order,
        and ``numbers`` those of drafts that may be made for each.
        """
        pool: Any = None

        def recorded(run: Callable[[], None]) -> Callable[[], None]:
            nonlocal pool
            run()  # what it needs once, it takes now
            graph = capture_graph(run, pool)
            pool = pool or graph.pool()
            replay: Callable[[], None] = graph.replay
            return replay

        self.columns.zero_()
        self.links.fill_(-1)
        try:
            for made in sorted(product(sizes, numbers), reverse=True):
                self.draft_graphs[made] = recorded(partial(self._draft, *made))
            self.sizes = sizes
            for shape, batch in sorted(views.items(), reverse=True):
                batch.pad()
                self.resolve_graphs[shape] = recorded(partial(self._resolve, batch))
                count = len(batch.tokens)
                following = sampled[:count]
                run = partial(self._read, batch, following, sampled, count)
                self.read_graphs[shape] = recorded(run)
        except (CaptureError, torch.OutOfMemoryError):
            return  # other steps start their kernels one by one

    # From the host

    def begin(self, scheduled: Sequence[ScheduledChunk]) -> bool:
        """Whether the coming step will be read, whose states are kept then."""
        self.linked, read_before = False, self.aux.wanted
        self.aux.wanted = self.reads(scheduled)
        if read_before and not self.aux.wanted and self.states.is_cuda:
            # After `_read`, all replays of a step's graph take 2 % longer on an H200,
            # until a product of one row runs outside a graph. Why isn't known.
            self.head.combine(self.states[:1])
        return self.aux.wanted

    def link_placeholders(
        self, scheduled: Sequence[ScheduledChunk], starts: np.ndarray
    ) -> None:
        """Say which requests go on from where the step before has got on the device.

        ``starts`` is the batch's query_start_loc.
        """
        waiting = [isinstance(chunk, PlaceholderChunk) for chunk in scheduled]
        self.linked = any(waiting)
        if not self.linked:
            return
        pairs, row_of = zip(waiting, scheduled, strict=True), self.row_of
        rows = [row_of[c.request.request_id] if linked else -1 for linked, c in pairs]
        staging = self.link_staging[self.index ^ 1]
        links, lengths = staging.numpy(), [chunk.length for chunk in scheduled]
        links[:] = -1
        source, count = np.repeat(rows, lengths), sum(lengths)
        begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
        owners = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        links[:count, 0] = source
        links[:count, 1] = np.where(source < 0, 0, np.arange(count) - begins)
        links[:count, 2] = owners
        links[owners, 3] = source
        self.links.copy_(staging, non_blocking=True)

    def prepare(
        self,
        batch: Batch,
        copies: Sequence[tuple[int, int]],
        shape: CaptureShape | None,
    ) -> None:
        """Before a step: copy pages as the model does, and complete its ``batch``.

        ``shape`` is that of its graph, if it has one.
        """
        if copies:
            self.pool.copy(copies)
        self.batch, self.shape = batch, shape
        if self.linked and shape is not None and shape in self.resolve_graphs:
            self.resolve_graphs[shape]()
        elif self.linked:
            self._resolve(batch)

    def output_lengths(
        self, requests: Sequence[SamplePosition], lengths: Tensor
    ) -> Tensor:
        """How many tokens ``requests`` have where the step samples, int64 [S].

        ``lengths`` is what the host says, which may know the drafts that were right.
        """
        if not self.linked:
            return lengths
        batch, prompts = self.batch, [request.num_prompt for request in requests]
        ends = batch.logits_indices[: len(lengths)].long()
        return batch.positions[ends] + 1 - upload(prompts, torch.int64, lengths.device)

    def propose(
        self, runner: Runner, samples: Sequence[SamplePosition]
    ) -> Callable[[], dict[int, int]] | None:
        """Read the runner's step, and draft after it as much as `count` says.

        ``samples`` are where it has sampled. Once the device is done, what is returned
        hands the drafts out; see `hand_out`.
        """
        self.row_of = {}
        if not self.aux.wanted:
            return None
        task, drafted = self.task(runner.step, runner.manager, len(samples))
        self.row_of = {entry.request.request_id: n for n, entry in enumerate(drafted)}
        results = self.draft_after(task, runner.sampled_tokens)
        if not drafted:
            return None
        host = self.host[self.index][: len(drafted)]
        host.copy_(results, non_blocking=True)
        return lambda: self.hand_out(task, drafted, host)

    def draft_after(self, task: DraftTask, sampled: Tensor) -> Tensor:
        """Start a ``task`` after the step that this rank has computed and ``sampled``.

        Returns of each request how many drafts were right, the token after these, and
        its new drafts: int32 [requests, 2 + most], which the next task writes over.
        """
        count, batch, shape = task.requests, self.batch, self.shape
        self.width = batch.groups[0].tables.shape[1]
        if task.columns is not None:
            self.columns.copy_(task.columns, non_blocking=True)
        if shape is not None and shape in self.read_graphs:
            self.read_graphs[shape]()
        else:
            self._read(batch, self._following(task, batch, sampled), sampled, count)
        if count and task.number:
            size = next((size for size in self.sizes if size >= count), count)
            eager = partial(self._draft, count, task.number)
            self.draft_graphs.get((size, task.number), eager)()
        return self.results[:count]

    @staticmethod
    def _following(task: DraftTask, batch: Batch, sampled: Tensor) -> Tensor:
        """The token after each of the step's: in the text, or just sampled."""
        following = batch.tokens.roll(-1).clamp(min=0)
        if task.ends:
            where = upload(task.ends, torch.int64, following.device)
            following[where] = upload(task.following, torch.int32, following.device)
        ends = batch.logits_indices[: task.samples].long()
        following[ends] = sampled[: task.samples]
        return following

    @torch.inference_mode()
    def seconds_per_draft(self) -> dict[int, float]:
        """What a draft takes for so many requests, with nothing in the cache."""
        seconds, most = {}, self.most
        self.columns[:3] = 0
        self.columns[3] = self.page_size
        self.positions.zero_()
        for size in self.sizes or (1,):
            run = self.draft_graphs.get((size, most), partial(self._draft, size, most))
            seconds[size] = fastest(run, self.columns.device) / most
        return seconds
