"""Grammars in the engine: what may come next, what has to, and what others notice."""

import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import TINY, write_checkpoint
from jsonschema import validate
from models import saying
from random_schemas import large_tokenizer

from simplellm import LLM, SamplingParams
from simplellm.api.build_outputs import outputs
from simplellm.api.futures import future_of
from simplellm.api.outputs import RequestOutput
from simplellm.base.grammar import BitmaskFiller, Grammar, GrammarError, llguidance
from simplellm.base.request import EngineError, Request
from simplellm.base.request_spec import RequestSpec
from simplellm.engine.scheduler import ScheduledChunk
from simplellm.structured.compiler import QUICK, Grammars
from simplellm.structured.rules import rules_text, schema_rules
from simplellm.structured.vocabulary import MOST_FORCED
from simplellm.text.dialects.dialect import HARMONY
from simplellm.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")

PAIRS = r"""
start: "{" pair ("," pair)* "}"
pair: KEY ":" VALUE
KEY: /"(north|northeast|south)"/
VALUE: /[0-9]{1,3}/
"""
FITS = re.compile(r'\{("(north|northeast|south)":[0-9]{1,3},?)+(?<!,)\}')
PROMPTS = ["What is 47 + 85?", "Which is larger, 5 or 9?", "Hello", "A"]
NUMBERS = 'start: /[0-9]{4,30}/ " and " /[a-z]{2,5}/'


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def grammars(llm: LLM) -> Grammars:
    return Grammars(llm.tokenizer, llm.config.vocab_size, llm.eos_token_ids)


def run(llm: LLM, asked: Sequence[RequestSpec]) -> list[RequestOutput]:
    """The outputs of requests of the door, all at once."""
    samples = llm._samples(asked)
    found: list[RequestOutput] = future_of(
        llm, llm._output_processor, samples, outputs
    ).result(timeout=120)
    return found


def ask(llm: LLM, grammar: Any, prompt: str = "Hello", **options: Any) -> RequestSpec:
    params = {"max_tokens": 40, "temperature": 0, **options}
    return replace(llm.input_processor.process(prompt, None, params), grammar=grammar)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_whatever_is_drawn_fits(
    llm: LLM, grammars: Grammars, temperature: float
) -> None:
    grammar = grammars.compile(PAIRS)
    asked = [
        ask(llm, grammar, prompt, temperature=temperature, seed=seed, max_tokens=90)
        for seed, prompt in enumerate(PROMPTS * 3)
    ]
    for output in run(llm, asked):
        if output.finish_reason == "stop":
            assert FITS.fullmatch(output.text), output.text
        else:
            assert output.finish_reason == "length" and len(output.token_ids) <= 90
            grammar.start().advance(output.token_ids)  # or it raises


SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "some": {
            "type": "array",
            "items": {"enum": ["red", "green"]},
            "minItems": 2,
        },
        "day": {"type": "string", "format": "date"},
        "count": {"type": "number"},
    },
    "required": ["text", "day", "count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"min_tokens": 1, "bad_words": ["zebra crossing"]},
        pytest.param({"logprobs": 1}, marks=pytest.mark.exhaustive),
        pytest.param({"repetition_penalty": 1.1}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_text_is_closed_before_its_limit(llm: LLM, more: dict[str, Any]) -> None:
    """A model that is at a loss writes its string for ever; it is JSON all the same."""
    asked = {"structured_outputs": {"json": SCHEMA}, "temperature": 1.0, **more}
    for most in (60, 75, 90):
        params = [SamplingParams(**asked, seed=n, max_tokens=most) for n in range(4)]
        found = llm.generate(PROMPTS, params).result()
        for output in found:
            validate(json.loads(output.text), SCHEMA)
        cut = [output for output in found if output.finish_reason == "length"]
        assert cut and all(most - 12 < len(o.token_ids) <= most for o in cut)


def test_what_fits_is_left_to_the_model(llm: LLM) -> None:
    """However near its limit is: no shortest value in place of the model's."""
    enum = {"enum": ["positive", "negative", "neutral"]}
    asked: list[tuple[str, Any]] = [
        ("choice", ["larger", "smaller", "yes"]),
        ("regex", "[0-9]{3}"),
        (
            "json",
            {"type": "object", "properties": {"a": enum, "b": {"type": "boolean"}}},
        ),
    ]
    asked[2][1].update(required=["a", "b"], additionalProperties=False)
    for kind, form in asked:
        given: Any = {"structured_outputs": {kind: form}, "temperature": 3.0}
        free = [SamplingParams(**given, seed=n, max_tokens=60) for n in range(12)]
        wanted = llm.generate(["It is "] * 12, free).result()
        assert len({output.text for output in wanted}) > 1
        assert {output.finish_reason for output in wanted} == {"stop"}
        for spare in (0, 1, 3) if kind != "json" else (2, 9):
            most = [replace(p, max_tokens=len(output.token_ids) + spare)
                    for p, output in zip(free, wanted, strict=True)]  # fmt: skip
            found = llm.generate(["It is "] * 12, most).result()
            assert [o.text for o in found] == [o.text for o in wanted], (kind, spare)


def test_what_is_not_begun_is_not_closed(llm: LLM) -> None:
    """No call is made up where a turn's limit comes within its thoughts."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    thinks = "<|channel|>analysis<|message|>" + "So. " * 50
    with saying(llm, thinks):
        options = {"tools": [tool], "tool_choice": "required", "max_tokens": 30}
        (turn,) = llm.chat([[{"role": "user", "content": "Hi"}]], **options)
    assert turn.finish_reason == "length" and not turn.tool_calls
    begun = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    with saying(llm, begun + '{"a": "' + "So. " * 50):
        (turn,) = llm.chat([[{"role": "user", "content": "Hi"}]], **options)
    assert turn.finish_reason == "length"
    assert json.loads(turn.tool_calls[0].arguments)["a"].startswith("So. So.")


def test_a_call_is_closed_though_its_end_token_finds_no_room(llm: LLM) -> None:
    form: Any = {"type": "object", "properties": {"x": {"type": "integer"}}}
    form |= {"required": ["x"], "additionalProperties": False}
    tool = {"name": "f", "parameters": form, "strict": True}
    begun = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    parts = llm.tokenizer.encode(begun, special=True), llm.tokenizer.encode('{"x":0}')
    least = sum(map(len, parts))
    options = {"tools": [{"type": "function", "function": tool}]}
    for most in range(least, least + 8):
        with saying(llm, begun + '{"x": -' + "1" * 50):
            (turn,) = llm.chat(
                [[{"role": "user", "content": "Hi"}]],
                tool_choice="required",
                max_tokens=most,
                **options,
            )
        assert turn.finish_reason == "length"
        assert isinstance(json.loads(turn.tool_calls[0].arguments)["x"], int), most


def test_forced_tokens_take_no_step_of_their_own(
    llm: LLM, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text with and without logprobs, which need each token's own step.

    Among many requests it has the same tokens, too, one in a step.
    """
    text = '{"a long name that nobody would guess":'
    grammar = grammars.compile(f"start: {json.dumps(text)} /[0-9]/")
    forced, alone = (
        run(llm, [ask(llm, grammar, logprobs=logprobs)])[0] for logprobs in (None, 1)
    )
    assert forced.text == alone.text and forced.text.startswith(text)
    assert forced.token_ids == alone.token_ids
    seen: list[int] = []
    start = llm.engine_core.runner.start_forward

    def watch(scheduled: Sequence[ScheduledChunk], sampling: Sequence[Request]) -> None:
        seen.append(len(scheduled))
        start(scheduled, sampling)

    llm.engine_core.runner.start_forward = watch  # type: ignore[method-assign, assignment]
    try:
        run(llm, [ask(llm, grammar)])
        quick = len(seen)
        run(llm, [ask(llm, grammar, logprobs=1)])
        slow = len(seen)
        monkeypatch.setattr("simplellm.sampling.masks.FORCING", 0)
        (among,) = run(llm, [ask(llm, grammar)])
    finally:
        del llm.engine_core.runner.start_forward
    assert quick <= 6 and slow - quick >= len(alone.token_ids)
    assert among.token_ids == forced.token_ids
    assert len(seen) - slow >= len(among.token_ids)


def test_signs_and_names_of_json_have_to_come(llm: LLM, grammars: Grammars) -> None:
    """Up to where a space may stand or a value begins."""
    number = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"properties": {"a name": number, "b": number}, "type": "object"}
    closed = schema | {"required": ["a name", "b"], "additionalProperties": False}
    state = grammars.compile(rules_text(schema_rules(closed, "schema"))).start()
    for chosen, forced in (("", '{"a name":'), (" 7", ","), (' "', 'b":'), ("3", "}")):
        state.advance(llm.tokenizer.encode(chosen))
        found = state.forced()
        assert llm.tokenizer.decode(found) == forced
        state.advance(found)


def test_a_long_text_that_has_to_come_comes_in_parts(
    llm: LLM, grammars: Grammars
) -> None:
    grammar = grammars.compile("start: /[ab]b{40000}/")
    state = grammar.start()
    state.advance(llm.tokenizer.encode("a"))
    begin = time.process_time()
    forced = state.forced()
    assert time.process_time() - begin < 1
    assert 0 < len(forced) <= MOST_FORCED
    most = 2 * MOST_FORCED
    (output,) = run(llm, [ask(llm, grammar, max_tokens=most)])
    assert output.finish_reason == "length" and len(output.token_ids) == most
    assert output.text[1:] == "b" * (len(output.text) - 1)
    (alone,) = run(llm, [ask(llm, grammar, max_tokens=20, logprobs=1)])
    assert alone.token_ids == output.token_ids[:20]


@pytest.mark.bits
def test_nobody_notices_the_others(llm: LLM, grammars: Grammars) -> None:
    """With and without grammars, alone and among company: the same tokens."""
    chance = random.Random(1)
    compiled = [grammars.compile(PAIRS), grammars.compile(NUMBERS), None]
    extras: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"logprobs": 2},
        {"frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"min_tokens": 12},
        {"bad_words": ["north"]},
        {"n": 3, "temperature": 1.0},
        {"stop": ["5", "ea"]},
    ]
    asked = []
    for number in range(16):
        extra = extras[number % len(extras)]
        prompt = chance.choice(PROMPTS)
        asked.append(ask(llm, chance.choice(compiled), prompt, seed=number, **extra))
    together = run(llm, asked)
    one_by_one = [output for one in asked for output in run(llm, [one])]
    assert len(together) == len(one_by_one)
    for found, wanted in zip(together, one_by_one, strict=True):
        assert found.token_ids == wanted.token_ids
        assert found.finish_reason == wanted.finish_reason


