"""Products with weights of 8 bits: every way to compute them against the plain one."""

import pytest
import torch
from allpairspy import AllPairs

from simplellm.checkpoint.scaled import E4M3, Scaled
from simplellm.model import feed_forward
from simplellm.model.kernels import linear
from simplellm.model.kernels.linear import Dot, Gemv
from simplellm.model.kernels.rounding import (
    Rounding,
    library_multiplies,
    library_suits,
    multiply_by_library,
    round_rows,
)
from simplellm.model.kernels.scaled_linear import (
    choose_scaled,
    choose_scaled_invariant,
    head,
    multiply_scaled,
    project,
)

FORMATS = {
    "FP8 in blocks": ((128, 128), E4M3, True),
    "FP8 in blocks, weights alone": ((128, 128), E4M3, False),
    "FP8 in low blocks": ((8, 128), E4M3, True),
    "FP8": ((1, 0), E4M3, True),
    "INT8": ((1, 0), torch.int8, True),
    "INT8, weights alone": ((1, 0), torch.int8, False),
}
KINDS = pytest.mark.parametrize("kind", FORMATS)
CONFIGS = [Gemv(4, 1), Gemv(2, 4), Dot(64, 64, 1, 4, 2), Dot(32, 128, 3, 4, 3)]
SHAPES = [(20, 416), (140, 320), (64, 96)]
CASES = [
    (kind, config, SHAPES[isinstance(config, Dot)], 3)
    for kind in FORMATS
    for config in CONFIGS
]


def is_a_case(chosen):
    """Gemv is for a few tokens."""
    return len(chosen) < 4 or isinstance(chosen[1], Dot) or chosen[3] <= 4


# Any two of them meet in one case at least.
PAIRS = AllPairs([[*FORMATS], CONFIGS, SHAPES, [1, 3, 17]], filter_func=is_a_case)
MORE = [pair for pair in map(tuple, PAIRS) if pair not in CASES]
CASES += [pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in MORE]
# Numbers rounded to 8 bits are the same; sums of their products have another order.
CLOSE = {
    torch.float32: dict(rtol=1e-4, atol=1e-4),
    torch.float16: dict(rtol=2e-3, atol=2e-2),
}
# Of the results' root mean square: Hopper's tensor cores keep about 14 bits of a sum of
# products of e4m3.
SHORT_SUMS = 1e-3


def assert_close(got, expected, weight):
    """Whether sums of products with ``weight`` are those that are expected."""
    close = CLOSE[got.dtype]
    fp8 = weight.inputs and weight.values.dtype == E4M3
    if got.is_cuda and fp8 and got.dtype == torch.float32:
        close = dict(rtol=0, atol=SHORT_SUMS * expected.pow(2).mean().sqrt().item())
    integers = weight.inputs and weight.values.dtype == torch.int8
    if got.is_cuda and integers and got.dtype == torch.float16:
        # Of many ties one may go the other way, where a GPU rounds a product and a sum
        # at once: by a 127th of 4, the largest x, times as large a weight.
        close = dict(rtol=2e-3, atol=4 / 127 * 4)
    torch.testing.assert_close(got, expected, **close)


def inputs(device, kind, tokens, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens * shape[0])

    def normal(*size):
        return torch.randn(*size, generator=generator).to(device)

    weight = Scaled.of(normal(*shape), *FORMATS[kind])
    # Numbers of float16, of which many are halfway between two of 8 bits.
    return normal(tokens, shape[1]).to(dtype), weight, normal(shape[0]).to(dtype)


def multiply(x, weight, bias, config):
    """[T, N] in x's dtype, in the way of ``config``."""
    y = x.new_full((len(x), weight.shape[0]), torch.nan)
    if config.parts > 1:
        y = y.float()[:, None].repeat(1, config.parts, 1)
    multiply_scaled(y, x, weight, bias, config)
    return added(y, x.dtype)


