"""Clients that leave, that don't read, that wait too long; servers that end."""

import json
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from models import PATIENCE, SMALL, until
from serving import Served, events_of, idle, serving, slow

from simplellm import LLM, EngineConfig
from simplellm.apps.serving import as_origin
from simplellm.server.serve import TimelyConnection

COMPLETE = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}


def connect(port: int, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request has been sent."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(raw)}\r\nconnection: close\r\n\r\n"
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.settimeout(PATIENCE)
    found.connect(("127.0.0.1", port))
    found.sendall(head.encode() + raw)
    return found


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves(served: Served, stream: bool, n: int) -> None:
    llm = served.service.llm
    with slow(llm):
        before = llm.stats()
        client = connect(served.port, COMPLETE, LONG | {"stream": stream, "n": n})
        until(lambda: llm.stats().running == n)
        if stream:
            assert client.recv(20).startswith(b"HTTP/1.1 200")
        left = llm.stats().steps
        client.close()
        until(lambda: idle(llm))
        after = llm.stats()
    # The loop and the engine's thread each get to know, and a step may be under way.
    assert after.steps - left < 10
    ended = after.finished.get("abort", 0) - before.finished.get("abort", 0)
    assert ended == n


def test_a_client_that_leaves_the_queue(served: Served) -> None:
    llm = served.service.llm
    with slow(llm):
        first = connect(served.port, COMPLETE, LONG | {"n": SMALL.max_num_seqs})
        until(lambda: llm.stats().running == SMALL.max_num_seqs)
        second = connect(served.port, COMPLETE, LONG)
        until(lambda: llm.stats().waiting == 1)
        second.close()
        until(lambda: llm.stats().waiting == 0)
        assert llm.stats().running == SMALL.max_num_seqs
        first.close()
        until(lambda: idle(llm))


def everything(client: socket.socket) -> bytes:
    """What a connection still brings until it is closed."""
    chunks = []
    while chunk := client.recv(65536):
        chunks.append(chunk)
    return b"".join(chunks)


def unchunked(raw: bytes) -> str:
    """The body of a chunked response."""
    _, _, rest = raw.partition(b"\r\n\r\n")
    found = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        if count == 0:
            return found.decode()
        found, rest = found + rest[:count], rest[count + 2 :]


def test_a_reader_that_does_not_read(served: Served) -> None:
    """The engine finishes, others are answered, and then all of it is there."""
    llm = served.service.llm
    body = LONG | {"prompt": "xy", "stream": True, "logprobs": 20, "n": 4, "seed": 1}
    body["return_token_ids"] = True
    served.shrink()
    client = connect(served.port, COMPLETE, body)
    until(lambda: llm.stats().running)
    until(lambda: idle(llm))
    answer = served.post(COMPLETE, {"prompt": "x", "max_tokens": 2})
    assert answer.status_code == 200
    until(lambda: served.service.running == 1)
    time.sleep(0.2)
    assert served.service.running == 1  # it isn't over: nobody has read it
    raw = everything(client)
    client.close()
    events = events_of(unchunked(raw))
    whole = served.post(COMPLETE, body | {"stream": False}).json()
    for choice in whole["choices"]:
        mine = [
            one
            for event in events
            for one in event["choices"]
            if one["index"] == choice["index"]
        ]
        assert [id for one in mine for id in one["token_ids"]] == choice["token_ids"]
        assert "".join(one["text"] for one in mine) == choice["text"]
        # Parts that waited for the reader have come together.
        assert len(mine) < len(choice["token_ids"])


def test_the_time_limit(served: Served) -> None:
    llm = served.service.llm
    with serving(llm, timeout=0.5) as hasty, slow(llm):
        hasty.shrink()
        answer = hasty.post(COMPLETE, LONG)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        until(lambda: idle(llm))
        answer = hasty.post(COMPLETE, LONG | {"stream": True})
        assert answer.status_code == 200 and "[DONE]" not in answer.text
        *parts, last, rest = answer.text.split("\n\n")
        assert rest == "" and len(parts) > 3
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "timeout"
        until(lambda: idle(llm))
        # Nor does it help not to read.
        body = LONG | {"stream": True, "logprobs": 20, "n": 8}
        client = connect(hasty.port, COMPLETE, body)
        until(lambda: not idle(llm))
        until(lambda: idle(llm) and not hasty.service.running)
        client.close()


def test_running_requests_finish_in_a_drain(folder: Path) -> None:
    with LLM(folder, SMALL) as llm, serving(llm) as served, slow(llm):
        found: list[Any] = []
        body = LONG | {"max_tokens": 30, "return_token_ids": True}
        thread = threading.Thread(
            target=lambda: found.extend(served.events(COMPLETE, body))
        )
        thread.start()
        until(lambda: llm.stats().running)
        other = httpx.Client(base_url=served.client.base_url)
        assert other.get("/health").status_code == 200
        served.server.handle_exit(signal.SIGTERM, None)
        for path, call in (("/health", other.get), (COMPLETE, other.post)):
            answer = call(path)
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert answer.json()["error"]["code"] == "shutting_down"
        thread.join(PATIENCE)
        tokens = [id for event in found for id in event["choices"][0]["token_ids"]]
        assert len(tokens) == 30
        assert found[-1]["choices"][0]["finish_reason"] == "length"
        other.close()


@pytest.mark.parametrize("again", [True, False])
def test_the_end_of_a_drain(folder: Path, again: bool) -> None:
    """A second signal, or the end of the grace time, ends what runs."""
    grace = 60.0 if again else 0.3
    with LLM(folder, SMALL) as llm, serving(llm, grace=grace) as served, slow(llm):
        streamed = connect(served.port, COMPLETE, LONG | {"stream": True})
        whole = connect(served.port, COMPLETE, LONG)
        until(lambda: llm.stats().running == 2)
        served.server.handle_exit(signal.SIGTERM, None)
        if again:
            served.server.handle_exit(signal.SIGTERM, None)
        assert served.server.force_exit is again
        events = unchunked(everything(streamed)).split("\n\n")
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert error["code"] == "shutting_down" and events[-1] == ""
        assert everything(whole).startswith(b"HTTP/1.1 503")


def test_the_engine_dies(folder: Path) -> None:
    with LLM(folder, SMALL) as llm, serving(llm) as served, slow(llm):
        client = connect(served.port, COMPLETE, LONG | {"stream": True})
        begun = client.recv(20)
        assert begun.startswith(b"HTTP/1.1 200")

        def broken() -> None:
            raise RuntimeError("broken on purpose")

        llm.engine_core.scheduler.schedule = broken  # type: ignore[assignment]
        *_, last, rest = unchunked(everything(client)).split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["type"] == "server_error" and rest == ""
        assert "broken on purpose" in error["message"]
        with suppress(httpx.TransportError):  # the server may be gone already
            assert served.client.get("/health").status_code == 503
        until(lambda: not served.server.servers[0].is_serving())


def test_a_process_from_start_to_end(folder: Path, processes: Any) -> None:
    process = processes(
        str(folder), "--api-key", "k", "--access-log", "requests", "--max-num-seqs", "4"
    )
    client = httpx.Client(
        base_url=f"http://127.0.0.1:{process.port}",
        headers={"authorization": "Bearer k", "x-request-id": "mine"},
        timeout=PATIENCE,
    )
    assert client.get("/v1/models").json()["data"][0]["id"] == folder.name
    body = {"prompt": "a secret", "max_tokens": 5, "ignore_eos": True}
    assert client.post(COMPLETE, json=body).status_code == 200
    with client.stream("POST", COMPLETE, json=LONG | {"stream": True}) as answer:
        chunks = answer.iter_bytes()
        text = next(chunks)
        process.process.send_signal(signal.SIGTERM)
        text += b"".join(chunks)
    events_of(text.decode())
    client.close()
    assert process.finish() == 0
    assert "a secret" not in "".join(process.lines)
    logged = [json.loads(line) for line in process.lines if line.startswith("{")]
    assert [line["path"] for line in logged] == ["/v1/models", COMPLETE, COMPLETE]
    assert all(line["request_id"] == "mine" for line in logged)
    assert logged[1]["completion_tokens"] == 5 and logged[1]["status"] == 200


def test_what_was_loaded_is_no_garbage(folder: Path, processes: Any) -> None:
    """Neither of the two processes ever looks for some among it."""
    before = "import gc, sys; freeze = gc.freeze\n"
    before += "def freezing():\n    freeze()\n"
    before += "    print('frozen', gc.get_freeze_count(), file=sys.stderr)\n"
    before += "gc.freeze = freezing"
    process = processes(str(folder), before=before)
    process.process.send_signal(signal.SIGTERM)
    assert process.finish() == 0
    counts = [line.split()[1] for line in process.lines if line.startswith("frozen")]
    assert len(counts) == 2 and all(int(count) > 50_000 for count in counts)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--timeout", "0"],
        ["--watchdog-timeout", "1"],
        ["--api-key", ""],
        ["--port", "99999"],
        ["--allowed-origins", "example.org"],
        ["--allowed-origins", "localhost:3000"],
        ["--allowed-origins", "https://example.org/page"],
        ["nowhere"],
    ],
)
def test_bad_arguments(arguments: list[str], capsys: Any) -> None:
    from simplellm.apps import cli

    assert cli.main(["serve", *arguments]) == 2
    assert capsys.readouterr().err


