"""The experts' MXFP4 matmuls for many tokens, on tensor cores.

Weights are the left operand: a wgmma or mma instruction takes 16 rows by 16 columns of
them from each warp's registers, in an order known beforehand, so `repack` stores them
in that order and `decode` turns what a thread loads into what it multiplies, with no
exchange between threads. Tokens are the right operand, 8 at least, so that few padding
tokens are multiplied when an expert has only one or two. For 8 tokens Triton 3.6 takes
mma, which needs no wait for products under way, else wgmma; later versions take it only
with fewer than 4 warps.

T tokens, E experts, k experts a token, n = T * k (token, choice) pairs, N rows and K
columns of a weight, G = K / 64 rounded up, I intermediate size.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.kernels import supports_pdl
from simplellm.kernels.routing import Dispatch, max_blocks
from simplellm.moe import swiglu
from simplellm.weights import BLOCK, MXFP4

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
WORD = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Packed:
    """An MXFP4 weight [E, N, K] in the order of tensor-core operands.

    Tiles of 16 rows and 64 columns, columns padded with zeros. Lane 4 * g + t of a warp
    has words 4 * (4 * g + t) + 2 * half + (0, 1) of a tile: row g + 8 * half, columns
    2 * t + (0, 1) + 8 * r for r in 0 to 7. Bit by bit they are what `decode` reads. If
    ``paired``, row g of tile i is row 16 * i + 2 * g of the weight, a gate, and row
    g + 8 is the one after it, the up that belongs to it.
    """

    words: Tensor  # int32 [E, N / 16, G, 128]
    scales: Tensor  # int32 [E, N / 16, G, 8], four of rows g and g + 8
    columns: int
    paired: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the dequantized weight."""
        return len(self.words), self.words.shape[1] * 16, self.columns

    @property
    def nbytes(self) -> int:
        """Bytes in memory, as many as before where K is a multiple of 64."""
        return self.words.nbytes + self.scales.nbytes

    def __getitem__(self, experts: Tensor | slice) -> "Packed":
        """The same of some experts."""
        return replace(self, words=self.words[experts], scales=self.scales[experts])

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight [E, N, K] as ordinary numbers, rows in their first order."""
        return unpack(self).dequantize(dtype)


def rotate(words: Tensor, left: int) -> Tensor:
    """Rotate int64 ``words`` of 32 bits."""
    return ((words << left) | (words >> (32 - left))) & WORD


def signed(words: Tensor) -> Tensor:
    """int64 numbers of 32 bits as int32."""
    return torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).int()


def repack(weight: MXFP4, paired: bool) -> Packed:
    """Bring ``weight`` [E, N, K] into the order that tensor cores read.

    ``paired`` is for gate_up weights, whose rows alternate. Works one expert at a time,
    on the weight's device. Raises ValueError for N that is no multiple of 16, and for
    scales above 2^9, which the kernels' arithmetic has no room for.
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
    experts, rows, columns = weight.shape
    shape = (experts, rows // 16, -(-columns // 64))
    words = weight.blocks.new_empty(*shape, 128, dtype=torch.int32)
    scales = weight.blocks.new_empty(*shape, 8, dtype=torch.int32)
    for expert in range(experts):
        words[expert], scales[expert] = repack_expert(weight[expert], paired)
    return Packed(words, scales, columns, paired)


def repack_expert(weight: MXFP4, paired: bool) -> tuple[Tensor, Tensor]:
    """One expert's words [N / 16, G, 128] and scales [N / 16, G, 8], both int32."""
    rows, columns = weight.shape
    # Blocks of 32 columns, two to a tile, the last one perhaps of zeros.
    blocks = torch.nn.functional.pad(weight.blocks, (0, 0, 0, columns // BLOCK % 2))
    scales = torch.nn.functional.pad(weight.scales, (0, columns // BLOCK % 2))
    blocks = blocks.long().view(rows // 16, 8, 2, -1, 2, 4, 4)  # tile a b G c5 (c4c3) t
    scales = scales.long().view(rows // 16, 8, 2, -1, 2)
    if not paired:  # 16 rows are [half, g], not [g, half]
        blocks = blocks.reshape(-1, 2, 8, *blocks.shape[3:]).transpose(1, 2)
        scales = scales.reshape(-1, 2, 8, *scales.shape[3:]).transpose(1, 2)

    # A byte's two elements as the halves of one register.
    low, high = blocks & 15, blocks >> 4
    bits = ((low & 7) << 6) | ((low & 8) << 12)
    bits |= ((high & 7) << 22) | ((high & 8) << 28)
    bits = bits.permute(0, 3, 1, 6, 2, 4, 5).flatten(-2)  # [tile, G, g, t, half, 8]
    r = bits.unbind(-1)
    shared = (r[3] >> 4) | rotate(r[7], 6)
    first = r[0] | (r[1] >> 6) | rotate(r[2], 4) | (shared & FIRST.value)
    second = r[4] | (r[5] >> 6) | rotate(r[6], 4) | (shared & SECOND.value) << 2
    words = torch.stack([first, second], -1).flatten(2)

    s = (scales + 126 - SHIFT).permute(0, 3, 1, 2, 4)  # [tile, G, g, half, c5]
    order = s[..., 0, 0], s[..., 1, 1], s[..., 0, 1], s[..., 1, 0]
    four = torch.stack([byte << (8 * i) for i, byte in enumerate(order)]).sum(0)
    return signed(words), signed(rotate(four, 7))


def unpack(packed: Packed) -> MXFP4:
    """What `repack` was given, up to scales of blocks of zeros in the padding."""
    words = (packed.words.long() & WORD).unflatten(-1, (8, 4, 2, 2))
    first, second = words.unbind(-1)  # [E, tile, G, g, t, half]
    shared = (first & FIRST.value) | ((second >> 2) & SECOND.value)
    registers = (
        *(first, first << 6, rotate(first, 28), shared << 4),
        *(second, second << 6, rotate(second, 28), rotate(shared, 26)),
    )
    bits = torch.stack(registers, -1) & NUMBERS.value
    low = ((bits >> 6) & 7) | ((bits >> 12) & 8)
    high = ((bits >> 22) & 7) | ((bits >> 28) & 8)
    blocks = (low | (high << 4)).to(torch.uint8)  # [E, tile, G, g, t, half, 8]
    s = rotate(packed.scales.long() & WORD, 25)  # [E, tile, G, g]
    order = [(s >> (8 * byte)) & 255 for byte in (0, 2, 3, 1)]
    scales = (torch.stack(order, -1) - 126 + SHIFT).to(torch.uint8)
    scales = scales.unflatten(-1, (2, 2))  # [E, tile, G, g, half, c5]

    if packed.paired:
        blocks = blocks.permute(0, 1, 3, 5, 2, 6, 4)  # [E, tile, g, half, G, 8, t]
        scales = scales.permute(0, 1, 3, 4, 2, 5)
    else:
        blocks = blocks.permute(0, 1, 5, 3, 2, 6, 4)
        scales = scales.permute(0, 1, 4, 3, 2, 5)
    experts, rows, columns = packed.shape
    groups = columns // BLOCK
    blocks = blocks.reshape(experts, rows, -1, BLOCK // 2)[:, :, :groups]
    scales = scales.reshape(experts, rows, -1)[:, :, :groups]
    return MXFP4(blocks.contiguous(), scales.contiguous())


def decode_ptx() -> str:
    """PTX for 16 bytes of a thread, words $16 to $19 with scales $20.

    Register r of half h, two bfloat16 numbers, goes to output 2 * r + h. It is their
    product with a scale plus -0, since before Hopper GPUs have no product alone.
    """
    lines = [
        ".reg .b32 s, u, low, high, zero;",
        ".reg .b16 l, h;",
        f"mov.b32 zero, {MINUS_ZERO.value};",
    ]
    for half in range(2):
        out = [f"${2 * r + half}" for r in range(8)]
        first, second = f"${16 + 2 * half}", f"${17 + 2 * half}"
        lines += [
            f"shf.l.wrap.b32 s, $20, $20, {8 * half};",
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
    return "{\n" + "\n".join(lines) + "\n}"


DECODE = tl.constexpr(decode_ptx())
DECODE_REGISTERS = tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 8))


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


@triton.jit
def decode_plain(words, scales):
    """`decode` without assembly: eight float32 [ROWS16, 128]."""
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


@triton.jit
def decode(words, scales, PTX: tl.constexpr):
    """int32 words [ROWS16, 128] and scales [ROWS16, 8] of tiles -> their weights
    [16 * ROWS16, 64] times 2^-SHIFT, bfloat16 if PTX, else float32.

    The first four `registers` of a row are multiplied by the low half of its scales,
    the others by the high half.
    """
    ROWS16: tl.constexpr = words.shape[0]
    if PTX:
        s = tl.broadcast_to(scales[:, :, None], (ROWS16, 8, 16))
        r0, r1, r2, r3, r4, r5, r6, r7 = tl.inline_asm_elementwise(
            DECODE,
            DECODE_REGISTERS,
            [words, tl.reshape(s, words.shape)],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=4,
        )
    else:
        r0, r1, r2, r3, r4, r5, r6, r7 = decode_plain(words, scales)
    low = tl.join(tl.join(r0, r1), tl.join(r2, r3))
    high = tl.join(tl.join(r4, r5), tl.join(r6, r7))
    all = tl.join(low, high)
    # tile g t half c0 c3 c4 c5, where c are bits of the column, 2 * t between c0 and
    # c3; each thread has all of half and c.
    all = tl.reshape(all, (ROWS16, 8, 4, 2, 2, 2, 2, 2))
    all = tl.permute(all, (0, 3, 1, 7, 6, 5, 2, 4))
    return tl.reshape(all, (16 * ROWS16, 64))


@triton.jit
def finished(out):
    """``out`` itself, as an instruction that needs it and does nothing.

    Triton would leave wgmmas under way while the next weights are decoded, and ptxas
    before 13.3 decodes them into registers that those wgmmas have yet to read
    (https://github.com/triton-lang/triton/issues/9433). With a use it waits for them.
    """
    return tl.inline_asm_elementwise(
        "", "=f,0", [out], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def opaque(weight):
    """``weight`` itself, bfloat16, as an instruction that nobody looks behind.

    For an mma, Triton 3.6 looks for joins in what made an operand and then wants its
    columns in another order. They are in the right one; another would have every
    register exchanged between threads. Not pure, since Triton looks through what is.
    """
    return tl.inline_asm_elementwise(
        "", "=r,0", [weight], dtype=tl.bfloat16, is_pure=False, pack=2
    )


@triton.jit
def multiply(
    x_ptr,
    x_rows,
    valid,
    words_ptr,
    scales_ptr,
    expert,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    """float32 [BLOCK_N, BLOCK_T]: this program's rows of the expert's weight times the
    rows ``x_rows`` of x."""
    ROWS16: tl.constexpr = BLOCK_N // 16
    TILES: tl.constexpr = (K + 63) // 64
    MASKED: tl.constexpr = TILES % UNROLL != 0 or K % 64 != 0
    base = expert.to(tl.int64) * (N // 16) * TILES
    rows = tl.program_id(0) * ROWS16 + tl.arange(0, ROWS16)
    tiles = rows[:, None] * TILES
    words_ptrs = words_ptr + base * 128 + (tiles * 128 + tl.arange(0, 128))
    scales_ptrs = scales_ptr + base * 8 + (tiles * 8 + tl.arange(0, 8))
    columns = tl.arange(0, 64)
    x_ptrs = x_ptr + (x_rows[None, :] * K + columns[:, None])
    ends = tl.where(rows < N // 16, TILES, 0)[:, None]  # of rows of tiles
    out = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in tl.range(0, TILES, UNROLL, num_stages=STAGES):
        for part in tl.static_range(UNROLL):
            tile = start + part
            here = ends > 0
            inside = valid[None, :]
            if MASKED:
                here = ends > tile
                inside = inside & (columns < K - tile * 64)[:, None]
            words = tl.load(words_ptrs + tile * 128, here, 0)
            scales = tl.load(scales_ptrs + tile * 8, here, 0)
            x = tl.load(x_ptrs + tile * 64, inside, 0.0)
            weight = decode(words, scales, PTX)
            if PTX:
                out = tl.dot(opaque(weight), x, out)
            else:
                out = tl.dot(weight, x.to(tl.float32), out, input_precision="ieee")
        if PTX:
            out = finished(out)
    return out * UNSHIFT


@triton.jit
def nearest(count, SIZE: tl.constexpr, LAST: tl.constexpr):
    """Whether SIZE is the least power of two from ``count`` on, or LAST and enough."""
    if LAST:
        return (count > 0) & (count <= SIZE)
    return (count > SIZE // 2) & (count <= SIZE)


@triton.jit
def activate(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """gate * sigmoid(ALPHA * gate) * (up + 1), clamped to LIMIT first."""
    gate = tl.minimum(gate, LIMIT)
    up = tl.clamp(up, -LIMIT, LIMIT)
    return gate / (1 + tl.exp(-ALPHA * gate)) * (up + 1)


@triton.jit
def gate_up_block(
    x_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    pairs_ptr,
    hidden_ptr,
    expert,
    first,
    end,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    """BLOCK_N rows for the pairs from ``first`` to ``end`` or BLOCK_T of them."""
    HALF: tl.constexpr = BLOCK_N // 2
    positions = first + tl.arange(0, BLOCK_T)
    valid = positions < end
    tokens = tl.load(pairs_ptr + positions, valid, 0) // TOP_K
    out = multiply(
        *(x_ptr, tokens, valid, words_ptr, scales_ptr, expert),
        *(N, K, BLOCK_N, BLOCK_T, UNROLL, STAGES, PTX),
    )
    # A tile's rows are 8 gates and their 8 ups; a thread has both of a unit.
    out = tl.reshape(out, (BLOCK_N // 16, 2, 8, BLOCK_T))
    gate, up = tl.split(tl.permute(out, (0, 2, 3, 1)))
    gate = tl.reshape(gate, (HALF, BLOCK_T))
    up = tl.reshape(up, (HALF, BLOCK_T))
    units = tl.program_id(0) * HALF + tl.arange(0, HALF)
    inside = units < N // 2
    bias_ptrs = bias_ptr + expert * N + 2 * units
    gate += tl.load(bias_ptrs, inside, 0).to(tl.float32)[:, None]
    up += tl.load(bias_ptrs + 1, inside, 0).to(tl.float32)[:, None]
    hidden = activate(gate, up, LIMIT, ALPHA)
    ptrs = hidden_ptr + (positions.to(tl.int64)[None, :] * (N // 2) + units[:, None])
    hidden = hidden.to(hidden_ptr.dtype.element_ty)
    tl.store(ptrs, hidden, valid[None, :] & inside[:, None])


@triton.jit
def gate_up_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    hidden_ptr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDTHS: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program multiplies BLOCK_N rows with one block of tokens.

    g, u = even and odd rows of (weight[expert] @ x[token] + bias[expert])
    g = min(g, LIMIT); u = clamp(u, -LIMIT, LIMIT)
    hidden[position] = g * sigmoid(ALPHA * g) * (u + 1)

    A block that is not full is padded to BLOCK_T, BLOCK_T / 2, … whichever is nearest
    of WIDTHS such.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(1)
    expert = tl.load(blocks_ptr + 2 * block)  # -1 if empty: first and end are 0
    first = tl.load(blocks_ptr + 2 * block + 1)
    end = tl.load(offsets_ptr + expert + 1)
    count = tl.minimum(end - first, BLOCK_T)
    for level in tl.static_range(WIDTHS):
        if nearest(count, BLOCK_T >> level, level == WIDTHS - 1):
            gate_up_block(
                *(x_ptr, words_ptr, scales_ptr, bias_ptr, pairs_ptr, hidden_ptr),
                *(expert, first, end, LIMIT, ALPHA, TOP_K, N, K),
                *(BLOCK_N, BLOCK_T >> level, UNROLL, STAGES, PTX),
            )


@triton.jit
def down_block(
    hidden_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    weights_ptr,
    pairs_ptr,
    out_ptr,
    expert,
    first,
    end,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    """BLOCK_N rows for the pairs from ``first`` to ``end`` or BLOCK_T of them."""
    positions = first + tl.arange(0, BLOCK_T)
    valid = positions < end
    pairs = tl.load(pairs_ptr + positions, valid, 0)
    weights = tl.load(weights_ptr + pairs, valid, 0).to(tl.float32)
    out = multiply(
        *(hidden_ptr, positions, valid, words_ptr, scales_ptr, expert),
        *(N, K, BLOCK_N, BLOCK_T, UNROLL, STAGES, PTX),
    )
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    bias = tl.load(bias_ptr + expert * N + rows, inside, 0).to(tl.float32)
    out = (out + bias[:, None]) * weights[None, :]
    ptrs = out_ptr + (pairs.to(tl.int64)[None, :] * N + rows[:, None])
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(ptrs, out, valid[None, :] & inside[:, None])


@triton.jit
def down_kernel(
    hidden_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    weights_ptr,
    pairs_ptr,
    offsets_ptr,
    blocks_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDTHS: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program multiplies BLOCK_N rows with one block of pairs.

    out[pair] = (weight[expert] @ hidden[position] + bias[expert]) * weights[pair]

    with pair = pairs[position]. WIDTHS as in `gate_up_kernel`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(1)
    expert = tl.load(blocks_ptr + 2 * block)  # -1 if empty: first and end are 0
    first = tl.load(blocks_ptr + 2 * block + 1)
    end = tl.load(offsets_ptr + expert + 1)
    count = tl.minimum(end - first, BLOCK_T)
    for level in tl.static_range(WIDTHS):
        if nearest(count, BLOCK_T >> level, level == WIDTHS - 1):
            down_block(
                *(hidden_ptr, words_ptr, scales_ptr, bias_ptr, weights_ptr, pairs_ptr),
                *(out_ptr, expert, first, end, N, K),
                *(BLOCK_N, BLOCK_T >> level, UNROLL, STAGES, PTX),
            )


class Tiling(NamedTuple):
    """How a kernel divides its work. It may change the last bits of a result."""

    rows: int  # of weights a program
    tokens: int  # of a block, `dispatch`'s ``block``
    widths: int = 1  # sizes that a block is padded to: tokens, tokens / 2, …
    unroll: int = 1  # tiles of 64 columns between waits for the weights
    stages: int = 4  # of loads under way
    warps: int = 4


NARROW = Tiling(rows=128, tokens=16, widths=2, unroll=3, stages=3)
NARROWEST = Tiling(rows=64, tokens=16, unroll=3, stages=3)
LEAN = Tiling(rows=128, tokens=8, unroll=3, stages=3, warps=2)
MIDDLE = Tiling(rows=128, tokens=64, widths=3)
WIDE = Tiling(rows=128, tokens=128, widths=3)
# The tilings of gate_up and down for at most so many experts in use, with at most so
# many pairs each if tokens spread evenly: from 8 tokens of 128 experts on the fastest
# on an H200 on 2026-11-21, at its power limit; those for fewer were timed in bursts.
# Few experts need more warps, to have some for all processors; 16 tokens have up to 64.
TUNED: tuple[tuple[float, float, Tiling, Tiling], ...] = (
    (8, 1, NARROW._replace(stages=4), NARROWEST._replace(unroll=5, stages=4)),
    (16, 1, NARROWEST, NARROW._replace(stages=4)),
    (76, 12, NARROW, NARROW),
    (math.inf, 6, LEAN, LEAN),
    (math.inf, 12, NARROW, NARROW),
    (math.inf, 96, MIDDLE, MIDDLE),
    (math.inf, math.inf, WIDE, WIDE),
)


# For any number of tokens, where each must be summed in the same order: never less than
# 16 in a block, since 8 may take another instruction.
INVARIANT = MIDDLE


def tilings(tokens: int, experts: int, top_k: int) -> tuple[Tiling, Tiling]:
    """Good tilings of `gate_up` and `down`; both want blocks of the same size."""
    pairs = tokens * top_k
    used, mean = min(pairs, experts), pairs / experts
    fits = ((up, back) for u, m, up, back in TUNED if used <= u and mean <= m)
    return next(fits)


def gate_up(
    x: Tensor,
    weight: Packed,
    bias: Tensor,
    dispatch: Dispatch,
    limit: float,
    alpha: float,
    tiling: Tiling,
    pdl: bool = True,
) -> Tensor:
    """The activations of every pair: the first half of its expert's network.

    x [T, K], ``weight`` paired [E, 2I, K], bias [E, 2I] -> hidden [n, I] in x's dtype,
    in the order of ``dispatch``, whose blocks have tiling.tokens pairs. Padding's are
    not written.

    Raises ValueError for other shapes.
    """
    top_k = check_gate_up(x, weight, bias, dispatch)
    check_blocks(dispatch, tiling)
    _, rows, columns = weight.shape
    hidden = x.new_empty(len(dispatch.pairs), rows // 2)
    pdl = pdl and supports_pdl(x.device)
    gate_up_kernel[(triton.cdiv(rows, tiling.rows), len(dispatch.blocks))](
        x,
        weight.words,
        weight.scales,
        bias,
        *dispatch,
        hidden,
        LIMIT=limit,
        ALPHA=alpha,
        TOP_K=top_k,
        N=rows,
        K=columns,
        **options(tiling, x, pdl),
    )
    return hidden


def gate_up_torch(
    x: Tensor,
    weight: Packed,
    bias: Tensor,
    dispatch: Dispatch,
    limit: float,
    alpha: float,
    tiling: Tiling,
    pdl: bool = True,
) -> Tensor:
    top_k = check_gate_up(x, weight, bias, dispatch)
    rows = x[dispatch.pairs.long() // top_k]
    return swiglu(linear_each(rows, weight, bias, dispatch), limit, alpha).to(x.dtype)


def down(
    hidden: Tensor,
    weight: Packed,
    bias: Tensor,
    weights: Tensor,
    dispatch: Dispatch,
    tiling: Tiling,
    pdl: bool = True,
) -> Tensor:
    """What each expert adds to each token: the other half, times the router's weight.

    hidden [n, I] from `gate_up`, ``weight`` [E, N, I], bias [E, N], weights [T, k] from
    `route` -> [T, k, N] in hidden's dtype; the token's sum is the caller's to take.
    What padding would get is not written.

    Raises ValueError for other shapes.
    """
    check_down(hidden, weight, bias, weights, dispatch)
    check_blocks(dispatch, tiling)
    _, rows, columns = weight.shape
    out = hidden.new_empty(*weights.shape, rows)
    pdl = pdl and supports_pdl(hidden.device)
    down_kernel[(triton.cdiv(rows, tiling.rows), len(dispatch.blocks))](
        hidden,
        weight.words,
        weight.scales,
        bias,
        weights,
        *dispatch,
        out,
        N=rows,
        K=columns,
        **options(tiling, hidden, pdl),
    )
    return out


def down_torch(
    hidden: Tensor,
    weight: Packed,
    bias: Tensor,
    weights: Tensor,
    dispatch: Dispatch,
    tiling: Tiling,
    pdl: bool = True,
) -> Tensor:
    check_down(hidden, weight, bias, weights, dispatch)
    pairs = dispatch.pairs.long()
    y = linear_each(hidden, weight, bias, dispatch)
    out = y.new_empty(y.shape)
    out[pairs] = y * weights.float().flatten()[pairs, None]
    return out.view(*weights.shape, -1).to(hidden.dtype)


def linear_each(x: Tensor, weight: Packed, bias: Tensor, dispatch: Dispatch) -> Tensor:
    """float32 [n, N]: each row of x [n, K] through the matrix of its expert.

    One matrix at a time: unpacked, all of a layer of the 120b would be 25 GB.
    """
    out = torch.zeros(len(x), weight.shape[1], device=x.device)  # what padding gets
    for expert, (begin, end) in enumerate(pairwise(dispatch.offsets.tolist())):
        if begin < end:
            (matrix,) = weight[expert : expert + 1].dequantize(torch.float32)
            out[begin:end] = x[begin:end].float() @ matrix.T + bias[expert].float()
    return out


def options(tiling: Tiling, x: Tensor, pdl: bool) -> dict:
    """What both kernels are launched with."""
    return dict(
        BLOCK_N=tiling.rows,
        BLOCK_T=tiling.tokens,
        WIDTHS=tiling.widths,
        UNROLL=tiling.unroll,
        STAGES=tiling.stages,
        PTX=x.is_cuda and x.dtype == torch.bfloat16,
        PDL=pdl,
        num_warps=tiling.warps,
        launch_pdl=pdl,
    )


def check_gate_up(x: Tensor, weight: Packed, bias: Tensor, dispatch: Dispatch) -> int:
    """k; raises ValueError unless these belong together."""
    check_weight(weight, bias, paired=True)
    check_rows("x", x, weight)
    pairs = len(dispatch.pairs)
    if pairs % max(len(x), 1):
        raise ValueError(
            f"dispatch has {pairs} pairs; expected a multiple of x's {len(x)} tokens"
        )
    return max(pairs // max(len(x), 1), 1)


def check_blocks(dispatch: Dispatch, tiling: Tiling) -> None:
    """Raise ValueError if the blocks are clearly not of tiling.tokens pairs."""
    pairs, experts = len(dispatch.pairs), len(dispatch.offsets) - 1
    expected = max_blocks(pairs, experts, tiling.tokens)
    if len(dispatch.blocks) != expected:
        raise ValueError(
            f"dispatch has {len(dispatch.blocks)} blocks; expected {expected} of "
            f"{tiling.tokens} pairs each"
        )


def check_down(
    hidden: Tensor, weight: Packed, bias: Tensor, weights: Tensor, dispatch: Dispatch
) -> None:
    """Raise ValueError unless these belong together."""
    check_weight(weight, bias, paired=False)
    check_rows("hidden", hidden, weight)
    if not len(hidden) == weights.numel() == len(dispatch.pairs):
        raise ValueError(
            f"hidden has {len(hidden)} rows, weights are {list(weights.shape)}, "
            f"dispatch has {len(dispatch.pairs)} pairs; expected as many of each"
        )


def check_weight(weight: Packed, bias: Tensor, paired: bool) -> None:
    if weight.paired != paired:
        raise ValueError(f"weight.paired is {weight.paired}; expected {paired}")
    if bias.shape != weight.shape[:2] or not bias.is_contiguous():
        raise ValueError(
            f"bias is {list(bias.shape)}; expected {list(weight.shape[:2])}, contiguous"
        )


def check_rows(name: str, x: Tensor, weight: Packed) -> None:
    if x.ndim != 2 or x.shape[1] != weight.columns or not x.is_contiguous():
        raise ValueError(
            f"{name} is {list(x.shape)}; expected [rows, {weight.columns}], contiguous"
        )
