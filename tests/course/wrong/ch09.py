"""Wrong answers to chapter 9."""

from simplellm.engine.page_manager import PageManager
from simplellm.engine.scheduler import ScheduledChunk, Scheduler
from wrong import wrong


@wrong("Scheduler._make_room", "the last in order gives way")
class FirstGivesWay(Scheduler):
    def _make_room(self, request, length, busy):
        while not self.manager.allocate(
            request.request_id, request.num_computed_tokens + length
        ):
            victim = next(r for r in self.running if r.request_id not in busy)
            if victim is request:
                return False
            self._preempt(victim)
        return True


@wrong("Scheduler._make_room", "has a chunk in this step and is spared")
class NobodySpared(Scheduler):
    def _make_room(self, request, length, busy):
        while not self.manager.allocate(
            request.request_id, request.num_computed_tokens + length
        ):
            victim = self.running[-1]
            if victim is request:
                return False
            self._preempt(victim)
        return True


@wrong("Scheduler._make_room", "nobody ahead of it")
class TakesFromThoseAhead(Scheduler):
    def _make_room(self, request, length, busy):
        while not self.manager.allocate(
            request.request_id, request.num_computed_tokens + length
        ):
            others = [
                r for r in self.running if r is not request and r.request_id not in busy
            ]
            if not others:
                return False
            self._preempt(others[-1])
        return True


@wrong("Scheduler._make_room", "does not preempt itself")
class PreemptsItself(Scheduler):
    def _make_room(self, request, length, busy):
        while not self.manager.allocate(
            request.request_id, request.num_computed_tokens + length
        ):
            victim = next(r for r in self.running[::-1] if r.request_id not in busy)
            self._preempt(victim)
            if victim is request:
                return False
        return True


@wrong("Scheduler._make_room", "first in order")
class NewestGivesWay(Scheduler):
    def _make_room(self, request, length, busy):
        while not self.manager.allocate(
            request.request_id, request.num_computed_tokens + length
        ):
            idle = [r for r in self.running if r.request_id not in busy]
            victim = max(idle, key=lambda r: r.arrival_time)
            if victim is request:
                return False
            self._preempt(victim)
        return True


@wrong("Scheduler._make_room", "try again")
class OnlyOnce(Scheduler):
    def _make_room(self, request, length, busy):
        if self.manager.allocate(
            request.request_id, request.num_computed_tokens + length
        ):
            return True
        victim = next(r for r in self.running[::-1] if r.request_id not in busy)
        if victim is not request:
            self._preempt(victim)
        return False


class Schedules(Scheduler):
    """The kept schedule, with a step for each of its parts."""

    def schedule(self):
        scheduled: list[ScheduledChunk] = []
        busy: set[int] = set()
        self.budget = self.max_num_batched_tokens
        self.rounds(scheduled, busy)
        self._admit(scheduled, self.budget)
        return scheduled

    def rounds(self, scheduled, busy):
        for decodes in (True, False):
            self.round(scheduled, busy, lambda r, d=decodes: (r.missing == 1) == d)

    def round(self, scheduled, busy, wanted):
        index = 0
        while index < len(self.running) and self.budget > 0:
            request = self.running[index]
            index += 1
            if wanted(request) and self._ready(request, busy):
                length = self._num_new_tokens(request, self.budget)
                if length and self._make_room(request, length, busy):
                    self.give(scheduled, busy, request, length)

    def give(self, scheduled, busy, request, length):
        scheduled.append(self._chunk(request, length))
        busy.add(request.request_id)
        self.budget -= length


@wrong("Scheduler.schedule", "the decodes take one each")
class OnePass(Schedules):
    def rounds(self, scheduled, busy):
        self.round(scheduled, busy, lambda request: True)


@wrong("Scheduler.schedule", "the decodes take one each")
class PromptsFirst(Schedules):
    def rounds(self, scheduled, busy):
        for decodes in (False, True):
            self.round(scheduled, busy, lambda r, d=decodes: (r.missing == 1) == d)


@wrong("Scheduler.schedule", "the decodes")
class BudgetNeverSpent(Schedules):
    def give(self, scheduled, busy, request, length):
        scheduled.append(self._chunk(request, length))
        busy.add(request.request_id)


@wrong("Scheduler.schedule", "note who has a chunk")
class NobodyBusy(Schedules):
    def rounds(self, scheduled, busy):
        for decodes in (True, False):
            self.round(scheduled, set(), lambda r, d=decodes: (r.missing == 1) == d)


