"""Several processes that compute one model, a shard each: tensor parallelism.

Rank 0 is the process of the engine: it schedules, and tells the others of each step
what they need for their part of it, the flat int32 array and the sampling tensors.
They know no requests. A line of JSON says what comes, over a link that ends with rank
0; the numbers come by broadcast or, for GPUs, lie in memory that all processes share.
Then all ranks do the same, and meet in the operations of `model/parallel.py`.

`Ranks` are the same to the engine where there is one process alone.
"""

import json
import math
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplellm.base.config import EngineConfig, ModelConfig
from simplellm.base.grammar import GrammarError
from simplellm.base.host_memory import pinned
from simplellm.base.request import EngineError
from simplellm.checkpoint.mxfp4 import Weight
from simplellm.checkpoint.sharding import Shard, ShardedSource
from simplellm.checkpoint.source import Source
from simplellm.engine.graphs import CaptureShape
from simplellm.engine.sampler import SamplerOutput, SamplingTensors
from simplellm.engine.stall_detector import Progress, StallDetector
from simplellm.model.machine import dtype_name
from simplellm.model.ops import Ops
from simplellm.model.parallel import Group, VocabularyShard, parallel_table
from simplellm.sampling.filters import Filters
from simplellm.sampling.logprobs import PromptTargets
from simplellm.sampling.masks import Mask
from simplellm.sampling.penalties import TokenCounts

START_SECONDS = 120.0  # until the processes are there
REPLY_SECONDS = 30.0  # that a rank may be behind the others
END_SECONDS = 3.0  # between the end of the link and that of a process
HANG_SECONDS = 5.0  # that a rank may be behind and do nothing
LOAD_SECONDS = 120.0  # that it may do nothing while it loads
POLL_SECONDS = 0.25  # between two looks at whether all live
ALIGNMENT = 8  # bytes, of a tensor in a message


class ForwardPass(NamedTuple):
    """A rank's part in the forward pass of a step: see `Runner.compute`."""

    flat: Tensor  # int32, a `Batch` of these sizes
    sizes: Sequence[int]  # as in `Runner.view`
    samples: int
    copies: Sequence[tuple[int, int]]  # of pages, before it
    targets: Sequence[PromptTargets]
    graph: CaptureShape | None  # of what is replayed


class TokenChoice(NamedTuple):
    """A rank's part in choosing tokens: see `Runner.choose_tokens`."""

    samples: int
    tensors: SamplingTensors
    output_lengths: Tensor  # int64 [samples], as in `sample`
    counts: TokenCounts | None
    mask: Mask | None


class Ranks:
    """The ranks that compute together: here one alone."""

    size = 1
    schedules = True  # whether this one says what is computed, as the first does
    has_requests = True  # of its own; else it computes a part of others'

    def shard(self, source: Source, config: EngineConfig) -> Source:
        """What this rank has of the weights."""
        return source

    def local_vocabulary(self, model: ModelConfig) -> ModelConfig:
        """A ``model`` with as many tokens as this rank has logits of."""
        return model

    def operations(self, ops: Ops, model: ModelConfig, dtype: torch.dtype) -> Ops:
        """The table ``ops`` for its part of a ``model``, computed in ``dtype``."""
        return ops

    def operations_alone(self, ops: Ops) -> Ops:
        """The table of which `operations` has made ``ops``: nobody is waited for."""
        return ops

    def whole(self, weight: Weight) -> Weight:
        """All rows of the embedding or the head, of which this rank has a part.

        All ranks call it, and have room for them. Raises ValueError if it's quantized.
        """
        return weight

    def min_once_loaded(self, number: int) -> int:
        """The least ``number`` of any rank, once all of them have loaded."""
        return number

    def min_of_all(self, number: int) -> int:
        """The least ``number`` of any rank."""
        return number

    def staging(self, size: int, device: torch.device) -> list[Tensor]:
        """Two arrays int32 [size] of the host for steps' numbers."""
        return [pinned([size], torch.int32, device) for _ in range(2)]

    @contextmanager
    def guard_load(self) -> Iterator[None]:
        """Inside of this a rank loads; if that fails, all ranks end."""
        yield

    def send_forward(self, forward: ForwardPass) -> None:
        """Let the others compute a step, too."""

    def send_sample(self, choice: TokenChoice) -> None:
        """Let the others choose tokens, too."""

    def local_sampling(
        self, tensors: SamplingTensors, mask: Mask | None
    ) -> tuple[SamplingTensors, Mask | None]:
        """Biases and mask for this rank's part of the vocabulary."""
        return tensors, mask

    def watch(self, wake: Callable[[], object]) -> None:
        """Call ``wake`` once a rank has ended; then `check` says which."""

    @contextmanager
    def guard_wait(self) -> Iterator[None]:
        """Inside of this the host waits for the GPU. Raises EngineError if too long."""
        yield

    def check(self, error: Exception | None = None) -> None:
        """Raise EngineError if a rank has ended, or ``error`` put them out of step."""

    def close(self) -> None:
        """End the other ranks."""


