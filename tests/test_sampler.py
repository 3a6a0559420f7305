"""The sampler, by distribution: chi-square against expectations computed in numpy."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from simplellm.base.noise import gumbel_noise, mix
from simplellm.base.request import Request
from simplellm.base.sampling_params import (
    MAX_BAD_WORDS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    SamplingParams,
)
from simplellm.engine.sampler import SamplerOutput, SamplingTensors, sample
from simplellm.model import ops
from simplellm.sampling.filters import filter_tokens
from simplellm.sampling.masks import Mask, apply_mask
from simplellm.sampling.penalties import TokenCounts

CPU = torch.device("cpu")
V = 12


def logits_rows(rows: int, vocab: int = V, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * 2


def requests_of(
    params: Sequence[SamplingParams],
    prompts: Sequence[list[int]],
    outputs: Sequence[list[int]],
) -> list[Request]:
    """Requests that have come so far."""
    requests = []
    rows = enumerate(zip(params, prompts, outputs, strict=True))
    for number, (p, prompt, output) in rows:
        requests.append(Request(list(prompt), 99, p, request_id=number))
        requests[-1].tokens += output
    return requests


def every_row(bits: torch.Tensor) -> Mask:
    """The mask of as many rows as there are bits."""
    return Mask(torch.arange(len(bits), device=bits.device), bits)


def draw(
    logits: torch.Tensor,
    params: list[SamplingParams],
    steps: list[int] | None = None,
    prompts: Sequence[list[int]] | None = None,
    outputs: Sequence[list[int]] | None = None,
    mask: torch.Tensor | None = None,
) -> SamplerOutput:
    """`sample` as a step does it, with counts only if some row needs them."""
    rows, vocab = logits.shape
    device = logits.device
    counts = TokenCounts(vocab, device)
    empty: list[list[int]] = [[]] * rows
    requests = requests_of(params, prompts or empty, outputs or empty)
    counting = counts.prepare(requests)
    return sample(
        logits,
        logits.argmax(-1).int(),
        SamplingTensors.of(params, vocab, device),
        torch.tensor(steps or [0] * rows, device=device),
        ops.PLAIN,
        counts=counts if counting else None,
        mask=None if mask is None else every_row(mask),
    )


def expected(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> np.ndarray:
    """The distribution of one row, in float64 and with Python loops."""
    x = logits.double().numpy().copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in range(len(x)):
        if token in prompt or token in output:
            penalty = params.repetition_penalty
            x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        x[token] -= params.frequency_penalty * output.count(token)
        x[token] -= params.presence_penalty * (token in output)
    p = np.exp((x - x.max()) / params.temperature)
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    mass = 0.0
    for token in order:
        if mass >= params.top_p:
            p[token] = 0
        mass += p[token]
    return p / p.sum()


def chi_square_fits(counts: np.ndarray, p: np.ndarray) -> bool:
    """Whether Pearson's statistic lies within five standard deviations of its mean."""
    assert counts[p == 0].sum() == 0, "drew a token of probability 0"
    n, used = counts.sum(), p > 0
    # Cells too rare for the approximation are counted together.
    rare = used & (p * n < 5)
    common = used & ~rare
    observed = [*counts[common], *([counts[rare].sum()] if rare.any() else [])]
    wanted = [*(p[common] * n), *([p[rare].sum() * n] if rare.any() else [])]
    statistic = sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
    freedom = max(len(wanted) - 1, 1)
    return statistic < freedom + 5 * math.sqrt(2 * freedom)