def added(y, dtype):
    return (y.sum(1) if y.ndim == 3 else y).to(dtype)


@pytest.mark.parametrize(("kind", "config", "shape", "tokens"), CASES)
def test_each_way_is_the_plain_product(kernel_device, kind, config, shape, tokens):
    for dtype, has_bias in ((torch.float32, True), (torch.float16, False)):
        x, weight, bias = inputs(kernel_device, kind, tokens, shape, dtype)
        given = bias if has_bias else None
        got = multiply(x, weight, given, config)
        assert_close(got, feed_forward.linear(x, weight, given), weight)


@KINDS
@pytest.mark.parametrize("shape", [(128, 256), (64, 300), (64, 65)])
def test_inputs_are_rounded_as_the_plain_operation_does(kernel_device, kind, shape):
    x, weight, _ = inputs(kernel_device, kind, 5, shape)
    x[3] = 0
    values, scales = round_rows(x, Rounding.of(weight))
    expected, their_scales = weight.round_inputs(x)
    assert torch.equal(values.view(torch.int8), expected.view(torch.int8))
    assert torch.equal(scales.T, their_scales)


@pytest.mark.parametrize("kind", ["FP8 in blocks", "INT8", "INT8, weights alone"])
@pytest.mark.parametrize("tokens", [1, 4, 5, 130])
def test_project_takes_any_number_of_tokens(kernel_device, kind, tokens):
    x, weight, bias = inputs(kernel_device, kind, tokens, (32, 256))
    for invariant in (False, True):
        got = added(project(x, weight, bias, batch_invariant=invariant), x.dtype)
        expected = feed_forward.linear(x, weight, bias)
        assert_close(got, expected, weight)
        logits = torch.full_like(expected, torch.nan)
        best = head(x, weight, logits, batch_invariant=invariant)
        assert_close(logits, feed_forward.linear(x, weight), weight)
        assert torch.equal(best.long(), logits.argmax(-1))


def test_ordinary_weights_go_the_ordinary_way(kernel_device):
    x, weight, bias = inputs(kernel_device, "FP8", 3, (32, 256))
    dense = weight.dequantize(torch.float32)
    got = project(x, dense, bias)
    assert torch.equal(got, linear.project(x, dense, bias))
    logits = x.new_empty(3, 32)
    best = head(x, dense, logits)
    torch.testing.assert_close(logits, x @ dense.T)
    assert torch.equal(best.long(), logits.argmax(-1))


def test_rows_of_x_may_be_slices(kernel_device):
    """The heads' part of a wider row."""
    for kind in FORMATS:
        x, weight, bias = inputs(kernel_device, kind, 3, (16, 256))
        wide = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)
        for config in CONFIGS[::2]:
            got = multiply(wide[:, :256], weight, bias, config)
            torch.testing.assert_close(got, multiply(x, weight, bias, config))


@KINDS
@pytest.mark.parametrize("config", CONFIGS[::2])
def test_nan_in_x_is_nan_in_y(kernel_device, kind, config):
    x, weight, bias = inputs(kernel_device, kind, 3, (16, 256))
    x[1, 130] = torch.nan
    got = multiply(x, weight, bias, config)
    assert got.isnan().all(1).tolist() == [False, True, False]
    assert not got[[0, 2]].isnan().any()


@pytest.mark.bits
@KINDS
def test_a_row_has_the_same_bits_among_any_number_of_others(kernel_device, kind):
    x, weight, bias = inputs(kernel_device, kind, 140, (64, 256), torch.float16)
    together = project(x, weight, bias, batch_invariant=True)
    for rows in (slice(0, 1), slice(63, 65), slice(20, 139)):
        apart = project(x[rows], weight, bias, batch_invariant=True)
        assert torch.equal(apart, together[rows])


