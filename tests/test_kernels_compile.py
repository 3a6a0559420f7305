"""The kernels of attention, of the residual stream and of sampling compile for Hopper.

Those of projections and experts are in test_kernels_compile_experts.py.
"""

import pytest
from kernels_compiler import (
    Case,
    assert_compiles_and_fits,
    assert_compiles_for_older_gpus,
    assert_every_program_waits,
    assert_waits,
    compile_case,
    kernel_name,
    kernels_of,
    parameters,
)

from simplellm.kernels import decode, draw, launch, norm, prefill, read, rope

OTHERS = {"experts", "experts_one", "head", "linear", "routing"}

# What a kernel may read before it waits for the kernel ahead: weights, what the step
# came with, and what a kernel has written that all later ones have waited for.
EARLY = {
    "decode_kernel": "lengths_ptr offsets_ptr tables_ptr sinks_ptr keys_ptr values_ptr",
    "join_kernel": "lengths_ptr offsets_ptr",
    "prefill_kernel": "queries_ptr lengths_ptr offsets_ptr tables_ptr sinks_ptr",
    "rope_kernel": "bias_ptr q_norm_ptr k_norm_ptr positions_ptr cos_ptr sin_ptr "
    "slots_ptr",
    "add_norm_kernel": "weight_ptr",
}
GPT_OSS = (8, 8, 64)  # kv heads, heads a group, head_dim
OTHER_HEADS = (8, 4, 128), (4, 2, 256)  # as Qwen3 and Gemma have them
MORE_HEADS = (4, 8, 128), (8, 2, 128), (2, 5, 128), (16, 1, 64), (2, 2, 32)


def decode_case(batch, window=None, heads=GPT_OSS):
    kv_heads, group, dim = heads
    tiles, sizes = decode.decode_options(batch, kv_heads * group, kv_heads, dim, window)
    has_sinks = heads == GPT_OSS
    sizes = {**sizes, "PAGE": 64, "ROWS": launch.power_of_two(group), "PDL": True}
    sizes |= {} if has_sinks else {"sinks_ptr": None}
    sinks = "*bf16" if has_sinks else ""
    return Case(
        decode.decode_kernel,
        f"*bf16 *bf16 *bf16 *i32 *i32 *i32 {sinks} *bf16 *fp32 *fp32 fp32 i32 i32 i32",
        sizes | {"HAS_SINKS": has_sinks},
        warps=tiles.warps,
        stages=tiles.stages,
        aligned=("stride_page",),
    )


def join_case(batch, splits, heads=GPT_OSS):
    kv_heads, group, dim = heads
    _, sizes = decode.decode_options(batch, kv_heads * group, kv_heads, dim, None)
    _, how = decode.join_options(batch, kv_heads * group, kv_heads, dim, splits)
    warps, own = how["num_warps"], {name: how[name] for name in ("HEADS", "SPLITS")}
    types = "*fp32 *fp32 *i32 *i32 *bf16 i32 i32"
    return Case(decode.join_kernel, types, sizes | own | {"PDL": True}, warps=warps)


def prefill_case(window=None, batch_invariant=False, heads=GPT_OSS):
    kv_heads, group, dim = heads
    tiles = prefill.prefill_tiles(dim, window, batch_invariant)
    has_sinks = heads == GPT_OSS
    sizes = {"K": kv_heads, "G": group, "D": dim, "PAGE": 64, "WINDOW": window or 0}
    sizes |= {"ROWS": launch.power_of_two(group), "DIMS": dim, "BLOCK": tiles.block}
    sizes |= {"TOKENS": tiles.tokens, "HAS_SINKS": has_sinks, "PDL": True}
    sizes |= {} if has_sinks else {"sinks_ptr": None}
    sinks = "*bf16" if has_sinks else ""
    return Case(
        prefill.prefill_kernel,
        f"*bf16 *bf16 *bf16 *i32 *i32 *i32 *i32 {sinks} *bf16 fp32 i32 i32 i32 i32",
        sizes,
        warps=tiles.warps,
        stages=tiles.stages,
        aligned=("stride_page",),
    )


def attention_cases(heads):
    """Every tiling that is used."""
    cases = [decode_case(batch, heads=heads) for batch in decode.DECODE_TILES]
    cases += [decode_case(1, 128, heads), prefill_case(128, True, heads)]
    cases += [prefill_case(window, heads=heads) for window in (None, 128)]
    return list({str(case): case for case in cases}.values())


