"""What every record of a measurement begins with, and how it is written.

A script writes its record where --json says; chapters, README and tests read it. This
needs nothing of the package, which compare.py has from elsewhere.
"""

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


def argument_parser(docstring: str | None) -> argparse.ArgumentParser:
    """A script's options, of which --json is the same everywhere."""
    parser = argparse.ArgumentParser(description=(docstring or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the record")
    return parser


def versions(*packages: str) -> dict[str, str | None]:
    """Those that decide how fast something is, and of ``packages``."""
    numbers: dict[str, str | None] = {name: version(name) for name in packages}
    numbers |= {"python": platform.python_version(), "torch": torch.__version__}
    numbers["cuda"] = torch.version.cuda  # None where PyTorch has no CUDA
    with suppress(ImportError):
        from triton import __version__ as triton
        from triton.backends.nvidia.compiler import get_ptxas

        numbers |= {"triton": triton, "ptxas": get_ptxas(90).version}
    return numbers


def header(*packages: str) -> dict[str, Any]:
    """The day, the GPU or the machine, all versions, and the command that runs."""
    script = Path(sys.argv[0]).resolve().relative_to(ROOT).as_posix()
    where = {"machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    if torch.cuda.is_available():
        where = {"gpu": torch.cuda.get_device_name()}
    return {
        "date": date.today().isoformat(),
        **where,
        "versions": versions(*packages),
        "command": shlex.join(["python", script, *sys.argv[1:]]),
    }


def save(record: Mapping[str, Any], path: Path | None) -> None:
    """Write it, if it is wanted."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
