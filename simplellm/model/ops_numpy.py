"""The operations for small models on a CPU: NumPy for few tokens, PyTorch for more.

Most of a decode is so small that a call costs more than its numbers, and a call of
NumPy costs less. Experts in MXFP4 are unpacked to float32 at load. Tensors and arrays
share their memory; all is float32 but weights that PyTorch multiplies. The functions do
what those of `ops` do, and promise as little about the order of sums.

T tokens, H query heads, K kv heads, G = H / K heads a group, D head_dim, S positions, E
experts, k experts a token, I intermediate size.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from simplellm.base.config import ModelConfig
from simplellm.checkpoint.cpu_weights import CPUWeight, PackedExperts
from simplellm.checkpoint.mxfp4 import MXFP4, Weight
from simplellm.checkpoint.names import is_expert_weight, tensor_shapes
from simplellm.checkpoint.scaled import Scaled
from simplellm.model import family_rules, ops
from simplellm.model.batch import KVGroup
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
from simplellm.model.ops import Ops
from simplellm.model.ops_cpu import prompt_attention

FEW = 64  # tokens up to which NumPy computes
# Of the sines by which the second half of a head, and the first, adds to the other one.
SIGNS = np.array([[-1], [1]], np.float32)
SMALL = 10**6  # multiplications up to which OpenBLAS copies nothing
UNPACKED_BYTES = 2**30  # of experts in float32, up to which a model is small


def is_small(config: ModelConfig) -> bool:
    """Whether what is packed of a model, its experts, may be unpacked to float32."""
    unpacked, forms = 0, config.formats
    for ours, shape in tensor_shapes(config).items():
        form = forms.get(ours)
        if form.is_mxfp4 if form else is_expert_weight(ours):
            unpacked += math.prod(shape)
    return 4 * unpacked <= UNPACKED_BYTES


def by_column(weight: Weight | PackedExperts) -> Any:
    """A weight's numbers in the order in which a product of few rows reads them."""
    if isinstance(weight, Scaled | CPUWeight):  # which PyTorch multiplies
        return weight
    if isinstance(weight, MXFP4):
        weight = weight.dequantize(torch.float32)
    return weight.mT.contiguous().mT


def prepare(layer: Layer) -> Layer:
    """The layer with unpacked weights that are stored by column."""
    attn = replace(layer.attn, qkv=by_column(layer.attn.qkv), o=by_column(layer.attn.o))
    mlp = layer.mlp
    mlp = replace(mlp, gate_up=by_column(mlp.gate_up), down=by_column(mlp.down))
    if isinstance(mlp, Experts):
        mlp = replace(mlp, router=by_column(mlp.router))
    return replace(layer, attn=attn, mlp=mlp)


def product(x: ndarray, weight: ndarray, out: ndarray) -> None:
    """Write x [T, in] times ``weight`` [in, out] to out [T, out]."""
    if len(x) * weight.size <= SMALL:
        np.dot(x, weight, out=out)
    else:
        to_tensor = torch.from_numpy
        torch.mm(to_tensor(x), to_tensor(weight), out=to_tensor(out))


def matmul(x: ndarray, weight: Tensor, bias: Tensor | None) -> ndarray:
    """x [T, in] times ``weight`` [out, in], transposed, plus ``bias`` -> [T, out]."""
    out = np.empty((len(x), weight.shape[0]), np.float32)
    product(x, weight.mT.numpy(), out)
    if bias is not None:
        out += bias.numpy()
    return out


def embed(tokens: Tensor, previous: Tensor, table: Tensor) -> Tensor:
    ids = tokens.numpy()
    if table.dtype != torch.float32 or len(ids) > FEW or ids.min() < 0:
        return ops.embed(tokens, previous, table)
    return torch.from_numpy(table.numpy()[ids])


def rms_norm_few(x: ndarray, weight: Tensor, eps: float) -> ndarray:
    """x [..., N] divided by its root mean square, times weight [N]."""
    squares = np.add.reduce(x * x, axis=-1, keepdims=True)
    normed: ndarray = x * (squares / x.shape[-1] + eps) ** -0.5
    normed *= weight.numpy()
    return normed


