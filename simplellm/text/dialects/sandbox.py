"""Chat templates as transformers runs them: Jinja in a sandbox, here with a deadline.

The sandbox keeps a template from Python's insides. A template that never ends is
stopped where it begins a loop or calls something. What it writes is text whose
characters may be hidden, as `Encoder` does with those of messages: what a template
looks for in a text is hidden alike, and so found there.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import CodeType
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MOST_SECONDS = 10.0
# The filters and methods of texts whose arguments, or of "replace" the first one, are
# looked for in a text.
LOOKING = frozenset(
    "count endswith find index partition reject rejectattr removeprefix removesuffix "
    "replace rfind rindex rpartition rsplit select selectattr split startswith".split()
)


class GenerationTag(Extension):
    """`{% generation %}`, which tells trainers what a model writes: here nothing."""

    tags = {"generation"}  # noqa: RUF012  (as jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateAdapter(NodeTransformer):
    """Has a template look at the clock, and for texts as ``hidden`` has them."""

    def __init__(self, hidden: Mapping[int, int]) -> None:
        self.hidden = hidden

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        match node:
            case nodes.For():
                clock = [node.iter, "in_time", [], [], None, None]
                node.iter = nodes.Filter(*clock, lineno=node.lineno)
            case nodes.Compare():
                self.translate_constants(
                    [node.expr, *(operand.expr for operand in node.ops)]
                )
            case nodes.Test():
                self.translate_constants(node.args)
            case nodes.Filter(name=name) | nodes.Call(node=nodes.Getattr(attr=name)):
                looked = node.args[:1] if name == "replace" else node.args
                self.translate_constants(looked if name in LOOKING else [])
        return node

    def translate_constants(self, every: Sequence[nodes.Node]) -> None:
        """Spell the texts in some expressions as ``hidden`` has them."""
        for one in every:
            inner = [one] if isinstance(one, nodes.Const) else one.find_all(nodes.Const)
            for constant in inner:
                if isinstance(constant.value, str):
                    constant.value = constant.value.translate(self.hidden)


class Attributes(Namespace):
    """Jinja's namespace, of which nothing leads into Python's insides."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            Attributes.__setitem__(self, name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            wrong = f"an attribute of a namespace is {name!r}; expected no underscore"
            raise SecurityError(wrong)
        super().__setitem__(name, value)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON without escapes for HTML; with ``ensure_ascii`` what is hidden stays so."""
    text = json.dumps(
        value,
        ensure_ascii=False,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    if not ensure_ascii:
        return text
    other = r"[^\x00-\x7f\ud800-\udfff]+"
    return re.sub(other, lambda match: json.dumps(match[0])[1:-1], text)


class Sandbox(ImmutableSandboxedEnvironment):
    """What one template runs in, once."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
        )
        self.filters |= {"tojson": tojson, "in_time": self.in_time}
        self.globals |= {
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": Attributes,
        }
        self.until = time.monotonic() + MOST_SECONDS

    def in_time(self, value: Any = None) -> Any:
        """``value``, if there is time left."""
        if time.monotonic() > self.until:
            seconds = f"{MOST_SECONDS:.0f} s"
            raise TemplateRuntimeError(f"it takes longer than {seconds}; expected less")
        return value

    def call(self, context: Any, what: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls, if there is time left."""
        self.in_time()
        return super().call(context, what, *args, **kwargs)


def parse_template(source: str) -> nodes.Template:
    """The tree of a template. Raises TemplateSyntaxError."""
    return Sandbox().parse(source)


def compile_template(tree: nodes.Template, hidden: Mapping[int, int]) -> CodeType:
    """Compile a template, which finds characters that are ``hidden`` in messages."""
    return Sandbox().compile(TemplateAdapter(hidden).visit(tree))


def render_template(code: CodeType, variables: dict[str, Any]) -> str:
    """The text that a template writes. Raises whatever its program raises."""
    sandbox = Sandbox()
    template = sandbox.template_class.from_code(sandbox, code, sandbox.globals)
    return template.render(variables)
