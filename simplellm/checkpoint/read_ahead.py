"""Weights that threads make, a few before they are asked for."""

import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch

from simplellm.checkpoint.cpu_weights import PackedExperts
from simplellm.checkpoint.mxfp4 import Weight
from simplellm.checkpoint.names import tensor_shapes
from simplellm.checkpoint.source import Source

MAX_NUMBERS = 2**26  # of weights at work, each of which may take 18 bytes meanwhile
MAX_THREADS = 4


class ReadAhead:
    """A ``source`` whose next weights, in the order of its names, are made by threads.

    Where weights become a `CPUWeight`, that is: this takes a while.
    """

    def __init__(self, source: Source) -> None:
        formats = source.config.formats.values()
        slow = any(form.dtype in ("int4", "float16") for form in formats)
        self.source, self.shapes = source, tensor_shapes(source.config)
        self.names = deque(source.names() if slow else ())
        self.begun: dict[str, Future[Weight | PackedExperts]] = {}
        self.pool = ThreadPoolExecutor(min(MAX_THREADS, torch.get_num_threads()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)

    def __getitem__(self, ours: str) -> Weight | PackedExperts:
        self._begin()
        if (found := self.begun.pop(ours, None)) is not None:
            return found.result()
        if ours in self.names:  # asked for before its turn
            self.names.remove(ours)
        return self.source[ours]

    def _begin(self) -> None:
        """Have the next weights made, as many as there is room for: at least one."""
        busy = sum(math.prod(self.shapes[ours]) for ours in self.begun)
        while self.names:
            busy += math.prod(self.shapes[self.names[0]])
            if self.begun and busy > MAX_NUMBERS:
                return
            ours = self.names.popleft()
            self.begun[ours] = self.pool.submit(self.source.__getitem__, ours)