def test_texts_that_fit_are_streamed_stopped_and_cached(llm: LLM) -> None:
    asked = {"regex": "[a-c]{3}-[0-9]{2}-[a-z]{2}"}
    options: dict[str, Any] = {"temperature": 0, "structured_outputs": asked}
    prompt = "What is 47 + 85? " * 20
    first, again = (llm.generate(prompt, **options).result()[0] for _ in range(2))
    assert re.fullmatch(asked["regex"], first.text) and first.finish_reason == "stop"
    assert first.num_cached_tokens == 0 < again.num_cached_tokens
    assert again.token_ids == first.token_ids
    parts = [part.text for part in llm.stream(prompt, **options)]
    assert "".join(parts) == first.text and len(parts) > 1
    cut = llm.generate(prompt, stop=["-"], **options).result()[0]
    assert (cut.text, cut.finish_reason) == (first.text[:3], "stop")


def test_preempted_requests_go_on_in_their_grammar(grammars: Grammars) -> None:
    with LLM(device="cpu", num_pages=24, page_size=4, max_num_seqs=6) as small:
        grammar = grammars.compile(PAIRS)
        asked = [
            ask(small, grammar, "A", seed=seed, temperature=1.0) for seed in range(12)
        ]
        together = run(small, asked)
        assert small.stats().preemptions > 0
        for one, output in zip(asked, together, strict=True):
            assert run(small, [one])[0].token_ids == output.token_ids


def given(llm: LLM, regex: str, **options: Any) -> RequestOutput:
    form: Any = {"structured_outputs": {"regex": regex}, "temperature": 0}
    (output,) = llm.generate("Hello", **form, **options).result(timeout=60)
    return output


