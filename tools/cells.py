"""The code of a chapter: its cells, and the order in which a test run takes them.

A blank is a stub that the reader fills in; its kept version is a cell of its own below.
An exercise's solution stands in a folded Markdown region, where a notebook does not run
it. The first lines of a cell may be directives:

    #| blank route          the stub of a blank, a function or a `Class.method`
    #| exercise 4.1         the stub of an exercise
    #| solution route       (part of) the kept version of a blank or an exercise
    #| export model.rope    the exporter writes the cell into simplellm/model/rope.py
"""

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REGION = re.compile(r"^<!-- #region.*?^<!-- #endregion -->$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(
    r"^(?P<ticks>`{3,})python(?P<options>[ \t][^\n]*)?\n(?P<code>.*?)^(?P=ticks)$",
    re.MULTILINE | re.DOTALL,
)
FOLDED = re.compile(r"^<details>.*?^</details>$|<!--.*?-->", re.MULTILINE | re.DOTALL)
LINKED = re.compile(r"!\[[^\]]*\]\([^)]*\)|(?<=\])\([^)\s]*\)")  # what is not read
CHAPTER = re.compile(r"(\d\d|[a-z])-[\w-]+")  # the stems of chapters and appendices
# The stems of pages that run as notebooks, too.
PAGES = ("index", "small-engine", "cases", "challenges")
EDITION = re.compile(r"(?<=^<!-- edition -->\n).*?(?=^<!-- /edition -->$)", re.M | re.S)
WORDS, LINES = 200, 12  # that are read in a minute
# Cells that ask a whole engine, a small real model's or one in a process of its own. In
# the course as it is that is our engine, whatever the chapter defines.
ASKING = re.compile(r"^(?:run_mine\(|if has_model\()", re.MULTILINE)
ASKED_IN = "03-mxfp4"  # the chapter whose cells of this kind every test run takes
CHECK = re.compile(r'^check\(\s*"([\w.]+)"', re.MULTILINE)


class Cell(NamedTuple):
    """One Python cell; ``options`` is what follows the word python on its fence."""

    source: str
    options: str = ""
    folded: bool = False  # an exercise's solution, which a notebook does not run

    def directives(self) -> dict[str, str]:
        """The argument of each leading ``#|`` line by its first word."""
        directives = {}
        for line in self.source.splitlines():
            if not line.startswith("#|"):
                break
            word, _, argument = line.removeprefix("#|").strip().partition(" ")
            directives[word] = argument.strip()
        return directives

    @property
    def body(self) -> str:
        """The source without its leading directives."""
        lines = self.source.splitlines(keepends=True)
        return "".join(lines[len(self.directives()) :])

    @property
    def raises(self) -> bool:
        return "raises-exception" in self.options

    @property
    def flows(self) -> bool:
        """Whether its code is open on the page; folded code is read by choice."""
        return not self.folded and '"source_hidden": true' not in self.options

    @property
    def checks(self) -> str:
        """The blank or exercise that the cell checks, or ""."""
        match = CHECK.search(self.source)
        return match[1] if match else ""


class Step(NamedTuple):
    """What to run, and what it has to raise: an exception's name, any ("*"), none."""

    name: str
    source: str
    raises: str = ""


def chapter_files(folder: Path) -> list[Path]:
    """The numbered chapters in ``folder``, then the appendices a-….md and on."""
    paths = [path for path in folder.glob("*.md") if CHAPTER.fullmatch(path.stem)]
    return sorted(paths, key=lambda path: (not path.name[0].isdigit(), path.name))


def number_of(chapter: Path) -> str:
    """What its exercises and terms are numbered with: 7, or an appendix's A."""
    return chapter.name.partition("-")[0].lstrip("0").upper()


def cells(text: str) -> list[Cell]:
    """The Python cells of a chapter in Markdown, in order."""
    regions = [match.span() for match in REGION.finditer(text)]
    result = []
    for match in FENCE.finditer(text):
        options = (match["options"] or "").strip()
        if options != ".noeval":
            folded = any(start < match.start() < end for start, end in regions)
            result.append(Cell(match["code"], options, folded))
    return result


def committed(page: Path) -> str:
    """The text of a page as git has it; the file's own where git has none.

    A reader may have written into a page of the course, and its stubs are still stubs.
    """
    command = ["git", "show", f"HEAD:./{page.name}"]
    try:
        done = subprocess.run(command, cwd=page.parent, capture_output=True)
    except OSError:  # there is no git
        return page.read_text(encoding="utf-8")
    if done.returncode:
        return page.read_text(encoding="utf-8")
    return done.stdout.decode()


def read(path: Path) -> list[Cell]:
    """The Python cells of a chapter that was saved as Markdown or as a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return cells(text)
    result = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            tags = cell["metadata"].get("tags", [])
            result.append(Cell(source, json.dumps(tags)))
        else:
            result += cells(source)
    return result


def reading_minutes(text: str) -> float:
    """How long a chapter takes to read, without what is folded."""
    prose = LINKED.sub("", FENCE.sub("", FOLDED.sub("", text)))
    words = [word for word in prose.split() if any(map(str.isalnum, word))]
    lines = [
        line
        for cell in cells(text)
        if cell.flows
        for line in cell.body.splitlines()
        if line.strip()
    ]
    return len(words) / WORDS + len(lines) / LINES


def solutions(contents: list[Cell]) -> dict[str, str]:
    """The code of each exercise's folded solution by the exercise's number."""
    solved: dict[str, str] = defaultdict(str)
    for cell in contents:
        if cell.folded and (name := cell.directives().get("solution")):
            solved[name] += cell.source
    return solved


def steps(text: str) -> Iterator[Step]:
    """What a test run executes of a chapter.

    Each check has to refuse the stub as not written. Behind an exercise's check come
    its solution and the check again; a blank's check is repeated behind the last cell
    of its kept version.
    """
    contents = cells(text)
    solved = solutions(contents)
    running = [cell for cell in contents if not cell.folded]
    last = {
        name: number
        for number, cell in enumerate(running)
        if (name := cell.directives().get("solution"))
    }
    checks = {}
    for number, cell in enumerate(running):
        name = cell.checks if cell.raises else ""
        if not name:
            yield Step(f"cell {number}", cell.source, "*" if cell.raises else "")
        else:
            yield Step(f"check {name} on the stub", cell.source, "NotYours")
            if last.get(name, -1) > number:
                checks[name] = cell.source
            else:
                missing = f"raise LookupError('no `#| solution {name}` in the chapter')"
                yield Step(f"solution {name}", solved.get(name, missing))
                yield Step(f"check {name} on the solution", cell.source)
        name = cell.directives().get("solution", "")
        if name in checks and last[name] == number:
            yield Step(f"check {name} on the kept version", checks[name])