CASES = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=4),
    "top_k of 1": SamplingParams(top_k=1),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.1, temperature=1.5),
    "all filters": SamplingParams(top_k=6, top_p=0.9, min_p=0.02, temperature=1.3),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=0.8),
    "bias": SamplingParams(logit_bias={3: 2.5, 5: -100.0}),
    "everything": SamplingParams(
        temperature=0.8,
        top_k=9,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={0: 1.0},
    ),
}
PROMPT, OUTPUT = [1, 2, 2, 7], [3, 3, 3, 2, 9]


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution(name: str) -> None:
    n = 20_000
    params = CASES[name]
    row = logits_rows(1, seed=len(name))
    # One request over n steps: the same seed, another step each time.
    tokens = draw(
        row.expand(n, -1),
        [replace(params, seed=5)] * n,
        list(range(n)),
        [PROMPT] * n,
        [OUTPUT] * n,
    ).tokens
    p = expected(row[0], params, PROMPT, OUTPUT)
    observed = np.bincount(tokens.numpy(), minlength=V)
    assert chi_square_fits(observed, p)
    assert abs(observed / n - p).sum() / 2 < 0.02


def test_the_test_of_fit_can_fail() -> None:
    p = expected(logits_rows(1)[0], SamplingParams())
    warmer = expected(logits_rows(1)[0], SamplingParams(temperature=1.1))
    counts = np.random.default_rng(0).multinomial(20_000, warmer)
    assert not chi_square_fits(counts, p)


def test_draws_over_seeds_follow_the_distribution() -> None:
    n = 20_000
    row = logits_rows(1, seed=3)
    params = [SamplingParams(seed=seed) for seed in range(n)]
    tokens = draw(row.expand(n, -1), params).tokens
    counts = np.bincount(tokens.numpy(), minlength=V)
    assert chi_square_fits(counts, expected(row[0], SamplingParams()))


def test_rows_steps_and_neighboring_seeds_are_independent() -> None:
    n = 20_000
    logits = torch.zeros(n, 4)
    one, two = (
        draw(logits, [SamplingParams(seed=seed)] * n, list(range(n))).tokens
        for seed in (11, 12)
    )
    uniform = np.full(16, 1 / 16)
    joint = np.bincount((one * 4 + two).numpy(), minlength=16)
    assert chi_square_fits(joint, uniform)  # two rows of a batch
    joint = np.bincount((one[:-1] * 4 + one[1:]).numpy(), minlength=16)
    assert chi_square_fits(joint, uniform)  # consecutive tokens of one request


def test_noise_is_standard_gumbel_and_uncorrelated() -> None:
    seeds = torch.arange(200)
    noise = gumbel_noise(seeds, torch.zeros(200, dtype=torch.int64), 1000)
    assert noise.isfinite().all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)  # Euler's constant
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)
    uniform = torch.exp(-torch.exp(-noise)).flatten().numpy()
    cells = np.bincount((uniform * 100).astype(int).clip(max=99), minlength=100)
    assert chi_square_fits(cells, np.full(100, 0.01))
    correlation = np.corrcoef(noise.numpy()) - np.eye(200)
    assert abs(correlation).max() < 0.17  # five and a half sigma of 1/sqrt(1000)
    tokens = np.corrcoef(noise[:, :-1].flatten(), noise[:, 1:].flatten())
    assert abs(tokens[0, 1]) < 0.012


def test_mix_is_a_bijection_that_flips_half_the_bits() -> None:
    x = torch.arange(1 << 16)
    hashed = mix(x)
    assert hashed.unique().numel() == x.numel()
    assert (hashed.min() >= 0) and (hashed.max() < 2**32)
    # The same in Python's integers: no overflow went unnoticed.
    for value in (0, 1, 12345, 2**32 - 1):
        h = ((value ^ (value >> 16)) * 0x21F0AAAD) % 2**32
        h = ((h ^ (h >> 15)) * 0x735A2D97) % 2**32
        assert mix(torch.tensor([value])).item() == h ^ (h >> 15)
    for bit in range(32):
        flipped = hashed ^ mix(x ^ (1 << bit))
        ones = sum(((flipped >> i) & 1).float().mean() for i in range(32))
        assert 15 < float(ones) < 17


def test_noise_extremes_are_finite() -> None:
    noise = gumbel_noise(torch.arange(50), torch.arange(50), 201_088)
    assert noise.isfinite().all()
    assert noise.max() > 14  # the tail of 10 million draws is there
    # This draw's 32 bits round up to a uniform 1, were it not for the clamp.
    step = torch.tensor([0])
    last = gumbel_noise(torch.tensor([17]), step, 42_211)[0, 42_210]
    assert -3 < last < -2.5