def scaled_mm(a, b, scale_a, scale_b, out_dtype):
    """What cuBLAS computes, of operands as it wants them."""
    (tokens, size), size_out = a.shape, b.shape[1]
    assert a.is_contiguous() and b.T.is_contiguous()
    assert tokens % 16 == size % 16 == size_out % 16 == 0
    if scale_a.shape[1] == 1:
        assert scale_a.shape == (tokens, 1) and scale_b.shape == (1, size_out)
        scale_b = scale_b.T
    else:
        assert scale_a.shape[1] % 4 == 0 and scale_a.stride() == (1, tokens)
        assert scale_b.stride() == (1, scale_a.shape[1])
        scale_a = scale_a.repeat_interleave(128, 1)
        scale_b = scale_b.T.repeat_interleave(128, 0).repeat_interleave(128, 1)
        scale_b = scale_b[:size_out]
    return ((a.float() * scale_a) @ (b.T.float() * scale_b).T).to(out_dtype)


@pytest.mark.parametrize("kind", ["FP8 in blocks", "FP8"])
def test_cublas_gets_what_it_wants(kernel_device, monkeypatch, kind):
    if kernel_device == "cpu":
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    x, weight, _ = inputs(kernel_device, kind, 139, (160, 512))
    if kernel_device == "cuda":
        tile = weight.tile if kind == "FP8 in blocks" else (1, 0)
        assert library_multiplies(tile, x.device)
        x = x.bfloat16()
    found, expected = multiply_by_library(x, weight), weight.product(x)
    assert found.shape == expected.shape and found.dtype == x.dtype
    assert (found - expected).float().norm() < 1e-2 * expected.float().norm()


def test_cublas_multiplies_what_it_can(monkeypatch):
    asked = []

    def library_multiplies(*what):
        asked.append(what)
        return True

    name = "simplellm.model.kernels.rounding.library_multiplies"
    monkeypatch.setattr(name, library_multiplies)
    many, few = torch.zeros(129, 512).bfloat16(), torch.zeros(128, 512).bfloat16()
    kinds = {n: Scaled.of(torch.ones(64, 512), *form) for n, form in FORMATS.items()}
    suited = [n for n, weight in kinds.items() if library_suits(many, weight)]
    assert suited == ["FP8 in blocks", "FP8"]
    assert [tile for tile, _ in asked] == [(128, 128), (1, 0)]
    assert not library_suits(few, kinds["FP8"])
    assert not library_suits(many.float(), kinds["FP8"])
    # Of 6 scales it would read others, where 8 have room.
    long = Scaled.of(torch.ones(64, 768), *FORMATS["FP8 in blocks"])
    assert not library_suits(torch.zeros(129, 768).bfloat16(), long)


def test_what_cublas_has_not_is_for_triton(kernel_device, monkeypatch):
    def missing(*args, **options):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(torch, "_scaled_mm", missing)
    device = torch.device(kernel_device)
    assert not library_multiplies.__wrapped__((128, 128), device)
    wrong = torch.ones(256, 256, device=device)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **options: wrong)
    assert not library_multiplies.__wrapped__((128, 128), device)


def test_what_is_chosen():
    square, row = (128, 128), (1, 4096)
    for tile in (square, row):
        assert isinstance(choose_scaled(1, 6144, 4096, tile, True), Gemv)
        assert isinstance(choose_scaled(2, 6144, 4096, tile, True), Dot)
        assert choose_scaled(16, 4096, 4096, tile, True).parts == 4
        assert choose_scaled(64, 4096, 4096, tile, True).parts == 6
        assert choose_scaled(64, 4096, 4096, tile, False).parts == 1
        assert choose_scaled(64, 24576, 4096, tile, True).parts == 1
        assert choose_scaled(2048, 4096, 4096, tile, True).parts == 1
        assert choose_scaled_invariant(4096, 4096, tile, True).width == 64
    # Rows of a program would have several scales.
    assert isinstance(choose_scaled(1, 6144, 4096, (1, 128), True), Dot)
