"""What clients wait for, measured against servers whose delays are known."""

import asyncio
import io
import json
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from serving import serving

from simplellm import LLM
from simplellm.apps import cli, traffic
from simplellm.apps.report import show_traffic
from simplellm.apps.traffic import (
    Outcome,
    latencies,
    run_traffic,
    summarize_traffic,
    to_engine,
    to_url,
)
from simplellm.apps.workloads import (
    WORKLOADS,
    Arrival,
    Workload,
    draw_workload,
    poisson_arrivals,
    read_workload,
)

LATE = 0.25  # seconds by which a busy machine may be late
SMALL = Workload((20, 8, 40), (10, 8, 20), shared=10, turns=3)
MODELS = b'{"data": [{"id": "scripted"}]}'
Script = Callable[[dict[str, Any], Callable[[Any], Awaitable[None]]], Awaitable[None]]


def request(name: str, **fields: Any) -> Arrival:
    return Arrival(name, "/v1/completions", {"prompt": name}, **fields)


def head(status: int, body: bytes | None = None) -> bytes:
    """The head of a response, with its body; else what is sent is its body."""
    lines = [f"HTTP/1.1 {status} OK", "content-type: application/json"]
    lines.append(f"content-length: {len(body)}" if body else "connection: close")
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


@contextmanager
def scripted(script: Script) -> Iterator[str]:
    """A server, in a thread of its own, that does what a script says; its URL.

    The script gets a request's body and what sends: a status with an error, or events.
    Several events in a list are sent at once.
    """
    stop, ready = asyncio.Event(), threading.Event()
    ports: list[int] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def answer(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        if asked.startswith(b"GET /v1/models "):
            writer.write(head(200, MODELS))
            writer.close()
            return
        length = asked.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        body = json.loads(await reader.readexactly(int(length)))
        begun = False

        async def send(what: Any) -> None:
            nonlocal begun
            if isinstance(what, int):
                error = {"code": "busy", "message": "come back"}
                writer.write(head(what, json.dumps({"error": error}).encode()))
                return
            if not begun:
                writer.write(head(200))
                begun = True
            lines = (f"data: {json.dumps(event)}\n\n" for event in what)
            writer.write("".join(lines).encode())
            await writer.drain()

        try:
            await script(body, send)
        finally:
            writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=600)
        loops.append(asyncio.get_running_loop())
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()
        await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait()
    yield f"http://127.0.0.1:{ports[0]}"
    loops[0].call_soon_threadsafe(stop.set)
    thread.join()


def part(*tokens: int, end: str | None = None, **fields: Any) -> dict[str, Any]:
    """An event with these tokens."""
    choice = {"text": "x", "token_ids": [*tokens], "finish_reason": end}
    return {"choices": [choice | fields]}


async def four(body: dict[str, Any], send: Any) -> None:
    """A token after 0.2 s, two at once 0.3 s later, the last one after 0.1 s more."""
    await asyncio.sleep(0.2)
    await send([part(1)])
    await asyncio.sleep(0.3)
    await send([part(2), part(3)])
    await asyncio.sleep(0.1)
    usage: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": 4}
    usage["prompt_tokens_details"] = {"cached_tokens": 3}
    await send([part(4, end="length"), {"choices": [], "usage": usage}])


def test_known_delays_are_found():
    """Never less than what the script waits, and little more."""
    with scripted(four) as url:
        found = run_traffic(to_url(url), [request("a"), request("b", at=0.3)])
    assert [one.tokens for one in found] == [[1, 2, 3, 4]] * 2
    for one in found:
        assert one.error is None
        assert (one.prompt_tokens, one.cached_tokens) == (7, 3)
        assert one.finish_reason == "length"
    times = {name: np.array(some) / 1e3 for name, some in latencies(found).items()}
    expected = {
        "first token": [0.2, 0.2],
        "between tokens": [0.15, 0.15, 0.1] * 2,  # two that came at once: half each
        "longest pause": [0.3, 0.3],
        "whole answer": [0.6, 0.6],
        "sent late": [0.0, 0.0],
    }
    assert [*times] == [*expected]
    for name, seconds in expected.items():
        assert len(times[name]) == len(seconds)
        assert times[name] == pytest.approx(seconds, abs=LATE), name
    assert times["first token"].min() > 0.19
    assert times["longest pause"].min() > 0.29 - LATE
    assert times["whole answer"].min() > 0.59


