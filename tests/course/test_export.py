"""The exporter, on small repositories of its own."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from export import TABLE_HEAD, main

ROOT = Path(__file__).parents[2]

FIRST = '''\
# First

One promise. It writes `simplellm/first.py` (0 lines).

```python
#| default_exp first
#| export
"""What first does.

T tokens
"""

import os
import math

SIZE = 32  # values a scale
```

The naive version stays here.

```python
def naive():
    return os.getcwd()
```

```python
#| export
from dataclasses import dataclass, field
import math


# Why it is so.
def area(radius: float) -> float:
    """Area of a circle."""
    return math.pi * radius**2


@dataclass
class Circle:
    radius: float
```
'''

FIRST_MODULE = '''\
"""What first does.

T tokens
"""

import math
from dataclasses import dataclass

SIZE = 32  # values a scale


# Why it is so.
def area(radius: float) -> float:
    """Area of a circle."""
    return math.pi * radius**2


@dataclass
class Circle:
    radius: float
'''


def cell(*lines: str) -> str:
    return "\n".join(["", "```python", *lines, "```", ""])


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "chapters").mkdir()
    (tmp_path / "simplellm").mkdir()
    (tmp_path / "simplellm/__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "chapters/01-first.md").write_text(FIRST)
    return tmp_path


def run(root: Path, *arguments: str | Path) -> tuple[int, str, str]:
    """Status, standard output and standard error of an export of ``root``."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = main(["--root", str(root), *map(str, arguments)])
    return status, out.getvalue(), err.getvalue()


def fails(root: Path, *parts: str, arguments: tuple[str | Path, ...] = ()) -> None:
    """The export ends with status 2 and one line that holds all of ``parts``."""
    status, _, errors = run(root, *arguments)
    assert (status, errors.count("\n")) == (2, 1), errors
    for part in parts:
        assert part in errors


def add(root: Path, name: str, text: str) -> Path:
    path = root / "chapters" / name
    path.write_text(text)
    return path


def test_a_module_reads_as_written_by_hand(repository: Path) -> None:
    status, output, _ = run(repository)
    assert status == 0
    assert output.splitlines() == [
        "wrote chapters/modules.toml",
        "wrote simplellm/first.py",
        "wrote chapters/01-first.md",
    ]
    assert (repository / "simplellm/first.py").read_text() == FIRST_MODULE
    # Nothing but the line count changes in a chapter that is formatted.
    chapter = (repository / "chapters/01-first.md").read_text()
    lines = FIRST_MODULE.count("\n")
    assert chapter == FIRST.replace("(0 lines)", f"({lines} lines)")


def test_the_chapter_gets_the_format_of_its_module(repository: Path) -> None:
    second = add(repository, "02-second.md", cell("#| export second", "N=[1,2]"))
    status, output, _ = run(repository, second, "--check")
    assert status == 1
    assert "-N=[1,2]" in output and output.count("+N = [1, 2]") == 2
    assert run(repository, second)[0] == 0
    assert second.read_text() == cell("#| export second", "N = [1, 2]")


def test_a_second_export_writes_nothing(repository: Path) -> None:
    run(repository)
    module = repository / "simplellm/first.py"
    before = module.stat().st_mtime_ns
    assert run(repository) == (0, "", "")
    assert module.stat().st_mtime_ns == before


def test_check_prints_a_diff_and_writes_nothing(repository: Path) -> None:
    status, output, _ = run(repository, "--check")
    assert status == 1
    assert "+++ simplellm/first.py (export)" in output
    assert not (repository / "simplellm/first.py").exists()
    run(repository)
    assert run(repository, "--check") == (0, "", "")
    module = repository / "simplellm/first.py"
    module.write_text(FIRST_MODULE.replace("SIZE = 32", "SIZE = 16"))
    status, output, _ = run(repository, "--check")
    assert status == 1
    assert "-SIZE = 16" in output and "+SIZE = 32" in output


def test_a_wrong_line_count_is_drift(repository: Path) -> None:
    run(repository)
    chapter = repository / "chapters/01-first.md"
    chapter.write_text(chapter.read_text().replace(" lines)", "9 lines)"))
    status, output, _ = run(repository, "--check")
    assert status == 1
    assert "chapters/01-first.md" in output


