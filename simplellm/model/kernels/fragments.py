"""The experts' MXFP4 weights in the order that tensor cores read, and their decoding.

A wgmma or mma instruction takes 16 rows by 16 columns of its left operand from each
warp's registers, in an order known beforehand. So `repack` stores weights in that
order, and `decode_weights` turns what a thread loads into what it multiplies, with no
exchange between threads.

E experts, N rows and K columns of a weight, G = K / 64 rounded up. Thread 4 * g + t of
a warp.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.checkpoint.cpu_weights import CPUWeight, PackedExperts
from simplellm.checkpoint.mxfp4 import BLOCK, MXFP4, Weight
from simplellm.checkpoint.scaled import E4M3, LARGEST, Scaled
from simplellm.model.layers import Experts, Layer

# The bits of one e2m1 number, or of two, where bfloat16 has its sign, the two lowest
# bits of its exponent and the highest of its mantissa. Read as bfloat16 that is the
# number times 2^-126: e2m1's subnormal 0.5 is a bfloat16 subnormal.
NUMBERS = tl.constexpr(0x81C081C0)
EXPONENTS = tl.constexpr(0x7F807F80)  # of two bfloat16 numbers
MINUS_ZERO = tl.constexpr(0x80008000)  # of both; what it is added to stays as it is
FIRST = tl.constexpr(0x60306030)  # what a pair's fourth register has in its first word
SECOND = tl.constexpr(0x9FCF9FCF)  # and what of its second word, shifted right by 2
SHIFT = 8  # products are weights * 2^-SHIFT, so that scales up to 2^(1 + SHIFT) fit
UNSHIFT = tl.constexpr(2.0**SHIFT)
MAX_SCALE = 128 + SHIFT  # the largest e8m0 byte
# e5m2 numbers keep 5 bits of bfloat16's exponent: those of 97 to 126 are 1 to 30, and
# so 2^SHIFT_FP8 times what they were. A block's numbers have exponents from 1 below its
# scale's to 2 above, all less by SHIFT.
SHIFT_FP8 = 16
UNSHIFT_FP8 = tl.constexpr(2.0 ** (SHIFT - SHIFT_FP8))
SCALES_FP8 = 98 + SHIFT, 124 + SHIFT  # the e8m0 bytes for which that is so
SIGN_BITS = 0x80808080  # of four numbers of 8 bits
WORD = 0xFFFFFFFF
SPARE = tl.constexpr(2)  # tiles of zeros behind a weight's last row


@triton.jit
def low(bits):
    """The lower of two bfloat16 numbers as float32."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(bits):
    """The upper of two bfloat16 numbers as float32."""
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def rotate_right(bits, BY: tl.constexpr):
    """Rotate uint32 ``bits``."""
    return (bits >> BY) | (bits << (32 - BY))


@triton.jit
def registers(a, b):
    """One row's 16 weights of a thread, unscaled, times 2^-126, from its words a and b.

    Register r holds columns 8 * r + 2 * t and the one after it. With N = NUMBERS:
      a & N, (a << 6) & N, (a >>> 4) & N, (u << 4) & N,
      b & N, (b << 6) & N, (b >>> 4) & N, (u >>> 6) & N,
    where u is a where FIRST has ones, b >> 2 elsewhere; >>> rotates.
    """
    u = (a & FIRST) | ((b >> 2) & SECOND)
    return (
        a & NUMBERS,
        (a << 6) & NUMBERS,
        rotate_right(a, 4) & NUMBERS,
        (u << 4) & NUMBERS,
        b & NUMBERS,
        (b << 6) & NUMBERS,
        rotate_right(b, 4) & NUMBERS,
        rotate_right(u, 6) & NUMBERS,
    )


def rotate_left(words: Tensor, left: int) -> Tensor:
    """Rotate int64 ``words`` of 32 bits."""
    return ((words << left) | (words >> (32 - left))) & WORD


def signed(words: Tensor) -> Tensor:
    """int64 numbers of 32 bits as int32."""
    return torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).int()


