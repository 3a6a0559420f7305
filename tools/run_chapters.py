"""Run the chapters' cells as scripts, where Jupyter is not installed.

    python tools/run_chapters.py            all of them
    python tools/run_chapters.py 7 10 a     some, of which a is an appendix

Each chapter runs in its own process, its directory chapters/, each check on the stub
and on the kept version. Prints how long each took and which cells failed; exits 1 if
one did.
"""

import argparse
import ast
import asyncio
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "chapters"))

from cells import chapter_files, number_of, steps

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = ROOT / "chapters"


def run_cell(file: Path, source: str, names: dict[str, Any]) -> None:
    """Run one cell as a notebook does: it may wait for coroutines."""
    file.write_text(source, encoding="utf-8")  # Triton reads its kernels' source
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(source, str(file), "exec", flags)
    value = eval(code, names)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(value)


def run_chapter(path: Path) -> list[str]:
    """Run a chapter in this process; the names of the cells that failed."""
    failed = []
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder:
        for number, step in enumerate(steps(path.read_text(encoding="utf-8"))):
            raised = ""
            try:
                run_cell(Path(folder, f"cell_{number}.py"), step.source, names)
            except Exception as error:
                raised = type(error).__name__
                if not step.raises:
                    print(f"\n{path.name}, {step.name}:\n{traceback.format_exc()}")
            if raised != step.raises and not (raised and step.raises == "*"):
                failed.append(step.name)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("numbers", nargs="*", help="of chapters, 7, or appendices, a")
    parser.add_argument("--timeout", type=float, default=180, help="seconds of each")
    parser.add_argument("--here", action="store_true", help="one, in this process")
    options = parser.parse_args()
    numbers = {path: number_of(path) for path in chapter_files(CHAPTERS)}
    wanted = {number.lstrip("0").upper() for number in options.numbers}
    chosen = [p for p in numbers if numbers[p] in wanted or not wanted]
    if options.here:
        failed = run_chapter(chosen[0])
        print(json.dumps(failed))
        return 0
    bad = False
    known = [str(ROOT), str(CHAPTERS), os.environ.get("PYTHONPATH", "")]
    modules = os.pathsep.join(filter(None, known))
    environment = os.environ | {"PYTHONPATH": modules, "MPLBACKEND": "Agg"}
    for path in chosen:
        command = [sys.executable, __file__, "--here", numbers[path]]
        start = time.perf_counter()
        try:
            done = subprocess.run(
                command,
                cwd=CHAPTERS,
                env=environment,
                capture_output=True,
                text=True,
                timeout=options.timeout,
            )
            lines = done.stdout.splitlines() or [""]
            failed = ["all of it"] if done.returncode else json.loads(lines[-1])
            shown = "\n".join(lines[:-1]) + done.stderr
        except subprocess.TimeoutExpired as error:
            failed, shown = [f"not done in {error.timeout:.0f} s"], ""
        seconds = time.perf_counter() - start
        if failed:
            bad = True
            print(shown[-6000:])
        print(
            f"{path.name:32} {seconds:6.1f} s  {', '.join(failed) or 'ok'}", flush=True
        )
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
