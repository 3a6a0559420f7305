"""The `simplellm` command: ask, chat, run files of requests, describe, measure.

The answer goes to standard output; reasoning, tool calls and errors go to standard
error, so that `simplellm "What is 47 + 85?" | wc` counts the answer alone. Colors
appear on a terminal only.

Exit status: 0 done, 1 failed, 2 bad input, 130 stopped with Ctrl-C.
"""

import ast
import json
import operator
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from simplellm import __version__

if TYPE_CHECKING:  # importing torch takes seconds: commands do it when they need it
    from simplellm.checkpoint import TensorInfo
    from simplellm.config import ModelConfig
    from simplellm.harmony import Delta
    from simplellm.llm import LLM

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


class Device(StrEnum):
    """Where the model runs."""

    cpu = "cpu"
    cuda = "cuda"


class PromptGroup(TyperGroup):
    """Commands of which `ask` is the default: what names no other is its prompt."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "--help", "--version"}:
            args = ["ask", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=PromptGroup,
    add_completion=False,
    rich_markup_mode=None,
    subcommand_metavar="PROMPT | COMMAND",
)

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
    float | None,
    typer.Option(min=0, max=100, help="0 is greedy.  [the checkpoint's]"),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Most tokens to generate, reasoning included."),
]
Seed = Annotated[int | None, typer.Option(help="Makes a random answer repeatable.")]
Where = Annotated[
    Device | None, typer.Option(help="Where to run.  [cuda where there is one]")
]


@dataclass
class Call:
    """A function call, put together from its deltas."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Turn:
    """One turn of the model, put together from its deltas."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """The turn as a message of the OpenAI chat format."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in self.calls
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


def function_name(recipient: str) -> str:
    """The name of the function that is called, as the next prompt can hold it."""
    return re.sub(r"[^\w.-]", "_", recipient.removeprefix("functions.")) or "_"


def show(deltas: Iterable["Delta"], screen: Screen) -> Turn:
    """Write a turn of the model while it arrives, and collect it."""
    turn = Turn()
    before = None
    for delta in deltas:
        aside = delta.recipient is not None or delta.channel == "analysis"
        now = (aside, delta.recipient, delta.call)
        if before is not None and before != now:
            screen.end_line(aside=before[0])
        if delta.call is not None:
            if delta.call == len(turn.calls):
                name = function_name(delta.recipient or "")
                turn.calls.append(Call(f"call_{delta.call}", name))
                screen.write(f"{name} ", aside=True)
            turn.calls[-1].arguments += delta.text
        elif delta.recipient is None and aside:
            turn.reasoning += delta.text
        elif delta.recipient is None:
            turn.content += delta.text
        screen.write(delta.text, aside=aside)
        before = now
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
                if not isinstance(number, bool):
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
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"error: {error}"


def respond(
    llm: "LLM", messages: list[dict[str, Any]], screen: Screen, **options: Any
) -> None:
    """Stream the answer to ``messages`` and append it, tool calls included."""
    for _ in range(MAX_TOOL_CALLS):
        turn = show(llm.stream_chat(messages, **options), screen)
        messages.append(turn.message())
        for call in turn.calls:
            result = call_tool(call.name, call.arguments)
            screen.write(f"= {result}\n", aside=True)
            answer = {"role": "tool", "tool_call_id": call.id, "content": result}
            messages.append(answer)
        if not turn.calls:
            break
    if not turn.content:
        screen.write("(the model stopped without an answer)\n", aside=True)


def load(model: str | None, device: Device | None, screen: Screen) -> "LLM":
    """The engine with its model loaded."""
    with screen.err.status("Starting PyTorch"):  # a spinner, on a terminal only
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
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode().rstrip("\n")
        except UnicodeDecodeError:
            raise ValueError(
                "the prompt on standard input is not text; expected UTF-8"
            ) from None
    if not prompt.strip():
        raise ValueError("the prompt is empty; expected a question")
    return prompt


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
    device: Where = None,
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
    device: Where = None,
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


