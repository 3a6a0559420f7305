"""The kernels of projections, routing, experts and head compile for Hopper."""

import re
from itertools import pairwise

import pytest
from kernels_compiler import (
    ADA,
    AMPERE,
    Case,
    assert_compiles_and_fits,
    assert_compiles_for_older_gpus,
    assert_every_program_waits,
    assert_waits,
    case_of,
    compile_case,
    kernel_name,
    kernels_of,
    machine_loops,
    overwritten,
    parameters,
)

from simplellm.model.kernels import (
    experts,
    experts_one,
    fragments,
    head,
    linear,
    routing,
)

# What a kernel may read before it waits for the kernel ahead: weights, what the step
# came with, and what a kernel has written that all later ones have waited for.
EARLY = {
    "gemv_kernel": "weight_ptr bias_ptr",
    "dot_kernel": "weight_ptr",
    "experts_one_kernel": (
        "ids_ptr scores_ptr words_ptr scales_ptr bias_ptr num_tokens_ptr"
    ),
    "sort_small_kernel": "num_tokens_ptr",
    "count_kernel": "num_tokens_ptr",
    "scatter_kernel": "num_tokens_ptr",
}


def ways(table, every=False):
    """Each way in a table of products, with a TOKENS that it is compiled for, or every.

    The one is the largest.
    """
    least = 1
    for most, config in table:
        for tokens in range(least if every else most, most + 1):
            start, _ = linear.product_launcher(config, tokens, 5120, 2880)
            yield config, start.options["TOKENS"]
        least = most + 1


def product_case(config, tokens, size_out, size_in, has_bias=False, best=False):
    start, _ = linear.product_launcher(config, tokens, size_out, size_in)
    without = "x_scales_ptr scales_ptr " + "bias_ptr " * (not has_bias)
    without += "best_ptr" * (not best)
    bias = "*bf16" if has_bias else ""
    is_dot = isinstance(config, linear.Dot)
    y = "*fp32 *i64" if best else "*fp32" if is_dot else "*bf16"
    types = f"*bf16 *bf16 {bias} {y} i32 i32 {'i32' * is_dot}"
    return case_of(start, types, without, aligned=("stride_x",))


def product_cases(every=False):
    """All projections of gpt-oss and its head in all ways that are used."""
    for (size_out, size_in), table in linear.PROJECTIONS.items():
        if size_out == 32 and not every:  # the 20b's router, like the 120b's
            continue
        # Others' biases are added by the kernels behind them.
        for config, tokens in dict.fromkeys(ways(table, every)):
            yield product_case(config, tokens, size_out, size_in, size_out == 2880)
    for config, tokens in dict.fromkeys(ways(head.HEADS, every)):
        yield product_case(config, tokens, 201088, 2880, best=True)


def expert_case(tiling, rows, fp8=False):
    interleaved = rows == 5760
    half = fragments.ExpertSizes(rows, 2880, interleaved, 7.0, 1.702, 4, True)
    start = experts.experts_launcher(tiling, half, 8.0 if fp8 else 1.0)
    scores, without = ("", "scores_ptr") if interleaved else ("*fp32", "")
    x, x_scales = ("*fp8e4nv", "*fp32") if fp8 else ("*bf16", "")
    if not (fp8 and interleaved):
        x_scales, without = "", f"{without} x_scales_ptr"
    out = x if interleaved else "*bf16"
    types = f"{x} {x_scales} *i32 *i32 *bf16 {scores} *i32 *i32 *i32 {out}"
    return case_of(start, types, without)


def expert_cases():
    """Both halves in every tiling that is used."""
    for up, back in dict.fromkeys((up, back) for *_, up, back in experts.TILINGS):
        yield from (expert_case(up, 5760), expert_case(back, 2880))


def one_case(interleaved):
    rows = 5760 if interleaved else 2880
    half = fragments.ExpertSizes(rows, 2880, interleaved, 7.0, 1.702, 4, True)
    start = experts_one.one_launcher(experts_one.one_tiling(1), half, 128)
    if interleaved:
        return case_of(start, "*bf16 *i32 *i32 *i32 *bf16 *i32 *bf16", "scores_ptr")
    return case_of(start, "*bf16 *i32 *fp32 *i32 *i32 *bf16 *i32 *fp32")


