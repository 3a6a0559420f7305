"""From what the scheduler wants to the tokens that come of it, on the device.

T packed tokens, B sequences, S of them sampling, V vocabulary.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, le
from typing import Any

import torch
from torch import Tensor

from simplellm.base.config import EngineConfig
from simplellm.base.host_memory import fetch, pinned, upload
from simplellm.base.sample_position import SamplePosition, output_lengths
from simplellm.engine.block_tables import BlockTables
from simplellm.engine.graphs import (
    MIXED_SIZES,
    MOST_CHUNKS,
    Agreed,
    CapturedGraph,
    CaptureShape,
    StepUnderWay,
    capture_graphs,
)
from simplellm.engine.input_batch import fill_batch
from simplellm.engine.page_manager import PageManager
from simplellm.engine.ranks import ALONE, ForwardPass, Ranks, TokenChoice
from simplellm.engine.sampler import SamplerOutput, SamplingTensors, TokenCounts, sample
from simplellm.engine.scheduler import ScheduledChunk
from simplellm.engine.step_output import StepOutput, step_output
from simplellm.engine.verify_chunks import has_drafts, num_drafts, step_positions
from simplellm.model.batch import Batch
from simplellm.model.kv_pool import KVPool
from simplellm.model.model import Model
from simplellm.sampling.logprobs import PromptScores, prompt_targets, score_prompts
from simplellm.sampling.masks import Masks

NEEDS_LAST_TOKEN = attrgetter("needs_last_token")
Flight = Callable[[], StepOutput]  # waits for what a step has sampled


class Runner:
    """Starts steps on the device; what they sampled can be had later.

    If the host doesn't know a token yet, its input id is -1 - i: it is row i of what
    the step before has sampled, on the device.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        manager: PageManager,
        config: EngineConfig,
        max_model_len: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.pool, self.manager = model, pool, manager
        self.ranks = ranks
        self.proposer: Any = None  # a `HeadProposer`, if a head drafts
        self.max_num_seqs = config.max_num_seqs
        # Columns of a block table: a multiple of 16, so that kernels are compiled once.
        self.table_width = 16 * -(-max_model_len // (16 * pool.page_size))
        seqs, self.device = config.max_num_seqs, model.device
        groups, tokens = len(pool.windows), config.max_num_batched_tokens
        drafts = config.max_drafts
        most = seqs + MOST_CHUNKS + drafts
        size = Batch.size(tokens, most, self.table_width, groups)
        # Two on the host: one is written while the other may still be on its way.
        self.staging = ranks.staging(size, self.device)
        rows = seqs + drafts
        self.host_output = [pinned([rows], torch.int32, self.device) for _ in range(2)]
        self.inputs = torch.zeros(size, dtype=torch.int32, device=self.device)
        self.sampled_tokens = torch.zeros(rows, dtype=torch.int32, device=self.device)
        vocab_size = model.config.vocab_size
        self.logits = torch.zeros(rows, model.lm_head.shape[0], device=self.device)
        # Of steps with prompts that are captured.
        sizes = min(tokens, MIXED_SIZES[-1]), model.config.hidden_size
        self.hidden = torch.zeros(sizes, dtype=model.dtype, device=self.device)
        self.counts = TokenCounts(vocab_size, self.device)
        self.masks = Masks(vocab_size, rows, self.device)
        # A mask may need all tokens of earlier steps.
        self.finish_steps_in_flight: Callable[[], None] = lambda: None
        self.buffer_index = 0
        # Whose tokens are in sampled_tokens, row by row.
        self.sampling: list[SamplePosition] = []
        self.tables = BlockTables(most, self.table_width, groups, pool.page_size)
        self.speculative = config.speculative is not None
        self.checking = False  # whether the step under way has drafts
        self.scores: list[PromptScores] = []  # of the step under way
        self.decode_graphs = list[CapturedGraph]()  # by size, as all of these
        self.drafting_graphs = list[CapturedGraph]()  # decodes, and a head drafts
        self.verify_graphs = list[CapturedGraph]()  # decodes, with drafts
        self.mixed_graphs = list[CapturedGraph]()  # with prompts
        self.step: StepUnderWay
        # Of a step: its requests, parameters, and if none is masked or penalized.
        self._cached_sampling: tuple[list[int], SamplingTensors, bool] | None = None

    def view(self, flat: Any, sizes: Sequence[int]) -> Batch:
        """A step of these ``sizes`` at the beginning of ``flat``.

        So many tokens, sequences, pages of each, decodes, and tokens of a decode.
        """
        tokens, sequences, pages, decodes, queries = sizes
        rows, pool = (tokens, sequences, pages, decodes), self.pool
        return Batch.of(flat, *rows, pool.windows, pool.page_size, queries)

    def batch_of(self, shape: CaptureShape, flat: Tensor | None = None) -> Batch:
        """A step of this shape: the captured one, or one in ``flat``."""
        tokens, decodes, chunks, queries = shape
        sizes = tokens, decodes + chunks, self.table_width, decodes, queries
        return self.view(self.inputs if flat is None else flat, sizes)

    # Graphs

    @torch.inference_mode()
    def capture(
        self,
        decodes: Sequence[int],
        mixed: Sequence[int] = (),
        verifying: Sequence[CaptureShape] = (),
    ) -> None:
        """Record steps of so many decodes, and with prompts of so many tokens.

        And those of ``verifying``, which check drafts. As far as there is room.
        """

        def padding(shape: CaptureShape) -> Callable[[], object]:
            batch = self.batch_of(shape)
            batch.pad()
            return partial(self.captured_step, batch, shape)

        seqs, room = self.max_num_seqs, len(self.hidden)
        shapes = [*(CaptureShape(size, size) for size in decodes), *verifying]
        shapes += [CaptureShape.mixed(size, seqs) for size in mixed if size <= room]
        graphs = capture_graphs(padding, shapes, self.ranks.min_of_all)
        self.mixed_graphs = [graph for graph in graphs if graph.shape.chunks]
        plain = [graph for graph in graphs if not graph.shape.chunks]
        self.decode_graphs = [graph for graph in plain if graph.shape.queries == 1]
        self.verify_graphs = [graph for graph in plain if graph.shape.queries > 1]
        if self.proposer is not None and self.ranks.size == 1:  # again, without states
            self.drafting_graphs, self.proposer.aux.wanted = self.decode_graphs, False
            shapes = [graph.shape for graph in self.drafting_graphs]
            self.decode_graphs = capture_graphs(padding, shapes, self.ranks.min_of_all)
            self.proposer.aux.wanted = True

    def _graph(
        self, scheduled: Sequence[ScheduledChunk], drafting: bool
    ) -> CapturedGraph | None:
        """The graph for a step that is nothing but decodes, if there is one."""
        count = len(scheduled)
        graphs = (drafting and self.drafting_graphs) or self.decode_graphs
        for chunk in scheduled:
            _, _, length, samples = chunk
            if not samples or (length > 1 and not num_drafts(chunk)):
                return None
            if length > 1:
                count, graphs = count + length - 1, self.verify_graphs
        index = bisect_left(graphs, count, key=lambda graph: graph.size)
        return graphs[index] if index < len(graphs) else None

    def _mixed(self, real: CaptureShape, samples: int = 0) -> CapturedGraph | None:
        """The graph for a step with chunks of prompts, if there is one."""
        for graph in self.mixed_graphs if real.chunks else ():
            rows = graph.shape.decodes + graph.shape.chunks
            if samples <= rows and all(map(le, real, graph.shape)):
                return graph
        return None

    def graph_of(self, shape: CaptureShape | None) -> CapturedGraph | None:
        """The graph that another rank replays, of this shape; None for none."""
        graphs = (*self.decode_graphs, *self.verify_graphs, *self.mixed_graphs)
        return next((graph for graph in graphs if graph.shape == shape), None)

    # Steps

    def launch(self, scheduled: Sequence[ScheduledChunk]) -> Flight:
        """Start to compute ``scheduled``, and to sample from what comes out."""
        self.checking = self.speculative and has_drafts(scheduled)
        rows = step_positions(scheduled, self.checking)
        self.start_forward(scheduled, rows)
        if any(map(NEEDS_LAST_TOKEN, rows)):
            self.finish_steps_in_flight()  # the device computes meanwhile
        return self.sample(rows)

    @torch.inference_mode()
    def start_forward(
        self,
        scheduled: Sequence[ScheduledChunk],
        sampling: Sequence[SamplePosition],
        agreed: Agreed | None = None,
    ) -> None:
        """Start the forward pass of a step, as other ranks may have ``agreed``.

        Until the next, ``logits`` has the logits of ``sampling``, ``sampled_tokens``
        their likeliest tokens, and ``scores`` what it finds of prompts.
        """
        copies = self.manager.take_copies()
        drafting = self.proposer is not None and self.proposer.begin(scheduled)
        if copies:
            self.tables.invalidate()
        real = CaptureShape.of(scheduled)
        if agreed is None:
            graph = self._graph(scheduled, drafting) or self._mixed(real, len(sampling))
            agreed = Agreed(graph, real.tokens)
        graph = agreed.graph
        tokens, decodes, chunks, queries = real if graph is None else graph.shape
        if graph is None:
            tokens = agreed.tokens
            # Each row samples once. For d drafts, d rows without tokens are added.
            chunks += sum(map(num_drafts, scheduled))
        sizes = tokens, decodes + chunks, self._pages(scheduled), decodes, queries
        self.buffer_index ^= 1
        staging = self.staging[self.buffer_index]
        batch = self.view(staging.numpy(), sizes)
        held = self.manager.tables
        fill_batch(batch, scheduled, real.decodes, self.sampling, held, self.tables)
        if drafting:
            self.proposer.link_placeholders(scheduled, batch.query_start_loc)
        flat = staging[: Batch.size(*sizes[:3], len(self.pool.windows))]
        targets = prompt_targets(scheduled, self.device)
        captured = None if graph is None else graph.shape
        forward = ForwardPass(flat, sizes, len(sampling), copies, targets, captured)
        self.ranks.send_forward(forward)
        self.sampling = [*sampling]
        self.step = StepUnderWay(scheduled, sizes)
        self.scores = self.compute(forward, graph)

    def compute(
        self, forward: ForwardPass, graph: CapturedGraph | None
    ) -> list[PromptScores]:
        """A rank's part in a forward pass, by its own ``graph`` if there is one."""
        flat, sizes, count, copies, targets, _ = forward
        self.pool.copy(copies)
        self.inputs[: len(flat)].copy_(flat, non_blocking=True)
        batch, hidden = self.view(self.inputs, sizes), self.hidden
        if self.proposer is not None:
            self.proposer.prepare(batch, copies, forward.graph)
        if graph is not None:
            graph.replay()
        else:
            hidden = self.model.forward(batch, self.pool, self.sampled_tokens)
        if graph is None or graph.shape.chunks:
            self._head(batch, hidden, count)
        head, score = self.model.head, self.model.ops.score
        return score_prompts(targets, hidden, head, self.logits, score)

    def _head(self, batch: Batch, hidden: Tensor, count: int) -> None:
        """Logits and likeliest tokens of the first ``count`` samples of a step."""
        if count:
            fewer = count < len(batch.tokens)
            last = hidden[batch.logits_indices[:count]] if fewer else hidden
            self.sampled_tokens[:count] = self.model.head(last, self.logits[:count])

    def captured_step(self, batch: Batch, shape: CaptureShape) -> None:
        """What the graph of a step does.

        All decodes sample. How many of a step with prompts do is not known yet, so that
        the graph ends with their hidden states.
        """
        hidden = self.model.forward(batch, self.pool, self.sampled_tokens)
        if shape.chunks:
            self.hidden[: shape.tokens] = hidden
        else:
            self._head(batch, hidden, shape.decodes)

    def _pages(self, scheduled: Sequence[ScheduledChunk]) -> int:
        """Columns of a step's block tables."""
        if self.device.type == "cuda":  # always the same, for graphs and kernels
            return self.table_width
        tables = (self.manager.tables[chunk.request.request_id] for chunk in scheduled)
        return max((len(table.groups[0]) for table in tables), default=1)

    @torch.inference_mode()
    def sample(self, requests: Sequence[SamplePosition]) -> Flight:
        """Sample a token for each of ``requests``, whose logits are there.

        Those of one request stand together, the one without drafts first.
        """
        count = len(requests)
        if count == 0:  # it is waited for all the same: its inputs are reused
            return self._fetch(requests, SamplerOutput(self.sampled_tokens[:0]))
        tensors, unrestricted = self._sampling_tensors(requests)
        counting = False if unrestricted else self.counts.prepare(requests)
        mask = None if unrestricted else self.masks.prepare(requests)
        sampled = SamplerOutput(self.sampled_tokens[:count])
        changed = counting or mask is not None or tensors.bias is not None
        if tensors.random or changed or tensors.logprobs is not None:
            lengths = upload(output_lengths(requests), torch.int64, self.device)
            if self.proposer is not None:
                lengths = self.proposer.output_lengths(requests, lengths)
            counts = self.counts if counting else None
            choice = TokenChoice(count, tensors, lengths, counts, mask)
            self.ranks.send_sample(choice)
            sampled = self.choose_tokens(choice)
        return self._fetch(requests, sampled)

    def choose_tokens(self, choice: TokenChoice) -> SamplerOutput:
        """A rank's part in choosing tokens, as `sample` does."""
        count, tensors, lengths, counts, mask = choice
        tensors, mask = self.ranks.local_sampling(tensors, mask)
        logits, best = self.logits[:count], self.sampled_tokens[:count]
        ops = self.model.ops
        sampled = sample(logits, best, tensors, lengths, ops, counts=counts, mask=mask)
        best[:] = sampled.tokens
        return sampled

    def _sampling_tensors(
        self, requests: Sequence[SamplePosition]
    ) -> tuple[SamplingTensors, bool]:
        """The sampling parameters of ``requests``, kept for as long as these stay.

        And whether these have stayed, and may all get any token, unpenalized.
        """
        numbers = [request.request_id for request in requests]
        if self._cached_sampling is not None and self._cached_sampling[0] == numbers:
            return self._cached_sampling[1:]
        params = [request.params for request in requests]
        vocab_size = self.model.config.vocab_size
        seeds = [request.seed for request in requests]
        tensors = SamplingTensors.of(params, vocab_size, self.device, seeds)
        bound = any(r.restricted or r.params.penalizes for r in requests)
        self._cached_sampling = numbers, tensors, not bound
        return tensors, False

    def invalidate(self) -> None:
        """Drop what is kept from step to step: a step failed, and it may be wrong."""
        self._cached_sampling = None
        self.counts.invalidate()

    def _fetch(
        self, requests: Sequence[SamplePosition], sampled: SamplerOutput
    ) -> Flight:
        """Let the sampled tokens, and logprobs if there are any, come to the host."""
        drafted = self.proposer.propose(self, requests) if self.proposer else None
        host_output = self.host_output[self.buffer_index][: len(requests)]
        host_output.copy_(sampled.tokens, non_blocking=True)
        logprobs = [*map(fetch, sampled.logprobs)]
        full = [*map(fetch, sampled.full)]
        scores = [p._replace(scores=[*map(fetch, p.scores)]) for p in self.scores]
        arrived = torch.cuda.Event() if self.device.type == "cuda" else None
        if arrived:
            arrived.record()
        forced = [request.forced for request in requests]
        checks = self.checking

        def wait() -> StepOutput:
            late = False
            if arrived is not None:
                with self.ranks.guard_wait():
                    late = arrived.query()
                    arrived.synchronize()
            tokens = host_output.tolist()
            accepted = drafted() if drafted else {} if checks else None
            every = requests, forced, tokens, logprobs, full, scores
            found = step_output(*every, accepted)
            return found._replace(late=late)

        return wait
