"""A server in a thread of this process or in one of its own, and what reads it."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch
import uvicorn
from jsonschema import Draft202012Validator
from models import PATIENCE, favor, saying, until

from simplellm import LLM
from simplellm.base.request import Request
from simplellm.engine.scheduler import ScheduledChunk
from simplellm.server.app import ENDPOINTS, make_app
from simplellm.server.http.endpoint import Service
from simplellm.server.http.openapi import openapi
from simplellm.server.serve import DrainingServer, TimelyConnection
from simplellm.server.start import Options

NAME = "tiny"
STEP = 0.02  # seconds, where steps are slow
ROOT = Path(__file__).parents[1]


class Document:
    """Holds a server's answers to what its OpenAPI document says of them."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found
        self.checks: dict[tuple[str, str], Draft202012Validator] = {}
        self.paths = [
            (path, re.compile(re.sub(r"\\{[^}]+\\}", "[^/]+", re.escape(path))))
            for path in found["paths"]
        ]

    def check(self, response: httpx.Response) -> None:
        """Of an answer in JSON: it has the schema of its path, method and status."""
        asked, kind = response.request, response.headers.get("content-type", "")
        named = [path for path, form in self.paths if form.fullmatch(asked.url.path)]
        if response.status_code != 200 or kind != "application/json" or not named:
            return
        key = asked.method.lower(), named[0]
        if key not in self.checks:
            answers = self.found["paths"][named[0]][key[0]]["responses"]["200"]
            schema = answers["content"]["application/json"]["schema"]
            self.checks[key] = Draft202012Validator(schema)
        self.checks[key].validate(json.loads(response.read()))


class Served:
    """A running server: its service, its port, and a client.

    What it answers is checked against its document.
    """

    def __init__(self, server: DrainingServer, url: str) -> None:
        self.server, self.service = server, server.service
        self.port = int(url.rpartition(":")[2])
        self.client = httpx.Client(base_url=url, timeout=PATIENCE)
        document = Document(openapi(self.service, ENDPOINTS))
        self.client.event_hooks = {"response": [document.check]}

    def shrink(self) -> None:
        """Let the system hold back little of what connections from now on send."""
        listener = self.server.servers[0].sockets[0]
        with socket.socket(fileno=os.dup(listener.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def events(
        self, path: str, body: dict[str, Any], *, done: bool = True
    ) -> list[dict[str, Any]]:
        """The data of a stream's events; its end is as it should be."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            return events_of(answer.read().decode(), done=done)


def events_of(text: str, *, done: bool = True) -> list[dict[str, Any]]:
    """The events of a whole stream, which may end with [DONE]; "type" names them."""
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    if done:
        assert blocks.pop() == "data: [DONE]"
    found = []
    for block in blocks:
        *names, data = block.split("\n")
        assert data.startswith("data: ")
        found.append(json.loads(data.removeprefix("data: ")))
        kind = found[-1].get("type")
        assert names == ([] if kind is None else [f"event: {kind}"])
    return found


@contextmanager
def serving(llm: LLM, *, grace: float = 5.0, **options: Any) -> Iterator[Served]:
    """A server of ``llm``; ``options`` are `Options`."""
    service = Service(llm, Options([NAME, "alias"], **options))
    config = uvicorn.Config(
        make_app(service),
        http=TimelyConnection,
        port=0,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    lines: list[str] = []
    server = DrainingServer(config, service, grace, lines.append)
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: lines)
    (address,) = re.findall(r"served at (\S+)", lines[0])
    served = Served(server, address)
    try:
        yield served
    finally:
        served.client.close()
        server.handle_exit(15, None)
        thread.join(PATIENCE)
        assert not thread.is_alive()


def said(served: Served, *scripts: Any) -> Any:
    """Its model says what ``scripts`` say, as `saying` has it."""
    return saying(served.service.llm, *scripts)


@contextmanager
def noted(llm: LLM) -> Iterator[list[list[int]]]:
    """The prompts of the requests that come meanwhile."""
    found: list[list[int]] = []
    submit = llm.engine.submit

    def noting(requests: Sequence[Request]) -> None:
        found.extend(list(request.tokens) for request in requests)
        submit(requests)

    llm.engine.submit = noting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        llm.engine.submit = submit  # type: ignore[method-assign]


def idle(llm: LLM) -> bool:
    """Whether nothing runs and no page is held."""
    stats = llm.stats()
    held = any(llm.engine.snapshot()["pages"]["references"])
    return not (stats.running or stats.waiting or stats.cache_usage or held)


@contextmanager
def babbling(llm: LLM, babble: Callable[[int, int], int]) -> Iterator[None]:
    """The model says what ``babble`` makes of a request's seed and a position.

    So the same request, streamed or not, gets the same tokens, whatever runs beside it.
    """
    runner = llm.engine_core.runner
    start = runner.start_forward

    def scripted(works: Sequence[ScheduledChunk], sampling: Sequence[Request]) -> None:
        start(works, sampling)
        with torch.inference_mode():
            for row, request in enumerate(sampling):
                token = babble(request.seed, request.num_output)
                favor(runner.logits[row], token)
                runner.sampled_tokens[row] = token

    runner.start_forward = scripted  # type: ignore[assignment]
    try:
        yield
    finally:
        runner.start_forward = start  # type: ignore[method-assign]


@contextmanager
def slow(llm: LLM) -> Iterator[None]:
    """Every step takes a while."""
    runner = llm.engine_core.runner
    start = runner.start_forward

    def late(works: Sequence[ScheduledChunk], sampling: Sequence[Request]) -> None:
        time.sleep(STEP)
        start(works, sampling)

    runner.start_forward = late  # type: ignore[assignment]
    try:
        yield
    finally:
        runner.start_forward = start  # type: ignore[method-assign]


def run(coroutine: Any) -> Any:
    """Run a test's coroutine, which may not hang."""
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


class Process:
    """`simplellm serve` in a group of processes of its own.

    Each of them runs ``before`` at its start.
    """

    def __init__(self, *arguments: str, before: str = "") -> None:
        self.folder = TemporaryDirectory()
        Path(self.folder.name, "sitecustomize.py").write_text(before)
        path = os.pathsep.join([self.folder.name, str(ROOT)])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, "-m", "simplellm.apps.cli", "serve", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            process_group=0,
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self.read)
        self.reader.start()
        until(lambda: self.ready or self.process.poll() is not None)
        assert self.ready, self.lines
        self.port = int(self.ready[1])

    def read(self) -> None:
        assert self.process.stderr is not None
        self.lines += self.process.stderr

    @property
    def engine(self) -> int:
        """The process that computes."""
        pid = self.process.pid
        (found,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(found)

    @property
    def ready(self) -> re.Match[str] | None:
        return re.search(r"served at http://127\.0\.0\.1:(\d+)", "".join(self.lines))

    def finish(self) -> int:
        """Wait for its end; its exit status."""
        status = self.process.wait(PATIENCE)
        self.reader.join()
        assert self.process.stdout is not None
        assert self.process.stdout.read() == ""
        self.process.stdout.close()
        self.folder.cleanup()
        return status