def test_allowed_tokens_spell_what_fits(llm: LLM) -> None:
    """Though others would spell it in less; and its end needs no permission."""
    bytes_of = llm.tokenizer.token_bytes
    single = [t for t in range(llm.config.vocab_size) if len(bytes_of(t)) == 1]
    output = given(llm, "The (north|south) 123", allowed_token_ids=single)
    assert output.text in ("The north 123", "The south 123")
    assert {*output.token_ids[:-1]} <= {*single} and output.finish_reason == "stop"
    assert len(given(llm, "The (north|south) 123").token_ids) < len(output.token_ids)
    digits = [t for n in "123" for t in llm.tokenizer.encode(n)]
    output = given(llm, "[0-9]{3}[a-z]?", allowed_token_ids=digits)
    assert {*output.text} <= {*"123"} and output.finish_reason == "stop"


@pytest.mark.parametrize("drafts", [{}, {"speculative": "suffix"}])
def test_what_rules_out_all_that_fits_ends_one_request(drafts: dict[str, Any]) -> None:
    """Its own: nothing that is ruled out comes, and who is beside it goes on."""
    # Far from the limit: near it no draft of a grammar's is checked.
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 90}
    with LLM(device="cpu", **drafts) as llm:
        digits = [t for sign in "0123456789 " for t in llm.tokenizer.encode(sign)]
        some: Any = {"allowed_token_ids": digits}
        cases = [("(12 ){5}1[a-c]{3}", some), ("So (be|do) it", {"bad_words": ["So"]})]
        prompts, free = ["12 12 12 12 1"] * 2, SamplingParams(**options)
        wanted = llm.generate(prompts[1], free).result(timeout=60)[0].token_ids
        for regex, ruled in cases:
            outputs = {"regex": regex}
            params = SamplingParams(**options, **ruled, structured_outputs=outputs)
            future, (name,) = llm.generate(prompts, [params, free]), ruled
            with pytest.raises(EngineError, match=f"{name} leave no token") as error:
                future.result(timeout=60)
            assert error.value.index == 0 and error.value.outputs
            assert error.value.outputs[1].token_ids == wanted


def test_drafts_that_are_dropped_take_no_pages_from_forced_tokens() -> None:
    """These are in the next step, which is launched before the drafts are checked."""
    text, drafting = "abcdefghijklmnopqrstuvwxyz", {"num_speculative_tokens": 2}
    outputs = []
    for options in ({}, {"speculative": "suffix", **drafting}):
        with LLM(device="cpu", page_size=4, **options) as small:
            small.engine_core.depth = 1  # as on a GPU
            first, *rest = small.tokenizer.encode(text)
            prompt = [49, 50, first, *rest, 49, 50]
            future = small.generate(
                prompt,
                temperature=0,
                logit_bias={first: 50},
                structured_outputs={"regex": f"[ab]{text[1:]}!"},
            )
            outputs.append(future.result(timeout=60)[0])
    plain, drafted = outputs
    assert plain.text == text + "!"
    assert drafted.token_ids == plain.token_ids
    assert drafted.metrics.draft_tokens and not plain.metrics.draft_tokens


def test_logprobs_are_those_of_the_model(llm: LLM, grammars: Grammars) -> None:
    one = ask(llm, grammars.compile(NUMBERS), logprobs=3, max_tokens=6)
    (output,) = run(llm, [one])
    logits = llm.model.logits([*one.tokens, *output.token_ids[:-1]])
    wanted = torch.log_softmax(logits[len(one.tokens) - 1 :], -1)
    assert output.logprobs is not None
    for row, entry in zip(wanted, output.logprobs, strict=True):
        assert abs(row[entry.token_id].item() - entry.logprob) < 1e-3
        assert entry.top[0][0] == row.argmax().item()


def test_max_tokens_in_the_middle_says_length(llm: LLM, grammars: Grammars) -> None:
    text = '{"a long name that nobody would guess":1}'
    grammar = grammars.compile(f"start: {json.dumps(text)}")
    for most in (1, 2, 5):
        (output,) = run(llm, [ask(llm, grammar, max_tokens=most)])
        assert output.finish_reason == "length" and len(output.token_ids) == most
        assert text.startswith(output.text) and output.text


