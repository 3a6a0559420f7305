"""What several commands have in common: the model, where it runs, how it samples.

A command's parameter with the name of a field of `EngineConfig` or `SamplingParams` is
that field: `asked_config` and `sampling` take it by its name, and nothing else has to.
"""

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from simplellm.apps.workloads import WORKLOADS
from simplellm.base.config import EngineConfig
from simplellm.base.sampling_params import SamplingParams

KNOWN_MODELS = "A checkpoint's folder, a .gguf file, or smollm2"
ModelFolder = Annotated[
    str | None, typer.Option(metavar="MODEL", help=f"{KNOWN_MODELS}.  [embedded]")
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help=f"{KNOWN_MODELS}.  [embedded]", show_default=False
    ),
]
ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"{KNOWN_MODELS}, gpt-oss-20b or gpt-oss-120b.  [embedded]",
        show_default=False,
    ),
]
Yes = Annotated[
    bool, typer.Option("--yes", help="Install a model's package without asking.")
]
Effort = Annotated[
    Literal["low", "medium", "high"] | None,
    typer.Option(help="How long to think.  [medium, if the model knows efforts]"),
]
Developer = Annotated[str | None, typer.Option(help="Instructions for the model.")]
Calculator = Annotated[
    bool, typer.Option("--calculator", help="Offer the model a calculator to call.")
]
ReplySeed = Annotated[
    int | None, typer.Option(help="Number that draws the same answer again.")
]
Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy.  [the checkpoint's]")
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Most tokens to generate, reasoning included.")
]
TopP = Annotated[
    float | None, typer.Option(help="Draw from the likeliest that add up to this.")
]
TopK = Annotated[int | None, typer.Option(help="Draw from this many likeliest tokens.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Text that ends the answer; may be given several times."),
]
Where = Annotated[
    Literal["cpu", "cuda"] | None,
    typer.Option(help="Where to run.  [cuda where there is one]"),
]

# Options under a heading of the help

memory_option = partial(typer.Option, rich_help_panel="Memory")
speculation_option = partial(typer.Option, rich_help_panel="Speculative decoding")
gpus_option = partial(typer.Option, rich_help_panel="Several GPUs")

Speculative = Annotated[
    str | None,
    speculation_option(
        metavar="suffix|head|FOLDER",
        help="Guess tokens and check several in a step; the text stays the same. "
        "suffix: from what the text has said before; head: the model's own EAGLE-3 "
        "head, if it has one; or the folder of a head or of a smaller model.",
    ),
]
Drafts = Annotated[
    int | None, speculation_option(help="Guesses in a step.  [as many as are worth it]")
]
ParallelSize = Annotated[
    int,
    gpus_option(help="Processes, each with a GPU of its own, that share each weight."),
]
DataParallelSize = Annotated[
    int,
    gpus_option(
        help="Processes, each with a GPU and requests of its own, that share the "
        "experts; --max-num-seqs and --cache-bytes are for each. It needs "
        "--enable-expert-parallel."
    ),
]
WholeExperts = Annotated[
    bool,
    gpus_option(
        "--enable-expert-parallel",
        help="Give each of these processes whole experts, not a slice of each.",
    ),
]
CacheBytes = Annotated[
    int | None,
    memory_option(help="Bytes for keys and values.  [what the memory allows]"),
]
CPUCacheBytes = Annotated[
    int,
    memory_option(
        help="Bytes of the host's memory for what the cache evicts: prefixes come back "
        "from there."
    ),
]
KVCacheDType = Annotated[
    Literal["auto", "fp8"],
    memory_option(
        help="Number format of keys and values in the cache. fp8: a byte for each "
        "number, half the memory."
    ),
]
MoEActivationDType = Annotated[
    Literal["auto", "fp8"],
    typer.Option(
        help="Number format of what MXFP4 experts multiply where each has many tokens, "
        "as in prompts. fp8: faster, and a little less exact."
    ),
]
DType = Annotated[
    Literal["bfloat16", "float16", "float32"] | None,
    typer.Option(help="What to compute with.  [float32 on a CPU, else bfloat16]"),
]

# Of the benchmark

RandomWeights = Annotated[
    bool,
    typer.Option(
        "--random-weights", help="Draw the weights at random; a name alone needs this."
    ),
]
Batches = Annotated[str, typer.Option(help="Requests at once, as in 1,8,64.")]
InputLength = Annotated[int, typer.Option(help="Tokens of a prompt.")]
OutputLength = Annotated[int, typer.Option(help="Tokens to generate.")]
Prefills = Annotated[str, typer.Option(help="Prompts x tokens, as in 32x2048,1x2048.")]
Contexts = Annotated[str, typer.Option(help="Tokens in the cache, as in 32768,131072.")]
JSONFile = Annotated[
    Path | None, typer.Option("--json", help="Write all numbers.", dir_okay=False)
]
PlotFile = Annotated[
    Path | None,
    typer.Option(help="Draw what is found (.svg, .png, .pdf).", dir_okay=False),
]
LoadName = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help=f"Instead, send a workload: {', '.join(WORKLOADS)}, or a file in the "
        "form of OpenAI's batches.  [chat, if another of these options is given]",
    ),
]
URL = Annotated[
    str,
    typer.Option(help="Send to this server; its key is read from SIMPLELLM_API_KEY."),
]
Count = Annotated[int, typer.Option(help="How many, of a named workload.")]
Rate = Annotated[
    float | None,
    typer.Option(help="Arrivals a second, Poisson.  [all at once, or the file's]"),
]
Clients = Annotated[
    int | None,
    typer.Option(
        help="Instead of a rate: this many clients, each sending when its last request "
        "is answered."
    ),
]
Formats = Annotated[
    bool,
    typer.Option(
        "--formats",
        help="Instead, compare number formats of the weights: size, speed and, of the "
        "embedded model, right answers.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Number that the workload is drawn from.  [another each time]"),
]
ResultsFile = Annotated[
    Path | None,
    typer.Option(help="Write all requests with what became of them.", dir_okay=False),
]


class GroupedHelp(TyperCommand):
    """A command whose help has its options under their headings, if they have one."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            is_option = param.param_type_name == "option"
            heading = getattr(param, "rich_help_panel", None)
            name = heading or ("Options" if is_option else "Arguments")
            if record := param.get_help_record(ctx):
                groups.setdefault(name, []).append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


SAMPLING = [spec.name for spec in fields(SamplingParams)]


def asked_config(ctx: typer.Context) -> EngineConfig:
    """The engine's sizes and switches among a command's options, checked."""
    names = {spec.name for spec in fields(EngineConfig)} & ctx.params.keys()
    return EngineConfig(**{name: ctx.params[name] for name in names})


def sampling(ctx: typer.Context) -> dict[str, Any]:
    """The sampling parameters among a command's options that were given.

    Raises TypeError or ValueError for what is wrong with them, before a model loads.
    """
    options = {name: x for name, x in ctx.params.items() if x not in (None, ())}
    params = {name: options[name] for name in SAMPLING if name in options}
    SamplingParams(**params)
    return params


def check_folder(file: Path) -> None:
    """Raise ValueError if there is no place for a file that is to be written."""
    if not file.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {file.absolute().parent} for {file}")
