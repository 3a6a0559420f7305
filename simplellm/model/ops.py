"""The operations of a forward pass in plain PyTorch: the reference, for any device.

A table of operations (`Ops`) is what a model computes with. This module's functions
are the plain table; `kernels.fused` has the same names and signatures. Arithmetic
within an operation is float32 where it decides the result, whatever the dtype of x.
In what order a product adds up a row, PyTorch's library decides, by the number of rows
and the processor: a token's numbers are the same in any company but for rounding.

T packed tokens, B sequences, S positions, Q queries, V vocabulary, H query heads, K kv
heads, G = H / K heads a group, D head_dim, E experts, k experts a token, I
intermediate size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from simplellm.base.noise import gumbel_noise
from simplellm.checkpoint.mxfp4 import MXFP4, Weight
from simplellm.checkpoint.scaled import Scaled
from simplellm.model.batch import KVGroup
from simplellm.model.layers import (
    Attention,
    Dense,
    Experts,
    Layer,
    LayerNorm,
    Norm,
    SandwichNorm,
)
from simplellm.model.variants import ACTIVATIONS, layer_norm, route_among_all
from simplellm.sampling.filters import Filters, filter_tokens


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times ``weight`` [out, in], transposed, plus ``bias`` [out].

    A packed weight is dequantized to x's dtype for this call only. One of 8 bits may
    round x first, as its format says.
    """
    if isinstance(weight, Scaled):
        return weight.product(x, bias)
    if isinstance(weight, MXFP4):
        weight = weight.dequantize(x.dtype)
    return functional.linear(x, weight, bias)


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and how much each one counts.

    x [T, hidden], weight [E, hidden], bias [E] -> ids int64 [T, k] and weights [T, k]
    in x's dtype. The weights are a softmax over the chosen logits alone: they add up
    to 1, and what the other experts scored does not matter.
    """
    logits = functional.linear(x, weight, bias)  # [T, E]
    top_logits, expert_ids = logits.topk(top_k, dim=-1)  # [T, k]
    return expert_ids, top_logits.softmax(dim=-1)


def swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """gate_up [..., 2I] -> [..., I]: gate * sigmoid(alpha * gate) * (up + 1).

    Gate and up alternate, gate first. Both are clamped to ``limit``, but only up from
    below as well: a very negative gate gives about 0 by itself.
    """
    gate, up = gate_up[..., 0::2], gate_up[..., 1::2]  # [..., I] each
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def activated(first: Tensor, mlp: Experts | Dense) -> Tensor:
    """What the second product of a feed-forward network gets of the first one's."""
    if isinstance(mlp, Experts) and mlp.activation == "clamped_swiglu":
        return swiglu(first, mlp.limit, mlp.alpha)
    return ACTIVATIONS[mlp.activation](first)


def experts(x: Tensor, mlp: Experts, num_tokens: Tensor) -> Tensor:
    """The weighted sum of what each token's experts say: x [T, hidden] -> the same.

    Every expert that some token chose runs once, on all its tokens together; only
    these experts are dequantized, one at a time. A token's sum runs over its experts
    in ascending order, whichever other tokens there are. Only the first ``num_tokens``,
    int32 [1], are no padding; other tables skip the rest, and may return [T, k,
    hidden].
    """
    rule = route if mlp.normalized else route_among_all
    ids, scores = rule(x, mlp.router, mlp.router_bias, mlp.top_k)
    out = torch.zeros_like(x)
    # The T*k (token, choice) pairs, sorted by expert; a pair's token is pair // k.
    pairs = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount().tolist()
    for expert, pair_ids in enumerate(pairs.split(counts)):
        if len(pair_ids) == 0:
            continue
        tokens = pair_ids // mlp.top_k  # [n], each at most once
        first_bias, second_bias = (
            None if bias is None else bias[expert]
            for bias in (mlp.gate_up_bias, mlp.down_bias)
        )
        gate_up = linear(x[tokens], mlp.gate_up[expert], first_bias)
        hidden = activated(gate_up, mlp)  # [n, I]
        y = linear(hidden, mlp.down[expert], second_bias)
        out.index_add_(0, tokens, y * scores.flatten()[pair_ids, None])
    return out


