"""The form of every chapter, and of the test run that executes the chapters."""

import ast
import builtins
import re
import shutil
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import cells
import jupytext
import marks
import pytest
from cells import chapter_files, number_of
from export import LINE_COUNT, collect, writers

ROOT = Path(__file__).parents[2]
PARTS = [
    "Why",
    "The idea",
    "The naive version",
    "You write it",
    "The check",
    "Costs and limits",
    "In production",
    "Exercises",
    "What we have now",
]
ROWS = ["time", "you need", "you write", "it becomes"]
COSTS = [
    "invariant",
    "gains",
    "limits",
    "measured wrongly",
    "measured here",
]
CARDS: tuple[list[str], ...] = (
    ["on an H100"],
    ["on an H200"],
    [],
)  # what was measured on one, if anything
LINES_OF_A_CELL = 40
EXPORTED_LINES = 320  # about 300 that the reader reads of what a chapter exports

DIFFICULTIES = ["easy", "medium", "hard"]
COLUMNS = 88

FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"!\[(.*?)\]\((.+?)\)", re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
TERM = re.compile(r"^- \*\*(.+?)\*\*: .+ \(\[\w+ (\w+)\]\(.+\)\)$", re.MULTILINE)
MODULE = r"`simplellm/[\w/]+\.py`"
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|Users|work|mnt)/")


def prose(text: str) -> str:
    """The chapter without its fenced code and the marks of its numbers."""
    return marks.MARK.sub("", FENCE.sub("", text))


def section(text: str, title: str) -> str:
    """The text of one ``##`` part, fences included."""
    parts = re.split(r"^## ", text, flags=re.MULTILINE)
    (found,) = [part for part in parts[1:] if part.startswith(title)]
    return found


CHAPTERS = chapter_files(ROOT / "chapters")
every_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.name)


@pytest.fixture
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.fixture
def number(path: Path) -> str:
    return number_of(path)


