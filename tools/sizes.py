"""What the package is made of: folders, lines, imports, the longest functions.

    python tools/sizes.py    print the report; `make sizes` does

tests/test_architecture.py holds the bounds that are worth one.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "simplellm"
# What a person reads to follow a request, in the order of its way.
SPINE = """
api.load api.llm api.output_processor api.reply base.request engine.engine
engine.scheduler engine.request_queues engine.page_pool engine.page_manager
model.kv_pool model.batch engine.runner model.model model.ops model.attention
model.feed_forward model.moe engine.sampler engine.stats
""".split()
Definition = ast.FunctionDef | ast.AsyncFunctionDef
Graph = dict[str, set[str]]


def dotted(path: Path) -> str:
    """A module's full name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


FILES = {dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    """Each module as Python parses it."""
    return {name: ast.parse(path.read_text("utf-8")) for name, path in FILES.items()}


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


class Function(NamedTuple):
    lines: int
    name: str
    is_kernel: bool


def functions() -> Iterator[Function]:
    """Every function of the package, methods and nested ones too."""
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, Definition):
                decorators = " ".join(map(ast.unparse, node.decorator_list))
                start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                count = (node.end_lineno or start) - start + 1
                name = f"{module}.{node.name}"
                yield Function(count, name, "triton.jit" in decorators)


def imported(module: str) -> set[str]:
    """The package's modules that one imports, wherever in it, for types alone too."""
    names: set[str] = set()
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = parts & FILES.keys()
            names |= modules | ({node.module} if parts - modules else set())
    return (names & FILES.keys()) - {module}


def module_graph() -> Graph:
    """What each module imports. The package's own `__init__` only names modules."""
    return {name: imported(name) for name in FILES if name != PACKAGE.name}


def folder(module: str) -> str:
    """The folder right below the package that a module is in."""
    return module.split(".")[1]


def folder_graph() -> Graph:
    """What each folder right below the package imports of the others."""
    graph: Graph = {}
    for module, below in module_graph().items():
        own = folder(module)
        graph.setdefault(own, set()).update(
            {folder(o) for o in below if o != PACKAGE.name} - {own}
        )
    return graph


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """Those that import each other, directly or by way of others."""
    reach = {name: set(below) for name, below in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    together = {
        tuple(sorted({name, *(o for o in reach[name] if name in reach.get(o, ()))}))
        for name in graph
        if name in reach[name]
    }
    return sorted(together)


def floors(graph: Graph) -> dict[str, int]:
    """On which floor each stands: 1, or one above the highest that it imports."""
    height: dict[str, int] = {}
    left = dict(graph)
    while left:
        ready = [
            n for n, below in left.items() if not (below & graph.keys()) - {*height}
        ]
        if not ready:
            break  # those in circles, and above
        level = {
            n: 1 + max((height[b] for b in left[n] if b in height), default=0)
            for n in ready
        }
        height |= level
        for name in ready:
            del left[name]
    return height


def spine() -> int:
    """Lines of the modules that follow a request."""
    return sum(lines(FILES[f"{PACKAGE.name}.{name}"]) for name in SPINE)


def by_folder() -> Mapping[str, int]:
    """Lines of each folder, those of kernels apart."""
    count: Counter[str] = Counter()
    for module, path in FILES.items():
        if module != PACKAGE.name:
            kernels = module.startswith(f"{PACKAGE.name}.model.kernels")
            count["model.kernels" if kernels else folder(module)] += lines(path)
    return count


def main() -> None:
    graph, height = folder_graph(), floors(folder_graph())
    size = by_folder()
    print(f"{'floor':>5}  {'folder':14}{'lines':>7}  imports")
    for name in sorted(graph, key=lambda n: (-height.get(n, 0), n)):
        print(f"{height.get(name, 0):5}  {name:14}{size[name]:7,}  ", end="")
        print(" ".join(sorted(graph[name], key=lambda n: -height.get(n, 0))))
        if name == "model":
            print(f"{'':5}  {'  kernels':14}{size['model.kernels']:7,}")
    modules = module_graph()
    arrows = sum(map(len, graph.values()))
    print(f"\n{len(graph)} folders, {max(height.values())} floors, {arrows} arrows")
    print(f"{len(modules)} modules, {sum(map(len, modules.values()))} imports", end="")
    print(f", {max(floors(modules).values())} floors, {len(circles(modules))} circles")
    every = sorted(functions(), reverse=True)
    for said, kernels in ("functions", False), ("kernels", True):
        print(f"longest {said}:")
        for entry in [e for e in every if e.is_kernel == kernels][:4]:
            print(f"  {entry.lines:4} {entry.name.removeprefix('simplellm.')}")
    print("longest files:")
    for path in sorted(FILES.values(), key=lines, reverse=True)[:4]:
        print(f"  {lines(path):4} {path.relative_to(PACKAGE).as_posix()}")
    chapters = [p for p in (ROOT / "chapters").glob("*.md") if p.stem[2:3] == "-"]
    for said, paths in {
        "spine": [FILES[f"{PACKAGE.name}.{name}"] for name in SPINE],
        "package": FILES.values(),
        "tools": (ROOT / "tools").rglob("*.py"),
        "tests": (ROOT / "tests").rglob("*.py"),
        "twelve chapters": chapters,
        "all Markdown of chapters/": (ROOT / "chapters").glob("*.md"),
    }.items():
        print(f"{said:26}{sum(map(lines, paths)):7,} lines")


if __name__ == "__main__":
    main()
