"""The operations of one rank of several, each with its shard of the weights.

`reduce` adds up what row-parallel weights give. Each rank has the logits of its own
part of the vocabulary, and nobody gathers them: the likeliest token is the largest of
int64 keys, of a value and a token, and the filters add up tallies, which are integers.
So the token is the one that a single rank would choose from the same logits, and all
ranks know it.

`ExpertExchange` is for ranks that have requests of their own, and share experts alone.
Between GPUs `kernels.expert_exchange` does the same.

T packed tokens, S rows of logits, V vocabulary, W of its tokens on this rank, R ranks.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from simplellm.base.noise import gumbel_noise
from simplellm.checkpoint.mxfp4 import Weight
from simplellm.model.layers import Experts
from simplellm.model.nccl import ID_BYTES, Communicator, unique_id
from simplellm.model.ops import Ops
from simplellm.model.sharded_choice import pack_keys, reach, token_of
from simplellm.sampling.filters import LAST, STEPS, WEIGHT, Filters
from simplellm.sampling.penalties import TokenCounts

LOGGER = logging.getLogger("simplellm")


class Group:
    """The ranks that compute together, as ``rank`` of ``size`` sees them.

    They find each other by a file in ``folder``, within ``timeout`` seconds, and talk
    over the loopback interface by gloo; with GPUs, this rank's being ``device``, about
    tensors there by NCCL, in the current stream. A collective of gloo whose other ranks
    do not come within ``timeout``, or have ended, raises RuntimeError; one of NCCL goes
    on until `abort`. All methods give each rank the same bits; tensors may be changed
    in place.
    """

    def __init__(
        self,
        folder: str,
        rank: int,
        size: int,
        timeout: float,
        device: torch.device | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        # No default group of the process: it may have several models.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout)
        store = dist.FileStore(f"{folder}/ranks", size)
        store.set_timeout(timedelta(seconds=timeout))
        self.store, self.name = store, f"simplellm {folder}"
        # Called before each wait for the others on the host.
        self.before: Callable[[], object] = lambda: None
        self.shared: list[SymmetricMemory] = []
        self.gloo: Any = gloo(store, rank, size, options)
        self.nccl: Any = None  # a Communicator, on a GPU
        if device is not None and device.type == "cuda":
            unique = torch.zeros(ID_BYTES, dtype=torch.uint8)
            if rank == 0:
                unique = torch.frombuffer(bytearray(unique_id()), dtype=torch.uint8)
            self.broadcast(unique)
            self.nccl = Communicator(unique.numpy().tobytes(), rank, size, device)

    def _reduce(self, x: Tensor, how: str) -> Tensor:
        x = x.contiguous()
        if x.is_cuda:
            self.nccl.all_reduce(x, how)
            return x
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, how)
        self.before()
        self.gloo.allreduce([x], options).wait()
        return x

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, in its dtype.

        Short floats are added in float32; by NCCL, each pair's sum is rounded.
        """
        short = x.is_floating_point() and x.element_size() < 4 and not x.is_cuda
        total = self._reduce(x.float() if short else x, "SUM")
        return total.to(x.dtype)

    def max(self, x: Tensor) -> Tensor:
        """The greatest of all ranks' ``x``, number by number."""
        return self._reduce(x, "MAX")

    def min(self, x: Tensor) -> Tensor:
        """The least of all ranks' ``x``, number by number."""
        return self._reduce(x, "MIN")

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' ``x``, of one shape: [R, ...]."""
        if x.is_cuda:
            all_of_them = x.new_empty(self.size, *x.shape)
            self.nccl.all_gather(all_of_them, x.contiguous())
            return all_of_them
        each = [torch.empty_like(x) for _ in range(self.size)]
        self.before()
        self.gloo.allgather([each], [x.contiguous()]).wait()
        return torch.stack(each)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Of the sum of all ranks' ``x`` [R, ...], this rank's part [...].

        Short floats are added as in `sum`.
        """
        if x.is_cuda:
            part = torch.empty_like(x[0])
            self.nccl.reduce_scatter(part, x.contiguous())
            return part
        return self.sum(x)[self.rank]

    def broadcast(self, x: Tensor) -> None:
        """Write the first rank's ``x`` to that of the others."""
        if x.is_cuda:
            self.nccl.broadcast(x)
            return
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.before()
        self.gloo.broadcast([x], options).wait()

    def share(self, nbytes: int, stop: int) -> Tensor | None:
        """Zeroed memory on each rank's GPU, which all ranks' kernels write to.

        Its addresses on this rank, int64 [R]; None if there is a GPU that has none to
        share. `abort` sets its int32 number ``stop`` to 1.
        """
        fresh = torch.tensor([not SymmetricMemory.begun], dtype=torch.int32)
        if not self.min(fresh)[0]:
            LOGGER.warning("A process's second engine adds up by NCCL on several GPUs")
            return None
        try:
            memory = SymmetricMemory.of(self, nbytes, stop)
        except RuntimeError as error:
            LOGGER.warning("GPUs don't share memory, and NCCL adds up: %s", error)
            memory = None
        able = torch.tensor([memory is not None], dtype=torch.int32)
        if not self.min(able)[0] or memory is None:
            return None
        self.shared.append(memory)
        return memory.addresses

    def abort(self) -> None:
        """End what waits for other ranks on this one's GPU, from any thread."""
        for memory in self.shared:
            memory.stop()
        if self.nccl is not None:
            self.nccl.abort()


