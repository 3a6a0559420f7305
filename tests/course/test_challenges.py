"""Twenty challenges: what is right gets its ratio, and what only looks right none."""

import inspect
import json
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cells
import faster
import numpy as np
import pytest
import torch
from course import Wrong, naive
from course.challenges import NAMES, Trial, board, challenge, main, source_of

TEXT = (Path(__file__).parents[2] / "chapters/challenges.md").read_text("utf-8")
every_challenge = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: results go to board/ there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(name: str, function: Any) -> str:
    with pytest.raises(Wrong) as error:
        challenge(name, function)
    return str(error.value)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On a busy machine threads of one product wait for each other, the fastest too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@every_challenge
@pytest.mark.usefixtures("one_thread")
def test_a_faster_version_gets_its_ratio(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = challenge(name, getattr(faster, name))
    assert result.ratio > 1.2
    assert result.ratio == pytest.approx(result.naive_seconds / result.seconds)
    assert f"{name}: right, and {result.ratio:.1f} times" in capsys.readouterr().out


@every_challenge
def test_the_naive_one_is_accepted(name: str) -> None:
    for seed in range(20):
        trial = Trial(name, seed, edge=True)
        trial.run(getattr(naive, name), "edge")
    Trial(name, 1).run(getattr(naive, name), "full size")


@every_challenge
def test_a_constant_is_refused(name: str) -> None:
    constant = getattr(naive, name)(*Trial(name, 7).arguments)
    trial = Trial(name, 8)
    with pytest.raises(Wrong, match=name):
        trial.run(lambda *arguments: constant, "run 1")


@every_challenge
def test_inputs_are_others_for_each_seed_and_the_same_for_one(name: str) -> None:
    one, again, other = (Trial(name, seed) for seed in (1, 1, 2))
    for trial in (one, again, other):
        trial.run(getattr(faster, name), "run")
    again.expected = one.expected
    again.compare("the same seed")
    other.expected = one.expected
    with pytest.raises(Wrong):
        other.compare("another seed")


def cached(function: Any, key: Any) -> Any:
    """``function`` with its answers kept by ``key`` of its first argument."""
    known: dict[Any, Any] = {}

    def remember(*arguments: Any) -> Any:
        place = key(arguments[0])
        if place not in known:
            known[place] = function(*arguments)
        return known[place]

    return remember


@pytest.mark.parametrize(
    "key",
    [lambda x: None, lambda x: x.shape, lambda x: x.dtype],
    ids=["the first", "by shape", "by dtype"],
)
@pytest.mark.parametrize("name", ["sinks", "top_p", "int8"])
def test_an_answer_of_another_run_is_refused(name: str, key: Any) -> None:
    assert name in refusal(name, cached(getattr(faster, name), key))


def test_what_was_seen_before_is_never_asked_again() -> None:
    seen: list[int] = []

    def remember(x: torch.Tensor) -> Any:
        assert hash(x.numpy().tobytes()) not in seen or x.numel() < 9
        seen.append(hash(x.numpy().tobytes()))
        return faster.online_softmax(x)

    challenge("online_softmax", remember)
    challenge("online_softmax", remember)
    assert len({*seen}) > 14


def in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a += b
    return a


def sorted_in_place(missing: list[int], budget: int) -> list[int]:
    done = faster.schedule(missing, budget)
    missing.clear()
    return done


def test_inputs_stay_as_they_are() -> None:
    told = refusal("all_reduce", in_place)
    assert told.startswith("all_reduce: it changes its input a")
    told = refusal("schedule", sorted_in_place)
    assert told.startswith("schedule: it changes its input missing")


class Later(torch.Tensor):
    """Would compute once somebody looks."""


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda a, b: (a + b).as_subclass(Later), "returns Later, expected Tensor"),
        (lambda a, b: None, "returns NoneType, expected Tensor"),
        (lambda a, b: (a + b).float(), "the dtype is torch.float32, expected torch.bf"),
        (lambda a, b: (a + b)[:-1], "the shape is torch.Size"),
        (lambda a, b: a, "numbers are wrong (case 0)"),
        (lambda a, b: (a + b) * torch.nan, "numbers are wrong"),
    ],
)
def test_a_wrong_answer_gets_a_reason(function: Any, told: str) -> None:
    assert told in refusal("all_reduce", function)


