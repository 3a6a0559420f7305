"""Several processes that compute one model, a shard each: tensor parallelism.

Rank 0 is the process of the engine: it schedules, and tells the others of each step
what they need for their part of it, the flat int32 array and the sampling tensors.
They know no requests. A line of JSON says what comes, over a link that ends with rank
0; the numbers come by broadcast. Then all ranks do the same, and meet in the operations
of `model/parallel.py`.

`Ranks` are the same to the engine where there is one process alone.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from simplellm.base.config import EngineConfig, ModelConfig, expect
from simplellm.base.grammar import GrammarError
from simplellm.base.request import EngineError
from simplellm.checkpoint.sharding import OPTION, Shard, ShardedSource, check_shards
from simplellm.checkpoint.source import Source
from simplellm.engine.sampler import SamplingTensors
from simplellm.model.machine import dtype_name
from simplellm.model.ops import Ops
from simplellm.model.parallel import Group, parallel
from simplellm.sampling.filters import Filters
from simplellm.sampling.logprobs import PromptTargets
from simplellm.sampling.masks import Mask
from simplellm.sampling.penalties import TokenCounts

START_SECONDS = 120.0  # until the processes are there
REPLY_SECONDS = 30.0  # that a rank may be behind the others
END_SECONDS = 3.0  # between the end of the link and that of a process
LOOK_SECONDS = 0.25  # between two looks at whether all live
ALIGNMENT = 8  # bytes, of a tensor in a message


class Ranks:
    """The ranks that compute together: here one alone."""

    size = 1

    def shard(self, source: Source) -> Source:
        """What this rank has of the weights."""
        return source

    def operations(self, ops: Ops, model: ModelConfig) -> Ops:
        """The table ``ops`` for its part of a ``model``."""
        return ops

    def least(self, number: int) -> int:
        """The least that any rank says, once all of them have loaded."""
        return number

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load inside of this, which ends all ranks if that fails."""
        yield

    def forward(
        self,
        flat: Tensor,
        shape: Sequence[int],
        count: int,
        copies: Sequence[tuple[int, int]],
        targets: Sequence[PromptTargets],
    ) -> None:
        """Let the others compute a step, too: their part in `Runner.compute`."""

    def sample(
        self,
        count: int,
        columns: SamplingTensors,
        steps: Tensor,
        counts: TokenCounts | None,
        mask: Mask | None,
    ) -> None:
        """Let the others choose tokens, too: their part in `Runner.choose`."""

    def own(
        self, columns: SamplingTensors, mask: Mask | None
    ) -> tuple[SamplingTensors, Mask | None]:
        """Biases and mask for this rank's part of the vocabulary."""
        return columns, mask

    def watch(self, wake: Callable[[], object]) -> None:
        """Call ``wake`` once a rank has ended; then `check` says which."""

    def check(self, error: Exception | None = None) -> None:
        """Raise EngineError if a rank has ended, or if ``error`` has parted them."""

    def close(self) -> None:
        """End the other ranks."""


ALONE = Ranks()


