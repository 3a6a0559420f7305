"""Inputs of 8-bit products, rounded by what makes them: the same bits as afterwards."""

from dataclasses import replace

import pytest
import torch
from test_kernels_other_families import make_dense
from test_kernels_scaled_linear import (
    CONFIGS,
    FORMATS,
    added,
    assert_close,
    inputs,
    scaled_mm,
)

from simplellm.checkpoint.scaled import Scaled
from simplellm.model import feed_forward
from simplellm.model.kernels import rounding
from simplellm.model.kernels.launch import power_of_two
from simplellm.model.kernels.linear import Gemv
from simplellm.model.kernels.norm import add_norm
from simplellm.model.kernels.other_families import (
    activate_parts,
    dense,
    plainly,
    rounded_norm,
)
from simplellm.model.kernels.rounding import (
    Rounded,
    RoundedNorm,
    Rounding,
    multiply_by_library,
    round_rows,
    rounding_of,
)
from simplellm.model.kernels.scaled_linear import (
    choose_scaled,
    multiply_scaled,
    project,
)

ROUNDED = ["FP8 in blocks", "FP8", "INT8"]
KINDS = pytest.mark.parametrize("kind", ROUNDED)
DTYPES = torch.float32, torch.bfloat16
EPS = 1e-5


@pytest.fixture
def large(monkeypatch):
    """Fewer tokens than otherwise are many, which are for cuBLAS."""
    monkeypatch.setattr(rounding, "BEFORE_CUBLAS", 4)


def room(tokens):
    return 16 if tokens > 4 else tokens


def rounded(x, weight):
    """x in the format of the weight's inputs, with rows behind the last."""
    values, scales = round_rows(x, Rounding.of(weight), 16)
    return Rounded(values, scales, len(x), weight.tile[1], x.dtype)


def assert_same_bits(got, x, weight):
    """``got`` is x, rounded by itself; a NaN is in its tile's scale alone."""
    assert isinstance(got, Rounded) and got.dtype == x.dtype and len(got) == len(x)
    values, scales = round_rows(x, Rounding.of(weight))
    given = got.scales[:, : len(x)]
    assert given.shape == scales.shape
    assert torch.equal(given.view(torch.int32), scales.view(torch.int32))
    whole = scales.isfinite().all(0)
    ours, theirs = (v[: len(x)].view(torch.int8)[whole] for v in (got.values, values))
    assert torch.equal(ours, theirs)
    assert got.scales.shape[1] == len(got.values)


@KINDS
@pytest.mark.parametrize(
    ("tokens", "size", "parts"), [(3, 96, 0), (4, 384, None), (5, 300, 2)]
)
def test_a_norm_rounds(kernel_device, large, kind, tokens, size, parts):
    _, matrix, _ = inputs("cpu", kind, tokens, (16, size))
    generator = torch.Generator().manual_seed(size)
    for dtype in DTYPES:

        def normal(*shape, dtype=dtype):
            numbers = torch.randn(*shape, generator=generator)
            return numbers.to(kernel_device, dtype)

        residual, weight = normal(tokens, size), normal(size, dtype=torch.float32)
        shape = (tokens, size) if parts is None else (tokens, parts, size)
        update = None if parts == 0 else normal(*shape)
        residual[1] = 0
        if update is not None:
            update[1] = 0
        residual[2, 7] = torch.nan
        sums, expected = add_norm(residual.clone(), update, weight, EPS)
        norm = rounded_norm(weight, matrix)
        assert isinstance(norm, RoundedNorm)
        total, got = add_norm(residual, update, norm, EPS)
        assert torch.equal(total.nan_to_num(), sums.nan_to_num())
        assert total.data_ptr() == residual.data_ptr()
        assert_same_bits(got, expected, matrix)
        assert len(got.values) == room(tokens)


@KINDS
@pytest.mark.parametrize(
    ("activation", "tokens", "size", "parts"),
    [("swiglu", 3, 1152, 2), ("swiglu", 5, 72, 1), ("gelu", 3, 384, 1)],
)
def test_an_activation_rounds(
    kernel_device, large, kind, activation, tokens, size, parts
):
    _, down, _ = inputs("cpu", kind, tokens, (8, size))
    mlp = replace(make_dense("cpu", activation), down=down)
    ordinary = replace(mlp, down=down.dequantize())
    generator = torch.Generator().manual_seed(size)
    width = size if activation == "gelu" else 2 * size
    first = torch.randn(tokens, parts, width, generator=generator).to(kernel_device)
    first[1] = 0
    first[2, :, 7] = torch.nan
    for dtype in DTYPES:
        given = first if parts > 1 else first[:, 0].to(dtype)
        got = activate_parts(given, mlp, dtype)
        expected = activate_parts(given, ordinary, dtype)
        if size > 1024 and down.tile[1] >= size:  # several programs share a scale
            assert torch.equal(got.nan_to_num(), expected.nan_to_num())
        else:
            assert_same_bits(got, expected, down)
            assert len(got.values) == room(tokens)


