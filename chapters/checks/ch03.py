"""Chapter 3: weights of four bits."""

import torch


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
    nan = numbers([[every]], [[255]], torch.float32)
    assert nan.isnan().all(), "the scale byte 255 stands for NaN"
