"""What drafts cost, how many are right, and when to stop making them for a while."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

DECAY = 0.95  # of earlier drafts' weight, at each new guess
FADE = 0.5  # the same, each time that drafting backs off
OVERHEAD_FADE = 0.125  # and that of what steps took
SIGNIFICANCE = 0.001  # likelihood of so many wrong drafts below which that's done
MIN_BACKOFF, MAX_BACKOFF = 8, 512  # steps that the first one takes, and the longest
# The same, where drafts would be right but aren't worth what they cost. With another
# number of requests they may be.
MIN_COST_BACKOFF, MAX_COST_BACKOFF = 8, 128
BACKOFF_FACTOR = 4  # times as long is each backoff as the one before


class StepCosts:
    """Seconds that a step of so many tokens takes: measured ones, and between them."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        self.sizes = sorted(measured)
        # More tokens never take less time.
        self.seconds = [*accumulate((measured[size] for size in self.sizes), max)]

    def __call__(self, tokens: int) -> float:
        """Seconds of a step; beyond the last size as between the last two."""
        sizes, seconds = self.sizes, self.seconds
        if len(sizes) == 1 or tokens <= sizes[0]:
            return seconds[0]
        right = min(bisect_left(sizes, tokens), len(sizes) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (sizes[right] - sizes[left])
        return seconds[left] + slope * (tokens - sizes[left])


@dataclass
class AcceptanceRate:
    """How likely a draft is right, given that all before it were: by counts."""

    right: float = 0.0
    tried: float = 0.0

    def learn(self, right: int, tried: int) -> None:
        """Count some more; what was longer ago counts less."""
        self.right = DECAY * self.right + right
        self.tried = DECAY * self.tried + tried

    def fade(self) -> None:
        """Believe less in it, so that it's tried again."""
        self.right, self.tried = FADE * self.right, FADE * self.tried

    def with_prior(self, other: float, weight: float) -> float:
        """The rate, if ``other`` was seen in ``weight`` drafts before."""
        return (self.right + weight * other) / (self.tried + weight)


@dataclass
class Overhead:
    """Seconds by which steps that follow one another take longer than they cost.

    That is the attention to what the cache holds, and what the host has to do between
    steps, unless it is ahead of the device; it is negative where a request's drafts
    share experts. A line by how many drafts each request has, by least squares, where
    what was longer ago counts less.
    """

    count: float = 0.0
    drafts: float = 0.0  # sums, of all steps: drafts of a request
    seconds: float = 0.0
    squares: float = 0.0  # of drafts
    products: float = 0.0  # of drafts and seconds

    def learn(self, drafts: float, seconds: float, cost: float) -> None:
        """Count one more step, with so many drafts of each request.

        ``cost`` is what it costs. One step that takes far longer than others was held
        up by something else, as a garbage collection does.
        """
        mean = self.seconds / self.count if self.count else 0.0
        seconds = min(seconds, 2 * abs(mean) + cost)
        self._scale(DECAY)
        self.count += 1
        self.drafts += drafts
        self.seconds += seconds
        self.squares += drafts**2
        self.products += drafts * seconds

    def fade(self) -> None:
        """Believe less in it, so that it's measured again."""
        self._scale(OVERHEAD_FADE)

    def _scale(self, factor: float) -> None:
        for name in ("count", "drafts", "seconds", "squares", "products"):
            setattr(self, name, factor * getattr(self, name))

    def at(self, drafts: float) -> float:
        """Seconds where each request has so many drafts; 0 before any was timed."""
        if not self.count:
            return 0.0
        mean, middle = self.seconds / self.count, self.drafts / self.count
        spread = self.count * self.squares - self.drafts**2
        if spread <= 1e-6 * self.count * self.squares:  # all had the same number
            return mean
        slope = (self.count * self.products - self.drafts * self.seconds) / spread
        return mean + slope * (drafts - middle)


@dataclass
class DraftBackoff:
    """For how many steps nobody drafts: an exponential backoff from wrong drafts.

    It begins when so many steps in a row had only wrong drafts that this is unlikely,
    if drafts are as good as was thought before the first of these steps.
    """

    left: int = 0  # steps
    next: int = MIN_BACKOFF  # steps of the next backoff
    next_cost: int = MIN_COST_BACKOFF  # of the next one by what drafts cost
    requests: int = 0  # that ran when it began
    # How likely as many wrong drafts in a row are. It begins low, and not at 1: until
    # some draft was right, a few wrong ones are enough.
    likelihood: float = 4 * SIGNIFICANCE
    prior_chance: float | None = None  # that a draft is right, before them
    right: bool = False  # whether any was, of those of this step
    wrong: int = 0  # requests of this step whose first draft was not

    def learn(self, right: int, tried: int, chance: float) -> None:
        """Count a request of this step: of ``tried`` drafts ``right`` were right."""
        self.right = self.right or right > 0
        self.wrong += tried > right == 0
        if self.prior_chance is None:
            self.prior_chance = chance

    def end_step(self) -> bool:
        """End a step, all of whose requests were counted. Whether to back off now."""
        if self.right:
            self.likelihood, self.prior_chance = 1.0, None
            self.next = max(self.next // BACKOFF_FACTOR, MIN_BACKOFF)
        elif self.wrong and self.prior_chance is not None:
            self.likelihood *= (1 - self.prior_chance) ** self.wrong
        self.right, self.wrong = False, 0
        return self.likelihood < SIGNIFICANCE

    def begin(self, unprofitable: bool) -> None:
        """Stop drafting for a while.

        Because it doesn't pay (``unprofitable``), or because drafts were wrong: then
        one more wrong draft is enough for the next backoff.
        """
        self.requests = 0
        if unprofitable:
            self.left = self.next_cost
            self.next_cost = min(BACKOFF_FACTOR * self.next_cost, MAX_COST_BACKOFF)
        else:
            self.left = self.next
            self.next = min(BACKOFF_FACTOR * self.next, MAX_BACKOFF)
            self.likelihood = SIGNIFICANCE

    def pass_step(self, requests: int) -> None:
        """Count a step of so many requests; twice or half as many end the backoff."""
        self.requests = self.requests or requests
        if self.requests < 2 * requests < 4 * self.requests:
            self.left = max(self.left - 1, 0)
        else:
            self.left, self.next_cost = 0, MIN_COST_BACKOFF