SMALL, *LARGE = (routing.sort_plan(n, 4, 128, 16) for n in (1024, 2048, 65_536))
FP8_EXPERTS = [expert_case(experts.FP8_WAITING, rows, True) for rows in (5760, 2880)]
AHEAD = [  # of the weights that are multiplied, others are decoded
    expert_case(tiling, rows, fp8)
    for tiling, fp8 in (
        *((experts.AHEAD, False), (experts.WIDE_AHEAD, False)),
        *((experts.FP8_AHEAD, True), (experts.FP8_WIDE, True)),
    )
    for rows in (5760, 2880)
]
EXPERTS = [*expert_cases(), *FP8_EXPERTS]
ONE = [one_case(interleaved) for interleaved in (True, False)]
CASES = [
    *product_cases(),
    # Where no answer depends on the others
    *(
        product_case(linear.choose_invariant(tokens, *shape), tokens, *shape)
        for shape in ((5120, 2880), (2880, 4096), (128, 2880))
        for tokens in (1, 8192)
    ),
    product_case(linear.MANY_TOKENS, 128, 128, 2880),
    # A dense family's feed-forward network
    *(product_case(linear.choose(n, 4096, 12288), n, 4096, 12288) for n in (4, 64)),
    product_case(linear.choose_invariant(99, 24576, 4096), 99, 24576, 4096),
    case_of(routing.top_k_launcher(128, 5, 4, 1), "*fp32 *bf16 *i32 *fp32 i32"),
    case_of(SMALL.scatter, "*i32 *i32 *i32 *i32 *i32 i32 i32"),
    *(case_of(plan.counter, "*i32 *i32 *i32 i32") for plan in LARGE),
    *(case_of(plan.scatter, "*i32 *i32 *i32 *i32 *i32 *i32 i32 i32") for plan in LARGE),
    *EXPERTS,
    *AHEAD,
    *ONE,
    *(
        Case(head.best_kernel, "*i64 *i32 i32", {"BLOCK": block, "PDL": True}, warps)
        for block, warps in ((2048, 8), (8192, 32))
    ),
]
MORE = [case for case in product_cases(every=True) if case not in CASES]
ONE_OF_EACH = list({(case.kernel, case.types): case for case in CASES}.values())


def waits(case):
    return case.constants["PDL"]


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_it_compiles_and_fits(case):
    assert_compiles_and_fits(case)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=kernel_name)
def test_it_compiles_for_older_gpus(case):
    assert_compiles_for_older_gpus(case, ADA if "fp8" in case.types else AMPERE)


@pytest.mark.parametrize("case", parameters(CASES, MORE, waits))
def test_nothing_is_read_or_written_too_early(case):
    early = EARLY.get(kernel_name(case), "")
    if case in ONE[::2]:
        early = ""  # nothing but what the kernel ahead has written is worth it
    assert_waits(case, early)


@pytest.mark.parametrize("case", parameters(CASES, MORE, waits))
def test_no_program_is_over_before_it_waits(case):
    assert_every_program_waits(case)


def test_the_ids_are_there_before_the_other_half_starts():
    """It reads them without waiting."""
    ptx = compile_case(ONE[0]).asm["ptx"]
    wait = ptx.index("griddepcontrol.wait")
    assert wait < ptx.index("griddepcontrol.launch_dependents")


def test_only_weights_with_aligned_rows_are_prefetched():
    for (_, size_in), table in linear.PROJECTIONS.items():
        ahead = any(isinstance(way, linear.Dot) and way.ahead for _, way in table)
        assert not ahead or size_in * 2 % 16 == 0
    others = (*linear.other_projections(4096, 4096), *head.HEADS)
    assert not any(isinstance(way, linear.Dot) and way.ahead for _, way in others)


