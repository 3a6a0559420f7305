"""The LM head with its argmax: every way of computing it against the twin."""

import pytest
import torch

from simplellm.kernels import head as module
from simplellm.kernels.head import (
    TUNED,
    best_of,
    choose,
    head,
    head_torch,
)
from simplellm.kernels.linear import Dot, Gemv

CONFIGS = [Gemv(8, 4), Dot(64, 64, 1, 4, 2)]


def inputs(device, tokens, vocabulary=1088, size=96):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, size, generator=generator)
    weight = torch.randn(vocabulary, size, generator=generator)
    return x.to(device), weight.to(device)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 1088), (3, 1001)])
def test_head_is_its_twin(kernel_device, tokens, vocabulary, config):
    x, weight = inputs(kernel_device, tokens, vocabulary)
    expected = torch.empty(tokens, vocabulary, device=kernel_device)
    ids = head_torch(x, weight, expected)
    got = torch.full_like(expected, torch.nan)
    assert torch.equal(best_of(x, weight, got, config), ids)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(best_of(x, weight, None, config), ids)


@pytest.mark.parametrize("config", CONFIGS)
def test_of_equal_logits_the_lowest_id_wins(kernel_device, config):
    """Near each other and in different programs; negative and zero ones as well."""
    x, weight = inputs(kernel_device, 1)
    weight[[3, 5, 700, 1087]] = x[0]
    assert best_of(x, weight, None, config).tolist() == [3]
    assert best_of(x, -x.expand(1088, -1).contiguous(), None, config).tolist() == [0]
    assert best_of(x, torch.zeros_like(weight), None, config).tolist() == [0]


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
    x, weight = inputs(kernel_device, 3)
    weight[900] = torch.nan
    assert best_of(x, weight, None, config).tolist() == [900] * 3
    x[1, 0] = torch.nan
    assert best_of(x, weight, None, config).tolist() == [900, 0, 900]
    assert head_torch(x, weight).tolist() == [900, 0, 900]


@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_head_takes_any_number_of_tokens(kernel_device, tokens):
    x, weight = inputs(kernel_device, tokens)
    logits = torch.full((tokens, 1088), torch.nan, device=kernel_device)
    ids = head(x, weight, logits)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, head_torch(x, weight))
    assert torch.equal(ids, logits.argmax(-1).int())
    assert head(x[:0], weight).shape == (0,)


def test_logits_of_many_tokens_are_not_rounded(kernel_device):
    x, weight = (part.bfloat16() for part in inputs(kernel_device, 160))
    got = torch.full((160, 1088), torch.nan, device=kernel_device)
    expected = torch.empty_like(got)
    head(x, weight, got)
    head_torch(x, weight, expected)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)
    assert not torch.equal(got, got.bfloat16().float())


def test_a_row_has_the_same_logits_among_any_number_of_others(kernel_device):
    x, weight = inputs(kernel_device, 130)
    logits = torch.full((130, 1088), torch.nan, device=kernel_device)
    ids = head(x, weight, logits, batch_invariant=True)
    assert torch.equal(ids, head_torch(x, weight))
    for rows in (slice(7, 8), slice(60, 70), slice(5, 5)):
        some = torch.full_like(logits[rows], torch.nan)
        assert torch.equal(head(x[rows], weight, some, True), ids[rows])
        assert torch.equal(some, logits[rows])


def test_more_tokens_go_to_pytorch():
    limits = [most for most, _ in TUNED]
    assert limits == sorted(limits)
    assert choose(limits[-1]) == TUNED[-1][1]
    assert choose(limits[-1] + 1) is None


def test_logits_of_another_shape_raise():
    x, weight = inputs("cpu", 2)
    with pytest.raises(ValueError, match=r"logits are .*expected torch.float32 \[2, "):
        head(x, weight, torch.empty(2, 7))
    with pytest.raises(ValueError, match=r"logits are torch.float16"):
        head(x, weight, torch.empty(2, 1088, dtype=torch.float16))
