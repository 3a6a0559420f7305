"""Log-probabilities of prompts and of the whole vocabulary, and what they cost."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from course.integrity import check_integrity
from oracle import oracle_config, prompt, save_dense
from stepping import drain, make_engine
from torch import Tensor

from simplellm import LLM, EngineConfig, SamplingParams, load_model
from simplellm.base.request import Event, Request, TokenLogprobs
from simplellm.engine.engine import Engine
from simplellm.model.model import Model
from simplellm.sampling.logprobs import ROWS, PromptTargets, score_prompts

TOLERANCE = 1e-4
VOCAB = TINY.vocab_size
Entries = Sequence[TokenLogprobs | None] | None


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(device="cpu", config=EngineConfig(prefill_chunk=16)) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, TINY)
    return load_model(path, device="cpu")


def assert_scored(entries: Entries, logits: Tensor, ids: list[int], count: int) -> None:
    """``entries`` are those of ``ids`` by ``logits`` [T, V], with ``count`` each."""
    assert entries is not None and len(entries) == len(ids) and entries[0] is None
    wanted = logits.float().log_softmax(-1)
    best = wanted.topk(count, dim=-1)
    for place, (token, entry) in enumerate(zip(ids[1:], entries[1:], strict=True)):
        assert entry is not None and entry.token_id == token
        assert abs(entry.logprob - wanted[place, token].item()) < TOLERANCE
        better = wanted[place] > entry.logprob + TOLERANCE
        near = wanted[place] >= entry.logprob - TOLERANCE
        assert 1 + better.sum() <= entry.rank <= near.sum()
        assert len(entry.top) == count
        for (token, logprob), value in zip(entry.top, best.values[place], strict=True):
            assert abs(logprob - value.item()) < TOLERANCE
            assert abs(wanted[place, token].item() - value.item()) < TOLERANCE


@pytest.mark.parametrize("chunk", [37, 512])
def test_a_prompt_is_scored_as_transformers_does(tmp_path: Path, chunk: int) -> None:
    """Beyond the window, while others share its beginning and are computed too."""
    config = oracle_config()
    oracle = save_dense(tmp_path, config, seed=3)
    ids = prompt(config, 300)
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    options = EngineConfig(prefill_chunk=chunk, max_num_seqs=4)
    with LLM(tmp_path, options, device="cpu", dtype=torch.float32) as llm:
        others = llm.generate([ids[:200], ids], max_tokens=2, temperature=0).result()
        prompts = [ids, ids[:200], ids[:1]]
        params = [
            SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=count)
            for count in (5, 0, 2)
        ]
        found = llm.generate(prompts, params).result()
    assert_scored(found[0].prompt_logprobs, expected, ids, 5)
    assert_scored(found[1].prompt_logprobs, expected, ids[:200], 0)
    assert found[2].prompt_logprobs == [None]
    assert [output.prompt_logprobs for output in others] == [None, None]
    assert found[0].token_ids == others[1].token_ids
    assert found[1].token_ids == others[0].token_ids


# In an engine


def ask(ids: Sequence[int], number: int, count: int | None, **fields: Any) -> Request:
    most = fields.pop("max_tokens", 4)
    params = SamplingParams(max_tokens=most, temperature=0, prompt_logprobs=count)
    return Request([*ids], most, params, request_id=number, **fields)


def watch_head(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows the head computes, each time."""
    rows: list[int] = []
    head = engine.runner.model.head

    def watched(hidden: Tensor, logits: Tensor) -> Tensor:
        rows.append(len(hidden))
        return head(hidden, logits)

    monkeypatch.setattr(engine.runner.model, "head", watched)
    return rows