@dataclass(frozen=True, eq=False)
class SymmetricMemory:
    """Memory of a GPU that all ranks of a group have access to."""

    # PyTorch counts a process's handshakes, and those of fresh ranks begin at 0: a
    # process that has made one would wait for a number that they never send.
    begun: ClassVar[bool] = False

    memory: Tensor  # uint8
    handle: Any  # keeps that of the others, and with it the group, known by its name
    addresses: Tensor  # int64 [R]
    stream: torch.cuda.Stream  # beside the kernels that wait
    one: Tensor  # int32 [1], pinned
    stop_index: int  # of the number that becomes 1

    @classmethod
    def of(cls, group: Group, nbytes: int, stop_index: int) -> "SymmetricMemory":
        """Made by all ranks at once. Raises RuntimeError where it can't be."""
        from torch._C import _distributed_c10d as c10d

        # Nothing here needs multicast, and setting it up needs more of the driver.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        # It finds the others by the store of a process group of this name.
        store = dist.PrefixStore("memory", group.store)
        named: Any = dist.ProcessGroup(store, group.rank, group.size)
        named._set_group_name(group.name)
        name: Any = group.name
        c10d._register_process_group(name, named)
        symmetric, device = c10d._SymmetricMemory, group.nccl.device
        memory = symmetric.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        memory.zero_()
        torch.cuda.synchronize(device)  # before others write
        cls.begun = True
        handle = symmetric.rendezvous(memory, group.name)
        addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        one = torch.ones(1, dtype=torch.int32, pin_memory=True)
        handles, stream = (handle, named), torch.cuda.Stream(device)
        return cls(memory, handles, addresses, stream, one, stop_index)

    def stop(self) -> None:
        """Set the number, while kernels run."""
        with torch.cuda.stream(self.stream):
            number = self.memory.view(torch.int32).narrow(0, self.stop_index, 1)
            number.copy_(self.one, non_blocking=True)


