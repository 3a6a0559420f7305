"""min_tokens, bad_words and allowed_token_ids: as bits, in an engine, for a user."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import TINY, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from recompute import Recompute, forbidden
from stepping import drain, make_engine

from simplellm import LLM, EngineConfig, SamplingParams, load_model
from simplellm.base.request import Request
from simplellm.engine.sampler import SamplingTensors
from simplellm.model.model import Model
from simplellm.sampling.allowed_tokens import (
    AllowedTokens,
    bad_sequences,
    pack,
    without,
)
from simplellm.sampling.masks import Mask, Masks, apply_mask, bits_on_device

CPU = torch.device("cpu")
VOCAB = TINY.vocab_size
QUESTION = "What is 47 + 85?"


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, TINY)
    return load_model(path, device="cpu")


def allowed_by(bits: Any, vocab_size: int) -> set[int]:
    """The tokens that `apply_mask` leaves."""
    mask = torch.from_numpy(np.asarray(bits).view(np.int32))
    row = Mask(torch.tensor([0]), mask[None])
    left = apply_mask(torch.zeros(1, vocab_size), row)[0]
    return {*left.isfinite().nonzero()[:, 0].tolist()}


@given(data=st.data(), vocab_size=st.integers(1, 200))
def test_bits_stand_for_the_tokens_that_are_left(data: Any, vocab_size: int) -> None:
    tokens = st.sets(st.integers(0, vocab_size - 1))
    some, ruled_out = data.draw(tokens), data.draw(tokens)
    allowed = np.isin(np.arange(vocab_size), [*some])
    bits = pack(allowed)
    assert allowed_by(bits, vocab_size) == some
    assert allowed_by(without(bits, ruled_out), vocab_size) == some - ruled_out
    assert allowed_by(bits, vocab_size) == some, "the first bits stay as they were"
    assert bits.any() == bool(some), "bits behind the last token say nothing"


SMALL = 6  # tokens of a vocabulary in which sequences meet often
TOKENS = st.integers(0, SMALL - 1)


@settings(max_examples=300)
@given(
    prompt=st.lists(TOKENS, min_size=1, max_size=3),
    output=st.lists(TOKENS, max_size=6),
    bad=st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=6),
    allowed=st.none() | st.lists(TOKENS, min_size=1, max_size=SMALL),
    stops=st.frozensets(TOKENS, max_size=2),
    min_tokens=st.integers(0, 6),
)
def test_choices_are_what_the_rules_say(
    prompt: list[int], output: list[int], bad: Any, allowed: Any, stops: Any,
    min_tokens: int,
) -> None:  # fmt: skip
    params = SamplingParams(min_tokens=min_tokens, allowed_token_ids=allowed)
    request = Request([*prompt], 9, params, stops, bad_sequences=bad)
    request.tokens += output
    choices = AllowedTokens(request, SMALL)
    row = bits_on_device(choices, request, CPU)
    wanted = {*range(SMALL)} - forbidden(request.tokens, len(prompt), request, SMALL)
    assert allowed_by(row.numpy(), SMALL) == wanted


def test_a_row_is_made_again_only_when_its_bits_change() -> None:
    """A request that never ends a word and is past min_tokens sends nothing."""
    params = SamplingParams(min_tokens=2)
    careful = Request(
        [1], 9, params, frozenset([5]), bad_sequences=[(2, 3)], request_id=0
    )
    free = Request([1], 9, request_id=1)
    masks = Masks(SMALL, 2, CPU)
    seen = []
    for token in (4, 4, 4, 2, 2, 4):
        mask = masks.prepare([careful, free])
        assert mask is not None and mask.rows.tolist() == [0]
        seen.append((id(mask), allowed_by(mask.bits[0].numpy(), SMALL)))
        careful.tokens.append(token)
    every = {*range(SMALL)}
    rows = [every - {5}, every - {5}, every, every, every - {3}, every - {3}]
    assert [row for _, row in seen] == rows
    assert seen[0][0] == seen[1][0] and seen[2][0] == seen[3][0]
    assert masks.prepare([free]) is None
    assert len(masks.allowed) == 1
    del careful
    assert not masks.allowed, "who has ended is forgotten"


def test_words_are_cut_at_the_beginning_and_after_a_space(llm: LLM) -> None:
    encode = llm.tokenizer.encode
    assert bad_sequences(["is"], llm.tokenizer) == [
        tuple(encode("is")),
        tuple(encode(" is")),
    ]
    assert bad_sequences([" is", "is"], llm.tokenizer) == bad_sequences(
        ["is"], llm.tokenizer
    )
    assert bad_sequences(["\n"], llm.tokenizer) == [tuple(encode("\n"))]


# In an engine: any order of steps gives what each request alone gives


def make_request(chance: random.Random, number: int) -> Request:
    """Few different ones, so that many requests have the same reference."""
    follows = tuple((token, 3 * token % VOCAB) for token in range(VOCAB))
    bad = chance.choice([(), ((5,), (9, 11)), follows])
    kind = chance.randrange(4)
    options: dict[str, Any] = {"temperature": 0.0}
    if kind == 1:
        options = {"temperature": 1.2, "seed": number % 2, "frequency_penalty": 1.0}
    elif kind == 2:
        options["allowed_token_ids"] = [*range(0, VOCAB, 7)]
    elif kind == 3:
        options |= {"min_tokens": 6, "logprobs": 2}
    stops = (3, 14, 21, 41, 77, 90)
    words = ["x"] if bad else []  # there is no tokenizer: `bad` is what they come to
    params = SamplingParams(
        max_tokens=10, stop_token_ids=stops, bad_words=words, **options
    )
    stems = [[chance.randrange(3) for _ in range(2)], [*range(20)]]
    prompt = chance.choice(stems)
    return Request(
        [*prompt],
        10,
        params,
        frozenset(stops),
        bad_sequences=bad,
        request_id=number,
    )


@pytest.mark.parametrize(
    ("num_pages", "overlap"),
    [
        (20, True),
        (300, False),
        pytest.param(20, False, marks=pytest.mark.exhaustive),
        pytest.param(300, True, marks=pytest.mark.exhaustive),
    ],
)
def test_any_schedule_gives_the_tokens_of_a_request_alone(
    model: Model, overlap: bool, num_pages: int
) -> None:
    alone = Recompute(model)
    config = EngineConfig(
        num_pages=num_pages, page_size=4, max_num_seqs=5, max_num_batched_tokens=24
    )
    engine = make_engine(model, config, overlap=overlap)
    chance = random.Random(num_pages)
    requests = [make_request(chance, number) for number in range(40)]
    wanted = [(list(r.tokens), r.params, r.bad_sequences) for r in requests]
    engine.submit(requests)
    while engine.scheduler.requests or engine.flights:
        engine.step()
    found: dict[int, list[int]] = {request.request_id: [] for request in requests}
    for event in drain(engine):
        found[event.request_id] += event.tokens
    for number, (prompt, params, bad) in enumerate(wanted):
        assert found[number] == alone(prompt, params, bad)[0], number
    assert (engine.scheduler.preemptions > 0) == (num_pages == 20)
    free = {"bad_words": [], "min_tokens": 0, "allowed_token_ids": None}
    usual = [alone(prompt, replace(params, **free))[0] for prompt, params, _ in wanted]
    changed = sum(tokens != found[number] for number, tokens in enumerate(usual))
    assert changed >= 10, "the rules have ruled something out"


# For a user


def text_of(llm: LLM, **options: Any) -> Any:
    params = {"max_tokens": 24, "temperature": 0, **options}
    (output,) = llm.generate(QUESTION, **params).result()
    return output


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_bad_word_never_comes(llm: LLM, temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "seed": 3}
    usual = text_of(llm, **options).text
    words = sorted({word for word in usual.split() if len(word) > 1})[:4]
    assert len(words) > 1
    text = text_of(llm, bad_words=words, **options).text
    assert text and not {*text.split()} & {*words}


def test_only_allowed_tokens_come(llm: LLM) -> None:
    digits = [token for n in range(10) for token in llm.tokenizer.encode(str(n))]
    for options in ({}, {"temperature": 2.0, "seed": 1}, {"logit_bias": {0: 100.0}}):
        output = text_of(llm, allowed_token_ids=digits, **options)
        assert output.text.isdigit() and {*output.token_ids} <= {*digits}


def test_biases_may_be_of_any_size(llm: LLM) -> None:
    """As in vLLM; minus infinity rules a token out whatever the others are like."""
    usual = text_of(llm)
    first, never = usual.token_ids[0], -math.inf
    for options in ({}, {"temperature": 2.0, "seed": 1, "top_p": 0.9}):
        output = text_of(llm, logit_bias={first: never}, **options)
        assert first not in output.token_ids
        every = dict.fromkeys(range(llm.config.vocab_size), -1e30)
        output = text_of(llm, logit_bias=every | {first: never}, **options)
        assert first not in output.token_ids
        output = text_of(llm, logit_bias={7: 1e30}, repetition_penalty=1.5, **options)
        assert {*output.token_ids} == {7}
    output = text_of(
        llm, logit_bias={first: 1000}, structured_outputs={"regex": "[a-z]{4}"}
    )
    assert output.text.isalpha() and output.finish_reason == "stop"
    letter, other = (llm.tokenizer.encode(sign)[0] for sign in "ab")
    for ruled_out, left in ((letter, "b"), (other, "a")):
        form = {"structured_outputs": {"regex": "a|b"}}
        assert text_of(llm, logit_bias={ruled_out: never}, **form).text == left


def test_nothing_ends_before_min_tokens(llm: LLM) -> None:
    usual = text_of(llm)
    stop = usual.token_ids[2]
    early = text_of(llm, stop_token_ids=[stop])
    assert early.finish_reason == "stop" and len(early.token_ids) == 3
    late = text_of(llm, stop_token_ids=[stop], min_tokens=10)
    assert stop not in late.token_ids[:10] and len(late.token_ids) > 10
    ends = {token: 100.0 for token in llm.eos_token_ids}
    assert len(text_of(llm, logit_bias=ends).token_ids) == 1
    output = text_of(llm, logit_bias=ends, min_tokens=7)
    assert len(output.token_ids) == 8 and output.finish_reason == "stop"
    # An end that does not count as one may come at any time.
    output = text_of(llm, logit_bias=ends, min_tokens=7, ignore_eos=True)
    assert {*output.token_ids} <= {*ends}


def test_what_a_batch_asks_for_is_sent_once_while_it_stays(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where every step needs the last token, and tells of the whole vocabulary."""
    made: list[SamplingTensors] = []
    of = SamplingTensors.of

    def counting(*arguments: Any) -> SamplingTensors:
        made.append(of(*arguments))
        return made[-1]

    monkeypatch.setattr(SamplingTensors, "of", counting)
    words = ["no such word", "nor this one"]
    assert all(len(found) > 1 for found in bad_sequences(words, llm.tokenizer))
    options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "bad_words": words}
    outputs = llm.generate([QUESTION] * 3, logprobs=-1, temperature=0, **options)
    assert [len(output.token_ids) for output in outputs.result(60)] == [20] * 3
    assert 1 <= len(made) <= 5, "as the three come and go"


