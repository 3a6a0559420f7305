"""How many drafts a step checks: those that are worth what they cost.

A draft is a guess of a token that has not been sampled yet. A step computes the last
token of a request and drafts after it, and samples at each of these positions. A draft
that equals the token sampled at its position was right, and the step has given one
token more; the first wrong one and those after it are dropped. What is sampled is what
would have been without drafts, whatever they are (Daliri, Musco, Suresh 2024): noise is
a function of seed, step and token.
"""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from simplellm.base.draft_position import DraftPosition, SamplePosition
from simplellm.base.request import UNKNOWN, Request, TokenLogprobs
from simplellm.engine.drafts import accept_drafts, acceptance, choose_counts
from simplellm.engine.scheduler import ScheduledChunk, Scheduler
from simplellm.engine.suffix import SuffixDrafter

LONGEST_DRAFT = 16  # tokens, where the number is chosen
DECAY = 0.9  # of earlier drafts' weight, at each new guess
FADE = 0.5  # the same, each time that drafting backs off
SIGNIFICANCE = 0.001  # likelihood of so many wrong drafts below which that's done
BACKOFF_STEPS = 8, 512  # steps that the first backoff takes, and the longest
PRICED_STEPS = 128  # the longest, where drafts cost too much for how many run
BACKOFF_FACTOR = 4  # times as long is each backoff as the one before
TIMED_STEPS = 4  # the last ones of a backoff, in which the time of steps is noted
MOST_INTERVAL = 1.0  # seconds between steps that follow one another
PRIOR_RATE = 0.5  # of acceptance, before any draft was checked
TRAINED_RATE = 0.7  # the same, of a head's: those that are published have about that
PRIOR_WEIGHT = 2.0  # in drafts
OWN_WEIGHT = 4.0  # drafts of a request after which its own rate is half of the mix


class DraftChunk(ScheduledChunk):
    """A decode of one token, and of as many drafts after it as make up its length."""

    __slots__ = ()


class ChainedChunk(DraftChunk):
    """One that is launched before it's known how many drafts of the last were right.

    Its tokens and their positions are known on the device alone, and may be moved on by
    as many positions as the step before checks drafts: ``start`` is the first possible.
    It may have no drafts of its own.
    """

    __slots__ = ()


DRAFTING = {DraftChunk, ChainedChunk}


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


DRAFTERS: dict[str, Callable[[], Drafter]] = {"suffix": SuffixDrafter}


class StepCosts:
    """Seconds that a step of so many tokens takes: measured ones, and between them."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        self.sizes = sorted(measured)
        self.seconds: list[float] = []
        for size in self.sizes:  # more tokens never take less time
            self.seconds.append(max([measured[size], *self.seconds[-1:]]))

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
    """The share of drafts that were right, of those that came after right ones."""

    right: float = 0.0
    tried: float = 0.0

    def learn(self, right: int, tried: int) -> None:
        """Count some more; what was longer ago counts less."""
        self.right = DECAY * self.right + right
        self.tried = DECAY * self.tried + tried

    def fade(self) -> None:
        """Believe less in it, so that it's tried again."""
        self.right, self.tried = FADE * self.right, FADE * self.tried

    def mixed(self, other: float, weight: float) -> float:
        """The rate, if ``other`` was seen in ``weight`` drafts before."""
        return (self.right + weight * other) / (self.tried + weight)


@dataclass
class Overhead:
    """Seconds by which steps that follow one another take longer than they cost.

    That is the attention to what the cache holds, the making of drafts, and what the
    host has to do between steps, unless it is ahead of the device: a line by the number
    of drafts, by least squares, where what was longer ago counts less.
    """

    count: float = 0.0
    drafts: float = 0.0  # sums, of all steps
    seconds: float = 0.0
    squares: float = 0.0  # of drafts
    products: float = 0.0  # of drafts and seconds

    def learn(self, drafts: int, seconds: float) -> None:
        """Count one more step, with so many drafts."""
        seconds = max(seconds, 0.0)
        self.count = DECAY * self.count + 1
        self.drafts = DECAY * self.drafts + drafts
        self.seconds = DECAY * self.seconds + seconds
        self.squares = DECAY * self.squares + drafts**2
        self.products = DECAY * self.products + drafts * seconds

    def line(self, plain: float | None) -> tuple[float, float]:
        """Of no drafts, and of each; ``plain`` is one more point, of a step without."""
        count = self.count + (plain is not None)
        seconds = self.seconds + (plain or 0.0)
        spread = count * self.squares - self.drafts**2
        slope = 0.0
        if spread > 1e-6 * count * self.squares:  # else all had the same number
            slope = (count * self.products - self.drafts * seconds) / spread
        slope = max(slope, 0.0)
        return max((seconds - slope * self.drafts) / count, 0.0), slope


