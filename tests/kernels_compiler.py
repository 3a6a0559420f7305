"""Compile the package's Triton kernels for Hopper, on a machine without a GPU too."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import simplellm.model.kernels
from simplellm.model.kernels.launch import FUSED, Launcher

HOPPER = GPUTarget("cuda", 90, 32)
AMPERE = GPUTarget("cuda", 80, 32)  # the oldest GPUs that get the kernels
ADA = GPUTarget("cuda", 89, 32)  # the oldest that multiply FP8
WAIT = r"griddepcontrol\.wait|grid_dependency_wait"  # as one Triton or another has it


@dataclass(frozen=True)
class Case:
    """A kernel, the types of its ordinary arguments, and its constants.

    Pointers, and what ``aligned`` names, are multiples of 16, as in real launches.
    """

    kernel: JITFunction
    types: str  # "*bf16 *fp32 i32", in the order of the arguments
    constants: dict[str, object]
    warps: int = 4
    stages: int = 3
    aligned: tuple[str, ...] = field(default=())


def case_of(
    launcher: Launcher, types: str, without: str = "", aligned: tuple[str, ...] = ()
) -> Case:
    """What a launcher compiles if the arguments ``without`` are None."""
    constants = {**launcher.options, "PDL": launcher.pdl}
    constants |= dict.fromkeys(without.split())
    constants.pop("maxnreg", None)
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages", 3)
    return Case(launcher.kernel, types, constants, warps, stages, aligned)


def kernel_name(case: Case) -> str:
    return case.kernel.__name__


def parameters(
    cases: Iterable[Case],
    more: Iterable[Case],
    wanted: Callable[[Case], object] = lambda case: True,
):
    """Those ``wanted`` as parameters of a test; ``more`` run when all tests do."""
    return [
        pytest.param(case, marks=marks, id=kernel_name(case))
        for some, marks in ((cases, ()), (more, pytest.mark.exhaustive))
        for case in some
        if wanted(case)
    ]


def compile_case(case: Case, target: GPUTarget = HOPPER):
    """The kernel's machine code, for an H100 or H200 unless told otherwise."""
    names = case.kernel.arg_names
    ordinary = [name for name in names if name not in case.constants]
    types = dict(zip(ordinary, case.types.split(), strict=True))
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in case.aligned
    }
    options: dict[str, object] = {"num_warps": case.warps, "num_stages": case.stages}
    options |= FUSED
    if "PDL" in case.constants:
        options["launch_pdl"] = case.constants["PDL"]
    source = ASTSource(case.kernel, signature, case.constants, aligned)
    return triton.compile(source, target=target, options=options)


def cuobjdump(compiled, option: str) -> str:
    """What NVIDIA's tool says of a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout


def stack_bytes(compiled) -> int:
    """What a thread has in memory of its own, as for registers that were too few."""
    (found,) = re.findall(r"STACK:(\d+)", cuobjdump(compiled, "-res-usage"))
    return int(found)


def machine_loops(compiled) -> list[list[str]]:
    """The instructions of a kernel's loops, without their predicates."""
    line = r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\w+ +)?(\S.*?) *;"
    told = cuobjdump(compiled, "-sass")
    code = [(int(place, 16), text) for place, text in re.findall(line, told)]
    loops = []
    for end, text in code:
        back = re.match(r"BRA\b.* 0x([0-9a-f]+)$", text)
        if back and int(back[1], 16) < end:
            loops.append([t for place, t in code if int(back[1], 16) <= place <= end])
    return loops


def overwritten(code: list[str]) -> list[str]:
    """The instructions that write what a wgmma under way has yet to read.

    It reads its left operand, four registers, until a wait for its group. One with
    "gsb0" is the last of its group.
    """
    under_way: list[set[int]] = [set()]  # by groups; the last may not be full
    found = []
    for line in code:
        name, _, operands = line.partition(" ")
        if name[1:5] == "GMMA":
            left = re.search(r"^R\d+, R(\d+)", operands)
            if left:
                under_way[-1] |= set(range(int(left[1]), int(left[1]) + 4))
            if "gsb0" in operands:
                under_way.append(set())
        elif name.startswith("WARPGROUP.DEPBAR"):
            pending = int(operands.rpartition(",")[2], 16)
            under_way = under_way[max(0, len(under_way) - 1 - pending) :]
        elif first := re.match(r"(?:U?PT?\d*, )*R(\d+)\b", operands):
            wide = re.search(r"\.(64|128|WIDE|M88\.2|M88\.4)\b", name)
            sizes = {"64": 2, "128": 4, "WIDE": 2, "M88.2": 2, "M88.4": 4}
            size = sizes[wide[1]] if wide else 1 + (name == "CS2R")
            written = set(range(int(first[1]), int(first[1]) + size))
            if written & set().union(*under_way):
                found.append(line)
    return found


def lines_before_the_wait(ttir: str) -> list[str]:
    """A kernel's lines in front of its wait; of its last one, if branches have some."""
    _, _, kernel = ttir.partition("tt.func public ")
    blocks = kernel.split("\n  ^bb")
    while not re.search(WAIT, blocks[-1]):
        blocks.pop()
    early = [re.split(WAIT, block)[0] for block in blocks]
    return "\n".join(early).splitlines()


def touched_before_the_wait(ttir: str) -> set[str]:
    """The arguments that a kernel reads or writes in front of its wait.

    That is what any instruction is given a pointer for, but those that only move it.
    """
    arguments, *lines = lines_before_the_wait(ttir)
    origin = {f"%{name}": name for name in re.findall(r"%(\w+): !tt\.ptr", arguments)}
    touched = set()
    for line in lines:
        used = {origin[value] for value in re.findall(r"%\w+", line) if value in origin}
        moved = re.match(r" *(%\w+) = tt\.(addptr|splat|broadcast|expand_dims) ", line)
        if moved and used:
            origin[moved[1]] = used.pop()
        touched |= used
    return touched


def assert_compiles_and_fits(case: Case) -> None:
    compiled = compile_case(case)
    assert len(compiled.asm["cubin"]) > 0
    assert compiled.metadata.shared <= 227 * 1024


def assert_compiles_for_older_gpus(case: Case, target: GPUTarget = AMPERE) -> None:
    constants = case.constants | ({"PDL": False} if "PDL" in case.constants else {})
    older = replace(case, constants=constants)
    assert len(compile_case(older, target).asm["cubin"]) > 0


def assert_waits(case: Case, early: str) -> None:
    """Before the wait, only the arguments ``early`` are read, and nothing written."""
    compiled = compile_case(case)
    assert touched_before_the_wait(compiled.asm["ttir"]) <= set(early.split())
    before, _ = compiled.asm["ptx"].split("griddepcontrol.wait", 1)
    assert "st.global" not in before
    assert "atom." not in before


def assert_every_program_waits(case: Case) -> None:
    """The kernel behind waits for this one alone, not for the one ahead."""
    lines = lines_before_the_wait(compile_case(case).asm["ttir"])
    assert not [line for line in lines if re.search(r"\b(cf|scf)\.", line)]


def kernels_of(*modules: str) -> dict[str, JITFunction]:
    """Every kernel of these modules of the package, or of all."""
    found = {}
    names = [
        module.name for module in pkgutil.iter_modules(simplellm.model.kernels.__path__)
    ]
    for name in modules or names:
        module = importlib.import_module(f"simplellm.model.kernels.{name}")
        for key, member in vars(module).items():
            if isinstance(member, JITFunction) and key.endswith("_kernel"):
                home = inspect.getmodule(member.fn)
                if home is module:
                    found[f"{name}.{key}"] = member
    return found
