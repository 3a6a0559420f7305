# Exported from chapters/07-kv-cache.md; edit there.
"""Decodes on a CPU: experts unpacked at load, and calls that cost little.

A product with weights is PyTorch's work. All else is so small that a call costs more
than its numbers, and a call of NumPy costs less. Tensors and arrays share their memory.

T tokens, one of each sequence; H query heads, K kv heads, G = H / K heads a group, D
head_dim, S positions, E experts, k experts a token, I intermediate size.
"""

import math
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from simplellm.cache import DecodeStep, Read
from simplellm.config import ModelConfig
from simplellm.model import TORCH, Backend, Block, Cache, Take, Transformer
from simplellm.moe import Experts


def unpack(weights: Experts) -> Experts:
    """The same experts in float32: 7.5 times the bytes, and no decoding in any step."""
    gate_up, down = (
        w if isinstance(w, Tensor) else w.dequantize(torch.float32)
        for w in (weights.gate_up, weights.down)
    )
    return replace(weights, gate_up=by_column(gate_up), down=by_column(down))


def by_column(weight: Tensor) -> Tensor:
    """The same in another order: few rows times this read it from first to last."""
    return weight.mT.contiguous().mT


Bank = list[tuple[Tensor, Tensor]]  # bias [out] and weight [out, in] of each expert


def multiply(x: ndarray, bank: Bank, counts: list[int]) -> ndarray:
    """x [N, in], ``counts[e]`` rows for each expert e in turn -> [N, out]."""
    out = np.empty((len(x), len(bank[0][0])), np.float32)
    used = [(pair, count) for pair, count in zip(bank, counts, strict=True) if count]
    sizes = [count for _, count in used]
    rows, targets = torch.from_numpy(x).split(sizes), torch.from_numpy(out).split(sizes)
    for ((bias, weight), _), row, target in zip(used, rows, targets, strict=True):
        torch.addmm(bias, row, weight.mT, out=target)
    return out


class Layer(NamedTuple):
    """A block's weights as `CPUTransformer` takes them."""

    number: int
    attn_norm: ndarray
    qkv: Tensor  # [(H+2K)*D, hidden], by column
    qkv_bias: Tensor
    sinks: ndarray  # [K, G, 1]
    o: Tensor  # [hidden, H*D], by column
    o_bias: Tensor
    mlp_norm: ndarray
    router: Tensor  # [E, hidden]
    router_bias: Tensor
    gate_up: Bank
    down: Bank

    @classmethod
    def of(cls, block: Block, kv_heads: int) -> "Layer":
        attn, mlp, experts = block.attn, block.mlp, block.mlp.experts
        assert isinstance(experts.gate_up, Tensor) and isinstance(experts.down, Tensor)
        assert attn.qkv.bias is not None and attn.o.bias is not None
        return cls(
            number=attn.layer,
            attn_norm=block.attn_norm.weight.numpy(),
            qkv=by_column(attn.qkv.weight),
            qkv_bias=attn.qkv.bias,
            sinks=attn.sinks.numpy().reshape(kv_heads, -1, 1),
            o=by_column(attn.o.weight),
            o_bias=attn.o.bias,
            mlp_norm=block.mlp_norm.weight.numpy(),
            router=mlp.router_weight,
            router_bias=mlp.router_bias,
            gate_up=list(zip(experts.gate_up_bias, experts.gate_up, strict=True)),
            down=list(zip(experts.down_bias, experts.down, strict=True)),
        )


def linear(x: ndarray, weight: Tensor, bias: Tensor) -> ndarray:
    """x [T, in] times ``weight`` [out, in], transposed, plus bias [out]."""
    return torch.addmm(bias, torch.from_numpy(x), weight.mT).numpy()


def rms_norm(x: ndarray, weight: ndarray, eps: float) -> ndarray:
    squares = np.einsum("th,th->t", x, x)[:, None]
    normed = x * (squares / x.shape[1] + eps) ** -0.5
    normed *= weight
    return normed


