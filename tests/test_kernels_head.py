"""The LM head with its argmax: every way of computing it against the plain one."""

import pytest
import torch

from simplellm.model import ops
from simplellm.model.kernels import head as module
from simplellm.model.kernels.head import (
    HEADS,
    choose_head,
    head,
    likeliest,
)
from simplellm.model.kernels.linear import Dot, Gemv

CONFIGS = [Gemv(32, 4), Dot(64, 64, 1, 4, 2)]


def inputs(device, tokens, vocabulary=1088, size=96):
    """Hidden states, weight, and logits yet to be filled."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, size, generator=generator)
    weight = torch.randn(vocabulary, size, generator=generator)
    logits = torch.full((tokens, vocabulary), torch.nan)
    return x.to(device), weight.to(device), logits.to(device)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 1088), (3, 1001)])
def test_each_way_is_the_plain_head(kernel_device, tokens, vocabulary, config):
    x, weight, logits = inputs(kernel_device, tokens, vocabulary)
    expected = torch.empty_like(logits)
    ids = ops.head(x, weight, expected)
    assert torch.equal(likeliest(x, weight, logits, config), ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.bits
@pytest.mark.parametrize("config", CONFIGS)
def test_of_equal_logits_the_lowest_id_wins(kernel_device, config):
    """Near each other and in different programs; negative and zero ones as well."""
    x, weight, logits = inputs(kernel_device, 1)
    weight[[3, 5, 700, 1087]] = x[0]
    assert likeliest(x, weight, logits, config).tolist() == [3]
    same = -x.expand(1088, -1).contiguous()
    assert likeliest(x, same, logits, config).tolist() == [0]
    assert likeliest(x, torch.zeros_like(weight), logits, config).tolist() == [0]


@pytest.mark.parametrize("count", [1, 64, 65, 200])
def test_the_best_of_several_tiles_of_keys(kernel_device, count):
    """A key has its logit in the upper half and its id, reversed, in the lower one."""
    ids = torch.arange(3 * count).view(3, count)
    logits = torch.randint(
        -5, 5, (3, count), generator=torch.Generator().manual_seed(0)
    )
    keys = (logits << 32 | 0x7FFFFFFF - ids).to(kernel_device)
    best = torch.empty(3, dtype=torch.int32, device=kernel_device)
    module.best_kernel[(3,)](  # as `kernel_device` has made it
        keys, best, count, BLOCK=64, PDL=False
    )
    tied = logits == logits.amax(1)[:, None]
    assert best.tolist() == (ids[:, 0] + tied.int().argmax(1)).tolist()


@pytest.mark.parametrize("config", CONFIGS)
def test_nan_wins(kernel_device, config):
    x, weight, logits = inputs(kernel_device, 3)
    weight[900] = torch.nan
    assert likeliest(x, weight, logits, config).tolist() == [900] * 3
    x[1, 0] = torch.nan
    assert likeliest(x, weight, logits, config).tolist() == [900, 0, 900]
    assert ops.head(x, weight, logits).tolist() == [900, 0, 900]


@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_head_takes_any_number_of_rows(kernel_device, tokens):
    x, weight, logits = inputs(kernel_device, tokens)
    ids = head(x, weight, logits)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, ops.head(x, weight, torch.empty_like(logits)))
    assert torch.equal(ids, logits.argmax(-1).int())


@pytest.mark.gpu  # where PyTorch can leave sums in float32
def test_logits_of_many_rows_are_not_rounded():
    x, weight, got = inputs("cuda", 160)
    x, weight = x.bfloat16(), weight.bfloat16()
    expected = torch.empty_like(got)
    head(x, weight, got)
    ops.head(x.float(), weight.float(), expected)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)
    assert not torch.equal(got, got.bfloat16().float())


@pytest.mark.bits
def test_a_row_has_the_same_logits_among_any_number_of_others(kernel_device):
    x, weight, logits = inputs(kernel_device, 130)
    ids = head(x, weight, logits, batch_invariant=True)
    assert torch.equal(ids, ops.head(x, weight, torch.empty_like(logits)))
    for rows in (slice(7, 8), slice(60, 70)):
        some = torch.full_like(logits[rows], torch.nan)
        assert torch.equal(head(x[rows], weight, some, batch_invariant=True), ids[rows])
        assert torch.equal(some, logits[rows])


def test_more_rows_go_to_pytorch():
    limits = [most for most, _ in HEADS]
    assert limits == sorted(limits)
    assert choose_head(limits[-1]) == HEADS[-1][1]
    assert choose_head(limits[-1] + 1) is None
    # A tile finds its best logit only if it has all of each sum.
    assert all(config.parts == 1 for _, config in HEADS)
