"""Trains the embedded model on one GPU.

    python tools/embedded/train.py --export simplellm/embedded

took 9.4 minutes on an H200 (train.jsonl). evaluate.py counts its right answers.

The expert weights pass through MXFP4 in every forward pass (straight-through
gradients), as gpt-oss's did, so that the exported 4-bit weights are exactly those
that were trained. All experts run on all tokens and the router's weights, zero for
those not chosen, select: for 16 small experts this is one wide matrix product.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from corpus import Writer
from safetensors.torch import save_file
from torch import Tensor, nn

from simplellm.config import ModelConfig
from simplellm.families import read_config
from simplellm.rope import rotations
from simplellm.tokenizer import Tokenizer
from simplellm.weights import quantize

ROW = 512  # tokens in a packed row
IGNORE = -100


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.config, self.window = config, config.window(layer)
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        experts, deep = config.num_local_experts, 2 * config.num_hidden_layers
        self.attn_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Linear(hidden, heads + 2 * kv)
        self.o = nn.Linear(heads, hidden)
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.router = nn.Linear(hidden, experts)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.gate_up_bias = nn.Parameter(torch.zeros(experts, 2 * inner))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner))
        self.down_bias = nn.Parameter(torch.zeros(experts, hidden))
        for weight, scale in (
            (self.qkv.weight, 1.0),
            (self.o.weight, deep**-0.5),
            (self.router.weight, 1.0),
            (self.gate_up, 1.0),
            (self.down, deep**-0.5),
        ):
            nn.init.normal_(weight, std=scale * weight.shape[-1] ** -0.5)
        for layer_bias in (self.qkv.bias, self.o.bias, self.router.bias):
            nn.init.zeros_(layer_bias)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = x + self.attention(norm(x, self.attn_norm), cos, sin, mask)
        out, balance = self.experts(norm(x, self.mlp_norm))
        return x + out, balance

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        config = self.config
        rows, length, _ = x.shape
        dim, groups = config.head_dim, config.num_key_value_heads
        qkv = F.linear(x, self.qkv.weight.bfloat16(), self.qkv.bias.bfloat16())
        q, k, v = (
            part.view(rows, length, -1, dim).transpose(1, 2)
            for part in qkv.split(
                [config.num_attention_heads * dim, groups * dim, groups * dim], -1
            )
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeat = config.num_attention_heads // groups
        k, v = (part.repeat_interleave(repeat, 1) for part in (k, v))
        scores = (q @ k.transpose(2, 3)).float() * dim**-0.5
        if self.window is not None:
            near = torch.arange(length, device=x.device)
            mask = mask & (near[:, None] - near < self.window)
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
        sink = self.sinks.bfloat16().float()[None, :, None, None]
        top = torch.maximum(scores.amax(-1, keepdim=True), sink).detach()
        weights = (scores - top).exp()
        weights = weights / (weights.sum(-1, keepdim=True) + (sink - top).exp())
        out = (weights.bfloat16() @ v).transpose(1, 2).reshape(rows, length, -1)
        return F.linear(out, self.o.weight.bfloat16(), self.o.bias.bfloat16())

    def experts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        count, inner = config.num_local_experts, config.intermediate_size
        scores = F.linear(
            x, self.router.weight.bfloat16(), self.router.bias.bfloat16()
        ).float()
        best, ids = scores.topk(config.num_experts_per_tok, -1)
        chosen = torch.zeros_like(scores).scatter(-1, ids, best.softmax(-1))
        used = torch.zeros_like(scores).scatter(-1, ids, 1.0).mean((0, 1))
        balance = count * (used * scores.softmax(-1).mean((0, 1))).sum()

        up_weight = fake_quantize(self.gate_up).bfloat16().flatten(0, 1)
        both = F.linear(x, up_weight, self.gate_up_bias.bfloat16().flatten())
        both = both.view(*x.shape[:2], count, inner, 2)
        gate = both[..., 0].clamp(max=config.swiglu_limit)
        up = both[..., 1].clamp(-config.swiglu_limit, config.swiglu_limit)
        act = gate * torch.sigmoid(config.swiglu_alpha * gate) * (up + 1)
        act = (act * chosen[..., None]).bfloat16().flatten(2)
        down = fake_quantize(self.down).bfloat16().transpose(0, 1).flatten(1)
        out = F.linear(act, down)
        return out + chosen.bfloat16() @ self.down_bias.bfloat16(), balance


class Model(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        size = (config.vocab_size, config.hidden_size)
        self.embed = nn.Parameter(torch.randn(size))
        self.blocks = nn.ModuleList(
            Block(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.head = nn.Parameter(torch.randn(size) * config.hidden_size**-0.5)
        self.cos: Tensor
        self.sin: Tensor
        cos, sin = rotations(config, torch.device("cpu"))
        self.register_buffer("cos", cos[:ROW], persistent=False)
        self.register_buffer("sin", sin[:ROW], persistent=False)

    def forward(
        self, tokens: Tensor, document: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits [rows, ROW, V] and the router's balance loss."""
        mask = (document[:, :, None] == document[:, None, :]).tril()
        x = F.embedding(tokens, self.embed.bfloat16())
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        total = torch.zeros((), device=x.device)
        for block in self.blocks:
            x, balance = block(x, cos, sin, mask)
            total = total + balance
        return F.linear(norm(x, self.norm), self.head.bfloat16()), total


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return (wide * scale * weight.bfloat16()).to(torch.bfloat16)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, -1).to(x.dtype)