def test_an_answer_that_the_next_run_overwrites_is_refused() -> None:
    buffer = torch.empty(300_000, dtype=torch.bfloat16)

    def reused(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.add(a, b, out=buffer[: len(a)])

    assert "looked at again" in refusal("all_reduce", reused)


def test_a_clock_that_was_exchanged_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def honest_but_slow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
        time.sleep(0.01)
        return a + b

    trial = Trial("all_reduce", 1)
    trial.run(honest_but_slow, "run")
    assert trial.seconds >= 0.01


def test_a_refusal_names_its_input() -> None:
    told = refusal("rope", lambda x, *rest: x)
    drawn = told.partition("its input: ")[2]
    arguments = eval(drawn, {"naive": naive, "np": np})
    assert len(arguments) == len(inspect.signature(naive.rope).parameters)
    assert not torch.equal(naive.rope(*arguments), arguments[0])


def test_a_loop_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*arguments: Any) -> None:
        while True:
            time.sleep(0.01)

    monkeypatch.setattr("course.challenges.CHECK_SECONDS", 0.5)
    assert refusal("rope", endless) == "rope: not done after 0.5 s"


def test_an_unknown_one_is_named() -> None:
    with pytest.raises(LookupError, match="there is no challenge sink;"):
        challenge("sink", print)


# The board


def test_a_class_has_one_table(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    challenge("utf8", naive.utf8, by="Ada")
    challenge("utf8", faster.utf8, by="Grace Hopper")
    challenge("schedule", faster.schedule, by="Ada")
    (folder / "board").rename(folder / "all")
    capsys.readouterr()
    board(folder)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [
        ["schedule", "Ada"],
        ["utf8", "Grace"],
        ["utf8", "Ada"],
    ]
    assert all(len(line) <= 80 for line in lines)
    monkeypatch.setattr("sys.argv", ["challenges", "all"])
    main()
    assert capsys.readouterr().out.splitlines() == lines


def test_a_file_keeps_the_best(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "board/ada-utf8.json"
    challenge("utf8", faster.utf8, by="Ada")
    found = json.loads(path.read_text())
    assert found["ratio"] > 1.2
    assert found["by"] == "Ada"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert found["machine"]["threads"] >= 1
    assert len({*found["seeds"]}) == 7
    assert "getincrementaldecoder" in found["source"]
    challenge("utf8", naive.utf8, by="Ada")
    assert "has a better one" in capsys.readouterr().out
    assert json.loads(path.read_text()) == found


def test_a_file_of_something_else_is_named(folder: Path) -> None:
    (folder / "board").mkdir()
    (folder / "board/x.json").write_text('{"ratio": 7}')
    with pytest.raises(ValueError, match=r"x\.json is no result of a challenge"):
        board()


def test_a_function_without_source_is_taken() -> None:
    assert source_of(partial(print)) == ""


# The page


def test_the_page_has_each_of_them_once_and_in_order() -> None:
    asked = re.findall(r'^challenge\("(\w+)", (\w+)\)$', TEXT, re.MULTILINE)
    assert asked == [(name, name) for name in NAMES]
    assert len(NAMES) == 20
    shown = re.findall(r"^```python \.noeval\n(.*?)```$", TEXT, re.M | re.S)
    assert shown == [inspect.getsource(getattr(naive, name)) for name in NAMES]
    titles = re.findall(r"^## (\d+)\. ", TEXT, re.MULTILINE)
    assert titles == [str(number) for number in range(1, 21)]


@every_challenge
def test_the_page_begins_with_the_naive_one(name: str) -> None:
    (cell,) = [c for c in cells.cells(TEXT) if f'challenge("{name}"' in c.source]
    assert f"def {name}(" in cell.source
    assert f"return naive.{name}(" in cell.source
