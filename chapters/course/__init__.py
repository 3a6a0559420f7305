"""What every chapter needs besides the engine: checks, figures, numbers, timing."""

import base64
import difflib
import functools
import html
import inspect
import io
import json
import linecache
import os
import re
import signal
import statistics
import sys
import textwrap
import threading
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

import simplellm
from course import checks
from course.dark import with_dark_style
from simplellm.base.config import CheckpointError
from simplellm.checkpoint.packages import find_packaged

PACKAGE = str(Path(simplellm.__file__).parent)
PARENTS = Path(__file__).resolve().parents
# Beside chapters/ in the repository, beside this folder in a workbook.
FIGURES = next(f for p in PARENTS if (f := p / "figures").is_dir())
OURS = Path(__file__).with_name("ours.json")  # our versions; a workbook has them
# A cell of a column of numbers: 12, 1.06x, 58 %, 1,200 us, a dash or nothing.
QUANTITY = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?([x%]?| [\w%/]{1,6})$|[-\u2013]?$")
WIDTH = 80  # columns a chapter may print
CHECK_SECONDS = 60  # far more than a check takes, even on a busy machine
MESSAGE = 400  # characters of an exception that a reader is shown

# Okabe and Ito's palette, told apart with any common color blindness; its yellow,
# too pale on white, comes last.
COLORS = (
    "#0072B2",  # blue
    "#D55E00",  # vermilion
    "#009E73",  # green
    "#CC79A7",  # purple
    "#56B4E9",  # sky
    "#E69F00",  # orange
    "#1f2933",  # ink
    "#F0E442",  # yellow
)

INK = COLORS[6]
# Text is laid out in DejaVu, wider than what pages have, and shown in theirs.
FONTS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
IN_DEJAVU = re.compile(r"(?<=font-family: )'DejaVu Sans',[^;\"]*")

matplotlib.rcParams.update(
    {
        # Seven inches are 504 pt in the SVG: about 700 px on a page, at which the
        # smallest text stays 12 px tall.
        "figure.figsize": (7.0, 3.6),
        # A figure has the ground of its page, and INK is a color that dark.py knows.
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "figure.constrained_layout.use": True,
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.labelsize": 10,
        "axes.prop_cycle": cycler(color=COLORS),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": "#dddddd",
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.8,
        "image.cmap": "viridis",
        "legend.frameon": False,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "legend.fontsize": 9,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        # The same picture gives the same bytes.
        "svg.hashsalt": "simplellm",
        # Text stays text, in the page's font: see FONTS.
        "svg.fonttype": "none",
    }
)