def test_origins_are_as_browsers_write_them() -> None:
    given = ["https://Example.org/", "http://localhost:3000", "https://a.b:443", "*"]
    expected = ["https://example.org", "http://localhost:3000", "https://a.b", "*"]
    assert [as_origin(text) for text in given] == expected
    for text in ("example.org", "https://*.example.org"):
        with pytest.raises(ValueError, match="expected a scheme and a host"):
            as_origin(text)


def test_a_port_that_is_taken(folder: Path, served: Served, capsys: Any) -> None:
    from simplellm.apps import cli

    assert cli.main(["serve", str(folder), "--port", str(served.port)]) == 2
    assert f"port is {served.port}" in capsys.readouterr().err
    assert cli.main(["serve", str(folder), "--host", "no.such.host.invalid"]) == 2
    assert "host" in capsys.readouterr().err


def test_the_fewest_requests_at_once(folder: Path) -> None:
    """One after the other, whatever comes: sizes reach the engine."""
    config = EngineConfig(max_num_seqs=1, num_pages=120)
    with LLM(folder, config) as llm, serving(llm) as served:
        body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 3, "ignore_eos": True}
        found = served.post(COMPLETE, body).json()
        assert found["usage"]["completion_tokens"] == 12


# ---- connections that don't say what they want

