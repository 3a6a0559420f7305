"""Time: what a step computes, and when one kernel may follow another."""

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
    SMALL,
    VERMILION,
    Drawing,
    shade,
)
from simplellm.pages import PageManager
from simplellm.request import Request
from simplellm.scheduler import Scheduler, Work

BUDGET = 16
NAMES = "ABCDE"
COLORS = (BLUE, GREEN, ORANGE, VERMILION, PURPLE)


def planned() -> list[list[Work]]:
    """Three steps of three requests that decode and two with prompts."""
    manager = PageManager(100, 2, share=False)
    scheduler = Scheduler(
        manager,
        max_num_seqs=8,
        max_num_batched_tokens=BUDGET,
        prefill_chunk=BUDGET,
    )

    def ask(number: int, prompt: int, answer: int) -> None:
        request = Request(list(range(prompt)), max_tokens=answer)
        request.number = number
        scheduler.add([request])

    def step() -> list[Work]:
        works = scheduler.schedule()
        scheduler.begin(works)
        scheduler.commit(works, [[1] for work in works if work.samples])
        return works

    for number, answer in enumerate((9, 9, 3)):
        ask(number, 2, answer)
    step()
    ask(3, 20, 9)
    ask(4, 6, 9)
    return [step() for _ in range(3)]


def plan() -> Drawing:
    """What three steps compute, a cell for each token of the budget."""
    d = Drawing("Three steps under a budget of 16 tokens", 0)
    left, wide, tall = 116.0, 34, 34
    d.heading(MARGIN, 34, f"a step computes at most {BUDGET} tokens")
    d.prose(
        MARGIN,
        58,
        "A, B and C are decoding: one token each. D arrives with a prompt of 20 "
        "tokens, E with one of 6.",
    )
    y = 96.0
    for number, works in enumerate(planned(), 1):
        d.text(MARGIN, y + tall / 2, f"step {number}", bold=True)
        x = left
        used = 0
        for request, start, length, samples in works:
            name, color = NAMES[request.number], COLORS[request.number]
            prompt = start < request.num_prompt
            cells = [f"{name}{start + i}" if prompt else name for i in range(length)]
            strip = d.cells(x, y, wide, tall, cells, colors=color, bold=not prompt)
            if samples:
                d.dot(strip[-1].cx, y + tall + 9, 4, shade(color))
            if prompt:
                last = start + length - 1
                what = f"{name}'s prompt, tokens {start} to {last}"
                d.note(
                    (strip[0].x + strip[-1].right) / 2, y - 10, what, anchor="middle"
                )
            x = strip[-1].right
            used += length
        for _ in range(BUDGET - used):
            d.box(x, y, wide, tall, radius=3, dash=True)
            x += wide
        d.text(
            MARGIN, y + tall / 2 + 16, f"{used} of {BUDGET}", size=SMALL, color=MUTED
        )
        y += 92
    d.dot(MARGIN + 5, y - 20, 4, INK)
    d.note(
        MARGIN + 18,
        y - 20,
        "a new token comes of it: of every decode, and of the last token of a prompt",
    )
    d.height = d.prose(
        MARGIN,
        y + 6,
        "Decodes come first, so nobody who is being answered waits for a long "
        "prompt. Prompts get the rest of the budget. C ends with step 2; from step "
        "3 on D and E decode like the others.",
    )
    return d


def dependent() -> Drawing:
    """Two kernels one after the other, and overlapped by dependent launch."""
    d = Drawing("Two kernels, without and with dependent launch", 0)
    left, tall = 100.0, 38
    start, weights, compute, end, gap = 38, 76, 98, 34, 16

    def kernel(x: float, y: float, name: str, *parts: tuple[str, float]) -> float:
        """Draws a kernel's parts from ``x`` on; where it ends."""
        colors = {"weights": ORANGE, "compute": BLUE, "waits": None}
        d.text(MARGIN, y + tall / 2, name, bold=True)
        for part, width in parts:
            color = colors.get(part, EDGE)
            d.box(
                x,
                y,
                width,
                tall,
                part,
                color=color,
                dash=part == "waits",
                radius=3,
                size=SMALL,
                ink=INK if color not in (None, EDGE) else MUTED,
            )
            x += width
        return x

    whole = ("start", start), ("weights", weights), ("compute", compute), ("end", end)
    d.heading(MARGIN, 34, "without: the second starts when the first has ended")
    y = 58.0
    over = kernel(left, y, "kernel 1", *whole)
    plain = kernel(over + gap, y + 50, "kernel 2", *whole)
    d.note(over + 10, y + tall / 2, "the last of its programs has ended")

    d.heading(MARGIN, 192, "with: it starts early, loads its weights, and waits")
    y = 240.0
    early = left + start
    over = kernel(left, y, "kernel 1", *whole)
    waits = over - (early + gap + start + weights)
    early += gap
    fast = kernel(
        early,
        y + 72,
        "kernel 2",
        ("start", start),
        ("weights", weights),
        ("waits", waits),
        ("compute", compute),
        ("end", end),
    )
    d.arrow((left + start, y + tall + 2), (early, y + 70))
    d.text(left + start - 2, y - 12, "gdc_launch_dependents", mono=True, size=11)
    d.arrow((over, y + tall + 2), (over, y + 70))
    d.text(over + 10, y + 54, "gdc_wait returns", mono=True, size=11)

    # What it saves.
    bottom = y + 72 + tall
    d.line((fast, bottom + 6), (fast, bottom + 44), color=LINE)
    d.line((plain, 58 + 50 + tall + 4), (plain, bottom + 44), color=LINE, dash=True)
    d.arrow((plain, bottom + 34), (fast, bottom + 34), color=shade(GREEN))
    d.text(
        (plain + fast) / 2,
        bottom + 22,
        "saved",
        anchor="middle",
        bold=True,
        color=shade(GREEN),
    )
    d.arrow((left, bottom + 34), (left + 120, bottom + 34))
    d.note(left + 128, bottom + 34, "time, not to scale")
    d.height = d.prose(
        MARGIN,
        bottom + 70,
        "Before gdc_wait a kernel may read only what no kernel ahead of it writes: "
        "weights, not activations.",
    )
    return d


def drawings() -> dict[str, Drawing]:
    """By name."""
    return {"09-plan": plan(), "10-dependent": dependent()}
