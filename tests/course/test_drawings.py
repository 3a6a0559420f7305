"""The course's drawings: made by code, legible, nothing on top of anything else."""

import math
import re
import tomllib
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from drawings.__main__ import ROOMS, rendered
from drawings.chat import ANSWER, QUESTION, THOUGHT
from drawings.model import HOPS, SMALL_MODEL
from drawings.svg import WIDTH, Box, Drawing, Text, width_of
from drawings.weights import real_weight, sources

from simplellm import LLM
from simplellm.checkpoint.families.gpt_oss import GPT_OSS_120B
from simplellm.checkpoint.names import tensor_shapes
from simplellm.model.memory import weight_bytes

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "figures"
SVG = "{http://www.w3.org/2000/svg}"
RENDERED = rendered()
DRAWINGS: dict[str, Drawing] = {}
for room in ROOMS:
    DRAWINGS |= import_module(f"drawings.{room}").drawings()


def extent(text: Text) -> Box:
    """Where a text is, at its widest."""
    width = width_of(text.string, text.size, text.mono, text.bold)
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
    points = (
        (x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps)
        for i in range(steps + 1)
    )
    return any(box.x < x < box.right and box.y < y < box.bottom for x, y in points)


def test_committed_files_are_what_the_code_draws() -> None:
    for name, svg in RENDERED.items():
        committed = (FIGURES / f"{name}.svg").read_text(encoding="utf-8")
        assert committed == svg, f"{name}.svg is stale: python figures/drawings"


@pytest.mark.parametrize("path", sorted(FIGURES.glob("*.svg")), ids=lambda p: p.stem)
def test_a_figure_has_its_pages_ground(path: Path) -> None:
    """It has colors for dark pages, and no white ground; a terminal has its own."""
    svg = path.read_text(encoding="utf-8")
    if path.stem != "demo":
        assert "(prefers-color-scheme:dark)" in svg
        assert not re.search(r'id="patch_1">\s*<path[^>]*fill: #ffffff', svg)


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
    assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg)", RENDERED[name])


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


def strings(name: str) -> list[str]:
    """What is written in a drawing."""
    return [text.string for text in DRAWINGS[name].texts]


def test_the_model_s_shapes_and_bytes() -> None:
    written = strings("model")
    for config in GPT_OSS_120B, SMALL_MODEL:
        for ours, shape in tensor_shapes(config).items():
            if not ours.endswith("bias") and not re.match(r"layers\.[1-9]", ours):
                assert str(list(shape)) in written, ours
    sizes = weight_bytes(GPT_OSS_120B)  # its norms are float32: 0.0006 % more
    whole = sum(sizes.values())
    used = whole - sizes["embedding"] - sizes["experts"] * 124 // 128
    for nbytes in whole, used:
        rounded = f"{nbytes / 1e9:.1f} GB"
        assert rounded in (
            f"{float(s[:-3]):.1f} GB" for s in written if s[-3:] == " GB"
        )
    alt = tomllib.loads((FIGURES / "drawings" / "alt.toml").read_text("utf-8"))
    assert f"Of {whole / 1e9:.1f} GB a token reads {used / 1e9:.0f} GB." in alt["model"]


def test_a_request_takes_the_hops_of_the_house() -> None:
    readme = (ROOT / "simplellm" / "README.md").read_text("utf-8")
    hops = re.findall(r"^\| \d+ \| `([^`]+)` \| `[\w/]+\.py` \|", readme, re.M)
    assert [name for _, name, _ in HOPS] == hops


def test_the_conversation_is_real() -> None:
    with LLM() as llm:
        choice = llm.chat([{"role": "user", "content": QUESTION}]).choices[0]
    assert (choice.reasoning, choice.content) == (THOUGHT, ANSWER)


def test_each_bit_of_the_repacked_words_has_one_place() -> None:
    found = sources()
    assert sorted(found) == [(word, bit) for word in "ab" for bit in range(32)]
    assert len(set(found.values())) == 64
    for register in range(8):
        bits = sorted(bit for r, bit in found.values() if r == register)
        assert bits == [6, 7, 8, 15, 22, 23, 24, 31]


def test_the_block_is_the_model_s_first() -> None:
    weight = real_weight()
    written = strings("03-mxfp4-block")
    codes = weight.blocks[0, 0, 0].tolist()
    assert [f"{code:02x}" for code in codes] == written[2:18]
    values = weight.dequantize(torch.float32)[0, 0, :32].tolist()
    shown = [s for s in written if re.match(r"[01]{4}:", s)]
    places = [int(s.split()[1]) for s in written if s.startswith("weight ")]
    for string, place in zip(shown, places, strict=True):
        assert float(string.split("= ")[1]) == values[place]


def test_the_sink_s_softmax() -> None:
    written = strings("05-sink")
    plain = torch.tensor([2.0, 1.0, 0.0]).softmax(0).tolist()
    four = torch.tensor([2.0, 1.0, 0.0, 1.0]).softmax(0).tolist()
    for value in [*plain, *four]:
        assert f"{value:.3f}" in written
    assert f"{sum(four[:3]):.3f}" in " ".join(written)
