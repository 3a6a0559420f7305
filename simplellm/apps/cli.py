"""The `simplellm` command: ask, chat, run files of requests, describe, measure.

The answer goes to standard output; reasoning, tool calls and errors go to standard
error, so that `simplellm "What is 47 + 85?" | wc` counts the answer alone. Colors
appear on a terminal only, and not where NO_COLOR is set.

Exit status: 0 done, 1 failed, 2 bad input, 130 stopped with Ctrl-C.
"""

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from simplellm import __version__
from simplellm.apps import options
from simplellm.apps.calculator import CALCULATOR
from simplellm.apps.install import ensure_installed
from simplellm.apps.screen import Screen, converse, greeting, read_lines, respond
from simplellm.apps.serving import needs_extra, serve_model
from simplellm.apps.workloads import plan_load
from simplellm.base.config import expect
from simplellm.checkpoint.packages import PACKAGED

if TYPE_CHECKING:  # importing torch takes seconds: commands do it when they need it
    from simplellm.api.llm import LLM

CHAT_HELP = """Hold a conversation. /help says what can be typed.

Ctrl-C ends an answer that is being written, and otherwise the chat."""
# The base of typer.BadParameter, which typer itself does not export.
UsageError: Any = typer.BadParameter.__mro__[1]


class PromptGroup(TyperGroup):
    """Commands of which `ask` is the default: what names no other is its prompt.

    Exceptions are `help`, and a single word that is nearly a command's name or names a
    model.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first, commands = args[0], [*self.commands, "help"]
        if first == "help":
            args = [*args[1:], "--help"]
        elif first not in {*commands, "-h", "--help", "--version"}:
            # Closer than "hello" is to "help".
            near = get_close_matches(first, commands, n=1, cutoff=0.7)
            if near and " " not in first and not first.startswith("-"):
                ctx.fail(
                    f"there is no command {first!r}; did you mean {near[0]!r}? To ask "
                    f"the model, use simplellm ask {first}"
                )
            if names_model(first):
                ctx.fail(
                    f"{first} is a model and no question. To chat with it: simplellm "
                    f"chat {shlex.quote(first)}"
                )
            args = ["ask", *args]
        return super().parse_args(ctx, args)


def names_model(word: str) -> bool:
    """Whether a word is a model's name, or a checkpoint's folder or file here."""
    from simplellm.checkpoint.families.gpt_oss import MODELS

    path = Path(word)
    return (
        word.lower() in {*MODELS, *PACKAGED}
        or (path.suffix == ".gguf" and path.is_file())
        or (path / "config.json").is_file()
        or (path.is_dir() and any(path.glob("*.gguf")))
    )


class PlainUsage(TyperCommand):
    """A command whose usage shows required arguments without braces."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


