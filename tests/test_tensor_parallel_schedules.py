"""Any schedule over several ranks gives the tokens of a request alone.

Over ranks that compute each request together, and over those that have requests of
their own. As in test_equivalence.py, whose cases these are; the ranks are threads here.
"""

import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from heads import write_head
from models import until
from recompute import Recompute
from test_equivalence import Prophet, capture_steps, guess_with, run_cases
from test_runner import Tape
from test_tensor_parallel import SIXTEEN

from simplellm import EngineConfig, load_model
from simplellm.api import follower as follower_module
from simplellm.api.follower import follow
from simplellm.api.load import load_engine
from simplellm.checkpoint.checkpoint import open_weights
from simplellm.checkpoint.families import read_config
from simplellm.engine import graphs, head_drafter
from simplellm.engine import start_ranks as start_module
from simplellm.engine.build_speculation import capture_drafts
from simplellm.engine.data_parallel_ranks import DataLeader
from simplellm.engine.data_parallel_runner import RemoteRunner
from simplellm.engine.engine import Engine
from simplellm.engine.graphs import QUERIES
from simplellm.engine.ranks import Leader, Link, TensorLeader
from simplellm.engine.start_ranks import start_ranks
from simplellm.model.model import Model
from simplellm.model.ops_numpy import NUMPY

CPU = torch.device("cpu")


class RankThread:
    """What `Leader` has of a rank's process, here a thread of this one."""

    def __init__(self, link: socket.socket) -> None:
        self.pid, self.link = threading.get_native_id(), Link(link)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        with suppress(ConnectionError):
            if (options := self.link.receive()) is not None:
                follow(self.link, **options)

    def poll(self) -> int | None:
        return None if self.thread.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int:
        self.thread.join(timeout)
        if self.thread.is_alive():
            raise subprocess.TimeoutExpired("a rank", timeout or 0)
        return 0

    def kill(self) -> None:
        raise AssertionError("a rank does not end")


class Threads(Leader):
    """Rank 0 of ranks that are threads."""

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        self.links.append(Link(ours))
        rank: Any = RankThread(theirs)
        self.processes.append(rank)


class TensorThreads(Threads, TensorLeader):
    """Those that all do the same."""


