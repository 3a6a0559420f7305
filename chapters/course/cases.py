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
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from course import PACKAGE, unwrapped
from course.mutation import Mutation
from simplellm.api.input_processor import Loaded
from simplellm.api.llm import LLM
from simplellm.api.load import build_engine, load
from simplellm.base.config import EngineConfig

PLAIN = "simplellm.model.ops"  # whose mistakes PyTorch's operations have, not NumPy's


def mutation(number: int) -> Mutation:
    """The mistake of a case. Raises LookupError for a case that there isn't."""
    text = Path(__file__).with_name("cases.toml").read_text(encoding="utf-8")
    sealed = tomllib.loads(text)["case"]
    if not 1 <= number <= len(sealed):
        raise LookupError(f"there is no case {number}; expected 1 to {len(sealed)}")
    found = {
        key: codecs.decode(value, "rot13") for key, value in sealed[number - 1].items()
    }
    function = pkgutil.resolve_name(found["function"])
    return Mutation(function, found["old"], found["new"])


# Opening a case


@functools.cache
def weights(operations: str) -> Loaded:
    """The embedded model, read once for all engines."""
    return load(device="cpu", options={"operations": operations})


def healthy(**options: Any) -> LLM:
    """An LLM of the embedded model on the CPU; ``options`` are `EngineConfig`'s."""
    config = EngineConfig(**options).resolved("cpu")
    loaded = weights(config.operations)
    base: Any = loaded.engine
    model = replace(base.runner.model)  # a copy, with the same weights
    engine = build_engine(model, config)
    processor = replace(loaded.input_processor, max_model_len=engine.max_model_len)
    return LLM.of(replace(loaded, engine=engine, input_processor=processor))


def case(number: int, **options: Any) -> LLM:
    """`healthy`, but for the mistake of a case. No other engine has it."""
    module = mutation(number).module()
    if module.__name__ == PLAIN:
        options = {"operations": "plain"} | options
    llm = healthy(**options)
    infect(llm.engine, module)
    return llm


def infect(engine: Any, module: ModuleType) -> None:
    """Let the parts of an engine that come from ``module``'s original come from it."""
    runner, scheduler = engine.runner, engine.scheduler
    for part in (scheduler, scheduler.manager, runner, runner.pool):
        if type(part).__module__ == module.__name__:
            part.__class__ = getattr(module, type(part).__name__)
    table = runner.model.ops
    operations = {
        name: getattr(module, function.__name__)
        for name, function in vars(table).items()
        if getattr(function, "__module__", "") == module.__name__
        and hasattr(module, function.__name__)
    }
    runner.model.ops = replace(table, **operations)


def steps_of(llm: LLM) -> list[dict[int, int]]:
    """A list to which each step of ``llm`` from now on adds what it computes.

    That is a number of tokens by the number of the request.
    """
    steps: list[dict[int, int]] = []
    schedule = llm.engine.scheduler.schedule

    def recorded() -> Any:
        scheduled = schedule()
        steps.append({chunk.request.number: chunk.length for chunk in scheduled})
        return scheduled

    llm.engine.scheduler.schedule = recorded
    return steps


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
    if not found:
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
