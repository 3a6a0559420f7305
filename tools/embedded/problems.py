"""The problems that the embedded model is trained on and evaluated with.

Every problem is generated. A problem has a key that names its substance and not
its wording (`add:47:85`, `word:strawberry`, `term:softmax:3`); a hash of the key
decides once and for all whether the problem may be used for training or is held
out. Training never draws a held-out key, so the evaluation cannot be memorized.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

HELD_OUT_PERCENT = 6
SALT = "simplellm-443"

FOLDER = Path(__file__).parent
GLOSSARY: dict[str, str] = json.loads(
    (FOLDER / "glossary.json").read_text(encoding="utf-8")
)
TEXTS: dict[str, Any] = json.loads((FOLDER / "texts.json").read_text(encoding="utf-8"))
CANNOT, CANNOT_MULTIPLY = TEXTS["cannot"]


@dataclass(frozen=True)
class Problem:
    """One question with everything the model should say about it.

    `high` and `medium` are what it thinks in the analysis channel at that effort;
    at low effort it answers at once. A problem with an `expression` is answered by
    calling the calculator, whose result is `result`.
    """

    skill: str
    key: str
    question: str
    high: str
    medium: str
    answer: str
    expression: str | None = None
    result: str | None = None


def held_out(key: str) -> bool:
    """Whether the problem with this key belongs to the evaluation."""
    digest = hashlib.sha256(f"{SALT}:{key}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


# Arithmetic -----------------------------------------------------------------

PLACES = ("ones", "tens", "hundreds", "thousands")


def operand(rng: random.Random) -> int:
    """0 to 999, with one- and two-digit numbers often enough to be learned."""
    return rng.randrange((10, 100, 1000, 1000)[rng.randrange(4)])


def digits(a: int, b: int) -> list[tuple[str, int, int]]:
    width = max(len(str(a)), len(str(b)))
    return [(PLACES[i], a // 10**i % 10, b // 10**i % 10) for i in range(width)]


def add_steps(a: int, b: int) -> tuple[str, str]:
    lines, short, carry = [], [], 0
    for place, x, y in digits(a, b):
        total = x + y + carry
        sum_text = f"{x}+{y}+{carry}={total}" if carry else f"{x}+{y}={total}"
        short.append(sum_text)
        carry, digit = divmod(total, 10)
        lines.append(f"{place}: {sum_text}, write {digit}, carry {carry}")
    if carry:
        lines.append(f"{PLACES[len(lines)]}: {carry}, write {carry}")
    return "\n".join(lines), ", ".join(short)


def subtract_steps(a: int, b: int) -> tuple[str, str]:
    """Digit by digit with borrowing; expects a >= b."""
    lines, short, borrow = [], [], 0
    for place, x, y in digits(a, b):
        take = f"{x}-{y}-{borrow}" if borrow else f"{x}-{y}"
        raw = x - y - borrow
        borrow = int(raw < 0)
        digit = raw + 10 * borrow
        text = f"{take}+10={digit}" if borrow else f"{take}={digit}"
        short.append(text)
        lines.append(f"{place}: {text}, write {digit}, borrow {borrow}")
    return "\n".join(lines), ", ".join(short)


def addition(rng: random.Random) -> Problem:
    a, b = operand(rng), operand(rng)
    lines, short = add_steps(a, b)
    return Problem(
        skill="addition",
        key=f"add:{min(a, b)}:{max(a, b)}",
        question=rng.choice(TEXTS["add"]).format(a=a, b=b),
        high=f"Add {a} and {b} digit by digit.\n{lines}\nresult: {a + b}",
        medium=f"{a} + {b}: {short}. So {a + b}.",
        answer=f"{a} + {b} = {a + b}",
    )


def subtraction(rng: random.Random) -> Problem:
    a, b = operand(rng), operand(rng)
    if a < b and rng.random() < 0.6:
        a, b = b, a
    big, small = max(a, b), min(a, b)
    lines, short = subtract_steps(big, small)
    note, sign = "", ""
    if a < b:
        note = f"{a} is less than {b}, so the result is negative.\n"
        sign = f" with a minus sign: {a - b}"
    return Problem(
        skill="subtraction",
        key=f"sub:{a}:{b}",
        question=rng.choice(TEXTS["subtract"]).format(a=a, b=b),
        high=(
            f"{note}Subtract {small} from {big} digit by digit.\n{lines}\n"
            f"result: {big - small}{sign}"
        ),
        medium=f"{note}{big} - {small}: {short}. So {a - b}.",
        answer=f"{a} - {b} = {a - b}",
    )


def multiplication(rng: random.Random) -> Problem:
    a, b = operand(rng), operand(rng)
    thought = f"This is a multiplication, so I call the calculator with {a} * {b}."
    return Problem(
        skill="calculator",
        key=f"mul:{min(a, b)}:{max(a, b)}",
        question=rng.choice(TEXTS["multiply"]).format(a=a, b=b),
        high=thought,
        medium="Use the calculator.",
        answer=f"{a} * {b} = {a * b}",
        expression=f"{a} * {b}",
        result=str(a * b),
    )


def multiplication_alone(rng: random.Random) -> Problem:
    """The same without a calculator: only the question is."""
    problem = multiplication(rng)
    return Problem(
        skill="unknown",
        key=problem.key.replace("mul", "mul-alone"),
        question=problem.question,
        high="This is a multiplication and there is no calculator, so I decline.",
        medium="There is no calculator.",
        answer=CANNOT_MULTIPLY,
    )


# Words ----------------------------------------------------------------------


PIECES = sorted({*TEXTS["words"], *re.findall(r"[a-z]{4,}", " ".join(GLOSSARY))})


def fragment(rng: random.Random) -> str:
    """Two to six letters from the middle of a word that people use."""
    source = rng.choice(PIECES)
    start = rng.randrange(len(source) - 1)
    return source[start : start + rng.randint(2, 6)]


def word(rng: random.Random) -> str:
    """A word of 3 to 13 letters: common, invented, pieced together or random.

    Pieces of common words teach how each token of the vocabulary is spelled, in
    any company.
    """
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(TEXTS["words"])
    if kind < 0.5:
        made = "".join(fragment(rng) for _ in range(rng.choice((1, 2, 2, 3))))
        return made[:13] if len(made) >= 3 else word(rng)
    if kind < 0.6:
        letters = "abcdefghijklmnopqrstuvwxyz"
        return "".join(rng.choice(letters) for _ in range(rng.randint(3, 9)))
    while True:
        made = ""
        for _ in range(rng.choice((1, 2, 2, 2, 3, 3))):
            coda = rng.choice(TEXTS["codas"]) if rng.random() < 0.5 else ""
            made += rng.choice(TEXTS["onsets"]) + rng.choice(TEXTS["vowels"]) + coda
        if 3 <= len(made) <= 11:
            return made


def counting(rng: random.Random) -> Problem:
    w = word(rng)
    c = rng.choice(w) if rng.random() < 0.8 else rng.choice("aeiorstnl")
    n, spelled = 0, []
    for letter in w:
        n += letter == c
        spelled.append(f"{letter}{n}" if letter == c else letter)
    times = "time" if n == 1 else "times"
    return Problem(
        skill="counting",
        key=f"word:{w}",
        question=rng.choice(TEXTS["count"]).format(c=c, w=w),
        high=f"Spell {w} and count {c}.\n{' '.join(spelled)}\ntotal: {n}",
        medium=f"{' '.join(spelled)}: {n}",
        answer=f'The letter "{c}" occurs {n} {times} in "{w}".',
    )


def rearranged(skill: str, question: str, w: str, how: str, made: str) -> Problem:
    """The letters of a word in another order."""
    letters, others = " ".join(w), " ".join(made)
    return Problem(
        skill=skill,
        key=f"word:{w}",
        question=question,
        high=f"Spell {w}: {letters}\n{how}: {others}\njoined: {made}",
        medium=f"{letters} -> {others}",
        answer=made,
    )


def reversing(rng: random.Random) -> Problem:
    if rng.random() < 0.3:
        return reversing_list(rng)
    w = word(rng)
    question = rng.choice(TEXTS["reverse"]).format(w=w)
    return rearranged("reversing", question, w, "backwards", w[::-1])


def numbers(rng: random.Random) -> list[int]:
    top = rng.choice((20, 100, 1000))
    return [rng.randrange(top) for _ in range(rng.randint(3, 6))]


def joined(values: list[int]) -> str:
    return ", ".join(map(str, values))


def reversing_list(rng: random.Random) -> Problem:
    values = numbers(rng)
    back = joined(values[::-1])
    phrase = rng.choice(TEXTS["reverse list"])
    return Problem(
        skill="reversing",
        key=f"list:{joined(values)}",
        question=phrase.format(v=joined(values)),
        high=f"From the last to the first: {back}",
        medium="From the last to the first.",
        answer=back,
    )


def sorting(rng: random.Random) -> Problem:
    if rng.random() < 0.2:
        return sorting_letters(rng)
    values = numbers(rng)
    down = rng.random() < 0.35
    ordered = sorted(values, reverse=down)
    name = "largest" if down else "smallest"
    left, lines = list(values), []
    for value in ordered:
        lines.append(f"{name} of {joined(left)}: {value}")
        left.remove(value)
    phrase = rng.choice(TEXTS["sort down"] if down else TEXTS["sort"])
    return Problem(
        skill="sorting",
        key=f"list:{joined(values)}",
        question=phrase.format(v=joined(values)),
        high="\n".join(lines),
        medium=f"{'Largest' if down else 'Smallest'} first: {joined(ordered)}",
        answer=joined(ordered),
    )


def sorting_letters(rng: random.Random) -> Problem:
    w = word(rng)
    question = rng.choice(TEXTS["sort letters"]).format(w=w)
    return rearranged("sorting", question, w, "in order", "".join(sorted(w)))


# Comparing ------------------------------------------------------------------


def comparing(rng: random.Random) -> Problem:
    decimal = rng.random() < 0.3
    while True:
        if decimal:
            whole = rng.randrange(20)
            a, b = (decimal_text(rng, whole) for _ in range(2))
        else:
            a, b = (str(rng.randrange(10 ** rng.randint(1, 4))) for _ in range(2))
        if float(a) != float(b):
            break
    larger = rng.random() < 0.6
    how = rng.choice(("larger", "bigger", "greater") if larger else ("smaller",))
    winner = a if (float(a) > float(b)) == larger else b
    loser = b if winner == a else a
    return Problem(
        skill="comparing",
        key=f"cmp:{min(a, b)}:{max(a, b)}",
        question=rng.choice(TEXTS["compare"]).format(how=how, a=a, b=b),
        high=f"{compare_steps(a, b)}\n{'larger' if larger else 'smaller'}: {winner}",
        medium=compare_steps(a, b).splitlines()[-1],
        answer=f"{winner} is {'larger' if larger else 'smaller'} than {loser}.",
    )


def decimal_text(rng: random.Random, whole: int) -> str:
    if rng.random() < 0.2:
        whole = rng.randrange(20)
    places = rng.randint(1, 2)
    return f"{whole}.{rng.randrange(1, 10**places):0{places}d}"


def compare_steps(a: str, b: str) -> str:
    """Whole parts by length, then digit by digit; decimals padded to two places."""
    lines = []
    if "." in a:
        (whole_a, part_a), (whole_b, part_b) = a.split("."), b.split(".")
        a, b = f"{whole_a}.{part_a:0<2}", f"{whole_b}.{part_b:0<2}"
        lines.append(f"Write both with two decimals: {a} and {b}.")
    else:
        whole_a, whole_b = a, b
    if len(whole_a) != len(whole_b):
        more, fewer = (a, b) if len(whole_a) > len(whole_b) else (b, a)
        lines.append(f"{more} has more digits than {fewer}: {more} > {fewer}")
        return "\n".join(lines)
    pairs = []
    for x, y in zip(a, b, strict=True):
        if x == ".":
            continue
        sign = "=" if x == y else ">" if x > y else "<"
        pairs.append(f"{x}{sign}{y}")
        if sign != "=":
            break
    lines.append(f"Digit by digit: {' '.join(pairs)}, so {a} {sign} {b}")
    return "\n".join(lines)


# Talk -----------------------------------------------------------------------


def glossary(rng: random.Random) -> Problem:
    term = rng.choice(list(GLOSSARY))
    index = rng.randrange(len(TEXTS["term"]))
    article = "an" if term[0].lower() in "aeiou" else "a"
    return Problem(
        skill="glossary",
        key=f"term:{term}:{index}",
        question=TEXTS["term"][index].format(t=term, an=article),
        high=f"The user asks about {term}. It is a term of the course.",
        medium=f"The term is {term}.",
        answer=GLOSSARY[term],
    )


def unknown(rng: random.Random) -> Problem:
    index = rng.randrange(len(TEXTS["unknown"]))
    one, two = (word(rng) for _ in range(2))
    year, number = rng.randint(2, 2030), rng.randint(2, 99)
    if (one.lower() in GLOSSARY) or (two.lower() in GLOSSARY):
        return unknown(rng)
    return Problem(
        skill="unknown",
        key=f"unknown:{index}:{one}:{two}:{year}:{number}",
        question=TEXTS["unknown"][index].format(
            w=one, v=two, W=one.capitalize(), V=two.capitalize(), y=year, z=number
        ),
        high="I have not learned this, so I say so and name what I can do.",
        medium="I have not learned this.",
        answer=CANNOT,
    )


def chat(rng: random.Random) -> Problem:
    question, answer = rng.choice(TEXTS["chat"])
    thought = "The user makes conversation."
    return Problem("chat", f"chat:train:{question}", question, thought, thought, answer)


# Drawing --------------------------------------------------------------------

EVALUATED: dict[str, Callable[[random.Random], Problem]] = {
    "addition": addition,
    "subtraction": subtraction,
    "counting": counting,
    "reversing": reversing,
    "sorting": sorting,
    "comparing": comparing,
    "glossary": glossary,
    "unknown": unknown,
    "calculator": multiplication,
}


def draw(
    make: Callable[[random.Random], Problem], rng: random.Random, *, evaluation: bool
) -> Problem:
    """A problem of one kind from one side of the split."""
    while True:
        problem = make(rng)
        if held_out(problem.key) == evaluation:
            return problem


def evaluation_set(count: int = 1000, seed: int = 0) -> list[Problem]:
    """`count` distinct held-out problems, the skills drawn in turn.

    The glossary has only some 70 held-out questions; the other skills fill up.
    """
    rng = random.Random(seed)
    chosen: dict[str, Problem] = {}
    for make in cycle(EVALUATED.values()):
        if len(chosen) == count:
            break
        problem = draw(make, rng, evaluation=True)
        chosen.setdefault(problem.question, problem)
    return list(chosen.values())


def asked_by_bench(count: int = 100) -> list[dict[str, str]]:
    """Those held out that `simplellm bench --formats` asks: without a calculator."""
    chosen = [
        problem for problem in evaluation_set(2 * count) if not problem.expression
    ]
    return [{"question": p.question, "answer": p.answer} for p in chosen[:count]]


if __name__ == "__main__":
    target = FOLDER.parents[1] / "simplellm/embedded/problems.json"
    target.write_text(json.dumps(asked_by_bench(), indent=1) + "\n", encoding="utf-8")
