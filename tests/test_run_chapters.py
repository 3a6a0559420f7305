"""tools/run_chapters.py finds the cells that a notebook has, and tells failures."""

import importlib.util
from pathlib import Path

import jupytext
import pytest
from export import chapter_files

ROOT = Path(__file__).resolve().parents[1]


def load(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load("run_chapters", ROOT / "tools/run_chapters.py")
conftest = load("root_conftest", ROOT / "conftest.py")


@pytest.mark.parametrize("path", chapter_files(ROOT))
def test_the_cells_are_those_of_the_notebook(path):
    expected = list(conftest.code_cells(jupytext.read(path)))
    found = [
        (cell.name, cell.source.rstrip("\n"), cell.raises)
        for cell in tool.cells(path.read_text(encoding="utf-8"))
    ]
    assert [(n, s.rstrip("\n"), r) for n, s, r in expected] == found


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
