"""What the scripts in tools/gpu/ are made of, as far as that runs without a GPU."""

import json
import random
from dataclasses import replace
from functools import partial
from statistics import mean

import pytest
import torch
from checkpoints import TINY
from families import drawn, write
from families_text import KINDS, write_text_side
from transformers import LlamaConfig

from simplellm import LLM, SamplingParams
from simplellm.checkpoint.families.gpt_oss import MODELS
from simplellm.engine.page_manager import PageManager

pytest.importorskip("triton")
import agents
import cases
import client
import clients
import compare
import fp8_cache
import fp8_experts
import gpu_accuracy as accuracy
import host
import host_pages
import parallel
import real
import sanitize
import speeds
import steady
import streams
import tune

from simplellm.model.kernels import linear


@pytest.fixture(scope="module")
def model():
    """Two layers of a tiny model, computed by PyTorch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "CUDA", torch.device("cpu"))
        patch.setattr(cases, "L2", 1e4)
        patch.setitem(MODELS, "tiny", replace(TINY, vocab_size=200_000))
        # In bfloat16 PyTorch's router meets ties, and the reference is float32.
        patch.setattr(cases, "normal", partial(cases.normal, dtype=torch.float32))
        yield cases.random_model("tiny", 2, dtype=torch.float32, kernels=False)


def test_every_case_can_be_called_and_agrees_with_its_twin(model):
    small = cases.small_cases(model)
    assert list(small) == sanitize.KERNELS
    for some in small.values():
        for case in some:
            assert case.nbytes > 0
            assert len(case.arguments) >= 2
            assert tune.right(case, case.expected()) == "", case


def test_a_wrong_case_is_found(model):
    case = cases.Cases(model).project("qkv", 3)
    wrong = replace(case, operation=lambda *inputs: 1.1 * case.operation(*inputs))
    assert "wrong by" in tune.right(wrong, case.expected())
    noisy = replace(case, operation=lambda x, *rest: torch.randn_like(x))
    assert "other bits" in tune.right(noisy, None)


def test_sequences_of_a_case_lie_where_their_tables_say(model):
    groups, pages = cases.groups([300, 500], [140, 1], 128, sets=2)
    assert pages == 2 * (5 + 3)
    seen = torch.cat([group.slots // cases.PAGE for group in groups])
    assert seen.unique().numel() <= pages
    for group in groups:
        assert group.offsets.tolist() == [0, 320]
        assert group.slots.unique().numel() == 141


def test_variants_take_the_place_of_what_a_module_would_choose(model):
    case = cases.Cases(model).project("qkv", 2)
    chosen = linear.choose(2, 64, 64)
    for variant in tune.VARIANTS["qkv"](case):
        with variant.patched():
            assert linear.choose(2, 64, 64) != chosen or variant.name
        assert linear.choose(2, 64, 64) == chosen


def test_every_variant_names_what_there_is(model):
    made = cases.Cases(model)
    some = [made.attend([300] * 2, [1] * 2), made.attend([300], [300])]
    some += [made.experts(tokens) for tokens in (1, 20)]
    some += [made.head(2), made.project("o", 1)]
    for case in some:
        for variant in tune.VARIANTS[case.kernel](case):
            assert variant.name
            with variant.patched():
                pass


def test_other_experts_have_cases_and_variants(model, monkeypatch):
    """Of a model like Qwen3-30B-A3B, and where experts are of 8 bits."""
    found = {}
    for name in ("Qwen3-30B-A3B", "Qwen3-30B-A3B-FP8"):
        config = cases.OTHERS[name]
        sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 24}
        small = replace(config, num_local_experts=9, num_experts_per_tok=3, **sizes)
        monkeypatch.setitem(cases.OTHERS, name, small)
        tiny = cases.random_model(name, 2, dtype=torch.float32, kernels=False)
        case = found[name] = cases.Cases(tiny).experts(5)
        assert tune.right(case, case.expected()) == ""
        for variant in tune.VARIANTS["experts"](case):
            with variant.patched():
                assert variant.name
    plain, scaled = (case.nbytes for case in found.values())
    # Bytes of an expert; two layers' are averaged. Of 8 bits they have two tiles.
    assert 2 * plain % (2 * 3 * 32 * 24) == 0 < plain
    assert 2 * scaled % (3 * 32 * 24 + 2 * 4) == 0 < scaled


def test_dense_models_have_cases_and_variants(monkeypatch):
    for name in ("Qwen3-8B", "Qwen3-8B-FP8"):
        sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 24}
        small = replace(cases.OTHERS[name], **sizes)
        monkeypatch.setitem(cases.OTHERS, name, small)
        tiny = cases.random_model(name, 2, dtype=torch.float32, kernels=False)
        for part in ("qkv", "o", "gate_up", "down"):
            case = cases.Cases(tiny).project(part, 2)
            assert tune.right(case, case.expected()) == ""
            assert case.nbytes > case.arguments[0][1].nbytes
            for variant in tune.VARIANTS[part](case):
                with variant.patched():
                    assert variant.name


def test_a_client_steps_an_engine(model):
    engine = client.make_engine(model, num_pages=40, cuda_graphs=False)
    one = client.Client(engine)
    first, second = (one.ask(client.random_prompt(20, n), 5) for n in range(2))
    one.finish()
    assert len(one.tokens(first)) == len(one.tokens(second)) == 5
    again = client.Client(engine)
    number = again.ask(client.random_prompt(20, 0), 5)
    again.finish()
    assert again.tokens(number) == one.tokens(first)


def test_chunks_have_the_logits_of_the_whole(model):
    tokens = torch.arange(40)
    whole = model.logits(tokens)
    found = accuracy.chunked(model, tokens, [20, 15, 1, 1, 3])
    assert accuracy.compare(found, whole)["median"] < 0.02


def test_what_is_slower_is_said():
    def rows(tree, *speeds):
        return [
            {"model": "gpt-oss-20b", "tree": tree, "found": found}
            for speed in speeds
            for found in [{"decode 1, tokens/s": speed, "start cached, s": 5.0}]
        ]

    same = list(compare.table(rows("old", 100, 101) + rows("new", 99, 100)))
    assert len(same) == 3
    assert not any("slower" in line for line in same)
    slow = list(compare.table(rows("old", 100, 101) + rows("new", 90, 91)))
    assert "slower" in slow[1] and "slower" not in slow[2]
    noisy = list(compare.table(rows("old", 80, 101) + rows("new", 80, 81)))
    assert not any("slower" in line for line in noisy)


@pytest.mark.parametrize(("prompt", "answer"), [(1000, 1000), (1024, 8192), (8192, 90)])
def test_requests_at_random_points_of_their_lives_fill_the_cache(prompt, answer):
    manager = PageManager(20_000, 64, window=128, enable_caching=False)
    count, chance = steady.fitting(prompt, answer, manager), random.Random(1)
    for number in range(count):
        length = prompt + chance.randrange(answer)
        manager.add(number, [0] * length)
        assert manager.allocate(number, length)
        manager.commit(number, [0] * length, length)
    assert 0.85 < manager.usage < 1
    assert manager.free_tokens > prompt


def test_only_steady_seconds_count():
    options = {"max_num_seqs": 6, "num_pages": 500, "enable_prefix_caching": False}
    with LLM(device="cpu", **options) as llm:
        found = steady.steady(llm, 20, 10, 2.0)
        stats = llm.stats()
    assert found["requests"] == 6 and found["ended"] > 6
    tokens = found["tokens_per_second"] * found["steady_seconds"]
    assert 10 * (found["ended"] - 6) < tokens < 10 * (found["ended"] + 6)
    assert tokens < stats.generated_tokens and found["preemptions"] == 0
    assert mean(found["parts"]) == pytest.approx(found["tokens_per_second"], rel=0.2)


@pytest.mark.exhaustive
def test_clients_get_all_their_tokens():
    (found,) = clients.turns(None, [3], 5)
    assert len(found) == clients.TURNS
    for turn in found:
        assert turn["answered"] == 3 and turn["output_tokens"] == 15
        assert turn["prompt_tokens"] == 3 * clients.PROMPT


@pytest.mark.usefixtures("quiet_transformers")
def test_a_real_model_is_measured(tmp_path, monkeypatch, capsys):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes["max_position_embeddings"] = 4096  # the whole text is a prompt
    vocabulary = KINDS["llama"]().get_vocab_size()
    folder = write(tmp_path, drawn(LlamaConfig(vocab_size=vocabulary, **sizes)))
    write_text_side(folder, "llama")
    monkeypatch.setattr(real, "TOKENS", 40)
    monkeypatch.setattr(real, "GREEDY", 3)
    found = real.measure(folder, "cpu")
    ours, theirs, *formats = found["rows"]
    assert ours["mean_kl"] < 1e-6 < theirs["mean_kl"] < 1
    assert [row["format"] for row in formats] == ["fp8", "int8", "mxfp4"]
    assert all(row["mean_kl"] < 1e-3 for row in formats)
    assert found["equal_to_alone"] == 32 and found["widest_gap"] < 1e-3
    assert "32 of 32" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.parametrize("ways", [(False, False), (True, False), (False, True)])
def test_several_ranks_are_measured_beside_one(ways, monkeypatch):
    sizes = {"vocab_size": 1000, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 1, "head_dim": 16}
    small = speeds.MODELS["Llama-3.1-8B"][1] | sizes
    if any(ways):
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        small |= {"model_type": "mixtral", **experts}
    monkeypatch.setitem(speeds.MODELS, "small", ("small", small))
    monkeypatch.setattr(parallel, "DEVICE", "cpu")
    monkeypatch.setattr(parallel, "LENGTH", 6)
    monkeypatch.setattr(parallel, "CACHE", 10**7)
    monkeypatch.setattr(parallel, "PREFILL", (2, 220))
    row = parallel.measured("small", 2, [1], *ways)
    (decode,) = row["decode"]
    assert row["error"] < 1e-4 and decode["batch"] == 1
    assert min(map(min, decode["step_ms"])) > 0 and decode["times"] > 0
    assert min(row["prefill"]["tokens_per_second"]) > 0


@pytest.mark.exhaustive
def test_other_families_are_measured_by_name(tmp_path, monkeypatch):
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 1, "head_dim": 16}
    small = {n: (r, data | sizes) for n, (r, data) in list(speeds.MODELS.items())[:2]}
    monkeypatch.setattr(speeds, "MODELS", small | {"worse": ("worse", {})})
    shape = "--random-weights --batch 1,64 --input-len 4 --output-len 9 --prefill 2x16"
    monkeypatch.setattr(speeds, "BENCH", [*shape.split(), "--device", "cpu"])
    found = [
        speeds.measure(name, tmp_path / f"c-bench-{record}.json", 200)
        for name, (record, _) in speeds.MODELS.items()
    ]
    assert found[:2] == ["", ""] and "worse" in found[2]
    heads, *rows = speeds.table(tmp_path)
    assert [row.split()[0] for row in rows] == [*small]
    assert len({len(line) for line in (heads, *rows)}) == 1
    record = json.loads((tmp_path / "c-bench-qwen3.json").read_text())
    assert record["model"] == "Qwen3-8B" and record["weights"] == "random"
    assert "bench Qwen3-8B" in record["command"]


def test_python_s_time_is_found_without_a_model():
    """The engine answers from a table: it spends time, and knows no weights' tokens."""
    found = host.measure(streams=3, tokens=20)
    assert [*found] == ["engine", "text", "wall"]
    assert min(found.values()) > 0
    with LLM(device="cpu") as llm:
        host.without_model(llm, 3)
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=9)
        prompts = [[1], [2], [3]]
        first, second = (llm.generate(prompts, params).result() for _ in range(2))
    tokens = [[output.token_ids for output in outputs] for outputs in (first, second)]
    assert tokens[0] != tokens[1], "they depend on the step alone"