ASKED = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [b"", b"\r\n", ASKED[:10], ASKED[:-2], ASKED + ASKED[:-2]],
    ids=["nothing", "an empty line", "half a line", "half a head", "and half another"],
)
def test_a_head_that_does_not_come(
    served: Served, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """The connection is closed; one on which a request runs for longer is not."""
    monkeypatch.setattr(TimelyConnection, "seconds", 0.3)
    llm = served.service.llm
    address = "127.0.0.1", served.port
    with (
        slow(llm),
        connect(served.port, COMPLETE, LONG | {"max_tokens": 40}) as other,
        socket.create_connection(address, PATIENCE) as silent,
    ):
        silent.sendall(sent)
        assert everything(silent).count(b"200 OK") == sent.count(ASKED)
        whole = everything(other)
    assert b"200 OK" in whole and b'"completion_tokens":40' in whole


def test_a_head_that_comes_drop_by_drop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes late doesn't make more time."""
    monkeypatch.setattr(TimelyConnection, "seconds", 0.3)
    start = time.monotonic()
    with (
        socket.create_connection(("127.0.0.1", served.port), PATIENCE) as slowly,
        pytest.raises(ConnectionError),
    ):
        slowly.sendall(ASKED[:-4])
        while True:
            slowly.sendall(b"\r\nx: y")
            time.sleep(0.05)
            assert time.monotonic() < start + PATIENCE


def test_a_body_that_does_not_come(served: Served) -> None:
    with serving(served.service.llm, timeout=0.3) as other:
        head = f"POST {COMPLETE} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
        head += 'content-type: application/json\r\n\r\n{"prompt": "x"'
        address = "127.0.0.1", other.port
        with socket.create_connection(address, PATIENCE) as client:
            client.sendall(head.encode())
            answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 408") and b"did not come within" in answer


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_an_offer_of_another_protocol(
    served: Served, chunked: bool, apart: bool
) -> None:
    """Java's HttpClient makes it with each request; so does curl with --http2."""
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    size = b"content-length: %d" % len(body)
    if chunked:
        size = b"transfer-encoding: chunked"
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    head = b"POST /v1/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    head += b"Host: x\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n%b\r\n" % size
    head += b"Content-Type: application/json\r\n\r\n"
    last = head.replace(b"Upgrade,", b"close,")
    with socket.create_connection(("127.0.0.1", served.port), PATIENCE) as client:
        for one in (head, last):  # the second on the same connection
            parts = [one[:70], one[70:], body] if apart else [one + body]
            for part in parts:
                client.sendall(part)
                time.sleep(0.05 * apart)
        answers = everything(client)
    assert answers.count(b"HTTP/1.1 200") == 2
    assert answers.count(b'"completion_tokens":2') == 2
