"""Which of the drafts that a step has checked are right, and how many to check."""

from collections.abc import Callable, Sequence

MIN_SPEEDUP = 1.02  # in tokens a second, or a step checks no drafts


def accept_drafts(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The tokens that are sure: those sampled up to the first wrong draft.

    ``sampled`` are len(drafts) + 1 tokens, each sampled after so many of the drafts.
    """
    right = 0
    while right < len(drafts) and drafts[right] == sampled[right]:
        right += 1
    return list(sampled[: right + 1])


def acceptance(drafts: Sequence[int], came: Sequence[int]) -> tuple[int, int]:
    """How many of ``drafts`` were right, and of how many that is known.

    ``came`` are the tokens that did come at these positions, perhaps fewer or more.
    A draft counts if all drafts before it were right.
    """
    right = 0
    for draft, token in zip(drafts, came, strict=False):
        if draft != token:
            return right, right + 1
        right += 1
    return right, right


def choose_counts(
    chances: Sequence[float],
    offered: Sequence[int],
    computed: int,
    max_drafts: int,
    cost: Callable[[int], float],
) -> list[int]:
    """How many drafts of each request to check, for the most tokens a second.

    ``chances`` are, of each request, that a draft is right if those before it are;
    ``offered`` is how many drafts it has. The step computes ``computed`` tokens without
    drafts, and at most ``max_drafts`` more; ``cost``: the seconds of so many tokens.
    """
    survival = sorted(
        (
            (chance**position, -row)
            for row, chance in enumerate(chances)
            for position in range(1, offered[row] + 1)
        ),
        reverse=True,
    )[:max_drafts]
    tokens = float(len(chances))
    best, chosen = MIN_SPEEDUP * tokens / cost(computed), 0
    for count, (chance, _) in enumerate(survival, 1):
        tokens += chance
        if (speed := tokens / cost(computed + count)) > best:
            best, chosen = speed, count
    counts = [0] * len(chances)
    for _, row in survival[:chosen]:
        counts[-row] += 1
    return counts
