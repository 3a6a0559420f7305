"""Kernels of several ranks that write to each other's memory.

In the interpreter ranks are processes, and their memory is that which all of them have.
Between GPUs, tools/gpu/parallel.py checks the same.
"""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from simplellm.base.sampling_params import SamplingParams
from simplellm.engine.sampler import SamplingTensors
from simplellm.model import ops
from simplellm.model.kernels.draw import draw
from simplellm.model.kernels.exchange import Peers, shared_bytes, stop_word
from simplellm.model.kernels.expert_exchange import COUNT_WORDS, PeerExpertExchange
from simplellm.model.kernels.norm import add_norm
from simplellm.model.kernels.vocabulary import ExchangingShard
from simplellm.model.layers import Experts
from simplellm.model.parallel import Group

EPS, ROWS, N, CALLS = 1e-5, 4, 96, 5
PATIENCE = 60.0


def forked(ranks: int, compute: Callable[[int], None]) -> None:
    """Let each rank compute in a process of its own."""

    def alone(rank: int) -> None:
        torch.set_num_threads(1)  # a forked process has none of its parent's others
        compute(rank)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=alone, args=[n]) for n in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0


def shared_memory(ranks: int, words: int = N) -> tuple[torch.Tensor, torch.Tensor]:
    """What each rank shares, and the addresses."""
    nbytes = shared_bytes(ranks, ROWS, words)
    memory = torch.zeros(ranks, nbytes, dtype=torch.uint8).share_memory_()
    return memory, torch.tensor([part.data_ptr() for part in memory])


@pytest.fixture
def interpreter(kernel_device: str) -> None:
    if kernel_device != "cpu":
        pytest.skip("of one process and one GPU there is one rank")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_have_the_sum_of_all_and_the_same_bits(ranks: int) -> None:
    """In each of several calls, of more and of fewer rows, with one of them late."""
    generator = torch.Generator().manual_seed(ranks)
    updates = torch.randn(CALLS, ranks, ROWS, 2, N, generator=generator)
    residual = torch.randn(ROWS, N, generator=generator)
    weight = torch.randn(N, generator=generator)
    found = torch.zeros(ranks, CALLS, 2, ROWS, N).share_memory_()
    _, addresses = shared_memory(ranks)

    def compute(rank: int) -> None:
        peers, own = Peers(addresses, rank, ranks, ROWS, N), residual.clone()
        for call in range(CALLS):
            time.sleep(0.05 * (rank == call % ranks))
            rows = 1 + call % ROWS
            update = updates[call, rank, :rows].contiguous()
            x, normed = add_norm(own[:rows], update, weight, EPS, peers)
            found[rank, call, 0, :rows], found[rank, call, 1, :rows] = x, normed

    forked(ranks, compute)
    for call in range(CALLS):
        rows = 1 + call % ROWS
        expected = ops.add_norm(
            residual[:rows], updates[call, :, :rows].sum((0, 2)), weight, EPS
        )
        for got, one in zip(found[0, call], expected, strict=True):
            torch.testing.assert_close(got[:rows], one, rtol=1e-5, atol=1e-5)
        for rank in range(1, ranks):
            assert found[rank, call].equal(found[0, call])


