"""Drafts from what a text has said before: a suffix automaton over its tokens.

Code that is edited, a quote, a name that comes again: where the end of a text stands
earlier in it, too, what followed there is a good guess of what comes now. No model
computes anything (prompt lookup decoding; SuffixDecoding, Oliaro et al. 2024).
"""

from collections.abc import Sequence

# Tokens that are indexed at a time, so that a long prompt holds up no step: 5 ms.
INDEXED_AT_ONCE = 4096
SHORTEST_MATCH = 2  # tokens; after a shorter match nothing is guessed


class SuffixAutomaton:
    """All substrings of a text that grows token by token (Blumer et al. 1985).

    It has at most two states for each token, and a token takes constant time, taken
    over all of them. A state stands for the substrings with the same end positions.
    """

    def __init__(self) -> None:
        self.size = 0  # of the text, in tokens
        # Of each state: its successors by token, the state of its longest suffix that
        # also ends elsewhere, the length of its longest substring, and where it ended
        # first or was last seen to end: after so many tokens.
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.end = [0]
        self.last = 0  # the state of the whole text

    def _state(self, successors: dict[int, int], link: int, length: int) -> int:
        self.next.append(successors)
        self.link.append(link)
        self.length.append(length)
        self.end.append(self.size)
        return len(self.next) - 1

    def append(self, token: int) -> None:
        """The text goes on with ``token``."""
        self.size += 1
        last = self._state({}, 0, self.size)
        state, self.last = self.last, last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = last
            state = self.link[state]
        if state < 0:
            return
        target = self.next[state][token]
        if self.length[target] != self.length[state] + 1:
            # Its shorter substrings end here, too, and the longer ones do not.
            longer, shorter = target, dict(self.next[target])
            target = self._state(shorter, self.link[longer], self.length[state] + 1)
            self.end[target] = self.end[longer]
            self.link[longer] = target
            while state >= 0 and self.next[state].get(token) == longer:
                self.next[state][token] = target
                state = self.link[state]
        self.link[last] = target

    def match(self) -> tuple[int, int]:
        """The longest end of the text that stands earlier in it.

        How many tokens it has, and after how many tokens of the text it ended there:
        the latest such end that was asked for.
        """
        state = self.link[self.last]
        if state <= 0:
            return 0, 0
        length, end = self.length[state], self.end[state]
        self.end[state] = self.size  # for the next time
        return length, end


class SuffixDrafter:
    """Guesses how one request goes on, from its prompt and its output."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self._match = (0, 0, 0)  # the text's length, and its match

    def update(self, tokens: Sequence[int]) -> bool:
        """Take in ``tokens``, the text so far; False if there is still more of it."""
        automaton = self.automaton
        start = automaton.size
        for token in tokens[start : start + INDEXED_AT_ONCE]:
            automaton.append(token)
        return automaton.size == len(tokens)

    def propose(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
        """Up to ``most`` tokens that may follow ``tokens``, and the match's length.

        ``tokens`` begin with those of the last call. A longer match is trusted for a
        longer draft: for as many tokens as it has.
        """
        if not self.update(tokens):
            return [], 0
        if self._match[0] != len(tokens):
            self._match = len(tokens), *self.automaton.match()
        _, length, end = self._match
        if length < SHORTEST_MATCH:
            return [], length
        return list(tokens[end : end + min(most, length)]), length
