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
from concurrent.futures import CancelledError
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from records import argument_parser, header, save

sys.path.append(str(Path(__file__).resolve().parents[1] / "chapters"))
from course.integrity import check_integrity

from simplellm import LLM, EngineConfig, EngineError, QueueFullError, RequestOutput
from simplellm.engine.page_manager import PageManager

CONFIG = EngineConfig(
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
DROPPED = "dropped by its client"
REFUSED = "refused: bad request"
BAD: tuple[dict[str, Any], ...] = (
    {"prompts": None},
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
# What a call that raises says of its requests.
ENDS: dict[type[BaseException], str] = {
    QueueFullError: "refused: queue full",
    EngineError: "error",
    CancelledError: "cancelled",
    TimeoutError: "hung",
}


class StepFault(Exception):
    """What the soak makes a step of the engine fail with."""


def resident_mib(process: object = "self") -> float:
    """What of this process, or of another, is in memory, as Linux counts it."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


@dataclass
class Ledger:
    """What the clients saw, shared by all of them."""

    asked: int = 0  # requests that clients tried to submit, a sample each
    ends: Counter[str] = field(default_factory=Counter)  # one for each asked
    wrong: list[str] = field(default_factory=list)  # what must not happen
    greedy: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    futures: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)

    @property
    def accepted(self) -> int:
        """Samples that the engine took, of those that have ended."""
        refused = (n for end, n in self.ends.items() if end.startswith("refused"))
        return self.ends.total() - sum(refused)

    def ask(self, count: int) -> None:
        with self.lock:
            self.asked += count

    def hold(self, what: Any) -> None:
        with self.lock:
            self.futures.add(what)

    def end(self, reasons: Collection[str]) -> None:
        with self.lock:
            self.ends.update(reasons)

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
    """One thread's random requests. An action returns how its requests ended."""

    def __init__(self, llm: LLM, ledger: Ledger, seed: int) -> None:
        self.llm = llm
        self.ledger = ledger
        self.chance = random.Random(seed)
        self.parked: list[Iterator[RequestOutput]] = []
        self.open = 0  # requests that the current action has asked for

    def run(self, until: float, least: int) -> None:
        """Go on until that time, and until ``least`` requests were accepted."""
        usual = [self.future, self.stream]
        rare = [self.bad, self.coroutine, self.park, self.chat]
        try:
            while time.monotonic() < until or self.ledger.accepted < least:
                some = rare if self.chance.random() < 0.3 else usual
                self.act(self.chance.choice(some))
            while self.parked:
                self.act(self.resume)
        except BaseException as error:
            self.ledger.fault(f"a client stopped: {error!r}")
            raise

    def act(self, action: Callable[[], list[str]]) -> None:
        """Take an action; if its call raises, that is how its requests ended."""
        self.open = 0
        try:
            ends = action()
        except tuple(ENDS) as error:
            ends = [ENDS[type(error)]] * self.open
            if isinstance(error, QueueFullError):
                time.sleep(self.chance.uniform(0, 2))
        self.ledger.end(ends)

    def ask(self, count: int = 1) -> int:
        self.open = count
        self.ledger.ask(count)
        return count

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
        rare = {"timeout": chance.uniform(0, 2), "stop": ["e", "\n"], "logprobs": 3}
        return prompt, options | {
            k: v for k, v in rare.items() if chance.random() < 0.1
        }

    def future(self) -> list[str]:
        prompt, options = self.request()
        n = self.ask(self.chance.choice([1, 1, 1, 2, 4]))
        future = self.llm.generate([prompt], n=n, **options)
        self.ledger.hold(future)
        if self.chance.random() < 0.1:
            future.add_done_callback(lambda future: 1 // 0)
        if self.chance.random() < 0.15:
            time.sleep(self.chance.uniform(0, 0.3))
            future.cancel()
        elif self.chance.random() < 0.05:
            return [f"future {DROPPED}"] * n
        outputs = future.result(PATIENCE)
        if options["temperature"] == 0:
            for output in outputs:
                self.ledger.compare(prompt, output.token_ids)
        return [str(output.finish_reason) for output in outputs]

    def open_stream(self) -> tuple[Iterator[RequestOutput], list[int], bool]:
        """A stream, its prompt, and whether it is greedy."""
        prompt, options = self.request()
        self.ask()
        stream = self.llm.stream(prompt, **options)
        self.ledger.hold(stream)
        return stream, prompt, options["temperature"] == 0

    def stream(self) -> list[str]:
        """Read a stream to its end, or walk away from it."""
        stream, prompt, greedy = self.open_stream()
        patience = self.chance.choice([1, 5, 1000, 1000, 1000])
        tokens: list[int] = []
        end = f"stream {DROPPED}"
        for output in stream:
            tokens += output.token_ids
            if output.finish_reason is not None:
                end = output.finish_reason
            elif len(tokens) >= patience:
                break
        if greedy:
            self.ledger.compare(prompt, tokens)
        return [end]

    def park(self) -> list[str]:
        """Open a stream and stop reading it for a while."""
        if len(self.parked) >= 2:
            return self.resume()
        self.parked.append(self.open_stream()[0])
        return []

    def resume(self) -> list[str]:
        stream, self.open = self.parked.pop(0), 1
        if self.chance.random() < 0.5:
            return [str([output.finish_reason for output in stream][-1])]
        return [f"stream {DROPPED}"]

    def coroutine(self) -> list[str]:
        """Read a stream in an event loop, to its end or until it is cancelled."""
        prompt, options = self.request()
        patience = self.chance.choice([0.01, 0.2, PATIENCE])

        async def read() -> str:
            reason: str | None = None
            async for output in self.llm.stream_async(prompt, **options):
                reason = output.finish_reason
            return str(reason)

        self.ask()
        try:
            return [asyncio.run(asyncio.wait_for(read(), patience))]
        except TimeoutError:
            return ["coroutine cancelled" if patience < PATIENCE else "hung"]

    def chat(self) -> list[str]:
        a, b = self.chance.randrange(100), self.chance.randrange(100)
        message = {"role": "user", "content": f"What is {a} + {b}?"}
        self.ask()
        output = self.llm.chat([message], reasoning_effort="low", temperature=0)
        self.ledger.compare([-1, a, b], output.token_ids)
        return [str(output.finish_reason)]

    def bad(self) -> list[str]:
        """What cannot run is refused at once."""
        request = dict(self.chance.choice(BAD))
        self.ask()
        try:
            self.llm.generate(request.pop("prompts"), **request)
        except (TypeError, ValueError):
            return [REFUSED]
        self.ledger.fault(f"{request} was accepted")
        return []


def inject_faults(llm: LLM, every: int) -> set[int]:
    """One request of ``every`` makes its steps fail; the numbers of those that did."""
    runner, failed = llm.engine_core.runner, set()
    launch = runner.launch

    def faulty(works: Any) -> Any:
        for work in works:
            number = work.request.request_id
            if number % every == 1 and work.request.num_output >= number % 5:
                if len(works) == 1:  # it was found out
                    failed.add(number)
                raise StepFault("one of the faults of the soak")
        return launch(works)

    runner.launch = faulty  # type: ignore[method-assign, assignment]
    return failed


def find_leaks(
    llm: LLM, ledger: Ledger, threads_before: int, failed: Collection[int] = ()
) -> list[str]:
    """What is left behind when all clients are done; closes the engine."""
    engine = llm.engine_core
    limit = time.monotonic() + PATIENCE
    while engine.scheduler.requests and time.monotonic() < limit:
        gc.collect()  # streams that nobody holds end their requests
        time.sleep(0.05)
    llm.close(cancel=True)
    gc.collect()
    if engine.dead is not None:
        return [f"the engine died: {engine.dead!r}", *ledger.wrong]
    seen, finished = engine.snapshot(), Counter(engine.stats().finished)
    left = {
        "pages in use": sum(map(bool, seen["pages"]["references"])),
        "sequences in the cache": len(seen["pages"]["tables"]),
        "requests": len(seen["running"]) + len(seen["waiting"]),
        "futures and streams": len(ledger.futures),
        "hung requests": ledger.ends["hung"],
        "requests without an end": ledger.asked - ledger.ends.total(),
        "requests the engine ended twice or never": finished.total() - ledger.accepted,
        "requests that others made fail": finished["error"] - len(failed),
    }
    # Callbacks run in threads of their own, which need a moment.
    while threading.active_count() > threads_before and time.monotonic() < limit:
        time.sleep(0.05)
    left["threads"] = max(0, threading.active_count() - threads_before)
    leaks = [f"{name}: {count}" for name, count in left.items() if count]
    manager = engine.scheduler.manager
    assert isinstance(manager, PageManager)
    try:
        check_integrity(manager)
    except AssertionError as error:
        leaks.append(f"the cache's books are wrong: {error}")
    return leaks + ledger.wrong


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
    LLM(device="cpu").close()  # starts what threads libraries keep
    threads_before = threading.active_count()
    # So short a queue that it is full now and then.
    llm = LLM(device="cpu", config=replace(CONFIG, max_waiting=max(4, threads // 2)))
    failed = inject_faults(llm, fault_every)
    ledger, until = Ledger(), time.monotonic() + seconds
    some = [Client(llm, ledger, seed * threads + one) for one in range(threads)]
    clients = [
        threading.Thread(target=one.run, args=[until, least], daemon=True)
        for one in some
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
        busiest = max(busiest, llm.stats().cache_usage)
        time.sleep(min(1.0, seconds / 20))
    del clients, client, some
    wrong = find_leaks(llm, ledger, threads_before, failed)
    stats = llm.engine_core.meter.stats(llm.engine_core.scheduler)  # even if it died
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
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # It would log each of the faults that are injected.
    logging.getLogger("simplellm").setLevel(logging.CRITICAL + 1)
    record = soak(60 * options.minutes, options.threads, options.seed)
    save(header() | {"config": asdict(CONFIG)} | record, options.json)
    print(json.dumps(record, indent=1))
    return int(bool(record["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
