"""Run the chapters as notebooks: `pytest chapters/`, `pytest chapters/03-mxfp4.md`.

nbval runs .ipynb files; here its collector takes the Markdown chapters. Behind each
`#| check` cell come the folded solution and the check once more: the check has to fail
on the stub and to pass on the solution.
"""

import re
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import jupytext
import pytest
from nbformat.v4 import new_code_cell
from nbval.plugin import IPyNbCell, IPyNbFile

# Triton is there on Linux only.
SKIPPED = set() if find_spec("triton") else {"11-triton-fusions.md"}
CHAPTER = re.compile(r"(\d\d|[a-z])-.*\.md$")  # a letter is an appendix's
DIRECTIVE = re.compile(r"#\| (check|solution) +(\S+)")
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def solutions(notebook) -> dict[str, str]:
    """The code of each exercise's folded solution by the exercise's number."""
    found: dict[str, str] = defaultdict(str)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for code in FENCE.findall(cell.source):
                match = DIRECTIVE.match(code)
                if match and match[1] == "solution":
                    found[match[2]] += code
    return found


def code_cells(notebook) -> Iterator[tuple[str, str, bool]]:
    """Name, source and whether it has to raise, of each cell to run."""
    solved = solutions(notebook)
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    for number, cell in enumerate(cells):
        match = DIRECTIVE.match(cell.source)
        if not (match and match[1] == "check"):
            expected = "raises-exception" in cell.metadata.get("tags", [])
            yield f"cell {number}", cell.source, expected
            continue
        exercise = match[2]
        missing = f"raise LookupError('no `#| solution {exercise}` in the chapter')"
        yield f"check {exercise} on the stub", cell.source, True
        yield f"solution {exercise}", solved.get(exercise, missing), False
        yield f"check {exercise} on the solution", cell.source, False


class Chapter(IPyNbFile):
    """A Markdown chapter, run in one kernel whose directory is chapters/."""

    seconds = 0.0

    def collect(self) -> Iterator[pytest.Item]:
        self.nb = jupytext.read(self.path)
        for number, (name, source, raises) in enumerate(code_cells(self.nb)):
            cell = new_code_cell(source)
            options = defaultdict(bool, check_exception=raises)
            yield ChapterCell.from_parent(
                self, name=name, cell_num=number, cell=cell, options=options
            )
        yield ChapterTime.from_parent(self, name="time")


class ChapterCell(IPyNbCell):
    """One cell; unlike nbval's, it fails when an expected exception stays away."""

    def runtest(self) -> None:
        start = time.perf_counter()
        try:
            super().runtest()
        finally:
            self.parent.seconds += time.perf_counter() - start
        raised = any(output.output_type == "error" for output in self.test_outputs)
        if self.options["check_exception"] and not raised:
            self.raise_cell_error("The cell raised nothing; expected an exception")

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.path.name}: {self.name}"


class ChapterTime(pytest.Item):
    """All cells of a chapter together stay under the time limit."""

    def runtest(self) -> None:
        chapter = self.getparent(Chapter)
        seconds = chapter.seconds if chapter else 0.0
        self.user_properties.append(("chapter seconds", seconds))
        limit = float(self.config.getini("chapter_seconds"))
        if seconds > limit:
            pytest.fail(f"took {seconds:.0f} s, allowed are {limit:.0f} s", False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("chapter_seconds", "time limit of a chapter in seconds", default="60")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Chapter | None:
    chapters = parent.config.rootpath / "chapters"
    if file_path.name in SKIPPED:
        return None
    if file_path.parent == chapters and CHAPTER.match(file_path.name):
        return Chapter.from_parent(parent, path=file_path)
    return None


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [
        *terminalreporter.getreports("passed"),
        *terminalreporter.getreports("failed"),
    ]
    times = sorted(
        (report.nodeid.split("::")[0], seconds)
        for report in reports
        if report.when == "call"
        for name, seconds in report.user_properties
        if name == "chapter seconds"
    )
    if times:
        terminalreporter.section("time per chapter")
        for chapter, seconds in [*times, ("total", sum(s for _, s in times))]:
            terminalreporter.line(f"{chapter:<40} {seconds:6.1f} s")
