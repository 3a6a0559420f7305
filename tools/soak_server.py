"""Load `simplellm serve` with clients of all kinds, then see what they left behind.

    python tools/soak_server.py --minutes 60 --clients 32 --json soak.json

Clients stay to the end or leave in the middle, before the first token or with half a
request sent; they ask for too much, for what cannot be, and for answers that fit a
schema. Every one must end as it should. Afterwards the server must run nothing, hold no
page, file or thread more than before, and its memory must not have grown.
"""

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from records import argument_parser, header, save
from soak import FLAT, flatness, resident_mib

from simplellm.apps.traffic import Outcome, Send, to_url
from simplellm.apps.workloads import Arrival, Workload, draw_workload

LIMIT = 30  # seconds that the server gives a request of a soak
PATIENCE = 120.0  # seconds after which a client counts as hung, and a server as busy
# Of requests that the embedded model can answer by the hundred.
KIND = Workload((15, 4, 60), (20, 4, 60), chat=False)
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}, "sure": {"type": "boolean"}},
    "required": ["sum", "sure"],
    "additionalProperties": False,
}
BAD: tuple[tuple[int, str, Any], ...] = (
    (400, "/v1/completions", {"prompt": []}),
    (400, "/v1/completions", {"prompt": "x", "max_tokens": 0}),
    (400, "/v1/completions", {"prompt": "x", "temperature": "hot"}),
    (400, "/v1/completions", {"prompt": "x", "top_p": 7}),
    (400, "/v1/completions", b"{"),
    (400, "/v1/chat/completions", {"messages": [{"role": "nobody"}]}),
    (404, "/v1/completions", {"prompt": "x", "model": "another"}),
    (404, "/v1/nothing", {}),
    (413, "/v1/completions", b"x" * (17 * 2**20)),
)


@contextmanager
def serving() -> Iterator[tuple[int, str]]:
    """`simplellm serve` in a process of its own: its number and its URL."""
    command = [sys.executable, "-m", "simplellm.apps.cli", "serve", "--port", "0"]
    command += ["--timeout", str(LIMIT)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"served at (http://\S+)", line):
                break
        else:
            raise RuntimeError(f"no server: {line}")
        try:
            yield process.pid, found[1]
        finally:
            process.terminate()
    if process.returncode:
        raise RuntimeError(f"the server ended with {process.returncode}")


def holdings(pid: int) -> dict[str, float]:
    """What a process and its children hold, as Linux counts it."""
    folder = Path("/proc", str(pid))
    tasks = [*(folder / "task").iterdir()]
    children = " ".join((task / "children").read_text() for task in tasks).split()
    held = {
        "mib": resident_mib(pid),
        "files": len([*(folder / "fd").iterdir()]),
        "threads": len(tasks),
    }
    for below in map(holdings, map(int, children)):  # the engine's process
        held = {name: count + below[name] for name, count in held.items()}
    return held


def holdings_at_rest(pid: int, before: dict[str, float]) -> dict[str, float]:
    """The same, as soon as it is no more than ``before``, or when patience ends.

    A busy machine takes its time to close what clients have left; a leak stays.
    """
    limit = time.monotonic() + PATIENCE
    while compare(before, held := holdings(pid), 0) and time.monotonic() < limit:
        time.sleep(0.5)
    return held


async def wait_until_idle(url: str) -> None:
    """Wait until the server runs nothing and holds no page. Raises TimeoutError."""
    names = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
    async with asyncio.timeout(PATIENCE), aiohttp.ClientSession(url) as session:
        while True:
            async with session.get("/metrics") as response:
                text = await response.text()
            values = [
                float(value)
                for name in names
                for value in re.findall(rf"^simplellm:{name}{{.*}} (.*)$", text, re.M)
            ]
            assert len(values) == len(names), text
            await asyncio.sleep(1)  # so long it may take to close a connection
            if not any(values):
                return


def compare(
    before: dict[str, float], after: dict[str, float], growth: float
) -> list[str]:
    """What a server holds that it should not."""
    leaks = [
        f"{name}: {after[name]}, and {before[name]} before"
        for name in ("files", "threads")
        if after[name] > before[name]
    ]
    return leaks + [f"memory grew by {growth:.1%}"] * (growth > FLAT)


