"""Ranks: processes that are forked from a notebook and know what is defined there."""

import mmap
import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch
from torch import Tensor

from simplellm.model.parallel import Group

SECONDS = 20.0  # a rank that takes longer waits for something that never comes


def shared(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros that the processes forked later read and write, too: at one address."""
    numbers = torch.Size(shape).numel()
    memory = mmap.mmap(-1, max(1, numbers * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype, count=numbers).view(shape)


def forked(
    size: int, compute: Callable[[int], Any], seconds: float = SECONDS
) -> list[Any]:
    """What ``compute(rank)`` returns in each of ``size`` processes.

    Raises what the first of them raises that fails, and TimeoutError if not all are
    done in time. None of them outlives this call.
    """
    pids: list[int] = []
    said: dict[int, bytearray] = {}  # by the end of a pipe that we read
    order: list[int] = []
    try:
        for rank in range(size):
            ours, theirs = os.pipe()
            said[ours] = bytearray()
            order.append(ours)
            with warnings.catch_warnings():
                # Of threads that a fork leaves behind: a rank needs none of them.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if not pid:
                _work(rank, compute, theirs)
            pids.append(pid)
            os.close(theirs)
        results: dict[int, Any] = {}
        end = time.monotonic() + seconds
        while len(results) < size:
            waiting = [pipe for pipe in order if pipe not in results]
            ready, _, _ = select.select(waiting, [], [], max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"not all ranks are done after {seconds:.0f} s")
            for pipe in ready:
                if data := os.read(pipe, 1 << 20):
                    said[pipe] += data
                    continue
                if not said[pipe]:
                    raise RuntimeError(f"rank {order.index(pipe)} ended without a word")
                result, error = pickle.loads(said[pipe])
                if error is not None:
                    raise error
                results[pipe] = result
        return [results[pipe] for pipe in order]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in order:
            os.close(pipe)


def _work(rank: int, compute: Callable[[int], Any], pipe: int) -> NoReturn:
    """In a forked process: compute, tell, and end without a trace."""
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)  # the parent's alarm is its own
        try:
            said: tuple[Any, BaseException | None] = compute(rank), None
        except BaseException as error:
            while error.__cause__ is not None:  # Triton's interpreter wraps it
                error = error.__cause__
            said = None, error
        try:
            data = pickle.dumps(said)
        except Exception:
            data = pickle.dumps((None, RuntimeError(repr(said))))
        with os.fdopen(pipe, "wb") as file:
            file.write(data)
    finally:
        os._exit(0)


def together(size: int, compute: Callable[[Group], Any]) -> list[Any]:
    """What ``compute`` returns on each of ``size`` ranks, which talk by gloo."""
    with TemporaryDirectory() as folder, torch.inference_mode():
        return forked(size, lambda rank: compute(Group(folder, rank, size, SECONDS)))
