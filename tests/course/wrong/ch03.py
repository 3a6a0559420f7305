"""Wrong answers to chapter 3."""

import torch

from simplellm.checkpoint.mxfp4 import (
    BLOCK,
    MXFP4,
    VALUES,
    choose_scales,
    decode_scales,
    quantize,
)
from simplellm.model.feed_forward import linear
from wrong import wrong

SIXTEEN = torch.tensor(VALUES)


def scaled(weight: MXFP4, codes: torch.Tensor, bias: int = 127) -> torch.Tensor:
    """The elements ``codes`` [..., G, 32] times their scales."""
    exponents = weight.scales.int()[..., None] - bias
    return torch.ldexp(SIXTEEN[codes.int()], exponents).flatten(-2)


def nibbles(weight: MXFP4) -> torch.Tensor:
    """The codes [..., G, 32]."""
    return torch.stack([weight.blocks & 15, weight.blocks >> 4], -1).flatten(-2)


@wrong("MXFP4.dequantize", "low nibble")
class HighNibbleFirst(MXFP4):
    def dequantize(self, dtype=torch.bfloat16):
        pairs = torch.stack([self.blocks >> 4, self.blocks & 15], -1)
        return scaled(self, pairs.flatten(-2)).to(dtype)


@wrong("MXFP4.dequantize", "neighbors")
class AllLowNibblesFirst(MXFP4):
    def dequantize(self, dtype=torch.bfloat16):
        codes = torch.cat([self.blocks & 15, self.blocks >> 4], -1)
        return scaled(self, codes).to(dtype)


@wrong("MXFP4.dequantize", "scale byte")
class OtherBias(MXFP4):
    def dequantize(self, dtype=torch.bfloat16):
        return scaled(self, nibbles(self), bias=128).to(dtype)


@wrong("MXFP4.dequantize", "blocks of a row")
class BlocksApart(MXFP4):
    def dequantize(self, dtype=torch.bfloat16):
        return scaled(self, nibbles(self)).unflatten(-1, (-1, BLOCK)).to(dtype)


@wrong("MXFP4.dequantize", "multiply in float32")
class ScalesInAnyDtype(MXFP4):
    def dequantize(self, dtype=torch.bfloat16):
        values = SIXTEEN.to(dtype)[nibbles(self).int()]
        return (values * decode_scales(self.scales, dtype)[..., None]).flatten(-2)


@wrong("MXFP4.dequantize", "a scale of its own")
class OneScaleARow(MXFP4):
    def dequantize(self, dtype=torch.bfloat16):
        first = self.scales[..., :1].expand_as(self.scales)
        return scaled(MXFP4(self.blocks, first), nibbles(self)).to(dtype)


def exponents(values, emax=2, bias=127):
    largest = values.abs().amax(-1)
    shared = torch.frexp(largest).exponent - 1 - emax
    return shared.masked_fill(largest == 0, -bias).clamp(-bias, bias) + bias


@wrong("choose_scales", "log2 rounds")
def by_log2(values):
    largest = values.abs().amax(-1)
    shared = (largest.log2().floor() - 2).clamp(-127, 127)
    return (shared + 127).to(torch.uint8)


@wrong("choose_scales", "in place")
def changes_its_blocks(values):
    return choose_scales(values.abs_())


@wrong("choose_scales", "2 - 2 = 0")
def forgets_the_two(values):
    return exponents(values, emax=0).to(torch.uint8)


@wrong("choose_scales", "2 - 2 = 0")
def mantissa_from_one_to_two(values):
    largest = values.abs().amax(-1)
    shared = torch.frexp(largest).exponent - 2
    return (shared.masked_fill(largest == 0, -127).clamp(-127, 127) + 127).byte()


@wrong("choose_scales", "2 - 2 = 0")
def never_clips(values):
    """So that the largest comes to 6 at most."""
    return (torch.frexp(values.abs().amax(-1) / 6).exponent + 127).clamp(0, 254).byte()


@wrong("choose_scales", "magnitude")
def largest_with_its_sign(values):
    largest = values.amax(-1)
    shared = torch.frexp(largest).exponent - 3
    return (shared.masked_fill(largest == 0, -127).clamp(-127, 127) + 127).byte()


@wrong("choose_scales", "block of zeros")
def zeros_like_any_block(values):
    return (torch.frexp(values.abs().amax(-1)).exponent - 3 + 127).clamp(0, 254).byte()


@wrong("choose_scales", "wrap around")
def unclamped(values):
    largest = values.abs().amax(-1)
    shared = torch.frexp(largest).exponent - 3
    return (shared.masked_fill(largest == 0, -127) + 127).byte()


@wrong("choose_scales", "torch.uint8")
def the_powers_themselves(values):
    return 2.0 ** (exponents(values) - 127)


@wrong("choose_scales", "its own scale")
def one_for_all_blocks(values):
    found = exponents(values).to(torch.uint8)
    return found.amax().expand_as(found)


