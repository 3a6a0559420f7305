"""Twenty challenges: one function each, to be made faster than a naive one.

    challenge("sinks", mine)               check it, time it, say how many times as fast
    challenge("sinks", mine, by="Ada")     and write that to board/ada-sinks.json
    board("board")                         one table of all such files in a folder

The last one is also `python -m course.challenges FOLDER`, with chapters/ or a workbook
as the working directory. The naive functions are those of `course.naive`.
"""

import argparse
import copy
import inspect
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course import CHECK_SECONDS, TooLong, Wrong, naive, table, time_limit
from simplellm.apps.peaks import seconds_of
from simplellm.apps.report import describe_device, versions, write_json

NAMES = (
    "mxfp4 int8 router experts_order rope sinks paged_decode online_softmax ring "
    "prefix_hash lru schedule top_k top_p gumbel logprobs verify stop_strings utf8 "
    "all_reduce"
).split()
EDGES = 30  # inputs of small shapes, each another one
RUNS = 7  # that are timed, each with an input of its own
CLOSE = 1e-3  # relative and absolute, for floating-point numbers


@dataclass(frozen=True)
class Result:
    """How a function did, and all that is needed to do it again."""

    challenge: str
    by: str
    ratio: float  # how many times as fast as the naive one
    # Of the fastest run: whatever disturbs a run makes it slower, never faster.
    seconds: float
    naive_seconds: float
    date: str
    machine: dict[str, Any]
    versions: dict[str, str | None]
    seeds: list[int]  # of the runs' inputs
    source: str


def challenge(name: str, function: Callable[..., Any], by: str | None = None) -> Result:
    """Check ``function``, time it against the naive one, and print the ratio.

    Each run has an input that nobody has seen before, and its answer is compared. With
    ``by``, a name, the result goes to a file in board/, unless a better one is there.
    Raises Wrong with a reason, and LookupError for a challenge that there isn't.
    """
    if name not in NAMES:
        raise LookupError(f"there is no challenge {name}; there are {', '.join(NAMES)}")
    try:
        with time_limit(CHECK_SECONDS):
            trials = run_all(name, function)
    except TooLong:
        raise Wrong(f"{name}: not done after {CHECK_SECONDS} s") from None
    seconds = min(trial.seconds for trial in trials)
    bar = min(trial.naive_seconds for trial in trials)
    result = Result(
        challenge=name,
        by=by or "",
        ratio=bar / seconds,
        seconds=seconds,
        naive_seconds=bar,
        date=date.today().isoformat(),
        machine=describe_device(torch.device("cpu")),
        versions=versions(),
        seeds=[trial.seed for trial in trials],
        source=source_of(function),
    )
    times = f"{1000 * seconds:.2f} ms for {1000 * bar:.2f} ms"
    print(f"{name}: right, and {result.ratio:.1f} times as fast as naive ({times})")
    if by:
        submit(result, Path("board"))
    return result


def run_all(name: str, function: Callable[..., Any]) -> list["Trial"]:
    """The timed runs, after small inputs that are easily got wrong. Raises Wrong."""
    for number in range(EDGES):
        Trial(name, secrets.randbits(64), edge=True).run(function, f"case {number}")
    trials = [Trial(name, secrets.randbits(64)) for _ in range(RUNS)]
    for number, trial in enumerate(trials):
        trial.run(function, f"run {number}")
        for earlier in trials[max(number - 1, 0) : number]:
            earlier.compare(f"run {number - 1}, looked at again after the next one")
    return trials


