"""Attention: grouped heads, a rotating pair, the sink's column."""

import math

from drawings.svg import (
    BLUE,
    EDGE,
    GREEN,
    LINE,
    MARGIN,
    MUTED,
    ORANGE,
    SMALL,
    VERMILION,
    WHITE,
    Drawing,
    mix,
    number,
    shade,
)
from simplellm.checkpoint.families.gpt_oss import GPT_OSS_120B
from simplellm.checkpoint.names import axes
from simplellm.model.memory import position_bytes
from simplellm.model.rope import yarn_frequencies


def heads() -> Drawing:
    """Which query heads read which keys and values."""
    config = GPT_OSS_120B
    dim, queries = config.head_dim, config.num_attention_heads
    kv_heads = config.num_key_value_heads
    group = queries // kv_heads
    size = axes(config)
    d = Drawing("Grouped heads: eight query heads share a kv head", 424)

    # The row of numbers that the projection gives.
    d.heading(MARGIN, 34, "one token's q, k and v")
    left, top = MARGIN, 56
    d.box(left, top, 436, 30, f"q: {queries} heads of {dim}", color=BLUE, radius=3)
    d.box(left + 436, top, 108, 30, f"k: {kv_heads} heads", color=GREEN, radius=3)
    d.box(left + 544, top, 108, 30, f"v: {kv_heads} heads", color=ORANGE, radius=3)
    d.bracket(left, left + 434, top + 34, f"{size['Q']} numbers")
    d.bracket(left + 438, left + 542, top + 34, f"{size['KV']}")
    d.bracket(left + 546, left + 652, top + 34, f"{size['KV']}")

    # Groups of query heads.
    d.heading(MARGIN, 148, f"query head h reads kv head h // {group}")
    y, wide = 192, 22
    shown = ((0, MARGIN), (1, MARGIN + 206), (kv_heads - 1, 494.0))
    for kv, x in shown:
        first = kv * group
        strip = [str(first + i) for i in range(group)]
        d.cells(x, y, wide, 26, strip, colors=BLUE, size=11)
        span = group * wide
        d.note(x + span / 2, y - 11, "query heads", anchor="middle")
        key = d.box(x + 4, y + 92, span / 2 - 8, 46, f"k {kv}", f"[{dim}]", color=GREEN)
        value = d.box(
            x + span / 2 + 4,
            y + 92,
            span / 2 - 8,
            46,
            f"v {kv}",
            f"[{dim}]",
            color=ORANGE,
        )
        middle = x + span / 2
        for i in range(group):
            start = x + wide * (i + 0.5), y + 27
            d.line(start, (middle, y + 62), width=1)
        d.arrow((middle, y + 62), (middle, y + 88))
        d.bracket(key.x, value.right, y + 142, f"kv head {kv}")
    d.text(452, y + 13, "…", size=18, anchor="middle", color=MUTED)
    d.text(452, y + 115, "…", size=18, anchor="middle", color=MUTED)

    kept = position_bytes(config, 2)
    d.height = d.prose(
        MARGIN,
        y + 186,
        f"Kept per position and layer: 2 * {kv_heads} heads * {dim} numbers * "
        f"2 bytes = {kept:,} bytes. With {queries} heads of keys and values it "
        f"would be {kept * group:,}.",
    )
    return d