def fake_quantize(weight: Tensor) -> Tensor:
    """MXFP4 rounding of [..., in] in blocks of 32, gradient passed straight on."""
    blocks = weight.detach().unflatten(-1, (-1, 32))
    shared = (exponent(blocks.abs().amax(-1, keepdim=True)) - 2).clamp(min=-120)
    scaled = blocks * power_of_two(-shared)
    step = power_of_two(exponent(scaled.abs()).clamp(min=0) - 1)
    rounded = (torch.round(scaled / step) * step).clamp(-6, 6)
    return weight + ((rounded * power_of_two(shared)).flatten(-2) - weight).detach()


def exponent(x: Tensor) -> Tensor:
    """floor(log2(x)) of positive float32, from the bits."""
    return (x.view(torch.int32) >> 23) - 127


def power_of_two(n: Tensor) -> Tensor:
    """2**n in float32 for -126 <= n <= 127, exactly."""
    return ((n + 127) << 23).view(torch.float32)


def export_weights(model: Model) -> dict[str, Tensor]:
    """The tensors under the names of the gpt-oss checkpoints on Hugging Face."""
    config = model.config
    dim = config.head_dim
    heads, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embed,
        "model.norm.weight": model.norm,
        "lm_head.weight": model.head,
    }
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        at = f"model.layers.{index}."
        tensors[at + "input_layernorm.weight"] = block.attn_norm
        tensors[at + "post_attention_layernorm.weight"] = block.mlp_norm
        for kind in ("weight", "bias"):
            parts = getattr(block.qkv, kind).split([heads, kv, kv])
            for name, part in zip("qkv", parts, strict=True):
                tensors[f"{at}self_attn.{name}_proj.{kind}"] = part
            tensors[f"{at}self_attn.o_proj.{kind}"] = getattr(block.o, kind)
            tensors[f"{at}mlp.router.{kind}"] = getattr(block.router, kind)
        tensors[at + "self_attn.sinks"] = block.sinks
        for name in ("gate_up", "down"):
            weight = getattr(block, name).detach().float().cpu()
            packed = quantize(weight)
            same = torch.equal(packed.dequantize(torch.float32), fake_quantize(weight))
            assert same, f"{at}{name}: training and export round differently"
            tensors[f"{at}mlp.experts.{name}_proj_blocks"] = packed.blocks
            tensors[f"{at}mlp.experts.{name}_proj_scales"] = packed.scales
            bias = getattr(block, name + "_bias")
            tensors[f"{at}mlp.experts.{name}_proj_bias"] = bias
    return {
        name: (value if value.dtype == torch.uint8 else value.bfloat16())
        .detach()
        .cpu()
        .contiguous()
        for name, value in tensors.items()
    }


# Data -----------------------------------------------------------------------