class Trial:
    """One input, and what two functions make of it."""

    def __init__(self, name: str, seed: int, edge: bool = False) -> None:
        self.name, self.seed, self.edge = name, seed, edge
        self.naive = getattr(naive, name)
        draw = getattr(naive, f"draw_{name}")
        self.arguments = draw(np.random.default_rng(seed), edge)

    def run(self, function: Callable[..., Any], where: str) -> None:
        """Time ``function``, then the naive one, and compare. Raises Wrong."""
        theirs, ours = (copy.deepcopy(self.arguments) for _ in range(2))
        answers: list[Any] = []
        # First, so that there is no right answer anywhere in memory yet.
        self.seconds = seconds_of(lambda: answers.append(function(*theirs)))
        self.naive_seconds = seconds_of(lambda: answers.append(self.naive(*ours)))
        self.found, self.expected = answers
        for index, argument in enumerate(self.arguments):
            if difference(argument, theirs[index], exact=True):
                parameter = list(inspect.signature(self.naive).parameters)[index]
                raise Wrong(f"{self.name}: it changes its input {parameter}")
        self.compare(where)

    def compare(self, where: str) -> None:
        """Raise Wrong unless the two answers are the same."""
        if reason := difference(self.expected, self.found):
            drawn = f"draw_{self.name}(np.random.default_rng({self.seed}), {self.edge})"
            raise Wrong(f"{self.name}: {reason} ({where})\nits input: naive.{drawn}")


def difference(expected: Any, found: Any, exact: bool = False) -> str:
    """How ``found`` is not ``expected``, or "".

    Types, shapes and dtypes have to be the same, and all but floating-point numbers.
    """
    # A subclass could compute when it is looked at, after the clock has stopped.
    if type(found) is not type(expected):
        return f"returns {type(found).__name__}, expected {type(expected).__name__}"
    if isinstance(expected, tuple):
        if len(found) != len(expected):
            return f"returns {len(found)} things, expected {len(expected)}"
        parts = map(difference, expected, found, [exact] * len(expected))
        return next(filter(None, parts), "")
    if not isinstance(expected, Tensor):
        return "" if found == expected else "another answer than the naive one's"
    for what in ("shape", "dtype"):
        theirs, ours = getattr(found, what), getattr(expected, what)
        if theirs != ours:
            return f"the {what} is {theirs}, expected {ours}"
    if exact or expected.dtype != torch.float32:
        wrong = found != expected
    else:
        wrong = ~torch.isclose(found, expected, rtol=CLOSE, atol=CLOSE)
    count = int(wrong.sum())
    return f"{count} of {wrong.numel()} numbers are wrong" if count else ""


def source_of(function: Callable[..., Any]) -> str:
    """The function's code, where there is any to read."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


# The board


def submit(result: Result, folder: Path) -> None:
    """Write a result into ``folder``, unless a better one of theirs is there."""
    folder.mkdir(exist_ok=True)
    name = re.sub(r"\W+", "-", result.by.lower()).strip("-")
    path = folder / f"{name}-{result.challenge}.json"
    if path.exists() and read(path).ratio >= result.ratio:
        print(f"{path} has a better one")
        return
    write_json(asdict(result), path)
    print(f"written to {path}")


def read(path: Path) -> Result:
    """The result in a file. Raises ValueError, with its name, if there is none."""
    try:
        return Result(**json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is no result of a challenge: {error}") from None


def machine_of(result: Result) -> str:
    """A machine in few words: "x86_64, 2 threads"."""
    name, threads = result.machine["name"], result.machine["threads"]
    return f"{name.removeprefix('CPU, ')}, {threads} thread{'s' * (threads > 1)}"


def board(folder: str | Path = "board") -> None:
    """Print the best result of everybody at each challenge, of all files in a folder.

    Ratios are those of one machine each: compare them where the machine is the same.
    """
    best: dict[tuple[str, str], Result] = {}
    for path in sorted(Path(folder).rglob("*.json")):
        result = read(path)
        key = result.challenge, result.by
        if key not in best or best[key].ratio < result.ratio:
            best[key] = result
    ranked = sorted(best.values(), key=lambda r: (NAMES.index(r.challenge), -r.ratio))
    rows = [
        (r.challenge, r.by[:16], round(r.ratio, 1), r.date, machine_of(r))
        for r in ranked
    ]
    table(rows, ["challenge", "by", "ratio", "date", "machine"])


def main() -> None:
    parser = argparse.ArgumentParser(description="One table of a class's results.")
    parser.add_argument("folder", nargs="?", default="board")
    board(parser.parse_args().folder)


if __name__ == "__main__":
    main()