ALONE = Ranks()


class ParallelRank(Ranks):
    """One of several ranks. ``group`` are all of them, once they have met."""

    group: Group
    alone: Ops  # the table of a rank alone

    def operations_alone(self, ops: Ops) -> Ops:
        return self.alone

    def min_of_all(self, number: int) -> int:
        return int(self.group.min(torch.tensor([number]))[0])


class TensorParallel(ParallelRank):
    """One of several ranks that have a part of each weight."""

    tokens: range  # of the vocabulary, this rank's
    vocab_size: int
    owned: tuple[Any, Any] = None, None  # tensors, and this rank's part of them

    def shard(self, source: Source, config: EngineConfig) -> Source:
        here = Shard(self.group.rank, self.size, config.enable_expert_parallel)
        self.tokens = here.vocabulary(source.config)
        self.vocab_size = source.config.vocab_size
        return ShardedSource(source, here, self.group.max)

    def local_vocabulary(self, model: ModelConfig) -> ModelConfig:
        return replace(model, vocab_size=len(self.tokens))

    def operations(self, ops: Ops, model: ModelConfig, dtype: torch.dtype) -> Ops:
        self.alone = ops
        shard = VocabularyShard(ops, self.group, self.tokens, model.vocab_size)
        if ops.name != "Triton":
            return parallel_table(shard)
        from simplellm.model.kernels.reduce import fuse_reduce  # where Triton is

        return fuse_reduce(shard, dtype, model.hidden_size)

    def whole(self, weight: Weight) -> Weight:
        if not isinstance(weight, Tensor):
            raise ValueError(
                "the model's embedding or head is quantized, and several ranks share "
                "it; expected an EAGLE-3 head with an lm_head.weight of its own"
            )
        every = weight.new_zeros(self.vocab_size, weight.shape[1])
        every[self.tokens.start : self.tokens.stop] = weight
        return self.group.sum(every)

    def local_sampling(
        self, tensors: SamplingTensors, mask: Mask | None
    ) -> tuple[SamplingTensors, Mask | None]:
        start, stop = self.tokens.start, self.tokens.stop
        if tensors.bias is not None:
            if tensors is not self.owned[0]:  # to choose some waits for the GPU
                rows, tokens, values = tensors.bias
                here = (tokens >= start) & (tokens < stop)
                bias = rows[here], tokens[here] - start, values[here]
                self.owned = tensors, replace(tensors, bias=bias)
            tensors = self.owned[1]
        if mask is not None:  # ranks part between words
            bits = mask.bits[:, start // 32 : -(-stop // 32)].contiguous()
            mask = replace(mask, bits=bits)
        return tensors, mask


class Link:
    """Lines of JSON between rank 0 and another one, and tensors after some of them."""

    def __init__(self, link: socket.socket) -> None:
        self.link, self.lines = link, link.makefile("rb")

    def send(self, message: Mapping[str, Any], data: bytes = b"") -> None:
        self.link.sendall(json.dumps(message).encode() + b"\n" + data)

    def send_tensors(
        self, message: Mapping[str, Any], tensors: Sequence[Tensor | None]
    ) -> None:
        """A message with its ``tensors``, for `receive_tensors`."""
        announced = {**message, "tensors": kinds_of(tensors)}
        self.send(announced, as_bytes(tensors).numpy().tobytes())

    def receive(self) -> dict[str, Any] | None:
        """The next message; None once the other end is closed."""
        line = self.lines.readline()
        return dict(json.loads(line)) if line else None

    def receive_tensors(self, kinds: Sequence[Any]) -> list[Any]:
        """The tensors that the message announced; see `tensors_of`.

        Raises ConnectionError if the other end is closed before.
        """
        size = sum(sizes_of(kinds))
        data = torch.empty(size, dtype=torch.uint8)
        if size and self.lines.readinto(data.numpy()) < size:  # type: ignore[arg-type]
            raise ConnectionError("the other end is closed")
        return tensors_of(data, kinds)

    def close(self) -> None:
        self.lines.close()
        self.link.close()


class StepSender(Ranks):
    """Sends each step to other ranks, by `send_call`."""

    memory: "SharedMemory"  # that they have, too
    sampling_tensors: SamplingTensors | None = None  # that they have
    counts: Tensor | None = None  # of the tables that they have

    def send_call(
        self, call: str, tensors: Sequence[Tensor | None], **numbers: Any
    ) -> None:
        """Send a message: what to do, and with which tensors."""
        raise NotImplementedError

    def send_forward(self, forward: ForwardPass) -> None:
        flat, sizes, count, copies, targets, graph = forward
        scored = [(target.row, target.most) for target in targets]
        step = {"sizes": sizes, "count": count, "copies": copies, "scored": scored}
        step |= {"graph": graph, "span": self.memory.span_of(flat)}
        sent = None if step["span"] else flat
        self.send_call("forward", [sent, *(t.tokens for t in targets)], **step)

    def send_sample(self, choice: TokenChoice) -> None:
        count, tensors, lengths, counts, mask = choice
        new = counts is not None and counts.in_prompt is not self.counts
        self.counts = None if counts is None else counts.in_prompt
        tables = [(name, getattr(counts, name)) for name in TABLES] if new else None
        known, self.sampling_tensors = self.sampling_tensors, tensors
        values = lengths, None if tensors is known else tensors, tables, mask
        sent: list[Tensor | None] = []
        numbers = {"count": count, "counting": counts is not None}
        numbers["values"] = without_tensors(values, sent)
        self.send_call("sample", sent, **numbers)


class Leader(ParallelRank):
    """Rank 0, which starts the others.

    ``options`` are the arguments of `follow` in api/follower.py that all have alike.
    """

    def __init__(
        self, size: int, options: Mapping[str, Any], device: torch.device
    ) -> None:
        self.size, self.processes = size, list[subprocess.Popen[bytes]]()
        self.links: list[Link] = []
        self.closed = False
        self.aborted = ""  # why the GPUs wait no longer
        self.hung = ""  # which rank hangs, if that is why
        self.loading_rank = 0  # that is waited for
        self.since: float | None = None  # when somebody began to wait for the GPU
        self.wake: Callable[[], object] = lambda: None
        self.folder = TemporaryDirectory(prefix="simplellm-")
        self.memory = SharedMemory(os.memfd_create("simplellm"))
        self.counts_file = Progress.create(size)
        self.progress = Progress(self.counts_file, size)
        with self.guard_load():
            for rank in range(1, size):
                self._spawn()
                start = {"folder": self.folder.name, "rank": rank, "size": size}
                start["device"] = str(device_of(device, rank))
                start["memory"] = self.memory.number
                start["progress"] = self.counts_file
                self.links[-1].send({**start, **options})
            for rank, link in enumerate(self.links, 1):
                link.link.settimeout(START_SECONDS)
                self._wait_for(rank)
                link.link.settimeout(None)
            self.group = Group(self.folder.name, 0, size, REPLY_SECONDS, device)
            self.group.before = self.advance
            threading.Thread(target=self._watch, daemon=True).start()

    def advance(self) -> None:
        """The others' results are wanted next."""
        self.progress.advance(0)

    def _spawn(self) -> None:
        """A process in a group of its own: Ctrl-C in a terminal is for rank 0 alone."""
        ours, theirs = socket.socketpair()
        self.links.append(Link(ours))
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-m", "simplellm.api.follower", str(number)]
            files = number, self.memory.number, self.counts_file
            process = subprocess.Popen(command, pass_fds=files, process_group=0)
        self.processes.append(process)

    def _wait_for(self, rank: int) -> None:
        """Wait until a rank is done with its part. Raises EngineError if it failed."""
        reply = self.links[rank - 1].receive()
        if reply is None:
            status = self.processes[rank - 1].wait(END_SECONDS)
            wrong = f"rank {rank} ended with status {status} while it loaded"
            raise EngineError(self.hung or wrong)
        self._check_reply(rank, reply)

    @staticmethod
    def _check_reply(rank: int, reply: Mapping[str, Any]) -> None:
        if "failed" in reply:
            raise EngineError(f"rank {rank} could not load: {reply['failed']}")

    def _check_replies(self) -> None:
        """Raise EngineError if a rank has said why it ends, whatever failed after."""
        for rank, link in enumerate(self.links, 1):
            link.link.settimeout(POLL_SECONDS)
            with suppress(OSError):
                self._check_reply(rank, link.receive() or {})

    @contextmanager
    def guard_load(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            try:
                if not isinstance(error, EngineError):
                    self._check_replies()
                    self._check_processes(error)
            finally:
                self.close()
            raise

    def min_once_loaded(self, number: int) -> int:
        for rank in range(1, self.size):
            self.loading_rank = rank
            self._wait_for(rank)  # it has loaded, which may take long
        self.loading_rank = 0
        for link in self.links:
            link.send({})
        least = self.min_of_all(number)
        self.folder.cleanup()  # all have met, and nobody would if we are killed
        return least

    def watch(self, wake: Callable[[], object]) -> None:
        self.wake = wake

    def _watch(self) -> None:
        """Until all is over, or a rank ends or is late: then nothing waits for it."""
        detectors = [StallDetector(process.pid) for process in self.processes]
        while not self.closed and not self.aborted:
            since = self.since
            if any(process.poll() is not None for process in self.processes):
                self.aborted = "a rank has ended"
            elif since is not None and time.monotonic() - since > REPLY_SECONDS:
                self.aborted = f"a step has timed out, after {REPLY_SECONDS:.0f} s"
            elif (rank := self._hung_rank(detectors)) is not None:
                self.hung = f"rank {rank} hangs: the others wait for it, and it has "
                self.hung += f"done nothing for {HANG_SECONDS:.0f} s"
                self.aborted = self.hung
                self.processes[rank - 1].kill()  # which ends the others' wait
            else:
                time.sleep(POLL_SECONDS)
        if self.aborted:
            self._abort()
            self.wake()

    def _hung_rank(self, detectors: Sequence[StallDetector]) -> int | None:
        """A rank that hangs, if one does; called every POLL_SECONDS.

        One that loads may do nothing for longer: files may come from far away.
        """
        for rank, detector in enumerate(detectors, 1):
            loads = rank == self.loading_rank
            late = loads or self.progress.is_late(rank)
            checks = detector.check(late, self.progress.counts[rank])
            if checks * POLL_SECONDS >= (LOAD_SECONDS if loads else HANG_SECONDS):
                return rank
        return None

    def _abort(self) -> None:
        """Have kernels of this GPU wait for other ranks no longer; returns at once."""
        if (group := getattr(self, "group", None)) is not None:
            threading.Thread(target=group.abort, daemon=True).start()

    @contextmanager
    def guard_wait(self) -> Iterator[None]:
        self.since = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            self.check(error)
        finally:
            self.since = None
        if self.aborted:
            self.check(EngineError(self.aborted))

    def check(self, error: Exception | None = None) -> None:
        if isinstance(error, GrammarError):  # which is found out between two messages
            return
        self._check_processes(error)
        if error is not None or self.aborted:
            why = error or self.aborted
            raise EngineError(f"the ranks are out of step: {why}") from error

    def _check_processes(self, error: BaseException | None) -> None:
        """Raise EngineError if a rank has ended, which may be the cause of ``error``.

        With an error it waits a moment: a rank may be about to end.
        """
        if self.hung:
            raise EngineError(self.hung) from error
        ended = []
        for rank, process in enumerate(self.processes, 1):
            with suppress(subprocess.TimeoutExpired):
                ended += [(process.wait(0 if error is None else POLL_SECONDS), rank)]
        if ended:  # one that was killed, if so, and not those that missed it
            status, rank = min(ended)
            raise EngineError(f"rank {rank} ended with status {status}") from error

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
        self._abort()
        self.memory.close()
        if self.counts_file >= 0:
            os.close(self.counts_file)
            self.counts_file = -1
        self.folder.cleanup()


class TensorLeader(Leader, TensorParallel, StepSender):
    """Rank 0 of ranks that all do the same."""

    def staging(self, size: int, device: torch.device) -> list[Tensor]:
        if device.type != "cuda":
            return super().staging(size, device)
        self.memory.resize(2 * 4 * size)
        for link in self.links:
            link.send({})
        return self.memory.arrays(2, size, device)

    def send_call(
        self, call: str, tensors: Sequence[Tensor | None], **numbers: Any
    ) -> None:
        for link in self.links:
            link.send({"call": call, "tensors": kinds_of(tensors), **numbers})
        if self.group.nccl is not None:  # what they wait for is not on the host
            self.advance()
        if len(data := as_bytes(tensors)):
            self.group.broadcast(data)


# What `TokenCounts` has of a step's rows.
TABLES = ("rows", "in_prompt", "in_output", "repetition", "presence", "frequency")


def without_tensors(value: Any, tensors: list[Tensor | None]) -> Any:
    """``value`` as JSON has it, for `with_tensors`: its tensors go to ``tensors``.

    Of a dataclass or a named tuple it has the values of all fields, in their order.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, tuple | list):
        return [without_tensors(one, tensors) for one in value]
    return value


def with_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    """What `without_tensors` was given, but with tuples for all that has parts."""
    if isinstance(value, dict):
        return tensors[value["tensor"]]
    if isinstance(value, list):
        return tuple(with_tensors(one, tensors) for one in value)
    return value


def kinds_of(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Each tensor's dtype and shape, as JSON has them; None for none."""
    return [t if t is None else [dtype_name(t.dtype), [*t.shape]] for t in tensors]


def as_bytes(tensors: Sequence[Tensor | None]) -> Tensor:
    """All tensors' bytes, uint8, each with padding to whole units of ALIGNMENT."""
    parts = [
        t.contiguous().flatten().view(torch.uint8) for t in tensors if t is not None
    ]
    padded = [torch.nn.functional.pad(x, (0, -len(x) % ALIGNMENT)) for x in parts]
    return torch.cat(padded) if padded else torch.empty(0, dtype=torch.uint8)


def sizes_of(kinds: Sequence[Any]) -> list[int]:
    """How many bytes each tensor has, its padding included."""
    sizes = []
    for kind in kinds:
        size = math.prod(kind[1]) * getattr(torch, kind[0]).itemsize if kind else 0
        sizes.append(size + -size % ALIGNMENT)
    return sizes


def tensors_of(data: Tensor, kinds: Sequence[Any]) -> list[Any]:
    """The tensors of which `as_bytes` has made ``data``, as `kinds_of` says."""
    tensors: list[Any] = []
    for kind, part in zip(kinds, data.split(sizes_of(kinds)), strict=True):
        if kind is None:
            tensors.append(None)
            continue
        dtype, shape = getattr(torch, kind[0]), kind[1]
        used = part[: math.prod(shape) * dtype.itemsize]
        tensors.append(used.view(dtype).view(shape))
    return tensors


def device_of(first: torch.device, rank: int) -> torch.device:
    """Where a rank computes, if rank 0 does on the ``first`` one."""
    if first.type == "cpu":
        return first
    return torch.device(first.type, (first.index or 0) + rank)


class SharedMemory:
    """Memory of the host that several processes have, ``number`` its open file.

    It is pinned if there are GPUs, which copy from it by themselves.
    """

    def __init__(self, number: int) -> None:
        self.number, self.pinned = number, False
        self.all = torch.empty(0, dtype=torch.int32)

    def resize(self, nbytes: int) -> None:
        """Make it so large; before anybody calls `arrays`."""
        os.ftruncate(self.number, nbytes)

    def arrays(self, count: int, size: int, device: torch.device) -> list[Tensor]:
        """So many arrays int32 [size], the same in all processes."""
        shared = mmap.mmap(self.number, count * 4 * size)
        self.all = torch.frombuffer(shared, dtype=torch.int32)
        if device.type == "cuda":
            status = torch.cuda.cudart().cudaHostRegister(
                self.all.data_ptr(), self.all.nbytes, 0
            )
            torch.cuda.check_error(status)
            self.pinned = True
        return [*self.all.split(size)]

    def span_of(self, array: Tensor) -> tuple[int, int] | None:
        """Where a part of it begins and ends, in numbers; None for other arrays."""
        first = (array.data_ptr() - self.all.data_ptr()) // 4
        if not 0 <= first < len(self.all):
            return None
        return first, first + len(array)

    def close(self) -> None:
        """Give it back, once nothing reads it."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.all.data_ptr())
        self.all, self.pinned = torch.empty(0, dtype=torch.int32), False
        if self.number >= 0:
            os.close(self.number)
        self.number = -1


class Follower(ParallelRank):
    """A rank other than 0, which carries out the messages of ``link``."""

    schedules = False

    def __init__(
        self,
        link: Link,
        folder: str,
        rank: int,
        size: int,
        device: torch.device,
        memory: int,
        progress: int,
    ) -> None:
        self.link, self.size, self.device = link, size, device
        self.memory = SharedMemory(memory)
        counts = Progress(progress, size)
        link.send({})
        self.group = Group(folder, rank, size, REPLY_SECONDS, device)
        self.advance = partial(counts.advance, rank)
        self.group.before = self.advance

    def _next_message(self) -> dict[str, Any]:
        """The next message. Raises ConnectionError if there will be none."""
        if (message := self.link.receive()) is None:
            raise ConnectionError("rank 0 has ended")
        return message

    def min_once_loaded(self, number: int) -> int:
        self.link.send({})
        self._next_message()  # all have loaded
        return self.min_of_all(number)

    def follow(self, runner: Any) -> None:
        """Take part in all steps with this rank's `Runner`, until rank 0 ends."""
        counts = TokenCounts(runner.model.config.vocab_size, runner.device)
        tensors: SamplingTensors  # those of the latest message that has some
        sampled: SamplerOutput | None = None  # of the step under way
        while (message := self.link.receive()) is not None:
            kinds, count = message["tensors"], message["count"]
            if message["call"] == "forward":
                flat, *scored = self._receive(kinds, self.device)
                if span := message["span"]:
                    flat = self.memory.all[slice(*span)]
                pairs = zip(scored, message["scored"], strict=True)
                targets = [PromptTargets(None, 0, row, x, n) for x, (row, n) in pairs]
                graph = message["graph"] and CaptureShape(*message["graph"])
                how = message["sizes"], count, message["copies"], targets, graph
                forward = ForwardPass(flat, *how)
                runner.scores = runner.compute(forward, runner.graph_of(graph))
                self._has_launched()
                continue
            if message["call"] == "fetch":
                self._answer(runner, sampled, message)
                sampled = None
                continue
            values = with_tensors(message["values"], self._receive(kinds, self.device))
            lengths, fields_of_new, tables, mask = values
            if fields_of_new is not None:
                tensors = SamplingTensors(*fields_of_new)
                if tensors.filters is not None:
                    tensors = replace(tensors, filters=Filters(*tensors.filters))
            for name, table in tables or ():
                setattr(counts, name, table)
            counting = counts if message["counting"] else None
            mask = mask and Mask(*mask)
            choice = TokenChoice(count, tensors, lengths, counting, mask)
            sampled = runner.choose_tokens(choice)
            self._has_launched()

    def _receive(self, kinds: Sequence[Any], device: torch.device) -> list[Any]:
        """The tensors that a message announces, or None for each that is not there."""
        raise NotImplementedError

    def _has_launched(self) -> None:
        """The rank has done what a message said."""

    def _answer(
        self, runner: Any, sampled: SamplerOutput | None, message: Mapping[str, Any]
    ) -> None:
        """Send what a step gave that rank 0 doesn't know, as a ``message`` asks."""
        raise NotImplementedError


class TensorFollower(Follower, TensorParallel):
    """One of ranks that all do the same."""

    has_requests = False

    def staging(self, size: int, device: torch.device) -> list[Tensor]:
        if device.type != "cuda":
            return super().staging(size, device)
        self._next_message()  # it has its size
        return self.memory.arrays(2, size, device)

    def _has_launched(self) -> None:
        if self.group.nccl is not None:  # see `TensorLeader.send_call`
            self.advance()

    def _receive(self, kinds: Sequence[Any], device: torch.device) -> list[Any]:
        data = torch.empty(sum(sizes_of(kinds)), dtype=torch.uint8, device=device)
        if len(data):
            self.group.broadcast(data)
        return tensors_of(data, kinds)
