"""Experts of few tokens, whose pairs are not sorted, against plain PyTorch."""

import pytest
import torch
from allpairspy import AllPairs
from test_kernels_grouped import (
    CLOSE,
    FORMATS,
    TINY,
    make_experts,
    number,
    plain_product,
    tokens_for,
    tolerance,
)

from simplellm.model import ops
from simplellm.model.kernels import grouped, grouped_few
from simplellm.model.kernels.grouped import experts
from simplellm.model.kernels.grouped_few import Few, are_few, choose_few, multiply_few
from simplellm.model.layers import Experts

exhaustive = pytest.mark.exhaustive
# Two steps along the longer rows, one along the others.
SMALL = Few(rows=16, columns=128, warps=2)
WAYS = {"as chosen": None, "small": SMALL, "wide": Few(rows=32, columns=256, warps=4)}
IDS = [[0, 3], [3, 0], [1, 2]]  # the last one is padding


SIZES: tuple[dict[str, int], ...] = {}, {"hidden": 304, "intermediate": 40}
FIRST = [
    (kind, [*CLOSE][place % 2], [*WAYS][place % 3], SIZES[place // 3])
    for place, kind in enumerate(FORMATS)
]
# Any two of them meet in one case at least.
PAIRS = map(tuple, AllPairs([[*FORMATS], [*CLOSE], [*WAYS], SIZES]))
HALVES = FIRST + [
    pytest.param(*pair, marks=exhaustive) for pair in PAIRS if pair not in FIRST
]


def assert_first_half(
    mlp: Experts, ids: torch.Tensor, num_tokens: torch.Tensor
) -> torch.Tensor:
    """It is the plain one, of two experts a token; padding has no part."""
    x = tokens_for(mlp, len(ids))
    x[num_tokens:] = torch.nan
    hidden = x.new_full((ids.numel(), mlp.down.shape[2]), torch.nan)
    multiply_few(hidden, x, mlp.gate_up, ids, None, num_tokens)
    pairs = 2 * int(num_tokens)
    for pair, expert in enumerate(ids.flatten().tolist()[:pairs]):
        expected = plain_product(x[pair // 2, None], mlp, expert, None)[0]
        torch.testing.assert_close(hidden[pair], expected, **CLOSE[x.dtype])
    assert hidden[pairs:].isnan().all()
    return hidden


def assert_second_half(
    mlp: Experts, hidden: torch.Tensor, ids: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    """It is the plain one, times the score; padding has no part."""
    scores = torch.linspace(0.1, 1, ids.numel(), device=ids.device).view(ids.shape)
    out = hidden.new_full((*ids.shape, mlp.down.shape[1]), torch.nan)
    multiply_few(out, hidden, mlp.down, ids, scores, num_tokens)
    pairs = 2 * int(num_tokens)
    for pair, expert in enumerate(ids.flatten().tolist()[:pairs]):
        score = scores.flatten()[pair, None, None]
        expected = plain_product(hidden[pair, None], mlp, expert, score)[0]
        found = out.flatten(0, 1)[pair]
        torch.testing.assert_close(found, expected, **CLOSE[out.dtype])
    assert out[num_tokens:].isnan().all()


@pytest.mark.parametrize(("kind", "dtype", "way", "sizes"), HALVES)
def test_each_half_is_the_plain_one(
    monkeypatch, kernel_device, kind, dtype, way, sizes
):
    if WAYS[way]:
        monkeypatch.setattr(grouped_few, "choose_few", lambda *_: WAYS[way])
    mlp = make_experts(kernel_device, kind, dtype=dtype, **sizes)
    ids = torch.tensor(IDS, dtype=torch.int32, device=kernel_device)
    num_tokens = number(2, kernel_device)
    ids[num_tokens:] = 2**30  # no expert
    hidden = assert_first_half(mlp, ids, num_tokens)
    assert_second_half(mlp, hidden, ids, num_tokens)


REAL = [
    pytest.param(kind, dtype, marks=() if some else exhaustive)
    for kind in FORMATS
    for dtype in CLOSE
    for some in [kind == "FP8 in blocks" and dtype == torch.float16]
]


@pytest.mark.parametrize(("kind", "dtype"), REAL)
def test_rows_may_be_long(kernel_device, kind, dtype):
    """A warp has several tiles of columns, as in Qwen3-30B-A3B; rows are few here."""
    ids = torch.tensor([[1, 0]], dtype=torch.int32, device=kernel_device)
    one = number(1, kernel_device)
    options = {"count": 3, "dtype": dtype}
    mlp = make_experts(kernel_device, kind, hidden=2048, intermediate=24, **options)
    assert_first_half(mlp, ids, one)
    mlp = make_experts(kernel_device, kind, hidden=40, intermediate=768, **options)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 768, generator=generator).to(kernel_device, dtype)
    hidden[:, -1] = 9  # the largest is far behind
    assert_second_half(mlp, hidden, ids, one)


def test_pairs_are_sorted_where_they_share_experts():
    assert [n for n in range(1, 20) if are_few(n, 128, 8)] == [*range(1, 9)]
    assert [n for n in range(1, 20) if are_few(n, 512, 10)] == [*range(1, 7)]
    assert [n for n in range(1, 20) if are_few(n, 16, 2)] == [*range(1, 5)]
    assert [n for n in range(1, 20) if are_few(n, 8, 8)] == [1]


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(
    "kind", [k if "blocks" in k else pytest.param(k, marks=exhaustive) for k in FORMATS]
)
def test_few_experts_are_the_plain_ones(kernel_device, monkeypatch, kind, tokens):
    """Without a sort."""
    monkeypatch.setattr(grouped, "sort_pairs", None)
    mlp = make_experts(kernel_device, kind, count=16, **TINY)
    x, num_tokens = tokens_for(mlp, tokens), number(tokens, kernel_device)
    found = experts(x, mlp, num_tokens).sum(1)
    torch.testing.assert_close(
        found, ops.experts(x, mlp, num_tokens), **tolerance(kind)
    )


@pytest.mark.parametrize("kind", ["numbers", "FP8 in blocks", "INT8"])
def test_a_token_is_as_if_alone(kernel_device, kind):
    """Padding behind it, and a NaN in another, change no bit of it."""
    mlp = make_experts(kernel_device, kind, count=32, **TINY)
    x = tokens_for(mlp, 4)
    clean = experts(x, mlp, number(4, kernel_device))
    x[1, 130] = torch.nan
    x[3] = torch.nan
    out = experts(x, mlp, number(3, kernel_device))
    assert out[1].isnan().all() and not clean.isnan().any()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


def test_a_program_has_what_tensor_cores_want():
    for size in (96, 768, 2048, 4096, 14336):
        for itemsize in (1, 2, 4):
            way = choose_few(size, itemsize)
            assert way.rows >= 16 and way.columns >= 128
            assert way.columns.bit_count() == way.rows.bit_count() == 1