def rotate(x: ndarray, cos: ndarray, sin: ndarray) -> None:
    """Turn heads [T, N, D] in place; cos [T, N, D], sin [T, N, D/2]."""
    half = x.shape[2] // 2
    crossed = np.empty_like(x)
    np.multiply(x[..., half:], -sin, out=crossed[..., :half])
    np.multiply(x[..., :half], sin, out=crossed[..., half:])
    x *= cos
    x += crossed


def attend(q: ndarray, read: Read, sinks: ndarray) -> ndarray:
    """Scaled q [n, K, G, D] to what ``read`` found -> [n, K, G, D]; sinks [K, G, 1]."""
    weights = np.matmul(q, read.keys.swapaxes(2, 3))  # [n, K, G, S]
    if read.hidden is not None:
        np.copyto(weights, -np.inf, where=read.hidden)
    top = np.maximum(weights.max(axis=3, keepdims=True), sinks)
    weights -= top
    np.exp(weights, out=weights)
    total = weights.sum(axis=3, keepdims=True)
    total += np.exp(sinks - top)
    mixed = np.matmul(weights, read.values)
    mixed /= total
    return mixed


def swiglu(gate_up: ndarray, limit: float, alpha: float) -> ndarray:
    """gate_up [N, 2I] -> [N, I]; chapter 4's in fewer operations."""
    gate_up = np.minimum(gate_up, np.float32(limit))
    gate, up = gate_up[:, 0::2], np.maximum(gate_up[:, 1::2], np.float32(-limit))
    up += 1
    up *= gate
    divisor = gate * np.float32(-alpha)
    np.exp(divisor, out=divisor)  # may be infinite, which makes the quotient 0
    divisor += 1
    up /= divisor
    return up


def choose(logits: ndarray, top_k: int) -> tuple[ndarray, ndarray]:
    """Chapter 4's `route`: the experts of each token and their shares, [T, k] each."""
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    best = logits[np.arange(len(logits))[:, None], chosen]
    shares = np.exp(best - best[:, :1])
    shares /= shares.sum(axis=1, keepdims=True)
    return chosen, shares


def pair(*shape: int) -> tuple[Tensor, ndarray]:
    """Room for float32 numbers, as a tensor and as an array."""
    array = np.empty(shape, np.float32)
    return torch.from_numpy(array), array


