"""Stop strings in a text that comes in pieces."""

from collections.abc import Sequence


class StopString:
    """How far into one stop string the text has come (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # that many of its characters are the end of the text so far
        # At [n], the matched characters that remain if the one behind n does not match.
        # As long as the longest match so far: what is never reached costs nothing.
        self._shorter = [0, 0]

    def push(self, character: str) -> bool:
        """Go on by one character; whether the stop string is complete."""
        text, shorter = self.text, self._shorter
        matched = self.matched
        while matched and text[matched] != character:
            matched = shorter[matched]
        matched += text[matched] == character
        if matched == len(shorter):  # the stop string meets itself as a text would
            last, border = text[matched - 1], shorter[matched - 1]
            while border and text[border] != last:
                border = shorter[border]
            shorter.append(border + (text[border] == last))
        self.matched = matched
        return matched == len(text)


class StopStrings:
    """Passes text on until one of ``stops`` appears in it, whatever the pieces.

    Text that may be the beginning of a stop string is held back until that is decided.
    Of several stop strings the one that ends first counts, of those that end together
    the longest. Each new character costs a few operations for each stop string that is
    under way, however long it is, and next to nothing if there is none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.held = ""
        self.found = False
        self._under_way: set[StopString] = set()
        self._by_first: dict[str, list[StopString]] = {}
        for stop in stops:
            self._by_first.setdefault(stop[0], []).append(StopString(stop))

    def push(self, text: str) -> str:
        """What of the text so far is safe to show."""
        if not self._under_way and self._by_first.keys().isdisjoint(text):
            return text
        text, new = self.held + text, len(self.held)
        for end, character in enumerate(text[new:], start=new + 1):
            beginning = self._by_first.get(character, ())
            stops = self._under_way.union(beginning)
            complete = [len(stop.text) for stop in stops if stop.push(character)]
            if complete:
                self.found = True
                self.flush()
                return text[: end - max(complete)]
            self._under_way = {stop for stop in stops if stop.matched}
        held = max((stop.matched for stop in self._under_way), default=0)
        shown = text[: len(text) - held]
        self.held = text[len(shown) :]
        return shown

    def flush(self) -> str:
        """What is held back, once no more text comes; then all begins anew."""
        for stop in self._under_way:
            stop.matched = 0
        self._under_way = set()
        held, self.held = self.held, ""
        return held
