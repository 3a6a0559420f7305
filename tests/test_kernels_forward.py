"""The fused forward pass and the graph runner, with the kernels' twins on a CPU."""

import pytest
import torch

from simplellm.graphs import GraphRunner
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
from simplellm.paged import PagedCache
from simplellm.sampler import Columns, SamplingParams
from simplellm.scheduler import Job, Scheduler

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


def test_the_same_tokens_as_the_plain_model(twins: None) -> None:
    plain = load_model()
    model = load_model(backend=FUSED)
    cache = PagedCache(
        model.config,
        num_pages=200,
        page_size=16,
        dtype=model.dtype,
        device=model.device,
    )
    fused = Fused(model, cache, max_num_seqs=8)
    cuda = torch.cuda.is_available()
    runner = GraphRunner(
        fused,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=1024,
        capture=cuda,
    )
    scheduler = Scheduler(
        cache.manager, max_num_seqs=8, max_num_batched_tokens=512, prefill_chunk=100
    )
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 5, 16, 130, 300, 40, 15, 17, 200, 31]
    prompts = [torch.randint(1000, (n,), generator=generator).tolist() for n in lengths]
    jobs = [Job(list(prompt), 40 + 3 * i) for i, prompt in enumerate(prompts)]
    scheduler.add(jobs)
    flights = []
    while scheduler.jobs:
        works = sorted(scheduler.schedule(), key=lambda w: w.length > 1)
        if works:
            params = [SamplingParams(temperature=0)] * sum(w.samples for w in works)
            columns = Columns.of(params, model.config.vocab_size, model.device)
            flights.append((works, runner.launch(works, columns, [])))
            scheduler.begin(works)
        if len(flights) > 1 or not works:
            done, flight = flights.pop(0)
            scheduler.commit(done, flight.wait().tokens.tolist())
        cache.manager.check_integrity()
    for prompt, job in zip(prompts, jobs, strict=True):
        logits = plain.logits(job.tokens[:-1])
        assert job.finish_reason == "length"
        expected = logits.argmax(-1)[len(prompt) - 1 :].tolist()
        assert job.tokens[len(prompt) :] == expected
