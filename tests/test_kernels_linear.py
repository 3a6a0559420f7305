"""Projections of few tokens: every way of computing them against the plain one."""

import pytest
import torch

from simplellm.model import feed_forward
from simplellm.model.kernels.linear import (
    MANY_TOKENS,
    MOST_STORED,
    PROJECTIONS,
    Dot,
    Gemv,
    choose,
    choose_invariant,
    count_parts,
    multiply_into,
    project,
    project_exactly,
    split_columns,
)

CONFIGS = [Gemv(2, 1), Gemv(8, 4), Dot(16, 64, 1, 4, 2), Dot(64, 64, 3, 4, 3)]
SHAPES = [(37, 224), (64, 96), (130, 256)]
DTYPES = [torch.float32, torch.float16]
CASES = [
    pytest.param(
        *(config, dtype, shape, tokens),
        marks=[] if shape == SHAPES[0] and tokens == 3 else pytest.mark.exhaustive,
    )
    for config in CONFIGS
    for dtype in DTYPES
    for shape in SHAPES
    for tokens in (1, 3, 17)
    # A gemv is unrolled over the tokens: for few of them.
    if isinstance(config, Dot) or tokens <= 4
]
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


def multiply(x, weight, bias, config):
    """[T, N] in x's dtype, or float32 parts [T, S, N], in the way of ``config``."""
    y = x.new_full((len(x), len(weight)), torch.nan)
    if config.parts > 1:
        shape = len(x), config.stored, len(weight)
        y = torch.full(shape, torch.nan, device=x.device)
    multiply_into(y, x, weight, bias, config)
    return y


def added(y, dtype):
    """The sum of what may be parts."""
    return (y.sum(1) if y.ndim == 3 else y).to(dtype)


def expected(x, weight, bias=None):
    bias = None if bias is None else bias.float()
    return feed_forward.linear(x.float(), weight.float(), bias).to(x.dtype)


@pytest.mark.parametrize(("config", "dtype", "shape", "tokens"), CASES)
def test_each_way_is_the_plain_product(kernel_device, config, dtype, shape, tokens):
    x, weight, bias = inputs(kernel_device, tokens, shape[0], shape[1], dtype)
    for given in (bias, None):
        got = added(multiply(x, weight, given, config), dtype)
        torch.testing.assert_close(got, expected(x, weight, given), **CLOSE[dtype])


@pytest.mark.parametrize("tokens", [1, 4, 5, 40, 70])
def test_project_takes_any_number_of_tokens(kernel_device, tokens):
    x, weight, bias = inputs(kernel_device, tokens, 96, 224)
    for invariant in (False, True):
        got = added(project(x, weight, bias, batch_invariant=invariant), x.dtype)
        torch.testing.assert_close(
            got, feed_forward.linear(x, weight, bias), **CLOSE[x.dtype]
        )


def test_rows_of_x_may_be_slices(kernel_device):
    """The heads' part of a wider row."""
    x, weight, bias = inputs(kernel_device, 5, 64, 96)
    wide = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)
    for config in (Gemv(4, 4), Dot(64, 64, 1, 4, 2)):
        got = multiply(wide[:, :96], weight, bias, config)
        torch.testing.assert_close(got, expected(x, weight, bias))


def test_parts_are_parts_of_the_columns(kernel_device):
    x, weight, bias = inputs(kernel_device, 5, 96, 320)
    parts = multiply(x, weight, bias, Dot(32, 64, 3, 4, 2))
    assert parts.shape == (5, 3, 96)
    # 320 = 5 steps of 64, two to a part: the last part has one.
    last = expected(x[:, 256:], weight[:, 256:])
    torch.testing.assert_close(parts[:, 2], last)


@pytest.mark.parametrize("tokens", [3, 70])
def test_exact_sums_are_not_rounded(kernel_device, tokens):
    x, weight, _ = inputs(kernel_device, tokens, 64, 96, torch.float16)
    parts = project_exactly(x, weight)
    assert parts.dtype == torch.float32 and parts.ndim == 3
    exact = x.float() @ weight.float().T
    torch.testing.assert_close(parts.sum(1), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS)
