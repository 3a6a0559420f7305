"""Structured output: a trie with a mask's branches, masks in time, a turn's grammar."""

import re

from drawings.svg import (
    BLUE,
    EDGE,
    GREEN,
    INK,
    LINE,
    MARGIN,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    SMALL,
    VERMILION,
    Box,
    Drawing,
    shade,
)

TOKENS = ("1", "12", "123", "1}", "}", "},", "n", "nu", "null")
# The beginnings of what fits in the state: at most one more digit, then a brace.
BEGINNING = re.compile(r"[0-9]?\}?")


def trie() -> Drawing:
    """The vocabulary as a tree, and what a walk of it sees in one state."""
    d = Drawing("The trie of nine tokens, and the branches that a walk takes", 0)
    nodes = sorted({token[: i + 1] for token in TOKENS for i in range(len(token))})
    leaves = [n for n in nodes if not any(m.startswith(n) and m != n for m in nodes)]
    d.heading(MARGIN, 30, "one digit is read; at most one more may come, and then }")
    wide, tall, left, pitch = 104, 44, 150, 132
    places: dict[str, Box] = {}

    def row(node: str) -> float:
        below = [i for i, leaf in enumerate(leaves) if leaf.startswith(node)]
        return sum(below) / len(below)

    state = d.box(MARGIN, 56 + 60 * row(""), 84, tall, "state", color=BLUE)
    for node in nodes:
        fits = bool(BEGINNING.fullmatch(node))
        seen = bool(BEGINNING.fullmatch(node[:-1]))
        token = f"token {node}" if node in TOKENS else "no token"
        box = d.box(
            left + pitch * (len(node) - 1),
            56 + 60 * row(node),
            wide,
            tall,
            node[-1],
            token if seen else "not seen",
            color=GREEN if fits else (VERMILION if seen else None),
            ink=shade(GREEN) if fits else (shade(VERMILION) if seen else MUTED),
            dash=not seen,
        )
        places[node] = box
        above = places.get(node[:-1], state)
        color = GREEN if fits else (VERMILION if seen else EDGE)
        middle = (above.right + box.x) / 2
        if abs(above.cy - box.cy) < 1:
            d.arrow((above.right, above.cy), (box.x, box.cy), color=color)
        else:
            bends = (middle, above.cy), (middle, box.cy)
            d.arrow((above.right, above.cy), *bends, (box.x, box.cy), color=color)
    fitting = [token for token in TOKENS if BEGINNING.fullmatch(token)]
    d.height = d.prose(
        MARGIN,
        56 + 60 * len(leaves) + 8,
        f"Green bytes lead somewhere, so {', '.join(fitting[:-1])} and {fitting[-1]} "
        "are allowed. A red byte leads nowhere, and what hangs below it, dashed, is "
        "never looked at.",
    )
    return d


def lanes(d: Drawing, y: float, title: str, fill: float, wait: float) -> None:
    """A step's lanes: the masks take ``fill`` px, and the GPU waits ``wait``."""
    d.heading(MARGIN, y, title)
    begin, tall, forward, sample = 118, 34, 250, 84
    for name, lane in (("GPU", y + 24), ("CPU", y + 74)):
        d.text(MARGIN, lane + tall / 2, name, bold=True)
    gpu, cpu = y + 24, y + 74
    d.box(begin, gpu, forward, tall, "forward pass", color=PURPLE)
    at = begin + forward + wait
    if wait:
        d.box(begin + forward + 4, gpu, wait - 8, tall, "waits", dash=True, ink=MUTED)
    chosen = d.box(at, gpu, sample, tall, "sample", color=VERMILION)
    rest = 676 - chosen.right
    d.box(chosen.right, gpu, rest, tall, "next pass" if rest > 90 else "", color=PURPLE)
    advance = d.box(begin, cpu, 74, tall, "advance", color=SKY)
    masks = d.box(advance.right, cpu, fill, tall, "fill the masks", color=GREEN)
    copy = d.box(masks.right, cpu, 48, tall, "copy", color=ORANGE)
    d.arrow(
        (copy.right, copy.cy), (chosen.x + 16, copy.cy), (chosen.x + 16, chosen.bottom)
    )


