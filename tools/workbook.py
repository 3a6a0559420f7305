"""A course to write yourself: chapters with empty blanks, and an engine of your own.

    make lab                               write workbook/, if it isn't there; open it
    make workbook                          write it anew: new text, and what you wrote
    make progress                          what of it is yours, and right
    make mine PROMPT="What is 47 + 85?"    ask the engine with your functions in it

and for those who teach, with a folder of each student:

    python tools/workbook.py progress alice/workbook bob/workbook [--json]

The exit status of `progress` is 0 if every blank is written and right, else 1.
Nothing that a reader wrote is overwritten: a refresh merges what the course has changed
into the reader's pages, and where both have changed the same lines, or git is missing,
the reader's page is put aside in workbook/before/ first.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "chapters"))

import cells
from blanks import (
    CHAPTERS,
    HERE,
    OWN,
    ROOT,
    Blank,
    Result,
    WorkbookError,
    blanks_of,
    by_chapter,
    course_blanks,
    judged,
    same,
    saved,
)
from cells import EDITION, FENCE, Cell, chapter_files, committed
from mine import ask

LEFT_OUT = {"__pycache__", ".ipynb_checkpoints", "tutor.md"}
NO_PAGES = {"SUMMARY.md", "manual.md", "models.md"}  # the book's
OURS = "course/ours.json"  # our versions by name
DETAILS = re.compile(r"^<details>.*?^</details>\n*", re.MULTILINE | re.DOTALL)
OUTSIDE = re.compile(r"(?<=\]\()\.\./(?=figures/)")
EDITION_NOTE = """\
*This is your workbook. The functions that you write here are those that `make mine`
runs, and `make progress` says which are right. The reading edition, with our versions
in it, is another folder: `make read` opens it.*
"""
KEEP = """\
```python
from course import keep

# From here on this page runs yours if it's right, else ours.
{root} = keep("{name}", {root})
```

"""
FIRST_IMPORT = "from course import "
ADVICE = """\
*{effort}. If you're stuck: `hint("{name}")`. Once yours is right: `ours("{name}")`.*

"""
TESTS = '''\
"""Each blank of this workbook against its check: `pytest`, or `pytest -k route`."""

import sys
from functools import cache
from pathlib import Path

import pytest

sys.path[:0] = {folders!r}

from blanks import Blank, Result, by_chapter, course_blanks, judged  # noqa: E402

BLANKS = course_blanks()


@cache
def results(chapter: str) -> list[Result]:
    return judged(Path(__file__).parent, by_chapter(BLANKS)[chapter])


@pytest.mark.parametrize("blank", BLANKS, ids=str)
def test_blank(blank: Blank) -> None:
    result = next(r for r in results(blank.chapter) if r.name == blank.name)
    if result.verdict != "right":
        pytest.fail(result.message, pytrace=False)
'''


# Writing a workbook


def without_kept_versions(text: str) -> str:
    """A chapter with a cell `route = keep("route", route)` for each kept version."""
    contents = cells.cells(text)
    names = {cell.directives().get("blank", "") for cell in contents} - {""}

    def kept(part: str) -> list[str]:
        solved = [cell.directives().get("solution", "") for cell in cells.cells(part)]
        return [name for name in dict.fromkeys(solved) if name in names]

    # Kept versions stand in <details>; one that does not is a part of its own.
    parts, end = [], 0
    spans = [match.span() for match in DETAILS.finditer(text) if kept(match[0])]
    for match in FENCE.finditer(text):
        inside = any(start <= match.start() < stop for start, stop in spans)
        if not inside and kept(match[0]):
            spans.append(match.span())
    spans.sort()
    last = {name: span for span in spans for name in kept(text[slice(*span)])}
    for start, stop in spans:
        parts.append(text[end:start])
        for name in kept(text[start:stop]):
            if last[name] == (start, stop):
                parts.append(KEEP.format(name=name, root=name.partition(".")[0]))
        end = stop
    return "".join([*parts, text[end:]])


def with_cells(text: str, sources: dict[str, str]) -> str:
    """A chapter with the stubs of blanks and exercises replaced by ``sources``."""

    def replaced(match: re.Match[str]) -> str:
        source = sources.get(own_name(Cell(match["code"])))
        if source is None:
            return match[0]
        longest = max(map(len, re.findall("`+", source)), default=0)
        ticks = "`" * max(3, longest + 1)
        code = source.rstrip("\n")
        return f"{ticks}python{match['options'] or ''}\n{code}\n{ticks}"

    return FENCE.sub(replaced, text)


def own_name(cell: Cell) -> str:
    """The blank or exercise that the reader writes in this cell, or ""."""
    directives = cell.directives()
    return directives.get("blank", directives.get("exercise", ""))


def digest(content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()


class Writer:
    """Writes files into a workbook, and never over what the reader has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = folder / OWN / "written.json"
        if folder.exists() and any(folder.iterdir()) and not self.manifest.exists():
            raise WorkbookError(
                f"{folder} is not a workbook; expected one that `make workbook` wrote, "
                "or a folder that is not there yet"
            )
        self.manifest.parent.mkdir(parents=True, exist_ok=True)
        self.known: dict[str, dict[str, str]] = {}  # of each file, see `chapter`, `put`
        if self.manifest.exists():
            self.known = json.loads(self.manifest.read_text(encoding="utf-8"))
        self.save()

    def save(self) -> None:
        text = json.dumps(self.known, indent=1, sort_keys=True)
        self.manifest.write_text(text + "\n", encoding="utf-8")

    def put(self, name: str, content: bytes) -> None:
        """Write a file; put the reader's aside if it is not as we left it."""
        path = self.folder / name
        if path.exists():
            old = path.read_bytes()
            if old != content and digest(old) != self.known.get(name, {}).get("file"):
                self.put_aside(path, "is the course's again")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self.known.setdefault(name, {})["file"] = digest(content)
        self.save()  # now, so that an interrupted run forgets nothing

    def put_aside(self, path: Path, why: str) -> None:
        """Copy a file to before/, under a name that is not taken, and say so."""
        before = self.folder / "before"
        before.mkdir(exist_ok=True)
        number = 1
        while (copy := before / f"{path.stem}-{number}{path.suffix}").exists():
            number += 1
        shutil.copy2(path, copy)
        print(f"{path.name} {why}.\n  As you had it: {shown(copy)}")

    def chapter(self, name: str, text: str) -> None:
        """Write a page, with what the reader has made of it.

        That is code in the place of its stubs, and notes and cells anywhere. A page
        whose text has not changed since is left as it is.
        """
        path, base_path = self.folder / name, self.folder / OWN / "pages" / name
        if not (path.exists() and base_path.exists()):
            self.put(name, text.encode())
        else:
            base, mine = (p.read_text(encoding="utf-8") for p in (base_path, path))
            if base == text:
                return
            stubs, old = stubs_of(text), stubs_of(base)
            sources = {own_name(cell): cell.source for cell in cells.cells(mine)}
            sources = {
                own: source
                for own, source in sources.items()
                if own in old and not same(source, old[own])
            }
            # In all three alike, the reader's code is nothing to merge.
            base = with_cells(base, sources)
            text_with = with_cells(text, sources)
            merged, clean = merge(base, mine, text_with)
            if sources.keys() - stubs.keys():
                self.put_aside(path, "has no place any more for code of yours")
            elif not clean and merged == text_with:
                self.put_aside(path, "is new, without your notes, since git isn't here")
            elif not clean:
                self.put_aside(path, "has changed where you had, too: both are in it")
            path.write_text(merged, encoding="utf-8")
            self.known.setdefault(name, {})["file"] = digest(merged)
            self.save()
        base_path.parent.mkdir(exist_ok=True)
        base_path.write_text(text, encoding="utf-8")


