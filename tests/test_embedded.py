"""The embedded model: its files, its training data, what it can do."""

import itertools
import json
import random
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from corpus import EFFORTS, MAKERS, TOOL, Writer, developer_text, system_text
from evaluate import ask, evaluate
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tokenizer import main as make_tokenizer
from problems import EVALUATED, GLOSSARY, draw, evaluation_set, held_out
from safetensors import safe_open
from safetensors.torch import load_file
from train import (
    ROW,
    export_weights,
    fake_quantize,
    flatten,
    make_model,
    pack,
    predict,
)

from simplellm import LLM
from simplellm.checkpoint.families import read_config
from simplellm.checkpoint.families.gpt_oss import GPT_OSS_20B
from simplellm.checkpoint.folder import EMBEDDED
from simplellm.checkpoint.mxfp4 import MXFP4, quantize
from simplellm.text.harmony import Message
from simplellm.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
TOKENIZER = EMBEDDED / "tokenizer.json"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(TOKENIZER)


def test_files_are_small_and_few() -> None:
    files = [file for file in EMBEDDED.rglob("*") if file.is_file()]
    assert {str(file.relative_to(EMBEDDED)) for file in files} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "model.safetensors",
        "problems.json",
        "head/config.json",
        "head/model.safetensors",
    }
    assert sum(file.stat().st_size for file in files) <= 12_500_000


def test_layout_is_that_of_the_hub() -> None:
    with safe_open(EMBEDDED / "model.safetensors", "pt") as file:
        found = {
            re.sub(r"\.\d+\.", ".N.", name): file.get_slice(name).get_dtype()
            for name in file.keys()  # noqa: SIM118  (not a mapping)
        }
    layer = "model.layers.N."
    attention = [
        f"self_attn.{name}_proj.{kind}"
        for name in "qkvo"
        for kind in ("weight", "bias")
    ]
    dense = ["input_layernorm.weight", "post_attention_layernorm.weight", *attention]
    dense += ["self_attn.sinks", "mlp.router.weight", "mlp.router.bias"]
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    top = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    expected = dict.fromkeys([*top, *(layer + name for name in dense)], "BF16")
    for name in experts:
        expected[f"{layer}{name}_blocks"] = expected[f"{layer}{name}_scales"] = "U8"
        expected[f"{layer}{name}_bias"] = "BF16"
    assert found == expected


def test_config_differs_from_20b_in_size_only() -> None:
    ours = read_config(EMBEDDED / "config.json")
    for name in (
        "rope_theta",
        "rope_scaling",
        "max_position_embeddings",
        "sliding_window",
        "num_experts_per_tok",
        "head_dim",
        "swiglu_limit",
        "rms_norm_eps",
        "tie_word_embeddings",
    ):
        assert getattr(ours, name) == getattr(GPT_OSS_20B, name), name
    for size in (ours.hidden_size, ours.intermediate_size, ours.vocab_size):
        assert size & (size - 1), f"{size} is a power of two"


def test_the_glossary_is_the_course_s() -> None:
    text = (ROOT / "chapters/glossary.md").read_text(encoding="utf-8")
    entries = re.findall(
        r"^- \*\*(.+?)\*\*: (.+) \(\[chapter \d+\]\(.+\)\)$", text, re.M
    )
    course = {term: definition + "." for term, definition in entries}
    assert len(GLOSSARY) >= 60
    assert course | GLOSSARY == course


@pytest.mark.parametrize("maker", MAKERS)
def test_training_never_draws_what_is_held_out(maker) -> None:
    rng = random.Random(1)
    assert not any(held_out(draw(maker, rng, evaluation=False).key) for _ in range(300))


def test_evaluation_set_is_held_out_and_distinct() -> None:
    problems = evaluation_set(1000)
    assert all(held_out(problem.key) for problem in problems)
    assert len({problem.question for problem in problems}) == 1000
    assert {problem.skill for problem in problems} == set(EVALUATED)
    assert problems == evaluation_set(1000)