def add_norm(
    residual: Tensor, update: Tensor | None, norm: Norm, eps: float
) -> tuple[Tensor, Tensor]:
    if residual.shape[0] > FEW or isinstance(norm, LayerNorm):
        return ops.add_norm(residual, update, norm, eps)
    x = residual.numpy()
    weight = norm.weight if isinstance(norm, SandwichNorm) else norm
    if update is not None:
        change = update.numpy()
        if isinstance(norm, SandwichNorm):
            change = rms_norm_few(change, norm.update, eps)
        x += change
    return residual, torch.from_numpy(rms_norm_few(x, weight, eps))


def project(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    if x.shape[0] > FEW or not isinstance(weight, Tensor):
        return linear(x, weight, bias)
    return torch.from_numpy(matmul(x.numpy(), weight, bias))


def rotate_few(x: ndarray, cos: ndarray, sin: ndarray) -> None:
    """Turn heads [T, N, D] in place; cos and sin [T, D/2]."""
    halves = x.reshape(*x.shape[:2], 2, -1)  # shares its memory, as D is contiguous
    turned = halves[:, :, ::-1] * (sin[:, None, None] * SIGNS)
    halves *= cos[:, None, None]
    halves += turned


def rope_and_cache(
    qkv: Tensor,
    attn: Attention,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    if qkv.shape[0] > FEW:
        return ops.rope_and_cache(qkv, attn, positions, keys, values, slots)
    kv_heads, dim = keys.shape[2:]
    x = qkv.numpy()
    if attn.qkv_bias is not None:
        x += attn.qkv_bias.numpy()
    x = x.reshape(len(x), -1, dim)  # [T, H + 2K, D]
    if attn.q_norm is not None and attn.k_norm is not None:
        q, k = x[:, : -2 * kv_heads], x[:, -2 * kv_heads : -kv_heads]
        q[:] = rms_norm_few(q, attn.q_norm, attn.eps)
        k[:] = rms_norm_few(k, attn.k_norm, attn.eps)
    where = positions.numpy()
    rotate_few(x[:, :-kv_heads], attn.cos.numpy()[where], attn.sin.numpy()[where])
    indices, rows = slots.numpy(), x
    if indices.min() < 0:  # padding
        real = indices >= 0
        indices, rows = indices[real], x[real]
    k, v = rows[:, -2 * kv_heads : -kv_heads], rows[:, -kv_heads:]
    for pages, new in ((keys, k), (values, v)):
        pages.numpy().reshape(-1, kv_heads, dim)[indices] = new
    return torch.from_numpy(x)[:, : -2 * kv_heads]


def attend(
    q: Tensor, keys: Tensor, values: Tensor, group: KVGroup, sinks: Tensor | None
) -> Tensor:
    heads, dim = q.shape[1:]
    kv_heads = keys.shape[2]
    if group.queries > 1:
        return ops.attend(q, keys, values, group, sinks)
    count = q.shape[0]
    if group.decodes < count:  # one call for all tokens, where chunks take one each
        group = group.by_token
    scaled = q.numpy()[: group.decodes] * np.float32(dim**-0.5)
    scaled = scaled.reshape(-1, kv_heads, heads // kv_heads, dim)  # [n, K, G, D]
    output = np.zeros((count, *scaled.shape[1:]), np.float32)
    sink = None if sinks is None else sinks.numpy().reshape(kv_heads, -1, 1)
    pages = [side.numpy().reshape(-1, kv_heads * dim) for side in (keys, values)]
    for rows, slots, masked in group.gather_plans:
        shape = *slots.shape, kv_heads, dim  # [n, S, K, D]
        k, v = (side.take(slots, 0).reshape(shape) for side in pages)
        weights = np.matmul(scaled[rows], k.transpose(0, 2, 3, 1))  # [n, K, G, S]
        if masked is not None:
            np.copyto(weights, -np.inf, where=masked[:, None, None])
        top = weights.max(axis=3, keepdims=True)
        if sink is not None:
            np.maximum(top, sink, out=top)
        weights -= top
        np.exp(weights, out=weights)
        total = weights.sum(axis=3, keepdims=True)
        if sink is not None:
            total += np.exp(sink - top)
        mixed = np.matmul(weights, v.swapaxes(1, 2))
        mixed /= total
        output[rows] = mixed
    out = torch.from_numpy(output).view(count, heads, dim)
    if group.decodes < count:
        ops.attend_chunks(q, keys, values, group, sinks, out, prompt_attention)
    return out


def exp_plus_one(x: ndarray) -> ndarray:
    """What sigmoid(-x) divides 1 by, in place."""
    with np.errstate(over="ignore"):  # infinity makes the quotient 0, as it should be
        np.exp(x, out=x)
    x += 1
    return x


def swiglu_few(gate_up: ndarray, limit: float, alpha: float) -> ndarray:
    """gate_up [N, 2I] -> [N, I]; `feed_forward.swiglu` in fewer operations."""
    gate_up = np.minimum(gate_up, np.float32(limit))
    gate, up = gate_up[:, 0::2], np.maximum(gate_up[:, 1::2], np.float32(-limit))
    up += 1
    up *= gate
    up /= exp_plus_one(gate * np.float32(-alpha))
    return up


def each(x: ndarray, weight: Tensor, bias: Tensor | None, counts: list[int]) -> ndarray:
    """x [N, in], ``counts[e]`` rows for each expert e in turn -> [N, out]."""
    out = np.empty((len(x), weight.shape[1]), np.float32)
    weights = weight.mT.numpy()  # [E, in, out]
    stop = 0
    for expert, count in enumerate(counts):
        if count:
            start, stop = stop, stop + count
            product(x[start:stop], weights[expert], out[start:stop])
    if bias is not None:
        out += bias.numpy().repeat(counts, axis=0)
    return out


def experts(x: Tensor, mlp: Experts, num_tokens: Tensor) -> Tensor:
    if not isinstance(mlp.gate_up, Tensor) or not isinstance(mlp.down, Tensor):
        return ops.experts(x, mlp, num_tokens)
    some = len(mlp.held) < len(mlp.router)
    if len(x) > FEW or mlp.activation != "clamped_swiglu" or some:
        return ops.experts(x, mlp, num_tokens)
    rows, top_k = x.numpy(), mlp.top_k
    logits = matmul(rows, mlp.router, mlp.router_bias)
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]  # [T, k]
    best = logits[np.arange(len(rows))[:, None], chosen]
    weights = np.exp(best - best[:, :1])
    weights /= weights.sum(axis=1, keepdims=True)
    order = chosen.ravel().argsort(kind="stable")  # [T*k], by expert
    counts = np.bincount(chosen.ravel(), minlength=logits.shape[1]).tolist()
    gate_up = each(rows[order // top_k], mlp.gate_up, mlp.gate_up_bias, counts)
    hidden = swiglu_few(gate_up, mlp.limit, mlp.alpha)
    out = np.empty((len(order), rows.shape[1]), np.float32)
    out[order] = each(hidden, mlp.down, mlp.down_bias, counts)
    mixed = np.matmul(weights[:, None], out.reshape(*chosen.shape, -1))[:, 0]
    return torch.from_numpy(mixed)


def dense(x: Tensor, mlp: Dense) -> Tensor:
    if x.shape[0] > FEW or mlp.activation != "swiglu":
        return family_rules.dense(x, mlp)
    gate_up = project(x, mlp.gate_up, mlp.gate_up_bias).numpy()
    size = gate_up.shape[1] // 2
    gate, up = gate_up[:, :size], gate_up[:, size:]
    hidden = exp_plus_one(-gate)
    np.divide(gate, hidden, out=hidden)
    hidden *= up
    return project(torch.from_numpy(hidden), mlp.down, mlp.down_bias)


def head(hidden: Tensor, weight: Weight, logits: Tensor) -> Tensor:
    if hidden.shape[0] > FEW or not isinstance(weight, Tensor):
        return ops.head(hidden, weight, logits)
    scores = logits.numpy()
    product(hidden.numpy(), weight.mT.numpy(), scores)
    return torch.from_numpy(scores.argmax(1).astype(np.int32))


NUMPY = Ops(
    "NumPy",
    embed=embed,
    add_norm=add_norm,
    project=project,
    rope_and_cache=rope_and_cache,
    attend=attend,
    experts=experts,
    dense=dense,
    head=head,
    prepare=prepare,
)