def test_a_module_imports_what_its_chapter_exports_to_another(repository: Path) -> None:
    double = "def double(radius: float) -> float:\n    return 2 * area(radius)"
    chapter = repository / "chapters/01-first.md"
    chapter.write_text(FIRST + cell("#| export second", double))
    assert run(repository)[0] == 0
    module = repository / "simplellm/second.py"
    imported = "from simplellm.first import area\n\n\n"
    assert module.read_text() == f"{imported}{double}\n"
    # Another chapter's reader has not written it: there it has to be imported.
    chapter.write_text(FIRST)
    add(repository, "02-second.md", cell("#| export second", double))
    fails(repository, "02-second.md", "Undefined name `area`")


@pytest.mark.parametrize("name", ["kernels.moe", "kernels/moe"])
def test_a_dotted_name_goes_to_a_subpackage(repository: Path, name: str) -> None:
    add(repository, "02-second.md", cell(f"#| export {name}", "N = 1"))
    assert run(repository)[0] == 0
    assert (repository / "simplellm/kernels/moe.py").read_text() == "N = 1\n"
    assert (repository / "simplellm/kernels/__init__.py").exists()


def test_one_chapter_alone(repository: Path) -> None:
    second = add(repository, "02-second.md", cell("#| export second", "N = 1"))
    assert run(repository, second)[0] == 0
    assert (repository / "simplellm/second.py").exists()
    assert not (repository / "simplellm/first.py").exists()


def test_other_markdown_and_folded_code_are_not_exported(repository: Path) -> None:
    add(repository, "index.md", cell("#| export index", "N = 1"))
    add(
        repository,
        "02-second.md",
        "<!-- #region -->" + cell("#| export folded", "N = 1") + "<!-- #endregion -->",
    )
    assert run(repository)[0] == 0
    assert sorted(p.name for p in (repository / "simplellm").glob("*.py")) == [
        "__init__.py",
        "first.py",
    ]


def test_a_blank_s_kept_version_is_exported_and_its_stub_is_not(
    repository: Path,
) -> None:
    """Whatever the order of its directives, and with the head's line count."""
    blank = (
        "It becomes `simplellm/third.py` (0 lines).\n\n"
        + cell("#| default_exp third", "#| blank half", "def half(x):", "    raise")
        + "<details><summary>The version we keep</summary>\n\n"
        + cell("#| export", "#| solution half", "def half(x):", "    return x / 2")
        + cell("#| solution half", "#| export", "def down(x):", "    return x // 2")
        + "</details>\n"
    )
    chapter = add(repository, "03-third.md", blank)
    assert run(repository)[0] == 0
    assert (repository / "simplellm/third.py").read_text() == (
        "def half(x):\n    return x / 2\n\n\ndef down(x):\n    return x // 2\n"
    )
    text = chapter.read_text()
    assert "third.py` (6 lines)" in text and "#| solution half" in text


def test_a_name_defined_twice(repository: Path) -> None:
    text = cell("#| export second", "N = 1") + cell("#| export second", "", "N = 2")
    add(repository, "02-second.md", text)
    fails(
        repository,
        "chapters/02-second.md:10:",
        "'N'",
        "chapters/02-second.md:4",
        "once",
    )


def test_overloads_are_one_definition(repository: Path) -> None:
    source = [
        "#| export second",
        "from typing import overload",
        *("@overload", "def f(x: int) -> int: ..."),
        *("@overload", "def f(x: str) -> str: ..."),
        *("def f(x):", "    return x"),
    ]
    add(repository, "02-second.md", cell(*source))
    assert run(repository)[0] == 0


def test_a_later_chapter_adds_to_a_module(repository: Path) -> None:
    """One docstring, one list of imports; what the module has is not imported."""
    later = add(
        repository,
        "10-later.md",
        "It writes `simplellm/first.py` (0 lines).\n"
        + cell(
            "#| export first",
            "import sys",
            "from simplellm.first import area",
            "",
            "UNIT = area(1.0) / sys.maxsize",
        ),
    )
    add(
        repository,
        "a-appendix.md",
        cell(
            "#| export first", "from simplellm.first import UNIT", "", "TWO = 2 * UNIT"
        ),
    )
    assert run(repository, later)[0] == 0
    module = FIRST_MODULE.replace("import math\n", "import math\nimport sys\n")
    module += "\n\nUNIT = area(1.0) / sys.maxsize\n\nTWO = 2 * UNIT\n"
    assert (repository / "simplellm/first.py").read_text() == module
    assert (repository / "chapters/modules.toml").read_text() == (
        TABLE_HEAD + '\n"simplellm/first.py" = ["chapters/01-first.md", '
        '"chapters/10-later.md", "chapters/a-appendix.md"]\n'
    )
    for chapter in ("01-first.md", "10-later.md"):
        text = (repository / "chapters" / chapter).read_text()
        assert f"({module.count(chr(10))} lines)" in text
    assert run(repository, "--check") == (0, "", "")


