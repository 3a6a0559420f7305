"""Workloads: which requests come, and when. Plain data, from a seed or a file."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from pathlib import Path
from random import Random
from typing import Any

from simplellm.base.config import MAX_SIZE, check_number, expect

# So common that a large vocabulary has a token for each; servers tell the true counts.
WORDS = (
    "time year people way day man thing woman life child world school state family "
    "student group country problem hand part place case week company system program "
    "question work government number night point home water room mother area money"
).split()
LOOKUP = {"name": "search", "parameters": {"type": "object"}}


@dataclass(frozen=True)
class Arrival:
    """One request and when it comes. Its fields are those of a line in a file.

    They are those of OpenAI's batch files, and what else we need.
    """

    custom_id: str
    url: str  # the path of an endpoint
    body: dict[str, Any]
    method: str = "POST"
    at: float = 0.0  # seconds after the start, or after that answer
    after: str | None = None  # the custom_id of the request whose answer it waits for
    result: dict[str, Any] | None = None  # once it was sent


@dataclass(frozen=True)
class Workload:
    """What requests look like, prompts in words and outputs in tokens.

    Lengths are (median, least, most) of a log-normal distribution with sigma 1.
    """

    prompt: tuple[int, int, int]
    output: tuple[int, int, int]  # no answer ends earlier
    shared: int = 0  # length of the system message, the same for all
    first: int | None = None  # of a conversation's first prompt, if it's another
    turns: int = 1  # of a conversation; the assistant calls a tool between them
    burst: int = 1  # requests that come at the same moment
    chat: bool = True  # False: a bare prompt


WORKLOADS = {
    "chat": Workload((100, 8, 1024), (150, 8, 1024)),
    "agent": Workload((200, 8, 2048), (60, 8, 512), shared=600, turns=6),
    # Prompts of 64,000 words in the mean, of which nine tenths were there a turn ago.
    "agent-long": Workload((6000,) * 3, (400,) * 3, first=48_000, turns=6),
    "burst": Workload((100, 8, 1024), (150, 8, 1024), burst=32),
    "shared": Workload((60, 8, 512), (100, 8, 512), shared=2000),
    "long": Workload((8000, 2000, 32_000), (150, 8, 512)),
    "mixed": Workload((400, 16, 4096), (200, 8, 1024), chat=False),
}


def draw_length(chance: Random, median: int, least: int, most: int) -> int:
    """Draw a length; one that is out of bounds becomes the bound."""
    return min(most, max(least, round(median * chance.lognormvariate(0, 1))))


def random_text(chance: Random, length: int) -> str:
    """A text of so many words."""
    return " ".join(chance.choices(WORDS, k=length))


def draw_conversation(
    kind: Workload, chance: Random, name: str, system: str
) -> list[Arrival]:
    """The requests of one conversation, each with all that was said before it.

    What the assistant says in it is drawn too, as long as the answer that the model is
    asked for; that one is waited for and forgotten. So every model gets the same load,
    and each prompt begins with the one before it.
    """

    def user_text() -> str:
        return random_text(chance, draw_length(chance, *kind.prompt))

    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    opening = user_text() if kind.first is None else random_text(chance, kind.first)
    messages.append({"role": "user", "content": opening})
    tools = {"tools": [{"type": "function", "function": LOOKUP}]}
    arrivals: list[Arrival] = []
    for turn in range(kind.turns):
        length = draw_length(chance, *kind.output)
        body: dict[str, Any] = {"messages": [*messages], "max_tokens": length}
        body |= tools if kind.turns > 1 else {}
        after = arrivals[-1].custom_id if arrivals else None
        url = "/v1/chat/completions"
        arrivals.append(Arrival(f"{name}-{turn}", url, body, after=after))
        query = json.dumps({"query": random_text(chance, length)})
        call = {"name": LOOKUP["name"], "arguments": query}
        calls = [{"id": f"call_{turn}", "type": "function", "function": call}]
        messages += [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": user_text()},
        ]
    return arrivals


def draw_workload(kind: Workload, requests: int, seed: int) -> list[Arrival]:
    """Draw so many requests, which all come at once. Each has a seed of its own."""
    chance = Random(seed)
    system = random_text(chance, kind.shared)
    arrivals: list[Arrival] = []
    while len(arrivals) < requests:
        name = str(len(arrivals))
        if kind.chat:
            arrivals += draw_conversation(kind, chance, name, system)
        else:
            prompt = random_text(chance, draw_length(chance, *kind.prompt))
            length = draw_length(chance, *kind.output)
            body = {"prompt": prompt, "max_tokens": length}
            arrivals.append(Arrival(name, "/v1/completions", body))
    return [
        replace(one, body=one.body | {"ignore_eos": True, "seed": seed + number})
        for number, one in enumerate(arrivals[:requests])
    ]


def poisson_arrivals(
    arrivals: Sequence[Arrival], rate: float, seed: int, burst: int = 1
) -> list[Arrival]:
    """The requests, arriving as a Poisson process of bursts at ``rate`` a second."""
    chance = Random(seed)
    starts = accumulate(chance.expovariate(rate / burst) for _ in count())
    times = (start for start in starts for _ in range(burst))
    return [replace(one, at=one.at if one.after else next(times)) for one in arrivals]


def conversations(arrivals: Iterable[Arrival]) -> list[list[Arrival]]:
    """The requests that wait for each other, in order; most wait for none.

    Raises ValueError for an id that comes twice, and for a request that waits for none
    of those before it, or for the same one as another.
    """
    groups: list[list[Arrival]] = []
    latest: dict[str, list[Arrival]] = {}  # conversations, by their last request so far
    seen: set[str] = set()
    for one in arrivals:
        name, former = one.custom_id, one.after
        expect(name not in seen, "custom_id", name, "an id that no other request has")
        seen.add(name)
        if former is None:
            latest[name] = []
            groups.append(latest[name])
        else:
            expected = "the id of an earlier request, for which no other waits"
            expect(former in latest, "after", former, expected)
            latest[name] = latest.pop(former)
        latest[name].append(one)
    return groups


def read_workload(path: Path) -> list[Arrival]:
    """The requests of a file. Raises ValueError that names the line that is not one."""
    arrivals = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            arrivals.append(Arrival(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
    expect(arrivals, str(path), "empty", "a line for each request")
    return arrivals


def plan_load(
    load: str, requests: int, rate: float | None, clients: int | None, seed: int
) -> list[Arrival]:
    """The requests that the options ask for. Raises ValueError."""
    check_number("--requests", requests, int, 1, MAX_SIZE)
    expect(None in (rate, clients), "--rate", rate, "none beside --clients")
    if clients is not None:
        check_number("--clients", clients, int, 1, MAX_SIZE)
    burst = 1
    if load in WORKLOADS:
        arrivals = draw_workload(WORKLOADS[load], requests, seed)
        burst = WORKLOADS[load].burst
    else:
        expected = f"{', '.join(WORKLOADS)} or a file"
        expect(Path(load).is_file(), "--load", load, expected)
        arrivals = read_workload(Path(load))
    if rate is None:
        return arrivals
    check_number("--rate", rate, float, 0, MAX_SIZE, above=0)
    return poisson_arrivals(arrivals, rate, seed, burst)