@pytest.mark.usefixtures("interpreter")
def test_embedding_and_greatest_token_are_those_of_one_rank() -> None:
    """Of 70 tokens, in parts, among values that tie, are NaN, or all below 0."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(70, N, generator=generator)
    previous = torch.tensor([40, 3], dtype=torch.int32)
    tokens = torch.tensor([69, -1, -2, 31], dtype=torch.int32)
    logits = torch.randn(ROWS, 70, generator=generator).round() - 9
    logits[1, 60] = torch.nan
    logits[2] = 5.0
    _, addresses = shared_memory(2)
    rows = torch.zeros(2, ROWS, N).share_memory_()
    best = torch.zeros(2, ROWS, dtype=torch.int32).share_memory_()

    def compute(rank: int) -> None:
        peers = Peers(addresses, rank, 2, ROWS, N)
        part = range(0, 32) if rank == 0 else range(32, 70)
        group = cast(Group, None)  # for more rows than these
        shard = ExchangingShard(ops.PLAIN, group, part, 70, peers)
        own = table[part.start : part.stop].contiguous()
        rows[rank] = shard.embed(tokens, previous, own)
        best[rank] = shard.argmax(logits[:, part.start : part.stop].contiguous())

    forked(2, compute)
    for rank in range(2):
        assert rows[rank].equal(ops.embed(tokens, previous, table))
        assert best[rank].equal(logits.argmax(-1).int())


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("ranks", [2, 3])
def test_experts_of_all_ranks_say_what_they_do_of_rows_that_count(ranks: int) -> None:
    """In calls of more and of fewer rows, of which few or none count; one rank late.

    No expert sees another row, and what it would say of one is not read.
    """
    chance = torch.Generator().manual_seed(ranks)
    x = torch.randn(CALLS, ranks, ROWS, N, generator=chance).half()
    counts = torch.randint(ROWS + 1, (CALLS, ranks), generator=chance)
    counts[0], counts[1, 1] = ROWS, 0
    weights = torch.randn(ranks, 2, N, generator=chance)
    found = torch.zeros(ranks, CALLS, ROWS, N, dtype=x.dtype).share_memory_()
    seen = torch.full((ranks, CALLS, ranks * ROWS, N), torch.nan).share_memory_()
    words = N // 2 + COUNT_WORDS.value
    _, addresses = shared_memory(ranks, words)

    def compute(rank: int) -> None:
        def experts(x: torch.Tensor, mlp: Experts, count: torch.Tensor) -> torch.Tensor:
            real = x[: int(count)]
            out = torch.full((len(x), 2, N), torch.nan)  # in two parts
            out[: len(real)] = real[:, None] * weights[rank]
            seen[rank, call, : len(real)] = real
            return out

        peers, group = Peers(addresses, rank, ranks, ROWS, words), cast(Group, None)
        table = replace(ops.PLAIN, experts=experts)
        exchange, mlp = PeerExpertExchange(table, group, peers), cast(Experts, None)
        for call in range(CALLS):
            time.sleep(0.05 * (rank == call % ranks))
            rows, count = int(counts[call].max()), counts[call, rank : rank + 1]
            own = x[call, rank, :rows].contiguous()
            own[int(count) :] = torch.nan
            found[rank, call, :rows] = exchange.experts(own, mlp, count.int())

    forked(ranks, compute)
    for call, some in enumerate(counts.tolist()):
        real = [x[call, rank, :count] for rank, count in enumerate(some)]
        parts = torch.cat(real).float()[:, None] * weights[:, None]
        said = parts.sum(2).half().float().sum(0).half()
        for rank, rows in enumerate(said.split(some)):
            assert found[rank, call, : len(rows)].equal(rows)
            assert seen[rank, call, : sum(some)].equal(torch.cat(real).float())
            assert seen[rank, call, sum(some) :].isnan().all()
            assert not found[rank, call, len(rows) :].any()


PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.2, top_k=50, top_p=0.9, min_p=0.002),
    SamplingParams(temperature=2.0, top_p=0.6),
]


@pytest.mark.usefixtures("interpreter")
def test_draws_are_those_of_one_rank(tmp_path: Path) -> None:
    vocabulary, device = 300, torch.device("cpu")
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(ROWS, vocabulary, generator=generator) * 3
    columns = SamplingTensors.of(PARAMS, vocabulary, device, [1, 2, 3, 4])
    best = logits.argmax(-1).int()
    steps = [torch.full((ROWS,), step) for step in range(6)]
    how = columns.temperature, columns.seeds
    _, addresses = shared_memory(2)
    found = torch.zeros(2, len(steps), ROWS, dtype=torch.int32).share_memory_()

    def compute(rank: int) -> None:
        peers, group = (
            Peers(addresses, rank, 2, ROWS, N),
            Group(str(tmp_path), rank, 2, 9),
        )
        part = range(0, 160) if rank == 0 else range(160, vocabulary)
        table = replace(ops.PLAIN, draw=draw)
        shard = ExchangingShard(table, group, part, vocabulary, peers)
        own = logits[:, part.start : part.stop].contiguous()
        for number, step in enumerate(steps):
            found[rank, number] = shard.draw(own, best, *how, step, columns.filters)

    forked(2, compute)
    for number, step in enumerate(steps):
        expected = ops.draw(logits, best, *how, step, columns.filters)
        assert found[0, number].equal(expected) and found[1, number].equal(expected)
    assert len(found.unique()) > 8


@pytest.mark.usefixtures("interpreter")
def test_a_stop_ends_the_wait_for_a_rank_that_does_not_come() -> None:
    memory, addresses = shared_memory(2)
    update, weight = torch.ones(1, 2, N), torch.ones(N)

    def compute(rank: int) -> None:
        if rank == 1:
            time.sleep(0.3)
            memory[0].view(torch.int32)[stop_word(2, ROWS)] = 1
            return
        begin = time.monotonic()
        peers = Peers(addresses, 0, 2, ROWS, N)
        add_norm(torch.zeros(1, N), update, weight, EPS, peers)
        assert time.monotonic() - begin > 0.25

    forked(2, compute)
