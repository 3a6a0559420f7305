"""The toggle above a kept version opens and closes its code in JupyterLab."""

import json
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDS = ROOT / ".jupyter/labextensions/simplellm-folds"

FOLD = "<details><summary>The version we keep</summary>"
CELLS = [
    ("markdown", "<details>a hint</details>"),
    ("code", "check('merge', merge)"),
    ("markdown", f"</details>\n\nNow you.\n\n{FOLD}"),
    ("code", "def merge"),
    ("markdown", "And a helper:"),
    ("code", "def helper"),
    ("markdown", "</details>\n\nIt works."),
    ("code", "merge"),
]
# What the extension sees of JupyterLab, with the cells above: their code is hidden.
PAGE = """
document.body.innerHTML = '';
window.cells = CELLS.map(([type, text]) => {
  const node = document.createElement('div');
  if (type === 'markdown') { node.innerHTML = text; }
  document.body.append(node);
  const model = {type, sharedModel: {getSource: () => text}};
  return {node, model, inputHidden: true};
});
const panel = {node: document.body, content: {widgets: window.cells}};
const app = {shell: {widgets: () => [{node: document.createElement('p')}, panel]}};
window._JUPYTERLAB['simplellm-folds'].get('./extension').then((make) => {
  make().default.activate(app);
});
"""


@pytest.fixture
def lab() -> Iterator[browser.Browser]:
    if (program := browser.find()) is None:
        pytest.skip("no Chromium on this machine")
    screen = browser.Browser(program)
    screen.evaluate((FOLDS / "remoteEntry.js").read_text(encoding="utf-8") + "; null")
    screen.evaluate(PAGE.replace("CELLS", json.dumps(CELLS), 1) + "; null")
    yield screen
    assert not screen.errors
    screen.close()


def shown(screen: browser.Browser) -> list[str]:
    """The sources of the code cells that are open."""
    found = screen.evaluate("cells.map((cell) => !cell.inputHidden)")
    return [text for (_, text), is_open in zip(CELLS, found, strict=True) if is_open]


def test_a_toggle_holds_the_code_up_to_its_end(lab: browser.Browser) -> None:
    fold = "cells[2].node.querySelector('details')"
    lab.evaluate(f"{fold}.open = true")
    lab.wait("!cells[3].inputHidden")
    assert shown(lab) == ["def merge", "def helper"]
    lab.evaluate(f"{fold}.open = false")
    lab.wait("cells[3].inputHidden")
    assert shown(lab) == []


def test_a_fold_of_one_cell_holds_no_other(lab: browser.Browser) -> None:
    lab.evaluate("cells[0].node.querySelector('details').open = true")
    lab.evaluate("cells[2].node.querySelector('details').open = true")
    lab.wait("!cells[3].inputHidden")  # by now the first one has been heard, too
    assert "check('merge', merge)" not in shown(lab)


def test_make_lab_loads_it() -> None:
    described = json.loads((FOLDS / "package.json").read_text(encoding="utf-8"))
    assert (FOLDS / described["jupyterlab"]["_build"]["load"]).exists()
    assert described["name"] == FOLDS.name
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert '_labextensions_path="$(CURDIR)/.jupyter/labextensions"' in makefile
