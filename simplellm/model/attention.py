"""Causal attention in plain PyTorch: the reference, for any device.

Q queries, S positions, H query heads, K kv heads, G = H / K heads a group, D head_dim.
"""

import torch
from torch import Tensor


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Bool [Q, S]: which key positions [S] each query position [Q] may read.

    A query reads itself and what came before; with a window, itself and the
    ``window - 1`` positions before it.
    """
    mask = keys <= queries[:, None]
    if window is not None:
        mask &= keys > queries[:, None] - window
    return mask


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None, scale: float
) -> Tensor:
    """q [..., Q, H, D], k and v [..., S, K, D], mask bool [..., Q, S] -> q's shape.

    Leading dimensions, if any, are sequences. Scores, softmax and the weighted sum are
    float32.
    """
    kv_heads = k.shape[-2]
    # Query head h reads kv head h // G: the G heads of a group are neighbors, and all
    # their queries meet the same keys in one matmul.
    grouped = (q.float() * scale).unflatten(-2, (kv_heads, -1))  # [..., Q, K, G, D]
    grouped = grouped.movedim(-4, -2)  # [..., K, G, Q, D]
    group, queries = grouped.shape[-3:-1]
    keys = k.float().movedim(-3, -1)  # [..., K, D, S]
    scores = (grouped.flatten(-3, -2) @ keys).unflatten(-2, (group, queries))
    scores = scores.masked_fill_(~mask[..., None, None, :, :], -torch.inf)
    if sinks is not None:
        # The sink takes its share of the softmax as one more key would, unscaled, and
        # has no value to give.
        sink = sinks.float().view(kv_heads, group, 1, 1)
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : mask.shape[-1]]  # [..., K, G, Q, S]
    out = weights.flatten(-3, -2) @ v.float().transpose(-3, -2)  # [..., K, G*Q, D]
    out = out.unflatten(-2, (group, queries)).movedim(-2, -4)
    return out.flatten(-3, -2).to(q.dtype)


# Queries that are scored at once: bounds the scores at [H, 128, S], and lets a
# sliding layer skip the keys that no query of the chunk can see.
QUERY_CHUNK = 128


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of the last Q of S positions of one sequence over all S.

    q [Q, H, D], k and v [S, K, D], sinks [H] -> [Q, H, D] in q's dtype. ``window``
    counts the query itself. ``scale`` is 1/sqrt(D) if not given.
    """
    num_queries, num_keys = q.shape[0], k.shape[0]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    positions = torch.arange(num_keys, device=q.device)
    offset = num_keys - num_queries
    outputs = []
    for start in range(0, num_queries, QUERY_CHUNK):
        queries = slice(start, min(start + QUERY_CHUNK, num_queries))
        oldest = 0 if window is None else max(0, offset + start + 1 - window)
        keys = slice(oldest, offset + queries.stop)
        mask = visible(positions[offset:][queries], positions[keys], window)
        out = masked_attention(q[queries], k[keys], v[keys], mask, sinks, scale)
        outputs.append(out)
    return torch.cat(outputs)