def test_a_model_that_likes_digits_comes_to_an_end(llm: LLM) -> None:
    """Though the schema says nothing of how many there may be."""
    properties = {"result": {"type": "integer"}}
    closed = {"required": ["result"], "additionalProperties": False}
    asked = {"json": {"type": "object", "properties": properties} | closed}
    (seven,) = llm.tokenizer.encode("7")
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 60}
    options |= {"structured_outputs": asked, "logit_bias": {seven: 100}}
    future = llm.generate("Hello", **options)
    (output,) = future.result(timeout=60)
    assert output.finish_reason == "stop"
    assert json.loads(output.text) == {"result": 7777777777777777777}


def test_who_leaves_the_grammar_fails_alone(llm: LLM, grammars: Grammars) -> None:
    """As where llguidance gives up in the middle: its error, and nobody else's."""
    grammar = grammars.compile(NUMBERS)
    broken = Grammar(grammar.text, grammar.matcher.deep_copy())
    broken.matcher.consume_tokens(llm.tokenizer.encode("x"))
    free = ask(llm, None)
    wanted = run(llm, [free])[0].token_ids
    futures = [
        future_of(llm, llm._output_processor, llm._samples([one]), outputs)
        for one in (free, ask(llm, broken), ask(llm, grammar))
    ]
    assert futures[0].result(timeout=60)[0].token_ids == wanted
    with pytest.raises(EngineError, match="this request failed"):
        futures[1].result(timeout=60)
    assert futures[2].result(timeout=60)[0].finish_reason in ("stop", "length")


