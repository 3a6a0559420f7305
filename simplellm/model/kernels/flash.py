"""Attention through the flash-attn library, for those who have it installed.

One more `attend` that a table can hold: a second opinion on a GPU. It asks the GPU for
lengths, so that no CUDA graph can record it.
"""

from itertools import pairwise

import torch
from torch import Tensor

from simplellm.model.batch import KVGroup


def attend(
    q: Tensor, keys: Tensor, values: Tensor, group: KVGroup, sinks: Tensor | None
) -> Tensor:
    """`simplellm.model.ops.attend` in bfloat16 or float16, all sequences in one call.

    The library knows no sinks. It returns the logarithm of each softmax's sum, and that
    is enough: one more logit in the sum makes a factor sigmoid(lse - sink). Raises
    ImportError without the library.
    """
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError as error:
        raise ImportError(
            "flash-attn is not installed; pip install simplellm[flash-attn] builds it"
        ) from error
    counts = group.lengths - group.offsets  # places [B] of which the table names pages
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    sequence = torch.arange(len(counts), device=q.device).repeat_interleave(counts)
    index = torch.arange(len(sequence), device=q.device) - ends[sequence]
    pages = group.tables[sequence, index // group.page_size].long()
    cells = pages * group.page_size + index % group.page_size
    queries = group.query_start_loc.tolist()
    total = queries[-1]
    out, lse, _ = flash_attn_varlen_func(
        q[:total],
        *(pages.flatten(0, 1)[cells] for pages in (keys, values)),
        cu_seqlens_q=group.query_start_loc,
        cu_seqlens_k=ends,
        max_seqlen_q=max(end - begin for begin, end in pairwise(queries)),
        max_seqlen_k=int(counts.max()),
        causal=True,
        window_size=(-1, -1) if group.window is None else (group.window - 1, 0),
        return_attn_probs=True,
    )  # [total, H, D], float32 [H, total]
    result = torch.zeros_like(q)
    if sinks is not None:
        out = out * torch.sigmoid(lse.T - sinks.float())[..., None]
    result[:total] = out
    return result
