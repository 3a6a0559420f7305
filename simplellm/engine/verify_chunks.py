"""A step's chunks that check drafts: what they compute, and where they sample."""

from collections.abc import Sequence

from simplellm.base.request import UNKNOWN
from simplellm.base.sample_position import DraftPosition, SamplePosition
from simplellm.engine.scheduler import ScheduledChunk


class DraftChunk(ScheduledChunk):
    """A decode of one token, and of as many drafts after it as make up its length."""

    __slots__ = ()


class PlaceholderChunk(DraftChunk):
    """One that is launched before it's known how many drafts of the last were right.

    Placeholders stand for its tokens and positions, which the device alone knows.
    ``start`` is the first possible position; each draft that the step before checks may
    move it on by one. It may have no drafts of its own.
    """

    __slots__ = ()


DRAFTING = {DraftChunk, PlaceholderChunk}


def has_drafts(scheduled: Sequence[ScheduledChunk]) -> bool:
    """Whether a step checks any, or has a request whose last ones aren't known."""
    return not DRAFTING.isdisjoint(map(type, scheduled))


def num_drafts(chunk: ScheduledChunk) -> int:
    """How many drafts of its request a step checks."""
    return chunk.length - 1 if isinstance(chunk, DraftChunk) else 0


def without_drafts(chunk: ScheduledChunk, launched: bool) -> ScheduledChunk:
    """``chunk`` without its drafts: it computes the request's own last token alone.

    ``launched`` says that the step's results are there, and so are those of all steps
    before it: the first UNKNOWN token is what this step has sampled, and the one before
    that is what it has computed.
    """
    if not isinstance(chunk, DraftChunk):
        return chunk
    request, start, _, samples = chunk
    if isinstance(chunk, PlaceholderChunk) and request.finish_reason is None:
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
    if request.overlaps_drafts:
        return [request] * (1 + drafts)
    ends, guessed = range(1, drafts + 1), request.drafts
    return [request, *(DraftPosition(request, guessed[:end]) for end in ends)]


def step_positions(
    scheduled: Sequence[ScheduledChunk], checking: bool
) -> list[SamplePosition]:
    """Where a step samples, which may be ``checking`` drafts."""
    if checking:
        return [row for chunk in scheduled for row in sample_positions(chunk)]
    return [chunk.request for chunk in scheduled if chunk.samples]
