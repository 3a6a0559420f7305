"""Routing, and sorting pairs by expert: the kernels against plain PyTorch."""

import pytest
import torch
from oracle_kernels import plain_sort

from simplellm.model import feed_forward
from simplellm.model.kernels.routing import (
    COMPARED,
    choose_experts,
    max_blocks,
    route_tokens,
    sort_pairs,
)
from simplellm.model.other_families import route_among_all

exhaustive = pytest.mark.exhaustive


def random_numbers(device, *shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device)


def inputs(device, tokens, experts, size=32):
    """x, and a router's weight and bias."""
    return (
        random_numbers(device, tokens, size),
        random_numbers(device, experts, size),
        random_numbers(device, experts),
    )


def some_ids(device, tokens, experts, top_k):
    logits = random_numbers(device, tokens, experts)
    return logits.topk(top_k).indices.int()


def choose(logits, top_k, rows=1):
    """The choice from logits [T, E] that are in one part and without a bias."""
    return choose_experts(logits[:, None].contiguous(), None, top_k, rows)


def assert_equal_blocks(got, expected):
    for field, found, want in zip(got._fields, got, expected, strict=True):
        assert torch.equal(found, want), field


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "rows"),
    [
        (1, 16, 4, 1),
        (7, 128, 4, 1),
        (3, 32, 4, 1),
        (5, 5, 5, 4),
        (2, 6, 1, 1),
        pytest.param(600, 16, 2, 4, marks=exhaustive),
    ],
)
def test_the_largest_logits_are_chosen(kernel_device, tokens, experts, top_k, rows):
    logits = random_numbers(kernel_device, tokens, experts)
    ids, scores = choose(logits, top_k, rows)
    best, expected = logits.topk(top_k)
    assert torch.equal(ids, expected.int())
    torch.testing.assert_close(scores, best.softmax(-1))


def test_of_equal_logits_the_lower_id_comes_first(kernel_device):
    logits = torch.tensor([[1.0, 0.0, -0.0, 1.0, 0.0, -2.0]], device=kernel_device)
    ids, _ = choose(logits, 5)
    assert ids.tolist() == [[0, 3, 1, 2, 4]]


def test_infinities_and_padding_do_not_mix(kernel_device):
    """Five experts in a block of eight; -inf is a logit like any other."""
    logits = torch.full((1, 5), -torch.inf, device=kernel_device)
    logits[0, 3] = 1.0
    ids, scores = choose(logits, 4)
    assert ids.tolist() == [[3, 0, 1, 2]]
    assert scores.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_nan_spoils_the_scores_of_its_token_only(kernel_device):
    logits = random_numbers(kernel_device, 3, 16)
    logits[1, 9] = torch.nan
    ids, scores = choose(logits, 4)
    assert ids[1, 0] == 9
    assert scores.isnan().all(1).tolist() == [False, True, False]
    assert not scores[[0, 2]].isnan().any()


