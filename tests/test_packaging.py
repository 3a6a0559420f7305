"""Pins, ranges and the conda environment agree; the wheel holds what it needs."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import simplellm

ROOT = Path(__file__).parents[1]
EMBEDDED = (
    "config.json",
    "generation_config.json",
    "head/config.json",
    "head/model.safetensors",
    "model.safetensors",
    "problems.json",
    "tokenizer.json",
)
MEGABYTE = 1_000_000
# Hours of compilation, never needed; and much to install for a few tests of its own.
UNPINNED = {"flash-attn", "ray"}


def name_of(requirement: Requirement) -> str:
    return re.sub(r"[-_.]+", "-", requirement.name).lower()


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def ranges(project: dict) -> dict[str, Requirement]:
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for e in extras.values() for line in e)]
    found = {name_of(r): r for r in map(Requirement, lines)}
    own = found.pop(project["name"])  # the course has what the server needs
    assert own.extras == {"families", "gguf", "serve", "structured"}
    return found


@pytest.fixture(scope="module")
def pins() -> dict[str, Requirement]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    found = [Requirement(line) for line in wanted]
    assert len({name_of(r) for r in found}) == len(found)
    return {name_of(r): r for r in found}


def version_of(pin: Requirement) -> str:
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    return specifier.version


def test_every_dependency_is_pinned_and_nothing_else(pins, ranges) -> None:
    assert set(pins) == set(ranges) - UNPINNED


def test_every_pin_lies_in_its_range(pins, ranges) -> None:
    for name, pin in pins.items():
        assert ranges[name].specifier.contains(version_of(pin)), pin
        assert pin.marker == ranges[name].marker, name


def test_the_ranges_cover_torch_2_11_to_2_15(ranges) -> None:
    torch, triton = ranges["torch"].specifier, ranges["triton"].specifier
    assert [v for v in range(8, 20) if torch.contains(f"2.{v}.0")] == [*range(11, 16)]
    assert triton.contains("3.6.0") and triton.contains("3.9.0")


def test_the_installed_versions_are_the_pinned_ones(pins) -> None:
    """Otherwise the other tests speak of versions that nobody installs."""
    for name, pin in pins.items():
        if pin.marker is None or pin.marker.evaluate():
            assert version(name).split("+")[0] == version_of(pin), name


def test_the_conda_environment_installs_the_pins(project) -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == project["name"]
    python, pip, packages = environment["dependencies"]
    assert (
        Requirement(python).specifier
        == Requirement(f"python{project['requires-python']}").specifier
    )
    assert pip == "pip"
    assert packages == {"pip": ["-r requirements.txt", "-e ."]}


def test_the_course_has_what_its_appendix_imports(project) -> None:
    extras = project["optional-dependencies"]
    assert "simplellm[families,gguf,serve,structured]" in extras["course"]
    names = {name_of(Requirement(line)) for line in extras["serve"]}
    text = (ROOT / "chapters" / "a-serving.md").read_text()
    imported = {*re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)}
    assert "uvicorn" in names & imported


def test_the_versions_agree(project) -> None:
    assert simplellm.__version__ == project["version"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`pip wheel .` of a copy, so that no build output lands in the repository."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "simplellm", source / "simplellm", ignore=ignored)
    target = tmp_path_factory.mktemp("wheel")
    wheel = [sys.executable, "-m", "pip", "wheel", ".", "--quiet", "--no-deps"]
    options = ["--no-build-isolation", "--wheel-dir", str(target)]
    subprocess.run([*wheel, *options], cwd=source, check=True)
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_the_model(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        (points,) = [n for n in sizes if n.endswith(".dist-info/entry_points.txt")]
        assert "simplellm = simplellm.apps.cli:main" in archive.read(points).decode()
    modules = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "simplellm").rglob("*.py")
        if "__pycache__" not in path.parts
    }
    embedded = {f"simplellm/embedded/{name}" for name in EMBEDDED}
    page = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "simplellm/server/page").rglob("*.*")
        if path.suffix in (".css", ".gz", ".html", ".js", ".txt")
    }
    assert "simplellm/server/page/index.html" in page
    swagger = "simplellm/server/page/swagger"
    page |= {f"{swagger}/LICENSE", f"{swagger}/NOTICE"}
    package = {name for name in sizes if name.startswith("simplellm/")}
    assert package == modules | embedded | page | {"simplellm/py.typed"}
    assert sum(sizes[name] for name in embedded) <= 12.5 * MEGABYTE
    assert any(name.endswith("LICENSE") for name in sizes)
    assert not any(name.startswith(("tests", "tools", "chapters")) for name in sizes)


@pytest.mark.slow
def test_the_wheel_works_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own; the dependencies come from this one by a path."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=False)
    python = home / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run([*pip, "--quiet", "--no-index", wheel], check=True)
    purelib = f"lib/python{sysconfig.get_python_version()}/site-packages"
    dependencies = sysconfig.get_path("purelib")
    (home / purelib / "dependencies.pth").write_text(dependencies)

    def run(*command: str | Path) -> str:
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    where = run(python, "-c", "import simplellm; print(simplellm.__file__)")
    assert Path(where.strip()).is_relative_to(home)
    assert "132" in run(home / "bin/simplellm", "What is 47 + 85?")
