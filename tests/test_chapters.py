"""The form of every chapter, and of the test run that executes the chapters."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import course
import jupytext
import pytest
from export import LINE_COUNT, chapter_files, collect, writers

ROOT = Path(__file__).parents[1]
PARTS = [
    "The pain",
    "The idea",
    "The naive version",
    "The version we keep",
    "The check",
    "The ledger",
    "In production",
    "Exercises",
    "What we have now",
]
LEDGER = [
    "technique",
    "invariant it keeps",
    "wins",
    "loses",
    "benchmark trap",
    "measured here",
    "measured on an H200",
]
DIFFICULTIES = ["easy", "medium", "hard"]
COLUMNS = 88

FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"!\[(.*?)\]\((.+?)\)", re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
TERM = re.compile(r"^- \*\*(.+?)\*\*: .+ \((?:chapter|appendix) (\w+)\)$", re.MULTILINE)
# "shows `simplellm/a.py`, `simplellm/b.py` and `simplellm/c.py`"
MODULE = r"`simplellm/[\w/]+\.py`"
SHOWS = re.compile(rf"\bshows\s+{MODULE}(?:(?:,|,?\s+and)\s+{MODULE})*")
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|Users|work|mnt)/")


def prose(text: str) -> str:
    """The chapter without its fenced code."""
    return FENCE.sub("", text)


def section(text: str, title: str) -> str:
    """The text of one ``##`` part, fences included."""
    parts = re.split(r"^## ", text, flags=re.MULTILINE)
    (found,) = [part for part in parts[1:] if part.startswith(title)]
    return found


def shown_modules(text: str) -> Iterator[str]:
    """The package's files whose code a chapter's cells pass to `course.show`."""
    homes: dict[str, str] = {}  # an imported name's module
    for cell in jupytext.reads(text, fmt="md").cells:
        if cell.cell_type != "code":
            continue
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom) and node.module:
                homes |= {n.asname or n.name: node.module for n in node.names}
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "show"):
                continue
            for argument in node.args:
                root, *attributes = ast.unparse(argument).split(".")
                thing = import_module(homes[root])
                with suppress(ModuleNotFoundError):  # it may be a module itself
                    import_module(f"{homes[root]}.{root}")
                for name in (root, *attributes):
                    thing = getattr(thing, name)
                yield course.file_of(thing)


def promised_modules(text: str) -> set[str]:
    """The handwritten modules that a chapter's head says it shows."""
    head = text.split("\n## ")[0]
    phrases = [match[0] for match in SHOWS.finditer(head)]
    return {name.strip("`") for p in phrases for name in re.findall(MODULE, p)}


@pytest.fixture(params=chapter_files(ROOT), ids=lambda path: path.name)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.fixture
def number(path: Path) -> str:
    """What its exercises and terms are numbered with: 7, or an appendix's A."""
    return path.name.partition("-")[0].lstrip("0").upper()


def test_the_title_comes_first(text: str) -> None:
    """No YAML header, one title."""
    assert re.match(r"# \S", text)
    assert len(re.findall(r"^# ", prose(text), re.MULTILINE)) == 1


def test_the_parts_are_there_in_order(text: str) -> None:
    titles = re.findall(r"^## (.+?)(?::.*)?$", prose(text), re.MULTILINE)
    assert titles == PARTS