def test_logits_may_come_in_parts_without_their_bias(kernel_device):
    parts = random_numbers(kernel_device, 9, 3, 16)
    bias = random_numbers(kernel_device, 16)
    ids, scores = choose_experts(parts, bias, 4, 1)
    best, expected = (parts[:, 0] + parts[:, 1] + parts[:, 2] + bias).topk(4)
    assert torch.equal(ids, expected.int())
    torch.testing.assert_close(scores, best.softmax(-1))


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_route_is_the_plain_one(kernel_device, tokens):
    x, weight, bias = inputs(kernel_device, tokens, 16, 96)
    for given in (bias, None):
        ids, scores = route_tokens(x, weight, given, 4)
        expected = feed_forward.route(x, weight, given, 4)
        assert torch.equal(ids, expected[0].int())
        torch.testing.assert_close(scores, expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("experts", [5, 16])
def test_scores_may_be_shares_among_all(kernel_device, experts):
    x, weight, bias = inputs(kernel_device, 6, experts, 96)
    weight = weight / 10  # so that the others have a share
    for given in (bias, None):
        ids, scores = route_tokens(x, weight, given, 3, normalized=False)
        expected = route_among_all(x, weight, given, 3)
        assert torch.equal(ids, expected[0].int())
        torch.testing.assert_close(scores, expected[1], atol=1e-5, rtol=1e-5)
        assert (scores.sum(-1) < 1).all()


def test_logits_are_not_rounded_to_the_dtype_of_x(kernel_device):
    """In float16 the two would tie at 2049, and the first be taken."""
    x = torch.ones(1, 32, dtype=torch.float16, device=kernel_device)
    weight = torch.zeros(2, 32, dtype=torch.float16, device=kernel_device)
    weight[:, 0] = 2048
    weight[0, 1], weight[1, 1] = 1, 1.5
    ids, _ = route_tokens(x, weight, None, 1)
    assert ids.tolist() == [[1]]


@pytest.mark.bits
def test_a_token_is_routed_alike_among_any_number_of_others(kernel_device):
    x, weight, bias = inputs(kernel_device, 100, 32, 96)

    def routed(rows):
        return route_tokens(x[rows], weight, bias, 4, batch_invariant=True)

    ids, scores = routed(slice(None))
    expected = feed_forward.route(x, weight, bias, 4)
    assert torch.equal(ids, expected[0].int())
    torch.testing.assert_close(scores, expected[1])
    for rows in (slice(9, 10), slice(60, 70)):
        some = routed(rows)
        assert torch.equal(some[0], ids[rows])
        assert torch.equal(some[1], scores[rows])


@pytest.mark.parametrize(
    "block", [pytest.param(1, marks=exhaustive), 16, pytest.param(64, marks=exhaustive)]
)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [
        (1, 16, 4),
        (3, 5, 2),
        (64, 128, 4),
        (65, 32, 4),
        pytest.param(COMPARED // 4, 8, 4, marks=exhaustive),
        (1200, 6, 4),
        (600, 300, 8),  # more counts than are added up at once
        (8193, 6, 4),  # the larger chunks
    ],
)
def test_sorted_pairs_are_the_plain_ones(kernel_device, tokens, experts, top_k, block):
    ids = some_ids(kernel_device, tokens, experts, top_k)
    got = sort_pairs(ids, experts, block)
    assert_equal_blocks(got, plain_sort(ids, experts, block))


@pytest.mark.parametrize("top_k", [pytest.param(3, marks=exhaustive), 4])
@pytest.mark.parametrize(
    "tokens",
    [2, 4, 40, pytest.param(COMPARED // 2, marks=exhaustive)],
)
@pytest.mark.parametrize("padding", [0, pytest.param(1, marks=exhaustive), 2])
def test_padding_has_no_expert(kernel_device, tokens, top_k, padding):
    """It changes nothing for the others, and its own pairs come last."""
    ids = some_ids(kernel_device, tokens, 8, top_k)
    num_tokens = torch.tensor(
        [tokens - padding], dtype=torch.int32, device=kernel_device
    )
    got = sort_pairs(ids, 8, 16, num_tokens)
    assert_equal_blocks(got, plain_sort(ids, 8, 16, num_tokens))
    if padding == tokens:  # there is nothing to sort alone
        return
    alone = sort_pairs(ids[: tokens - padding], 8, 16)
    pairs = (tokens - padding) * top_k
    assert torch.equal(got.pairs[:pairs], alone.pairs)
    assert got.pairs[pairs:].tolist() == list(range(pairs, tokens * top_k))
    assert torch.equal(got.offsets, alone.offsets)
    used = len(alone.blocks)
    assert torch.equal(got.blocks[:used], alone.blocks)
    assert (got.blocks[used:, 0] == -1).all()


def test_padding_of_many_pairs_has_no_expert(kernel_device):
    """As above, where they are counted first."""
    tokens = COMPARED // 4 + 100
    ids = some_ids(kernel_device, tokens, 8, 4)
    num_tokens = torch.tensor([tokens - 2], dtype=torch.int32, device=kernel_device)
    got = sort_pairs(ids, 8, 16, num_tokens)
    assert_equal_blocks(got, plain_sort(ids, 8, 16, num_tokens))
    assert got.pairs[-8:].tolist() == list(range(tokens * 4 - 8, tokens * 4))


@pytest.mark.parametrize("tokens", [9, 300])
@pytest.mark.parametrize("expert", [0, 4, 6])
def test_all_tokens_may_choose_one_expert(kernel_device, tokens, expert):
    ids = torch.full((tokens, 1), expert, dtype=torch.int32, device=kernel_device)
    pairs, offsets, blocks = sort_pairs(ids, 7, 4)
    assert pairs.tolist() == list(range(tokens))
    assert offsets.tolist() == [0] * (expert + 1) + [tokens] * (7 - expert)
    used = -(-tokens // 4)
    assert blocks[:used].tolist() == [[expert, 4 * b] for b in range(used)]
    assert (blocks[used:] == torch.tensor([-1, 0], device=kernel_device)).all()


@pytest.mark.parametrize("tokens", [12, 300])
def test_blocks_cover_each_position_once(kernel_device, tokens):
    """What an expert kernel relies on, whatever the order of the blocks."""
    ids = torch.arange(tokens * 2, dtype=torch.int32).view(-1, 2) * 7 % 11
    _, offsets, blocks = sort_pairs(ids.to(kernel_device), 11, 8)
    seen: list[int] = []
    for expert, first in blocks.tolist():
        if expert >= 0:
            seen += range(first, min(first + 8, int(offsets[expert + 1])))
    assert sorted(seen) == list(range(tokens * 2))


def test_there_are_as_many_blocks_as_the_worst_routing_fills():
    for experts, block in ((4, 4), (3, 8), (7, 2)):
        for pairs in range(40):
            # One pair to each expert, the rest to the first: the most there can be.
            counts = [1] * min(pairs, experts)
            if counts:
                counts[0] += pairs - len(counts)
            used = sum(-(-count // block) for count in counts)
            assert used == max_blocks(pairs, experts, block)
