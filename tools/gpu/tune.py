"""Check and time the kernels at a model's sizes on one GPU, as they are and otherwise.

    python tools/gpu/tune.py --json OUT                  every kernel as it is chosen
    python tools/gpu/tune.py --only decode,experts --variants --json OUT
    python tools/gpu/tune.py --model Qwen3-30B-A3B-FP8 --only experts --json OUT
    python tools/gpu/tune.py --model Qwen3-8B --only qkv,o --shapes 1,64 --variants

With --variants each is also timed with other tilings, which stand in for what its
module would choose. Every variant is first compared with the operation in PyTorch, its
results poisoned, and with itself: the same bits twice.

Times are medians of replays of a CUDA graph whose launches take turns between inputs
that are together larger than the L2 cache. A replay is repeated for a third of a second
and the first third of that left out: kernels that bring a card to its power limit are
slowed by it. Shares are of what an H200's memory gave at best.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product, starmap
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).parents[1]))

import torch
from cases import Case, Cases, random_model
from records import argument_parser, header, save
from torch import Tensor

from simplellm.checkpoint.scaled import Scaled
from simplellm.model.kernels.decode import DecodeTiles, decode_tiles
from simplellm.model.kernels.experts import Tiling
from simplellm.model.kernels.experts_one import FEW_TOKENS, OneTiling
from simplellm.model.kernels.grouped import Grouping
from simplellm.model.kernels.grouped_few import Few, are_few
from simplellm.model.kernels.linear import Dot, Gemv
from simplellm.model.kernels.prefill import PrefillTiles

PEAK = 4650.0  # GB/s
SECONDS = 0.35  # of each measurement
TOLERANCE = 0.02  # of a row's root mean square; bfloat16 results lose about 0.009
CHECKED = 2**17  # rows x tokens from which on PyTorch would take too long
PROJECTIONS = "qkv", "o", "gate_up", "down"
Row = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """What takes the place of functions of simplellm.model.kernels, by MODULE.NAME."""

    name: str
    replaced: dict[str, Any]

    def patched(self) -> ExitStack:
        """A context in which the kernels are launched so."""
        stack = ExitStack()
        for path, value in self.replaced.items():
            module, _, name = path.rpartition(".")
            place = import_module(f"simplellm.model.kernels.{module}")
            stack.enter_context(mock.patch.object(place, name, value))
        return stack


AS_CHOSEN = Variant("", {})


def chosen(path: str, value: Any) -> dict[str, Any]:
    """Make a function that chooses tiles give ``value``, whatever it is asked."""
    return {path: lambda *_: value}


def named(config: Any) -> str:
    """A tiling's numbers in the order of its fields, switches by name."""
    values = config._asdict() if hasattr(config, "_asdict") else vars(config)
    numbers = "x".join(str(v) for v in values.values() if type(v) is int)
    return " ".join([numbers, *(n for n, v in values.items() if v is True)])


def spelled(text: str) -> list[Any]:
    """The numbers of tilings that are written as `named` writes them."""
    return [tuple(map(int, word.split("x"))) for word in text.split()]


def decode_variants(case: Case) -> Iterator[Variant]:
    group = case.arguments[0][3]
    now = decode_tiles(group.decodes, 64, group.window)
    shapes = spelled("64x4x2 64x4x3 64x4x4 128x4x2 128x8x2")
    for (keys, warps, stages), early in product(shapes, (False, True)):
        tiles = DecodeTiles(keys, warps, stages, least=now.least, early=early)
        yield Variant(named(tiles), chosen("decode.decode_tiles", tiles))
    for percent in (-1, 43, 64, 100):
        tiles = now._replace(carveout=percent)
        yield Variant(named(tiles), chosen("decode.decode_tiles", tiles))


def prefill_variants(case: Case) -> Iterator[Variant]:
    shapes = "64x8x3x16 64x8x2x16 64x4x3x16 32x4x3x8 64x4x2x8 64x4x2x16 32x8x3x32 "
    for tiles in starmap(PrefillTiles, spelled(shapes + "64x8x2x32 64x8x3x32")):
        yield Variant(named(tiles), chosen("prefill.prefill_tiles", tiles))


