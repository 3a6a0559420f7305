"""The course's drawings: made by code, legible, nothing on top of anything else."""

import math
import re
import sys
import tomllib
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from PIL import ImageFont

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "figures"
sys.path.insert(0, str(FIGURES))

from drawings.__main__ import ROOMS, rendered  # noqa: E402
from drawings.svg import WIDTH, Box, Drawing, Text  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
DRAWINGS: dict[str, Drawing] = {}
for room in ROOMS:
    DRAWINGS |= import_module(f"drawings.{room}").drawings()


@lru_cache
def font(mono: bool, bold: bool) -> ImageFont.FreeTypeFont:
    """DejaVu, wider than the fonts that systems use for their pages."""
    name = f"DejaVuSans{'Mono' if mono else ''}{'-Bold' if bold else ''}.ttf"
    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/{name}", 100)


def extent(text: Text) -> Box:
    """Where a text is, at its widest."""
    width = font(text.mono, text.bold).getlength(text.string) * text.size / 100
    left = text.x - width * {"start": 0, "middle": 0.5, "end": 1}[text.anchor]
    height = text.size * 0.8  # without the lowest part of g and p
    return Box(left, text.y - height / 2, width, height)


def inside(inner: Box, outer: Box, room: float) -> bool:
    return (
        inner.x >= outer.x + room
        and inner.right <= outer.right - room
        and inner.y >= outer.y
        and inner.bottom <= outer.bottom
    )


def apart(one: Box, other: Box, by: float = 0) -> bool:
    return (
        one.right + by <= other.x
        or other.right + by <= one.x
        or one.bottom <= other.y
        or other.bottom <= one.y
    )


def crosses(line: tuple[tuple[float, float], tuple[float, float]], box: Box) -> bool:
    """Whether a straight line goes through a box."""
    (x0, y0), (x1, y1) = line
    steps = max(1, math.ceil(math.hypot(x1 - x0, y1 - y0)))
    points = ((x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(steps + 1))
    return any(box.x < x < box.right and box.y < y < box.bottom for x, y in points)


def test_committed_files_are_what_the_code_draws() -> None:
    for name, svg in rendered().items():
        committed = (FIGURES / f"{name}.svg").read_text(encoding="utf-8")
        assert committed == svg, f"{name}.svg is stale: python figures/drawings"


def test_every_drawing_has_alt_text_and_every_alt_text_a_drawing() -> None:
    alt = tomllib.loads((FIGURES / "drawings" / "alt.toml").read_text("utf-8"))
    assert list(alt) == list(DRAWINGS)
    for name, text in alt.items():
        assert 40 <= len(text) <= 900 and text.endswith("."), name


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_file_says_what_it_shows_and_is_as_wide_as_a_page(name: str) -> None:
    root = ElementTree.parse(FIGURES / f"{name}.svg").getroot()
    for tag in "title", "desc":
        found = root.find(f"{SVG}{tag}")
        assert found is not None and found.text
    assert root.get("width") == str(WIDTH) == "700"
    assert root.get("viewBox") == f"0 0 700 {root.get('height')}"
    sizes = [float(text.get("font-size", 0)) for text in root.iter(f"{SVG}text")]
    assert sizes and min(sizes) >= 11
    assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg)", rendered()[name])


@pytest.mark.parametrize("name", DRAWINGS)
def test_no_text_leaves_its_box_or_meets_anything(name: str) -> None:
    drawing = DRAWINGS[name]
    page = Box(0, 0, WIDTH, drawing.height)
    placed = [(text, extent(text)) for text in drawing.texts]
    for text, place in placed:
        assert inside(place, page, 10), f"{text.string!r} leaves the page"
        if text.box is not None:
            assert inside(place, text.box, 1), f"{text.string!r} leaves its box"
        for box in drawing.boxes:
            clear = inside(place, box, 0) or apart(place, box)
            assert clear, f"{text.string!r} is on the edge of {box}"
        for line in drawing.lines:
            assert not crosses(line, place), f"{text.string!r} is on a line, {line}"
    for i, (text, place) in enumerate(placed):
        for other, elsewhere in placed[:i]:
            clear = apart(place, elsewhere, by=3)
            assert clear, f"{text.string!r} is on {other.string!r}"
