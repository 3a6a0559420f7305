"""Experts of a rank that has some of them: together, the ranks give what one gives."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle_kernels import plain_sort, random_experts, repacked
from test_kernels_grouped import FORMATS, make_experts, number, tokens_for, tolerance
from test_kernels_routing import some_ids

from simplellm.checkpoint.sharding import narrow_weight
from simplellm.model import ops
from simplellm.model.kernels import experts as packed
from simplellm.model.kernels import grouped
from simplellm.model.kernels.experts_one import OneTiling, experts_one
from simplellm.model.kernels.routing import COMPARED, route_tokens, sort_pairs
from simplellm.model.layers import Experts

exhaustive = pytest.mark.exhaustive
HIDDEN, INTERMEDIATE = 96, 64
PARTS = {2: [range(3), range(3, 6)], 3: [range(2), range(2, 4), range(4, 6)]}


@pytest.fixture(autouse=True)
def empty_is_nan() -> Iterator[None]:
    """What nobody writes must not be read."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def some(mlp: Experts, held: range) -> Experts:
    """A rank's part."""
    weights: dict[str, Any] = {
        name: narrow_weight(getattr(mlp, name), -3, held)
        for name in ("gate_up", "down")
    }
    for name in ("gate_up_bias", "down_bias"):
        bias = getattr(mlp, name)
        weights[name] = None if bias is None else bias[held.start : held.stop]
    return replace(mlp, **weights, first=held.start)


@pytest.mark.parametrize("ranks", PARTS)
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("kind", FORMATS)
def test_plain_ones_add_up(kind: str, tokens: int, ranks: int) -> None:
    mlp = make_experts("cpu", kind, count=6)
    x, num_tokens = tokens_for(mlp, tokens), number(tokens, "cpu")
    each = [ops.experts(x, some(mlp, held), num_tokens) for held in PARTS[ranks]]
    expected = ops.experts(x, mlp, num_tokens)
    torch.testing.assert_close(sum(each), expected, rtol=1e-5, atol=1e-5)


FIRST = [
    (kind, tokens, False) for kind in FORMATS if "blocks" in kind for tokens in (1, 9)
]
# All pairs of kind, tokens and invariance.
MORE = [
    (kind, tokens, (number + place) % 2 == 0)
    for number, kind in enumerate(FORMATS)
    for place, tokens in enumerate((1, 9, 70))
]


@pytest.mark.parametrize(
    ("kind", "tokens", "invariant"),
    [
        *FIRST,
        *(pytest.param(*each, marks=exhaustive) for each in MORE if each not in FIRST),
    ],
)
def test_grouped_ones_add_up(
    kernel_device: str, kind: str, tokens: int, invariant: bool
) -> None:
    """Sorted, and for a single token not; the last row is padding."""
    mlp = make_experts(kernel_device, kind, count=6, normalized=tokens > 1)
    x, num_tokens = tokens_for(mlp, tokens + 1), number(tokens, kernel_device)
    x = x[: max(tokens, 2 * (tokens > 1))]
    each = [
        grouped.experts(x, some(mlp, held), num_tokens, batch_invariant=invariant)
        for held in PARTS[2]
    ]
    found = torch.stack([part.float().sum(1) for part in each]).sum(0)[:tokens]
    expected = ops.experts(x[:tokens], mlp, num_tokens)
    torch.testing.assert_close(found, expected, **tolerance(kind))


@pytest.mark.parametrize("few", [pytest.param(True, marks=exhaustive), False])
def test_packed_ones_add_up(kernel_device: str, few: bool) -> None:
    """Of few tokens in bfloat16, by the kernel that sorts nothing."""
    tokens, dtype = (3, torch.bfloat16) if few else (9, torch.float32)
    mlp = random_experts(kernel_device, HIDDEN, INTERMEDIATE, 6, dtype=dtype)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(kernel_device, dtype)
    real = number(tokens - 1, kernel_device)
    tiling = (OneTiling(programs=2, warps=2),) if few else ()
    compute: Any = experts_one if few else packed.experts
    parts = [compute(x, repacked(some(mlp, held)), real, *tiling) for held in PARTS[3]]
    whole = compute(x, repacked(mlp), real, *tiling)
    assert torch.equal(sum(parts)[:-1], whole[:-1])


@pytest.mark.parametrize("tokens", [1, 40, COMPARED // 4 + 100])
def test_choices_of_others_are_in_no_block(kernel_device: str, tokens: int) -> None:
    """Whether or not the pairs are counted before they are sorted."""
    ids = some_ids(kernel_device, tokens, 8, 4).clamp(max=5)  # 5: of another rank
    num_tokens = number(max(1, tokens - 2), kernel_device)
    for experts in (5, 4):
        ids = ids.clamp(max=experts)
        found = sort_pairs(ids, experts, 16, num_tokens, others=True)
        for one, plain in zip(
            found, plain_sort(ids, experts, 16, num_tokens), strict=True
        ):
            assert torch.equal(one, plain)


def test_ids_count_among_those_that_are_held(kernel_device: str) -> None:
    mlp = make_experts(kernel_device, count=6, top_k=3)
    x = tokens_for(mlp, 30)
    ids, scores = route_tokens(x, mlp.router, mlp.router_bias, 3)
    own, same = route_tokens(x, mlp.router, mlp.router_bias, 3, held=range(2, 4))
    here = (ids >= 2) & (ids < 4)
    assert torch.equal(own, torch.where(here, ids - 2, 2)) and here.any()
    assert torch.equal(same, scores)
