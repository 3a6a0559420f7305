"""The engine that serves many requests at once, and the LLM that stands before it.

One thread runs `Engine.step` for as long as there is work. Any number of other threads
submit requests and read what comes of them; none of them can hold the engine up.
"""

import asyncio
import logging
import math
import os
import queue
import threading
import time
import traceback
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from simplellm.attention import NoCache
from simplellm.cache import Chunk, Manager, SlotCache, kv_bytes
from simplellm.cpu import choose_backend
from simplellm.futures import Completion, RequestFuture, ending
from simplellm.generate import LLM as PlainLLM
from simplellm.generate import (
    NewToken,
    Prompt,
    Request,
    RequestOutput,
    TextSide,
    TokenLogprobs,
    token_logprobs,
)
from simplellm.model import Transformer
from simplellm.paged import PagedCache
from simplellm.sampler import (
    Columns,
    Sampled,
    SamplingParams,
    check_integer,
    check_number,
    count_tokens,
    sample,
)
from simplellm.scheduler import Job, QueueFullError, Scheduler, Work

CPU_CACHE_BYTES = 2**28
GPU_CACHE_SHARE = 0.85  # of the memory that is free once the model is loaded


@dataclass(frozen=True)
class EngineConfig:
    """The switch of every mechanism, and its size. Raises TypeError or ValueError.

    The defaults of ``num_pages``, ``cache_bytes`` and ``max_model_len`` follow from the
    model and the memory: 256 MiB of cache on a CPU, 85 % of what is free on a GPU.
    """

    cache: Literal["none", "slot", "paged"] = "paged"
    page_size: int = 16  # tokens in a page
    num_pages: int | None = None  # of a paged cache, instead of cache_bytes
    cache_bytes: int | None = None  # for keys and values
    share_prefixes: bool = True  # find the pages of equal prompts again
    continuous: bool = True  # requests join a running batch; False: static batches
    max_num_seqs: int = 64  # that run at once
    max_num_batched_tokens: int = 2048  # in a step
    prefill_chunk: int | None = 512  # tokens of a prompt in a step; None: all of it
    max_model_len: int | None = None  # tokens of a request, prompt and output
    max_waiting: int = 10_000  # requests that wait; more are refused
    overtakes: int = 100  # earlier requests that a level of priority lets one pass

    def __post_init__(self) -> None:
        if self.cache not in ("none", "slot", "paged"):
            raise ValueError(
                f"cache is {self.cache!r}; expected 'none', 'slot' or 'paged'"
            )
        for name in ("share_prefixes", "continuous"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"{name} is {getattr(self, name)!r}; expected True or False"
                )
        optional = ("num_pages", "cache_bytes", "prefill_chunk", "max_model_len")
        required = (
            "page_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_waiting",
            "overtakes",
        )
        for name in (*required, *optional):
            value = getattr(self, name)
            if name in required or value is not None:
                check_integer(name, value, int(name != "overtakes"), 2**48)
        if self.num_pages is not None and self.cache_bytes is not None:
            raise ValueError(
                "both num_pages and cache_bytes are given; expected one of them"
            )
        if self.num_pages is not None and self.cache != "paged":
            raise ValueError(
                f"num_pages is {self.num_pages} and cache is {self.cache!r}; expected "
                "num_pages with cache='paged' only"
            )
        if self.cache_bytes is not None and self.cache == "none":
            raise ValueError(
                f"cache_bytes is {self.cache_bytes} and cache is 'none'; expected "
                "cache_bytes with a cache only"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; expected at "
                f"least {self.max_num_seqs}, a token for each of max_num_seqs"
            )


class Unlimited:
    """The `Manager` of no cache: there is always room, and nothing is kept."""

    max_tokens = free_tokens = 2**48
    usage = 0.0

    def add(self, sequence: int, tokens: Sequence[int]) -> int:
        return 0

    def grow(self, sequence: int, length: int) -> bool:
        return True

    def commit(self, sequence: int, tokens: Sequence[int], length: int) -> None:
        pass

    def fork(self, parent: int, child: int) -> bool:
        return False

    def remove(self, sequence: int) -> None:
        pass

    def check_integrity(self) -> None:
        pass


