"""The operations of a forward pass in plain PyTorch: the reference, for any device.

A table of operations (`Ops`) is what a model computes with. The functions here, in
attention.py, moe.py and feed_forward.py are the plain table; `kernels.table` has
the same names and signatures. Arithmetic within an operation is float32 where it
decides the result, whatever the dtype of x. In what order a product adds up a row,
PyTorch's library decides, by the number of rows and the processor: a token's numbers
are the same in any company but for rounding.

T packed tokens, B sequences, S positions, Q queries, V vocabulary, H query heads, K kv
heads, G = H / K heads a group, D head_dim, E experts, k experts a token, I
intermediate size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from simplellm.base.noise import gumbel_noise
from simplellm.checkpoint.mxfp4 import Weight
from simplellm.model.attention import attention, masked_attention
from simplellm.model.batch import KVGroup
from simplellm.model.family_rules import dense
from simplellm.model.feed_forward import linear
from simplellm.model.layers import (
    Attention,
    Dense,
    Experts,
    Layer,
    LayerNorm,
    Norm,
    SandwichNorm,
)
from simplellm.model.moe import experts
from simplellm.model.other_families import layer_norm
from simplellm.model.rope import rotate
from simplellm.sampling.filters import Filters, filter_tokens
from simplellm.sampling.logprobs import score


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


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in ``dtype``, in which an FP8 number that is too large is its largest."""
    if dtype == torch.float8_e4m3fn:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def rope_and_cache(
    qkv: Tensor,
    attn: Attention,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotated q [T, H, D] in ``attn.dtype``; k and v go into their pages.

    ``qkv`` [T, (H + 2K) * D], or [T, parts, ...] that are summed, still without its
    bias. ``keys`` and ``values`` are one layer's pages [pages, page_size, K, D];
    ``slots`` int32 [T] says where, -1 for a token that is written nowhere. In a cache
    of FP8 numbers those that are too large for it become its largest.
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
    k_scale, v_scale = attn.kv_scales
    real = slots >= 0
    pages, offsets = slots[real] // keys.shape[1], slots[real] % keys.shape[1]
    for cache, rows in ((keys, k * (1 / k_scale)), (values, v * (1 / v_scale))):
        cache[pages, offsets] = rounded(rows[real], cache.dtype)
    return (q * k_scale).to(attn.dtype or keys.dtype)


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
        at = where // keys.shape[1], where % keys.shape[1]
        k, v = keys[at], values[at]  # [n, S, K, D]
        output = masked_attention(q[which, None], k, v, mask[:, None], sinks, scale)
        out[which] = output[:, 0]


def attend_chunks(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: KVGroup,
    sinks: Tensor | None,
    out: Tensor,
    attend_one: Callable[..., Tensor] = attention,
) -> None:
    """Write to ``out`` what `attend` gives for the other sequences, one by one."""
    size = keys.shape[1]
    queries, lengths = group.query_start_loc.tolist(), group.lengths.tolist()
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
        out[begin:end] = attend_one(q[begin:end], k, v, sinks, window=group.window)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, group: KVGroup, sinks: Tensor | None
) -> Tensor:
    """Attention [T, H, D] of each sequence's newest tokens over all of its positions.

    q [T, H, D]; ``keys`` and ``values`` are one layer's pages, the new tokens' among
    them; ``sinks`` [H] are logits. Scores are scaled by 1/sqrt(D). A padding row is 0.
    """
    out = torch.zeros_like(q)
    if group.queries > 1:  # decodes are as chunks then
        group = replace(group, decodes=0)
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
    ``penalize`` is that of `simplellm.sampling.penalties.TokenCounts`. ``reduce`` adds
    up what several ranks have computed of [T, hidden]; see model/parallel.py. Whatever
    is fused, a layer calls ``add_norm``: there model/eagle.py reads an EAGLE head's
    states, and model/kernels/reduce.py adds up if it's that of kernels/norm.py.
    """

    name: str
    embed: Callable[[Tensor, Tensor, Tensor], Tensor] = embed
    add_norm: Callable[..., tuple[Tensor, Tensor]] = add_norm
    project: Callable[[Tensor, Weight, Tensor | None], Tensor] = linear
    rope_and_cache: Callable[..., Tensor] = rope_and_cache
    attend: Callable[..., Tensor] = attend
    reduce: Callable[[Tensor], Any] = lambda x: x
    experts: Callable[[Tensor, Experts, Tensor], Tensor] = experts
    dense: Callable[[Tensor, Dense], Tensor] = dense
    head: Callable[[Tensor, Weight, Tensor], Tensor] = head
    argmax: Callable[[Tensor], Tensor] = lambda logits: logits.argmax(-1).int()
    draw: Callable[..., Tensor] = draw
    score: Callable[[Tensor, Tensor, int], tuple[Tensor, ...]] = score
    penalize: Callable[[Any, Tensor], Tensor] = lambda counts, x: counts.penalize(x)
    prepare: Callable[[Layer], Layer] = lambda layer: layer


PLAIN = Ops("PyTorch")