def test_a_name_of_an_earlier_chapter(repository: Path) -> None:
    add(repository, "02-second.md", cell("#| export first", "SIZE = 1"))
    fails(repository, "02-second.md:4:", "'SIZE'", "chapters/01-first.md:16", "once")


BEGUN = cell(
    "#| export queue",
    "class Queue:",
    '    """Who is next."""',
    "",
    "    def __init__(self) -> None:",
    "        self.items: list[int] = []",
    "    # The end is where it grows.",
    "",
    "LIMIT = 8",
)
CONTINUED = cell(
    "#| export queue",
    "from simplellm.queue import Queue",
    "",
    "# The way in.",
    "class Queue(Queue):",
    "    # One at a time.",
    "    def put(self, item: int) -> None:",
    "        self.items.append(item)",
    "",
    "    @property",
    "    def full(self) -> bool:",
    "        return len(self.items) >= LIMIT  # never more",
    "    @full.setter",
    "    def full(self, value: bool) -> None:",
    "        raise AttributeError",
    "",
    "EMPTY = Queue()",
)
QUEUE = '''\
class Queue:
    """Who is next."""

    def __init__(self) -> None:
        self.items: list[int] = []

    # The end is where it grows.

    # The way in.
    # One at a time.
    def put(self, item: int) -> None:
        self.items.append(item)

    @property
    def full(self) -> bool:
        return len(self.items) >= LIMIT  # never more

    @full.setter
    def full(self, value: bool) -> None:
        raise AttributeError

    def get(self) -> int:
        return self.items.pop(0)


LIMIT = 8

EMPTY = Queue()
'''


def test_a_class_told_in_several_cells(repository: Path) -> None:
    add(repository, "02-second.md", BEGUN + CONTINUED)
    get = ("    def get(self) -> int:", "        return self.items.pop(0)")
    add(repository, "03-third.md", cell("#| export queue", "class Queue(Queue):", *get))
    assert run(repository)[0] == 0
    assert (repository / "simplellm/queue.py").read_text() == QUEUE
    assert run(repository, "--check") == (0, "", "")


@pytest.mark.parametrize(
    ("begun", "continued", "problem"),
    [
        ([], ["class C(C):", "    N = 1"], "before it to begin the class"),
        (["class C:", "    N = 1"], ["class C(C):", "    N = 2"], "'C.N' again"),
        (["class C:", "    N = 1"], ["class C:", "    M = 2"], "'C' again"),
        (["class C:", "    N = 1"], ["class C(C): ..."], "its body below"),
        (
            ["class C:", "    N = 1"],
            ["class C(C):", '    """More."""'],
            "second docstring",
        ),
        (
            [
                "from dataclasses import dataclass",
                "@dataclass",
                "class C:",
                "    n: int",
            ],
            ["class C(C):", "    m: int"],
            "adds a field",
        ),
        (
            [
                "from dataclasses import dataclass",
                "@dataclass",
                "class C:",
                "    n: int",
            ],
            ["@dataclass", "class C(C):", "    M = 1"],
            "alone",
        ),
    ],
)
def test_a_class_that_cannot_be_continued(
    repository: Path, begun: list[str], continued: list[str], problem: str
) -> None:
    add(repository, "02-second.md", cell("#| export c", *begun))
    add(repository, "03-third.md", cell("#| export c", *continued))
    fails(repository, "chapters/03-third.md:", "'C", problem, "expected")


def test_a_cell_that_does_not_parse(repository: Path) -> None:
    add(repository, "02-second.md", cell("#| export second", "N = 1", "def f(:"))
    fails(repository, "chapters/02-second.md:5:", "does not parse", "expected")


def test_an_export_without_a_module(repository: Path) -> None:
    add(repository, "02-second.md", "\n" + cell("#| export", "N = 1"))
    fails(repository, "chapters/02-second.md:4:", "without a module", "default_exp")


