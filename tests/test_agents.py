"""Agents as people install them, against a server whose model plays a script.

Each of them is asked for two calls of a tool and an answer made of what these gave.
What to install: see tools/record_clients.py.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from director import ANSWER, PRODUCTS, Step, directed
from record_clients import PLACE, PYTHON, installed
from serving import NAME, Served

from simplellm.server.app import ACCESS

pytestmark = pytest.mark.agents

PROGRAMS = Path(__file__).parent / "agents"
SUMS = "47 * 85", "12 * 34"
FILES = "first", "second"  # that a shell writes
QUESTION = "Multiply 47 by 85, then 12 by 34, by your shell. Then say both products."
TOLD = ANSWER.format(*PRODUCTS)
MULTIPLY = [Step("multiply", dict(a=47, b=85)), Step("multiply", dict(a=12, b=34))]
NOWHERE = "http://127.0.0.1:9"  # a proxy for whatever isn't on this machine


def start(
    command: list[str],
    home: Path,
    given: str = "",
    *,
    cwd: Path | None = None,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program that finds nothing of this user and reaches no other machine."""
    home.mkdir(exist_ok=True)
    environment = {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "HTTP_PROXY": NOWHERE,
        "HTTPS_PROXY": NOWHERE,
        "NO_PROXY": "127.0.0.1,localhost",
        "DO_NOT_TRACK": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        **more,
    }
    return subprocess.run(
        command,
        cwd=cwd or home,
        env=environment,
        input=given,
        capture_output=True,
        text=True,
    )


class Agent(NamedTuple):
    """A program with a shell of its own."""

    package: str
    tool: str
    arguments: Callable[[str], dict[str, Any]]  # for a command
    run: Callable[[Served, Path], subprocess.CompletedProcess[str]]


def program(name: str) -> str:
    return str(PLACE / "node_modules/.bin" / name)


CODEX = """
model = "{name}"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "http://127.0.0.1:{port}/v1"
wire_api = "responses"
[analytics]
enabled = false
"""


def codex(served: Served, home: Path) -> subprocess.CompletedProcess[str]:
    (home / ".codex").mkdir(parents=True)
    config = CODEX.format(name=NAME, port=served.port)
    (home / ".codex/config.toml").write_text(config)
    trust = "--dangerously-bypass-approvals-and-sandbox"  # the commands are ours
    command = [program("codex"), "exec", "--skip-git-repo-check", trust, QUESTION]
    return start(command, home)


def claude(served: Served, home: Path) -> subprocess.CompletedProcess[str]:
    command = [program("claude"), "-p", QUESTION, "--model", NAME]
    return start(
        [*command, "--allowedTools", "Bash"],
        home,
        ANTHROPIC_BASE_URL=f"http://127.0.0.1:{served.port}",
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )


def opencode(served: Served, home: Path) -> subprocess.CompletedProcess[str]:
    url = f"http://127.0.0.1:{served.port}/v1"
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": url, "apiKey": "none"},
        "models": {NAME: {"tool_call": True}},
    }
    config = {"provider": {"local": provider}, "share": "disabled"}
    return start(
        [program("opencode"), "run", "--model", f"local/{NAME}", QUESTION],
        home,
        OPENCODE_CONFIG_CONTENT=json.dumps(config | {"autoupdate": False}),
        OPENCODE_DISABLE_MODELS_FETCH="1",
        XDG_DATA_HOME=str(home / "data"),
    )


def qwen(served: Served, home: Path) -> subprocess.CompletedProcess[str]:
    (home / ".qwen").mkdir(parents=True)
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
    }
    (home / ".qwen/settings.json").write_text(json.dumps(settings))
    return start(
        [program("qwen"), "--auth-type", "openai", "--yolo", "--prompt", QUESTION],
        home,
        OPENAI_BASE_URL=f"http://127.0.0.1:{served.port}/v1",
        OPENAI_API_KEY="none",
        OPENAI_MODEL=NAME,
        HTTP_PROXY="",  # it would take one for this machine, too
        HTTPS_PROXY="",
    )


def bash(command: str) -> dict[str, Any]:
    return {"command": command, "description": "Multiplies"}


def qwen_shell(command: str) -> dict[str, Any]:
    return {**bash(command), "is_background": False}