@dataclass(frozen=True)
class VocabularyShard:
    """The operations that look at the vocabulary, of which a rank has ``tokens``.

    Rows of logits are [S, W], token ids count in all of the vocabulary.
    """

    ops: Ops  # those of a rank alone
    group: Group
    tokens: range
    vocab_size: int

    def embed(self, tokens: Tensor, previous: Tensor, table: Tensor) -> Tensor:
        """`embed` of ``table`` [W, hidden]: each row is looked up on one rank."""
        ids = torch.where(tokens < 0, previous[(-1 - tokens).clamp(min=0)], tokens)
        local, inside = self._local_ids(ids)
        x = self.ops.embed(local.int(), previous, table)
        return self.group.sum(x.masked_fill(~inside[:, None], 0))

    def head(self, hidden: Tensor, weight: Weight, logits: Tensor) -> Tensor:
        """`head`: fills this rank's ``logits`` [S, W]; the likeliest of all tokens."""
        return self._largest(logits, self.ops.head(hidden, weight, logits))

    def argmax(self, values: Tensor) -> Tensor:
        """The token of the greatest number of each row, int32 [S], of all ranks'."""
        return self._largest(values, values.argmax(-1))

    def draw(
        self,
        logits: Tensor,
        best: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        steps: Tensor,
        filters: Filters | None = None,
    ) -> Tensor:
        """`draw`, with the same noise for each token as on one rank."""
        scores = logits - self.group.max(self._of_tokens(logits, best))
        scores = scores / torch.where(temperature > 0, temperature, 1.0)[:, None]
        if filters is not None:
            scores = self.filtered(scores, filters)
        noise = gumbel_noise(seeds, steps, logits.shape[1], self.tokens.start)
        return torch.where(temperature > 0, self.argmax(scores + noise), best)

    def filtered(self, scores: Tensor, filters: Filters) -> Tensor:
        """`filter_tokens` of scores [S, W] that are 0 at the best token of all."""
        top_k, top_p, min_p, *_ = filters
        depths = ((0 - scores).clamp(0, LAST / STEPS) * STEPS).int()
        keep = scores >= min_p.log()
        if filters.some_top_k:
            ones = torch.ones_like(depths, dtype=torch.int64)
            enough = top_k.double()
            keep &= depths <= reach(depths, ones, lambda _: enough, self.group.sum)
        if filters.some_top_p:
            weights = (scores.exp() * WEIGHT).long() * keep
            share = top_p.double()
            last = reach(depths, weights, lambda all_: share * all_, self.group.sum)
            keep &= (depths <= last) | (top_p >= 1)
        return scores.masked_fill(~keep, -torch.inf)

    def score(self, logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, ...]:
        """`score` of logits [S, W]; of the likeliest, each rank offers its own."""
        top = self.group.max(logits.amax(-1, keepdim=True))
        total = self.group.sum((logits - top).exp().sum(-1, keepdim=True))
        logprobs = logits - top - total.log()
        picked = self.group.max(self._of_tokens(logprobs, tokens))
        ranks = 1 + self.group.sum((logprobs > picked).sum(-1))
        count = min(count, self.vocab_size)
        own = logprobs.topk(min(count, len(self.tokens)), dim=-1)
        values = logprobs.new_full((len(logits), count), -torch.inf)
        ids = torch.zeros_like(values, dtype=torch.int64)
        values[:, : own.values.shape[1]] = own.values
        ids[:, : own.values.shape[1]] = own.indices + self.tokens.start
        if count > 0:
            gather = self.group.all_gather
            values, ids = (gather(x).movedim(0, 1) for x in (values, ids))
        best = values.flatten(1).topk(count, dim=-1)
        return picked[:, 0], ranks, ids.flatten(1).gather(1, best.indices), best.values

    def penalize(self, counts: TokenCounts, logits: Tensor) -> Tensor:
        """`penalize`, by this rank's columns of ``counts``."""
        return self.ops.penalize(counts.of_tokens(self.tokens), logits)

    def _local_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids among this rank's tokens, int64, and which are: 0 for those elsewhere."""
        local = ids.long() - self.tokens.start
        inside = (local >= 0) & (local < len(self.tokens))
        return torch.where(inside, local, 0), inside

    def _of_tokens(self, values: Tensor, tokens: Tensor) -> Tensor:
        """The number [S, 1] of a token of each row, -inf if another rank has it."""
        local, inside = self._local_ids(tokens)
        numbers = values.gather(1, local[:, None])
        return numbers.masked_fill(~inside[:, None], -torch.inf)

    def _largest(self, values: Tensor, local: Tensor) -> Tensor:
        """The token, int32 [S], of the greatest number of all ranks' ``local`` ids."""
        local = local.long()
        numbers = values.gather(1, local[:, None])[:, 0]
        keys = self.group.max(pack_keys(numbers, local + self.tokens.start))
        return token_of(keys)


@dataclass(frozen=True)
class ExpertExchange:
    """Experts that the ranks share, where each rank has tokens of its own.

    All ranks have the same number of rows, some of them padding. Each sends its rows to
    all others, every rank computes its experts' part of all rows, and the sum for a row
    comes back to the rank that sent it. So nobody has to know which ranks have the
    experts of a row. Little is sent in vain where a token has more experts than there
    are ranks.
    """

    ops: Ops  # those of a rank alone
    group: Group

    def experts(self, x: Tensor, mlp: Experts, num_tokens: Tensor) -> Tensor:
        """`experts` of x [T, hidden], of which only some are on this rank."""
        rows = torch.arange(len(x), device=x.device)
        # Padding comes between rows that count, so that no table can skip it: what is
        # computed of it, nobody reads, but it has to be numbers.
        own = x.masked_fill((rows >= num_tokens)[:, None], 0)
        every = self.group.all_gather(own).flatten(0, 1)  # [R * T, hidden]
        all_rows = torch.full_like(num_tokens, len(every))
        out = self.ops.experts(every, mlp, all_rows)
        if out.ndim == 3:  # in parts
            out = out.float().sum(1).to(x.dtype)
        return self.group.reduce_scatter(out.unflatten(0, (-1, len(x))))


def data_parallel_table(ops: Ops, group: Group) -> Ops:
    """The table ``ops`` for a rank that shares nothing but the experts."""
    return replace(ops, experts=ExpertExchange(ops, group).experts)


def parallel_table(shard: VocabularyShard) -> Ops:
    """The table of operations for a rank that has a ``shard``."""
    return replace(
        shard.ops,
        reduce=shard.group.sum,
        embed=shard.embed,
        head=shard.head,
        argmax=shard.argmax,
        draw=shard.draw,
        score=shard.score,
        penalize=shard.penalize,
    )