SMALL = dict(model_type="llama", hidden_size=32, intermediate_size=48)
SMALL |= dict(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
SMALL |= dict(head_dim=8, rope_theta=1e4, max_position_embeddings=512, vocab_size=1040)


def test_many_streams_get_their_text():
    rates = streams.measure(SMALL, streams=3, tokens=20, times=2)
    assert len(rates) == 2
    assert min(rates) > 0


@pytest.mark.parametrize("kind", fp8_cache.KINDS)
def test_long_contexts_are_decoded_together(kind, monkeypatch):
    monkeypatch.setattr(fp8_cache, "NEW", 30)
    row = fp8_cache.measure(SMALL | {"vocab_size": 97}, kind, batch=3, context=40)
    assert row["kv_cache_dtype"] == kind
    assert row["step_ms"] > 0
    assert 20 < row["steps"] < 30


def test_a_prefix_comes_back_from_the_host():
    row = host_pages.measure(SMALL, tokens=320, rounds=2)
    assert row["tokens"] == 320 and 128 <= row["loaded_tokens"] <= 320
    assert row["share"] == row["back_ms"] / row["computed_ms"] > 0


@pytest.mark.parametrize("accepted", [None, 2.5])
def test_agents_get_what_was_computed_a_turn_ago(accepted):
    shape = SMALL | {"vocab_size": 97, "num_hidden_layers": 5 if accepted else 1}
    how = {"lengths": (200, 40, 20), "turns": 4, "accepted": accepted}
    row = agents.measure(shape, users=3, page_size=16, **how)
    if accepted:  # where none of random weights would be
        assert 0 < row["accepted_drafts"] < row["drafts"]
    assert row["users"] == 3 and row["preemptions"] == 0
    assert row["prompt_tokens"] == 200 + 60 * (1 + 2 + 3) / 3
    assert 0.6 < row["cached"] < 0.9
    assert row["tokens_per_second_of_a_user"] > 0


def test_what_rounded_experts_cost_is_measured_along_the_first_answers():
    problems, texts = fp8_experts.evaluation_set(9), list[list[int]]()
    row, logits = fp8_experts.embedded("auto", problems, texts)
    assert (row["right"], row["of"]) == (9, 9)
    assert [len(text) for text in texts] == [len(one) for one in logits]
    found = fp8_experts.distance(logits, logits)
    assert found["mean_kl"] == found["worst_kl"] == 0 and found["same_argmax"] == 1
    assert fp8_experts.distance(logits, [one.flip(-1) for one in logits])["mean_kl"] > 1
