"""Send a workload to a server or an engine, and note what comes back, and when.

Latencies count from the moment at which a request was due, so that its wait for a slow
server is part of them, and for a slow client too. Every request has an outcome.
"""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from itertools import groupby, pairwise
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from simplellm.apps.serving import needs_extra
from simplellm.apps.workloads import Arrival, conversations
from simplellm.engine.stats import quantile

PATIENCE = 3600.0  # seconds for one answer
UNCOUNTED = -1  # for a part's tokens, where a server doesn't count them
# What of a choice, or of its delta, says that there is a token.
SPOKEN = ("text", "content", "reasoning", "reasoning_content", "tool_calls")
FAILED = "not sent: the request before it failed"
MOST_REASONS = 5  # that a summary tells


@dataclass
class Outcome:
    """What became of a request. Times are seconds, by time.monotonic()."""

    due: float  # when it was to be sent
    sent: float = 0.0  # 0: it never was
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of each of them
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt's
    finish_reason: str | None = None
    error: str | None = None  # its kind, and after a colon the rest

    def push(self, tokens: Sequence[int]) -> None:
        """Note that these tokens are there, or a part of an unknown number of them."""
        self.tokens += tokens
        self.times += [time.monotonic()] * len(tokens)

    def gaps(self) -> list[float]:
        """Seconds between tokens.

        Of k tokens that came at once, g seconds after those before them, each counts
        g / k. Those that came with the first one count nothing. Tokens of which
        the server sends no ids are spread evenly over the parts of the answer.
        """
        each = self.output_tokens / max(1, len(self.tokens))
        parts = [(when, each * len([*group])) for when, group in groupby(self.times)]
        return [
            (now - before) / count
            for (before, _), (now, count) in pairwise(parts)
            for _ in range(max(1, round(count)))
        ]


# A coroutine that sends a request and fills its outcome.
Send = Callable[[Arrival, Outcome], Any]


# Ways to send


@asynccontextmanager
async def to_engine(llm: Any) -> AsyncIterator[Send]:
    """A way to send requests to an LLM of this process, as a server would do it.

    Raises ValueError without the extra [serve].
    """
    with needs_extra():
        from simplellm.apps import offline

    async def send(arrival: Arrival, outcome: Outcome) -> None:
        request = {"url": arrival.url, "body": arrival.body}
        made = offline.read_request(llm, request, {})
        async with llm.replies(made.specs, n=made.n, chat=made.chat) as replies:
            async for _, part in replies:
                outcome.push([UNCOUNTED] if made.chat else part.token_ids)
            usage = replies.usage()
            outcome.output_tokens = usage.completion_tokens
            outcome.prompt_tokens = usage.prompt_tokens
            outcome.cached_tokens = usage.cached_tokens
            outcome.finish_reason = replies.outputs()[0].finish_reason

    yield send


@asynccontextmanager
async def to_url(url: str, key: str | None = None) -> AsyncIterator[Send]:
    """A way to send requests to a server. Raises aiohttp.ClientError if there is none.

    A body that names no model asks for the first one that the server lists.
    """
    try:
        import aiohttp
    except ModuleNotFoundError:
        raise ValueError(
            "aiohttp is not installed; expected what pip install 'simplellm[bench]' "
            "brings"
        ) from None
    # A server may close a connection in the moment in which it is used again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(PATIENCE)
    url = url.rstrip("/").removesuffix("/v1")  # as clients' base URLs end
    async with aiohttp.ClientSession(
        url, connector=connector, headers=headers, timeout=timeout
    ) as session:
        async with session.get("/v1/models", raise_for_status=True) as response:
            model = (await response.json())["data"][0]["id"]
        stream = {"stream": True, "stream_options": {"include_usage": True}}

        async def send(arrival: Arrival, outcome: Outcome) -> None:
            body = {"model": model} | arrival.body | stream
            # In a chat some servers would compute log-probabilities for that.
            body |= {} if "messages" in body else {"return_token_ids": True}
            async with session.post(arrival.url, json=body) as response:
                if response.status != 200:
                    text = await response.text()
                    outcome.error = f"HTTP {response.status}: {text}"
                rest = b""
                # What can be read at once came at once, in however many events.
                async for data in response.content.iter_any():
                    *lines, rest = (rest + data).split(b"\n")
                    take_events(lines, outcome)

        yield send


def take_events(lines: Iterable[bytes], outcome: Outcome) -> None:
    """Enter into ``outcome`` what lines of a stream say that came together."""
    tokens: list[int] = []
    for line in lines:
        name, _, data = line.partition(b":")
        if name != b"data" or data.strip() == b"[DONE]":
            continue
        event = json.loads(data)
        if error := event.get("error"):
            outcome.error = f"in the stream: {error}"
        if usage := event.get("usage"):
            outcome.output_tokens = usage["completion_tokens"]
            outcome.prompt_tokens = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            outcome.cached_tokens = details.get("cached_tokens") or 0
        for choice in event.get("choices", ()):
            outcome.finish_reason = choice["finish_reason"] or outcome.finish_reason
            texts = {"text": choice.get("text")} | choice.get("delta", {})
            has_text = any(texts.get(name) for name in SPOKEN)
            ids = choice.get("token_ids")
            tokens += [UNCOUNTED] * has_text if ids is None else ids
    outcome.push(tokens)


