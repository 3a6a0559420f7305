"""The `simplellm` command: ask one question, hold a chat, describe a checkpoint.

The answer goes to standard output; reasoning, tool calls and errors go to standard
error, so that `simplellm "What is 47 + 85?" | wc` counts the answer alone. Colors
appear on a terminal only.

Exit status: 0 done, 1 failed, 2 bad input, 130 stopped with Ctrl-C.
"""

import ast
import json
import operator
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from simplellm import __version__

if TYPE_CHECKING:  # importing torch takes seconds: commands do it when they need it
    from simplellm.generate import LLM
    from simplellm.harmony import Delta

MAX_TOOL_CALLS = 8  # per question; a model that never stops calling is cut off here
MAX_EXPRESSION = 100  # characters

# What a model writes may hold escape sequences: on a terminal they are made visible.
CONTROLS = {
    code: 0xFFFD for code in [*range(32), *range(127, 160)] if chr(code) not in "\t\n"
}

# The base of typer.BadParameter, which typer itself does not export.
UsageError: Any = typer.BadParameter.__mro__[1]

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "The expression, such as 12 * 34.",
                }
            },
            "required": ["expression"],
        },
    },
}
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class ReasoningEffort(StrEnum):
    """How long the model thinks before it answers."""

    low = "low"
    medium = "medium"
    high = "high"


class PromptGroup(TyperGroup):
    """Commands of which `ask` is the default: what names no other is its prompt."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "--help", "--version"}:
            args = ["ask", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=PromptGroup, add_completion=False, rich_markup_mode=None)

Model = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Folder of a gpt-oss checkpoint.  [embedded]"),
]
Effort = Annotated[ReasoningEffort, typer.Option(help="How long to think.")]
Developer = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Instructions for the model.")
]
Calculator = Annotated[
    bool, typer.Option("--calculator", help="Offer the model a calculator to call.")
]
Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy.  [the checkpoint's]")
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Most tokens to generate, reasoning included.")
]
Seed = Annotated[int | None, typer.Option(help="Makes a random answer repeatable.")]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda.  [cuda where there is one]")
]


@dataclass
class Turn:
    """One turn of the model, put together from its deltas."""

    reasoning: str = ""
    content: str = ""
    calls: dict[str, str] = field(default_factory=dict)  # arguments by function name

    def message(self) -> dict[str, Any]:
        """The turn as a message of the OpenAI chat format."""
        calls = [
            {
                "id": name,
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name, arguments in self.calls.items()
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        return message | ({"tool_calls": calls} if calls else {})


@dataclass
class Screen:
    """Where text goes: the answer to `out`, all else dim to `err`."""

    out: Console = field(default_factory=Console)
    err: Console = field(default_factory=lambda: Console(stderr=True))
    at_line_start: bool = True

    def write(self, text: str, *, aside: bool = False) -> None:
        """Show ``text`` at once; ``aside`` marks what is not part of the answer."""
        console = self.err if aside else self.out
        if console.is_terminal:
            text = text.translate(CONTROLS)
        if text:
            style = "dim" if aside else None
            console.out(text, style=style, end="", highlight=False)
            console.file.flush()
            self.at_line_start = text.endswith("\n")

    def end_line(self, *, aside: bool = False) -> None:
        """Begin a new line unless the cursor is at the start of one."""
        if not self.at_line_start:
            self.write("\n", aside=aside)

    def error(self, error: object) -> None:
        """One line that says what went wrong."""
        self.end_line(aside=True)
        line = " ".join(str(error).split())
        self.err.out(f"error: {line}", style="red", highlight=False)


def show(deltas: Iterable["Delta"], screen: Screen) -> Turn:
    """Write a turn of the model while it arrives, and collect it."""
    turn = Turn()
    before = None
    for delta in deltas:
        call = (delta.recipient or "").removeprefix("functions.")
        aside = bool(call) or delta.channel == "analysis"
        if before is not None and before != (aside, call):
            screen.end_line(aside=True)
        if call:
            if call not in turn.calls:
                screen.write(f"{call} ", aside=True)
            turn.calls[call] = turn.calls.get(call, "") + delta.text
        elif aside:
            turn.reasoning += delta.text
        else:
            turn.content += delta.text
        screen.write(delta.text, aside=aside)
        before = (aside, call)
    screen.end_line(aside=before is not None and before[0])
    return turn


def calculate(expression: str) -> int | float:
    """The value of sums, differences and products of numbers.

    Raises ValueError for anything else.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"the expression is longer than {MAX_EXPRESSION} characters")
    unknown = ValueError(f"cannot evaluate {expression!r}; expected numbers and + - *")

    def value(node: ast.AST) -> int | float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
        raise unknown

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        raise unknown from None