app = typer.Typer(
    cls=PromptGroup,
    add_completion=False,
    rich_markup_mode=None,
    subcommand_metavar="PROMPT | COMMAND",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def load_llm(ctx: typer.Context, screen: Screen) -> "LLM":
    """The LLM of a command's options; its model's package is installed if need be."""
    model = ctx.params["model"]
    ensure_installed(model, ctx.params.get("yes", False), screen)
    with screen.waiting("Starting PyTorch"):
        import simplellm.api.load  # noqa: F401  (which the LLM will ask for)
        from simplellm.api.llm import LLM
    where: Any = {key: ctx.params.get(key) for key in ("device", "dtype")}
    return LLM(model, options.asked_config(ctx), **where)


def options_of(ctx: typer.Context) -> dict[str, Any]:
    """What a chat is asked with, by the options that both commands have."""
    params = ctx.params
    tools = [CALCULATOR] if params["calculator"] else None
    effort = params["reasoning_effort"]
    return options.sampling(ctx) | {"reasoning_effort": effort, "tools": tools}


def first_messages(developer: str | None) -> list[dict[str, Any]]:
    """The messages that a conversation begins with."""
    return [{"role": "developer", "content": developer}] if developer else []


@app.command("ask")
def answer_question(
    ctx: typer.Context,
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT",
            help='The question; "-" reads it from standard input.',
            show_default=False,
        ),
    ] = "",
    model: options.ModelFolder = None,
    reasoning_effort: options.Effort = None,
    developer: options.Developer = None,
    calculator: options.Calculator = False,
    temperature: options.Temperature = None,
    max_tokens: options.MaxTokens = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    stop: options.Stop = None,
    seed: options.ReplySeed = None,
    device: options.Where = None,
    dtype: options.DType = None,
    cache_bytes: options.CacheBytes = None,
    yes: options.Yes = False,
) -> None:
    """Answer one question. The word "ask" may be left out."""
    screen = Screen()
    if prompt == "-":
        prompt = sys.stdin.buffer.read().decode().rstrip("\n")
    if not prompt.strip():
        raise ValueError("the prompt is empty; expected a question")
    settings = options_of(ctx)
    with load_llm(ctx, screen) as llm:
        messages = [*first_messages(developer), {"role": "user", "content": prompt}]
        respond(llm.stream_chat, messages, screen, **settings)


@app.command("chat", help=CHAT_HELP)
def hold_chat(
    ctx: typer.Context,
    model: options.ModelArgument = None,
    reasoning_effort: options.Effort = None,
    developer: options.Developer = None,
    calculator: options.Calculator = False,
    temperature: options.Temperature = None,
    max_tokens: options.MaxTokens = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    stop: options.Stop = None,
    seed: options.ReplySeed = None,
    device: options.Where = None,
    dtype: options.DType = None,
    cache_bytes: options.CacheBytes = None,
    yes: options.Yes = False,
) -> None:
    """Answer every line that is typed."""
    screen = Screen()
    settings = options_of(ctx)
    with load_llm(ctx, screen) as llm:

        def answer(messages: list[dict[str, Any]]) -> None:
            respond(llm.stream_chat, messages, screen, **settings)

        help = greeting(model)
        if sys.stdin.isatty():
            screen.write(help, aside=True)
        converse(answer, first_messages(developer), read_lines(screen), screen, help)


@app.command()
def info(model: options.ModelName = None) -> None:
    """Tabulate a checkpoint from its headers; no tensor is read."""
    from simplellm.apps.info import describe

    for text in describe(model):
        print(text)


def check_files(source: Path, target: Path) -> None:
    """Raise ValueError unless a batch can be read, and its results kept."""
    options.check_folder(target)
    for path, there in ((source, True), (target, target.exists())):
        if str(path) == "-" or (there and not path.is_file()):
            raise ValueError(f"{path} is no file; expected one that can be read again")
    if target.exists() and source.samefile(target):
        raise ValueError(f"{target} is both input and output; expected two files")


def summarize(
    screen: Screen, done: Mapping[Any, bool], failures: Sequence[Exception]
) -> int:
    """Say what became of a batch; the exit status."""
    rejected = sum(done.values())
    summary = f"{len(done) - rejected} answered, {rejected} errors"
    screen.write(f"{len(done) + len(failures)} requests: {summary}\n", aside=True)
    if failures:
        screen.error(
            f"{len(failures)} requests failed, the last one with {failures[-1]!r}; the "
            "same command tries them again"
        )
    return int(len(failures) + rejected > 0)


