"""Chapter 9: continuous batching."""

import random
from statistics import mean

from simplellm.base.request import UNKNOWN, Request
from simplellm.engine.page_manager import PageManager
from simplellm.engine.scheduler import ScheduledChunk, Scheduler

STEPS = 500  # more than any of these schedules takes


def whole(candidate, ours):
    """The reader's class, with our methods where it has none of its own yet."""
    if issubclass(candidate, ours):
        return candidate
    return type(candidate.__name__, (candidate, ours), {})


def of(scheduled):
    """The length of each chunk by its request's id."""
    return {chunk.request.request_id: chunk.length for chunk in scheduled}


def book(scheduler, scheduled):
    """Book a step as if it had been computed; every token is 7."""
    for request, start, length, _ in scheduled:
        table = scheduler.manager.tables.get(request.request_id)
        held = 4 * len(table.groups[0]) if table is not None else 0
        assert held >= start + length, (
            f"request {request.request_id} has a chunk up to token {start + length} "
            f"and pages for {held}: ask `_make_room` before you plan it"
        )
    scheduler.update_after_launch(scheduled)
    scheduler.update_from_output(
        scheduled, [[7]] * sum(chunk.samples for chunk in scheduled)
    )


def numbered(*sizes):
    """Requests 0, 1, … from pairs (tokens of the prompt, tokens to generate)."""
    return [
        Request([number + 1] * prompt, most, request_id=number)
        for number, (prompt, most) in enumerate(sizes)
    ]


def make(kind, pages=100, seqs=8, budget=16, **limits):
    """A scheduler over pages of 4 that shares nothing."""
    manager = PageManager(pages, 4, enable_caching=False)
    limits = dict(max_num_seqs=seqs, max_num_batched_tokens=budget) | limits
    return kind(manager, **limits)


def check_Scheduler__make_room(candidate):
    """Four requests of two full pages each, and a pool of eight pages."""
    kind = whole(candidate, Scheduler)

    def full(pages=8, urgent=None, tokens=8):
        scheduler = make(kind, pages, budget=64)
        four = numbered(*[(tokens, 9)] * 4)
        if urgent is not None:
            four[urgent].priority = -1
        scheduler.add(four)
        scheduled: list[ScheduledChunk] = []
        scheduler._admit(scheduled, 64)
        scheduler.update_after_launch(scheduled)
        return scheduler, four

    def state(four):
        return [request.preemptions for request in four]

    scheduler, four = full(pages=9)
    assert scheduler._make_room(four[1], 1, set()) is True, (
        "one page is free, so there is room: say so"
    )
    assert state(four) == [0] * 4, "there was room, and yet somebody was preempted"
    scheduler, four = full(tokens=7)
    made = scheduler._make_room(four[1], 1, set())
    assert made is True and state(four) == [0] * 4, (
        "request 1 has computed 7 tokens, and one more just fills its 2 pages of 4: it "
        "has that room already. Ask `manager.allocate` for num_computed_tokens + "
        "length, not for more, and preempt nobody before it says False"
    )
    scheduler, four = full()
    made = scheduler._make_room(four[1], 1, set())
    assert state(four) == [0, 0, 0, 1], (
        "no page is free: the last in order gives way, request 3 of four; preempted "
        f"were {[n for n, times in enumerate(state(four)) if times]}"
    )
    assert made is True, "request 3 gave its pages, so now there is room: try again"
    assert len(scheduler.manager.tables[1].groups[0]) == 3, (
        "you say there is room, and request 1 has not got a third page: "
        "`manager.allocate` has to succeed once more after the preemption"
    )
    assert four[3] in scheduler.waiting, "who gave way waits again"

    scheduler, four = full()
    made = scheduler._make_room(four[1], 1, {0, 3})
    assert state(four) == [0, 0, 1, 0], (
        "request 3 has a chunk in this step and is spared: request 2 is the last "
        f"without; preempted were {[n for n, t in enumerate(state(four)) if t]}"
    )
    scheduler, four = full()
    held = len(scheduler.manager.tables[1].groups[0])
    made = scheduler._make_room(four[1], 1, {0, 2, 3})
    assert made is False and state(four) == [0] * 4, (
        "all others have work, so request 1 itself is the last without: it does not "
        "preempt itself, but returns False and waits a step"
    )
    assert len(scheduler.manager.tables[1].groups[0]) == held, "it keeps what it has"
    scheduler, four = full()
    made = scheduler._make_room(four[3], 1, set())
    assert made is False and state(four) == [0] * 4, (
        "request 3 is the last in order itself: nobody ahead of it gives way, so it "
        "returns False and waits"
    )
    scheduler, four = full(urgent=3)
    made = scheduler._make_room(four[1], 1, set())
    assert state(four) == [0, 0, 1, 0], (
        "request 3 came last and is urgent, so it is first in order: request 2 is the "
        f"last; preempted were {[n for n, t in enumerate(state(four)) if t]}"
    )
    scheduler, four = full()
    made = scheduler._make_room(four[0], 20, set())
    assert state(four) == [0, 1, 1, 1] and made is True, (
        "request 0 needs five more pages and each preemption gives two: preempt until "
        f"there is room, three times here and not {sum(state(four))}"
    )

    scheduler = make(kind, 8, prefill_chunk=8)
    two = numbered((20, 9), (8, 9))
    scheduler.add(two)
    for budget in (4, 8):  # a chunk of the first one's prompt, all of the second one's
        begun: list[ScheduledChunk] = []
        scheduler._admit(begun, budget)
        scheduler.update_after_launch(begun)
    scheduler.manager.add(99, [0])
    scheduler.manager.allocate(99, 16)  # four pages, so one is left
    made = scheduler._make_room(two[0], 4, set())
    assert made is True and state(two) == [0, 0], (
        "4 of request 0's 20 tokens are computed, and its next chunk of 4 needs the "
        "one page that is free: expected True and nobody preempted. Count from "
        "num_computed_tokens: of a prompt in chunks that isn't all tokens but one"
    )