@pytest.mark.parametrize("name", [*CASES, "greedy"])
def test_a_row_is_the_same_alone_and_in_any_batch(name: str) -> None:
    mine = replace(CASES.get(name, SamplingParams(temperature=0)), seed=77)
    others = [replace(p, seed=i) for i, p in enumerate(CASES.values())]
    logits = logits_rows(len(others) + 1, vocab=500, seed=9)
    for step in range(20):
        alone = draw(logits[:1], [mine], [step], [PROMPT], [OUTPUT]).tokens[0]
        rows = torch.cat([logits[1:], logits[:1]])
        among = draw(
            rows,
            [*others, mine],
            [*range(len(others)), step],
            [[]] * len(others) + [PROMPT],
            [[4]] * len(others) + [OUTPUT],
        ).tokens[-1]
        assert alone == among


def test_a_row_without_filters_keeps_all_beside_one_with() -> None:
    logits = logits_rows(2, vocab=200_000)
    ordered = logits.sort(descending=True).values.softmax(-1)
    before = ordered.cumsum(-1) - ordered
    assert before.max() >= 1  # rounding: by the sum alone a tail would be lost
    columns = [[200_000], [3]], [[1.0], [0.5]], [[0.0], [0.0]]
    kept = filter_tokens(logits, *map(torch.tensor, columns)).isfinite()
    assert kept[0].all() and kept[1].sum() <= 3


def test_seeds_use_all_64_bits_and_the_step() -> None:
    logits = torch.zeros(1, 100_000)
    seeds = (0, 1, 2**32, 2**63, 2**64 - 1, -5)
    chosen = {draw(logits, [SamplingParams(seed=s)]).tokens.item() for s in seeds}
    assert len(chosen) == len(seeds)
    same_bits = [draw(logits, [SamplingParams(seed=s)]).tokens for s in (-1, 2**64 - 1)]
    assert same_bits[0] == same_bits[1]
    steps = {
        draw(logits, [SamplingParams(seed=0)], [n]).tokens.item() for n in range(9)
    }
    assert len(steps) == 9


def test_greedy_takes_the_best_whatever_else_is_set() -> None:
    logits = logits_rows(64, vocab=1000)
    params = [SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.2)] * 64
    assert torch.equal(draw(logits, params).tokens, logits.argmax(-1).int())
    mixed = [*params[:32], *[SamplingParams(seed=s) for s in range(32)]]
    chosen = draw(logits, mixed).tokens
    assert torch.equal(chosen[:32], logits[:32].argmax(-1).int())


def test_a_tiny_temperature_is_greedy_without_overflow() -> None:
    logits = logits_rows(64, vocab=1000) * 30
    params = [SamplingParams(temperature=2e-38, seed=s) for s in range(64)]
    assert torch.equal(draw(logits, params).tokens, logits.argmax(-1).int())


@pytest.mark.parametrize("seed", range(5))
def test_filters_agree_with_transformers(seed: int) -> None:
    logits = logits_rows(8, vocab=200, seed=seed)
    ids: Any = torch.zeros(8, 1, dtype=torch.int64)

    def ours(top_k: int = 200, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
        columns = (torch.full((8, 1), x) for x in (top_k, top_p, min_p))
        return filter_tokens(logits, *columns)

    assert torch.equal(ours(top_k=7), TopKLogitsWarper(7)(ids, logits))
    assert torch.equal(ours(top_p=0.8), TopPLogitsWarper(0.8)(ids, logits))
    assert torch.equal(ours(min_p=0.05), MinPLogitsWarper(0.05)(ids, logits))
    both = TopPLogitsWarper(0.8)(ids, TopKLogitsWarper(9)(ids, logits))
    assert torch.equal(ours(top_k=9, top_p=0.8), both)
    all_three = TopKLogitsWarper(9)(ids, MinPLogitsWarper(0.01)(ids, logits))
    all_three = TopPLogitsWarper(0.9)(ids, all_three)
    assert torch.equal(ours(9, 0.9, 0.01), all_three)


def test_repetition_penalty_agrees_with_transformers() -> None:
    logits = logits_rows(1, vocab=50)
    prompt, output = [1, 4, 4, 9], [20, 21, 4]
    seen: Any = torch.tensor([prompt + output])
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(seen, logits.clone())
    counts = TokenCounts(50, CPU)
    counts.prepare(
        requests_of([SamplingParams(repetition_penalty=1.3)], [prompt], [output])
    )
    assert torch.equal(counts.penalize(logits), theirs)


# Counts that are kept from step to step


def penalized(logits: torch.Tensor, request: Request, output: list[int]) -> np.ndarray:
    """One row of `TokenCounts.penalize`, computed from the tokens themselves."""
    p, prompt = request.params, request.tokens[: request.num_prompt]
    x = logits.double().numpy().copy()
    for token in {*prompt, *output}:
        x[token] *= 1 / p.repetition_penalty if x[token] > 0 else p.repetition_penalty
    for token in set(output):
        x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    return x


PENALTIES = st.just(SamplingParams()) | st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.25, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.75]),
)


