"""Training documents: harmony conversations and raw text, as token ids.

A document is a list of (token ids, learned) spans. The loss counts only the spans
that the model has to write itself.
"""

import random
from collections.abc import Callable, Iterator

from problems import (
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

from simplellm.apps.calculator import CALCULATOR
from simplellm.text.harmony import Message, developer_text, system_text
from simplellm.text.harmony.render import render_message
from simplellm.text.harmony.schema import as_tools
from simplellm.text.tokenizer import Tokenizer

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
(TOOL,) = as_tools([CALCULATOR])


class Writer:
    """Turns problems into documents."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.opening = 1 + len(tokenizer.encode("assistant"))  # ids before a reply

    def document(self, said: list[tuple[Message, bool]]) -> list[Span]:
        """Messages, and whether each is learned; the last ends the reply.

        What opens a learned message is learned only behind another: else it's there
        when the model begins.
        """
        spans: list[Span] = [([], False)]
        for message, learned in said:
            ids = render_message(message, self.tokenizer)
            if learned and not spans[-1][1]:
                spans[-1][0].extend(ids[: self.opening])
                ids = ids[self.opening :]
            if learned == spans[-1][1]:
                spans[-1][0].extend(ids)
            else:
                spans.append((ids, learned))
        spans[-1][0][-1] = self.tokenizer.special["<|return|>"]
        return spans

    def conversation(self, rng: random.Random) -> list[Span]:
        """A system message, at times earlier turns, and one turn to learn from."""
        problem = self.pick(rng)
        effort = rng.choices(EFFORTS, effort_weights(problem))[0]
        with_tool = problem.expression is not None or (
            problem.skill != "unknown" and rng.random() < 0.05
        )
        history = head(rng, effort, with_tool)
        for _ in range(rng.choice((1, 1, 2)) if rng.random() < 0.15 else 0):
            earlier = self.pick(rng)
            if not earlier.expression or with_tool:
                history += [Message("user", earlier.question), *tool_round(earlier)]
                history.append(reply("final", earlier.answer))
        if problem.expression and rng.random() < 0.3:  # the client kept no analysis
            history += [Message("user", problem.question), *tool_round(problem)]
            learned = [(reply("final", problem.answer), True)]
            return self.document([(one, False) for one in history] + learned)
        return self.turn(history, problem, effort)

    def turn(self, history: list[Message], problem: Problem, effort: str) -> list[Span]:
        """The history, a question, and the reply that is to be learned.

        The calculator's result comes from outside, so it is not learned.
        """
        said = [(one, False) for one in (*history, Message("user", problem.question))]
        thought = {"low": None, "medium": problem.medium, "high": problem.high}[effort]
        if thought:
            said.append((reply("analysis", thought), True))
        said += [(one, one.role == "assistant") for one in tool_round(problem)]
        return self.document([*said, (reply("final", problem.answer), True)])

    def raw(self, rng: random.Random) -> list[Span]:
        """The question as plain text, continued by the work and the answer."""
        problem = self.pick(rng)
        while problem.expression:
            problem = self.pick(rng)
        learned = self.tokenizer.encode(f"\n{problem.high}\n{problem.answer}")
        learned.append(self.tokenizer.special["<|endoftext|>"])
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


def head(rng: random.Random, effort: str, with_tool: bool) -> list[Message]:
    """A system message, and one of a developer if there is anything to say."""
    date = None
    if rng.random() < 0.1:
        month, day = rng.randint(1, 12), rng.randint(1, 28)
        date = f"{rng.randint(2024, 2030)}-{month:02d}-{day:02d}"
    system = system_text(effort, tools=with_tool, current_date=date)
    says = rng.choice(INSTRUCTIONS) if rng.random() < 0.2 else None
    text = developer_text(says, (TOOL,) if with_tool else ())
    return [Message("system", system), *([Message("developer", text)] if text else [])]


def reply(channel: str, text: str) -> Message:
    return Message("assistant", text, channel=channel)


def tool_round(problem: Problem) -> list[Message]:
    """The call of the calculator and what it returns, if the problem has one."""
    if not problem.expression:
        return []
    return [call_message(problem), result_message(problem)]


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
