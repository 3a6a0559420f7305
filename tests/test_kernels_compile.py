"""Every kernel compiles for Hopper, on a machine without a GPU as well."""

import importlib
import inspect
import pkgutil
import re
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import simplellm.kernels
from simplellm.kernels import (
    attention,
    experts,
    experts_few,
    forward,
    head,
    linear,
    norm,
    read,
    rope,
    routing,
    sampling,
)

HOPPER = GPUTarget("cuda", 90, 32)
AMPERE = GPUTarget("cuda", 80, 32)  # the oldest GPUs that get the kernels
WAIT = r"griddepcontrol\.wait|grid_dependency_wait"  # as one Triton or another has it

# What a kernel may read before it waits for the kernel ahead: weights, what the step
# came with, and what a kernel has written that all later ones have waited for.
EARLY = {
    "decode_kernel": "lengths_ptr offsets_ptr tables_ptr sinks_ptr keys_ptr values_ptr",
    "join_kernel": "lengths_ptr offsets_ptr",
    "prefill_kernel": "queries_ptr lengths_ptr offsets_ptr tables_ptr sinks_ptr",
    "rope_kernel": "bias_ptr positions_ptr cos_ptr sin_ptr slots_ptr",
    "add_norm_kernel": "weight_ptr",
    "gemv_kernel": "weight_ptr bias_ptr",
    "dot_kernel": "weight_ptr",
    "head_gemv_kernel": "weight_ptr",
    "head_dot_kernel": "weight_ptr",
    "down_few_kernel": "ids_ptr weights_ptr words_ptr scales_ptr bias_ptr",
    "route_kernel": "live_ptr",
    "sort_small_kernel": "live_ptr",
    "count_kernel": "live_ptr",
    "place_kernel": "live_ptr",
}


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


def launches(table):
    """Each way in a table of `choose`, with every TOKENS that it is compiled for."""
    least = 1
    for most, how in table:
        for tokens in range(least, most + 1):
            # A dot takes up to 128 tokens in a program, rounded up.
            rounded = min(128, max(16, triton.next_power_of_2(tokens)))
            yield how, tokens if isinstance(how, linear.Gemv) else rounded
        least = most + 1


def linear_cases():
    """All projections of gpt-oss in all ways that are used."""
    for (rows, columns), table in linear.TUNED.items():
        # Others' biases are added by the kernels behind them.
        sizes = {"N": rows, "K": columns, "HAS_BIAS": rows == 2880}
        for how, tokens in dict.fromkeys(launches(table)):
            yield linear_case(how, sizes | {"TOKENS": tokens})


def linear_case(how, sizes):
    constants = sizes | constants_of(how, sizes["K"])
    if isinstance(how, linear.Gemv):
        kernel, types = linear.gemv_kernel, "*bf16 *bf16 *bf16 *bf16 i32"
        return Case(kernel, types, constants, how.warps, aligned=("stride_x",))
    constants |= {"PARTS": how.parts}
    kernel, types = linear.dot_kernel, "*bf16 *bf16 *bf16 *fp32 i32 i32"
    return Case(kernel, types, constants, how.warps, how.stages, ("stride_x",))


def head_cases():
    """The head in all ways that are used."""
    for how, tokens in dict.fromkeys(launches(head.TUNED)):
        sizes = {"V": 201088, "N": 2880, "WRITE": True, "TOKENS": tokens}
        constants = sizes | constants_of(how, sizes["N"])
        if isinstance(how, linear.Gemv):
            kernel, types = head.head_gemv_kernel, "*bf16 *bf16 *fp32 *i64 i32"
            yield Case(kernel, types, constants, how.warps, aligned=("stride_x",))
        else:
            kernel, types = head.head_dot_kernel, "*bf16 *bf16 *fp32 *i64 i32 i32"
            yield Case(kernel, types, constants, how.warps, how.stages, ("stride_x",))


