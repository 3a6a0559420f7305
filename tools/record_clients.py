"""Record which agents ran against a server of this package: figures/clients.json.

    python tools/record_clients.py --install        a minute or two, 1.3 GB
    python tools/record_clients.py        a minute or two

The tests with the mark "agents" run them, unmodified, from their packages, which lie in
build/agents and not in this environment. Nothing is written if a test fails.
"""

import json
import re
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

from record_families import passed
from records import ROOT, header, save

RECORD = ROOT / "figures/clients.json"
PLACE = ROOT / "build/agents"  # node_modules lies in it
VENV = PLACE / "venv"
PYTHON = VENV / "bin/python"
NPM = [
    "@openai/codex@0.171.0",
    "@anthropic-ai/claude-code@2.1.332",
    "opencode-ai@1.18.33",
    "@qwen-code/qwen-code@0.15.10",
    "ai@6.0.326",
    "@ai-sdk/openai@3.0.141",
    "@ai-sdk/openai-compatible@2.0.92",
    "@ai-sdk/anthropic@3.0.140",
    "zod@4.6.7",
]
PYPI = [
    "openai-agents==0.24.0",
    "langchain-openai==1.7.4",
    "langgraph==1.2.24",
    "pydantic-ai-slim[openai]==2.68.0",
    "litellm==1.110.2",
    "autogen-agentchat==0.7.5",
    "autogen-ext[openai]==0.7.5",
    "agno==3.1.10",
]


def install() -> None:
    """Get the packages as far as they can be had, those that are not there yet."""
    here = installed()
    npm = [pin for pin in NPM if here.get(name_of(pin)) != pin.rpartition("@")[2]]
    pypi = [pin for pin in PYPI if here.get(name_of(pin)) != pin.rpartition("=")[2]]
    PLACE.mkdir(parents=True, exist_ok=True)
    quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
    quiet += ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    venv = [] if PYTHON.exists() else [[sys.executable, "-m", "venv", VENV]]
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--retries=1"]  # where nothing can be reached, that is soon known
    commands = {
        "npm": [["npm", "install", "--prefix", PLACE, *quiet, *npm]] if npm else [],
        "PyPI": [*venv, [*pip, *pypi]] if pypi else [],
    }
    for source, steps in commands.items():
        try:
            for step in steps:
                subprocess.run([*map(str, step)], check=True)
        except (OSError, subprocess.CalledProcessError):
            print(f"{source} can't be had here: the tests of its agents are skipped.")


def name_of(pin: str) -> str:
    """The package in "@ai-sdk/openai@3.0.141" or "pydantic-ai-slim[openai]==2.68.0"."""
    return re.split(r"\[|==|(?<!^)@", pin)[0]


def installed() -> dict[str, str]:
    """The versions of the packages in build/agents."""
    versions = {}
    for name in map(name_of, NPM):
        file = PLACE / "node_modules" / name / "package.json"
        if file.exists():
            versions[name] = json.loads(file.read_text("utf-8"))["version"]
    libraries = map(str, VENV.glob("lib/python3.*/site-packages"))
    return versions | {
        one.name: one.version for one in distributions(path=[*libraries])
    }


def run_tests(report: Path) -> None:
    """Run them; what they found is in ``report``."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "agents"]
    command += ["tests/test_agents.py", f"--junitxml={report}"]
    subprocess.run(command, cwd=ROOT, check=True)


def summarize(report: Path) -> list[dict[str, object]]:
    """Each client once, in the order of the tests, with all that ran of it."""
    clients: dict[str, dict[str, set[str]]] = {}
    for _, properties in passed(report):
        new: dict[str, set[str]] = {"packages": set(), "paths": set()}
        client = clients.setdefault(properties["client"], new)
        client["packages"].update(properties["packages"].split(", "))
        client["paths"].update(properties["paths"].split())
    return [
        {"client": name, **{key: sorted(value) for key, value in properties.items()}}
        for name, properties in clients.items()
    ]


def main(arguments: list[str]) -> None:
    if "--install" in arguments:
        install()
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        run_tests(report)
        rows = summarize(report)
    save({**header(), "rows": rows}, RECORD)


if __name__ == "__main__":
    main(sys.argv[1:])