def check_Scheduler_schedule(candidate):
    """Pencil and paper's steps, then rules that every step keeps."""
    kind = not_busy_yet(whole(candidate, Scheduler))
    decodes_come_first(kind)
    steps_of_the_drawing(kind)
    under_way_before_new(kind)
    prompts_in_chunks(kind)
    from_front_to_back(kind)
    no_chunk_of_no_tokens(kind)
    no_work_without_a_token_to_compute(kind)
    random_crowds(kind)


def not_busy_yet(kind):
    """A scheduler that refuses to make room for a request that is marked as busy."""

    def _make_room(self, request, length, busy):
        assert request.request_id not in busy, (
            f"request {request.request_id} is in busy before `_make_room` is asked for "
            "it: then it counts as one that has a chunk, and if all others do, nobody "
            "is left to give way. Add it once it has its chunk"
        )
        return kind._make_room(self, request, length, busy)

    return type(kind.__name__, (kind,), {"_make_room": _make_room})


def decodes_come_first(kind):
    """A prompt that is first in line and needs more than a step leaves."""
    scheduler = make(kind, budget=10, prefill_chunk=8)
    *others, long = numbered((1, 9), (1, 9), (1, 9), (40, 2))
    long.priority = -1
    scheduler.add(others)
    book(scheduler, scheduler.schedule())
    scheduler.add([long])
    scheduled = scheduler.schedule()
    assert of(scheduled).get(3) == 7, (
        "three requests decode and a prompt of 40 tokens comes: of a budget of 10 it "
        f"starts with the 7 that the decodes leave; you have {of(scheduled)}"
    )
    book(scheduler, scheduled)
    scheduled = scheduler.schedule()
    expected = {0: 1, 1: 1, 2: 1, 3: 7}
    assert of(scheduled) == expected, (
        "three requests decode, an urgent prompt before them in line has 33 tokens "
        "missing: of a budget of 10 the decodes take one each, the prompt the rest; "
        f"yours is {of(scheduled)}"
    )
    assert list(of(scheduled))[-1] == 3, (
        "the decodes come first in the list as well: a batch expects them there"
    )


