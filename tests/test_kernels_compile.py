"""The kernels of attention, of the residual stream and of sampling compile for Hopper.

Those of projections and experts are in test_kernels_compile_experts.py.
"""

import pytest
import torch
from kernels_compiler import (
    Case,
    assert_compiles_and_fits,
    assert_compiles_for_older_gpus,
    assert_every_program_waits,
    assert_waits,
    case_of,
    compile_case,
    kernel_name,
    kernels_of,
    parameters,
)

from simplellm.engine.graphs import QUERIES
from simplellm.model.kernels import (
    bandwidth,
    decode,
    decode_fp8,
    draw,
    expert_exchange,
    filters,
    linear,
    norm,
    other_families,
    penalties,
    prefill,
    reduce,
    rope,
    verify,
    vocabulary,
)
from simplellm.model.kernels.exchange import Peers
from simplellm.model.kernels.key_tiles import AttentionSizes
from simplellm.model.kernels.launch import launcher

OTHERS = {"experts", "experts_one", "grouped", "head", "linear", "scaled_linear"}
OTHERS |= {"blocks", "grouped_few", "rounding", "routing", "sorting"}

# What a kernel may read before it waits for the kernel ahead: weights, what the step
# came with, and what a kernel has written that all later ones have waited for.
EARLY = {
    "decode_kernel": "lengths_ptr offsets_ptr tables_ptr sinks_ptr keys_ptr values_ptr",
    "decode_fp8_kernel": "lengths_ptr offsets_ptr tables_ptr sinks_ptr keys_ptr "
    "values_ptr",
    "join_kernel": "lengths_ptr offsets_ptr",
    "prefill_kernel": "query_start_loc_ptr lengths_ptr offsets_ptr tables_ptr "
    "sinks_ptr",
    "verify_kernel": "query_start_loc_ptr lengths_ptr offsets_ptr tables_ptr sinks_ptr",
    "verify_join_kernel": "query_start_loc_ptr lengths_ptr offsets_ptr",
    "rope_kernel": "bias_ptr q_norm_ptr k_norm_ptr positions_ptr cos_ptr sin_ptr "
    "slots_ptr",
    "add_norm_kernel": "update_weight_ptr weight_ptr bias_ptr peers_ptr",
    "combine_kernel": "peers_ptr",
    "dispatch_kernel": "peers_ptr",
    "largest_kernel": "peers_ptr",
    "peak_kernel": "peers_ptr",
    "gemv_kernel": "weight_ptr",
}
GPT_OSS = (8, 8, 64)  # kv heads, heads a group, head_dim
OTHER_HEADS = (8, 4, 128), (4, 2, 256)  # as Qwen3 and Gemma have them
BATCHES = [1, 5, 16, 32, 64, 128]  # with tiles of their own
MORE_HEADS = (4, 8, 128), (8, 2, 128), (2, 5, 128), (16, 1, 64), (2, 2, 32)


def sizes_of(heads, window):
    kv_heads, group, dim = heads
    q = torch.empty(1, kv_heads * group, dim, device="meta")
    keys = torch.empty(1, 64, kv_heads, dim, device="meta")
    return AttentionSizes.of(q, keys, window, heads == GPT_OSS)