AGENTS = {
    "Codex": Agent(
        "@openai/codex", "exec_command", lambda command: {"cmd": command}, codex
    ),
    "Claude Code": Agent("@anthropic-ai/claude-code", "Bash", bash, claude),
    "opencode": Agent("opencode-ai", "bash", bash, opencode),
    "Qwen Code": Agent("@qwen-code/qwen-code", "run_shell_command", qwen_shell, qwen),
}
WAYS = {  # of the AI SDK, by the package that goes them
    "responses": "@ai-sdk/openai",
    "chat": "@ai-sdk/openai",
    "compatible": "@ai-sdk/openai-compatible",
    "messages": "@ai-sdk/anthropic",
}
FRAMEWORKS: dict[
    str, tuple[str, ...]
] = {  # functions in frameworks.py: their names as people know them, packages
    "openai_agents": ("OpenAI Agents SDK", "openai-agents"),
    "openai_agents_chat": ("OpenAI Agents SDK", "openai-agents"),
    "langchain": ("LangChain", "langchain-openai"),
    "langgraph": ("LangGraph", "langgraph"),
    "pydantic_ai": ("Pydantic AI", "pydantic-ai-slim"),
    "litellm": ("LiteLLM", "litellm"),
    "autogen": ("AutoGen", "autogen-agentchat", "autogen-ext"),
    "agno": ("Agno", "agno"),
}


def need(*packages: str) -> str:
    """Their versions; the test is skipped where one isn't installed."""
    found = installed()
    for package in packages:
        if package not in found:
            how = "tools/record_clients.py --install"
            pytest.skip(f"{package} is not installed: {how}")
    return ", ".join(f"{package} {found[package]}" for package in packages)


@pytest.fixture
def record(caplog: pytest.LogCaptureFixture, record_property: Any) -> Any:
    """Tells the record what ran; the access log has to know of no refusal."""
    caplog.set_level("INFO", ACCESS.name)

    def found(client: str, packages: str) -> None:
        named = [one for one in caplog.records if one.name == ACCESS.name]
        lines = [json.loads(one.getMessage()) for one in named]
        posts = [line for line in lines if line["method"] == "POST"]
        assert len(posts) >= 3 and {line["status"] for line in posts} == {200}
        record_property("client", client)
        record_property("packages", packages)
        record_property("paths", " ".join(sorted({line["path"] for line in posts})))

    return found


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_with_a_shell(
    name: str, folder: Path, tmp_path: Path, record: Any
) -> None:
    """Its shell writes files, and the answer says what it printed."""
    agent, home = AGENTS[name], tmp_path / "home"
    versions = need(agent.package)
    steps = [
        Step(agent.tool, agent.arguments(f"echo $(({sum})) | tee {home / file}"))
        for sum, file in zip(SUMS, FILES, strict=True)
    ]
    with directed(folder, steps) as served:
        done = agent.run(served, home)
    assert done.returncode == 0 and TOLD in done.stdout, done
    assert [(home / file).read_text().strip() for file in FILES] == [*PRODUCTS]
    record(name, versions)


def check_loop(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"asked": [[47, 85], [12, 34]], "text": TOLD}


@pytest.mark.parametrize("way", WAYS)
def test_ai_sdk(way: str, folder: Path, tmp_path: Path, record: Any) -> None:
    versions = need("ai", WAYS[way])
    with directed(folder, MULTIPLY) as served:
        url = f"http://127.0.0.1:{served.port}/v1"
        command = ["node", "--input-type=module", "-", way, url]
        script = (PROGRAMS / "ai_sdk.mjs").read_text()
        done = start(command, tmp_path / "home", script, cwd=PLACE)
    check_loop(done)
    record("AI SDK", versions)


@pytest.mark.parametrize("function", FRAMEWORKS)
def test_framework(function: str, folder: Path, tmp_path: Path, record: Any) -> None:
    client, *packages = FRAMEWORKS[function]
    versions = need(*packages)
    with directed(folder, MULTIPLY) as served:
        url = f"http://127.0.0.1:{served.port}/v1"
        command = [str(PYTHON), str(PROGRAMS / "frameworks.py"), function, url]
        done = start(command, tmp_path / "home")
    check_loop(done)
    record(client, versions)
