"""Bias, norm of each head, rotation and the write into the paged cache, in one launch.

T tokens, S parts of a sum, H query heads, K kv heads, D head_dim, W = (H + 2K) * D.
"""

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from simplellm.model.kernels.launch import Launcher, launcher, power_of_two
from simplellm.model.layers import Attention


@triton.jit
def load_norms(q_norm_ptr, k_norm_ptr, of_q, dims, D: tl.constexpr):
    """The norms' weights [HEADS, HALF] of the ``dims`` [1, HALF], float32."""
    q_norm = tl.load(q_norm_ptr + dims, mask=dims < D, other=0.0).to(tl.float32)
    k_norm = tl.load(k_norm_ptr + dims, mask=dims < D, other=0.0).to(tl.float32)
    return tl.where(of_q, q_norm, k_norm)


@triton.jit
def as_stored(x, cache_ptr):
    """x as the cache's numbers; what is too large for one of FP8 is its largest."""
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x, -448.0, 448.0)
    return x.to(cache_ptr.dtype.element_ty)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def rope_kernel(
    # Pointers
    qkv_ptr,  # [T, S, W]
    bias_ptr,  # [W]
    q_norm_ptr,  # [D]
    k_norm_ptr,
    positions_ptr,  # int32 [T]
    cos_ptr,  # float32 [positions, D/2]
    sin_ptr,
    slots_ptr,  # integer [T]
    q_ptr,  # [T, H, D]
    keys_ptr,  # [pages, page_size, K, D]
    values_ptr,
    eps,  # of the norms
    k_scale,  # what q is multiplied by, and keys and values
    k_inverse,
    v_inverse,
    # Strides, in elements
    stride_page_keys,
    stride_page_values,
    # Sizes and switches
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,  # S
    HEADS: tl.constexpr,  # heads a program takes, a power of two
    HALF: tl.constexpr,  # D/2, rounded up to a power of two
    HAS_BIAS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """For a token and some of its heads x, each the halves (a, b), of q, k and v:

    x = sum of the parts + bias
    x = x / sqrt(mean(x^2) + eps) * norm        if there are norms, unless x is of v
    x = a * cos - b * sin, b * cos + a * sin    unless x is of v
    q[token] = x  or, if slot >= 0,  keys[slot] = x  or  values[slot] = x,  scaled
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < H + 2 * K) & (pair < D // 2)
    first = head * D + pair
    second = first + D // 2
    # None of this comes from the kernel before.
    turn = tl.load(positions_ptr + token).to(tl.int64) * (D // 2) + pair
    c = tl.load(cos_ptr + turn, mask=pair < D // 2, other=0.0)
    s = tl.load(sin_ptr + turn, mask=pair < D // 2, other=0.0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if HAS_BIAS:
        a_bias = tl.load(bias_ptr + first, mask=inside, other=0.0).to(tl.float32)
        b_bias = tl.load(bias_ptr + second, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORMS:
        a_norm = load_norms(q_norm_ptr, k_norm_ptr, head < H, pair, D)
        b_norm = load_norms(q_norm_ptr, k_norm_ptr, head < H, pair + D // 2, D)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = qkv_ptr + token * (PARTS * (H + 2 * K) * D)
    a = tl.load(row + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(row + second, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        more = row + part * ((H + 2 * K) * D)
        a += tl.load(more + first, mask=inside, other=0.0).to(tl.float32)
        b += tl.load(more + second, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        a += a_bias
        b += b_bias
    turned = head < H + K
    if HAS_NORMS:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        a = tl.where(turned, a * scale * a_norm, a)
        b = tl.where(turned, b * scale * b_norm, b)
    a, b = tl.where(turned, a * c - b * s, a), tl.where(turned, b * c + a * s, b)
    scale = tl.where(head < H, k_scale, tl.where(turned, k_inverse, v_inverse))
    of_q = inside & (head < H)
    out = q_ptr + token * (H * D)
    a, b = a * scale, b * scale
    tl.store(out + first, a.to(q_ptr.dtype.element_ty), mask=of_q)
    tl.store(out + second, b.to(q_ptr.dtype.element_ty), mask=of_q)
    stored = inside & (head < tl.where(slot >= 0, H + 2 * K, H))
    page, offset = slot // PAGE, slot % PAGE
    of_k = stored & (head >= H) & (head < H + K)
    key = keys_ptr + page * stride_page_keys + offset * (K * D) - H * D
    tl.store(key + first, as_stored(a, keys_ptr), mask=of_k)
    tl.store(key + second, as_stored(b, keys_ptr), mask=of_k)
    of_v = stored & (head >= H + K)
    value = values_ptr + page * stride_page_values + offset * (K * D) - (H + K) * D
    tl.store(value + first, as_stored(a, values_ptr), mask=of_v)
    tl.store(value + second, as_stored(b, values_ptr), mask=of_v)


@cache
def rope_launcher(
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    parts: int,
    has_bias: bool,
    has_norms: bool,
) -> tuple[Launcher, int]:
    """For these shapes; and how many programs take a token."""
    half = power_of_two(dim // 2)
    # As many numbers as 16 heads of 64 have: two warps hold no more of longer ones.
    block = min(16, max(1, 512 // half))
    start = launcher(
        rope_kernel,
        H=heads,
        K=kv_heads,
        D=dim,
        PAGE=page_size,
        PARTS=parts,
        HEADS=block,
        HALF=half,
        HAS_BIAS=has_bias,
        HAS_NORMS=has_norms,
        num_warps=2,
    )
    return start, -(-(heads + 2 * kv_heads) // block)


def rope_and_cache(
    qkv: Tensor,
    attn: Attention,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotated q [T, H, D] in ``attn.dtype``; k and v go into their pages.

    ``qkv`` [T, W] holds the heads of q, k and v in this order, or [T, S, W] the parts
    that they are the sums of, contiguous; ``attn`` has a bias [W] and norms [D] of the
    heads of q and k, or None for these. All this is float32 arithmetic. ``positions``
    int32 [T]; ``keys`` and ``values`` are one layer's pages [pages, page_size, K, D],
    each contiguous; ``slots`` int32 [T] names page * page_size + row for each token, -1
    for one that is written nowhere.
    """
    num_tokens, width = qkv.shape[0], qkv.shape[-1]
    _, page_size, kv_heads, dim = keys.shape
    heads = width // dim - 2 * kv_heads
    q = keys.new_empty(num_tokens, heads, dim, dtype=attn.dtype or keys.dtype)
    k_scale, v_scale = attn.kv_scales
    parts = 1 if qkv.ndim == 2 else qkv.shape[1]
    has_bias, has_norms = attn.qkv_bias is not None, attn.q_norm is not None
    start, programs = rope_launcher(
        heads, kv_heads, dim, page_size, parts, has_bias, has_norms
    )
    start(
        (num_tokens, programs, 1),
        *(qkv, attn.qkv_bias, attn.q_norm, attn.k_norm),
        *(positions, attn.cos, attn.sin, slots, q, keys, values),
        *(attn.eps, k_scale, 1 / k_scale, 1 / v_scale),
        *(keys.stride(0), values.stride(0)),
    )
    return q
