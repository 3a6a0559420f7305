"""Wrong answers to chapter 9."""

import asyncio
import queue
from importlib.resources import files
from typing import Any

from simplellm.api.outputs import RequestOutput
from simplellm.api.reader import END, Reader
from simplellm.api.reply import TextReply
from simplellm.engine.page_manager import PageManager
from simplellm.engine.scheduler import ScheduledChunk, Scheduler
from simplellm.text.tokenizer import Tokenizer
from wrong import wrong

TOKENIZER = Tokenizer.from_file(str(files("simplellm") / "embedded" / "tokenizer.json"))


@wrong("next_batch", "nobody runs while somebody waits")
def no_refill(left, batch, waiting, places):
    return [n for n in batch if left[n]] if batch else waiting[:places]


@wrong("next_batch", "three places are free")
def static(left, batch, waiting, places):
    return batch if any(left[n] for n in batch) else waiting[:places]


@wrong("next_batch", "only as many may join")
def too_many(left, batch, waiting, places):
    return [n for n in batch if left[n]] + waiting[:places]


@wrong("next_batch", "the fifth starts")
def newest_first(left, batch, waiting, places):
    stay = [n for n in batch if left[n]]
    return stay + waiting[::-1][: places - len(stay)]


@wrong("Scheduler._make_room", "the last in rank gives way")
class FirstGivesWay(Scheduler):
    def _make_room(self, request, length, busy):
        while not self.manager.allocate(
            request.number, request.num_computed_tokens + length
        ):
            victim = next(r for r in self.running if r.number not in busy)
            if victim is request:
                return False
            self._preempt(victim)
        return True


@wrong("Scheduler._make_room", "has work in this step and is spared")
class NobodySpared(Scheduler):
    def _make_room(self, request, length, busy):
        while not self.manager.allocate(
            request.number, request.num_computed_tokens + length
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
            request.number, request.num_computed_tokens + length
        ):
            others = [
                r for r in self.running if r is not request and r.number not in busy
            ]
            if not others:
                return False
            self._preempt(others[-1])
        return True


@wrong("Scheduler._make_room", "does not preempt itself")
class PreemptsItself(Scheduler):
    def _make_room(self, request, length, busy):
        while not self.manager.allocate(
            request.number, request.num_computed_tokens + length
        ):
            victim = next(r for r in self.running[::-1] if r.number not in busy)
            self._preempt(victim)
            if victim is request:
                return False
        return True


@wrong("Scheduler._make_room", "first in rank")
class NewestGivesWay(Scheduler):
    def _make_room(self, request, length, busy):
        while not self.manager.allocate(
            request.number, request.num_computed_tokens + length
        ):
            idle = [r for r in self.running if r.number not in busy]
            victim = max(idle, key=lambda r: r.arrival_time)
            if victim is request:
                return False
            self._preempt(victim)
        return True


@wrong("Scheduler._make_room", "try again")
class OnlyOnce(Scheduler):
    def _make_room(self, request, length, busy):
        if self.manager.allocate(request.number, request.num_computed_tokens + length):
            return True
        victim = next(r for r in self.running[::-1] if r.number not in busy)
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
        if not self.running:
            self._closed = False
        if not self._closed:
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
        busy.add(request.number)
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
        busy.add(request.number)


@wrong("Scheduler.schedule", "note who has work")
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


@wrong("Scheduler.schedule", "may join")
class ClosesWhenItAdmits(Scheduler):
    def schedule(self):
        scheduled = super().schedule()
        self._closed = self._closed or not self.continuous
        return scheduled


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
        if self.running and not self._closed:
            self._admit(scheduled, self.budget)
        for chunk in scheduled[before:]:
            busy.add(chunk.request.number)
            self.budget -= chunk.length
        self.round(scheduled, busy, lambda r: r.missing > 1)


@wrong("Scheduler.schedule", "_closed")
class ClosedForGood(Scheduler):
    def schedule(self):
        if not self.running and self._closed:
            return []
        return super().schedule()


@wrong("Scheduler.schedule", "is being computed")
class ReadyOrNot(Scheduler):
    def _ready(self, request, busy):
        return request.number not in busy


@wrong("Scheduler.commit", "position start + length")
class AtTheEnd(Scheduler):
    def commit(self, scheduled, tokens):
        new = []
        sampling = [chunk for chunk in scheduled if chunk.samples]
        for (request, start, length, _), found in zip(sampling, tokens, strict=True):
            if request.finish_reason is None:
                reason, kept = self._keep(request, start + length, found)
                request.tokens[-1:] = kept
                new.append((request, kept))
                if reason:
                    self.finish(request, reason)
        return new


@wrong("Scheduler.commit", "is replaced")
class Appended(Scheduler):
    def commit(self, scheduled, tokens):
        new = []
        sampling = [chunk for chunk in scheduled if chunk.samples]
        for (request, start, length, _), found in zip(sampling, tokens, strict=True):
            if request.finish_reason is None:
                reason, kept = self._keep(request, start + length, found)
                request.tokens += kept
                new.append((request, kept))
                if reason:
                    self.finish(request, reason)
        return new