@app.command(cls=PlainUsage)
def batch(
    ctx: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN.jsonl",
            help="Requests as OpenAI's batches have them: custom_id, url and body.",
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT.jsonl",
            help="Results, each with its request's custom_id, as they are finished.",
        ),
    ],
    model: options.ModelFolder = None,
    temperature: options.Temperature = None,
    max_tokens: options.MaxTokens = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    stop: options.Stop = None,
    device: options.Where = None,
) -> int:
    """Answer a batch file. What was stopped goes on where it was.

    Sampling options are for lines that leave them open.

    A request that was rejected is tried again once it is changed. One that has been
    answered must stay as it is: a new question needs a new custom_id.
    """
    with needs_extra():
        from simplellm.apps import batch_file
        from simplellm.apps.offline import answer_line
    screen = Screen()
    defaults = options.sampling(ctx)
    check_files(source, target)
    requests = batch_file.read_requests(source)
    failures: list[Exception] = []
    with batch_file.open_results(target, requests) as (file, done):
        if len(done) < len(requests):
            with load_llm(ctx, screen) as llm:
                answer = partial(answer_line, llm, defaults)
                try:
                    failures = batch_file.answer_all(answer, requests, file, done)
                except KeyboardInterrupt:
                    screen.write("stopped; the same command goes on\n", aside=True)
                    raise
    return summarize(screen, done, failures)


def compare(
    llm: Any, model: str | None, formats: bool, drafts: tuple[Any, Any], **options: Any
) -> tuple[dict[str, Any], Any]:
    """The record of number formats, or of what drafts bring, and the tables to show."""
    from simplellm.apps import bench_formats, bench_speculation, report

    if formats:
        record = bench_formats.measure_formats(llm, model, **options)
        return record, [report.tabulate(record["rows"], bench_formats.FORMAT_ROWS)]
    record = bench_speculation.measure_speculation(llm, model, *drafts, **options)
    table = report.tabulate(record["rows"], bench_speculation.ROWS)
    return record, [table, bench_speculation.NOTE]


def send_load(
    ctx: typer.Context,
    screen: Screen,
    llm: Any,
    url: str,
    load: str,
    seed: int | None,
    results: Path | None,
    *,
    command: str,
    **how: Any,
) -> tuple[dict[str, Any], Any]:
    """The record of a workload that is sent, and what draws it.

    ``how``: as many requests, at a rate or by clients. Raises ValueError for options
    that have nothing to do with that.
    """
    from simplellm.apps import report, traffic

    check_unused(ctx)
    if not load:
        load = "chat"
        screen.remark("the workload is chat; --load names another")
    seed = time.time_ns() % 10**6 if seed is None else seed
    arrivals = plan_load(load, **how, seed=seed)
    outcomes = traffic.measure_traffic(llm, url, arrivals, how["clients"], results)
    record = {"command": command, "load": load, "seed": seed}
    record |= traffic.summarize_traffic(outcomes)
    return record, partial(report.plot_traffic, traffic.latencies(outcomes))


def check_unused(ctx: typer.Context) -> None:
    """Raise ValueError for an option that a workload has no use for."""
    for name in "batch input_len output_len prefill context formats".split():
        given = getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"
        option, expected = f"--{name.replace('_', '-')}", "none beside a workload"
        expect(not given, option, ctx.params[name], expected)