@wrong("choose_scales", "not their sum")
def of_the_sum_of_magnitudes(values):
    total = values.abs().sum(-1, keepdim=True)
    return exponents(total).to(torch.uint8)


@wrong("choose_scales", "not their sum")
def of_the_magnitude_of_the_sum(values):
    total = values.sum(-1, keepdim=True)
    return exponents(total).to(torch.uint8)


def small_as_zero(threshold):
    """`choose_scales`, for which blocks below a threshold are zeros."""

    def scales(values):
        small = values.abs().amax(-1) < threshold
        return choose_scales(values).masked_fill(small, 0)

    return scales


wrong("choose_scales", "a threshold")(small_as_zero(1e-30))
wrong("choose_scales", "a threshold")(small_as_zero(1e-12))
wrong("choose_scales", "a threshold")(small_as_zero(1e-6))


@wrong("choose_scales", "a threshold")
def zero_is_close(values):
    largest = values.abs().amax(-1)
    near = torch.isclose(largest, torch.zeros(()))
    return choose_scales(values).masked_fill(near, 0)


def round_half_to_even(size):
    low = (size * 2).round()
    high = torch.where(size < 4, size.round() + 2, (size / 2).round() + 4)
    return torch.where(size < 2, low, high).clamp(max=7)


def packed_codes(codes, scales):
    return MXFP4(codes[..., 0::2] | codes[..., 1::2] << 4, scales)


def quantized(weight, code=round_half_to_even, sign=True):
    values = weight.float().unflatten(-1, (-1, BLOCK))
    scales = choose_scales(values)
    size = values.abs() / decode_scales(scales, torch.float32)[..., None]
    codes = code(size).to(torch.uint8)
    return packed_codes(codes | (values.signbit().byte() << 3) * sign, scales)


@wrong("3.6", "low nibble")
def packs_high_first(weight):
    found = quantize(weight)
    return MXFP4(found.blocks >> 4 | found.blocks << 4, found.scales)


@wrong("3.6", "the sign is bit 3")
def without_signs(weight):
    return quantized(weight, sign=False)


@wrong("3.6", "nearest values")
def rounds_down(weight):
    grid = torch.tensor(VALUES[:8])
    return quantized(weight, lambda size: (size[..., None] >= grid).sum(-1) - 1)


@wrong("3.6", "even code wins")
def ties_go_up(weight):
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    return quantized(weight, lambda size: (size[..., None] >= middle).sum(-1))


@wrong("3.6", "even code wins")
def ties_go_down(weight):
    grid = torch.tensor(VALUES[:8])
    return quantized(weight, lambda size: (size[..., None] - grid).abs().argmin(-1))


@wrong("3.6", "clamped to 6")
def without_a_clamp(weight):
    def code(size):
        high = torch.where(size < 4, size.round() + 2, (size / 2).round() + 4)
        return torch.where(size < 2, (size * 2).round(), high)

    return quantized(weight, code)


@wrong("3.6", "sum before the rounding")
def adds_before_rounding(weight):
    def code(size):
        high = torch.where(size < 4, (size + 2).round(), (size / 2 + 4).round())
        return torch.where(size < 2, (size * 2).round(), high).clamp(max=7)

    return quantized(weight, code)


@wrong("3.6", "only exact zeros")
def small_blocks_as_zeros(weight):
    small = weight.unflatten(-1, (-1, BLOCK)).abs().amax(-1) < 1e-6
    found = quantize(weight)
    blocks = found.blocks.masked_fill(small[..., None], 0)
    return MXFP4(blocks, found.scales.masked_fill(small, 0))


@wrong("3.6", "what you add to it")
def adds_an_epsilon(weight):
    values = weight.float().unflatten(-1, (-1, BLOCK))
    scales = choose_scales(values)
    size = values.abs() / (decode_scales(scales, torch.float32)[..., None] + 1e-12)
    codes = round_half_to_even(size).to(torch.uint8)
    return packed_codes(codes | (values.signbit().byte() << 3), scales)


@wrong("3.6", "float32")
def in_the_dtype_of_the_weight(weight):
    if weight.dtype == torch.float32:
        return quantize(weight)
    values = weight.unflatten(-1, (-1, BLOCK))
    scales = choose_scales(values.float())
    size = values.abs() / (values.abs().amax(-1, keepdim=True) / 6)
    codes = round_half_to_even(size).to(torch.uint8) | values.signbit().byte() << 3
    return packed_codes(codes, scales)


@wrong("3.6", "float16 weight rounds like")
def scales_in_the_dtype_of_the_weight(weight):
    values = weight.unflatten(-1, (-1, BLOCK))
    scales = choose_scales(values.float())
    size = values.abs() / decode_scales(scales, weight.dtype)[..., None]
    codes = round_half_to_even(size.float()).to(torch.uint8)
    return packed_codes(codes | values.signbit().byte() << 3, scales)


def bounded(weight, steps):
    values = weight.float().unflatten(-1, (-1, BLOCK))
    scale = decode_scales(choose_scales(values), torch.float32)[..., None]
    return (steps(values.abs() / scale) * scale).flatten(-2)


