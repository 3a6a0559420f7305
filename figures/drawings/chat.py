"""Harmony: who wrote which token, and the two states of the parser."""

from drawings.svg import (
    BLUE,
    GREEN,
    INK,
    MARGIN,
    MUTED,
    ORANGE,
    VERMILION,
    WHITE,
    WIDTH,
    Box,
    Drawing,
    shade,
    tint,
)
from simplellm.checkpoint.folder import EMBEDDED
from simplellm.text.harmony import Message, render
from simplellm.text.tokenizer import Tokenizer

QUESTION = "What is 47 + 85?"
# What the embedded model answers.
THOUGHT = "47 + 85: 7+5=12, 4+8+1=13. So 132."
ANSWER = "47 + 85 = 132"
CHARACTER = 6.63  # the width of one in monospaced 11 px
CHIP = 20


def words(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Each token's own text, spaces visible."""
    names = {id: name for name, id in tokenizer.special.items()}
    return [
        names[id] if id in names else tokenizer.decode([id]).replace(" ", "·")
        for id in ids
    ]


def chip(d: Drawing, x: float, y: float, word: str, color: str) -> Box:
    """A token in its box; control tokens are filled."""
    width = len(word) * CHARACTER + 7
    control = word.startswith("<|") and word.endswith("|>")
    return d.box(
        x,
        y,
        width,
        CHIP,
        word,
        color=color,
        fill=shade(color) if control else tint(color),
        ink=WHITE if control else INK,
        size=11,
        mono=True,
        radius=4,
    )


def flow(d: Drawing, y: float, parts: list[tuple[list[str], str]]) -> float:
    """Chips from left to right, in as many rows as they take; the last row's end."""
    x: float = MARGIN
    for tokens, color in parts:
        for word in tokens:
            if x + len(word) * CHARACTER + 7 > WIDTH - MARGIN:
                x, y = MARGIN, y + CHIP + 6
            x = chip(d, x, y, word, color).right + 3
    return y + CHIP


def roles() -> Drawing:
    """A conversation as tokens, each in the color of who wrote it."""
    tokenizer = Tokenizer.from_file(EMBEDDED / "tokenizer.json")
    conversation = [
        Message("user", QUESTION),
        Message("assistant", THOUGHT, channel="analysis"),
        Message("assistant", ANSWER, channel="final"),
    ]
    prompt = render(conversation[:1], tokenizer)
    whole = render(conversation, tokenizer, add_generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    starts = [i for i, id in enumerate(prompt) if id == tokenizer.special["<|start|>"]]
    system, user = prompt[: starts[1]], prompt[starts[1] : starts[2]]
    head = system.index(tokenizer.special["<|message|>"]) + 1
    asked = tokenizer.encode(QUESTION)
    before = user.index(asked[0])
    program, person, model = BLUE, ORANGE, VERMILION

    d = Drawing("Who wrote which token of a conversation", 0)
    d.heading(MARGIN, 36, "One conversation, token by token")
    x = 330.0
    for color, who in ((program, "program"), (person, "user"), (model, "model")):
        d.box(x, 27, 18, 18, color=color, radius=4)
        d.text(x + 26, 36, who)
        x += 112

    def part(y: float, string: str, parts: list[tuple[list[str], str]]) -> float:
        d.text(MARGIN, y, string, size=11.5, color=MUTED)
        return flow(d, y + 13, parts) + 26

    def told(ids: list[int]) -> list[str]:
        return words(tokenizer, ids)

    rest = f"{len(system) - head - 1} more tokens"
    y = part(
        78,
        "The program writes the system message. A dot is a space.",
        [([*told(system[:head]), rest, *told(system[-1:])], program)],
    )
    y = part(
        y,
        "It wraps what the user typed, so the control tokens are its own.",
        [
            (told(user[:before]), program),
            (told(asked), person),
            (told(user[before + len(asked) :]), program),
        ],
    )
    y = part(
        y,
        "It announces the assistant, and from there the model writes, control tokens "
        "too.",
        [
            (told(prompt[starts[2] :]), program),
            (told(whole[len(prompt) :]), model),
        ],
    )
    y = part(
        y + 4,
        "A user who types <|end|> gets characters, not the control token:",
        [(told(tokenizer.encode("<|end|>")), person)],
    )
    d.height = y - 4
    return d


def parser() -> Drawing:
    """The parser's two states, and how they follow each other in a reply."""
    d = Drawing("The harmony parser's two states", 436)
    top, tall = 92, 76
    header = d.box(
        92, top, 150, tall, "in a header", "collects words", color=BLUE, size=13.5
    )
    content = d.box(
        458, top, 150, tall, "in a content", "passes text on", color=GREEN, size=13.5
    )
    d.arrow((header.right, top + 22), (content.x, top + 22))
    d.text(350, top + 9, "<|message|>", mono=True, size=11.5, anchor="middle")
    d.arrow((content.x, top + 54), (header.right, top + 54))
    d.text(350, top + 68, "<|end|> <|return|>", mono=True, size=11.5, anchor="middle")
    d.text(
        350, top + 84, "<|call|> <|endoftext|>", mono=True, size=11.5, anchor="middle"
    )
    d.note(350, top + 102, "the message is over", anchor="middle")

    def loop(box: Box) -> None:
        left, right, up = box.cx - 24, box.cx + 24, box.y - 24
        d.arrow((left, box.y), (left, up), (right, up), (right, box.y))

    loop(header)
    words = "text", "<|channel|> <|constrain|>"
    for i, line in enumerate(words):
        d.text(header.cx, 36 + 16 * i, line, mono=True, size=11.5, anchor="middle")
    loop(content)
    d.text(content.cx, 52, "text", mono=True, size=11.5, anchor="middle")

    d.arrow((40, header.cy), (header.x, header.cy))
    d.note(46, header.cy - 12, "start", anchor="middle")
    d.prose(
        MARGIN,
        222,
        "What models get wrong: <|start|> anywhere ends what came before it, and so "
        "does <|channel|> in a content; both begin a header. One that ends without "
        "<|message|> gives its text as content. Anything else out of place is ignored.",
    )

    d.line((MARGIN, 266), (WIDTH - MARGIN, 266), width=0.8)
    d.heading(MARGIN, 292, "A reply, piece by piece")
    reply = (
        ("<|channel|>", BLUE),
        ("analysis", BLUE),
        ("<|message|>", BLUE),
        ("7+5", GREEN),
        ("=12", GREEN),
        ("<|end|>", GREEN),
        ("<|start|>", BLUE),
        ("assistant", BLUE),
        ("<|channel|>", BLUE),
        ("final", BLUE),
        ("<|message|>", BLUE),
        ("12", GREEN),
        ("<|return|>", GREEN),
    )
    rows = ((reply[:6], 314, "analysis", "7+5=12"), (reply[6:], 372, "final", "12"))
    for tokens, y, channel, text in rows:
        x: float = MARGIN
        first = None
        for word, color in tokens:
            box = chip(d, x, y, word, color)
            if color == GREEN and first is None:
                first = x
                d.bracket(MARGIN, x - 3, y + CHIP + 3, f"header: channel {channel}")
            x = box.right + 3
        assert first is not None
        d.bracket(first, x - 3, y + CHIP + 3, f"content: {text}")
    return d


def drawings() -> dict[str, Drawing]:
    """By name."""
    return {"01-roles": roles(), "01-parser": parser()}
