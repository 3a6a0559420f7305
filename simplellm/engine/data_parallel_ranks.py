"""Ranks that compute requests of their own each, and share the experts alone.

All schedulers are in rank 0, one for each rank, and all ranks take each step together,
those with nothing to do with rows of padding: their experts are wanted. An engine on
each rank, as in vLLM, would have to agree with the others on whether anybody is busy
and on a step's size, before each step, and requests, aborts, grammars and statistics
would have to travel. Here, whoever schedules knows all that before anybody computes.
What travels is what ranks of tensor parallelism get, to each its own: the flat
int32 array, which lies in memory that all processes share, and the sampling tensors.
Back come tokens and log-probabilities. So aborts, prefix caches, Ctrl-C and the death
of a rank are what they are with one rank. The price is that one processor prepares the
steps of all GPUs, while these compute the step before.
"""

import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from simplellm.base.config import EngineConfig, ModelConfig
from simplellm.base.host_memory import fetch
from simplellm.base.request import EngineError
from simplellm.checkpoint.sharding import Shard, ShardedSource
from simplellm.checkpoint.source import Source
from simplellm.engine.host_proposer import DraftTask
from simplellm.engine.ranks import (
    Follower,
    Leader,
    ParallelRank,
    StepSender,
    with_tensors,
    without_tensors,
)
from simplellm.engine.sampler import SamplerOutput
from simplellm.model.ops import Ops
from simplellm.model.parallel import data_parallel_table


class DataParallel(ParallelRank):
    """One of several ranks that have all weights but the others' experts."""

    def shard(self, source: Source, config: EngineConfig) -> Source:
        here = Shard(self.group.rank, self.size, True, data_parallel=True)
        return ShardedSource(source, here, self.group.max)

    def operations(self, ops: Ops, model: ModelConfig, dtype: torch.dtype) -> Ops:
        self.alone = ops
        if ops.name != "Triton":
            return data_parallel_table(ops, self.group)
        from simplellm.model.kernels.expert_exchange import fuse_expert_exchange

        return fuse_expert_exchange(ops, self.group, dtype, model.hidden_size)


class DataLeader(Leader, DataParallel):
    """Rank 0. Of each other rank there is a `RemoteRank` in ``others``."""

    def staging(self, size: int, device: torch.device) -> list[Tensor]:
        arrays = 2 * self.size
        self.memory.resize(arrays * 4 * size)
        for link in self.links:
            link.send({})
        every = self.memory.arrays(arrays, size, device)  # two of each rank
        self.others = [
            RemoteRank(self, rank, every[2 * rank : 2 * rank + 2])
            for rank in range(1, self.size)
        ]
        return every[:2]

    def _abort(self) -> None:
        super()._abort()
        if self.aborted:  # whoever waits for an answer would wait on
            for process in self.processes:
                process.kill()


class RemoteRank(StepSender):
    """Another rank, with requests of its own, as rank 0 sees it."""

    def __init__(
        self, leader: DataLeader, rank: int, staging: Sequence[Tensor]
    ) -> None:
        self.leader, self.size, self.arrays = leader, leader.size, staging
        self.link, self.memory = leader.links[rank - 1], leader.memory

    def staging(self, size: int, device: torch.device) -> list[Tensor]:
        return [*self.arrays]

    def send_call(
        self, call: str, tensors: Sequence[Tensor | None], **numbers: Any
    ) -> None:
        self.link.send_tensors({"call": call, **numbers}, tensors)

    def send_fetch(self, count: int, task: DraftTask | None) -> None:
        """Ask for what a step of ``count`` samples gives, and for drafts after it."""
        sent: list[Tensor | None] = []
        self.send_call("fetch", sent, count=count, task=without_tensors(task, sent))

    def answer(self) -> list[list[Tensor]]:
        """What a step gave, which `send_fetch` has asked for.

        Tensors in lists: the tokens and, if a head has drafted after it, the results of
        that; their log-probabilities, those of the vocabulary, and what `score` says of
        each part of a prompt. Raises EngineError.
        """
        with self.leader.guard_wait():
            try:
                message = self.link.receive()
                if message is None:
                    raise ConnectionError("the other end is closed")
                tensors = iter(self.link.receive_tensors(message["tensors"]))
            except OSError as error:
                self.leader.check(error)
                raise EngineError("a rank has ended") from error
        return [[next(tensors) for _ in range(count)] for count in message["counts"]]


class DataFollower(Follower, DataParallel):
    """A rank other than 0."""

    def staging(self, size: int, device: torch.device) -> list[Tensor]:
        self._next_message()  # it has its size
        self.memory.arrays(2 * self.size, size, device)
        return super().staging(0, device)  # rank 0 writes them

    def follow(self, runner: Any) -> None:
        # What waits for the GPU must not keep the next step from being launched.
        self.answers: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._send_answers, daemon=True).start()
        super().follow(runner)

    def _receive(self, kinds: Sequence[Any], device: torch.device) -> list[Any]:
        tensors = self.link.receive_tensors(kinds)
        if device.type == "cuda":  # so that it need not wait for the GPU
            tensors = [t if t is None else t.pin_memory() for t in tensors]
        return [t if t is None else t.to(device, non_blocking=True) for t in tensors]

    def _answer(
        self, runner: Any, sampled: SamplerOutput | None, message: Mapping[str, Any]
    ) -> None:
        if sampled is None:  # the likeliest tokens
            sampled = SamplerOutput(runner.sampled_tokens[: message["count"]])
        tokens = [sampled.tokens]
        columns = self._receive(message["tensors"], self.device)
        if (task := with_tensors(message["task"], columns)) is not None:
            task = DraftTask(*task)
            tokens.append(runner.proposer.draft_after(task, runner.sampled_tokens))
        groups = [tokens, sampled.logprobs, sampled.full]
        groups += [part.scores for part in runner.scores]
        host = [[fetch(tensor) for tensor in group] for group in groups]
        arrived = torch.cuda.Event() if self.device.type == "cuda" else None
        if arrived:
            arrived.record()
        self.answers.put((arrived, host))
        self.advance()

    def _send_answers(self) -> None:
        while True:
            arrived, groups = self.answers.get()
            if arrived:
                arrived.synchronize()
            tensors = [tensor for group in groups for tensor in group]
            self.link.send_tensors({"counts": [*map(len, groups)]}, tensors)
