"""The pure core of streams: whatever parts come, however cut, they add up."""

from typing import Any

import pytest
from cut_turns import CUTS, TOKENS, CutTurn, cut, cut_turns
from hypothesis import given
from models import TOKENIZER

from simplellm.base.request import TokenLogprobs
from simplellm.server.http.sse import event
from simplellm.server.openai.deltas import Turn, message_of_choice
from simplellm.server.openai.logprobs import LegacyLogprobs, chat_logprobs, token_name


@given(cut_turns())
def test_parts_add_up(cut_turn: CutTurn) -> None:
    params, reply, _, read = cut_turn
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
    if params.logprobs is not None:
        assert [id for part in read for id in part.token_ids] == reply.token_ids
        entries = [entry for part in read for entry in part.logprobs or ()]
        assert [entry.token_id for entry in entries] == reply.token_ids


@given(TOKENS, CUTS)
def test_logprobs_of_parts_add_up(ids: list[int], cuts: list[int]) -> None:
    entries = [TokenLogprobs(id, -1.0, ((5, float("-inf")),), 1) for id in ids]
    whole = LegacyLogprobs(TOKENIZER).push(ids, entries)
    pieces: dict[str, list[Any]] = {name: [] for name in whole}
    parted = LegacyLogprobs(TOKENIZER)
    for run in cut(entries, cuts):
        for name, values in parted.push([entry.token_id for entry in run], run).items():
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