def finish(engine: Engine) -> dict[int, list[Event]]:
    events: dict[int, list[Event]] = {}
    while engine.scheduler.requests or engine.flights:
        engine.step()
        check_integrity(engine.scheduler.manager)
    for event in drain(engine):
        events.setdefault(event.request_id, []).append(event)
    return events


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_pages", [24, 300])
@pytest.mark.parametrize("chunk", [3, 16])
def test_any_schedule_gives_the_same_scores(
    model: Model, overlap: bool, num_pages: int, chunk: int
) -> None:
    config = EngineConfig(
        num_pages=num_pages,
        page_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        prefill_chunk=chunk,
    )
    engine = make_engine(model, config, overlap=overlap)
    chance = random.Random(num_pages + chunk)
    stem = [chance.randrange(VOCAB) for _ in range(30)]
    requests: list[Request] = []
    asked: dict[int, tuple[list[int], int | None]] = {}
    for number in range(0, 90, 3):
        ids = [*stem[: chance.randrange(1, 31)], number]
        count = chance.choice([None, 0, 3])
        most = 0 if count == 0 else chance.randrange(1, 9)
        family = [
            ask(
                ids,
                number + n,
                count,
                max_tokens=most,
                priority=chance.randrange(2),
                index=n,
            )
            for n in range(chance.choice([1, 1, 3]))
        ]
        family[0].siblings = family[1:]
        requests.append(family[0])
        asked |= {
            r.request_id: (ids, count if r is family[0] else None) for r in family
        }
    engine.submit(requests)
    events = finish(engine)
    preempted = engine.scheduler.preemptions
    assert (preempted > 0) == (num_pages == 24)
    for number, (ids, count) in asked.items():
        first, *later = events[number]
        assert all(event.prompt_logprobs is None for event in later)
        if count is None:
            assert first.prompt_logprobs is None
        else:
            assert_scored(first.prompt_logprobs, model.logits(ids), ids, count)
        assert events[number][-1].finish_reason == "length"


