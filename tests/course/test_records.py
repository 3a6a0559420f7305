"""Whoever reads a record can find what measured it."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from record_schedule import RECORD, schedule

ROOT = Path(__file__).parents[2]
FILE = re.compile(r"(?:chapters|tools)/[\w/-]+\.\w+")


def commands(record: Any) -> Iterator[tuple[str, str]]:
    """Each command in a record, with the commit beside it or ""."""
    if isinstance(record, dict) and "command" in record:
        yield record["command"], record.get("commit", "")
    inner = record.values() if isinstance(record, dict) else record
    if isinstance(record, dict | list):
        for part in inner:
            yield from commands(part)


def recorded() -> list[tuple[str, str, str]]:
    """The name of each record's file, with its commands and their commits."""
    return [
        (path.name, *found)
        for path in sorted((ROOT / "figures").glob("*.json"))
        for found in commands(json.loads(path.read_text(encoding="utf-8")))
    ]


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def history() -> None:
    """All commits have to be here."""
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("this copy has no history to look a commit up in")


def test_records_have_commands() -> None:
    assert len(recorded()) > 20


@pytest.mark.parametrize(("record", "command", "commit"), recorded())
def test_a_command_names_what_is_here_or_a_commit(
    record: str, command: str, commit: str
) -> None:
    named = FILE.findall(command)
    assert named or command.startswith("simplellm "), f"{record}: {command}"
    # Of a tool that is here the commit says which one it was: options go, too.
    gone = [file for file in named if not (ROOT / file).exists()]
    assert commit or not gone, f"{record}: {gone} and {commit!r}"


@pytest.mark.usefixtures("history")
@pytest.mark.parametrize(
    ("record", "command", "commit"), [row for row in recorded() if row[2]]
)
def test_the_commit_has_the_files(record: str, command: str, commit: str) -> None:
    for file in FILE.findall(command):
        assert git("cat-file", "-e", f"{commit}:{file}").returncode == 0, (
            f"{record}: no {file} at {commit}"
        )


def test_the_schedule_that_chapter_9_draws_is_the_engines() -> None:
    assert schedule() == json.loads(RECORD.read_text(encoding="utf-8"))