# What is sent when


async def send_request(send: Send, arrival: Arrival, outcome: Outcome) -> None:
    """Send a request once it is due, and wait for its end. Raises nothing."""
    await asyncio.sleep(outcome.due - time.monotonic())
    outcome.sent = time.monotonic()
    try:
        await send(arrival, outcome)
        outcome.output_tokens = outcome.output_tokens or len(outcome.tokens)
        if outcome.error is None and outcome.finish_reason is None:
            outcome.error = "cut short"
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"


def find_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop, with which hundreds of streams cost the client half as much; or None."""
    with suppress(ImportError):
        from uvloop import new_event_loop

        return new_event_loop
    return None


def run_traffic(
    way: AbstractAsyncContextManager[Send],
    arrivals: Sequence[Arrival],
    clients: int | None = None,
    file: IO[str] | None = None,
) -> list[Outcome]:
    """Send a workload one ``way``; its outcomes, in its order.

    All begin when they are due. Or ``clients`` share the conversations, whatever their
    time: each begins another when it is through with one. After an error the rest of a
    conversation has nothing to follow. ``file`` gets a line for each request.
    """
    talks = conversations(arrivals)
    outcomes: dict[str, Outcome] = {}

    async def converse(send: Send, talk: Sequence[Arrival], due: float) -> None:
        error = None
        for arrival in talk:
            outcome = Outcome(due + arrival.at, error=error)
            if error is None:
                await send_request(send, arrival, outcome)
            outcome.ended = due = time.monotonic()
            error = outcome.error and FAILED
            outcomes[arrival.custom_id] = outcome
            if file is not None:
                line = asdict(replace(arrival, result=asdict(outcome)))
                file.write(json.dumps(line) + "\n")
            bar.update()

    async def run() -> None:
        async with way as send:
            waiting, now = iter(talks), time.monotonic()

            async def work() -> None:
                for talk in waiting:
                    await converse(send, talk, time.monotonic() - talk[0].at)

            if clients is None:
                await asyncio.gather(*(converse(send, talk, now) for talk in talks))
            else:
                await asyncio.gather(*(work() for _ in range(clients)))

    with (
        tqdm(total=len(arrivals), unit="req", disable=None, leave=False) as bar,
        asyncio.Runner(loop_factory=find_loop()) as runner,
    ):
        runner.run(run())
    return [outcomes[one.custom_id] for one in arrivals]


# What is found


def latencies(outcomes: Iterable[Outcome]) -> dict[str, list[float]]:
    """Milliseconds of each kind of latency, of answers without an error."""
    good = [one for one in outcomes if one.error is None and one.times]
    pauses = ([b - a for a, b in pairwise(one.times)] for one in good)
    seconds = {
        "first token": [one.times[0] - one.due for one in good],
        "between tokens": [gap for one in good for gap in one.gaps()],
        "longest pause": [max(some) for some in pauses if some],
        "whole answer": [one.ended - one.due for one in good],
        "sent late": [one.sent - one.due for one in good],  # the client's fault
    }
    return {name: [1e3 * time for time in some] for name, some in seconds.items()}


def summarize_traffic(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What all outcomes come to. Tokens are those of answers without an error."""
    good = [one for one in outcomes if one.error is None]
    errors = Counter(one.error.partition(":")[0] for one in outcomes if one.error)
    reasons = Counter(one.error for one in outcomes if one.error)
    seconds = max(one.ended for one in outcomes) - min(one.due for one in outcomes)
    tokens = sum(one.output_tokens for one in good)
    return {
        "date": date.today().isoformat(),
        "requests": len(outcomes),
        "answered": len(good),
        "errors": dict(errors.most_common()),  # requests by kind
        "reasons": dict(reasons.most_common(MOST_REASONS)),  # requests by whole error
        "seconds": seconds,  # until the last one ended
        "requests_per_second": len(good) / seconds,
        "tokens_per_second": tokens / seconds,
        "output_tokens": tokens,
        "prompt_tokens": sum(one.prompt_tokens for one in good),
        "cached_tokens": sum(one.cached_tokens for one in good),
        "milliseconds": {
            name: {f"p{q}": quantile(some, q / 100) for q in (50, 90, 99)}
            for name, some in latencies(good).items()
        },
    }


def measure_traffic(
    start: Callable[[], Any],
    url: str,
    arrivals: Sequence[Arrival],
    clients: int | None,
    results: Path | None,
) -> list[Outcome]:
    """Send a workload to ``url`` or, where that is "", to the LLM of ``start``."""
    with ExitStack() as stack:
        file = stack.enter_context(results.open("w")) if results else None
        if url:
            way = to_url(url, os.environ.get("SIMPLELLM_API_KEY"))
        else:
            way = to_engine(stack.enter_context(start()))
        return run_traffic(way, arrivals, clients, file)