def rope_case(dim, has_norms):
    half = dim // 2
    norms = "*bf16 *bf16" if has_norms else ""
    sizes = {"H": 64, "K": 8, "D": dim, "PAGE": 64, "PARTS": 1, "HEADS": 512 // half}
    sizes |= {} if has_norms else {"q_norm_ptr": None, "k_norm_ptr": None}
    return Case(
        rope.rope_kernel,
        f"*bf16 *bf16 {norms} *i32 *fp32 *fp32 *i32 *bf16 *bf16 *bf16 fp32 i32 i32",
        sizes | {"HALF": half, "HAS_BIAS": True, "HAS_NORMS": has_norms, "PDL": True},
        warps=2,
        aligned=("stride_page_keys", "stride_page_values"),
    )


CASES = [
    *attention_cases(GPT_OSS),
    join_case(1, splits=64),
    join_case(64, splits=4),
    join_case(9, splits=7),
    rope_case(64, has_norms=False),
    Case(
        norm.add_norm_kernel,
        "*bf16 *bf16 *fp32 *bf16 fp32",
        {"N": 2880, "PARTS": 4, "BLOCK": 4096, "PDL": True},
        warps=8,
    ),
    Case(
        draw.draw_kernel,
        "*fp32 *i32 *fp32 *i64 *i64 *i64 i32",
        {"BLOCK": 2048, "LIBRARY": True, "PDL": True},
        warps=8,
    ),
    Case(draw.drawn_kernel, "*i64 *i32 *fp32 *i32 i32", {"BLOCK": 128, "PDL": True}),
    Case(norm.embed_kernel, "*i32 *i32 *bf16 *bf16", {"N": 2880, "BLOCK": 4096}),
    Case(read.read_kernel, "*i32 *i32", {"BLOCK": 8192}, warps=8),
    # Other families' attention
    *(case for heads in OTHER_HEADS for case in attention_cases(heads)),
    join_case(1, splits=64, heads=(4, 2, 256)),
    join_case(65, splits=4, heads=(8, 4, 128)),
    rope_case(128, has_norms=True),
    rope_case(256, has_norms=True),
]
MORE = [
    *(case for heads in MORE_HEADS for case in attention_cases(heads)),
    rope_case(64, has_norms=True),
    rope_case(128, has_norms=False),
    rope_case(256, has_norms=False),
]
ONE_OF_EACH = list({case.kernel: case for case in reversed(CASES)}.values())


NEVER_WAIT = norm.embed_kernel, read.read_kernel
# Of attention's programs, those without work do not wait, but there are always others.
SOME_WAIT = decode.decode_kernel, prefill.prefill_kernel


def waits(case):
    return case.kernel not in NEVER_WAIT


def always_waits(case):
    return waits(case) and case.kernel not in SOME_WAIT


@pytest.mark.parametrize("case", parameters(CASES, MORE))
def test_it_compiles_and_fits(case):
    assert_compiles_and_fits(case)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=kernel_name)
def test_it_compiles_for_older_gpus(case):
    assert_compiles_for_older_gpus(case)


@pytest.mark.parametrize("case", parameters(CASES, MORE, waits))
def test_nothing_is_read_or_written_too_early(case):
    """Before the wait, only what `EARLY` names is read, and nothing written."""
    early = EARLY.get(kernel_name(case), "")
    if case.constants.get("EARLY") is False and case.kernel is decode.decode_kernel:
        early = early.replace("keys_ptr values_ptr", "")
    assert_waits(case, early)


@pytest.mark.parametrize("case", parameters(CASES, MORE, always_waits))
def test_no_program_is_over_before_it_waits(case):
    assert_every_program_waits(case)


@pytest.mark.parametrize("heads", [GPT_OSS, *OTHER_HEADS], ids=str)
@pytest.mark.parametrize("batch", decode.DECODE_TILES)
def test_keys_are_on_their_way_before_the_wait(batch, heads):
    ptx = compile_case(decode_case(batch, heads=heads)).asm["ptx"]
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert ("cp.async" in before) == decode.DECODE_TILES[batch].early
    assert "ld.global" in after  # the queries, which the kernel before has written


def test_every_kernel_is_in_the_list():
    listed = {case.kernel.fn for case in CASES}
    kernels = kernels_of().items()
    missing = {name for name, kernel in kernels if kernel.fn not in listed}
    assert {name for name in missing if name.split(".")[0] not in OTHERS} == set()
