"""Routing and dispatch: the kernels against their twins."""

from functools import partial

import pytest
import torch

from simplellm.kernels.routing import (
    SMALL,
    dispatch,
    dispatch_torch,
    max_blocks,
    route,
    route_and_dispatch,
    route_and_dispatch_torch,
    route_torch,
    top_k_and_dispatch,
    top_k_softmax,
    top_k_softmax_torch,
)


def random_logits(device, tokens, experts):
    generator = torch.Generator().manual_seed(tokens * experts)
    return torch.randn(tokens, experts, generator=generator).to(device)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 16, 4), (7, 128, 4), (3, 32, 4), (5, 5, 5), (2, 6, 1), (600, 16, 2)],
)
def test_top_k_is_its_twin(kernel_device, tokens, experts, top_k):
    logits = random_logits(kernel_device, tokens, experts)
    ids, weights = top_k_softmax(logits, top_k)
    expected = top_k_softmax_torch(logits, top_k)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(weights, expected[1])


def test_a_token_is_routed_alike_among_any_number_of_others(kernel_device):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(kernel_device)
        for shape in ((100, 96), (32, 96), (32,))
    )
    ids, weights, pairs = route_and_dispatch(
        x, weight, bias, 4, 16, batch_invariant=True
    )
    expected = route_and_dispatch_torch(x, weight, bias, 4, 16)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(weights, expected[1])
    assert torch.equal(pairs.blocks, expected[2].blocks)
    for rows in (slice(9, 10), slice(60, 70)):
        some = route_and_dispatch(x[rows], weight, bias, 4, 16, batch_invariant=True)
        assert torch.equal(some[0], ids[rows])
        assert torch.equal(some[1], weights[rows])


def test_of_equal_logits_the_lower_id_comes_first(kernel_device):
    logits = torch.tensor([[1.0, 0.0, -0.0, 1.0, 0.0, -2.0]], device=kernel_device)
    ids, _ = top_k_softmax(logits, 5)
    assert ids.tolist() == [[0, 3, 1, 2, 4]]


def test_infinities_and_padding_do_not_mix(kernel_device):
    """Five experts in a block of eight; -inf is a logit like any other."""
    logits = torch.full((1, 5), -torch.inf, device=kernel_device)
    logits[0, 3] = 1.0
    ids, weights = top_k_softmax(logits, 4)
    assert ids.tolist() == [[3, 0, 1, 2]]
    assert weights.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_nan_spoils_the_weights_of_its_token_only(kernel_device):
    logits = random_logits(kernel_device, 3, 16)
    logits[1, 9] = torch.nan
    ids, weights = top_k_softmax(logits, 4)
    assert ids[1, 0] == 9
    assert weights.isnan().all(1).tolist() == [False, True, False]
    assert not weights[[0, 2]].isnan().any()


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_route_is_its_twin(kernel_device, tokens):
    x = random_logits(kernel_device, tokens, 96)
    weight, bias = random_logits(kernel_device, 16, 96), torch.ones(16)
    bias = bias.to(kernel_device)
    ids, weights = route(x, weight, bias, 4)
    expected = route_torch(x, weight, bias, 4)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(weights, expected[1], atol=1e-5, rtol=1e-5)


def test_logits_may_come_in_parts_without_their_bias(kernel_device):
    parts = random_logits(kernel_device, 9, 3 * 16).view(9, 3, 16)
    bias = random_logits(kernel_device, 1, 16)[0]
    ids, weights = top_k_softmax(parts, 4, bias)
    whole = parts[:, 0] + parts[:, 1] + parts[:, 2] + bias
    expected = top_k_softmax_torch(whole, 4)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(weights, expected[1])
    twin = top_k_softmax_torch(parts, 4, bias)
    torch.testing.assert_close(twin[1], expected[1])


def test_logits_are_not_rounded_to_the_dtype_of_x(kernel_device):
    """In float16 the two would tie at 2049, and the first be taken."""
    x = torch.ones(1, 32, dtype=torch.float16, device=kernel_device)
    weight = torch.zeros(2, 32, dtype=torch.float16, device=kernel_device)
    weight[:, 0] = 2048
    weight[0, 1], weight[1, 1] = 1, 1.5
    ids, _ = route(x, weight, weight[:, 2].contiguous(), 1)
    assert ids.tolist() == [[1]]


@pytest.mark.parametrize("block", [1, 8, 64])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 16, 4), (1, 128, 4), (3, 5, 3), (9, 7, 1), (64, 128, 4), (65, 16, 4)],
)
def test_choosing_and_sorting_at_once(kernel_device, tokens, experts, top_k, block):
    x = random_logits(kernel_device, tokens, 32)
    weight, bias = random_logits(kernel_device, experts, 32), torch.ones(experts)
    bias = bias.to(kernel_device)
    ids, weights, pairs = route_and_dispatch(x, weight, bias, top_k, block)
    expected = route_and_dispatch_torch(x, weight, bias, top_k, block)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(weights, expected[1], atol=1e-5, rtol=1e-5)
    for field, got, want in zip(pairs._fields, pairs, expected[2], strict=True):
        assert torch.equal(got, want), field


