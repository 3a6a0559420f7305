"""The few shapes that the course's drawings are made of, and their one style.

Lengths are in px on a page 700 px wide. A drawing remembers where its texts, boxes and
lines are, so that a test can find what collides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from itertools import pairwise
from typing import Literal

import matplotlib
from course import COLORS, FONTS, INK
from course.dark import with_dark_style
from PIL import ImageFont

BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE = COLORS[:6]
MUTED = "#52606d"
LINE = "#7b8794"  # arrows
EDGE = "#b4bcc6"  # of boxes that nothing singles out
PANEL = "#f5f7f9"  # what lies behind a group of boxes
WHITE = "#ffffff"

WIDTH = 700
MARGIN = 24
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SIZE = 12.5  # of ordinary text
SMALL = 11.5  # of notes; nothing is smaller than 11
BASELINE = 0.36  # of a text's size, from its middle down to its baseline

Anchor = Literal["start", "middle", "end"]
Point = tuple[float, float]


def mix(color: str, other: str, share: float) -> str:
    """``color`` with ``share`` of it replaced by ``other``."""
    one, two = ([int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (color, other))
    mixed = [round(a + (b - a) * share) for a, b in zip(one, two, strict=True)]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def tint(color: str, share: float = 0.86) -> str:
    """A background of this color, pale enough for text."""
    return mix(color, WHITE, share)


def shade(color: str) -> str:
    """The color, dark enough to be read as text."""
    return mix(color, INK, 0.45)


@lru_cache
def font(mono: bool, bold: bool) -> ImageFont.FreeTypeFont:
    """DejaVu, wider than the fonts that systems use for their pages."""
    name = f"DejaVuSans{'Mono' if mono else ''}{'-Bold' if bold else ''}.ttf"
    path = f"{matplotlib.get_data_path()}/fonts/ttf/{name}"
    return ImageFont.truetype(path, 100, layout_engine=ImageFont.Layout.BASIC)


def width_of(string: str, size: float, mono: bool = False, bold: bool = False) -> float:
    """How wide a text is at its widest."""
    return font(mono, bold).getlength(string) * size / 100


def number(value: float) -> str:
    """As short as two decimals allow."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Box:
    """A rectangle on the page."""

    x: float
    y: float
    w: float
    h: float

    @property
    def right(self) -> float:
        return self.x + self.w

    @property
    def bottom(self) -> float:
        return self.y + self.h

    @property
    def cx(self) -> float:
        return self.x + self.w / 2

    @property
    def cy(self) -> float:
        return self.y + self.h / 2


@dataclass(frozen=True)
class Text:
    """A line of text: ``x`` is its anchor, ``y`` its middle."""

    x: float
    y: float
    string: str
    size: float
    anchor: Anchor
    mono: bool
    bold: bool
    box: Box | None  # what it must not leave