@pytest.mark.parametrize(
    ("times", "gaps"),
    [
        ([], []),
        ([1.0], []),
        ([1.0, 1.0, 1.0], []),
        ([1.0, 1.5, 3.5], [0.5, 2.0]),
        ([1.0, 1.0, 4.0, 4.0, 4.0, 5.0], [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_a_gap_is_shared_by_the_tokens_that_end_it(times, gaps):
    count = len(times)
    one = Outcome(0.0, tokens=[1] * count, times=times, output_tokens=count)
    assert one.gaps() == gaps


def test_tokens_that_are_not_told_are_spread_over_their_parts():
    """Ten tokens in three parts: 3.33 each, which share a gap of 1 s and one of 3."""
    parts = [traffic.UNCOUNTED] * 3
    one = Outcome(0.0, tokens=parts, times=[5.0, 6.0, 9.0], output_tokens=10)
    assert one.gaps() == pytest.approx([0.3] * 3 + [0.9] * 3)


def test_percentiles_are_those_of_numpy():
    chance = np.random.default_rng(1)
    found = []
    for _ in range(137):
        times = 5.0 + np.cumsum(chance.exponential(size=chance.integers(1, 30)))
        done = times[-1] + chance.exponential()
        found.append(Outcome(5.0, 5.0, done, [1] * len(times), [*times], len(times)))
    told = summarize_traffic(found)["milliseconds"]
    gaps = [np.diff(one.times) for one in found]
    expected: dict[str, Any] = {
        "first token": [one.times[0] - 5 for one in found],
        "between tokens": np.concatenate(gaps),
        "longest pause": [gap.max() for gap in gaps if len(gap)],
        "whole answer": [one.ended - 5 for one in found],
        "sent late": [0.0] * len(found),
    }
    for name, seconds in expected.items():
        for q in (50, 90, 99):
            value = 1e3 * np.percentile(seconds, q, method="inverted_cdf")
            assert told[name][f"p{q}"] == pytest.approx(value), (name, q)


async def faulty(body: dict[str, Any], send: Any) -> None:
    match body["prompt"]:
        case "refused":
            await send(503)
        case "full":
            await send(429)
        case "cut":
            await send([part(1)])
        case "failed":
            await send([part(1), {"error": {"code": "timeout", "message": "late"}}])
        case "silent":
            await asyncio.sleep(60)
        case "gone":
            pass
        case "garbage":
            await send([part(1) | {"choices": 5}])
        case _:
            await send([part(1, end="stop")])


def test_every_request_has_an_outcome_and_errors_are_counted_by_kind(monkeypatch):
    monkeypatch.setattr(traffic, "PATIENCE", 2.0)
    names = "good refused full cut failed silent gone garbage".split()
    talk = [request(f"{name}{k}") for name in names for k in range(2)]
    talk = [replace(one, body={"prompt": one.custom_id[:-1]}) for one in talk]
    talk.append(request("later", after="refused0"))
    with scripted(faulty) as url:
        found = run_traffic(to_url(url), talk)
    told = summarize_traffic(found)
    assert told["requests"] == len(talk) == len(found)
    assert told["answered"] == 2
    assert told["errors"] == {
        "HTTP 503": 2,
        "HTTP 429": 2,
        "cut short": 2,
        "in the stream": 2,
        "TimeoutError": 2,
        "ServerDisconnectedError": 2,
        "TypeError": 2,
        "not sent": 1,
    }
    assert len(told["reasons"]) == 5
    assert [n for why, n in told["reasons"].items() if "come back" in why] == [2, 2]
    assert told["output_tokens"] == 2
    assert len(told["milliseconds"]["first token"]) == 3
    assert len(latencies(found)["whole answer"]) == 2


def test_a_server_that_is_not_there(capsys):
    assert cli.main(["bench", "--url", "http://127.0.0.1:9"]) == 1
    assert "Cannot connect to host 127.0.0.1:9" in capsys.readouterr().err


def test_without_token_ids_a_part_with_text_counts_as_one():
    async def untold(body: dict[str, Any], send: Any) -> None:
        for delta in ({"role": "assistant", "content": ""}, {"reasoning": "a"}):
            await send([{"choices": [{"delta": delta, "finish_reason": None}]}])
        await send(
            [{"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]}]
        )

    with scripted(untold) as url:
        found = run_traffic(to_url(url), [request("a")])
    assert found[0].tokens == [traffic.UNCOUNTED] * 2
    assert summarize_traffic(found)["output_tokens"] == 2


# When it is sent


@asynccontextmanager
async def one_at_a_time(seconds: float, log: list[str]) -> Any:
    """An engine that answers requests in turn."""
    lock = asyncio.Lock()

    async def send(arrival: Arrival, outcome: Outcome) -> None:
        log.append(f"+{arrival.custom_id}")
        async with lock:
            await asyncio.sleep(seconds)
        outcome.push([1, 2])
        outcome.finish_reason = "stop"
        log.append(f"-{arrival.custom_id}")

    yield send


def test_who_waits_in_line_is_counted():
    """Ten come at once, each takes 0.1 s: the last one has waited for a second."""
    found = run_traffic(one_at_a_time(0.1, []), [request(str(k)) for k in range(10)])
    waits = sorted(latencies(found)["first token"])
    assert waits == pytest.approx([100 * (k + 1) for k in range(10)], abs=1e3 * LATE)
    assert waits[-1] > 990


def test_a_client_that_is_late_says_so_and_counts_it():
    """Requests come each 50 ms, but sending one keeps the client busy for 100."""

    @asynccontextmanager
    async def busy() -> Any:
        async def send(arrival: Arrival, outcome: Outcome) -> None:
            await asyncio.sleep(0)
            threading.Event().wait(0.1)
            outcome.push([1])
            outcome.finish_reason = "stop"

        yield send

    found = run_traffic(busy(), [request(str(k), at=k / 20) for k in range(8)])
    times = latencies(found)
    assert max(times["sent late"]) > 300
    assert max(times["first token"]) > 400


def test_clients_wait_for_their_answers():
    log: list[str] = []
    some = [request(str(k), at=9.0) for k in range(12)]
    found = run_traffic(one_at_a_time(0.01, log), some, clients=3)
    assert len(found) == 12
    running = np.cumsum([1 if entry[0] == "+" else -1 for entry in log])
    assert running.max() == 3
    assert max(latencies(found)["sent late"]) < 1e3 * LATE  # no time of the file counts


@pytest.mark.parametrize("clients", [None, 1, 2])
def test_a_turn_waits_for_the_one_before(clients):
    log: list[str] = []
    talk = [request("a"), request("b", after="a", at=0.1), request("c", after="b")]
    found = run_traffic(one_at_a_time(0.01, log), [*talk, request("z")], clients)
    assert [entry for entry in log if entry[1] != "z"] == "+a -a +b -b +c -c".split()
    assert len(found) == 4
    assert found[1].due == found[0].ended + 0.1
    assert found[2].due == found[1].ended


def test_a_file_comes_out_as_it_went_in(tmp_path: Path):
    """But for the results, which another run may replace."""
    some = poisson_arrivals(draw_workload(SMALL, 7, 1), 200.0, 1)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    with first.open("w") as file:
        run_traffic(one_at_a_time(0.001, []), some, file=file)
    written = read_workload(first)
    for one in written:
        assert one.result is not None
        assert one.result["tokens"] == [1, 2]
        due, sent = one.result["due"], one.result["sent"]
        assert due - 0.002 < sent <= one.result["times"][0]  # uvloop counts in ms
    order = {one.custom_id: one for one in written}
    assert [replace(order[one.custom_id], result=None) for one in some] == some
    with second.open("w") as file:
        run_traffic(one_at_a_time(0.001, []), written, file=file)
    assert {one.custom_id for one in read_workload(second)} == {*order}


# The two ways


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu") as llm:
        yield llm


def test_an_engine_says_the_same_by_both_ways(llm: LLM):
    """A seed makes each answer the same; lengths are those that were asked for."""
    kind = replace(WORKLOADS["mixed"], prompt=(20, 8, 40), output=(10, 8, 20))
    some = draw_workload(SMALL, 6, 3)
    some += [replace(a, custom_id=f"m{a.custom_id}") for a in draw_workload(kind, 6, 3)]
    inside = run_traffic(to_engine(llm), some)
    with serving(llm) as served:
        outside = run_traffic(to_url(f"http://127.0.0.1:{served.port}"), some)
    for found in (inside, outside):
        assert [one.error for one in found] == [None] * len(some)
        assert [one.output_tokens for one in found] == [
            one.body["max_tokens"] for one in some
        ]
        assert all(one.finish_reason == "length" for one in found)
        assert len({one.prompt_tokens for one in found}) > 1
    counts = [[one.prompt_tokens for one in found] for found in (inside, outside)]
    assert counts[0] == counts[1]
    said = [[one.tokens for one in found[6:]] for found in (inside, outside)]
    assert said[0] == said[1]  # of completions; of a chat they are not told
    assert max(one.cached_tokens for one in outside) > 0


def test_what_an_engine_refuses_is_counted(llm: LLM):
    wrong = replace(request("a"), body={"prompt": "x", "temperature": "hot"})
    lost = replace(request("b"), url="/v1/nothing")
    with serving(llm) as served:
        url = f"http://127.0.0.1:{served.port}"
        outside = summarize_traffic(run_traffic(to_url(url), [wrong, lost]))
    assert outside["errors"] == {"HTTP 400": 1, "HTTP 404": 1}
    inside = summarize_traffic(run_traffic(to_engine(llm), [wrong, lost]))
    assert inside["errors"] == {"APIError": 2}


# The command


def test_the_command_sends_a_file_to_a_server(
    llm: LLM, tmp_path: Path, capsys, monkeypatch
):
    monkeypatch.setenv("SIMPLELLM_API_KEY", "secret")
    with (tmp_path / "in.jsonl").open("w") as file:
        run_traffic(one_at_a_time(0.0, []), draw_workload(SMALL, 5, 1), file=file)
    paths = [tmp_path / name for name in ("out.json", "out.svg", "out.jsonl")]
    with serving(llm, key="secret") as served:
        options = ["--url", f"http://127.0.0.1:{served.port}"]
        options += ["--load", str(tmp_path / "in.jsonl"), "--rate", "50"]
        for option, path in zip(("--json", "--plot", "--results"), paths, strict=True):
            options += [option, str(path)]
        assert cli.main(["bench", *options]) == 0
    out = capsys.readouterr().out
    assert out.startswith("5 of 5 requests answered in ")
    assert max(map(len, out.splitlines())) <= 80
    found = json.loads(paths[0].read_text())
    assert found["answered"] == 5
    assert found["command"].startswith("simplellm bench --url")
    assert f"{found['milliseconds']['first token']['p50']:,.1f}" in out
    assert "<svg" in paths[1].read_text()
    assert len(read_workload(paths[2])) == 5


def test_the_command_sends_a_named_workload_to_an_engine(capsys, monkeypatch):
    monkeypatch.setitem(WORKLOADS, "chat", SMALL)
    options = "bench --requests 4 --clients 2 --seed 7 --device cpu".split()
    assert cli.main(options) == 0
    out, err = capsys.readouterr()
    assert out.startswith("4 of 4 requests answered in ")
    assert ", seed 7\nworkload chat\n" in out and "the workload is chat" in err


@pytest.mark.parametrize("option", ["--batch 8", "--input-len 64", "--prefill 1x20"])
def test_what_a_workload_has_no_use_for_is_refused(capsys, option: str) -> None:
    assert cli.main(["bench", "--rate", "5", *option.split()]) == 2
    name, value = option.split()
    error = " ".join(capsys.readouterr().err.split())
    assert f"{name} is" in error and value in error
    assert "expected none beside a workload" in error


def test_the_command_tells_why_requests_failed(capsys, tmp_path: Path):
    file = tmp_path / "in.jsonl"
    wrong = [replace(request(f"a{n}"), body={"prompt": "x", "n": 0}) for n in range(3)]
    good = replace(request("b"), body={"prompt": "x", "max_tokens": 1})
    file.write_text("\n".join(json.dumps(asdict(one)) for one in [*wrong, good]))
    assert cli.main(["bench", "--load", str(file), "--device", "cpu"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "1 of 4 requests answered" in out and "3 errors: APIError" in out
    assert "3 x APIError: n is 0; expected" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--load chess",
            "--load is 'chess'; expected chat, agent, agent-long, burst, shared",
        ),
        ("--load chat --rate -1", "--rate is -1.0; expected more than 0"),
        ("--load chat --rate 1 --clients 2", "--rate is 1.0; expected none beside"),
        ("--load chat --clients 0", "--clients is 0; expected 1 to"),
        ("--load chat --requests 0", "--requests is 0; expected 1 to"),
        ("--load chat --results nowhere/x.jsonl", "there is no folder"),
        ("--load chat --plot x.jpeg", "the plot is 'x.jpeg'"),
    ],
)
def test_what_cannot_be_sent_is_refused(capsys, options: str, message: str):
    assert cli.main(["bench", "--device", "cpu", *options.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_server_needs_a_client(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert cli.main(["bench", "--url", "http://127.0.0.1:9"]) == 2
    assert "pip install 'simplellm[bench]'" in capsys.readouterr().err


def test_the_table_fits_a_terminal():
    found = [
        Outcome(0.0, 0.0, 99_999.9, [1] * 9, [12_345.6 + k * 999 for k in range(9)], 9)
        for _ in range(3)
    ]
    errors = [f"HTTP {status}: {'busy ' * 99}" for status in (429, 503)]
    found += [Outcome(0.0, error=error) for error in errors]
    record = summarize_traffic(found) | {"output_tokens": 10**9}
    record |= {
        "prompt_tokens": 10**10,
        "requests": 10**7,
        "seed": 999_999,
        "load": "long",
    }
    console = Console(width=200, record=True, file=io.StringIO())
    show_traffic(record, console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert "1 errors: HTTP 429" in lines