@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [
        (1, 16, 4),
        (3, 5, 2),
        (64, 128, 4),
        (65, 32, 4),
        (SMALL // 4, 8, 4),
        (1200, 6, 4),
    ],
)
def test_dispatch_is_its_twin(kernel_device, tokens, experts, top_k, block):
    logits = random_logits(kernel_device, tokens, experts)
    ids = top_k_softmax_torch(logits, top_k)[0]
    for field, got, expected in zip(
        ("pairs", "offsets", "blocks"),
        dispatch(ids, experts, block),
        dispatch_torch(ids, experts, block),
        strict=True,
    ):
        assert torch.equal(got, expected), field


@pytest.mark.parametrize("top_k", [3, 4])
@pytest.mark.parametrize("tokens", [2, 4, 40, SMALL // 2])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_padding_has_no_expert(kernel_device, tokens, top_k, padding):
    """It changes nothing for the others, and its own pairs come last."""
    logits = random_logits(kernel_device, tokens, 8)
    live = torch.tensor([tokens - padding], dtype=torch.int32, device=kernel_device)
    ids, weights, got = top_k_and_dispatch(logits, top_k, 16, live=live)
    expected = dispatch_torch(ids, 8, 16, live)
    for field, found, want in zip(got._fields, got, expected, strict=True):
        assert torch.equal(found, want), field
    alone = top_k_and_dispatch(logits[: tokens - padding], top_k, 16)
    pairs = (tokens - padding) * top_k
    assert torch.equal(weights[: tokens - padding], alone[1])
    assert torch.equal(got.pairs[:pairs], alone[2].pairs)
    assert got.pairs[pairs:].tolist() == list(range(pairs, tokens * top_k))
    assert torch.equal(got.offsets, alone[2].offsets)
    used = len(alone[2].blocks)
    assert torch.equal(got.blocks[:used], alone[2].blocks)
    assert (got.blocks[used:, 0] == -1).all()


@pytest.mark.parametrize("tokens", [9, 300])
@pytest.mark.parametrize("expert", [0, 4, 6])
def test_all_tokens_may_choose_one_expert(kernel_device, tokens, expert):
    ids = torch.full((tokens, 1), expert, dtype=torch.int32, device=kernel_device)
    pairs, offsets, blocks = dispatch(ids, 7, 4)
    assert pairs.tolist() == list(range(tokens))
    assert offsets.tolist() == [0] * (expert + 1) + [tokens] * (7 - expert)
    used = -(-tokens // 4)
    assert blocks[:used].tolist() == [[expert, 4 * b] for b in range(used)]
    assert (blocks[used:] == torch.tensor([-1, 0], device=kernel_device)).all()


@pytest.mark.parametrize("tokens", [12, 300])
def test_blocks_cover_each_position_once(kernel_device, tokens):
    """What an expert kernel relies on, whatever the order of the blocks."""
    ids = torch.arange(tokens * 2, dtype=torch.int32).view(-1, 2) * 7 % 11
    _, offsets, blocks = dispatch(ids.to(kernel_device), 11, 8)
    seen: list[int] = []
    for expert, first in blocks.tolist():
        if expert >= 0:
            seen += range(first, min(first + 8, int(offsets[expert + 1])))
    assert sorted(seen) == list(range(tokens * 2))


def test_there_are_enough_blocks_for_the_worst_routing():
    for experts, block in ((4, 4), (3, 8), (7, 2)):
        for pairs in range(40):
            # One pair to each expert, the rest to the first: the most there can be.
            counts = [1] * min(pairs, experts)
            if counts:
                counts[0] += pairs - len(counts)
            used = sum(-(-count // block) for count in counts)
            assert used <= max_blocks(pairs, experts, block) <= pairs


def test_no_tokens_are_no_error(kernel_device):
    ids = torch.empty(0, 4, dtype=torch.int32, device=kernel_device)
    pairs, offsets, blocks = dispatch(ids, 16, 8)
    assert (len(pairs), offsets.tolist(), len(blocks)) == (0, [0] * 17, 0)
    empty = torch.empty(0, 16, device=kernel_device)
    assert top_k_softmax(empty, 4)[0].shape == (0, 4)


def test_bad_input_raises():
    logits, ids = torch.ones(2, 8), torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"top_k is 9; expected 1 to 8"):
        top_k_softmax(logits, 9)
    with pytest.raises(ValueError, match=r"logits are \[8\]"):
        top_k_softmax(logits[0], 1)
    for call in (partial(dispatch, ids), partial(top_k_and_dispatch, logits)):
        with pytest.raises(ValueError, match=r"block is 12; expected a power of two"):
            call(8, 12)
    with pytest.raises(ValueError, match=r"bias is \[7\]; expected \[8\]"):
        top_k_softmax(logits, 4, torch.ones(7))
    with pytest.raises(ValueError, match=r"ids are torch.int64"):
        dispatch(ids.long(), 8, 16)