def dense(x: Tensor, mlp: Dense) -> Tensor:
    """A feed-forward network for all tokens: x [T, hidden] -> the same shape."""
    first = linear(x, mlp.gate_up, mlp.gate_up_bias)
    return linear(activated(first, mlp), mlp.down, mlp.down_bias)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of ``x`` [T, N, D] by its token's angles; same dtype as ``x``.

    cos and sin are float32 [T, D/2]. Dimension i is paired with i + D/2 (half-split,
    not interleaved). The products are float32 whatever the dtype of ``x``.
    """
    first, second = x.float().chunk(2, dim=-1)  # [T, N, D/2] each
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, D/2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


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


def embed(tokens: Tensor, previous: Tensor, table: Tensor) -> Tensor:
    """The rows of ``table`` [V, hidden] of int32 tokens [T] -> [T, hidden].

    A token -1 - i stands for ``previous[i]``, int32, which the step before has sampled.
    """
    ids = torch.where(tokens < 0, previous[(-1 - tokens).clamp(min=0)], tokens)
    return functional.embedding(ids, table)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N] divided by its root mean square, times weight [N], in x's dtype.

    Computed in float32, and multiplied by the weight before the cast back.
    """
    x32 = x.float()
    scale = torch.rsqrt(x32.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (x32 * scale * weight.float()).to(x.dtype)


def add_norm(
    residual: Tensor, update: Tensor | None, norm: Norm, eps: float
) -> tuple[Tensor, Tensor]:
    """Add ``update`` to ``residual`` [T, N] in place; return it and its norm.

    ``update`` is [T, N] or, in parts that are summed in float32, [T, parts, N]; None
    adds nothing. The sum is rounded to residual's dtype before it is normalized.
    ``norm`` is an RMSNorm's weight [N], or what other families have in its place.
    """
    if update is not None:
        update = update if update.ndim == 2 else update.float().sum(1)
        if isinstance(norm, SandwichNorm):
            update = rms_norm(update, norm.update, eps)
        residual += update
    if isinstance(norm, LayerNorm):
        return residual, layer_norm(residual, norm.weight, norm.bias, eps)
    weight = norm.weight if isinstance(norm, SandwichNorm) else norm
    return residual, rms_norm(residual, weight, eps)


def rope_and_cache(
    qkv: Tensor,
    attn: Attention,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotated q [T, H, D] in the dtype of ``keys``; k and v go into their pages.

    ``qkv`` [T, (H + 2K) * D], or [T, parts, ...] that are summed, still without its
    bias. ``keys`` and ``values`` are one layer's pages [pages, page_size, K, D];
    ``slots`` int32 [T] says where, -1 for a token that is written nowhere.
    """
    kv_heads, dim = keys.shape[2:]
    x = qkv.float() if qkv.ndim == 2 else qkv.float().sum(1)
    x = x if attn.qkv_bias is None else x + attn.qkv_bias.float()
    x = x.unflatten(-1, (-1, dim))  # [T, H + 2K, D]
    q, k, v = x.split([x.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if attn.q_norm is not None and attn.k_norm is not None:
        q, k = rms_norm(q, attn.q_norm, attn.eps), rms_norm(k, attn.k_norm, attn.eps)
    cos, sin = attn.cos[positions], attn.sin[positions]
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    real = slots >= 0
    for pages, rows in ((keys, k), (values, v)):
        pages.flatten(0, 1)[slots[real]] = rows[real].to(pages.dtype)
    return q.to(keys.dtype)


def gather(x: Tensor, pages: Tensor) -> Tensor:
    """x [num_pages, page_size, K, D], pages [..., P] -> [..., P*page_size, K, D]."""
    # index_select copies whole pages; indexing with a tensor is three times as slow.
    flat = x.index_select(0, pages.flatten())
    return flat.view(*pages.shape[:-1], -1, *x.shape[2:])


def attend_decodes(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: KVGroup,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Write to ``out`` what `attend` gives for sequences that have one new token."""
    scale = q.shape[2] ** -0.5
    for rows, slots, masked in group.gather_plans:
        which, where = (torch.from_numpy(x).to(q.device) for x in (rows, slots))
        mask = torch.ones_like(where, dtype=torch.bool)  # [n, S]
        if masked is not None:
            mask = torch.from_numpy(~masked).to(q.device)
        k, v = (x.flatten(0, 1)[where] for x in (keys, values))  # [n, S, K, D]
        output = masked_attention(q[which, None], k, v, mask[:, None], sinks, scale)
        out[which] = output[:, 0]


def attend_chunks(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: KVGroup,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Write to ``out`` what `attend` gives for the other sequences."""
    size = keys.shape[1]
    queries, lengths = group.queries.tolist(), group.lengths.tolist()
    for row in range(group.decodes, len(lengths)):
        begin, end, length = queries[row], queries[row + 1], lengths[row]
        if begin == end or length == 0:
            continue
        lowest = 0
        if group.window is not None:
            lowest = max(0, length - (end - begin) - group.window + 1)
        # What is outside of this may hold anything, and 0 times NaN is NaN.
        start = lowest - int(group.offsets[row])
        first, stop = start // size, -(-(start + length - lowest) // size)
        pages = group.tables[row, first:stop]
        span = slice(start - first * size, start - first * size + length - lowest)
        k, v = (gather(x, pages)[span] for x in (keys, values))
        out[begin:end] = attention(q[begin:end], k, v, sinks, window=group.window)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, group: KVGroup, sinks: Tensor | None
) -> Tensor:
    """Attention [T, H, D] of each sequence's newest tokens over all of its positions.

    q [T, H, D]; ``keys`` and ``values`` are one layer's pages, the new tokens' among
    them; ``sinks`` [H] are logits. Scores are scaled by 1/sqrt(D). A padding row is 0.
    """
    out = torch.zeros_like(q)
    attend_decodes(q, keys, values, group, sinks, out)
    attend_chunks(q, keys, values, group, sinks, out)
    return out


def head(hidden: Tensor, weight: Weight, logits: Tensor) -> Tensor:
    """The likeliest token of each row: hidden [S, N], weight [V, N] -> int32 [S].

    Fills ``logits``, float32 [S, V]. Of equal logits the lower id wins.
    """
    logits.copy_(linear(hidden, weight))
    return logits.argmax(-1).int()


def draw(
    logits: Tensor,
    best: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    steps: Tensor,
    filters: Filters | None = None,
) -> Tensor:
    """One token for each row of ``logits`` float32 [S, V]: int32 [S].

    Rows whose ``temperature``, float32 [S], is 0 get ``best``, int32 [S], their
    likeliest token. ``seeds`` and ``steps`` int64 [S] fix the noise.
    """
    # The best token sits at 0, so that no temperature, however small, overflows.
    scores = logits - logits.gather(1, best[:, None].long())
    scores = scores / torch.where(temperature > 0, temperature, 1.0)[:, None]
    if filters is not None:
        scores = filter_tokens(scores, filters.top_k, filters.top_p, filters.min_p)
    sampled = (scores + gumbel_noise(seeds, steps, logits.shape[1])).argmax(-1).int()
    return torch.where(temperature > 0, sampled, best)


@dataclass(frozen=True)
class Ops:
    """The functions that a model computes with; see this module's for what each does.

    ``project`` is `linear` of x [T, in]; other tables may return [T, parts, out].
    ``prepare`` brings a layer's weights into the layout that the others read.
    ``penalize`` is that of `simplellm.sampling.penalties.TokenCounts`.
    """

    name: str
    embed: Callable[[Tensor, Tensor, Tensor], Tensor] = embed
    add_norm: Callable[..., tuple[Tensor, Tensor]] = add_norm
    project: Callable[[Tensor, Weight, Tensor | None], Tensor] = linear
    rope_and_cache: Callable[..., Tensor] = rope_and_cache
    attend: Callable[..., Tensor] = attend
    experts: Callable[[Tensor, Experts, Tensor], Tensor] = experts
    dense: Callable[[Tensor, Dense], Tensor] = dense
    head: Callable[[Tensor, Weight, Tensor], Tensor] = head
    draw: Callable[..., Tensor] = draw
    penalize: Callable[[Any, Tensor], Tensor] = lambda counts, x: counts.penalize(x)
    prepare: Callable[[Layer], Layer] = lambda layer: layer


PLAIN = Ops("PyTorch")
