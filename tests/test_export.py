"""The exporter, on small repositories of its own."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from export import main

ROOT = Path(__file__).parents[1]

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
# Exported from chapters/01-first.md; edit there.
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


def fails(root: Path, *parts: str, arguments: tuple[Path, ...] = ()) -> None:
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


@pytest.mark.parametrize("name", ["kernels.moe", "kernels/moe"])
def test_a_dotted_name_goes_to_a_subpackage(repository: Path, name: str) -> None:
    add(repository, "02-second.md", cell(f"#| export {name}", "N = 1"))
    assert run(repository)[0] == 0
    assert (repository / "simplellm/kernels/moe.py").read_text() == (
        "# Exported from chapters/02-second.md; edit there.\n\nN = 1\n"
    )
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


def test_a_name_defined_twice(repository: Path) -> None:
    text = cell("#| export second", "N = 1") + cell("#| export second", "", "N = 2")
    add(repository, "02-second.md", text)
    fails(repository, "chapters/02-second.md:10:", "'N'", "line 4", "once")


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


def test_a_module_of_another_chapter(repository: Path) -> None:
    second = add(repository, "02-second.md", cell("#| export first", "N = 1"))
    parts = ("chapters/02-second.md:4:", "'first'", "chapters/01-first.md writes")
    fails(repository, *parts)
    fails(repository, *parts, arguments=(second,))


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
    fails(repository, "chapters/02-second.md", "Undefined name `os`", "second.py:5")


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
    fails(repository, "simplellm/second.py", "no chapter writes it", "deleted")
    (repository / "simplellm/second.py").write_text('"""By hand."""\n')
    assert run(repository)[0] == 0


def test_a_chapter_that_exports_nothing(repository: Path) -> None:
    second = add(repository, "02-second.md", "# Second\n")
    fails(repository, "02-second.md", "exports nothing", arguments=(second,))
    fails(repository, "99-none.md", arguments=(repository / "chapters/99-none.md",))


def test_the_package_matches_its_chapters() -> None:
    status, output, errors = run(ROOT, "--check")
    assert status == 0, output + errors
