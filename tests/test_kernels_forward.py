"""The fused forward pass and the graph runner, with the kernels' twins on a CPU."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from torch import Tensor

from simplellm.engine import Engine, EngineConfig, Event, Submission, Ticket
from simplellm.graphs import GPUConfig, GraphEngine
from simplellm.kernels import (
    attention,
    experts,
    experts_few,
    forward,
    head,
    linear,
    norm,
    rope,
    routing,
)
from simplellm.kernels.forward import FUSED, Fused, embed, embed_torch
from simplellm.model import load_model
from simplellm.paged import PagedCache
from simplellm.sampler import SamplingParams

TWINS = {
    "add_norm": norm.add_norm_torch,
    "embed": forward.embed_torch,
    "linear": linear.linear_torch,
    "rope_and_cache": rope.rope_and_cache_torch,
    "route": routing.route_torch,
    "gate_up_few": experts_few.gate_up_few_torch,
    "down_few": experts_few.down_few_torch,
    "route_and_dispatch": routing.route_and_dispatch_torch,
    "gate_up": experts.gate_up_torch,
    "down": experts.down_torch,
    "head": head.head_torch,
}


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    for name, twin in TWINS.items():
        monkeypatch.setattr(forward, name, twin)
    monkeypatch.setattr(forward, "choose", lambda *shape: None)
    for name in ("paged_decode", "paged_prefill"):
        monkeypatch.setattr(attention, name, getattr(attention, f"{name}_torch"))


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations of ``prompts``, all at once."""
    asked: list[list[Event]] = []
    for number, prompt in enumerate(prompts):
        events: list[Event] = []
        params = SamplingParams(temperature=0)
        request = Submission(prompt, params, frozenset(), 3 + 3 * number)
        engine.submit([[Ticket(request, events.append)]])
        asked.append(events)
    while engine.scheduler.jobs or engine.flights:
        engine.step()
    return [[e.token_id for e in events if e.token_id is not None] for events in asked]


def test_the_same_tokens_as_the_plain_engine(twins: None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(1000, (length,), generator=generator).tolist()
        for length in (1, 15, 16, 130, 17)
    ]
    sizes = dict(page_size=16, num_pages=100, prefill_chunk=100, max_num_seqs=8)
    exact = load_model(dtype=torch.float32, device=device)
    expected = answers(Engine(exact, EngineConfig(**sizes)), prompts)
    model = load_model(dtype=torch.float32, device=device, backend=FUSED)
    config = GPUConfig(**sizes, cuda_graphs=device == "cuda")
    engine = GraphEngine(model, config, Fused)
    assert answers(engine, prompts) == expected
    assert engine.scheduler.manager.usage == 0


def test_logprobs_have_the_same_bits_in_any_company(
    kernel_device: str, tmp_path: Path
) -> None:
    config = replace(TINY, max_position_embeddings=64)
    write_checkpoint(tmp_path, config)
    model = load_model(tmp_path, torch.float32, kernel_device, backend=FUSED)
    first, other = list(range(21)), list(range(60, 72))

    def run(prompts: list[list[int]], **options: int) -> list[Event]:
        config = GPUConfig(
            page_size=4,
            num_pages=40,
            max_num_seqs=4,
            cuda_graphs=False,
            batch_invariant=True,
            **options,
        )
        engine = GraphEngine(model, config, partial(Fused, batch_invariant=True))
        params = SamplingParams(temperature=0, logprobs=2)
        received: list[list[Event]] = [[] for _ in prompts]
        for prompt, events in zip(prompts, received, strict=True):
            request = Submission(prompt, params, frozenset(), 3)
            engine.submit([[Ticket(request, events.append)]])
        while engine.scheduler.jobs or engine.flights:
            engine.step()
        return received[0]

    alone = run([first])
    assert len(alone) == 3 and alone[0].logprobs is not None
    assert run([first, other]) == alone
    assert run([first, other], prefill_chunk=5) == alone


def test_one_tokens_experts_are_those_of_the_plain_model(
    twins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = load_model(dtype=torch.float32, device=device)
    model = load_model(dtype=torch.bfloat16, device=device, backend=FUSED)
    fused = Fused(model, PagedCache(model.config, num_pages=4), max_num_seqs=1)
    # The path of several tokens would give the same.
    monkeypatch.delattr(fused.kernels, "route_and_dispatch")
    torch.manual_seed(0)
    h = torch.randn(1, model.config.hidden_size).to(device, torch.bfloat16)
    live = torch.ones(1, dtype=torch.int32, device=device)
    for layer, exact in zip(fused.layers, plain.layers, strict=True):
        update = fused.experts(layer.mlp, h, live).sum(1)
        expected = exact.get_submodule("mlp")(h.float())
        assert (update - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("function", [embed, embed_torch])
def test_a_token_may_be_one_that_the_step_before_has_sampled(
    function: Callable[..., Tensor], kernel_device: str
) -> None:
    tokens = torch.tensor([4, -1, -3, -2, 0], dtype=torch.int32, device=kernel_device)
    previous = torch.tensor([7, 8, 9], dtype=torch.int32, device=kernel_device)
    table = torch.randn(12, 24, device=kernel_device)
    assert torch.equal(function(tokens, previous, table), table[[4, 7, 9, 8, 0]])