def test_a_prompt_is_scored_once_for_all_its_samples(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts no larger than a batch, and not again after a preemption."""
    config = EngineConfig(num_pages=100, page_size=4, max_num_seqs=8)
    engine = make_engine(model, config)
    rows = watch_head(engine, monkeypatch)
    ids = [number % VOCAB for number in range(100)]
    first = ask(ids, 0, 1, max_tokens=3)
    others = [ask(ids, number, 1, max_tokens=3) for number in (1, 2)]
    for sibling in others:
        sibling.prompt_logprobs = None
    first.siblings = others
    engine.submit([first])
    while first.num_output < 2:
        engine.step()
    engine.scheduler._preempt(first)
    finish(engine)
    assert max(rows) <= 8 < ROWS
    assert sum(rows) == 99 + 3 * 3 and first.preemptions == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_that_begins_again_is_scored_once(model: Model, overlap: bool) -> None:
    """Preempted within its prompt, maybe with a step under way."""
    config = EngineConfig(num_pages=100, page_size=4, prefill_chunk=7)
    engine = make_engine(model, config, overlap=overlap)
    ids = [*range(30)]
    request = ask(ids, 0, 1)
    engine.submit([request])
    for _ in range(3):
        engine.step()
    assert 0 < request.num_computed_tokens < 30 and len(engine.flights) == overlap
    engine.scheduler._preempt(request)
    first, *_ = finish(engine)[0]
    assert_scored(first.prompt_logprobs, model.logits(ids), ids, 1)


@pytest.mark.bits
def test_at_most_so_many_rows_at_once(model: Model) -> None:
    """However large the step, and however many requests may run."""
    hidden = torch.randn(300, TINY.hidden_size)
    tokens = torch.arange(300) % VOCAB
    seen = Counter[int]()

    def head(rows: Tensor, logits: Tensor) -> Tensor:
        seen[len(rows)] += 1
        return model.head(rows, logits)

    buffer = torch.zeros(ROWS, VOCAB)
    targets = [PromptTargets(None, 0, 0, tokens, 4)]
    (found,) = score_prompts(targets, hidden, head, buffer)
    chosen, ranks, ids, values = found.scores
    assert seen == {ROWS: 2, 300 - 2 * ROWS: 1} and not buffer.any()
    logits = torch.empty(300, VOCAB)
    # A rank is exact, and among other rows a processor may round a row otherwise.
    for part, out in zip(hidden.split(ROWS), logits.split(ROWS), strict=True):
        model.head(part, out)
    wanted = logits.log_softmax(-1)
    torch.testing.assert_close(chosen, wanted.gather(1, tokens[:, None])[:, 0])
    better = (wanted > chosen[:, None]).sum(-1)
    assert torch.equal(ranks, better + 1)
    torch.testing.assert_close(values, wanted.topk(4).values)
    torch.testing.assert_close(wanted.gather(1, ids), values)


def test_what_is_scored_is_not_looked_up_but_can_be_found(model: Model) -> None:
    engine = make_engine(model, EngineConfig(num_pages=100, page_size=4))
    ids = [*range(40)]
    cached = []
    for number, count in enumerate((None, None, 0, None)):
        engine.submit([ask(ids, number, count)])
        cached.append(finish(engine)[number][-1].cached_tokens)
    assert cached == [0, 36, 0, 36]


def test_what_ends_early_has_what_there_is(model: Model) -> None:
    config = EngineConfig(max_num_batched_tokens=10, max_num_seqs=4, prefill_chunk=10)
    engine = make_engine(model, config)
    ids = [*range(40)]
    request = ask(ids, 0, 1)
    engine.submit([request])
    for _ in range(2):
        engine.step()
    engine.end(request, "abort")
    (event,) = drain(engine)
    assert event.finish_reason == "abort" and event.prompt_logprobs is not None
    assert len(event.prompt_logprobs) == 21
    assert_scored(event.prompt_logprobs, model.logits(ids), ids[:21], 1)


def test_a_step_that_fails_is_scored_when_it_is_tried_again(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, EngineConfig(num_pages=100, page_size=4))
    head = engine.runner._head

    def fail_together(batch: Any, hidden: Any, count: int) -> None:
        if count > 1:
            raise RuntimeError("no two at once")
        head(batch, hidden, count)

    monkeypatch.setattr(engine.runner, "_head", fail_together)
    prompts = [[*range(20)], [*range(50, 70)]]
    engine.submit([ask(ids, number, 2) for number, ids in enumerate(prompts)])
    events = finish(engine)
    for number, ids in enumerate(prompts):
        assert_scored(events[number][0].prompt_logprobs, model.logits(ids), ids, 2)
        assert events[number][-1].finish_reason == "length"


# For a user


def test_scores_are_those_of_the_logits(llm: LLM) -> None:
    ids = llm.tokenizer.encode("What is 47 + 85? Add them, digit by digit.")
    logits = llm.model.logits(ids)
    for options in ({"max_tokens": 0}, {"max_tokens": 3}, {"max_tokens": 2, "n": 3}):
        first, *others = llm.generate(ids, prompt_logprobs=2, **options).result()
        assert_scored(first.prompt_logprobs, logits, ids, 2)
        assert len(first.token_ids) == options["max_tokens"]
        assert [output.prompt_logprobs for output in others] == [None] * len(others)
        assert first.finish_reason == "length"
    first, *rest = llm.stream(ids, prompt_logprobs=0, max_tokens=3)
    assert_scored(first.prompt_logprobs, logits, ids, 0)
    assert [part.prompt_logprobs for part in rest] == [None] * len(rest)


def test_without_output_a_prompt_may_be_as_long_as_the_context() -> None:
    with LLM(device="cpu", config=EngineConfig(max_model_len=20)) as llm:
        ids = [*range(20)]
        (output,) = llm.generate(ids, max_tokens=0, prompt_logprobs=0).result()
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 20
        assert (output.text, output.token_ids, output.logprobs) == ("", [], None)
        with pytest.raises(ValueError, match="20 tokens > 19 maximum"):
            llm.generate(ids, max_tokens=1, prompt_logprobs=0)
        with pytest.raises(ValueError, match="21 tokens > 20 maximum"):
            llm.generate([*ids, 0], max_tokens=0, prompt_logprobs=0)
        assert llm.stats().generated_tokens == 0


def test_all_of_the_vocabulary(llm: LLM) -> None:
    """For the row that asks; the others get what they asked for."""
    ids = llm.tokenizer.encode("What is 47 + 85?")
    size = llm.config.vocab_size
    params = [
        SamplingParams(temperature=0, max_tokens=3, logprobs=count)
        for count in (None, -1, 2, -1, 0)
    ]
    for some in (params, params[:2]):
        outputs = llm.generate([ids] * len(some), some).result()
        tokens = outputs[0].token_ids
        wanted = llm.model.logits(ids + tokens)[len(ids) - 1 :].log_softmax(-1)
        for output, p in zip(outputs, some, strict=True):
            assert output.token_ids == tokens
            if p.logprobs is None:
                assert output.logprobs is None
                continue
            assert output.logprobs is not None
            for step, entry in enumerate(output.logprobs):
                top = dict(entry.top)
                assert len(top) == (size if p.logprobs == -1 else p.logprobs)
                assert abs(entry.logprob - wanted[step, tokens[step]].item()) < 1e-4
                assert entry.rank == 1
                spelled = 0 if p.logprobs == -1 else p.logprobs
                assert len(entry.decoded_top) == spelled
                values = torch.tensor([*top.values()])
                torch.testing.assert_close(
                    values, wanted[step, [*top]], atol=1e-4, rtol=0
                )
                assert [*top.values()] == sorted(top.values(), reverse=True)
