"""tools/run_chapters.py finds the cells that a notebook has, and tells failures."""

import importlib.util
from pathlib import Path

import cells
import jupytext
import pytest
from cells import chapter_files

ROOT = Path(__file__).resolve().parents[1]


def load(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load("run_chapters", ROOT / "tools/run_chapters.py")


@pytest.mark.parametrize(
    "path", chapter_files(ROOT / "chapters"), ids=lambda path: path.name
)
def test_the_cells_are_those_of_the_notebook(path, tmp_path):
    notebook = jupytext.read(path)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    found = cells.read(path)
    assert [c.source.rstrip("\n") for c in found if not c.folded] == code
    saved = tmp_path / "saved.ipynb"
    jupytext.write(notebook, saved)
    again = cells.read(saved)
    assert [c.source.rstrip("\n") for c in again] == [
        c.source.rstrip("\n") for c in found
    ]


def test_failures_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "chapters"))
    text = """
```python
a = 1
```
```python
assert a == 2
```
```python tags=["raises-exception"]
a += 1
```
```python
import asyncio
await asyncio.sleep(0)
assert a == 2
```
"""
    chapter = tmp_path / "01-test.md"
    chapter.write_text(text)
    assert tool.run_chapter(chapter) == ["cell 1", "cell 2"]
    assert "AssertionError" in capsys.readouterr().out
