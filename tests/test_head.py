"""An EAGLE-3 head: its files, what it computes, and that no text changes by it."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heads import drafted, layers_of, write_head
from models import SMALL
from problems import evaluation_set
from stepping import make_engine
from test_runner import Tape
from test_speculation import answers
from torch import Tensor

from simplellm import LLM, SamplingParams
from simplellm.api.load import load_model
from simplellm.base.config import ConfigError
from simplellm.base.request import UNKNOWN, Request
from simplellm.checkpoint.eagle import head_config, read_head, read_head_config
from simplellm.engine import build_speculation, graphs, head_drafter
from simplellm.engine.build_speculation import capture_drafts
from simplellm.engine.draft_budget import StepCosts
from simplellm.engine.graphs import bucket_sizes, verify_shapes
from simplellm.engine.scheduler import ScheduledChunk
from simplellm.engine.speculator import DRAFTERS, HeadDrafts
from simplellm.engine.verify_chunks import PlaceholderChunk
from simplellm.model.eagle import with_taps
from simplellm.model.kv_pool import KVPool
from simplellm.model.model import Model
from simplellm.model.one_sequence import PAGE, one_sequence

GREEDY_PARAMS = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Model:
    return load_model(folder, device="cpu")


FLAGS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True, "attention_bias": True},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True},
]


def states_of(model: Model, layers: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """What these layers make of a text that is computed at once: [T, 3 * hidden]."""
    windows, pages = model.config.windows, -(-len(tokens) // PAGE)
    pool = KVPool(model.config, pages * len(windows), PAGE, model.dtype, model.device)
    batch = one_sequence(torch.tensor(tokens), 0, pages, windows, model.device)
    seen: dict[int, Tensor] = {}
    taps = {n + 1: lambda x, n=n: seen.setdefault(n, x.clone()) for n in layers}
    with torch.inference_mode():
        replace(model, ops=with_taps(model, taps)).forward(
            batch, pool, batch.tokens[:1]
        )
    return torch.cat([seen[n] for n in layers], dim=-1)


# What it computes


@pytest.mark.parametrize(
    ("flags", "pages"), [*((flags, 20) for flags in FLAGS), ({}, 120)]
)
def test_drafts_are_those_of_a_text_computed_at_once(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, Any],
    pages: int,
) -> None:
    """In chunks, among others, after wrong drafts, after giving way, from a cache."""
    model = load_model(folder, device="cpu")
    tensors = write_head(tmp_path, model.config, **flags)
    seen: list[tuple[list[int], list[int]]] = []
    propose = HeadDrafts.propose

    def noted(self: HeadDrafts, tokens: list[int], most: int) -> Any:
        drafts = propose(self, tokens, most)
        seen.append(([*tokens], drafts[0]))
        return drafts

    config = replace(SMALL, num_pages=pages, speculative=str(tmp_path))
    config = replace(config, num_speculative_tokens=3)
    prompts = [([n, *range(3, 9), 2 * n] * 3)[:20] for n in range(1, 7)]
    options: Any = {"max_tokens": 14, "temperature": 0, "ignore_eos": True}
    with LLM(folder, config, device="cpu") as llm:
        if pages > 20:  # they will be found in the cache
            llm.generate(prompts, **options).result()
        monkeypatch.setattr(HeadDrafts, "propose", noted)
        outputs = llm.generate(prompts, **options).result()
        stats = llm.stats()
    cached = [output.num_cached_tokens > 0 for output in outputs]
    assert all(cached) if pages > 20 else stats.preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        text = [*prompt, *output.token_ids]
        mine = [(t, d) for t, d in seen if d and t == text[: len(t)]]
        for tokens, drafts in mine[:: max(1, len(mine) // 4)]:
            states = states_of(model, layers_of(model.config), tokens[:-1])
            count = len(drafts)
            args = tensors, flags, model.embed_tokens, states, tokens, count
            assert drafted(*args) == drafts
    assert stats.drafts > 20


# The engine's texts


def test_a_heads_drafts_change_no_text(tmp_path: Path) -> None:
    expected, _ = answers()
    with LLM(device="cpu") as llm:
        write_head(tmp_path, llm.config, norm_before_fc=True, norm_output=True)
    for number in (None, 4):
        options = {"speculative": str(tmp_path), "num_speculative_tokens": number}
        texts, stats = answers(**options)
        assert texts == expected
    assert stats.draft_tokens["4"] > 100


def test_the_embedded_model_has_a_head() -> None:
    """Which guesses its answers to held-out questions, and changes none of them."""
    asked = [problem.question for problem in evaluation_set(18)]  # two of each kind
    chats = [[{"role": "user", "content": text}] for text in asked]
    drafting: dict[str, Any] = {"speculative": "head", "num_speculative_tokens": 3}
    found = []
    for options in ({}, drafting):
        with LLM(device="cpu", dtype="float32", **options) as llm:
            outputs = llm.chat(chats, temperature=0, max_tokens=200)
            found.append([output.choices[0].token_ids for output in outputs])
            stats = llm.stats()
    assert found[0] == found[1]
    length = 1 + sum(stats.accepted_tokens.values()) / stats.drafts
    assert length > 2.5, length


@pytest.mark.parametrize("overlap", [False, True])
def test_captured_drafts_are_those_of_other_steps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """With padding rows, and more drafts than fit in a row. A graph computes again."""
    model, tape = load_model(folder, device="cpu"), Tape()
    write_head(tmp_path, model.config)
    replays = Counter[str]()

    def recorded(run: Any, pool: Any = None) -> SimpleNamespace:
        def replay() -> None:
            replays[run.func.__name__] += 1
            run()

        return SimpleNamespace(replay=replay, pool=lambda: "a pool")

    monkeypatch.setattr(graphs, "capture_graph", tape)
    monkeypatch.setattr(head_drafter, "capture_graph", recorded)
    config = replace(SMALL, speculative=str(tmp_path), num_speculative_tokens=5)
    found = []
    for captured in (False, True):
        engine = make_engine(replace(model), config, overlap=overlap)
        runner, speculator = engine.runner, engine.scheduler.speculator
        if captured:
            runner._pages = lambda scheduled, runner=runner: runner.table_width
            runner.capture(bucket_sizes(8), (16, 32), verify_shapes(8, 40))
            capture_drafts(engine.scheduler, runner)
        asked = [
            Request(([n, *range(3, 9), 2 * n] * 3)[: 12 + n], 9 + n, GREEDY_PARAMS,
                    request_id=n)
            for n in range(1, 7)
        ]  # fmt: skip
        engine.submit(asked)
        drafts = []
        while engine.scheduler.requests or engine.flights:
            engine.step()
            drafts.append({r.request_id: [*r.drafts] for r in asked if r.drafts})
        found.append(([r.tokens for r in asked], drafts, speculator.draft_stats()))
    assert found[0] == found[1]
    assert found[0][2]["drafts"] > 20
    names = ["_read", "_draft", *(["_resolve"] if overlap else [])]
    assert min(replays[name] for name in names) > 5, replays


def test_steps_that_fail_between_drafts_change_no_token(
    folder: Path, tmp_path: Path
) -> None:
    """Each request is tried by itself, from where its last drafts have brought it."""
    model = load_model(folder, device="cpu")
    write_head(tmp_path, model.config)
    config = replace(SMALL, speculative=str(tmp_path), num_speculative_tokens=3)
    found, sizes, failed = [], list[int](), list[int]()
    for failing in (False, True):
        engine = make_engine(replace(model), config, overlap=True)
        launch = engine.runner.launch

        def launch_or_fail(
            scheduled: Sequence[ScheduledChunk], launch: Any = launch
        ) -> Any:
            sizes.append(len(scheduled))
            placeholders = any(isinstance(c, PlaceholderChunk) for c in scheduled)
            if placeholders and len(scheduled) == 3 and len(sizes) % 3 == 0:
                failed.append(len(sizes))
                raise RuntimeError("this step failed")
            return launch(scheduled)

        if failing:
            engine.runner.launch = launch_or_fail
        asked = [
            Request([n, *range(3, 9)], 20, GREEDY_PARAMS, request_id=n)
            for n in range(1, 4)
        ]
        engine.submit(asked)
        while engine.scheduler.requests or engine.flights:
            engine.step()
        found.append([(r.tokens, r.finish_reason) for r in asked])
    assert found[0] == found[1]
    assert len(failed) > 2
    assert all(sizes[place : place + 3] == [1, 1, 1] for place in failed)


def test_a_step_may_know_of_the_last_drafts_when_it_samples(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bad words wait for a last token. Others draw as ever, and may have ended by then.

    The first request's drafts are right, and the last ones end at stop tokens.
    """
    model = load_model(folder, device="cpu")
    write_head(tmp_path, model.config)
    drafting = replace(SMALL, speculative=str(tmp_path), num_speculative_tokens=1)
    drawn = SamplingParams(temperature=1.0, seed=5)
    bound = SamplingParams(temperature=0, bad_words=["x"])
    ends = frozenset(range(0, model.config.vocab_size, 8))
    found: list[Any] = []
    for config in (SMALL, drafting):
        engine = make_engine(replace(model), config, overlap=True)
        asked = [
            Request([5, 6, 7], 20, drawn, request_id=0),
            Request([8, 9], 30, bound, bad_sequences=[(1, 2)], request_id=1),
            *(
                Request([n, 11, 12], 20, GREEDY_PARAMS, ends, request_id=n)
                for n in range(2, 6)
            ),
        ]
        if (proposer := engine.runner.proposer) is not None:

            def draft(
                normed: Tensor, proposer: Any = proposer, head: Any = proposer.head
            ) -> Tensor:
                tokens = type(head).draft(head, normed)
                if (row := proposer.row_of.get(0)) is not None:
                    place = int(proposer.positions[row]) + 2
                    tokens[row] = [*found[0][0][0], 0][place]
                return tokens

            vars(proposer.head)["draft"] = draft
        engine.submit(asked)
        while engine.scheduler.requests or engine.flights:
            engine.step()
        known = [[t for t in r.tokens if t != UNKNOWN] for r in asked]
        found.append([*zip(known, [r.finish_reason for r in asked], strict=True)])
    assert found[0] == found[1]
    assert {reason for _, reason in found[0][2:]} == {"stop"}
    assert engine.scheduler.speculator.accepted[1] >= 9
    assert not caplog.records