@wrong("Scheduler.schedule", "ask `_make_room`")
class PlansWithoutRoom(Schedules):
    def round(self, scheduled, busy, wanted):
        for request in self.running:
            if self.budget > 0 and wanted(request) and self._ready(request, busy):
                length = self._num_new_tokens(request, self.budget)
                if length > 0:
                    self.give(scheduled, busy, request, length)


@wrong("Scheduler.schedule", "not a copy of it")
class WalksACopy(Schedules):
    def round(self, scheduled, busy, wanted):
        for request in list(self.running):
            if self.budget > 0 and wanted(request) and self._ready(request, busy):
                length = self._num_new_tokens(request, self.budget)
                if length and self._make_room(request, length, busy):
                    self.give(scheduled, busy, request, length)


@wrong("Scheduler.schedule", "before anybody is admitted")
class NewBeforeUnderWay(Schedules):
    def rounds(self, scheduled, busy):
        self.round(scheduled, busy, lambda r: r.missing == 1)
        before = len(scheduled)
        if self.running:
            self._admit(scheduled, self.budget)
        for chunk in scheduled[before:]:
            busy.add(chunk.request.request_id)
            self.budget -= chunk.length
        self.round(scheduled, busy, lambda r: r.missing > 1)


@wrong("Scheduler.schedule", "is being computed")
class ReadyOrNot(Scheduler):
    def _ready(self, request, busy):
        return request.request_id not in busy


@wrong("Scheduler.update_from_output", "position start + length")
class AtTheEnd(Scheduler):
    def update_from_output(self, scheduled, tokens):
        new = []
        sampling = [chunk for chunk in scheduled if chunk.samples]
        for (request, *_), found in zip(sampling, tokens, strict=True):
            if request.finish_reason is None:
                reason, kept = self._keep(request, len(request.tokens) - 1, found)
                new.append((request, kept))
                if reason:
                    self.finish(request, reason)
        return new


@wrong("Scheduler.update_from_output", "is replaced")
class Appended(Scheduler):
    def update_from_output(self, scheduled, tokens):
        new = []
        sampling = [chunk for chunk in scheduled if chunk.samples]
        for (request, *_), found in zip(sampling, tokens, strict=True):
            if request.finish_reason is None:
                reason, kept = self._keep(request, len(request.tokens), found)
                new.append((request, kept))
                if reason:
                    self.finish(request, reason)
        return new


@wrong("Scheduler.update_from_output", "samples nothing")
class EveryWork(Scheduler):
    def update_from_output(self, scheduled, tokens):
        new = []
        for (request, start, length, _), found in zip(scheduled, tokens, strict=False):
            if request.finish_reason is None:
                reason, kept = self._keep(request, start + length, found)
                new.append((request, kept))
                if reason:
                    self.finish(request, reason)
        return new


@wrong("Scheduler.update_from_output", "was aborted")
class ToldAfterItsEnd(Scheduler):
    def update_from_output(self, scheduled, tokens):
        ended = [w.request for w in scheduled if w.request.finish_reason is not None]
        return super().update_from_output(scheduled, tokens) + [
            (request, [0]) for request in ended
        ]


@wrong("Scheduler.update_from_output", "pair chunks and lists first")
class SkipsBeforeItPairs(Scheduler):
    def update_from_output(self, scheduled, tokens):
        live = [w for w in scheduled if w.samples and w.request.finish_reason is None]
        return super().update_from_output(live, tokens[: len(live)])


@wrong("Scheduler.update_from_output", "has to be finished")
class NeverFinished(Scheduler):
    def finish(self, request, reason):
        pass


@wrong("9.1", "not full")
def narrow_last_batch(lengths, batch):
    groups = [lengths[first : first + batch] for first in range(0, len(lengths), batch)]
    return sum(lengths) / sum(len(group) * max(group) for group in groups)


@wrong("9.1", "slots give a token")
def one_batch(lengths, batch):
    return sum(lengths) / (len(lengths) * max(lengths))


