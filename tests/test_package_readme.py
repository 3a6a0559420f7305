"""simplellm/README.md tells the truth: its files are there, its names, its floors."""

import ast
import re
from pathlib import Path

import pytest
import sizes

PACKAGE = Path(__file__).parents[1] / "simplellm"
PAGE = (PACKAGE / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`]+)`", PAGE)
PLACES = sorted({word for word in CODE if re.fullmatch(r"[\w/]+(\.py|/)", word)})
FLOORS, _, REST = PAGE.partition("## Five decisions")
NAMES = sorted({word for word in CODE if re.fullmatch(r"\w+(\.(?!py$)\w+)?", word)})


def definitions(path: Path) -> set[str]:
    """A file's functions, classes and constants; "Class.member" for members."""
    found: set[str] = set()
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


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", PAGE)
    assert links
    assert [link for link in links if not (PACKAGE / link).exists()] == []


def test_the_floors_are_those_of_the_imports() -> None:
    rows = re.findall(r"^\| (\d) \| `(\w+)/` \|", FLOORS, re.MULTILINE)
    told = {folder: int(floor) for floor, folder in rows}
    assert told == sizes.floors(sizes.folder_graph())


def test_the_spine_is_told() -> None:
    told = re.findall(r"`([\w/]+)\.py`", FLOORS[FLOORS.index("**spine**") :])
    assert [place.replace("/", ".") for place in told] == sizes.SPINE


def test_every_name_is_defined() -> None:
    known = set().union(*map(definitions, sizes.FILES.values())) | {"None"}
    assert [name for name in NAMES if name not in known] == []


def test_the_page_names_all_hops() -> None:
    hops = re.findall(r"^\| (\d+) \| `([\w.]+)` \| `([\w./]+)`", REST, re.MULTILINE)
    assert [int(number) for number, *_ in hops] == list(range(1, len(hops) + 1))
    assert len(hops) > 10
    for _, name, file in hops:
        assert name in definitions(PACKAGE / file)
