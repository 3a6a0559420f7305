"""Replies: tokens in, text or a turn of a chat out, whatever the tokens are."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import TOKENIZER, spelled

from simplellm.api.outputs import merge
from simplellm.api.reply import (
    ChatChoice,
    ChatReply,
    RequestOutput,
    TextReply,
    is_reasoning,
)
from simplellm.api.stops import StopStrings
from simplellm.base.request import Event, Request, TokenLogprobs
from simplellm.base.sampling_params import SamplingParams
from simplellm.text.harmony import Delta, ToolCall, from_openai, parse, tool_calls

PROMPT = [5, 6, 7]


def encoded(text: str) -> list[int]:
    return TOKENIZER.encode(text, special=True)


def logprobs_of(tokens: Sequence[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -0.5, ((token, -0.5),), 1) for token in tokens]


def events(
    tokens: Sequence[int], finish_reason: str | None, size: int = 1
) -> list[Event]:
    """``tokens`` as they come, ``size`` at a time; the last event tells the end."""
    parts = [tokens[i : i + size] for i in range(0, len(tokens), size)] or [()]
    ends = [None] * (len(parts) - 1) + [finish_reason]
    return [
        Event(1, part, logprobs_of(part), end)
        for part, end in zip(parts, ends, strict=True)
    ]


def asked(stop: Sequence[str] = (), logprobs: int | None = 1) -> Request:
    """A request for a reply."""
    params = SamplingParams(stop=stop, logprobs=logprobs)
    return Request(PROMPT, max_tokens=100, params=params)


def text_reply(
    tokens: Sequence[int],
    stop: Sequence[str] = (),
    finish_reason: str | None = "length",
    size: int = 1,
) -> tuple[list[str], TextReply]:
    """What each event added, and the reply."""
    reply = TextReply(asked(stop), TOKENIZER)
    pushed = [reply.push(event) for event in events(tokens, finish_reason, size)]
    return ["".join(part.text for part in parts) for parts in pushed], reply


def chat_reply(
    tokens: Sequence[int],
    stop: Sequence[str] = (),
    finish_reason: str | None = "stop",
    size: int = 1,
    logprobs: int | None = None,
) -> tuple[list[Delta], ChatReply]:
    """All deltas, and the reply."""
    reply = ChatReply(asked(stop, logprobs), TOKENIZER)
    pushed = [reply.push(event) for event in events(tokens, finish_reason, size)]
    return [delta for deltas in pushed for delta in deltas], reply


# Stop strings


def until_stop(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first, one char at a time."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


def longest_beginning(text: str, stops: list[str]) -> int:
    """How many of the text's last characters may be the beginning of a stop string."""
    lengths = (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))
    return max(lengths, default=0)


@settings(max_examples=500)
@given(
    st.lists(st.text("ab", min_size=0, max_size=6), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=9), max_size=3),
)
def test_stop_strings_do_not_depend_on_the_pieces(
    parts: list[str], stops: list[str]
) -> None:
    side = StopStrings(stops)
    shown = so_far = ""
    for part in parts:
        shown += side.push(part)
        so_far += part
        if side.match:
            break
        # All but what may become a stop string is out at once.
        assert shown == so_far[: len(so_far) - longest_beginning(so_far, stops)]
        assert shown + side.pending == so_far
    else:
        shown += side.flush()
    assert shown == until_stop("".join(parts), stops)
    assert side.pending == ""


