"""What the engine counts and times, cheap enough to keep at every token."""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simplellm.base.request import Request
from simplellm.engine.joins import COUNT, COUNTS, NOW, SHARE, SLOWEST

if TYPE_CHECKING:  # it brings PyTorch, and whoever reads statistics may lack that
    from simplellm.engine.data_parallel_scheduler import DataParallelScheduler
    from simplellm.engine.scheduler import Scheduler


@dataclass(frozen=True)
class Stats:
    """How the engine is doing.

    Times are in seconds, of the last 4,096 requests (ttft) or tokens (itl), if any.
    """

    waiting: int = field(metadata=NOW)
    running: int = field(metadata=NOW)
    finished: dict[str, int] = field(metadata=COUNTS)  # by finish_reason, or "error"
    refused: int = field(metadata=COUNT)  # because the queue was full
    steps: int = field(metadata=COUNT)
    prompt_tokens: int = field(metadata=COUNT)  # of requests that have begun
    cached_tokens: int = field(metadata=COUNT)  # of these, those that the cache held
    generated_tokens: int = field(metadata=COUNT)
    tokens_per_second: float = field(metadata=NOW)  # in 256 steps without a pause
    cache_usage: float = field(metadata=SHARE)  # 0 to 1
    preemptions: int = field(metadata=COUNT)
    ttft: float | None = field(metadata=SLOWEST)  # time to first token, median
    ttft_p99: float | None = field(metadata=SLOWEST)
    itl: float | None = field(metadata=SLOWEST)  # inter-token latency, median
    itl_p99: float | None = field(metadata=SLOWEST)
    drafts: int = field(default=0, metadata=COUNT)  # times that drafts were checked
    # Checked ones and right ones, by position after the last sure token: "1", ...
    draft_tokens: dict[str, int] = field(default_factory=dict, metadata=COUNTS)
    accepted_tokens: dict[str, int] = field(default_factory=dict, metadata=COUNTS)
    loaded_tokens: int = field(default=0, metadata=COUNT)  # from the host's memory

    @property
    def cache_hit_rate(self) -> float:
        """The share of prompt tokens found in the cache."""
        return self.cached_tokens / max(1, self.prompt_tokens)


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value that ``share`` of the values do not exceed; None of none."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None


class Meter:
    """Counts and times of one engine."""

    def __init__(self) -> None:
        self.refused = self.steps = self.tokens = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.recent: deque[tuple[float, int]] = deque(maxlen=256)
        self.ttft: deque[float] = deque(maxlen=4096)
        self.itl: deque[float] = deque(maxlen=4096)

    def begin(self) -> None:
        """The first request of a busy time comes: the pause before is not counted."""
        self.recent.clear()
        self.recent.append((time.monotonic(), 0))

    def step(self, new: Sequence[tuple[Request, Sequence[int]]], now: float) -> None:
        """A step has given these requests these tokens at ``now``."""
        count = sum(len(tokens) for _, tokens in new)
        self.steps += 1
        self.tokens += count
        self.recent.append((now, count))
        for request, tokens in new:
            if request.last_token_time is None:
                self.ttft.append(now - request.arrival_time)
                self.prompt_tokens += request.num_prompt
                self.cached_tokens += request.num_cached_tokens or 0
            else:
                self.itl.append((now - request.last_token_time) / len(tokens))
            request.last_token_time = now

    def stats(self, scheduler: "Scheduler | DataParallelScheduler") -> Stats:
        """All of it, with what the scheduler counts."""
        recent = list(self.recent)
        seconds = recent[-1][0] - recent[0][0] if recent else 0.0
        generated = sum(count for _, count in recent[1:])
        speculator = getattr(scheduler, "speculator", None)  # if drafts are checked
        checked = speculator.draft_stats() if speculator is not None else {}
        return Stats(
            waiting=scheduler.num_waiting,
            running=len(scheduler.running),
            finished=dict(scheduler.finished),
            refused=self.refused,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.tokens,
            tokens_per_second=generated / seconds if seconds else 0.0,
            cache_usage=scheduler.manager.usage,
            preemptions=scheduler.preemptions,
            ttft=quantile(self.ttft, 0.5),
            ttft_p99=quantile(self.ttft, 0.99),
            itl=quantile(self.itl, 0.5),
            itl_p99=quantile(self.itl, 0.99),
            loaded_tokens=scheduler.manager.loaded_tokens,
            **checked,
        )
