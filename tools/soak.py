"""Load the engine with random requests from many threads, then look for leaks.

Clients ask for all that the engine offers and misbehave in every way: they cancel, walk
away, stop reading, set deadlines too short, have callbacks that raise, send what cannot
run and more than the queue holds. Some requests make every step fail that they are in.
The pool of pages is small, so that requests are preempted and cached pages evicted all
the time. Afterwards nothing may be left: no page, sequence, thread or future; memory
must not have grown; every request must have ended once, with a reason, and only those
that made steps fail with an error. Greedy answers must never differ.

    python tools/soak.py --minutes 30 --threads 64 --json soak.json
"""

import argparse
import asyncio
import gc
import json
import logging
import random
import statistics
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from simplellm import LLM, EngineConfig, EngineError, QueueFullError, RequestOutput
from simplellm.paged import PageManager

CONFIG = EngineConfig(
    cache="paged",
    page_size=8,
    num_pages=58,
    max_num_seqs=12,
    max_num_batched_tokens=128,
    prefill_chunk=24,
    max_model_len=300,
)
PATIENCE = 600.0  # seconds after which a request that has not ended counts as hung
# The last is overtaken by 300 later ones at most, a minute even on a busy machine.
PRIORITIES = (0, 0, 0, -2, 1)
FLAT = 0.05  # memory may grow by this share from the second fifth to the last
BAD: tuple[dict[str, Any], ...] = (
    {"prompts": []},
    {"prompts": [[]]},
    {"prompts": [[10**9]]},
    {"prompts": [[1] * 300]},
    {"prompts": [[1]], "n": 0},
    {"prompts": [[1]], "max_tokens": 0},
    {"prompts": [[1]], "timeout": -1},
    {"prompts": [[1]], "priority": 10**9},
    {"prompts": [[1]], "stop": ["x"] * 10_000},
    {"prompts": [[1]], "temperature": "hot"},
)


class StepFault(Exception):
    """What the soak makes a step of the engine fail with."""