class DataThreads(Threads, DataLeader):
    """Those that have requests of their own."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), SIXTEEN)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Recompute:
    return Recompute(load_model(folder, device="cpu", ops=NUMPY))


@pytest.fixture
def over_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int, bool], Any]]:
    """What makes engines of so many ranks, with whole experts or parts of all."""
    monkeypatch.setattr(start_module, "TensorLeader", TensorThreads)
    monkeypatch.setattr(start_module, "DataLeader", DataThreads)
    begun: list[Engine] = []

    def close() -> None:
        while begun:
            begun.pop().runner.ranks.close()

    def ranked(size: int, experts: bool, kind: str = "tensor") -> Any:
        def make(model: Model, config: EngineConfig, *, overlap: bool) -> Engine:
            close()  # that of the case before
            own: dict[str, Any] = {f"{kind}_parallel_size": size}
            own["enable_expert_parallel"] = experts
            own["cpu_cache_bytes"] = size * config.cpu_cache_bytes
            config = config.changed(own).resolved("cpu")
            source = open_weights(folder, torch.float32, CPU, False, None)
            ranks = start_ranks(config, source.config, folder, torch.float32, CPU)
            with ranks.guard_load():
                engine, *_ = load_engine(source, config, torch.float32, CPU, ranks)
            limit = engine.max_model_len
            begun.append(Engine(engine.scheduler, engine.runner, limit, overlap))
            return begun[-1]

        return make

    yield ranked
    close()


@pytest.mark.parametrize(
    ("size", "experts", "seeds"),
    [
        (2, False, range(3)),
        (2, True, range(3, 6)),
        pytest.param(4, False, range(5), marks=pytest.mark.exhaustive),
        pytest.param(4, True, range(5, 10), marks=pytest.mark.exhaustive),
    ],
)
def test_any_schedule_gives_the_tokens_of_a_request_alone(
    size: int,
    experts: bool,
    seeds: range,
    folder: Path,
    alone: Recompute,
    over_ranks: Callable[[int, bool], Any],
) -> None:
    model = load_model(folder, device="cpu")
    counts = run_cases(model, alone, seeds, make=over_ranks(size, experts))
    assert counts["length"] > 0 and counts["hits"] > 0, counts


@pytest.mark.parametrize(
    ("size", "seeds", "more"),
    [
        (2, range(30, 34), ()),
        (2, range(76, 79), ("drafts", "offloading")),
        pytest.param(4, range(34, 35), (), marks=pytest.mark.exhaustive),
        pytest.param(2, range(36, 60), (), marks=pytest.mark.exhaustive),
        pytest.param(4, range(60, 76), (), marks=pytest.mark.exhaustive),
        pytest.param(4, range(79, 95), ("drafts",), marks=pytest.mark.exhaustive),
        pytest.param(2, range(95, 110), ("offloading",), marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_with_requests_of_their_own(
    size: int,
    seeds: range,
    more: Sequence[str],
    folder: Path,
    alone: Recompute,
    over_ranks: Callable[..., Any],
) -> None:
    model = load_model(folder, device="cpu")
    options: dict[str, Any] = dict.fromkeys(more, True)
    options["make"] = over_ranks(size, True, "data")
    counts = run_cases(model, alone, seeds, **options)
    assert counts["length"] > 0, counts
    assert counts["drafts"] > counts["right"] > 0 or "drafts" not in more, counts


@pytest.fixture(scope="module")
def head(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("head")
    write_head(path, read_config(folder / "config.json"))
    return str(path)


def loading(
    monkeypatch: pytest.MonkeyPatch, loaded: Callable[[Engine, int], None]
) -> None:
    """Have ``loaded`` called on each rank, all at once, with its engine and number."""
    load = load_engine

    def load_and_tell(*arguments: Any) -> Any:
        found = load(*arguments)
        loaded(found[0], arguments[-1].group.rank)
        return found

    monkeypatch.setattr(follower_module, "load_engine", load_and_tell)
    monkeypatch.setattr(sys.modules[__name__], "load_engine", load_and_tell)


@pytest.mark.parametrize(
    ("size", "seeds"),
    [
        (2, range(118, 121)),
        pytest.param(2, range(121, 150), marks=pytest.mark.exhaustive),
        pytest.param(4, range(150, 162), marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_draft_with_a_head_of_their_own(
    size: int,
    seeds: range,
    folder: Path,
    head: str,
    alone: Recompute,
    over_ranks: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For their own requests, which rank 0 alone knows; pages move to the host."""
    proposers: dict[int, Any] = {}

    def noted(engine: Engine, rank: int) -> None:
        proposers[rank] = engine.runner.proposer

    def guesses(engine: Any, prophet: Prophet) -> None:
        until(lambda: len(proposers) == size)  # all ranks have loaded
        hosts = [proposers[0], *(one.host_proposer for one in engine.runner.others)]
        for rank, host in enumerate(hosts):
            rows: dict[int, int] = {}
            task = host.task

            def noting(*arguments: Any, task: Any = task, rows: Any = rows) -> Any:
                found = task(*arguments)
                rows.clear()
                rows |= {entry[0].request_id: n for n, entry in enumerate(found[1])}
                return found

            host.task = noting
            own, scheduler = proposers.pop(rank), engine.scheduler.ranks[rank]
            guess_with(own, scheduler, prophet, lambda rows=rows: dict(rows))

    loading(monkeypatch, noted)
    model = load_model(folder, device="cpu")
    options: dict[str, Any] = {"head": head, "offloading": True, "guesses": guesses}
    options["make"] = over_ranks(size, True, "data")
    counts = run_cases(model, alone, seeds, **options)
    assert counts["drafts"] > counts["right"] > 20 * len(seeds), counts
    assert min(counts["hits"], counts["abort"], counts["preemptions"]) > 0, counts
    assert counts["loaded"] > 0 or size > 2, counts


@pytest.mark.parametrize("drafter", ["suffix", "head"])
def test_captured_steps_of_ranks_with_requests_of_their_own(
    drafter: str,
    folder: Path,
    head: str,
    alone: Recompute,
    over_ranks: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all decode, some check drafts or compute prompts, graphs are the same."""
    tape, replays = Tape(), Counter[tuple[int, str]]()
    monkeypatch.setattr(graphs, "capture_graph", tape)

    def recorded(run: Any, pool: Any = None) -> SimpleNamespace:
        def replay() -> None:
            replays[threading.get_ident(), run.func.__name__] += 1
            run()

        return SimpleNamespace(replay=replay, pool=lambda: "a pool")

    monkeypatch.setattr(head_drafter, "capture_graph", recorded)
    make = over_ranks(2, True, "data")

    def captured(engine: Engine, rank: int) -> None:
        capture_steps(engine.runner, True)
        capture_drafts(engine.scheduler, engine.runner)

    loading(monkeypatch, captured)
    monkeypatch.setattr(RemoteRunner, "_pages", lambda self, _: self.table_width)
    model = load_model(folder, device="cpu")
    more: dict[str, Any] = {"head": head} if drafter == "head" else {"drafts": True}
    run_cases(model, alone, range(3), make=make, **more)
    kinds = Counter((shape.chunks > 0, shape.queries) for shape in tape.replays)
    assert min(kinds[True, 1], kinds[False, 1], kinds[False, QUERIES]) >= 10, kinds
    for name in ("_read", "_draft") if drafter == "head" else ():
        each = [number for (_, which), number in replays.items() if which == name]
        assert len(each) >= 2 and min(each) > 5, replays
