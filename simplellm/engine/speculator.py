"""Which drafts a step checks: those that are worth what they cost.

A draft is a guess of a token that has not been sampled yet. A step computes the last
token of a request and drafts after it, and samples at each of these positions. A draft
that equals the token sampled at its position was right, and the step has given one
token more; the first wrong one and those after it are dropped. What is sampled is what
would have been without drafts, whatever they are (Daliri, Musco, Suresh 2024): noise is
a function of seed, step and token.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import mean
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from simplellm.base.request import UNKNOWN, Request
from simplellm.engine.draft_budget import (
    AcceptanceRate,
    DraftBackoff,
    Overhead,
    StepCosts,
)
from simplellm.engine.drafts import acceptance, choose_counts
from simplellm.engine.suffix_drafter import SuffixDrafter

LONGEST_DRAFT = 16  # tokens, where the number is chosen
TIMED_BACKOFF_STEPS = 4  # the last ones of a backoff, in which steps are timed again
PRIOR_ACCEPTANCE = 0.5  # rate, before any draft was checked
HEAD_PRIOR_ACCEPTANCE = 0.7  # a head's: those that are published have about that
PRIOR_WEIGHT = 2.0  # in drafts
OWN_WEIGHT = 4.0  # drafts of a request after which its own rate is half of the mix


class Drafter(Protocol):
    """Guesses how one request goes on. Each request has one of its own."""

    def propose(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
        """Up to ``most`` tokens that may follow ``tokens``, and how sure they are.

        ``tokens`` are the request's prompt and output, and begin with those of the
        last call. It is called between two steps, which wait for it. Drafts that are
        equally sure share what is known of others' acceptance; `SuffixDrafter` tells
        the length of its match.
        """


class Proposer(Protocol):
    """Makes drafts after a step, on the device, for all requests that it samples for.

    It makes ``count`` of each, and hands them to ``deliver``.
    """

    count: int
    deliver: Callable[[Request, int, int, list[int]], object]


class HeadDrafts:
    """Holds one request's drafts, which a `Proposer` made."""

    def __init__(self) -> None:
        # How long the text is that they continue, its last token, and they.
        self.latest: tuple[int, int, list[int]] = (0, 0, [])

    def propose(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
        """Up to ``most`` tokens that may follow ``tokens``, and 0: all as sure."""
        length, last, drafts = self.latest
        known = len(tokens) == length and tokens[-1] == last
        return drafts[:most] if known else [], 0


DRAFTERS: dict[str, Callable[[], Drafter]] = {"suffix": SuffixDrafter}


@dataclass
class DraftState:
    """Drafts for one request, and how often they were right."""

    drafter: Drafter
    rate: AcceptanceRate = field(default_factory=AcceptanceRate)
    length: int = 0  # of the text that the drafts continue
    drafts: list[int] = field(default_factory=list)
    confidence: int = 0  # in these drafts, as the drafter says


class Speculator:
    """Chooses each step's drafts. Plain Python, no tensors.

    ``most`` drafts of a request are checked in a step, always; or, with ``costs``, as
    many as make it give most tokens a second, and none where nothing is gained. With a
    ``proposer`` drafts are made after a step, on the device, for the one that follows;
    then `plan` says whether there are any, before the step begins.
    """

    def __init__(
        self,
        most: int,
        costs: StepCosts | None = None,
        drafter: Callable[[], Drafter] = SuffixDrafter,
        *,
        proposer: Proposer | None = None,
        serial_drafter: bool = False,
        overlaps: bool = True,
    ) -> None:
        self.most, self.costs, self.drafter = most, costs, drafter
        self.overlaps = overlaps  # requests' steps, where their drafts are made
        self.serial_drafter = serial_drafter  # makes them one request after the other
        self.draft_costs = StepCosts({1: 0.0})  # of a draft for so many requests
        # Tokens of a step at most, where drafts follow.
        self.max_verify_tokens: int | None = None
        self.proposer = proposer
        if proposer is not None:
            proposer.deliver = self.receive
        self.draft_states: WeakKeyDictionary[Request, DraftState] = WeakKeyDictionary()
        self.rates: dict[int, AcceptanceRate] = {}  # all requests', by confidence
        self.backoff = DraftBackoff()
        # Of steps without drafts, which may overlap, and of those with some.
        self.overheads = Overhead(), Overhead()
        self.checked: Counter[int] = Counter()  # by position
        self.accepted: Counter[int] = Counter()  # the right ones

    def _state_of(self, request: Request) -> DraftState:
        state = self.draft_states.get(request)
        if state is None:
            state = self.draft_states[request] = DraftState(self.drafter())
        return state

    def _update(self, request: Request, tokens: Sequence[int]) -> DraftState:
        """Guess what follows ``tokens``, the request's as far as they are known.

        Learns first from what has followed what was guessed before: a draft need not
        have been checked for that.
        """
        state = self._state_of(request)
        if state.length == len(tokens):
            return state
        if state.drafts:
            self._learn(state, *acceptance(state.drafts, tokens[state.length :]))
        state.length = len(tokens)
        state.drafts, state.confidence = state.drafter.propose(tokens, self.most)
        return state

    def _learn(self, state: DraftState, right: int, tried: int) -> None:
        """Count drafts of a request: how many were right, of how many that's known."""
        self.backoff.learn(right, tried, self._chance(state))
        for rate in (state.rate, self._shared_rate(state.confidence)):
            rate.learn(right, tried)

    def receive(
        self, request: Request, length: int, last: int, drafts: list[int]
    ) -> None:
        """Take drafts for a request whose text has this length and this last token.

        If the text has changed since, the drafter drops them.
        """
        drafter = self._state_of(request).drafter
        assert isinstance(drafter, HeadDrafts)  # as beside any proposer
        drafter.latest = length, last, drafts

    def count_drafts(self, request: Request, checked: int, right: int) -> None:
        """A step has checked drafts of a request, of which so many were right."""
        self.checked.update(range(1, checked + 1))
        self.accepted.update(range(1, right + 1))
        request.draft_counts = add_step_counts(request.draft_counts, checked, right)
        if self.proposer is not None and request.overlaps_drafts:
            state = self._state_of(request)
            state.drafts = []  # nobody learns from these again
            self._learn(state, right, min(right + 1, checked))

    def plan(self, requests: Sequence[Request], max_drafts: int) -> int:
        """Choose how many drafts are made of each of ``requests`` after the next step.

        The step after it checks them, at most ``max_drafts`` in all. Every request
        gets the same number, by the mean of their acceptance. 0: none are made.
        """
        if self.proposer is None:
            return 0
        self.proposer.count = 0 if self.backoff.left else self.most
        if self.costs is not None and requests and not self.backoff.left:
            rows = len(requests)
            chance = mean(self._chance(self._state_of(one)) for one in requests)
            if self.max_verify_tokens is not None:
                max_drafts = min(max_drafts, self.max_verify_tokens - rows)
            offered = max(min(self.most, max_drafts // rows), 0)
            costs = self._step_costs(rows, rows)
            cost = lambda each: costs(rows * each)  # noqa: E731
            (count,) = choose_counts([chance], [offered], 1, offered, cost)
            self.proposer.count = count
            if not count:  # later it is tried again
                self._give_up(unprofitable=True)
        return self.proposer.count

    def _give_up(self, unprofitable: bool = False) -> None:
        """Make no drafts for a while, and then think better of them."""
        self.backoff.begin(unprofitable)
        if self.proposer is not None:
            self.proposer.count = 0
        states = self.draft_states.values()
        for rate in (*self.rates.values(), *(state.rate for state in states)):
            rate.fade()
        self.overheads[1].fade()

    def backs_off(self, requests: int) -> bool:
        """Whether the next step, of so many requests, has nothing to do with drafts.

        Counts it as one of the backoff. In the last ones steps are timed again.
        """
        if self.backoff.left:
            self.backoff.pass_step(requests)
        return self.backoff.left >= TIMED_BACKOFF_STEPS

    def close(self) -> None:
        """Let go of what makes drafts, and of its memory: for good. The counts stay."""
        self.proposer = None
        del self.drafter
        self.draft_states.clear()

    def draft_stats(self) -> dict[str, Any]:
        """The counts for `Stats`."""
        stats: dict[str, Any] = {"drafts": self.checked[1]}
        kinds = {"draft_tokens": self.checked, "accepted_tokens": self.accepted}
        for name, counts in kinds.items():
            stats[name] = {str(position): n for position, n in sorted(counts.items())}
        return stats

    def _shared_rate(self, confidence: int) -> AcceptanceRate:
        return self.rates.setdefault(confidence.bit_length(), AcceptanceRate())

    def _chance(self, state: DraftState) -> float:
        """How likely a draft is right if those before it are."""
        prior = PRIOR_ACCEPTANCE if self.proposer is None else HEAD_PRIOR_ACCEPTANCE
        shared = self._shared_rate(state.confidence).with_prior(prior, PRIOR_WEIGHT)
        return state.rate.with_prior(shared, OWN_WEIGHT)

    def should_wait(self, request: Request) -> bool:
        """Whether a request should let a step pass until its last token is known.

        Only then drafts can follow it; else it may have the next step at once.
        """
        if request.tokens[-1] != UNKNOWN:
            return False
        if self.proposer is not None:  # it has them on the device
            return self.proposer.count > 0 and not request.overlaps_drafts
        if self.serial_drafter:
            return True
        request.tokens.pop()  # for now: a copy of a long text would cost more
        try:
            state = self._update(request, request.tokens)
        finally:
            request.tokens.append(UNKNOWN)
        return bool(state.drafts) and (
            self.costs is None or self._chance(state) > PRIOR_ACCEPTANCE
        )

    def choose(
        self,
        requests: Sequence[Request],
        computed: int,
        max_drafts: int,
        made: Mapping[int, int] | None = None,
    ) -> list[list[int]]:
        """The drafts of each of ``requests``, whose next step computes one token.

        At most ``max_drafts`` in all. The step computes ``computed`` tokens without
        them. A request whose last token isn't known gets none, unless so many of its
        drafts were ``made`` on the device, by its number: in place of these come zeros.
        """
        states: list[DraftState | None] = []
        offered: list[int] = []
        for request in requests:
            left = max(request.max_tokens - request.num_output - 1, 0)
            state, number = None, 0
            if made and request.request_id in made and not self.backoff.left:
                state, number = self._state_of(request), made[request.request_id]
            elif left and not self.backoff.left and request.tokens[-1] != UNKNOWN:
                state = self._update(request, request.tokens)
                number = len(state.drafts)
            states.append(state)
            offered.append(min(number, left))
        if self.costs is not None and not self.backoff.left and self.backoff.end_step():
            self._give_up()
            return [[] for _ in requests]
        drafts: list[list[int]] = []
        counts = self._choose_counts(states, offered, computed, max_drafts)
        useless = any(offered) and not any(counts)
        if self.serial_drafter and self.costs is not None and useless:
            self._give_up(unprofitable=True)  # they have been made for nothing
        for request, own, count in zip(requests, states, counts, strict=True):
            unknown = request.tokens[-1] == UNKNOWN
            drafts.append([0] * count if unknown or not own else own.drafts[:count])
        return drafts

    def _choose_counts(
        self,
        states: Sequence[DraftState | None],
        offered: Sequence[int],
        computed: int,
        max_drafts: int,
    ) -> list[int]:
        """How many drafts of each request to check, of those ``offered``."""
        if self.costs is None:
            counts = []
            for number in offered:
                counts.append(min(number, max_drafts))
                max_drafts -= counts[-1]
            return counts
        chances = [self._chance(state) if state else 0.0 for state in states]
        cost = self._step_costs(computed, max(1, len(states)))
        return choose_counts(chances, offered, computed, max_drafts, cost)

    def _step_costs(self, computed: int, requests: int) -> Callable[[int], float]:
        """Seconds of a step of ``requests``, by its number of tokens.

        ``computed`` are no drafts; with drafts it takes no less than without.
        """
        plain, drafting = self.overheads
        fixed = plain.at(0)
        least = self._cost_alone(computed, 0, requests, 0) + fixed

        def cost(tokens: int) -> float:
            drafts = tokens - computed
            if not drafts:
                return least
            each = drafts / requests
            if self.proposer is not None:  # made for all at once
                each = ceil(each)
            # What was measured counts for less the fewer steps it stems from.
            overhead = drafting.count * drafting.at(each) + fixed
            alone = self._cost_alone(tokens, drafts, requests, each)
            return max(alone + overhead / (drafting.count + 1), least)

        return cost

    def _cost_alone(
        self, tokens: int, drafts: int, requests: int, each: float
    ) -> float:
        """The same, as it was measured at the start."""
        assert self.costs is not None
        # A `serial_drafter` makes all, whether they are checked or not.
        made = self.most if self.serial_drafter and drafts else each
        return self.costs(tokens) + made * self.draft_costs(requests)

    def learn_interval(
        self, tokens: int, drafts: int, seconds: float, made: int = 0
    ) -> None:
        """A step of decodes has come so long after another one like it.

        So many drafts of each request were ``made`` after it, on the device.
        """
        if self.costs is not None:
            requests = max(1, tokens - drafts)
            each = made or drafts / requests
            cost = self._cost_alone(tokens, drafts, requests, each)
            self.overheads[drafts > 0].learn(each, seconds - cost, cost)


def add_step_counts(
    counts: Sequence[tuple[int, int]], checked: int, right: int
) -> tuple[tuple[int, int], ...]:
    """``counts`` by position, of drafts checked and right, after one more step."""
    padded = [*counts, *[(0, 0)] * (checked - len(counts))]
    return tuple(
        (tried + (position < checked), came + (position < right))
        for position, (tried, came) in enumerate(padded)
    )
