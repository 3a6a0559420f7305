"""The chapters' helper: figures that stay the same, tables that fit, honest timing."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import course
import matplotlib.pyplot as plt
import pytest
import torch

from simplellm.apps.report import write_json
from simplellm.request import SamplingParams


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(course, "FIGURES", tmp_path / "figures")
    return tmp_path / "figures"


def draw() -> plt.Figure:
    fig, axes = plt.subplots()
    axes.plot([1, 2, 3], [3, 1, 2], label="a")
    axes.hist([1, 2, 2, 3])
    axes.legend()
    return fig


def test_the_same_figure_gives_the_same_bytes(figures: Path) -> None:
    course.save_figure(draw(), "00-one", alt="A line over a histogram")
    course.save_figure(draw(), "00-two", alt="A line over a histogram")
    first, second = (figures / f"00-{name}.svg" for name in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()
    assert "<title>A line over a histogram</title>" in first.read_text()
    assert "fill: #ffffff" in first.read_text()  # readable on a dark page too
    assert not plt.get_fignums()


def test_recorded_numbers_come_from_figures(figures: Path) -> None:
    figures.mkdir()
    (figures / "00-speed.json").write_text(json.dumps({"tokens": 3}))
    assert course.recorded("00-speed") == {"tokens": 3}


def test_code_is_printed_with_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    course.show(write_json, SamplingParams.__post_init__)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["simplellm/apps/report.py", ""]
    assert lines[2].startswith("def write_json(")
    second = lines.index("simplellm/request.py")
    assert lines[second + 2].startswith("def __post_init__(")  # without its indent


def test_code_of_what_wraps_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    """A property, a kernel, which has its function as ``fn``, a decorated function."""
    decorated = torch.no_grad()(course.bench)
    course.show(property(course.recorded), SimpleNamespace(fn=course.table), decorated)
    printed = capsys.readouterr().out
    assert printed.count("chapters/course.py\n\ndef ") == 3


def test_a_notebook_renders_code(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    IPython = SimpleNamespace(
        get_ipython=object,
        display=SimpleNamespace(display=lambda data, raw: shown.append(data)),
    )
    monkeypatch.setitem(sys.modules, "IPython", IPython)
    course.show(course.bench)
    (data,) = shown
    markdown = data["text/markdown"]
    assert markdown.startswith("`chapters/course.py`\n\n````python\ndef bench(")
    assert markdown.endswith("\n````")
    assert data["text/plain"].startswith("chapters/course.py\n\ndef bench(")


def test_bench_is_the_median_without_the_warmup() -> None:
    waits = iter([0.2, 0.0, 0.03, 0.2])
    seconds = course.bench(lambda: time.sleep(next(waits)), repeat=3, warmup=1)
    assert 0.03 <= seconds < 0.1


def test_a_table_aligns_numbers_to_the_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    course.table([["a", 1.5], ["bcd", 22]], ["name", "value"])
    assert capsys.readouterr().out.splitlines() == [
        "name  value",
        "----  -----",
        "a       1.5",
        "bcd      22",
    ]


def test_a_table_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="has 1 cells, expected 2"):
        course.table([["a"]], ["name", "value"])
    with pytest.raises(ValueError, match="81 columns wide, expected at most 80"):
        course.table([["x" * 81]], ["name"])
