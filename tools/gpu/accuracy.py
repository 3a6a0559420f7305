"""Compare the fused forward pass with PyTorch: four layers of the 120b's real widths.

python tools/gpu/accuracy.py --json OUT
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from simplellm.checkpoint import Packed, RandomCheckpoint
from simplellm.config import MODELS
from simplellm.graphs import Step
from simplellm.kernels.forward import FUSED, Fused
from simplellm.model import TORCH, Transformer
from simplellm.weights import MXFP4
from simplellm.paged import PagedCache


def build(config, dtype, backend):
    checkpoint = RandomCheckpoint(config, dtype=torch.bfloat16, device="cuda")

    def take(name):
        weight = checkpoint[name]
        if isinstance(weight, Packed):
            return MXFP4(weight.blocks, weight.scales)
        return weight.to(torch.float32 if name.endswith("norm.weight") else dtype)

    return Transformer(config, take, backend)


@torch.inference_mode()
def fused_logits(model, tokens, chunks):
    """Logits of every token, computed in chunks of these sizes."""
    cache = PagedCache(
        model.config, num_pages=400, page_size=64, dtype=model.dtype, device="cuda"
    )
    fused = Fused(model, cache, 8)
    manager, pages, start, out = cache.manager, 64, 0, []
    manager.add(0, tokens)
    for length in chunks:
        assert manager.grow(0, start + length)
        table = manager.table(0)
        flat = torch.zeros(Step.size(length, 1, pages), dtype=torch.int32)
        step = Step.of(flat, length, 1, pages, int(length == 1))
        step.tokens[:] = torch.tensor(tokens[start : start + length])
        positions = torch.arange(start, start + length)
        step.positions[:] = positions
        step.lengths[0], step.queries[0], step.queries[1] = start + length, 0, length
        for group, live, first in zip(
            step.groups, table.groups, table.first, strict=True
        ):
            found = torch.tensor(live)
            group.tables[0, : len(found) - first] = found[first:]
            group.offsets[0] = first * 64
            group.slots[:] = found[positions // 64] * 64 + positions % 64
        device = Step.of(flat.cuda(), length, 1, pages, int(length == 1))
        hidden = fused(device, torch.zeros(8, dtype=torch.int32, device="cuda"))
        logits = torch.empty(length, model.config.vocab_size, device="cuda")
        fused.head(hidden, logits)
        out.append(logits)
        start += length
        manager.commit(0, tokens, start)
    return torch.cat(out)


def compare(ours, exact):
    error = (ours - exact).norm(dim=1) / exact.norm(dim=1)
    same = (ours.argmax(1) == exact.argmax(1)).float().mean()
    q = torch.tensor([0.5, 0.9, 1.0], device=error.device)
    names = "median", "p90", "max"
    return dict(zip(names, error.quantile(q).tolist(), strict=True)) | {
        "same_argmax": same.item()
    }


def measure():
    """Errors of the logits of 1,500 tokens, by how they were computed."""
    config = replace(
        MODELS["gpt-oss-120b"],
        num_hidden_layers=4,
        layer_types=MODELS["gpt-oss-120b"].layer_types[:4],
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(200_000, (1500,), generator=generator).tolist()
    exact = build(config, torch.float32, TORCH).logits(tokens)
    plain = build(config, torch.bfloat16, TORCH).logits(tokens)
    result = {
        "gpu": torch.cuda.get_device_name(),
        "bf16 PyTorch": compare(plain, exact),
    }
    model = build(config, torch.bfloat16, FUSED)
    for name, chunks in (
        ("fused, whole", [1500]),
        ("fused, chunks", [700, 300, 1, 199, 300]),
        ("fused, token by token from 1,300", [1300] + [1] * 200),
    ):
        result[name] = compare(fused_logits(model, tokens, chunks), exact)
    first, second = (fused_logits(model, tokens, [700, 800]) for _ in range(2))
    result["bits equal twice"] = bool(torch.equal(first, second))
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    args = parser.parse_args()
    result = measure()
    print(json.dumps(result, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
