"""The book: pages from chapters, the checks on its HTML, a small book built whole."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = Path(__file__).parent / "book_fixture"
sys.path.insert(0, str(ROOT / "tools"))

from bookbuild import execute, mdbook, page  # noqa: E402
from bookbuild.check import check_html, parse  # noqa: E402
from bookbuild.execute import BookError  # noqa: E402


def stream(text: str) -> dict:
    return {"output_type": "stream", "name": "stdout", "text": text}


# --- Prose -----------------------------------------------------------------------


def test_math_becomes_mathml_without_markdown_characters():
    made = page.prose("p", "The $a_i * b_i$, of a row.")
    assert made.startswith('The <span class="inline-math"><math')
    assert made.endswith("</math>,</span> of a row.")
    assert "<msub><mi>a</mi><mi>i</mi></msub>" in made
    assert not set("*_`[]|~$\\") & set(made)


def test_names_of_functions_stand_apart_from_what_they_multiply():
    made = page.prose("p", r"$D \ln \theta$ and $\max(a)$")
    assert '<mi>D</mi><mo lspace="0.167em" rspace="0.167em">ln</mo><mi>' in made
    assert '<mo lspace="0.167em" rspace="0">max</mo><mo' in made


def test_commands_that_the_converter_lacks_are_spelled_out():
    assert page.prose("p", r"$\arg\max_i x_i$").count(">arg</mo>") == 1


def test_line_breaks_of_display_math_become_rows():
    aligned = page.prose(
        "p", "$$\n\\begin{aligned} a &= 1 \\\\ b &= 2 \\end{aligned}\n$$"
    )
    plain = page.prose("p", "$$a = 1 \\\\ b = 2$$")
    for made in (aligned, plain):
        assert made.count("<mtr>") == 2
        assert "\n" not in made


@pytest.mark.parametrize(
    "text",
    [
        "`$HOME` and ``a ` $b$`` and `over $two\nlines$`",
        "```console\n$ make demo\n$ make test\n```",
        "> ```text\n> $a$ ![x](../figures/a.svg)\n> ```",
        "a $ b and 3 $",
    ],
)
def test_dollars_that_are_no_math_stay(text):
    assert page.prose("p", text) == text


def test_escaped_dollars_are_told_apart_from_forgotten_math():
    dollar = '<span class="dollar">$</span>'
    assert page.prose("p", r"\$5 and \$7") == f"{dollar}5 and {dollar}7"


def test_unreadable_math_is_an_error_that_names_page_and_formula():
    with pytest.raises(BookError, match=r"03-x: unknown \\nosuch"):
        page.prose("03-x", r"Here $\nosuch{x}$.")
    with pytest.raises(BookError, match=r"03-x: cannot read the math 'x\^'"):
        page.prose("03-x", "Here $x^$.")


def test_paths_beside_the_chapters_become_paths_beside_the_pages():
    text = '![a](../figures/a.svg) [b](02-b.md#c) <img src="../figures/d.svg"> `](../e`'
    assert page.prose("p", text) == text.replace("../figures", "figures")


def test_directives_leave_folded_solutions_but_not_other_fences():
    solution = "```python\n#| solution 1.1\nf = 1\n```"
    assert page.prose("p", solution) == "```python\nf = 1\n```"
    quoted = "> ~~~python\n> #| solution 1.1\n> f = 1\n> ~~~"
    assert page.prose("p", quoted) == "> ~~~python\n> f = 1\n> ~~~"
    assert page.prose("p", "```text\n#| export\n```") == "```text\n#| export\n```"
    assert page.prose("p", "```python .noeval\nx\n```") == "```python\nx\n```"


# --- Cells and their outputs -------------------------------------------------------


def test_outputs_stand_below_their_cells():
    source = (
        "```python\n#| export\na = 1\n```\n\nBetween.\n\n```python\nprint(2)\n```\n"
    )
    made = page.make("01-x", source, [[stream("one\n")], [stream("two\n")]]).markdown
    order = ["a = 1", "one", "Between.", "print(2)", "two"]
    assert [made.index(part) for part in order] == sorted(map(made.index, order))
    assert "#|" not in made


def test_what_is_printed_between_tables_stays_between_them():
    shown = {"output_type": "display_data", "data": {"text/plain": "table"}}
    warning = {**stream("careful\n"), "name": "stderr"}
    given = [stream("a\n"), stream("b\n"), shown, stream("c\n"), warning, stream("d\n")]
    assert execute.joined(given) == [
        *(stream("a\nb\n"), shown, stream("c\n"), warning, stream("d\n")),
    ]


def test_exported_cells_name_the_module():
    source = (
        "```python\n#| default_exp a\n#| export\nx = 1\n```\n\n"
        "```python\n#| export b.c\ny = 1\n```\n\n```python\nz = 1\n```\n"
    )
    made = page.make("01-x", source, [[], [], []]).markdown
    assert re.findall(r"simplellm/[\w/]+\.py", made) == [
        "simplellm/a.py",
        "simplellm/b/c.py",
    ]


def test_text_output_loses_colors_and_cannot_close_its_fence():
    made = page.text_output("\x1b[31mred\x1b[0m\n```\nend\n\n")
    assert made == '<div class="output">\n\n````text\nred\n```\nend\n````\n\n</div>'
    assert page.text_output(" \n") == ""


def test_markdown_is_rendered():
    data = {"text/markdown": "````python\nx = 1\n````", "text/plain": "x = 1"}
    output = {"output_type": "display_data", "data": data}
    made = page.make("01-x", "```python\nshow(f)\n```\n", [[output]]).markdown
    assert '<div class="output">\n\n````python\nx = 1\n````\n\n</div>' in made


def test_warnings_stay_out_of_the_page():
    warning = {**stream("Warning: slow"), "name": "stderr"}
    made = page.make("01-x", "```python\nf()\n```\n", [[warning]]).markdown
    assert "Warning" not in made


def test_expected_exception_is_one_folded_line():
    source = '```python tags=["raises-exception"]\n1/0\n```\n'
    error = {
        "output_type": "error",
        "ename": "ValueError",
        "evalue": "<first>\nsecond",
        "traceback": ["\x1b[31mlong\x1b[0m"] * 20,
    }
    made = page.make("01-x", source, [[error]]).markdown
    assert '<details class="output raised">' in made
    assert "ValueError: <first>\n```" in made
    assert "second" not in made and "long" not in made


HIDDEN = '```python jupyter={"source_hidden": true}\nplot()\n```\n'


def test_hidden_code_is_folded_and_its_output_is_not():
    made = page.make("01-x", HIDDEN, [[stream("42\n")]]).markdown
    order = ["<details>", "plot()", "</details>", "42"]
    assert [made.index(part) for part in order] == sorted(map(made.index, order))


def test_folded_code_is_called_by_what_it_defines():
    defining = HIDDEN.replace(
        "plot()", "class A:\n    def b(self): ...\n\ndef plot(): ..."
    )
    made = page.make("01-x", defining, [[]]).markdown
    assert "<summary>Code: <code>A</code>, <code>plot</code></summary>" in made
    assert "<summary>Code</summary>" in page.make("01-x", HIDDEN, [[]]).markdown
    drawing = HIDDEN.replace("plot()", "def f(): ...\n\nsave_figure(fig, 'a')")
    made = page.make("01-x", drawing, [[]]).markdown
    assert "<summary>Code of the figure</summary>" in made


def test_hidden_code_is_folded_once():
    """The chapter may have folded it, which a notebook does not see."""
    kept = "<details><summary>The version we keep</summary>\n\n{}\n\n</details>\n"
    made = page.make("01-x", kept.format(HIDDEN), [[]]).markdown
    assert made.count("<details") == made.count("</details>") == 1
    assert "<summary>The version we keep</summary>\n\n```python\nplot()" in made


def test_a_blank_shows_its_stub_and_that_it_is_to_be_written():
    source = (
        "```python\n#| blank half\ndef half(x):\n    ...\n```\n\n"
        '```python tags=["raises-exception"]\ncheck("half", half)\n```\n'
    )
    told = "half: not written yet"
    error = {"output_type": "error", "ename": "NotYours", "evalue": told}
    made = page.make("01-x", source, [[], [error]]).markdown
    assert "```python\ndef half(x):" in made and 'check("half", half)' in made
    assert told not in made and "NotYours" not in made
    assert "yours to write, in the workbook" in made


ANSWERED = """\
# T

