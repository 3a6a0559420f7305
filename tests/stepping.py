"""Steps of a model by hand: whoever calls says which sequences compute how much."""

import queue
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from simplellm.api.load import build_engine
from simplellm.base.config import EngineConfig
from simplellm.base.request import Event, Request
from simplellm.engine.engine import Engine
from simplellm.engine.page_manager import PageManager
from simplellm.engine.runner import Runner
from simplellm.engine.scheduler import ScheduledChunk
from simplellm.model.fp8_cache import make_pool
from simplellm.model.memory import sliding_groups
from simplellm.model.model import Model


def make_engine(
    model: Model, config: EngineConfig | None = None, *, overlap: bool = False
) -> Engine:
    """An engine without a thread, whose steps may overlap on any device.

    On a CPU nothing is computed side by side, but a step is scheduled before the tokens
    of the one before it are known.
    """
    engine = build_engine(model, (config or EngineConfig()).resolved("cpu"))
    limit = engine.max_model_len
    return Engine(engine.scheduler, engine.runner, limit, overlap)


def drain(engine: Engine) -> list[Event]:
    """The events that have come since the last time."""
    events: list[Event] = []
    while True:
        try:
            event = engine.events.get_nowait()
        except queue.Empty:
            return events
        if event is not None:
            events.append(event)


class Stepper:
    """Sequences with numbers of the caller's choice, in pages of one pool."""

    def __init__(
        self,
        model: Model,
        *,
        num_pages: int = 300,
        page_size: int = 4,
        max_num_seqs: int = 8,
        longest: int = 512,  # tokens of a sequence, and of a step
        enable_caching: bool = False,
        kv_cache_dtype: Literal["auto", "fp8"] = "auto",
    ) -> None:
        groups = sliding_groups(model.config, model.dtype.itemsize, kv_cache_dtype)
        self.manager = PageManager(
            num_pages,
            page_size,
            window=model.config.windows[-1],
            sliding_groups=groups,
            enable_caching=enable_caching,
        )
        config = EngineConfig(
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=longest,
            kv_cache_dtype=kv_cache_dtype,
        ).resolved("cpu")
        self.pool = make_pool(
            model.config, config, num_pages, model.dtype, model.device
        )
        self.runner = Runner(model, self.pool, self.manager, config, longest)
        self.requests: dict[int, Request] = {}

    def add(self, number: int, tokens: Sequence[int]) -> int:
        """Begin a sequence; how many of its tokens are there already."""
        request = Request(tokens=list(tokens), max_tokens=1)
        request.request_id = number
        request.num_computed_tokens = self.manager.add(number, request.tokens)
        self.requests[number] = request
        return request.num_computed_tokens

    def fork(self, parent: int, child: int, tokens: Sequence[int]) -> None:
        """Begin a sequence with all that is computed of ``parent``."""
        self.manager.fork(parent, child)
        request = Request(tokens=list(tokens), max_tokens=1)
        request.request_id, request.num_computed_tokens = (
            child,
            self.requests[parent].num_computed_tokens,
        )
        self.requests[child] = request

    def start(self, lengths: dict[int, int]) -> Tensor:
        """Compute the next tokens of some sequences: logits [B, V] behind the last."""
        scheduled = []
        for number, length in lengths.items():
            request = self.requests[number]
            assert self.manager.allocate(number, request.num_computed_tokens + length)
            scheduled.append(
                ScheduledChunk(
                    request, request.num_computed_tokens, length, samples=True
                )
            )
        scheduled.sort(key=lambda chunk: chunk.length > 1)  # decodes come first
        requests = [chunk.request for chunk in scheduled]
        self.runner.start_forward(scheduled, requests)
        rows = [requests.index(self.requests[number]) for number in lengths]
        return self.runner.logits[: len(scheduled)][torch.tensor(rows)].clone()

    def step(self, lengths: dict[int, int]) -> Tensor:
        """`start`, and book what is computed."""
        logits = self.start(lengths)
        for number, length in lengths.items():
            request = self.requests[number]
            request.num_computed_tokens += length
            self.manager.commit(number, request.tokens, request.num_computed_tokens)
        return logits

    def forward(self, number: int, tokens: Sequence[int], prefill: int = 0) -> Tensor:
        """Logits behind a prefill and each token that is fed after it: [T, V]."""
        self.add(number, tokens)
        lengths = [prefill] * (prefill > 0) + [1] * (len(tokens) - prefill)
        return torch.cat([self.step({number: length}) for length in lengths])

    def remove(self, number: int) -> None:
        self.manager.remove(number)
        del self.requests[number]