@settings(max_examples=200)
@given(
    st.text("ab", max_size=12), st.text("ab", max_size=12), st.text("ab", min_size=1)
)
def test_flushed_stop_strings_begin_anew(first: str, second: str, stop: str) -> None:
    side = StopStrings([stop])
    if side.push(first) + side.flush() == first:
        assert side.push(second) + side.flush() == until_stop(second, [stop])


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python run in ``call``."""
    count = 0

    def trace(frame: object, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("matching", [False, True])
def test_a_long_stop_string_costs_no_more_than_a_short_one(matching: bool) -> None:
    def pushed(stop: str) -> int:
        side, text = StopStrings([stop]), "xyz " * 20
        text = stop[:40] + text if matching else text
        return lines_run(lambda: [side.push(text[i : i + 4]) for i in range(0, 90, 4)])

    assert pushed("ab" * 2048) == pushed("ab" * 32)


@pytest.mark.parametrize("stop", ["a" * 4096, "ab" * 2048, "a" * 2000 + "b" * 2096])
def test_stop_strings_cost_a_bounded_amount_a_character(stop: str) -> None:
    # The longest matches there are, with all their shorter ones, and then none.
    text = (stop[:-1] + "c" + stop[:1000] + "a" + stop[:1000])[:6000]
    side = StopStrings([stop, stop[1:] + "z"])
    lines = lines_run(lambda: [side.push(character) for character in text])
    assert not side.match and lines < 60 * len(text)


# Text


def test_text_and_what_comes_with_it() -> None:
    tokens = encoded("The sum is 132.<|return|>")
    reply = TextReply(asked(logprobs=None), TOKENIZER)
    parts = [reply.push(event)[0] for event in events(tokens, "stop")]
    assert reply.output() == RequestOutput(
        text="The sum is 132.",
        token_ids=tokens,
        finish_reason="stop",
        logprobs=None,
        prompt_token_ids=PROMPT,
    )
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [
        "stop"
    ]
    assert all(part.prompt_token_ids == PROMPT for part in parts)
    assert all(part.logprobs is None for part in parts)


def test_a_stream_holds_whole_characters() -> None:
    text = "na\u00efve \u4e16\u754c \U0001f600!"
    texts, reply = text_reply(spelled(text))
    assert "".join(texts) == text == reply.output().text
    assert "\ufffd" not in "".join(texts)
    assert texts.count("") == len(text.encode()) - len(text)


def test_a_character_cut_off_becomes_a_replacement() -> None:
    texts, _ = text_reply(spelled("ok \u4e16")[:5])
    assert texts == ["o", "k", " ", "", "\ufffd"]


def test_a_reply_may_end_without_another_token() -> None:
    texts, reply = text_reply(spelled("a ST") + spelled("\u4e16")[:2], ["STOP"], None)
    last = reply.push(Event(1, finish_reason="abort"))[0]
    assert texts == ["a", " ", "", "", "", ""] and last.text == "ST\ufffd"
    assert reply.output().text == "a ST\ufffd"
    assert last.token_ids == [] and last.logprobs == []
    assert last.finish_reason == reply.finish_reason == "abort"


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    _, reply = text_reply([*spelled("a"), 1099, *spelled("b")])
    assert reply.output().text == "ab" and reply.output().token_ids[1] == 1099


def test_without_a_tokenizer_there_is_no_text() -> None:
    reply = TextReply(asked(logprobs=None), None)
    assert reply.push(Event(1, [1, 2], finish_reason="length"))[0].text == ""
    assert reply.output().token_ids == [1, 2] and reply.finish_reason == "length"


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_stop_strings_cross_token_borders(whole: bool, size: int) -> None:
    text = "The answer is 132.\nUser: and now?"
    tokens = TOKENIZER.encode(text) if whole else spelled(text)
    texts, reply = text_reply(tokens, ["\nUser", "never"], "length", size)
    output = reply.output()
    assert output.text == "The answer is 132." == "".join(texts)
    assert output.finish_reason == reply.finish_reason == "stop"
    # What came behind the stop string does not count, not even in the same event.
    read = TOKENIZER.decode(output.token_ids)
    assert read.startswith("The answer is 132.\nUser")
    assert not TOKENIZER.decode(output.token_ids[:-1]).endswith("\nUser")
    assert output.logprobs == logprobs_of(output.token_ids)


def test_text_held_back_comes_when_no_stop_string_follows() -> None:
    tokens = [*spelled("a STO"), TOKENIZER.special["<|return|>"]]
    texts, _ = text_reply(tokens, ["STOP"], "stop")
    assert texts == ["a", " ", "", "", "", "STO"]
    _, reply = text_reply(tokens[:4], ["STOP"])
    assert reply.output().text == "a ST" and reply.finish_reason == "length"


def test_a_stop_string_in_the_last_token_counts_as_stop() -> None:
    _, reply = text_reply(spelled("abc"), ["c"])
    assert reply.output().text == "ab" and reply.finish_reason == "stop"
    _, reply = text_reply(spelled("ab\u4e16")[:3], ["\ufffd"])
    assert reply.output().text == "ab" and reply.finish_reason == "stop"


def test_what_comes_after_a_stop_string_is_ignored() -> None:
    _, reply = text_reply(spelled("abc"), ["b"], None)
    before = reply.output()
    assert reply.push(Event(1, spelled("d"), logprobs_of([1]), "length")) == []
    assert reply.output() == before and before.text == "a"


IDS = st.lists(
    st.one_of(
        st.sampled_from(sorted(TOKENIZER.special.values())),
        st.sampled_from(
            TOKENIZER.encode("assistant to=functions.f final analysis commentary 🙂 ab")
        ),
        st.sampled_from(spelled("ab é🙂")),
        st.integers(-1, 1200),
    ),
    max_size=40,
)
STOPS = st.lists(st.text("ab fin\ufffd", min_size=1, max_size=4), max_size=3)
REASONS = st.sampled_from(["stop", "length", "abort"])


@settings(max_examples=300)
@given(IDS, STOPS, REASONS, st.integers(1, 5))
def test_any_tokens_make_a_text(
    ids: list[int], stops: list[str], reason: str, size: int
) -> None:
    reply = TextReply(asked(stops), TOKENIZER)
    parts = [part for event in events(ids, reason, size) for part in reply.push(event)]
    output = reply.output()
    visible = ids[:-1] if reason == "stop" else ids  # the last one stopped it
    text = TOKENIZER.decode(visible, skip_special=True)
    assert output.text == until_stop(text, stops)
    stopped = output.text != text
    assert output.finish_reason == ("stop" if stopped else reason)
    assert output.text == "".join(part.text for part in parts)
    assert output.token_ids == [t for part in parts for t in part.token_ids]
    assert output.logprobs == logprobs_of(output.token_ids)
    assert output.token_ids == (ids[: len(output.token_ids)] if stopped else ids)
    one_by_one = TextReply(asked(stops), TOKENIZER)
    for event in events(ids, reason):
        one_by_one.push(event)
    assert one_by_one.output() == output
    unread = TextReply(asked(stops), TOKENIZER)
    for number, event in enumerate(events(ids, reason, size)):
        unread.take(event)
        if number % 3 == size % 3:
            assert output.text.startswith(unread.output().text)
    assert unread.output() == output


# Chat

ANSWER = "<|start|>assistant<|channel|>final<|message|>"
THOUGHT = "<|channel|>analysis<|message|>"
CALL = "<|channel|>commentary to=functions.f<|message|>"


def test_a_turn_is_taken_apart() -> None:
    text = f"{THOUGHT}7 + 5 = 12.<|end|>{ANSWER}132<|return|>"
    tokens = encoded(text)
    deltas, reply = chat_reply(tokens)
    expected = ChatChoice(
        reasoning="7 + 5 = 12.",
        content="132",
        tool_calls=[],
        finish_reason="stop",
        token_ids=tokens,
        logprobs=None,
    )
    assert reply.output() == expected and reply.finish_reason == "stop"
    for channel, part in (("analysis", "7 + 5 = 12."), ("final", "132")):
        assert "".join(d.text for d in deltas if d.channel == channel) == part
    assert reply.reasoning_tokens == len(TOKENIZER.encode("7 + 5 = 12."))


def test_a_turn_that_calls_functions_says_so() -> None:
    call = (
        "<|channel|>commentary to=functions.calculator <|constrain|>json<|message|>"
        '{"expression": "12 * 34"}'
    )
    _, reply = chat_reply(encoded(call + "<|call|>"))
    choice = reply.output()
    assert choice.tool_calls == [ToolCall("calculator", '{"expression": "12 * 34"}')]
    assert choice.content == choice.reasoning == ""
    assert choice.finish_reason == "tool_calls"
    _, reply = chat_reply(encoded(call)[:-2], (), "length")
    assert reply.finish_reason == "length" and len(reply.output().tool_calls) == 1
    _, reply = chat_reply(encoded(f"{call}<|end|>{ANSWER}no"), ["n"], None)
    assert reply.finish_reason == "stop" and len(reply.output().tool_calls) == 1


def test_stop_strings_count_in_the_answer_only() -> None:
    tokens = encoded(f"{THOUGHT}one, two<|end|>{ANSWER}one, two, three<|return|>")
    _, reply = chat_reply(tokens, [", tw"])
    choice = reply.output()
    assert choice.reasoning == "one, two" and choice.content == "one"
    assert choice.finish_reason == "stop" and len(choice.token_ids) < len(tokens)
    _, reply = chat_reply(tokens, ["three, four"])
    assert reply.output().content == "one, two, three"


def test_stop_strings_do_not_count_in_a_call() -> None:
    tokens = encoded("<|channel|>final to=functions.f<|message|>one, two<|call|>")
    _, reply = chat_reply(tokens, [", ", "o, three"])
    assert reply.output().tool_calls == [ToolCall("f", "one, two")]
    assert reply.output().content == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>final<|message|>12 ab<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.f<|message|>{}<|call|>",
            [("final", "12 ab"), ("commentary", "{}")],
        ),
        (
            "<|channel|>final<|message|>x ab<|end|><|start|>assistant"
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
            "<|channel|>final<|message|>cat<|return|>",
            [("final", "x ab"), ("analysis", "hm"), ("final", "cat")],
        ),
        (
            "<|channel|>final<|message|>x ab<|channel|>final<|message|>cat<|return|>",
            [("final", "x abcat")],
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 4])
def test_a_stop_string_lies_in_one_message(
    text: str, expected: list[tuple[str, str]], size: int
) -> None:
    deltas, reply = chat_reply(encoded(text), ["abc"], "stop", size)
    shown: list[tuple[str | None, str]] = []
    for delta in deltas:
        if shown and shown[-1][0] == delta.channel:
            shown[-1] = (delta.channel, shown[-1][1] + delta.text)
        else:
            shown.append((delta.channel, delta.text))
    assert shown == expected
    content = [part for channel, part in expected if channel == "final"]
    assert reply.output().content == "".join(content)
    assert reply.output().token_ids == encoded(text)


def test_calls_are_told_apart_as_they_come() -> None:
    then = f"<|end|><|start|>assistant{CALL}"
    deltas, _ = chat_reply(encoded(f"{CALL}1{then}{then}2<|call|>"))
    texts = [(delta.call, delta.text) for delta in deltas]
    assert texts == [(0, ""), (0, "1"), (1, ""), (2, ""), (2, "2")]


def test_a_turn_cut_off_keeps_what_was_under_way() -> None:
    tokens = encoded("<|channel|>final<|message|>") + spelled("ok \u4e16")[:4]
    _, reply = chat_reply(tokens, (), "length")
    assert reply.output().content == "ok \ufffd" and reply.finish_reason == "length"
    tokens = encoded(CALL) + spelled('{"a"')
    _, reply = chat_reply(tokens, (), None)
    assert reply.output().tool_calls == [] and reply.finish_reason is None
    assert reply.push(Event(1, finish_reason="timeout")) == []
    assert reply.output().tool_calls == [ToolCall("f", '{"a"')]
    assert reply.finish_reason == "timeout"
    assert reply.push(Event(1, spelled("x"))) == []
    assert reply.output().token_ids == tokens


def test_a_turn_can_stand_in_the_next_prompt() -> None:
    calls = f"{CALL}1<|end|><|start|>assistant<|channel|>commentary to=a<b{CALL[-11:]}2"
    _, reply = chat_reply(
        encoded(f"{THOUGHT}hm<|end|><|start|>assistant{calls}<|call|>")
    )
    message = reply.output().message()
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "content": "5"}
        for call in message["tool_calls"]
    ]
    names = [call["function"]["name"] for call in message["tool_calls"]]
    assert names == ["f", "a_b"]
    found = from_openai([message, *answers])
    assert [m.name for m in found if m.role == "tool"] == [
        "functions.f",
        "functions.a_b",
    ]
    assert found[0].content == "hm" and found[0].channel == "analysis"
    _, plain = chat_reply(encoded("<|channel|>final<|message|>5<|return|>"))
    assert plain.output().message() == {"role": "assistant", "content": "5"}


@settings(max_examples=400)
@given(IDS, STOPS, REASONS, st.integers(1, 5))
def test_any_tokens_make_a_turn(
    ids: list[int], stops: list[str], reason: str, size: int
) -> None:
    deltas, reply = chat_reply(ids, stops, reason, size)
    choice = reply.output()
    assert all(delta.text or delta.call is not None for delta in deltas)
    said = [delta for delta in deltas if delta.call is None]
    thoughts = "".join(d.text for d in said if is_reasoning(d))
    assert choice.reasoning == thoughts
    assert choice.content == "".join(d.text for d in said if not is_reasoning(d))
    calls: dict[int, str] = {}
    for delta in deltas:
        if delta.call is not None:
            calls[delta.call] = calls.get(delta.call, "") + delta.text
    assert [call.arguments for call in choice.tool_calls] == list(calls.values())
    assert choice.token_ids == ids[: len(choice.token_ids)]
    assert choice.logprobs is None
    assert 0 <= reply.reasoning_tokens <= len(choice.token_ids)
    finals = [
        m for m in parse(ids, TOKENIZER) if (m.channel, m.recipient) == ("final", None)
    ]
    cut = [until_stop(m.content, stops) for m in finals]
    stopped = [a != b.content for a, b in zip(cut, finals, strict=True)]
    first = stopped.index(True) + 1 if any(stopped) else len(cut)
    answer = "".join(
        d.text for d in said if (d.channel, d.recipient) == ("final", None)
    )
    assert answer == "".join(cut[:first])
    if any(stopped):
        assert choice.finish_reason == "stop"
    else:
        calling = reason == "stop" and choice.tool_calls
        assert choice.finish_reason == ("tool_calls" if calling else reason)
        assert choice.tool_calls == tool_calls(parse(ids, TOKENIZER))
    assert chat_reply(ids, stops, reason)[1].output() == choice


def test_each_token_is_in_one_delta_of_its_message() -> None:
    call = f"{CALL}1<|call|>"
    tokens = encoded(f"{THOUGHT}hm<|end|>{ANSWER}") + spelled("\u4e16") + encoded(call)
    deltas, _ = chat_reply(tokens, logprobs=1)
    assert [token for delta in deltas for token in delta.token_ids] == tokens
    told = [(d.channel, d.call, d.text, d.token_ids) for d in deltas if d.channel]
    thoughts = [text for channel, _, text, _ in told if channel == "analysis"]
    assert "".join(thoughts) == "hm"
    final = [(text, ids) for channel, _, text, ids in told if channel == "final"]
    first, second, third = ((token,) for token in spelled("\u4e16"))
    assert final == [("", first), ("", second), ("\u4e16", third)]
    calls = [each for each in told if each[1] == 0]
    header, one = ("commentary", 0, "", ()), tuple(TOKENIZER.encode("1"))
    assert calls == [header, ("commentary", 0, "1", one)]


@settings(max_examples=200)
@given(IDS, STOPS, REASONS, st.integers(1, 5))
def test_deltas_with_their_tokens_say_the_same(
    ids: list[int], stops: list[str], reason: str, size: int
) -> None:
    plain, reply = chat_reply(ids, stops, reason, size)
    deltas, same = chat_reply(ids, stops, reason, size, logprobs=1)
    token_ids = [token for delta in deltas for token in delta.token_ids]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert token_ids == same.output().token_ids == reply.output().token_ids
    assert logprobs == same.output().logprobs == logprobs_of(token_ids)
    bare = [replace(delta, token_ids=(), logprobs=None) for delta in deltas]
    assert said(bare) == said(plain)
    assert said(merge(deltas)) == said(plain)
    assert [t for delta in merge(deltas) for t in delta.token_ids] == token_ids


def said(deltas: Sequence[Delta]) -> dict[Any, str]:
    """The texts of all messages of a kind, each with all that it says."""
    found: dict[Any, str] = {}
    for delta in deltas:
        kind = (delta.channel, delta.recipient, delta.call)
        if delta.text or delta.call is not None:
            found[kind] = found.get(kind, "") + delta.text
    return found
