"""Chapter 3: weights of four bits."""

import math
from functools import cache

import torch

from simplellm.checkpoint.checkpoint import Checkpoint
from simplellm.checkpoint.folder import EMBEDDED
from simplellm.checkpoint.mxfp4 import MXFP4, quantize
from simplellm.model.feed_forward import linear

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def element(code: int) -> float:
    """The value of a four-bit code, from the definition of e2m1."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = code >> 1 & 3, code & 1
    if exponent == 0:
        return sign * mantissa / 2
    return sign * (1 + mantissa / 2) * 2.0 ** (exponent - 1)


def check_MXFP4_dequantize(MXFP4):
    """Bytes and scales whose values follow from the format's definition."""

    def numbers(blocks, scales, *dtype):
        return MXFP4(
            torch.tensor(blocks, dtype=torch.uint8),
            torch.tensor(scales, dtype=torch.uint8),
        ).dequantize(*dtype)

    block = [0] * 16
    plain = numbers([[block, block]] * 3, [[127, 127]] * 3, torch.float32)
    assert plain.shape == (3, 64), (
        f"3 rows of 2 blocks have the shape {list(plain.shape)}; expected [3, 64], all "
        "blocks of a row one after the other"
    )
    one = numbers([[[0x05, *block[1:]]]], [[127]], torch.float32)[0]
    places = one.nonzero().flatten().tolist()
    assert places == [0], (
        "the first byte is 0x05 and the others are 0; its low nibble is the even "
        f"element, so only element 0 is not zero; yours are the elements {places}"
    )
    every = [16 * (2 * n + 1) + 2 * n for n in range(8)] * 2
    expected = [element(code) for code in range(16)] * 2
    found = numbers([[every]], [[127]], torch.float32)[0].tolist()
    if sorted(found) == sorted(expected):
        assert found == expected, (
            "the values are right and the order is not: the elements of a byte are "
            "neighbors, the low nibble's first"
        )
    for scale in (127, 1, 100, 128, 250):
        found = numbers([[every]], [[scale]], torch.float32)[0].tolist()
        assert found[2] == 2.0 ** (scale - 127), (
            f"the scale byte {scale} stands for 2^({scale} - 127): 1 becomes "
            f"{2.0 ** (scale - 127):g}; yours is {found[2]:g}"
        )
        assert found == [2.0 ** (scale - 127) * value for value in expected], (
            f"the codes 0 to 15 at the scale byte {scale} came out as {found[:16]}"
        )
    two = numbers([[every, every], [every, every]], [[127, 129], [120, 127]])
    ratio = two.float()[:, 2::32].tolist()  # each block's 1
    assert ratio == [[1.0, 4.0], [2.0**-7, 1.0]], (
        f"each block has a scale of its own: the ones of 2 x 2 blocks are {ratio}"
    )
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        made = numbers([[every]], [[127]], dtype).dtype
        assert made == dtype, f"asked for {dtype}, you return {made}"
    made = numbers([[every]], [[127]]).dtype
    assert made == torch.bfloat16, f"without a dtype it is bfloat16, not {made}"
    experts = numbers([[[every]], [[every]]], [[[127]], [[128]]], torch.float32)
    assert experts.shape == (2, 1, 32), "leading dimensions, the experts', stay"
    for scale in (143, 102):
        found = numbers([[every]], [[scale]], torch.float16)[0]
        right = torch.tensor(expected, dtype=torch.float64) * 2.0 ** (scale - 127)
        assert torch.equal(found, right.half()), (
            f"float16 can't hold the scale 2^{scale - 127} but holds products with it: "
            "multiply in float32, then convert"
        )
    nan = numbers([[every]], [[255]], torch.float32)
    assert nan.isnan().all(), "the scale byte 255 stands for NaN"