def test_a_bad_module_name(repository: Path) -> None:
    add(repository, "02-second.md", cell("#| export ../setup", "N = 1"))
    fails(repository, "chapters/02-second.md:3:", "not a module name", "expected")


def test_a_name_that_no_exported_cell_defines(repository: Path) -> None:
    text = cell("import os") + cell("#| export second", "def f():", "    return os.sep")
    add(repository, "02-second.md", text)
    fails(repository, "chapters/02-second.md", "Undefined name `os`", "second.py:2")


def test_a_module_that_does_not_import_is_taken_back(repository: Path) -> None:
    second = add(repository, "02-second.md", cell("#| export second", "N = 1"))
    run(repository)
    old = (repository / "simplellm/second.py").read_text()
    second.write_text(cell("#| export second", "N = 1 / 0"))
    fails(repository, "simplellm/second.py", "ZeroDivisionError", "expected")
    assert (repository / "simplellm/second.py").read_text() == old
    add(
        repository,
        "03-third.md",
        cell("#| export third", "import no_such_module as m")
        + cell("#| export third", "N = m.N"),
    )
    second.write_text(cell("#| export second", "N = 1"))
    fails(repository, "simplellm/third.py", "no_such_module")
    assert not (repository / "simplellm/third.py").exists()


def test_a_module_that_no_chapter_writes(repository: Path) -> None:
    second = add(repository, "02-second.md", cell("#| export second", "N = 1"))
    run(repository)
    second.unlink()
    first = repository / "chapters/01-first.md"
    for arguments in ((), ("--check",), (first,)):
        parts = ("simplellm/second.py", "no chapter writes it", "deleted")
        fails(repository, *parts, arguments=arguments)
    (repository / "simplellm/second.py").unlink()
    status, output, _ = run(repository, "--check")
    assert status == 1 and '-"simplellm/second.py"' in output
    assert run(repository) == (0, "wrote chapters/modules.toml\n", "")


def test_a_module_becomes_one_written_by_hand(repository: Path) -> None:
    """When its line leaves the table."""
    second = add(repository, "02-second.md", cell("#| export second", "N = 1"))
    run(repository)
    second.unlink()
    table = repository / "chapters/modules.toml"
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(line for line in lines if "second" not in line))
    assert run(repository, "--check") == (0, "", "")


def test_a_module_written_by_hand_is_not_overwritten(repository: Path) -> None:
    module = repository / "simplellm/second.py"
    module.write_text('"""By hand."""\n')
    assert run(repository)[0] == 0
    add(repository, "02-second.md", cell("#| export second", "N = 1"))
    first = repository / "chapters/01-first.md"
    for arguments in ((), ("--check",), (first,)):
        parts = ("02-second.md:4:", "simplellm/second.py", "by hand", "deleted")
        fails(repository, *parts, arguments=arguments)
    assert module.read_text() == '"""By hand."""\n'
    module.unlink()
    assert run(repository)[0] == 0
    assert module.read_text() == "N = 1\n"
    assert run(repository, "--check") == (0, "", "")


def test_a_table_that_differs_is_drift(repository: Path) -> None:
    run(repository)
    table = repository / "chapters/modules.toml"
    table.write_text(table.read_text().replace("01-first", "07-other"))
    status, output, _ = run(repository, "--check")
    assert status == 1
    assert '-"simplellm/first.py" = ["chapters/07-other.md"]' in output
    assert '+"simplellm/first.py" = ["chapters/01-first.md"]' in output


def test_a_chapter_that_exports_nothing(repository: Path) -> None:
    second = add(repository, "02-second.md", "# Second\n")
    fails(repository, "02-second.md", "exports nothing", arguments=(second,))
    fails(repository, "99-none.md", arguments=(repository / "chapters/99-none.md",))


def test_the_package_matches_its_chapters() -> None:
    status, output, errors = run(ROOT, "--check")
    assert status == 0, output + errors


def test_each_blank_has_its_hint(repository: Path) -> None:
    add(repository, "09-x.md", "```python\n#| blank f\ndef f(): ...\n```\n")
    assert run(repository)[0] == 0  # nothing lists them
    advice = repository / "chapters/course/blanks.toml"
    advice.parent.mkdir()
    advice.write_text("[f]\n")
    assert run(repository)[0] == 0
    advice.write_text("")
    fails(repository, "blanks.toml: [f]: expected an entry")
    advice.write_text("[f]\n[g]\n")
    fails(repository, "blanks.toml: [g]: expected none")