class Verdict(Exception):
    """A check's answer to code that is not right; a notebook shows just its lines."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class NotYours(Verdict):
    """The code is still the stub."""


class Wrong(Verdict):
    """The code was written, and the check refuses it."""


class TooLong(BaseException):
    """No Exception, so that a bare loop around `except Exception` ends too."""


def check(name: str, candidate: Any) -> None:
    """Print "NAME: right" if the check of blank or exercise ``name`` accepts it.

    Raises as `judge`.
    """
    judge(name, candidate)
    print(f"{name}: right")
    if name not in about():
        return  # an exercise
    if OURS.exists():
        print(f'ours("{name}") shows how we wrote it.')
    else:
        print("Your own engine is written in the workbook: `make lab` opens it.")


def judge(name: str, candidate: Any) -> None:
    """Run the check of blank or exercise ``name``.

    Raises NotYours for a stub and Wrong for everything else, with the reason.
    """
    run = checks.find(name)
    try:
        with time_limit(CHECK_SECONDS):
            run(candidate)
    except (Exception, SystemExit, TooLong) as error:
        raise verdict(name, run, candidate, error) from None


@functools.cache
def about() -> dict[str, dict[str, Any]]:
    """Of each blank, by its name: the "minutes" that it may take, and a "hint"."""
    path = Path(__file__).with_name("blanks.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def hint(name: str) -> None:
    """Print a hint for blank ``name``."""
    if name not in about():
        near = difflib.get_close_matches(name, about(), 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise LookupError(f"there is no blank {name}{meant}")
    print(textwrap.fill(about()[name]["hint"], WIDTH))


def ours(name: str) -> None:
    """Show our version of blank ``name`` if the caller's own is right.

    A workbook has them; in the reading edition each is folded below its check.
    """
    if not OURS.exists():
        print(f"Our {name} is folded below its check: this is the reading edition.")
        return
    source = json.loads(OURS.read_text(encoding="utf-8"))[name]
    candidate = caller_names().get(name.partition(".")[0])
    if not is_own(name, candidate):
        print(f"Write your {name} first: once it is right, you can compare.")
        return
    try:
        judge(name, candidate)
    except Verdict as error:
        print(f"{error}\nOnce yours is right, you can compare.")
        return
    if not display({"text/markdown": f"````python\n{source}````"}, source):
        print(source)


def caller_names() -> dict[str, Any]:
    """The global names of the cell that called the function that calls this."""
    frame = inspect.currentframe()
    for _ in range(2):
        assert frame is not None
        frame = frame.f_back
    assert frame is not None
    return frame.f_globals


def is_own(name: str, candidate: Any) -> bool:
    """Whether ``candidate`` has a version of blank ``name`` that is not ours."""
    _, _, member = name.partition(".")
    thing = vars(candidate).get(member) if member and candidate else candidate
    code = getattr(unwrapped(thing), "__code__", None)
    return code is not None and not code.co_filename.startswith(("our ", PACKAGE))


def keep(name: str, candidate: Any) -> Any:
    """``candidate`` if its check accepts it, else the version that the course keeps.

    For the cells of a workbook, which have no kept version of their own: it is defined
    among the caller's names, from the file that `make workbook` writes beside this. Why
    it is refused, the check's own cell has told.
    """
    try:
        judge(name, candidate)
    except Verdict:
        print(f"From here on this page uses our {name}.")
    else:
        print(f"From here on this page uses your {name}.")
        return candidate
    names = caller_names()
    root, _, method = name.partition(".")
    if method and len(candidate.__bases__) == 1:
        names[root] = candidate.__bases__[0]  # ours adds to the class before the stub
    source = json.loads(OURS.read_text(encoding="utf-8"))[name]
    # Where Triton and tracebacks look for lines of code.
    file = f"our {name}"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), names)
    return names[root]


def run_mine(*prompts: str, model: str | None = None, form: Any = None) -> None:
    """Let the embedded model answer, on an engine with your functions in it.

    Yours are those that this notebook's checks found right; the others are ours. Prints
    the answers and how often the engine called each. `make mine` does the same with the
    functions of all chapters. Another ``model``, "smollm2", answers in a few words, if
    it `has_model`. In appendix B, ``form`` is an expression that answers have to fit.
    """
    names = caller_names()
    if model is not None and not has_model(model):
        return
    tools = str(Path(PACKAGE).parent / "tools")
    if tools not in sys.path:
        sys.path.append(tools)
    from mine import ask_here  # which imports this module

    ask_here(names, prompts, model, form)


def has_model(model: str) -> bool:
    """Whether a model is installed; if not, this says how to get it."""
    try:
        find_packaged(model)
    except CheckpointError as error:
        print(textwrap.fill(str(error), WIDTH))
        return False
    return True


def verdict(
    name: str, run: Callable[[Any], None], candidate: Any, error: BaseException
) -> Verdict:
    """What to tell a reader whose ``candidate`` made its check ``run`` raise."""
    root: BaseException | None = error
    while root is not None:
        # Triton's interpreter raises its own exception from the kernel's; its compiler
        # knows no `raise`, and quotes the line.
        quoted = "raise NotImplementedError" in str(root)
        if quoted or isinstance(root, NotImplementedError):
            return NotYours(f"{name}: not written yet")
        root = root.__cause__
    if isinstance(error, TooLong):
        reason = f"not done after {CHECK_SECONDS} s: it is too slow, or never ends"
        return Wrong(f"{name}: {reason}")
    frames = traceback.extract_tb(error.__traceback__)
    own = source_files(written(name, candidate))
    lines = [frame for frame in frames if frame.filename in own]
    if isinstance(error, AssertionError):
        judged = frames[-1].filename in source_files(run)
        if judged or not lines:
            asked = frames[-1].line  # the assertion itself says what was expected
            return Wrong(f"{name}: {str(error) or asked}")
    told = f"{name}: {type(error).__name__}: {error}"[:MESSAGE].rstrip(": ")
    if lines:
        number, code = lines[-1].lineno, (lines[-1].line or "").strip()
        told += f"\n  in your line {number}: {code}"
    return Wrong(told)


def written(name: str, candidate: Any) -> Any:
    """What a reader wrote for ``name``: a class's method, for "Scheduler.schedule".

    Its other methods are the course's cells, or other blanks.
    """
    _, _, member = name.partition(".")
    return inspect.getattr_static(candidate, member, candidate) if member else candidate


def source_files(thing: Any) -> set[str]:
    """The files, or notebook cells, that a function or a class's methods stand in."""
    members = list(vars(thing).values()) if inspect.isclass(thing) else [thing]
    codes = [getattr(unwrapped(member), "__code__", None) for member in members]
    files = {code.co_filename for code in codes if code is not None}
    return {file for file in files if not file.startswith(PACKAGE) and is_source(file)}