def timeline() -> Drawing:
    """Forward pass, masks and sampling over time, with masks in time and late."""
    d = Drawing("When a step's masks are made", 0)
    lanes(d, 30, "masks in time: they cost nothing", 104, 0)
    lanes(d, 168, "masks too late: the whole batch waits", 220, 110)
    d.arrow((118, 300), (676, 300))
    d.note(676, 314, "time", anchor="end")
    d.height = d.prose(
        MARGIN,
        334,
        "The grammars advance by the tokens of the step before. From then on filling "
        "the masks needs nothing that this forward pass computes.",
    )
    return d


def pills(
    d: Drawing, x: float, y: float, words: list[tuple[str, ...]], gap: float = 14
) -> list[Box]:
    """A track of boxes: a control token, a word, or a text, by its first letters."""
    boxes: list[Box] = []
    for word, *more in words:
        control, text = word.startswith("<"), word.isupper() or word == "any text"
        fits = word.isupper()
        wide = float(more[0]) if more else 7.0 * len(word) + 14
        color = GREEN if fits else (PURPLE if control else (SKY if text else None))
        box = d.box(
            x,
            y,
            wide,
            30,
            word,
            color=color,
            size=SMALL,
            mono=not text,
            bold=fits,
            ink=shade(color) if color else INK,
            radius=14 if not text else 4,
        )
        if boxes:
            d.arrow((boxes[-1].right, box.cy), (box.x, box.cy))
        boxes.append(box)
        x = box.right + gap
    return boxes


def optional(d: Drawing, box: Box) -> None:
    """A track around a box."""
    left, right, below = box.x - 8, box.right + 7, box.bottom + 9
    d.line((left, box.cy), (left, below), (right, below), (right, box.cy))


def turn() -> Drawing:
    """The grammar of a harmony turn, as a railway."""
    d = Drawing("The grammar of a turn", 0)
    start, left = 36.0, 62.0
    d.heading(left, 30, "as often as the model likes")
    loop = pills(
        d,
        left,
        56,
        [
            ("<|channel|>",),
            ("analysis",),
            ("<|message|>",),
            ("any text", "70"),
            ("<|end|>",),
            ("<|start|>",),
            ("assistant",),
        ],
        gap=11,
    )
    other = d.box(
        loop[1].x - 4,
        96,
        loop[1].w + 8,
        30,
        "commentary",
        size=SMALL,
        mono=True,
        radius=14,
    )
    for x, box in ((other.x - 3, loop[0]), (other.right + 3, loop[2])):
        edge = other.x if box is loop[0] else other.right
        d.line((x, box.cy), (x, other.cy), (edge, other.cy))
    d.heading(left, 178, "then an answer, or a call")
    final = pills(
        d,
        left,
        200,
        [
            ("<|channel|>",),
            ("final",),
            ("<|constrain|> json", "146"),
            ("<|message|>",),
            ("ANSWER", "84"),
            ("<|return|>",),
        ],
    )
    optional(d, final[2])
    header = d.box(left, 268, 300, 46, color=None, radius=14)
    for line, words in enumerate(
        (
            " to=functions.NAME <|channel|> commentary",
            "<|channel|> commentary to=functions.NAME",
        )
    ):
        d.text(
            header.cx,
            header.cy - 9 + 18 * line,
            words.strip(),
            size=11,
            anchor="middle",
            mono=True,
            box=header,
        )
    call = pills(
        d,
        header.right + 14,
        276,
        [("<|message|>",), ("ARGUMENTS", "92"), ("<|call|>",)],
    )
    d.arrow((header.right, call[0].cy), (call[0].x, call[0].cy))
    # The tracks: into the loop and back, and on to the endings.
    d.dot(start, 148, 5, LINE)
    d.arrow((start, 148), (start, loop[0].cy), (loop[0].x, loop[0].cy))
    back = loop[-1].right + 10
    d.arrow(
        (loop[-1].right, loop[0].cy), (back, loop[0].cy), (back, 148), (start + 6, 148)
    )
    for row in (final[0], call[0]):
        d.arrow((start, 148), (start, row.cy), (left, row.cy))
    d.note(start + 12, 136, "start", anchor="start")
    d.height = d.prose(
        MARGIN,
        340,
        "Violet: control tokens, which no text holds. Green: the two texts that have "
        "to fit. The messages before, in blue, may be any text. In a call's header, "
        "too, json may be announced.",
    )
    return d


def drawings() -> dict[str, Drawing]:
    """By name."""
    return {"b-trie": trie(), "b-time": timeline(), "b-turn": turn()}