@wrong("Scheduler.commit", "samples nothing")
class EveryWork(Scheduler):
    def commit(self, scheduled, tokens):
        new = []
        for (request, start, length, _), found in zip(scheduled, tokens, strict=False):
            if request.finish_reason is None:
                reason, kept = self._keep(request, start + length, found)
                request.tokens[start + length : start + length + 1] = kept
                new.append((request, kept))
                if reason:
                    self.finish(request, reason)
        return new


@wrong("Scheduler.commit", "was aborted")
class ToldAfterItsEnd(Scheduler):
    def commit(self, scheduled, tokens):
        ended = [w.request for w in scheduled if w.request.finish_reason is not None]
        return super().commit(scheduled, tokens) + [(request, [0]) for request in ended]


@wrong("Scheduler.commit", "pair chunks and lists first")
class SkipsBeforeItPairs(Scheduler):
    def commit(self, scheduled, tokens):
        live = [w for w in scheduled if w.samples and w.request.finish_reason is None]
        return super().commit(live, tokens[: len(live)])


@wrong("Scheduler.commit", "has to be finished")
class NeverFinished(Scheduler):
    def finish(self, request, reason):
        pass


def output_of(text, tokens, reason, logprobs, prompt):
    return RequestOutput(
        text=text,
        token_ids=tokens,
        finish_reason=reason,
        logprobs=logprobs,
        prompt_token_ids=prompt,
    )


def part(text, event, reason):
    return [output_of(text, list(event.tokens), reason, None, [])]


@wrong("TextReply.push", "each by itself")
class TokenByToken(TextReply):
    def push(self, event):
        if self.finish_reason is not None:
            return []
        text = "".join(TOKENIZER.decode([token]) for token in event.tokens)
        self.finish_reason = event.finish_reason
        self.token_ids += event.tokens
        self._texts.append(text)
        return part(text, event, self.finish_reason)


class Pushes(TextReply):
    """The kept version, with what students change as switches."""

    flushes = checks_end = True
    takes_all = trusts_the_engine = forgets = False
    around = lists = nameless = False

    def push(self, event):
        if self.checks_end and self.finish_reason is not None:
            return []
        text, count = "", len(event.tokens)
        if self._decoder is not None:
            for number, token in enumerate(event.tokens, 1):
                text += self._stops.push(self._decoder.push(token))
                if self._stops.match:
                    count = len(event.tokens) if self.takes_all else number
                    break
            if event.finish_reason and self.flushes and not self._stops.match:
                rest = self._decoder.flush()
                text += rest if self.around else self._stops.push(rest)
                text += self._stops.flush()
        stopped = self._stops.match and not self.trusts_the_engine
        self.finish_reason = "stop" if stopped else event.finish_reason
        tokens = list(event.tokens[:count])
        logprobs: list[Any] | None = [] if self.lists else None
        if self.logprobs is not None:
            logprobs = list(event.logprobs or ())[:count]
            self.logprobs += logprobs
        self.token_ids += tokens
        if not self.forgets:
            self._texts.append(text)
        prompt = [] if self.nameless else self.prompt_token_ids
        return [output_of(text, tokens, self.finish_reason, logprobs, prompt)]


@wrong("TextReply.push", "flushes what the decoder")
class NoFlush(Pushes):
    flushes = False


@wrong("TextReply.push", "the last that counts")
class AllTokens(Pushes):
    takes_all = True


@wrong("TextReply.push", "the reason is 'stop'")
class TheEnginesReason(Pushes):
    trusts_the_engine = True


@wrong("TextReply.push", "note texts")
class TextsForgotten(Pushes):
    forgets = True


@wrong("TextReply.push", "behind ST")
class FlushesAroundTheStops(Pushes):
    around = True


@wrong("TextReply.push", "nobody asked")
class EmptyLogprobs(Pushes):
    lists = True


@wrong("TextReply.push", "which prompt")
class NoPrompt(Pushes):
    nameless = True


@wrong("TextReply.push", "behind the end")
class GoesOn(Pushes):
    checks_end = False


def streams(*, door=True, drops=True, raises=True, at_once=False, ends=True, most=0):
    """The kept version, with what students change as switches."""

    async def stream(delivery, request, reply):
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[Any] = asyncio.Queue(most)

        def deliver(part):
            if door:
                loop.call_soon_threadsafe(parts.put_nowait, part)
            else:
                parts.put_nowait(part)

        reader = Reader(request, reply, deliver)
        delivery.submit([[reader]])
        kept = []
        try:
            while (part := await parts.get()) is not END:
                if raises and isinstance(part, Exception):
                    raise part
                if at_once:
                    kept.append(part)
                else:
                    yield part
                if isinstance(part, Exception):
                    return
            for part in kept if ends else (*kept, END):
                yield part
        finally:
            if drops:
                delivery.drop([reader])

    return stream