def names_bound(cell: cells.Cell) -> set[str]:
    """The names that a cell imports, anywhere, or binds at its top level anew."""
    tree = ast.parse(cell.source)
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    found = {
        (alias.asname or alias.name).partition(".")[0]
        for node in imports
        for alias in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            if node.name not in map(ast.unparse, node.bases):  # it adds to a class
                found.add(node.name)
        else:
            stores = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
            found |= {n.id for n in stores if isinstance(n.ctx, ast.Store)}
    return found


# Blanks by their chapters that a later cell may replace.
REPLACED: set[tuple[str, str]] = set()


@every_chapter
def test_no_later_cell_replaces_what_the_reader_wrote(path: Path, text: str) -> None:
    """What a chapter runs after a blank is the reader's function, or the kept one."""
    written: set[str] = set()
    for cell in cells.cells(text):
        directives = cell.directives()
        blank = directives.get("blank", "").partition(".")[0]
        solved = directives.get("solution", "").partition(".")[0]
        if not cell.folded:
            replaced = (names_bound(cell) & written) - {blank, solved}
            assert {(path.stem, name) for name in replaced} <= REPLACED
        written |= {blank} - {""}


@every_chapter
def test_the_title_comes_first(text: str) -> None:
    """No YAML header, one title."""
    assert re.match(r"# \S", text)
    assert len(re.findall(r"^# ", prose(text), re.MULTILINE)) == 1


@every_chapter
def test_the_parts_are_there_in_order(path: Path, text: str) -> None:
    titles = re.findall(r"^## (.+?)(?::.*)?$", prose(text), re.MULTILINE)
    assert titles == PARTS


@every_chapter
def test_the_head_has_four_true_rows_a_promise_and_the_drawing(
    path: Path, text: str, number: str
) -> None:
    head = text.split("\n## ")[0]
    rows = dict(re.findall(r"^\| ([\w ]+?) \| (.+?) \|$", head, re.MULTILINE))
    assert list(rows) == ROWS
    time = re.fullmatch(r"(\d+) minutes to read, (\d+) to write", rows["time"])
    assert time, "expected a row like | time | 45 minutes to read, 60 to write |"
    counted = cells.reading_minutes(text)
    assert abs(int(time[1]) - counted) <= 4, f"it takes {counted:.0f} minutes to read"
    blanks = list(dict.fromkeys(blanks_of(path)))
    least = 5 * len(blanks)
    assert int(time[2]) >= least, f"the blanks take {least} minutes at least"
    assert re.findall(r"`([\w.]+)`", rows["you write"]) == blanks

    becomes = rows["it becomes"]
    modules = {name: writers(found) for name, found in collect(ROOT).items()}
    own = {name for name in modules if f"chapters/{path.name}" in modules[name]}
    assert set(re.findall(MODULE, becomes)) >= {f"`{name}`" for name in own}
    for match in LINE_COUNT.finditer(head):
        lines = (ROOT / match[2]).read_text(encoding="utf-8").count("\n")
        assert re.search(rf"\({lines}\s", match[0]), match[0]
    assert {match[2] for match in LINE_COUNT.finditer(becomes)} >= own

    promise, drawing = (part.strip() for part in head.split("\n\n")[2:4])
    assert promise[-1] in ".?!" and promise[0] not in "|!`"
    name = number if number.isalpha() else f"{int(number):02}"
    assert IMAGE.fullmatch(drawing)
    assert drawing.endswith(f"](../figures/engine-{name.lower()}.svg)")


def blanks_of(path: Path) -> list[str]:
    """The names of a chapter's blanks, in order."""
    found = (cell.directives().get("blank", "") for cell in cells.read(path))
    return [name for name in found if name]


@every_chapter
def test_the_reader_writes(path: Path, text: str) -> None:
    """Two blanks at least, each with a stub, a check and a folded kept version."""
    blanks = blanks_of(path)
    assert len(blanks) >= 2
    found = cells.read(path)
    for name in blanks:
        words = [cell.directives() for cell in found]
        (stub,) = [i for i, word in enumerate(words) if word.get("blank") == name]
        (check,) = [i for i, c in enumerate(found) if c.raises and c.checks == name]
        kept = [i for i, word in enumerate(words) if word.get("solution") == name]
        assert stub < check < min(kept), f"{name}: stub, check, kept version"
        assert found[stub].flows
        assert not any(found[i].flows or found[i].folded for i in kept), name
    for match in cells.FENCE.finditer(text):
        if "source_hidden" in (match["options"] or "") and "#| solution" in match[0]:
            before = text[: match.start()]
            assert before.count("<details>") == before.count("</details>") + 1, (
                "a kept version stands in <details>"
            )


@every_chapter
def test_the_flow_has_no_long_cell(path: Path) -> None:
    for cell in cells.read(path):
        if cell.flows:
            lines = cell.body.count("\n")
            assert lines <= LINES_OF_A_CELL, f"{lines} lines:\n{cell.body[:200]}"


@every_chapter
def test_the_flow_exports_what_one_can_read(path: Path) -> None:
    exported = [
        cell.body.count("\n")
        for cell in cells.read(path)
        if cell.flows and "export" in cell.directives()
    ]
    assert sum(exported) <= EXPORTED_LINES


@every_chapter
def test_the_idea_has_a_figure(text: str) -> None:
    assert IMAGE.search(section(text, "The idea"))


@every_chapter
def test_every_figure_exists_and_is_described(path: Path, text: str) -> None:
    for alt, target in IMAGE.findall(prose(text)):
        assert len(alt) >= 20, f"{target}: the alt text says too little: {alt!r}"
        assert (path.parent / target).is_file(), target
        own = f"{path.name.partition('-')[0]}-"
        drawings = ("engine-", "model.svg", "request.svg")  # of the whole course
        assert Path(target).name.startswith((own, *drawings)), target


@every_chapter
def test_every_relative_link_resolves(path: Path, text: str) -> None:
    for target in LINK.findall(prose(text)):
        if not re.match(r"[a-z]+:|#", target):
            assert (path.parent / target.split("#")[0]).exists(), target


@every_chapter
def test_the_costs_define_each_technique(text: str) -> None:
    """A name in bold, and below it a list with what there is to know of it."""
    part = section(text, "Costs and limits")
    names = re.findall(r"^\*\*([^*\n]+)\*\*$", part, re.MULTILINE)
    entries = re.split(r"^\*\*[^*\n]+\*\*$", part, flags=re.MULTILINE)[1:]
    assert names
    for name, entry in zip(names, entries, strict=True):
        items = re.findall(r"^- ([\w ]+): +\S", entry, re.MULTILINE)
        assert items in [[*COSTS, *card] for card in CARDS], name


@every_chapter
def test_production_names_a_source(text: str) -> None:
    part = section(text, "In production")
    assert re.search(r"vLLM|SGLang|TensorRT-LLM", part)
    assert "https://github.com/" in part


@every_chapter
def test_the_exercises_have_their_form(path: Path, text: str, number: str) -> None:
    part = section(text, "Exercises")
    heads = re.findall(r"^### (.+)$", prose(part), re.MULTILINE)
    assert len(heads) >= 2
    bodies = re.split(r"^### .+$", part, flags=re.MULTILINE)[1:]
    difficulties = []
    for index, (head, body) in enumerate(zip(heads, bodies, strict=True), start=1):
        name = f"{number}.{index}"
        assert re.match(rf"Exercise {re.escape(name)}: \S", head), head
        stated = re.search(r"^\*Difficulty: (\w+)\. \d+ minutes\.\*$", body, re.M)
        assert stated, f"{name}: no line like *Difficulty: easy. 10 minutes.*"
        difficulties.append(DIFFICULTIES.index(stated[1]))
        visible, _, folded = body.partition("<!-- #region -->")
        codes = FENCE.findall(visible)
        (stub,) = [c for _, c in codes if c.startswith(f"#| exercise {name}\n")]
        (check,) = [i for i, c in codes if c.startswith(f'check("{name}", ')]
        assert stub.strip()
        assert check == 'python tags=["raises-exception"]', f"{name}: check's fence"
        assert "<details><summary>Hint</summary>" in visible, f"{name}: no hint"
        assert "<details><summary>Solution</summary>" in folded, f"{name}: no solution"
        assert "<!-- #endregion -->" in folded
        solutions = [c for i, c in FENCE.findall(folded) if i == "python"]
        assert any(c.startswith(f"#| solution {name}\n") for c in solutions), name
        assert body.count("<details>") == body.count("</details>") == 2, name
    assert all(a <= b for a, b in pairwise(difficulties)), "difficulty rises"


@every_chapter
def test_only_python_runs(text: str) -> None:
    """Fences like bash and html turn into cells with a %% magic: keep them out."""
    for cell in jupytext.reads(text, fmt="md").cells:
        if cell.cell_type == "code":
            assert not cell.source.lstrip().startswith("%%"), cell.source
            known = {"tags", "jupyter", "lines_to_next_cell"}
            assert set(cell.metadata) <= known, cell.metadata


@every_chapter
def test_code_fits_the_page(text: str) -> None:
    for _, code in FENCE.findall(text):
        for line in code.splitlines():
            assert len(line) <= COLUMNS, line


@every_chapter
def test_no_line_of_a_paragraph_begins_a_list_by_chance(text: str) -> None:
    """JupyterLab takes "in" and "2025. Then" on the next line for a list."""
    for paragraph in re.split(r"\n\s*\n", prose(text)):
        numbers = re.findall(r"^ *(\d+)[.)] ", paragraph, re.MULTILINE)
        assert numbers == [str(1 + n) for n in range(len(numbers))], paragraph
        assert not numbers or re.match(r"\s*1[.)] ", paragraph), paragraph


@every_chapter
def test_no_path_of_a_machine(text: str) -> None:
    assert not MACHINE_PATH.search(text)


@every_chapter
def test_the_glossary_terms_of_a_chapter_stand_in_it(text: str, number: str) -> None:
    glossary = (ROOT / "chapters/glossary.md").read_text(encoding="utf-8")
    words = " ".join(text.lower().replace("*", "").split())
    terms = [term for term, chapter in TERM.findall(glossary) if chapter == number]
    missing = [term for term in terms if term.lower() not in words]
    assert terms and not missing, missing


@every_chapter
def test_the_glossary_terms_of_a_chapter_are_explained_in_it(
    text: str, number: str
) -> None:
    """Where a term is explained it stands in bold or italics, or in a title."""
    glossary = (ROOT / "chapters/glossary.md").read_text(encoding="utf-8")
    plain = prose(text)
    told = re.findall(r"\*{1,2}([^*]+)\*{1,2}|^#+ (.+)$", plain, re.MULTILINE)
    marked = " | ".join(" ".join("".join(match).lower().split()) for match in told)
    terms = [term for term, chapter in TERM.findall(glossary) if chapter == number]
    assert [term for term in terms if term.lower() not in marked] == []


@every_chapter
def test_code_quoted_in_prose_exists(path: Path, text: str) -> None:
    """`name(...)` and `Class.member` are in the package, the chapter or a library."""
    code = "\n".join(cell.source for cell in cells.read(path))
    known = names_in(code) | package_names() | set(dir(builtins))
    theirs = package_classes()
    classes = theirs | classes_in(code)  # the chapter's may add members
    unknown = []
    for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(text)):
        match = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", span)
        if not match:
            continue
        root, *members = match[1].split(".")
        if root in classes and members:
            own = classes_in(code).get(root, set()) | theirs.get(root, set())
            unknown += [span] * (members[0] not in own)
        elif match[2] and not {root, *members} <= known:
            unknown.append(span)
    assert unknown == []