def expected_tensors(config: "ModelConfig") -> list["TensorInfo"]:
    """What OpenAI's checkpoint of this model holds: packed experts, the rest bf16."""
    from simplellm.checkpoint import ITEMSIZE, TensorInfo, stored_shapes

    infos = []
    for parts in stored_shapes(config, "huggingface", packed=True).values():
        for name, shape in parts.items():
            dtype = "U8" if name.endswith(("_blocks", "_scales")) else "BF16"
            nbytes = prod(shape) * ITEMSIZE[dtype]
            infos.append(TensorInfo(name, dtype, shape, nbytes, Path()))
    return infos


def tensors_by_kind(
    config: "ModelConfig", infos: Iterable["TensorInfo"], layout: str, packed: bool
) -> dict[str, list["TensorInfo"]]:
    """The tensors on disk of each part of the model."""
    from simplellm.checkpoint import kind, stored_shapes

    on_disk = {info.name: info for info in infos}
    kinds: dict[str, list[TensorInfo]] = {}
    for ours, names in stored_shapes(config, layout, packed).items():
        kinds.setdefault(kind(ours), []).extend(on_disk[name] for name in names)
    return kinds


def sizes(config: "ModelConfig", total: int, active: int) -> dict[str, str]:
    """The model's dimensions in words."""
    layers = ", ".join(
        f"{config.layer_types.count(layer_type)} {layer_type.replace('_', ' ')}"
        for layer_type in dict.fromkeys(config.layer_types)
    )
    windowed = config.sliding_window is not None
    window = {"window": f"{config.sliding_window} tokens"} if windowed else {}
    return {
        "parameters": f"{total:,}, of which {active:,} active for each token",
        "layers": f"{config.num_hidden_layers}: {layers}",
        **window,
        "hidden size": f"{config.hidden_size:,}",
        "heads": f"{config.num_attention_heads} for queries, "
        f"{config.num_key_value_heads} for keys and values, of {config.head_dim} each",
        "experts": f"{config.num_local_experts} a layer, {config.num_experts_per_tok} "
        f"for each token, intermediate size {config.intermediate_size:,}",
        "vocabulary": f"{config.vocab_size:,} tokens",
        "context": f"{config.max_position_embeddings:,} tokens",
    }


@app.command()
def info(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATH]",
            help="A checkpoint folder, gpt-oss-20b or gpt-oss-120b.  [embedded]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Tabulate a checkpoint from its headers; no tensor is read."""
    from simplellm.checkpoint import Checkpoint, count_parameters
    from simplellm.config import MODELS

    if path in MODELS and not Path(path).exists():
        config, infos = MODELS[path], expected_tensors(MODELS[path])
        layout, packed, source = "huggingface", True, "no files, the published shapes"
    else:
        folder = Path(__file__).with_name("embedded") if path is None else Path(path)
        checkpoint = Checkpoint(folder)
        config, infos = checkpoint.config, checkpoint.infos()
        layout, packed = checkpoint.layout, checkpoint.packed
        files = len({info.file for info in infos})
        source = f"safetensors files: {files}, layout: {layout}"
    total, active, parameters = count_parameters(config)
    kinds = tensors_by_kind(config, infos, layout, packed)
    nbytes = sum(info.nbytes for info in infos)
    table = Table(box=None, padding=(0, 2), pad_edge=False, show_footer=True)
    table.add_column("part", "total")
    table.add_column("stored as")
    table.add_column("parameters", f"{total:,}", justify="right")
    table.add_column("bytes", f"{nbytes:,}", justify="right")
    table.add_column("share", "100.0%", justify="right")
    for kind, count in parameters.items():  # tied, the embedding is the LM head
        tensors = kinds[kind]
        dtypes = ("MXFP4" if info.dtype == "U8" else info.dtype for info in tensors)
        size = sum(info.nbytes for info in tensors)
        table.add_row(
            kind,
            ", ".join(dict.fromkeys(dtypes)),
            f"{count:,}",
            f"{size:,}",
            f"{size / nbytes:.1%}",
        )
    console = Console(highlight=False)
    console.out(f"{path or 'the embedded model'}: {source}\n", highlight=False)
    for name, line in sizes(config, total, active).items():
        console.out(f"{name:<12} {line}", highlight=False)
    console.print()
    console.print(table)


