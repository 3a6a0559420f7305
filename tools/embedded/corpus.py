"""Training documents: harmony conversations and raw text, as token ids.

A document is a list of (token ids, learned) spans. The loss counts only the spans
that the model has to write itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import lru_cache

from problems import (
    CALCULATOR,
    EVALUATED,
    Problem,
    addition,
    chat,
    comparing,
    counting,
    draw,
    glossary,
    multiplication,
    multiplication_alone,
    reversing,
    sorting,
    subtraction,
    unknown,
)

from simplellm.harmony import Message, Tool, developer_text, render, system_text
from simplellm.tokenizer import Tokenizer

Span = tuple[list[int], bool]

MIX: tuple[tuple[Callable[[random.Random], Problem], float], ...] = (
    (addition, 10),
    (subtraction, 12),
    (counting, 18),
    (reversing, 22),
    (sorting, 16),
    (comparing, 10),
    (glossary, 12),
    (unknown, 8),
    (multiplication_alone, 1),
    (chat, 1.5),
    (multiplication, 8),
)
MAKERS = [maker for maker, _ in MIX]
WEIGHTS = [weight for _, weight in MIX]
EFFORTS = ("low", "medium", "high")
THOUGHTLESS = {"glossary", "unknown", "chat", "calculator"}
INSTRUCTIONS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "Be concise.",
    "Be precise and polite.",
    "You are a careful teacher.",
    "Think step by step.",
)
TOOL = Tool(**CALCULATOR)


class Writer:
    """Turns problems into documents."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.special = tokenizer.special
        self.encode = lru_cache(maxsize=4096)(self._encode)
        self.opening = [self.special["<|start|>"], *self.encode("assistant")]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def message(self, role: str, text: str, end: str = "<|end|>") -> list[int]:
        return [
            self.special["<|start|>"],
            *self.encode(role),
            self.special["<|message|>"],
            *self.tokenizer.encode(text),
            self.special[end],
        ]

    def reply(self, channel: str, text: str, end: str) -> list[int]:
        """What follows `<|start|>assistant`: a channel, a text and its end."""
        return [
            self.special["<|channel|>"],
            *self.encode(channel),
            self.special["<|message|>"],
            *self.tokenizer.encode(text),
            self.special[end],
        ]

    def call(self, problem: Problem) -> list[int]:
        """What follows `<|start|>assistant` when the model calls the calculator."""
        return self.last_message(call_message(problem))[len(self.opening) :]

    def last_message(self, *messages: Message) -> list[int]:
        """The ids of the last of these messages, as harmony renders them."""
        ids = render(messages, self.tokenizer, add_generation_prompt=False)
        return ids[len(ids) - 1 - ids[::-1].index(self.special["<|start|>"]) :]

    def head(self, rng: random.Random, effort: str, with_tool: bool) -> list[int]:
        date = None
        if rng.random() < 0.1:
            month, day = rng.randint(1, 12), rng.randint(1, 28)
            date = f"{rng.randint(2024, 2030)}-{month:02d}-{day:02d}"
        text = system_text(effort, tools=with_tool, current_date=date)
        ids = self.message("system", text)
        says = rng.choice(INSTRUCTIONS) if rng.random() < 0.2 else None
        if with_tool or says:
            tools = (TOOL,) if with_tool else ()
            ids += self.message("developer", developer_text(says, tools))
        return ids

    def conversation(self, rng: random.Random) -> list[Span]:
        """A system message, at times earlier turns, and one turn to learn from."""
        problem = self.pick(rng)
        effort = rng.choices(EFFORTS, effort_weights(problem))[0]
        with_tool = problem.expression is not None or (
            problem.skill != "unknown" and rng.random() < 0.05
        )
        history = self.head(rng, effort, with_tool)
        for _ in range(rng.choice((1, 1, 2)) if rng.random() < 0.15 else 0):
            earlier = self.pick(rng)
            if earlier.expression and not with_tool:
                continue
            history += self.message("user", earlier.question)
            if earlier.expression:
                history += self.tool_round(earlier)
            history += self.opening + self.reply("final", earlier.answer, "<|end|>")
        if problem.expression and rng.random() < 0.3:  # the client kept no analysis
            history += self.message("user", problem.question)
            history += self.tool_round(problem) + self.opening
            final = self.reply("final", problem.answer, "<|return|>")
            return [(history, False), (final, True)]
        return self.turn(history, problem, effort)

    def turn(self, history: list[int], problem: Problem, effort: str) -> list[Span]:
        """The history, a question, and the reply that is to be learned.

        The calculator's result comes from outside, so it is not learned.
        """
        asked = history + self.message("user", problem.question) + self.opening
        thought = {"low": None, "medium": problem.medium, "high": problem.high}[effort]
        learned: list[int] = []
        if thought:
            learned += self.reply("analysis", thought, "<|end|>") + self.opening
        final = self.reply("final", problem.answer, "<|return|>")
        if not problem.expression:
            return [(asked, False), (learned + final, True)]
        return [
            (asked, False),
            (learned + self.call(problem), True),
            (self.tool_result(problem) + self.opening, False),
            (final, True),
        ]

    def tool_round(self, problem: Problem) -> list[int]:
        return self.opening + self.call(problem) + self.tool_result(problem)

    def tool_result(self, problem: Problem) -> list[int]:
        return self.last_message(call_message(problem), result_message(problem))

    def raw(self, rng: random.Random) -> list[Span]:
        """The question as plain text, continued by the work and the answer."""
        problem = self.pick(rng)
        while problem.expression:
            problem = self.pick(rng)
        text = f"\n{problem.high}\n{problem.answer}"
        learned = [*self.tokenizer.encode(text), self.special["<|endoftext|>"]]
        return [(self.tokenizer.encode(problem.question), False), (learned, True)]

    def pick(self, rng: random.Random) -> Problem:
        maker = rng.choices(MAKERS, WEIGHTS)[0]
        return draw(maker, rng, evaluation=False)

    def documents(self, seed: int) -> Iterator[list[Span]]:
        rng = random.Random(seed)
        while True:
            yield self.raw(rng) if rng.random() < 0.1 else self.conversation(rng)


