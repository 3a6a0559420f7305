"""Write every drawing to figures/NAME.svg, byte for byte the same each time."""

import sys
import tomllib
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIGURES = HERE.parent
sys.path[:0] = [str(FIGURES), str(FIGURES.parent), str(FIGURES.parent / "chapters")]

# Files with a function `drawings` that returns the drawings by their names.
ROOMS = (
    "engine",
    "model",
    "chat",
    "weights",
    "routing",
    "attention",
    "cache",
    "steps",
    "processor",
    "serving",
    "structured",
    "models",
    "ranks",
)


def rendered() -> dict[str, str]:
    """The text of each SVG by its name."""
    alt = tomllib.loads((HERE / "alt.toml").read_text(encoding="utf-8"))
    found = {}
    for room in ROOMS:
        for name, drawing in import_module(f"drawings.{room}").drawings().items():
            found[name] = drawing.svg(alt[name])
    return found


if __name__ == "__main__":
    for name, svg in rendered().items():
        (FIGURES / f"{name}.svg").write_text(svg, encoding="utf-8")