def product_variants(path: str, case: Case) -> Iterator[Variant]:
    """Products of few tokens: on ordinary cores, on tensor cores."""
    tokens, scaled = len(case.arguments[0][0]), isinstance(case.arguments[0][1], Scaled)
    path = "scaled_linear.choose_scaled" if scaled else path
    configs: list[Gemv | Dot] = []
    if tokens <= 4:
        sizes = "8x4 8x8 16x4 16x8" if scaled else "1x1 2x2"
        configs += starmap(Gemv, spelled(f"{sizes} 2x4 4x4 4x8 2x8"))
    if tokens > 1 or scaled:
        parts = (1,) if path.startswith("head") else (1, 3, 5)
        tiles = spelled("64x64x6 64x128x3 128x64x4 128x128x4")
        for (rows, depth, stages), part, warps in product(tiles, parts, (4, 8)):
            dot = Dot(rows, depth, part, warps, stages, pdl=False)
            early = dot._replace(pdl=True, ahead=0 if scaled else 1)
            configs += [early] if scaled else [dot, early]
    for config in configs:
        yield Variant(named(config), chosen(path, config))
    if not scaled:
        yield Variant("cuBLAS", chosen(path, None))


def expert_variants(case: Case) -> Iterator[Variant]:
    x, mlp, _ = case.arguments[0]
    tokens = len(x)
    if mlp.activation == "swiglu" and are_few(tokens, len(mlp.router), mlp.top_k):
        for way in starmap(Few, product((16, 32), (512, 1024, 2048), (2, 4, 8))):
            yield Variant(named(way), chosen("grouped_few.choose_few", way))
        return
    if mlp.activation == "swiglu":
        shapes = product((64, 128), (16, 32, 64, 128), (4, 8), (3, 4, 6))
        for grouping in starmap(Grouping, shapes):
            yield Variant(named(grouping), chosen("grouped.choose_grouping", grouping))
        return
    if tokens <= FEW_TOKENS:
        sizes = [-(-most // tokens) for most in (66, 99, 132)]
        for programs, warps, registers in product(sizes, (4, 8), (128, 168)):
            one = OneTiling(programs, warps, registers)
            yield Variant(named(one), chosen("experts_one.one_tiling", one))
        return
    tilings = {
        512: "64x16x1x3x3x4 128x16x1x3x3x4 128x16x2x3x3x4 128x16x2x5x3x4 "
        "128x8x1x3x3x1 128x8x1x3x3x2 128x32x3x3x3x4",
        4096: "128x64x3x1x4x4 128x64x4x1x4x4 128x32x3x3x3x4",
        2**31: "128x128x3x1x4x4 256x128x3x1x4x8 128x256x4x1x4x8",
    }
    some = next(some for most, some in tilings.items() if tokens <= most)
    for tiling in starmap(Tiling, spelled(some)):
        yield Variant(named(tiling), chosen("experts.tilings", (tiling, tiling)))


def projections(name: str, cases: Cases) -> Iterator[Case]:
    return (cases.project(name, tokens) for tokens in (1, 2, 8, 64, 256))


VARIANTS: dict[str, Callable[[Case], Iterator[Variant]]] = {
    "decode": decode_variants,
    "prefill": prefill_variants,
    **dict.fromkeys(PROJECTIONS, partial(product_variants, "linear.choose")),
    "head": partial(product_variants, "head.choose_head"),
    "experts": expert_variants,
}
# The sizes of each kernel that are timed.
SIZES: dict[str, Callable[[Cases], Iterator[Case]]] = {
    "norm": lambda c: (c.norm(n, k) for n in (1, 8, 64, 256) for k in (1, 4)),
    "rope": lambda c: map(c.rope, (1, 8, 64, 256, 2048)),
    **{name: partial(projections, name) for name in PROJECTIONS},
    "decode": lambda c: (
        c.attend([length] * batch, [1] * batch, window)
        for batch, length, window in (
            *((1, n, None) for n in (500, 1000, 8192, 32_768, 131_072)),
            *((8, n, None) for n in (500, 1000, 32_768)),
            *((64, 1000, None), (128, 500, None), (256, 500, None)),
            *((1, 1000, 128), (64, 1000, 128)),
        )
    ),
    "prefill": lambda c: (
        c.attend([length] * batch, [length] * batch, window)
        for batch, length in ((1, 2048), (32, 2048), (64, 128))
        for window in (None, 128)
    ),
    "experts": lambda c: map(c.experts, (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)),
    "head": lambda c: map(c.head, (1, 2, 8, 64, 256)),
    "draw": lambda c: map(c.draw, (1, 8, 64)),
}


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one of ``calls``, replayed together as one graph."""
    calls = [*calls] * math.ceil(16 / len(calls))
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < SECONDS or len(times) < 3:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return 1e3 * statistics.median(times[len(times) // 3 :]) / len(calls)


def error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, over a number's own size and its row's mean one.

    Operations may leave a sum of parts, [T, parts, N], to the next one.
    """
    worst = 0.0
    for got, want in zip(actual, expected, strict=True):
        got = got.sum(1) if got.ndim > want.ndim else got
        size = want.abs() + want.square().mean(-1, keepdim=True).sqrt()
        off = ((got - want).abs() / size.clamp(min=1e-9)).max().item()
        worst = off if not off <= worst else worst  # NaN stays
    return worst


def right(case: Case, expected: Sequence[Tensor] | None) -> str:
    """What is wrong with a case's results; "" if nothing is."""
    # Fills every new tensor with NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, again = (case.outcome() for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    if not all(map(torch.equal, first, again)):
        return "other bits at the second time"
    if expected is not None and not (off := error(first, expected)) < TOLERANCE:
        return f"wrong by {off:.3g}"
    return ""


def measure(case: Case, variants: Sequence[Variant]) -> Iterator[Row]:
    """A row for each variant that is right. What is wrong is told."""
    tokens = len(case.arguments[0][0])
    expected = case.expected() if tokens * len(case.arguments[0]) < CHECKED else None
    for variant in variants:
        with variant.patched():
            try:
                problem = right(case, expected)
                us = math.nan if problem else microseconds(case.calls())
            except Exception as failure:  # of one variant; the others go on
                torch.cuda.synchronize()
                problem = f"{type(failure).__name__}: {str(failure)[:160]}"
        if problem:
            print(f"{case.kernel} {case.shape} {variant.name}: {problem}", flush=True)
            continue
        row = {"kernel": case.kernel, "shape": case.shape, "config": variant.name}
        yield row | {"us": us, "bytes": case.nbytes, "flops": case.flops}


def shown(row: Row) -> str:
    """A row of the table."""
    rate = row["bytes"] / row["us"] / 1e3
    return (
        f"{row['kernel']:<12}{row['shape']:<14}{row['config']:<30}{row['us']:9.2f} us"
        f"{rate:7.0f} GB/s{rate / PEAK:5.0%}{row['flops'] / row['us'] / 1e6:6.0f} TF"
    )


def tune(options: argparse.Namespace) -> Iterator[Row]:
    """All rows, printed as they come, the quickest variant of a size first."""
    cases = Cases(random_model(options.model, 8))
    others = ("gate_up", "down") if cases.config.num_local_experts else ("experts",)
    every = [name for name in SIZES if name not in others]
    wanted = options.only.split(",") if options.only else every
    for name in wanted:
        for case in SIZES[name](cases):
            if options.shapes and case.shape not in options.shapes.split(","):
                continue
            variants = [AS_CHOSEN]
            if options.variants and name in VARIANTS:
                variants += VARIANTS[name](case)
            rows = sorted(measure(case, variants), key=lambda row: row["us"])
            for row in rows[:6]:
                print(shown(row), flush=True)
            yield from rows
            del case
            torch.cuda.empty_cache()


@torch.inference_mode()
def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="gpt-oss-120b")
    parser.add_argument("--only", help=f"some of {','.join(SIZES)}")
    parser.add_argument("--shapes", help="some of the table's second column")
    parser.add_argument("--variants", action="store_true", help="other tilings too")
    options = parser.parse_args()
    torch.manual_seed(0)
    record = header() | {"rows": []}
    for row in tune(options):
        record["rows"].append(row)
        save(record, options.json)


if __name__ == "__main__":
    main()