def constants_of(how, columns):
    """What a gemv or a dot of so many columns is told by a table's entry."""
    common = {"ROWS": how.rows, "PDL": how.pdl}
    if isinstance(how, linear.Gemv):
        block, rest = linear.split(columns)
        return common | {"BLOCK": block, "REST": rest}
    return common | {"DEPTH": how.depth, "AHEAD": how.ahead}


def route_case(tokens):
    tiling, _ = experts.tilings(tokens, 128, 4)
    blocks = routing.max_blocks(4 * tokens, 128, tiling.tokens)
    sizes = {"PARTS": 1, "BLOCK": tiling.tokens, "STEP": blocks}
    types = "*fp32 *bf16 *i32 *fp32 *i32 *i32 *i32 *i32 i32 i32"
    constants = top_choices(rows=tokens) | sizes
    return Case(routing.route_kernel, types, constants, warps=max(1, tokens // 2))


def top_choices(rows):
    sizes = {"E": 128, "PARTS": 5, "HAS_BIAS": True, "TOP_K": 4, "ROWS": rows}
    return {**sizes, "BLOCK_E": 128, "BLOCK_K": 4, "PDL": True}


def sorting(step):
    sizes = {"E": 128, "TOP_K": 4, "BLOCK_E": 128, "BLOCK": 16}
    return sizes | {"STEP": step, "PDL": True}


def expert_cases():
    """Both halves in every tiling that is used."""
    tilings = dict.fromkeys((up, back) for *_, up, back in experts.TUNED)
    for up, back in tilings:
        sizes = {"N": 5760, "LIMIT": 7.0, "ALPHA": 1.702, "TOP_K": 4}
        types = "*bf16 *i32 *i32 *bf16 *i32 *i32 *i32 *bf16"
        yield expert_case(experts.gate_up_kernel, types, up, sizes)
        types = "*bf16 *i32 *i32 *bf16 *fp32 *i32 *i32 *i32 *bf16"
        yield expert_case(experts.down_kernel, types, back, {"N": 2880})


def expert_case(kernel, types, tiling, sizes):
    blocks = {"K": 2880, "BLOCK_N": tiling.rows, "BLOCK_T": tiling.tokens}
    loop = {"WIDTHS": tiling.widths, "UNROLL": tiling.unroll, "STAGES": tiling.stages}
    constants = sizes | blocks | loop | {"PTX": True, "PDL": True}
    return Case(kernel, types, constants, warps=tiling.warps)


def one_token():
    return {"K": 2880, "PROGRAMS": 66, "WARPS": 8, "PTX": True, "PDL": True}


def attention_sizes(tiles, window=0):
    sizes = {"K": 8, "G": 8, "D": 64, "PAGE": 64, "WINDOW": window, "ROWS": 8}
    return {**sizes, "DIMS": 64, "BLOCK": tiles.block, "HAS_SINKS": True, "PDL": True}


def decode_case(tiles, window=0):
    return Case(
        attention.decode_kernel,
        "*bf16 *bf16 *bf16 *i32 *i32 *i32 *bf16 *bf16 *fp32 *fp32 fp32 i32 i32 i32 i32",
        attention_sizes(tiles, window) | {"EARLY": tiles.early},
        warps=tiles.warps,
        stages=tiles.stages,
        aligned=("stride_q", "stride_page"),
    )


def join_case(tiles, heads, splits):
    sizes = {"K": 8, "G": 8, "D": 64, "WINDOW": 0, "HEADS": heads, "DIMS": 64}
    how = {"SPLITS": splits, "BLOCK": tiles.block, "EARLY": tiles.early, "PDL": True}
    types = "*fp32 *fp32 *i32 *i32 *bf16 i32 i32"
    warps = max(1, splits * heads * 64 // 4096)
    return Case(attention.join_kernel, types, sizes | how, warps=warps)


def prefill_case(tiles, window=0):
    return Case(
        attention.prefill_kernel,
        "*bf16 *bf16 *bf16 *i32 *i32 *i32 *i32 *bf16 *bf16 fp32 i32 i32 i32 i32 i32",
        attention_sizes(tiles, window) | {"TOKENS": tiles.tokens},
        warps=tiles.warps,
        stages=tiles.stages,
        aligned=("stride_q", "stride_page"),
    )


EXPERTS = list(expert_cases())
CASES = [
    *(decode_case(tiles) for tiles in attention.DECODE.values()),
    decode_case(attention.DECODE_WINDOW, 128),
    join_case(attention.DECODE[1], heads=1, splits=64),
    join_case(attention.DECODE[64], heads=8, splits=4),
    join_case(attention.DECODE[5], heads=8, splits=8),
    prefill_case(attention.PREFILL),
    prefill_case(attention.PREFILL_WINDOW, 128),
    prefill_case(attention.INVARIANT_WINDOW, 128),
    Case(
        rope.rope_kernel,
        "*bf16 *bf16 *i32 *fp32 *fp32 *i32 *bf16 *bf16 *bf16 i32 i32 i32 i32",
        {"H": 64, "K": 8, "D": 64, "PAGE": 64, "PARTS": 1, "HEADS": 16}
        | {"HALF": 32, "HAS_BIAS": True, "PDL": True},
        warps=2,
        aligned=("stride_token", "stride_page_keys", "stride_page_values"),
    ),
    Case(
        norm.add_norm_kernel,
        "*bf16 *bf16 *fp32 *bf16 i32 i32 fp32",
        {"N": 2880, "PARTS": 4, "BLOCK": 4096, "PDL": True},
        warps=8,
        aligned=("stride_token", "stride_part"),
    ),
    *linear_cases(),
    linear_case(
        linear.INVARIANT,
        {"N": 5120, "K": 2880, "HAS_BIAS": False, "TOKENS": linear.INVARIANT.width},
    ),
    Case(
        linear.add_parts_kernel,
        "*fp32 *bf16",
        {"N": 5120, "PARTS": 3, "BLOCK": 512, "PDL": True},
    ),
    Case(
        routing.top_k_kernel,
        "*fp32 *bf16 *i32 *fp32 i32",
        top_choices(rows=1),
        warps=1,
    ),
    *(route_case(tokens) for tokens in (1, 2, routing.FEW_PAIRS // 4)),
    Case(
        routing.sort_small_kernel,
        "*i32 *i32 *i32 *i32 *i32 i32 i32",
        sorting(step=32) | {"ROWS": 32, "CHUNK": 512},
        warps=8,
    ),
    Case(
        routing.count_kernel,
        "*i32 *i32 *i32 i32",
        {"TOP_K": 4, "CHUNK": 512, "BLOCK_E": 128, "PDL": True},
        warps=16,
    ),
    Case(
        routing.place_kernel,
        "*i32 *i32 *i32 *i32 *i32 *i32 i32 i32",
        sorting(step=16) | {"CHUNK": 512, "TILE": 32},
        warps=16,
    ),
    Case(
        sampling.draw_kernel,
        "*fp32 *i32 *fp32 *i64 *i64 *i64 i32",
        {"BLOCK": 2048, "LIBRARY": True, "PDL": True},
        warps=8,
    ),
    Case(
        sampling.drawn_kernel,
        "*i64 *i32 *fp32 *i32 i32",
        {"BLOCK": 128, "PDL": True},
    ),
    *head_cases(),
    *EXPERTS,
    Case(
        experts_few.gate_up_few_kernel,
        "*bf16 *i32 *i32 *i32 *bf16 *bf16",
        {"N": 5760, "LIMIT": 7.0, "ALPHA": 1.702} | one_token(),
        warps=8,
    ),
    Case(
        experts_few.down_few_kernel,
        "*bf16 *i32 *fp32 *i32 *i32 *bf16 *fp32",
        {"N": 2880} | one_token(),
        warps=8,
    ),
    Case(forward.embed_kernel, "*i32 *i32 *bf16 *bf16", {"N": 2880, "BLOCK": 4096}),
    Case(read.read_kernel, "*i32 *i32", {"BLOCK": 8192}, warps=8),
    Case(head.best_kernel, "*i64 *i32 i32", {"BLOCK": 2048, "PDL": True}, warps=8),
    Case(head.best_kernel, "*i64 *i32 i32", {"BLOCK": 8192, "PDL": True}, warps=32),
]


WAITING = [case for case in CASES if case.constants.get("PDL")]
ONE_OF_EACH = list({case.kernel: case for case in CASES}.values())


def kernel_name(case: Case) -> str:
    return case.kernel.__name__


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
    if "PDL" in case.constants:
        options["launch_pdl"] = case.constants["PDL"]
    source = ASTSource(case.kernel, signature, case.constants, aligned)
    return triton.compile(source, target=target, options=options)


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


@pytest.mark.parametrize("case", CASES, ids=kernel_name)
def test_it_compiles_and_fits(case):
    compiled = compile_case(case)
    assert len(compiled.asm["cubin"]) > 0
    assert compiled.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=kernel_name)
def test_it_compiles_for_older_gpus(case):
    constants = case.constants | ({"PDL": False} if "PDL" in case.constants else {})
    compiled = compile_case(replace(case, constants=constants), AMPERE)
    assert len(compiled.asm["cubin"]) > 0


@pytest.mark.parametrize("case", WAITING, ids=kernel_name)
def test_nothing_is_read_or_written_too_early(case):
    """Before the wait, only what `EARLY` names is read, and nothing written."""
    compiled = compile_case(case)
    allowed = set(EARLY.get(kernel_name(case), "").split())
    if case.kernel is attention.decode_kernel and not case.constants["EARLY"]:
        allowed -= {"keys_ptr", "values_ptr"}
    assert touched_before_the_wait(compiled.asm["ttir"]) <= allowed
    before, _ = compiled.asm["ptx"].split("griddepcontrol.wait", 1)
    assert "st.global" not in before
    assert "atom." not in before


# Of attention's programs, those without work do not wait, but there are always others.
ATTENTION = attention.decode_kernel, attention.prefill_kernel
ALL_WAIT = [case for case in WAITING if case.kernel not in ATTENTION]


@pytest.mark.parametrize("case", ALL_WAIT, ids=kernel_name)
def test_no_program_is_over_before_it_waits(case):
    """The kernel behind waits for this one alone, not for the one ahead."""
    lines = lines_before_the_wait(compile_case(case).asm["ttir"])
    assert not [line for line in lines if re.search(r"\b(cf|scf)\.", line)]


def test_the_ids_are_there_before_down_starts():
    """`down_few_kernel` reads them without waiting."""
    (case,) = (c for c in CASES if c.kernel is experts_few.gate_up_few_kernel)
    ptx = compile_case(case).asm["ptx"]
    wait = ptx.index("griddepcontrol.wait")
    assert wait < ptx.index("griddepcontrol.launch_dependents")


@pytest.mark.parametrize("tiles", attention.DECODE.values(), ids=str)
def test_keys_are_on_their_way_before_the_wait(tiles):
    case = decode_case(tiles)
    before, after = compile_case(case).asm["ptx"].split("griddepcontrol.wait", 1)
    assert ("cp.async" in before) == tiles.early
    assert "ld.global" in after  # the queries, which the kernel before has written


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


@pytest.mark.parametrize("case", EXPERTS, ids=kernel_name)
def test_decoded_weights_stay_in_their_threads(case):
    """Triton 3.6 would exchange them, see `experts.opaque`; 3.9 would not."""
    ptx = compile_case(case).asm["ptx"]
    assert "shfl.sync" not in ptx
    if case.constants["BLOCK_T"] == 8:
        assert "mma.sync" in ptx


def test_every_kernel_is_in_the_list():
    listed = {case.kernel.fn for case in CASES}
    missing = []
    for module in pkgutil.iter_modules(simplellm.kernels.__path__):
        members = vars(importlib.import_module(f"simplellm.kernels.{module.name}"))
        for name, member in members.items():
            if isinstance(member, JITFunction) and name.endswith("_kernel"):
                source = inspect.getmodule(member.fn).__name__
                if member.fn not in listed:
                    missing.append(f"{source}.{name}")
    assert not missing
