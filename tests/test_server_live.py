"""/live: the engine's books, cut to a screen, for those who may look."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from models import HELLO, PATIENCE, SMALL, until
from serving import Served, idle, serving, slow

from simplellm import LLM
from simplellm.server.http import live_view

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
PROMPT = "This is a secret of somebody else, and it is longer than a page."
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
MINE = {"x-request-id": "page-1"}


class Viewer:
    """What comes of a view, read in a thread."""

    def __init__(self, answer: httpx.Response) -> None:
        self.raw = ""
        self.ended = False
        self.thread = threading.Thread(target=self.read, args=(answer,))
        self.thread.start()

    def read(self, answer: httpx.Response) -> None:
        with suppress(httpx.StreamError, httpx.TransportError):  # we close it
            for chunk in answer.iter_text():
                self.raw += chunk
            self.ended = True

    @property
    def events(self) -> list[dict[str, Any]]:
        blocks = self.raw.split("\n\n")[:-1]
        data = [block for block in blocks if block.startswith("data: ")]
        return [json.loads(block.removeprefix("data: ")) for block in data]


@contextmanager
def viewing(served: Served, **headers: str) -> Iterator[Viewer]:
    options = {"headers": MINE | headers, "timeout": PATIENCE}
    with (
        httpx.Client(base_url=served.client.base_url) as client,
        client.stream("GET", "/live", **options) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        viewer = Viewer(answer)
        yield viewer
        # Closing it would wait for the thread that reads.
        stream = answer.extensions["network_stream"]
        with suppress(OSError):  # the server has closed it
            stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        viewer.thread.join(PATIENCE)


@contextmanager
def asking(served: Served, count: int = 1, **headers: str) -> Iterator[None]:
    """Requests that run meanwhile, ``count`` samples of one prompt."""
    body = LONG | {"stream": True, "n": count}
    options: Any = {"json": body, "headers": headers, "timeout": PATIENCE}
    with (
        httpx.Client(base_url=served.client.base_url) as client,
        client.stream("POST", COMPLETE, **options) as answer,
    ):
        assert answer.status_code == 200
        yield
    until(lambda: idle(served.service.llm))


def test_the_books_of_running_requests(served: Served) -> None:
    llm = served.service.llm
    with slow(llm), viewing(served) as viewer, asking(served, 3, **MINE):
        until(lambda: any(len(e["running"]) == 3 for e in viewer.events))
        seen = len(viewer.events)
        until(lambda: len(viewer.events) > seen + 2)
        *_, before, latest = viewer.events
        now = llm.engine.snapshot()
    assert [r["mine"] for r in latest["running"]] == [True] * 3
    outputs = [[r["output"] for r in event["running"]] for event in (before, latest)]
    assert all(old < new for old, new in zip(*outputs, strict=True))
    numbers = {str(r["request_id"]) for r in latest["running"]}
    assert latest["pages"]["tables"].keys() == numbers
    assert latest["pages"]["num_pages"] == now["pages"]["num_pages"]
    assert latest["totals"]["running"] == 3 and latest["totals"]["held"] > 3
    # The full pages of a prompt belong to all of its samples.
    assert latest["totals"]["shared"] >= 1


def test_it_tells_no_text_and_whose_requests_are_whose(served: Served) -> None:
    llm = served.service.llm
    other = {"x-request-id": "someone-else"}
    with slow(llm), viewing(served) as viewer, asking(served, 2, **other):
        until(lambda: any(len(e["running"]) == 2 for e in viewer.events))
    marks = [r["mine"] for event in viewer.events for r in event["running"]]
    assert marks and not any(marks)
    for word in ("secret", "someone-else", "page-1"):
        assert word not in viewer.raw
    assert served.service.calls == {}


def test_nobody_looks_when_nobody_watches(served: Served, monkeypatch: Any) -> None:
    looks: list[float] = []
    engine = served.service.llm.engine
    snapshot = engine.snapshot

    def counted() -> Any:
        looks.append(time.monotonic())
        return snapshot()

    monkeypatch.setattr(engine, "snapshot", counted)
    time.sleep(live_view.EVERY)  # until what others have seen is old
    start = time.monotonic()
    with viewing(served) as one, viewing(served) as two, viewing(served) as three:
        until(lambda: one.events and two.events and three.events)
        time.sleep(4 * live_view.EVERY)
        # What hasn't changed isn't told again.
        assert len(one.events) == 1
        most = 1 + (time.monotonic() - start) / live_view.EVERY
        assert 2 <= len(looks) <= most, "each viewer has the engine looked at"
    until(lambda: not served.service.running)
    seen = len(looks)
    time.sleep(2 * live_view.EVERY)
    assert len(looks) == seen


def test_a_quiet_engine_gives_signs_of_life(served: Served, monkeypatch: Any) -> None:
    monkeypatch.setattr(live_view, "QUIET", 0.3)
    with viewing(served) as viewer:
        until(lambda: viewer.raw.count(live_view.ALIVE.decode()) >= 2)
        assert len(viewer.events) == 1


def test_viewers_are_not_too_many(served: Served, monkeypatch: Any) -> None:
    monkeypatch.setattr(live_view, "MAX_VIEWERS", 1)
    with viewing(served) as viewer:
        until(lambda: viewer.events)
        answer = served.client.get("/live")
        assert answer.status_code == 429 and answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "too_many_viewers"
    until(lambda: not served.service.running)
    with viewing(served) as viewer:
        until(lambda: viewer.events)


def test_a_viewer_that_does_not_read(served: Served, monkeypatch: Any) -> None:
    """It is left, and a drain doesn't wait for it."""
    monkeypatch.setattr(live_view, "STALLED", 0.3)
    monkeypatch.setattr(live_view, "EVERY", 0.001)
    served.shrink()
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", served.port))
    raw.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
    until(lambda: served.service.running)
    with slow(served.service.llm), asking(served, 4):
        until(lambda: served.service.running == 1)
    raw.close()


