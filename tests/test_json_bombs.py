"""Schemas that explode are refused, or bounded in time and memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")
if sys.platform != "linux":
    pytest.skip("memory is measured in /proc", allow_module_level=True)

from json_bombs import NAMES, STEPS

ROOT = Path(__file__).parents[1]
# Seconds are the processor's, whatever else it does: 0.8, 0.1 and 130 MiB at most.
COMPILE_SECONDS, STEP_SECONDS, MEBIBYTES = 5.0, 2.0, 300
# llguidance alone crashes the process, or takes more time or memory than these bounds.
REFUSED = """
objects 10,000 deep, anyOf 10,000 deep, brackets 100,000 deep, a chain of 1,000 refs,
a chain of fat refs, a circle, a word of 100,000, 1,000 patterns of names, 10,000 names,
at least one of 500, multiples of 1,000,003, multiples of 300 numbers, 5 MB of names,
a bracket that never closes
"""


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """What became of each bomb; they share a process of their own."""
    command = [sys.executable, str(ROOT / "tests/json_bombs.py")]
    place = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, env=place)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert ran.returncode == 0, (lines[-1:], ran.stderr[-2000:])
    return {line["name"]: line for line in lines}


def test_every_bomb_was_tried(results: dict[str, dict[str, Any]]) -> None:
    assert [*results] == [*NAMES]
    assert STEPS >= 50


@pytest.mark.parametrize("name", NAMES)
def test_a_bomb_is_refused_or_bounded(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    found = results[name]
    assert found["compile"] < COMPILE_SECONDS
    assert found["step"] < STEP_SECONDS
    assert found["memory"] < MEBIBYTES
    if name in REFUSED.replace("\n", " "):
        assert found["refused"].startswith("schema")


def test_what_ends_in_an_error_is_an_error_of_a_limit(
    results: dict[str, dict[str, Any]],
) -> None:
    errors = {name: found["error"] for name, found in results.items() if found["error"]}
    limits = "items; max is", "too many ", "Too many items"
    assert all(any(limit in error for limit in limits) for error in errors.values())