def test_others_in_the_batch_get_what_they_get_alone(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=20)
    params = [
        plain,
        replace(plain, bad_words=["47", "digit by"]),
        replace(plain, min_tokens=20),
        replace(plain, allowed_token_ids=[5, 6, 7]),
    ]
    alone = [text_of(llm, **vars(p)).token_ids for p in params]
    outputs = llm.generate([QUESTION] * 4, params).result()
    assert [output.token_ids for output in outputs] == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_token_ids": [1088]}, "a token id of allowed_token_ids is 1088"),
        (
            {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1},
            "the tokens that allowed_token_ids, bad_words, logit_bias and min_tokens "
            "leave is 0",
        ),
        ({"allowed_token_ids": [0], "bad_words": ["!"]}, "leave is 0"),
        ({"allowed_token_ids": [5], "logit_bias": {5: -math.inf}}, "leave is 0"),
    ],
)
def test_what_leaves_nothing_is_refused(
    llm: LLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match="expected") as error:
        llm.generate(QUESTION, **options)
    assert message in str(error.value)


def test_bad_words_need_a_tokenizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY)
    with LLM(tmp_path, device="cpu") as llm, pytest.raises(ValueError, match="token"):
        llm.generate([1], bad_words=["a"])


def test_a_bad_word_may_come_where_nothing_else_can(llm: LLM) -> None:
    """Both letters alone are allowed, and every pair of them is a bad word."""
    a, b = (llm.tokenizer.encode(letter)[0] for letter in "ab")
    request = Request(
        [1],
        9,
        SamplingParams(allowed_token_ids=[a, b]),
        bad_sequences=[(a, a), (a, b), (b, a), (b, b)],
    )
    request.tokens.append(a)
    choices = AllowedTokens(request, llm.config.vocab_size)
    row = bits_on_device(choices, request, CPU)
    assert allowed_by(row.numpy(), llm.config.vocab_size) == {a, b}
