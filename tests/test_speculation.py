"""Drafts: where they come from, how many are checked, and that no text changes."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import HELLO
from serving import serving

import simplellm
from simplellm import LLM, SamplingParams
from simplellm.base.request import UNKNOWN, Request
from simplellm.engine import step_times
from simplellm.engine.draft_budget import StepCosts
from simplellm.engine.speculator import HeadDrafts, Speculator
from simplellm.engine.stats import Stats
from simplellm.engine.suffix_drafter import (
    INDEXED_AT_ONCE,
    SuffixAutomaton,
    SuffixDrafter,
)
from simplellm.server.http import live_view

TIMES = [
    "arrival_time",
    "first_scheduled_time",
    "first_token_time",
    "finished_time",
    "preemptions",
]
TEXTS = st.lists(st.integers(0, 2), max_size=40)


def longest_earlier(text: Sequence[int]) -> int:
    """Tokens of the longest end of ``text`` that stands earlier in it, by looking."""
    return max(
        length
        for length in range(len(text))
        if any(
            text[end - length : end] == text[len(text) - length :]
            for end in range(length, len(text))
        )
    )


@given(TEXTS)
def test_the_longest_end_that_was_there_before_is_found(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for size, token in enumerate(text, 1):
        automaton.append(token)
        length, end = automaton.match()
        assert length == longest_earlier(text[:size])
        if length:
            assert length <= end < size
            assert text[end - length : end] == text[size - length : size]
    assert len(automaton.next) <= max(2 * len(text), 2)


def test_what_followed_last_time_is_guessed() -> None:
    drafter = SuffixDrafter()
    assert drafter.propose([1, 2, 3, 4, 5, 6, 1, 2], 5) == ([3, 4], 2)
    # One token more matches, so one more is guessed; no more than asked for.
    assert drafter.propose([1, 2, 3, 4, 5, 6, 1, 2, 3], 5) == ([4, 5, 6], 3)
    assert drafter.propose([1, 2, 3, 4, 5, 6, 1, 2, 3], 1) == ([4], 3)
    # What it said here came to something else: nothing of that length is there.
    assert drafter.propose([1, 2, 3, 4, 5, 6, 1, 2, 3, 9], 5) == ([], 0)


def test_a_long_prompt_is_indexed_in_parts() -> None:
    drafter, text = SuffixDrafter(), [7, 8, 9] * INDEXED_AT_ONCE
    assert drafter.propose(text, 2) == drafter.propose(text, 2) == ([], 0)
    drafts, length = drafter.propose(text, 2)
    assert drafts == [7, 8] and length == len(text) - 3


def test_a_step_costs_what_was_measured() -> None:
    costs = StepCosts({1: 1.0, 4: 0.9, 8: 5.0})
    assert [costs(tokens) for tokens in (1, 2, 4, 6, 8, 12)] == [1, 1, 1, 3, 5, 9]


def request(tokens: Sequence[int], request_id: int = 0) -> Request:
    return Request(list(tokens), max_tokens=1000, request_id=request_id)


FLAT = {1: 1.0, 512: 1.0}  # a step costs the same, however many tokens it has
STEEP = {1: 1.0, 512: 512.0}  # each token costs as much as a step of one


def test_drafts_that_are_right_are_worth_more_and_more() -> None:
    speculator = Speculator(8, StepCosts({1: 1.0, 512: 52.1}))  # a tenth for each
    one = request([1, 2, 3, 4, 5, 6, 7, 8] * 4)
    lengths = []
    for token in [1, 2, 3, 4, 5, 6, 7, 8] * 2:
        (drafts,) = speculator.choose([one], 1, 100)
        assert drafts == one.tokens[-32:][: len(drafts)]
        lengths.append(len(drafts))
        one.tokens.append(token)
    assert 0 < lengths[0] < lengths[-1] == 8


def test_drafts_that_are_never_right_are_not_checked() -> None:
    speculator = Speculator(8, StepCosts(FLAT))
    one = request([1, 2, 3] * 9)
    checked = []
    for token in range(100, 140):
        (drafts,) = speculator.choose([one], 1, 100)
        checked.append(len(drafts))
        # What was guessed never comes, though the same three tokens come again.
        one.tokens += [token, 1, 2, 3]
    assert checked[0] > 0
    speculator.costs = StepCosts({1: 1.0, 512: 52.1})
    assert speculator.choose([one], 1, 100) == [[]]
    # Nor are those of a newcomer: others' experience counts.
    assert speculator.choose([request([5, 6, 7] * 2 + [1, 5, 6, 7])], 1, 100) == [[]]


def test_nothing_is_checked_where_each_token_costs_a_step() -> None:
    speculator = Speculator(8, StepCosts(STEEP))
    assert speculator.choose([request([1, 2, 3] * 9)], 1, 100) == [[]]


def test_a_number_is_a_number() -> None:
    speculator = Speculator(3)
    one, other = request([1, 2, 3] * 9), request([4, 5] * 9, request_id=1)
    assert speculator.choose([one, other], 2, 100) == [[1, 2, 3], [4, 5]]
    assert sum(map(len, speculator.choose([one, other], 2, 4))) == 4  # of a room of 4
    one.tokens.append(UNKNOWN)
    assert speculator.choose([one], 1, 100) == [[]]
    assert speculator.should_wait(one) and not speculator.should_wait(other)
    other.max_tokens = 2  # the second token comes of the step itself
    assert speculator.choose([other], 1, 100) == [[4]]


def test_a_drafter_of_another_kind_has_its_drafts_checked() -> None:
    class Counting:
        def propose(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
            return [tokens[-1] + step for step in range(1, most + 1)], 0

    speculator = Speculator(3, drafter=Counting)
    assert speculator.choose([request([5]), request([8])], 2, 100) == [
        [6, 7, 8],
        [9, 10, 11],
    ]


class Made:
    """A proposer that makes wrong drafts, but for a coin's share of right ones."""

    count, deliver = 5, None


