"""What several commands have in common: which model, and where it runs."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from simplellm.apps.screen import Screen
from simplellm.config import EngineConfig

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
Where = Annotated[
    Literal["cpu", "cuda"] | None,
    typer.Option(help="Where to run.  [cuda where there is one]"),
]


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
