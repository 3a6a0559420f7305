"""What `simplellm bench --formats` compares, and its record."""

import json
from pathlib import Path

import torch
from families import SIZES, case, write
from problems import asked_by_bench

from simplellm import LLM
from simplellm.apps import bench_formats, cli
from simplellm.apps.bench_formats import FORMAT_ROWS, RoundedCheckpoint
from simplellm.apps.quantize import TARGETS, quantize_checkpoint
from simplellm.checkpoint.checkpoint import Checkpoint
from simplellm.checkpoint.scaled import Scaled
from simplellm.checkpoint.stored import tensors
from simplellm.model.memory import weight_bytes

ROOT = Path(__file__).parents[1]


def test_formats_are_those_that_a_checkpoint_in_them_has(tmp_path):
    """Whether rounded as they are loaded, or by `simplellm quantize` before."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    source, model = tmp_path / "in", case("Qwen3", **SIZES | sizes).build()
    write(source, model)
    for name, form in TARGETS.items():
        if name == "fp8":  # whose joined parts share tiles, where these are not whole
            continue
        quantize_checkpoint(source, tmp_path / name, name)
        stored, ours = (
            Checkpoint(tmp_path / name),
            RoundedCheckpoint(Checkpoint(source), form),
        )
        assert ours.config.formats.keys() == stored.config.formats.keys()
        assert weight_bytes(ours.config, 4) == weight_bytes(stored.config, 4)
        for weight in stored.config.formats:
            one, two = ours[weight], stored[weight]
            pairs = zip(tensors(one), tensors(two), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
    assert isinstance(
        RoundedCheckpoint(Checkpoint(source), TARGETS["fp8"])[weight], Scaled
    )


def test_right_answers_are_counted(monkeypatch, tmp_path):
    problems = json.loads(bench_formats.PROBLEMS.read_text(encoding="utf-8"))
    assert problems == asked_by_bench()
    some = tmp_path / "problems.json"
    right, other = problems[1:3]
    some.write_text(json.dumps([right, other | {"answer": right["answer"]}]))
    monkeypatch.setattr(bench_formats, "PROBLEMS", some)
    with LLM(device="cpu") as llm:
        assert bench_formats.count_right(llm) == "1 of 2"


def test_the_command_compares_formats(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench_formats, "count_right", lambda llm: "7 of 9")
    monkeypatch.setattr(bench_formats, "INPUT_LEN", 8)
    monkeypatch.setattr(bench_formats, "OUTPUT_LEN", 4)
    record = tmp_path / "record.json"
    options = ["bench", "--formats", "--device", "cpu", "--json", str(record)]
    assert cli.main(options) == 0
    out, found = capsys.readouterr().out, json.loads(record.read_text())
    rows = {row["format"]: row for row in found["rows"]}
    assert [*rows] == ["as stored", "fp8", "int8", "mxfp4"]
    assert rows["as stored"]["right"] == "7 of 9"
    nbytes = {name: row["weights"] for name, row in rows.items()}
    assert nbytes["mxfp4"] < min(nbytes["as stored"], nbytes["int8"], nbytes["fp8"])
    for row in found["rows"]:
        assert f"{row['weights']:,}" in out and row["one"] > 0 and row["eight"] > 0
    assert cli.main([*options[:2], "--plot", "x.svg"]) == 2
    assert "--plot is 'x.svg'; expected none with --formats" in capsys.readouterr().err


def test_formats_of_what_is_drawn_at_random(capsys, monkeypatch, tmp_path):
    """In each format that there is a weight for: none fills MXFP4's blocks here."""
    monkeypatch.setattr(bench_formats, "OUTPUT_LEN", 4)
    monkeypatch.setattr(bench_formats, "INPUT_LEN", 8)
    for kind, forms in (("Llama", ["fp8", "int8"]), ("GPT2", [])):
        source = write(tmp_path / kind, case(kind).build())
        assert cli.main(["bench", str(source), "--formats", "--random-weights"]) == 0
        rows = [x for x in capsys.readouterr().out.splitlines() if "not asked" in x]
        assert [row.split()[0] for row in rows] == ["as", *forms]


def test_the_record_of_formats_has_its_fields():
    found = json.loads((ROOT / "figures/c-formats.json").read_text())
    assert {row["format"] for row in found["rows"]} == {"as stored", *TARGETS}
    assert found["rows"][0].keys() == {*FORMAT_ROWS, "backend"}
    assert found.keys() >= {"date", "command", "device", "versions", "load_average"}
