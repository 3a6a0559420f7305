"""How weights lie in memory: a mapped file, a block of MXFP4, a repacked word."""

import torch
from safetensors import safe_open

from drawings.svg import (
    BLUE,
    EDGE,
    GREEN,
    INK,
    MARGIN,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    SMALL,
    VERMILION,
    WHITE,
    WIDTH,
    Drawing,
)
from simplellm.checkpoint.folder import EMBEDDED
from simplellm.checkpoint.mxfp4 import BIAS, MXFP4, VALUES
from simplellm.model.kernels.fragments import FIRST, NUMBERS, SHIFT, repack_expert


def real_weight() -> MXFP4:
    """gate_up of the embedded model's first layer, [E, 2I, hidden]."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with safe_open(EMBEDDED / "model.safetensors", "pt") as file:
        blocks, scales = (
            file.get_tensor(f"{name}_{part}") for part in ("blocks", "scales")
        )
    return MXFP4(blocks, scales)


def mmap() -> Drawing:
    """Addresses, memory and file, of which only what was touched is read."""
    d = Drawing("A file mapped into memory", 390)
    pages = (
        ("header", EDGE),
        ("tensor A", PURPLE),
        ("tensor A", PURPLE),
        ("tensor B", BLUE),
        ("tensor B", BLUE),
        ("tensor C", GREEN),
        ("tensor C", GREEN),
        ("tensor C", GREEN),
    )
    touched = (0, 3, 4)
    columns = (
        (MARGIN, "addresses", "of the process"),
        (275, "memory", "the page cache"),
        (526, "file", "on disk"),
    )
    wide, tall, top = 150, 26, 84
    for x, string, what in columns:
        d.text(x + wide / 2, 34, string, bold=True, anchor="middle", size=13.5)
        d.note(x + wide / 2, 54, what, anchor="middle")
    frames = {page: 2 + i for i, page in enumerate(touched)}
    left, middle, right = (x for x, _, _ in columns)
    for i, (string, color) in enumerate(pages):
        y = top + i * (tall + 3)
        here = i in touched
        d.box(
            left,
            y,
            wide,
            tall,
            string,
            color=color if here else EDGE,
            fill=None if here and color != EDGE else WHITE,
            ink=INK if here else MUTED,
            dash=not here,
            radius=3,
        )
        d.box(right, y, wide, tall, string, color=color, radius=3)
    for frame in range(7):
        y = top + 14 + frame * (tall + 3)
        page = next((page for page, at in frames.items() if at == frame), None)
        if page is None:
            d.box(middle, y, wide, tall, color=EDGE, fill="#fafbfc", radius=3)
            continue
        string, color = pages[page]
        d.box(middle, y, wide, tall, string, color=color, radius=3)
    for page, frame in frames.items():
        start = top + page * (tall + 3) + tall / 2
        end = top + 14 + frame * (tall + 3) + tall / 2
        d.arrow((left + wide, start), (middle, end))
        d.arrow((right, start), (middle + wide, end))
    d.note(
        MARGIN,
        336,
        "1  Mapping gives addresses to the whole file and reads nothing.",
        "2  The first touch of a page stops the process until the system has read it "
        "into memory.",
        "3  Whoever maps the file too gets the same memory. Pages that nobody uses can "
        "go again.",
    )
    return d


def block() -> Drawing:
    """Sixteen bytes and a scale, and one of the bytes taken apart."""
    weight = real_weight()[0]
    codes, scale = weight.blocks[0, 0].tolist(), int(weight.scales[0, 0])
    numbers = weight.dequantize(torch.float32)[0, :32].tolist()
    # A byte with two different numbers, one of them negative.
    place = next(
        i
        for i, code in enumerate(codes)
        if code >> 4 > 9 and 1 < code & 15 < 8 and code >> 4 & 7 != code & 7
    )
    byte = codes[place]
    d = Drawing("A block of MXFP4", 470)
    d.heading(MARGIN, 34, "32 weights in 17 bytes")
    d.text(
        WIDTH - MARGIN,
        34,
        "the first block of the embedded model",
        size=SMALL,
        color=MUTED,
        anchor="end",
    )
    wide, top = 35, 58
    colors = [BLUE if i == place else EDGE for i in range(16)]
    cells = d.cells(
        MARGIN,
        top,
        wide,
        28,
        [f"{code:02x}" for code in codes],
        colors=colors,
        size=12.5,
    )
    last = d.cells(620, top, 56, 28, [f"{scale:02x}"], colors=ORANGE, size=12.5)[0]
    d.bracket(
        MARGIN, cells[-1].right, top + 32, "16 bytes, each two codes of four bits"
    )
    d.bracket(last.x, last.right, top + 32, "scale")

    # One byte.
    y, bit = 146, 34
    low, high = byte & 15, byte >> 4
    d.note(MARGIN, y + 14, f"byte {place}")
    start = 180
    bits = f"{byte:08b}"
    roles = (VERMILION, SKY, SKY, GREEN) * 2
    d.cells(start, y, bit, 28, list(bits[:4]), colors=roles[:4], size=12.5)
    d.cells(start + 190, y, bit, 28, list(bits[4:]), colors=roles[4:], size=12.5)
    for x, half, element in (
        (start, "high half, second", 2 * place + 1),
        (start + 190, "low half, first", 2 * place),
    ):
        d.note(x + 2 * bit, y + 42, f"{half}: weight {element}", anchor="middle")
    for i, (name, color) in enumerate(
        (("sign", VERMILION), ("exponent", SKY), ("mantissa", GREEN))
    ):
        d.box(560, y - 8 + 20 * i, 14, 14, color=color, radius=3)
        d.text(582, y - 1 + 20 * i, name, size=SMALL)

    # What a code stands for.
    y = 228
    d.note(MARGIN, y + 14, "code")
    d.note(MARGIN, y + 42, "size")
    for code in range(8):
        x = start + 58 * code
        chosen = code in (low & 7, high & 7)
        color = BLUE if chosen else EDGE
        d.cells(x, y, 58, 26, [f"{code:03b}"], colors=color)
        d.cells(x, y + 28, 58, 26, [f"{VALUES[code]:g}"], colors=color, bold=chosen)

    # The numbers.
    y = 302
    exponent = scale - BIAS
    d.note(MARGIN, y + 14, "scale")
    d.text(
        start,
        y + 14,
        f"{scale:02x} in hexadecimal is {scale}:  2^({scale} - {BIAS}) = 2^{exponent}",
        mono=True,
        size=12,
    )
    for i, (code, element) in enumerate(((low, 2 * place), (high, 2 * place + 1))):
        y = 332 + 30 * i
        value = VALUES[code] * 2.0**exponent
        assert value == numbers[element]
        d.note(MARGIN, y + 13, f"weight {element}")
        formula = f"{code:04b}:  {VALUES[code]:g} * 2^{exponent} = {value:g}"
        d.text(start, y + 13, formula, mono=True, size=12)
    d.height = d.prose(
        MARGIN,
        412,
        "17 bytes for 32 weights are 4.25 bits per weight; in bfloat16 they take 64 "
        "bytes.",
    )
    return d


REGISTER_COLORS = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, "#7a8b3a", "#8a6d5b")


def sources() -> dict[tuple[str, int], tuple[int, int]]:
    """For each bit of the words a and b: its register, and its bit there."""
    shifts = (
        ("a", 0),
        ("a", 6),
        ("a", -4),
        ("u", 4),
        ("b", 0),
        ("b", 6),
        ("b", -4),
        ("u", -6),
    )
    found = {}
    for register, (word, left) in enumerate(shifts):
        for bit in range(32):
            if not NUMBERS.value >> bit & 1:
                continue
            at = (bit - left) % 32
            if word == "u":
                # u is a where FIRST has ones, b >> 2 elsewhere.
                first = FIRST.value >> at & 1
                source = ("a", at) if first else ("b", at + 2)
            else:
                source = (word, at)
            assert source not in found
            found[source] = register, bit
    return found


def repacked() -> Drawing:
    """The two words of a thread, each bit in the color of the register it is for."""
    weight = real_weight()[0]
    words, _ = repack_expert(weight, interleaved=True)
    word = {"a": int(words[0, 0, 0]), "b": int(words[0, 0, 1])}
    owner = sources()
    d = Drawing("The bits of a repacked word", 470)
    d.heading(MARGIN, 34, "16 weights of one thread in two words")
    wide, left = 20, 40
    for name, y in (("a", 70), ("b", 128)):
        d.text(MARGIN, y + 13, name, mono=True, bold=True, size=13)
        for bit in range(32):
            x = left + wide * (31 - bit)
            register, _ = owner[name, bit]
            value = str(word[name] >> bit & 1)
            d.cells(x, y, wide, 26, [value], colors=REGISTER_COLORS[register])
            if bit % 8 in (0, 7):
                d.text(
                    x + wide / 2,
                    y - 8,
                    str(bit),
                    size=11,
                    anchor="middle",
                    color=MUTED,
                )
    d.text(MARGIN, 184, "for register", size=SMALL, color=MUTED)
    for register, color in enumerate(REGISTER_COLORS):
        x = 110 + 66 * register
        d.cells(x, 173, 22, 22, [register], colors=color)

    # Two registers.
    recipes = (("a & N", 0), ("(a << 6) & N", 1))
    values = weight.dequantize(torch.float32)[0]
    scale = float(2.0 ** (int(weight.scales[0, 0]) - BIAS))
    y = 232
    d.text(
        MARGIN,
        y,
        f"N = 0x{NUMBERS.value:08X} keeps eight bits: two numbers, each where bfloat16 "
        "has its sign, exponent and mantissa.",
        size=SMALL,
        color=MUTED,
    )
    for recipe, register in recipes:
        y += 46
        d.text(left, y - 11, f"register {register} = {recipe}", mono=True, size=12)
        for bit in range(32):
            x = left + wide * (31 - bit)
            source = next(
                (s for s, place in owner.items() if place == (register, bit)), None
            )
            if source is None:
                d.cells(x, y, wide, 26, ["0"], colors=EDGE)
            else:
                value = str(word[source[0]] >> source[1] & 1)
                color = REGISTER_COLORS[register]
                d.cells(x, y, wide, 26, [value], colors=color, bold=True)
        for half, x in ((1, left + 8 * wide), (0, left + 24 * wide)):
            column = 8 * register + half
            e2m1 = float(values[column]) / scale
            d.bracket(
                x - 8 * wide + 2,
                x + 8 * wide - 2,
                y + 30,
                f"column {column}: {e2m1:g} times 2^-126",
            )
        y += 44
    d.height = d.prose(
        MARGIN,
        y + 34,
        f"One multiplication by the scale, stored 2^{126 - SHIFT} times as large, "
        f"gives two weights times 2^-{SHIFT}. Registers 3 and 7 take what is left "
        "of both words: u has the bits of a where FIRST has ones, those of b >> 2 "
        "elsewhere.",
    )
    return d


def drawings() -> dict[str, Drawing]:
    """By name."""
    return {"02-mmap": mmap(), "03-mxfp4-block": block(), "12-repacked": repacked()}