@app.command()
def bench(
    ctx: typer.Context,
    model: options.ModelName = None,
    random_weights: options.RandomWeights = False,
    batch: options.Batches = "1",
    input_len: options.InputLength = 128,
    output_len: options.OutputLength = 128,
    prefill: options.Prefills = "",
    context: options.Contexts = "",
    formats: options.Formats = False,
    speculative: options.Speculative = None,
    num_speculative_tokens: options.Drafts = None,
    load: options.LoadName = "",
    url: options.URL = "",
    requests: options.Count = 100,
    rate: options.Rate = None,
    clients: options.Clients = None,
    seed: options.Seed = None,
    results: options.ResultsFile = None,
    json_file: options.JSONFile = None,
    plot: options.PlotFile = None,
    device: options.Where = None,
) -> int:
    """Measure a model's speed, and what this machine allows.

    With --load or --url: how long those wait who send a workload.
    """
    for path in filter(None, (json_file, plot, results)):
        options.check_folder(path)
    screen = Screen()
    with screen.waiting("Starting PyTorch"):
        from simplellm.api.llm import LLM
        from simplellm.apps import report
        from simplellm.apps.bench import measure, plan_steps
    draw: Any = None
    drafts = speculative, num_speculative_tokens
    if plot is not None:
        report.check_plot(plot)
        other = "formats" if formats else speculative and "speculative"
        expect(not other, "--plot", str(plot), f"none with --{other}")
    command: dict[str, Any] = {"command": shlex.join(["simplellm", *ctx.obj])}
    start: dict[str, Any] = {"random_weights": random_weights, "device": device}
    if load or url or results or (rate, clients) != (None, None):
        how: Any = {"requests": requests, "rate": rate, "clients": clients}
        llm = partial(LLM, model, **start)
        record, draw = send_load(
            ctx, screen, llm, url, load, seed, results, **how, **command
        )
        report.show_traffic(record, screen.out)
    elif formats or drafts != (None, None):
        record, shown = compare(LLM, model, formats, drafts, **start, **command)
        screen.out.print(*shown)
    else:
        plan = plan_steps(batch, input_len, output_len, prefill, context)
        record = measure(plan, LLM, model, **start, **command)
        report.show(record, screen.out)
        draw = partial(report.plot, record)
    if json_file is not None:
        report.write_json(record, json_file)
    if plot is not None:
        draw(plot)
    return int(bool(record.get("errors")))


@app.command("quantize", cls=PlainUsage)
def quantize_model(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A checkpoint folder.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="A folder to make.")],
    format: Annotated[
        Literal["fp8", "int8", "mxfp4"],
        typer.Option(help="Of linear layers; of gpt-oss's experts, only mxfp4."),
    ],
) -> None:
    """Write a checkpoint's weights in a smaller number format.

    fp8 is the format of Qwen's and DeepSeek's checkpoints; int8 with rounded inputs
    (w8a8) and mxfp4 are those of compressed-tensors. Embeddings, heads, norms and
    routers stay as they are.
    """
    options.check_folder(target)
    screen = Screen()
    with screen.waiting("Starting PyTorch"):
        from simplellm.apps.quantize import quantize_checkpoint
    before, after = quantize_checkpoint(source, target, format)
    sizes = f"{before:,} bytes of weights are now {after:,}"
    screen.write(f"{target}: {sizes} ({after / before:.0%})\n")


app.command("serve", cls=options.GroupedHelp)(serve_model)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"simplellm {__version__}")
        raise typer.Exit


@app.callback()
def simplellm(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Show it and exit."
        ),
    ] = False,
) -> None:
    """Run gpt-oss, from the small embedded model up to gpt-oss-120b.

    \b
    simplellm "What is 47 + 85?"
    simplellm chat --calculator
    simplellm chat smollm2
    simplellm batch questions.jsonl answers.jsonl
    simplellm info gpt-oss-120b
    simplellm bench --batch 1,4
    simplellm quantize Qwen3-8B Qwen3-8B-FP8 --format fp8
    simplellm serve --port 8000
    """


def run(arguments: list[str]) -> int:
    """Run a command; the exit status. What goes wrong is said in one line."""
    how = {"prog_name": "simplellm", "standalone_mode": False}
    try:
        return app(arguments or ["--help"], **how, obj=arguments) or 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except UsageError as error:
        Screen().error(error.format_message())
        return 2
    except (ValueError, TypeError) as error:
        Screen().error(error)
        return 2
    except BrokenPipeError:  # who reads the answer has had enough
        return 1
    except Exception as error:
        Screen().error(f"{type(error).__name__}: {error}")
        return 1


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    status = run(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.stdout.flush()
    except OSError as error:  # at its end Python would try again, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if status == 0 and not isinstance(error, BrokenPipeError):
            Screen().error(f"{type(error).__name__}: {error}")
        status = status or 1
    return status


if __name__ == "__main__":
    sys.exit(main())