class OneToken:
    """The way of one token through the layers, in buffers that the next one reuses."""

    @torch.inference_mode(False)  # the buffers may be used in that mode and outside
    def __init__(self, config: ModelConfig, concentration: float) -> None:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        dim, half = config.head_dim, config.head_dim // 2
        self.eps, self.top_k = config.rms_norm_eps, config.num_experts_per_tok
        self.limit = np.float32(config.swiglu_limit)
        self.alpha = np.float32(config.swiglu_alpha)

        self.x_t, self.x = pair(config.hidden_size)  # the residual stream
        self.h_t, self.h = pair(config.hidden_size)  # what a sublayer reads of it

        self.qkv_t, qkv = pair((heads + 2 * kv_heads) * dim)
        rows = qkv.reshape(-1, dim)
        self.qk, self.v = rows[:-kv_heads], rows[-kv_heads:]
        self.q, self.k = rows[:heads].reshape(kv_heads, -1, dim), self.qk[heads:]
        self.halves = self.qk[:, :half], self.qk[:, half:]
        self.crossed = np.empty_like(self.qk)
        self.crossed_halves = self.crossed[:, :half], self.crossed[:, half:]
        self.length = np.full((heads + kv_heads, 1), concentration, np.float32)
        self.length[:heads] *= dim**-0.5  # queries are scaled while they are turned
        self.mixed_t, mixed = pair(heads * dim)
        self.mixed = mixed.reshape(kv_heads, -1, dim)

        self.logits_t, self.logits = pair(config.num_local_experts)
        gate_up_t, self.gate_up = pair(self.top_k, 2 * config.intermediate_size)
        self.gate_up_t = gate_up_t.unbind()
        self.gate, self.up = self.gate_up[:, 0::2], self.gate_up[:, 1::2]  # [k, I]
        hidden_t, self.hidden = pair(self.top_k, config.intermediate_size)
        self.hidden_t = hidden_t.unbind()

    def start(self, embedding: ndarray, angles: ndarray) -> None:
        """Begin with a token's embedding [hidden]; ``angles`` [D/2] turn heads."""
        self.x[:] = embedding
        self.cos = np.tile(np.cos(angles), 2) * self.length  # [H+K, D]
        sin = np.sin(angles) * self.length  # [H+K, D/2]
        self.sin, self.minus_sin = sin, -sin

    def norm(self, weight: ndarray) -> float:
        """Make h = x * weight; what is linear in h still needs the factor returned."""
        x = self.x
        np.multiply(x, weight, out=self.h)
        return (float(np.dot(x, x)) / len(x) + self.eps) ** -0.5

    def attend(self, layer: Layer, cache: DecodeStep) -> None:
        """Add the layer's attention to x."""
        scale = self.norm(layer.attn_norm)
        torch.addmv(layer.qkv_bias, layer.qkv, self.h_t, alpha=scale, out=self.qkv_t)
        self.turn()
        (read,) = cache.extend(layer.number, self.k[None], self.v[None])
        keys, values = read.keys[0], read.values[0]  # [K, S, D]
        weights = np.matmul(self.q, keys.transpose(0, 2, 1))  # [K, G, S]
        top = np.maximum(weights.max(axis=2, keepdims=True), layer.sinks)
        weights -= top
        np.exp(weights, out=weights)
        total = weights.sum(axis=2, keepdims=True)
        total += np.exp(layer.sinks - top)
        mixed = np.matmul(weights, values, out=self.mixed)  # [K, G, D]
        mixed /= total
        self.x_t.addmv_(layer.o, self.mixed_t).add_(layer.o_bias)

    def turn(self) -> None:
        """Rotate queries and keys, which are neighbors in qkv, in one go."""
        (first, second), (from_second, from_first) = self.halves, self.crossed_halves
        np.multiply(second, self.minus_sin, out=from_second)
        np.multiply(first, self.sin, out=from_first)
        self.qk *= self.cos
        self.qk += self.crossed

    def feed(self, layer: Layer) -> None:
        """Add to x what the token's experts say."""
        scale = self.norm(layer.mlp_norm)
        h_t, logits_t = self.h_t, self.logits_t
        torch.addmv(layer.router_bias, layer.router, h_t, alpha=scale, out=logits_t)
        logits = self.logits.tolist()
        order = sorted(range(len(logits)), key=logits.__getitem__, reverse=True)
        chosen = order[: self.top_k]
        shares = [math.exp(logits[e] - logits[chosen[0]]) for e in chosen]
        total = sum(shares)

        for e, out in zip(chosen, self.gate_up_t, strict=True):
            bias, weight = layer.gate_up[e]
            torch.addmv(bias, weight, h_t, alpha=scale, out=out)
        self.swiglu()
        for e, share, hidden_t in zip(chosen, shares, self.hidden_t, strict=True):
            bias, weight = layer.down[e]
            share /= total
            self.x_t.addmv_(weight, hidden_t, alpha=share).add_(bias, alpha=share)

    def swiglu(self) -> None:
        """Make hidden of gate and up."""
        np.minimum(self.gate_up, self.limit, out=self.gate_up)
        up = np.maximum(self.up, -self.limit)
        up += 1
        divisor = self.gate * -self.alpha
        np.exp(divisor, out=divisor)  # may be infinite, which makes hidden 0
        divisor += 1
        np.divide(self.gate, divisor, out=self.hidden)
        self.hidden *= up


