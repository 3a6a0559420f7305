"""Measuring: the bytes that a step must read, what a run counts, what is refused."""

import io
import json
import math
import re
import sys
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import torch
from clockwork import Clockwork
from rich.console import Console

from simplellm.api.llm import LLM
from simplellm.apps import bench, cli, peaks, roofline
from simplellm.apps.bench import Plan
from simplellm.apps.report import show, write_json
from simplellm.apps.roofline import Machine, read_bytes, step_flops
from simplellm.base.config import EngineConfig
from simplellm.checkpoint.families import read_config
from simplellm.checkpoint.families.gpt_oss import GPT_OSS_20B, GPT_OSS_120B, MODELS
from simplellm.checkpoint.folder import EMBEDDED
from simplellm.model import memory
from simplellm.model.memory import kv_bytes, page_bytes, weight_bytes

REFERENCE = json.loads(
    (Path(__file__).parents[1] / "figures/vllm-h200.json").read_text()
)
TINY = read_config(EMBEDDED / "config.json")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Every kind of row, of the embedded model."""
    plan = Plan(
        batches=(1, 3),
        input_len=20,
        output_len=6,
        prefills=((2, 40),),
        contexts=(100,),
        context_batches=(2,),
    )
    return bench.measure(plan, LLM, device="cpu", command="simplellm bench")


@pytest.fixture
def known_machine(monkeypatch):
    """Nothing is measured of the machine, which would take a second or more."""
    machine = Machine(bytes_per_second=1e10, flops_per_second=1e11)
    monkeypatch.setattr(bench, "measure_machine", lambda *arguments: machine)


@pytest.mark.parametrize(
    "row", REFERENCE["decode"], ids=lambda row: f"{row['model']}-{row['batch']}"
)
def test_bytes_and_limit_are_those_of_the_recorded_table(row):
    config, batch = MODELS[row["model"]], row["batch"]
    machine = Machine(1e9 * REFERENCE["read_gigabytes_per_second"], 790e12)
    found = read_bytes(config, batch)
    assert found.kv == 0
    assert roofline.distinct_experts(config, batch) == pytest.approx(
        row["distinct_experts"], abs=0.06
    )
    assert found.total / 1e9 == pytest.approx(row["gigabytes"], rel=0.01)
    flops = step_flops(config, batch, batch)
    limit = batch / machine.least_seconds(found.total, flops)
    assert limit == pytest.approx(row["limit"], rel=0.01)


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_distinct_experts_as_counted(tokens):
    """Draw the choices of many steps and count."""
    config = TINY
    experts, chosen = config.num_local_experts, config.num_experts_per_tok
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(4000, tokens, experts, generator=generator)
    hit = torch.zeros(4000, experts)
    hit.scatter_(1, scores.topk(chosen).indices.flatten(1), 1)
    counted = hit.sum(1).mean().item()
    assert roofline.distinct_experts(config, tokens) == pytest.approx(counted, rel=0.02)


def test_the_context_adds_its_keys_and_values():
    without = read_bytes(GPT_OSS_20B, 8)
    found = read_bytes(GPT_OSS_20B, 8, 5000)
    assert found.kv == 8 * kv_bytes(GPT_OSS_20B, 5000)
    assert replace(found, kv=0) == without


def test_a_tied_head_is_read_once():
    tied = replace(GPT_OSS_20B, tie_word_embeddings=True)
    apart, together = weight_bytes(GPT_OSS_20B), weight_bytes(tied)
    assert sum(apart.values()) - sum(together.values()) == apart["embedding"]
    assert read_bytes(tied, 1) == read_bytes(GPT_OSS_20B, 1)


def test_prefill_does_not_compute_the_head_for_every_token():
    head = 2 * GPT_OSS_120B.vocab_size * GPT_OSS_120B.hidden_size
    whole = step_flops(GPT_OSS_120B, 10, 10)
    assert whole / 10 == pytest.approx(2 * 5.13e9, rel=0.01)
    assert whole - step_flops(GPT_OSS_120B, 10, 1) == 9 * head


def test_the_roof_is_the_slower_of_reading_and_computing():
    machine = Machine(bytes_per_second=10.0, flops_per_second=100.0)
    assert machine.least_seconds(50, 100) == 5
    assert machine.least_seconds(5, 100) == 1


def test_on_a_cpu_as_much_is_read_as_the_model_has(monkeypatch):
    """A small model is in the cache, which is faster than memory."""
    read: list[int] = []
    monkeypatch.setattr(peaks, "matmul_speed", lambda *arguments: 1e12)

    def read_speed(device, nbytes):
        read.append(nbytes)
        return 1e10

    monkeypatch.setattr(peaks, "read_speed", read_speed)
    plan = Plan(batches=(1,), input_len=9, output_len=4)
    bench.measure(plan, LLM, device="cpu")
    held = sum(weight_bytes(TINY, 4).values())
    peaks.measure_machine(torch.device("cpu"), 10**12)
    assert read == [held, 2**28]


def test_rows_are_what_was_asked_for(report):
    shape = ("batch", "input_len", "output_len")
    shapes = [tuple(row[name] for name in shape) for row in report["decode"]]
    assert shapes == [(1, 20, 6), (3, 20, 6)]
    (context,) = report["context"]
    assert context["batch"] == 2
    assert context["input_len"] + context["output_len"] == 100
    (prefill,) = report["prefill"]
    assert (prefill["batch"], prefill["input_len"]) == (2, 40)
    assert report["config"]["max_num_seqs"] == 3
    assert report["config"]["max_model_len"] == 100


def test_a_row_agrees_with_itself(report):
    for row in [*report["decode"], *report["context"]]:
        seconds = row["step_ms"] / 1e3
        assert row["tokens_per_second"] == pytest.approx(row["batch"] / seconds)
        assert row["share"] == pytest.approx(row["tokens_per_second"] / row["limit"])
        assert row["end_to_end"] > 0
        assert 0 < row["itl_ms"] <= row["itl_p99_ms"]
        assert 0 < row["ttft_ms"] <= row["ttft_p99_ms"]
        read = row["dense_bytes"] + row["expert_bytes"] + row["kv_bytes"]
        bandwidth = report["machine"]["bytes_per_second"]
        assert row["limit"] <= row["batch"] * bandwidth / read * 1.0001
        assert row["distinct_outputs"] == row["batch"]
    # Each of 6 tokens but the first follows a step that gave all requests a token.
    assert [row["steps"] for row in report["decode"]] == [5, 5]
    (row,) = report["prefill"]
    assert row["tokens_per_second"] == pytest.approx(80 / row["seconds"])
    assert row["ttft_ms"] <= 1e3 * row["seconds"] * 1.5


def test_the_limit_can_be_computed_again_from_a_row(report):
    for row in report["decode"]:
        read = row["dense_bytes"] + row["expert_bytes"] + row["kv_bytes"]
        flops = step_flops(TINY, row["batch"], row["batch"])
        least = Machine(**report["machine"]).least_seconds(read, flops)
        assert row["limit"] == pytest.approx(row["batch"] / least)


def test_a_full_step_has_every_request_before_and_after():
    meter = bench.unbounded_meter()
    meter.recent.extend([(0, 1), (1, 2), (3, 2), (7, 2), (8, 1), (9, 2), (9.5, 0)])
    run = bench.Trial([], 0.0, meter, began=0.0)
    assert run.full_steps(2) == [2, 4]
    assert run.last_token == 9


def test_a_recorder_keeps_more_than_a_meter():
    meter = bench.unbounded_meter()
    for _ in range(5000):
        meter.step([], 0.0)
    assert len(meter.recent) == 5000


def test_prompts_are_distinct_and_follow_from_the_seed(known_machine):
    def prompts(seed):
        seen: list[tuple[int, ...]] = []

        class Probe(LLM):
            def generate(self, prompts, *arguments, **options):
                seen.extend(map(tuple, prompts))
                return super().generate(prompts, *arguments, **options)

        plan = Plan(batches=(2,), input_len=9, output_len=4, seed=seed)
        bench.measure(plan, Probe, device="cpu")
        return seen

    first, again, other = prompts(1), prompts(1), prompts(2)
    assert first == again
    assert not set(first) & set(other)
    assert len(set(first)) == len(first) == 4  # two runs, one of them to warm up


def test_switches_of_the_engine_reach_it(known_machine):
    plan = Plan(batches=(2,), input_len=9, output_len=4)
    config = EngineConfig(operations="plain", num_pages=77, max_num_seqs=7)
    report = bench.measure(plan, LLM, device="cpu", config=config)
    assert report["backend"].startswith("PyTorch")
    assert report["config"]["max_num_seqs"] == 2
    assert report["memory"]["cache"] == 77 * page_bytes(TINY, 16, 4)


def test_a_model_without_experts(known_machine, tmp_path, capsys):
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 12, "vocab_size": 101}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3", **sizes}))
    config = read_config(file)
    read = read_bytes(config, tokens=1, itemsize=4)
    parts = weight_bytes(config, itemsize=4)
    assert read.total == sum(parts.values()) - parts["embedding"] + 48 * 4
    options = "--random-weights --batch 2 --input-len 8 --output-len 4 --device cpu"
    assert cli.main(["bench", str(tmp_path), *options.split()]) == 0
    assert "random weights" in capsys.readouterr().out


def test_json_holds_the_report(report, tmp_path):
    file = tmp_path / "bench.json"
    write_json(report, file)
    found = json.loads(file.read_text())
    assert found == json.loads(json.dumps(report))
    assert set(found) >= {"date", "command", "model", "device", "versions", "machine"}
    assert found["weights"] == "checkpoint"
    assert found["decode"][1]["batch"] == 3
    assert "NaN" not in file.read_text()


def test_the_tables_fit_a_terminal(report):
    wide = report["context"][0] | {
        "batch": 256,
        "input_len": 130816,
        "output_len": 1024,
        "step_ms": 1234.56,
        "tokens_per_second": 22222.2,
        "end_to_end": 22222.2,
        "limit": 94444.4,
        "share": 0.987,
        "ttft_ms": 123456.7,
        "itl_p99_ms": 1234.5,
    }
    report = report | {"context": [wide]}
    console = Console(width=200, record=True, file=io.StringIO())
    show(report, console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("130816" in line for line in lines)
    heads = [line.split() for line in lines if "tok/s" in line]
    assert all(
        head[0] in ("batch", "prompts") and head[-2:] == ["of", "it"] for head in heads
    )


def test_the_command_writes_numbers_and_a_plot(known_machine, capsys, tmp_path):
    json_file, plot = tmp_path / "bench.json", tmp_path / "bench.svg"
    options = "bench --batch 1 --input-len 8 --output-len 4 --prefill 1x8".split()
    options += ["--json", str(json_file), "--plot", str(plot), "--device", "cpu"]
    assert cli.main(options) == 0
    out = capsys.readouterr().out
    assert out.startswith("embedded, checkpoint weights, ")
    assert re.search(r"^memory: weights \d+\.\d MB, cache ", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80
    found = json.loads(json_file.read_text())
    assert found["command"].startswith("simplellm bench --batch 1 --input-len 8")
    assert f"{found['decode'][0]['tokens_per_second']:.0f}" in out
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "gpt-oss-12b",
            "gpt-oss-12b: does not exist; expected a checkpoint's folder, a .gguf file",
        ),
        (
            "gpt-oss-20b",
            "gpt-oss-20b: does not exist; expected the folder of a checkpoint",
        ),
        ("--batch 1,x", "--batch is '1,x'; expected integers such as 1,8,64"),
        ("--batch 0", "batch is 0; expected 1 to"),
        ("--prefill 32", "--prefill is '32'; expected prompts x tokens"),
        ("--input-len 0", "input_len is 0; expected 1 to"),
        ("--batch=", "nothing is to be measured"),
        ("--batch 64 --output-len 4", "output_len of 64 requests is 4; expected 6 to"),
        ("--context 60", "context of 1 requests is 60; expected 65 to"),
        ("--input-len 131072", "+ 128 is 131200; expected 2 to 131072"),
        ("--batch 400 --input-len 2000 --output-len 900", "GB for keys and values"),
        ("--plot x.jpeg", "the plot is 'x.jpeg'; expected .svg, .png or .pdf"),
        ("--json nowhere/x.json", "there is no folder"),
    ],
)
def test_what_cannot_run_is_refused(known_machine, capsys, options, message):
    assert cli.main(["bench", "--device", "cpu", *options.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "--device", "cuda"]) == 2
    assert "expected cpu: PyTorch finds no GPU" in capsys.readouterr().err


def test_a_plot_without_matplotlib(monkeypatch, capsys):
    find = PathFinder.find_spec
    monkeypatch.setattr(
        PathFinder,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find(name, *rest),
    )
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    assert cli.main(["bench", "--device", "cpu", "--plot", "x.svg"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("batch", [1, 40])
def test_no_request_is_preempted_in_a_cache_that_is_just_enough(known_machine, batch):
    plan = Plan(batches=(batch,), input_len=50, output_len=70)
    config = EngineConfig().resolved("cpu")
    (case,) = bench.plan_cases(plan, config, 131_072)
    config = bench.engine_config([case], config)
    need = bench.cache_bytes(TINY, config, 4, case)
    assert need >= batch * kv_bytes(TINY, 120, itemsize=4)
    config = EngineConfig(cache_bytes=need + 100_000)  # less than a page goes unused
    row = bench.measure(plan, LLM, device="cpu", config=config)["decode"][0]
    assert math.isfinite(row["step_ms"])
    with pytest.raises(ValueError, match="GB, which the cache has"):
        bench.measure(
            plan, LLM, device="cpu", config=EngineConfig(cache_bytes=need // 2)
        )


def test_all_decode_together_after_long_prompts(known_machine, monkeypatch):
    """Beside those that decode, the others' prompts come in small pieces."""
    monkeypatch.setattr(bench, "CONTEXT_STEPS", 4)
    plan = Plan(batches=(), contexts=(2000,), context_batches=(5,))
    # As on a GPU, where one prompt may fill a step.
    config = EngineConfig(max_num_batched_tokens=2048, prefill_chunk=2048)
    (row,) = bench.measure(plan, LLM, device="cpu", config=config)["context"]
    assert 1 <= row["steps"] <= 8