wrong("read_async", "call_soon_threadsafe")(streams(door=False))
wrong("read_async", "with nobody to read it")(streams(drops=False))
wrong("read_async", "is to be raised")(streams(raises=False))
wrong("read_async", "as they come")(streams(at_once=True))
wrong("read_async", "END is none of them")(streams(ends=False))


@wrong("read_async", "nobody else in the loop")
async def blocks_the_loop(delivery, request, reply):
    parts: queue.SimpleQueue[Any] = queue.SimpleQueue()
    reader = Reader(request, reply, parts.put)
    delivery.submit([[reader]])
    try:
        while (part := parts.get()) is not END:
            yield part
    finally:
        delivery.drop([reader])


@wrong("read_async", "with nobody to read it")
async def drops_at_the_end_only(delivery, request, reply):
    loop = asyncio.get_running_loop()
    parts: asyncio.Queue[Any] = asyncio.Queue()
    reader = Reader(
        request, reply, lambda part: loop.call_soon_threadsafe(parts.put_nowait, part)
    )
    delivery.submit([[reader]])
    while (part := await parts.get()) is not END:
        if isinstance(part, Exception):
            raise part
        yield part
    delivery.drop([reader])


@wrong("9.1", "not full")
def narrow_last_batch(lengths, batch):
    groups = [lengths[first : first + batch] for first in range(0, len(lengths), batch)]
    return sum(lengths) / sum(len(group) * max(group) for group in groups)


@wrong("9.1", "places give a token")
def one_batch(lengths, batch):
    return sum(lengths) / (len(lengths) * max(lengths))


@wrong("9.2", "decodes")
def without_company(prompt, decodes, budget, chunk):
    return -(-prompt // min(chunk, budget))


@wrong("9.2", "the scheduler computes")
def rounded_down(prompt, decodes, budget, chunk):
    return prompt // min(chunk, budget - decodes) + 1


@wrong("9.3", "nobody's")
async def others_go_on(llm, prompts, params):
    async def ask(index):
        parts = llm.stream_async(prompts[index], params[index])
        return index, "".join([piece.text async for piece in parts])

    tasks = [asyncio.create_task(ask(index)) for index in range(len(prompts))]
    await asyncio.wait(tasks)
    return min((task.result() for task in tasks), key=lambda found: len(found[1]))


@wrong("9.4", "the shortest goes first")
class SortedCalls(Scheduler):
    def add(self, requests):
        super().add(sorted(requests, key=lambda request: request.max_tokens))


@wrong("9.4", "starvation")
class Absolute(Scheduler):
    def add(self, requests):
        for request in requests:
            request.priority = 1000 * request.max_tokens
        super().add(requests)


@wrong("9.4", "the shortest goes first")
class LongestFirst(Scheduler):
    def add(self, requests):
        for request in requests:
            request.priority = -request.max_tokens
        super().add(requests)


@wrong("9.4", "the shortest goes first")
class WithThePrompt(Scheduler):
    def add(self, requests):
        for request in requests:
            request.priority = request.max_tokens + request.num_prompt
        super().add(requests)


@wrong("9.5", "in reserve")
class CountedTwice(PageManager):
    reserve = 0

    @property
    def free_tokens(self):
        return super().free_tokens - 2 * self.reserve


@wrong("9.5", "those that run may use")
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


@wrong("next_batch", "changes what it is given")
def takes_from_the_line(left, batch, waiting, places):
    batch[:] = [number for number in batch if left[number]]
    while waiting and len(batch) < places:
        batch.append(waiting.pop(0))
    return batch


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


@wrong("Scheduler.commit", "after the end")
class ReplacesWhatItKeeps(Scheduler):
    def commit(self, scheduled, tokens):
        new = []
        sampling = [chunk for chunk in scheduled if chunk.samples]
        for (request, start, length, _), found in zip(sampling, tokens, strict=True):
            if request.finish_reason is None:
                first = start + length
                reason, kept = self._keep(request, first, found)
                request.tokens[first : first + len(kept)] = kept
                new.append((request, kept))
                if reason:
                    self.finish(request, reason)
        return new


@wrong("read_async", "can't be cancelled")
async def waits_in_a_thread(delivery, request, reply):
    parts: queue.SimpleQueue[Any] = queue.SimpleQueue()
    reader = Reader(request, reply, parts.put)
    delivery.submit([[reader]])
    try:
        while (part := await asyncio.to_thread(parts.get)) is not END:
            if isinstance(part, Exception):
                raise part
            yield part
    finally:
        delivery.drop([reader])


wrong("read_async", "with a bound")(streams(most=4))


@wrong("9.3", "cancel their tasks")
async def leaves_the_others(llm, prompts, params):
    async def ask(index):
        parts = llm.stream_async(prompts[index], params[index])
        return index, "".join([piece.text async for piece in parts])

    tasks = [asyncio.create_task(ask(index)) for index in range(len(prompts))]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return done.pop().result()