def effort_weights(problem: Problem) -> tuple[float, float, float]:
    """How often a problem is shown at low, medium and high effort.

    What takes work is seldom shown without it: like a model of any size, this one
    is to rely on its reasoning rather than to learn every sum by heart.
    """
    return (1, 1, 1) if problem.skill in THOUGHTLESS else (0.05, 0.95, 1)


def call_message(problem: Problem) -> Message:
    return Message(
        role="assistant",
        content=f'{{"expression": "{problem.expression}"}}',
        channel="commentary",
        recipient="functions.calculator",
        content_type="<|constrain|>json",
    )


def result_message(problem: Problem) -> Message:
    return Message(
        role="tool",
        name="functions.calculator",
        content=problem.result or "",
        channel="commentary",
        recipient="assistant",
    )


def sample_texts(count: int, seed: int) -> Iterator[str]:
    """Plain texts for training the tokenizer, from the training side of the split."""
    rng = random.Random(seed)
    head = [
        system_text(effort, tools=tools)
        for effort in EFFORTS
        for tools in (False, True)
    ]
    for index in range(count):
        problem = draw(rng.choices(MAKERS, WEIGHTS)[0], rng, evaluation=False)
        yield f"{problem.question}\n{problem.high}\n{problem.answer}"
        yield problem.medium
        if problem.expression:
            yield call_message(problem).content
        if index % 20 == 0:
            yield head[index // 20 % len(head)]
            yield developer_text(rng.choice(INSTRUCTIONS), (TOOL,))
            yield "assistant user system developer analysis commentary final json"
            yield " to=functions.calculator to=assistant functions.calculator"


assert set(EVALUATED.values()) <= set(MAKERS)