def test_who_fails_by_its_grammar_holds_up_nobody(
    llm: LLM, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of its step are tried again together, and not one by one."""
    broken = Grammar("", grammars.compile(NUMBERS).matcher)
    broken.matcher.consume_tokens(llm.tokenizer.encode("x"))
    others = [ask(llm, None, ignore_eos=True) for _ in range(6)]
    wanted = [output.token_ids for output in run(llm, others)]
    launch, sizes, failed = llm.engine_core.runner.launch, list[int](), list[int]()

    def counting(scheduled: Sequence[ScheduledChunk]) -> Any:
        sizes.append(len(scheduled))
        try:
            return launch(scheduled)
        except GrammarError:
            failed.append(len(sizes))
            raise

    monkeypatch.setattr(llm.engine_core.runner, "launch", counting)
    futures = [
        future_of(llm, llm._output_processor, llm._samples([one]), outputs)
        for one in (*others, ask(llm, broken))
    ]
    with pytest.raises(EngineError, match="this request failed"):
        futures.pop().result(timeout=60)
    assert [future.result(timeout=60)[0].token_ids for future in futures] == wanted
    (place,) = failed
    assert sizes[place] == sizes[place - 1] - 1 > 0


DOUBLING = "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(30))
LIMITS: dict[str, dict[str, Any]] = {
    "Too many items": {"grammar": f'{DOUBLING}r30: "x"'},
    "Current row has 3000 items": {"json": {"enum": [{"a": n} for n in range(3000)]}},
    "too many expressions": {"regex": "(a|aa|aaa){1000}"},
}


def test_who_fails_takes_no_forced_token_from_the_others() -> None:
    """In steps of so many that each takes one forced token at a time."""
    words = ["north", "northeast", "southwest"]
    each: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
    with LLM(device="cpu", max_num_seqs=160) as llm:
        choices = [
            llm.generate(f"{n} ", **each, structured_outputs={"choice": words})
            for n in range(140)
        ]
        limited = {"structured_outputs": LIMITS["too many expressions"]}
        futures = [llm.generate("Hello", **each | limited), *choices]
        with pytest.raises(EngineError, match="this request failed"):
            futures.pop(0).result(timeout=300)
        answers = [future.result(timeout=300)[0] for future in futures]
    assert {answer.text for answer in answers} <= set(words)
    assert all(answer.finish_reason == "stop" for answer in answers)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_of_llguidance_ends_its_request_alone(llm: LLM, limit: str) -> None:
    """Such grammars show it on the way only; the others go on as if alone."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    wanted = [output.token_ids for output in llm.generate(PROMPTS, **options)]
    free = llm.generate(PROMPTS, **options)
    asked = {"max_tokens": 1500, "structured_outputs": LIMITS[limit]}
    limited = llm.generate("Hello", temperature=0, **asked)
    with pytest.raises(EngineError, match="this request failed") as error:
        limited.result(timeout=120)
    assert limit in str(error.value.__cause__)
    assert [output.token_ids for output in free.result(timeout=120)] == wanted


@pytest.mark.parametrize(("quick", "lexers"), [(1e9, 3), (0.0, 1)])
def test_walks_of_a_grammar_have_several_lexers(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, quick: float, lexers: int
) -> None:
    """If it is compiled quickly. Each of them leaves the same."""
    monkeypatch.setattr("simplellm.structured.compiler.MOST_LEXERS", 3)
    monkeypatch.setattr("simplellm.structured.compiler.QUICK", quick)
    grammar = grammars.compile(PAIRS)
    assert 1 + len(grammar.others) == lexers
    states = [grammar.start(number) for number in range(5)]
    for text in ('{"north', 'east":1', "2"):
        for state in states:
            state.advance(grammars.tokenizer.encode(text))
        bits = np.zeros((5, -(-grammars.vocab_size // 32)), np.uint32)
        BitmaskFiller().fill(states, bits)
        assert bits.any() and (bits == bits[0]).all()


def test_a_busy_engine_leaves_a_grammar_its_lexers(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits, as for Python's lock, does not compile slowly."""
    library = llguidance()

    def waiting(*arguments: Any, **options: Any) -> Any:
        time.sleep(2 * QUICK)
        return library.LLMatcher(*arguments, **options)

    busy = SimpleNamespace(LLParserLimits=library.LLParserLimits, LLMatcher=waiting)
    monkeypatch.setattr("simplellm.structured.compiler.llguidance", lambda: busy)
    monkeypatch.setattr("simplellm.structured.compiler.MOST_LEXERS", 3)
    assert 1 + len(grammars.compile(PAIRS).others) == 3


class Copied:
    """In place of a matcher: it tells of which one a state is a copy."""

    def __init__(self, name: str) -> None:
        self.name = name

    def deep_copy(self) -> str:
        return self.name


def test_walks_share_the_lexers_evenly() -> None:
    """Whichever requests of a step it is that follow the grammar."""
    grammar = Grammar("", Copied("a"), [Copied("b"), Copied("c")])
    numbers = range(0, 18, 3)
    found = [grammar.start(number) for number in numbers]
    assert [state.matcher for state in found] == [*"abcabc"]
    assert [state.request_id for state in found] == [*numbers]


@pytest.mark.parametrize("text", ["start: nothing", "start: /(/", "", "{"])
def test_what_is_no_grammar_is_refused(grammars: Grammars, text: str) -> None:
    with pytest.raises(GrammarError, match=r"\w"):
        grammars.compile(text)


SIZE = 201_088  # tokens, as gpt-oss has
ENDLESS: dict[str, Any] = {"temperature": 0, "max_tokens": 9000, "ignore_eos": True}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    """A small checkpoint of many tokens, and a tokenizer for it."""
    folder = tmp_path_factory.mktemp("many")
    write_checkpoint(folder, replace(TINY, vocab_size=SIZE))
    return folder, large_tokenizer(SIZE)


@pytest.fixture
def large(
    many: tuple[Path, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> Iterator[LLM]:
    folder, tokenizer = many
    text = tokenizer, HARMONY
    monkeypatch.setattr(
        "simplellm.api.input_processor.load_tokenizer_and_dialect",
        lambda folder, config: text,
    )
    with LLM(folder, device="cpu") as llm:
        yield llm


def test_a_first_grammar_stops_nobody(large: LLM) -> None:
    """What all of them need is made beside the weights."""
    asked = {"structured_outputs": {"json": {"type": "object"}}}
    came: list[float] = []
    stream = large.stream([1], **ENDLESS)
    with ThreadPoolExecutor(1) as pool, closing(stream):
        for number, _ in enumerate(stream):
            came.append(time.perf_counter())
            if number == 30:
                first = pool.submit(large.input_processor.process, [1], None, asked)
            if number > 30 and first.done():
                break
    assert first.result().grammar is not None
    begin = time.perf_counter()
    assert Grammars(large.tokenizer, SIZE, large.eos_token_ids).vocabulary
    takes = time.perf_counter() - begin
    longest = max(after - before for before, after in pairwise(came))
    print(f"{takes:.2f} s, and {longest:.3f} s between two tokens")
    assert longest < takes / 2