@KINDS
@pytest.mark.parametrize("tokens", [1, 2, 5, 18])
def test_a_product_takes_what_is_rounded(kernel_device, kind, tokens):
    for dtype, has_bias in ((torch.float32, True), (torch.float16, False)):
        x, weight, bias = inputs(kernel_device, kind, tokens, (16, 416), dtype)
        given = bias if has_bias else None
        expected = feed_forward.linear(x, weight, given)
        for invariant in (False, True):
            y = project(rounded(x, weight), weight, given, batch_invariant=invariant)
            assert_close(added(y, dtype), expected, weight)


@KINDS
@pytest.mark.parametrize("config", CONFIGS[1:3])
def test_a_nan_that_was_rounded_is_nan_in_y(kernel_device, kind, config):
    x, weight, bias = inputs(kernel_device, kind, 3, (16, 320))
    x[1, 130] = torch.nan
    y = x.new_full((3, 16), torch.nan)
    multiply_scaled(y, rounded(x, weight), weight, bias, config)
    assert y.isnan().all(1).tolist() == [False, True, False]
    assert not y[[0, 2]].isnan().any()


@pytest.mark.parametrize("kind", ["FP8 in blocks", "FP8"])
def test_cublas_takes_what_is_rounded(monkeypatch, kernel_device, kind):
    if kernel_device == "cpu":
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    dtype = torch.float32 if kernel_device == "cpu" else torch.bfloat16
    x, weight, _ = inputs(kernel_device, kind, 139, (160, 512), dtype)
    found = multiply_by_library(rounded(x, weight), weight)
    assert torch.equal(found, multiply_by_library(x, weight))


@KINDS
def test_a_network_takes_what_is_rounded(kernel_device, kind):
    mlp = make_dense(kernel_device, "swiglu", kind)
    x, _, _ = inputs(kernel_device, kind, 5, (16, 96))
    for invariant in (False, True):
        got = dense(rounded(x, mlp.gate_up), mlp, batch_invariant=invariant)
        apart = dense(x, mlp, batch_invariant=invariant)
        assert torch.equal(added(got, x.dtype), added(apart, x.dtype))


def test_who_rounds():
    weights = {n: Scaled.of(torch.ones(8, 2048), *form) for n, form in FORMATS.items()}
    blocks = [n for n, weight in weights.items() if rounding_of(weight, 1024)]
    assert blocks == ["FP8 in blocks", "FP8 in low blocks"]  # no whole rows
    rows = [n for n, weight in weights.items() if rounding_of(weight, 2048)]
    assert {*rows} == {*ROUNDED, *blocks}
    assert rounding_of(torch.ones(8, 2048), 2048) is None
    assert rounding_of(weights["INT8"], 2048) == Rounding(2048, torch.int8)


@KINDS
def test_plain_operations_get_ordinary_numbers(kind):
    x, weight, _ = inputs("cpu", kind, 3, (8, 300))
    norm = rounded_norm(x[0], weight)
    assert isinstance(norm, RoundedNorm)
    assert norm.rounding == rounding_of(weight, power_of_two(300))
    assert plainly(norm) is norm.weight and plainly(x) is x and plainly(None) is None
    values, scales = weight.round_inputs(x)
    again = plainly(Rounded(values, scales.T, 3, weight.tile[1], x.dtype))
    expected = feed_forward.linear(x, weight)
    torch.testing.assert_close(feed_forward.linear(again, weight), expected)


def test_more_is_for_ordinary_cores_when_it_is_rounded():
    square = (128, 128)
    for size in (4096, 12288):
        assert isinstance(choose_scaled(1, 4096, size, square, True, True), Gemv)
        before = choose_scaled(1, 4096, size, square, True)
        assert isinstance(before, Gemv) == (size == 4096)
    assert not isinstance(choose_scaled(1, 4096, 32768, square, True, True), Gemv)
    assert not isinstance(choose_scaled(2, 4096, 4096, square, True, True), Gemv)
