"""The command `simplellm bench`: its options, before anything heavy is imported."""

import os
import shlex
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplellm.apps.options import ModelName, Where, check_folder
from simplellm.apps.screen import Screen
from simplellm.apps.workloads import (
    WORKLOADS,
    Arrival,
    arrive,
    draw_workload,
    read_workload,
)
from simplellm.config import MAX_SIZE, check_number, expect

if TYPE_CHECKING:  # importing torch takes seconds
    from simplellm.apps.report import Plan

RandomWeights = Annotated[
    bool,
    typer.Option(
        "--random-weights",
        help="Draw the weights at random; a name alone needs this.",
    ),
]
Batch = Annotated[str, typer.Option(help="Requests at once, as in 1,8,64.")]
InputLen = Annotated[int, typer.Option(help="Tokens of a prompt.")]
OutputLen = Annotated[int, typer.Option(help="Tokens to generate.")]
Prefill = Annotated[str, typer.Option(help="Prompts x tokens, as in 32x2048,1x2048.")]
Context = Annotated[str, typer.Option(help="Tokens in the cache, as in 32768,131072.")]
JSONFile = Annotated[
    Path | None, typer.Option("--json", help="Write all numbers.", dir_okay=False)
]
Plot = Annotated[
    Path | None,
    typer.Option(help="Draw what is found (.svg, .png, .pdf).", dir_okay=False),
]
Load = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help=f"Instead, send {', '.join(WORKLOADS)}, or a batch file in OpenAI's form.",
    ),
]
URL = Annotated[
    str, typer.Option(help="Send to this server, whose key SIMPLELLM_API_KEY is.")
]
Requests = Annotated[int, typer.Option(help="How many, by name.", min=1)]
Rate = Annotated[
    float,
    typer.Option(help="Arrivals a second, Poisson.  [all at once, or the file's]"),
]
Clients = Annotated[
    int, typer.Option(help="Send when these have their answers.", min=0)
]
Seed = Annotated[int | None, typer.Option(help="Of the load.  [another each time]")]
Results = Annotated[
    Path | None,
    typer.Option(help="Write all requests with what became of them.", dir_okay=False),
]


def numbers(name: str, text: str, width: int, expected: str) -> list[tuple[int, ...]]:
    """What an option such as "1,8,64" or "32x2048,1x2048" lists; may be nothing."""
    try:
        found = [tuple(map(int, part.split("x"))) for part in text.split(",") if text]
    except ValueError:
        found = [()]
    if any(len(entry) != width for entry in found):
        raise ValueError(f"--{name} is {text}; expected {expected}")
    return found


def plan_steps(
    batch: str, input_len: int, output_len: int, prefill: str, context: str
) -> "Plan":
    """What the options ask to be measured of an engine."""
    from simplellm.apps.report import Plan

    wanted = "prompts x tokens such as 32x2048,1x2048"
    return Plan(
        batches=[n for (n,) in numbers("batch", batch, 1, "integers such as 1,8,64")],
        input_len=input_len,
        output_len=output_len,
        prefills=[(n, length) for n, length in numbers("prefill", prefill, 2, wanted)],
        contexts=[n for (n,) in numbers("context", context, 1, "integers")],
    )


def plan_load(load: str, requests: int, rate: float, seed: int) -> list[Arrival]:
    """What they ask to be sent. Raises ValueError."""
    check_number("--rate", rate, float, 0, MAX_SIZE)
    burst = 1
    if load in WORKLOADS:
        arrivals = draw_workload(WORKLOADS[load], requests, seed)
        burst = WORKLOADS[load].burst
    else:
        wanted = f"{', '.join(WORKLOADS)} or a file"
        expect(Path(load).is_file(), "--load", load, wanted)
        arrivals = read_workload(Path(load))
    return arrive(arrivals, rate, seed, burst) if rate else arrivals


def bench_model(
    ctx: typer.Context,
    model: ModelName = None,
    random_weights: RandomWeights = False,
    batch: Batch = "1",
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    prefill: Prefill = "",
    context: Context = "",
    load: Load = "",
    url: URL = "",
    requests: Requests = 100,
    rate: Rate = 0.0,
    clients: Clients = 0,
    seed: Seed = None,
    results: Results = None,
    json_file: JSONFile = None,
    plot: Plot = None,
    device: Where = None,
) -> None:
    """Measure a model's speed, and what this machine allows.

    With --load or --url: how long those wait who send a workload.
    """
    for path in filter(None, (json_file, plot, results)):
        check_folder(path)
    screen = Screen()
    with screen.waiting("Starting PyTorch"):
        from simplellm.apps import report, traffic
        from simplellm.apps.bench import measure
        from simplellm.llm import LLM
    if plot is not None:
        report.check_plot(plot)
    if url and not find_spec("aiohttp"):
        raise ValueError(
            "aiohttp is not installed; expected what pip install 'simplellm[bench]' "
            "brings"
        )
    command = {"command": shlex.join(["simplellm", *ctx.obj])}
    options: dict[str, Any] = {"random_weights": random_weights, "device": device}
    if load or url or rate or clients or results:
        drawn = time.time_ns() % 10**6 if seed is None else seed
        arrivals = plan_load(load or "chat", requests, rate, drawn)
        with ExitStack() as stack:
            file = stack.enter_context(results.open("w")) if results else None
            if url:
                way = traffic.to_url(url, os.environ.get("SIMPLELLM_API_KEY"))
            else:
                way = traffic.to_engine(stack.enter_context(LLM(model, **options)))
            outcomes = traffic.run_traffic(way, arrivals, clients, file)
        record = command | traffic.summarize_traffic(outcomes) | {"seed": drawn}
        report.show_traffic(record, screen.out)
        draw = partial(report.plot_traffic, traffic.latencies(outcomes))
    else:
        plan = plan_steps(batch, input_len, output_len, prefill, context)
        steps = measure(plan, LLM, model, **options, **command)
        report.show(steps, screen.out)
        draw, record = partial(report.plot, steps), asdict(steps)
    if json_file is not None:
        report.write_json(record, json_file)
    if plot is not None:
        draw(plot)