@settings(max_examples=150)
@given(
    requests=st.lists(
        st.tuples(PENALTIES, st.lists(st.integers(0, V - 1), min_size=1, max_size=4)),
        min_size=1,
        max_size=5,
    ),
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, 4), unique=True), st.booleans()),
        min_size=1,
        max_size=9,
    ),
    seed=st.integers(0, 99),
)
def test_counts_are_those_of_the_tokens(requests, steps, seed) -> None:
    """Batches change: who joins, leaves, comes back or moves has his own counts.

    What the last step chose is not in the requests yet when the next one is chosen; a
    failed step makes the counts start over, with all tokens known.
    """
    all_requests = [
        Request(prompt, 99, params, request_id=7 * number)
        for number, (params, prompt) in enumerate(requests)
    ]
    outputs: dict[Request, list[int]] = {request: [] for request in all_requests}
    counts = TokenCounts(V, CPU)
    generator = torch.Generator().manual_seed(seed)
    late: list[tuple[Request, int]] = []
    for places, failed in steps:
        batch = [all_requests[i] for i in places if i < len(all_requests)]
        if failed:
            counts.invalidate()
        if failed or not batch:
            for request, token in late:
                request.tokens.append(token)
            late = []
        if not batch:
            continue
        logits = torch.randn(len(batch), V, generator=generator)
        counting = counts.prepare(batch)
        assert counting == any(request.params.penalizes for request in batch)
        chosen = torch.randint(V, (len(batch),), generator=generator).int()
        if counting:
            before = logits.clone()
            found = counts.penalize(logits)
            assert torch.equal(logits, before), "the logits as given are still needed"
            rows = zip(batch, logits, strict=True)
            expected = [penalized(row, r, outputs[r]) for r, row in rows]
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)
            counts.add(chosen)
        for request, token in late:
            request.tokens.append(token)
        late = list(zip(batch, chosen.tolist(), strict=True))
        for request, token in late:
            outputs[request].append(token)


def test_rows_without_penalties_are_left_alone() -> None:
    logits = logits_rows(3)
    params = [SamplingParams(), SamplingParams(presence_penalty=2.0), SamplingParams()]
    counts = TokenCounts(V, CPU)
    assert counts.prepare(requests_of(params, [[1]] * 3, [[2]] * 3))
    changed = counts.penalize(logits) != logits
    assert changed.nonzero().tolist() == [[1, 2]]


def test_counts_follow_a_row_that_moves() -> None:
    """The same requests have penalties, in other rows than the step before."""
    plain, penalty = SamplingParams(), SamplingParams(frequency_penalty=1.0)
    others = requests_of([plain, plain, penalty], [[1]] * 3, [[2]] * 3)
    counts = TokenCounts(V, CPU)
    assert counts.prepare(others)
    counts.add(torch.tensor([4, 5, 6], dtype=torch.int32))
    assert counts.prepare(others[1:])
    counts.add(torch.tensor([7, 8], dtype=torch.int32))
    assert counts.prepare([others[2], others[0]])
    logits = logits_rows(2)
    expected = logits.clone()
    expected[0, [2, 6, 8]] -= 1.0
    torch.testing.assert_close(counts.penalize(logits), expected)


