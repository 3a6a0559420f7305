"""Several ranks answer as one does, and none outlives the others.

Ranks are threads where only the model computes, and processes where an engine does.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from families import CASES, MOE, sparse, write
from gguf_files import write_gguf
from heads import write_head
from models import SMALL, write_model
from torch import Tensor

from simplellm import LLM, EngineConfig
from simplellm.api.load import read_weights
from simplellm.apps.cli import main
from simplellm.base.request import EngineError
from simplellm.base.sampling_params import SamplingParams
from simplellm.checkpoint.checkpoint import (
    Checkpoint,
    RandomCheckpoint,
    open_weights,
)
from simplellm.checkpoint.families import family_config, read_config
from simplellm.checkpoint.families.gpt_oss import GPT_OSS_120B
from simplellm.checkpoint.mxfp4 import MXFP4
from simplellm.checkpoint.sharding import Shard, ShardedSource, check_shards
from simplellm.checkpoint.source import Source
from simplellm.engine import ranks as ranks_module
from simplellm.engine.ranks import Leader
from simplellm.model.model import Model
from simplellm.model.ops import PLAIN, Ops
from simplellm.model.ops_numpy import NUMPY
from simplellm.model.parallel import (
    Group,
    SymmetricMemory,
    VocabularyShard,
    parallel_table,
)
from simplellm.sampling.filters import Filters

pytestmark = pytest.mark.usefixtures("quiet_transformers")
CPU = torch.device("cpu")
PATIENCE = 60.0  # seconds that a rank of a test may be behind
IDS = torch.randint(97, (40,), generator=torch.Generator().manual_seed(5))
MAIN = {  # each has something of its own that is cut
    "Llama biases", "Llama tied", "Qwen3", "Mixtral", "Qwen3-MoE unnormed", "Gemma3",
    "GPT2",
}  # fmt: skip


def together(folder: Path, size: int, compute: Callable[[Group], Any]) -> list[Any]:
    """What ``compute`` returns on each of ``size`` ranks, which are threads."""
    folder.mkdir(exist_ok=True)

    def rank(number: int) -> Any:
        with torch.inference_mode():
            return compute(Group(str(folder), number, size, PATIENCE))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


def shard_of(
    source: Source, group: Group, ops: Ops = PLAIN, experts: bool = False
) -> Model:
    """A rank's part of a model in float32, with whole ``experts`` or parts of all."""
    shard, config = Shard(group.rank, group.size, experts), source.config
    tokens = shard.vocabulary(config)
    table = parallel_table(VocabularyShard(ops, group, tokens, config.vocab_size))
    own = ShardedSource(source, shard, group.max)
    return read_weights(own, torch.float32, CPU, table)