def next_to(number: float, toward: float) -> float:
    """The float32 beside ``number``."""
    return torch.tensor(number).nextafter(torch.tensor(toward)).item()


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_choose_scales(candidate):
    """Blocks whose largest weight is known, where floor and log2 matter."""

    def byte(number, place=3):
        block = torch.zeros(1, 32)
        block[0, place] = number
        found = candidate(block)
        assert isinstance(found, torch.Tensor) and tuple(found.shape) == (1,), (
            "one block [1, 32] has one scale, shape [1]; yours is "
            f"{list(getattr(found, 'shape', []))}"
        )
        assert found.dtype == torch.uint8, (
            f"scales are bytes, torch.uint8; yours are {found.dtype}"
        )
        return found.item()

    for number in (4.0, 5.0, 6.0, 7.0, 7.9):
        found = byte(number)
        assert found == 127, (
            f"a largest weight of {number} lies between 4 and 8 as it is: the exponent "
            f"is 2 - 2 = 0, the byte 127; yours is {found}"
        )
    assert byte(8.0) == 128, f"from 8 on the byte is 128; yours is {byte(8.0)}"
    found = byte(next_to(8.0, 0.0))
    assert found == 127, (
        "the float just below 8 is still below 8, so the byte is 127; log2 rounds it "
        f"up to 3 and yours is {found}"
    )
    assert byte(-5.0) == 127, (
        "the largest magnitude counts: a block with -5 and zeros has the byte 127; "
        f"yours is {byte(-5.0)}"
    )
    assert byte(0.0) == 0, (
        f"a block of zeros gets the smallest scale, the byte 0; yours is {byte(0.0)}"
    )
    dense = seeded(1, 32)
    largest = dense.abs().max().item()
    right, found = 127 + math.frexp(largest)[1] - 3, candidate(dense).item()
    assert found == right, (
        f"of 32 numbers with signs the largest has the magnitude {largest:.2f}, so the "
        f"byte is {right}; yours is {found}. The largest of the 32 counts, not their "
        "sum"
    )
    for number in (1e-4, 1e-7, 1e-13, 1e-20, 1e-35):
        right, found = 127 + math.frexp(number)[1] - 3, byte(number)
        assert found == right, (
            f"a largest weight of {number:g} has the byte {right}, yours is {found}: "
            "only exact zeros make a block of zeros; a threshold would erase small "
            "weights"
        )
    for number in (2.0**-149, 2.0**-126, 1.5 * 2.0**-125):
        found = byte(number)
        assert found == 0, (
            f"for {number:.1e} the exponent would be below -127, the least that e8m0 "
            f"has: the byte stays 0, and doesn't wrap around; yours is {found}"
        )
    largest = torch.finfo(torch.float32).max
    assert byte(largest) == 252, (
        f"for float32's largest number the byte is 252; yours is {byte(largest)}"
    )
    blocks = torch.zeros(2, 3, 32)
    blocks[..., 7] = torch.tensor([[1.0, -2.0, 4.0], [0.1, 100.0, 0.0]])
    before, found = blocks.clone(), candidate(blocks)
    expected = [[125, 126, 127], [121, 131, 0]]
    assert found.tolist() == expected, (
        f"each block has its own scale: largest weights {blocks[..., 7].tolist()} make "
        f"the bytes {expected}; yours are {found.tolist()}"
    )
    assert torch.equal(blocks, before), (
        "yours changed the blocks in place: they are a view of the weight that someone "
        "quantizes; take abs, not abs_"
    )


def nearest(size: float) -> int:
    """The code next to ``size``, ties to the even one, by trying all."""
    return min(range(8), key=lambda code: (abs(GRID[code] - size), code % 2))