def is_source(file: str) -> bool:
    """Whether the lines of ``file`` can be shown; a dataclass's __init__ has none."""
    return bool(linecache.getlines(file))


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooLong in the body after ``seconds``, where there are timers."""
    main = threading.current_thread() is threading.main_thread()
    if not (main and hasattr(signal, "setitimer")):
        yield
        return

    def ring(number: int, frame: Any) -> None:
        raise TooLong

    start = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # a test run has a limit of its own
            left = max(left - (time.monotonic() - start), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval)


@contextmanager
def untimed() -> Iterator[None]:
    """Stop the clock of `time_limit` in the body, where no code of a reader's runs."""
    main = threading.current_thread() is threading.main_thread()
    if not (main and hasattr(signal, "setitimer")):
        yield
        return
    left = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)


def save_figure(fig: Figure, name: str, alt: str | None = None) -> None:
    """Show ``fig`` below the cell that draws it, and close it.

    ``figures/NAME.svg``, which the text shows, is written only where the environment
    has SAVE_FIGURES, so that running a chapter changes no file:

        make figures                                   all chapters'
        SAVE_FIGURES=1 .venv/bin/python -m pytest chapters/03-mxfp4.md

    The same figure gives the same bytes. ``alt`` becomes the SVG's own title, for
    screen readers that open the file.
    """
    picture = svg_of(fig, alt)
    if os.environ.get("SAVE_FIGURES"):
        FIGURES.mkdir(exist_ok=True)
        (FIGURES / f"{name}.svg").write_text(picture, encoding="utf-8")
    data = {"image/svg+xml": picture, "text/html": in_place(picture, name)}
    display(data, f"figure {name}", figure=name)


def svg_of(fig: Figure, title: str | None = None) -> str:
    """``fig`` as an SVG for light and dark pages, and close it."""
    metadata = {"Date": None, "Creator": None} | ({"Title": title} if title else {})
    drawn = io.StringIO()
    fig.savefig(drawn, format="svg", metadata=metadata)
    plt.close(fig)
    return with_dark_style(IN_DEJAVU.sub(FONTS, drawn.getvalue()))


