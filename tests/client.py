"""An engine of a model, and requests to it, step by step and without threads."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from simplellm.api.load import build_engine
from simplellm.base.config import EngineConfig
from simplellm.base.request import Event, Request
from simplellm.base.sampling_params import SamplingParams
from simplellm.engine.engine import Engine
from simplellm.engine.graphs import MIXED_SIZES, bucket_sizes
from simplellm.model.model import Model


def make_engine(model: Model, **options: Any) -> Engine:
    """An engine of an `EngineConfig` with these options, its graphs captured."""
    config = EngineConfig(**options).resolved(model.device.type)
    engine = build_engine(model, config)
    if config.cuda_graphs:
        engine.runner.capture(bucket_sizes(config.max_num_seqs), MIXED_SIZES)
    return engine


def random_prompt(length: int, seed: int) -> list[int]:
    """Tokens below 200,000, which both models have."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(200_000, (length,), generator=generator).tolist()


class Client:
    """Submits greedy requests, and runs the engine's steps itself."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: dict[int, list[Event]] = defaultdict(list)

    def ask(self, prompt: Sequence[int], count: int) -> int:
        """Queue a request for ``count`` tokens; its id."""
        params = SamplingParams(temperature=0, max_tokens=count)
        number = len(self.events)
        self.events[number] = []
        self.engine.submit([Request(list(prompt), count, params, request_id=number)])
        return number

    def step(self) -> int:
        """Run a step; how many tokens came."""
        self.engine.step()
        count = 0
        while not self.engine.events.empty():
            event = self.engine.events.get()
            assert event is not None
            self.events[event.request_id].append(event)
            count += len(event.tokens)
        return count

    @property
    def busy(self) -> bool:
        return bool(self.engine.scheduler.requests or self.engine.flights)

    def finish(self) -> None:
        """Run steps until nothing is left to do."""
        while self.busy:
            self.step()

    def tokens(self, number: int) -> list[int]:
        """What a request has got so far. Raises its error if it failed."""
        events = self.events[number]
        if events and events[-1].error is not None:
            raise events[-1].error
        return [token for event in events for token in event.tokens]
