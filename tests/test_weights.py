"""mxfp4.py against transformers, the bits of the format, and its rounding rule."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from simplellm.checkpoint.mxfp4 import MXFP4, VALUES, quantize
from simplellm.model.feed_forward import linear

EXAMPLES = settings(max_examples=60)
seeds = st.integers(0, 2**32 - 1)


def random_packed(*shape: int, seed: int = 0, low: int = 0, high: int = 254) -> MXFP4:
    """Any bytes, scales from ``low`` to ``high``; shape is [..., out, in]."""
    generator = torch.Generator().manual_seed(seed)
    *leading, inner = shape
    sizes = (*leading, inner // 32)
    blocks = torch.randint(0, 256, (*sizes, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(low, high + 1, sizes, dtype=torch.uint8, generator=generator)
    return MXFP4(blocks, scales)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit: 0 and -0 differ, NaN equals itself."""
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def e2m1(code: int) -> float:
    """The value of four bits: sign, two of exponent with bias 1, one of mantissa."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = (code >> 1) & 3, code & 1
    if exponent == 0:
        return sign * mantissa * 0.5
    return sign * (1 + mantissa / 2) * 2.0 ** (exponent - 1)


def nearest_code(size: float) -> int:
    """The e2m1 code next to ``size``, which is not negative; ties to the even code."""
    return min(range(8), key=lambda code: (abs(e2m1(code) - size), code & 1))


# Decoding.


@EXAMPLES
@given(seeds, st.integers(1, 3), st.integers(1, 5), st.integers(1, 4))
def test_dequantize_is_bit_exact_with_transformers(seed, experts, rows, groups):
    packed = random_packed(experts, rows, 32 * groups, seed=seed)
    packed.scales[0, 0, 0], packed.scales[-1, -1, -1] = 0, 254
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        theirs = convert_moe_packed_tensors(packed.blocks, packed.scales, dtype=dtype)
        # They return [E, in, out]; ours is out times in, as the bytes are.
        theirs = theirs.transpose(1, 2).contiguous()
        assert same_bits(packed.dequantize(dtype), theirs)


def test_values_are_e2m1():
    assert [math.copysign(1, v) for v in VALUES] == [1.0] * 8 + [-1.0] * 8
    assert list(VALUES) == [e2m1(code) for code in range(16)]


@pytest.mark.parametrize("scale", [0, 1, 2, 119, 126, 127, 128, 251, 252])
def test_every_byte_at_a_scale(scale):
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16)
    packed = MXFP4(blocks, torch.full((16, 1), scale, dtype=torch.uint8))
    expected = [
        e2m1(nibble) * 2.0 ** (scale - 127)
        for byte in range(256)
        for nibble in (byte & 15, byte >> 4)
    ]
    for dtype in (torch.float32, torch.bfloat16):
        values = packed.dequantize(dtype).flatten().double()
        assert same_bits(values, torch.tensor(expected, dtype=torch.float64))


def test_low_nibble_is_the_even_element():
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0], blocks[0, 0, 3] = 0x72, 0x0F  # codes 2, 7 and 15, 0
    values = MXFP4(blocks, torch.tensor([[127]], dtype=torch.uint8)).dequantize()
    assert values[0, :8].tolist() == [1, 6, 0, 0, 0, 0, -6, 0]


def test_scale_255_is_nan():
    packed = random_packed(2, 64)
    packed.scales[1, 0] = 255
    values = packed.dequantize(torch.float32)
    assert values[1, :32].isnan().all()
    assert values.isnan().sum() == 32


# Encoding.

magnitudes = st.integers(-149, 127).flatmap(
    lambda exponent: st.floats(0, 1, width=32).map(
        lambda f: float(torch.tensor((1 + f) * 2.0**exponent).clamp(max=3.4e38))
    )
)
blocks_of_floats = st.one_of(
    st.lists(st.floats(-1, 1, width=32), min_size=32, max_size=32),
    st.lists(
        st.builds(lambda m, s: m * s, magnitudes, st.sampled_from([-1, 0, 1])),
        min_size=32,
        max_size=32,
    ),
    # Quarters hit every tie of the grid.
    st.lists(st.integers(-32, 32).map(lambda n: n / 4), min_size=32, max_size=32),
)


@EXAMPLES
@given(blocks_of_floats)
def test_quantize_follows_the_rule(numbers):
    weight = torch.tensor([numbers], dtype=torch.float32)
    packed = quantize(weight)
    largest = weight.abs().max().item()
    # math.frexp is exact, and a Python float holds all that follows exactly.
    exponent = -127 if largest == 0 else math.frexp(largest)[1] - 1 - 2
    exponent = min(max(exponent, -127), 127)
    assert packed.scales.item() == exponent + 127
    codes = [
        nearest_code(abs(value) / 2.0**exponent) | (8 if value < 0 else 0)
        for value in weight[0].tolist()
    ]
    negative_zeros = (weight[0] == 0) & weight[0].signbit()
    expected = (
        torch.tensor(codes, dtype=torch.uint8) | negative_zeros.to(torch.uint8) * 8
    )
    low, high = packed.blocks[0, 0] & 15, packed.blocks[0, 0] >> 4
    assert torch.equal(low, expected[0::2])
    assert torch.equal(high, expected[1::2])


@EXAMPLES
@given(blocks_of_floats)
def test_error_is_half_a_step_or_saturation(numbers):
    weight = torch.tensor([numbers], dtype=torch.float32)
    packed = quantize(weight)
    scale = 2.0 ** (packed.scales.item() - 127)
    sizes = weight[0].double().abs() / scale
    error = (packed.dequantize(torch.float32) - weight)[0].double().abs() / scale
    half = torch.where(sizes < 2, 0.25, torch.where(sizes < 4, 0.5, 1.0))
    assert ((error <= half) | (sizes > 6)).all()
    assert (error < 2).all()


@EXAMPLES
@given(blocks_of_floats)
def test_quantizing_again_changes_nothing(numbers):
    once = quantize(torch.tensor([numbers], dtype=torch.float32)).dequantize()
    assert same_bits(quantize(once).dequantize(), once)


@EXAMPLES
@given(seeds)
def test_what_the_format_holds_survives(seed):
    values = random_packed(4, 96, seed=seed, high=252).dequantize(torch.float32)
    # Not the bytes: a block without a 4 or a 6 gets a smaller scale. Not below 2^-127.
    packed = quantize(values)
    assert same_bits(packed.dequantize(torch.float32), values)


@pytest.mark.parametrize(
    ("number", "rounded"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4)],
)
def test_ties_go_to_the_even_code(number, rounded):
    """And the floats next to a tie go where they belong."""
    grid = [abs(value) for value in VALUES]
    tie = torch.tensor(float(number))
    below = torch.nextafter(tie, torch.tensor(0.0))
    above = torch.nextafter(tie, torch.tensor(9.0))
    weight = torch.zeros(1, 32)
    weight[0, :7] = torch.stack(
        [6 * tie.sign(), tie, below, above, -tie, -below, -above]
    )
    low = max(value for value in grid if value < number)
    high = min(value for value in grid if value > number)
    expected = [6, rounded, low, high, -rounded, -low, -high]
    assert quantize(weight).dequantize(torch.float32)[0, :7].tolist() == expected


def test_saturates_at_six():
    weight = torch.zeros(2, 32)
    weight[0, 3], weight[1, 3] = 7.99, -7.0
    packed = quantize(weight)
    assert packed.scales.flatten().tolist() == [127, 127]
    assert packed.dequantize()[:, 3].tolist() == [6, -6]


def test_zeros():
    packed = quantize(torch.zeros(2, 64))
    assert packed.scales.unique().tolist() == [0]
    assert packed.blocks.unique().tolist() == [0]
    assert packed.dequantize().abs().max() == 0


def test_extremes_of_float32():
    weight = torch.zeros(3, 32)
    weight[0, 0] = torch.finfo(torch.float32).max
    weight[1, 0] = 2.0**-149
    weight[2, 0] = 2.0**-128
    packed = quantize(weight)
    assert packed.scales.flatten().tolist() == [252, 0, 0]
    expected = [6 * 2.0**125, 0, 2.0**-128]
    assert packed.dequantize(torch.float32)[:, 0].tolist() == expected


def test_blocks_are_along_the_last_dimension_of_each_expert():
    weight = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
    weight *= torch.logspace(-3, 3, 3)[:, None, None]
    whole = quantize(weight).dequantize(torch.float32)
    parts = [
        quantize(row[start : start + 32]).dequantize(torch.float32)
        for expert in weight
        for row in expert
        for start in (0, 32)
    ]
    assert same_bits(whole.flatten(), torch.cat(parts))


def test_bfloat16_weights_are_quantized_as_their_float32_values():
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    ours, theirs = quantize(weight), quantize(weight.float())
    assert torch.equal(ours.blocks, theirs.blocks)
    assert torch.equal(ours.scales, theirs.scales)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (torch.zeros(4, 33), ValueError, r"\[4, 33\]; expected .* multiple of 32"),
        (torch.zeros(4, 0), ValueError, r"\[4, 0\]; expected .* multiple of 32"),
        (torch.tensor(1.0), ValueError, r"\[\]; expected .* multiple of 32"),
        (torch.zeros(1, 32, dtype=torch.int8), TypeError, "int8; expected floating"),
        (torch.full((1, 32), math.nan), ValueError, "NaN or infinity"),
        (torch.full((1, 32), -math.inf), ValueError, "NaN or infinity"),
    ],
)
def test_quantize_refuses(weight, error, message):
    with pytest.raises(error, match=message):
        quantize(weight)


# The record and linear.


def test_shape_bytes_and_index():
    packed = random_packed(4, 6, 96)
    assert packed.shape == (4, 6, 96)
    assert packed.nbytes == 4 * 6 * 96 * 17 // 32
    whole = packed.dequantize(torch.float32)
    for index in (2, torch.tensor([3, 0]), slice(1, 3)):
        part = packed[index]
        assert same_bits(part.dequantize(torch.float32), whole[index])
        assert part.shape == tuple(whole[index].shape)
    assert same_bits(packed.to("cpu").dequantize(torch.float32), whole)


@pytest.mark.parametrize(
    ("blocks", "scales", "error", "message"),
    [
        ((2, 3, 16), (2, 4), ValueError, r"\[2, 3, 16\]; expected \[2, 4, 16\]"),
        ((2, 3, 8), (2, 3), ValueError, r"\[2, 3, 8\]; expected \[2, 3, 16\]"),
        ((3, 16), (2, 3), ValueError, r"expected \[2, 3, 16\]"),
    ],
)
def test_record_refuses_shapes(blocks, scales, error, message):
    with pytest.raises(error, match=message):
        MXFP4(
            torch.zeros(blocks, dtype=torch.uint8),
            torch.zeros(scales, dtype=torch.uint8),
        )


def test_record_refuses_dtypes():
    good = random_packed(2, 32)
    with pytest.raises(TypeError, match=r"blocks are torch\.int8"):
        MXFP4(good.blocks.view(torch.int8), good.scales)
    with pytest.raises(TypeError, match=r"scales are torch\.float32"):
        MXFP4(good.blocks, good.scales.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_applies_either_kind(dtype):
    generator = torch.Generator().manual_seed(3)
    packed = random_packed(8, 64, low=118, high=122)
    x = torch.randn(5, 2, 64, generator=generator).to(dtype)
    bias = torch.randn(8, generator=generator).to(dtype)
    dense = packed.dequantize(dtype)
    assert torch.equal(linear(x, packed, bias), linear(x, dense, bias))
    expected = x.double() @ dense.double().T + bias.double()
    error = (linear(x, packed, bias).double() - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype == torch.float32 else 4e-3)
    assert torch.equal(linear(x, packed), linear(x, dense))
    assert linear(x, packed).dtype == dtype