def steps_of_the_drawing(kind):
    """A, B and C decode; D has a prompt of 20 tokens and E one of 6."""
    scheduler = make(kind, prefill_chunk=16)
    requests = numbered((1, 9), (1, 9), (1, 9), (20, 9), (6, 9))
    scheduler.add(requests[:3])
    book(scheduler, scheduler.schedule())
    scheduler.add(requests[3:])
    plan = [
        {0: 1, 1: 1, 2: 1, 3: 13},
        {0: 1, 1: 1, 2: 1, 3: 7, 4: 6},
        {0: 1, 1: 1, 2: 1, 3: 1, 4: 1},
    ]
    for step, expected in enumerate(plan, start=1):
        scheduled = scheduler.schedule()
        found = of(scheduled)
        assert sum(found.values()) <= 16, (
            f"step {step} of the drawing computes {sum(found.values())} tokens, and "
            "the budget is 16: what a chunk takes is gone for those after it"
        )
        assert found == expected, (
            f"step {step} of the drawing is {expected}; yours is {found}"
        )
        book(scheduler, scheduled)


def under_way_before_new(kind):
    """A long prompt that has begun, and a short one that comes later."""
    scheduler = make(kind, budget=8, prefill_chunk=8)
    long, short = numbered((20, 2), (4, 2))
    scheduler.add([long])
    book(scheduler, scheduler.schedule())
    scheduler.add([short])
    found = of(scheduler.schedule())
    assert found == {0: 8}, (
        "a prompt of 20 tokens has begun when one of 4 arrives, and the budget is 8: "
        f"who is under way goes on before anybody is admitted; yours is {found}"
    )


def from_front_to_back(kind):
    """Two requests of which the first gets what there is."""
    scheduler = make(kind, budget=12, prefill_chunk=8)
    scheduler.add(numbered((20, 2), (20, 2)))
    book(scheduler, scheduler.schedule())
    found = of(scheduler.schedule())
    assert found == {0: 8, 1: 4}, (
        "two prompts are under way, with chunks of up to 8 tokens and a budget of 12: "
        "the first in line gets 8 and the second 4, since you go through self.running "
        f"from front to back; yours is {found}"
    )
    scheduler = make(kind, pages=3)
    scheduler.add(numbered((4, 3), (4, 3)))
    book(scheduler, scheduler.schedule())
    found = of(scheduler.schedule())
    assert found == {0: 1}, (
        "two requests decode, each needs a new page, and one page is free: the first "
        "in line gets it, since you go through self.running from front to back; yours "
        f"is {found}"
    )


def prompts_in_chunks(kind):
    """A prompt alone, with budget to spare."""
    scheduler = make(kind, prefill_chunk=5)
    scheduler.add(numbered((14, 3)))
    plan, found = [{0: 5}, {0: 5}, {0: 4}], []
    for _ in plan:
        scheduled = scheduler.schedule()
        found.append(of(scheduled))
        book(scheduler, scheduled)
    assert found == plan, (
        "a prompt of 14 tokens, a prefill_chunk of 5 and a budget of 16: the steps are "
        f"{plan}, yours {found}. How much of a prompt a step computes is what "
        "`_num_new_tokens` says, not all that the budget allows"
    )


def no_chunk_of_no_tokens(kind):
    """Two prompts beside a decode, for the second of which nothing is left."""
    scheduler = make(kind, pages=1000, budget=4096, prefill_chunk=720)
    scheduler.add(numbered((1500, 2), (1500, 2), (3, 5)))
    book(scheduler, scheduler.schedule())
    found = of(scheduler.schedule())
    assert 0 not in found.values(), (
        f"a chunk of no tokens, in {found}: where `_num_new_tokens` says 0, as it does "
        "when the prompts beside a decode have had their part, the request waits"
    )
    assert found == {2: 1, 0: 706}, (
        "one request decodes beside two prompts under way, of which the first gets 706 "
        f"tokens, all that `_num_new_tokens` gives prompts here; yours is {found}"
    )