# Masks


def bits(allowed: torch.Tensor) -> torch.Tensor:
    """Bool [B, V] as int32 [B, ceil(V / 32)], by Python's integers."""
    rows = []
    for row in allowed.tolist():
        words = [row[i : i + 32] for i in range(0, len(row), 32)]
        unsigned = [sum(1 << i for i, bit in enumerate(word) if bit) for word in words]
        rows.append([(word + 2**31) % 2**32 - 2**31 for word in unsigned])
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 201])
def test_a_mask_rules_out_the_tokens_without_a_bit(vocab: int) -> None:
    scores = logits_rows(5, vocab)
    allowed = logits_rows(5, vocab, seed=1) > 0
    allowed[0] = True
    expected = scores.masked_fill(~allowed, -torch.inf)
    assert torch.equal(apply_mask(scores, every_row(bits(allowed))), expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.9}])
def test_filters_see_what_the_mask_left(temperature: float, filters: dict) -> None:
    """Were it masked after a filter, nothing might be left, or the wrong token."""
    n = 200
    logits = torch.arange(40.0).expand(n, -1) / 4
    allowed = torch.zeros(n, 40, dtype=torch.bool)
    allowed[:, [0, 3, 5]] = True  # the least likely ones
    params = SamplingParams(temperature=temperature, seed=1, **filters)
    rows = [params] * n
    sampled = draw(logits, rows, list(range(n)), mask=bits(allowed)).tokens
    wanted = {"top_k": {3, 5}, "top_p": {3, 5}, "min_p": {5}}
    chosen = {5} if temperature == 0 else {0, 3, 5}
    for name in filters if temperature else {}:
        chosen = wanted[name]
    assert set(sampled.tolist()) == chosen


def test_a_mask_weighs_more_than_a_bias_and_changes_no_logprob() -> None:
    logits = logits_rows(1)
    allowed = torch.ones(1, V, dtype=torch.bool)
    allowed[0, 4] = False
    params = SamplingParams(temperature=0, logit_bias={4: 100.0}, logprobs=V)
    sampled = draw(logits, [params], mask=bits(allowed))
    assert sampled.tokens.tolist() == [
        logits.masked_fill(~allowed, -99.0).argmax().item()
    ]
    *_, top_ids, top_logprobs = sampled.logprobs
    best = logits.log_softmax(-1).sort(descending=True)
    assert torch.equal(top_ids, best.indices)
    torch.testing.assert_close(top_logprobs, best.values)


def test_draws_under_a_mask_follow_the_distribution() -> None:
    n = 20_000
    row = logits_rows(1, seed=8)
    allowed = torch.tensor([[token % 3 != 1 for token in range(V)]])
    params = [SamplingParams(seed=6)] * n
    mask = bits(allowed).expand(n, -1)
    tokens = draw(row.expand(n, -1), params, list(range(n)), mask=mask).tokens
    p = expected(row[0], SamplingParams()) * allowed[0].numpy()
    assert chi_square_fits(np.bincount(tokens.numpy(), minlength=V), p / p.sum())


def test_ties_at_the_threshold_stay() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    columns = torch.tensor([[2]]), torch.tensor([[1.0]]), torch.tensor([[0.0]])
    kept = filter_tokens(logits, *columns).isfinite()
    assert kept.tolist() == [[True, True, True, False]]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = logits_rows(3)
    params = [
        SamplingParams(seed=1, logprobs=3, temperature=0.3, logit_bias={2: 9.0}),
        SamplingParams(seed=2, logprobs=0),
        SamplingParams(temperature=0),
    ]
    sampled = draw(logits, params)
    wanted = torch.log(torch.softmax(logits.double(), -1))
    logprobs, ranks, top_ids, top_logprobs = sampled.logprobs
    picked = wanted.gather(1, sampled.tokens[:, None].long())[:, 0]
    torch.testing.assert_close(logprobs.double(), picked, atol=1e-5, rtol=0)
    best = wanted.sort(-1, descending=True)
    assert torch.equal(top_ids, best.indices[:, :3])
    assert torch.equal(ranks, 1 + (wanted > picked[:, None]).sum(-1))
    torch.testing.assert_close(
        top_logprobs.double(), best.values[:, :3], atol=1e-5, rtol=0
    )
    assert draw(logits, [SamplingParams(temperature=0)] * 3).logprobs == ()


