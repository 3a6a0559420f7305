"""Ranks that have requests of their own and share the experts answer as one rank does.

Ranks are threads where only the model computes, and processes where an engine does.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from families import CASES, write
from heads import write_head
from models import until, write_model
from problems import evaluation_set
from test_tensor_parallel import (
    CPU,
    SIXTEEN,
    SPARSE,
    answers,
    ends,
    everything,
    failing,
    few_pages,
    processes,
    stat_of,
    together,
)
from torch import Tensor

from simplellm import LLM, EngineConfig
from simplellm.api.load import read_weights
from simplellm.base.grammar import GrammarError
from simplellm.base.request import EngineError
from simplellm.checkpoint.checkpoint import (
    Checkpoint,
    RandomCheckpoint,
    open_weights,
)
from simplellm.checkpoint.families import read_config
from simplellm.checkpoint.sharding import Shard, ShardedSource
from simplellm.checkpoint.source import Source
from simplellm.model.ops import PLAIN, Ops
from simplellm.model.ops_numpy import NUMPY
from simplellm.model.parallel import Group, data_parallel_table

__all__ = ["failing"]  # a fixture
pytestmark = pytest.mark.usefixtures("quiet_transformers")
PATIENCE = 60.0  # seconds for an answer
LENGTH = 24  # tokens of each rank


def compare(source: Source, folder: Path, size: int, ops: Ops = PLAIN) -> None:
    """Each rank's logits, of tokens of its own, are those of one rank."""
    chance = torch.Generator().manual_seed(size)
    ids = torch.randint(97, (size, LENGTH), generator=chance)

    def compute(group: Group) -> Tensor:
        shard = Shard(group.rank, group.size, True, data_parallel=True)
        own = ShardedSource(source, shard, group.max)
        table = data_parallel_table(ops, group)
        model = read_weights(own, torch.float32, CPU, table)
        return model.logits(ids[group.rank])

    whole = read_weights(source, torch.float32, CPU, ops)
    for found, tokens in zip(together(folder, size, compute), ids, strict=True):
        expected = whole.logits(tokens)
        error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < 1e-5


@pytest.mark.parametrize("ops", [PLAIN, NUMPY], ids=["plain", "NumPy"])
@pytest.mark.parametrize("size", [2, 4])
def test_gpt_oss(size: int, ops: Ops, tmp_path: Path) -> None:
    source = Checkpoint(write_checkpoint(tmp_path / "model", SIXTEEN))
    compare(source, tmp_path / "g", size, ops)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SPARSE)
