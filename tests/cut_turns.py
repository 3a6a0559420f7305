"""Random turns of a chat: their events and parts come cut anywhere."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st
from models import TOKENIZER

from simplellm.api.outputs import merge
from simplellm.api.reply import ChatReply
from simplellm.base.request import Event, Request, TokenLogprobs
from simplellm.base.sampling_params import SamplingParams
from simplellm.text.harmony import Delta

PIECES = [*TOKENIZER.special, "functions.add", " to=functions.add", "analysis"]
PIECES += ["final", "commentary", "assistant", " json", "{", "😀", "é", "stop", " x"]
TOKENS = st.lists(
    st.one_of(
        st.sampled_from(PIECES).map(lambda text: TOKENIZER.encode(text, special=True)),
        st.integers(0, 1099).map(lambda id: [id]),
    ),
    max_size=40,
).map(lambda lists: [id for ids in lists for id in ids])
CUTS = st.lists(st.integers(0, 100), max_size=5)


class CutTurn(NamedTuple):
    """A reply, its parts as its events gave them, and as a slow reader gets them."""

    params: SamplingParams
    reply: ChatReply
    parts: list[Delta]
    read: list[Delta]


def cut(items: Sequence[Any], cuts: Sequence[int]) -> list[Sequence[Any]]:
    """``items`` in runs that begin at ``cuts``, which may be any numbers."""
    borders = sorted({0, *(place % (len(items) + 1) for place in cuts)})
    ends = [*borders[1:], None]
    return [items[start:end] for start, end in zip(borders, ends, strict=True)]


@st.composite
def cut_turns(draw: st.DrawFn) -> CutTurn:
    """Any tokens, in events that are cut and parts that are merged anywhere."""
    ids = draw(TOKENS)
    stop = draw(st.sampled_from([(), ("stop",), ("x", "é")]))
    params = SamplingParams(stop=stop, logprobs=draw(st.sampled_from([None, 0])))
    reply = ChatReply(Request([1], 10, params), TOKENIZER)
    parts: list[Delta] = []
    *runs, last = cut(ids, [*draw(CUTS), len(ids)])
    for run in [*runs, last]:
        logprobs = None
        if params.logprobs is not None:
            logprobs = [TokenLogprobs(id, -1.0, (), 1) for id in run]
        reason = "length" if run is last else None
        parts += reply.push(Event(1, run, logprobs, reason))
    read = [part for run in cut(parts, draw(CUTS)) for part in merge(run)]
    return CutTurn(params, reply, parts, read)