def test_the_likeliest_token_is_taken_as_it_is_given() -> None:
    """Without any change nobody looks for it again; after one, somebody does."""
    logits = logits_rows(2)
    given = torch.tensor([3, 4], dtype=torch.int32)
    greedy = SamplingParams(temperature=0)
    steps = torch.zeros(2, dtype=torch.int64)
    columns = SamplingTensors.of([greedy] * 2, V, CPU)
    assert sample(logits, given, columns, steps, ops.PLAIN).tokens is given
    biased = replace(greedy, logit_bias={9: 100.0})
    columns = SamplingTensors.of([biased, greedy], V, CPU)
    found = sample(logits, given, columns, steps, ops.PLAIN).tokens
    assert found.tolist() == [9, logits[1].argmax()]
    assert found.dtype == torch.int32


def test_the_operation_that_draws_gets_what_it_needs() -> None:
    """The logits as they came, each row's temperature, and filters if there are any."""
    seen = []

    def spy(scores, best, temperature, seeds, steps, filters):
        seen.append((scores, temperature.tolist(), filters is not None))
        return ops.draw(scores, best, temperature, seeds, steps, filters)

    logits, steps = logits_rows(2), torch.zeros(2, dtype=torch.int64)
    best = logits.argmax(-1).int()
    warm, cold = SamplingParams(temperature=0.5), SamplingParams(temperature=0)
    for params in ([cold, cold], [warm, cold], [replace(warm, top_k=3), cold]):
        columns = SamplingTensors.of(params, V, CPU)
        sample(logits, best, columns, steps, replace(ops.PLAIN, draw=spy))
    assert [row for _, *row in seen] == [[[0.5, 0.0], False], [[0.5, 0.0], True]]
    assert all(scores is logits for scores, *_ in seen)


