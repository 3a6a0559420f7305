"""Chat templates as transformers runs them: Jinja in a sandbox, here with a deadline.

The sandbox keeps a template from Python's insides. A template that never ends is
stopped where it begins a loop or calls something. What it writes is text whose
characters may be hidden, as `Encoder` does with those of messages: what a template
looks for in a text is hidden alike, and so found there.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import takewhile
from types import CodeType
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MOST_SECONDS = 10.0
# The methods of texts, and filters, whose arguments are looked for in a text. Of the
# first ones it doesn't matter who has written the text; the second ones cut it.
SEARCHES = frozenset("count endswith find index rfind rindex startswith".split())
CUTS = frozenset(
    "partition removeprefix removesuffix replace rpartition rsplit split".split()
)
REPLACE = "old", "new", "count"  # the filter's arguments
LOOKING = SEARCHES | frozenset("reject rejectattr select selectattr".split())


class GenerationTag(Extension):
    """`{% generation %}`, which tells trainers what a model writes: here nothing."""

    tags = {"generation"}  # noqa: RUF012  (as jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateAdapter(NodeTransformer):
    """Has a template look at the clock, and compare texts as messages have them."""

    block_call: nodes.Call | None = None  # a {% call %}'s, which has to stay a call

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, nodes.CallBlock):
            self.block_call = node.call
        super().generic_visit(node, *args, **kwargs)
        match node:
            case nodes.For():
                node.iter = filtered(node.iter, "in_time")
            case nodes.Compare():
                node.expr = filtered(node.expr, "hide")
                for operand in node.ops:
                    operand.expr = filtered(operand.expr, "hide")
            case nodes.Test() if node.args:
                node.node = filtered(node.node, "hide")
                node.args = [filtered(one, "hide") for one in node.args]
            case nodes.Concat():
                node.nodes = [filtered(one, "string") for one in node.nodes]
            case nodes.Filter(node=text, name="replace"):
                given = dict[Any, Any]((one.key, one.value) for one in node.kwargs)
                places = takewhile(given.__contains__, REPLACE[len(node.args) :])
                some = [*node.args, *(given.pop(place) for place in places)]
                texts = [filtered(one, "string") for one in some[:2]]
                node.args = [nodes.Const(node.name), *texts, *some[2:]]
                node.kwargs = [one for one in node.kwargs if one.key in given]
                # None: what a {% filter %} has around it
                node.node = filtered(text, "string") if text else None
                node.name = "cut"
            case nodes.Filter(name=name) if name in LOOKING:
                node.args = [filtered(one, "hide") for one in node.args]
            case nodes.Call(node=nodes.Getattr(attr=name) as method) if (
                name in CUTS and node is not self.block_call
            ):
                more = node.kwargs, node.dyn_args, node.dyn_kwargs
                args_of_cut = [nodes.Const(name), *node.args]
                return nodes.Filter(method.node, "cut", args_of_cut, *more)
            case nodes.Call(node=nodes.Getattr(attr=name) as method):
                if name in SEARCHES:
                    node.args = [filtered(one, "hide") for one in node.args]
                    method.node = filtered(method.node, "hide")
        return node


def filtered(node: nodes.Node, name: str) -> nodes.Filter:
    """An expression put through the filter of this name."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


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
    """What one template runs in, once, with messages in which text is ``hidden``."""

    def __init__(self, hidden: Mapping[int, int]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=self.written,
        )
        self.hidden, self.characters = hidden, [*map(chr, hidden)]
        self.shown = {stand_in: char for char, stand_in in hidden.items()}
        self.filters |= {"tojson": tojson, "in_time": self.in_time}
        self.filters |= {"hide": self.hide, "string": lambda x: str(self.written(x))}
        self.filters["cut"] = self.cut
        self.globals |= {
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": Attributes,
        }
        self.until = time.monotonic() + MOST_SECONDS

    def hide(self, value: Any) -> Any:
        """``value`` with its text as messages have it; it may have come of one."""
        if isinstance(value, str):  # most have nothing to hide, and may be long
            shown = any(character in value for character in self.characters)
            return value.translate(self.hidden) if shown else value
        if isinstance(value, list | tuple):
            some = map(self.hide, value)
            return [*some] if isinstance(value, list) else tuple(some)
        return value

    def cut(self, text: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """What the method ``name``, one of CUTS, makes of ``text``.

        What it looks for is found whoever wrote it, a template or a message, and what
        is left of the text stays as it is.
        """
        self.in_time()
        if name not in CUTS:  # a template may name it as well
            raise SecurityError(f"a text is cut by {name!r}; expected one of its cuts")
        if "sep" in kwargs and not args:
            args = (kwargs.pop("sep"),)
        if name == "replace" and len(args) > 2 and args[2] is None:
            args = args[:2]  # as the filter has it
        look = self.hide(args[0]) if args else None
        alike = self.hide(text)
        if not isinstance(text, str) or alike == text or not look:
            method = self.getattr(text, name)
            if not self.is_safe_callable(method):
                raise SecurityError(f"{name!r} is not to be called")
            return method(*((look, *args[1:]) if args else ()), **kwargs)
        if name == "replace":
            new, count, *_ = *args[1:], kwargs.get("count", -1)  # Python 3.13 names it
            return str(new).join(slices(text, look, alike.split(look, count)))
        parts = getattr(alike, name)(look, *args[1:], **kwargs)
        if isinstance(parts, str):  # its prefix or suffix is gone, or isn't there
            begin = len(text) - len(parts) if name == "removeprefix" else 0
            return text[begin : begin + len(parts)]
        between = "" if "partition" in name else look
        return type(parts)(slices(text, between, parts))

    def written(self, value: Any) -> Any:
        """``value`` as it is written: a list or an object as Python has it."""
        if not isinstance(value, dict | list | tuple):
            return value
        shown = map_text(value, lambda text: text.translate(self.shown))
        return str(shown).translate(self.hidden)

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


def slices(text: str, between: str, parts: Iterable[str]) -> Iterator[str]:
    """Those of ``text`` that are as long as ``parts``, which have this between."""
    at = 0
    for part in parts:
        yield text[at : at + len(part)]
        at += len(part) + len(between)


class CallArguments(dict[str, Any]):
    """A call's arguments, an object, which a template may add to a text as well.

    DeepSeek's do that: then it's the ``text`` that they were written in.
    """

    def __init__(self, fields: Mapping[str, Any], text: str) -> None:
        super().__init__(fields)
        self._text = text

    def __radd__(self, before: str) -> str:
        return before + self._text

    def __add__(self, after: str) -> str:
        return self._text + after


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """Plain data with all its text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, CallArguments):
        return CallArguments(map_text(dict(value), change), change(value._text))
    if isinstance(value, Mapping):
        pairs = value.items()
        return {map_text(k, change): map_text(v, change) for k, v in pairs}
    if isinstance(value, list | tuple):
        return type(value)(map_text(part, change) for part in value)
    return value


def parse_template(source: str) -> nodes.Template:
    """The tree of a template. Raises TemplateSyntaxError."""
    return Sandbox({}).parse(source)


def compile_template(tree: nodes.Template, hidden: Mapping[int, int]) -> CodeType:
    """Compile a template, which finds characters that are ``hidden`` in messages."""
    return Sandbox(hidden).compile(TemplateAdapter().visit(tree))


def render_template(
    code: CodeType, variables: dict[str, Any], hidden: Mapping[int, int]
) -> str:
    """The text that a template writes. Raises whatever its program raises.

    In the text of ``variables`` some characters are ``hidden``, as when the template
    was compiled.
    """
    sandbox = Sandbox(hidden)
    template = sandbox.template_class.from_code(sandbox, code, sandbox.globals)
    return template.render(variables)
