"""Numbers in the prose that come from records of figures/, and where in them they are.

A comment below a paragraph, an item of a list or a fence, which no reader sees, names a
record and says what each number is:

    The longest gap is 13.7 times shorter; the prompt's first token comes after 0.80 s.
    <!-- 09-serving
    13.7 = gaps.ratio
    after 0.80 = record("gpu-ledger").gaps.chunks_of_1024.first_token_ms / 1e3
    -->

On the left are words of the text above that are there once; their last number is meant.
On the right is a Python expression, in which the record's keys are names beside those
of `HELPERS`, and lines without " = " go on with it. What has no number on the left is a
name for the lines below. The text decides how many decimals a number has, and
`tables.py` renews it.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

FIGURES = Path(__file__).resolve().parents[1] / "figures"
NUMBER = re.compile(r"(?<![\w.,-])[+-]?\d+(?:[.,-]\d+)*(?!\w)")
MARK = re.compile(r"^ *<!-- ([\w-]+)\n((?:(?! *-->).+\n)+) *-->\n", re.MULTILINE)
ROW = re.compile(r".+? = .+\n(?:(?!.+ = ).+\n)*")
BEGIN = re.compile(r"\n\n|^ *- ", re.MULTILINE)  # of a paragraph or of an item
FENCE = re.compile(r"^```\w+\n(?:(?!```).*\n)*```\n\Z", re.MULTILINE)


def name_of(key: str) -> str:
    """A key as a name: "chunks of 1024" is chunks_of_1024."""
    return re.sub(r"\W", "_", key)


class Part(dict[str, Any]):
    """A part of a record: its keys are attributes, and 16 is the key "16"."""

    def __getattr__(self, name: str) -> Any:
        for key, value in self.items():
            if name_of(key) == name:
                return value
        raise AttributeError(f"no {name!r} among {[*self]}")

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, str):
            raise KeyError(key)
        return self[str(key)]


@cache
def record(name: str) -> Part:
    """What figures/ has by this name."""
    text = (FIGURES / f"{name}.json").read_text(encoding="utf-8")
    parts: Part = json.loads(text, object_hook=Part)
    return parts


def column(rows: list[Part], name: str, **values: Any) -> list[Any]:
    """What those of ``rows`` that have these ``values`` have by a name."""
    return [row[name] for row in rows if row.items() >= values.items()]


def one(rows: list[Part], **values: Any) -> Part:
    """The only one of ``rows`` that has these ``values``."""
    (row,) = (row for row in rows if row.items() >= values.items())
    return row


HELPERS = {"record": record, "column": column, "one": one, "mean": mean}


class Marked(NamedTuple):
    """A number in a text, which may be the mark's own, and what the mark says of it."""

    start: int
    number: str
    expression: str
    names: dict[str, Any]

    def renewed(self) -> str:
        """The number as the record has it, with as many decimals as before."""
        value = eval(self.expression, self.names)
        if isinstance(value, str):
            return value
        decimals = len(self.number.partition(".")[2])
        sign = "+" if self.number[0] in "+-" else ""
        return f"{value:{sign},.{decimals}f}"


def above(text: str, mark: int) -> tuple[int, int]:
    """Where the text begins and ends that a mark at ``mark`` speaks of."""
    while (before := MARK.search(text, text.rfind("<!--", 0, mark), mark)) and (
        before.end() == mark
    ):
        mark = before.start()
    begin = FENCE.search(text, 0, mark) or [*BEGIN.finditer(text, 0, mark)][-1]
    return begin.start(), mark


def marked(text: str) -> Iterator[Marked]:
    """The numbers that have marks, each in the text and in its mark.

    Raises ValueError for words that the text above doesn't have, or more than once.
    """
    for mark in MARK.finditer(text):
        begin, end = above(text, mark.start())
        parts = record(mark[1]).items()
        names = HELPERS | {name_of(key): value for key, value in parts}
        for row in ROW.finditer(text, *mark.span(2)):
            words, expression = (
                " ".join(part.split()) for part in row[0].split(" = ", 1)
            )
            if not NUMBER.search(words):
                names[words] = eval(expression, names)
                continue
            pattern = re.escape(words).replace(r"\ ", r"\s+")
            pattern = rf"(?<![\w.,-]){pattern}(?!\w|[.,]\d)"
            matches = [*re.compile(pattern).finditer(text, begin, end)]
            if len(matches) != 1:
                raise ValueError(f"{len(matches)} of {words!r} in {text[begin:end]!r}")
            for start, part in (
                (matches[0].start(), matches[0][0]),
                (row.start(), row[0]),
            ):
                number = [*NUMBER.finditer(part.split(" = ")[0])][-1]
                yield Marked(start + number.start(), number[0], expression, names)


def replace(text: str, new: Callable[[Marked], str]) -> str:
    """``text`` with each marked number replaced by ``new`` of it."""
    for number in sorted(marked(text), reverse=True):
        end = number.start + len(number.number)
        text = text[: number.start] + new(number) + text[end:]
    return text


def renewed(text: str) -> str:
    """``text`` with all its marked numbers as the records have them."""
    return replace(text, Marked.renewed)