DENSE = {1: 3.8, 2: 4.4, 64: 4.7, 256: 7.5}  # ms of steps, Llama-3.1-8B on an H200
# gpt-oss-120b: each token has experts of its own
SPARSE = {1: 1.9, 2: 2.6, 4: 3.7, 8: 5.5, 16: 8.0, 32: 11.6, 64: 14.8, 128: 17.2}
SPARSE |= {256: 19.6}


def slowdown(
    batch: int,
    chance: float,
    steps: int,
    prior: float | None = None,
    measured: Mapping[int, float] = DENSE,
    overhead: Callable[[float], float] = lambda each: 0.0,
) -> float:
    """Times of steps with drafts, by the costs themselves, of those without.

    ``chance`` is that a draft is right, and ``prior`` what it was for 200 steps before.
    A step that checks so many drafts of each request takes ``overhead`` ms more than
    what was measured at the start.
    """
    times, draft, made = StepCosts(measured), 0.28, Made()
    speculator = Speculator(5, times, HeadDrafts, proposer=made)
    speculator.draft_costs = StepCosts({1: draft})
    coin = random.Random(batch)
    phases = [(prior, 200)] if prior is not None else []
    for right, count in [*phases, (chance, steps)]:
        asked = [Request([1], 10**6, request_id=number) for number in range(batch)]
        seconds, tokens, ahead, before = 0.0, 0, 0, (False, False)
        for step in range(count):
            if not speculator.backs_off(batch):
                for one in asked if ahead else ():
                    drafts = [100] * ahead
                    speculator.receive(one, len(one.tokens), one.tokens[-1], drafts)
                offers = speculator.choose(asked, batch, 256)
                ahead = speculator.plan(asked, 256)
            else:
                offers, ahead = [[]] * batch, 0
            drafted = sum(map(len, offers))
            took = times(batch + drafted) + ahead * draft + overhead(drafted / batch)
            if before == (kind := (drafted > 0, ahead > 0)) and kind[0] == kind[1]:
                speculator.learn_interval(batch + drafted, drafted, took, ahead)
            seconds, before = seconds + took, kind
            for one, offer in zip(asked, offers, strict=True):
                good = 0  # drafts, which may be more than those that are checked
                while good < 5 and coin.random() < right:
                    good += 1
                one.tokens += offer[:good]
                one.tokens.append(100 if good > len(offer) else step % 100)
                tokens += min(good, len(offer)) + 1
    return seconds / times(batch) * batch / tokens


