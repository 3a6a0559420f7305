"""Steps that the host only starts: static buffers, captured graphs, no waiting.

T packed tokens, B sequences, S of them sampling, P pages in a row of a table, V
vocabulary.
"""

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from simplellm.engine import Engine, EngineConfig, Flight
from simplellm.model import Transformer
from simplellm.paged import PagedCache
from simplellm.sampler import Columns, Sampled, prepare, sample, upload
from simplellm.scheduler import UNKNOWN, Job, Work

LOGGER = logging.getLogger("simplellm")


@dataclass(frozen=True)
class Group:
    """Where the layers of one group, full or sliding, find their keys and values."""

    slots: Tensor  # int32 [T], where to write; -1 for padding
    tables: Tensor  # int32 [B, P], pages from the first one in use
    offsets: Tensor  # int32 [B], the position where the first of them begins


@dataclass(frozen=True)
class Step:
    """What one forward pass needs beside the weights, all of it on the GPU.

    The first ``decodes`` sequences have one new token each; the others have chunks of
    their prompts. A padding row has the length 0.
    """

    tokens: Tensor  # int32 [T]; -1 - i stands for token i of the step before
    positions: Tensor  # int32 [T]
    lengths: Tensor  # int32 [B], positions in the cache after this step
    queries: Tensor  # int32 [B + 1], where each sequence's tokens begin
    samples: Tensor  # int32 [S], the tokens whose successors are wanted
    groups: tuple[Group, Group]
    decodes: int

    @staticmethod
    def size(tokens: int, sequences: int, pages: int) -> int:
        """How many numbers a step of this shape has."""
        return 4 * tokens + sequences * (5 + 2 * pages) + 1

    @classmethod
    def of(
        cls, flat: Any, tokens: int, sequences: int, pages: int, decodes: int
    ) -> "Step":
        """The views of one flat int32 array or tensor that make up a step."""
        place = 0

        def take(*shape: int) -> Any:
            nonlocal place
            count = math.prod(shape)
            place += count
            return flat[place - count : place].reshape(shape)

        def group() -> Group:
            return Group(take(tokens), take(sequences, pages), take(sequences))

        return cls(
            tokens=take(tokens),
            positions=take(tokens),
            lengths=take(sequences),
            queries=take(sequences + 1),
            samples=take(sequences),
            groups=(group(), group()),
            decodes=decodes,
        )