def test_nan_in_x_is_nan_in_y(kernel_device, config):
    x, weight, bias = inputs(kernel_device, 3, 37, 96)
    x[1, 95] = torch.nan
    got = added(multiply(x, weight, bias, config), x.dtype)
    assert got.isnan().all(1).tolist() == [False, True, False]
    assert not got[[0, 2]].isnan().any()


@pytest.mark.bits
@pytest.mark.parametrize("columns", [64, 320, 352])
def test_joined_parts_are_those_that_the_next_kernel_would_add_up(
    kernel_device, columns
):
    """In the same order. Of 64 columns all but the first of them are empty."""
    x, weight, bias = inputs(kernel_device, 20, 96, columns, torch.float16)
    apart = Dot(64, 64, 3, 4, 2)
    wide = apart._replace(rows=128, warps=8, joined=True)
    for given in (bias, None):
        parts = multiply(x, weight, given, apart)
        joined = multiply(x, weight, given, wide)
        assert joined.shape == (20, 1, 96) and joined.dtype == torch.float32
        assert torch.equal(joined[:, 0], parts[:, 0] + parts[:, 1] + parts[:, 2])


@pytest.mark.bits
def test_a_row_has_the_same_bits_among_any_number_of_others(kernel_device):
    x, weight, bias = inputs(kernel_device, 150, 96, 320, torch.float16)
    together = project(x, weight, bias, batch_invariant=True)
    for rows in (slice(0, 1), slice(63, 65), slice(70, 71), slice(20, 149)):
        apart = project(x[rows], weight, bias, batch_invariant=True)
        assert torch.equal(apart, together[rows])


def test_the_order_of_an_invariant_sum_is_one_for_all_numbers_of_tokens():
    counts = 1, 16, 64, 65, 300, 3000, 65536
    for size_out, size_in in (*PROJECTIONS, (24576, 4096), (4096, 12288), (300, 20000)):
        ways = {
            tokens: choose_invariant(tokens, size_out, size_in) for tokens in counts
        }
        assert len({(way.depth, way.parts) for way in ways.values()}) == 1
        for tokens, way in ways.items():
            few = tokens * way.stored * size_out <= MOST_STORED
            assert few or tokens <= 64 or way.stored == 1
        assert ways[1].parts == 1 or ways[65536].joined


def test_more_tokens_go_to_pytorch():
    for (size_out, size_in), entries in PROJECTIONS.items():
        limits = [most for most, _ in entries]
        assert limits == sorted(limits)
        assert choose(1, size_out, size_in) == entries[0][1]
        assert choose(limits[-1], size_out, size_in) == entries[-1][1]
        assert choose(limits[-1] + 1, size_out, size_in) is None
    assert MANY_TOKENS.parts == 1


def test_weights_that_nobody_has_measured_have_a_way_too():
    for size_out, size_in in ((7, 9), (6144, 4096), (4096, 12288), (8192, 28672)):
        gemv, dot = (choose(tokens, size_out, size_in) for tokens in (1, 64))
        assert choose(65, size_out, size_in) is None
        assert dot.parts == count_parts(size_out, size_in)
        if isinstance(gemv, Gemv):
            held = gemv.rows * size_in / (32 * gemv.warps)
            assert held <= 128, "a thread has registers for no more"
        else:
            assert size_in > 16384
    assert choose(64, 4096, 12288).parts == 4


@pytest.mark.parametrize(
    "config",
    [
        Gemv(4, 2, pdl=False),
        Dot(32, 64, 2, 4, 2, ahead=9),
        Dot(32, 64, 2, 4, 2, pdl=False),
    ],
)
def test_reading_ahead_changes_nothing(kernel_device, config):
    x, weight, bias = inputs(kernel_device, 3, 37, 224, torch.float16)
    got = added(multiply(x, weight, bias, config), x.dtype)
    torch.testing.assert_close(got, expected(x, weight, bias))


@pytest.mark.parametrize(("size", "sizes"), [(2880, (2048, 1024)), (4096, (4096, 0))])
def test_columns_are_split_with_little_padding(size, sizes):
    assert split_columns(size) == sizes