def test_families(name: str, size: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", SPARSE[name].build())
    compare(open_weights(folder, torch.float32, CPU, False, None), tmp_path / "g", size)


def test_ranks_share_nothing_but_the_experts() -> None:
    source = RandomCheckpoint(SIXTEEN, dtype=torch.float32)
    shards = [
        ShardedSource(source, Shard(rank, 4, True, data_parallel=True), max)
        for rank in range(4)
    ]
    for ours in shards[0].table:
        sizes, whole = [shard[ours].nbytes for shard in shards], source[ours].nbytes
        of_experts = ".experts." in ours
        assert sizes == [whole // 4 if of_experts else whole] * 4
    for shard, first in zip(shards, range(0, 16, 4), strict=True):
        assert shard.config.held_experts == range(first, first + 4)
        assert shard.config.num_attention_heads == SIXTEEN.num_attention_heads


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({}, "data_parallel_size is 2; expected 1 without enable_expert_parallel"),
        (
            {"enable_expert_parallel": True, "tensor_parallel_size": 2},
            "tensor_parallel_size is 2; expected 1 beside data_parallel_size 2",
        ),
    ],
)
def test_what_they_cannot_do_is_refused(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        EngineConfig(data_parallel_size=2, **options)


def test_models_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    dense = write(tmp_path / "dense", CASES["Llama"]().build())
    with pytest.raises(ValueError, match=r"enable_expert_parallel is True; .*dense"):
        LLM(dense, device="cpu", **options(2))
    folder = write_model(tmp_path / "model", replace(TINY, vocab_size=1100))
    three = r"data_parallel_size is 3; expected a divisor of the model's .* experts"
    with pytest.raises(ValueError, match=three):
        LLM(folder, device="cpu", **options(3))


# Engines, each rank a process.


def options(size: int) -> dict[str, Any]:
    return {"data_parallel_size": size, "enable_expert_parallel": True}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with as many experts as four ranks need."""
    path = tmp_path_factory.mktemp("wide")
    return write_model(path / "model", replace(SIXTEEN, vocab_size=1100))


@pytest.fixture(scope="module")
def random_head(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("head")
    write_head(path, read_config(wide / "config.json"))
    return str(path)


@pytest.fixture(scope="module")
def two(wide: Path) -> Iterator[LLM]:
    with LLM(wide, few_pages(), device="cpu", **options(2)) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(wide: Path) -> Iterator[LLM]:
    with LLM(wide, few_pages(), device="cpu") as llm:
        yield llm


def loads(llm: LLM) -> list[int]:
    """How many requests each rank has."""
    scheduler: Any = llm.engine_core.scheduler
    return [len(one.requests) for one in scheduler.ranks]


def all_is_free(llm: LLM) -> bool:
    pages = llm.engine_core.snapshot()["pages"]
    return not pages["tables"] and not any(pages["references"])


def test_an_engine_answers_as_one_rank_does(two: LLM, alone: LLM) -> None:
    """Greedy and seeded, with penalties, biases, grammars and log-probabilities."""
    assert answers(two) == answers(alone)
    for found, one in zip(everything(two), everything(alone), strict=True):
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-5)
    assert two.stats().preemptions > 0
    assert "error" not in two.stats().finished
    assert all_is_free(two)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("drafter", "number"),
    [
        ("suffix", 4),
        ("suffix", None),
        ("a model", 4),
        ("a random head", 4),
        ("a random head", None),
    ],
)
def test_drafts_and_pages_on_the_host_change_no_token(
    drafter: str, number: int | None, wide: Path, alone: LLM, random_head: str
) -> None:
    """Each rank checks drafts of its own, and has pages of its own on the host."""
    names = {"a model": str(wide), "a random head": random_head}
    name = names.get(drafter, drafter)
    more = {"speculative": name, "num_speculative_tokens": number}
    config = replace(few_pages(), cpu_cache_bytes=2**22, **more)
    # Texts that repeat themselves, and others, each more than once.
    prompts = [([n, n + 1, n + 2] * (6 + n))[: 20 + n] for n in range(3)]
    prompts += [[*range(50 + n, 110 + n)] for n in range(3)]

    def ids(llm: LLM) -> list[list[int]]:
        asked: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 3}]
        asked += [{"temperature": 0, "repetition_penalty": 1.2, "logprobs": 2}]
        outputs = []
        for _ in range(2):
            futures = [
                llm.generate(prompt, max_tokens=40, ignore_eos=True, **one)
                for one in asked
                for prompt in prompts
            ]
            outputs += [future.result()[0].token_ids for future in futures]
        return outputs

    expected = answers(alone), ids(alone)
    with LLM(wide, config, device="cpu", **options(2)) as llm:
        assert (answers(llm), ids(llm)) == expected
        stats = llm.stats()
        assert stats.loaded_tokens > 0 and "error" not in stats.finished
        if number is not None:
            assert sum(stats.draft_tokens.values()) > stats.drafts > 20
            right = sum(stats.accepted_tokens.values())
            assert right > 0 or drafter == "a random head"
        assert all_is_free(llm)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_heads_of_several_ranks_guess_as_that_of_one(size: int) -> None:
    """The embedded model's own: as many drafts are right, and no token changes.

    Requests are enough for all ranks, then there's one alone; and all have a grammar.
    """
    asked = [problem.question for problem in evaluation_set(6)]
    chats = [[{"role": "user", "content": text}] for text in asked]
    chosen: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 3}]
    chosen += [{"temperature": 0, "structured_outputs": {"regex": "[0-9]{9,30}"}}]
    chosen += [{"temperature": 0, "logprobs": 2, "repetition_penalty": 1.1}]
    found = []
    drafting: dict[str, Any] = {"speculative": "head", "num_speculative_tokens": 3}
    for more in ({}, drafting, {**drafting, **options(size)}):
        with LLM(device="cpu", dtype="float32", **more) as llm:
            outputs = []
            for one in chosen:
                outputs += llm.chat(chats, max_tokens=48, **one)
                outputs += llm.chat(chats[:1], max_tokens=48, **one)
            texts = [output.choices[0].token_ids for output in outputs]
            stats = llm.stats()
            found.append((texts, stats.draft_tokens, stats.accepted_tokens))
            assert stats.cached_tokens > 0
    assert found[0][0] == found[1][0]
    assert found[1] == found[2]
    assert found[2][2]["3"] > 100


@pytest.mark.exhaustive
def test_four_ranks_answer_as_one_does(wide: Path, alone: LLM) -> None:
    with LLM(wide, few_pages(), device="cpu", **options(4)) as llm:
        assert len(processes(llm)) == 3
        assert answers(llm) == answers(alone)
        for found, one in zip(everything(llm), everything(alone), strict=True):
            torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
def test_another_family(tmp_path: Path) -> None:
    """Whose first layer alone has experts."""
    folder = write(tmp_path / "model", SPARSE["Qwen3-MoE"].build())
    asked: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 3}, {"seed": 4, "n": 2}]

    def ids(llm: LLM) -> list[list[list[int]]]:
        futures = [
            llm.generate([5 + n, 40, 2 * n], max_tokens=12, ignore_eos=True, **one)
            for n, one in enumerate(asked * 2)
        ]
        return [[list(o.token_ids) for o in future.result()] for future in futures]

    with LLM(folder, few_pages(), device="cpu") as llm:
        expected = ids(llm)
    with LLM(folder, few_pages(), device="cpu", **options(4)) as llm:
        assert ids(llm) == expected


LONG: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "temperature": 0}


def test_requests_go_where_their_prompt_is_cached_or_nobody_is(two: LLM) -> None:
    prompts = [[100 + n] * 3 + [*range(n, n + 40)] for n in range(4)]
    before = two.stats().cached_tokens
    for prompt in prompts:
        two.generate(prompt, max_tokens=1).result()
    for prompt in [*prompts, *prompts]:
        two.generate(prompt, max_tokens=1).result()
    cached = two.stats().cached_tokens - before
    assert cached >= 2 * len(prompts) * 32
    futures = [two.generate([900 + n], **LONG) for n in range(4)]
    assert loads(two) == [2, 2]
    for future in futures:
        future.cancel()
    until(lambda: loads(two) == [0, 0])


def test_others_go_on_when_requests_are_aborted(two: LLM, alone: LLM) -> None:
    """Also when a rank has nothing left to do."""
    prompt = [*range(30)]
    asked: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "seed": 7}
    expected = alone.generate(prompt, **asked).result()[0].token_ids
    streams = [two.stream([500 + n], **LONG) for n in range(3)]
    for stream in streams:
        next(stream)
    kept = two.generate(prompt, **asked)
    for stream in streams:
        stream.close()
    assert kept.result()[0].token_ids == expected
    until(lambda: loads(two) == [0, 0])
    assert all_is_free(two)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_whose_grammar_fails_ends_alone(
    rank: int, two: LLM, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are in step afterwards, whether they had begun to choose tokens or not."""
    runner: Any = two.engine_core.runner
    masks = [runner, *runner.others][rank].masks
    prepare = masks.prepare

    def failing_once(requests: Any) -> Any:
        for request in requests:
            if request.restricted and request.num_output == 3:
                monkeypatch.setattr(masks, "prepare", prepare)
                error = GrammarError("no token fits")
                error.request_id = request.request_id
                raise error
        return prepare(requests)

    monkeypatch.setattr(masks, "prepare", failing_once)
    asked: dict[str, Any] = {"max_tokens": 12, "seed": 5}
    regex = {"structured_outputs": {"regex": "[a-z ]{20,40}"}}
    bound = [two.generate([700 + n], **asked, **regex) for n in range(2)]
    free = [two.generate([800 + n], **asked) for n in range(2)]
    errors = [future.exception(PATIENCE) for future in bound]
    assert sum(error is not None for error in errors) == 1
    assert any("no token fits" in str(error) for error in errors)
    for n, future in enumerate(free):
        expected = alone.generate([800 + n], **asked).result()
        assert future.result()[0].token_ids == expected[0].token_ids
    assert two.generate([5], **asked, **regex).result()[0].token_ids
    counts = runner.ranks.progress.counts
    assert counts[0] == counts[1], "a rank would seem to be late"


def test_ranks_that_wait_use_no_time(two: LLM) -> None:
    (process,) = processes(two)

    def used() -> int:
        fields = stat_of(process.pid).rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])  # ticks

    before = used()
    time.sleep(1.0)
    assert used() - before < 30