def codes_of(packed) -> list[int]:
    """The codes of a packed weight, in order."""
    return [
        half
        for byte in packed.blocks.flatten().tolist()
        for half in (byte % 16, byte // 16)
    ]


def check_3_4(candidate):
    """Above every error, and reached in every range of the grid."""
    largest = 7.96875
    sizes = torch.cat([torch.linspace(0, 7.9, 1581), torch.tensor([largest])])
    keep = ((sizes - 2).abs() > 0.01) & ((sizes - 4).abs() > 0.01)
    sizes = sizes[keep & ((sizes - 6).abs() > 0.01)]
    sizes = sizes[: sizes.numel() // 31 * 31]
    blocks = torch.cat(
        [sizes.view(-1, 31), torch.full((len(sizes) // 31, 1), largest)], 1
    )
    blocks[1::2] *= -1
    for scale in (1.0, 2.0**-5):
        weight = blocks * scale
        bound = candidate(weight)
        assert tuple(bound.shape) == tuple(weight.shape), (
            f"a bound per weight, {list(weight.shape)}; yours is {list(bound.shape)}"
        )
        assert (bound >= 0).all(), "a bound on an error's size is not negative"
        error = (quantize(weight).dequantize(torch.float32) - weight).abs() / scale
        size, bound = weight.abs() / scale, bound / scale
        for low, high, half in ((0, 2, 0.25), (2, 4, 0.5), (4, 6, 1.0), (6, 8, 0.0)):
            here = (size > low) & (size < high)
            worst = (error - bound)[here].argmax()
            off, told = error[here][worst], bound[here][worst]
            assert told >= off - 1e-6, (
                f"a weight of {size[here][worst]:.3f} scales is off by {off:.3f} and "
                f"your bound says {told:.3f}: from {low} to {high} "
                + ("it is cut down to 6" if low == 6 else f"half a step is {half}")
                + ("" if scale == 1 else "; the scale of this block is not 1")
            )
            most = (size - 6 if low == 6 else torch.full_like(size, half))[here]
            missing = (most - bound[here]).max()
            assert missing <= 1e-5, (
                f"from {low} to {high} scales your bound holds for these weights and "
                f"not for all: it is {missing:.3f} scales too small for one that lies "
                "halfway between two values. A bound is known without rounding"
            )
            slack = (bound[here] - most).max()
            assert slack <= 1e-5, (
                f"your bound holds, but from {low} to {high} scales it is too large by "
                f"{slack:.3f} scales: "
                + (
                    "the error is what is beyond 6"
                    if low == 6
                    else "half a step will do"
                )
                + ("" if scale == 1 else "; the scale of this block is not 1")
            )


def check_3_1(candidate):
    """Bytes that the package decodes to the numbers they were made of."""
    values = [element(code) for code in range(16)]
    mixed = [values[7 * n % 16] for n in range(32)]
    for numbers in ([3.0, 0.5] * 16, [-1.5, 4.0] * 16, mixed):
        packed = list(candidate(numbers))
        assert len(packed) == 16, f"32 numbers are 16 bytes; yours are {len(packed)}"
        assert all(0 <= byte < 256 for byte in packed), "a byte is 0 to 255"
        blocks = torch.tensor([[packed]], dtype=torch.uint8)
        weight = MXFP4(blocks, torch.full((1, 1), 127, dtype=torch.uint8))
        found = weight.dequantize(torch.float32)[0].tolist()
        assert found[:2] != numbers[1::-1], (
            f"{numbers[:2]} came back as {found[:2]}: the first of two goes into the "
            "low nibble"
        )
        assert found == numbers, (
            f"{numbers[:4]} ... came back as {found[:4]} ...: neighbors share a byte, "
            "and a negative number has bit 3 of its code set"
        )
    print(f"-1.5 and 4 are the byte {candidate([-1.5, 4.0] * 16)[0]:#04x}")


@cache
def attention():
    """The embedded model's attention matrices in float32, which no format rounded."""
    checkpoint = Checkpoint(EMBEDDED)
    names = [n for n in checkpoint.names() if n.endswith(("qkv.weight", "o.weight"))]
    found = (checkpoint[name] for name in names)
    return [weight.float() for weight in found if isinstance(weight, torch.Tensor)]


def relative(errors):
    """The norm of the errors of all `attention` over the norm of the weights."""
    flat = (torch.cat([t.flatten() for t in part]) for part in (errors, attention()))
    above, below = (part.norm().item() for part in flat)
    return above / below


def squared_errors(packed, weight):
    """The squared error of each block [..., G]."""
    error = packed.dequantize(torch.float32).double() - weight.double()
    return error.unflatten(-1, (-1, 32)).square().sum(-1)


def check_3_2(candidate):
    """Block by block against both scales."""
    weight = seeded(64, 224, seed=1)
    spec, best = quantize(weight), candidate(weight)
    assert getattr(best, "blocks", None) is not None, "return an MXFP4"
    before, after = squared_errors(spec, weight), squared_errors(best, weight)
    raised = best.scales.int() - spec.scales.int()
    assert ((raised == 0) | (raised == 1)).all(), (
        "each block has the specification's exponent or the next one"
    )
    assert (after <= before + 1e-9).all(), (
        "some block got worse: choose block by block, by the squared error"
    )
    assert after.sum() < before.sum(), "no block got better"
    twice = (spec.scales + 1).view(torch.float8_e8m0fnu).float()[..., None]
    blocks = weight.unflatten(-1, (-1, 32))
    grid = torch.tensor([*(-value for value in GRID[:0:-1]), *GRID])
    other = grid[((blocks / twice)[..., None] - grid).abs().argmin(-1)] * twice
    coarse = (other.double() - blocks.double()).square().sum(-1)
    assert (after <= coarse + 1e-9).all(), (
        "some block would be better with the next exponent: compare squared errors, "
        "added up over the block"
    )
    assert ((raised == 0) | (after < before)).all(), (
        "on a tie, the specification's exponent stays"
    )
    tie = torch.tensor([[4.0, *[0.0] * 31]])  # exact with either exponent
    assert torch.equal(candidate(tie).scales, quantize(tie).scales), (
        "4 and zeros are exact with both exponents: on a tie, the specification's stays"
    )
    ways = {"the specification's": quantize, "yours": candidate}
    for name, way in ways.items():
        errors = [way(w).dequantize(torch.float32) - w for w in attention()]
        print(f"relative error on attention's weights: {relative(errors):.2%}, {name}")


def check_3_3(candidate):
    """At 32 it is MXFP4, at other sizes the rule in exact arithmetic."""
    weight = seeded(16, 224, seed=2)
    bits, error = candidate(weight, 32)
    packed = quantize(weight).dequantize(torch.float32)
    known = ((packed - weight).norm() / weight.norm()).item()
    assert math.isclose(bits, 4.25), f"at 32 it is 4.25 bits a weight, not {bits}"
    assert math.isclose(error, known, rel_tol=1e-4), (
        f"at 32 the error is that of quantize, {known:.4f}; yours is {error:.4f}"
    )
    for size in (4, 8, 16, 224):
        bits, error = candidate(weight, size)
        assert math.isclose(bits, 4 + 8 / size), (
            f"a scale of 8 bits for each {size} weights adds {8 / size:g} bits to 4; "
            f"yours are {bits}"
        )
        total = 0.0
        for block in weight.double().reshape(-1, size).tolist():
            scale = 2.0 ** (math.frexp(max(map(abs, block)))[1] - 3)
            for value in block:
                total += (GRID[nearest(abs(value) / scale)] * scale - abs(value)) ** 2
        known = math.sqrt(total) / weight.double().norm().item()
        assert math.isclose(error, known, rel_tol=1e-4), (
            f"in blocks of {size} the relative error is {known:.4f}, norm over norm; "
            f"yours is {error:.4f}"
        )
    for size in (4, 8, 16, 32):
        errors = [candidate(w, size)[1] * w.norm() for w in attention()]
        bits = candidate(weight, size)[0]
        print(f"blocks of {size:2}: {bits:.2f} bits, {relative(errors):.2%}")


def check_3_5(candidate):
    """Right to rounding, and scaling sums: a block that only cancels when summed."""
    packed = quantize(seeded(24, 224, seed=3))
    x = seeded(5, 224, seed=4)

    def error(y, x, packed):
        expected = linear(x.double(), packed.dequantize(torch.float32).double())
        assert tuple(y.shape) == tuple(expected.shape), (
            f"x [5, 224] times [24, 224] makes [5, 24]; yours is {list(y.shape)}"
        )
        return ((y.double() - expected).norm() / expected.norm()).item()

    off = error(candidate(x, packed), x, packed)
    assert off < 1e-5, f"the relative error is {off:.1e}: not the product"
    # At scale 254 a 6 is decoded to infinity, and so is a product scaled by itself.
    sixes = MXFP4(
        torch.full((1, 1, 16), 0x77, dtype=torch.uint8),
        torch.full((1, 1), 254, dtype=torch.uint8),
    )
    signs = torch.tensor([[1.0, -1.0] * 16])
    y = candidate(signs, sixes)
    assert y.isfinite().all() and y.item() == 0, (
        "a block of sixes at the largest scale, with x = 1, -1, 1, -1, ...: the "
        f"products add up to 0, and 0 times the scale is 0; yours is {y.item()}, which "
        "comes of scaling each weight or product. Scale the sum"
    )
    x, y = seeded(5, 224, seed=4), linear(seeded(5, 224, seed=4), packed)
    equal = (candidate(x, packed) == y).float().mean().item()
    print(f"to the last bit equal to linear: {equal:.0%} of the numbers")


def check_3_6(candidate):
    """Against a search through all values, in exact arithmetic."""

    def codes(numbers):
        """Of one block at scale 1, which a 6 at its end sees to."""
        block = torch.tensor([[*numbers, *[0.0] * (31 - len(numbers)), 6.0]])
        packed = candidate(block)
        for name, shape in (("blocks", (1, 1, 16)), ("scales", (1, 1))):
            part = getattr(packed, name, None)
            assert part is not None, "return an MXFP4, with blocks and scales"
            assert tuple(part.shape) == shape and part.dtype == torch.uint8, (
                f"a weight [1, 32] has {name} uint8 {list(shape)}; yours are "
                f"{part.dtype} {list(part.shape)}"
            )
        assert packed.scales.item() == 127, (
            "a block whose largest weight is 6 has the scale byte 127; yours is "
            f"{packed.scales.item()}"
        )
        return codes_of(packed)[: len(numbers)]

    found = codes([3.0, 0.5])
    assert found != [1, 5], (
        "the even element goes into the low nibble, not the high one"
    )
    assert found == [5, 1], (
        f"3 and 0.5 are the codes 5 and 1, in one byte; yours are {found}"
    )
    found = codes([1.5, -1.5, -6.0, 4.0])
    assert found == [3, 11, 15, 6], (
        "the sign is bit 3 of the code: 1.5, -1.5, -6 and 4 are 3, 11, 15 and 6; yours "
        f"are {found}"
    )
    found = codes([0.45, 0.8, 1.4, 2.9, 5.9])
    assert found == [1, 2, 3, 5, 7], (
        "0.45, 0.8, 1.4, 2.9 and 5.9 go up to 0.5, 1, 1.5, 3 and 6, the nearest "
        f"values, whose codes are 1, 2, 3, 5, 7; yours are {found}"
    )
    found = codes([7.9, -7.5, 7.0, 6.5])
    assert found == [7, 15, 7, 7], (
        "beyond 6 everything is clamped to 6, code 7 (15 with the sign): 7.9, -7.5, 7 "
        f"and 6.5 came out as {found}"
    )
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    found = codes(ties)
    assert found == [0, 2, 2, 4, 4, 6, 6], (
        f"halfway between two values, the even code wins: {ties} have the codes 0, 2, "
        f"2, 4, 4, 6, 6; yours are {found}"
    )
    for tie in ties:
        for neighbor in (next_to(tie, 0.0), next_to(tie, 9.0)):
            (found,) = codes([neighbor])
            assert found == nearest(neighbor), (
                f"{neighbor:.7f} is no tie, though as near to {tie} as a float32 can "
                f"be: its code is {nearest(neighbor)}, yours {found}; a sum before the "
                "rounding is rounded too"
            )
    weight = seeded(3, 4, 64) * torch.logspace(-6, 6, 12).view(3, 4, 1)
    packed = candidate(weight)
    assert tuple(packed.blocks.shape) == (3, 4, 2, 16), (
        f"[3, 4, 64] has blocks [3, 4, 2, 16]; yours are {list(packed.blocks.shape)}"
    )
    expected: list[int] = []
    exponents = []
    for block in weight.double().reshape(-1, 32).tolist():
        exponent = math.frexp(max(map(abs, block)))[1] - 3
        exponents.append(exponent + 127)
        for value in block:
            code = nearest(abs(value) / 2.0**exponent)
            expected.append(code + 8 * (value < 0 < code))
    assert packed.scales.flatten().tolist() == exponents, (
        "over 24 random blocks, some scale is not the specification's; each block has "
        "its own"
    )
    found = [code if code != 8 else 0 for code in codes_of(packed)]  # -0 is 0
    assert found == expected, (
        "over 24 random blocks, some weight did not go to its block's nearest value"
    )
    for exponent in (-14, -24, -44, -66, -116):
        packed = candidate(torch.tensor([[*GRID, *[0.0] * 24]]) * 2.0**exponent)
        assert packed.scales.item() == exponent + 127, (
            f"a block whose largest weight is 6 times 2^{exponent} has the scale byte "
            f"{exponent + 127}; yours is {packed.scales.item()}: only exact zeros make "
            "a block of zeros"
        )
        found = codes_of(packed)[:8]
        assert found == list(range(8)), (
            f"a block of the grid's values times 2^{exponent} has the codes 0 to 7; "
            f"yours are {found}. Divide by the scale as it is: it's never 0, and what "
            "you add to it is larger than small scales"
        )
    zeros = candidate(torch.zeros(2, 32))
    assert set(codes_of(zeros)) <= {0, 8}, "zeros stay zeros"
    small = 4e-8 * seeded(2, 64)  # whose scales are too small for float16
    for given in (weight.bfloat16(), small.half(), torch.zeros(1, 32).half()):
        half, whole = candidate(given), candidate(given.float())
        assert torch.equal(half.blocks, whole.blocks), (
            f"a {str(given.dtype)[6:]} weight rounds like the same numbers in float32; "
            "compute in float32"
        )
