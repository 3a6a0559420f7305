"""Every launch of a forward pass hands a kernel what it asks for, without a GPU.

Nothing is computed: what starts a kernel is replaced, and its parameters are held
against what it was given.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from simplellm.checkpoint import RandomCheckpoint
from simplellm.config import GPT_OSS_20B, EngineConfig
from simplellm.gpt_oss import build
from simplellm.graphs import MIXED_SIZES, Room
from simplellm.kernels import decode
from simplellm.kernels.fused import fused
from simplellm.kernels.launch import Launcher
from simplellm.pages import KVPool, PageManager
from simplellm.runner import Runner
from simplellm.warmup import DRAWS, rehearse, rehearse_draw, rehearse_experts

CPU = torch.device("cpu")
CONFIG = replace(
    GPT_OSS_20B,
    num_hidden_layers=2,
    layer_types=GPT_OSS_20B.layer_types[:2],
    num_local_experts=8,
    vocab_size=512,
    max_position_embeddings=4096,
    eos_token_ids=(),
)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def start(launcher: Launcher, grid: tuple[int, int, int], *args: Any) -> Any:
        kernel, options = launcher.kernel, launcher.options
        ordinary = [p.name for p in kernel.params if not p.is_constexpr]
        constants = {p.name for p in kernel.params if p.is_constexpr} - {"PDL"}
        name = kernel.fn.__name__
        assert len(args) == len(ordinary), f"{name}: {len(args)} for {ordinary}"
        assert constants <= options.keys(), f"{name}: {constants - options.keys()}"
        assert len(grid) == 3 and min(grid) > 0, name
        names.append(name)
        return SimpleNamespace(function=0)

    monkeypatch.setattr(Launcher, "__call__", start)
    monkeypatch.setattr(decode, "set_carveout", lambda *arguments: None)
    return names


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_kernels_get_what_they_ask_for(
    launched: list[str], batch_invariant: bool
) -> None:
    """Decodes and prompts of the sizes that choose among kernels."""
    ops = fused(CONFIG, max_num_seqs=64, device=CPU, batch_invariant=batch_invariant)
    source = RandomCheckpoint(CONFIG, dtype=torch.bfloat16)
    model = build(CONFIG, source.__getitem__, ops)
    pool = KVPool(CONFIG, 4, 64, torch.bfloat16, CPU)
    manager, config = PageManager(4, 64, window=128), EngineConfig().resolved("cpu")
    runner = Runner(model, pool, manager, config, 4096)
    for tokens in (1, 2, 8, 64):
        rehearse(runner, Room(tokens, tokens), ops)
    for tokens in (2, 64, 300, 2048):
        rehearse(runner, Room(tokens, 0, 1), ops)
    for tokens in MIXED_SIZES:
        rehearse(runner, Room.mixed(tokens, 64), ops)
    for tokens in (64, 2048):
        rehearse_experts(runner, tokens, ops)
    for params in DRAWS:
        rehearse_draw(runner, params, ops)
    seen = set(launched)
    assert {"experts_kernel", "prefill_kernel", "dot_kernel", "draw_kernel"} <= seen
    assert {"tally_kernel", "pick_kernel", "penalize_kernel"} <= seen
    assert batch_invariant or {"experts_one_kernel", "decode_kernel"} <= seen