def resident_mib() -> float:
    """What of this process is in memory, as Linux counts it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


@dataclass
class Ledger:
    """What the clients saw, shared by all of them."""

    asked: int = 0  # requests that clients tried to submit, a sample each
    accepted: int = 0  # samples that the engine took
    ends: Counter[str] = field(default_factory=Counter)  # one for each asked
    wrong: list[str] = field(default_factory=list)  # what must not happen
    greedy: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    futures: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)

    def ask(self, count: int) -> None:
        with self.lock:
            self.asked += count

    def accept(self, what: Any, count: int) -> None:
        with self.lock:
            self.accepted += count
            self.futures.add(what)

    def end(self, reason: str, count: int = 1) -> None:
        with self.lock:
            self.ends[reason] += count

    def fault(self, what: str) -> None:
        with self.lock:
            self.wrong.append(what)

    def compare(self, prompt: list[int], tokens: list[int]) -> None:
        """A greedy answer is the beginning of all longer ones to the same prompt."""
        with self.lock:
            known = self.greedy.setdefault(tuple(prompt), tokens)
            shorter = min(len(known), len(tokens))
            if known[:shorter] != tokens[:shorter]:
                self.wrong.append(f"{prompt[:4]}…: {tokens} is not {known}")
            if len(tokens) > len(known):
                self.greedy[tuple(prompt)] = tokens


class Client:
    """One thread's random requests."""

    def __init__(self, llm: LLM, ledger: Ledger, seed: int) -> None:
        self.llm = llm
        self.ledger = ledger
        self.chance = random.Random(seed)
        self.parked: list[tuple[Iterator[RequestOutput], list[int]]] = []

    def run(self, until: float, least: int) -> None:
        """Go on until that time, and until ``least`` requests were accepted."""
        actions: list[Callable[[], None]] = [self.future, self.stream]
        rare = [self.bad, self.coroutine, self.park, self.chat]
        try:
            while time.monotonic() < until or self.ledger.accepted < least:
                some = rare if self.chance.random() < 0.3 else actions
                try:
                    self.chance.choice(some)()
                except QueueFullError:
                    time.sleep(self.chance.uniform(0, 2))
            while self.parked:
                self.resume()
        except BaseException as error:
            self.ledger.fault(f"a client stopped: {error!r}")
            raise

    def request(self) -> tuple[list[int], dict[str, Any]]:
        """A prompt, often with a beginning that others have, and its options."""
        chance = self.chance
        stem = random.Random(chance.randrange(6))
        prompt = [stem.randrange(1000) for _ in range(chance.choice([3, 40, 130, 200]))]
        prompt += [chance.randrange(1000) for _ in range(chance.choice([0, 0, 1, 9]))]
        options: dict[str, Any] = {
            "max_tokens": chance.choice([1, 2, 8, 30, 90, 150]),
            "temperature": chance.choice([0.0, 0.0, 1.0]),
            "priority": chance.choice(PRIORITIES),
        }
        if chance.random() < 0.1:
            options["timeout"] = chance.uniform(0, 2)
        if chance.random() < 0.1:
            options["stop"] = ["e", "\n"]
        if chance.random() < 0.1:
            options["logprobs"] = 3
        return prompt, options

    def future(self) -> None:
        prompt, options = self.request()
        n = self.chance.choice([1, 1, 1, 2, 4])
        self.ledger.ask(n)
        try:
            future = self.llm.generate([prompt], n=n, **options)
        except QueueFullError:
            self.ledger.end("refused: queue full", n)
            raise
        self.ledger.accept(future, n)
        if self.chance.random() < 0.1:
            future.add_done_callback(lambda future: 1 // 0)
        if self.chance.random() < 0.15:
            time.sleep(self.chance.uniform(0, 0.3))
            future.cancel()
        elif self.chance.random() < 0.05:
            self.ledger.end("future dropped by its client", n)
            return
        self.collect(future, prompt, options, n)

    def collect(
        self, future: Future[Any], prompt: list[int], options: dict[str, Any], n: int
    ) -> None:
        try:
            outputs = future.result(PATIENCE)
        except CancelledError:
            self.ledger.end("cancelled", n)
        except TimeoutError:
            self.ledger.end("hung", n)
        except EngineError:
            self.ledger.end("error", n)
        else:
            for output in outputs:
                self.ledger.end(str(output.finish_reason))
                if options["temperature"] == 0:
                    self.ledger.compare(prompt, output.token_ids)

    def open_stream(self) -> tuple[Iterator[RequestOutput], list[int], dict[str, Any]]:
        prompt, options = self.request()
        self.ledger.ask(1)
        try:
            stream = self.llm.stream(prompt, **options)
        except QueueFullError:
            self.ledger.end("refused: queue full")
            raise
        self.ledger.accept(stream, 1)
        return stream, prompt, options

    def stream(self) -> None:
        """Read a stream to its end, or walk away from it."""
        stream, prompt, options = self.open_stream()
        patience = self.chance.choice([1, 5, 1000, 1000, 1000])
        tokens: list[int] = []
        try:
            for output in stream:
                tokens += output.token_ids
                if output.finish_reason is not None:
                    self.ledger.end(output.finish_reason)
                elif len(tokens) >= patience:
                    self.ledger.end("stream dropped by its client")
                    break
        except EngineError:
            self.ledger.end("error")
            return
        if options["temperature"] == 0:
            self.ledger.compare(prompt, tokens)

    def park(self) -> None:
        """Open a stream and stop reading it for a while."""
        if len(self.parked) >= 2:
            return self.resume()
        stream, _, _ = self.open_stream()
        self.parked.append((stream, []))

    def resume(self) -> None:
        stream, _ = self.parked.pop(0)
        reason: str | None = "stream dropped by its client"
        try:
            if self.chance.random() < 0.5:
                reason = [output.finish_reason for output in stream][-1]
        except EngineError:
            reason = "error"
        self.ledger.end(str(reason))

    def coroutine(self) -> None:
        """Read a stream in an event loop, to its end or until it is cancelled."""
        prompt, options = self.request()
        patience = self.chance.choice([0.01, 0.2, PATIENCE])

        async def read() -> str:
            reason: str | None = None
            stream = self.llm.stream_async(prompt, **options)
            async for output in stream:
                reason = output.finish_reason
            return str(reason)

        async def limited() -> str:
            return await asyncio.wait_for(read(), patience)

        self.ledger.ask(1)
        try:
            reason = asyncio.run(limited())
        except QueueFullError:
            self.ledger.end("refused: queue full")
            raise
        except TimeoutError:
            reason = "coroutine cancelled" if patience < PATIENCE else "hung"
        except EngineError:
            reason = "error"
        self.ledger.end(reason)
        with self.ledger.lock:
            self.ledger.accepted += 1

    def chat(self) -> None:
        a, b = self.chance.randrange(100), self.chance.randrange(100)
        message = {"role": "user", "content": f"What is {a} + {b}?"}
        self.ledger.ask(1)
        try:
            output = self.llm.chat([message], reasoning_effort="low", temperature=0)
        except QueueFullError:
            self.ledger.end("refused: queue full")
            raise
        except EngineError:
            reason = "error"
        else:
            reason = str(output.finish_reason)
            self.ledger.compare([-1, a, b], output.token_ids)
        self.ledger.end(reason)
        with self.ledger.lock:
            self.ledger.accepted += 1

    def bad(self) -> None:
        """What cannot run is refused at once."""
        request = dict(self.chance.choice(BAD))
        self.ledger.ask(1)
        try:
            self.llm.generate(request.pop("prompts"), **request)
        except (TypeError, ValueError):
            self.ledger.end("refused: bad request")
        else:
            self.ledger.fault(f"{request} was accepted")


def inject_faults(llm: LLM, every: int) -> set[int]:
    """One request of ``every`` makes its steps fail; the numbers of those that did."""
    run, failed = llm.engine.run, set()

    def faulty(works: Any) -> Any:
        logits = run(works)
        for job, *_ in works:
            if job.number % every == 1 and job.num_output >= job.number % 5:
                if len(works) == 1:  # it was found out
                    failed.add(job.number)
                raise StepFault("one of the faults of the soak")
        return logits

    llm.engine.run = faulty  # type: ignore[method-assign]
    return failed


def find_leaks(
    llm: LLM, ledger: Ledger, threads_before: int, failed: Collection[int] = ()
) -> list[str]:
    """What is left behind when all clients are done; closes the engine."""
    engine = llm.engine
    limit = time.monotonic() + PATIENCE
    while engine.scheduler.jobs and time.monotonic() < limit:
        gc.collect()  # streams that nobody holds end their requests
        time.sleep(0.05)
    finished = engine.meter.finished
    llm.close(cancel=True)
    gc.collect()
    manager, scheduler = engine.scheduler.manager, engine.scheduler
    assert isinstance(manager, PageManager)
    left = {
        "pages in use": sum(map(bool, manager.references)),
        "sequences in the cache": len(manager.tables),
        "jobs": len(scheduler.jobs) + len(scheduler.running) + len(scheduler.waiting),
        "deadlines": len(scheduler.deadlines),
        "tickets": len(engine.tickets),
        "futures and streams": len(ledger.futures),
        "hung requests": ledger.ends["hung"],
        "requests without an end": ledger.asked - ledger.ends.total(),
        "requests the engine ended twice or never": finished.total() - ledger.accepted,
        "requests that others made fail": finished["error"] - len(failed),
    }
    # Callbacks run in threads of their own, which need a moment.
    while threading.active_count() > threads_before and time.monotonic() < limit:
        time.sleep(0.05)
    left["threads"] = threading.active_count() - threads_before
    found = [f"{name}: {count}" for name, count in left.items() if count]
    try:
        manager.check_integrity()
    except AssertionError as error:
        found.append(f"the cache's books are wrong: {error}")
    if engine.dead is not None:
        found.append(f"the engine died: {engine.dead!r}")
    return found + ledger.wrong


def flatness(samples: list[float]) -> dict[str, float]:
    """Memory in the second and the last fifth of the run, and the growth between."""
    fifth = max(1, len(samples) // 5)
    early = statistics.median(samples[fifth : 2 * fifth] or samples)
    late = statistics.median(samples[-fifth:])
    return {"early_mib": early, "late_mib": late, "growth": late / early - 1}


def soak(
    seconds: float,
    threads: int,
    seed: int = 0,
    fault_every: int = 50,
    least: int = 0,
) -> dict[str, Any]:
    """Run it; what happened, and under "wrong" whatever should not have."""
    logging.getLogger("simplellm").setLevel(logging.CRITICAL + 1)
    LLM(device="cpu").close()  # starts what threads libraries keep
    threads_before = threading.active_count()
    # So short a queue that it is full now and then.
    llm = LLM(device="cpu", config=replace(CONFIG, max_waiting=max(4, threads // 2)))
    failed = inject_faults(llm, fault_every)
    ledger = Ledger()
    until = time.monotonic() + seconds
    clients = [
        threading.Thread(
            target=Client(llm, ledger, seed * threads + number).run,
            args=[until, least],
            daemon=True,
        )
        for number in range(threads)
    ]
    for client in clients:
        client.start()
    memory, busiest = [], 0.0
    while any(client.is_alive() for client in clients):
        if time.monotonic() > until + 2 * PATIENCE:
            alive = sum(client.is_alive() for client in clients)
            ledger.fault(f"{alive} clients hang")
            break
        memory.append(resident_mib())
        busiest = max(busiest, llm.engine.scheduler.manager.usage)
        time.sleep(min(1.0, seconds / 20))
    del clients, client
    wrong = find_leaks(llm, ledger, threads_before, failed)
    stats = llm.engine.meter.stats(llm.engine.scheduler)  # even if it died
    flat = flatness(memory)
    if flat["growth"] > FLAT:
        wrong.append(f"memory grew: {flat}")
    return {
        "seconds": seconds,
        "threads": threads,
        "asked": ledger.asked,
        "accepted": ledger.accepted,
        "ends": dict(ledger.ends.most_common()),
        "engine_ends": stats.finished,
        "steps": stats.steps,
        "tokens": stats.generated_tokens,
        "preemptions": stats.preemptions,
        "cache_hit_rate": stats.cache_hit_rate,
        "most_of_the_cache_used": busiest,
        "memory": flat,
        "wrong": wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write what happened")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        "date": date.today().isoformat(),
        "command": " ".join(["python tools/soak.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "config": asdict(CONFIG),
    } | soak(60 * options.minutes, options.threads, options.seed)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name in ("asked", "ends", "tokens", "preemptions", "memory", "wrong"):
        print(f"{name:<12} {found[name]}")
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
