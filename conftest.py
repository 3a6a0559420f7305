"""Run the chapters as notebooks: `pytest chapters/`, `pytest chapters/03-mxfp4.md`.

nbval runs .ipynb files; here its collector takes the Markdown chapters. Each `check`
has to refuse the stub above it as not written, and to accept the kept version.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import jupytext
import psutil
import pytest
from cells import ASKED_IN, ASKING, PAGES, chapter_files, steps
from nbformat.v4 import new_code_cell
from nbval.plugin import IPyNbCell, IPyNbFile

# Triton is there on Linux only.
NEED_TRITON = {"11-triton-fusions.md", "12-full-speed.md", "e-several-gpus.md"}
SKIPPED = set() if find_spec("triton") else NEED_TRITON


class Chapter(IPyNbFile):
    """A Markdown chapter, run in one kernel whose directory is chapters/."""

    seconds = 0.0
    before: dict[Path, bytes]  # its figures when it starts
    began: float  # what its kernel had computed then

    def collect(self) -> Iterator[pytest.Item]:
        self.nb = jupytext.read(self.path)
        text = self.path.read_text(encoding="utf-8")
        for number, (name, source, raises) in enumerate(steps(text)):
            cell = new_code_cell(source)
            options = defaultdict(bool, check_exception=bool(raises), raises=raises)
            item = ChapterCell.from_parent(
                self, name=name, cell_num=number, cell=cell, options=options
            )
            if ASKING.search(source) and self.path.stem != ASKED_IN:
                item.add_marker("exhaustive")
            yield item
        yield ChapterTime.from_parent(self, name="time")
        yield ChapterFigures.from_parent(self, name="figures")

    def setup(self) -> None:
        self.before = self.figures()
        super().setup()
        self.began = self.cpu_seconds()

    def cpu_seconds(self) -> float:
        """What its kernel has computed so far, and the processes that it waited for."""
        pid = self.kernel.km.provisioner.pid
        return sum(psutil.Process(pid).cpu_times()[:4])

    def figures(self) -> dict[Path, bytes]:
        """The chapter's figures and recorded numbers, which running it leaves alone."""
        number = self.path.name.partition("-")[0]
        found = (self.config.rootpath / "figures").glob(f"{number}-*")
        return {path: path.read_bytes() for path in found}


class ChapterCell(IPyNbCell):
    """One cell; unlike nbval's, it fails when an expected exception stays away."""

    def runtest(self) -> None:
        start = time.perf_counter()
        try:
            super().runtest()
        finally:
            self.parent.seconds += time.perf_counter() - start
        expected = self.options["raises"]
        raised = [o.ename for o in self.test_outputs if o.output_type == "error"]
        if expected and not raised:
            self.raise_cell_error("The cell raised nothing; expected an exception")
        if expected not in ("", "*", *raised):
            self.raise_cell_error(f"The cell raised {raised[0]}; expected {expected}")

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.path.name}: {self.name}"


class ChapterTime(pytest.Item):
    """All cells of a chapter together stay under the time limit.

    Where they took longer than they have computed, as beside other processes, it is
    what they have computed that counts.
    """

    def runtest(self) -> None:
        chapter = self.getparent(Chapter)
        if chapter is None:
            return
        self.user_properties.append(("chapter seconds", chapter.seconds))
        limit = float(self.config.getini("chapter_seconds"))
        computed = chapter.cpu_seconds() - chapter.began
        if chapter.seconds > limit and computed > limit:
            took = f"{chapter.seconds:.0f} s, {computed:.0f} of them computing"
            pytest.fail(f"took {took}; allowed are {limit:.0f} s", False)


class ChapterFigures(pytest.Item):
    """Running a chapter writes no figure, unless it is asked to."""

    def runtest(self) -> None:
        chapter = self.getparent(Chapter)
        if chapter is None or os.environ.get("SAVE_FIGURES"):
            return
        now, before = chapter.figures(), chapter.before
        changed = [p.name for p in now if now[p] != before.get(p)]
        if changed or now.keys() != before.keys():
            pytest.fail(f"wrote or removed figures: {changed}", False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("chapter_seconds", "time limit of a chapter in seconds", default="60")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Chapter | None:
    chapters = parent.config.rootpath / "chapters"
    if file_path.name in SKIPPED:
        return None
    pages = [chapters / f"{name}.md" for name in PAGES]
    if file_path in [*pages, *chapter_files(chapters)]:
        return Chapter.from_parent(parent, path=file_path)
    return None


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Mark what tests the course, so that a change of the engine can leave it out."""
    course = [config.rootpath / "chapters", config.rootpath / "tests/course"]
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in course):
            item.add_marker("course")


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