def names_in(code: str) -> set[str]:
    """All identifiers of Python source, strings and comments aside."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        for field in ("id", "attr", "name", "arg", "module", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found |= set(value.split("."))
    return found


def classes_in(code: str) -> dict[str, set[str]]:
    """The members of each class, those that methods set on self included."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ClassDef):
            members = found.setdefault(node.name, set())
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    members.add(part.name)
                elif isinstance(getattr(part, "ctx", None), ast.Store):
                    members.add(getattr(part, "attr", getattr(part, "id", "")))
    return found


@cache
def package_code() -> str:
    """All of the package and of the course's own modules."""
    sources = [
        *(ROOT / "simplellm").rglob("*.py"),
        *(ROOT / "chapters/course").glob("*.py"),
    ]
    codes = (source.read_text("utf-8") for source in sources)
    return "\n".join(re.sub(r"(?m)^from __future__.*$", "", code) for code in codes)


@cache
def package_names() -> set[str]:
    return names_in(package_code())


@cache
def package_classes() -> dict[str, set[str]]:
    return classes_in(package_code())


@every_chapter
def test_the_summary_lists_the_chapter(path: Path) -> None:
    summary = (ROOT / "chapters/SUMMARY.md").read_text(encoding="utf-8")
    assert f"({path.name})" in summary