@pytest.mark.parametrize(
    ("batch", "context"), [(1, 500), (5, 20_000), (8, 131_072), (32, 8192)]
)
def test_they_do_for_as_many_steps_as_are_measured(batch, context, monkeypatch):
    config = EngineConfig().resolved("cuda")
    plan = Plan(batches=(), contexts=(context,), context_batches=(batch,))
    (case,) = bench.plan_cases(plan, config, 131_072)
    clock = Clockwork(monkeypatch, lambda _: 1.0, lambda _: 0.1)
    clock.run([(0.0, case.input_len, case.output_len)] * batch)
    together = [step for step in clock.scheduled if len(step) == batch]
    decodes = [step for step in together if all(c.length == 1 for c in step)]
    assert bench.CONTEXT_STEPS - 4 <= len(decodes) <= 1.5 * bench.CONTEXT_STEPS


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(
    known_machine, monkeypatch, capsys
):
    monkeypatch.setattr(memory, "free_bytes", lambda device: (12_300_000_000, 10**11))
    options = "bench gpt-oss-120b --random-weights --device cpu".split()
    assert cli.main(options) != 0
    message = capsys.readouterr().err
    assert "69.6 GB for its weights" in message
    assert "12.3 of 100.0 GB are free" in message


def test_a_step_that_is_preempted_is_no_measurement(monkeypatch):
    """Should the memory for pages have been reckoned wrong."""
    monkeypatch.setattr(bench, "check_cache", lambda *arguments: None)
    config = EngineConfig(num_pages=40)
    plan = Plan(batches=(16,), input_len=8, output_len=60)
    with pytest.raises(AssertionError, match="the cache was too small"):
        bench.measure(plan, LLM, device="cpu", config=config)