def slot_length(model: Transformer, max_num_seqs: int, num_bytes: int) -> int:
    """The longest slots of which ``max_num_seqs`` fit ``num_bytes``.

    Raises ValueError if not even slots of one token do.
    """

    def size(length: int) -> int:
        each = kv_bytes(model.config, length, itemsize=model.dtype.itemsize)
        return max_num_seqs * each

    context = model.config.max_position_embeddings
    length = bisect_right(range(1, context + 1), num_bytes, key=size)
    if length == 0:
        raise ValueError(
            f"cache_bytes is {num_bytes}; expected at least {size(1)}, a token for "
            f"each of max_num_seqs, {max_num_seqs}"
        )
    return length


def make_cache(
    model: Transformer, config: EngineConfig
) -> SlotCache | PagedCache | None:
    """The cache that ``config`` asks for, as large as it says."""
    if config.cache == "none":
        return None
    num_bytes = config.cache_bytes
    if num_bytes is None and model.device.type == "cuda":
        num_bytes = int(torch.cuda.mem_get_info(model.device)[0] * GPU_CACHE_SHARE)
    elif num_bytes is None:
        num_bytes = CPU_CACHE_BYTES
    if config.cache == "slot":
        longest = slot_length(model, config.max_num_seqs, num_bytes)
        return SlotCache(
            model.config,
            max_num_seqs=config.max_num_seqs,
            max_model_len=min(longest, config.max_model_len or longest),
            dtype=model.dtype,
            device=model.device,
        )
    budget = config.max_num_batched_tokens
    return PagedCache(
        model.config,
        num_pages=config.num_pages,
        max_bytes=None if config.num_pages else num_bytes,
        page_size=config.page_size,
        share=config.share_prefixes,
        max_chunk=min(config.prefill_chunk or budget, budget),
        dtype=model.dtype,
        device=model.device,
    )


class EngineError(RuntimeError):
    """A request failed inside the engine, or the engine takes no more requests."""


@dataclass(frozen=True)
class Event:
    """What a request's reader is told: a token, how the request ended, or both."""

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    error: EngineError | None = None


@dataclass(eq=False)
class Submission(Request):
    """A request with its place in line and its time limit."""

    priority: int = 0
    deadline: float = math.inf  # by time.monotonic()

    def accept(self, event: Event) -> NewToken | None:
        """Write down what the reader is told. Raises the event's error."""
        self.finish_reason = event.finish_reason
        if event.error is not None:
            raise event.error
        if event.token_id is None:
            return None
        self.output.append(event.token_id)
        return NewToken(self, event.token_id, event.logprobs)


@dataclass(eq=False)
class Ticket:
    """A request inside the engine: its job, and where its events go.

    The job belongs to the engine's thread, the request to its reader.
    """

    request: Submission
    send: Callable[[Event], object]  # must not block
    submitted: float = field(default_factory=time.monotonic)
    latest: float | None = None  # when its latest token came

    def __post_init__(self) -> None:
        self.job = Job(
            list(self.request.prompt),
            self.request.max_tokens,
            self.request.stop_ids,
            self.request.priority,
            self.request.deadline,
        )


@dataclass(frozen=True)
class Stats:
    """How the engine is doing.

    Times are in seconds: ttft of the last 4,096 requests, itl of as many tokens.
    """

    waiting: int
    running: int
    finished: dict[str, int]  # requests by finish_reason, failed ones as "error"
    refused: int  # because the queue was full
    steps: int
    generated_tokens: int
    tokens_per_second: float  # generated, in the last 256 steps without a pause
    cache_usage: float  # 0 to 1
    cache_hit_rate: float  # the share of prompt tokens found in the cache
    preemptions: int
    ttft: float | None  # time to first token, median; None before there was one
    ttft_p99: float | None
    itl: float | None  # inter-token latency, median
    itl_p99: float | None


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value that ``share`` of the values do not exceed; None of none."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None


