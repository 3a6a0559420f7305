"""The command `simplellm serve`: its options, before anything heavy is imported."""

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from simplellm.apps import options
from simplellm.apps.install import ensure_installed
from simplellm.apps.screen import Screen
from simplellm.base.config import MAX_SIZE, check_number, expect
from simplellm.server.start import WATCHDOG_TIMEOUT, Options, bind, spawn, spawn_each

if TYPE_CHECKING:
    from simplellm.server.remote.client import RemoteClient

MAX_REPLICAS = 64
network_option = partial(typer.Option, rich_help_panel="Network and access")
operation_option = partial(typer.Option, rich_help_panel="Operation")
EMBEDDED_NAME = "simplellm"  # what clients call the model that comes with the package

Host = Annotated[str, network_option(help="Address to listen on.")]
Port = Annotated[
    int,
    network_option(
        metavar="<int>", help="Its port; 0 takes a free one.", min=0, max=65535
    ),
]
Key = Annotated[
    str | None,
    network_option(
        envvar="SIMPLELLM_API_KEY",
        help="The key that clients must send. Prefer the environment variable "
        "SIMPLELLM_API_KEY: other users of this machine can see command lines.",
        show_envvar=False,
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Option(help="What clients call the model; may be repeated.  [its name]"),
]
Seqs = Annotated[int | None, options.memory_option(help="Requests that run at once.")]
Length = Annotated[
    int | None,
    options.memory_option(
        help="Tokens of a prompt and its answer, at most.  [the model's own limit]"
    ),
]
Engines = Annotated[
    int | None,
    options.gpus_option(
        metavar="<int>",
        help="Number of engines, each on a GPU of its own or all on the CPU; "
        "--max-num-seqs is for each.  [one engine]",
        min=1,
        max=MAX_REPLICAS,
    ),
]
Timeout = Annotated[float, operation_option(help="Seconds that a request may take.")]
Grace = Annotated[
    float, operation_option(help="Seconds that running requests get at shutdown.")
]
Watchdog = Annotated[
    float,
    operation_option(
        help="Seconds for which an engine may be silent, or finish no step though it "
        "has requests; then it is killed."
    ),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], operation_option(help="What to log.")
]
AccessLog = Annotated[
    Literal["off", "requests", "prompts"],
    operation_option(help="A JSON line for each request; its body too with prompts."),
]
Strict = Annotated[
    bool,
    network_option(
        "--strict",
        help="Refuse parameters that this server doesn't know or do, also where they "
        "are hints.",
    ),
]
Origins = Annotated[
    list[str] | None,
    network_option(
        metavar="ORIGIN",
        help="Pages in browsers that may ask, such as https://example.org, or '*' for "
        "all; may be repeated.  [none]",
    ),
]


def as_origin(text: str) -> str:
    """An origin as browsers write it: "https://example.org", or "*" for all.

    Raises ValueError for what none would write, since no page would ever match.
    """
    origin = text.rstrip("/").lower()
    ok = origin in ("*", "null") or re.fullmatch(
        r"[a-z][a-z0-9+.-]*://[^/?#@*\s]+", origin
    )
    expected = "a scheme and a host, such as https://example.org, or '*' for all"
    expect(ok, "--allowed-origins", text, expected)
    port = {"http": ":80", "https": ":443"}.get(origin.partition(":")[0], "")
    return origin.removesuffix(port)


def served_name(model: str | None) -> str:
    """The default name of a checkpoint for clients."""
    if model is None:
        return EMBEDDED_NAME
    path = Path(model).resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def serve_model(
    ctx: typer.Context,
    model: options.ModelArgument = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: Key = None,
    served_model_name: Names = None,
    max_num_seqs: Seqs = None,
    timeout: Timeout = 600.0,
    grace: Grace = 30.0,
    log_level: LogLevel = "warning",
    access_log: AccessLog = "off",
    device: options.Where = None,
    dtype: options.DType = None,
    cache_bytes: options.CacheBytes = None,
    cpu_cache_bytes: options.CPUCacheBytes = 0,
    kv_cache_dtype: options.KVCacheDType = "auto",
    moe_activation_dtype: options.MoEActivationDType = "auto",
    max_model_len: Length = None,
    speculative: options.Speculative = None,
    num_speculative_tokens: options.Drafts = None,
    tensor_parallel_size: options.ParallelSize = 1,
    data_parallel_size: options.DataParallelSize = 1,
    enable_expert_parallel: options.WholeExperts = False,
    replicas: Engines = None,
    watchdog_timeout: Watchdog = WATCHDOG_TIMEOUT,
    strict: Strict = False,
    allowed_origins: Origins = None,
    yes: options.Yes = False,
) -> int:
    """Serve a chat page, and clients of OpenAI's and Anthropic's APIs.

    SIGTERM or Ctrl-C lets running requests finish and refuses new ones; a second one
    ends all.
    """
    config = options.asked_config(ctx)
    check_number("--timeout", timeout, float, 0, MAX_SIZE, above=0)
    check_number("--grace", grace, float, 0, MAX_SIZE)
    check_number("--watchdog-timeout", watchdog_timeout, float, 5, MAX_SIZE)
    settings = Options(
        names=served_model_name or [served_name(model)],
        key=api_key,
        timeout=timeout,
        grace=grace,
        log_level=log_level,
        access_log=access_log,
        strict=strict,
        allowed_origins=[*map(as_origin, allowed_origins or ())],
    )
    ensure_installed(model, yes, screen := Screen())
    where: Any = {"device": device, "dtype": dtype, "log_level": log_level}
    with closing(bind(host, port)) as bound:
        with needs_extra(), screen.waiting("Starting PyTorch"):
            engine = start_engine(replicas, device, watchdog_timeout)
            from simplellm.api.llm import LLM
            from simplellm.server.remote.client import load_remote
            from simplellm.server.serve import serve
        with LLM.of(load_remote(engine, model, config, **where)) as llm:
            return serve(
                llm, settings, bound, lambda line: screen.write(f"{line}\n", aside=True)
            )


@contextmanager
def needs_extra() -> Iterator[None]:
    """Raise ValueError if an import misses what the extra [serve] brings."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{error.name} is not installed; expected what "
            "pip install 'simplellm[serve]' brings"
        ) from None


def start_engine(
    replicas: int | None, device: str | None, watchdog_timeout: float
) -> "RemoteClient":
    """Start the engine's process, or one for each of several ``replicas``."""
    import orjson  # noqa: F401  (which the engine's process needs too)

    if replicas is None:
        process, link = spawn()  # it imports meanwhile
        from simplellm.server.remote.client import RemoteEngine

        return RemoteEngine(process, link, watchdog_timeout)
    spawns = spawn_each(replicas, device)
    from simplellm.server.remote.replicas import Replicas

    return Replicas(spawns, watchdog_timeout)
