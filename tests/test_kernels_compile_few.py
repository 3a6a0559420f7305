"""The kernel of few tokens' experts compiles for Hopper, with its loads under way."""

import re

import pytest
from kernels_compiler import (
    assert_compiles_and_fits,
    assert_compiles_for_older_gpus,
    assert_every_program_waits,
    assert_waits,
    case_of,
    compile_case,
    kernels_of,
    parameters,
    stack_bytes,
)
from test_kernels_compile_grouped import FORMATS, MIXTRAL, NAMES, QWEN, is_first

from simplellm.checkpoint.scaled import LARGEST
from simplellm.model.kernels import grouped_few


def half_case(kind, shape, top_k, gated):
    dtype, tile, inputs = FORMATS[kind]
    tile = tile if tile == (128, 128) else (1, shape[2])
    most = int(LARGEST[dtype]) if inputs else 0
    config = grouped_few.choose_few(shape[2], dtype.itemsize)
    start = grouped_few.few_launcher(config, shape, tile, top_k, most, gated)
    scaled = dtype in LARGEST
    types = ["*bf16", NAMES[dtype]] + ["*fp32"] * scaled + ["*fp32"] * (not gated)
    types += ["*i32", "*i32", "*bf16"]
    without = "scales_ptr " * (not scaled) + "scores_ptr " * gated
    return case_of(start, " ".join(types), without)


def half_cases(model, top_k):
    for kind in FORMATS:
        for gated, shape in model.items():
            yield half_case(kind, shape, top_k, gated)


CASES, MORE = [*half_cases(QWEN, 8)], [*half_cases(MIXTRAL, 2)]


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_it_compiles_and_fits(case):
    assert_compiles_and_fits(case)


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_its_registers_are_enough(case):
    assert stack_bytes(compile_case(case)) == 0


@pytest.mark.parametrize(
    "case", parameters(CASES, MORE, lambda case: "fp8" not in case.types)
)
def test_all_but_e4m3_compiles_for_older_gpus(case):
    assert_compiles_for_older_gpus(case)


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_nothing_is_read_or_written_too_early(case):
    """What the first half has waited for is there before the other one starts."""
    early = "ids_ptr num_tokens_ptr weight_ptr scales_ptr scores_ptr"
    assert_waits(case, "" if is_first(case) else early)


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_no_program_is_over_before_it_waits(case):
    assert_every_program_waits(case)


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_rows_are_under_way_before_the_other_half_waits(case):
    """All in pieces of 16 bytes; those of the first half as soon as it has waited."""
    ptx = compile_case(case).asm["ptx"]
    steps = re.findall(r"griddepcontrol\.(\w+)|ld\.global\.(v4)\.b32|(mma)\.sync", ptx)
    steps = ["".join(step) for step in steps]
    wait, first = steps.index("wait"), steps.index("v4")
    assert wait < first if is_first(case) else first < wait
    assert steps.index("launch_dependents") < steps.index("mma")
    held = case.constants["ROWS"] * case.constants["TILES"] * case.constants["COLUMNS"]
    size = 2 if "*bf16 *bf16" in case.types else 1
    pieces = held * size // (case.warps * 32 * 16)
    before = steps[: steps.index("mma") if is_first(case) else wait]
    assert before.count("v4") >= pieces


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_each_matrix_has_its_own_sums(case):
    """Of less than 8 columns Triton 3.9 gives two matrices of a warp the same."""
    ptx = compile_case(case).asm["ptx"]
    found = re.findall(r"mma\.sync\S+ *\{([^}]*)\}", ptx)
    sums = {tuple(re.findall(r"%\w+", group)) for group in found}
    tiles, rows = case.constants["TILES"], case.constants["ROWS"]
    most = max(1, tiles // case.warps) * rows // 16
    steps = -(-case.constants["K"] // (tiles * case.constants["COLUMNS"]))
    registers = [name for group in sums for name in group]
    assert len(registers) == len({*registers}) and len(sums) in (most, most * steps)


def test_every_kernel_is_in_the_list():
    listed = {case.kernel.fn for case in CASES}
    missing = [n for n, k in kernels_of("grouped_few").items() if k.fn not in listed]
    assert not missing
