"""Wrong answers to chapter 10."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from simplellm.model.batch import Batch
from wrong import wrong


@wrong("step_ahead", "before `launch`")
def books_before_it_launches(scheduler, runner, flights):
    scheduled = scheduler.schedule()
    if scheduled:
        scheduler.update_after_launch(scheduled)
        flights.append((scheduled, runner.launch(scheduled)))
    while len(flights) > bool(scheduled):
        before, flight = flights.pop(0)
        scheduler.update_from_output(before, flight().tokens)


@wrong("step_ahead", "in flight")
def waits_at_once(scheduler, runner, flights):
    scheduled = scheduler.schedule()
    flight = runner.launch(scheduled)
    scheduler.update_after_launch(scheduled)
    scheduler.update_from_output(scheduled, flight().tokens)


@wrong("step_ahead", "before the host waits")
def lands_first(scheduler, runner, flights):
    scheduled = scheduler.schedule()
    while flights:
        before, flight = flights.pop(0)
        scheduler.update_from_output(before, flight().tokens)
    if scheduled:
        flights.append((scheduled, runner.launch(scheduled)))
        scheduler.update_after_launch(scheduled)


@wrong("step_ahead", "launch nothing")
def never_lands_the_last(scheduler, runner, flights):
    scheduled = scheduler.schedule()
    if scheduled:
        flights.append((scheduled, runner.launch(scheduled)))
        scheduler.update_after_launch(scheduled)
    while len(flights) > 1:
        before, flight = flights.pop(0)
        scheduler.update_from_output(before, flight().tokens)


@wrong("step_ahead", "all but the last one")
def two_in_the_air(scheduler, runner, flights):
    scheduled = scheduler.schedule()
    if scheduled:
        flights.append((scheduled, runner.launch(scheduled)))
        scheduler.update_after_launch(scheduled)
    if len(flights) > 2 or not scheduled:
        before, flight = flights.pop(0)
        scheduler.update_from_output(before, flight().tokens)


class Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


@wrong("Tape.replay", "copied to where the first one was")
class CalledOnly(Recording):
    def replay(self):
        for func, args, kwargs, _ in self.calls:
            func(*args, **kwargs)


@wrong("Tape.replay", "those in the middle")
class OnlyTheLast(Recording):
    def replay(self):
        news = [func(*args, **kwargs) for func, args, kwargs, _ in self.calls]
        self.calls[-1][3].copy_(news[-1])


@wrong("Tape.replay", "two outputs")
class FirstOutput(Recording):
    def replay(self):
        for func, args, kwargs, out in self.calls:
            new = func(*args, **kwargs)
            if isinstance(out, Tensor):
                out.copy_(new)


@wrong("Tape.replay", "runs once in a replay")
class CalledTwice(Recording):
    def replay(self):
        for func, args, kwargs, out in self.calls:
            func(*args, **kwargs)
            new = func(*args, **kwargs)
            several = not isinstance(out, Tensor)
            for old, fresh in zip(out, new, strict=True) if several else [(out, new)]:
                old.copy_(fresh)


@wrong("Tape.replay", "kwargs, too")
class WithoutKwargs(Recording):
    def replay(self):
        for func, args, _, out in self.calls:
            new = func(*args)
            several = not isinstance(out, Tensor)
            for old, fresh in zip(out, new, strict=True) if several else [(out, new)]:
                old.copy_(fresh)


@wrong("Tape.replay", "cannot move")
class PointsElsewhere(Recording):
    def replay(self):
        for func, args, kwargs, out in self.calls:
            new = func(*args, **kwargs)
            several = not isinstance(out, Tensor)
            for old, fresh in zip(out, new, strict=True) if several else [(out, new)]:
                old.set_(fresh)


@wrong("Batch.pad", "Slot 0 is the first")
class AllZero(Batch):
    def pad(self):
        self.tokens[:] = self.positions[:] = self.lengths[:] = 0
        self.query_start_loc[:] = self.logits_indices[:] = 0
        for group in self.groups:
            group.slots[:] = group.tables[:] = group.offsets[:] = 0


@wrong("Batch.pad", "length 0")
class LengthOne(Batch):
    def pad(self):
        super().pad()
        self.lengths[:] = 1


@wrong("Batch.pad", "in every group")
class FirstGroup(Batch):
    def pad(self):
        self.tokens[:] = self.positions[:] = self.lengths[:] = 0
        self.query_start_loc[:] = self.logits_indices[:] = 0
        group = self.groups[0]
        group.slots[:] = -1
        group.tables[:] = group.offsets[:] = 0


@wrong("Batch.pad", "somebody's page")
class TablesStay(Batch):
    def pad(self):
        self.tokens[:] = self.positions[:] = self.lengths[:] = 0
        self.query_start_loc[:] = self.logits_indices[:] = 0
        for group in self.groups:
            group.slots[:] = -1


@wrong("10.1", "A kernel starts when it is launched")
def no_queue(kernels, launch):
    return sum(max(0, launch - kernel) for kernel in kernels[:-1])


@wrong("10.1", "between the first start")
def counts_the_first_launch(kernels, launch):
    free = idle = 0
    for number, length in enumerate(kernels):
        queued = (number + 1) * launch
        idle += max(0, queued - free)
        free = max(queued, free) + length
    return idle


@wrong("10.2", "a Python number")
def place_baked_in(table, token, place, history):
    def step():
        token.copy_(table.index_select(0, token))
        history[int(place)] = token[0]
        place.add_(1)

    return step


@wrong("10.2", "a buffer that is replaced")
def token_replaced(table, token, place, history):
    def step():
        history.index_copy_(0, place, table.index_select(0, token))
        place.add_(1)

    return step


@wrong("10.3", "are possible")
def quantiles(batches, count):
    ordered = sorted(batches)
    marks = {ordered[len(ordered) * n // count - 1] for n in range(1, count + 1)}
    return sorted(marks)


@wrong("10.3", "no bucket")
def the_most_frequent(batches, count):
    often = sorted(set(batches), key=batches.count, reverse=True)
    return sorted(often[:count])
