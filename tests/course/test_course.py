"""The chapters' helper: figures that stay the same, tables that fit, honest timing."""

import contextlib
import json
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import course
import matplotlib.pyplot as plt
import pytest
import torch
from course import checks
from course.dark import dark

from simplellm.apps.report import write_json
from simplellm.base.sampling_params import SamplingParams


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


def test_a_figure_is_written_when_asked_and_has_the_same_bytes(
    figures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course.save_figure(draw(), "00-one", alt="A line over a histogram")
    assert not figures.exists()
    monkeypatch.setenv("SAVE_FIGURES", "1")
    course.save_figure(draw(), "00-one", alt="A line over a histogram")
    course.save_figure(draw(), "00-two", alt="A line over a histogram")
    first, second = (figures / f"00-{name}.svg" for name in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()
    assert "<title>A line over a histogram</title>" in first.read_text()
    # The page's ground is the figure's, and each color has another on a dark page.
    assert "fill: #ffffff" not in first.read_text()
    dark_style = first.read_text().partition("(prefers-color-scheme:dark)")[2]
    assert '[style*="fill: #1f2933"]' in dark_style.partition("</style>")[0]
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
    second = lines.index("simplellm/base/sampling_params.py")
    assert lines[second + 2].startswith("def __post_init__(")  # without its indent


def test_code_of_what_wraps_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    """A property, a kernel, which has its function as ``fn``, a decorated function."""
    decorated = torch.no_grad()(course.bench)
    course.show(property(course.recorded), SimpleNamespace(fn=course.table), decorated)
    printed = capsys.readouterr().out
    assert printed.count("course/__init__.py\n\ndef ") == 3


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict, dict]]:
    """What a notebook would show: data by MIME type, and metadata."""
    plt.switch_backend("agg")  # before there seems to be a notebook
    found: list[tuple[dict, dict]] = []

    def display(data: dict, metadata: dict, raw: bool) -> None:
        found.append((data, metadata))

    IPython = SimpleNamespace(
        get_ipython=object, display=SimpleNamespace(display=display)
    )
    monkeypatch.setitem(sys.modules, "IPython", IPython)
    return found


def test_a_notebook_renders_code(shown: list) -> None:
    course.show(course.bench)
    ((data, _),) = shown
    markdown = data["text/markdown"]
    assert markdown.startswith("`course/__init__.py`\n\n````python\ndef bench(")
    assert markdown.endswith("\n````")
    assert data["text/plain"].startswith("course/__init__.py\n\ndef bench(")


def test_a_notebook_shows_a_figure(figures: Path, shown: list) -> None:
    course.save_figure(draw(), "00-one")
    ((data, metadata),) = shown
    assert "<svg " in data["image/svg+xml"]
    assert metadata == {"figure": "00-one"}
    # JupyterLab takes the HTML, whose style hides the same figure in the text below.
    style, picture = data["text/html"].split("</style>")
    assert 'img[src*="figures/00-one.svg"]' in style
    assert picture.startswith('<img data-figure="00-one" src="data:image/svg+xml;')


# Checks.


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Gives the verdict of a check on a function."""

    def judged(check: Callable, candidate: object = None) -> str:
        monkeypatch.setattr(checks, "find", lambda name: check)
        with pytest.raises(course.Verdict) as refused:
            course.check("half", candidate)
        # A notebook shows these lines and no traceback.
        assert refused.value._render_traceback_() == str(refused.value).splitlines()
        return f"{type(refused.value).__name__} {refused.value}"

    return judged


CHECK = """
def check_half(half):
    assert half(4) == 2, f"half of 4 is {half(4)}"
    assert half(6) == 3
"""


@pytest.fixture
def check_half(tmp_path: Path) -> Callable:
    """From a file of its own, whose assertions pytest does not rewrite."""
    (tmp_path / "half.py").write_text(CHECK)
    return runpy.run_path(str(tmp_path / "half.py"))["check_half"]


def test_the_verdict_on_code_that_is_not_right(
    judge: Callable, check_half: Callable
) -> None:
    def stub(x: int) -> int:
        raise NotImplementedError

    def kernel(x: int) -> int:
        try:
            return stub(x)
        except NotImplementedError as error:
            raise RuntimeError("in a kernel") from error

    def compiled(x: int) -> int:
        raise RuntimeError("3: raise NotImplementedError is not supported")

    def fails(x: int) -> int:
        return [1, 2][x]

    assert judge(check_half, stub) == "NotYours half: not written yet"
    assert judge(check_half, kernel) == "NotYours half: not written yet"
    assert judge(check_half, compiled) == "NotYours half: not written yet"
    assert judge(check_half, lambda x: x) == "Wrong half: half of 4 is 4"
    # An assertion without a message tells what it asserts.
    assert judge(check_half, lambda x: 2) == "Wrong half: assert half(6) == 3"
    line = fails.__code__.co_firstlineno + 1
    assert judge(check_half, fails) == (
        "Wrong half: IndexError: list index out of range\n"
        f"  in your line {line}: return [1, 2][x]"
    )
    assert judge(check_half, sys.exit) == "Wrong half: SystemExit: 4"


def test_no_time_is_counted_in_which_none_of_a_readers_code_runs() -> None:
    with course.time_limit(0.2), course.untimed():
        time.sleep(0.3)
    with pytest.raises(course.TooLong), course.time_limit(0.2):
        with course.untimed():
            time.sleep(0.1)
        time.sleep(10)


CELLS = (
    """
class Table:
    def add(self):
        self.found().append(1)
    def room(self):
        return [][-1]
""",
    """
class Table(Table):
    def found(self):
        return ()
