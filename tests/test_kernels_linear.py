"""Projections of few tokens: every way of computing them against the twin."""

import pytest
import torch

from simplellm.kernels.linear import (
    INVARIANT,
    OTHERS,
    TUNED,
    Dot,
    Gemv,
    add_parts,
    choose,
    linear,
    linear_parts,
    linear_torch,
    project,
    split,
)

CONFIGS = [Gemv(2, 1), Gemv(8, 4), Dot(16, 64, 1, 4, 2), Dot(64, 64, 3, 4, 3)]


# Sums of 256 products, in another order.
CLOSE = {
    torch.float32: dict(rtol=1e-4, atol=5e-5),
    torch.float16: dict(rtol=2e-3, atol=2e-3),
}


def inputs(device, tokens, size_out, size_in, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens * size_out)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return normal(tokens, size_in), normal(size_out, size_in), normal(size_out)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("size_out", "size_in"), [(37, 224), (64, 96), (130, 256)])
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_project_is_its_twin(kernel_device, tokens, size_out, size_in, dtype, config):
    if isinstance(config, Gemv) and tokens > 4:
        pytest.skip("unrolled over the tokens: for few of them")
    x, weight, bias = inputs(kernel_device, tokens, size_out, size_in, dtype)
    for given in (bias, None):
        got = project(x, weight, given, config)
        torch.testing.assert_close(got, linear_torch(x, weight, given), **CLOSE[dtype])


@pytest.mark.parametrize("tokens", [1, 4, 5, 40, 70])
def test_linear_is_its_twin(kernel_device, tokens):
    x, weight, bias = inputs(kernel_device, tokens, 96, 224)
    torch.testing.assert_close(linear(x, weight, bias), linear_torch(x, weight, bias))
    assert linear(x[:0], weight, bias).shape == (0, 96)


def test_rows_of_x_may_be_slices(kernel_device):
    """The heads' part of a wider row."""
    x, weight, bias = inputs(kernel_device, 5, 64, 96)
    wide = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)
    for config in (Gemv(4, 4), Dot(64, 64, 1, 4, 2)):
        got = project(wide[:, :96], weight, bias, config)
        torch.testing.assert_close(got, linear_torch(x, weight, bias))


def test_parts_add_up_in_order(kernel_device):
    x, weight, bias = inputs(kernel_device, 5, 96, 320)
    parts = linear_parts(x, weight, bias, Dot(32, 64, 3, 4, 2))
    assert parts.shape == (5, 3, 96)
    one_by_one = parts[:, 0] + parts[:, 1] + parts[:, 2]
    assert torch.equal(add_parts(parts, x.dtype), one_by_one)
    # 320 = 5 steps of 64, two to a part: the last part has one.
    last = linear_torch(x[:, 256:], weight[:, 256:])
    torch.testing.assert_close(parts[:, 2], last)


@pytest.mark.parametrize("config", CONFIGS)
def test_nan_in_x_is_nan_in_y(kernel_device, config):
    x, weight, bias = inputs(kernel_device, 3, 37, 96)
    x[1, 95] = torch.nan
    got = project(x, weight, bias, config)
    assert got.isnan().all(1).tolist() == [False, True, False]
    assert not got[[0, 2]].isnan().any()


def test_a_row_has_the_same_bits_among_any_number_of_others(kernel_device):
    x, weight, bias = inputs(kernel_device, 150, 96, 320, torch.float16)
    together = linear_parts(x, weight, bias, INVARIANT)
    for rows in (slice(0, 1), slice(63, 65), slice(70, 71), slice(20, 149)):
        apart = linear_parts(x[rows], weight, bias, INVARIANT)
        assert torch.equal(apart, together[rows])


def test_more_tokens_go_to_pytorch():
    for (size_out, size_in), entries in TUNED.items():
        limits = [most for most, _ in entries]
        assert limits == sorted(limits)
        assert choose(1, size_out, size_in) == entries[0][1]
        assert choose(limits[-1], size_out, size_in) == entries[-1][1]
        assert choose(limits[-1] + 1, size_out, size_in) is None
    assert choose(1, 7, 9) == OTHERS[0][1]


@pytest.mark.parametrize(
    "config",
    [
        Gemv(4, 2, pdl=False),
        Dot(32, 64, 2, 4, 2, ahead=9),
        Dot(32, 64, 2, 4, 2, pdl=False),
    ],
)
@pytest.mark.parametrize("size_in", [224, 98])  # rows of 98 are not 16 bytes apart
def test_reading_ahead_changes_nothing(kernel_device, size_in, config):
    x, weight, bias = inputs(kernel_device, 3, 37, size_in, torch.float16)
    got = project(x, weight, bias, config)
    torch.testing.assert_close(got, linear_torch(x, weight, bias))


@pytest.mark.parametrize(
    ("size", "expected"), [(2880, (2048, 1024)), (4096, (4096, 0))]
)
def test_columns_are_split_with_little_padding(size, expected):
    assert split(size) == expected


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        ((3, 64), (32, 96), 32, r"x is \[3, 64\].*expected \[T, 96\]"),
        ((96,), (32, 96), 32, r"x is \[96\]"),
        ((3, 96), (96,), 32, r"weight is \[96\]"),
        ((3, 96), (32, 96), 31, r"bias is \[31\]; expected \[32\]"),
    ],
)
def test_shapes_that_do_not_fit_raise(x, weight, bias, message):
    with pytest.raises(ValueError, match=message):
        linear(torch.ones(x), torch.ones(weight), torch.ones(bias))


def test_mixed_dtypes_raise():
    x, weight = torch.ones(3, 96), torch.ones(32, 96, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"weight is torch.float16; expected x's"):
        linear(x, weight)