def pack_words(*r: Tensor) -> tuple[Tensor, Tensor]:
    """The two words that `registers` finds the eight registers ``r`` in.

    Each is int64 of 32 bits, with ones only where NUMBERS has them.
    """
    shared = (r[3] >> 4) | rotate_left(r[7], 6)
    first = r[0] | (r[1] >> 6) | rotate_left(r[2], 4) | (shared & FIRST.value)
    second = r[4] | (r[5] >> 6) | rotate_left(r[6], 4) | (shared & SECOND.value) << 2
    return first, second


@dataclass(frozen=True, eq=False)
class Fragments:
    """An MXFP4 weight [E, N, K] in the order of tensor-core operands.

    Tiles of 16 rows and 64 columns, columns padded with zeros. Thread 4 * g + t has
    words 4 * (4 * g + t) + 2 * half + (0, 1) of a tile: row g + 8 * half, columns
    2 * t + (0, 1) + 8 * r for r in 0 to 7. Bit by bit they are what `decode_weights`
    reads. If ``interleaved``, row g of tile i is row 16 * i + 2 * g of the weight, a
    gate, and row g + 8 is the one after it, the up that belongs to it.
    """

    words: Tensor  # int32 [E, N / 16, G, 128]
    scales: Tensor  # int32 [E, N / 16, G, 8], four of rows g and g + 8
    columns: int
    interleaved: bool

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], interleaved: bool, device: torch.device
    ) -> "Fragments":
        """Room for a weight of this shape, [E, N, K], and spare tiles behind it."""
        experts, rows, columns = shape
        tiles = experts, rows // 16, -(-columns // 64)
        count = math.prod(tiles)

        def room(width: int) -> Tensor:
            spared = count + SPARE.value, width
            whole = torch.empty(spared, dtype=torch.int32, device=device)
            whole[count:] = 0
            return whole[:count].view(*tiles, width)

        return cls(room(128), room(8), columns, interleaved)

    @cached_property  # four launches a layer ask for it
    def shape(self) -> tuple[int, int, int]:
        """The shape of the dequantized weight."""
        return len(self.words), self.words.shape[1] * 16, self.columns

    @property
    def nbytes(self) -> int:
        """Bytes in memory, as many as before where K is a multiple of 64."""
        return self.words.nbytes + self.scales.nbytes

    def __getitem__(self, experts: Tensor | slice) -> "Fragments":
        """The fragments of some experts; a copy, of a tensor's, has nothing spare."""
        return replace(self, words=self.words[experts], scales=self.scales[experts])

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight [E, N, K] as ordinary numbers, rows in their first order."""
        return unpack(self).dequantize(dtype)


class ExpertSizes(NamedTuple):
    """What the kernels of one half of the experts are compiled for, in any tiling."""

    N: int
    K: int
    INTERLEAVED: bool
    LIMIT: float
    ALPHA: float
    TOP_K: int
    PTX: bool

    @classmethod
    def of(cls, weight: Fragments, mlp: Experts, ptx: bool) -> "ExpertSizes":
        """The half that multiplies with ``weight``; with ``ptx`` it isn't emulated."""
        sizes = *weight.shape[1:], weight.interleaved
        return cls(*sizes, mlp.limit, mlp.alpha, mlp.top_k, ptx)


def repack(weight: MXFP4, interleaved: bool) -> Fragments:
    """Bring ``weight`` [E, N, K] into the order that tensor cores read.

    ``interleaved`` is for gate_up weights, whose rows alternate. Works one expert at a
    time, on the weight's device. Raises ValueError for N that is no multiple of 16, and
    for scales above 2^9, which the kernels' arithmetic has no room for.
    """
    if len(weight.shape) != 3 or weight.shape[1] % 16:
        raise ValueError(
            f"weight is {list(weight.shape)}; expected [E, N, K] with N a multiple of "
            "16"
        )
    largest = int(weight.scales.max())
    if largest > MAX_SCALE:
        raise ValueError(
            f"the largest scale is 2^{largest - 127}; expected at most 2^"
            f"{MAX_SCALE - 127}"
        )
    new = Fragments.empty(weight.shape, interleaved, weight.blocks.device)
    for expert in range(len(new.words)):
        new.words[expert], new.scales[expert] = repack_expert(
            weight[expert], interleaved
        )
    return new


