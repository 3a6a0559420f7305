"""`batch_invariant` on a GPU: the same tokens alone and in any company.

A model with random weights in the widths of gpt-oss-120b answers the same greedy
prompts alone and in many kinds of company.
"""

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("triton")
from cases import random_model
from client import Client, make_engine, random_prompt

from simplellm.engine.engine import Engine
from simplellm.model.model import Model

pytestmark = pytest.mark.gpu
REQUESTS = 64
COMMON = {
    "max_num_seqs": REQUESTS,
    "max_model_len": 2304,
    "enable_prefix_caching": False,
}
ROOM = {"cache_bytes": 2**32}
# A prompt enters when there is room for it, so that only answers which grow by much
# more than their prompts had are sure to run out of pages.
FEW = {"page_size": 16, "num_pages": 200, "prefill_chunk": 128}


def make_prompts(prefix: int, step: int, other_step: int) -> list[list[int]]:
    """Half of them with a common beginning of ``prefix`` tokens, taking turns.

    Within each half a prompt is one step longer than the last.
    """
    shared, half = random_prompt(prefix, 0), REQUESTS // 2
    prompts = [shared + random_prompt(1 + step * n, 1 + n) for n in range(half)]
    prompts += [random_prompt(1 + other_step * n, 1000 + n) for n in range(half)]
    return [prompts[n // 2 + n % 2 * half] for n in range(REQUESTS)]


LONG, SHORT = make_prompts(300, 3, 23), make_prompts(40, 1, 2)


def answers(
    engine: Engine, prompts: Sequence[Sequence[int]], batch: int
) -> list[list[int]]:
    """Greedy continuations, ``batch`` prompts at once."""
    lengths = [24 + n % 3 * 12 for n in range(len(prompts))]
    found: list[list[int]] = []
    for first in range(0, len(prompts), batch):
        client, part = Client(engine), slice(first, first + batch)
        numbers = list(map(client.ask, prompts[part], lengths[part]))
        client.finish()
        found += map(client.tokens, numbers)
    assert list(map(len, found)) == lengths
    return found


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model("gpt-oss-120b", 4, batch_invariant=True)


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    yield
    gc.collect()  # an engine refers to itself


@pytest.fixture(scope="module")
def alone(model: Model) -> dict[str, list[list[int]]]:
    """What is answered to each prompt while no other one is there."""
    engine = make_engine(model, **COMMON, **ROOM)
    found = {"long": answers(engine, LONG, 1), "short": answers(engine, SHORT, 1)}
    assert len({token for answer in found["long"] for token in answer}) > 100
    return found


@pytest.mark.parametrize(
    ("batch", "options", "times"),
    [
        (1, {}, 1),
        (2, {}, 1),
        (5, {}, 1),
        (16, {}, 1),
        (64, {}, 1),
        (64, {"prefill_chunk": 33}, 1),
        (64, {"max_num_batched_tokens": 97}, 1),
        (16, {"enable_prefix_caching": True}, 2),
        (64, {"cuda_graphs": False, "overlap": False}, 1),
    ],
)
def test_company_changes_nothing(
    model: Model,
    alone: dict[str, list[list[int]]],
    batch: int,
    options: dict[str, Any],
    times: int,
) -> None:
    engine = make_engine(model, **(COMMON | ROOM | options))
    for _ in range(times):
        assert answers(engine, LONG, batch) == alone["long"]
    assert bool(engine.stats().cache_hit_rate) == ("enable_prefix_caching" in options)


@pytest.mark.parametrize("share", [False, True])
def test_preemption_changes_nothing(
    model: Model, alone: dict[str, list[list[int]]], share: bool
) -> None:
    engine = make_engine(model, **(COMMON | FEW | {"enable_prefix_caching": share}))
    for _ in range(1 + share):
        assert answers(engine, SHORT, REQUESTS) == alone["short"]
    assert engine.stats().preemptions
    assert bool(engine.stats().cache_hit_rate) or not share
