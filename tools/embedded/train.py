"""Trains the embedded model on one GPU.

    python tools/embedded/train.py --export simplellm/embedded

The checkpoint that is there took 9.4 minutes on an H200 (train.jsonl), with a network
that was written out here (commit 39941b3); now it is transformers'. evaluate.py counts
its right answers.

The expert weights pass through MXFP4 in every forward pass (straight-through
gradients), as gpt-oss's did, so that the exported 4-bit weights are exactly those
that were trained. All experts run on all tokens and the router's weights, zero for
those not chosen, select: for 16 small experts this is one wide matrix product.
"""

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
from transformers import AutoConfig, GptOssForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

from simplellm.checkpoint.mxfp4 import quantize
from simplellm.text.tokenizer import Tokenizer

ROW = 512  # tokens in a packed row
IGNORE = -100


class Experts(gpt_oss.GptOssExperts):
    """All of them on every token [T, H], each weight rounded as it is stored."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = (  # [E, out, in]
            fake_quantize(weight.transpose(1, 2))
            for weight in (self.gate_up_proj, self.down_proj)
        )
        shares = x.new_zeros(len(x), self.num_experts)
        shares = shares.scatter(-1, chosen, weights.to(shares.dtype))
        both = F.linear(x, gate_up.flatten(0, 1), self.gate_up_proj_bias.flatten())
        inner = self._apply_gate(both.unflatten(-1, (self.num_experts, -1)))
        inner = (inner * shares[..., None]).flatten(1)
        out = F.linear(inner, down.transpose(0, 1).flatten(1))
        return out + shares @ self.down_proj_bias


def fake_quantize(weight: Tensor) -> Tensor:
    """MXFP4 rounding of [..., in] in blocks of 32, gradient passed straight on."""
    rounded = quantize(weight.detach()).dequantize(torch.float32)
    return weight + (rounded - weight).detach()


def make_model(file: str) -> Any:
    """A gpt-oss of the sizes in ``file``, with numbers to begin from."""
    config = AutoConfig.from_pretrained(file, attn_implementation="eager")
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp.experts = Experts(config)
    for name, weight in model.named_parameters():
        fan_in = weight.shape[1 if weight.dim() == 3 else -1]
        std = 1.0 if "embed" in name else fan_in**-0.5
        if "o_proj" in name or "down_proj" in name:  # added to all before them
            std *= (2 * config.num_hidden_layers) ** -0.5
        if name.endswith(("bias", "sinks")):
            nn.init.zeros_(weight)
        elif weight.dim() == 1:
            nn.init.ones_(weight)
        else:
            nn.init.normal_(weight, std=std)
    return model


def predict(
    model: Any, tokens: Tensor, document: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits [rows, ROW, V] and the router's balance loss, of all layers."""
    config, place = model.config, torch.arange(tokens.shape[1], device=tokens.device)
    seen = (document[:, :, None] == document[:, None, :]).tril()
    near = place[:, None] - place < config.sliding_window
    masks = {
        name: torch.where(mask, 0.0, -math.inf)[:, None]
        for name, mask in (
            ("full_attention", seen),
            ("sliding_attention", seen & near),
        )
    }
    with torch.autocast(tokens.device.type, torch.bfloat16):
        found = model.model(
            tokens,
            attention_mask=masks,
            position_ids=positions,
            use_cache=False,
            output_router_logits=True,
        )
        logits = model.lm_head(found.last_hidden_state)
    sizes = config.num_local_experts, config.num_experts_per_tok
    balance = (
        gpt_oss.load_balancing_loss_func((layer,), *sizes)
        for layer in found.router_logits
    )
    return logits, sum(balance, torch.zeros((), device=tokens.device))


def export_weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors as in the gpt-oss checkpoints on Hugging Face."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed = quantize(value.float().cpu().transpose(1, 2).contiguous())
            tensors |= {f"{name}_blocks": packed.blocks}
            tensors |= {f"{name}_scales": packed.scales}
        else:
            tensors[name] = value.bfloat16().cpu().contiguous()
    return tensors


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


def make_optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
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


def train(args: argparse.Namespace, write: Callable[..., None]) -> Any:
    """The trained model; ``write`` is told how it goes."""
    model = make_model(args.config).to(args.device)
    optimizer = make_optimizer(model, args.lr)
    data = make_data(args.tokenizer, args.data_rows, args.workers)
    write(event="data", rows=len(data[0]), full=float((data[2] >= 0).mean()))
    run = predict if args.no_compile else torch.compile(predict)
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
        logits, balance = run(model, tokens, owner, positions)
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE
        )
        (loss + 0.002 * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean += loss.detach() / 100
        if step % 100 == 0:
            each = balance.item() / model.config.num_hidden_layers
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
