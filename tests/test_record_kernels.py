"""Rows of tools/gpu/tune.py become entries of chapter 11's record."""

import json

import pytest
import record_kernels

RESULTS = {
    "gpu": "NVIDIA X",
    "rows": [
        {"kernel": "decode", "shape": "1 x 8", "config": "64x4", "us": 2.0, "bytes": 5},
        {"kernel": "decode", "shape": "1 x 8", "config": "", "us": 3.0, "bytes": 5},
        {"kernel": "down", "shape": "8", "config": "66x8", "us": 6.0, "bytes": 7.2},
        {"kernel": "down", "shape": "8", "config": "66x8", "us": 5.0, "bytes": 7.2},
    ],
}


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
    ("name", "kernel", "shape", "us", "size"),
    [
        ("decode 1 x 8 64x4", "decode", "1 x 8", 2, 5),
        ("decode 1 x 8", "decode", "1 x 8", 3, 5),
        ("down 8 66x8", "down", "8", 5, 7),
    ],
)
def test_a_row_becomes_an_entry(record, name, kernel, shape, us, size):
    assert record(name, "v") == [
        {"kernel": kernel, "shape": shape, "version": "v"}
        | {"bytes": size, "launches": 1, "us": us}
    ]


def test_the_same_version_is_replaced_in_its_place(record):
    record("decode 1 x 8 64x4", "a")
    record("down 8 66x8", "a")
    rows = record("decode 1 x 8", "a", "--dropped", "--why", "it waits")
    assert [(row["kernel"], row["us"]) for row in rows] == [("decode", 3), ("down", 5)]
    assert (rows[0]["kept"], rows[0]["why"]) == (False, "it waits")
    assert "kept" not in rows[1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("down 8 1x1", "no row is 'down 8 1x1'; expected one like\n  down 8 66x8\n"),
        ("up 8", "expected one like\n  decode\n  down"),
    ],
)
def test_a_row_that_does_not_fit_says_so(record, row, message, capsys):
    with pytest.raises(SystemExit):
        record(row, "v")
    assert message in capsys.readouterr().err
