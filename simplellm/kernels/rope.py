"""Bias, rotation and the write into the paged cache, in one launch.

T tokens, S parts of a sum, H query heads, K kv heads, D head_dim, W = (H + 2K) * D.
"""

import triton
import triton.language as tl
from torch import Tensor

from simplellm.kernels import supports_pdl
from simplellm.rope import apply_rope


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def rope_kernel(
    # Pointers
    qkv_ptr,  # [T, S, W]
    bias_ptr,  # [W]
    positions_ptr,  # int32 [T]
    cos_ptr,  # float32 [positions, D/2]
    sin_ptr,
    slots_ptr,  # integer [T]
    q_ptr,  # [T, H, D]
    keys_ptr,  # [pages, page_size, K, D]
    values_ptr,
    # Strides, in elements
    stride_token,
    stride_part,
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
    PDL: tl.constexpr,
):
    """For a token and some of its heads x, each the halves (a, b), of q, k and v:

    x = sum of the parts + bias
    x = a * cos - b * sin, b * cos + a * sin    unless x is of v
    q[token] = x  or, if slot >= 0,  keys[slot] = x  or  values[slot] = x
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
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = qkv_ptr + token * stride_token
    a = tl.load(row + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(row + second, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        more = row + part * stride_part
        a += tl.load(more + first, mask=inside, other=0.0).to(tl.float32)
        b += tl.load(more + second, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        a += a_bias
        b += b_bias
    turned = head < H + K
    a, b = tl.where(turned, a * c - b * s, a), tl.where(turned, b * c + a * s, b)

    of_q = inside & (head < H)
    out = q_ptr + token * (H * D)
    tl.store(out + first, a.to(q_ptr.dtype.element_ty), mask=of_q)
    tl.store(out + second, b.to(q_ptr.dtype.element_ty), mask=of_q)
    # Without a slot, only the heads of q are stored.
    stored = inside & (head < tl.where(slot >= 0, H + 2 * K, H))
    page, place = slot // PAGE, slot % PAGE
    of_k = stored & (head >= H) & (head < H + K)
    key = keys_ptr + page * stride_page_keys + place * (K * D) - H * D
    tl.store(key + first, a.to(keys_ptr.dtype.element_ty), mask=of_k)
    tl.store(key + second, b.to(keys_ptr.dtype.element_ty), mask=of_k)
    of_v = stored & (head >= H + K)
    value = values_ptr + page * stride_page_values + place * (K * D) - (H + K) * D
    tl.store(value + first, a.to(values_ptr.dtype.element_ty), mask=of_v)
    tl.store(value + second, b.to(values_ptr.dtype.element_ty), mask=of_v)


def rope_and_cache(
    qkv: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotated q [T, H, D] in the dtype of ``keys``; k and v go into their pages.

    ``qkv`` [T, W] holds the heads of q, k and v in this order, or [T, S, W] the parts
    that they are the sums of; ``bias`` [W] is added if given. All this is float32
    arithmetic. ``positions`` int32 [T] are rows of ``cos`` and ``sin``, float32
    [positions, D/2]. ``keys`` and ``values`` are one layer's pages [pages, page_size,
    K, D], and ``slots`` integer [T] names page * page_size + row for each token; a
    token with the slot -1 is written nowhere. Raises ValueError for shapes that do not
    fit.
    """
    num_tokens, heads = check_rope(qkv, bias, positions, cos, sin, keys, values, slots)
    page_size, kv_heads, dim = keys.shape[1:]
    q = qkv.new_empty(num_tokens, heads, dim, dtype=keys.dtype)
    block = 16
    pdl = supports_pdl(qkv.device)
    grid = (num_tokens, triton.cdiv(heads + 2 * kv_heads, block))
    if not num_tokens:
        return q
    rope_kernel[grid](
        qkv,
        bias,
        positions,
        cos,
        sin,
        slots,
        q,
        keys,
        values,
        qkv.stride(0),
        qkv.stride(-2),
        keys.stride(0),
        values.stride(0),
        H=heads,
        K=kv_heads,
        D=dim,
        PAGE=page_size,
        PARTS=1 if qkv.ndim == 2 else qkv.shape[1],
        HEADS=block,
        HALF=triton.next_power_of_2(dim // 2),
        HAS_BIAS=bias is not None,
        PDL=pdl,
        num_warps=2,
        launch_pdl=pdl,
    )
    return q


def rope_and_cache_torch(
    qkv: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """The same in plain PyTorch."""
    _, heads = check_rope(qkv, bias, positions, cos, sin, keys, values, slots)
    page_size, kv_heads, dim = keys.shape[1:]
    x = qkv.float() if qkv.ndim == 2 else qkv.float().sum(1)
    x = x if bias is None else x + bias.float()
    q, k, v = x.unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
    positions = positions.long()
    q, k = (apply_rope(part, cos[positions], sin[positions]) for part in (q, k))
    real = slots >= 0
    page, place = slots[real].long() // page_size, slots[real].long() % page_size
    keys[page, place] = k[real].to(keys.dtype)
    values[page, place] = v[real].to(values.dtype)
    return q.to(keys.dtype)


def check_rope(
    qkv: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> tuple[int, int]:
    """T and H. Raises ValueError for tensors that do not fit each other."""
    if keys.shape != values.shape or keys.ndim != 4:
        raise ValueError(
            f"keys is {list(keys.shape)} and values {list(values.shape)}; expected one "
            "shape [pages, page_size, K, D]"
        )
    if not (keys[0].is_contiguous() and values[0].is_contiguous()):
        raise ValueError("keys and values are strided; expected contiguous pages")
    kv_heads, dim = keys.shape[2:]
    num_tokens, width = qkv.shape[0], qkv.shape[-1]
    heads = width // dim - 2 * kv_heads
    if (
        qkv.ndim not in (2, 3)
        or dim % 2
        or width % dim
        or heads < 1
        or qkv.stride(-1) != 1
    ):
        raise ValueError(
            f"qkv is {list(qkv.shape)}; expected [T, W] or [T, S, W] with more than "
            f"{2 * kv_heads} heads of {dim}, an even size"
        )
    for name, tensor, shape in (
        ("bias", bias, (width,)),
        ("positions", positions, (num_tokens,)),
        ("slots", slots, (num_tokens,)),
        ("cos", cos, (len(cos), dim // 2)),
        ("sin", sin, tuple(cos.shape)),
    ):
        if tensor is not None and (tensor.shape != shape or not tensor.is_contiguous()):
            raise ValueError(
                f"{name} is {list(tensor.shape)}; expected contiguous {list(shape)}"
            )
    return num_tokens, heads
