"""Where a checkpoint's files lie."""

from pathlib import Path


def find_file(folder: Path, name: str) -> Path | None:
    """``name`` in a checkpoint folder, or beside it if it is a hub's `original/`."""
    places = [folder]
    if folder.is_dir():
        names = (folder.absolute(), folder.resolve())  # it may be "." or a link
        places += [path.parent for path in names if path.name == "original"]
    return next(filter(Path.is_file, (place / name for place in places)), None)
