"""The chapters' cells, as cells.py finds them, are those that a notebook has."""

from pathlib import Path

import cells
import jupytext
import pytest
from cells import chapter_files

CHAPTERS = chapter_files(Path(__file__).resolve().parents[2] / "chapters")


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.name)
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
