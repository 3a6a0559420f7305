"""The pure core of streams: whatever parts come, however cut, they add up."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import TOKENIZER

from simplellm.harmony import Delta
from simplellm.outputs import merge
from simplellm.reply import ChatReply
from simplellm.request import Event, Request, TokenLogprobs
from simplellm.sampling_params import SamplingParams
from simplellm.server.deltas import Turn, message_of_choice
from simplellm.server.logprobs import LegacyLogprobs, chat_logprobs, token_name
from simplellm.server.sse import event

PIECES = [*TOKENIZER.special, "functions.add", " to=functions.add", "analysis"]
PIECES += ["final", "commentary", "assistant", " json", "{", "😀", "é", "stop", " x"]
TOKENS = st.lists(
    st.one_of(
        st.sampled_from(PIECES).map(lambda text: TOKENIZER.encode(text, special=True)),
        st.integers(0, 1099).map(lambda id: [id]),
    ),
    max_size=40,
).map(lambda lists: [id for ids in lists for id in ids])


def parts_of(
    ids: Sequence[int], cuts: Sequence[int], params: SamplingParams
) -> tuple[ChatReply, list[Delta]]:
    """The reply to these tokens, and its parts if they come in events as cut."""
    reply = ChatReply(Request([1], 10, params), TOKENIZER)
    parts: list[Delta] = []
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    for start, end in zip(borders, [*borders[1:], None], strict=True):
        tokens = list(ids[start:end])
        logprobs = None
        if params.logprobs is not None:
            logprobs = [TokenLogprobs(id, -1.0, (), 1) for id in tokens]
        reason = "length" if end is None else None
        parts += reply.push(Event(1, tokens, logprobs, reason))
    return reply, parts


@given(
    TOKENS,
    st.lists(st.integers(0, 100), max_size=5),
    st.lists(st.integers(0, 100), max_size=5),
    st.sampled_from([(), ("stop",), ("x", "é")]),
    st.sampled_from([None, 0]),
)
def test_parts_add_up(
    ids: list[int],
    cuts: list[int],
    joins: list[int],
    stop: tuple[str, ...],
    logprobs: int | None,
) -> None:
    params = SamplingParams(stop=stop, logprobs=logprobs)
    reply, parts = parts_of(ids, cuts, params)
    # A slow reader gets some of them merged.
    borders = sorted({0, *(join % (len(parts) + 1) for join in joins)})
    read = [
        part
        for start, end in zip(borders, [*borders[1:], None], strict=True)
        for part in merge(parts[start:end])
    ]
    turn = Turn()
    found: dict[str, Any] = {"reasoning": "", "content": ""}
    calls: list[dict[str, Any]] = []
    for part in read:
        delta = turn.push(part)
        for name in ("reasoning", "content"):
            found[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append(call["function"] | {"arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    message = message_of_choice(reply.output())
    assert found["reasoning"] == message.get("reasoning", "")
    assert found["content"] == (message["content"] or "")
    assert calls == [call["function"] for call in message.get("tool_calls", ())]
    if logprobs is not None:
        assert [id for part in read for id in part.token_ids] == reply.token_ids
        entries = [entry for part in read for entry in part.logprobs or ()]
        assert [entry.token_id for entry in entries] == reply.token_ids


@given(TOKENS, st.lists(st.integers(0, 100), max_size=5))
def test_logprobs_of_parts_add_up(ids: list[int], cuts: list[int]) -> None:
    entries = [TokenLogprobs(id, -1.0, ((5, float("-inf")),), 1) for id in ids]
    whole = LegacyLogprobs(TOKENIZER).push(ids, entries)
    pieces: dict[str, list[Any]] = {name: [] for name in whole}
    parted = LegacyLogprobs(TOKENIZER)
    borders = sorted({0, *(cut % (len(ids) + 1) for cut in cuts)})
    for start, end in zip(borders, [*borders[1:], None], strict=True):
        for name, values in parted.push(ids[start:end], entries[start:end]).items():
            pieces[name] += values
    assert pieces == whole
    text = TOKENIZER.decode(ids, skip_special=True)
    assert all(0 <= offset <= len(text) for offset in whole["text_offset"])
    assert whole["text_offset"] == sorted(whole["text_offset"])
    assert b"NaN" not in event(whole) and b"null" not in event(whole)


def test_no_logprobs() -> None:
    assert chat_logprobs(None, TOKENIZER) is None
    assert chat_logprobs([], TOKENIZER) == {"content": [], "refusal": None}


def test_tokens_that_are_no_text_have_names_of_their_own() -> None:
    names = {token_name(id, TOKENIZER) for id in range(256)}
    assert len(names) == 256


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            {"a": "\n\r\x85\u2028\u2029é"},
            'data: {"a":"\\n\\r\\u0085\\u2028\\u2029é"}\n\n',
        ),
        ({"type": "ping"}, 'event: ping\ndata: {"type":"ping"}\n\n'),
    ],
)
def test_an_event_is_a_line(data: dict[str, Any], text: str) -> None:
    assert event(data).decode() == text
