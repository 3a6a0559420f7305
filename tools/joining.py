"""The source of a module from the cells that chapters export into it.

Docstring and imports come first, wherever they stand; the rest keeps its order. What a
cell adds to an earlier class by ``class NAME(NAME):`` goes to the end of that class. A
notebook runs such a cell as a subclass, so what would then mean something else than in
the module is refused. Works on lines, so that comments stay.
"""

import ast
import re
from dataclasses import dataclass


class ExportError(Exception):
    """One line that says where, what is wrong and what was expected."""


@dataclass(frozen=True)
class Cell:
    """The exported source of one cell and the line of the chapter it starts at."""

    chapter: str
    line: int
    module: str  # its path, simplellm/moe.py
    source: str


def defined_names(node: ast.stmt) -> list[str]:
    """The top-level names that a statement defines (overloads aside)."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            overload = any("overload" in ast.unparse(d) for d in node.decorator_list)
            return [] if overload else [node.name]
        case ast.Assign(targets=targets):
            nodes = [n for target in targets for n in ast.walk(target)]
        case ast.AnnAssign(target=ast.Name() as target):
            nodes = [target]
        case _:
            return []
    return [
        n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    ]


def parse(cell: Cell) -> ast.Module:
    """The syntax tree of a cell."""
    try:
        return ast.parse(cell.source)
    except SyntaxError as error:
        line = cell.line + (error.lineno or 1) - 1
        raise ExportError(
            f"{cell.chapter}:{line}: the exported cell does not parse: "
            f"{error.msg}; expected plain Python"
        ) from None


def continues(node: ast.ClassDef) -> bool:
    """Whether it is ``class NAME(NAME):``, which adds to the class before it."""
    return [ast.unparse(base) for base in node.bases] == [node.name]


def objection(node: ast.ClassDef, first: ast.ClassDef | None) -> str:
    """Why ``node`` cannot add to the class that ``first`` begins; "" if it can."""
    if first is None:
        return (
            "continues a class; expected an exported cell before it to begin the class"
        )
    if node.decorator_list or node.keywords or node.body[0].lineno == node.lineno:
        return f"expected `class {node.name}({node.name}):` alone with its body below"
    if ast.get_docstring(node):
        return "has a second docstring; expected it in the class's first part only"
    # The notebook runs a subclass, whose generated __init__ would not know the field.
    heads = " ".join(map(ast.unparse, [*first.decorator_list, *first.bases]))
    fields = any(isinstance(member, ast.AnnAssign) for member in node.body)
    if fields and re.search("dataclass|NamedTuple", heads):
        return "adds a field to a dataclass; expected all fields in its first part"
    return ""


def class_span(lines: list[str], node: ast.ClassDef) -> tuple[int, int]:
    """From the comment right above a class to the comments that end its body."""
    start, end = node.lineno - 1, node.end_lineno or node.lineno
    while start and lines[start - 1].startswith("#"):
        start -= 1
    while end < len(lines) and lines[end][:1] in ("", " "):
        end += 1
    return start, end


def joined(path: str, cells: list[Cell]) -> str:
    """The source of all cells as one module: docstring, imports, everything else."""
    lines: list[str] = []
    origins: list[str] = []  # of each line: chapter and number
    starts: set[int] = set()  # lines that begin a cell
    for cell in cells:
        parse(cell)
        starts.add(len(lines))
        source = [*cell.source.splitlines(), ""]
        lines += source
        origins += [f"{cell.chapter}:{cell.line + i}" for i in range(len(source))]
    tree = ast.parse("\n".join(lines))
    itself = path.removesuffix(".py").replace("/", ".")
    docstring: list[str] = []
    imports: list[str] = []
    moved: set[int] = set()  # lines that do not stay where they are
    classes: dict[str, ast.ClassDef] = {}
    additions: dict[int, list[str]] = {}  # by the line they go before
    seen: dict[str, str] = {}  # where each name is defined, and each CLASS.MEMBER
    for node in tree.body:
        origin = origins[node.lineno - 1]
        names, members = defined_names(node), []
        start, end = node.lineno - 1, node.end_lineno or node.lineno
        if isinstance(node, ast.Import | ast.ImportFrom):
            # A later chapter imports what an earlier one wrote into this module.
            if getattr(node, "module", None) != itself:
                imports += lines[start:end]
            moved.update(range(start, end))
        elif node is tree.body[0] and ast.get_docstring(tree):
            docstring = lines[start:end]
            moved.update(range(start, end))
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                members += [f"{node.name}.{name}" for name in defined_names(member)]
            if continues(node):
                if problem := objection(node, classes.get(node.name)):
                    raise ExportError(f"{origin}: {node.name!r} {problem}")
                names = members
                start, end = class_span(lines, node)
                comment = [f"    {line}" for line in lines[start : node.lineno - 1]]
                body = lines[node.lineno : end]
                place = class_span(lines, classes[node.name])[1]
                additions.setdefault(place, []).extend(["", *comment, *body])
                moved.update(range(start, end))
            else:
                classes[node.name] = node
        for name in names:
            if name in seen:
                raise ExportError(
                    f"{origin}: defines {name!r} again (first at {seen[name]}); "
                    "expected each name once in a module"
                )
        seen |= dict.fromkeys(names + members, origin)
    blocks = [docstring, imports]
    for number, line in enumerate(lines):
        if number in starts:
            blocks.append([])
        blocks[-1] += additions.get(number, [])
        if number not in moved:
            blocks[-1].append(line)
    parts = ["\n".join(block).strip("\n") for block in blocks]
    return "\n\n".join(filter(None, parts)) + "\n"
