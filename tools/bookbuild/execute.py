"""Execute a chapter as a notebook and keep the outputs of its cells."""

import hashlib
import json
import os
import platform
import re
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

Outputs = list[list[dict[str, Any]]]  # of each code cell, in nbformat's form

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colors of a terminal
SECONDS_PER_CELL = 600
ROOT = str(Path(__file__).resolve().parents[2])


class BookError(Exception):
    """One message that names the page and what is wrong with it."""


def read(source: str) -> nbformat.NotebookNode:
    """The notebook that a page of jupytext Markdown is."""
    return jupytext.reads(source, fmt="md")


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def fingerprint(root: Path, notebook: nbformat.NotebookNode) -> str:
    """A hash of all that a chapter's outputs depend on; its prose is not among it."""
    digest = hashlib.sha256(platform.python_version().encode())
    digest.update(metadata.version("torch").encode())
    for cell in code_cells(notebook):
        digest.update(f"\0{cell.metadata.get('tags')}\0{cell.source}".encode())
    read_by_chapters = [
        *sorted(root.glob("chapters/**/*.[!m]*")),  # all but the pages
        *sorted(root.glob("simplellm/**/*")),
        *sorted(root.glob("figures/*.json")),
    ]
    for path in read_by_chapters:
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a cell gave, with neighbors of one stream in one piece.

    Only neighbors: what is printed between two tables belongs between them.
    """
    merged: list[dict[str, Any]] = []
    for output in outputs:
        before = merged[-1] if merged else {}
        if output["output_type"] == "stream" and before.get("name") == output["name"]:
            merged[-1] = {**before, "text": before["text"] + output["text"]}
        else:
            merged.append(output)
    return merged


def outputs(root: Path, name: str, source: str) -> Outputs:
    """Outputs of each code cell of page ``name``, from the cache where it is current.

    Raises BookError when a cell raises that is not tagged raises-exception.
    """
    notebook = read(source)
    cells = code_cells(notebook)
    if not cells:
        return []
    cached = root / ".cache/book/outputs" / f"{name}.json"
    key = fingerprint(root, notebook)
    if cached.exists():
        kept = json.loads(cached.read_text(encoding="utf-8"))
        if kept["key"] == key:
            return kept["outputs"]
    start = time.perf_counter()
    run(root / "chapters", name, notebook)
    seconds = time.perf_counter() - start
    print(f"{name}: {len(cells)} cells in {seconds:.1f} s", file=sys.stderr)
    results: Outputs = [joined(cell.outputs) for cell in cells]
    cached.parent.mkdir(parents=True, exist_ok=True)
    cached.write_text(json.dumps({"key": key, "outputs": results}), encoding="utf-8")
    return results


def run(folder: Path, name: str, notebook: nbformat.NotebookNode) -> None:
    """Execute all cells in one kernel of this Python, in ``folder``."""
    # With no folder to look in, the manager offers the kernel of this Python alone.
    manager = AsyncKernelManager(
        kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[])
    )
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=SECONDS_PER_CELL,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
    )
    client.owns_km = True  # so that the kernel ends with the execution
    # The package is imported from here, installed or not.
    search = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    try:
        client.execute(env={**os.environ, "PYTHONPATH": search})
    except CellExecutionError as error:
        message = f"{name}: {error.ename}: {error.evalue}\n{error}"
        raise BookError(ANSI.sub("", message)) from error