<!-- edition -->
In chapters/.
<!-- /edition -->

```python
#| blank half
def half(x): ...
```

<details><summary>The version we keep</summary>

```python
#| solution half
def half(x):
    return x / 2
```

</details>

<!-- #region -->
<details>
<summary>Hint</summary>
Divide.
</details>

<details><summary>Solution</summary>

```python
#| solution 1.1
y = 1
```

</details>
<!-- #endregion -->

The end.
"""


def test_pages_for_the_search_have_no_answers():
    whole = page.make("01-x", ANSWERED, [[], []]).markdown
    assert "x / 2" in whole and "y = 1" in whole and "Divide" in whole
    made = page.make("01-x", ANSWERED, [[], []], answers=False).markdown
    assert not any(part in made for part in ("x / 2", "y = 1", "Divide"))
    assert "def half(x): ..." in made and "The end." in made
    assert made.count("<details") == made.count("</details>")


def test_titles_have_their_numbers_and_a_page_says_which_edition_it_is():
    made = page.make("01-x", ANSWERED, [[], []], notebook="n.ipynb").markdown
    assert "# 1. T\n" in made and '<a href="n.ipynb">' in made
    assert "This is the book" in made and "In chapters/." not in made
    assert "# A. T\n" in page.make("a-x", ANSWERED, [[], []]).markdown
    assert "# T\n" in page.make("glossary", ANSWERED, [[], []]).markdown


def test_a_figure_that_the_text_shows_is_not_shown_twice():
    data = {"image/svg+xml": "<svg/>", "text/plain": "figure 01-a"}
    shown = {"output_type": "display_data", "data": data}
    output = shown | {"metadata": {"figure": "01-a"}}
    made = page.make("01-x", "```python\nplot()\n```\n", [[output]])
    assert made.images == {} and "figure" not in made.markdown


def test_image_without_alt_text_is_an_error():
    output = {"output_type": "display_data", "data": {"image/png": "AAAA"}}
    with pytest.raises(BookError, match=r"01-x: .* `#\| alt"):
        page.make("01-x", "```python\nplot()\n```\n", [[output]])
    source = "```python\n#| alt A plot of x\nplot()\n```\n"
    made = page.make("01-x", source, [[output]])
    assert made.images == {"outputs/01-x-1.png": b"\0\0\0"}
    assert '<img src="outputs/01-x-1.png" alt="A plot of x">' in made.markdown


# --- The checks ---------------------------------------------------------------------

GOOD = f"""<!-- {page.MADE} --><h1 id="top">T</h1><p>a<br>b <code>$x</code></p>
<a href="#top">here</a> <a href="b.html#end">there</a> <a href="mailto:a@b.c">m</a>
<img src="a.svg" alt="A line"><pre><code class="language-python">x = "$"</code></pre>"""


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """A book of two pages without a fault, and its SUMMARY.md beside them."""
    (tmp_path / "SUMMARY.md").write_text("- [A](a.md)\n- [B](b.md)\n")
    (tmp_path / "a.html").write_text(GOOD)
    (tmp_path / "b.html").write_text(f'<!-- {page.MADE} --><h2 id="end">E</h2>')
    (tmp_path / "a.svg").write_text("<svg/>")
    return tmp_path


def test_good_pages_have_no_problem(pages):
    assert check_html(pages, pages) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("<p>a", "<p>$a", "a.html: raw $ in '$a'"),
        ("</p>", "</p></div> 5 $", "a.html: raw $ in '5 $"),
        ("#top", "#bottom", "a.html: dead anchor #bottom"),
        ("b.html#end", "b.html#start", "a.html: dead anchor b.html#start"),
        ("b.html#end", "c.html", "a.html: dead link c.html"),
        ("b.html#end", "b.md", "a.html: dead link b.md"),
        ("a.svg", "b.svg", "a.html: image b.svg is missing"),
        ('alt="A line"', 'alt=" "', "a.html: image a.svg has no alt text"),
        (' alt="A line"', "", "a.html: image a.svg has no alt text"),
        ("x = ", "y\n  #| export\nx = ", "a.html: directive line '  #| export'"),
        (page.MADE, "made", "a.html: the preprocessor did not run"),
        ("<p>a", "<!-- #region --><p>a", "a.html: a region comment"),
        ("<p>a", "<p><math><mi>\\foo</mi></math>", "a.html: LaTeX left in"),
        ("<p>a", '<script src="https://x.org/y.js"></script>', "a.html: loads https"),
        ("<p>a", '<script src="c.js"></script>', "a.html: c.js is missing"),
    ],
)
def test_each_fault_is_found(pages, old, new, problem):
    assert GOOD.count(old) >= 1
    (pages / "a.html").write_text(GOOD.replace(old, new, 1))
    problems = check_html(pages, pages)
    assert len(problems) == 1
    assert problems[0].startswith(problem)


def test_missing_page_is_found(pages):
    (pages / "b.html").unlink()
    assert "b.html: the page is missing" in check_html(pages, pages)


# --- A small book, built whole -----------------------------------------------------


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fixture's pages built with the real book.toml; the folder of the HTML."""
    if mdbook.find(ROOT / ".cache/mdbook") is None:
        pytest.skip("mdBook 0.5 is not here and cannot be fetched")
    root = tmp_path_factory.mktemp("book")
    shutil.copytree(FIXTURE / "pages", root / "chapters")
    shutil.copytree(FIXTURE / "figures", root / "figures")
    shutil.copyfile(ROOT / "book.toml", root / "book.toml")
    (root / "tools").symlink_to(ROOT / "tools")
    (root / ".cache").mkdir()
    (root / ".cache/mdbook").symlink_to(ROOT / ".cache/mdbook")
    build = subprocess.run(
        [sys.executable, ROOT / "tools/book.py", "build", "--root", root],
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    return root / "book"


def main_part(path: Path) -> str:
    match = re.search(r"<main>(.*)</main>", path.read_text("utf-8"), re.DOTALL)
    assert match
    return match[1]


def test_built_book_has_no_problem(book):
    assert check_html(book, FIXTURE / "pages") == []


def test_built_page_has_everything(book):
    page = main_part(book / "01-first.html")
    assert page.count("<math") == 10
    assert "$5 and 4" in page and "&lt;b&gt;not bold&lt;/b&gt;" in page
    assert "<td>column 19 of many</td>" in page
    assert ">42\n" in page
    assert "AssertionError: first line of the message\n" in page
    assert "second line\n" not in page and "Traceback" not in page
    assert "NotImplementedError\n" in page
    assert page.count("<details") == page.count("</details>") == 4
    solution = page[page.index("<summary>Solution</summary>") :]
    assert '<code class="language-python">def half(x):' in solution
    assert "blockquote-tag-note" in page


def test_built_book_brings_its_files_along(book):
    # mdBook writes an image twice: on the page and enlarged, behind a click.
    found = dict.fromkeys(source for source, _ in parse(book / "01-first.html").images)
    images = list(found)
    assert images == [
        "outputs/01-first-1.svg",
        "outputs/01-first-2.png",
        "figures/01-line.svg",
    ]
    assert all((book / image).read_bytes() for image in images)


def test_the_search_finds_no_answers(book):
    (index,) = book.glob("searchindex-*.js")
    text = index.read_text("utf-8")
    assert "admonition with math" in text.lower()
    solution = main_part(book / "01-first.html").partition("Solution</summary>")[2]
    assert "return x / 2" in solution
    assert "return x / 2" not in text


def test_fonts_are_there_and_the_chapters_modules_are_not(book):
    text = (book / "fonts/fonts.css").read_text("utf-8")
    files = re.findall(r'url\("([^"]+)"\)', text)
    assert len(files) == 3
    assert all((book / "fonts" / name).stat().st_size > 10_000 for name in files)
    names = {path.relative_to(book).parts[0] for path in book.rglob("*.py")}
    assert names == set()


def test_each_executed_page_is_a_notebook_with_outputs(book):
    notebook = nbformat.read(book / "notebooks/01-first.ipynb", 4)
    texts = [
        o.text for c in notebook.cells for o in c.get("outputs", []) if "text" in o
    ]
    assert any("$5 and 4" in text for text in texts)
    prose = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    assert "](02-second.ipynb#a-part-with-a-name)" in prose
    assert "notebooks/01-first.ipynb" in parse(book / "01-first.html").links


def test_pages_beside_the_chapters_are_not_executed(book):
    assert "42 and 42,000" in main_part(book / "index.html")
    assert "not executed" in main_part(book / "glossary.html")


def test_page_that_fails_stops_the_build_and_is_named(tmp_path):
    (tmp_path / "chapters").mkdir()
    (tmp_path / "chapters/SUMMARY.md").write_text("- [A](01-a.md)\n")
    (tmp_path / "chapters/01-a.md").write_text("```python\nint('x')\n```\n")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/mdbook").symlink_to(ROOT / ".cache/mdbook")
    if mdbook.find(ROOT / ".cache/mdbook") is None:
        pytest.skip("mdBook 0.5 is not here and cannot be fetched")
    build = subprocess.run(
        [sys.executable, ROOT / "tools/book.py", "build", "--root", tmp_path],
        capture_output=True,
        text=True,
    )
    assert build.returncode == 1
    assert "01-a: ValueError: invalid literal" in build.stderr


def test_the_workflow_publishes_what_is_built():
    flow = yaml.safe_load((ROOT / ".github/workflows/book.yml").read_text("utf-8"))
    build, publish = flow["jobs"]["build"]["steps"], flow["jobs"]["publish"]["steps"]
    assert "make book" in [step.get("run") for step in build]
    (upload,) = [s for s in build if "upload-pages-artifact" in s.get("uses", "")]
    assert upload["with"]["path"] == "book"
    assert "deploy-pages" in publish[-1]["uses"]
