"""Files of a checkpoint: the small ones, by name, and the large ones, mapped."""

import mmap
import sys
from pathlib import Path
from typing import Any, Protocol

from simplellm.base.config import read_json


class SmallFiles(Protocol):
    """What a checkpoint says in the files that the hub has beside the weights.

    They are known by their names there, wherever what they say really stands.
    """

    def path_of(self, name: str) -> Path:
        """The file's path, for messages."""

    def json(self, name: str) -> dict[str, Any] | None:
        """What a JSON file says; None if there is none. Raises ValueError."""

    def text(self, name: str) -> str | None:
        """What a text file says; None if there is none."""


class FolderFiles:
    """The `SmallFiles` of a folder as the hub has it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def path_of(self, name: str) -> Path:
        return self.path / name

    def json(self, name: str) -> dict[str, Any] | None:
        file = self.path_of(name)
        return read_json(file) if file.is_file() else None

    def text(self, name: str) -> str | None:
        file = self.path_of(name)
        return file.read_bytes().decode(errors="replace") if file.is_file() else None


# Linux lets no process map more than it has memory for if the pages may be written to,
# unless the mapping says that nothing is to be set aside. Python 3.13 has the name.
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


def map_private(file: Path) -> mmap.mmap:
    """A file, mapped whole; it may be larger than memory. Raises OSError.

    A page that somebody writes to becomes a copy, which the file does not see; all
    others are the page cache's.
    """
    with file.open("rb") as opened:
        flags = mmap.MAP_PRIVATE | MAP_NORESERVE
        return mmap.mmap(opened.fileno(), 0, flags=flags)
