"""The sampler, by distribution: chi-square against expectations computed in numpy."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from simplellm.sampler import (
    Columns,
    Sampled,
    SamplingParams,
    count_tokens,
    filter_tokens,
    gumbel_noise,
    mix,
    penalize,
    sample,
)

CPU = torch.device("cpu")
V = 12


def logits_rows(rows: int, vocab: int = V, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * 2


def draw(
    logits: torch.Tensor,
    params: list[SamplingParams],
    steps: list[int] | None = None,
    prompts: list[list[int]] | None = None,
    outputs: list[list[int]] | None = None,
) -> Sampled:
    rows, vocab = logits.shape
    columns = Columns.of(params, vocab, CPU)
    counts = [count_tokens(s or [[]] * rows, vocab, CPU) for s in (prompts, outputs)]
    return sample(logits, columns, torch.tensor(steps or [0] * rows), *counts)


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
    columns = Columns.of([SamplingParams(**{**vars(params), "seed": 5})] * n, V, CPU)
    counts = [count_tokens([s], V, CPU).expand(n, -1) for s in (PROMPT, OUTPUT)]
    tokens = sample(row.expand(n, -1), columns, torch.arange(n), *counts).tokens
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


def test_rows_steps_and_neighbouring_seeds_are_independent() -> None:
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
    mine = SamplingParams(
        **{**vars(CASES.get(name, SamplingParams(temperature=0))), "seed": 77}
    )
    others = [
        SamplingParams(**{**vars(p), "seed": i}) for i, p in enumerate(CASES.values())
    ]
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
    assert torch.equal(draw(logits, params).tokens, logits.argmax(-1))
    mixed = [*params[:32], *[SamplingParams(seed=s) for s in range(32)]]
    assert torch.equal(draw(logits, mixed).tokens[:32], logits[:32].argmax(-1))


def test_a_tiny_temperature_is_greedy_without_overflow() -> None:
    logits = logits_rows(64, vocab=1000) * 30
    params = [SamplingParams(temperature=2e-38, seed=s) for s in range(64)]
    assert torch.equal(draw(logits, params).tokens, logits.argmax(-1))


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
    counts = [count_tokens([tokens], 50, CPU) for tokens in (prompt, output)]
    penalties = [torch.tensor([[value]]) for value in (1.3, 0.0, 0.0)]
    assert torch.equal(penalize(logits, *counts, *penalties), theirs)


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
    assert sampled.logprobs is not None and sampled.top is not None
    top_ids, top_logprobs = sampled.top
    picked = wanted.gather(1, sampled.tokens[:, None])[:, 0]
    torch.testing.assert_close(sampled.logprobs.double(), picked, atol=1e-5, rtol=0)
    best = wanted.sort(-1, descending=True)
    assert torch.equal(top_ids, best.indices[:, :3])
    torch.testing.assert_close(
        top_logprobs.double(), best.values[:, :3], atol=1e-5, rtol=0
    )
    assert draw(logits, [SamplingParams(temperature=0)] * 3).logprobs is None


def test_count_tokens() -> None:
    counts = count_tokens([[1, 1, 4], [], [0]], 5, CPU)
    assert counts.tolist() == [[0, 2, 0, 0, 1], [0] * 5, [1, 0, 0, 0, 0]]


def test_missing_counts_and_seeds_are_errors() -> None:
    columns = Columns.of([SamplingParams(seed=0, presence_penalty=1.0)], V, CPU)
    with pytest.raises(ValueError, match="expected the counts"):
        sample(logits_rows(1), columns, torch.tensor([0]))
    with pytest.raises(ValueError, match="row 0 draws without a seed"):
        Columns.of([SamplingParams()], V, CPU)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens is 0; expected 1 to"),
        ("max_tokens", 1.5, "max_tokens is 1.5; expected an integer"),
        ("max_tokens", True, "expected an integer"),
        ("temperature", -0.1, "temperature is -0.1; expected 0 to 100"),
        ("temperature", float("nan"), "temperature is nan"),
        ("temperature", float("inf"), "temperature is inf"),
        ("temperature", "1", "temperature is '1'; expected a number"),
        ("temperature", None, "expected a number"),
        ("top_k", -2, "top_k is -2"),
        ("top_p", 0, "top_p is 0; expected more than 0"),
        ("top_p", 1.01, "top_p is 1.01; expected 0 to 1"),
        ("min_p", -0.5, "min_p"),
        ("repetition_penalty", 0, "repetition_penalty is 0"),
        ("presence_penalty", 2.1, "presence_penalty is 2.1; expected -2 to 2"),
        ("frequency_penalty", -3, "frequency_penalty is -3"),
        ("stop", "", "stop is"),
        ("stop", ["a", ""], "stop is"),
        ("stop", [3], "stop is"),
        ("stop_token_ids", [-1], "stop_token_ids"),
        ("seed", 2**64, "seed is"),
        ("seed", 0.5, "seed is 0.5; expected an integer"),
        ("logprobs", 21, "logprobs is 21; expected 0 to 20"),
        ("logit_bias", {5: 101}, "logit_bias of token 5 is 101"),
        ("logit_bias", {"5": 1.0}, "expected an integer"),
    ],
)
def test_bad_parameters_are_named(field: str, value: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert message in str(error.value)


def test_stop_is_normalised() -> None:
    assert SamplingParams(stop="\n").stop == ("\n",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_none_stops_nothing_as_in_vllm() -> None:
    given: dict[str, Any] = {"stop": None, "stop_token_ids": None}
    assert SamplingParams(**given) == SamplingParams()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same_tokens() -> None:
    params = [
        SamplingParams(**{**vars(case), "seed": seed})
        for seed, case in enumerate(CASES.values())
    ]
    logits = logits_rows(len(params), vocab=5000)
    steps = torch.arange(len(params))
    chosen = []
    for device in (CPU, torch.device("cuda")):
        columns = Columns.of(params, 5000, device)
        counts = [
            count_tokens([seen] * len(params), 5000, device)
            for seen in (PROMPT, OUTPUT)
        ]
        sampled = sample(logits.to(device), columns, steps.to(device), *counts)
        chosen.append(sampled.tokens.cpu())
    assert torch.equal(*chosen)
    assert torch.equal(mix(steps), mix(steps.cuda()).cpu())