def decode_plan(batch, heads, window=None, places=4096 * 64):
    tiles = decode.decode_tiles(batch, heads[2], window)
    sizes = sizes_of(heads, window)
    return decode.decode_plan(tiles, batch, places // 64, sizes, decode.decode_kernel)


def decode_case(batch, window=None, heads=GPT_OSS):
    sinks, without = ("*bf16", "") if heads == GPT_OSS else ("", "sinks_ptr")
    return case_of(
        decode_plan(batch, heads, window).start,
        f"*bf16 *bf16 *bf16 *i32 *i32 *i32 {sinks} *bf16 *fp32 *fp32 fp32 i32 i32 i32",
        without,
        aligned=("stride_page",),
    )


def join_case(batch, splits, heads=GPT_OSS):
    least = decode.decode_tiles(batch, heads[2], None).least
    plan = decode_plan(batch, heads, places=splits * least)
    assert plan.splits == splits
    return case_of(plan.join, "*fp32 *fp32 *i32 *i32 *bf16 i32 i32")


def verify_plan(batch, heads, window=None, places=4096 * 64):
    tiles = decode.decode_tiles(batch, heads[2], window)
    sizes = sizes_of(heads, window)
    return verify.verify_plan(tiles, batch, QUERIES, places // 64, sizes)


def verify_case(batch, window=None, heads=GPT_OSS):
    sinks, without = ("*bf16", "") if heads == GPT_OSS else ("", "sinks_ptr")
    return case_of(
        verify_plan(batch, heads, window).start,
        f"*bf16 *bf16 *bf16 *i32 *i32 *i32 *i32 {sinks} *bf16 *fp32 *fp32 fp32 i32 i32 "
        "i32 i32",
        without,
        aligned=("stride_page",),
    )


def verify_join_case(batch, splits, heads=GPT_OSS):
    least = decode.decode_tiles(batch, heads[2], None).least
    plan = verify_plan(batch, heads, places=splits * least)
    assert plan.splits == splits
    return case_of(plan.join, "*fp32 *fp32 *i32 *i32 *i32 *bf16 i32 i32")


def prefill_case(window=None, batch_invariant=False, heads=GPT_OSS, cache="bf16"):
    _, group, dim = heads
    tiles = prefill.prefill_tiles(dim, group, window, batch_invariant)
    sinks, without = ("*bf16", "") if heads == GPT_OSS else ("", "sinks_ptr")
    pages = f"*{cache} *{cache}"
    return case_of(
        prefill.prefill_launcher(tiles, sizes_of(heads, window)),
        f"*bf16 {pages} *i32 *i32 *i32 *i32 {sinks} *bf16 fp32 i32 i32 i32 i32",
        without,
        aligned=("stride_page",),
    )


def attention_cases(heads):
    """Every tiling that is used."""
    cases = [decode_case(batch, heads=heads) for batch in BATCHES]
    cases += [decode_case(1, 128, heads), prefill_case(128, True, heads)]
    cases += [verify_case(batch, heads=heads) for batch in BATCHES]
    cases += [verify_case(1, 128, heads)]
    cases += [prefill_case(window, heads=heads) for window in (None, 128)]
    return list({str(case): case for case in cases}.values())


def decode_fp8_case(batch, heads):
    sinks, without = ("*bf16", "") if heads == GPT_OSS else ("", "sinks_ptr")
    tiles, sizes = decode_fp8.fp8_tiles(batch, heads[2]), sizes_of(heads, None)
    kernel = decode_fp8.decode_fp8_kernel
    return case_of(
        decode.decode_plan(tiles, batch, 4096, sizes, kernel, PTX=True).start,
        f"*bf16 *i16 *i16 *i32 *i32 *i32 {sinks} *bf16 *fp32 *fp32 fp32 i32 i32 i32",
        without,
        aligned=("stride_page",),
    )


def fp8_cases(heads):
    """Attention over keys and values of FP8, as layers without a window have them."""
    cases = [decode_fp8_case(batch, heads) for batch in BATCHES]
    cases += [prefill_case(heads=heads, cache="fp8e4nv")]
    return list({str(case): case for case in cases}.values())


def rope_case(dim, has_norms, cache="bf16"):
    norms, without = ("*bf16 *bf16", "") if has_norms else ("", "q_norm_ptr k_norm_ptr")
    start, _ = rope.rope_launcher(64, 8, dim, 64, 1, True, has_norms)
    return case_of(
        start,
        f"*bf16 *bf16 {norms} *i32 *fp32 *fp32 *i32 *bf16 *{cache} *{cache} "
        "fp32 fp32 fp32 fp32 i32 i32",
        without,
        aligned=("stride_page_keys", "stride_page_values"),
    )


PEERS = Peers(torch.empty(0), 1, 2, 256, 1440)
DRAW, DRAWN = draw.draw_launchers(True)
_, DRAWN_BY_ALL = draw.draw_launchers(True, PEERS)


def filter_cases(weights, first):
    tally, pick = filters.filter_launchers(weights, first, True)
    logits, columns = "*fp32 *i32", "*fp32 *i64 *fp32"
    more = "*fp32 *i32 *i32 *i32 *i64"
    return [
        case_of(tally, f"{logits} {columns} {more} i32 i32", "peaks_ptr"),
        case_of(tally, f"{logits} *fp32 {columns} {more} i32 i32"),
        case_of(pick, f"{columns} *i32 *i32 *i32 *i64 i32 i32"),
    ]


def norm_case(size, parts, sandwich):
    start = norm.add_norm_launcher(size, parts)
    if parts == 0:  # GPT-2's first
        types, without = "*bf16 *fp32 *fp32 *bf16", "update_ptr update_weight_ptr"
    else:
        types, without = "*bf16 *fp32 *fp32 *fp32 *bf16", "bias_ptr"
        without = without if sandwich else "update_weight_ptr"
    return case_of(start, f"{types} i32 fp32", f"{without} scales_ptr peers_ptr")


def exchange_case(ranks, parts):
    peers = Peers(torch.empty(0), 1, ranks, 256, 1440)
    return case_of(
        norm.add_norm_launcher(2880, parts, peers=peers),
        "*bf16 *fp32 *fp32 *bf16 *i64 i32 fp32",
        "update_weight_ptr bias_ptr scales_ptr",
    )


def expert_exchange_cases(ranks, parts):
    """What is said of a row are 4 parts of float32, or of more rows of bfloat16."""
    peers = Peers(torch.empty(0), 1, ranks, 256, 1444)
    combine = expert_exchange.combine_launcher(2880, 4, peers)
    return [
        case_of(
            expert_exchange.dispatch_launcher(2880, peers),
            "*bf16 *i32 *bf16 *i32 *i64",
        ),
        case_of(combine, f"*{parts} *i32 *bf16 *i64"),
    ]


def activation_case(size, parts, activation):
    how = size, parts, activation, torch.bfloat16, None
    start, _ = other_families.activation_launcher(*how)
    first = "*bf16" if parts == 1 else "*fp32"
    return case_of(start, f"{first} *bf16 i32", "scales_ptr")


def gated_case(tokens, shape, activation="swiglu"):
    config = linear.choose(tokens, *shape)
    start, _ = linear.product_launcher(config, tokens, *shape, activation=activation)
    types = "*bf16 *bf16 *bf16 i32 i32" + " i32" * isinstance(config, linear.Dot)
    without = "x_scales_ptr scales_ptr bias_ptr best_ptr"
    return case_of(start, types, without, aligned=("stride_x",))


PENALIZE = launcher(
    penalties.penalize_kernel, BLOCK=penalties.PENALTY_BLOCK, num_warps=8
)
CASES = [
    *attention_cases(GPT_OSS),
    *fp8_cases((8, 4, 128)),
    join_case(1, splits=64),
    join_case(64, splits=4),
    join_case(9, splits=7),
    verify_join_case(4, splits=16),
    verify_join_case(64, splits=4),
    rope_case(64, has_norms=False),
    rope_case(128, has_norms=True, cache="fp8e4nv"),
    case_of(
        norm.add_norm_launcher(2880, 4),
        "*bf16 *bf16 *fp32 *bf16 i32 fp32",
        "update_weight_ptr bias_ptr scales_ptr peers_ptr",
    ),
    *(exchange_case(ranks, 4) for ranks in (2, 8)),
    *expert_exchange_cases(2, "fp32"),
    *expert_exchange_cases(8, "bf16"),
    case_of(
        vocabulary.embed_part_launcher(2880, PEERS),
        "*i32 *i32 *bf16 *bf16 *i64 i32 i32",
    ),
    case_of(vocabulary.largest_launcher(PEERS), "*fp32 *i32 *i64 *i32 i32 i32"),
    case_of(reduce.add_parts_launcher(2880, 4)[0], "*bf16 *bf16"),
    case_of(
        DRAW,
        "*fp32 *i32 *fp32 *i64 *i64 *i64 i32 i32",
        "deepest_ptr floors_ptr peaks_ptr",
    ),
    case_of(DRAW, "*fp32 *i32 *fp32 *i64 *i64 *i32 *fp32 *fp32 *i64 i32 i32"),
    case_of(DRAWN_BY_ALL, "*i64 *i32 *fp32 *i32 *i64 i32"),
    case_of(vocabulary.peak_launcher(PEERS), "*fp32 *i32 *i64 *fp32 i32 i32"),
    *filter_cases(weights=False, first=True),
    *filter_cases(weights=False, first=False),
    *filter_cases(weights=True, first=True),
    *filter_cases(weights=True, first=False),
    case_of(PENALIZE, "*fp32 *i64 *i1 *i32 *fp32 *fp32 *fp32 i32 i32"),
    case_of(DRAWN, "*i64 *i32 *fp32 *i32 i32", "peers_ptr"),
    case_of(norm.embed_launcher(2880), "*i32 *i32 *bf16 *bf16"),
    Case(bandwidth.read_kernel, "*i32 *i32", {"BLOCK": 8192}, warps=8),
    # Other families' attention
    *(case for heads in OTHER_HEADS for case in attention_cases(heads)),
    join_case(1, splits=64, heads=(4, 2, 256)),
    join_case(65, splits=4, heads=(8, 4, 128)),
    rope_case(128, has_norms=True),
    rope_case(256, has_norms=True),
    # What is around their attention: Gemma's, GPT-2's, Qwen's
    norm_case(2560, 4, sandwich=True),
    norm_case(768, 8, sandwich=False),
    norm_case(768, 0, sandwich=False),
    activation_case(12288, 1, "swiglu"),
    activation_case(10240, 2, "geglu"),
    activation_case(3072, 5, "gelu"),
    *(gated_case(tokens, (24576, 4096)) for tokens in (1, 8, 64)),
    gated_case(1, (20480, 2560), "geglu"),
]
MORE = [
    *(case for heads in MORE_HEADS for case in attention_cases(heads)),
    *fp8_cases(GPT_OSS),
    rope_case(64, has_norms=True),
    rope_case(128, has_norms=False),
    rope_case(256, has_norms=False),
]
ONE_OF_EACH = list({case.kernel: case for case in reversed(CASES)}.values())


NEVER_WAIT = norm.embed_kernel, bandwidth.read_kernel, vocabulary.embed_part_kernel
# Of attention's programs, those without work do not wait, but there are always others.
SOME_WAIT = (
    decode.decode_kernel,
    decode_fp8.decode_fp8_kernel,
    prefill.prefill_kernel,
    verify.verify_kernel,
)


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
@pytest.mark.parametrize("batch", BATCHES)
def test_keys_are_on_their_way_before_the_wait(batch, heads):
    ptx = compile_case(decode_case(batch, heads=heads)).asm["ptx"]
    before, after = ptx.split("griddepcontrol.wait", 1)
    early = decode.decode_tiles(batch, heads[2], None).early
    assert ("cp.async" in before) == early
    assert "ld.global" in after  # the queries, which the kernel before has written


@pytest.mark.parametrize("heads", [GPT_OSS, (8, 4, 128)], ids=str)
def test_fp8_values_are_turned_two_bytes_at_a_time(heads):
    ptx = compile_case(decode_fp8_case(64, heads)).asm["ptx"]
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in ptx
    assert "cvt.rn.f16x2.e4m3x2" not in ptx
    assert "ld.shared.b8" not in ptx


def test_every_kernel_is_in_the_list():
    listed = {case.kernel.fn for case in CASES}
    kernels = kernels_of().items()
    missing = {name for name, kernel in kernels if kernel.fn not in listed}
    assert {name for name in missing if name.split(".")[0] not in OTHERS} == set()
