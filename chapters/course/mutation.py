"""A mistake on purpose: one snippet in the source of one function, replaced."""

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any


@dataclass(frozen=True)
class Mutation:
    """``function`` with ``new`` in the place of ``old``, which it has once."""

    function: Callable[..., Any]
    old: str
    new: str

    def source(self) -> str:
        """The function with the mistake in it, without the indentation of its class."""
        source = textwrap.dedent(inspect.getsource(self.function))
        assert source.count(self.old) == 1, (
            f"{self.function.__qualname__} has {source.count(self.old)} times "
            f"{self.old!r}; expected one: did the function change?"
        )
        return source.replace(self.old, self.new)

    def code(self) -> Any:
        """Its code object: in the place of the function's, every caller runs it."""
        namespace = dict(self.function.__globals__)
        exec(self.source(), namespace)
        mutant = namespace[self.function.__name__]
        mutant = getattr(mutant, "func", mutant)  # of a cached property
        assert isinstance(mutant, FunctionType)
        return mutant.__code__

    def module(self) -> ModuleType:
        """A copy of the function's module, with the mistake in it."""
        right = inspect.getsource(self.function)
        indentation = right[: len(right) - len(right.lstrip())]
        wrong = textwrap.indent(self.source(), indentation)
        return copy_of(self.function.__module__, right, wrong)


def copy_of(name: str, right: str = "", wrong: str = "") -> ModuleType:
    """A copy of module ``name`` with another text in the place of ``right``.

    The module itself stays as it is, and it is its lines that `inspect` and tracebacks
    show of the copy.
    """
    home = sys.modules[name]
    source = inspect.getsource(home)
    copy = ModuleType(name)
    copy.__file__ = home.__file__
    code = source.replace(right, wrong) if right else source
    exec(compile(code, str(home.__file__), "exec"), vars(copy))
    return copy
