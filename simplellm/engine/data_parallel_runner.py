"""Steps of several ranks at once, each with requests of its own."""

from collections.abc import Sequence

import torch

from simplellm.base.config import EngineConfig
from simplellm.base.grammar import GrammarError
from simplellm.base.sample_position import SamplePosition
from simplellm.engine.data_parallel_ranks import DataLeader, RemoteRank
from simplellm.engine.graphs import Agreed, CapturedGraph, CaptureShape
from simplellm.engine.host_proposer import DraftedRequest, HostProposer
from simplellm.engine.page_manager import PageManager
from simplellm.engine.ranks import ForwardPass, TokenChoice
from simplellm.engine.runner import Flight, Runner
from simplellm.engine.sampler import SamplerOutput
from simplellm.engine.scheduler import ScheduledChunk
from simplellm.engine.step_output import StepOutput, step_output
from simplellm.engine.verify_chunks import has_drafts, step_positions
from simplellm.model.model import Model
from simplellm.model.ops import PLAIN
from simplellm.sampling.logprobs import PromptScores


class RemoteRunner(Runner):
    """What rank 0 does of another rank's steps: all but to compute them.

    ``like`` is rank 0's own runner, ``manager`` has the other's pages.
    """

    ranks: RemoteRank

    def __init__(
        self,
        like: Runner,
        manager: PageManager,
        config: EngineConfig,
        max_model_len: int,
        rank: RemoteRank,
    ) -> None:
        nothing = torch.empty(0, dtype=like.model.dtype)
        model = Model(
            like.model.config,
            PLAIN,
            embed_tokens=nothing,
            layers=(),
            norm=nothing,
            lm_head=nothing[None],
        )
        super().__init__(model, like.pool, manager, config, max_model_len, rank)
        self.like = like
        self.host_proposer: HostProposer | None = None  # if a head drafts

    def compute(
        self, forward: ForwardPass, graph: CapturedGraph | None
    ) -> list[PromptScores]:
        return [PromptScores(part.request, part.first, ()) for part in forward.targets]

    def choose_tokens(self, choice: TokenChoice) -> SamplerOutput:
        self.counting = choice.counts is not None
        return SamplerOutput(self.sampled_tokens[: choice.samples])

    def _pages(self, scheduled: Sequence[ScheduledChunk]) -> int:
        if self.like.device.type == "cuda":
            return self.table_width
        return super()._pages(scheduled)

    def sample(self, requests: Sequence[SamplePosition]) -> Flight:
        self.counting = False
        return super().sample(requests)

    def _fetch(
        self, requests: Sequence[SamplePosition], sampled: SamplerOutput
    ) -> Flight:
        task, drafted, proposer = None, list[DraftedRequest](), self.host_proposer
        if proposer is not None and proposer.reads(self.step.scheduled):
            task, drafted = proposer.task(self.step, self.manager, len(requests))
        self.ranks.send_fetch(len(requests), task)
        forced = [request.forced for request in requests]
        scores, counting = self.scores, self.counting
        accepted: dict[int, int] | None = {} if self.checking else None

        def wait() -> StepOutput:
            (tokens, *results), logprobs, full, *scored = self.ranks.answer()
            if counting:  # as the other rank has counted them
                with torch.inference_mode():
                    self.counts.add(tokens)
            pairs = zip(scores, scored, strict=True)
            parts = [part._replace(scores=found) for part, found in pairs]
            if task is not None and proposer is not None:
                proposer.hand_out(task, drafted, *results)
            every = requests, forced, tokens.tolist(), logprobs, full, parts
            return step_output(*every, accepted)

        return wait


class DataParallelRunner(Runner):
    """Rank 0's runner, which has the other ranks compute steps of their own, too.

    Who makes it gives it ``others``, a `RemoteRunner` for each of these.
    """

    ranks: DataLeader
    others: Sequence[RemoteRunner] = ()

    def launch(self, scheduled: Sequence[ScheduledChunk]) -> Flight:
        """Start to compute ``scheduled``, each rank its requests, in their order."""
        runners: list[Runner] = [self, *self.others]
        parts = [
            [c for c in scheduled if c.request.request_id in runner.manager.tables]
            for runner in runners
        ]
        rows = []
        for runner, part in zip(runners, parts, strict=True):
            runner.checking = self.speculative and has_drafts(part)
            rows.append(step_positions(part, runner.checking))
        agreed = self._agree(parts, max(map(len, rows)))
        steps = [*zip(runners, parts, rows, strict=True)]
        for runner, part, sampling in reversed(steps):
            # This rank last: in its forward pass it waits for the others.
            runner.start_forward(part, sampling, agreed)
        # Of the others' tokens this rank counts only those that it knows.
        counted = any(row.params.penalizes for part in rows[1:] for row in part)
        if counted or any(row.needs_last_token for part in rows for row in part):
            self.finish_steps_in_flight()  # the devices compute meanwhile
        flights: list[Flight] = []

        def wait() -> StepOutput:
            self.ranks.advance()
            outputs = [flight() for flight in flights]
            tokens = [one for output in outputs for one in output.tokens]
            logprobs = [one for output in outputs for one in output.logprobs]
            prompts = [one for output in outputs for one in output.prompts]
            return StepOutput(tokens, logprobs, prompts, outputs[0].late)

        try:
            # Again this rank last: the others draw and draft while it does.
            for runner, _, sampling in reversed(steps):
                flights.insert(0, runner.sample(sampling))
        except GrammarError:  # all other errors end the engine
            for runner, _, _ in reversed(steps[: len(steps) - len(flights)]):
                flights.insert(0, runner.sample([]))
            wait()  # the others end the step, too
            raise
        return wait

    def _agree(self, parts: Sequence[Sequence[ScheduledChunk]], most: int) -> Agreed:
        """How all ranks compute their ``parts`` of a step, of up to ``most`` samples.

        Each has as many rows as the one with most: they meet at the experts.
        """
        graphs = [graph for part in parts if (graph := self._graph(part, False))]
        if len(graphs) == len(parts):
            size = max(graph.size for graph in graphs)
            # Where one checks drafts, all of them replay a graph that does.
            if any(graph.shape.queries > 1 for graph in graphs):
                graphs = self.verify_graphs
            for graph in graphs:
                if graph.size >= size:
                    return Agreed(graph, graph.size)
        shapes = zip(*map(CaptureShape.of, parts), strict=True)
        whole = CaptureShape(*map(max, shapes))
        return Agreed(self._mixed(whole, most), max(1, whole.tokens))

    def invalidate(self) -> None:
        super().invalidate()
        for runner in self.others:
            runner.invalidate()
