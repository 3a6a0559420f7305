"""Filters without a sort, and penalties: the kernels against the operations."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simplellm.base.request import Request
from simplellm.base.sampling_params import SamplingParams
from simplellm.engine.sampler import SamplingTensors
from simplellm.model import ops
from simplellm.model.kernels.draw import draw
from simplellm.model.kernels.filters import TALLY_BLOCK, bounds
from simplellm.model.kernels.penalties import PENALTY_BLOCK, penalize
from simplellm.sampling.filters import LAST, STEPS, Filters, filter_tokens
from simplellm.sampling.penalties import TokenCounts

SETTINGS = settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def scores_of(logits, best, temperature):
    scores = logits - logits.gather(1, best[:, None].long())
    return scores / torch.where(temperature > 0, temperature, 1.0)[:, None]


def kept_by_kernel(logits, best, temperature, filters):
    """Bool [S, V], as `draw_kernel` reads it from `bounds`."""
    deepest, floors = bounds(logits, best, temperature, filters)
    scores = scores_of(logits, best, temperature)
    depths = ((-scores).clamp(0, LAST / STEPS) * STEPS).int()
    return (depths <= deepest[:, None]) & (scores >= floors)


def filters_of(params, logits):
    found = Filters.of(params, logits.shape[1], logits.device)
    assert found is not None
    return found


def agree(logits, params):
    """The kernel keeps what sorting keeps, and the same tokens are drawn."""
    columns = SamplingTensors.of(params, logits.shape[1], logits.device)
    best, filters = logits.argmax(-1).int(), columns.filters
    if filters is None:
        return
    given = logits, best, columns.temperature
    scores, drawing = scores_of(*given), columns.temperature > 0
    wanted = filter_tokens(scores, *filters[:3]) > -torch.inf
    kept = kept_by_kernel(*given, filters) & (scores > -torch.inf)
    assert torch.equal(kept[drawing], wanted[drawing])
    steps = torch.arange(len(params), device=logits.device)
    chosen = draw(*given, columns.seeds, steps, filters)
    assert torch.equal(chosen, ops.draw(*given, columns.seeds, steps, filters))


SOME = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1.0, 1.0, 0.7, 0.0, 1e-3, 2e-38, 20.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 7, 50, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.1, 1e-6, 1e-50, 1 - 2**-24]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0, 1e-30]),
    seed=st.integers(0, 99),
)
NUMBERS = (
    st.floats(-30, 30, width=32, allow_subnormal=False)
    | st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=False)
    | st.sampled_from([-torch.inf, 0.0, -0.0, 1.0, 1 + 2.0**-23, 5.0])
)


@st.composite
def rows_of_logits(draw):
    """Rows [S, V], each with a number that is no -inf, and their parameters."""
    vocabulary = draw(st.integers(1, 40))
    row = st.lists(NUMBERS, min_size=vocabulary, max_size=vocabulary)
    rows = draw(st.lists(row, min_size=1, max_size=4))
    logits = torch.tensor(rows)
    logits[:, draw(st.integers(0, vocabulary - 1))] = draw(
        st.sampled_from([-9.0, 0.0, 9.0])
    )
    return logits, [draw(SOME) for _ in rows]


@SETTINGS
@given(case=rows_of_logits())
def test_what_is_kept_is_what_sorting_keeps(kernel_device, case):
    """Ties, tokens ruled out, huge logits, one token; other parameters in each row."""
    logits, params = case
    agree(logits.to(kernel_device), params)


KINDS = [
    {"top_p": 0.95},
    {"top_p": 0.3, "temperature": 0.7},
    {"top_k": 50},
    {"top_k": 3000, "top_p": 0.9},
    {"min_p": 0.1, "top_p": 0.8},
    {"top_k": 20, "min_p": 0.01, "top_p": 0.99, "temperature": 1.3},
    {"temperature": 0.0, "top_p": 0.5},
    {},
]


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_many_tokens_in_several_blocks(kernel_device, spread):
    """Flat rows and peaked ones; the last block is not full."""
    generator = torch.Generator().manual_seed(5)
    shape = len(KINDS), 2 * TALLY_BLOCK + 77
    logits = torch.randn(shape, generator=generator) * spread
    agree(logits.to(kernel_device), [SamplingParams(seed=1, **kind) for kind in KINDS])


def test_equal_logits_stay_together(kernel_device):
    logits = torch.zeros(3, 500, device=kernel_device)
    params = [SamplingParams(top_k=3), SamplingParams(top_p=0.2), SamplingParams()]
    filters, temperature = (
        filters_of(params, logits),
        torch.ones(3, device=kernel_device),
    )
    best = torch.zeros(3, dtype=torch.int32, device=kernel_device)
    assert kept_by_kernel(logits, best, temperature, filters).all()


def test_a_row_is_the_same_alone_and_in_any_batch(kernel_device):
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(len(KINDS), 3000, generator=generator).to(kernel_device)
    params = [SamplingParams(**kind) for kind in KINDS]
    best = logits.argmax(-1).int()
    temperature = torch.tensor([p.temperature for p in params], device=kernel_device)
    together, _ = bounds(logits, best, temperature, filters_of(params, logits))
    for row in range(6):
        some = slice(row, row + 1)
        filters = filters_of(params[some], logits)
        alone, _ = bounds(logits[some], best[some], temperature[some], filters)
        assert alone[0] == together[row]


def test_nothing_kept_for_nan_is_out_of_bounds(kernel_device):
    """A row of NaN draws some token of the vocabulary; its neighbor its own."""
    logits = torch.zeros(2, 100, device=kernel_device)
    logits[0] = torch.nan
    logits[1, 7] = 50.0
    params = [SamplingParams(top_k=3, top_p=0.5, seed=1)] * 2
    columns = SamplingTensors.of(params, 100, logits.device)
    best = torch.tensor([0, 7], dtype=torch.int32, device=kernel_device)
    steps = torch.zeros(2, dtype=torch.int64, device=kernel_device)
    temperature, seeds = columns.temperature, columns.seeds
    chosen = draw(logits, best, temperature, seeds, steps, columns.filters)
    assert 0 <= chosen[0] < 100 and chosen[1] == 7


@pytest.mark.parametrize("vocabulary", [1, 50, PENALTY_BLOCK + 3])
def test_penalties_are_those_of_the_plain_operation(kernel_device, vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(4, vocabulary, generator=generator).to(kernel_device) * 5
    plain = SamplingParams()
    params = [
        replace(plain, repetition_penalty=1.7, frequency_penalty=0.5),
        plain,
        replace(plain, presence_penalty=-1.5),
        replace(plain, repetition_penalty=0.5, presence_penalty=1.0),
    ]
    requests = []
    for number, p in enumerate(params):
        tokens = torch.randint(vocabulary, (30,), generator=generator).tolist()
        requests.append(Request(tokens[:20], 99, p, request_id=number))
        requests[-1].tokens += tokens[20:]
    counts = TokenCounts(vocabulary, logits.device)
    assert counts.prepare(requests)
    before = logits.clone()
    found = penalize(counts, logits)
    expected = counts.penalize(logits)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    part = range(vocabulary // 2, vocabulary)  # as a rank of several has them
    upper = penalize(counts.of_tokens(part), logits[:, part.start :].contiguous())
    torch.testing.assert_close(upper, expected[:, part.start :], rtol=1e-6, atol=1e-6)
    assert torch.equal(logits, before), "logprobs need them as they came"
    assert torch.equal(found[1], logits[1])
