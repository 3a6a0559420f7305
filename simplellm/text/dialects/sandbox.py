"""Jinja templates of people we don't know: what they may do, and how much of it.

Templates see plain data and call what is listed here. Jinja's sandbox keeps them from
Python's insides. Here they also have an amount of characters and items that they may
make, and a time: so none fills the memory, or never ends.
"""

import json
import time
from datetime import datetime
from types import CodeType
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from simplellm.base.config import expect, one_of

MOST_SOURCE = 2**17  # characters of a template
MOST_MADE = 2**28  # characters and items
MOST_SECONDS = 10.0
MOST_BITS = 64  # of a number
ALLOWED_FILTERS = """
abs capitalize count d default dictsort first float int items last length list lower map
max min reject rejectattr reverse round safe select selectattr sort sum title trim
unique upper
"""
ALLOWED_METHODS = """
append capitalize copy count endswith find get index isalpha isdigit islower isnumeric
isspace isupper items join keys lower lstrip removeprefix removesuffix replace rfind
rsplit rstrip split splitlines startswith strip title upper values
"""


class GenerationTag(Extension):
    """`{% generation %}`, which tells trainers what a model writes: here nothing."""

    tags = {"generation"}  # noqa: RUF012  (as jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Meters(NodeTransformer):
    """Has a template ask, wherever it copies or repeats something."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        match node:
            case nodes.For():
                node.iter = metered(node.iter)
            case nodes.Concat():
                node.nodes = [metered(part, "written") for part in node.nodes]
            case nodes.Filter() | nodes.Getitem(arg=nodes.Slice()):
                return metered(node)
        return node


def metered(node: nodes.Node, meter: str = "made") -> nodes.Filter:
    return nodes.Filter(node, meter, [], [], None, None, lineno=node.lineno)


class Attributes(Namespace):
    """Jinja's namespace, of which nothing leads into Python's insides."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            Attributes.__setitem__(self, name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            forbid(f"an attribute of a namespace is {name!r}; expected no underscore")
        super().__setitem__(name, value)


def forbid(message: str) -> NoReturn:
    """`raise_exception` of templates."""
    raise TemplateError(message)


class Sandbox(ImmutableSandboxedEnvironment):
    """What one template runs in, once."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=self.written,
        )
        self.left, self.until = MOST_MADE, time.monotonic() + MOST_SECONDS
        self.globals = {
            "range": self.globals["range"],
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": Attributes,
            "raise_exception": forbid,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        known = {name: self.filters[name] for name in ALLOWED_FILTERS.split()}
        self.filters = known | {
            "join": self.joined,
            "replace": lambda text, *args: self.grown(str(text).replace, *args),
            "string": lambda some: str(self.written(some)),
            "tojson": self.tojson,
            "made": lambda value: self.made(value),  # a template may not say a size
            "written": self.written,
        }

    def made(self, value: Any, size: int | None = None) -> Any:
        """``value``, whose ``size`` is counted: by default how long it is."""
        if size is None:
            size = len(value) if isinstance(value, str | list | tuple | dict) else 1
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            forbid(f"a number has {value.bit_length()} bits; expected {MOST_BITS}")
        self.left -= 1 + size
        if self.left < 0 or time.monotonic() > self.until:
            raise TemplateRuntimeError(
                f"it makes more than {MOST_MADE:,} characters and items, or takes "
                f"longer than {MOST_SECONDS:.0f} s; expected less"
            )
        return value

    def written(self, value: Any) -> Any:
        """``value``, about to become text: all that is in it counts."""
        self.made(value)
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        for part in parts if isinstance(parts, list | tuple) else ():
            self.written(part)
        return value

    def grown(self, method: Any, *args: Any) -> Any:
        """What a str's ``replace`` or ``join`` gives, counted before it is made."""
        before = self.left
        self.written([*args])
        self.made(None, len(method.__self__) * (before - self.left))
        return method(*args)

    def joined(self, some: Any, by: Any = "", attribute: Any = None) -> str:
        if attribute is not None:
            some = map(make_attrgetter(self, attribute), some)
        return self.grown(str(by).join, [str(self.written(part)) for part in some])

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        if not 0 <= int(indent or 0) <= 8 or len("".join(separators or ())) > 8:
            forbid("tojson has a wide indent or long separators; expected 8 at most")
        self.written(value)
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    # What jinja asks

    def call(self, context: Any, what: Any, /, *args: Any, **kwargs: Any) -> Any:
        grows = isinstance(getattr(what, "__self__", None), str)
        if grows and what.__name__ in ("join", "replace"):
            # Within loops Jinja adds keywords of its own.
            given = [list(args[0])] if what.__name__ == "join" else args
            return self.grown(what, *given)
        return self.made(super().call(context, what, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        lengths = [len(x) for x in (left, right) if isinstance(x, str | list | tuple)]
        if operator == "**" or (operator == "%" and lengths):
            forbid(f"it has the operator {operator}; expected others")
        if operator == "*" and lengths:
            numbers = [x for x in (left, right) if isinstance(x, int)]
            self.made(None, max(0, lengths[0] * sum(numbers)))
        return self.made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> None:
        """No `format`, safe or not: it can make long texts of short ones."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        plain = isinstance(obj, str | int | float | list | tuple | dict | bytes)
        known = not plain or attr in ALLOWED_METHODS.split()
        return known and super().is_safe_attribute(obj, attr, value)


def compiled(source: str) -> CodeType:
    """A template, ready for `rendered`. Raises ValueError, and what Jinja does."""
    count = len(source)
    expect(count <= MOST_SOURCE, "its length", count, f"at most {MOST_SOURCE}")
    sandbox = Sandbox()
    tree = sandbox.parse(source)
    for node in tree.find_all(nodes.Filter):
        one_of("a filter", node.name, sorted(sandbox.filters))
    return sandbox.compile(Meters().visit(tree))


def rendered(code: CodeType, variables: dict[str, Any]) -> str:
    """What a template writes. Raises whatever its program does."""
    sandbox = Sandbox()
    template = sandbox.template_class.from_code(sandbox, code, sandbox.globals)
    return template.render(variables)
