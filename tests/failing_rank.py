"""A rank of an engine that fails at some point: `python failing_rank.py WHEN HOW FD`.

WHEN: "loads"; "prompt", its first step; "decode", a later one; "draws"; "adds up", in
the midst of a step; "drafts", with a head. HOW: "dies"; "hangs"; "computes" or
"compiles" for three seconds, the latter in a process of its own.
"""

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SECONDS = 3.0
TURNS = f"import time; end = time.time() + {SECONDS}\nwhile time.time() < end: pass"


def fail(how: str) -> None:
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        time.sleep(1000)
    if how == "computes":
        exec(TURNS)
    if how == "compiles":
        subprocess.run([sys.executable, "-c", TURNS], check=True)


def failing(function: Callable[..., Any], call: int, how: str) -> Callable[..., Any]:
    """``function`` that fails at one of its calls."""
    calls = 0

    def instead(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            fail(how)
        return function(*arguments, **named)

    return instead


if __name__ == "__main__":
    when, how, number = sys.argv[1:]
    from simplellm.engine.head_drafter import HeadProposer
    from simplellm.engine.runner import Runner
    from simplellm.model.model import Model
    from simplellm.model.parallel import Group

    places: dict[str, tuple[Any, str, int]] = {
        "loads": (Model, "__post_init__", 1),
        "prompt": (Runner, "compute", 1),
        "decode": (Runner, "compute", 4),
        "draws": (Runner, "choose_tokens", 3),
        "adds up": (Group, "sum", 9),
        "drafts": (HeadProposer, "draft_after", 3),
    }
    owner, name, call = places[when]
    setattr(owner, name, failing(getattr(owner, name), call, how))
    sys.argv = ["follower", number]
    runpy.run_module("simplellm.api.follower", run_name="__main__")