def in_place(picture: str, name: str) -> str:
    """HTML that shows an SVG, in JupyterLab in the place of its committed twin.

    The twin stands in the text below, for who reads without running. It goes out of
    sight only, because its alternative text is that of both.
    """
    encoded = base64.b64encode(picture.encode()).decode()
    twin = f'.jp-Notebook:has([data-figure="{name}"]) img[src*="figures/{name}.svg"]'
    return (
        f"<style>{twin} {{position: absolute; width: 1px; opacity: 0}}</style>"
        f'<img data-figure="{name}" src="data:image/svg+xml;base64,{encoded}" alt="">'
    )


def display(data: dict[str, str], plain: str, **metadata: str) -> bool:
    """Show ``data``, by its MIME types, in a notebook; False where there is none."""
    shell = sys.modules.get("IPython")  # scripts run without it
    if shell is None or shell.get_ipython() is None:
        return False
    shell.display.display(data | {"text/plain": plain}, metadata=metadata, raw=True)
    return True


def recorded(name: str) -> Any:
    """The measurement recorded in ``figures/NAME.json``."""
    return json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))


def unwrapped(thing: Any) -> Any:
    """A function or class as it was written, without what wraps it."""
    if not inspect.isclass(thing):
        # The function of a property, a cached property, a Triton kernel.
        for inner in ("fget", "func", "fn", "__func__"):
            thing = getattr(thing, inner, thing)
        thing = inspect.unwrap(thing)  # a decorator's file is another one
    return thing


def file_of(thing: Any) -> str:
    """The file that ``thing`` is written in, such as ``simplellm/model/ops.py``."""
    thing = unwrapped(thing)
    package = sys.modules[thing.__module__.partition(".")[0]]
    file = Path(inspect.getsourcefile(thing) or "")
    return file.relative_to(Path(package.__file__ or "").parents[1]).as_posix()


def show(*objects: Any) -> None:
    """Show the code of the package's functions, classes and methods, with their files.

    A notebook renders it; elsewhere it is printed.
    """
    for thing in objects:
        name = file_of(thing)
        code = textwrap.dedent(inspect.getsource(unwrapped(thing))).rstrip()
        plain = f"{name}\n\n{code}"
        # Four backticks, because a docstring may hold three.
        markdown = f"`{name}`\n\n````python\n{code}\n````"
        if not display({"text/markdown": markdown}, plain):
            print(plain)


def bench(fn: Callable[[], Any], *, repeat: int = 5, warmup: int = 1) -> float:
    """Median wall time of ``fn()`` in seconds, the GPU's queued work included."""

    def once() -> float:
        start = time.perf_counter()
        fn()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(warmup):
        once()
    return statistics.median(once() for _ in range(repeat))


def table(rows: Iterable[Sequence[Any]], headers: Sequence[str]) -> None:
    """Show ``rows`` under ``headers``, columns of numbers to the right.

    A notebook shows a table; elsewhere it is text within 80 columns. Raises ValueError
    for a row of another length or a table that is too wide.
    """
    rows = [list(row) for row in rows]
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"row {row} has {len(row)} cells, expected {len(headers)}")
    cells = [[str(cell) for cell in row] for row in [headers, *rows]]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if (width := sum(widths) + 2 * (len(widths) - 1)) > WIDTH:
        raise ValueError(f"the table is {width} columns wide, expected at most {WIDTH}")
    right = [bool(rows) and all(map(QUANTITY.match, column[1:])) for column in columns]
    rule = ["-" * width for width in widths]
    plain = "\n".join(
        "  ".join(
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in [cells[0], rule, *cells[1:]]
    )
    if not display({"text/html": html_table(cells, right)}, plain):
        print(plain)


def html_table(cells: list[list[str]], right: list[bool]) -> str:
    """The rows of ``cells``, of which the first is the head, as a table in HTML."""
    aligned = ["right" if numeric else "left" for numeric in right]
    rows = (
        "".join(
            f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
            for cell, side in zip(row, aligned, strict=True)
        )
        for tag, row in zip(["th", *["td"] * (len(cells) - 1)], cells, strict=True)
    )
    head, *body = (f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"