def no_work_without_a_token_to_compute(kind):
    """A request whose last token is being computed, and one that goes on."""
    scheduler = make(kind)
    one, other = numbered((3, 1), (3, 5))
    scheduler.add([one, other])
    scheduled = scheduler.schedule()
    assert len(scheduled) == 2, "both prompts fit into the first step"
    scheduler.update_after_launch(scheduled)  # and nothing is committed yet
    found = of(scheduler.schedule())
    assert 0 not in found, (
        "request 0 may have one token, and that is being computed: `_ready` says that "
        "it has no part in the next step"
    )
    assert found == {1: 1}, (
        "request 1 goes on: the step takes a token's number, not its name; yours "
        f"computes {found}"
    )


def random_crowds(kind):
    """Requests of all sizes in tight memory, and small chunks in every other crowd."""
    rng = random.Random(5)
    for crowd in range(40):
        pages, budget = rng.randrange(14, 30), rng.randrange(6, 30)
        chunk = rng.randrange(2, 20) if crowd % 2 else rng.randrange(1, 4)
        scheduler = make(kind, pages, 6, budget, prefill_chunk=chunk)
        manager = scheduler.manager
        requests = numbered(
            *[(rng.randrange(1, 25), rng.randrange(1, 25)) for _ in range(12)]
        )
        scheduler.add(requests)
        for _ in range(STEPS):
            if not scheduler.requests:
                break
            decoding = [r for r in scheduler.running if r.missing == 1]
            try:
                scheduled = scheduler.schedule()
            except KeyError:
                raise AssertionError(
                    "you made room for a request that had just been preempted: "
                    "`_make_room` takes others out of self.running, so walk that list "
                    "itself and not a copy of it"
                ) from None
            found = of(scheduled)
            assert scheduled, "requests wait or run, and the step is empty"
            assert len(found) == len(scheduled), "a request has two chunks in one step"
            assert sum(found.values()) <= budget, "the step is over its budget"
            for request, begin, length, samples in scheduled:
                assert request in scheduler.running, (
                    f"request {request.request_id} has a chunk in this step and was "
                    "preempted for another: note who has a chunk, so that `_make_room` "
                    "spares it"
                )
                assert (
                    begin == request.num_computed_tokens and length <= request.missing
                ), (
                    f"request {request.request_id} has computed "
                    f"{request.num_computed_tokens} tokens and misses "
                    f"{request.missing}: a chunk of {length} from {begin} on "
                    "is not what comes next"
                )
                assert samples == (length == request.missing), (
                    "a chunk samples if it computes the last token that is missing"
                )
                held = len(manager.tables[request.request_id].groups[0])
                assert 4 * held >= begin + length, (
                    f"request {request.request_id} has a chunk and no room for it in "
                    "the cache"
                )
            room = manager.free_pages
            for request in decoding:
                stays = request in scheduler.running
                assert not stays or request.request_id in found or room == 0, (
                    f"request {request.request_id} decodes, there is room, and it has "
                    "no chunk: every decode gets its token in every step"
                )
            book(scheduler, scheduled)
        assert not scheduler.requests, f"not done after {STEPS} steps"


