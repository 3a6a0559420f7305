"""`simplellm serve --replicas`: each engine in a process, with a GPU of its own."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import Popen
from typing import Any

import httpx
import pytest
from models import PATIENCE, until
from serving import ROOT, Process, events_of

from simplellm.server.start import spawn_each

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="needs /proc"
)

COMPLETE = "/v1/completions"
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "seed": 1}

# A prompt that begins with 13 never gets its 20th token.
HANG = """
import sys, time

if sys.orig_argv[1:3] == ["-m", "simplellm.server.remote.engine_process"]:
    from simplellm.engine.runner import Runner
    start = Runner.start_forward

    def starting(self, chunks, sampling):
        requests = [chunk.request for chunk in chunks]
        while any(r.tokens[0] == 13 and r.num_output > 18 for r in requests):
            time.sleep(1)
        start(self, chunks, sampling)

    Runner.start_forward = starting
"""


def family_of(pid: int) -> dict[int, str]:
    """The processes that come from one, by their ids, and what they are called."""
    parents, names = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (path / "stat").read_text().rpartition(") ")[2].split()[:2]
            names[int(path.name)] = (path / "cmdline").read_text()
        except OSError:  # it has just ended
            continue
        if state != "Z":
            parents[int(path.name)] = int(parent)
    found = {pid}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return {one: names[one] for one in found - {pid}}


def replicas_of(process: Process) -> list[int]:
    family = family_of(process.process.pid)
    return [pid for pid, name in family.items() if "remote.engine_process" in name]


@pytest.fixture(scope="module")
def two() -> Iterator[Process]:
    """A server with two replicas of the embedded model."""
    process = Process("--replicas", "2", "--watchdog-timeout", "10", before=HANG)
    yield process
    if process.process.poll() is None:
        process.process.kill()
        process.finish()


@pytest.fixture(scope="module")
def client(two: Process) -> Iterator[httpx.Client]:
    url = f"http://127.0.0.1:{two.port}"
    with httpx.Client(base_url=url, timeout=PATIENCE) as found:
        yield found


def alive(client: httpx.Client) -> int:
    found: int = client.get("/health").json()["replicas"]["alive"]
    return found


def streamed(client: httpx.Client, number: int) -> list[dict[str, Any]]:
    """The events of a long stream, however it ends."""
    body = {"prompt": [number] * 40, "stream": True, "return_token_ids": True, **LONG}
    with client.stream("POST", COMPLETE, json=body) as answer:
        text = answer.read().decode()
    return events_of(text, done="[DONE]" in text)


def told(client: httpx.Client, name: str) -> float:
    """One of the metrics."""
    text = client.get("/metrics").text
    (line,) = (x for x in text.splitlines() if x.startswith(f"simplellm:{name}{{"))
    return float(line.split()[-1])


def variables_of(process: Popen[bytes]) -> dict[str, str]:
    """What a process of ours has in its environment."""
    environment = Path(f"/proc/{process.pid}/environ")
    with process:
        until(environment.read_text)  # empty until the program is there
        lines = environment.read_text().split("\0")
        process.kill()
    return dict(line.split("=", 1) for line in lines if line)


@pytest.mark.parametrize("visible", [None, "5,GPU-a1,3"])
def test_each_has_a_gpu_and_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None
) -> None:
    """Of those that are visible, which PyTorch counts."""
    fake = "import sys, time\nclass cuda: device_count = lambda: 3\n"
    # An engine's process stays until its variables were read.
    fake += "if sys.argv != ['-c']: time.sleep(60)"
    (tmp_path / "torch.py").write_text(fake)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = []
    for spawn in spawn_each(2, None):
        process, link = spawn()
        link.close()
        found.append(variables_of(process))
    names = "0,1,2" if visible is None else visible
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == names.split(",")[:2]
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [one["OMP_NUM_THREADS"] for one in found] == [str(share)] * 2
    with pytest.raises(ValueError, match="--replicas is 4; expected at most 3"):
        spawn_each(4, None)
    assert len(spawn_each(4, "cpu")) == 4


def test_two_answer_as_one(two: Process, client: httpx.Client) -> None:
    assert alive(client) == 2 and len(replicas_of(two)) == 2
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: streamed(client, 7), range(2))
    tokens = [
        [id for event in events for id in event["choices"][0]["token_ids"]]
        for events in (first, second)
    ]
    assert tokens[0] == tokens[1] and len(tokens[0]) == LONG["max_tokens"]


def test_an_equal_prompt_is_found_in_the_cache(client: httpx.Client) -> None:
    body = {"prompt": list(range(100, 180)), "max_tokens": 1}
    for _ in range(3):
        usage = client.post(COMPLETE, json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 64


def test_one_is_killed(two: Process, client: httpx.Client) -> None:
    """Its stream ends with an error, the other one goes on, and another one comes."""
    before, tokens = replicas_of(two), told(client, "generation_tokens_total")
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(streamed, client, number) for number in (8, 9)]
        until(lambda: told(client, "generation_tokens_total") > tokens + 40)
        os.kill(before[0], signal.SIGKILL)
        ends = [answer.result(PATIENCE)[-1] for answer in answers]
    errors = [end["error"]["message"] for end in ends if "error" in end]
    assert len(errors) == 1 and "the engine died: its process ended" in errors[0]
    until(lambda: len(replicas_of(two)) == 2 == alive(client))
    after = replicas_of(two)
    assert before[0] not in after and before[1] in after
    assert streamed(client, 8)[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.exhaustive
def test_one_hangs(two: Process, client: httpx.Client) -> None:
    """Its process ends once nobody listens, and another one comes."""
    before = replicas_of(two)
    *_, last = streamed(client, 13)
    assert "its process made no progress in 10 seconds" in last["error"]["message"]
    assert streamed(client, 8)[-1]["choices"][0]["finish_reason"] == "length"
    until(lambda: len({*before} & {*replicas_of(two)}) == 1)
    until(lambda: len(replicas_of(two)) == 2 == alive(client))


def test_the_end(two: Process, client: httpx.Client) -> None:
    """What runs is finished, and nobody is left."""
    family = family_of(two.process.pid)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(streamed, client, 8)
        until(lambda: told(client, "num_requests_running") == 1)
        two.process.send_signal(signal.SIGTERM)
        assert answer.result(PATIENCE)[-1]["choices"][0]["finish_reason"] == "length"
    assert two.finish() == 0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))
