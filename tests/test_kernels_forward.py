"""The fused forward pass and the graph runner, with the kernels' twins on a CPU."""

import pytest
import torch

from simplellm.engine import Engine, EngineConfig, Event, Submission, Ticket
from simplellm.graphs import GPUConfig, GraphEngine
from simplellm.kernels import (
    attention,
    experts,
    forward,
    head,
    linear,
    norm,
    rope,
    routing,
)
from simplellm.kernels.forward import FUSED, Fused
from simplellm.model import load_model
from simplellm.sampler import SamplingParams

TWINS = {
    "add_norm": norm.add_norm_torch,
    "embed": forward.embed_torch,
    "linear": linear.linear_torch,
    "rope_and_cache": rope.rope_and_cache_torch,
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
