"""Schemathesis, as it is, sends what the OpenAPI document allows and what it doesn't.

Whatever comes, the server does not fail, and its answers are as the document says.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import PATIENCE
from serving import Process

pytest.importorskip("schemathesis", minversion="4")

KEY = "k"
# Tokens, with room for a chat. Many cases ask for all that there is room for, and some
# for a thousand samples of it: what they take is nearly all of the time.
CONTEXT = 128
EXAMPLES = 15  # for each endpoint that takes a body, where they are drawn
# A document can't say what one parameter means for another, what a prompt takes of the
# context, or which call the message of a tool answers: what it allows may be refused.
UNSAID = "positive_data_acceptance"


# Unless it is strict the server takes more than its document says.
UNWRITTEN = "negative_data_rejection"


# A strict server keeps its document in both directions. What one that isn't takes
# besides is in test_server_lenient.py.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="strict"),
        pytest.param(False, id="lenient", marks=pytest.mark.exhaustive),
    ],
)
def strict(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def process(folder: Path, strict: bool) -> Iterator[Process]:
    options = ["--max-model-len", str(CONTEXT), *(["--strict"] if strict else [])]
    found = Process(str(folder), "--api-key", KEY, *options)
    yield found
    found.process.terminate()
    assert found.finish() == 0


@pytest.mark.parametrize(
    ("phase", "least"),
    [
        ("fuzzing", 4 * EXAMPLES),
        # One value at a time, at and beyond its limits, whatever the examples: some
        # 3,900 cases.
        pytest.param(
            "coverage",
            2000,
            marks=[pytest.mark.exhaustive, pytest.mark.timeout(600)],
        ),
    ],
)
def test_the_document_is_true(
    process: Process, strict: bool, tmp_path: Path, phase: str, least: int
) -> None:
    """Requests of both kinds; ``least`` is how many there are."""
    unsaid = UNSAID if strict else f"{UNSAID},{UNWRITTEN}"
    done = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"),
            *("run", f"http://127.0.0.1:{process.port}/openapi.json"),
            *("--header", f"Authorization: Bearer {KEY}"),
            *("--checks", "all", "--exclude-checks", unsaid),
            *("--phases", phase, "--max-examples", str(EXAMPLES)),
            *("--request-timeout", str(PATIENCE), "--max-response-time", str(PATIENCE)),
            *("--continue-on-failure", "--seed", "1", "--no-color"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    count = re.search(r"(\d+) generated", done.stdout)
    assert count and int(count[1]) >= least, done.stdout
