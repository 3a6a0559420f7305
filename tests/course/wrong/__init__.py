"""Wrong answers to the blanks and exercises, as students give them.

Each module, chNN.py of a chapter or chA.py of an appendix, holds functions and classes
decorated with `@wrong("route", "softmax")`: the name of the blank or exercise, and a
word of the message with which its check has to refuse the answer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Answer(NamedTuple):
    name: str
    word: str
    thing: Any

    def __str__(self) -> str:
        return f"{self.name}: {getattr(self.thing, '__name__', self.thing)}"


ANSWERS: list[Answer] = []


def wrong(name: str, word: str) -> Callable[[Any], Any]:
    """Note the decorated answer."""

    def note(thing: Any) -> Any:
        ANSWERS.append(Answer(name, word, thing))
        return thing

    return note