JUDGE = """\
class NotYours(Exception): ...


def check(name, double):
    try:
        assert double(2) == 4
    except NotImplementedError:
        raise NotYours from None
"""
EXERCISE = """\
# {number}

```python
#| exercise {number}.1
{judge}

def double(x):
    {stub}
```

```python tags=["raises-exception"]
check("{number}.1", double)
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
BLANK = """\
# {number}

```python
{judge}```

```python
#| blank double
def double(x):
    {stub}
```

```python tags=["raises-exception"]
check("double", double)
```

```python jupyter={{"source_hidden": true}}
#| solution double
def double(x):
    {solution}
```
"""


@pytest.mark.exhaustive
def test_the_notebook_run_judges_stubs_and_solutions(tmp_path: Path) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    chapters = tmp_path / "chapters"
    chapters.mkdir()
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/cells.py", tmp_path / "tools")

    def write(
        name: str, stub: str, solution: str, more: str = "", form: str = EXERCISE
    ) -> None:
        parts = {"judge": JUDGE, "stub": stub, "solution": solution}
        text = form.format(number=int(name[:2]), **parts)
        (chapters / name).write_text(text + more)

    write("01-right.md", STUB, "return 2 * x")
    write("02-solved-stub.md", "return 2 * x", "return 2 * x")
    write("03-wrong-solution.md", STUB, "return 3 * x")
    write("04-slow.md", STUB, "return 2 * x", "\n```python\nimport time\n```\n")
    with (chapters / "04-slow.md").open("a") as chapter:
        spin = (
            "end = time.process_time() + 2\nwhile time.process_time() < end:\n    pass"
        )
        chapter.write(f"\n```python\n{spin}\n```\n")
    figure = "\n```python\nfrom pathlib import Path\n"
    figure += "Path('../figures/05-a.svg').write_text('changed')\n```\n"
    write("05-writes.md", STUB, "return 2 * x", figure)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/05-a.svg").write_text("as drawn")
    write("06-blank.md", STUB, "return 2 * x", form=BLANK)
    write("07-written-stub.md", "return x", "return 2 * x", form=BLANK)
    write("08-wrong-kept.md", STUB, "return x", form=BLANK)
    for page in ("index", "glossary"):
        (chapters / f"{page}.md").write_text("```python\n1 / 0\n```\n")
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
        "05-writes.md::figures",
        "07-written-stub.md::check double on the stub",
        "08-wrong-kept.md::check double on the kept version",
        "a-appendix.md::cell 0",
        "index.md::cell 0",
    }, result.stdout
    assert {name for name in outcomes if name.startswith("01")} == {
        "01-right.md::cell 0",
        "01-right.md::check 1.1 on the stub",
        "01-right.md::solution 1.1",
        "01-right.md::check 1.1 on the solution",
        "01-right.md::time",
        "01-right.md::figures",
    }
    assert re.search(r"^chapters/04-slow.md +\d+\.\d s$", result.stdout, re.MULTILINE)


def test_names_beside_those_of_other_engines_are_in_the_package() -> None:
    glossary = (ROOT / "chapters/glossary.md").read_text(encoding="utf-8")
    table = glossary[glossary.index("## Names in the code") :]
    cells_of_ours = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    ours = [name for cell in cells_of_ours for name in re.findall(r"`([^`]+)`", cell)]
    assert len(ours) > 20
    unknown = []
    for name in ours:
        owner, _, member = name.partition(".")
        known = package_classes().get(owner, set()) if member else package_names()
        if (member or owner) not in known:
            unknown.append(name)
    assert unknown == []
