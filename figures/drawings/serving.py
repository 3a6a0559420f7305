"""Serving: a token's way from the engine's step to the client's screen."""

from itertools import pairwise

from drawings.svg import (
    BLUE,
    GREEN,
    MARGIN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Drawing,
    shade,
)

# Where a token is, what it has become there, and who waits for what.
HOPS = (
    (
        PURPLE,
        "engine: a step",
        "a token for each request",
        "waits for nobody: what it tells",
        "goes into a queue without end",
    ),
    (
        BLUE,
        "text thread: the reply",
        "tokens become parts of text",
        "waits for the next token",
        "of any request",
    ),
    (
        VERMILION,
        "inbox: one for each reply",
        "parts that wait become one",
        "the only place where anything",
        "piles up: a few parts, no more",
    ),
    (
        GREEN,
        "event loop: the handler",
        "parts become events",
        "waits in send until there is room,",
        "for this client and no other",
    ),
    (
        ORANGE,
        "buffers: server, system",
        "bytes, some hundred KB",
        "full when the client doesn't read:",
        "only then does send wait",
    ),
    (
        SKY,
        "client",
        "bytes become events again",
        "reads when it wants to,",
        "or leaves",
    ),
)


def way() -> Drawing:
    """Six places of a token, from top to bottom, and who waits at each."""
    d = Drawing("A token's way to the screen, and who waits where", 0)
    left, wide, tall, pitch = MARGIN, 236, 48, 74
    d.heading(left, 30, "where a token is")
    d.heading(330, 30, "who waits there")
    y = 50.0
    boxes = []
    for color, place, becomes, *waits in HOPS:
        box = d.box(left, y, wide, tall, place, becomes, color=color, ink=shade(color))
        d.text(330, box.cy - 8, waits[0])
        d.text(330, box.cy + 8, waits[1])
        boxes.append(box)
        y += pitch
    for above, below in pairwise(boxes):
        d.arrow((above.cx, above.bottom), (above.cx, below.y))
    first, last = boxes[0], boxes[-1]
    d.arrow(
        (last.right, last.cy),
        (278, last.cy),
        (278, first.cy),
        (first.right, first.cy),
        dash=True,
        color=shade(SKY),
    )
    d.note(290, first.bottom + 14, "a client that leaves ends its request")
    d.height = d.prose(
        MARGIN,
        y + 4,
        "A slow client makes its own handler wait in send. Meanwhile its parts become "
        "one in the inbox, and the engine, the text thread and all other clients go "
        "on as if nothing were the matter.",
    )
    return d


def drawings() -> dict[str, Drawing]:
    """By name."""
    return {"a-way": way()}