@pytest.mark.parametrize("measured", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_drafts_that_are_never_right_cost_nothing_to_speak_of(
    batch: int, measured: Mapping[int, float]
) -> None:
    assert slowdown(batch, 0.0, 256, measured=measured) < 1.01
    # Even if they were right before, and are so no more.
    assert slowdown(batch, 0.0, 500, prior=0.75, measured=measured) < 1.01


@pytest.mark.parametrize(
    ("measured", "batch", "least"),
    [
        (DENSE, 1, 1.7),
        (DENSE, 8, 2.1),
        (DENSE, 64, 1.3),
        (SPARSE, 8, 1.15),
        (SPARSE, 64, 1.8),
    ],
)
def test_good_drafts_are_hardly_ever_given_up(
    measured: Mapping[int, float], batch: int, least: float
) -> None:
    speedup = 1 / slowdown(batch, 0.75, 300, measured=measured)
    assert speedup > least


@pytest.mark.parametrize("chance", [0.5, 0.6])
def test_drafts_do_not_pay_if_steps_with_them_wait_for_the_host(chance: float) -> None:
    """Each draft more costs more than its row and than what makes it."""
    late = lambda each: (each > 0) * (1.1 + 0.9 * each)  # noqa: E731
    assert slowdown(64, chance, 600, overhead=late) < 1.01
    # One request has so much of a step to itself that they pay.
    assert 1 / slowdown(1, 0.75, 600, overhead=late) > 1.1


def test_drafts_that_share_their_experts_are_worth_more() -> None:
    """On an H200 three drafts of two requests took 0.6 ms less than was measured.

    What was measured are steps of tokens that have nothing in common.
    """
    shared = lambda each: (each > 0) * (1.4 - 0.68 * each)  # noqa: E731
    assert 1 / slowdown(2, 0.75, 600, measured=SPARSE, overhead=shared) > 1.25


def test_drafts_that_become_good_are_found_again() -> None:
    speedup = 1 / slowdown(4, 0.75, 1000, prior=0.0)
    assert speedup > 1.5


def test_drafts_that_take_longer_than_they_bring_are_left_out() -> None:
    """As on an H200 with 64 requests: each draft costs more than its row in a step."""

    class Ones:
        def propose(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
            return [1] * most, 0

    costs = StepCosts({1: 3.8, 64: 4.7, 128: 5.4, 256: 7.2})
    speculator, coin = Speculator(5, costs, Ones), random.Random(0)
    asked = [request([2], number) for number in range(64)]
    totals = []
    for _ in range(60):
        drafts = sum(map(len, speculator.choose(asked, 64, 256)))
        totals.append(drafts)
        seconds = costs(64 + drafts) + 1.1 + 0.014 * drafts
        speculator.learn_interval(64 + drafts, drafts, seconds)
        for one in asked:
            while coin.random() < 0.75:
                one.tokens.append(1)
            one.tokens.append(2)
    assert max(totals) > 192  # it has been tried
    assert all(96 < drafts < 192 for drafts in totals[-20:])


class Device:
    """Stands for a head, whose drafts are made on the device."""

    count = 0

    def deliver(self, request: Request, length: int, last: int, ids: list[int]) -> None:
        raise AssertionError("nothing was made")


def steps_until_drafts(speculator: Speculator, batch: int, most: int = 1000) -> int:
    """How many steps pass before drafts are made of ``batch`` requests."""
    asked = [request([2], number) for number in range(batch)]
    for number in range(most):
        speculator.backs_off(batch)
        if speculator.plan(asked, 4 * batch):
            return number
    return most


def test_what_one_stream_pays_for_a_draft_is_shared_by_many() -> None:
    costs = StepCosts({1: 1.0, 2: 1.5, 4: 2.5, 64: 4.5, 320: 7.0})
    speculator = Speculator(5, costs, proposer=Device())
    for drafts in (1, 2, 3, 1, 2, 3):  # 0.5 each: one stream gains nothing
        seconds = costs(1 + drafts) + 0.5 * drafts
        speculator.learn_interval(1 + drafts, drafts, seconds, drafts)
    speculator.learn_interval(1, 0, costs(1))
    assert steps_until_drafts(speculator, 1, most=8) == 8
    speculator.backoff.left = 0
    assert steps_until_drafts(speculator, 64) == 0


def test_a_prompt_in_the_step_drafts_nothing_and_costs_no_drafts() -> None:
    class Model:
        def propose(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
            return [1] * most, 0

    costs = StepCosts({1: 30.0, 16: 31.0, 32: 32.0, 1024: 90.0})
    speculator = Speculator(5, costs, Model, serial_drafter=True)
    speculator.draft_costs = StepCosts({1: 0.5, 2: 1.0})
    asked = [request([2], number) for number in range(4)]
    for _ in range(30):
        drafts = sum(map(len, speculator.choose(asked, 4, 256)))
        seconds = costs(4 + drafts) + 5 * 4 * 0.5
        speculator.learn_interval(4 + drafts, drafts, seconds)
        for one in asked:
            one.tokens += [1, 1, 2]
    assert any(speculator.choose(asked, 4, 256))
    for one in asked:
        one.tokens.append(2)
    assert any(speculator.choose(asked, 4 + 512, 256))


def test_what_a_graph_pads_costs_what_the_graph_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {1: 0.01, 2: 0.02, 4: 0.03, 6: 0.05, 8: 0.09}
    graphs = [SimpleNamespace(size=size) for size in (2, 4, 6)]
    asked = SimpleNamespace(
        sampled_tokens=range(9),
        device=torch.device("cpu"),
        verify_graphs=graphs,
    )
    # In place of the steps themselves, which take as long as these.
    monkeypatch.setattr(step_times, "dummy_step", lambda _, size: size)
    monkeypatch.setattr(step_times, "fastest", lambda size, _: seconds[size])
    runner: Any = asked
    costs = StepCosts(step_times.time_steps(runner))
    expected = [0.01, 0.02, 0.03, 0.03, 0.05, 0.05, 0.07, 0.09]
    assert [costs(tokens) for tokens in range(1, 9)] == pytest.approx(expected)


def test_a_price_that_was_measured_wrongly_is_measured_again() -> None:
    costs = StepCosts({1: 3.8, 64: 4.7, 128: 5.4, 256: 7.2})
    speculator = Speculator(3, costs, proposer=Device())
    for _ in range(30):  # something else held the machine up
        speculator.learn_interval(256, 192, costs(256) + 100.0, 3)
    speculator.learn_interval(64, 0, costs(64))
    assert 100 < steps_until_drafts(speculator, 64, most=3000) < 3000


def test_a_pause_between_two_steps_is_no_price_of_drafts() -> None:
    """A garbage collection took 0.1 s where a step takes a few milliseconds."""
    costs = StepCosts({1: 3.8, 2: 4.4, 64: 4.7, 256: 7.5})
    speculator = Speculator(5, costs, proposer=Device())
    speculator.learn_interval(1, 0, costs(1))
    for seconds in (100.0, *[costs(6)] * 4):
        speculator.learn_interval(6, 5, seconds, 5)
        assert steps_until_drafts(speculator, 1) == 0
    for _ in range(20):  # many in a row may be one, but are soon forgotten
        speculator.learn_interval(6, 5, 100.0, 5)
    assert 0 < steps_until_drafts(speculator, 1) < 200


def test_a_step_with_drafts_is_one_that_was_captured() -> None:
    costs = StepCosts({1: 3.8, 1024: 7.5})
    speculator = Speculator(5, costs, proposer=Device())
    speculator.max_verify_tokens = 512
    assert speculator.plan([request([2], n) for n in range(64)], 8192) == 5
    assert speculator.plan([request([2], n) for n in range(200)], 8192) == 1
    assert speculator.plan([request([2], n) for n in range(300)], 8192) == 0


# The engine's texts

ASKED = [
    SamplingParams(temperature=0, max_tokens=60),
    SamplingParams(seed=1, max_tokens=60, logprobs=2),
    SamplingParams(seed=2, max_tokens=60, frequency_penalty=0.2, min_tokens=20),
    SamplingParams(seed=3, max_tokens=60, bad_words=["1"], stop=["= 9"]),
    SamplingParams(seed=4, max_tokens=60, structured_outputs={"regex": "(ab|cde){15}"}),
    SamplingParams(
        seed=5,
        max_tokens=60,
        repetition_penalty=1.1,
        structured_outputs={"regex": "(one |two |three ){12}"},
    ),
    SamplingParams(seed=6, max_tokens=60, n=2, top_p=0.9, min_p=0.01),
]


def answers(**options: object) -> tuple[list[object], Stats]:
    """What the embedded model says, and what its engine counts."""
    prompt = "Add digit by digit. Add digit by digit. 12 + 34 = 46, 12 + 35 = 47, 12 +"
    with LLM(device="cpu", **options) as llm:  # type: ignore[arg-type]
        futures = [llm.generate([prompt], params) for params in ASKED]
        futures += [llm.chat_future([HELLO], temperature=0, max_tokens=60)]
        texts: list[object] = []
        for future in futures:
            for output in future.result():
                samples = getattr(output, "choices", [output])
                texts += [(s.token_ids, s.finish_reason) for s in samples]
        return texts, llm.stats()


def test_drafts_change_no_text() -> None:
    expected, _ = answers()
    for number in (None, 4):
        texts, stats = answers(speculative="suffix", num_speculative_tokens=number)
        assert texts == expected
        accepted = sum(stats.accepted_tokens.values())
        least = 0 if number is None else 20  # None: what this machine gains by it
        assert least <= accepted <= sum(stats.draft_tokens.values())


def test_a_model_drafts() -> None:
    """The embedded one for itself: what it says greedily, it guessed."""
    folder = Path(simplellm.__file__).parent / "embedded"
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    found = []
    for more in ({}, {"speculative": str(folder), "num_speculative_tokens": 3}):
        with LLM(device="cpu", **more) as llm:
            outputs = llm.generate(["12 + 34 =", "Hello, and " * 50], **options)
            found.append([output.token_ids for output in outputs.result()])
            stats = llm.stats()
    assert found[0] == found[1]
    assert stats.draft_tokens == stats.accepted_tokens and stats.drafts == 2 * 7


def test_a_request_tells_of_its_drafts() -> None:
    copied = "12 + 34 = 46, 12 + 35 = 47, "
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 0}
    with LLM(device="cpu", speculative="suffix", num_speculative_tokens=3) as llm:
        prompts = [copied * 3, copied * 2, "Hello"]
        outputs = llm.generate(prompts, **options).result()
        stats = llm.stats()
        *_, last = llm.stream(copied * 3, **options)
    assert last.metrics == replace(
        outputs[0].metrics, **{n: getattr(last.metrics, n) for n in TIMES}
    )
    for name in ("draft_tokens", "accepted_tokens"):
        told = [getattr(output.metrics, name) for output in outputs]
        by_place = zip_longest(*told, fillvalue=0)
        counted = {str(n): sum(counts) for n, counts in enumerate(by_place, 1)}
        found = getattr(stats, name)
        assert {n: count for n, count in counted.items() if count} == found
    first = outputs[0].metrics
    assert 3 == len(first.draft_tokens) == len(first.accepted_tokens)
    pairs = zip(first.draft_tokens, first.accepted_tokens, strict=True)
    assert all(checked >= right for checked, right in pairs)
    # A place is reached only by way of those before it.
    assert sorted(first.accepted_tokens, reverse=True) == [*first.accepted_tokens]


def test_servers_tell_of_drafts() -> None:
    body = {"prompt": "12 + 34 = 46, " * 4, "max_tokens": 30, "temperature": 0}
    options: Any = {"speculative": "suffix", "num_speculative_tokens": 2}
    with LLM(device="cpu", **options) as llm, serving(llm) as served:
        assert served.post("/v1/completions", body).status_code == 200
        text = served.client.get("/metrics").text
        found = dict(re.findall(r"^simplellm:spec_decode_(\S+) (\S+)$", text, re.M))
        stats = llm.stats()
        seen = live_view.SnapshotPoller(served.service).poll()["totals"]
    labels = f'engine="0",model_name="{served.service.options.names[0]}"'
    sums = [sum(c.values()) for c in (stats.draft_tokens, stats.accepted_tokens)]
    assert stats.drafts > 5 and 0 < sums[1] <= sums[0] <= 2 * stats.drafts
    assert float(found[f"num_drafts_total{{{labels}}}"]) == stats.drafts
    assert float(found[f"num_draft_tokens_total{{{labels}}}"]) == sums[0]
    assert float(found[f"num_accepted_tokens_total{{{labels}}}"]) == sums[1]
    for place, count in stats.accepted_tokens.items():
        name = "num_accepted_tokens_per_pos_total"
        named = f'{name}{{{labels},position="{int(place) - 1}"}}'
        assert float(found[named]) == count
    assert seen["drafts"] == stats.draft_tokens
    assert seen["accepted"] == stats.accepted_tokens


def test_wrong_combinations_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens is 3; expected None"):
        LLM(device="cpu", num_speculative_tokens=3)
    with pytest.raises(ValueError, match="speculative is 'eagle'; expected one of"):
        LLM(device="cpu", speculative="eagle")
