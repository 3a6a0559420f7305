"""Workloads: lengths, arrivals, conversations, and files of them."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from simplellm.apps.workloads import (
    WORKLOADS,
    Arrival,
    conversations,
    draw_workload,
    poisson_arrivals,
    read_workload,
)

named = pytest.mark.parametrize("name", WORKLOADS)


@named
def test_a_workload_follows_from_its_seed(name):
    kind = WORKLOADS[name]
    first, again = draw_workload(kind, 20, 1), draw_workload(kind, 20, 1)
    other = draw_workload(kind, 20, 2)
    assert first == again
    assert len(first) == len(other) == 20
    assert not {str(a.body) for a in first} & {str(a.body) for a in other}
    seeds = [one.body["seed"] for one in first]
    assert seeds == [*range(1, 21)]


@named
def test_lengths_are_within_their_bounds_and_around_their_median(name):
    kind = WORKLOADS[name]
    found = draw_workload(kind, 30 if kind.first else 300, 5)
    prompts = []
    opening = kind.prompt if kind.first is None else (kind.first,) * 3
    for one in found:
        assert one.body["ignore_eos"]
        said = one.body.get("messages", [{"role": "user", "content": ""}])
        roles = [message["role"] for message in said]
        text = one.body.get("prompt") or said[roles.index("user")]["content"]
        prompts.append(len(text.split()))
        if "system" in roles:
            assert len(said[0]["content"].split()) == kind.shared
    for lengths, (median, least, most) in (
        (prompts, opening),
        ([one.body["max_tokens"] for one in found], kind.output),
    ):
        assert least <= min(lengths) <= max(lengths) <= most
        assert median / 1.5 < np.median(lengths) < 1.5 * median


@named
def test_what_comes_together_shares_its_beginning(name):
    kind = WORKLOADS[name]
    bodies = [one.body for one in draw_workload(kind, 12, 5)]
    assert all(("messages" in body) == kind.chat for body in bodies)
    said = [body.get("messages", []) for body in bodies]
    if kind.shared:
        assert len({messages[0]["content"] for messages in said}) == 1
        assert len({messages[1]["content"] for messages in said}) == 12 // kind.turns


def test_long_agents_repeat_nine_tenths_of_a_long_prompt():
    (talk,) = conversations(draw_workload(WORKLOADS["agent-long"], 6, 3))
    lengths = [len(str(one.body["messages"]).split()) for one in talk]
    assert np.mean(lengths) == pytest.approx(64_000, rel=0.03)
    shares = [before / after for before, after in pairwise(lengths)]
    assert np.mean(shares) == pytest.approx(0.9, abs=0.01)
    assert {one.body["max_tokens"] for one in talk} == {400}


@pytest.mark.parametrize("name", ["agent", "agent-long"])
def test_agents_go_on_where_they_were(name):
    kind = WORKLOADS[name]
    talks = conversations(draw_workload(kind, 15, 3))
    assert [len(talk) for talk in talks] == [6, 6, 3]
    for talk in talks:
        for before, after in pairwise(talk):
            assert after.after == before.custom_id
            assert after.body["tools"] == before.body["tools"]
            old, new = before.body["messages"], after.body["messages"]
            assert new[: len(old)] == old
            call, result = new[len(old) :]
            (one,) = call["tool_calls"]
            assert result["tool_call_id"] == one["id"]
            query = json.loads(one["function"]["arguments"])["query"]
            assert len(query.split()) == before.body["max_tokens"]


def test_arrivals_are_poisson():
    """Gaps of an exponential distribution: its mean, its spread, no memory."""
    count, rate = 4000, 8.0
    some = [Arrival(str(k), "", {}) for k in range(count)]
    found = poisson_arrivals(some, rate, seed=1)
    assert [replace(one, at=0.0) for one in found] == some
    gaps = np.diff([0.0, *(one.at for one in found)])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.05)
    assert gaps.std() == pytest.approx(1 / rate, rel=0.1)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.05
    assert poisson_arrivals(some, rate, seed=1) == found
    assert poisson_arrivals(some, rate, seed=2) != found


def test_bursts_come_at_once_and_answers_are_waited_for():
    some = [Arrival(str(k), "", {}) for k in range(6400)]
    found = poisson_arrivals(some, 64.0, seed=1, burst=32)
    assert set(Counter(one.at for one in found).values()) == {32}
    assert found[-1].at == pytest.approx(100, rel=0.2)
    talk = [Arrival("a", "", {}), Arrival("b", "", {}, at=0.5, after="a")]
    first, second = poisson_arrivals(talk, 64.0, seed=1)
    assert first.at > 0
    assert second == talk[1]


@pytest.mark.parametrize(
    ("some", "message"),
    [
        ([("a", None), ("a", None)], "custom_id is 'a'; expected an id that no other"),
        ([("b", "a"), ("a", None)], "after is 'a'; expected the id of an earlier"),
        ([("a", None), ("b", "a"), ("c", "a")], "for which no other waits"),
    ],
)
def test_what_cannot_be_followed_is_refused(some, message):
    with pytest.raises(ValueError, match=message):
        conversations(Arrival(name, "", {}, after=after) for name, after in some)


def test_a_batch_file_of_openai_is_a_workload(tmp_path: Path):
    body = {"prompt": "time", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(line) + "\n \n\n")
    assert read_workload(file) == [Arrival("a", "/v1/completions", body)]


def test_a_file_without_requests_is_refused(tmp_path: Path):
    file = tmp_path / "in.jsonl"
    file.touch()
    with pytest.raises(ValueError, match="expected a line for each request"):
        read_workload(file)


@pytest.mark.parametrize("line", ["{", "[]", '{"custom_id": "a"}', '{"id": 1}'])
def test_a_line_that_is_no_request_is_named(line: str, tmp_path: Path):
    file = tmp_path / "in.jsonl"
    good = {"custom_id": "a", "url": "/v1/completions", "body": {}}
    file.write_text(f"{json.dumps(good)}\n{line}\n")
    with pytest.raises(ValueError, match=r"in\.jsonl: line 2: "):
        read_workload(file)
