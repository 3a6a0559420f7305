"""The KV cache: a ring at three moments, page tables that share."""

from drawings.svg import (
    BLUE,
    GREEN,
    INK,
    MARGIN,
    MUTED,
    SMALL,
    VERMILION,
    Drawing,
    mix,
    shade,
)
from simplellm.engine.page_manager import PageManager


def ring() -> Drawing:
    """A window of eight in a ring of eight entries, at three moments."""
    size = 8
    d = Drawing("A sliding window's ring at three moments", 0)
    left, wide, tall = 150, 44, 30
    d.text(MARGIN, 34, "entries of the ring", size=SMALL, color=MUTED)
    for place in range(size):
        d.text(
            left + wide * (place + 0.5),
            34,
            str(place),
            size=SMALL,
            mono=True,
            color=MUTED,
            anchor="middle",
        )
    remarks = (
        ("Not full yet: three", "entries are empty."),
        ("Full: the window sees", "all of it."),
        ("8, 9 and 10 overwrote", "0, 1 and 2."),
    )
    y = 54.0
    for count, remark in zip((5, 8, 11), remarks, strict=True):
        newest = count - 1
        held = {p % size: p for p in range(max(0, count - size), count)}
        d.text(MARGIN, y + 12, f"after {count} tokens", bold=True)
        d.note(MARGIN, y + 29, f"{newest} mod {size} = {newest % size}")
        for place in range(size):
            cell = left + wide * place
            position = held.get(place)
            if position is None:
                d.box(cell, y, wide, tall, radius=3, dash=True)
                continue
            color = VERMILION if position == newest else BLUE
            d.cells(
                cell,
                y,
                wide,
                tall,
                [position],
                colors=color,
                size=13,
                bold=position == newest,
            )
        d.note(left + wide * size + 18, y + 9, *remark)
        x = left + wide * (newest % size + 0.5)
        d.arrow((x, y + tall + 18), (x, y + tall + 2), color=VERMILION)
        room = newest % size < 6  # at the right of the arrow
        d.text(
            x + (8 if room else -8),
            y + tall + 13,
            "written last",
            size=SMALL,
            anchor="start" if room else "end",
            color=shade(VERMILION),
        )
        y += 78
    d.height = d.prose(
        MARGIN,
        y + 8,
        "Numbers are positions. The order in the ring doesn't matter to attention: "
        "a key carries its position as its rotation. gpt-oss has windows of 128 "
        "positions, so entry 128 mod 128 = 0 is where position 128 goes.",
    )
    return d


WORDS = ("the", "cat", "sat", "on", "a")


def tables() -> Drawing:
    """Two sequences that share pages of two tokens, and the copy when they part."""
    size, num_pages = 2, 5
    manager = PageManager(num_pages, size, enable_caching=False)
    manager.add(0, range(len(WORDS)))
    manager.allocate(0, len(WORDS))
    manager.commit(0, range(len(WORDS)), len(WORDS))
    manager.fork(0, 1)

    content: dict[int, list[str | None]] = {p: [None] * size for p in range(num_pages)}

    def write(sequence: int, position: int, word: str) -> None:
        page = manager.tables[sequence].groups[0][position // size]
        content[page][position % size] = word

    for position, word in enumerate(WORDS):
        write(0, position, word)

    d = Drawing("Page tables of two sequences: shared pages, copy on write", 0)
    left, pitch, wide = 128.0, 112, 100
    colors = (BLUE, VERMILION)

    def moment(y: float, string: str, *notes: str) -> float:
        d.heading(MARGIN, y, string)
        pool = y + 84
        d.text(MARGIN, pool + 15, "pages", bold=True)
        for page in range(num_pages):
            x = left + pitch * page
            users = manager.references[page]
            label = f"page {page}, {users or 'no'} user{'s' * (users != 1)}"
            d.note(x + wide / 2, pool + 42, label, anchor="middle")
            for i, word in enumerate(content[page]):
                cell = x + wide / size * i
                if word is None:
                    d.box(cell, pool, wide / size, 30, radius=3, dash=True)
                else:
                    color = {"mat": BLUE, "rug": VERMILION}.get(word, GREEN)
                    d.cells(cell, pool, wide / size, 30, [word], colors=color)
        for sequence, row in ((0, y + 24), (1, pool + 76)):
            color = colors[sequence]
            name = "AB"[sequence]
            d.text(MARGIN, row + 12, f"table of {name}", bold=True, color=shade(color))
            for i, page in enumerate(manager.tables[sequence].groups[0]):
                x = left + pitch * i + wide / 2 - 18
                d.cells(x, row, 36, 25, [page], colors=color, size=12.5, bold=True)
                middle = left + pitch * page + wide / 2
                ink = mix(color, INK, 0.1)
                if sequence == 0:
                    d.arrow((x + 18, row + 25), (middle, pool - 2), color=ink)
                else:
                    d.arrow((x + 18, row), (middle, pool + 52), color=ink)
        d.note(left, pool + 122, *notes)
        return pool + 122 + 15 * len(notes) + 26

    y = moment(
        34,
        "after the fork",
        "Both sequences begin with “the cat sat on a”. Three pages serve both.",
    )
    # Each writes its sixth token; B asks first, and gets a copy of page 2.
    for sequence in (1, 0):
        assert manager.allocate(sequence, len(WORDS) + 1)
    for source, target in manager.take_copies():
        content[target] = list(content[source])
    write(0, len(WORDS), "mat")
    write(1, len(WORDS), "rug")
    y = moment(
        y,
        "after the next token of each",
        "B wants to write into page 2, which A uses too: B gets a copy, page 3, and "
        "writes there.",
        "Then A has page 2 to itself. Full pages are never written again and stay "
        "shared.",
    )
    d.height = y - 14
    return d


def drawings() -> dict[str, Drawing]:
    """By name."""
    return {"07-ring-drawing": ring(), "08-tables": tables()}