@pytest.mark.parametrize("case", EXPERTS, ids=kernel_name)
def test_a_weight_is_decoded_after_the_multiplications_before(case):
    """ptxas before 13.3 reuses registers of a wgmma that is under way."""
    ptx = compile_case(case).asm["ptx"]
    steps = re.findall(r"wgmma\.(mma_async|wait_group\S+ *\d+)|(fma)\.rn\.bf16x2", ptx)
    kinds = [first.split(".")[0] or second for first, second in steps]
    assert kinds.count("fma")
    # mma, for up to 8 tokens, is over when it is over.
    assert kinds.count("mma_async") or case.constants["BLOCK_T"] == 8
    assert all(first.endswith(" 0") for first, _ in steps if "wait" in first)
    for step, following in pairwise(kinds):
        assert step != "mma_async" or following != "fma"


@pytest.mark.parametrize("case", AHEAD, ids=kernel_name)
def test_a_weight_is_decoded_into_registers_that_nobody_reads(case):
    """ptxas since 13.3 sees to it, even in front of a wait; older ones don't."""
    loops = machine_loops(compile_case(case))
    loops = [loop for loop in loops if any("GMMA" in line for line in loop)]
    assert len(loops) >= case.constants["WIDTHS"]
    if experts.assembler() < (13, 3):
        assert all(overwritten([*loop, *loop]) for loop in loops)
        return
    for loop in loops:
        assert not overwritten([*loop, *loop])
        assert decodes_under_way([*loop, *loop])


def decodes_under_way(code: list[str]) -> bool:
    """Whether anything is scaled while a product is under way."""
    groups = 0
    for line in code:
        if line[1:5] == "GMMA":
            groups += 1
        elif line.startswith("WARPGROUP.DEPBAR"):
            groups = min(groups, int(line.rpartition(",")[2], 16))
        elif line.startswith(("HMUL2", "HFMA2")) and groups:
            return True
    return False


def test_what_happens_under_a_product_is_found():
    product = "HGMMA.64x8x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0"
    scale = "HMUL2.BF16_V2 R165, R165, R8.H0_H0"
    waits = [f"WARPGROUP.DEPBAR.LE gsb0, 0x{pending}" for pending in (0, 1)]
    assert decodes_under_way([product, scale])
    assert decodes_under_way([product, waits[1], scale])
    assert not decodes_under_way([scale, product, waits[0], scale])


def test_an_overwritten_register_is_found():
    first = "HGMMA.64x8x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0"
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    write = "LOP3.LUT R10, R2, R3, R4, 0x80, !PT"
    assert overwritten([first, write, wait]) == [write]
    assert overwritten([first, "LDS.128 R8, [R3]", wait])
    assert not overwritten([first, wait, write])
    assert not overwritten([first, "LOP3.LUT R12, R8, R9, R10, 0x80, !PT", wait])
    assert not overwritten([first, "STS.128 [R3], R8", wait])
    for write in ("LOP3.LUT P0, R10, R2, R3, R4", "SHFL.IDX PT, R10, R4, R5, 0x1f",
                  "LDSM.16.M88.4 R8, [R3]", "CS2R R10, SRZ"):  # fmt: skip
        assert overwritten([first, write, wait]) == [write]
    second = first.removesuffix(", gsb0")  # as far as the machine knows, still open
    assert overwritten([second, wait, "MOV R10, R1"])


@pytest.mark.parametrize("case", [*EXPERTS, *AHEAD], ids=kernel_name)
def test_decoded_weights_stay_in_their_threads(case):
    """Triton 3.6 would exchange them, see `experts.layout_barrier`; 3.9 would not."""
    ptx = compile_case(case).asm["ptx"]
    assert "shfl.sync" not in ptx
    if case.constants["BLOCK_T"] == 8:
        assert "mma.sync" in ptx


def test_every_kernel_is_in_the_list():
    listed = {case.kernel.fn for case in CASES}
    kernels = kernels_of("experts", "experts_one", "fragments", "head", "linear")
    kernels |= kernels_of("routing")
    assert not [name for name, kernel in kernels.items() if kernel.fn not in listed]
