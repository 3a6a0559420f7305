"""FlashAttention as one more attention function, for those who have it installed.

Nothing in the engine needs it. It is a second opinion on prefill, on a GPU.
"""

import torch
from torch import Tensor


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """`simplellm.attention.attention` through the flash-attn library, in bf16 or fp16.

    The library knows no sinks. It returns the logarithm of each softmax's sum, and that
    is enough: one more logit in the sum makes a factor sigmoid(lse - sink). Raises
    ImportError without the library.
    """
    try:
        from flash_attn import flash_attn_func
    except ImportError as error:
        raise ImportError(
            "flash-attn is not installed; pip install simplellm[flash-attn] builds it"
        ) from error
    out, lse, _ = flash_attn_func(
        *(x[None] for x in (q, k, v)),
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        return_attn_probs=True,
    )  # [1, Q, H, D], float32 [1, H, Q]
    if sinks is None:
        return out[0]
    share = torch.sigmoid(lse[0].T - sinks.float())  # [Q, H]
    return (out[0] * share[..., None]).to(q.dtype)
