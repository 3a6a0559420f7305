"""The whole engine in one drawing, and for each chapter with its part lit."""

from drawings.svg import (
    BLUE,
    EDGE,
    GREEN,
    INK,
    LINE,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    WHITE,
    Box,
    Drawing,
    mix,
    shade,
    tint,
)

# What each chapter is about, in the words of the drawing's title.
CHAPTERS = {
    1: "tokens and harmony",
    2: "the weights file",
    3: "MXFP4",
    4: "the mixture of experts",
    5: "attention",
    6: "the model and the sampler",
    7: "the KV cache",
    8: "pages",
    9: "requests and the scheduler",
    10: "CUDA graphs and the runner",
    11: "the kernels",
    12: "full speed",
}
APPENDICES = {
    "A": "the server",
    "B": "the grammar",
    "C": "other models",
    "D": "drafts",
    "E": "several GPUs",
}
COLOR: dict[int | str, str] = {
    **dict.fromkeys((1, 9), BLUE),
    **dict.fromkeys((2, 3), ORANGE),
    **dict.fromkeys((4, 5, 6), VERMILION),
    **dict.fromkeys((7, 8), GREEN),
    **dict.fromkeys((10, 11, 12), PURPLE),
    **dict.fromkeys(("A", "B", "C", "D", "E"), SKY),
}
FADED = "#66727f"
DIM = "#98a3ae"  # badges of faded parts


class Engine(Drawing):
    """Draws parts that are lit, or faded because another chapter's are."""

    def __init__(self, chapter: int | str | None) -> None:
        title = "The whole engine"
        if isinstance(chapter, str):
            title += f" behind appendix {chapter}, lit: {APPENDICES[chapter]}"
        elif chapter is not None:
            title += f", chapter {chapter} lit: {CHAPTERS[chapter]}"
        super().__init__(title, 668)
        self.chapter = chapter

    def part(
        self,
        chapter: int | str,
        x: float,
        y: float,
        w: float,
        h: float,
        *lines: str,
    ) -> Box:
        """A chapter's or appendix's box, with its number or letter in front."""
        color = COLOR[chapter]
        lit = self.chapter in (None, chapter)
        chosen = self.chapter == chapter
        box = self.box(
            x,
            y,
            w,
            h,
            color=color if lit else EDGE,
            fill=tint(color, 0.72 if chosen else 0.88) if lit else WHITE,
            stroke=2.4 if chosen else 1,
        )
        ink = shade(color) if lit else FADED
        self.fill(box, *lines, ink=ink, bold=lit, left=26)
        dark = mix(color, INK, 0.25) if lit else DIM
        self.badge(x + 18, box.cy, str(chapter), dark)
        return box


