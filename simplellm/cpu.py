"""Decodes on a CPU: experts unpacked at load, and calls that cost little.

Most of a step is so small that a call costs more than its numbers, and a call of NumPy
costs less. Large products are PyTorch's work. Tensors and arrays share their memory.

T tokens, one of each sequence; H query heads, K kv heads, G = H / K heads a group, D
head_dim, S positions, E experts, k experts a token, I intermediate size.
"""

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
    """The same experts in float32: 7.5 times the bytes, and no step unpacks any."""
    gate_up, down = (
        w if isinstance(w, Tensor) else w.dequantize(torch.float32)
        for w in (weights.gate_up, weights.down)
    )
    return replace(weights, gate_up=by_column(gate_up), down=by_column(down))


def by_column(weight: Tensor) -> Tensor:
    """The same numbers, stored in the order in which a product of few rows reads."""
    return weight.mT.contiguous().mT


class Dense(NamedTuple):
    """A matrix and what is added to its product."""

    weight: ndarray  # [in, out]
    bias: ndarray  # [out]

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> "Dense":
        """Of ``weight`` [out, in], which is copied unless it is by column."""
        return cls(weight.mT.contiguous().numpy(), bias.numpy())


class Bank(NamedTuple):
    """The matrices of a layer's experts, and what is added to their products."""

    weights: list[ndarray]  # [in, out] of each expert
    biases: ndarray  # [E, out]

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> "Bank":
        """Of ``weight`` [E, out, in], which is copied unless it is by column."""
        return cls(list(weight.mT.contiguous().numpy()), bias.numpy())


SMALL = 10**6  # multiplications up to which OpenBLAS copies nothing


def product(x: ndarray, weight: ndarray, out: ndarray) -> None:
    """Write x [N, in] times ``weight`` [in, out] to out [N, out]."""
    if len(x) * weight.size <= SMALL:
        np.dot(x, weight, out=out)
    else:
        to_tensor = torch.from_numpy
        torch.mm(to_tensor(x), to_tensor(weight), out=to_tensor(out))


def linear(x: ndarray, dense: Dense) -> ndarray:
    """x [N, in] -> [N, out]."""
    out = np.empty((len(x), len(dense.bias)), np.float32)
    product(x, dense.weight, out)
    out += dense.bias
    return out


def multiply(x: ndarray, bank: Bank, counts: list[int]) -> ndarray:
    """x [N, in], ``counts[e]`` rows for each expert e in turn -> [N, out]."""
    out = np.empty((len(x), bank.biases.shape[1]), np.float32)
    stop = 0
    for weight, count in zip(bank.weights, counts, strict=True):
        if count:
            start, stop = stop, stop + count
            product(x[start:stop], weight, out[start:stop])
    out += bank.biases.repeat(counts, axis=0)
    return out


class Layer(NamedTuple):
    """A block's weights as `CPUTransformer` takes them."""

    number: int
    attn_norm: ndarray
    qkv: Dense
    sinks: ndarray  # [K, G, 1]
    o: Dense
    mlp_norm: ndarray
    router: Dense
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
            qkv=Dense.of(attn.qkv.weight, attn.qkv.bias),
            sinks=attn.sinks.numpy().reshape(kv_heads, -1, 1),
            o=Dense.of(attn.o.weight, attn.o.bias),
            mlp_norm=block.mlp_norm.weight.numpy(),
            router=Dense.of(mlp.router_weight, mlp.router_bias),
            gate_up=Bank.of(experts.gate_up, experts.gate_up_bias),
            down=Bank.of(experts.down, experts.down_bias),
        )


def rms_norm(x: ndarray, weight: ndarray, eps: float) -> ndarray:
    squares = np.add.reduce(x * x, axis=1, keepdims=True)
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
    """gate_up [N, 2I] -> [N, I]; `simplellm.moe.swiglu` in fewer operations."""
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
    """`simplellm.moe.route`: each token's experts and their shares, [T, k] both."""
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    best = logits[np.arange(len(logits))[:, None], chosen]
    shares = np.exp(best - best[:, :1])
    shares /= shares.sum(axis=1, keepdims=True)
    return chosen, shares


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
        scales = np.full((heads + kv_heads, 1), self.rope.concentration, np.float32)
        scales[:heads] *= config.head_dim**-0.5  # queries are scaled as they turn
        self.scales = scales
        self.weights = [Layer.of(cast(Block, block), kv_heads) for block in self.layers]
        self.last_norm = self.norm.weight.numpy()

    def forward(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        if not isinstance(cache, DecodeStep) or not cache.decodes:
            return super().forward(tokens, positions, cache)
        eps = self.config.rms_norm_eps
        x = self.embeddings[tokens.numpy()]  # [T, hidden]
        angles = positions.numpy().astype(np.float32)[:, None] * self.frequencies
        cos = np.concatenate([np.cos(angles)] * 2, axis=1)  # [T, D]
        cos = cos[:, None] * self.scales  # [T, H+K, D]
        sin = np.sin(angles)[:, None] * self.scales  # [T, H+K, D/2]
        with np.errstate(over="ignore", invalid="ignore"):
            for layer in self.weights:
                h = rms_norm(x, layer.attn_norm, eps)
                x += self.attention(layer, h, cos, sin, cache)
                h = rms_norm(x, layer.mlp_norm, eps)
                x += self.mixture(layer, h)
        return torch.from_numpy(rms_norm(x, self.last_norm, eps))

    def attention(
        self, layer: Layer, h: ndarray, cos: ndarray, sin: ndarray, cache: DecodeStep
    ) -> ndarray:
        config = self.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv = linear(h, layer.qkv)
        qkv = qkv.reshape(len(h), -1, config.head_dim)
        rotate(qkv[:, :-kv_heads], cos, sin)
        q = qkv[:, :heads].reshape(len(h), kv_heads, -1, config.head_dim)
        k, v = qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
        mixed = np.empty_like(q)
        for read in cache.extend(layer.number, k, v):
            mixed[read.rows] = attend(q[read.rows], read, layer.sinks)
        return linear(mixed.reshape(len(h), -1), layer.o)

    def mixture(self, layer: Layer, h: ndarray) -> ndarray:
        config = self.config
        logits = linear(h, layer.router)
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
