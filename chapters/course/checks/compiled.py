"""Whether Triton's compiler takes what its interpreter has run.

The interpreter is Python: it knows every statement, any global, and variables that
change their type in a loop. The compiler doesn't, and needs no GPU to say so.
"""

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from course import untimed

SECONDS = 600  # a compile takes a few; many, if the machine is busy
REFUSED = 3  # exit status
COMPILE = """

import json
import re
import subprocess
import tempfile

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError

ALIGNED = {
    (place,): [["tt.divisibility", 16]]
    for place, kind in enumerate(SIGNATURE.values())
    if kind[0] == "*" or kind == "i32"
}
try:
    source = ASTSource(KERNEL, SIGNATURE, CONSTANTS, ALIGNED)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
except CompilationError as error:
    print(error.error_message or repr(error.__cause__))
    raise SystemExit(REFUSED)
if LOOK:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True).stdout
    registers, stack = re.search(r"REG:(\\d+) STACK:(\\d+)", usage).groups()
    loads = r"ld\\.global\\S*\\.v4\\.b32|cp\\.async\\S* .* 0x10,"
    products = "mma.sync|wgmma.mma"
    counts = [len(re.findall(x, made.asm["ptx"])) for x in (loads, products)]
    print(json.dumps([int(registers), int(stack), made.metadata.shared, *counts]))
"""
ADVICE = {
    "oop-carried": "a variable keeps its type in a loop: begin with a tile, tl.zeros",
    "global variable": "a global has to be a tl.constexpr, or an argument",
    "AST node type: Break": "a kernel's loop has no break",
    "AST node type: Continue": "a kernel's loop has no continue",
}


def assert_compiles(kernel: Any, types: str, **constants: int) -> None:
    """``types`` of the arguments that aren't in ``constants``, for an H100.

    On a GPU the kernel has been compiled already. Where the compiler itself doesn't
    run, nothing is said.
    """
    if torch.cuda.is_available():
        return
    try:
        done = run_compiler(kernel, types, constants, look=False)
    except TimeoutError as error:
        raise AssertionError(f"{error}. If the machine was busy, check again") from None
    said = (done.stdout.strip().splitlines() or [""])[0]
    advice = [text for word, text in ADVICE.items() if word in said]
    assert done.returncode != REFUSED, (
        ". ".join(
            ["the interpreter runs it, and the compiler for a GPU refuses it", *advice]
        )
        + f" ({said})"
    )


def made_of(kernel: Any, types: str, **constants: int) -> tuple[int, ...]:
    """What the compiler makes of ``kernel`` for an H100, with or without a GPU.

    The registers of a thread, the bytes that don't fit them, those of shared memory,
    and how many instructions load 16 bytes or multiply matrices. Pointers and sizes are
    multiples of 16. Raises RuntimeError for a kernel that it refuses, and TimeoutError
    if it isn't done after ten minutes.
    """
    done = run_compiler(kernel, types, constants, look=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr[-2000:])
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def run_compiler(
    kernel: Any, types: str, constants: dict[str, int], look: bool
) -> subprocess.CompletedProcess[str]:
    """Compile ``kernel`` in a process of its own, in which it isn't interpreted."""
    of_rest = iter(types.split())
    signature = {
        name: "constexpr" if name in constants else next(of_rest)
        for name in inspect.signature(kernel.fn).parameters
    }
    lines = ["import triton", "import triton.language as tl", *sources(kernel.fn, {})]
    lines += [f"KERNEL = {kernel.fn.__name__}", f"REFUSED = {REFUSED}"]
    lines += [f"SIGNATURE = {signature}", f"CONSTANTS = {constants}", f"LOOK = {look}"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "compiled_kernel.py"  # Triton reads the code in it
        file.write_text("\n".join(lines) + COMPILE, encoding="utf-8")
        command = [sys.executable, str(file)]
        try:
            with untimed():
                return subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=SECONDS,
                    env=environment,
                )
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"the compiler for a GPU wasn't done with {kernel.fn.__name__} after "
                f"{SECONDS:g} s. A tl.static_range is unrolled: has one too many steps?"
            ) from None


def written(value: Any) -> str:
    """``value`` in Python, infinity included."""
    return f"float({str(value)!r})" if isinstance(value, float) else repr(value)


def sources(function: FunctionType, done: dict[str, None]) -> list[str]:
    """The code of a kernel, and before it that of what it names."""
    lines: list[str] = []
    for name in function.__code__.co_names:
        if name not in function.__globals__ or name in done:
            continue
        done[name] = None
        value = function.__globals__[name]
        inner = getattr(value, "fn", None)
        if isinstance(value, ModuleType):
            lines.append(f"import {value.__name__} as {name}")
        elif inner is not None and inner.__module__.startswith(("simplellm", "triton")):
            lines.append(f"from {inner.__module__} import {inner.__name__} as {name}")
        elif inner is not None:
            lines += sources(inner, done)
        elif type(value).__name__ == "constexpr":
            lines.append(f"{name} = tl.constexpr({written(value.value)})")
        elif isinstance(value, int | float | str):
            lines.append(f"{name} = {written(value)}")
    code = textwrap.dedent(inspect.getsource(function))
    begin = re.search(r"^def ", code, re.MULTILINE)
    return [*lines, "@triton.jit", code[begin.start() if begin else 0 :]]