def half_steps(size):
    return torch.where(size < 2, 0.25, torch.where(size < 4, 0.5, 1.0))


@wrong("3.4", "half a step will do")
def whole_steps(weight):
    return bounded(weight, lambda size: half_steps(size) * 2)


@wrong("3.4", "without rounding")
def the_error_itself(weight):
    return (quantize(weight).dequantize(torch.float32) - weight).abs()


@wrong("3.4", "cut down to 6")
def forgets_saturation(weight):
    return bounded(weight, half_steps)


@wrong("3.4", "half a step will do")
def one_bound_for_all(weight):
    return bounded(weight, lambda size: torch.full_like(size, 2.0))


@wrong("3.4", "the scale of this block is not 1")
def in_scales(weight):
    values = weight.float().unflatten(-1, (-1, BLOCK))
    scale = decode_scales(choose_scales(values), torch.float32)[..., None]
    size = values.abs() / scale
    return torch.where(size > 6, size - 6, half_steps(size)).flatten(-2)


@wrong("3.4", "the scale of this block is not 1")
def without_the_scale(weight):
    size = weight.abs() / weight.abs().amax() * 7.96875
    return torch.where(size > 6, size - 6, half_steps(size)).clamp(max=1.96875) * (
        1 if weight.abs().max() > 1 else 2.0**-6
    )


@wrong("3.1", "low nibble")
def pack_high_first(values):
    codes = [VALUES.index(value) for value in values]
    return [high << 4 | low for high, low in zip(codes[0::2], codes[1::2], strict=True)]


@wrong("3.1", "neighbors share")
def pack_halves(values):
    codes = [VALUES.index(value) for value in values]
    return [low | high << 4 for low, high in zip(codes[:16], codes[16:], strict=True)]


@wrong("3.1", "bit 3")
def pack_without_signs(values):
    codes = [VALUES.index(abs(value)) for value in values]
    return [low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True)]


def coarser(weight):
    """Quantized with the next exponent everywhere."""
    values = weight.float().unflatten(-1, (-1, BLOCK))
    scales = choose_scales(values) + 1
    size = values.abs() / decode_scales(scales, torch.float32)[..., None]
    codes = round_half_to_even(size).to(torch.uint8) | values.signbit().byte() << 3
    return packed_codes(codes, scales)


def chosen(weight, better):
    spec, coarse = quantize(weight), coarser(weight)
    which = better(spec, coarse)
    return MXFP4(
        torch.where(which[..., None], coarse.blocks, spec.blocks),
        torch.where(which, coarse.scales, spec.scales),
    )


def errors(packed, weight):
    return (packed.dequantize(torch.float32) - weight).unflatten(-1, (-1, BLOCK))


@wrong("3.2", "got worse")
def always_above_seven(weight):
    def better(spec, coarse):
        blocks = weight.unflatten(-1, (-1, BLOCK))
        largest = blocks.abs().amax(-1)
        return largest > 7 * decode_scales(spec.scales, torch.float32)

    return chosen(weight, better)


@wrong("3.2", "squared error")
def by_the_largest_error(weight):
    return chosen(
        weight,
        lambda spec, coarse: (
            errors(coarse, weight).abs().amax(-1) < errors(spec, weight).abs().amax(-1)
        ),
    )


@wrong("3.2", "specification's")
def coarse_on_a_tie(weight):
    return chosen(
        weight,
        lambda spec, coarse: (
            errors(coarse, weight).square().sum(-1)
            <= errors(spec, weight).square().sum(-1)
        ),
    )


@wrong("3.2", "no block got better")
def the_specification(weight):
    return quantize(weight)


def block_error(weight, size, bits=None, root=True):
    blocks = weight.unflatten(-1, (-1, size))
    scale = decode_scales(choose_scales(blocks), torch.float32)[..., None]
    grid = torch.tensor(VALUES)
    rounded = grid[((blocks / scale)[..., None] - grid).abs().argmin(-1)] * scale
    error = (rounded - blocks).norm() / weight.norm()
    return bits or 4 + 8 / size, (error if root else error**2).item()


@wrong("3.3", "adds")
def always_a_quarter_bit(weight, size):
    return block_error(weight, size, bits=4.25)


@wrong("3.3", "that of quantize")
def squared(weight, size):
    return block_error(weight, size, root=False)


@wrong("3.3", "norm over norm")
def always_blocks_of_32(weight, size):
    return 4 + 8 / size, block_error(weight, 32)[1]


@wrong("3.5", "Scale the sum")
def dequantizes_first(x, packed):
    return linear(x, packed)


@wrong("3.5", "Scale the sum")
def scales_each_product(x, packed):
    products = x.unflatten(-1, (-1, BLOCK))[:, None] * SIXTEEN[nibbles(packed).int()]
    return (products * decode_scales(packed.scales, x.dtype)[..., None]).sum((-1, -2))


@wrong("3.5", "not the product")
def forgets_the_scales(x, packed):
    return x @ SIXTEEN[nibbles(packed).int()].flatten(-2).T
