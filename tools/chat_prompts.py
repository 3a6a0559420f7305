"""Writes questions for `train_head.py --prompts`, a line each, about what is here.

    python tools/chat_prompts.py > prompts.txt

Cities of the world (of Python's time zones), Python's modules and functions, and the
terms of the course's glossary, each with all questions of its kind. Nothing that the
last 100 lines ask about is asked about before, so that these can be held out.
"""

import builtins
import random
import re
import sys
import zoneinfo
from collections.abc import Sequence
from pathlib import Path

GLOSSARY = Path(__file__).parents[1] / "chapters/glossary.md"
HELD_OUT = 100
QUESTIONS: dict[str, Sequence[str]] = {
    "city": (
        "Tell me about {}.",
        "What is the best time of the year to visit {}?",
        "Plan a weekend in {} for a family of four.",
        "Write a short story that begins in {}.",
        "Write a friendly e-mail that invites a colleague to {}.",
    ),
    "module": (
        "What is Python's module {} for?",
        "Write a short Python program that uses the module {}.",
        "Which mistakes do beginners make with Python's module {}?",
    ),
    "function": (
        "What does {} do in Python?",
        "Write a short example of {} in Python.",
    ),
    "term": (
        "Explain {} in simple words.",
        "Why does {} matter for a language model?",
        "Give three facts about {}.",
    ),
}


def topics() -> dict[str, list[str]]:
    """What can be asked about, by kind."""
    zones = (name.split("/") for name in zoneinfo.available_timezones())
    regions = {"Africa", "America", "Asia", "Australia", "Europe", "Pacific"}
    cities = {zone[-1].replace("_", " ") for zone in zones if zone[0] in regions}
    owners = (str, list, dict, set, bytes, int, float)
    methods = {
        f"{owner.__name__}.{name}()"
        for owner in owners
        for name in vars(owner)
        if not name.startswith("_")
    }
    functions = {f"{name}()" for name in vars(builtins) if name.islower()}
    terms = re.findall(r"^- \*\*(.+?)\*\*", GLOSSARY.read_text(encoding="utf-8"), re.M)
    modules = [name for name in sys.stdlib_module_names if not name.startswith("_")]
    return {
        "city": sorted(cities),
        "module": sorted(modules),
        "function": sorted(methods | functions),
        "term": sorted(terms),
    }


def questions(seed: int = 0) -> list[str]:
    """All of them, shuffled; those that are held out come last."""
    rng = random.Random(seed)
    about = [(kind, name) for kind, names in topics().items() for name in names]
    rng.shuffle(about)
    last = [rng.choice(QUESTIONS[kind]).format(x) for kind, x in about[:HELD_OUT]]
    first = [text.format(x) for kind, x in about[HELD_OUT:] for text in QUESTIONS[kind]]
    rng.shuffle(first)
    return [*first, *last]


if __name__ == "__main__":
    print(*questions(), sep="\n")