class CPUTransformer(Transformer):
    """A model that computes steps of decodes in NumPy, and all else as ever.

    Raises ValueError unless it is in float32 on a CPU.
    """

    def __init__(self, config: ModelConfig, take: Take, backend: Backend) -> None:
        super().__init__(config, take, backend)
        if self.dtype != torch.float32 or self.device.type != "cpu":
            raise ValueError(
                f"the model is {self.dtype} on {self.device}; expected torch.float32 "
                "on a CPU, or another backend"
            )
        self.embeddings = self.embed_tokens.numpy()
        self.frequencies = self.rope.frequencies.numpy()  # [D/2]
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        lengths = np.full((heads + kv_heads, 1), self.rope.concentration, np.float32)
        lengths[:heads] *= config.head_dim**-0.5  # queries are scaled as they turn
        self.lengths = lengths
        self.rows = [Layer.of(cast(Block, block), kv_heads) for block in self.layers]
        self.idle: list[OneToken] = []  # one for each thread that came at a time

    def forward(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        if not isinstance(cache, DecodeStep) or not cache.decodes:
            return super().forward(tokens, positions, cache)
        if len(tokens) == 1:
            return self.forward_one(int(tokens), int(positions), cache)
        eps = self.config.rms_norm_eps
        x = self.embeddings[tokens.numpy()]  # [T, hidden]
        angles = positions.numpy().astype(np.float32)[:, None] * self.frequencies
        cos = np.tile(np.cos(angles), 2)[:, None] * self.lengths  # [T, H+K, D]
        sin = np.sin(angles)[:, None] * self.lengths  # [T, H+K, D/2]
        with np.errstate(over="ignore", invalid="ignore"):
            for layer in self.rows:
                h = rms_norm(x, layer.attn_norm, eps)
                x += self.attention(layer, h, cos, sin, cache)
                h = rms_norm(x, layer.mlp_norm, eps)
                x += self.mixture(layer, h)
        return torch.from_numpy(rms_norm(x, self.norm.weight.numpy(), eps))

    def forward_one(self, token: int, position: int, cache: DecodeStep) -> Tensor:
        try:
            one = self.idle.pop()
        except IndexError:
            one = OneToken(self.config, self.rope.concentration)
        with np.errstate(over="ignore", invalid="ignore"):
            angles = self.frequencies * np.float32(position)
            one.start(self.embeddings[token], angles)
            for layer in self.rows:
                one.attend(layer, cache)
                one.feed(layer)
            hidden = one.h_t * one.norm(self.norm.weight.numpy())
        self.idle.append(one)
        return hidden[None]

    def attention(
        self, layer: Layer, h: ndarray, cos: ndarray, sin: ndarray, cache: DecodeStep
    ) -> ndarray:
        config = self.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv = linear(h, layer.qkv, layer.qkv_bias)
        qkv = qkv.reshape(len(h), -1, config.head_dim)
        rotate(qkv[:, :-kv_heads], cos, sin)
        q = qkv[:, :heads].reshape(len(h), kv_heads, -1, config.head_dim)
        k, v = qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
        mixed = np.empty_like(q)
        for read in cache.extend(layer.number, k, v):
            mixed[read.rows] = attend(q[read.rows], read, layer.sinks)
        return linear(mixed.reshape(len(h), -1), layer.o, layer.o_bias)

    def mixture(self, layer: Layer, h: ndarray) -> ndarray:
        config = self.config
        logits = linear(h, layer.router, layer.router_bias)
        chosen, shares = choose(logits, config.num_experts_per_tok)
        order = chosen.ravel().argsort(kind="stable")  # [T*k], by expert
        counts = np.bincount(chosen.ravel(), minlength=logits.shape[1]).tolist()
        gate_up = multiply(h[order // chosen.shape[1]], layer.gate_up, counts)
        hidden = swiglu(gate_up, config.swiglu_limit, config.swiglu_alpha)
        out = np.empty((len(order), h.shape[1]), np.float32)
        out[order] = multiply(hidden, layer.down, counts)
        return np.matmul(shares[:, None], out.reshape(*chosen.shape, -1))[:, 0]


CPU = replace(TORCH, prepare=unpack, model=CPUTransformer)
UNPACKED_BYTES = 2**30  # of experts in float32, up to which `choose_backend` unpacks


def choose_backend(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Backend:
    """`CPU` for a small model in float32 on a CPU, otherwise `TORCH`.

    A model is small if its experts take at most `UNPACKED_BYTES` once unpacked.
    """
    experts = config.num_hidden_layers * config.num_local_experts
    unpacked = 4 * experts * 3 * config.intermediate_size * config.hidden_size
    small = unpacked <= UNPACKED_BYTES
    return CPU if small and dtype == torch.float32 and device.type == "cpu" else TORCH
