"""Wrong answers to chapter 5."""

import math
from dataclasses import replace

import torch

from simplellm.model import attention, rope
from simplellm.model.attention import visible
from wrong import wrong


@wrong("visible", "it sees")
def one_too_wide(queries, keys, window):
    return visible(queries, keys, None if window is None else window + 1)


@wrong("visible", "doesn't see itself")
def strictly_before(queries, keys, window):
    mask = keys < queries[:, None]
    return mask if window is None else mask & (keys > queries[:, None] - window)


@wrong("visible", "the future")
def a_window_on_both_sides(queries, keys, window):
    if window is None:
        return visible(queries, keys, None)
    return (keys - queries[:, None]).abs() < window


@wrong("visible", "doesn't see")
def lower_left_triangle(queries, keys, window):
    mask = torch.ones(len(queries), len(keys)).tril().bool()
    return mask if window is None else mask & visible(queries, keys, window)


@wrong("visible", "the window counts")
def forgets_the_window(queries, keys, window):
    return visible(queries, keys, None)


@wrong("visible", "in the middle of the keys")
def counts_for_positions(queries, keys, window):
    """Right as long as the queries are the last positions."""
    places = torch.arange(len(keys))
    return visible(places[len(keys) - len(queries) :], places, window)


@wrong("visible", "the future")
def the_other_way_round(queries, keys, window):
    return ~visible(queries, keys, window)


def shares_of(q, k, mask, sinks, scale):
    """Attention weights [..., H, Q, S], with each kv head copied for its group."""
    group = q.shape[-2] // k.shape[-2]
    keys = k.repeat_interleave(group, -2).movedim(-3, -1)  # [..., H, D, S]
    scores = q.movedim(-2, -3) @ keys * scale
    scores = scores.masked_fill(~mask[..., None, :, :], -torch.inf)
    if sinks is not None:
        sink = sinks[:, None, None].to(scores.dtype)
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : mask.shape[-1]]


def mixed(shares, v, like):
    group = like.shape[-2] // v.shape[-2]
    values = v.repeat_interleave(group, -2).movedim(-2, -3)  # [..., H, S, D]
    return (shares @ values.to(shares.dtype)).movedim(-3, -2).to(like.dtype)


@wrong("masked_attention", "h // 2 and not h % 3")
def kv_heads_in_turns(q, k, v, mask, sinks, scale):
    times = q.shape[-2] // k.shape[-2]
    keys, values = (x.repeat(*[1] * (x.ndim - 2), times, 1) for x in (k, v))
    return attention.masked_attention(q, keys, values, mask, sinks, scale)


@wrong("masked_attention", "unscaled")
def scales_the_sink(q, k, v, mask, sinks, scale):
    sinks = None if sinks is None else sinks * scale
    return attention.masked_attention(q, k, v, mask, sinks, scale)


@wrong("masked_attention", "no effect")
def ignores_sinks(q, k, v, mask, sinks, scale):
    return attention.masked_attention(q, k, v, mask, None, scale)


@wrong("masked_attention", "before the softmax")
def masked_after_the_softmax(q, k, v, mask, sinks, scale):
    everything = torch.ones_like(mask)
    shares = shares_of(q.float(), k.float(), everything, sinks, scale)
    return mixed(shares * mask[..., None, :, :], v, q)


@wrong("masked_attention", "True is what")
def mask_inverted(q, k, v, mask, sinks, scale):
    return attention.masked_attention(q, k, v, ~mask, sinks, scale)


@wrong("masked_attention", "subtract a maximum")
def bare_exponentials(q, k, v, mask, sinks, scale):
    group = q.shape[-2] // k.shape[-2]
    keys = k.float().repeat_interleave(group, -2).movedim(-3, -1)
    scores = q.float().movedim(-2, -3) @ keys * scale
    terms = scores.exp() * mask[..., None, :, :]
    total = terms.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return mixed(terms / total, v, q)


@wrong("masked_attention", "only the result is rounded")
def in_the_dtype_of_q(q, k, v, mask, sinks, scale):
    shares = shares_of(q, k, mask, sinks, scale)
    return mixed(shares, v.to(q.dtype), q)


@wrong("masked_attention", "the future is seen")
def hidden_at_minus_100(q, k, v, mask, sinks, scale):
    group = q.shape[-2] // k.shape[-2]
    keys = k.float().repeat_interleave(group, -2).movedim(-3, -1)
    scores = q.float().movedim(-2, -3) @ keys * scale
    scores = scores.masked_fill(~mask[..., None, :, :], -100.0)
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    return mixed(scores.softmax(-1)[..., : mask.shape[-1]], v, q)


@wrong("masked_attention", "below -100,000")
def hidden_at_minus_10_000(q, k, v, mask, sinks, scale):
    group = q.shape[-2] // k.shape[-2]
    keys = k.float().repeat_interleave(group, -2).movedim(-3, -1)
    scores = q.float().movedim(-2, -3) @ keys * scale
    scores = scores.masked_fill(~mask[..., None, :, :], -1e4)
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    return mixed(scores.softmax(-1)[..., : mask.shape[-1]], v, q)


@wrong("masked_attention", "has changed")
def scales_in_place(q, k, v, mask, sinks, scale):
    queries = q.float()
    queries *= scale
    return attention.masked_attention(queries, k, v, mask, sinks, 1.0).to(q.dtype)


