"""Attention over pages: decodes apart from chunks of prompts."""

import torch
from torch import Tensor

from simplellm.model.batch import KVGroup
from simplellm.model.kernels.decode import Scratch, decode_attention
from simplellm.model.kernels.decode_fp8 import decode_fp8_attention
from simplellm.model.kernels.prefill import prefill_attention
from simplellm.model.kernels.verify import verify_attention


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: KVGroup,
    sinks: Tensor | None,
    *,
    scratch: Scratch,
    batch_invariant: bool = False,
) -> Tensor:
    """Attention [T, H, D] of each sequence's newest tokens over all of its positions.

    As `simplellm.model.ops.attend`; ``scratch`` has room for the decodes. With
    ``batch_invariant`` decodes go the way of chunks, for the same order of sums.
    """
    decodes = 0 if batch_invariant else group.decodes
    out = torch.empty_like(q)
    if decodes and group.queries > 1:
        verify_attention(q, keys, values, group, sinks, out, scratch)
        return out
    if decodes:
        fp8 = keys.dtype == torch.float8_e4m3fn
        start = decode_fp8_attention if fp8 else decode_attention
        start(q, keys, values, group, sinks, out, scratch)
    if decodes < q.shape[0]:
        chunks = group.chunks if decodes else group
        prefill_attention(
            q, keys, values, chunks, sinks, out, batch_invariant=batch_invariant
        )
    return out
