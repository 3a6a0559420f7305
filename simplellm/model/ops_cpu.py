"""The operations of PyTorch for a CPU: attention of prompts stays in its caches.

The reference writes the scores of 128 queries to memory and reads them several times:
at 8,000 positions those of 9 heads take 37 MB. A kernel of PyTorch's has only a block
of them at once. Here it's called for the keys that all of some queries see, and for
those that some of them do; the logarithms of the softmaxes' sums say how much either
counts, and how much is left beside a sink.

Q queries, S positions, H query heads, K kv heads, G = H / K heads a group, D head_dim.
"""

from dataclasses import replace

import torch
from torch import Tensor

from simplellm.model import ops
from simplellm.model.attention import visible
from simplellm.model.batch import KVGroup
from simplellm.model.ops import PLAIN

# Queries at once. More are faster by themselves, but score more that is masked, all the
# more in a window.
QUERY_BLOCK = 256
WINDOW_QUERY_BLOCK = 128
# What scaled_dot_product_attention calls, which keeps the sums to itself.
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend_some(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention where each query sees keys of its own, its own position among them.

    q [K, G, Q, D], k and v [K, S, D] -> [K, G, Q, D], and the logarithms [K, G, Q] of
    what the softmax divides by. ``mask`` bool [Q, S] says which; None: S is Q, and the
    keys up to its own.
    """
    k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    if mask is None:
        return flash_attention(q, k, v, is_causal=True)
    bias = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    return flash_attention(q, k, v, attn_mask=bias)


def attend_all(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`attend_some`, where each query sees all keys."""
    # The queries of a group are one tall matrix, as in the reference.
    out, lse = flash_attention(q.flatten(1, 2)[None], k[None], v[None])
    return out[0].view(q.shape), lse[0].view(q.shape[:-1])


def prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, window: int | None = None
) -> Tensor:
    """What `simplellm.model.attention.attention` gives, [Q, H, D] in q's dtype."""
    num_queries, num_keys = len(q), len(k)
    size = QUERY_BLOCK if window is None else WINDOW_QUERY_BLOCK
    positions = torch.arange(num_keys)
    grouped = q.float().unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
    k, v = (x.float().transpose(0, 1) for x in (k, v))  # [K, S, D]
    output = torch.empty_like(q)
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        block = grouped[:, :, start:stop]  # [K, G, Q, D]
        first, end = (num_keys - num_queries + n for n in (start, stop))
        new = slice(first, end)
        if window is not None and window < end:
            seen = slice(max(0, first + 1 - window), end)
            mask = visible(positions[new], positions[seen], window)
            out, lse = attend_some(block, k[:, seen], v[:, seen], mask)
        else:
            out, lse = attend_some(block, k[:, new], v[:, new])
            if first > 0:
                before, lse_before = attend_all(block, k[:, :first], v[:, :first])
                out = out.lerp(before, torch.sigmoid(lse_before - lse)[..., None])
                lse = lse.logaddexp(lse_before)
        if sinks is not None:  # one more logit below, and nothing above
            share = torch.sigmoid(lse - sinks.float().view(*lse.shape[:2], 1))
            out = out * share[..., None]
        output[start:stop] = out.permute(2, 0, 1, 3).flatten(1, 2)
    return output


def attend(
    q: Tensor, keys: Tensor, values: Tensor, group: KVGroup, sinks: Tensor | None
) -> Tensor:
    if group.queries > 1:  # so few each that a block has nothing to gain
        return ops.attend(q, keys, values, group, sinks)
    out = torch.zeros_like(q)
    ops.attend_decodes(q, keys, values, group, sinks, out)
    ops.attend_chunks(q, keys, values, group, sinks, out, prompt_attention)
    return out


CPU = replace(PLAIN, name="CPU", attend=attend)