def call_tool(name: str, arguments: str) -> str:
    """What the model is told when it calls function ``name``; never raises."""
    try:
        if name != "calculator":
            raise ValueError(f"there is no function {name!r}; expected 'calculator'")
        return str(calculate(json.loads(arguments)["expression"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return f"error: {error}"


def respond(
    llm: "LLM", messages: list[dict[str, Any]], screen: Screen, **options: Any
) -> None:
    """Stream the answer to ``messages`` and append it, tool calls included."""
    for _ in range(MAX_TOOL_CALLS):
        turn = show(llm.stream_chat(messages, **options), screen)
        messages.append(turn.message())
        for name, arguments in turn.calls.items():
            result = call_tool(name, arguments)
            screen.write(f"= {result}\n", aside=True)
            messages.append({"role": "tool", "tool_call_id": name, "content": result})
        if not turn.calls:
            return


def load(model: str | None, device: str | None, screen: Screen) -> "LLM":
    """The engine with its model loaded, a spinner turning on a terminal meanwhile."""
    with screen.err.status("Loading the model"):
        from simplellm import LLM

        return LLM(model, device=device)


def start(developer: str | None) -> list[dict[str, Any]]:
    """The messages of a conversation in which nothing has been said."""
    return [{"role": "developer", "content": developer}] if developer else []


def chat_options(
    effort: ReasoningEffort, calculator: bool, **sampling: float | None
) -> dict[str, Any]:
    """What the options say, as `LLM.stream_chat` wants it."""
    given = {name: value for name, value in sampling.items() if value is not None}
    tools = [CALCULATOR] if calculator else None
    return {"reasoning_effort": effort.value, "tools": tools, **given}


def read_prompt(prompt: str) -> str:
    """The prompt, from standard input if it is "-"."""
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode().rstrip("\n")
    except UnicodeDecodeError:
        raise ValueError(
            "the prompt on standard input is not text; expected UTF-8"
        ) from None


@app.command()
def ask(
    prompt: Annotated[
        str, typer.Argument(help='The question; "-" reads it from standard input.')
    ],
    model: Model = None,
    reasoning_effort: Effort = ReasoningEffort.medium,
    developer: Developer = None,
    calculator: Calculator = False,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    device: Device = None,
) -> None:
    """Answer one question. The word "ask" may be left out."""
    screen = Screen()
    message = {"role": "user", "content": read_prompt(prompt)}
    with load(model, device, screen) as llm:
        options = chat_options(
            reasoning_effort,
            calculator,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
        )
        respond(llm, [*start(developer), message], screen, **options)


@app.command()
def chat(
    model: Model = None,
    reasoning_effort: Effort = ReasoningEffort.medium,
    developer: Developer = None,
    calculator: Calculator = False,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    device: Device = None,
) -> None:
    """Hold a conversation. /reset forgets it, Ctrl-D or /exit ends it."""
    with suppress(ImportError):  # gives input() line editing and history, on Unix
        import readline  # noqa: F401
    screen = Screen()
    caret = "> " if sys.stdin.isatty() else ""
    options = chat_options(
        reasoning_effort,
        calculator,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
    )
    with load(model, device, screen) as llm:
        messages = start(developer)
        while True:
            try:
                line = input(caret).strip()
            except EOFError:
                return
            match line:
                case "":
                    continue
                case "/exit" | "exit":
                    return
                case "/reset":
                    messages = start(developer)
                    continue
            turns = [*messages, {"role": "user", "content": line}]
            try:
                respond(llm, turns, screen, **options)
            except ValueError as error:
                screen.error(error)
            else:
                messages = turns


def version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"simplellm {__version__}")
        raise typer.Exit


@app.callback()
def simplellm(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=version, is_eager=True, help="Show it and exit."
        ),
    ] = False,
) -> None:
    """Run gpt-oss, from the small embedded model up to gpt-oss-120b."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        status = app(
            args=arguments or ["--help"], prog_name="simplellm", standalone_mode=False
        )
        return status or 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except UsageError as error:
        Screen().error(error.format_message())
        return 2
    except (ValueError, TypeError) as error:
        Screen().error(error)
        return 2
    except Exception as error:
        Screen().error(f"{type(error).__name__}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