def test_answers_are_right() -> None:
    """The generator's own arithmetic, against Python's."""
    for problem in evaluation_set(1000):
        if problem.skill in ("addition", "subtraction", "calculator"):
            sum_text, _, result = problem.answer.partition(" = ")
            assert eval(sum_text) == int(result)
            if problem.skill != "calculator":
                assert problem.medium.endswith(f"So {result}.")
        elif problem.skill == "counting":
            letter, count, word = re.findall(
                r'"(\w)".*? (\d+) .*"(\w+)"', problem.answer
            )[0]
            assert word.count(letter) == int(count)
        elif problem.skill == "comparing":
            one, how, two = re.match(
                r"([\d.]+) is (\w+) than ([\d.]+)\.", problem.answer
            ).groups()
            assert (float(one) > float(two)) == (how == "larger")


@pytest.mark.parametrize("effort", EFFORTS)
def test_training_text_is_what_chat_renders(tokenizer: Tokenizer, effort: str) -> None:
    writer = Writer(tokenizer)
    for maker in EVALUATED.values():
        problem = draw(maker, random.Random(2), evaluation=True)
        tools = (TOOL,) if problem.expression else ()
        history = [Message("system", system_text(effort, tools=bool(tools)))]
        if tools:
            history.append(Message("developer", developer_text(None, tools)))
        (asked, learned), *_ = writer.turn(history, problem, effort)
        assert not learned
        assert asked == ask(problem, effort, tokenizer, [])


def test_documents_pack_whole(tokenizer: Tokenizer) -> None:
    tokens, targets, owner = pack((str(TOKENIZER), 7, 6))
    assert tokens.shape == targets.shape == owner.shape == (6, ROW)
    documents = Writer(tokenizer).documents(7)
    for spans in itertools.islice(documents, 4):
        ids, labels = flatten(spans)
        assert len(ids) == len(labels)
        assert labels[-1] == -100
        assert any(label != -100 for label in labels)
    ids, labels = flatten(next(Writer(tokenizer).documents(7)))
    assert tokens[0, : len(ids)].tolist() == ids
    assert targets[0, : len(ids)].tolist() == labels


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.floats(-20, 20))
def test_training_rounds_as_the_package_does(seed: int, exponent: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 96, generator=generator) * 2.0**exponent
    assert torch.equal(
        fake_quantize(weight), quantize(weight).dequantize(torch.float32)
    )


def test_what_is_trained_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network with the embedded weights: its export, and what it predicts."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # float32
    model = make_model(str(EMBEDDED / "config.json"))
    weights = load_file(EMBEDDED / "model.safetensors")
    state = {}
    for name in model.state_dict():
        if name in weights:
            state[name] = weights[name].float()
        else:
            packed = MXFP4(weights[f"{name}_blocks"], weights[f"{name}_scales"])
            state[name] = packed.dequantize(torch.float32).transpose(1, 2)
    model.load_state_dict(state)
    again = export_weights(model)
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    # Longer than a window, and twice in a row: the second does not see the first.
    ids = torch.randint(1000, (150,), generator=torch.Generator().manual_seed(0))
    place = torch.arange(150).repeat(2)
    document = torch.arange(2).repeat_interleave(150)
    with torch.no_grad():
        found, _ = predict(model, ids.repeat(2)[None], document[None], place[None])
    with LLM(device="cpu") as llm:
        expected = llm.model.logits(ids).float()
    for half in found[0].chunk(2):
        assert (half - expected).abs().max() < 1e-3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_tokenizer_can_be_made_again(tmp_path: Path, monkeypatch) -> None:
    again = tmp_path / "tokenizer.json"
    monkeypatch.setattr("sys.argv", ["make_tokenizer.py", str(again)])
    make_tokenizer()
    assert again.read_bytes() == TOKENIZER.read_bytes()


def test_held_out_problems_are_answered() -> None:
    """One of each skill, through the engine; the evaluation asks a thousand."""
    with LLM(device="cpu") as llm:
        efforts, wrong = evaluate(llm, evaluation_set(9), "high")
    assert wrong == []
    assert sum(row["of"] for row in efforts.values()) == 9


def test_recorded_evaluation_meets_its_bar() -> None:
    recorded = json.loads((ROOT / "figures/evaluation.json").read_text())
    high, low = recorded["efforts"]["high"], recorded["efforts"]["low"]
    assert sum(row["of"] for row in high.values()) == 1000
    for skill, row in high.items():
        bar = 0.99 if skill in ("addition", "subtraction") else 0.95
        assert row["right"] >= bar * row["of"], skill
    for skill in ("addition", "subtraction", "counting"):
        assert low[skill]["right"] < 0.9 * high[skill]["right"], skill