def engine(chapter: int | str | None = None) -> Drawing:
    """The way of a text through the engine, with one chapter's part lit, or all."""
    d = Engine(chapter)

    # Text in, text out.
    if chapter == "A":
        d.text(24, 29, "“What is 47 + 85?”", size=14, bold=True)
        d.text(676, 29, "“47 + 85 = 132”", size=14, anchor="end", bold=True)
    else:
        d.text(126, 30, "“What is 47 + 85?”", size=14, anchor="middle", bold=True)
        d.text(574, 30, "“47 + 85 = 132”", size=14, anchor="middle", bold=True)
    harmony = d.part(
        1,
        24,
        60,
        652,
        48,
        "Tokens and harmony",
        "text becomes token ids, and the answer's ids become text",
    )
    if chapter == "A":
        server = d.part("A", 224, 10, 268, 36, "Server: any number of clients")
        d.arrow((196, server.cy), (server.x, server.cy))
        d.arrow((server.right, server.cy), (520, server.cy))
        d.arrow((284, server.bottom), (284, harmony.y))
        d.arrow((432, harmony.y), (432, server.bottom))
    else:
        d.arrow((126, 40), (126, harmony.y))
        d.arrow((574, harmony.y), (574, 40))

    scheduler = d.part(
        9,
        24,
        142,
        608,
        48,
        "Requests and scheduler",
        "who computes how many tokens in the next step",
    )
    d.arrow((126, harmony.bottom), (126, scheduler.y))
    d.note(136, 125, "token ids")
    d.arrow((574, scheduler.y), (574, harmony.bottom))
    d.note(564, 125, "each new token", anchor="end")

    runner = d.part(
        10, 192, 224, 300, 48, "Runner and CUDA graphs", "starts a whole step at once"
    )
    d.arrow((342, scheduler.bottom), (342, runner.y))
    d.note(352, 207, "a batch")

    # The model.
    lit = chapter in (None, 6)
    edge = VERMILION if lit else EDGE
    model = d.panel(
        192,
        306,
        300,
        262,
        fill=tint(VERMILION, 0.84 if chapter == 6 else 0.95) if lit else "#fbfcfd",
        edge=edge,
    )
    d.arrow((342, runner.bottom), (342, model.y))
    d.badge(214, 328, "6", mix(VERMILION, INK, 0.25) if lit else DIM)
    ink = shade(VERMILION) if lit else FADED
    d.text(232, 328, "The model: one forward pass", bold=lit, color=ink, box=model)

    def small(y: float, string: str) -> Box:
        return d.box(
            216,
            y,
            252,
            26,
            string,
            color=edge,
            fill=WHITE,
            ink=shade(VERMILION) if chapter == 6 else (INK if lit else FADED),
            bold=chapter == 6,
        )

    embedding = small(346, "embedding")
    layers = d.panel(204, 384, 276, 102, fill=WHITE, edge=edge)
    d.text(
        342,
        398,
        "each layer (gpt-oss-120b has 36)",
        size=11.5,
        anchor="middle",
        color=MUTED if chapter is None else FADED,
        box=layers,
    )
    attention = d.part(5, 216, 410, 252, 30, "attention")
    experts = d.part(4, 216, 448, 252, 30, "router and experts")
    head = small(498, "head: scores of all tokens")
    sampler = small(532, "sampler: the next token")
    for above, below in ((embedding, layers), (layers, head), (head, sampler)):
        d.arrow((342, above.bottom), (342, below.y))
    d.arrow((342, attention.bottom), (342, experts.y))

    # Weights on the left.
    file = d.part(2, 24, 335, 144, 48, "Weights file", "mapped whole")
    mxfp4 = d.part(3, 24, 439, 144, 48, "MXFP4", "experts in 4 bits")
    d.arrow((file.right, 359), (embedding.x, 359))
    d.arrow((96, file.bottom), (96, mxfp4.y))
    d.arrow((mxfp4.right, experts.cy), (experts.x, experts.cy))

    if chapter == "B":
        grammar = d.part("B", 24, 521, 144, 48, "Grammar", "the tokens that fit")
        d.arrow((grammar.right, sampler.cy), (sampler.x, sampler.cy))

    if chapter == "C":
        others = d.part("C", 24, 521, 144, 48, "Other models", "names, formats")
        d.arrow((others.right, others.cy), (model.x, others.cy))

    if chapter == "D":
        drafts = d.part("D", 24, 224, 144, 48, "Drafts", "guessed tokens")
        d.arrow((96, drafts.y), (96, scheduler.bottom))

    if chapter == "E":
        ranks = d.part("E", 24, 521, 144, 48, "Several GPUs", "a shard each")
        d.arrow((ranks.right, ranks.cy), (model.x, ranks.cy))

    # Keys and values on the right.
    pages = d.part(8, 516, 314, 116, 60, "Pages", "who holds", "which ones")
    cache = d.part(7, 516, 401, 116, 48, "KV cache", "keys, values")
    d.arrow((574, scheduler.bottom), (574, pages.y))
    d.note(564, 252, "asks", "for pages", anchor="end")
    d.arrow((574, pages.bottom), (574, cache.y))
    d.arrow((attention.right, attention.cy), (cache.x, attention.cy), both=True)

    # The new token goes back to the scheduler.
    d.arrow(
        (sampler.right, sampler.cy),
        (656, sampler.cy),
        (656, scheduler.cy),
        (scheduler.right, scheduler.cy),
        color=LINE,
    )
    d.note(648, 531, "one token a step", anchor="end")

    # Everything stands on the kernels.
    for x in (280, 404):
        d.arrow((x, 594), (x, model.bottom))
    d.part(
        11, 24, 594, 316, 50, "Triton kernels", "norm, products, attention, sampling"
    )
    d.part(12, 360, 594, 316, 50, "Full speed", "kernels for the experts, the roofline")
    return d


def drawings() -> dict[str, Drawing]:
    """By name."""
    found = {"engine": engine()}
    for chapter in CHAPTERS:
        found[f"engine-{chapter:02}"] = engine(chapter)
    for letter in APPENDICES:
        found[f"engine-{letter.lower()}"] = engine(letter)
    return found
