"""Other models: one layer, with a number where some family does something else."""

from drawings.svg import (
    BLUE,
    GREEN,
    INK,
    MARGIN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Box,
    Drawing,
    mix,
)

LEFT, WIDE, TALL, PITCH = 130, 250, 34, 48
# What a layer does: words, the color of its kind, the switch, what families say.
PARTS = (
    ("norm", BLUE, 1, "RMS, mean and bias, 1 + w"),
    ("q, k and v", ORANGE, 2, "with a bias or without"),
    ("norm of q's and k's heads", BLUE, 3, "or none"),
    ("rotation", PURPLE, 4, "plain, stretched; or learned positions"),
    ("attention", GREEN, 5, "window, sinks, scale of scores"),
    ("output projection", ORANGE, 2, "with a bias or without"),
    ("norm of the update", BLUE, 6, "or none"),
    ("norm", BLUE, 1, "as above"),
    ("router", SKY, 7, "softmax before or after the choice, or none"),
    ("gate and up", ORANGE, 7, "of experts, or of one network"),
    ("activation", VERMILION, 8, "SwiGLU, GeGLU, GELU; clamped"),
    ("down", ORANGE, 7, "of experts, or of one network"),
    ("norm of the update", BLUE, 6, "or none"),
)
HALF = 7  # parts of attention, with their norms


def block() -> Drawing:
    """A layer from top to bottom beside its residual stream."""
    d = Drawing("One layer, and the switches between families", 0)
    d.heading(MARGIN, 28, "one layer")
    boxes: list[Box] = []
    y, stream = 52.0, 60.0
    for number, (name, color, switch, said) in enumerate(PARTS):
        y += 30 if number == HALF else 0
        box = d.box(LEFT, y, WIDE, TALL, name, color=color)
        d.badge(LEFT + WIDE + 24, box.cy, str(switch), mix(color, INK, 0.25))
        d.note(LEFT + WIDE + 44, box.cy, said)
        if number not in (0, HALF):
            d.arrow((box.cx, boxes[-1].bottom), (box.cx, box.y))
        boxes.append(box)
        y += PITCH
    end = boxes[-1].bottom + 26
    at = 44.0
    for first, last in ((0, HALF - 1), (HALF, len(boxes) - 1)):
        start, stop = boxes[first], boxes[last]
        d.arrow((stream, start.cy), (start.x, start.cy))
        d.arrow((stream, at), (stream, stop.cy - 12))
        d.arrow((stop.x, stop.cy), (stream + 12, stop.cy))
        d.badge(stream, stop.cy, "+", INK)
        at = stop.cy + 12
    d.arrow((stream, at), (stream, end))
    d.height = d.prose(
        MARGIN,
        end + 22,
        "The line at the left is what a layer reads and adds to. A box that a family "
        "doesn't have is left out; the rest of the layer stays as it is.",
    )
    return d


def drawings() -> dict[str, Drawing]:
    """By name."""
    return {"c-block": block()}