def rope() -> Drawing:
    """A pair of a fast and of a slow frequency at three positions."""
    frequencies, _ = yarn_frequencies(GPT_OSS_120B)
    rows = ((0, BLUE), (5, VERMILION))
    d = Drawing("A rotating pair at positions 0, 1 and 2", 420)
    radius, pitch, left = 44, 112, 134
    headings = (
        "position 0",
        "position 1",
        "position 2",
        "k at 1, q at 3",
        "k at 4, q at 6",
    )
    for column, heading in enumerate(headings):
        x = left + 44 + pitch * column
        d.text(x, 34, heading, size=SMALL, anchor="middle", color=MUTED)

    def dial(x: float, y: float, angles: tuple[tuple[float, str, str], ...]) -> None:
        d.body.append(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="{radius}" fill="{WHITE}" '
            f'stroke="{EDGE}"/>'
        )
        d.body.append(
            f'<path d="M{number(x - radius)} {number(y)}h{2 * radius}M{number(x)} '
            f'{number(y - radius)}v{2 * radius}" stroke="{mix(EDGE, WHITE, 0.5)}"/>'
        )
        for angle, color, name in angles:
            turn = math.cos(angle), -math.sin(angle)
            tip = x + turn[0] * radius, y + turn[1] * radius
            d.arrow((x, y), tip, color=color, width=2)
            if name:
                at = x + turn[0] * (radius + 9), y + turn[1] * (radius + 9)
                d.text(*at, name, size=SMALL, mono=True, anchor="middle", bold=True)

    for row, (pair, color) in enumerate(rows):
        y = 100 + 128 * row
        frequency = float(frequencies[pair])
        d.text(MARGIN, y - 16, f"pair {pair}", bold=True, color=shade(color))
        d.text(MARGIN, y + 3, f"{frequency:.3g} radian", size=SMALL, color=MUTED)
        d.text(MARGIN, y + 19, "per position", size=SMALL, color=MUTED)
        start = 0.35  # where the pair points before it is turned
        for position in range(3):
            x = left + 44 + pitch * position
            angle = start + frequency * position
            if position:
                dial(x, y, ((start, mix(color, WHITE, 0.75), ""), (angle, color, "")))
            else:
                dial(x, y, ((angle, color, ""),))
        for i, (key, query) in enumerate(((1, 3), (4, 6))):
            x = left + 44 + pitch * (3 + i)
            turns = [
                start + frequency * (key + (query - key) * s / 20) for s in range(21)
            ]
            arc = [(x + 18 * math.cos(a), y - 18 * math.sin(a)) for a in turns]
            d.curve(arc, LINE, 1.5)
            dial(
                x,
                y,
                (
                    (start + frequency * key, GREEN, "k"),
                    (start + frequency * query, color, "q"),
                ),
            )
    d.height = d.prose(
        MARGIN,
        300,
        "A position turns dimension i and dimension i + 32 of a head together, "
        "each pair at its own speed: pair 0 the fastest, pair 31 the slowest. "
        "Three positions further on, query and key point elsewhere, but the angle "
        "between them is the same: their product depends on how far apart they "
        "are, not on where.",
    )
    return d


def sink() -> Drawing:
    """A softmax of three scores, without a sink and with one."""
    scores, sink_logit = (2.0, 1.0, 0.0), 1.0
    powers = [math.exp(score) for score in scores]
    extra = math.exp(sink_logit)
    plain = [power / sum(powers) for power in powers]
    total = sum(powers) + extra
    weights = [power / total for power in [*powers, extra]]
    colors = (BLUE, GREEN, ORANGE, EDGE)
    d = Drawing("The sink's column in a softmax", 400)
    left, wide = 150, 98
    for i, string in enumerate(("token 0", "token 1", "token 2", "sink", "sum")):
        x = left + (wide + 6) * i + (10 if i > 3 else 0)
        d.text(x + wide / 2, 34, string, bold=True, anchor="middle")

    def row(y: float, string: str, values: list[float | None], show: str) -> None:
        d.text(MARGIN, y + 15, string, size=SMALL, color=MUTED)
        for i, value in enumerate(values):
            x: float = left + (wide + 6) * i
            if value is None:
                d.box(x, y, wide, 30, dash=True, radius=3)
            else:
                text = format(value, show)
                d.cells(x, y, wide, 30, [text], colors=colors[i], size=12.5)
        found = [value for value in values if value is not None]
        if show != "g":
            x = left + (wide + 6) * 4 + 10 + wide / 2
            text = format(sum(found), show)
            if show == ".2f":
                text = f"{sum(found[:3]):.2f} + {found[3]:.2f}"
            d.text(x, y + 15, text, mono=True, size=12.5, anchor="middle")

    row(56, "scores", [*scores, sink_logit], "g")
    row(98, "e to that power", [*powers, extra], ".2f")

    def bar(y: float, shares: list[float]) -> None:
        x: float = left
        whole = 4 * wide + 18
        for i, share in enumerate(shares):
            box = d.box(
                x,
                y,
                whole * share,
                20,
                *(["dropped"] if i == 3 else []),
                color=colors[i],
                radius=2,
                dash=i == 3,
                size=SMALL,
                ink=MUTED,
            )
            x = box.right

    d.heading(MARGIN, 162, "without the sink")
    row(182, "weights", [*plain, None], ".3f")
    bar(220, plain)
    d.heading(MARGIN, 276, "with it")
    row(296, "softmax of four", list(weights), ".3f")
    bar(334, weights)
    d.height = d.prose(
        MARGIN,
        378,
        "The sink has no value, so its column is dropped: the weights that count "
        f"add up to {sum(weights[:3]):.3f}. A head that finds nothing worth reading "
        "can give almost nothing that way. Each head has learned the score of its "
        "own sink.",
    )
    return d


def drawings() -> dict[str, Drawing]:
    """By name."""
    return {"05-heads": heads(), "05-rope": rope(), "05-sink": sink()}