""",
    """
class Table(Table):
    def found(self):
        return self.room()
""",
)


def test_a_readers_lines_are_those_of_the_blank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other methods of the class stand in cells of the course or other blanks."""
    monkeypatch.setattr(checks, "find", lambda name: lambda table: table().add())
    names: dict = {}
    told = []
    for number, cell in enumerate(CELLS):
        file = tmp_path / f"{number}.py"
        file.write_text(cell)
        exec(compile(cell, str(file), "exec"), names)
        if number > 0:
            with pytest.raises(course.Wrong) as refused:
                course.check("Table.found", names["Table"])
            told.append(str(refused.value))
    assert told == [
        "Table.found: AttributeError: 'tuple' object has no attribute 'append'",
        "Table.found: IndexError: list index out of range\n"
        "  in your line 4: return self.room()",
    ]


def test_a_loop_without_end_is_ended(
    judge: Callable, check_half: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forever(x: int) -> int:
        while True:
            with contextlib.suppress(Exception):
                x += 1

    monkeypatch.setattr(course, "CHECK_SECONDS", 0.1)
    outer = signal.getitimer(signal.ITIMER_REAL)[0]
    assert judge(check_half, forever) == (
        "Wrong half: not done after 0.1 s: it is too slow, or never ends"
    )
    # The test run's own limit goes on.
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (outer > 0)


def test_an_unknown_check_is_named() -> None:
    with pytest.raises(LookupError, match="no check_no_such in chapters"):
        course.check("no.such", None)


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


def test_a_notebook_shows_a_table_in_html(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []

    def display(data: dict[str, str], plain: str) -> bool:
        shown.append(data)
        return True

    monkeypatch.setattr(course, "display", display)
    course.table([["a < b", "58 %"], ["c", "1,200 us"]], ["name", "share"])
    (data,) = shown
    assert data["text/html"] == (
        '<table><thead><tr><th style="text-align: left">name</th>'
        '<th style="text-align: right">share</th></tr></thead>'
        '<tbody><tr><td style="text-align: left">a &lt; b</td>'
        '<td style="text-align: right">58 %</td></tr>'
        '<tr><td style="text-align: left">c</td>'
        '<td style="text-align: right">1,200 us</td></tr></tbody></table>'
    )


def test_a_table_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="has 1 cells, expected 2"):
        course.table([["a"]], ["name", "value"])
    with pytest.raises(ValueError, match="81 columns wide, expected at most 80"):
        course.table([["x" * 81]], ["name"])


# Hints, and ours.


def test_a_hint_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    course.hint("visible")
    told = capsys.readouterr().out
    assert " ".join(told.split()) == course.about()["visible"]["hint"]
    assert max(map(len, told.splitlines())) <= course.WIDTH
    with pytest.raises(LookupError, match="no blank visibl; did you mean visible"):
        course.hint("visibl")


@pytest.fixture
def half_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check_half: Callable
) -> str:
    """A blank `half` and a class's `Pair.half`; the source of our versions of both."""
    source = "def half(x):\n    return x // 2\n"
    monkeypatch.setattr(course, "OURS", tmp_path / "ours.json")
    course.OURS.write_text(json.dumps({"half": source, "Pair.half": source}))
    monkeypatch.setattr(checks, "find", lambda name: check_half)
    return source


def test_ours_is_shown_once_yours_is_right(
    half_is_ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(code: str = "") -> str:
        names = {"ours": course.ours, "keep": course.keep}
        exec(f"{code}\nours('half')", names)
        return capsys.readouterr().out

    assert "Write your half first" in told()
    assert "Write your half first" in told("half = None")
    refused = told("def half(x):\n    return x")
    assert "half of 4 is 4" in refused and half_is_ours not in refused
    assert told("def half(x):\n    return x / 2") == f"{half_is_ours}\n"
    # Ours in the place of a wrong one isn't the reader's.
    replaced = told("def half(x):\n    return x\nhalf = keep('half', half)")
    assert "Write your half first" in replaced


def test_a_method_of_the_package_is_not_the_readers() -> None:
    class Own(SamplingParams):
        def check(self) -> int:
            return 1

    assert course.is_own("SamplingParams.check", Own)
    assert not course.is_own("SamplingParams.__post_init__", Own)
    assert not course.is_own("SamplingParams.__post_init__", SamplingParams)


def test_a_right_answer_says_where_to_go_on(
    half_is_ours: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(course, "about", lambda: {"half": {}})
    course.check("half", lambda x: x // 2)
    assert 'ours("half")' in capsys.readouterr().out
    course.OURS.unlink()  # in the reading edition
    course.check("half", lambda x: x // 2)
    assert "`make lab` opens it" in capsys.readouterr().out
    course.check("4.1", lambda x: x // 2)
    assert capsys.readouterr().out == "4.1: right\n"


def luminance(color: str) -> float:
    """As WCAG 2 defines it, from 0 to 1."""
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (
        c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(
    ("text", "ground"),
    [("#1f2933", "#ffffff"), ("#52606d", "#f5f7f9"), ("#1f2933", "#dbebf4")]
    + [(color, "#ffffff") for color in course.COLORS]
    + [("#ffffff", color) for color in course.COLORS[:3]],
)
def test_what_can_be_read_on_a_light_page_can_be_on_a_dark_one(
    text: str, ground: str
) -> None:
    light, deep = sorted(
        (luminance(dark(c)) + 0.05 for c in (text, ground)), reverse=True
    )
    assert light / deep > 3.5
    assert luminance(dark("#ffffff")) < 0.02 < 0.6 < luminance(dark("#1f2933"))
