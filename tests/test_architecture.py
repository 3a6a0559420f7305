"""Imports go downward, and what a person reads in an evening stays that long.

What the package is made of: ``make sizes``.
"""

import ast
import re
from collections import defaultdict

import pytest
import sizes

# From the top. A folder imports only from those below it.
ORDER = "apps server api engine model checkpoint sampling structured text base".split()
# What there is, and the slack of 5 % that a good change may need.
LONGEST_FUNCTION = 60 * 1.05
LONGEST_KERNEL = 90 * 1.05
SPINE = 3210 * 1.05


def test_modules_import_in_no_circle() -> None:
    assert sizes.circles(sizes.module_graph()) == []


def test_folders_are_those_of_the_map() -> None:
    assert sizes.folder_graph().keys() == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_folder_imports_from_those_below(name: str) -> None:
    assert sizes.folder_graph()[name] <= set(ORDER[ORDER.index(name) + 1 :])


def test_a_circle_is_noticed() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}
    assert sizes.circles(graph) == [("b", "c")]
    assert sizes.floors({"a": {"b"}, "b": set()}) == {"b": 1, "a": 2}


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in sizes.FILES.values()} - {sizes.PACKAGE})
)
def test_a_folders_docstring_is_its_map(folder) -> None:
    """It names each file in it, and nothing that isn't there."""
    tree = ast.parse((folder / "__init__.py").read_text("utf-8"))
    told = ast.get_docstring(tree) or ""
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    named = set(re.findall(r"`([\w/]+\.py)`", told))
    assert files - named == set()
    places = folder, sizes.PACKAGE
    lost = [n for n in named if not any((place / n).exists() for place in places)]
    assert told and lost == []


def test_functions_fit_a_screen() -> None:
    entries = list(sizes.functions())
    assert max(e for e in entries if not e.is_kernel).lines <= LONGEST_FUNCTION
    assert max(e for e in entries if e.is_kernel).lines <= LONGEST_KERNEL


def test_the_spine_is_read_in_an_evening() -> None:
    assert sizes.spine() <= SPINE


def defined(tree: ast.Module) -> set[str]:
    """Names that a module gives to functions, classes and values of its own."""
    names = set()
    for node in tree.body:
        if isinstance(node, sizes.Definition | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                n.id for target in targets for n in ast.walk(target)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }  # fmt: skip
    return names


def operations() -> set[str]:
    """The fields of `Ops`: their names stand in every table of operations."""
    for node in sizes.trees()["simplellm.model.ops"].body:
        if isinstance(node, ast.ClassDef) and node.name == "Ops":
            return {
                part.target.id
                for part in node.body
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            }
    raise AssertionError("no record of operations")


def test_one_word_means_one_thing_inside_a_folder() -> None:
    """But for operations in their tables, and each module's logger."""
    modules = defaultdict(list)
    shared = operations()
    for module, tree in sizes.trees().items():
        for name in defined(tree) - {"LOGGER"}:
            of_table = name in shared and module.startswith("simplellm.model")
            if module.count(".") > 1 and not name.startswith("__") and not of_table:
                modules[sizes.folder(module), name].append(module)
    assert {name: where for name, where in modules.items() if len(where) > 1} == {}
