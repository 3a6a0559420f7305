"""Steps: what one computes, what it is sent, when one kernel may follow another."""

from typing import Any

import numpy as np

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
    Drawing,
    shade,
)
from simplellm.base.request import UNKNOWN, Request
from simplellm.engine.block_tables import BlockTables
from simplellm.engine.input_batch import fill_batch
from simplellm.engine.page_manager import PageManager
from simplellm.engine.scheduler import ScheduledChunk, Scheduler
from simplellm.model.batch import Batch

BUDGET = 16
NAMES = "ABCDE"
COLORS = (BLUE, GREEN, ORANGE, VERMILION, PURPLE)


def planned() -> list[list[ScheduledChunk]]:
    """Three steps of three requests that decode and two with prompts."""
    manager = PageManager(100, 2, enable_caching=False)
    scheduler = Scheduler(
        manager,
        max_num_seqs=8,
        max_num_batched_tokens=BUDGET,
        prefill_chunk=BUDGET,
    )

    def ask(number: int, prompt: int, answer: int) -> None:
        request = Request(list(range(prompt)), max_tokens=answer)
        request.request_id = number
        scheduler.add([request])

    def step() -> list[ScheduledChunk]:
        scheduled = scheduler.schedule()
        scheduler.update_after_launch(scheduled)
        scheduler.update_from_output(
            scheduled, [[1] for chunk in scheduled if chunk.samples]
        )
        return scheduled

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
    for number, scheduled in enumerate(planned(), 1):
        d.text(MARGIN, y + tall / 2, f"step {number}", bold=True)
        x = left
        used = 0
        for request, start, length, samples in scheduled:
            name, color = NAMES[request.request_id], COLORS[request.request_id]
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


PAGE, WINDOW, PAGES = 2, 4, 3  # positions, positions, pages in a row of a table


def filled() -> Batch:
    """Two decodes and a chunk of three tokens, as the runner writes them down."""
    manager = PageManager(24, PAGE, window=WINDOW, enable_caching=False)
    scheduled = []
    for number, (tokens, computed, length) in enumerate(
        (
            ([40, 41, 42, 43, 44, UNKNOWN], 5, 1),
            ([50, 51, 52, 53], 3, 1),
            ([60, 61, 62, 63], 0, 3),
        )
    ):
        request = Request(tokens, max_tokens=9)
        request.request_id = number
        manager.add(number, tokens[:1])
        assert manager.allocate(number, computed + length)
        manager.commit(number, tokens, computed)
        samples = computed + length == len(tokens)
        scheduled.append(ScheduledChunk(request, computed, length, samples))
    shape = sum(chunk.length for chunk in scheduled), len(scheduled), PAGES
    flat = np.zeros(Batch.size(*shape, 2), dtype=np.int32)
    batch = Batch.of(flat, *shape, 2, manager.windows, PAGE)
    sampling = [scheduled[0].request]  # its last token is on its way
    tables = BlockTables(len(scheduled), PAGES, 2, PAGE)
    fill_batch(batch, scheduled, 2, sampling, manager.tables, tables)
    return batch


def flat() -> Drawing:
    """The arrays of a batch, one behind the other."""
    batch = filled()
    d = Drawing("A batch: views of one flat array", 0)
    wide, tall, left = 30, 28, 46.0
    count = batch.tokens.shape[0]
    owners = [0, 1, 2, 2, 2]  # of each token
    d.heading(MARGIN, 34, "one step, one array of int32")
    for i, (name, color) in enumerate(
        (("A decodes", BLUE), ("B decodes", GREEN), ("C, a chunk of three", ORANGE))
    ):
        key = 300 + 112 * i
        d.box(key, 26, 16, 16, color=color, radius=4)
        d.text(key + 22, 34, name, size=SMALL)

    y = 92.0
    used = 0

    def part(x: float, name: str, values: Any, colors: list[str]) -> float:
        nonlocal used
        numbers = [int(value) for value in np.ravel(values)]
        cells = d.cells(x, y, wide, tall, numbers, colors=colors, size=12)
        d.bracket(
            x + 2, cells[-1].right - 2, y + tall + 4, f"{name} {list(values.shape)}"
        )
        used += len(numbers)
        return cells[-1].right

    def begin(name: str) -> None:
        d.text(left, y - 14, name, size=SMALL, bold=True)

    of_token = [COLORS[owner] for owner in owners]
    of_row = list(COLORS[:3])
    begin(f"for all layers, from number {used}")
    x = part(left, "tokens", batch.tokens, of_token)
    x = part(x, "positions", batch.positions, of_token)
    x = part(x, "lengths", batch.lengths, of_row)
    x = part(x, "query_start_loc", batch.query_start_loc, [SKY] * 4)
    part(x + 4, "logits_indices", batch.logits_indices, [*of_row[:2], EDGE])
    kinds = ("full layers", f"sliding layers, window {WINDOW}")
    for kind, group in zip(kinds, batch.groups, strict=True):
        y += 92
        begin(f"for the {kind}, from number {used}")
        x = part(left, "slots", group.slots, of_token)
        live = [
            -(-int(length - offset) // PAGE)
            for length, offset in zip(batch.lengths, group.offsets, strict=True)
        ]
        of_table = [
            COLORS[row] if page < live[row] else EDGE
            for row in range(3)
            for page in range(PAGES)
        ]
        x = part(x, "tables", group.tables, of_table)
        part(x, "offsets", group.offsets, of_row)
    assert used == Batch.size(count, 3, PAGES, 2)
    d.height = d.prose(
        MARGIN,
        y + 84,
        f"Pages have {PAGE} positions; a slot is page * {PAGE} + place. Gray zeros are "
        "padding. A's token is -1, the first one that the step before samples: nobody "
        "knows it yet. query_start_loc says where each sequence's tokens begin, "
        "logits_indices whose successors are wanted. In the sliding layers A has lost "
        "its first page already: its table begins at position 2.",
    )
    return d


def drawings() -> dict[str, Drawing]:
    """By name."""
    return {
        "09-plan": plan(),
        "10-batch": flat(),
        "10-dependent": dependent(),
    }
