"""Weights of 8 bits: rounded as their formats say, multiplied as they were rounded."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from simplellm.checkpoint import scaled
from simplellm.checkpoint.scaled import E4M3, LARGEST, Scaled, as_numbers, join
from simplellm.model import feed_forward

SQUARE, ROW = (128, 128), (1, 0)
FORMATS = {
    "FP8 in blocks": (SQUARE, E4M3, True),
    "FP8": (ROW, E4M3, True),
    "INT8": (ROW, torch.int8, True),
    "INT8, weights alone": (ROW, torch.int8, False),
}
KINDS = pytest.mark.parametrize("kind", FORMATS)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tiles_of(x, rows, columns):
    """Each tile of a matrix, with its place among the scales."""
    for r, part in enumerate(x.split(rows)):
        for c, tile in enumerate(part.split(columns, 1)):
            yield (r, c), tile


def rounded(x, tile, dtype):
    """What numbers become, in float64, tile by tile.

    Ties are decided in float32, as they are by engines: they multiply by the scale's
    inverse.
    """
    rows, columns = tile[0], tile[1] or x.shape[1]
    out = torch.empty(x.shape, dtype=torch.float64)
    pairs = zip(tiles_of(out, rows, columns), tiles_of(x, rows, columns), strict=True)
    for (_, target), (_, source) in pairs:
        largest = source.abs().max()
        steps = source * (torch.full_like(largest, LARGEST[dtype]) / largest)
        values = steps.round() if dtype == torch.int8 else steps.to(dtype)
        target[:] = values.double() * (largest.double() / LARGEST[dtype])
    return out


def test_every_finite_value_of_e4m3_is_right():
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    finite = codes[~codes.float().isnan()]
    assert len(finite) == 254
    assert torch.equal(as_numbers(finite), finite.float())


@KINDS
@pytest.mark.parametrize("shape", [(128, 256), (192, 200), (7, 50)])
def test_a_weight_is_rounded_tile_by_tile(kind, shape):
    tile, dtype, inputs = FORMATS[kind]
    weight = normal(*shape) * torch.logspace(-3, 3, shape[1])
    scaled = Scaled.of(weight, tile, dtype, inputs)
    assert scaled.shape == shape
    assert scaled.nbytes == weight.numel() + 4 * scaled.scales.numel()
    expected = rounded(weight, tile, dtype)
    torch.testing.assert_close(
        scaled.dequantize(torch.float64), expected, rtol=1e-6, atol=0
    )
    columns = tile[1] or shape[1]
    for place, part in tiles_of(weight, tile[0], columns):
        largest = scaled.scales[place] * LARGEST[dtype]
        torch.testing.assert_close(largest, part.abs().max(), rtol=1e-6, atol=0)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 384), (300, 200)])
def test_a_product_is_that_of_the_rounded_numbers(kind, dtype, shape):
    """In float64: inputs by token, and by so many columns as a tile has."""
    tile, values, inputs = FORMATS[kind]
    x, bias = normal(5, shape[1], seed=1).to(dtype), normal(shape[0], seed=2)
    weight = Scaled.of(normal(*shape), tile, values, inputs)
    wide = rounded(x.float(), (1, tile[1]), values) if inputs else x.double()
    expected = functional.linear(wide, weight.dequantize(torch.float64), bias.double())
    close = dict(rtol=1e-5, atol=1e-4) if dtype == torch.float32 else {}
    for given_x in (x, x[:1]):
        got = feed_forward.linear(given_x, weight, bias)
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected[: len(got)].to(dtype), **close)
    got = feed_forward.linear(x.view(5, 1, -1), weight)
    torch.testing.assert_close(got[:, 0], feed_forward.linear(x, weight))


@KINDS
def test_rounding_costs_as_much_as_the_format_says(kind):
    """Three bits of mantissa: 2 to 3 percent; seven of an integer: under 1."""
    tile, values, inputs = FORMATS[kind]
    x, weight = normal(16, 512, seed=1), normal(256, 512)
    exact = x @ weight.T
    got = Scaled.of(weight, tile, values, inputs).product(x)
    error = ((got - exact).norm() / exact.norm()).item()
    low, high = (0.005, 0.012) if values == torch.int8 else (0.02, 0.045)
    assert (low if inputs else low / 2) < error < high


@KINDS
def test_zeros_nan_and_huge_numbers(kind):
    tile, values, inputs = FORMATS[kind]
    weight = normal(128, 256)
    weight[:, :128] = 0
    weight[0] = 0
    scaled = Scaled.of(weight * 1e30, tile, values, inputs)
    assert torch.isfinite(scaled.dequantize(torch.float32)).all()
    assert torch.equal(scaled.dequantize(torch.float32)[0], torch.zeros(256))
    x = normal(3, 256)
    x[0], x[1, 7] = 0, torch.nan
    y = Scaled.of(weight, tile, values, inputs).product(x)
    assert torch.equal(y[0], torch.zeros(128))
    assert y[1].isnan().any() and torch.isfinite(y[2]).all()


@settings(max_examples=40)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(1, 260))
def test_joined_weights_keep_their_numbers(heights, width):
    for tile, dtype, inputs in FORMATS.values():
        parts = [
            Scaled.of(normal(height, width, seed=i), tile, dtype, inputs)
            for i, height in enumerate(heights)
        ]
        joined = join(parts)
        expected = torch.cat([part.dequantize(torch.float32) for part in parts])
        assert torch.equal(joined.dequantize(torch.float32), expected)
        assert tile[0] % joined.tile[0] == 0


def test_whole_blocks_are_joined_as_they_are():
    parts = [Scaled.of(normal(n, 256), SQUARE, E4M3, True) for n in (256, 128, 100)]
    assert join(parts).tile == SQUARE


def test_experts_are_picked_by_index():
    scaled = Scaled.of(normal(4, 192, 256), SQUARE, E4M3, True)
    one = scaled[2]
    assert one.shape == (192, 256)
    dense = scaled.dequantize(torch.float32)
    assert torch.equal(one.dequantize(torch.float32), dense[2])
    assert torch.equal(scaled.to("cpu")[1:3].dequantize(torch.float32), dense[1:3])


@pytest.mark.parametrize(
    ("values", "scales", "error", "words"),
    [
        (torch.zeros(2, 3), torch.ones(2, 1), TypeError, "torch.float8_e4m3fn or"),
        (torch.zeros(2, 3).char(), torch.ones(2, 1).half(), TypeError, "float32"),
        (torch.zeros(2, 3).char(), torch.ones(3, 1), ValueError, r"expected \[2, 1\]"),
        (torch.zeros(2, 3).char(), torch.ones(2), ValueError, r"are \[2\]"),
    ],
)
def test_what_does_not_fit_together_is_refused(values, scales, error, words):
    with pytest.raises(error, match=words):
        Scaled(values, scales, (1, 3), True)


@pytest.mark.parametrize("vnni", [True, False])
@pytest.mark.parametrize(("out", "size"), [(5, 600), (130, 2048), (257, 4097)])
def test_sums_of_integers_are_exact(vnni, out, size, monkeypatch):
    """With the CPU's instructions for them or without; also the largest there are."""
    if vnni and not scaled.HAS_VNNI:
        pytest.skip("this CPU has no VNNI")
    monkeypatch.setattr(scaled, "HAS_VNNI", vnni)
    generator = torch.Generator().manual_seed(1)
    values, weight = (
        torch.randint(-127, 128, (n, size), dtype=torch.int8, generator=generator)
        for n in (9, out)
    )
    values[0], weight[0], weight[1] = 127, 127, -128
    expected = (values.long() @ weight.long().t()).float()
    assert torch.equal(scaled.exact_sums(values, weight), expected)
