"""What every chapter needs besides the engine: figures, recorded numbers, timing."""

import inspect
import json
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

FIGURES = Path(__file__).resolve().parents[1] / "figures"
WIDTH = 80  # columns a chapter may print

# Okabe and Ito's palette, told apart with any common colour blindness; its yellow,
# too pale on white, comes last.
COLORS = (
    "#0072B2",  # blue
    "#D55E00",  # vermilion
    "#009E73",  # green
    "#CC79A7",  # purple
    "#56B4E9",  # sky
    "#E69F00",  # orange
    "#000000",
    "#F0E442",  # yellow
)

matplotlib.rcParams.update(
    {
        # Seven inches are 504 pt in the SVG: about 700 px on a page, at which the
        # smallest text stays 12 px tall.
        "figure.figsize": (7.0, 3.6),
        "figure.facecolor": "white",
        "figure.constrained_layout.use": True,
        "savefig.facecolor": "white",
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
        "legend.fontsize": 9,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        # The same picture gives the same bytes.
        "svg.hashsalt": "simplellm",
        "svg.fonttype": "path",
    }
)


def save_figure(fig: Figure, name: str, alt: str | None = None) -> None:
    """Write ``figures/NAME.svg``, byte for byte the same each time, and close ``fig``.

    ``alt`` becomes the SVG's own title, for screen readers that open the file.
    """
    FIGURES.mkdir(exist_ok=True)
    metadata: dict[str, str | None] = {"Date": None, "Creator": None}
    if alt is not None:
        metadata["Title"] = alt
    fig.savefig(FIGURES / f"{name}.svg", format="svg", metadata=metadata)
    plt.close(fig)


def recorded(name: str) -> Any:
    """The measurement recorded in ``figures/NAME.json``."""
    return json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))


def unwrapped(thing: Any) -> Any:
    """A function or class as it was written, without what wraps it."""
    if not inspect.isclass(thing):
        # The function of a property, a cached property, a Triton kernel.
        for inner in ("fget", "func", "fn"):
            thing = getattr(thing, inner, thing)
        thing = inspect.unwrap(thing)  # a decorator's file is another one
    return thing


def file_of(thing: Any) -> str:
    """The file that ``thing`` is written in, such as ``simplellm/ops.py``."""
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
        shell = sys.modules.get("IPython")  # scripts run without it
        if shell is None or shell.get_ipython() is None:
            print(plain)
            continue
        # Four backticks, because a docstring may hold three.
        data = {"text/markdown": f"`{name}`\n\n````python\n{code}\n````"}
        shell.display.display(data | {"text/plain": plain}, raw=True)


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
    """Print ``rows`` under ``headers``, numbers to the right, within 80 columns.

    Raises ValueError for a row of another length or a table that is too wide.
    """
    rows = [list(row) for row in rows]
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"row {row} has {len(row)} cells, expected {len(headers)}")
    cells = [[str(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if (width := sum(widths) + 2 * (len(widths) - 1)) > WIDTH:
        raise ValueError(f"the table is {width} columns wide, expected at most {WIDTH}")
    cells.insert(1, ["-" * width for width in widths])
    right = [
        bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        for i in range(len(headers))
    ]
    for row in cells:
        padded = (
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(row, widths, right, strict=True)
        )
        print("  ".join(padded).rstrip())