def stubs_of(text: str) -> dict[str, str]:
    """The stubs of a page's blanks and exercises by their names."""
    contents = [cell for cell in cells.cells(text) if not cell.folded]
    return {own_name(cell): cell.source for cell in contents if own_name(cell)}


def merge(base: str, mine: str, new: str) -> tuple[str, bool]:
    """``mine`` with what changed from ``base`` to ``new``, and whether that was easy.

    Where both have changed the same lines, both are kept. Without git it is ``new``.
    """
    if mine == base:
        return new, True
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("mine", "base", "new")]
        for file, text in zip(files, (mine, base, new), strict=True):
            file.write_text(text, encoding="utf-8")
        command = ["git", "merge-file", "--stdout", *map(str, files)]
        try:
            conflicts = subprocess.run(command, capture_output=True).returncode
            done = subprocess.run([*command, "--union"], capture_output=True)
        except OSError:
            return new, False
    if done.returncode:
        return new, False
    return done.stdout.decode(), conflicts == 0


def edition(text: str) -> str:
    """A page of the course as a workbook has it."""
    blanks = blanks_of("", cells.cells(text))
    text = EDITION.sub(EDITION_NOTE, without_kept_versions(text))
    for blank in blanks:
        effort = blank.effort[0].upper() + blank.effort[1:]
        advice = ADVICE.format(effort=effort, name=blank.name)
        stub = f"```python\n#| blank {blank.name}\n"
        text = text.replace(stub, advice + stub)
    if blanks:
        imports = f"{FIRST_IMPORT}hint, ours\n{FIRST_IMPORT}"
        text = text.replace(FIRST_IMPORT, imports, 1)
    return OUTSIDE.sub("", text)


