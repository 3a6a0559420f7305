"""Record what the demo prints on a terminal as figures/demo.svg, for the README.

    python tools/demo_svg.py

The commands run under a pseudo-terminal; nothing in the picture is made up.
"""

import io
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 80
COMMANDS = (
    ("simplellm", "What is 47 + 85?"),
    ("simplellm", "What is 47 + 85?", "--reasoning-effort", "high"),
    ("simplellm", "What is 12 * 34?", "--calculator"),
)
ERASE_LINE = "\x1b[2K"
CURSOR = re.compile(r"\x1b\[\?25[hl]")
FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def terminal_output(arguments: tuple[str, ...]) -> str:
    """All that a command writes to a terminal; raises CalledProcessError."""
    terminal, child = pty.openpty()
    environment = os.environ | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "simplellm.apps.cli", *arguments[1:]]
    process = subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, env=environment, cwd=ROOT
    )
    os.close(child)
    output = b""
    try:
        while part := os.read(terminal, 4096):
            output += part
    except OSError:  # how Linux reports that the last writer has closed
        pass
    os.close(terminal)
    if status := process.wait():
        raise subprocess.CalledProcessError(status, command, output)
    # The spinner is gone once the answer begins; so is all before its last erasure.
    text = output.decode().replace("\r\n", "\n").rpartition(ERASE_LINE)[2]
    return CURSOR.sub("", text)


def picture(commands: tuple[tuple[str, ...], ...]) -> str:
    """The commands and their output as an SVG that loads nothing from elsewhere."""
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    for number, arguments in enumerate(commands):
        if number:
            console.print()
        line = Text("$ ", style="green").append(quoted(arguments), style="bold default")
        console.print(line)
        console.print(Text.from_ansi(terminal_output(arguments).rstrip("\n")))
    svg = console.export_svg(title="SimpleLLM", unique_id="demo")
    return FONT_FACE.sub("", svg)


def quoted(arguments: tuple[str, ...]) -> str:
    """A command as one types it, in double quotes where any are needed."""
    return " ".join(
        word if shlex.quote(word) == word else f'"{word}"' for word in arguments
    )


if __name__ == "__main__":
    (ROOT / "figures/demo.svg").write_text(picture(COMMANDS), encoding="utf-8")