class TensorParallel(Ranks):
    """One of several ranks. ``group`` are all of them, once they have met."""

    group: Group
    tokens: range  # of the vocabulary, this rank's

    def shard(self, source: Source) -> Source:
        here = Shard(self.group.rank, self.size)
        self.tokens = here.vocabulary(source.config)
        return ShardedSource(source, here, self.group.max)

    def operations(self, ops: Ops, model: ModelConfig) -> Ops:
        return parallel(ops, self.group, self.tokens, model.vocab_size)

    def least(self, number: int) -> int:
        return int(self.group.min(torch.tensor([number]))[0])

    def own(
        self, columns: SamplingTensors, mask: Mask | None
    ) -> tuple[SamplingTensors, Mask | None]:
        start, stop = self.tokens.start, self.tokens.stop
        if columns.bias is not None:
            rows, tokens, values = columns.bias
            here = (tokens >= start) & (tokens < stop)
            bias = rows[here], tokens[here] - start, values[here]
            columns = replace(columns, bias=bias)
        if mask is not None:  # ranks part between words
            bits = mask.bits[:, start // 32 : -(-stop // 32)].contiguous()
            mask = replace(mask, bits=bits)
        return columns, mask


class Link:
    """Lines of JSON between rank 0 and another one."""

    def __init__(self, link: socket.socket) -> None:
        self.link, self.lines = link, link.makefile("rb")

    def send(self, message: Mapping[str, Any]) -> None:
        self.link.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message; None once the other end is closed."""
        line = self.lines.readline()
        return dict(json.loads(line)) if line else None

    def close(self) -> None:
        self.lines.close()
        self.link.close()


class Leader(TensorParallel):
    """Rank 0, which starts the others. ``options`` are those of `follow` below."""

    def __init__(self, size: int, options: Mapping[str, Any]) -> None:
        self.size, self.processes = size, list[subprocess.Popen[bytes]]()
        self.links: list[Link] = []
        self.counts: Tensor | None = None  # of the tables that all ranks have
        self.closed = False
        self.folder = TemporaryDirectory(prefix="simplellm-")
        with self.loading():
            for rank in range(1, size):
                self._spawn()
                place = {"folder": self.folder.name, "rank": rank, "size": size}
                self.links[-1].send({**place, **options})
            for rank, link in enumerate(self.links, 1):
                link.link.settimeout(START_SECONDS)
                self._hear(rank)
                link.link.settimeout(None)
            self.group = Group(self.folder.name, 0, size, REPLY_SECONDS)

    def _spawn(self) -> None:
        """A process in a group of its own: Ctrl-C in a terminal is for rank 0 alone."""
        ours, theirs = socket.socketpair()
        self.links.append(Link(ours))
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-m", "simplellm.api.follower", str(number)]
            process = subprocess.Popen(command, pass_fds=[number], process_group=0)
        self.processes.append(process)

    def _hear(self, rank: int) -> None:
        """Wait for a rank that does something. Raises EngineError if it has failed."""
        reply = self.links[rank - 1].receive()
        if reply is None:
            status = self.processes[rank - 1].wait(END_SECONDS)
            raise EngineError(f"rank {rank} ended with status {status} while it loaded")
        if "failed" in reply:
            raise EngineError(f"rank {rank} could not load: {reply['failed']}")

    @contextmanager
    def loading(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def least(self, number: int) -> int:
        for rank in range(1, self.size):
            self._hear(rank)  # it has loaded, which may take long
        least = super().least(number)
        self.folder.cleanup()  # all have met, and nobody would if we are killed
        return least

    def _tell(
        self, call: str, tensors: Sequence[Tensor | None], **numbers: Any
    ) -> None:
        """Send a message to all ranks: what to do, and with which tensors."""
        kinds = [t if t is None else [dtype_name(t.dtype), [*t.shape]] for t in tensors]
        for link in self.links:
            link.send({"call": call, "tensors": kinds, **numbers})
        self.group.broadcast(torch.cat([as_bytes(t) for t in tensors if t is not None]))

    def forward(
        self,
        flat: Tensor,
        shape: Sequence[int],
        count: int,
        copies: Sequence[tuple[int, int]],
        targets: Sequence[PromptTargets],
    ) -> None:
        scored = [(target.row, target.most) for target in targets]
        step = {"shape": shape, "count": count, "copies": copies, "scored": scored}
        self._tell("forward", [flat, *(t.tokens for t in targets)], **step)

    def sample(
        self,
        count: int,
        columns: SamplingTensors,
        steps: Tensor,
        counts: TokenCounts | None,
        mask: Mask | None,
    ) -> None:
        new = counts is not None and counts.in_prompt is not self.counts
        self.counts = None if counts is None else counts.in_prompt
        tables = [getattr(counts, name) if new else None for name in TABLES]
        *filters, some_top_k, some_top_p = columns.filters or (None,) * 5
        tensors = [columns.seeds, columns.temperature, steps, columns.full_rows]
        tensors += [*(columns.bias or (None,) * 3), *filters, *tables]
        tensors += [None, None] if mask is None else [mask.rows, mask.bits]
        self._tell(
            "sample",
            tensors,
            count=count,
            random=columns.random,
            logprobs=columns.logprobs,
            filtered=[some_top_k, some_top_p],
            counting=counts is not None,
        )

    def watch(self, wake: Callable[[], object]) -> None:
        def look() -> None:
            while not self.closed:
                if any(process.poll() is not None for process in self.processes):
                    wake()
                    return
                time.sleep(LOOK_SECONDS)

        threading.Thread(target=look, name="simplellm-ranks", daemon=True).start()

    def check(self, error: Exception | None = None) -> None:
        if isinstance(error, GrammarError):  # which is found out between two messages
            return
        for rank, process in enumerate(self.processes, 1):
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(0 if error is None else LOOK_SECONDS)
                raise EngineError(f"rank {rank} ended with status {status}") from error
        if error is not None:
            raise EngineError(f"the ranks are out of step: {error}") from error

    def close(self) -> None:
        self.closed = True
        for link in self.links:
            link.close()
        end = time.monotonic() + END_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:  # it waits for somebody else
                process.kill()
                process.wait()
        self.folder.cleanup()


# What `TokenCounts` has of a step's rows.
TABLES = ("rows", "in_prompt", "in_output", "repetition", "presence", "frequency")


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes, uint8, and padding to whole units of ALIGNMENT."""
    data = tensor.cpu().contiguous().flatten().view(torch.uint8)
    return torch.nn.functional.pad(data, (0, -len(data) % ALIGNMENT))


class Follower(TensorParallel):
    """Another rank than 0: it does what it is told by ``link``."""

    def __init__(self, link: Link, folder: str, rank: int, size: int) -> None:
        self.link, self.size = link, size
        link.send({})
        self.group = Group(folder, rank, size, REPLY_SECONDS)

    def least(self, number: int) -> int:
        self.link.send({})
        return super().least(number)

    def follow(self, runner: Any) -> None:
        """Take part in all steps with this rank's `Runner`, until rank 0 ends."""
        counts = TokenCounts(runner.model.config.vocab_size, runner.device)
        while (message := self.link.receive()) is not None:
            tensors = self._receive(message["tensors"])
            count = message["count"]
            if message["call"] == "forward":
                flat, *tokens = (tensor for tensor in tensors if tensor is not None)
                scored = zip(tokens, message["scored"], strict=True)
                targets = [
                    PromptTargets(None, 0, row, ids, most)
                    for ids, (row, most) in scored
                ]
                runner.pool.copy(message["copies"])
                runner.compute(flat, message["shape"], count, targets)
                continue
            columns, steps, mask, tables = sampling_tensors(tensors, message)
            if tables[0] is not None:
                for name, table in zip(TABLES, tables, strict=True):
                    setattr(counts, name, table)
            counting = counts if message["counting"] else None
            runner.choose(count, columns, steps, counting, mask)

    def _receive(self, kinds: Sequence[Any]) -> list[Tensor | None]:
        """The tensors that a message announces."""
        empty = [
            None
            if kind is None
            else torch.empty(kind[1], dtype=getattr(torch, kind[0]))
            for kind in kinds
        ]
        sizes = [0 if t is None else t.nbytes + -t.nbytes % ALIGNMENT for t in empty]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        self.group.broadcast(data)
        parts = zip(empty, data.split(sizes), strict=True)
        return [
            None if t is None else part[: t.nbytes].view(t.dtype).view(t.shape)
            for t, part in parts
        ]


def sampling_tensors(
    tensors: Sequence[Any], message: Mapping[str, Any]
) -> tuple[SamplingTensors, Tensor, Mask | None, Sequence[Any]]:
    """The columns, steps, mask and tables of `Leader.sample`."""
    seeds, temperature, steps, full_rows, *rest = tensors
    bias, filters, tables, (rows, bits) = rest[:3], rest[3:6], rest[6:12], rest[12:]
    columns = SamplingTensors(
        seeds=seeds,
        temperature=temperature,
        filters=None if filters[0] is None else Filters(*filters, *message["filtered"]),
        bias=None if bias[0] is None else (bias[0], bias[1], bias[2]),
        random=message["random"],
        logprobs=message["logprobs"],
        full_rows=full_rows,
    )
    return columns, steps, None if rows is None else Mask(rows, bits), tables


def start_ranks(
    config: EngineConfig,
    model: ModelConfig,
    path: str | Path | None,
    dtype: torch.dtype,
    device: torch.device,
    random_weights: bool = False,
    seed: int | None = None,
) -> Ranks:
    """The ranks for ``config``, which is resolved; those beside this one are started.

    The other arguments are those of `load_model`, by which they load, too. Raises
    ValueError for a model that isn't cut in so many, and on a GPU, where several ranks
    can't run yet; EngineError if one of them doesn't start.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return ALONE
    check_shards(model, size)
    expected = "1 on a GPU: several run on a CPU only yet"
    expect(device.type == "cpu", OPTION, size, expected)
    options = {
        "path": None if path is None else os.fspath(path),
        "config": asdict(config),
        "dtype": dtype_name(dtype),
        "device": str(device),
        "random_weights": random_weights,
        "seed": seed,
        "threads": torch.get_num_threads(),  # as many, for the same rounding
    }
    return Leader(size, options)