class Forward(Protocol):
    """A model's forward pass over a paged cache that never waits for the GPU."""

    vocab_size: int

    def compile(self, steps: Iterable[Callable[[], object]]) -> None:
        """Prepare what ``steps`` need, perhaps by doing them, in no order."""
        ...

    def __call__(self, step: Step, previous: Tensor) -> Tensor:
        """Hidden states [T, hidden]; ``previous`` int32, the tokens sampled last."""
        ...

    def head(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """The likeliest token of each row [S], int32; float32 ``logits`` [S, V] too."""
        ...

    def draw(
        self, logits: Tensor, best: Tensor, columns: Columns, steps: Tensor
    ) -> Tensor:
        """A random token of each row [S], int32, given the likeliest ones."""
        ...


def bucket_sizes(most: int) -> list[int]:
    """Batch sizes to capture: close together where a step's time depends on them."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224]
    sizes += range(256, most, 64)
    return [size for size in sizes if size < most] + [most]


@dataclass(frozen=True)
class Captured:
    """A decode step of one batch size, ready to be replayed."""

    size: int
    replay: Callable[[], None]


class CaptureError(RuntimeError):
    """A graph could not be recorded."""


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """Where to record graphs: PyTorch's own stream is of the GPU that came first."""
    return torch.cuda.Stream(device)


def record(run: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of what ``run`` starts on the GPU.

    ``pool`` is that of another graph, whose memory this one may share. Raises
    torch.OutOfMemoryError, or CaptureError if the driver or ``run`` does not allow it.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = capture_stream(torch.cuda.current_device())
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CaptureError(f"a CUDA graph was not recorded: {error}") from error
    return graph


class Runner:
    """Starts steps on the device; what they sampled can be had later.

    All that changes from step to step travels in one int32 array, which is copied to
    the same place on the device each time, so that a graph captured once finds it
    there. A token that the host has not seen yet is named by its place among those that
    the step before has sampled.
    """

    def __init__(
        self, forward: Forward, cache: PagedCache, config: EngineConfig, max_len: int
    ) -> None:
        self.forward, self.cache = forward, cache
        self.pages = -(-max_len // cache.manager.page_size)
        seqs = config.max_num_seqs
        size = Step.size(config.max_num_batched_tokens, seqs, self.pages)
        self.device = cache.k.device
        # Two on the host: one is written while the other may still be on its way.
        self.staging = [self._pinned(size) for _ in range(2)]
        self.landing = [self._pinned(seqs) for _ in range(2)]
        self.inputs = torch.zeros(size, dtype=torch.int32, device=self.device)
        self.output = torch.zeros(seqs, dtype=torch.int32, device=self.device)
        shape = seqs, forward.vocab_size
        self.logits = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self.turn = 0
        self.previous: dict[int, int] = {}  # job -> place of its token in the output
        self.captured: list[Captured] = []  # by size

    def _pinned(self, size: int) -> Tensor:
        # Only from pinned memory does a copy go on while the host does something else.
        pin = self.device.type == "cuda"
        return torch.zeros(size, dtype=torch.int32, pin_memory=pin)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int]) -> None:
        """Record a decode step for each batch size, the largest first.

        The smaller ones then find room in the memory that the largest has taken. Sizes
        for which there is no room are left out, with one line in the log, and the rest
        of them if the driver cannot record.
        """
        self.forward.compile([partial(self._try, size) for size in sizes])
        pool, cause = None, ""
        for size in sorted(sizes, reverse=True):
            step = self._padding(self.inputs, size)
            try:
                self._decode(step)  # compiles what is not compiled yet
                graph = record(partial(self._decode, step), pool)
            except torch.OutOfMemoryError as error:
                cause = str(error).partition("\n")[0]  # itself, it holds memory
                continue
            except CaptureError as error:
                cause = str(error).partition("\n")[0]
                break
            pool = graph.pool()
            self.captured.insert(0, Captured(size, graph.replay))
        if cause:
            LOGGER.warning(
                "CUDA graphs for %d of %d batch sizes only; other steps are slower. "
                "Why: %s. If it is memory, a smaller cache_bytes or max_num_seqs helps",
                len(self.captured),
                len(sizes),
                cause,
            )

    @torch.inference_mode()
    def _try(self, size: int) -> None:
        """A step of nothing but padding, whose results nobody reads.

        Several may be under way at once, and write over each other's.
        """
        self._decode(self._padding(torch.zeros_like(self.inputs), size))

    def _decode(self, step: Step) -> None:
        self._head(self.forward(step, self.output))

    def _head(self, hidden: Tensor) -> None:
        """Write the logits of hidden states [S, hidden], and the likeliest tokens."""
        count = len(hidden)
        self.output[:count] = self.forward.head(hidden, self.logits[:count])

    def _view(self, flat: Any, tokens: int, sequences: int, decodes: int) -> Step:
        return Step.of(flat, tokens, sequences, self.pages, decodes)

    def _padding(self, flat: Tensor, size: int) -> Step:
        """A decode step of so many rows, all of them padding."""
        step = self._view(flat, size, size, size)
        self._pad(step)
        return step

    def _pad(self, step: Step) -> None:
        """Make every row a padding row: of no length, and written nowhere."""
        step.tokens[:] = step.positions[:] = step.lengths[:] = 0
        step.queries[:] = step.samples[:] = 0
        for group in step.groups:
            group.slots[:] = -1
            group.tables[:] = group.offsets[:] = 0

    @torch.inference_mode()
    def start(self, works: Sequence[Work]) -> Tensor:
        """Start a step: float32 logits [S, V] of the works that sample.

        The likeliest tokens are in ``output``. The next step writes over both.
        """
        self.cache.copy_pages()
        tokens, batch = sum(work.length for work in works), len(works)
        graph = self._graph(works)
        decodes = next((n for n, w in enumerate(works) if w.length > 1), batch)
        if graph is not None:
            tokens = batch = decodes = graph.size
        self.turn ^= 1
        staging = self.staging[self.turn]
        self._fill(self._view(staging.numpy(), tokens, batch, decodes), works)
        size = Step.size(tokens, batch, self.pages)
        self.inputs[:size].copy_(staging[:size], non_blocking=True)
        sampling = [work.job.number for work in works if work.samples]
        self.previous = {number: place for place, number in enumerate(sampling)}
        if graph is not None:
            graph.replay()
        else:
            step = self._view(self.inputs, tokens, batch, decodes)
            hidden = self.forward(step, self.output)
            self._head(hidden[step.samples[: len(sampling)]])
        return self.logits[: len(sampling)]

    def finish(self, count: int, sampled: Sampled | None) -> Flight:
        """Let the first ``count`` tokens of the output come to the host.

        ``sampled`` has the logprobs if somebody asked for them.
        """
        landing = self.landing[self.turn][:count]
        landing.copy_(self.output[:count], non_blocking=True)
        landed = Sampled(landing)
        if sampled is not None and sampled.logprobs is not None and sampled.top:
            logprobs, ids, values = map(self._fetch, (sampled.logprobs, *sampled.top))
            landed = Sampled(landing, logprobs, (ids, values))
        arrived = torch.cuda.Event() if self.device.type == "cuda" else None
        if arrived:
            arrived.record()

        def wait() -> Sampled:
            if arrived:
                arrived.synchronize()
            return landed

        return wait

    def _fetch(self, x: Tensor) -> Tensor:
        """A copy of ``x`` that is on its way to the host."""
        pin = self.device.type == "cuda"
        place = torch.empty(x.shape, dtype=x.dtype, pin_memory=pin)
        return place.copy_(x, non_blocking=True)

    def _graph(self, works: Sequence[Work]) -> Captured | None:
        """The graph for a step that is nothing but decodes, if there is one."""
        if not all(work.length == 1 and work.samples for work in works):
            return None
        place = bisect_left(self.captured, len(works), key=lambda graph: graph.size)
        return self.captured[place] if place < len(self.captured) else None

    def _fill(self, step: Any, works: Sequence[Work]) -> None:
        """Write ``works`` into ``step``, a `Step` of numpy arrays."""
        manager, page_size = self.cache.manager, self.cache.manager.page_size
        self._pad(step)
        groups = step.groups[: len(manager.windows)]
        tokens: list[int] = []
        positions: list[int] = []
        for row, (job, start, length, _) in enumerate(works):
            tokens += job.tokens[start : start + length]
            if tokens[-1] == UNKNOWN:
                tokens[-1] = -1 - self.previous[job.number]
            positions += range(start, start + length)
            table = manager.table(job.number)
            for group, pages, first in zip(
                groups, table.groups, table.first, strict=True
            ):
                live = np.frombuffer(pages, dtype=np.int32)[first:]
                group.tables[row, : len(live)] = live
                group.offsets[row] = first * page_size
        # The rest is done for all rows at once: a call costs more than a number.
        count, batch = len(tokens), len(works)
        counts = [work.length for work in works]
        ends = np.cumsum(counts)
        step.tokens[:count], step.positions[:count] = tokens, positions
        step.lengths[:batch] = [work.start + work.length for work in works]
        step.queries[1 : batch + 1], step.queries[batch + 1 :] = ends, count
        samples = ends[[work.samples for work in works]] - 1
        step.samples[: len(samples)] = samples
        owners = np.repeat(np.arange(batch), counts)
        for group in groups:
            place = step.positions[:count] - group.offsets[owners]
            pages = group.tables[owners, place // page_size]
            group.slots[:count] = pages * page_size + place % page_size


@dataclass(frozen=True)
class GPUConfig(EngineConfig):
    """An `EngineConfig` with the defaults for a GPU, and its own three switches."""

    page_size: int = 64
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefill_chunk: int | None = 8192
    cuda_graphs: bool = True  # replay decode steps instead of starting each kernel
    overlap: bool = True  # schedule the next step while this one is computed
    batch_invariant: bool = False  # tokens do not depend on other requests; slower

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cuda_graphs", "overlap", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"{name} is {getattr(self, name)!r}; expected True or False"
                )
        # A kernel may have a program for each, and so many a launch at most.
        if self.max_num_batched_tokens + self.max_num_seqs >= 2**16 - 1:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and "
                f"max_num_seqs {self.max_num_seqs}; expected less than 65,535 together"
            )


