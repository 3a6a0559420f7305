"""The kernels' logits beside PyTorch's: four layers in a model's real widths."""

from dataclasses import replace
from typing import Any

import torch
from cases import random_model
from torch import Tensor

from simplellm.model.kv_pool import KVPool
from simplellm.model.model import Model
from simplellm.model.one_sequence import PAGE, one_sequence

LAYERS, TOKENS = 4, 1500


@torch.inference_mode()
def chunked(model: Model, tokens: Tensor, chunks: list[int]) -> Tensor:
    """Logits [T, V] of a sequence that is computed in chunks of these sizes."""
    windows, device = model.config.windows, model.device
    pages = -(-len(tokens) // PAGE)
    pool = KVPool(model.config, pages * len(windows), PAGE, model.dtype, device)
    logits = torch.empty(len(tokens), model.config.vocab_size, device=device)
    previous = torch.zeros(1, dtype=torch.int32, device=device)
    start = 0
    for length in chunks:
        stop = start + length
        batch = one_sequence(tokens[start:stop], start, pages, windows, device)
        if length == 1:  # as the engine decodes
            groups = tuple(replace(group, decodes=1) for group in batch.groups)
            batch = replace(batch, groups=groups)
        model.head(model.forward(batch, pool, previous), logits[start:stop])
        start = stop
    return logits


def compare(found: Tensor, exact: Tensor) -> dict[str, float]:
    """How far rows of logits are apart, over the exact ones' size."""
    error = (found - exact).norm(dim=1) / exact.norm(dim=1)
    same = (found.argmax(1) == exact.argmax(1)).float().mean()
    shares = torch.tensor([0.5, 0.9, 1.0], device=error.device)
    names = "median", "p90", "max"
    quantiles = dict(zip(names, error.quantile(shares).tolist(), strict=True))
    return quantiles | {"same_argmax": same.item()}


def measure(name: str) -> dict[str, Any]:
    """Errors of the logits of 1,500 tokens, by how they were computed."""
    generator = torch.Generator().manual_seed(0)
    wide = random_model(name, LAYERS, dtype=torch.float32, kernels=False)
    tokens = torch.randint(wide.config.vocab_size, (TOKENS,), generator=generator)
    exact = wide.logits(tokens)
    plain = random_model(name, LAYERS, kernels=False).logits(tokens)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "bf16 PyTorch": compare(plain, exact),
    }
    model = random_model(name, LAYERS)
    for way, chunks in (
        ("fused, whole", [1500]),
        ("fused, chunks", [700, 300, 1, 199, 300]),
        ("fused, token by token from 1,300", [1300] + [1] * 200),
    ):
        result[way] = compare(chunked(model, tokens, chunks), exact)
    first, second = (chunked(model, tokens, [700, 800]) for _ in range(2))
    result["bits equal twice"] = bool(torch.equal(first, second))
    return result