class Client:
    """Asks one thing after the other; an action returns how it ended."""

    def __init__(
        self, url: str, send: Send, session: aiohttp.ClientSession, seed: int
    ) -> None:
        self.url, self.send, self.session = url, send, session
        self.chance = random.Random(seed)
        self.actions: list[Callable[[], Awaitable[str]]] = [
            *[self.stay] * 4,
            *[self.leave] * 3,
            self.schema,
            self.bad,
            self.too_long,
            self.half,
        ]

    def request(self) -> Arrival:
        (one,) = draw_workload(KIND, 1, self.chance.randrange(10**9))
        return one

    async def stay(self) -> str:
        """Read a stream to its end."""
        one, outcome = self.request(), Outcome(time.monotonic())
        await self.send(one, outcome)
        if outcome.error is not None:
            return "ok: no time" if "timeout" in outcome.error else outcome.error
        short = one.body["max_tokens"] - len(outcome.tokens)
        return f"{short} tokens are missing" if short else "ok: answered"

    async def leave(self) -> str:
        """Leave somewhere on the way, most often in the middle of a stream."""
        try:
            async with asyncio.timeout(self.chance.expovariate(1.0)):
                return await self.stay()
        except TimeoutError:
            return "ok: left"

    async def too_long(self) -> str:
        """Ask for more than there is time for."""
        body = {"prompt": "time", "max_tokens": 50_000, "ignore_eos": True}
        async with self.session.post("/v1/completions", json=body) as response:
            return "ok: too long" if response.status == 504 else str(response.status)

    async def schema(self) -> str:
        """Ask for an answer that fits a schema; a new one each time is compiled."""
        name = f"answer_{self.chance.randrange(10**6)}"
        schema = SCHEMA | {"title": name}
        body = {
            "messages": [{"role": "user", "content": "What is 47 + 85?"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": name, "schema": schema, "strict": True},
            },
            "reasoning_effort": "low",
            "max_tokens": 400,
        }
        async with self.session.post("/v1/chat/completions", json=body) as response:
            if response.status != 200:
                late = response.status == 504
                return "ok: no time" if late else await response.text()
            choice = (await response.json())["choices"][0]
        if choice["finish_reason"] == "length":
            return "ok: schema, cut off"
        value = json.loads(choice["message"]["content"])
        fits = type(value.pop("sum")) is int and type(value.pop("sure")) is bool
        return "ok: schema" if fits and not value else f"not in the schema: {value}"

    async def bad(self) -> str:
        """Send what cannot be answered."""
        status, path, body = self.chance.choice(BAD)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        try:
            async with self.session.post(path, data=data, headers=headers) as response:
                answered = response.status
        except aiohttp.ClientOSError:  # it was refused before all of it was sent
            answered = 413 if status == 413 else 0
        right = answered == status
        return "ok: bad" if right else f"{path}: {answered}, not {status}"

    async def half(self) -> str:
        """Send half a request and leave."""
        address = urlsplit(self.url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        text = b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\n"
        text += b"content-type: application/json\r\n\r\n{"
        writer.write(text[: self.chance.randrange(len(text))])
        await writer.drain()
        writer.close()
        return "ok: half"

    async def run(self, until: float, ends: Counter[str]) -> None:
        while time.monotonic() < until:
            try:
                async with asyncio.timeout(PATIENCE):
                    ends[await self.chance.choice(self.actions)()] += 1
            except Exception as error:
                ends[f"{type(error).__name__}: {error}"] += 1


async def warm_up(url: str, clients: int) -> None:
    """Let the server start the threads that it will have, those for grammars too."""
    async with to_url(url) as send, aiohttp.ClientSession(url) as session:
        some = [Client(url, send, session, -seed) for seed in range(1, clients + 1)]
        await asyncio.gather(*(one.schema() for one in some))
        await asyncio.gather(*(one.stay() for one in some))
    await wait_until_idle(url)


async def crowd_of_all_kinds(
    pid: int, url: str, seconds: float, clients: int
) -> tuple[Counter[str], list[float]]:
    """How their requests ended, and the server's memory every few seconds."""
    until, ends = time.monotonic() + seconds, Counter[str]()
    memory: list[float] = []

    async def watch() -> None:
        while True:
            memory.append(holdings(pid)["mib"])
            await asyncio.sleep(min(5.0, seconds / 50))

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        to_url(url) as send,
        aiohttp.ClientSession(url, connector=connector) as session,
    ):
        watching = asyncio.create_task(watch())
        some = [Client(url, send, session, seed) for seed in range(clients)]
        await asyncio.gather(*(client.run(until, ends) for client in some))
        watching.cancel()
    await wait_until_idle(url)
    return ends, memory


def soak_server(seconds: float, clients: int) -> dict[str, Any]:
    """Run it; what happened, and under "wrong" whatever should not have."""
    with serving() as (pid, url):
        asyncio.run(warm_up(url, max(8, clients)))
        before = holdings(pid)
        ends, memory = asyncio.run(crowd_of_all_kinds(pid, url, seconds, clients))
        after = holdings_at_rest(pid, before)
    flat = flatness(memory)
    wrong = [f"{count} x {end}" for end, count in ends.items() if end[:3] != "ok:"]
    return {
        "seconds": seconds,
        "clients": clients,
        "ends": dict(ends.most_common()),
        "before": before,
        "after": after,
        "memory": flat,
        "wrong": wrong + compare(before, after, flat["growth"]),
    }


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=32)
    options = parser.parse_args()
    record = soak_server(60 * options.minutes, options.clients)
    save(header() | record, options.json)
    print(json.dumps(record, indent=1))
    return int(bool(record["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