def test_the_key_is_needed(served: Served) -> None:
    with serving(served.service.llm, key="s3cret") as other:
        answer = other.client.get("/live")
        assert answer.status_code == 401
        with viewing(other, authorization="Bearer s3cret") as viewer:
            until(lambda: viewer.events)


def test_it_ends_with_the_server(folder: Path) -> None:
    with LLM(folder, SMALL) as llm:
        with serving(llm, grace=60.0) as served, viewing(served) as viewer:
            until(lambda: viewer.events)
            served.service.draining = True
            until(lambda: viewer.ended)
        with serving(llm) as served, viewing(served) as viewer:
            until(lambda: viewer.events)
            llm.engine.dead = RuntimeError("broken on purpose")
            until(lambda: viewer.ended)
            llm.engine.dead = None


def book(requests: int, pages: int) -> dict[str, Any]:
    """A snapshot of a large engine, every page of which is held by every request."""
    described = [
        {"request_id": n, "prompt": 9, "output": 9, "computed": 9, "preemptions": 0}
        for n in range(2 * requests)
    ]
    return {
        "running": described[:requests],
        "waiting": described[requests:],
        "pages": {
            "num_pages": 2 * pages,
            "page_size": 16,
            "windows": [None, 128],
            "free": 0,
            "cached": [*range(pages, 2 * pages)],
            "references": [requests] * pages + [0] * pages,
            "tables": {
                n: [[*range(pages)], [-1] * (pages - 9) + [*range(9)]]
                for n in range(requests)
            },
        },
    }


@pytest.mark.parametrize(("requests", "pages"), [(1, 40), (1, 60_000), (300, 60_000)])
def test_a_large_engine_fits_a_screen(requests: int, pages: int) -> None:
    found = live_view.trim_snapshot(book(requests, pages))
    assert len(json.dumps(found)) < 16_000
    rows = min(requests, live_view.MAX_ROWS)
    assert len(found["running"]) == len(found["waiting"]) == rows
    assert found["pages"]["tables"].keys() == {str(n) for n in range(rows)}
    assert found["totals"] == {
        "running": requests,
        "waiting": requests,
        "held": pages,
        "shared": pages if requests > 1 else 0,
        "kept": pages,
    }
    full, sliding = found["pages"]["tables"]["0"]
    most = live_view.MAX_PAGES // (2 * rows)
    assert full == {str(n): n for n in range(min(most, pages))}
    assert sliding == {str(pages - 9 + n): n for n in range(9)}
    assert found["pages"]["cached"][-1] == 2 * pages - 1


def test_a_chat_is_marked_too(served: Served) -> None:
    llm = served.service.llm
    body = {"messages": HELLO, "ignore_eos": True, "max_tokens": 60}
    with slow(llm), viewing(served) as viewer:
        answer = served.post(CHAT, body, headers=MINE)
        assert answer.status_code == 200
    assert any(r["mine"] for event in viewer.events for r in event["running"])
