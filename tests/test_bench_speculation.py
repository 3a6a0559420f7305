"""What `simplellm bench --speculative` measures, and what it expects."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from simplellm.apps import bench_speculation, cli
from simplellm.apps.bench_speculation import ROWS, expected_seconds
from simplellm.engine.draft_budget import StepCosts


def test_the_steps_that_checked_drafts_cost_more() -> None:
    costs = StepCosts({1: 1.0, 2: 1.5, 4: 3.0})
    # Ten steps: five with no draft, two with one, and three with three.
    assert expected_seconds(10, [5, 3, 3], costs) == 5 * 1.0 + 2 * 1.5 + 3 * 3.0
    assert expected_seconds(7, [], costs) == 7.0


def test_the_command_compares_texts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_speculation, "RUNS", 1)
    monkeypatch.setattr(bench_speculation, "MAX_TOKENS", 40)
    record = tmp_path / "record.json"
    options = ["bench", "--speculative", "suffix", "--device", "cpu"]
    more = ["--num-speculative-tokens", "3", "--json", str(record)]
    assert cli.main([*options, *more]) == 0
    out, found = capsys.readouterr().out, json.loads(record.read_text())
    assert max(map(len, out.splitlines())) <= 80
    assert "how many tokens a step gives that checks drafts" in " ".join(out.split())
    new, copied = found["rows"]
    assert (new["text"], copied["text"]) == ("new", "copied")
    for row in (new, copied):
        assert row["same"] and row["tokens"] >= row["steps"] > 0
        assert row["tokens"] - row["steps"] <= row["right"]  # but for a cut last step
        # A place is reached by way of those before it.
        assert all(one >= two for one, two in pairwise(row["drafted"]))
        assert min(row["predicted"], row["measured"], row["plain"]) > 0
        for name, (_, shown) in ROWS.items():
            assert format(row[name], shown) in out
    # What stands in the prompt is copied, several tokens a step.
    assert copied["acceptance_length"] > new["acceptance_length"] >= 1
    assert copied["tokens"] > 1.5 * copied["steps"]
    assert cli.main([*options, "--plot", "x.svg"]) == 2
    wanted = "--plot is 'x.svg'; expected none with --speculative"
    assert wanted in capsys.readouterr().err
