"""Add a layer's output to the residual stream and normalise the sum.

T tokens, N hidden size, S parts of an update.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplellm.kernels import supports_pdl
from simplellm.model import rms_norm


@triton.jit
def sum_parts(
    x,
    update,
    stride_part,
    inside,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """x plus the parts of its update, which are added first, rounded to DTYPE."""
    total = tl.load(update, inside, 0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(update + part * stride_part, inside, 0).to(tl.float32)
    return (x + total).to(DTYPE).to(tl.float32)


@triton.jit
def add_norm_kernel(
    residual_ptr,
    update_ptr,
    weight_ptr,
    normed_ptr,
    stride_token,
    stride_part,
    eps,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: residual += sum of the parts; normed = its RMSNorm.

    scale = 1 / sqrt(mean(residual^2) + eps); normed = residual * scale * weight
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    weight = tl.load(weight_ptr + columns, inside, 0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(residual_ptr + row * N + columns, inside, 0).to(tl.float32)
    if PARTS > 0:
        update = update_ptr + row * stride_token + columns
        dtype = residual_ptr.dtype.element_ty
        x = sum_parts(x, update, stride_part, inside, PARTS, dtype)
        tl.store(residual_ptr + row * N + columns, x.to(dtype), inside)
    scale = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    y = x * scale * weight
    tl.store(normed_ptr + row * N + columns, y.to(normed_ptr.dtype.element_ty), inside)


def add_norm(
    residual: Tensor,
    update: Tensor | None,
    weight: Tensor,
    eps: float,
    pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """Add ``update`` to ``residual`` in place; return it and its RMSNorm, [T, N] both.

    residual [T, N], contiguous; update [T, N] or, in S parts that are first summed in
    float32 and in order, [T, S, N], any float dtype, rows contiguous; weight [N]. The
    sum is rounded to residual's dtype before it is normalised. Raises ValueError for
    other shapes.
    """
    check_add_norm(residual, update, weight)
    tokens, size = residual.shape
    normed = torch.empty_like(residual)
    if tokens == 0:
        return residual, normed
    parts = count_parts(update)
    pdl = pdl and supports_pdl(residual.device)
    add_norm_kernel[(tokens,)](
        residual,
        residual if update is None else update,
        weight,
        normed,
        0 if update is None else update.stride(0),
        0 if update is None else update.stride(-2),
        eps,
        N=size,
        PARTS=parts,
        BLOCK=triton.next_power_of_2(size),
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )
    return residual, normed


def count_parts(update: Tensor | None) -> int:
    """S; 0 without an update."""
    if update is None:
        return 0
    return 1 if update.ndim == 2 else update.shape[1]


def add_norm_torch(
    residual: Tensor, update: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if update is not None:
        parts = update.float().unsqueeze(1).flatten(1, -2)  # [T, S, N]
        residual.copy_(residual.float() + parts.sum(1))
    return residual, rms_norm(residual, weight, eps)


def check_add_norm(residual: Tensor, update: Tensor | None, weight: Tensor) -> None:
    """Raise ValueError unless the three belong together."""
    if residual.ndim != 2 or not residual.is_contiguous():
        raise ValueError(
            f"residual is {list(residual.shape)} with strides "
            f"{list(residual.stride())}; expected [T, N], contiguous"
        )
    tokens, size = residual.shape
    if weight.shape != (size,):
        raise ValueError(f"weight is {list(weight.shape)}; expected [{size}]")
    if update is None:
        return
    fits = update.ndim in (2, 3) and update.shape[0] == tokens
    if not fits or update.shape[-1] != size or update.stride(-1) != 1:
        raise ValueError(
            f"update is {list(update.shape)} with strides {list(update.stride())}; "
            f"expected [{tokens}, {size}] or [{tokens}, S, {size}], rows contiguous"
        )