class WrongDrafter:
    """Says what never comes: the last token once more, and 1 where that's repeated."""

    def propose(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
        return [tokens[-1] ^ 1] * most, 0


def calls_of(run: Any) -> Counter[tuple[str, str]]:
    """Which functions the modules of engine/ call: the module, and the function."""
    calls = Counter[tuple[str, str]]()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event not in ("call", "c_call"):
            return
        caller = frame.f_back if event == "call" else frame
        name = frame.f_code.co_name if event == "call" else argument.__name__
        file = Path(caller.f_code.co_filename)
        if file.parent.name == "engine":
            calls[file.name, name] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("kind", ["head", "suffix"])
def test_a_step_without_drafts_is_one_of_an_engine_without_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Once drafts are given up: the same calls, and the next step as early."""
    tape, model = Tape(), load_model(folder, device="cpu")
    write_head(tmp_path, model.config)
    monkeypatch.setattr(graphs, "capture_graph", tape)
    replays = lambda run, pool=None: SimpleNamespace(replay=run, pool=lambda: pool)  # noqa: E731
    monkeypatch.setattr(head_drafter, "capture_graph", replays)
    monkeypatch.setitem(DRAFTERS, "suffix", WrongDrafter)
    plain = replace(SMALL, page_size=64, num_pages=40)
    name = str(tmp_path) if kind == "head" else kind
    found, texts, count = [], [], 5
    monkeypatch.setattr(
        build_speculation, "time_steps", lambda runner: {1: 1.0, 512: 1.0}
    )
    for config in (plain, replace(plain, speculative=name)):
        engine = make_engine(replace(model), config, overlap=True)
        runner = engine.runner
        runner._pages = lambda scheduled, runner=runner: runner.table_width
        runner.capture(bucket_sizes(8), (16, 32), verify_shapes(8, config.max_drafts))
        capture_drafts(engine.scheduler, runner)
        asked = [
            Request([n, *range(3, 9)], 40, GREEDY_PARAMS, request_id=n)
            for n in range(1, count + 1)
        ]
        engine.submit(asked)
        if config.speculative:
            speculator = engine.scheduler.speculator
            # All drafts are free, so that they are tried.
            speculator.draft_costs = StepCosts({1: 0.0})
            while speculator.backoff.left != 20:
                engine.step()
        while any(r.num_output < 10 for r in asked):
            engine.step()
        assert all(r.tokens[-1] == UNKNOWN for r in asked)
        found.append(calls_of(engine.step))
        while engine.scheduler.requests or engine.flights:
            engine.step()
        texts.append([r.tokens for r in asked])
    assert texts[0] == texts[1]
    # Names of modules begin so.
    own = "speculat", "draft", "head_drafter", "host_proposer", "verify_chunks"
    assert found[0] - found[1] == Counter() and len(found[0]) > 50
    more = found[1] - found[0]
    asks = {name for (file, name) in more if not file.startswith(own)}
    # Beside those, it asks whether there is something to do: a few calls a step.
    assert asks <= {"begin", "has_drafts", "prepare", "propose"}, asks
    assert more.total() <= 31 + count, more


# Its files

FLAT = {  # as SpecForge's configs
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 11, 21]},
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 17280,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
    "draft_vocab_size": 32000,
}
NESTED = {  # as speculators'
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3"},
    "norm_before_residual": True,
    "norm_before_fc": True,
    "draft_vocab_size": 32000,
    "eagle_aux_hidden_state_layer_ids": [2, 12, 22],
    "transformer_layer_config": {
        key: FLAT[key]
        for key in FLAT
        if key not in ("architectures", "eagle_config", "draft_vocab_size")
    }
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
}


def test_both_layouts_of_files_are_read() -> None:
    flat, nested = head_config(FLAT), head_config(NESTED)
    # Speculators count from the layer that the states go into.
    assert flat.layers(24) == nested.layers(24) == (1, 11, 21)
    assert (flat.rope_theta, nested.rope_theta) == (10000.0, 500000.0)
    assert nested.norm_before_fc and nested.norm_before_residual
    same = {"norm_before_fc": False, "norm_before_residual": False}
    assert replace(nested, rope_theta=1e4, **same) == flat
    without = {k: v for k, v in FLAT.items() if k != "eagle_config"}
    assert head_config(without).layers(36) == (1, 17, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures is"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; expected 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
        ({"tree_width": 4}, "tree_width is 4; expected no such field"),
        ({"draft_vocab_size": 300000}, "draft_vocab_size is 300000; expected at most"),
        ({"hidden_size": None}, "hidden_size is None; expected an integer"),
        ({"rope_scaling": {"rope_type": "magic"}}, "rope_type is 'magic'"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step is 4"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
            r"eagle_aux_hidden_state_layer_ids is \[1, 2\]; expected three layers'",
        ),
    ],
)
def test_what_a_config_says_that_is_not_known(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        head_config(FLAT | change)


def test_a_head_for_another_model_is_refused_at_the_door(
    folder: Path, tiny: Model, tmp_path: Path
) -> None:
    def refused(message: str, path: Path = tmp_path) -> None:
        with pytest.raises(ValueError, match=message):
            LLM(folder, SMALL, device="cpu", speculative=str(path))

    expected = "expected one of 'suffix', 'head', or the"
    refused(f"speculative is .*; {expected}", tmp_path / "none")
    refused("speculative is 'head'; expected a folder .*head with the", Path("head"))
    write_head(tmp_path, replace(tiny.config, vocab_size=2 * tiny.config.vocab_size))
    refused("vocab_size is .*; expected .*, the model's vocab_size")
    write_head(tmp_path, replace(tiny.config, hidden_size=64))
    refused("target_hidden_size is 64; expected .*, the model's hidden_size")
    last = tiny.config.num_hidden_layers - 1
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 0, last]}
    write_head(tmp_path, tiny.config, eagle_config=ids)
    refused(f"layer_ids is {last}; expected a layer from 0 to {last - 1}")


def test_tensors_that_are_wrong_are_named(tiny: Model, tmp_path: Path) -> None:
    write_head(tmp_path, tiny.config)
    file = tmp_path / "config.json"
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data | {"fc_norm": True}))
    config = read_head_config(tmp_path)
    with pytest.raises(ValueError, match=r"fc_norm.0.weight is None; expected a tens"):
        read_head(tmp_path, config)
    file.write_text(json.dumps(data | {"intermediate_size": 56}))
    with pytest.raises(ValueError, match=r"layer.mlp.gate_proj.weight's shape is"):
        read_head(tmp_path, read_head_config(tmp_path))
    write_head(tmp_path, tiny.config, norm_before_fc=True)
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"input_norm.weight'; expected no such ten"):
        read_head(tmp_path, read_head_config(tmp_path))
    file.write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_head_config(tmp_path)
