"""What several commands have in common: the model, where it runs, how it samples."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from simplellm.apps.screen import Screen
from simplellm.config import EngineConfig
from simplellm.sampling_params import SamplingParams

if TYPE_CHECKING:  # importing torch takes seconds: commands do it when they need it
    from simplellm.llm import LLM

ModelFolder = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Folder of a gpt-oss checkpoint.  [embedded]"),
]
ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A checkpoint folder, gpt-oss-20b or gpt-oss-120b.  [embedded]",
        show_default=False,
    ),
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


def given(**options: Any) -> dict[str, Any]:
    """Sampling parameters that were given, and are not None or an empty list.

    Raises TypeError or ValueError for what is wrong with them, before a model loads.
    """
    found = {k: v for k, v in options.items() if v is not None and v != []}
    SamplingParams(**found)
    return found


def check_folder(file: Path) -> None:
    """Raise ValueError if there is no place for a file that is to be written."""
    if not file.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {file.absolute().parent} for {file}")


def load_llm(
    model: str | None,
    device: str | None,
    screen: Screen,
    config: EngineConfig | None = None,
) -> "LLM":
    """The engine with its model loaded."""
    with screen.waiting("Starting PyTorch"):
        from simplellm.llm import LLM
    return LLM(model, config, device=device)
