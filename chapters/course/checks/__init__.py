"""The checks of blanks and exercises: chNN.py of a chapter, chA.py of an appendix.

`check_route` takes what the reader has written and raises AssertionError, with a
message that teaches, unless it is right. `PageManager.take` is checked by
`check_PageManager_take`, exercise 4.1 by `check_4_1`.
"""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

DEFINITION = re.compile(r"^def check_(\w+)\(", re.MULTILINE)


def homes() -> dict[str, str]:
    """The module of each check by its name, read from the files: importing one may
    need Triton, which is not there on every machine.

    Raises ValueError for a name that two modules, or one module twice, define.
    """
    found: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("ch*.py")):
        for name in DEFINITION.findall(path.read_text(encoding="utf-8")):
            if name in found:
                raise ValueError(f"check_{name} is in {found[name]}.py and {path.name}")
            found[name] = path.stem
    return found


def find(name: str) -> Callable[[Any], None]:
    """The check of blank or exercise ``name``; LookupError if there is none."""
    function = name.replace(".", "_")
    known = homes()
    if function not in known:
        raise LookupError(f"no check_{function} in chapters/course/checks/")
    module = import_module(f"course.checks.{known[function]}")
    return getattr(module, f"check_{function}")