@pytest.mark.skipif(not find_spec("triton"), reason="chapters show kernels")
def test_the_head_tells_minutes_and_modules(path: Path, text: str) -> None:
    """It "writes" what the chapter exports and "shows" what is written by hand.

    A module that a chapter before it has promised to show may come again untold.
    """
    head = text.split("\n## ")[0]
    assert re.search(r"\d+\s+minutes|minutes.*\d+", head)
    name = path.relative_to(ROOT).as_posix()
    chapters = {module: writers(cells) for module, cells in collect(ROOT).items()}
    begun = {module for module in chapters if chapters[module][0] == name}
    continued = {module for module in chapters if name in chapters[module][1:]}
    shown = {module for module in shown_modules(text) if module not in chapters}
    assert promised_modules(text) <= shown
    files = chapter_files(ROOT)
    texts = [file.read_text(encoding="utf-8") for file in files]
    known = set().union(*map(promised_modules, texts[: files.index(path) + 1]))
    assert shown <= known
    told = {match[2] for match in LINE_COUNT.finditer(head)}
    assert begun <= told <= begun | continued
    assert [module for module in continued if f"`{module}`" not in head] == []
    for match in LINE_COUNT.finditer(head):
        lines = (ROOT / match[2]).read_text(encoding="utf-8").count("\n")
        assert re.search(rf"\({lines}\s", match[0]), match[0]


def test_the_idea_has_a_figure(text: str) -> None:
    assert IMAGE.search(section(text, "The idea"))


def test_every_figure_exists_and_is_described(path: Path, text: str) -> None:
    for alt, target in IMAGE.findall(prose(text)):
        assert len(alt) >= 20, f"{target}: the alt text says too little: {alt!r}"
        assert (path.parent / target).is_file(), target
        assert Path(target).name.startswith(path.name[:2]), target


def test_every_relative_link_resolves(path: Path, text: str) -> None:
    for target in LINK.findall(prose(text)):
        if not re.match(r"[a-z]+:|#", target):
            assert (path.parent / target.split("#")[0]).exists(), target


def test_the_ledger_row_is_complete(text: str) -> None:
    lines = section(text, "The ledger").splitlines()
    rows = [line.strip().strip("|").split("|") for line in lines if line[:1] == "|"]
    assert [cell.strip() for cell in rows[0]] == LEDGER
    assert len(rows) >= 3
    for row in rows[2:]:
        assert len(row) == len(LEDGER)
        assert all(cell.strip() for cell in row), row


def test_production_names_a_source(text: str) -> None:
    part = section(text, "In production")
    assert re.search(r"vLLM|SGLang|TensorRT-LLM", part)
    assert "https://github.com/" in part


def test_the_exercises_have_their_form(text: str, number: str) -> None:
    part = section(text, "Exercises")
    heads = re.findall(r"^### (.+)$", prose(part), re.MULTILINE)
    assert len(heads) >= 3
    bodies = re.split(r"^### .+$", part, flags=re.MULTILINE)[1:]
    difficulties = []
    for index, (head, body) in enumerate(zip(heads, bodies, strict=True), start=1):
        name = f"{number}.{index}"
        assert re.match(rf"Exercise {re.escape(name)}: \S", head), head
        stated = re.search(r"^\*Difficulty: (\w+)\. \d+ minutes\.\*$", body, re.M)
        assert stated, f"{name}: no line like *Difficulty: easy. 10 minutes.*"
        difficulties.append(DIFFICULTIES.index(stated[1]))
        visible, _, folded = body.partition("<!-- #region -->")
        cells = FENCE.findall(visible)
        (stub,) = [c for _, c in cells if c.startswith(f"#| exercise {name}\n")]
        (check,) = [i for i, c in cells if c.startswith(f"#| check {name}\n")]
        assert stub.strip()
        assert check == 'python tags=["raises-exception"]', f"{name}: check's fence"
        assert "<details><summary>Hint</summary>" in visible, f"{name}: no hint"
        assert "<details><summary>Solution</summary>" in folded, f"{name}: no solution"
        assert "<!-- #endregion -->" in folded
        solutions = [c for i, c in FENCE.findall(folded) if i == "python"]
        assert any(c.startswith(f"#| solution {name}\n") for c in solutions), name
        assert body.count("<details>") == body.count("</details>") == 2, name
    assert all(a <= b for a, b in pairwise(difficulties)), "difficulty rises"


