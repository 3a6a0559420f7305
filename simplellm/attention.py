"""Attention with grouped heads, a sliding window and sinks, in plain PyTorch.

Q queries, S positions, T packed tokens, H query heads, K kv heads, G = H / K heads a
group, D head_dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Queries that are scored at once: bounds the scores at [H, 128, S], and lets a
# sliding layer skip the keys that no query of the chunk can see.
QUERY_CHUNK = 128


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
    """q [Q, H, D], k and v [S, K, D], mask bool [Q, S] -> [Q, H, D] in q's dtype."""
    (num_queries, num_heads, dim), (num_keys, kv_heads, _) = q.shape, k.shape
    group = num_heads // kv_heads
    # Query head h reads kv head h // G: the G heads of a group are neighbours, and all
    # their queries meet the same keys in one matmul.
    grouped = (q.float() * scale).view(num_queries, kv_heads, group, dim)
    grouped = grouped.permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)  # [K, G*Q, D]
    scores = grouped @ k.float().permute(1, 2, 0)  # [K, G*Q, S]
    scores = scores.view(kv_heads, group, num_queries, num_keys)
    scores = scores.masked_fill_(~mask, -torch.inf)
    if sinks is not None:
        # The sink takes its share of the softmax as one more key would, unscaled, and
        # has no value to give.
        sink = sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, num_queries, 1)
        scores = torch.cat([scores, sink], dim=-1)  # [K, G, Q, S+1]
    weights = scores.softmax(dim=-1)[..., :num_keys]
    weights = weights.reshape(kv_heads, -1, num_keys)  # [K, G*Q, S]
    out = weights @ v.float().transpose(0, 1)  # [K, G*Q, D]
    out = out.view(kv_heads, group, num_queries, dim).permute(2, 0, 1, 3)
    return out.reshape(num_queries, num_heads, dim).to(q.dtype)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of the last Q of S positions over all S.

    q [Q, H, D], k and v [S, K, D], sinks [H] -> [Q, H, D] in q's dtype; scores,
    softmax and the weighted sum are float32. ``window`` counts the query itself.
    ``scale`` is 1/sqrt(D) if not given. Raises ValueError for shapes that do not fit.
    """
    num_queries, num_keys = q.shape[0], k.shape[0]
    if not 1 <= num_queries <= num_keys or k.shape != v.shape:
        raise ValueError(
            f"q is {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; expected k "
            "and v of one shape, and in q the last of their positions"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} query heads do not divide among {k.shape[1]} kv heads; "
            "expected a multiple"
        )
    scale = q.shape[2] ** -0.5 if scale is None else scale
    positions = torch.arange(num_keys, device=q.device)
    offset = num_keys - num_queries
    outputs = []
    for start in range(0, num_queries, QUERY_CHUNK):
        queries = slice(start, min(start + QUERY_CHUNK, num_queries))
        oldest = 0 if window is None else max(0, offset + start + 1 - window)
        keys = slice(oldest, offset + queries.stop)
        mask = visible(positions[offset:][queries], positions[keys], window)
        outputs.append(
            masked_attention(q[queries], k[keys], v[keys], mask, sinks, scale)
        )
    return torch.cat(outputs)


class NoCache:
    """Attention within each of several packed sequences, remembering nothing.

    The model hands every layer's q, k and v to such an object. This one expects all
    positions of its sequences in each call.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths {list(lengths)}: expected positive numbers")
        self.lengths = list(lengths)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        window: int | None,
    ) -> Tensor:
        """q [T, H, D], k and v [T, K, D], T the sum of the lengths -> [T, H, D]."""
        if q.shape[0] != sum(self.lengths):
            raise ValueError(
                f"{q.shape[0]} packed tokens; expected {sum(self.lengths)}, the sum of "
                f"the lengths {self.lengths}"
            )
        sequences = zip(*(x.split(self.lengths) for x in (q, k, v)), strict=True)
        outputs = [attention(q, k, v, sinks, window=window) for q, k, v in sequences]
        return torch.cat(outputs)