def repack_expert(weight: MXFP4, interleaved: bool) -> tuple[Tensor, Tensor]:
    """One expert's words [N / 16, G, 128] and scales [N / 16, G, 8], both int32."""
    rows, columns = weight.shape
    # Blocks of 32 columns, two to a tile, the last one perhaps of zeros.
    blocks = torch.nn.functional.pad(weight.blocks, (0, 0, 0, columns // BLOCK % 2))
    scales = torch.nn.functional.pad(weight.scales, (0, columns // BLOCK % 2))
    blocks = blocks.long().view(rows // 16, 8, 2, -1, 2, 4, 4)  # tile a b G c5 (c4c3) t
    scales = scales.long().view(rows // 16, 8, 2, -1, 2)
    if not interleaved:  # 16 rows are [half, g], not [g, half]
        blocks = blocks.reshape(-1, 2, 8, *blocks.shape[3:]).transpose(1, 2)
        scales = scales.reshape(-1, 2, 8, *scales.shape[3:]).transpose(1, 2)

    # A byte's two elements as the halves of one register.
    low, high = blocks & 15, blocks >> 4
    bits = ((low & 7) << 6) | ((low & 8) << 12)
    bits |= ((high & 7) << 22) | ((high & 8) << 28)
    bits = bits.permute(0, 3, 1, 6, 2, 4, 5).flatten(-2)  # [tile, G, g, t, half, 8]
    first, second = pack_words(*bits.unbind(-1))
    words = torch.stack([first, second], -1).flatten(2)

    s = (scales + 126 - SHIFT).permute(0, 3, 1, 2, 4)  # [tile, G, g, half, c5]
    order = s[..., 0, 0], s[..., 1, 1], s[..., 0, 1], s[..., 1, 0]
    four = torch.stack([byte << (8 * i) for i, byte in enumerate(order)]).sum(0)
    return signed(words), signed(rotate_left(four, 7))


def unpack(fragments: Fragments) -> MXFP4:
    """What `repack` was given, up to scales of blocks of zeros in the padding."""
    words = (fragments.words.long() & WORD).unflatten(-1, (8, 4, 2, 2))
    first, second = words.unbind(-1)  # [E, tile, G, g, t, half]
    shared = (first & FIRST.value) | ((second >> 2) & SECOND.value)
    registers = (
        *(first, first << 6, rotate_left(first, 28), shared << 4),
        *(second, second << 6, rotate_left(second, 28), rotate_left(shared, 26)),
    )
    bits = torch.stack(registers, -1) & NUMBERS.value
    low = ((bits >> 6) & 7) | ((bits >> 12) & 8)
    high = ((bits >> 22) & 7) | ((bits >> 28) & 8)
    blocks = (low | (high << 4)).to(torch.uint8)  # [E, tile, G, g, t, half, 8]
    s = rotate_left(fragments.scales.long() & WORD, 25)  # [E, tile, G, g]
    order = [(s >> (8 * byte)) & 255 for byte in (0, 2, 3, 1)]
    scales = (torch.stack(order, -1) - 126 + SHIFT).to(torch.uint8)
    scales = scales.unflatten(-1, (2, 2))  # [E, tile, G, g, half, c5]

    if fragments.interleaved:
        blocks = blocks.permute(0, 1, 3, 5, 2, 6, 4)  # [E, tile, g, half, G, 8, t]
        scales = scales.permute(0, 1, 3, 4, 2, 5)
    else:
        blocks = blocks.permute(0, 1, 5, 3, 2, 6, 4)
        scales = scales.permute(0, 1, 4, 3, 2, 5)
    experts, rows, columns = fragments.shape
    groups = columns // BLOCK
    blocks = blocks.reshape(experts, rows, -1, BLOCK // 2)[:, :, :groups]
    scales = scales.reshape(experts, rows, -1)[:, :, :groups]
    return MXFP4(blocks.contiguous(), scales.contiguous())


def prepare(layer: Layer, fp8: bool = False) -> Layer:
    """``layer`` with its experts repacked, one at a time; what is dense stays as it is.

    What the kernels rely on is checked here and nowhere else. Raises TypeError unless
    the experts are MXFP4 with biases, or those of another family, and the other
    matrices not MXFP4; ValueError if the experts are to be multiplied in ``fp8``, and
    it has no room for them.
    """
    attn, mlp = layer.attn, layer.mlp
    check_product(attn.qkv, attn.qkv_bias)
    check_product(attn.o, attn.o_bias)
    if not isinstance(mlp, Experts):
        check_product(mlp.gate_up, mlp.gate_up_bias)
        check_product(mlp.down, mlp.down_bias)
        return layer
    check_product(mlp.router, mlp.router_bias)
    if mlp.activation == "swiglu":  # `grouped` reads them as they are
        assert mlp.gate_up_bias is None and mlp.down_bias is None
        check_product(mlp.gate_up, None)
        check_product(mlp.down, None)
        return layer
    if fp8:
        hidden_scale(mlp)
    for weight, bias in (mlp.gate_up, mlp.gate_up_bias), (mlp.down, mlp.down_bias):
        if not isinstance(weight, MXFP4) or bias is None:
            raise TypeError("the experts are dense or without biases; expected MXFP4")
        for expert in range(len(weight.scales) if fp8 else 0):
            check_range(weight[expert])
        assert bias.shape == weight.shape[:2] and bias.is_contiguous()
        assert bias.dtype == mlp.router.dtype
    new: Any = {  # a layer's record does not know fragments
        "gate_up": repack(cast(MXFP4, mlp.gate_up), interleaved=True),
        "down": repack(cast(MXFP4, mlp.down), interleaved=False),
    }
    return replace(layer, mlp=replace(mlp, **new))


def hidden_scale(mlp: Experts) -> float:
    """What activations are multiplied by before they are rounded to e4m3.

    A power of two with which the largest that its limits allow finds room; of a gate,
    times its sigmoid, nothing is below -0.2785 / alpha. Raises ValueError if it's so
    far from 1 that the usual ones would lose bits.
    """
    bound = max(mlp.limit, 0.2785 / mlp.alpha) * (mlp.limit + 1)
    scale = LARGEST[E4M3] / bound
    if not 1 <= scale <= 2**16:
        raise ValueError(
            "moe_activation_dtype is 'fp8'; expected 'auto', since swiglu_limit "
            f"{mlp.limit:g} and swiglu_alpha {mlp.alpha:g} let activations reach "
            f"{bound:.3g}, and for FP8 that must be 0.007 to 448"
        )
    return 2.0 ** math.floor(math.log2(scale))


def check_range(weight: MXFP4) -> None:
    """Raise ValueError if e5m2, as `decode_fp8` makes it, has no room for a number."""
    used = weight.scales[((weight.blocks & 0x77) != 0).any(-1)]
    least, most = SCALES_FP8
    if used.numel() and not least <= used.min() <= used.max() <= most:
        low, high = int(used.min()) - 127, int(used.max()) - 127
        raise ValueError(
            "moe_activation_dtype is 'fp8'; expected 'auto', since an expert's scales "
            f"go from 2^{low} to 2^{high}, and FP8 has room from 2^{least - 127} to "
            f"2^{most - 127}"
        )


def check_product(weight: Weight | PackedExperts, bias: Tensor | None) -> None:
    """Raise TypeError unless a product with ``weight`` [..., N, K] has a kernel."""
    if isinstance(weight, MXFP4 | CPUWeight):
        raise TypeError("a weight is packed; expected a dense one, or one of 8 bits")
    values = weight.values if isinstance(weight, Scaled) else weight
    assert values.is_contiguous() and values.data_ptr() % 16 == 0
    if bias is not None:
        assert bias.shape == weight.shape[:-1] and bias.is_contiguous()
        assert bias.dtype == values.dtype or isinstance(weight, Scaled)


@triton.jit
def decode_plain(words, scales):
    """`decode_weights` without assembly: eight float32 [ROWS16, 128]."""
    ROWS16: tl.constexpr = words.shape[0]
    words = tl.reshape(words.to(tl.uint32, bitcast=True), (ROWS16, 8, 4, 2, 2))
    a, b = tl.split(words)  # [ROWS16, g, t, half]
    s = scales.to(tl.uint32, bitcast=True)
    s = tl.join(s, rotate_right(s, 24))[:, :, None, :] & EXPONENTS
    bits = registers(a, b)
    out: tl.tuple = ()
    for r in tl.static_range(8):
        m = low(s) if r < 4 else high(s)
        both = tl.join(low(bits[r]) * m, high(bits[r]) * m)
        out += (tl.reshape(both, (ROWS16, 128)),)
    return out


def decode_ptx(fp8: bool = False) -> str:
    """PTX for 16 bytes of a thread: words, then scales, behind the outputs.

    Register r of half h, two bfloat16 numbers, goes to output 2 * r + h. It is their
    product with a scale plus -0, since before Hopper GPUs have no product alone.

    With ``fp8`` registers 2 * p and 2 * p + 1 together, four e5m2 numbers, go to output
    2 * p + h. These have but 5 of the exponent's 8 bits, which are times 2^SHIFT_FP8.
    """
    count = 8 if fp8 else 16
    lines = [
        ".reg .b32 s, u, low, high, zero, signs;",
        ".reg .b16 l, h;",
        f"mov.b32 zero, {MINUS_ZERO.value};",
    ]
    if fp8:
        lines.append(".reg .b32 x<8>;")
    scales = f"${count + 4}"
    for half in range(2):
        out = [f"x{r}" if fp8 else f"${2 * r + half}" for r in range(8)]
        first, second = f"${count + 2 * half}", f"${count + 1 + 2 * half}"
        lines += [
            f"shf.l.wrap.b32 s, {scales}, {scales}, {8 * half};",
            f"and.b32 s, s, {EXPONENTS.value};",
            "mov.b32 {l, h}, s;",
            "mov.b32 low, {l, l};",
            "mov.b32 high, {h, h};",
            f"shr.u32 u, {second}, 2;",
            f"lop3.b32 u, {first}, u, {FIRST.value}, 0xE4;",  # FIRST ? first : u
            f"mov.b32 {out[0]}, {first};",
            f"shl.b32 {out[1]}, {first}, 6;",
            f"shf.r.wrap.b32 {out[2]}, {first}, {first}, 4;",
            f"shl.b32 {out[3]}, u, 4;",
            f"mov.b32 {out[4]}, {second};",
            f"shl.b32 {out[5]}, {second}, 6;",
            f"shf.r.wrap.b32 {out[6]}, {second}, {second}, 4;",
            f"shf.r.wrap.b32 {out[7]}, u, u, 6;",
        ]
        for r in range(8):
            scale = "low" if r < 4 else "high"
            lines += [
                f"and.b32 {out[r]}, {out[r]}, {NUMBERS.value};",
                f"fma.rn.bf16x2 {out[r]}, {out[r]}, {scale}, zero;",
            ]
        for p in range(4 if fp8 else 0):
            even, odd = out[2 * p : 2 * p + 2]
            lines += [  # bytes of a sign, and of exponents and mantissas behind it
                f"prmt.b32 signs, {even}, {odd}, 0x7531;",
                f"shl.b32 {even}, {even}, 3;",
                f"shl.b32 {odd}, {odd}, 3;",
                f"prmt.b32 {even}, {even}, {odd}, 0x7531;",
                f"lop3.b32 ${2 * p + half}, signs, {even}, {SIGN_BITS}, 0xE4;",
            ]
    return "{\n" + "\n".join(lines) + "\n}"


DECODE_PTX = tl.constexpr(decode_ptx())
DECODE_FP8_PTX = tl.constexpr(decode_ptx(fp8=True))
DECODE_OPERANDS = tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 8))
DECODE_FP8_OPERANDS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))


@triton.jit
def join_bits(r0, r1, r2, r3, r4, r5, r6, r7, TILES: tl.constexpr):
    """Eight [R, 128] as one [R / TILES, TILES, g, t, 2, 2, 2, 2, 2].

    128 is [g, t, 2, 2]. Behind these come three bits of which of the eight a number is
    from, the lowest first.
    """
    ROWS16: tl.constexpr = r0.shape[0]
    low = tl.join(tl.join(r0, r1), tl.join(r2, r3))
    high = tl.join(tl.join(r4, r5), tl.join(r6, r7))
    shape: tl.constexpr = (ROWS16 // TILES, TILES, 8, 4, 2, 2, 2, 2, 2)
    return tl.reshape(tl.join(low, high), shape)


@triton.jit
def decode_fp8(words, scales, TILES: tl.constexpr, PTX: tl.constexpr):
    """`decode_weights` as e5m2 numbers if PTX, times 2^SHIFT_FP8, else float32.

    Columns are in `fragment_order`, in which a thread has the four of a register that
    tensor cores want of FP8: what `decode_weights` would give it, and no others.
    """
    ROWS16: tl.constexpr = words.shape[0]
    if PTX:
        s = tl.broadcast_to(scales[:, :, None], (ROWS16, 8, 16))
        r0, r1, r2, r3, r4, r5, r6, r7 = tl.inline_asm_elementwise(
            DECODE_FP8_PTX,
            DECODE_FP8_OPERANDS,
            [words, tl.reshape(s, words.shape)],
            dtype=(tl.float8e5,) * 8,
            is_pure=True,
            pack=4,
        )
    else:
        r0, r1, r2, r3, r4, r5, r6, r7 = decode_plain(words, scales)
    bits = join_bits(r0, r1, r2, r3, r4, r5, r6, r7, TILES)
    if PTX:  # they are c3 c0 half c4 c5, else half c0 c3 c4 c5
        bits = tl.permute(bits, (0, 6, 2, 1, 8, 7, 3, 4, 5))
    else:
        bits = tl.permute(bits, (0, 4, 2, 1, 8, 7, 3, 6, 5))
    return tl.reshape(bits, (16 * ROWS16 // TILES, 64 * TILES))


@triton.jit
def fragment_order(x):
    """x [K, T] for weights of `decode_fp8`, whose K columns are in its order.

    Of the bits c4 to c0 of a column c1 and c2 move in front of c3. 32 divides K.
    """
    K: tl.constexpr = x.shape[0]
    T: tl.constexpr = x.shape[1]
    x = tl.permute(tl.reshape(x, (K // 32, 2, 2, 4, 2, T)), (0, 1, 3, 2, 4, 5))
    return tl.reshape(x, (K, T))


@triton.jit
def decode_weights(words, scales, TILES: tl.constexpr, PTX: tl.constexpr):
    """int32 words [R, 128] and scales [R, 8] of tiles, of which TILES follow each other
    in a row -> their weights [16 * R / TILES, 64 * TILES] times 2^-SHIFT, bfloat16 if
    PTX, else float32.

    The first four `registers` of a row are multiplied by the low half of its scales,
    the others by the high half.
    """
    ROWS16: tl.constexpr = words.shape[0]
    if PTX:
        s = tl.broadcast_to(scales[:, :, None], (ROWS16, 8, 16))
        r0, r1, r2, r3, r4, r5, r6, r7 = tl.inline_asm_elementwise(
            DECODE_PTX,
            DECODE_OPERANDS,
            [words, tl.reshape(s, words.shape)],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=4,
        )
    else:
        r0, r1, r2, r3, r4, r5, r6, r7 = decode_plain(words, scales)
    bits = join_bits(r0, r1, r2, r3, r4, r5, r6, r7, TILES)
    # half c0 c3 c4 c5, where c are bits of the column, 2 * t between c0 and c3; each
    # thread has all of half and c.
    bits = tl.permute(bits, (0, 4, 2, 1, 8, 7, 6, 3, 5))
    return tl.reshape(bits, (16 * ROWS16 // TILES, 64 * TILES))


@triton.jit
def activate(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """gate * sigmoid(ALPHA * gate) * (up + 1), clamped to LIMIT first."""
    gate = tl.minimum(gate, LIMIT)
    up = tl.clamp(up, -LIMIT, LIMIT)
    return gate / (1 + tl.exp(-ALPHA * gate)) * (up + 1)