def check_Scheduler_update_from_output(candidate):
    """Ends, placeholders, and chunks that sample nothing."""
    kind = whole(candidate, Scheduler)

    def started(*sizes, **limits):
        scheduler = make(kind, **limits)
        requests = numbered(*sizes)
        scheduler.add(requests)
        scheduled = next_chunks(scheduler)
        scheduler.update_after_launch(scheduled)
        return scheduler, requests, scheduled

    def next_chunks(scheduler):
        scheduled = Scheduler.schedule(scheduler)
        assert scheduled, "the scheduler has nothing to compute"
        return scheduled

    scheduler, (one, two), scheduled = started((3, 5), (2, 5))
    told = scheduler.update_from_output(scheduled, [[11], [12]])
    assert (one.tokens, two.tokens) == ([1, 1, 1, 11], [2, 2, 12]), (
        f"the placeholder {UNKNOWN} after the prompt is replaced by the token that "
        f"was sampled: {one.tokens}, {two.tokens}"
    )
    told = [(request.request_id, list(kept)) for request, kept in told]
    assert told == [(0, [11]), (1, [12])], (
        f"return pairs of each request and the tokens that it keeps; yours are {told}"
    )
    assert one.finish_reason is None, "5 tokens are asked for, and this was the first"

    scheduler, (one, two), scheduled = started((9, 5), (2, 5), prefill_chunk=4)
    scheduler.update_from_output(scheduled, [[12]])
    assert one.tokens == [1] * 9 and two.tokens == [2, 2, 12], (
        "request 0 computed a chunk and samples nothing: tokens has a list for each "
        f"chunk that samples, and no other; {one.tokens}, {two.tokens}"
    )

    scheduler, (one, two), scheduled = started((3, 1), (2, 5))
    two.stop_ids = frozenset([13])
    scheduler.update_from_output(scheduled, [[11], [13]])
    assert one.finish_reason == "length", (
        "request 0 has all of its tokens: it has to be finished, with the reason that "
        f"`_keep` gives, 'length', not {one.finish_reason!r}"
    )
    assert two.finish_reason == "stop" and two.tokens[-1] == 13, (
        "token 13 is one of request 1's stop_ids: it ends it, and stays among its "
        f"tokens; {two.finish_reason!r}, {two.tokens}"
    )
    assert not scheduler.requests and scheduler.manager.usage == 0, (
        "requests that end give back their room: call `finish`"
    )

    scheduler, (one, two), scheduled = started((3, 5), (2, 5))
    scheduler.finish(one, "abort")
    told = scheduler.update_from_output(scheduled, [[11], [12]])
    assert [request.request_id for request, _ in told] == [1], (
        "request 0 was aborted while its step ran: nobody is told of its token"
    )
    assert two.tokens == [2, 2, 12], (
        "request 0 was aborted, and its list of tokens is there all the same: pair "
        f"chunks and lists first, then skip who has ended; {two.tokens}"
    )
    assert one.finish_reason == "abort", "a request that was aborted stays aborted"

    scheduler, (one,), scheduled = started((3, 9))
    later = next_chunks(scheduler)
    scheduler.update_after_launch(later)  # with overlap: two steps in flight
    scheduler.update_from_output(scheduled, [[11]])
    assert one.tokens == [1, 1, 1, 11, UNKNOWN], (
        "two steps are in flight, and the first is collected: its token belongs to "
        f"position start + length, not to the end of the list; {one.tokens}"
    )
    scheduler.update_from_output(later, [[12]])
    assert one.tokens == [1, 1, 1, 11, 12], (
        f"then the second is collected: {one.tokens}"
    )

    scheduler, (one, two), scheduled = started((3, 2), (2, 9))
    two.stop_ids = frozenset([15])
    told = scheduler.update_from_output(scheduled, [[11, 12, 13], [14, 15, 16]])
    kept = [list(tokens) for _, tokens in told]
    assert kept == [[11, 12], [14, 15]], (
        "a chunk may bring several tokens, and its list goes to `_keep` as a "
        f"whole, which drops what is beyond max_tokens or a stop token; {kept}"
    )


def check_9_1(useful_share):
    """Places counted one by one, the last batch's empty ones included."""
    rng = random.Random(1)
    cases = [([5] * 4, 2), ([10] * 7 + [100], 8), ([10] * 7 + [100], 2), ([3], 4)]
    cases += [([rng.randrange(1, 50) for _ in range(n)], 4) for n in (9, 10, 12)]
    for lengths, batch in cases:
        used = places = 0
        for first in range(0, len(lengths), batch):
            group = lengths[first : first + batch]
            for step in range(max(group)):
                used += sum(length > step for length in group)
                places += batch
        found = useful_share(list(lengths), batch)
        assert abs(found - used / places) < 1e-9, (
            f"batches of {batch} of {lengths}: {used} of {places} slots give a token"
            + (
                ", the empty slots of a last batch that is not full included"
                if len(lengths) % batch
                else ""
            )
            + f"; yours is {found:.3f}"
        )


