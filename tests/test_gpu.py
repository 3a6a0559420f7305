"""The engine on an NVIDIA GPU: fused kernels, CUDA graphs, overlapping steps.

`pytest -m gpu` runs these and the tests of each kernel.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from stepping import make_engine
from test_runner import PROMPTS, answers

from simplellm import LLM, EngineConfig, RequestOutput, SamplingParams, load_model
from simplellm.engine.graphs import bucket_sizes
from simplellm.engine.runner import Runner
from simplellm.model.kernels.triton_ops import triton_ops

pytestmark = pytest.mark.gpu
# A prompt found in the cache is computed in other parts, and rounded otherwise.
ALONE: dict[str, Any] = dict(
    enable_prefix_caching=False, max_num_seqs=64, cache_bytes=2**28, max_model_len=4096
)


def prompts(count: int, seed: int) -> list[list[int]]:
    """Of 1 to 300 tokens: within and beyond the window, off the pages' edges."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 301, (count,), generator=generator).tolist()
    return [
        torch.randint(1000, (length,), generator=generator).tolist()
        for length in lengths
    ]


def ask(llm: LLM, count: int, **params: Any) -> list[RequestOutput]:
    """All at once, and for the same number of tokens: one batch to the end."""
    options = dict(max_tokens=24, ignore_eos=True, temperature=0) | params
    return llm.generate(prompts(count, seed=3), **options).result(timeout=120)