@dataclass
class Drawing:
    """An SVG that grows shape by shape, what comes later on top.

    ``title`` and ``alt`` are for who does not see it.
    """

    title: str
    height: float
    texts: list[Text] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    lines: list[tuple[Point, Point]] = field(default_factory=list)
    body: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        string: str,
        *,
        size: float = SIZE,
        anchor: Anchor = "start",
        mono: bool = False,
        bold: bool = False,
        color: str = INK,
        box: Box | None = None,
    ) -> None:
        """Text whose middle is at height ``y``."""
        self.texts.append(Text(x, y, string, size, anchor, mono, bold, box))
        style = f' text-anchor="{anchor}"' if anchor != "start" else ""
        style += ' class="m"' if mono else ""
        style += ' font-weight="600"' if bold else ""
        self.body.append(
            f'<text x="{number(x)}" y="{number(y + size * BASELINE)}" '
            f'font-size="{number(size)}" fill="{color}"{style}>{escape(string)}</text>'
        )

    def note(self, x: float, y: float, *lines: str, anchor: Anchor = "start") -> None:
        """Small gray lines, the first with its middle at ``y``."""
        for i, line in enumerate(lines):
            self.text(x, y + 15 * i, line, size=SMALL, anchor=anchor, color=MUTED)

    def prose(self, x: float, y: float, string: str) -> float:
        """Small gray text in as many lines as it takes; where the page may end."""
        lines = [""]
        for word in string.split(" "):
            longer = f"{lines[-1]} {word}".lstrip()
            if x + width_of(longer, SMALL) > WIDTH - MARGIN:
                lines.append(word)
            else:
                lines[-1] = longer
        self.note(x, y, *lines)
        return y + 15 * len(lines) + 12

    def heading(self, x: float, y: float, string: str, color: str = INK) -> None:
        """What a part of the drawing is about."""
        self.text(x, y, string, size=13.5, bold=True, color=color)

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *lines: str,
        color: str | None = None,
        fill: str | None = None,
        stroke: float = 1,
        size: float = SIZE,
        mono: bool = False,
        bold: bool = False,
        ink: str = INK,
        radius: float = 6,
        dash: bool = False,
    ) -> Box:
        """A rounded box in a tint of ``color`` with centered lines of text.

        The first of several lines is bold, the others are small.
        """
        box = Box(x, y, w, h)
        self.boxes.append(box)
        fill = fill or (tint(color) if color else WHITE)
        style = ' stroke-dasharray="4 3"' if dash else ""
        self.body.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(w)}" '
            f'height="{number(h)}" rx="{number(radius)}" fill="{fill}" '
            f'stroke="{color or EDGE}" stroke-width="{number(stroke)}"{style}/>'
        )
        self.fill(box, *lines, size=size, mono=mono, bold=bold, ink=ink)
        return box

    def fill(
        self,
        box: Box,
        *lines: str,
        size: float = SIZE,
        mono: bool = False,
        bold: bool = False,
        ink: str = INK,
        left: float = 0,
    ) -> None:
        """Centered lines in a box, the first of several bold, the others small."""
        pitch = 15.5
        y = box.cy - pitch * (len(lines) - 1) / 2
        for i, line in enumerate(lines):
            first = i == 0
            self.text(
                box.cx + left / 2,
                y + pitch * i,
                line,
                size=size if first else SMALL,
                anchor="middle",
                mono=mono,
                bold=first and (bold or len(lines) > 1),
                color=ink if first else mix(ink, WHITE, 0.12),
                box=box,
            )

    def panel(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str = PANEL,
        edge: str = "none",
    ) -> Box:
        """A quiet background for a group of boxes."""
        self.body.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(w)}" '
            f'height="{number(h)}" rx="10" fill="{fill}" stroke="{edge}"/>'
        )
        box = Box(x, y, w, h)
        self.boxes.append(box)
        return box

    def cells(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        values: Sequence[object],
        *,
        colors: Sequence[str | None] | str | None = None,
        size: float = SMALL,
        mono: bool = True,
        bold: bool = False,
        gap: float = 0,
    ) -> list[Box]:
        """A row of equal cells, each with a value; None leaves a cell empty."""
        cells = []
        for i, value in enumerate(values):
            color = colors if colors is None or isinstance(colors, str) else colors[i]
            lines = () if value is None else (str(value),)
            left = x + i * (w + gap)
            box = self.box(left, y, w, h, color=color, radius=3)
            self.fill(box, *lines, size=size, mono=mono, bold=bold)
            cells.append(box)
        return cells

    def badge(
        self, x: float, y: float, string: str, color: str, size: float = 10
    ) -> None:
        """A filled circle with a number or letter in it."""
        self.body.append(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(size)}" '
            f'fill="{color}"/>'
        )
        box = Box(x - size, y - size, 2 * size, 2 * size)
        self.text(
            x, y, string, size=11, anchor="middle", bold=True, color=WHITE, box=box
        )

    def dot(self, x: float, y: float, radius: float, color: str) -> None:
        """A filled circle."""
        self.body.append(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" '
            f'fill="{color}"/>'
        )

    def line(
        self, *points: Point, color: str = LINE, width: float = 1.3, dash: bool = False
    ) -> None:
        """Straight pieces through ``points``, round at the corners."""
        self.lines += pairwise(points)
        path = f"M{number(points[0][0])} {number(points[0][1])}"
        for before, at, after in zip(points, points[1:], points[2:], strict=False):
            into, out = (toward(at, other, 7) for other in (before, after))
            path += f"L{number(into[0])} {number(into[1])}"
            path += f"Q{number(at[0])} {number(at[1])} "
            path += f"{number(out[0])} {number(out[1])}"
        path += f"L{number(points[-1][0])} {number(points[-1][1])}"
        style = ' stroke-dasharray="4 3"' if dash else ""
        self.body.append(
            f'<path d="{path}" fill="none" stroke="{color}" '
            f'stroke-width="{number(width)}"{style}/>'
        )

    def arrow(
        self,
        *points: Point,
        color: str = LINE,
        width: float = 1.3,
        dash: bool = False,
        both: bool = False,
    ) -> None:
        """A line with a head at its end, or at ``both`` ends."""
        inner = list(points)
        heads = [(points[-2], points[-1], len(points) - 1)]
        if both:
            heads.append((points[1], points[0], 0))
        for start, end, place in heads:
            inner[place] = toward(end, start, 5)
        self.line(*inner, color=color, width=width, dash=dash)
        for start, end, _ in heads:
            back, side = toward(end, start, 7.5), 3.4
            length = max(abs(end[0] - back[0]) + abs(end[1] - back[1]), 1e-9)
            across = (
                (end[1] - back[1]) / length * side,
                (end[0] - back[0]) / length * side,
            )
            corners = (
                end,
                (back[0] + across[0], back[1] - across[1]),
                (back[0] - across[0], back[1] + across[1]),
            )
            shape = " ".join(f"{number(x)},{number(y)}" for x, y in corners)
            self.body.append(f'<polygon points="{shape}" fill="{color}"/>')

    def curve(self, points: Sequence[Point], color: str, width: float = 1.8) -> None:
        """A line through many points, as of a function."""
        path = "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self.body.append(
            f'<path d="M{path}" fill="none" stroke="{color}" '
            f'stroke-width="{number(width)}"/>'
        )

    def bracket(
        self, left: float, right: float, y: float, label: str, *, below: bool = True
    ) -> None:
        """A bracket over or under a span, and what the span is."""
        down = 1 if below else -1
        points = (left, y), (left, y + 5 * down), (right, y + 5 * down), (right, y)
        self.line(*points, width=1)
        middle = (left + right) / 2
        self.note(middle, y + 15 * down, label, anchor="middle")

    def svg(self, alt: str) -> str:
        """The file's text; ``alt`` says in words what it shows."""
        height = number(self.height)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" '
            f'height="{height}" viewBox="0 0 {WIDTH} {height}" role="img" '
            'aria-labelledby="title desc">\n'
            f'<title id="title">{escape(self.title)}</title>\n'
            f'<desc id="desc">{escape(alt)}</desc>\n'
            f"<style>text{{font-family:{FONTS}}}.m{{font-family:{MONO}}}</style>\n"
        )
        return with_dark_style(head + "\n".join(self.body) + "\n</svg>\n")


def toward(start: Point, end: Point, length: float) -> Point:
    """The point ``length`` from ``start`` on the way to ``end``, at most half-way."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    whole = (dx * dx + dy * dy) ** 0.5
    share = min(0.5, length / whole) if whole else 0
    return start[0] + dx * share, start[1] + dy * share
