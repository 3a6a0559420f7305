"""Experts: tokens sorted by them, and the programs that multiply."""

from itertools import groupby

import torch

from drawings.svg import (
    BLUE,
    EDGE,
    GREEN,
    INK,
    MARGIN,
    MUTED,
    PURPLE,
    SMALL,
    VERMILION,
    Drawing,
    mix,
)
from simplellm.checkpoint.families.gpt_oss import GPT_OSS_120B
from simplellm.model.kernels.experts import tilings
from simplellm.model.kernels.sorting import max_blocks

TOKENS = (BLUE, VERMILION, GREEN)
EXPERTS = (BLUE, EDGE, VERMILION, GREEN, EDGE, PURPLE)


def dispatch() -> Drawing:
    """Three tokens with two choices each among four experts, there and back."""
    choices = torch.tensor([[2, 0], [0, 3], [2, 3]])
    shares = ((0.7, 0.3), (0.6, 0.4), (0.8, 0.2))
    expert_of = choices.flatten().tolist()
    order = choices.flatten().argsort(stable=True).tolist()
    d = Drawing("Tokens go to their experts and back", 520)
    wide, gap = 72, 6
    groups = [128.0, 327.0, 526.0]  # left edges of tokens
    experts = {0: 128.0, 2: 364.0, 3: 526.0}  # and of experts, 1 between them
    place: dict[int, float] = {}
    seen = dict.fromkeys(experts, 0)
    for pair in order:
        expert = expert_of[pair]
        place[pair] = experts[expert] + (wide + gap) * seen[expert]
        seen[expert] += 1

    def label(y: float, string: str, *notes: str) -> None:
        d.text(MARGIN, y, string, bold=True)
        for i, note in enumerate(notes):
            d.text(MARGIN, y + 16 + 15 * i, note, size=SMALL, color=MUTED)

    # Tokens and their choices.
    label(38, "tokens")
    tops = [
        d.box(x, 24, 2 * wide + gap, 28, f"token {i}", color=color, bold=True)
        for i, (x, color) in enumerate(zip(groups, TOKENS, strict=True))
    ]
    label(92, "pairs", "of token", "and choice")
    pairs = []
    for pair, expert in enumerate(expert_of):
        token, choice = divmod(pair, 2)
        x = groups[token] + (wide + gap) * choice
        lines = f"expert {expert}", f"weight {shares[token][choice]}"
        pairs.append(d.box(x, 80, wide, 42, *lines, color=TOKENS[token]))
        d.arrow((x + wide / 2, tops[token].bottom), (x + wide / 2, 80))

    # Sorted by expert.
    label(212, "sorted", "by expert")
    rows = {}
    for pair in order:
        token = pair // 2
        box = d.box(place[pair], 206, wide, 34, f"token {token}", color=TOKENS[token])
        rows[pair] = box
    for pair, box in enumerate(pairs):
        color = mix(TOKENS[pair // 2], INK, 0.1)
        d.arrow((box.cx, box.bottom + 2), (rows[pair].cx, 204), color=color)

    # The experts.
    label(288, "experts", "each runs", "once")
    for expert, x in experts.items():
        box = d.box(
            x,
            272,
            2 * wide + gap,
            56,
            f"expert {expert}",
            "[2, hidden] in and out",
            fill="#eef1f4",
        )
        for column in (0, 1):
            middle = x + wide / 2 + (wide + gap) * column
            d.arrow((middle, 240), (middle, box.y))
    d.box(288, 206, 66, 122, dash=True)
    d.text(321, 242, "expert 1", size=SMALL, anchor="middle", color=MUTED)
    for i, note in enumerate(("nobody's", "choice:", "not read")):
        d.text(321, 262 + 15 * i, note, size=11, anchor="middle", color=MUTED)

    # And back.
    label(420, "combine", "a weighted", "sum")
    ends = []
    for token, x in enumerate(groups):
        first, second = expert_of[2 * token : 2 * token + 2]
        one, two = shares[token]
        line = f"{one} E{first} + {two} E{second}"
        ends.append(
            d.box(
                x,
                412,
                2 * wide + gap,
                42,
                f"token {token}",
                line,
                color=TOKENS[token],
            )
        )
    for pair in order:
        token, choice = divmod(pair, 2)
        x = groups[token] + wide / 2 + (wide + gap) * choice
        color = mix(TOKENS[token], INK, 0.1)
        d.arrow((rows[pair].cx, 330), (x, 410), color=color)
    d.height = d.prose(
        MARGIN,
        480,
        "E0 is what expert 0 made of this token. A pair's number is 2 * token + "
        f"choice; sorted by expert: {', '.join(map(str, order))}.",
    )
    return d


def programs() -> Drawing:
    """Pairs sorted by expert, in blocks of one expert, and a grid of programs."""
    size, num_experts, top_k = 4, 6, 2
    choices = torch.tensor([[2, 0], [0, 2], [5, 2], [2, 3], [0, 5], [5, 2]])
    expert_of = choices.flatten().tolist()
    order = choices.flatten().argsort(stable=True).tolist()
    room = max_blocks(len(order), num_experts, size)
    d = Drawing("Pairs, blocks and programs of the experts' kernel", 0)
    left, wide, gap = 134, 42, 3

    def label(y: float, string: str, *notes: str) -> None:
        d.text(MARGIN, y, string, bold=True)
        for i, note in enumerate(notes):
            d.text(MARGIN, y + 17 + 15 * i, note, size=SMALL, color=MUTED)

    # Pairs, and the blocks that they are cut into: an expert and its positions.
    label(66, "pairs", "their tokens")
    blocks: list[tuple[int, list[int]]] = []
    position = 0
    for expert, members in groupby(order, key=lambda pair: expert_of[pair]):
        own = list(members)
        x = left + position * (wide + gap)
        middle = x + (len(own) * (wide + gap) - gap) / 2
        d.text(middle, 36, f"E{expert}", mono=True, anchor="middle", bold=True)
        for i, pair in enumerate(own):
            cell = x + i * (wide + gap)
            d.cells(cell, 50, wide, 24, [pair], colors=EXPERTS[expert])
            d.cells(cell, 74, wide, 20, [pair // top_k], colors=EDGE, size=11)
        for start in range(0, len(own), size):
            count = min(size, len(own) - start)
            first = position + start
            blocks.append((expert, list(range(first, first + count))))
        position += len(own)

    top, pitch, column = 182, 78, 70
    label(top + 2, "blocks", f"of {size} pairs,", "one expert")
    grid = 276
    label(grid + 12, "programs", "one per block", "and tile of", "the weight")
    for number in range(room):
        x = left + pitch * number
        filled = number < len(blocks)
        expert, positions = blocks[number] if filled else (-1, [])
        color = EXPERTS[expert] if filled else EDGE
        for slot in range(size):
            if slot < len(positions):
                value = order[positions[slot]]
                d.cells(x + 17.5 * slot, top, 17.5, 24, [value], colors=color, size=11)
            else:
                d.box(x + 17.5 * slot, top, 17.5, 24, radius=3, dash=True)
        for tile in range(4):
            y = grid + 30 * tile
            if filled:
                string = f"E{expert}[{tile}]"
                d.cells(x, y, column, 25, [string], colors=color, size=11)
            else:
                d.box(x, y, column, 25, "ends", dash=True, ink=MUTED, radius=3, size=11)
        middle = x + column / 2
        d.note(middle, top + 35, f"block {number}", anchor="middle")
        if filled:
            start = left + positions[0] * (wide + gap)
            stop = left + positions[-1] * (wide + gap) + wide
            d.line((start + 2, 100), (stop - 2, 100), width=2, color=color)
            ink = mix(color, INK, 0.1)
            d.arrow(((start + stop) / 2, 103), (middle, top - 4), color=ink)
            d.arrow((middle, top + 46), (middle, grid - 3))
    bottom = grid + 4 * 30

    batch = 64
    tiling = tilings(
        batch, GPT_OSS_120B.num_local_experts, GPT_OSS_120B.num_experts_per_tok
    )[0]
    n = batch * GPT_OSS_120B.num_experts_per_tok
    most = max_blocks(n, GPT_OSS_120B.num_local_experts, tiling.tokens)
    tiles = -(-2 * GPT_OSS_120B.intermediate_size // tiling.rows)
    d.height = d.prose(
        MARGIN,
        bottom + 22,
        "E2[0] are the first rows of expert 2's weight; blocks 1 and 2 both "
        "multiply with them. The host doesn't know how many blocks there'll be, so "
        f"it leaves room for the most, {room}; the programs of empty blocks end at "
        f"once. gpt-oss-120b, {batch} tokens: {n} pairs, room for {most} blocks of "
        f"{tiling.tokens}, and {tiles} tiles of {tiling.rows} rows for gate and up.",
    )
    return d


def drawings() -> dict[str, Drawing]:
    """By name."""
    return {"04-dispatch-drawing": dispatch(), "12-pairs": programs()}