def bits(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(config=EngineConfig(**ALONE), device="cuda") as llm:
        yield llm


def test_the_fast_path_is_the_one_taken(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    assert llm.model.ops.name == "Triton" and llm.engine_core.runner.decode_graphs
    assert llm.engine_core.depth == 1
    with (
        caplog.at_level(logging.INFO, "simplellm"),
        LLM(config=EngineConfig(**ALONE), device="cuda"),
    ):
        pass
    # No warning: everything compiles and is captured.
    told = [r for r in caplog.records if r.name == "simplellm"]
    assert {r.levelno for r in told} == {logging.INFO}
    line = told[0].getMessage()
    assert "Triton kernels" in line and torch.cuda.get_device_name() in line


@pytest.mark.parametrize("count", [1, 5, 48])
@pytest.mark.parametrize(
    "params",
    [dict(logprobs=2), dict(temperature=0.9, seed=5), dict(top_p=0.9, seed=6)],
    ids=["logprobs", "drawn", "top_p"],
)
def test_the_same_requests_twice_give_the_same_bits(
    llm: LLM, count: int, params: dict[str, Any]
) -> None:
    first = bits(ask(llm, count, **params))
    assert first == bits(ask(llm, count, **params))
    with LLM(config=EngineConfig(**ALONE), device="cuda") as other:
        assert first == bits(ask(other, count, **params))


@pytest.mark.parametrize("switch", ["cuda_graphs", "overlap"])
def test_graphs_and_overlap_change_no_bit(switch: str) -> None:
    """Whatever is padded: with ``batch_invariant`` no size chooses other kernels."""
    found = []
    for on in (True, False):
        options = ALONE | {"batch_invariant": True, switch: on}
        with LLM(config=EngineConfig(**options), device="cuda") as llm:
            runner = llm.engine_core.runner
            assert bool(runner.mixed_graphs) == (on or switch != "cuda_graphs")
            found.append([bits(ask(llm, n, logprobs=1)) for n in (1, 8, 48)])
    assert found[0] == found[1]


def test_a_chunk_keeps_its_inputs_while_steps_before_it_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps that sample nothing have results that nobody reads; they are awaited."""
    start = Runner.start_forward

    def slow(*args: Any) -> None:
        torch.cuda._sleep(30_000_000)  # some 15 ms: the host is far ahead
        start(*args)

    monkeypatch.setattr(Runner, "start_forward", slow)
    prompt = torch.arange(2000).remainder(997).tolist()
    found = []
    for overlap in (False, True):
        config = EngineConfig(**ALONE, overlap=overlap, prefill_chunk=256)
        with LLM(config=config, device="cuda") as llm:
            asked = llm.generate(prompt, max_tokens=4, temperature=0, logprobs=1)
            found.append(bits(asked.result(timeout=120)))
    assert found[0] == found[1]


def test_padding_rows_change_no_token() -> None:
    """Batches between the captured sizes give the tokens of the captured ones.

    In float32: another batch size may mean another order of summation.
    """
    sizes = EngineConfig(max_num_seqs=8, num_pages=200, max_num_batched_tokens=2048)
    device = torch.device("cuda", torch.cuda.current_device())
    plain = load_model(dtype=torch.float32, device=device)
    ops = triton_ops(plain.config, max_num_seqs=8, device=device)
    model = load_model(dtype=torch.float32, device=device, ops=ops)
    engine = make_engine(model, sizes.resolved("cuda"), overlap=True)
    engine.runner.capture(bucket_sizes(8))
    assert [graph.size for graph in engine.runner.decode_graphs] == [1, 2, 4, 8]
    expected = answers(engine, PROMPTS[:8])
    for batch in range(1, 8):
        assert answers(engine, PROMPTS[:batch]) == expected[:batch]
    assert expected == answers(make_engine(plain, sizes), PROMPTS[:8])


def test_logits_are_those_of_plain_operations(llm: LLM) -> None:
    """Whatever was chosen, with repacked experts, beside a running engine."""
    plain = load_model(device="cuda", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, (2100,), generator=generator).tolist()
    future = llm.generate(ids[:20], max_tokens=64, ignore_eos=True)
    found, expected = llm.model.logits(ids), plain.logits(ids)
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.05
    assert torch.equal(llm.model.logits(ids), found)
    assert len(future.result(timeout=120)[0].token_ids) == 64


def test_experts_in_fp8_say_nearly_the_same(llm: LLM) -> None:
    tokens = [id for one in prompts(8, seed=5) for id in one]
    config = EngineConfig(moe_activation_dtype="fp8", **ALONE)
    with LLM(config=config, device="cuda") as rounded:
        both = [one.model.logits(tokens).log_softmax(-1) for one in (llm, rounded)]
        few = [one.model.logits(tokens[:50]) for one in (llm, rounded)]
    apart = (both[0].exp() * (both[0] - both[1])).sum(-1)
    assert 0 < apart.mean() < 0.02
    assert torch.equal(*few)  # as before where an expert has few tokens


def test_the_embedded_model_solves_its_problems(llm: LLM) -> None:
    """A short form of `make evaluate`, in bfloat16."""
    from evaluate import evaluate
    from problems import evaluation_set

    problems = evaluation_set(63)  # seven of each kind
    for some in (problems, *([problem] for problem in problems[:9])):
        results, wrong = evaluate(llm, some, "high")
        assert wrong == [] and sum(row["of"] for row in results.values()) == len(some)


@pytest.mark.parametrize(
    "name",
    [
        *("gpt-oss-120b", "Qwen3-8B", "Qwen3-8B-FP8", "Llama-3.1-8B"),
        *("Qwen3-30B-A3B", "Qwen3-30B-A3B-FP8"),
    ],
)
def test_four_layers_in_real_widths_are_as_exact_as_plain_bfloat16(name: str) -> None:
    """Against float32, whole, in chunks and token by token."""
    from gpu_accuracy import measure

    found = measure(name)
    plain = found["bf16 PyTorch"]
    fused = [row for name, row in found.items() if name.startswith("fused")]
    assert len(fused) == 3 and found["bits equal twice"]
    for row in fused:
        assert row["median"] <= 1.05 * plain["median"], found
        assert row["same_argmax"] >= plain["same_argmax"] - 0.02


def test_what_is_ruled_out_never_comes(llm: LLM) -> None:
    """In graphs and overlapping steps, beside rows whose bits stay what they were."""
    asked = prompts(64, seed=3)
    plain = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0)
    usual = llm.generate(asked, plain).result(timeout=120)
    words = ["a", "1", "="]
    # Bad words of one token.
    single = [word for word in words if len(llm.tokenizer.encode(" " + word)) == 1]
    assert single
    some = [
        plain,
        replace(plain, allowed_token_ids=[*range(7, 500, 3)]),
        replace(plain, bad_words=single, temperature=1.0, seed=5),
        replace(plain, min_tokens=24, stop_token_ids=[*range(20)]),
    ]
    params = [some[number % 4] for number in range(64)]
    outputs = llm.generate(asked, params).result(timeout=120)
    for number, (output, before) in enumerate(zip(outputs, usual, strict=True)):
        tokens = {*output.token_ids}
        if number % 4 == 0:
            assert bits([output]) == bits([before])
        elif number % 4 == 1:
            assert tokens <= {*range(7, 500, 3)}
        elif number % 4 == 2:
            ids = {llm.tokenizer.encode(word)[0] for word in single}
            assert not tokens & ids
        else:
            assert not {*output.token_ids[:24]} & {*range(20)}
            assert len(output.token_ids) == 24


def test_bad_words_of_several_tokens_never_come(llm: LLM) -> None:
    """Each mask needs the last token, and nobody completes a pair it usually has."""
    asked = prompts(32, seed=3)
    options: dict[str, Any] = dict(max_tokens=40, ignore_eos=True, temperature=0)
    usual = llm.generate(asked, **options).result(timeout=120)
    decode = llm.tokenizer.decode
    words = [decode(output.token_ids[3:6]).strip() for output in usual]
    params = [
        SamplingParams(**options, bad_words=[word] if word else []) for word in words
    ]
    outputs = llm.generate(asked, params).result(timeout=120)
    several = 0
    for output, word in zip(outputs, words, strict=True):
        for text in (word, " " + word) if word else ():
            bad = llm.tokenizer.encode(text)
            several += len(bad) > 1
            found = [
                output.token_ids[place : place + len(bad)]
                for place in range(len(output.token_ids))
            ]
            assert bad not in found
    assert several >= 32


def test_prompts_are_scored(llm: LLM) -> None:
    """As `Model.logits` scores them, up to bfloat16, chunk by chunk."""
    asked = prompts(40, seed=5)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=3)
    outputs = llm.generate(asked, params).result(timeout=120)
    errors = []
    for ids, output in zip(asked, outputs, strict=True):
        wanted = llm.model.logits(ids).log_softmax(-1).cpu()
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(ids)
        for place, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None and entry.token_id == ids[place + 1]
            assert len(entry.top) == 3
            errors.append(abs(entry.logprob - wanted[place, ids[place + 1]].item()))
    found = torch.tensor(errors)

    assert found.median() < 0.02 and found.quantile(0.99) < 1.0