@wrong("9.2", "decodes")
def without_company(prompt, decodes, budget, chunk):
    return -(-prompt // min(chunk, budget))


@wrong("9.2", "the scheduler computes")
def rounded_down(prompt, decodes, budget, chunk):
    return prompt // min(chunk, budget - decodes) + 1


@wrong("9.3", "the shortest goes first")
class SortedCalls(Scheduler):
    def add(self, requests):
        super().add(sorted(requests, key=lambda request: request.max_tokens))


@wrong("9.3", "starvation")
class Absolute(Scheduler):
    def add(self, requests):
        for request in requests:
            request.priority = 1000 * request.max_tokens
        super().add(requests)


@wrong("9.3", "the shortest goes first")
class LongestFirst(Scheduler):
    def add(self, requests):
        for request in requests:
            request.priority = -request.max_tokens
        super().add(requests)


@wrong("9.3", "the shortest goes first")
class WithThePrompt(Scheduler):
    def add(self, requests):
        for request in requests:
            request.priority = request.max_tokens + request.num_prompt
        super().add(requests)


@wrong("9.4", "in reserve")
class CountedTwice(PageManager):
    reserve = 0

    @property
    def free_tokens(self):
        return super().free_tokens - 2 * self.reserve


@wrong("9.4", "those that run may use")
class KeptForGood(PageManager):
    reserve = 0

    @property
    def free_tokens(self):
        return super().free_tokens - self.reserve

    def allocate(self, sequence, length):
        held = self.page_size * len(self.tables[sequence].groups[0])
        if length > held and self.free_tokens < length - held:
            return False
        return super().allocate(sequence, length)


@wrong("Scheduler.schedule", "what `_num_new_tokens` says")
class ChunksAsLargeAsTheBudget(Schedules):
    def round(self, scheduled, busy, wanted):
        index = 0
        while index < len(self.running) and self.budget > 0:
            request = self.running[index]
            index += 1
            if wanted(request) and self._ready(request, busy):
                length = min(request.missing, self.budget)
                if self._make_room(request, length, busy):
                    self.give(scheduled, busy, request, length)


@wrong("Scheduler.update_from_output", "as a whole")
class FirstTokenOnly(Scheduler):
    def update_from_output(self, scheduled, tokens):
        return super().update_from_output(scheduled, [found[:1] for found in tokens])


@wrong("Scheduler._make_room", "Count from num_computed_tokens")
class TakesEachForADecode(Scheduler):
    def _make_room(self, request, length, busy):
        end = len(request.tokens) - 1 + length
        return super()._make_room(request, end - request.num_computed_tokens, busy)


@wrong("Scheduler._make_room", "not for more")
class AsksForOneMore(Scheduler):
    def _make_room(self, request, length, busy):
        return super()._make_room(request, length + 1, busy)


@wrong("Scheduler.schedule", "from front to back")
class BackToFront(Schedules):
    def round(self, scheduled, busy, wanted):
        for request in self.running[::-1]:
            if request not in self.running or self.budget == 0:
                continue
            if wanted(request) and self._ready(request, busy):
                length = self._num_new_tokens(request, self.budget)
                if length and self._make_room(request, length, busy):
                    self.give(scheduled, busy, request, length)


@wrong("Scheduler.schedule", "the first in line gets 8")
class PromptsBackToFront(BackToFront):
    def rounds(self, scheduled, busy):
        Schedules.round(self, scheduled, busy, lambda r: r.missing == 1)
        self.round(scheduled, busy, lambda r: r.missing > 1)


@wrong("Scheduler.schedule", "one page is free")
class DecodesBackToFront(BackToFront):
    def rounds(self, scheduled, busy):
        self.round(scheduled, busy, lambda r: r.missing == 1)
        Schedules.round(self, scheduled, busy, lambda r: r.missing > 1)


@wrong("Scheduler.schedule", "a chunk of no tokens")
class ChunksOfNoTokens(Schedules):
    def round(self, scheduled, busy, wanted):
        index = 0
        while index < len(self.running) and self.budget > 0:
            request = self.running[index]
            index += 1
            if wanted(request) and self._ready(request, busy):
                length = self._num_new_tokens(request, self.budget)
                if self._make_room(request, length, busy):
                    self.give(scheduled, busy, request, length)


@wrong("Scheduler.schedule", "a chunk of no tokens")
class SpendsTheBudgetAndGoesOn(Schedules):
    def round(self, scheduled, busy, wanted):
        index = 0
        while index < len(self.running):
            request = self.running[index]
            index += 1
            if wanted(request) and self._ready(request, busy):
                length = self._num_new_tokens(request, self.budget)
                if self._make_room(request, length, busy):
                    self.give(scheduled, busy, request, length)


@wrong("Scheduler.schedule", "is in busy before")
class BusyBeforeThereIsRoom(Schedules):
    def round(self, scheduled, busy, wanted):
        index = 0
        while index < len(self.running) and self.budget > 0:
            request = self.running[index]
            index += 1
            if wanted(request) and self._ready(request, busy):
                length = self._num_new_tokens(request, self.budget)
                busy.add(request.request_id)
                if length and self._make_room(request, length, busy):
                    self.give(scheduled, busy, request, length)
