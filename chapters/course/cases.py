"""Ten cases: an engine with a mistake in it, which the reader is to find.

    llm = case(3)                   an LLM of the embedded model, with the mistake
    llm = healthy()                 the same without it, which is there beside it
    solve(3, "PageManager.free")    name the function that is wrong, or a line of it

The mistakes are sealed in cases.toml; the package itself stays as it is.
"""

import ast
import codecs
import functools
import inspect
import pkgutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from course import PACKAGE, unwrapped
from course.mutation import Mutation, copy_of
from course.widgets import Widget, live, widget
from course.widgets.live import LiveEngine
from simplellm.api.input_processor import LoadedModel
from simplellm.api.llm import LLM
from simplellm.api.load import build_engine, load
from simplellm.base.config import EngineConfig

METHODS = (FunctionType, staticmethod, property)
PAGES = {"num_pages": 512}  # of an engine, unless its options say; 25 MB


def mutation(number: int) -> Mutation:
    """The mistake of a case. Raises LookupError for a case that there isn't."""
    text = Path(__file__).with_name("cases.toml").read_text(encoding="utf-8")
    sealed = tomllib.loads(text)["case"]
    if not 1 <= number <= len(sealed):
        raise LookupError(f"there is no case {number}; expected 1 to {len(sealed)}")
    found = {
        key: codecs.decode(value, "rot13") for key, value in sealed[number - 1].items()
    }
    (name,) = suspects(found["function"])
    function = pkgutil.resolve_name(name)
    return Mutation(function, found["old"], found["new"])


# Opening a case


@functools.cache
def weights(operations: str) -> LoadedModel:
    """The embedded model, read once for all engines."""
    return load(device="cpu", options={"operations": operations} | PAGES)


def healthy(**options: Any) -> LLM:
    """An LLM of the embedded model on the CPU; ``options`` are `EngineConfig`'s."""
    config = EngineConfig(**PAGES | options).resolved("cpu")
    loaded = weights(config.operations)
    base: Any = loaded.engine
    model = replace(base.runner.model)  # a copy, with the same weights
    engine = build_engine(model, config)
    processor = replace(loaded.input_processor, max_model_len=engine.max_model_len)
    return LLM.of(replace(loaded, engine=engine, input_processor=processor))


def case(number: int, **options: Any) -> LLM:
    """`healthy`, but for the mistake of a case. No other engine has it."""
    llm = healthy(**options)
    infect(llm.engine, mutation(number))
    return llm


def infect(engine: Any, mistake: Mutation) -> None:
    """Let an engine's parts and operations come from modules with the mistake."""
    runner, scheduler = engine.runner, engine.scheduler
    parts = [scheduler, scheduler.manager, runner, runner.pool]
    table = runner.model.ops
    homes = {kind.__module__ for part in parts for kind in type(part).__mro__}
    homes |= {getattr(x, "__module__", "") for x in vars(table).values()} - {""}
    homes |= {x.__module__ for home in homes for x in used_by(home)}
    copies = copies_with(mistake, homes)
    for part in parts:
        part.__class__ = kind_with(copies, type(part))
    changed = {name: counterpart(copies, x) for name, x in vars(table).items()}
    runner.model.ops = replace(table, **{k: x for k, x in changed.items() if x})


def used_by(home: str) -> list[FunctionType]:
    """The functions of the package that a module of it has a name for."""
    found = vars(sys.modules[home]).values()
    functions = [x for x in found if isinstance(x, FunctionType)]
    return [x for x in functions if x.__module__.startswith("simplellm.")]


def kind_with(copies: dict[str, ModuleType], kind: type) -> type:
    """A class like ``kind``, with the methods that it or a base has in ``copies``."""
    methods: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        home = copies.get(base.__module__)
        found = base if home is None else getattr(home, base.__name__)
        methods |= {k: x for k, x in vars(found).items() if isinstance(x, METHODS)}
    return type(kind.__name__, (kind,), methods)


def copies_with(mistake: Mutation, homes: set[str]) -> dict[str, ModuleType]:
    """Copies of the module with the mistake, and of those of ``homes`` that call it."""
    copies = {mistake.function.__module__: mistake.module()}
    while callers := [
        name
        for name in homes - copies.keys()
        if any(counterpart(copies, x) for x in vars(sys.modules[name]).values())
    ]:
        copies |= {name: copy_of(name) for name in callers}
    for copy in copies.values():
        for name, value in [*vars(copy).items()]:
            if (other := counterpart(copies, value)) is not None:
                setattr(copy, name, other)
    return copies