def test_only_python_runs(text: str) -> None:
    """Fences like bash and html turn into cells with a %% magic: keep them out."""
    for cell in jupytext.reads(text, fmt="md").cells:
        if cell.cell_type == "code":
            assert not cell.source.lstrip().startswith("%%"), cell.source
            known = {"tags", "jupyter", "lines_to_next_cell"}
            assert set(cell.metadata) <= known, cell.metadata


def test_code_fits_the_page(text: str) -> None:
    for _, code in FENCE.findall(text):
        for line in code.splitlines():
            assert len(line) <= COLUMNS, line


def test_no_path_of_a_machine(text: str) -> None:
    assert not MACHINE_PATH.search(text)


def test_the_glossary_terms_of_a_chapter_stand_in_it(text: str, number: str) -> None:
    glossary = (ROOT / "chapters/glossary.md").read_text(encoding="utf-8")
    words = " ".join(text.lower().replace("*", "").split())
    terms = [term for term, chapter in TERM.findall(glossary) if chapter == number]
    missing = [term for term in terms if term.lower() not in words]
    assert terms and not missing, missing


def test_the_summary_lists_the_chapter(path: Path) -> None:
    summary = (ROOT / "chapters/SUMMARY.md").read_text(encoding="utf-8")
    assert f"({path.name})" in summary


EXERCISE = """\
# {number}

```python
#| exercise {number}.1
def double(x):
    {stub}
```

```python tags=["raises-exception"]
#| check {number}.1
assert double(2) == 4
```

<!-- #region -->
```python
#| solution {number}.1
def double(x):
    {solution}
```
<!-- #endregion -->
"""
STUB = "raise NotImplementedError"


def test_the_notebook_run_judges_stubs_and_solutions(tmp_path: Path) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    chapters = tmp_path / "chapters"
    chapters.mkdir()
    shutil.copy(ROOT / "chapters/cells.py", chapters)

    def write(name: str, stub: str, solution: str, more: str = "") -> None:
        text = EXERCISE.format(number=int(name[:2]), stub=stub, solution=solution)
        (chapters / name).write_text(text + more)

    write("01-right.md", STUB, "return 2 * x")
    write("02-solved-stub.md", "return 2 * x", "return 2 * x")
    write("03-wrong-solution.md", STUB, "return 3 * x")
    write("04-slow.md", STUB, "return 2 * x", "\n```python\nimport time\n```\n")
    with (chapters / "04-slow.md").open("a") as chapter:
        chapter.write("\n```python\ntime.sleep(2)\n```\n")
    (chapters / "index.md").write_text("```python\n1 / 0\n```\n")
    (chapters / "a-appendix.md").write_text("```python\n1 / 0\n```\n")

    command = [sys.executable, "-m", "pytest", "chapters", "--color=no", "-rA"]
    options = ["-p", "no:cacheprovider", "-o", "chapter_seconds=1.5"]
    result = subprocess.run(
        [*command, *options], cwd=tmp_path, capture_output=True, text=True
    )
    outcomes = dict(
        reversed(match)
        for match in re.findall(
            r"^(PASSED|FAILED) chapters/(.+?)(?: - .*)?$", result.stdout, re.MULTILINE
        )
    )
    failed = {name for name, outcome in outcomes.items() if outcome == "FAILED"}
    assert failed == {
        "02-solved-stub.md::check 2.1 on the stub",
        "03-wrong-solution.md::check 3.1 on the solution",
        "04-slow.md::time",
        "a-appendix.md::cell 0",
    }, result.stdout
    assert {name for name in outcomes if name.startswith("01")} == {
        "01-right.md::cell 0",
        "01-right.md::check 1.1 on the stub",
        "01-right.md::solution 1.1",
        "01-right.md::check 1.1 on the solution",
        "01-right.md::time",
        "01-right.md::figures",
    }
    assert re.search(r"^chapters/04-slow.md +2\.\d s$", result.stdout, re.MULTILINE)
