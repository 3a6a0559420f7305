"""Things to move: the same JavaScript in JupyterLab and on the pages of the book.

Each widget is a module beside this file, such as ``merge.js``, that exports ``render``
as anywidget wants it. What they share, and the drawing of the engine, are in the
package: the page of `simplellm serve` shows them too. A chapter's cell, its source
hidden, ends in

    widget("scale", weight_block(blocks[0, 0]), alt="What one sees, in words.")

GitHub shows the cell with these words. A notebook shows the widget, and a page of the
book holds the same code with the data of that run (`page`); whatever shows neither,
such as a terminal, prints the words.
"""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import traitlets
from anywidget import AnyWidget

import simplellm

HERE = Path(__file__).parent
SHARED = Path(simplellm.__file__).parent / "server/page"  # parts.js, view.js, view.css
IMPORT = re.compile(r'^import .* from "\./(\w+)\.js";\n', re.MULTILINE)
PAGE = "application/vnd.simplellm.page+html"  # tools/bookbuild puts it on the page


def source(*names: str) -> str:
    """The code of JavaScript modules, with that of those they import, in one piece.

    Pages are opened as files too, where a browser loads no module from another.
    """
    found: dict[str, str] = {}

    def take(name: str) -> None:
        path = HERE / f"{name}.js"
        path = path if path.is_file() else SHARED / path.name
        code = path.read_text(encoding="utf-8")
        for imported in IMPORT.findall(code):
            if imported not in found:
                take(imported)
        found[name] = re.sub(
            r"^export (?!default)", "", IMPORT.sub("", code), flags=re.M
        )

    for name in names:
        take(name)
    return "\n".join(found.values())


def style() -> str:
    sheets = SHARED / "view.css", HERE / "style.css"
    return "\n".join(path.read_text(encoding="utf-8") for path in sheets)


def page(name: str, data: Any, alt: str) -> str:
    """The HTML of a widget that needs no kernel, in blocks that Markdown leaves alone.

    Without JavaScript it is the text alternative.
    """
    state = json.dumps({"data": data, "alt": alt}, separators=(",", ":"))
    state = state.replace("<", "\\u003c")  # a text may hold </script>
    code = source(name, "page").replace("export default { render };\n", "")
    return f"""\
<div id="widget-{name}" data-widget="{name}"><p>{html.escape(alt)}</p></div>

<style>
{style()}</style>

<script type="application/json" id="widget-{name}-data">{state}</script>

<script type="module">
{code}
show("{name}", render);
</script>
"""


class Widget(AnyWidget):
    """A widget with its data, its text alternative and who answers its questions."""

    data = traitlets.Any().tag(sync=True)
    alt = traitlets.Unicode().tag(sync=True)
    live = traitlets.Bool().tag(sync=True)  # whether somebody answers

    def __init__(
        self, name: str, answer: Callable[[Any], Any] | None, **state: Any
    ) -> None:
        self._esm, self._css = source(name), style()
        super().__init__(live=answer is not None, **state)
        self.name = name
        if answer is not None:
            self.on_msg(lambda _, question, buffers: self.send(answer(question)))

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, **options: Any) -> Any:
        data, metadata = super()._repr_mimebundle_(**options) or ({}, {})
        data["text/plain"] = self.alt
        return data | {PAGE: page(self.name, self.data, self.alt)}, metadata


def widget(
    name: str,
    data: Any,
    alt: str,
    answer: Callable[[Any], Any] | None = None,
) -> Widget:
    """The widget of the module ``name``.js, with ``data`` that JSON can hold.

    ``alt`` says in words what one sees. ``answer``, if there is a kernel, is called
    with each question of the widget; what it returns goes back. Raises ValueError for
    a name without a module, or no words.
    """
    if not (HERE / f"{name}.js").is_file():
        raise ValueError(f"there is no {name}.js in {HERE.name}/")
    if not alt.strip():
        raise ValueError(f"the widget {name} has no text alternative")
    return Widget(name, answer, data=data, alt=alt)