# When a rank ends, or doesn't.


def test_a_rank_that_dies_while_all_wait(wide: Path) -> None:
    llm = LLM(wide, few_pages(), device="cpu", **options(2))
    (process,) = processes(llm)
    process.kill()
    llm.engine_core.thread.join(5)  # type: ignore[union-attr]
    with pytest.raises(EngineError, match="rank 1 ended with status -9"):
        llm.generate("x")
    llm.close()


@pytest.mark.parametrize(
    ("when", "how"),
    [
        ("adds up", "dies"),
        pytest.param("draws", "hangs", marks=pytest.mark.exhaustive),
        pytest.param("loads", "dies", marks=pytest.mark.exhaustive),
        pytest.param("decode", "hangs", marks=pytest.mark.exhaustive),
        pytest.param("draws", "dies", marks=pytest.mark.exhaustive),
        pytest.param("prompt", "dies", marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_that_fails_ends_the_engine(
    when: str, how: str, wide: Path, failing: Any
) -> None:
    """Also in a step of its own, or while others compute and it has nothing to do."""
    failing(1, when, how)
    hangs = "rank 1 hangs: the others wait for it"
    ends(wide, hangs if how == "hangs" else "rank 1 ended with status -9", **options(2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_that_fails_while_it_drafts_ends_the_engine(
    how: str, wide: Path, random_head: str, failing: Any
) -> None:
    failing(1, "drafts", how)
    drafting: dict[str, Any] = {"speculative": random_head, "num_speculative_tokens": 2}
    hangs = "rank 1 hangs: the others wait for it"
    wrong = hangs if how == "hangs" else "rank 1 ended with status -9"
    ends(wide, wrong, **drafting, **options(2))


SCRIPT = """
import sys, time
from simplellm import LLM
llm = LLM(
    sys.argv[1], device="cpu", data_parallel_size=2, enable_expert_parallel=True
)
stream = llm.stream("x", max_tokens=4000, ignore_eos=True)
next(stream)
print(llm.engine_core.runner.ranks.processes[0].pid, flush=True)
for _ in stream: pass
"""


@pytest.mark.parametrize(
    "sent",
    [pytest.param(signal.SIGKILL, marks=pytest.mark.exhaustive), signal.SIGINT],
    ids=str,
)
def test_no_rank_outlives_the_first(sent: signal.Signals, wide: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(wide)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as first:
        pid = int(first.stdout.readline())  # type: ignore[union-attr]
        first.send_signal(sent)
        assert first.wait(20) != 0
    until(lambda: not Path(f"/proc/{pid}").exists() or " Z " in stat_of(pid))
