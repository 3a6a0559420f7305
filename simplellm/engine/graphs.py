"""CUDA graphs: a step's launches, recorded once and replayed."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from simplellm.engine.scheduler import ScheduledChunk

LOGGER = logging.getLogger("simplellm")


def bucket_sizes(most: int) -> list[int]:
    """Batch sizes to capture: close together where a step's time depends on them."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224]
    sizes += range(256, most, 64)
    return [size for size in sizes if size < most] + [most]


# Tokens of steps with prompts to capture. In larger ones the host is ahead anyway.
MIXED_SIZES = (16, 32, 64, 128, 256, 384, 512, 768, 1024)
MOST_CHUNKS = 64  # of prompts in a captured step
# Of steps that check drafts: tokens to capture at most, and tokens of a row. A request
# with more drafts has several rows.
MOST_VERIFIED = 512
QUERIES = 4


class CaptureShape(NamedTuple):
    """What a captured step has room for: so many tokens, decodes, chunks of prompts.

    Each decode has up to ``queries`` tokens, its drafts among them.
    """

    tokens: int
    decodes: int
    chunks: int = 0
    queries: int = 1

    @classmethod
    def of(cls, scheduled: Sequence[ScheduledChunk]) -> "CaptureShape":
        """The shape of a step without any padding."""
        lengths = [chunk.length for chunk in scheduled]
        rows, tokens = len(lengths), sum(lengths)
        decodes = next((n for n, length in enumerate(lengths) if length > 1), rows)
        return cls(tokens, decodes, rows - decodes)

    @classmethod
    def mixed(cls, tokens: int, max_num_seqs: int) -> "CaptureShape":
        """A step with prompts. Room for more rows costs time in attention."""
        decodes = min(tokens // 2, max_num_seqs)
        return cls(tokens, decodes, min(tokens // 4, MOST_CHUNKS))


def verify_shapes(max_num_seqs: int, max_drafts: int) -> list[CaptureShape]:
    """Steps to capture that check drafts: with a row for each token, if need be."""
    most = min(max_num_seqs + max_drafts, MOST_VERIFIED) if max_drafts else 1
    sizes = [size for size in bucket_sizes(most) if size > 1]
    return [CaptureShape(size, size, queries=QUERIES) for size in sizes]


@dataclass(frozen=True)
class CapturedGraph:
    """A step of one shape, ready to be replayed."""

    shape: CaptureShape
    replay: Callable[[], None]

    @property
    def size(self) -> int:
        """How many tokens it has; without chunks, these are its decodes."""
        return self.shape.tokens


class Agreed(NamedTuple):
    """How all ranks compute a step: by which graph, if by any, and of how many rows."""

    graph: CapturedGraph | None
    tokens: int


class StepUnderWay(NamedTuple):
    """What the device computes now."""

    scheduled: Sequence[ScheduledChunk]
    sizes: Sequence[int]  # as in `Runner.view`


class CaptureError(RuntimeError):
    """A graph could not be recorded."""


@cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """A stream of this GPU to record graphs on: PyTorch's own is of the first GPU."""
    return torch.cuda.Stream(device)


def capture_graph(run: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
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


READY, NO_ROOM, REFUSED = 2, 1, 0  # what became of a graph, on the worst of all ranks


def capture_graphs(
    prepare: Callable[[CaptureShape], Callable[[], object]],
    shapes: Sequence[CaptureShape],
    least: Callable[[int], int] = lambda number: number,
) -> list[CapturedGraph]:
    """Record the step that ``prepare(shape)`` gives for each of ``shapes``, by size.

    The largest comes first, so that the smaller ones find room in the memory that it
    has taken. Shapes for which there is no room are left out, with one line in the log,
    and the rest of them if the driver cannot record. ``least`` gives the least number
    that any rank calls it with: all of them have the same graphs.
    """
    captured: list[CapturedGraph] = []
    pool, cause = None, ""
    for shape in sorted(shapes, reverse=True):
        step, graph, status = prepare(shape), None, READY
        try:
            step()  # what it needs once, it takes now
            graph = capture_graph(step, pool)
        except (torch.OutOfMemoryError, CaptureError) as error:
            cause = str(error).partition("\n")[0]  # itself, it holds memory
            status = REFUSED if isinstance(error, CaptureError) else NO_ROOM
        worst = least(status)
        if graph is not None and worst == READY:
            pool = graph.pool()
            captured.insert(0, CapturedGraph(shape, graph.replay))
        elif not cause:
            cause = "another rank had none of it"
        if worst == REFUSED:
            break
    if cause:
        LOGGER.warning(
            "CUDA graphs for %d of %d sizes only; other steps are slower. "
            "Why: %s. If it is memory, a smaller cache_bytes or max_num_seqs helps",
            len(captured),
            len(shapes),
            cause,
        )
    return captured