@wrong("masked_attention", "may be None")
def needs_sinks(q, k, v, mask, sinks, scale):
    if sinks is None and scale != 1.0:
        sinks = torch.zeros(q.shape[-2])
    return attention.masked_attention(q, k, v, mask, sinks, scale)


@wrong("masked_attention", "the scale is an argument")
def scale_of_its_own(q, k, v, mask, sinks, scale):
    if scale != 1.0:
        scale = q.shape[-1] ** -0.5
    return attention.masked_attention(q, k, v, mask, sinks, scale)


@wrong("5.1", "counts the token itself")
def whole_windows(windows, position):
    if None in windows:
        return 0
    return max(0, position - sum(windows))


@wrong("5.1", "every layer reaches")
def one_window(windows, position):
    if None in windows:
        return 0
    return max(0, position - max(windows) + 1)


@wrong("5.1", "there is no position")
def before_the_beginning(windows, position):
    if None in windows:
        return 0
    return position - sum(window - 1 for window in windows)


@wrong("5.1", "wherever it stands")
def a_full_layer_on_top_alone(windows, position):
    if windows[-1] is None:
        return 0
    return max(0, position - sum(window - 1 for window in windows if window))


@wrong("5.2", "the pairs are")
def back_to_neighbors(weight, head_dim):
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)


@wrong("5.2", "stay in their head")
def over_all_heads(weight, head_dim):
    return torch.cat([weight[0::2], weight[1::2]])


@wrong("5.2", "the pairs are")
def left_as_it_is(weight, head_dim):
    return weight.clone()


@wrong("5.3", "infinity in float32")
def by_two_powers(out, lse, sinks):
    return out * (lse.exp() / (lse.exp() + sinks.exp()))[..., None]


@wrong("5.3", "infinity in float32")
def by_a_sum_of_powers(out, lse, sinks):
    scale = lse.exp() + sinks.exp()
    return out * lse.exp()[..., None] / scale[..., None]


@wrong("5.3", "what is left of the output")
def the_share_of_the_sink(out, lse, sinks):
    return out * torch.sigmoid(sinks - lse)[..., None]


@wrong("5.3", "off by")
def forgets_the_power(out, lse, sinks):
    return out * (lse / (lse + sinks))[..., None]


@wrong("5.4", "already")
def of_the_first_pair_that_differs(config, radians):
    truncated = replace(config.rope_scaling, truncate=True)
    right, _ = rope.yarn_frequencies(config)
    other, _ = rope.yarn_frequencies(replace(config, rope_scaling=truncated))
    off = (right - other).abs()
    return math.ceil(radians / off[off > 1e-9][-1].item())


@wrong("5.4", "whole number")
def not_rounded(config, radians):
    truncated = replace(config.rope_scaling, truncate=True)
    right, _ = rope.yarn_frequencies(config)
    other, _ = rope.yarn_frequencies(replace(config, rope_scaling=truncated))
    return radians / (right - other).abs().max().item()


@wrong("5.4", "only")
def sum_of_all_pairs(config, radians):
    truncated = replace(config.rope_scaling, truncate=True)
    right, _ = rope.yarn_frequencies(config)
    other, _ = rope.yarn_frequencies(replace(config, rope_scaling=truncated))
    return math.ceil(radians / (right - other).abs().sum().item())


@wrong("5.4", "head_dim 128")
def always_for_the_20b(config, radians):
    return math.ceil(4530 * radians)


@wrong("5.4", "only")
def rounded_down(config, radians):
    return int(not_rounded(config, radians))


@wrong("visible", "right, but too slow")
def pair_by_pair(queries, keys, window):
    reach = window or math.inf
    places = keys.tolist()
    rows = [[0 <= query - key < reach for key in places] for query in queries.tolist()]
    return torch.tensor(rows)


@wrong("masked_attention", "a loop over queries or heads")
def head_by_head(q, k, v, mask, sinks, scale):
    if q.dim() > 3:
        each = zip(q, k, v, mask, strict=True)
        return torch.stack([head_by_head(*one, sinks, scale) for one in each])
    group, found = q.shape[1] // k.shape[1], []
    for head in range(q.shape[1]):
        kv = slice(head // group, head // group + 1)
        own = slice(head, head + 1)
        sink = None if sinks is None else sinks[own]
        parts = q[:, own], k[:, kv], v[:, kv]
        found.append(attention.masked_attention(*parts, mask, sink, scale))
    return torch.cat(found, 1)


@wrong("masked_attention", "q's dtype")
def in_the_dtype_of_the_values(q, k, v, mask, sinks, scale):
    return attention.masked_attention(q.float(), k, v, mask, sinks, scale).to(v.dtype)


@wrong("masked_attention", "right without leading axes")
def one_sequence_only(q, k, v, mask, sinks, scale):
    groups = q.float().unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("qkgd,skd->kgqs", groups, k.float()) * scale
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(k.shape[1], -1, 1, 1).expand(-1, -1, len(q), 1)
        scores = torch.cat([scores, sink], -1)
    shares = scores.softmax(-1)[..., : len(k)]
    found = torch.einsum("kgqs,skd->qkgd", shares, v.float())
    return found.flatten(1, 2).to(q.dtype)