def check_9_2(steps_to_first_token):
    """The scheduler's own steps."""
    for prompt, decodes, budget, chunk in [
        (1, 3, 8, 4),
        (17, 3, 8, 4),
        (17, 3, 8, 40),
        (16, 4, 8, 8),
        (64, 0, 64, 64),
        (65, 2, 66, 64),
        (4000, 100, 256, 512),
    ]:
        limits = dict(seqs=decodes + 1, budget=budget, prefill_chunk=chunk)
        scheduler = make(Scheduler, 2000, **limits)
        *others, request = numbered(*[(1, 999)] * decodes, (prompt, 9))
        if others:
            scheduler.add(others)
            book(scheduler, scheduler.schedule())
        scheduler.add([request])
        steps = 0
        while request.num_output == 0:
            book(scheduler, scheduler.schedule())
            steps += 1
            assert steps < 10_000, "the scheduler gives the prompt no token"
        found = steps_to_first_token(prompt, decodes, budget, chunk)
        assert found == steps, (
            f"a prompt of {prompt}, {decodes} decodes, budget {budget}, chunk {chunk}: "
            f"the scheduler computes its last token in another step than {found}"
        )


def check_9_3(candidate):
    """Requests that come in one call, and one by one."""

    def ends(kind, lengths, together):
        """The step in which each request ends, one running at a time."""
        scheduler = make(kind, seqs=1, budget=64, overtakes=5)
        prompts = [30 if most < 4 else 1 for most in lengths]
        requests = numbered(*zip(prompts, lengths, strict=True))
        for group in [requests] if together else [[r] for r in requests]:
            scheduler.add(group)
        found = {}
        for step in range(5000):
            if not scheduler.requests:
                break
            scheduled = scheduler.schedule()
            book(scheduler, scheduled)
            found[scheduled[0].request.request_id] = step
        assert not scheduler.requests, "not done after 5,000 steps"
        return [found[number] for number in range(len(lengths))]

    lengths = [40, 3, 25, 8, 2, 60, 5]
    plain = ends(Scheduler, lengths, together=True)
    for together in (True, False):
        found = ends(candidate, lengths, together)
        order = sorted(range(7), key=found.__getitem__)
        call = "in one call of add" if together else "one call of add each"
        assert order == [4, 1, 6, 3, 2, 0, 5], (
            f"requests of {lengths} tokens, {call}, end in the order {order}; the "
            "shortest goes first"
        )
        assert mean(found) < 0.6 * mean(plain), (
            f"{call}: the mean request waits {mean(found):.0f} steps, where in order "
            f"of arrival it waits {mean(plain):.0f}"
        )
        found = ends(candidate, [20] + 120 * [2], together)
        passed = sum(end < found[0] for end in found)
        assert passed < 120, (
            "a request of 20 tokens waits until all 120 short ones are done: with a "
            "server's endless stream of those it would wait forever (starvation)"
        )
        assert passed == 5 * (20 - 2), (
            f"{passed} of 120 requests of 2 tokens overtook one of 20; with "
            "overtakes=5 each token of difference is worth 5 places"
        )


def check_9_4(candidate):
    """Who is let in at once, counted from the room there is."""
    room = 48 * 4

    def play(reserve):
        manager = candidate(48, 4, enable_caching=False)
        manager.reserve = reserve
        scheduler = Scheduler(manager, max_num_seqs=12, max_num_batched_tokens=1000)
        scheduler.add(numbered(*[(12, 40)] * 12))
        first, steps = None, 0
        while scheduler.requests:
            scheduled = scheduler.schedule()
            first = len(scheduled) if first is None else first
            book(scheduler, scheduled)
            steps += 1
            assert steps < 2000, (
                f"with a reserve of {reserve} tokens some request never ends: those "
                "that run may use the reserve, only admission may not"
            )
        return first, scheduler.preemptions, steps

    for reserve in (0, 30, 80, 110, 170):
        first, _, _ = play(reserve)
        expected = max(1, (room - reserve) // 12)
        assert first == min(12, expected), (
            f"room for {room} tokens, {reserve} in reserve, prompts of 12: the first "
            f"step lets {first} in, expected {min(12, expected)}"
        )
    none, some = play(0)[1], play(80)[1]
    assert some < none, f"{some} preemptions with a reserve, {none} without"