@dataclass
class DraftBackoff:
    """For how many steps nobody drafts: an exponential backoff from wrong drafts.

    It begins when so many steps in a row had only wrong drafts that this is unlikely,
    if drafts are as good as was thought before the first of these steps.
    """

    left: int = 0  # steps
    next: int = BACKOFF_STEPS[0]  # steps of the next backoff
    requests: int = 0  # that ran when it began
    # Of so many wrong drafts in a row. The first ones have no credit.
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
            self.next = max(self.next // BACKOFF_FACTOR, BACKOFF_STEPS[0])
        elif self.wrong and self.prior_chance is not None:
            self.likelihood *= (1 - self.prior_chance) ** self.wrong
        self.right, self.wrong = False, 0
        return self.likelihood < SIGNIFICANCE

    def begin(self, most: int) -> None:
        """Back off, for ``most`` steps at most.

        After that, one more wrong draft is enough for the next backoff.
        """
        self.left, self.requests = min(self.next, most), 0
        self.next = min(BACKOFF_FACTOR * self.next, BACKOFF_STEPS[1])
        self.likelihood = SIGNIFICANCE

    def pass_step(self, requests: int) -> None:
        """Count a step of so many requests; twice or half as many end the backoff."""
        self.requests = self.requests or requests
        same = self.requests < 2 * requests < 4 * self.requests
        self.left = max(self.left - 1, 0) if same else 0


@dataclass
class DraftState:
    """Drafts for one request, and how often they were right."""

    drafter: Drafter
    rate: AcceptanceRate = field(default_factory=AcceptanceRate)
    length: int = 0  # of the text that the drafts continue
    drafts: list[int] = field(default_factory=list)
    confidence: int = 0  # in these drafts, as the drafter says

    def propose(self, tokens: Sequence[int], most: int) -> None:
        """Guess what follows ``tokens``."""
        self.drafts, self.confidence = self.drafter.propose(tokens, most)


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
        costly: bool = False,
    ) -> None:
        self.most, self.costs, self.drafter = most, costs, drafter
        self.costly = costly  # a draft takes `seconds`, one request after the other
        self.proposer, self.seconds = proposer, 0.0  # of a draft
        if proposer is not None:
            proposer.deliver = self.receive
        self.draft_states: WeakKeyDictionary[Request, DraftState] = WeakKeyDictionary()
        self.rates: dict[int, AcceptanceRate] = {}  # all requests', by confidence
        self.backoff = DraftBackoff()
        # Of steps without drafts, which may overlap, and of those with some.
        self.overheads = Overhead(), Overhead()
        self.drafts = 0  # times that a step has checked some
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
            right, tried = acceptance(state.drafts, tokens[state.length :])
            self.backoff.learn(right, tried, self._chance(state))
            for rate in (state.rate, self._shared_rate(state.confidence)):
                rate.learn(right, tried)
        state.length = len(tokens)
        state.propose(tokens, self.most)
        return state

    def receive(
        self, request: Request, length: int, last: int, drafts: list[int]
    ) -> None:
        """Take drafts for a request whose text has this length and this last token.

        If the text has changed since, the drafter drops them.
        """
        drafter: Any = self._state_of(request).drafter
        drafter.latest = length, last, drafts

    def learn(self, request: Request, checked: int, right: int) -> None:
        """A step has checked so many drafts, which were made on the device."""
        state = self._state_of(request)
        tried = min(right + 1, checked)
        state.drafts = []  # nobody learns from these again
        self.backoff.learn(right, tried, self._chance(state))
        for rate in (state.rate, self._shared_rate(state.confidence)):
            rate.learn(right, tried)

    def plan(self, requests: Sequence[Request], max_drafts: int) -> int:
        """Choose how many drafts are made of each of ``requests`` after the next step.

        They are for the step after it, which checks at most ``max_drafts``. 0: none are
        made.
        """
        if self.proposer is None:
            return 0
        self.proposer.count = 0 if self.backoff.left else self.most
        if self.costs is not None and requests and not self.backoff.left:
            states = [self._state_of(request) for request in requests]
            offered = [self.most] * len(states)
            counts = self._choose_counts(states, offered, len(states), max_drafts)
            self.proposer.count = max(counts)
            if not any(counts):  # later it is tried again
                self._give_up(PRICED_STEPS)
        return self.proposer.count

    def _give_up(self, most: int = BACKOFF_STEPS[1]) -> None:
        """Make no drafts for a while, and then think better of them."""
        self.backoff.begin(most)
        if self.proposer is not None:
            self.proposer.count = 0
        states = self.draft_states.values()
        for rate in (*self.rates.values(), *(state.rate for state in states)):
            rate.fade()

    def backs_off(self, requests: int) -> bool:
        """Whether the next step, of so many requests, has nothing to do with drafts.

        Counts it as one of the backoff. In the last ones steps are timed again.
        """
        if self.backoff.left:
            self.backoff.pass_step(requests)
        return self.backoff.left >= TIMED_STEPS

    def count_step(self, checked: int, right: int) -> None:
        """Count drafts of a request that a step has checked, and the right ones."""
        self.drafts += 1
        self.checked.update(range(1, checked + 1))
        self.accepted.update(range(1, right + 1))

    def close(self) -> None:
        """Let go of what makes drafts, and of its memory. The counts stay."""
        self.proposer, self.drafter = None, SuffixDrafter
        self.draft_states.clear()

    def draft_stats(self) -> dict[str, Any]:
        """The counts for `Stats`."""
        stats: dict[str, Any] = {"drafts": self.drafts}
        kinds = {"draft_tokens": self.checked, "accepted_tokens": self.accepted}
        for name, counts in kinds.items():
            stats[name] = {str(position): n for position, n in sorted(counts.items())}
        return stats

    def _shared_rate(self, confidence: int) -> AcceptanceRate:
        return self.rates.setdefault(confidence.bit_length(), AcceptanceRate())

    def _chance(self, state: DraftState) -> float:
        """How likely a draft is right if those before it are."""
        prior = PRIOR_RATE if self.proposer is None else TRAINED_RATE
        shared = self._shared_rate(state.confidence).mixed(prior, PRIOR_WEIGHT)
        return state.rate.mixed(shared, OWN_WEIGHT)

    def waits(self, request: Request) -> bool:
        """Whether a request should let a step pass until its last token is known.

        Only then drafts can follow it; else it may have the next step at once.
        """
        if request.tokens[-1] != UNKNOWN:
            return False
        if self.proposer is not None:  # it has them on the device
            return self.proposer.count > 0 and not request.chains
        if self.costly:
            return True
        request.tokens.pop()  # for now: a copy of a long text would cost more
        try:
            state = self._update(request, request.tokens)
        finally:
            request.tokens.append(UNKNOWN)
        return bool(state.drafts) and (
            self.costs is None or self._chance(state) > PRIOR_RATE
        )

    def choose(
        self,
        requests: Sequence[Request],
        computed: int,
        max_drafts: int,
        made: Mapping[int, int] = MappingProxyType({}),
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
            if request.request_id in made and not self.backoff.left:
                state = self._state_of(request)
                states.append(state)
                offered.append(min(made[request.request_id], left))
                continue
            if left == 0 or self.backoff.left or request.tokens[-1] == UNKNOWN:
                states.append(None)
                offered.append(0)
                continue
            state = self._update(request, request.tokens)
            states.append(state)
            offered.append(min(len(state.drafts), left))
        if self.costs is not None and not self.backoff.left and self.backoff.end_step():
            self._give_up()
            return [[] for _ in requests]
        drafts: list[list[int]] = []
        counts = self._choose_counts(states, offered, computed, max_drafts)
        if self.costly and self.costs is not None and any(offered) and not any(counts):
            self._give_up()  # they have been made for nothing
        for request, own, count in zip(requests, states, counts, strict=True):
            unknown = request.tokens[-1] == UNKNOWN
            drafts.append([0] * count if unknown or not own else own.drafts[:count])
        return drafts

    def _cost(self, tokens: int, drafts: int) -> float:
        """Seconds of a step of so many ``tokens``, of which some are ``drafts``."""
        assert self.costs is not None
        plain, drafting = self.overheads
        cost = self.costs(tokens)
        fixed = plain.seconds / plain.count if plain.count else None
        if drafting.count:
            least, each = drafting.line(fixed)
            # Until a step without drafts was timed, it takes what others have at least.
            fixed = least if fixed is None else fixed
            if drafts:  # such steps never overlap more than others
                return cost + max(least + each * drafts, fixed)
        made = -(-drafts // max(1, tokens - drafts)) * self.seconds
        if self.costly and drafts:  # of all, whether they are checked or not
            made = self.most * max(1, tokens - drafts) * self.seconds
        return cost + (fixed or 0.0) + made

    def learn_interval(self, tokens: int, drafts: int, seconds: float) -> None:
        """A step of decodes has come so long after another one like it."""
        if self.costs is not None:
            self.overheads[drafts > 0].learn(drafts, seconds - self.costs(tokens))

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

        def cost(tokens: int) -> float:
            return self._cost(tokens, tokens - computed)

        return choose_counts(chances, offered, computed, max_drafts, cost)


@dataclass(eq=False)
class SpeculativeScheduler(Scheduler):
    """A scheduler whose decodes check drafts, as far as there is room.

    How many tokens a request has after a step that checks drafts isn't known before its
    results come. If its drafts are made on the device, its next step is launched all
    the same, as a `ChainedChunk`; else the request has no part in it.
    """

    _: KW_ONLY
    speculator: Speculator
    max_drafts: int  # that a step checks

    def __post_init__(self) -> None:
        super().__post_init__()
        # When the last results came, and of which requests, if they were decodes.
        self._last: tuple[float, Any] = (0.0, None)
        # The latest steps, and whether drafts are made after them.
        self._steps: deque[tuple[Any, bool]] = deque(maxlen=3)
        # Of the step launched last, by requests' numbers: drafts that it checks.
        self._checking: dict[int, int] = {}
        # Those whose step is being launched before the one in flight is known.
        self._launching: set[int] = set()
        self._made = 0  # drafts of each of these requests that are made after it

    def _ready(self, request: Request, busy: set[int]) -> bool:
        """Whether a running request can have a part in the step."""
        if not super()._ready(request, busy):
            return False
        if request.tokens[-1] != UNKNOWN:
            return True
        speculator, checking = self.speculator, self._checking
        if checking and (checked := checking.get(request.request_id, 0)):
            may_end = request.num_output + checked >= request.max_tokens
            known = not request.chains or speculator.proposer is None
            if known or may_end or speculator.backoff.left >= TIMED_STEPS:
                return False
        return speculator.backoff.left > 0 or not speculator.waits(request)

    def schedule(self) -> list[ScheduledChunk]:
        """What to compute now: decodes without drafts, with them, then prompts.

        Nobody is preempted for a draft.
        """
        self._launching = set()
        if self.speculator.backs_off(len(self.running)):
            self._last = (0.0, None)
            return super().schedule()
        scheduled = super().schedule()
        decodes = [c for c in scheduled if c.length == 1 and c.samples]
        computed = sum(chunk.length for chunk in scheduled)
        max_drafts = min(self.max_num_batched_tokens - computed, self.max_drafts)
        requests = [chunk.request for chunk in decodes]
        offers: Sequence[Sequence[int]] = ()
        if decodes:
            made = self._drafts_made(requests)
            offers = self.speculator.choose(requests, computed, max_drafts, made)
        changed: dict[int, ScheduledChunk | None] = {}
        for chunk, drafts in zip(decodes, offers, strict=True):
            if drafts or chunk.request.tokens[-1] == UNKNOWN:
                own = self._with_drafts(chunk, drafts)
                if own is not chunk:
                    changed[chunk.request.request_id] = own
        if changed:
            every = (changed.get(c.request.request_id, c) for c in scheduled)
            kept = [chunk for chunk in every if chunk is not None]
            kinds: list[list[ScheduledChunk]] = [[], [], []]
            for chunk in kept:
                drafting = isinstance(chunk, DraftChunk)
                kinds[0 if chunk.length == 1 else 1 if drafting else 2].append(chunk)
            scheduled = [*kinds[0], *kinds[1], *kinds[2]]
        sampling = [chunk for chunk in scheduled if chunk.samples]
        ahead = self.speculator.plan([c.request for c in sampling], self.max_drafts)
        for chunk in sampling if ahead else ():
            self._allocate_ahead(chunk, ahead)
        for chunk in scheduled:
            if isinstance(chunk, ChainedChunk):
                self._launching.add(chunk.request.request_id)
        self._steps.append((scheduled, ahead > 0))
        return scheduled

    def _drafts_made(self, requests: Sequence[Request]) -> dict[int, int]:
        """Drafts on the device, by the numbers of the requests that can check them."""
        if not self._made:
            return {}
        made = {}
        for request in requests:
            if request.tokens[-1] == UNKNOWN and request.chains:
                # As many as it has tokens left, if the last drafts are right.
                checked = self._checking.get(request.request_id)
                if checked is not None:
                    left = request.max_tokens - request.num_output - checked - 1
                    made[request.request_id] = max(0, min(left, self._made))
        return made

    def _with_drafts(
        self, chunk: ScheduledChunk, drafts: Sequence[int]
    ) -> ScheduledChunk | None:
        """The decode with its drafts, or without if there are no pages for them.

        None if it has to wait until its position is known.
        """
        request, start, _, samples = chunk
        if request.tokens[-1] != UNKNOWN:
            length = 1 + len(drafts)
            if not self.manager.allocate(request.request_id, start + length):
                return chunk
            request.drafts = drafts
            return DraftChunk(request, start, length, samples)
        checked = self._checking.get(request.request_id, 0)
        if not checked and not drafts:
            return chunk  # its position is known
        for length in (1 + len(drafts), 1):
            end = start + checked + length
            if self.manager.allocate(request.request_id, end):
                return ChainedChunk(request, start, length, samples)
        return None

    def _allocate_ahead(self, chunk: ScheduledChunk, count: int) -> None:
        """Pages for drafts that are made after the step, if there are any."""
        request = chunk.request
        end = chunk.start + chunk.length
        if isinstance(chunk, ChainedChunk):
            end += self._checking.get(request.request_id, 0)
        end = max(end, min(end + count, request.num_prompt + request.max_tokens))
        self.manager.allocate(request.request_id, end)

    def update_after_launch(self, scheduled: Sequence[ScheduledChunk]) -> None:
        """Book a step whose results will come; of drafts, nothing is sure yet."""
        proposer, drafting = self.speculator.proposer, has_drafts(scheduled)
        self._made = 0 if proposer is None else proposer.count
        sure = scheduled
        if drafting:
            sure = [without_drafts(chunk, False) for chunk in scheduled]
        super().update_after_launch(sure)
        self._launching, self._checking = set(), {}
        if drafting or self._made:
            self._checking = {
                chunk.request.request_id: num_drafts(chunk)
                for chunk in scheduled
                if chunk.samples
            }

    def _note_interval(self, scheduled: Sequence[ScheduledChunk]) -> None:
        """The results of a step have come, perhaps after those of one like it."""
        now, drafts = time.monotonic(), sum(map(num_drafts, scheduled))
        tokens = sum(chunk.length for chunk in scheduled)
        decodes = all(c.length == 1 or isinstance(c, DraftChunk) for c in scheduled)
        made = next((made for own, made in self._steps if own is scheduled), None)
        kind = drafts > 0, made
        then, before = self._last
        self._last = now, kind if decodes else None
        # One that has either drafts before it or others after it is of neither kind.
        pure = self.speculator.proposer is None or made == (drafts > 0)
        if decodes and pure and before == kind and now - then < MOST_INTERVAL:
            self.speculator.learn_interval(tokens, drafts, now - then)

    @staticmethod
    def _keep(
        request: Request, first: int, tokens: Sequence[int]
    ) -> tuple[str | None, Sequence[int]]:
        """As `Scheduler._keep`; what a later step samples stays behind the tokens."""
        if len(tokens) == 1 or not request.chains:
            return Scheduler._keep(request, first, tokens)
        later = request.tokens[first + 1 :]
        del request.tokens[first + 1 :]
        kept = Scheduler._keep(request, first, tokens)
        request.tokens += later
        return kept

    def update_from_output(
        self, scheduled: Sequence[ScheduledChunk], tokens: Sequence[Sequence[int]]
    ) -> list[tuple[Request, Sequence[int]]]:
        """Book the results of a step: of drafts, the right ones and one token more."""
        if self.speculator.backoff.left < TIMED_STEPS:
            self._note_interval(scheduled)
        if not has_drafts(scheduled):
            return super().update_from_output(scheduled, tokens)
        sure = [without_drafts(chunk, True) for chunk in scheduled]
        new = super().update_from_output(sure, tokens)
        sampling = [chunk for chunk in scheduled if chunk.samples]
        for chunk, sampled in zip(sampling, tokens, strict=True):
            if not isinstance(chunk, DraftChunk):
                continue
            request, drafts = chunk.request, num_drafts(chunk)
            right = 0 if request.forced else len(sampled) - 1
            if not isinstance(chunk, ChainedChunk):
                request.drafts = ()
            if drafts:
                self._count_drafts(request, drafts, right)
            # Unless it was preempted meanwhile, or has ended.
            table = self.manager.tables.get(request.request_id)
            if table is None or request.finish_reason is not None:
                continue
            request.num_computed_tokens += right
            computed = request.num_computed_tokens
            self.manager.commit(request.request_id, request.tokens, computed)
            later = request.request_id in self._launching
            if not later and request.tokens[-1] != UNKNOWN:
                pages = len(table.groups[0])
                self.manager.truncate(request.request_id, computed)
                table.shortened += len(table.groups[0]) < pages
        return new

    def _count_drafts(self, request: Request, checked: int, right: int) -> None:
        """A step has checked drafts of a request, of which so many were right."""
        speculator = self.speculator
        speculator.count_step(checked, right)
        counts = request.draft_counts
        request.draft_counts = add_step_counts(counts, checked, right)
        if speculator.proposer is not None and request.chains:
            speculator.learn(request, checked, right)


def add_step_counts(
    counts: Sequence[tuple[int, int]], checked: int, right: int
) -> tuple[tuple[int, int], ...]:
    """``counts`` by position, of drafts checked and right, after one more step."""
    padded = [*counts, *[(0, 0)] * (checked - len(counts))]
    return tuple(
        (tried + (position < checked), came + (position < right))
        for position, (tried, came) in enumerate(padded)
    )


def has_drafts(scheduled: Sequence[ScheduledChunk]) -> bool:
    """Whether a step checks any, or has a request whose last ones aren't known."""
    return not DRAFTING.isdisjoint(map(type, scheduled))


def num_drafts(chunk: ScheduledChunk) -> int:
    """How many drafts of its request a step checks."""
    return chunk.length - 1 if isinstance(chunk, DraftChunk) else 0


def without_drafts(chunk: ScheduledChunk, launched: bool) -> ScheduledChunk:
    """The part of ``chunk`` that computes the request's own tokens.

    Once the results of a step that was ``launched`` are there, all earlier ones are
    known, so that its own tokens are the first that aren't.
    """
    if not isinstance(chunk, DraftChunk):
        return chunk
    request, start, _, samples = chunk
    if isinstance(chunk, ChainedChunk) and request.finish_reason is None:
        start = request.num_computed_tokens
        if launched:
            start = request.tokens.index(UNKNOWN, chunk.start) - 1
    return ScheduledChunk(request, start, 1, samples)


def sample_positions(chunk: ScheduledChunk) -> list[SamplePosition]:
    """Where a step samples for ``chunk``: after its tokens, and after each draft.

    The request itself stands for all of them if nothing there depends on its drafts.
    """
    if not chunk.samples:
        return []
    request, drafts = chunk.request, num_drafts(chunk)
    if request.chains:
        return [request] * (1 + drafts)
    ends, guessed = range(1, drafts + 1), request.drafts
    return [request, *(DraftPosition(request, guessed[:end]) for end in ends)]


def verify_drafts(
    rows: Sequence[SamplePosition],
    tokens: Sequence[list[int]],
    logprobs: Sequence[list[TokenLogprobs] | None],
    accepted: Mapping[int, int] = MappingProxyType({}),
) -> tuple[list[list[int]], list[list[TokenLogprobs] | None]]:
    """Of each request the tokens that are sure, and their logprobs.

    Those of one request stand together, the one without drafts first. How many drafts
    of some requests are ``accepted`` is known from the device, by their numbers.
    """
    new: list[list[int]] = []
    scored: list[list[TokenLogprobs] | None] = []
    parts = zip(rows, tokens, logprobs, strict=True)
    for request_id, group in groupby(parts, key=lambda part: part[0].request_id):
        (request, sure, scores), *rest = group
        sampled, drafts = [*sure], list[int]()
        scores = None if scores is None else [*scores]
        for row, more, own in rest:
            if request.forced or not getattr(row, "valid", True):
                break
            if isinstance(row, DraftPosition):
                drafts.append(row.drafts[-1])
            sampled += more
            if scores is not None and own is not None:
                scores += own
        if request.chains and request_id in accepted:
            del sampled[accepted[request_id] + 1 :]
        elif request.chains and rest:
            sampled = accept_drafts(request.drafts, sampled)
        elif drafts:
            sampled = accept_drafts(drafts, sampled)
        new.append(sampled)
        scored.append(scores if scores is None else scores[: len(sampled)])
    return new, scored
