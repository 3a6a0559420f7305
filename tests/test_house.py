"""simplellm/README.md tells the truth: its files are there, and so are its names."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "simplellm"
PAGE = (PACKAGE / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`]+)`", PAGE)
PLACES = sorted({word for word in CODE if re.fullmatch(r"[\w/]+(\.py|/)", word)})
NAMES = sorted({word for word in CODE if re.fullmatch(r"\w+(\.(?!py$)\w+)?", word)})


def definitions() -> set[str]:
    """Functions, classes and constants of the package; "Class.member" for members."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            found |= names_of(node)
            if isinstance(node, ast.ClassDef):
                members = set().union(*map(names_of, ast.walk(node)))
                found |= {f"{node.name}.{member}" for member in members}
    return found


def names_of(node: ast.AST) -> set[str]:
    """What a statement defines; an attribute of self counts as one."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return names | {t.attr for t in targets if isinstance(t, ast.Attribute)}


@pytest.mark.parametrize("place", PLACES)
def test_every_file_is_there(place: str) -> None:
    assert (PACKAGE / place).exists()


def test_every_file_is_named() -> None:
    """On a floor, by itself or with its folder."""
    floors = PAGE.partition("## Five decisions")[0]
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        folder = place.partition("/")[0] + "/"
        named = f"`{place}`" in floors or ("/" in place and f"`{folder}`" in floors)
        assert named or place == "__init__.py", f"{place} is on no floor"


def test_every_name_is_defined() -> None:
    known = definitions() | {"None"}
    assert [name for name in NAMES if name not in known] == []


def test_the_page_names_all_hops() -> None:
    hops = re.findall(r"^\| (\d+) \| `([\w.]+)`", PAGE, re.MULTILINE)
    assert [int(number) for number, _ in hops] == list(range(1, len(hops) + 1))
    assert len(hops) > 10