def pack(args: tuple[str, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`rows` rows of whole documents: tokens, targets and document numbers."""
    tokenizer_file, seed, rows = args
    writer = Writer(Tokenizer.from_file(tokenizer_file))
    documents = writer.documents(seed)
    tokens = np.zeros((rows, ROW), np.int16)
    targets = np.full((rows, ROW), IGNORE, np.int16)
    owner = np.full((rows, ROW), -1, np.int16)
    row = fill = number = 0
    while row < rows:
        ids, labels = flatten(next(documents))
        if len(ids) > ROW:
            continue
        if fill + len(ids) > ROW:
            row, fill, number = row + 1, 0, 0
            continue
        tokens[row, fill : fill + len(ids)] = ids
        targets[row, fill : fill + len(ids)] = labels
        owner[row, fill : fill + len(ids)] = number
        fill, number = fill + len(ids), number + 1
    return tokens, targets, owner


def flatten(spans: list[tuple[list[int], bool]]) -> tuple[list[int], list[int]]:
    """A document's ids, and at each place the next id if it is to be learned."""
    ids = [token for span, _ in spans for token in span]
    learned = [flag for span, flag in spans for _ in span]
    pairs = zip(ids[1:], learned[1:], strict=True)
    return ids, [token if flag else IGNORE for token, flag in pairs] + [IGNORE]


def batch(arrays: tuple[np.ndarray, ...], device: str) -> tuple[Tensor, ...]:
    tokens, targets, owner = (
        torch.from_numpy(array).to(device, non_blocking=True).long() for array in arrays
    )
    place = torch.arange(tokens.shape[1], device=device)
    starts = torch.ones_like(owner, dtype=torch.bool)
    starts[:, 1:] = owner[:, 1:] != owner[:, :-1]
    positions = place - torch.cummax(torch.where(starts, place, 0), 1).values
    return tokens, targets, owner, positions


# Training -------------------------------------------------------------------


def rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 300 steps, then a cosine down to 1 % of the peak."""
    if step < 300:
        return peak * (step + 1) / 300
    share = (step - 300) / max(1, steps - 300)
    return peak * (0.01 + 0.99 * (1 + math.cos(math.pi * share)) / 2)


def make_data(tokenizer: str, rows: int, workers: int) -> tuple[np.ndarray, ...]:
    """``rows`` packed rows, made in as many processes as there are ``workers``."""
    share = -(-rows // workers)
    jobs = [(tokenizer, 1_000_000 + worker, share) for worker in range(workers)]
    with ProcessPoolExecutor(workers) as pool:
        parts = list(pool.map(pack, jobs))
    return tuple(np.concatenate(kind) for kind in zip(*parts, strict=True))


def make_optimizer(model: Model, rate: float) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": decay, "weight_decay": 0.05},
        {"params": others},
    ]
    return torch.optim.AdamW(
        groups, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=decay[0].is_cuda
    )


def train(args: argparse.Namespace, write: Callable[..., None]) -> Model:
    """The trained model; ``write`` is told how it goes."""
    config = read_config(args.config)
    model = Model(config).to(args.device)
    optimizer = make_optimizer(model, args.lr)
    data = make_data(args.tokenizer, args.data_rows, args.workers)
    write(event="data", rows=len(data[0]), full=float((data[2] >= 0).mean()))
    run = model if args.no_compile else torch.compile(model)
    order = np.random.default_rng(0).permutation(len(data[0]))
    place, mean = 0, torch.zeros((), device=args.device)
    for step in range(1, args.steps + 1):
        if place + args.rows > len(order):
            place = 0
        rows = np.sort(order[place : place + args.rows])
        place += args.rows
        tokens, targets, owner, positions = batch(
            tuple(array[rows] for array in data), args.device
        )
        for group in optimizer.param_groups:
            group["lr"] = rate(step - 1, args.steps, args.lr)
        logits, balance = run(tokens, owner, positions)
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE
        )
        (loss + 0.002 * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean += loss.detach() / 100
        if step % 100 == 0:
            each = balance.item() / config.num_hidden_layers
            write(step=step, loss=round(mean.item(), 5), balance=round(each, 3))
            mean.zero_()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="simplellm/embedded/config.json")
    parser.add_argument("--tokenizer", default="simplellm/embedded/tokenizer.json")
    parser.add_argument("--steps", type=int, default=7700)
    parser.add_argument("--rows", type=int, default=192, help="rows a step")
    parser.add_argument("--data-rows", type=int, default=600_000)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--log", type=Path, default=Path("train.jsonl"))
    parser.add_argument("--export", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    began = time.time()
    random.seed(0)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")

    def write(**record: object) -> None:
        line = json.dumps({"seconds": round(time.time() - began, 1), **record})
        print(line, flush=True)
        with args.log.open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    model = train(args, write)
    target = args.export / "model.safetensors"
    save_file(export_weights(model), target, metadata={"format": "pt"})
    write(event="exported", bytes=target.stat().st_size)


if __name__ == "__main__":
    main()
