"""Stop strings in a text that comes in pieces."""

from collections.abc import Sequence
from typing import Any


def find_stop(text: str, stop: str, start: int) -> int:
    """Where ``stop`` begins in ``text``, from ``start`` on, or may if more text comes.

    The end of the text if nowhere.
    """
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start : start + len(stop)]):
            return start
        start += 1
    return len(text)


class StopStrings:
    """Passes text on until one of ``stops`` appears in it, whatever the pieces.

    Text that may be the beginning of a stop string is held back until that is decided.
    Of several stop strings the one that ends first counts, of those that end together
    the longest. Each looks at a place once, and again only while it may begin there: a
    piece costs a few operations and one for each of its characters, however long the
    stop strings are.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.stops = stops
        self.include = include  # what is found is passed on, too
        self.match: str | None = None
        self.pending = ""
        self._begins = [0] * len(stops)  # of each: where in `pending` it may begin
        self._firsts = {stop[0] for stop in stops}

    @classmethod
    def of(cls, params: Any) -> "StopStrings":
        """What `SamplingParams` say."""
        return cls(params.stop, include=params.include_stop_str_in_output)

    def push(self, text: str) -> str:
        """What of the text so far is safe to show."""
        if not self.pending and self._firsts.isdisjoint(text):
            return text  # as almost all text is
        text = self.pending + text
        begins = [
            find_stop(text, stop, start)
            for stop, start in zip(self.stops, self._begins, strict=True)
        ]
        lengths = map(len, self.stops)
        ends = [begin + n for begin, n in zip(begins, lengths, strict=True)]
        end, first = min(zip(ends, begins, strict=True))
        if end <= len(text):
            self.match = text[first:end]
            self.flush()
            return text[: end if self.include else first]
        safe = min(begins)
        self.pending = text[safe:]
        self._begins = [begin - safe for begin in begins]
        return text[:safe]

    def flush(self) -> str:
        """What is held back, once no more text comes; then all begins anew."""
        self._begins = [0] * len(self.stops)
        pending, self.pending = self.pending, ""
        return pending