@app.command()
def batch(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN.jsonl",
            help="Requests: objects with prompt or messages, id, temperature, …",
            exists=True,
            dir_okay=False,
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT.jsonl",
            help="Results, each with its request's id, as they are finished.",
            dir_okay=False,
        ),
    ],
    model: Model = None,
    device: Where = None,
) -> int:
    """Answer a file of requests. What was stopped goes on where it was."""
    from simplellm import jobs

    screen = Screen()
    if target.exists() and source.samefile(target):
        raise ValueError(f"{target} is both input and output; expected two files")
    if not source.is_file():
        raise ValueError(f"{source} is no file; expected one, since it is read twice")
    ids = jobs.read_ids(source)
    with jobs.open_results(target, ids) as (file, done):
        totals = jobs.count(done)
        if len(done) < len(ids):
            with load(model, device, screen) as llm:
                try:
                    totals = jobs.run(llm, source, file, done)
                except KeyboardInterrupt:
                    screen.write("stopped; the same command goes on\n", aside=True)
                    raise
    summary = f"{totals.answered} answered, {totals.rejected} errors"
    screen.write(f"{len(ids)} requests: {summary}\n", aside=True)
    if totals.failed:
        screen.error(
            f"{totals.failed} requests failed, the last one with {totals.cause!r}; the "
            "same command tries them again"
        )
    return int(totals.failed + totals.rejected > 0)


def numbers(name: str, text: str) -> tuple[int, ...]:
    """The integers of an option such as "1,8,64"; none of an empty text."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ValueError(
            f"--{name} is {text}; expected integers such as 1,8,64"
        ) from None


def pairs(name: str, text: str) -> tuple[tuple[int, int], ...]:
    """The pairs of an option such as "32x2048,1x2048"."""
    try:
        parts = [part.split("x") for part in text.split(",")] if text else []
        return tuple((int(count), int(length)) for count, length in parts)
    except ValueError:
        raise ValueError(
            f"--{name} is {text}; expected prompts x tokens such as 32x2048,1x2048"
        ) from None


@app.command()
def bench(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint folder; with --random-weights also gpt-oss-20b or "
            "gpt-oss-120b.  [embedded]",
            show_default=False,
        ),
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Only the shapes of the model.")
    ] = False,
    batch: Annotated[str, typer.Option(help="Requests at once, as in 1,8,64.")] = "1",
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
    prefill: Annotated[
        str, typer.Option(help="Prompts x tokens, as in 32x2048,1x2048.")
    ] = "",
    context: Annotated[
        str, typer.Option(help="Tokens in the cache, as in 32768,131072.")
    ] = "",
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write all numbers.", dir_okay=False
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw speeds and limit (.svg, .png, .pdf).",
            dir_okay=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and random weights.")] = 0,
    device: Where = None,
) -> None:
    """Measure a model's speed, and what this machine allows."""
    screen = Screen()
    with screen.err.status("Starting PyTorch"):
        from simplellm import bench as benchmark
        from simplellm import report
    plan = benchmark.Plan(
        batches=numbers("batch", batch),
        input_len=input_len,
        output_len=output_len,
        prefills=pairs("prefill", prefill),
        contexts=numbers("context", context),
        seed=seed,
    )
    for file in (json_file, plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(f"there is no folder {file.absolute().parent} for {file}")
    if plot is not None:
        report.check_plot(plot)
    found = benchmark.measure(
        plan,
        model,
        random_weights=random_weights,
        device=device,
        command=shlex.join(["simplellm", *ctx.obj]),
    )
    if json_file is not None:
        report.write_json(found, json_file)
    if plot is not None:
        report.plot(found, plot)
    console = Console(highlight=False)
    for line in report.summary(found):
        console.out(line, highlight=False)
    for table in report.tables(found):
        console.print()
        console.print(table)


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
    """Run gpt-oss, from the small embedded model up to gpt-oss-120b.

    \b
    simplellm "What is 47 + 85?"
    simplellm chat --calculator
    simplellm batch questions.jsonl answers.jsonl
    simplellm info gpt-oss-120b
    simplellm bench --batch 1,4
    """


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        status = app(
            args=arguments or ["--help"],
            prog_name="simplellm",
            standalone_mode=False,
            obj=arguments,
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
