"""The kernel of other families' experts compiles for Hopper, and multiplies there."""

import re

import pytest
import torch
from kernels_compiler import (
    assert_compiles_and_fits,
    assert_compiles_for_older_gpus,
    assert_every_program_waits,
    assert_waits,
    case_of,
    compile_case,
    kernels_of,
    parameters,
)

from simplellm.checkpoint.scaled import E4M3
from simplellm.model.kernels import grouped

# The numbers' dtype, `grouped_launcher`'s tile, and whether inputs are rounded.
FORMATS = {
    "bfloat16": (torch.bfloat16, (1, 0), False),
    "FP8 in blocks": (E4M3, (128, 128), True),
    "FP8": (E4M3, (1, 0), True),
    "INT8": (torch.int8, (1, 0), True),
    "INT8, weights alone": (torch.int8, (1, 2048), False),
}
NAMES = {torch.bfloat16: "*bf16", E4M3: "*fp8e4nv", torch.int8: "*i8"}
QWEN = {True: (128, 1536, 2048), False: (128, 2048, 768)}  # Qwen3-30B-A3B
MIXTRAL = {True: (8, 28672, 4096), False: (8, 4096, 14336)}
WAYS = [grouping for _, grouping in grouped.GROUPINGS]
# What is known of blocks, for the half that may read some before it waits.
BLOCKS = "pairs_ptr offsets_ptr blocks_ptr"


def half_case(kind, grouping, shape, top_k, gated):
    dtype, tile, inputs = FORMATS[kind]
    size = dtype.itemsize
    start = grouped.grouped_launcher(grouping, shape, size, tile, top_k, gated)
    name, scaled = NAMES[dtype], dtype != torch.bfloat16
    types = [name, "*fp32", name] if inputs else ["*bf16", name]
    types += ["*fp32"] * scaled + ["*fp32"] * (not gated)
    types += ["*i32"] * len(BLOCKS.split()) + ["*bf16", "i32"]
    without = "x_scales_ptr " * (not inputs) + "scales_ptr " * (not scaled)
    without += "scores_ptr " * gated
    return case_of(start, " ".join(types), without)


def half_cases(kind, grouping):
    for top_k, model in ((8, QWEN), (2, MIXTRAL)):
        for gated, shape in model.items():
            yield half_case(kind, grouping, shape, top_k, gated)


CASES = [half_case("bfloat16", way, QWEN[True], 8, True) for way in WAYS]
CASES += [half_case(kind, WAYS[1], QWEN[False], 8, False) for kind in FORMATS]
MORE = [case for kind in FORMATS for way in WAYS for case in half_cases(kind, way)]
MORE = [case for case in MORE if case not in CASES]


def is_first(case):
    return case.constants["GATED"]


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_it_compiles_and_fits(case):
    assert_compiles_and_fits(case)


@pytest.mark.parametrize(
    "case", parameters(CASES, MORE, lambda case: "fp8" not in case.types)
)
def test_all_but_e4m3_compiles_for_older_gpus(case):
    assert_compiles_for_older_gpus(case)


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_nothing_is_read_or_written_too_early(case):
    """What the first half has waited for is there before the other one starts."""
    assert_waits(case, "" if is_first(case) else BLOCKS)


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_what_is_behind_starts_in_time(case):
    """Nothing, until late."""
    ptx = compile_case(case).asm["ptx"]
    found = re.findall(r"griddepcontrol\.(\w+)|wgmma\.(mma_async)", ptx)
    steps = [first or second for first, second in found]
    assert steps[0] == "wait" and steps[-1] == "launch_dependents"
    assert steps.count("wait") == 1
    assert steps.count("launch_dependents") == case.constants["WIDTHS"]


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_no_program_is_over_before_it_waits(case):
    assert_every_program_waits(case)


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_tensor_cores_multiply_what_the_format_has(case):
    ptx = compile_case(case).asm["ptx"]
    kinds = {*re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k\d+\.(\S+)", ptx)}
    kind = case.types.split()[0]
    names = {"*bf16": "f32.bf16.bf16", "*i8": "s32.s8.s8"}
    assert kinds == {names.get(kind, "f32.e4m3.e4m3")}


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_both_operands_come_in_pieces_of_16_bytes(case):
    """From rows that lie anywhere. What threads convert comes as they hold it."""
    ptx = compile_case(case).asm["ptx"]
    assert "cp.async.cg.shared.global" in ptx
    assert "cp.async.ca" not in ptx or case.types.startswith("*bf16 *i8")


@pytest.mark.parametrize(
    "case", parameters(CASES, MORE, lambda case: case.types.startswith("*bf16 *i8"))
)
def test_a_weight_is_converted_after_the_multiplications_before(case):
    """ptxas before 13.3 reuses registers of a wgmma that is under way."""
    waits = re.findall(r"wgmma\.wait_group\S+ *(\d+)", compile_case(case).asm["ptx"])
    assert waits and {*waits} == {"0"}


def test_every_kernel_is_in_the_list():
    listed = {case.kernel.fn for case in CASES}
    missing = [n for n, k in kernels_of("grouped").items() if k.fn not in listed]
    assert not missing