class GraphEngine(Engine):
    """An engine that starts each step and reads its tokens while the next one runs.

    ``make_forward(model, cache, max_num_seqs)`` gives the forward pass.
    """

    config: GPUConfig

    def __init__(
        self,
        model: Transformer,
        config: GPUConfig,
        make_forward: Callable[[Transformer, PagedCache, int], Forward],
    ) -> None:
        super().__init__(model, config)
        if not isinstance(self.cache, PagedCache):
            raise ValueError(f"cache is {config.cache!r}; expected 'paged'")
        forward = make_forward(model, self.cache, config.max_num_seqs)
        self.runner = Runner(forward, self.cache, config, self.max_model_len)
        if config.cuda_graphs:
            self.runner.capture(bucket_sizes(config.max_num_seqs))

    @torch.inference_mode()
    def launch(self, works: Sequence[Work]) -> Flight:
        """Start to compute works, and to sample from what comes out."""
        logits = self.runner.start(works)
        jobs = [work.job for work in works if work.samples]
        sampled = None
        if jobs:
            columns = self.columns(jobs)
            # Whoever counts tokens must know them all before the next step.
            self.depth = int(self.config.overlap and not columns.penalties)
            sampled = self._sample(jobs, logits, columns)
        return self.runner.finish(len(jobs), sampled)

    def _sample(
        self, jobs: Sequence[Job], logits: Tensor, columns: Columns
    ) -> Sampled | None:
        """Put tokens in the place of the likeliest ones, unless all rows want these."""
        output = self.runner.output[: len(jobs)]
        changed = columns.bias is not None or columns.penalties
        if not (columns.random or changed or columns.logprobs is not None):
            return None
        steps = upload([job.num_output for job in jobs], torch.int64, logits.device)
        if not changed and columns.logprobs is None:
            if columns.filters:  # which leave scores that are over the temperature
                logits = prepare(logits, columns)
                columns = replace(columns, temperature=columns.temperature.sign())
            output.copy_(self.runner.forward.draw(logits, output, columns, steps))
            return None
        sampled = sample(logits, columns, steps, *self.counts(jobs, columns))
        output.copy_(sampled.tokens)
        return sampled