def counterpart(copies: dict[str, ModuleType], value: Any) -> Any:
    """What stands for a function or a module of the package in its copy, if any."""
    if isinstance(value, ModuleType):
        known = value is sys.modules.get(value.__name__)
        return copies.get(value.__name__) if known else None
    if not isinstance(value, FunctionType) or value.__module__ not in copies:
        return None
    name = value.__name__
    known = value is getattr(sys.modules[value.__module__], name, None)
    return getattr(copies[value.__module__], name) if known else None


def steps_of(llm: LLM) -> list[dict[int, int]]:
    """A list to which each step of ``llm`` from now on adds what it computes.

    That is a number of tokens by the id of the request.
    """
    steps: list[dict[int, int]] = []
    scheduler = llm.engine_core.scheduler
    schedule = scheduler.schedule

    def recorded() -> Any:
        scheduled = schedule()
        steps.append({chunk.request.request_id: chunk.length for chunk in scheduled})
        return scheduled

    scheduler.schedule = recorded  # type: ignore[method-assign]
    return steps


class SickEngine(LiveEngine):
    """The live view's engine, with the mistake of a case."""

    def __init__(self, number: int) -> None:
        super().__init__(healthy())
        self.mistake = mutation(number)

    def start(self, requests: int, pages: int) -> dict[str, Any]:
        told = super().start(requests, pages)
        infect(self.engine, self.mistake)
        return told


def watch(number: int) -> Widget:
    """The live view of an engine with the mistake of a case, for a notebook."""
    return widget(
        "engine",
        {"choices": live.CHOICES},
        alt=f"The engine of case {number} at work on up to six questions.",
        answer=SickEngine(number).answer,
    )


# Solving it


@functools.cache
def functions() -> dict[str, tuple[str, range]]:
    """The package's functions by their full names: their files and their lines."""
    found = {}
    root = Path(PACKAGE)

    def look(node: ast.AST, name: str, file: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                full = f"{name}.{child.name}"
                if not isinstance(child, ast.ClassDef):
                    first = min(d.lineno for d in [child, *child.decorator_list])
                    found[full] = file, range(first, (child.end_lineno or 0) + 1)
                else:
                    look(child, full, file)

    for path in root.rglob("*.py"):
        file = path.relative_to(root.parent)
        module = ".".join(file.with_suffix("").parts)
        look(ast.parse(path.read_text(encoding="utf-8")), module, file.as_posix())
    return found


def suspects(answer: str | Callable[..., Any]) -> list[str]:
    """The full names of the functions that an answer may mean."""
    if not isinstance(answer, str):
        function = unwrapped(answer)
        answer = f"{function.__module__}.{function.__qualname__}"
    file, _, line = answer.strip().rpartition(":")
    if line.isdecimal():
        return [
            name
            for name, (path, lines) in functions().items()
            if f"/{path}".endswith(f"/{file}") and int(line) in lines
        ]
    answer = answer.strip().removesuffix("()")
    return [name for name in functions() if f".{name}".endswith(f".{answer}")]


def solve(number: int, answer: str | Callable[..., Any]) -> bool:
    """Whether ``answer`` names the function with the mistake, and say so.

    It may be a function, a name ("PageManager.free", "route") or a line
    ("page_manager.py:120"). Raises LookupError for a case that there isn't.
    """
    mistake = mutation(number)
    if not answer:
        print(f"Case {number} is open. Which function of the package is wrong?")
        return False
    found, right = suspects(answer), mistake.function
    culprit = f"{right.__module__}.{right.__qualname__}"
    if not found and ":" in str(answer):
        print(f"Case {number}: no function of the package has the line {answer}.")
    elif not found:
        print(f"Case {number}: the package has no function {answer}.")
    elif len(found) > 1:
        print(f"Case {number}: which one? {answer} may be")
        print(*(f"    {name}" for name in found[:9]), sep="\n")
    elif found != [culprit]:
        where = functions()[found[0]][0] == functions()[culprit][0]
        near = " But that's the file." if where else ""
        print(f"Case {number}: {found[0]} does what it should.{near}")
    else:
        print(f"Case {number} is solved: it's {culprit}.")
        print(f"    healthy   {line_with(mistake, mistake.old)}")
        print(f"    here      {line_with(mistake, mistake.new)}")
    return found == [culprit]


def line_with(mistake: Mutation, snippet: str) -> str:
    """The line of the function that has the mistake, with ``snippet`` in its place."""
    lines = inspect.getsource(mistake.function).splitlines()
    line = next(line for line in lines if mistake.old in line)
    return line.strip().replace(mistake.old, snippet)
