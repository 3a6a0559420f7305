"""The kernels for weights of 8 bits compile for Hopper, and multiply as they should."""

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
    kernel_name,
    kernels_of,
    parameters,
    stack_bytes,
)

from simplellm.checkpoint.scaled import E4M3, Scaled
from simplellm.model.kernels import (
    linear,
    norm,
    other_families,
    rounding,
    scaled_linear,
)

FORMATS = {  # tile, dtype and whether inputs are rounded
    "FP8 in blocks": ((128, 128), E4M3, True),
    "FP8": ((1, 0), E4M3, True),
    "INT8": ((1, 0), torch.int8, True),
    "INT8, weights alone": ((1, 0), torch.int8, False),
    "FP8 in blocks, weights alone": ((128, 128), E4M3, False),
}
NAMES = {E4M3: "*fp8e4nv", torch.int8: "*i8"}
# Out and in, of Qwen3-8B: its queries, keys and values, and the end of its MLP.
QKV, DOWN = (6144, 4096), (4096, 12288)
TOKENS = 1, 2, 4, 64, 2048
EARLY = {
    "gemv_kernel": "weight_ptr scales_ptr bias_ptr",
    "add_norm_kernel": "weight_ptr",
}


def product_case(kind, shape, tokens, invariant=False, rounded=False, wide="*bf16"):
    """With an input of type ``wide`` if it is not rounded ahead."""
    (rows, columns), dtype, inputs = FORMATS[kind]
    out, size = shape
    tile = rows, columns or size
    config = scaled_linear.choose_scaled(tokens, out, size, tile, True, rounded)
    if invariant:
        config = scaled_linear.choose_scaled_invariant(out, size, tile, True)
    few = isinstance(config, scaled_linear.Gemv)
    scales = torch.empty(-(-out // tile[0]), -(-size // tile[1]), device="meta")
    weight = Scaled(
        torch.empty(shape, dtype=dtype, device="meta"), scales, tile, inputs
    )
    scaling = scaled_linear.scaling_of(weight, inputs and few and not rounded, config)
    numbers = f"{NAMES[dtype]} *fp32"
    y = "*bf16" if config.parts == 1 else "*fp32"
    if not inputs and not few:
        start, _ = scaled_linear.wide_launcher(config, tokens, *shape, scaling)
        types = f"{wide} {numbers} {y} i32 i32"
        return case_of(start, types, "bias_ptr", aligned=("stride_x",))
    start, _ = linear.product_launcher(config, tokens, *shape, scaling)
    x, without = f"{NAMES[dtype]} *fp32", "bias_ptr best_ptr"
    if not inputs or (few and not rounded):
        x, without = wide, "x_scales_ptr bias_ptr best_ptr"
    types = f"{x} {numbers} {y} i32 i32{'' if few else ' i32'}"
    return case_of(start, types, without, aligned=("stride_x",))


def round_case(kind, shape):
    tile, dtype, _ = FORMATS[kind]
    how = rounding.Rounding(tile[1] or shape[1], dtype)
    start = rounding.round_launcher(shape[1], how)
    types = f"*bf16 {NAMES[dtype]} *fp32 i32 i32"
    return case_of(start, types, aligned=("stride_x",))


def norm_case(kind, size, parts):
    """Of an RMSNorm that rounds."""
    (_, columns), dtype, _ = FORMATS[kind]
    how = rounding.Rounding(columns or size, dtype)
    start = norm.add_norm_launcher(size, parts, how)
    update, without = ("*fp32", "") if parts else ("", "update_ptr ")
    types = f"*bf16 {update} *fp32 {NAMES[dtype]} *fp32 i32 fp32"
    return case_of(start, types, f"{without}update_weight_ptr bias_ptr peers_ptr")


def activation_case(kind, size, parts):
    """Of one that rounds."""
    (_, columns), dtype, _ = FORMATS[kind]
    how = rounding.Rounding(columns or size, dtype)
    given = size, parts, "swiglu", torch.bfloat16, how
    start, _ = other_families.activation_launcher(*given)
    first = "*bf16" if parts == 1 else "*fp32"
    return case_of(start, f"{first} {NAMES[dtype]} *fp32 i32")


CASES = [
    *(product_case(kind, QKV, 64) for kind in FORMATS),
    *(product_case(kind, QKV, 2) for kind in ("FP8 in blocks", "INT8")),
    product_case("FP8 in blocks", QKV, 2048),
    *(round_case(kind, DOWN) for kind in ("FP8 in blocks", "INT8")),
    *(product_case(kind, QKV, 1, False, True) for kind in ("FP8 in blocks", "INT8")),
    product_case("FP8 in blocks", DOWN, 1, False, True),
    *(norm_case(kind, QKV[1], 3) for kind in ("FP8 in blocks", "INT8")),
    activation_case("FP8 in blocks", DOWN[1], 1),
]
MORE = [
    product_case(kind, shape, tokens, invariant)
    for kind in FORMATS
    for shape in (QKV, DOWN)
    for tokens in TOKENS
    for invariant in (False, True)
]
MORE += [round_case(kind, QKV) for kind in FORMATS]
ROUNDED = "FP8 in blocks", "FP8", "INT8"
MORE += [
    product_case(kind, shape, tokens, False, True)
    for kind in ROUNDED
    for shape in (QKV, DOWN, (4096, 16384))
    for tokens in (1, 2)
]
MORE += [norm_case(kind, QKV[1], parts) for kind in ROUNDED for parts in (0, 1)]
MORE += [activation_case("FP8 in blocks", DOWN[1], 3)]
MORE += [  # wide inputs take the most shared memory
    product_case("INT8, weights alone", QKV, tokens, wide="*fp32")
    for tokens in (16, 64, 128, 2048)
]
MORE = [case for case in MORE if case not in CASES]


def is_fp8(case):
    return "fp8" in case.types


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_it_compiles_and_fits(case):
    assert_compiles_and_fits(case)


@pytest.mark.parametrize("case", parameters(CASES, [], lambda case: not is_fp8(case)))
def test_integers_compile_for_older_gpus(case):
    """Which have no e4m3."""
    assert_compiles_for_older_gpus(case)


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_nothing_is_read_or_written_too_early(case):
    assert_waits(case, EARLY.get(kernel_name(case), ""))


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_no_program_is_over_before_it_waits(case):
    assert_every_program_waits(case)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("kind", ["FP8 in blocks", "FP8"])
def test_threads_keep_what_they_load_of_the_weight(kind, rounded):
    """In registers, and where x is, without a way through shared memory."""
    compiled = compile_case(product_case(kind, QKV, 1, False, rounded))
    assert compiled.metadata.shared < 1024
    assert ".local" not in compiled.asm["ptx"]


@pytest.mark.parametrize("shape", [QKV, DOWN, (4096, 16384)])
@pytest.mark.parametrize("kind", ROUNDED)
def test_16_bytes_of_the_weight_come_at_once_for_what_is_rounded(kind, shape):
    """And with x beside them they fit into registers."""
    compiled = compile_case(product_case(kind, shape, 1, False, True))
    early, _ = compiled.asm["ptx"].split("griddepcontrol.wait", 1)
    config = scaled_linear.choose_scaled(1, *shape, shape[::-1], True, True)
    loads = re.findall(r"ld\.global\S*\.v4\.b32", early)
    held = sum(linear.split_columns(shape[1])) * config.rows
    assert len(loads) >= held / (16 * 32 * config.warps)
    assert stack_bytes(compiled) == 0


DOTS = [case for case in CASES if kernel_name(case).endswith("dot_kernel")]


@pytest.mark.parametrize("case", DOTS, ids=lambda case: case.types)
def test_tensor_cores_multiply_8_bits_where_both_have_them(case):
    ptx = compile_case(case).asm["ptx"]
    kinds = {*re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k\d+\.(\S+)", ptx)}
    alone = case.types.startswith("*bf16")
    expected = "f32.bf16.bf16" if alone else "f32.e4m3.e4m3" if is_fp8(case) else None
    assert kinds == {expected or "s32.s8.s8"}


@pytest.mark.parametrize("case", DOTS, ids=lambda case: case.types)
def test_the_kernel_behind_starts_when_the_sums_are_there(case):
    """Its programs would take the places of those that this one still has to start."""
    ptx = compile_case(case).asm["ptx"]
    before, after = ptx.split("griddepcontrol.launch_dependents")
    assert "griddepcontrol.wait" in before and "wgmma.mma_async" in before
    assert "wgmma.mma_async" not in after and "st.global" in after


@pytest.mark.parametrize("tokens", [64, 2048])
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if "alone" in kind])
def test_a_weight_is_converted_after_the_multiplications_before(kind, tokens):
    """ptxas before 13.3 reuses registers of a wgmma that is under way."""
    ptx = compile_case(product_case(kind, QKV, tokens)).asm["ptx"]
    waits = re.findall(r"wgmma\.wait_group\S+ *(\d+)", ptx)
    assert waits and {*waits} == {"0"}


def test_every_kernel_is_in_the_list():
    listed = {case.kernel.fn for case in CASES}
    missing = [
        n
        for n, k in kernels_of("scaled_linear", "rounding").items()
        if k.fn not in listed
    ]
    assert not missing