# Parameters


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 1.5, "max_tokens is 1.5; expected an integer"),
        ("max_tokens", True, "expected an integer"),
        ("temperature", -0.1, "temperature is -0.1; expected 0 to 100"),
        ("temperature", float("nan"), "temperature is nan"),
        ("temperature", float("inf"), "temperature is inf"),
        ("temperature", "1", "temperature is '1'; expected a number"),
        ("temperature", None, "expected a number"),
        ("n", 0, "n is 0; expected 1 to 1024"),
        ("n", None, "n is None; expected an integer"),
        ("max_tokens", 0, "max_tokens is 0; expected 1 or more, or prompt_logprobs"),
        ("min_tokens", -1, "min_tokens is -1"),
        ("min_tokens", 257, "min_tokens is 257; expected at most max_tokens, 256"),
        ("bad_words", [5], "bad_words is [5]; expected a list of str"),
        ("bad_words", "a" * (2**16 + 1), "bad_words has 1 texts of 65537 characters"),
        ("bad_words", ["a", ""], "bad_words is"),
        ("bad_words", ["a"] * (MAX_BAD_WORDS + 1), "bad_words has 1025 texts"),
        ("allowed_token_ids", [], "expected at least one token id, or None"),
        ("allowed_token_ids", [-1], "an entry of allowed_token_ids is -1"),
        ("allowed_token_ids", 5, "allowed_token_ids is 5; expected a list of int"),
        ("include_stop_str_in_output", 1, "expected True or False"),
        ("skip_special_tokens", None, "skip_special_tokens is None"),
        ("prompt_logprobs", -1, "prompt_logprobs is -1; expected 0 to 20"),
        ("top_k", None, "top_k is None"),
        ("top_k", -2, "top_k is -2"),
        ("top_p", 0, "top_p is 0; expected more than 0"),
        ("top_p", 1.01, "top_p is 1.01; expected more than 0, up to 1"),
        ("min_p", -0.5, "min_p"),
        ("repetition_penalty", 0, "repetition_penalty is 0"),
        ("presence_penalty", 2.1, "presence_penalty is 2.1; expected -2 to 2"),
        ("frequency_penalty", -3, "frequency_penalty is -3"),
        ("stop", "", "stop is"),
        ("stop", ["a", ""], "stop is"),
        ("stop", [3], "stop is"),
        ("stop", 3, "stop is 3; expected a list of str"),
        ("stop", ["a"] * (MAX_STOPS + 1), "stop has 65 texts of 65 characters; exp"),
        ("stop", ["a" * (MAX_STOP_CHARACTERS + 1)], "stop has 1 texts of 4097 char"),
        ("ignore_eos", "false", "ignore_eos is 'false'; expected True or False"),
        ("ignore_eos", 1, "ignore_eos is 1; expected True or False"),
        ("ignore_eos", None, "ignore_eos is None"),
        ("stop_token_ids", [-1], "stop_token_ids"),
        ("stop_token_ids", ["a"], "stop_token_ids is ['a']; expected a list of int"),
        ("stop_token_ids", [True], "expected an integer"),
        ("stop_token_ids", 5, "stop_token_ids is 5"),
        ("seed", 2**64, "seed is"),
        ("seed", 0.5, "seed is 0.5; expected an integer"),
        ("logprobs", 21, "logprobs is 21; expected -1 to 20"),
        ("logit_bias", {5: math.inf}, "logit_bias of token 5 is inf"),
        ("logit_bias", {5: math.nan}, "logit_bias of token 5 is nan"),
        ("logit_bias", {"5": 1.0}, "expected an integer"),
        ("logit_bias", [5], "logit_bias is [5]; expected a dict"),
    ],
)
def test_bad_parameters_are_named(field: str, value: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize("wrong", ["false", 1, None])
def test_flags_are_no_other_type(wrong: object) -> None:
    """A text that says "false" would be true."""
    with pytest.raises(TypeError):
        SamplingParams(ignore_eos=wrong)


def test_stops_up_to_the_limits_are_fine() -> None:
    assert len(SamplingParams(stop=["a"] * MAX_STOPS).stop) == MAX_STOPS
    assert SamplingParams(stop="a" * MAX_STOP_CHARACTERS).stop


def test_what_was_checked_cannot_be_changed_later() -> None:
    given = {1: 1.0}
    params = SamplingParams(logit_bias=given, stop_token_ids=[3])
    given[1] = 1e9
    assert params.logit_bias == {1: 1.0} and params.stop_token_ids == (3,)
    with pytest.raises(AttributeError):
        params.top_k = -5


def test_stop_is_normalized() -> None:
    assert SamplingParams(stop="\n").stop == ("\n",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(bad_words="a").bad_words == ("a",)


def test_none_stops_nothing_as_in_vllm() -> None:
    given: dict[str, Any] = {"stop": None, "stop_token_ids": None, "bad_words": None}
    assert SamplingParams(**given) == SamplingParams()


@pytest.mark.gpu
def test_a_gpu_draws_the_same_tokens() -> None:
    params = [replace(case, seed=seed) for seed, case in enumerate(CASES.values())]
    rows = len(params)
    logits = logits_rows(rows, vocab=5000)
    steps = list(range(rows))
    seen = [PROMPT] * rows, [OUTPUT] * rows
    mask = bits(logits_rows(rows, vocab=5000, seed=1) > 0)
    for masks in ((None, None), (mask, mask.cuda())):
        chosen = [
            draw(logits.to(device), params, steps, *seen, mask=mask).tokens.cpu()
            for device, mask in zip((CPU, torch.device("cuda")), masks, strict=True)
        ]
        assert torch.equal(*chosen)
    assert torch.equal(mix(torch.tensor(steps)), mix(torch.tensor(steps).cuda()).cpu())
