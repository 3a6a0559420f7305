"""Operations in plain PyTorch that never wait: a step of them can be recorded.

Their shapes depend on no number, and none of them asks for one. That takes far more
work than the engine's own operations.
"""

from dataclasses import replace

import torch

from simplellm.model.attention import masked_attention
from simplellm.model.feed_forward import route, swiglu
from simplellm.model.ops import PLAIN, gather
from simplellm.model.rope import rotate


def every_expert(x, mlp, num_tokens):
    """`moe.experts` with no choice: each of them sees each token."""
    ids, weights = route(x, mlp.router, mlp.router_bias, mlp.top_k)
    gate_up = torch.einsum("th,eih->tei", x, mlp.gate_up) + mlp.gate_up_bias
    hidden = swiglu(gate_up, mlp.limit, mlp.alpha)  # [T, E, I]
    y = torch.einsum("tei,ehi->teh", hidden, mlp.down) + mlp.down_bias
    chosen = torch.zeros(y.shape[:2], dtype=x.dtype, device=x.device)
    return (chosen.scatter(1, ids, weights)[..., None] * y).sum(1)


def unpack(layer):
    """The layer with experts that are not packed."""
    mlp = layer.mlp
    parts = (mlp.gate_up, mlp.down)
    gate_up, down = (part.dequantize(mlp.gate_up_bias.dtype) for part in parts)
    return replace(layer, mlp=replace(mlp, gate_up=gate_up, down=down))


def embed(tokens, previous, table):
    """Rows of ``table``; a token -1 - i is the i-th of ``previous``."""
    unseen = previous.index_select(0, (-1 - tokens).clamp(min=0))
    return table.index_select(0, torch.where(tokens < 0, unseen, tokens))


def rope_and_cache(qkv, attn, positions, keys, values, slots):
    """Rotated queries; keys and values go to their slots, padding's to row 0's."""
    heads = (qkv + attn.qkv_bias).unflatten(-1, (-1, attn.head_dim))
    kv = keys.shape[2]
    q, k, v = heads.split([heads.shape[1] - 2 * kv, kv, kv], dim=1)
    cos, sin = (angles.index_select(0, positions) for angles in (attn.cos, attn.sin))
    real = slots >= 0
    places = torch.where(real, slots, slots[0]).clamp(min=0)
    for pages, new in ((keys, rotate(k, cos, sin)), (values, v)):
        new = torch.where(real[:, None, None], new, new[:1])
        pages.flatten(0, 1).index_copy_(0, places.long(), new)
    return rotate(q, cos, sin)


def attend(q, keys, values, group, sinks):
    """Attention of each token over all pages of its sequence's table, masked."""
    tokens = torch.arange(len(q), dtype=torch.int32, device=q.device)
    row = tokens  # which sequence a token belongs to
    if group.decodes < len(group.lengths):
        row = torch.searchsorted(group.query_start_loc[1:], tokens, right=True)
        row = row.clamp(max=len(group.lengths) - 1)  # padding's
    tables = group.tables.index_select(0, row)
    lengths, ends = group.lengths.index_select(0, row), group.query_start_loc[1:]
    now = (lengths - ends.index_select(0, row) + tokens)[:, None]  # its position
    places = torch.arange(tables.shape[1] * keys.shape[1], device=q.device)
    at = group.offsets.index_select(0, row)[:, None] + places
    seen = at <= now
    if group.window is not None:
        seen &= at > now - group.window
    k, v = gather(keys, tables), gather(values, tables)  # [T, S, K, D]
    scale = q.shape[2] ** -0.5
    return masked_attention(q[:, None], k, v, seen[:, None], sinks, scale)[:, 0]


CAPTURABLE = replace(
    PLAIN,
    name="capturable",
    embed=embed,
    rope_and_cache=rope_and_cache,
    attend=attend,
    experts=every_expert,
    prepare=unpack,
)