def compare(
    source: Source, folder: Path, size: int, ops: Ops = PLAIN, experts: bool = False
) -> None:
    """The ranks' logits are those of one rank, and their tokens are the same bits."""

    def compute(group: Group) -> tuple[Tensor, Tensor]:
        model = shard_of(source, group, ops, experts)
        logits = model.logits(IDS)
        return logits, model.ops.argmax(logits)

    found = together(folder, size, compute)
    expected = read_weights(source, torch.float32, CPU, ops).logits(IDS)
    logits = torch.cat([part for part, _ in found], dim=-1)
    error = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 1e-5
    for _, best in found:
        assert best.equal(logits.argmax(-1).int())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in MAIN else [pytest.mark.exhaustive])
        for name in CASES
    ],
)
def test_families(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", CASES[name]().build())
    compare(open_weights(folder, torch.float32, CPU, False, None), tmp_path / "g", 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_families_on_four_ranks(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    heads = {"n_head": 8} if case.kind == "GPT2" else OF_FOUR
    case = replace(case, changes={**case.changes, **heads})
    folder = write(tmp_path / "model", case.build())
    compare(open_weights(folder, torch.float32, CPU, False, None), tmp_path / "g", 4)


def test_uneven_parts(tmp_path: Path) -> None:
    """80 columns and 101 tokens, in three."""
    folder = write(tmp_path / "model", CASES["GPT2"]().build())
    compare(open_weights(folder, torch.float32, CPU, False, None), tmp_path / "g", 3)


FOUR = replace(
    TINY, num_attention_heads=8, num_key_value_heads=4, intermediate_size=160
)


@pytest.mark.parametrize(("size", "ops"), [(2, PLAIN), (4, NUMPY)], ids=["2", "4"])
def test_gpt_oss(size: int, ops: Ops, tmp_path: Path) -> None:
    """Five blocks of packed experts, among two and four."""
    source = RandomCheckpoint(FOUR, dtype=torch.float32)
    compare(source, tmp_path / "g", size, ops)


LLAMA = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def compressed(inputs: Any = None, **weights: Any) -> dict[str, Any]:
    """What llm-compressor says of all its linear layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    form = "mxfp4-pack-quantized" if weights["num_bits"] == 4 else "int-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}


EACH_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
BLOCKS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
QUANTIZATIONS = {
    "fp8": FP8,  # tiles of 128 rows, which KV heads of 64 part
    "int8 weights": compressed(**INT8),
    "int8": compressed({**EACH_TOKEN, "type": "int"}, **INT8),  # one scale for a row
    "mxfp4": compressed(**BLOCKS),
}


@pytest.mark.parametrize("form", QUANTIZATIONS)
def test_formats(form: str, tmp_path: Path) -> None:
    config = family_config(LLAMA | {"quantization_config": QUANTIZATIONS[form]})
    compare(RandomCheckpoint(config, dtype=torch.float32), tmp_path / "g", 2)


@pytest.mark.parametrize(
    "name", ["Mixtral", pytest.param("Qwen3 biases", marks=pytest.mark.exhaustive)]
)
def test_int8_files(name: str, tmp_path: Path) -> None:
    """Experts that lie apart, and q, k and v, with inputs that are rounded."""
    write(tmp_path / "model", CASES[name]().build())
    folders = [str(tmp_path / "model"), str(tmp_path / "int8")]
    assert main(["quantize", *folders, "--format", "int8"]) == 0
    source = open_weights(folders[1], torch.float32, CPU, False, None)
    compare(source, tmp_path / "g", 2)


@pytest.mark.exhaustive
def test_gguf(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", CASES["Llama"]().build())
    write_gguf(tmp_path / "model.gguf", folder)
    source = open_weights(tmp_path / "model.gguf", torch.float32, CPU, False, None)
    compare(source, tmp_path / "g", 2)


def test_ranks_hold_each_number_once(tmp_path: Path) -> None:
    source = RandomCheckpoint(FOUR, dtype=torch.float32)
    shards = [ShardedSource(source, Shard(rank, 4), max) for rank in range(4)]
    for ours, name in shards[0].table.items():
        sizes = [shard[ours].nbytes for shard in shards]
        whole = source[ours].nbytes
        assert sum(sizes) == whole if name.split else sizes == [whole] * 4


# Whole experts on each rank.

OF_FOUR = {"num_attention_heads": 8, "num_key_value_heads": 4}
SPARSE = {
    "Mixtral": sparse("Mixtral", num_local_experts=8, **OF_FOUR),
    "Qwen3-MoE": sparse(
        "Qwen3Moe", num_experts=8, mlp_only_layers=[1], **MOE, **OF_FOUR
    ),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SPARSE)
def test_families_with_sharded_experts(name: str, size: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", SPARSE[name].build())
    source = open_weights(folder, torch.float32, CPU, False, None)
    compare(source, tmp_path / "g", size, experts=True)


SIXTEEN = replace(FOUR, num_local_experts=16, num_experts_per_tok=4)


@pytest.mark.parametrize("ops", [PLAIN, NUMPY], ids=["plain", "NumPy"])
@pytest.mark.parametrize("size", [2, 4])
def test_gpt_oss_with_sharded_experts(size: int, ops: Ops, tmp_path: Path) -> None:
    source = Checkpoint(write_checkpoint(tmp_path / "model", SIXTEEN))
    compare(source, tmp_path / "g", size, ops, experts=True)


@pytest.mark.parametrize("form", QUANTIZATIONS)
def test_formats_with_sharded_experts(form: str, tmp_path: Path) -> None:
    config = family_config(MIXTRAL | {"quantization_config": QUANTIZATIONS[form]})
    source = RandomCheckpoint(config, dtype=torch.float32)
    compare(source, tmp_path / "g", 2, experts=True)


def test_int8_files_with_sharded_experts(tmp_path: Path) -> None:
    write(tmp_path / "model", SPARSE["Mixtral"].build())
    folders = [str(tmp_path / "model"), str(tmp_path / "int8")]
    assert main(["quantize", *folders, "--format", "int8"]) == 0
    source = open_weights(folders[1], torch.float32, CPU, False, None)
    compare(source, tmp_path / "g", 2, experts=True)


def test_ranks_hold_each_expert_once(tmp_path: Path) -> None:
    """Where experts lie in one tensor of a file, a rank's part is not even copied."""
    source = Checkpoint(write_checkpoint(tmp_path / "model", SIXTEEN))
    shards = [ShardedSource(source, Shard(rank, 4, True), max) for rank in range(4)]
    for ours, name in shards[0].table.items():
        sizes = [shard[ours].nbytes for shard in shards]
        whole = source[ours].nbytes
        assert sum(sizes) == whole if name.split else sizes == [whole] * 4
    ours = "layers.1.experts.down"
    held, every = shards[2][ours], source[ours]
    assert isinstance(held, MXFP4) and isinstance(every, MXFP4)
    assert held.blocks.data_ptr() == every.blocks[8].data_ptr()


def test_of_experts_that_lie_apart_only_a_ranks_own_are_read(tmp_path: Path) -> None:
    source = Checkpoint(write(tmp_path / "model", SPARSE["Mixtral"].build()))
    ours = "layers.0.experts.gate_up"
    gates_and_ups = source.parts(ours, range(2, 4))
    assert len(gates_and_ups) == 2 * 2
    held, every = ShardedSource(source, Shard(1, 4, True), max)[ours], source[ours]
    assert isinstance(held, Tensor) and isinstance(every, Tensor)
    assert held.equal(every[2:4])
    assert held.equal(torch.cat(gates_and_ups).view(held.shape))  # type: ignore[arg-type]


# What can't be shared out is refused.


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (GPT_OSS_120B, 3, "tensor_parallel_size is 3; expected a divisor of .* 8 KV"),
        (TINY, 2, None),
        (replace(TINY, intermediate_size=32), 2, "at most 1: the model has 32 interm"),
        (replace(TINY, vocab_size=20), 2, "at most 1: the model has 20 tokens"),
        (
            family_config(LLAMA | {"head_dim": 32, "quantization_config": FP8}),
            *(2, "whole blocks of 128 columns"),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(config, size: int, message: str | None) -> None:
    check_shards(GPT_OSS_120B, 8)
    if message is None:
        check_shards(config, size)
        return
    with pytest.raises(ValueError, match=message):
        check_shards(config, size)


def test_an_llm_refuses_before_it_starts_a_process(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"is 3; expected a divisor of .* 2 KV heads"):
        LLM(folder, device="cpu", tensor_parallel_size=3)


def test_experts_that_cannot_be_shared_out_are_refused(tmp_path: Path) -> None:
    check_shards(TINY, 1, expert_parallel=True)
    with pytest.raises(ValueError, match=r"size is 2; expected a divisor .* 5 experts"):
        check_shards(TINY, 2, expert_parallel=True)
    folder = write(tmp_path, CASES["Llama"]().build())
    for size in (1, 2):
        sizes: dict[str, Any] = {"tensor_parallel_size": size}
        with pytest.raises(
            ValueError, match=r"enable_expert_parallel is True; .*dense"
        ):
            LLM(folder, device="cpu", enable_expert_parallel=True, **sizes)


# Sampling over shards of the vocabulary, from the same logits.


def random_logits(rows: int, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, vocab_size, generator=generator) * 3
    return (logits * 8).round() / 8  # with ties


PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.5, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.6),
    SamplingParams(temperature=2.0, min_p=0.1),
    SamplingParams(temperature=1.2, top_k=50, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=3.0, top_k=1),
    SamplingParams(temperature=3.0, top_p=0.01),
]


@pytest.mark.parametrize("size", [2, 4])
def test_draws_are_those_of_one_rank(size: int, tmp_path: Path) -> None:
    draws, vocab_size = 40, 333
    params = PARAMS * draws
    logits = random_logits(len(PARAMS), vocab_size).repeat(draws, 1)
    temperature = torch.tensor([p.temperature for p in params])
    seeds = torch.arange(len(params)) - 100
    steps = torch.arange(len(params)) % 7
    filters = Filters.of(params, vocab_size, CPU)
    columns = temperature, seeds, steps, filters

    def compute(group: Group) -> tuple[Tensor, ...]:
        part = Shard(group.rank, size).part(vocab_size, 32)
        shard = VocabularyShard(PLAIN, group, part, vocab_size)
        own = logits[:, part.start : part.stop].contiguous()
        best = shard.argmax(own)
        tokens = shard.draw(own, best, *columns)
        return best, tokens, *shard.score(own, tokens, 3)

    best = logits.argmax(-1).int()
    tokens = PLAIN.draw(logits, best, *columns)
    logprobs, ranks, _, likeliest = PLAIN.score(logits, tokens, 3)
    for found in together(tmp_path / "g", size, compute):
        assert found[0].equal(best)
        assert found[1].equal(tokens)
        torch.testing.assert_close(found[2], logprobs)
        assert found[3].equal(ranks)
        torch.testing.assert_close(found[5], likeliest)
        chosen = logits.log_softmax(-1).gather(1, found[4])
        torch.testing.assert_close(chosen, likeliest)
    assert len(set(tokens.tolist())) > 30


def test_numbers_that_are_none_win_as_on_one_rank(tmp_path: Path) -> None:
    logits = torch.tensor([[-0.0, 0.0] * 48, [-torch.inf] * 95 + [-3.0], [1.0] * 96])
    logits[2, 70] = torch.nan

    def compute(group: Group) -> Tensor:
        part = Shard(group.rank, 3).part(96, 32)
        shard = VocabularyShard(PLAIN, group, part, 96)
        return shard.argmax(logits[:, part.start : part.stop])

    for found in together(tmp_path / "g", 3, compute):
        assert found.tolist() == logits.argmax(-1).tolist() == [0, 95, 70]


# Engines, each rank a process.

ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 1},
    {"seed": 2, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    {"seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0, "frequency_penalty": 1.5, "logit_bias": {5: 2.0, 1000: 4.0}},
    {"seed": 4, "allowed_token_ids": [3, 70, 400, 900, 1001]},
    {"seed": 5, "n": 3},
    {"seed": 6, "structured_outputs": {"regex": "(yes|no)+!"}, "ignore_eos": False},
]


def answers(llm: LLM) -> list[Any]:
    """Token ids of all kinds of requests at once, more than fit the cache."""
    prompts = [[(7 * n + m) % 1000 for m in range(9 + 5 * n)] for n in range(4)]
    futures = [
        llm.generate(prompt, **{"max_tokens": 24, "ignore_eos": True, **asked})
        for asked in ASKED
        for prompt in prompts
    ]
    return [[one.token_ids for one in future.result()] for future in futures]


def everything(llm: LLM) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the vocabulary, of generated tokens and the prompt's."""
    asked = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    (output,) = llm.generate(
        [*range(20, 60)], logprobs=-1, prompt_logprobs=5, **asked
    ).result()

    def row(entry: Any) -> list[float]:
        return [value for _, value in sorted(entry.top)]

    rows = [row(entry) for entry in output.logprobs or ()]
    first = [row(entry) for entry in output.prompt_logprobs or () if entry]
    return torch.tensor(rows), torch.tensor(first)


def test_a_part_of_a_model_is_not_handed_out(two: LLM) -> None:
    """Whoever computed with it alone would part the ranks."""
    with pytest.raises(EngineError, match="the model is shared by 2 ranks"):
        two.model  # noqa: B018


def processes(llm: LLM) -> Sequence[subprocess.Popen[bytes]]:
    leader = llm.engine_core.runner.ranks
    assert isinstance(leader, Leader)
    return leader.processes


def few_pages() -> EngineConfig:
    return replace(SMALL, num_pages=60)


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[LLM]:
    with LLM(folder, few_pages(), device="cpu", tensor_parallel_size=2) as llm:
        yield llm


def test_an_engine_answers_as_one_rank_does(folder: Path, two: LLM) -> None:
    with LLM(folder, few_pages(), device="cpu") as llm:
        expected, scores = answers(llm), everything(llm)
    assert answers(two) == expected
    for found, one in zip(everything(two), scores, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-5)
    assert scores[0].shape == (6, 1100)
    assert two.stats().preemptions > 0
    assert "error" not in two.stats().finished


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [None, 4])
@pytest.mark.parametrize("drafter", ["suffix", "a model", "a head"])
def test_drafts(drafter: str, number: int | None, folder: Path, tmp_path: Path) -> None:
    """Ranks time their steps together, where that says how many drafts there are.

    A model or a head that drafts is the first rank's alone, and whole. The model is the
    same once more.
    """
    names = {"a model": str(folder), "a head": str(tmp_path)}
    name = names.get(drafter, drafter)
    write_head(tmp_path, read_config(folder / "config.json"))
    drafts: dict[str, Any] = {"speculative": name, "num_speculative_tokens": number}
    config = replace(few_pages(), **drafts)
    with LLM(folder, few_pages(), device="cpu") as llm:
        expected = answers(llm)
    with LLM(folder, config, device="cpu", tensor_parallel_size=2) as llm:
        assert answers(llm) == expected
        stats = llm.stats()
        assert number is None or stats.drafts > 0
        if number is not None and drafter == "a model":
            assert sum(stats.accepted_tokens.values()) > 0


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with as many heads and experts as four ranks need."""
    path = tmp_path_factory.mktemp("wide")
    return write_model(path / "model", replace(SIXTEEN, vocab_size=1100))


@pytest.mark.parametrize(
    ("size", "experts"),
    [
        (2, True),
        pytest.param(4, True, marks=pytest.mark.exhaustive),
    ],
)
def test_more_ranks_and_whole_experts(size: int, experts: bool, wide: Path) -> None:
    """Four with a part of each expert are in test_tensor_parallel_schedules.py."""
    config = replace(few_pages(), enable_expert_parallel=experts)
    with LLM(wide, few_pages(), device="cpu") as llm:
        expected, scores = answers(llm), everything(llm)
    with LLM(wide, config, device="cpu", tensor_parallel_size=size) as llm:
        assert len(processes(llm)) == size - 1
        assert answers(llm) == expected
        for found, one in zip(everything(llm), scores, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-5)
        assert llm.stats().preemptions > 0


def test_ranks_that_wait_use_no_time(two: LLM) -> None:
    """They are told of a step when there is one."""
    (process,) = processes(two)
    before = cpu_seconds(process.pid)
    time.sleep(1.5)
    assert cpu_seconds(process.pid) - before < 0.5


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# When a rank ends, or doesn't.


def test_a_rank_that_dies_while_all_wait(folder: Path) -> None:
    llm = LLM(folder, SMALL, device="cpu", tensor_parallel_size=2)
    (process,) = processes(llm)
    process.kill()
    llm.engine_core.thread.join(5)
    with pytest.raises(EngineError, match="rank 1 ended with status -9"):
        llm.generate("x")
    llm.close()


@pytest.mark.parametrize(
    ("sent", "wrong"),
    [
        pytest.param(signal.SIGKILL, "status -9", marks=pytest.mark.exhaustive),
        (signal.SIGSTOP, "rank 1 hangs"),
    ],
    ids=["dies", "is stopped"],
)
def test_a_rank_that_stops_in_a_step(
    sent: signal.Signals, wrong: str, folder: Path
) -> None:
    llm = LLM(folder, SMALL, device="cpu", tensor_parallel_size=2)
    (process,) = processes(llm)
    stream = llm.stream("x", max_tokens=500, ignore_eos=True)
    next(stream)
    process.send_signal(sent)
    start = time.monotonic()
    with pytest.raises(EngineError, match=wrong):
        for _ in stream:
            pass
    llm.close()
    assert time.monotonic() - start < 15
    assert process.poll() is not None


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str, str], None]:
    """Have a rank of the next engine fail, as failing_rank.py says."""
    monkeypatch.setattr(ranks_module, "HANG_SECONDS", 2.0)
    monkeypatch.setattr(ranks_module, "LOAD_SECONDS", 4.0)

    def prepare(rank: int, when: str, how: str) -> None:
        begun, script = count(1), Path(__file__).with_name("failing_rank.py")

        class Process(subprocess.Popen[bytes]):
            def __init__(self, command: list[str], **options: Any) -> None:
                if next(begun) == rank:
                    command = [sys.executable, str(script), when, how, command[-1]]
                super().__init__(command, **options)

        monkeypatch.setattr(subprocess, "Popen", Process)

    return prepare


PHASES = ["loads", "prompt", "decode", "draws", "adds up"]
ASKED_FOR: dict[str, Any] = {
    "max_tokens": 8,
    "temperature": 1.0,  # greedy tokens are no draws
    "seed": 1,
    "ignore_eos": True,
}


def ends(folder: Path, wrong: str, **sizes: Any) -> None:
    """An engine of several ranks says what is wrong, soon, and leaves no process."""
    begun: list[Leader] = []
    begin = Leader.__init__

    def noted(self: Leader, *arguments: Any) -> None:
        begun.append(self)
        begin(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Leader, "__init__", noted)
        with pytest.raises(EngineError, match=wrong):
            llm = LLM(folder, SMALL, device="cpu", **sizes)
            start = time.monotonic()
            try:
                futures = [llm.generate("x", **ASKED_FOR) for _ in range(2)]
                for future in futures:
                    future.result(PATIENCE)
            finally:
                llm.close()
                assert time.monotonic() - start < 20
    (leader,) = begun
    assert len(leader.processes) == leader.size - 1
    assert all(process.poll() is not None for process in leader.processes)


FEW = [  # in the suite; the others are exhaustive
    (2, "loads", "dies"),
    (2, "adds up", "dies"),
]
# Each phase and way once, of two ranks and of four in turn: all pairs are there.
FAILURES = [
    (2 if (number % 2 == 0) == (how == "dies") else 4, when, how)
    for (number, when), how in product(enumerate(PHASES), ("dies", "hangs"))
]


@pytest.mark.parametrize(
    ("size", "when", "how"),
    [
        pytest.param(*each, marks=[] if each in FEW else [pytest.mark.exhaustive])
        for each in FAILURES
    ],
)
def test_a_rank_that_fails_ends_the_engine(
    size: int, when: str, how: str, wide: Path, failing: Callable[[int, str, str], None]
) -> None:
    """At each phase; of four ranks, the third."""
    rank = size - 1 if size == 2 else 2
    failing(rank, when, how)
    hangs = f"rank {rank} hangs: the others wait for it"
    wrong = hangs if how == "hangs" else f"rank {rank} ended with status -9"
    ends(wide, wrong, tensor_parallel_size=size)


@pytest.mark.parametrize(
    "how", ["computes", pytest.param("compiles", marks=pytest.mark.exhaustive)]
)
def test_a_rank_that_takes_long_does_not_hang(
    how: str, folder: Path, failing: Callable[[int, str, str], None]
) -> None:
    """It computes, or has another process compile, for longer than it may rest."""
    with LLM(folder, SMALL, device="cpu") as llm:
        expected = llm.generate("x", **ASKED_FOR).result()[0].token_ids
    failing(1, "decode", how)
    with LLM(folder, SMALL, device="cpu", tensor_parallel_size=2) as llm:
        start = time.monotonic()
        assert llm.generate("x", **ASKED_FOR).result()[0].token_ids == expected
        assert time.monotonic() - start > 3


def test_a_rank_that_cannot_load_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, since the folder that it is told of is not there."""
    begin = Leader.__init__

    def wrongly(
        self: Leader, size: int, options: dict[str, Any], device: torch.device
    ) -> None:
        begin(self, size, options | {"path": str(folder / "nowhere")}, device)

    monkeypatch.setattr(Leader, "__init__", wrongly)
    with pytest.raises(EngineError, match=r"rank 1 could not load: .*does not exist"):
        LLM(folder, SMALL, device="cpu", tensor_parallel_size=2)


def test_a_rank_says_why_though_its_connection_failed_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaders: list[Leader] = []
    begin, group = Leader.__init__, ranks_module.Group

    def wrongly(
        self: Leader, size: int, options: dict[str, Any], device: torch.device
    ) -> None:
        leaders.append(self)
        begin(self, size, options | {"path": str(folder / "nowhere")}, device)

    def lost(*args: Any) -> None:
        group(*args)
        leaders[0].processes[0].wait(60)
        raise RuntimeError("the connection was closed by the peer")

    monkeypatch.setattr(Leader, "__init__", wrongly)
    monkeypatch.setattr(ranks_module, "Group", lost)
    with pytest.raises(EngineError, match=r"rank 1 could not load: .*does not exist"):
        LLM(folder, SMALL, device="cpu", tensor_parallel_size=2)


SCRIPT = """
import sys, time
from simplellm import LLM
llm = LLM(sys.argv[1], device="cpu", tensor_parallel_size=2)
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
def test_no_rank_outlives_the_first(sent: signal.Signals, folder: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as first:
        pid = int(first.stdout.readline())
        first.send_signal(sent)
        assert first.wait(20) != 0
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and " Z " not in stat_of(pid):
        assert time.monotonic() < end, "a rank lives on"
        time.sleep(0.05)


def stat_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return " Z "


def test_a_process_shares_memory_of_its_gpu_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second time, ranks wouldn't find each other: they don't try."""
    monkeypatch.setattr(SymmetricMemory, "begun", True)
    assert Group(str(tmp_path), 0, 1, PATIENCE).share(64, 0) is None
    assert "NCCL" in caplog.text
