"""Rows of the scripts in tools/gpu/ become entries of chapter 11's record."""

import json

import pytest
import record_kernels

RESULTS = [
    {"note": "NVIDIA X, torch 2"},
    {"name": "no kernel", "seconds": 3e-6},
    {"kernel": "decode", "shape": "1 x 8", "config": "b64 w4", "us": 2.0, "gbs": 50.0},
    {"half": "down", "tokens": 8, "tiling": [128, None, 3, ""], "seconds": 4e-6}
    | {"gb": 0.001},
    {"half": "down", "tokens": 8, "tiling": [66, 8], "seconds": 6e-6, "rate": 100.0},
    {"half": "down", "tokens": 8, "tiling": [66, 8], "seconds": 5e-6, "rate": 120.0},
    {"half": "chain", "tokens": 8, "up": [1, 2], "down": [3, ""], "s": 7e-6},
]


@pytest.fixture
def record(tmp_path):
    figure, results = tmp_path / "record.json", tmp_path / "results.json"
    figure.write_text(json.dumps({"date": "D", "rows": []}))
    results.write_text(json.dumps(RESULTS))

    def run(*arguments):
        record_kernels.main([str(results), *arguments], figure)
        return json.loads(figure.read_text())["rows"]

    return run


@pytest.mark.parametrize(
    ("arguments", "kernel", "shape", "us", "size"),
    [
        (["decode 1 x 8 b64 w4", "v"], "decode", "1 x 8", 2, 100_000),
        (["down 8 128x3", "v"], "down", "8", 4, 1_000_000),
        (["down 8 66x8", "v"], "down", "8", 5, 600_000),
        (["chain 8 1x2 3", "v", "--kernel", "all"], "all", "8", 7, None),
        (["down 8 66x8", "v", "--shape", "T8"], "down", "T8", 5, 600_000),
    ],
)
def test_each_layout_is_read(record, arguments, kernel, shape, us, size):
    assert record(*arguments, "--launches", "2") == [
        {"kernel": kernel, "shape": shape, "version": "v"}
        | {"bytes": size, "launches": 2, "us": us}
    ]


def test_the_same_version_is_replaced_in_its_place(record):
    record("down 8 66x8", "a")
    record("down 8 128x3", "b")
    rows = record("down 8 128x3", "a", "--dropped", "--why", "it waits")
    assert [(row["version"], row["us"]) for row in rows] == [("a", 4), ("b", 4)]
    assert (rows[0]["kept"], rows[0]["why"]) == (False, "it waits")
    assert "kept" not in rows[1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("down 8 1x1", "no row is 'down 8 1x1'; expected one like\n  down 8 128x3\n"),
        ("up 8", "expected one like\n  chain\n  decode\n  down"),
    ],
)
def test_a_row_that_does_not_fit_says_so(record, row, message, capsys):
    with pytest.raises(SystemExit):
        record(row, "v")
    assert message in capsys.readouterr().err