class Meter:
    """Counts and times, cheap enough to keep at every token."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        self.refused = self.steps = self.tokens = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.recent: deque[tuple[float, int]] = deque(maxlen=256)
        self.ttft: deque[float] = deque(maxlen=4096)
        self.itl: deque[float] = deque(maxlen=4096)

    def begin(self) -> None:
        """The first request of a busy time comes: the pause before is not counted."""
        self.recent.clear()
        self.recent.append((time.monotonic(), 0))

    def step(self, tickets: Sequence[Ticket]) -> None:
        """Each of ``tickets`` has got a token just now."""
        now = time.monotonic()
        self.steps += 1
        self.tokens += len(tickets)
        self.recent.append((now, len(tickets)))
        for ticket in tickets:
            if ticket.latest is None:
                self.ttft.append(now - ticket.submitted)
                self.prompt_tokens += ticket.job.num_prompt
                self.cached_tokens += ticket.job.cached or 0
            else:
                self.itl.append(now - ticket.latest)
            ticket.latest = now

    def stats(self, scheduler: Scheduler) -> Stats:
        recent = list(self.recent)
        seconds = recent[-1][0] - recent[0][0] if recent else 0.0
        return Stats(
            waiting=scheduler.num_waiting,
            running=len(scheduler.running),
            finished=dict(self.finished),
            refused=self.refused,
            steps=self.steps,
            generated_tokens=self.tokens,
            tokens_per_second=(
                sum(count for _, count in recent[1:]) / seconds if seconds else 0.0
            ),
            cache_usage=scheduler.manager.usage,
            cache_hit_rate=self.cached_tokens / max(1, self.prompt_tokens),
            preemptions=scheduler.preemptions,
            ttft=quantile(self.ttft, 0.5),
            ttft_p99=quantile(self.ttft, 0.99),
            itl=quantile(self.itl, 0.5),
            itl_p99=quantile(self.itl, 0.99),
        )


LOGGER = logging.getLogger("simplellm")

Flight = Callable[[], Sampled]  # waits for what a step has sampled


class Engine:
    """Runs many requests at once, a step at a time.

    Without `start`, whoever holds it calls `step` himself.
    """

    def __init__(self, model: Transformer, config: EngineConfig | None = None) -> None:
        if not isinstance(config, EngineConfig | None):
            raise TypeError(f"config is {config!r}; expected an EngineConfig")
        self.model = model
        self.config = config = config or EngineConfig()
        self.cache = make_cache(model, config)
        manager: Manager = self.cache.manager if self.cache else Unlimited()
        self.scheduler = Scheduler(
            manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_chunk=config.prefill_chunk,
            max_waiting=config.max_waiting,
            overtakes=config.overtakes,
            continuous=config.continuous,
        )
        limits = [model.config.max_position_embeddings, manager.max_tokens]
        limits += [config.max_model_len] if config.max_model_len else []
        if config.prefill_chunk is None:  # a prompt is computed in one step
            limits.append(config.max_num_batched_tokens)
        self.max_model_len = min(limits)
        self.tickets: dict[Job, Ticket] = {}
        self.meter = Meter()
        self.lock = threading.Lock()  # guards the scheduler, tickets and meter
        self.closing = self.stopping = False
        self.dead: BaseException | None = None  # what it died of
        self.pid = os.getpid()
        # A SimpleQueue may be put to from a finalizer, which may run in any thread.
        self.inbox: queue.SimpleQueue[tuple[Job, str] | None] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Callable[[], object] | None]
        self.outbox = queue.SimpleQueue()  # work for the thread that makes text
        self.threads: list[threading.Thread] = []
        self.depth = 0  # steps that are still computed while the next one is scheduled
        self.flights: deque[tuple[Sequence[Work], Sequence[Ticket], Flight]] = deque()
        self._columns: tuple[list[int], Columns] | None = None

    def step(self) -> None:
        """Begin the next forward pass, and book those that are over."""
        with self.lock:
            works = self.scheduler.schedule()
        if works:
            self.advance(works)
        elif not self.flights:
            raise RuntimeError("requests wait, but none of them can run")
        while len(self.flights) > (self.depth if works else 0):
            self.land(*self.flights.popleft())

    def advance(self, works: Sequence[Work]) -> None:
        """Begin to compute works; should that fail, each of them by itself."""
        while len(self.flights) > self.depth:
            self.land(*self.flights.popleft())
        tickets = [self.tickets[work.job] for work in works if work.samples]
        try:
            flight = self.launch(works)
        except Exception as error:
            self._columns = None
            traceback.clear_frames(error.__traceback__)  # they hold memory
            while self.flights:  # what is tried again must know its last token
                self.land(*self.flights.popleft())
            for work in works:
                if work.job.finish_reason is not None:  # since a flight has landed
                    continue
                if len(works) > 1 and self.repeatable(work):
                    self.advance([work])
                else:
                    self.fail(work.job, error)
            return
        with self.lock:
            self.scheduler.begin(works)
        self.flights.append((works, tickets, flight))

    def launch(self, works: Sequence[Work]) -> Flight:
        """Compute works. A faster engine only starts this and does not wait."""
        sampled = self.sample(works, self.run(works))
        return lambda: sampled

    def land(
        self, works: Sequence[Work], tickets: Sequence[Ticket], flight: Flight
    ) -> None:
        """Book the results of a step and tell the readers."""
        sampled = flight()
        tokens = sampled.tokens.tolist()  # waits for the GPU, and without the lock
        with self.lock:
            new = self.scheduler.commit(works, tokens)
            self.meter.step([self.tickets[job] for job, _ in new])
        self.deliver(tickets, sampled, new)

    def repeatable(self, work: Work) -> bool:
        """Whether a work can be computed again: a ring forgets what a chunk reads."""
        forgets = isinstance(self.cache, SlotCache) and work.start > 0
        return not forgets or work.length == 1

    @torch.inference_mode()
    def run(self, works: Sequence[Work]) -> Tensor:
        """float32 logits [B, V] after each work that samples."""
        device = self.model.device
        spans = [(job, start, start + length) for job, start, length, _ in works]
        if self.cache is None:  # everything again, for whoever is to get a token
            spans = [(w.job, 0, len(w.job.tokens)) for w in works if w.samples]
            if not spans:
                return torch.empty(0, self.model.config.vocab_size, device=device)
        tokens = [token for job, start, end in spans for token in job.tokens[start:end]]
        positions = [p for _, start, end in spans for p in range(start, end)]
        lengths = [end - start for _, start, end in spans]
        chunks = [Chunk(job.number, start, length) for job, start, length, _ in works]
        hidden = self.model(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            self.cache.step(chunks) if self.cache else NoCache(lengths),
        )  # [T, hidden]
        sampling = zip(spans, accumulate(lengths), strict=True)
        last = [stop - 1 for (job, _, end), stop in sampling if end == len(job.tokens)]
        if len(last) < len(hidden):
            hidden = hidden[torch.tensor(last, dtype=torch.int64, device=device)]
        return self.model.lm_head(hidden).float()

    @torch.inference_mode()
    def sample(self, works: Sequence[Work], logits: Tensor) -> Sampled:
        """The next token of each work that samples."""
        jobs = [work.job for work in works if work.samples]
        if not jobs:
            return Sampled(torch.empty(0, dtype=torch.int64))
        columns = self.columns(jobs)
        steps = torch.tensor([job.num_output for job in jobs], device=logits.device)
        return sample(logits, columns, steps, *self.counts(jobs, columns))

    def columns(self, jobs: Sequence[Job]) -> Columns:
        """The sampling parameters of ``jobs``, kept for as long as these stay."""
        numbers = [job.number for job in jobs]
        if self._columns is None or self._columns[0] != numbers:
            params = [self.tickets[job].request.params for job in jobs]
            config, device = self.model.config, self.model.device
            self._columns = numbers, Columns.of(params, config.vocab_size, device)
        return self._columns[1]

    def counts(self, jobs: Sequence[Job], columns: Columns) -> list[Tensor]:
        """How often each token was in the prompts and the outputs, if that matters."""
        if not columns.penalties:
            return []
        parts: tuple[list[list[int]], list[list[int]]] = [], []
        for job in jobs:
            matters = self.tickets[job].request.params.penalizes
            tokens = job.tokens if matters else []
            parts[0].append(tokens[: job.num_prompt])
            parts[1].append(tokens[job.num_prompt :])
        config, device = self.model.config, self.model.device
        return [count_tokens(part, config.vocab_size, device) for part in parts]

    def deliver(
        self,
        tickets: Sequence[Ticket],
        sampled: Sampled,
        new: Sequence[tuple[Job, int]],
    ) -> None:
        """Tell the readers of their new tokens."""
        logprobs: Mapping[Job, TokenLogprobs | None] = {}
        if sampled.logprobs is not None:
            found = token_logprobs([ticket.request for ticket in tickets], sampled)
            jobs = [ticket.job for ticket in tickets]
            logprobs = dict(zip(jobs, found, strict=True))
        for job, token in new:
            self.send(job, Event(token, logprobs.get(job), job.finish_reason))

    def send(self, job: Job, event: Event) -> None:
        """Pass an event on; the last one of a request takes its ticket away."""
        ticket = self.tickets[job]
        if event.finish_reason is not None:
            with self.lock:
                self.meter.finished[event.finish_reason] += 1
                del self.tickets[job]
        try:
            ticket.send(event)
        except Exception:  # an event loop that is closed, for example
            LOGGER.exception("nobody takes what a request gives; it ends")
            self.end(job, "abort")

    def end(self, job: Job, reason: str, error: EngineError | None = None) -> None:
        """End a job that has not ended by itself; nothing if it has."""
        if job in self.tickets:
            with self.lock:
                self.scheduler.finish(job, reason)
            self.send(job, Event(finish_reason=reason, error=error))

    def fail(self, job: Job, cause: Exception) -> None:
        """End the request of a step that went wrong."""
        error = EngineError(f"the step of this request failed: {cause!r}")
        error.__cause__ = cause
        self.end(job, "error", error)

    # From here on: what other threads call, and the thread that calls step().

    def submit(self, groups: Sequence[Sequence[Ticket]]) -> None:
        """Queue requests; those of a group are samples of one prompt.

        Raises QueueFullError or EngineError and then has taken none of them.
        """
        for first, *rest in groups:
            first.job.siblings = [ticket.job for ticket in rest]
        self.check()  # before the lock, which a fork may have copied as it was: taken
        with self.lock:
            self.check()
            if self.closing:
                raise EngineError("this LLM is closed; expected one that is open")
            if not self.scheduler.jobs:
                self.meter.begin()
            try:
                self.scheduler.add([group[0].job for group in groups])
            except QueueFullError:
                self.meter.refused += sum(map(len, groups))
                raise
            for group in groups:
                self.tickets.update((ticket.job, ticket) for ticket in group)
        self.inbox.put(None)

    def abort(self, job: Job, reason: str = "abort") -> None:
        """End a job soon, from any thread or finalizer."""
        self.inbox.put((job, reason))

    def check(self) -> None:
        """Raise EngineError if the engine cannot answer any more."""
        if os.getpid() != self.pid:
            raise EngineError(
                f"this LLM belongs to process {self.pid} and does not work in "
                f"{os.getpid()}, a fork of it; expected processes that are spawned, "
                "not forked, each with its own LLM"
            )
        if self.dead is not None:
            raise EngineError(f"the engine died: {self.dead!r}") from self.dead

    def stats(self) -> Stats:
        """How the engine is doing. Raises EngineError if it is dead."""
        self.check()
        with self.lock:
            return self.meter.stats(self.scheduler)

    def start(self) -> None:
        """Run steps in a thread of its own until `shutdown`."""
        for name, loop in (("engine", self._loop), ("text", self._make_text)):
            thread = threading.Thread(
                target=loop, name=f"simplellm-{name}", daemon=True
            )
            thread.start()
            self.threads.append(thread)

    def shutdown(self, stop: bool, timeout: float | None = None) -> None:
        """Take no more requests; finish those there are, or ``stop`` them now."""
        if os.getpid() != self.pid:
            return
        self.closing = True
        if stop:
            self.stopping = True
        self.inbox.put(None)
        if threading.current_thread() not in self.threads:
            for thread in self.threads:
                thread.join(timeout)

    def _loop(self) -> None:
        if self.model.device.type == "cuda":  # a thread begins on the first GPU
            torch.cuda.set_device(self.model.device)
        try:
            while self._obey():
                for job in self._expired():
                    self.end(job, "timeout")
                if self.scheduler.jobs or self.flights:
                    self.step()
        except BaseException as error:
            LOGGER.exception("the engine died")
            self._die(error)
        self.outbox.put(None)

    def _obey(self) -> bool:
        """Carry out what other threads asked for; wait if there is nothing to run."""
        while True:
            with self.lock:  # whoever came before the closing is among the jobs
                idle = not (self.scheduler.jobs or self.flights)
                over = self.stopping or (self.closing and idle)
            if over:
                for job in list(self.tickets):
                    self.end(job, "abort")
                return False
            try:
                asked = self.inbox.get(block=idle)
            except queue.Empty:
                return True
            if asked is not None:
                self.end(*asked)

    def _expired(self) -> list[Job]:
        with self.lock:
            return self.scheduler.expire(time.monotonic())

    def _die(self, cause: BaseException) -> None:
        """Whoever is there gets an error: the engine runs no more steps."""
        with self.lock:
            self.dead = cause
            orphans, self.tickets = self.tickets, {}
            self.meter.finished["error"] += len(orphans)
        for ticket in orphans.values():
            error = EngineError(f"the engine died: {cause!r}")
            error.__cause__ = cause
            with suppress(Exception):
                ticket.send(Event(finish_reason="error", error=error))

    def _make_text(self) -> None:
        while (task := self.outbox.get()) is not None:
            task()
            del task  # which knows its LLM, so that this can go when nobody else does


class TokenStream:
    """The new tokens of one request, as they come. Dropped, it ends the request."""

    def __init__(self, engine: Engine, request: Submission) -> None:
        self.engine = engine
        self.request = request
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        ticket = Ticket(request, self.events.put)
        engine.submit([[ticket]])
        self.job = ticket.job

    def __iter__(self) -> Iterator[NewToken]:
        return self

    def __next__(self) -> NewToken:
        # A reader may have found a stop string and finished the request himself.
        while self.request.finish_reason is None:
            try:
                event = self.events.get(timeout=1.0)
            except queue.Empty:
                self.engine.check()
                continue
            except BaseException:  # Ctrl-C, whose traceback may keep this for long
                self.close()
                raise
            if (new := self.request.accept(event)) is not None:
                return new
        raise StopIteration

    def close(self) -> None:
        """The reader wants no more."""
        self.engine.abort(self.job, self.request.finish_reason or "abort")

    def __del__(self) -> None:
        if hasattr(self, "job"):  # not if it was refused
            self.close()


def sibling(request: Request, number: int) -> Submission:
    """The request of one more sample: the same, drawn with another seed."""
    assert isinstance(request, Submission) and request.params.seed is not None
    seed = (request.params.seed + number) % 2**64
    return replace(request, params=replace(request.params, seed=seed), output=[])


MAX_SAMPLES = 1024
MAX_PRIORITY = 1000
MAX_SECONDS = 10.0**9
# Every new piece of text is compared with every stop string.
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 4096


class LLM(PlainLLM):
    """A model that answers any number of threads, all their requests at once.

    The arguments and methods of `simplellm.generate.LLM`, ``config`` for the engine.
    Each method that takes sampling parameters takes two more: ``priority`` (an integer;
    the lower, the sooner) and ``timeout`` (seconds, after which a request ends with
    what it has and the finish_reason "timeout").

    Raises QueueFullError if too many requests wait. If the step of a request fails, its
    call raises EngineError, with the failure as its cause; what other calls have asked
    for goes on.
    """

    _known = (*PlainLLM._known, "priority", "timeout")

    def __init__(
        self,
        path: str | Path | None = None,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, **{"backend": choose_backend, **options})
        self.engine: Engine = self._make_engine(config)  # type: ignore[assignment]
        # Also runs at the interpreter's exit, before it stops threads by force.
        self._finalizer = weakref.finalize(self, self.engine.shutdown, True, 60.0)
        self.engine.start()

    def _make_engine(self, config: EngineConfig | None) -> Engine:
        return Engine(self.model, config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        **overrides: Any,
    ) -> Future[list[RequestOutput]]:
        """Continue each prompt; the result has ``n`` outputs per prompt, in order.

        The other arguments are those of `simplellm.generate.LLM.generate`. The samples
        of a prompt share its computation and its pages; with a seed s they draw with s,
        s + 1, ... Cancelling the future ends its requests. In a coroutine:
        ``await asyncio.wrap_future(llm.generate(...))``.
        """
        check_integer("n", n, 1, MAX_SAMPLES)
        families = [
            [sibling(request, number) for number in range(n)]
            for request in self._requests(prompts, sampling_params, overrides)
        ]
        requests = [request for family in families for request in family]
        future = RequestFuture(owner=self)
        sides = [TextSide(request, self._tokenizer) for request in requests]
        completion = Completion(self.engine, future, sides)
        outbox = self.engine.outbox

        def sender(index: int) -> Callable[[Event], object]:
            return lambda event: outbox.put(lambda: completion.push(index, event))

        future.tickets = [Ticket(r, sender(i)) for i, r in enumerate(requests)]
        groups = [future.tickets[i : i + n] for i in range(0, len(requests), n)]
        self.engine.submit(groups)
        return future

    def stream_async(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **overrides: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Like `stream`, for ``async for``.

        The request starts with the iteration, its ``timeout`` with this call.
        """
        return self._outputs_async(self._request(prompt, sampling_params, overrides))

    def stats(self) -> Stats:
        """Queue, speed, cache and latencies of the engine."""
        return self.engine.stats()

    def close(self, *, cancel: bool = False) -> None:
        """Finish what was asked for, or end it with ``cancel``, and accept no more."""
        super().close()
        self.engine.shutdown(stop=cancel)
        self._finalizer.detach()

    def __exit__(self, *exception: object) -> None:
        self.close(cancel=exception[0] is not None)

    def _tokens(self, requests: Sequence[Request]) -> Iterator[NewToken]:
        (request,) = requests
        assert isinstance(request, Submission)
        return TokenStream(self.engine, request)

    def _outputs(
        self, request: Request, tokens: Iterator[NewToken]
    ) -> Iterator[RequestOutput]:
        assert isinstance(tokens, TokenStream)
        side = TextSide(request, self._tokenizer)
        for new in tokens:
            output = side.push(new)
            if side.stops.found:
                tokens.close()  # the reader may hold on to the stream
            yield output
        if request.finish_reason in ("timeout", "abort"):
            yield ending(side)

    async def _outputs_async(self, request: Submission) -> AsyncIterator[RequestOutput]:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()
        gone = False

        def send(event: Event) -> None:
            if not gone:  # later, the loop may be closed
                loop.call_soon_threadsafe(events.put_nowait, event)

        side = TextSide(request, self._tokenizer)
        ticket = Ticket(request, send)
        self.engine.submit([[ticket]])
        try:
            while request.finish_reason is None:
                new = request.accept(await events.get())
                output = side.push(new) if new else ending(side)
                if side.stops.found:
                    self.engine.abort(ticket.job, "stop")
                yield output
        finally:
            gone = True
            self.engine.abort(ticket.job)

    def _request(
        self,
        prompt: object,
        params: SamplingParams | None,
        overrides: Mapping[str, Any],
    ) -> Submission:
        """A checked request. Raises TypeError or ValueError."""
        options = dict(overrides)
        priority, timeout = options.pop("priority", 0), options.pop("timeout", None)
        check_integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
        deadline = math.inf
        if timeout is not None:
            check_number("timeout", timeout, 0, MAX_SECONDS)
            deadline = time.monotonic() + timeout
        request = super()._request(prompt, params, options)
        limit = self.engine.max_model_len
        if len(request.prompt) >= limit:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens; expected fewer than "
                f"{limit}, which is all that this engine's cache and limits have room "
                "for"
            )
        stops = request.params.stop
        if len(stops) > MAX_STOPS or sum(map(len, stops)) > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"stop has {len(stops)} texts of {sum(map(len, stops))} characters; "
                f"expected at most {MAX_STOPS} texts and {MAX_STOP_CHARACTERS} "
                "characters in all"
            )
        return Submission(
            prompt=request.prompt,
            params=request.params,
            stop_ids=request.stop_ids,
            max_tokens=min(request.max_tokens, limit - len(request.prompt)),
            priority=priority,
            deadline=deadline,
        )
