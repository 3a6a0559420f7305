"""Which prefixes of prompts an engine has computed."""

from collections.abc import Sequence

STRIDE = 16  # tokens between two prefixes of a prompt
MOST_PREFIXES = 2**17  # that are remembered of a replica, about 15 MB


class Prefixes:
    """The prefixes of prompts that an engine has computed, as digests."""

    def __init__(self) -> None:
        self.digests: dict[int, None] = {}  # the latest ones last

    def match(self, digests: Sequence[int]) -> int:
        """How many of these prefixes, the shortest first, it has computed."""
        count = 0
        while count < len(digests) and digests[count] in self.digests:
            count += 1
        return count

    def remember(self, digests: Sequence[int]) -> None:
        """Note a prompt with these prefixes; long ones are forgotten before short."""
        for digest in reversed(digests):
            self.digests.pop(digest, None)
            self.digests[digest] = None
        while len(self.digests) > MOST_PREFIXES:
            del self.digests[next(iter(self.digests))]


def digests_of(prompt: Sequence[int], stride: int = STRIDE) -> list[int]:
    """A digest of each prefix whose length is a multiple of ``stride`` tokens or bytes.

    They are the same in all processes.
    """
    digests, before = [], 0
    for end in range(stride, len(prompt) + 1, stride):
        before = hash((before, *prompt[end - stride : end]))
        digests.append(before)
    return digests