def make(folder: Path) -> None:
    """Write a workbook, or refresh its text."""
    writer = Writer(folder)
    ours: dict[str, str] = {}
    chapters = chapter_files(CHAPTERS)
    for path in chapters:
        text = committed(path)
        ours |= {b.name: b.kept for b in blanks_of(path.stem, cells.cells(text))}
        writer.chapter(path.name, edition(text))
    for path in sorted(CHAPTERS.glob("*.md")):
        if path not in chapters and path.name not in NO_PAGES:
            writer.chapter(path.name, edition(committed(path)))
    for source, target in (
        (CHAPTERS / "course", "course"),
        (ROOT / "figures", "figures"),
    ):
        for path in sorted(source.rglob("*")):
            if path.is_file() and not LEFT_OUT & set(path.parts):
                name = f"{target}/{path.relative_to(source).as_posix()}"
                writer.put(name, path.read_bytes())
    writer.put(OURS, json.dumps(ours, indent=1).encode())
    writer.put("AGENTS.md", (CHAPTERS / "course/tutor.md").read_bytes())
    writer.put("jupytext.toml", (ROOT / "jupytext.toml").read_bytes())
    folders = [str(HERE), str(CHAPTERS)]
    writer.put("test_blanks.py", TESTS.format(folders=folders).encode())
    print(f"{len(ours)} blanks are in {shown(folder)}: `make lab` opens it")


# Telling


def shown(path: Path) -> str:
    """A path as one would type it here."""
    return min(str(path), os.path.relpath(path), key=len)


def summary(results: list[Result]) -> str:
    """ "23 of 47 written, 22 right, 1 wrong"."""
    right = sum(result.verdict == "right" for result in results)
    wrong = sum(result.verdict == "wrong" for result in results)
    yours = right + wrong
    text = f"{yours} of {len(results)} written"
    if yours:
        text += f", {right} right"
    return f"{text}, {wrong} wrong" if wrong else text


def report(results: list[Result]) -> str:
    """A line for one chapter, and the message of each wrong blank below it."""
    right = sum(result.verdict == "right" for result in results)
    lines = [f"{results[0].chapter:<26} {right:>2} of {len(results)}"]
    lines += [
        f"    {line}"
        for result in results
        if result.verdict == "wrong"
        for line in result.message.splitlines()
    ]
    return "\n".join(lines)


def effort(blanks: list[Blank]) -> str:
    """How long it takes to write them all: hours, or minutes of less than two."""
    minutes = sum(blank.minutes for blank in blanks)
    hours = round(minutes / 60)
    return f"{hours} hours" if hours > 1 else f"{minutes} minutes"


def outlook(folder: Path, results: list[Result], blanks: list[Blank]) -> str:
    """How much writing is left, and with what to go on; "" if nothing is."""
    verdicts = {result.name: result.verdict for result in results}
    open_ones = [blank for blank in blanks if verdicts[blank.name] != "right"]
    if not open_ones:
        return ""
    numbered = [blank for blank in open_ones if blank.chapter[0].isdigit()]
    others = [blank for blank in open_ones if blank not in numbered]
    left = f"About {effort(numbered or others)} of writing are left"
    if numbered and others:
        left += f", and {effort(others)} more in the appendices"
    missing = [b for b in open_ones if verdicts[b.name] == "missing"] or open_ones
    path = saved(folder, missing[0].chapter, missing) or folder
    return f"{left}.\nNext: {missing[0]} ({missing[0].effort})\nin {shown(path)}"


def results_of(folder: Path, blanks: list[Blank]) -> Iterator[list[Result]]:
    """What became of the blanks in a workbook, chapter by chapter."""
    if not folder.is_dir():
        raise WorkbookError(f"{folder} is not there; expected `make lab` first")
    for chapter_blanks in by_chapter(blanks).values():
        yield judged(folder, chapter_blanks)


def progress(folders: list[Path], as_json: bool) -> int:
    """Print what became of the blanks in each folder; the exit status."""
    every: dict[str, list[Result]] = {}
    blanks = course_blanks()
    for folder in folders:
        results = every.setdefault(str(folder), [])
        if len(folders) > 1 and not as_json:
            print(folder)
        for found in results_of(folder, blanks):
            results += found
            if not as_json:
                print(report(found), flush=True)
        if not as_json:
            lines = [summary(results), outlook(folder, results, blanks)]
            print("", *filter(None, lines), sep="\n")
    if as_json:
        told_all = {name: [r._asdict() for r in found] for name, found in every.items()}
        print(json.dumps(told_all, indent=1))
    verdicts = [result.verdict for results in every.values() for result in results]
    return int(any(verdict != "right" for verdict in verdicts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("make", help="write or refresh a workbook")
    command.add_argument("folder", nargs="?", type=Path, default=ROOT / "workbook")
    command = commands.add_parser("progress", help="what is written, and right")
    command.add_argument("folders", nargs="*", type=Path, default=[ROOT / "workbook"])
    command.add_argument("--json", action="store_true", help="for other programs")
    command = commands.add_parser("mine", help="ask the engine with your functions")
    command.add_argument("prompt")
    command.add_argument(
        "--workbook", type=Path, default=ROOT / "workbook", metavar="FOLDER"
    )
    options = parser.parse_args()
    try:
        if options.command == "make":
            make(options.folder)
            return 0
        if options.command == "progress":
            return progress(options.folders, options.json)
        folder = options.workbook.resolve()
        results = [r for found in results_of(folder, course_blanks()) for r in found]
        ask(folder, results, options.prompt)
        return 0
    except WorkbookError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
