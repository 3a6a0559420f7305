"""Check, tune and time the attention and rope kernels on a GPU.

    python3 tools/gpu/attention.py --json OUT
    python3 tools/gpu/attention.py --tune --json OUT
    compute-sanitizer --tool memcheck python3 tools/gpu/attention.py --sanitize

Times are of CUDA graphs of many launches, each on other inputs, more than the L2 cache
holds. Shares are of 4,650 GB/s, what an H200's memory gave at best.
"""

import argparse
import json
import math
import random
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from simplellm.config import GPT_OSS_120B
from simplellm.kernels import attention as kernels
from simplellm.kernels.attention import DecodeTiles, PrefillTiles, Scratch
from simplellm.kernels.forward import project
from simplellm.kernels.rope import rope_and_cache, rope_and_cache_torch
from simplellm.rope import Rope

HEADS, KV_HEADS, DIM = 64, 8, 64
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2  # keys and values of a token in one layer
PEAK = 4650.0  # GB/s
L2 = 150e6  # bytes of inputs after which nothing of the first is cached any more
DEVICE = "cuda"


Tiles = DecodeTiles | PrefillTiles
Some = TypeVar("Some", bound=Tiles)


@dataclass
class Batch:
    """What an attention kernel is called with."""

    q: Tensor
    keys: Tensor
    values: Tensor
    tables: Tensor
    offsets: Tensor
    lengths: Tensor
    queries: Tensor
    sinks: Tensor
    window: int | None

    def decode(self, tiles: DecodeTiles, scratch: Scratch, out: Tensor) -> Tensor:
        arguments: list[Any] = list(vars(self).values())
        del arguments[6]
        return kernels.launch_decode(*[*arguments, scratch, out, tiles])

    def prefill(self, tiles: PrefillTiles, out: Tensor) -> Tensor:
        arguments: list[Any] = list(vars(self).values())
        return kernels.launch_prefill(*[*arguments, out, tiles])

    def expected(self) -> Tensor:
        """In float32, which the twin keeps if q has it."""
        arguments = vars(self) | {"q": self.q.float()}
        return kernels.paged_prefill_torch(*arguments.values())


def make_batches(
    lengths: Sequence[int],
    chunks: Sequence[int],
    window: int | None,
    page_size: int,
    sets: int,
    poison: bool = False,
    capacity: int = 1024,
) -> list[Batch]:
    """``sets`` batches of the same shape in pages of their own, in random order.

    Their tables have room for ``capacity`` tokens, or what they need if it is more.
    """
    firsts = [
        0 if window is None else max(0, n - c + 1 - window) // page_size
        for n, c in zip(lengths, chunks, strict=True)
    ]
    counts = [
        -(-n // page_size) - first for n, first in zip(lengths, firsts, strict=True)
    ]
    total = sum(counts)
    shape = (total * sets, page_size, KV_HEADS, DIM)
    keys = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    values = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    order = torch.randperm(total * sets, device=DEVICE).int()
    width = max([capacity // page_size, *counts])
    num_tokens = sum(chunks)
    batches = []
    for number in range(sets):
        pages = order[number * total : (number + 1) * total].split(counts)
        tables = torch.zeros(len(lengths), width, dtype=torch.int32, device=DEVICE)
        for row, mine in enumerate(pages):
            tables[row, : len(mine)] = mine
        if poison:
            for row, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
                used = (length - first * page_size) % page_size
                if used:
                    for x in (keys, values):
                        x[pages[row][-1].long(), used:] = math.nan
        q = torch.randn(num_tokens, HEADS, DIM, device=DEVICE).bfloat16()
        batches.append(
            Batch(
                q=q,
                keys=keys,
                values=values,
                tables=tables,
                offsets=torch.tensor(firsts, device=DEVICE).int() * page_size,
                lengths=torch.tensor(lengths, device=DEVICE).int(),
                queries=torch.tensor([0, *chunks], device=DEVICE).cumsum(0).int(),
                sinks=torch.randn(HEADS, device=DEVICE).bfloat16(),
                window=window,
            )
        )
    return batches


def microseconds(
    launches: Sequence[Callable[[], object]], least: float = 0.02
) -> float:
    """Median time of one of ``launches``, replayed as one graph for ``least`` s."""
    # The start of a graph counts little among 24 launches or more.
    launches = [*launches] * math.ceil(24 / len(launches))
    stream = torch.cuda.Stream()
    # The inputs may still be on their way into memory.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches[:2]:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < least * 1e3 and len(times) < 50):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times) * 1e3 / len(launches)


class Report:
    """Prints rows and keeps them for the JSON file."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []
        self.begun = time.perf_counter()

    def row(self, kernel: str, shape: str, config: str, us: float, **more: float):
        entry = {"kernel": kernel, "shape": shape, "config": config, "us": us, **more}
        self.rows.append(entry)
        line = f"{kernel:<8}{shape:<16}{config:<34}{us:9.2f} us"
        if "gbs" in more:
            line += f" {more['gbs']:7.0f} GB/s {more['gbs'] / PEAK:4.0%}"
        if "tflops" in more:
            line += f" {more['tflops']:7.0f} TFLOP/s"
        print(line, flush=True)

    def note(self, text: str) -> None:
        self.rows.append({"note": text})
        print(f"[{time.perf_counter() - self.begun:5.1f} s] {text}", flush=True)


def name_of(tiles: Tiles) -> str:
    text = f"b{tiles.block} w{tiles.warps} s{tiles.stages}"
    if isinstance(tiles, PrefillTiles):
        return f"{text} t{tiles.tokens}"
    text += f" l{tiles.least}" + " early" * tiles.early
    return text + (f" c{tiles.carveout}" if tiles.carveout >= 0 else "")


def compile_all(jobs: Sequence[Callable[[], object]]) -> None:
    """Run each once, in threads: nearly all of it is compilation."""

    def run(job: Callable[[], object]) -> None:
        try:
            job()
        except Exception as error:
            print(f"fails: {str(error).splitlines()[0][:150]}", flush=True)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(run, jobs))
    torch.cuda.synchronize()


def error_of(got: Tensor, expected: Tensor) -> float:
    """Largest difference, over the number's own size and its row's root mean square.

    The size of a row goes with 1 / sqrt(keys): one scale for all rows would measure
    nothing but the rounding of the shortest sequence.
    """
    size = expected.abs() + expected.square().mean(-1, keepdim=True).sqrt()
    return float(((got.float() - expected).abs() / size.clamp(min=1e-9)).max())


# Rounding weights and output to bf16 made 0.009 of random numbers, at most.
TOLERANCE = 0.02
REPEATS = 20
# Lengths, new tokens, window, page size.
Shape = tuple[list[int], list[int], int | None, int]

DECODE_LENGTHS: list[tuple[list[int], int | None, int]] = [
    ([1], None, 16),
    ([5000], None, 16),
    ([0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 3000, 40_000], None, 64),
    ([0, 1, 511, 512, 513, 9000], None, 32),
    ([70, 2049] * 40, None, 64),
    ([0, 1, 15, 127, 128, 129, 130, 4096, 5000], 128, 16),
    ([1, 127, 128, 129, 130, 4096], 128, 64),
    ([100, 1000, 2000], 700, 16),
]
DECODE_SHAPES: list[Shape] = [
    (lengths, [1] * len(lengths), window, page_size)
    for lengths, window, page_size in DECODE_LENGTHS
]
EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 600]
PREFILL_SHAPES: list[Shape] = [
    (EDGES, EDGES, None, 16),
    ([4500, 0, 90, 1000], [300, 0, 1, 1000], None, 32),
    (EDGES, EDGES, 128, 16),
    ([4500, 0, 90, 1000], [300, 0, 1, 1000], 128, 64),
]


def random_shapes(count: int, *, decode: bool) -> list[Shape]:
    """Sequences of random lengths and chunks, with and without a window."""
    generator = random.Random(count)
    shapes: list[Shape] = []
    for number in range(count):
        lengths = [
            int(2 ** generator.uniform(0, 12)) for _ in range(generator.randint(1, 24))
        ]
        chunks = [1 if decode else generator.randint(0, n) for n in lengths]
        window = 128 if number % 2 else None
        shapes.append((lengths, chunks, window, generator.choice([16, 32, 64])))
    return shapes


SMALL = kernels.DECODE[1]
DECODE_TILES = [
    SMALL,
    kernels.DECODE[16],
    kernels.DECODE[64],
    DecodeTiles(block=64, warps=4, stages=2),
    DecodeTiles(block=64, warps=2, stages=4),
    DecodeTiles(block=128, warps=4, stages=2),
    DecodeTiles(block=128, warps=4, stages=3),
]
WINDOW_TILES = [
    kernels.DECODE_WINDOW,
    DecodeTiles(block=64, warps=4, stages=3),
    DecodeTiles(block=128, warps=2, stages=1),
]
PREFILL_TILES = [
    PrefillTiles(block=64, warps=warps, stages=stages, tokens=16)
    for warps, stages in ((8, 3), (8, 2), (4, 3))
]
PREFILL_WINDOW_TILES = [
    PrefillTiles(block=block, warps=warps, stages=stages, tokens=tokens)
    for block, warps, stages, tokens in (
        (32, 4, 3, 8), (32, 8, 3, 16), (64, 8, 2, 16), (64, 4, 2, 8),
    )
]  # fmt: skip


def variant(tiles: Tiles, case: Batch) -> tuple[object, ...]:
    """What is compiled apart, of a kernel."""
    page_size, width = case.keys.shape[1], case.tables.shape[1]
    splits = kernels.choose_splits(len(case.lengths), KV_HEADS)
    least = tiles.least if isinstance(tiles, DecodeTiles) else 0
    alone = (case.window or width * page_size) <= least
    return tiles, case.window, page_size, splits, alone


def check(
    report: Report, name: str, shapes: list[Shape], choices: tuple[list[Some], ...]
) -> tuple[list[Some], ...]:
    """The tiles, for full and for sliding layers, that are right every time."""
    scratch = Scratch.create(128, HEADS, KV_HEADS, DIM, DEVICE)

    def run(case: Batch, tiles: Tiles, out: Tensor) -> Tensor:
        if isinstance(tiles, PrefillTiles):
            return case.prefill(tiles, out)
        return case.decode(tiles, scratch, out)

    cases = [make_batches(*shape, 1, poison=True)[0] for shape in shapes]
    expected = [case.expected() for case in cases]
    pairs = [
        (tiles, index)
        for index, case in enumerate(cases)
        for tiles in choices[case.window is not None]
    ]
    warm = {variant(tiles, cases[i]): (tiles, i) for tiles, i in pairs}
    compile_all(
        [
            partial(run, cases[i], tiles, torch.empty_like(cases[i].q))
            for tiles, i in warm.values()
        ]
    )
    report.note(f"compiled {name}, {len(warm)} variants")
    bad: set[Some] = set()
    for tiles, index in pairs:
        case, largest, different = cases[index], math.nan, 0
        try:
            for x in (scratch.parts, scratch.sums):
                x.fill_(math.nan)
            out = run(case, tiles, torch.full_like(case.q, math.nan))
            largest = error_of(out, expected[index])
            for _ in range(REPEATS):
                again = run(case, tiles, torch.full_like(case.q, math.nan))
                different += not torch.equal(out, again)
            fine = largest < TOLERANCE and not different
        except Exception as error:
            fine = False
            report.note(f"{name_of(tiles)}: {str(error).splitlines()[0][:100]}")
        if not fine:
            bad.add(tiles)
            report.note(
                f"WRONG {name} {name_of(tiles)} {shapes[index]}: {largest:.3g}, "
                f"{different} of {REPEATS} repeats differ"
            )
    report.note(f"checked {name}, {len(pairs)} cases, {REPEATS} repeats of each")
    return tuple([t for t in tiles if t not in bad] for tiles in choices)


def sanitize() -> None:
    """Every chosen kernel once, on little."""
    lengths, chunks = [300, 0, 129], [40, 0, 129]
    for window in (None, 128):
        decode, prefill = (
            make_batches(lengths, new, window, 64, 1, poison=True)[0]
            for new in ([1] * 3, chunks)
        )
        scratch = Scratch.create(3, HEADS, KV_HEADS, DIM, DEVICE)
        choices = [*kernels.DECODE.values()] if window is None else []
        choices = choices or [kernels.DECODE_WINDOW]
        for tiles in choices:
            out = decode.decode(tiles, scratch, torch.empty_like(decode.q))
            print("decode", name_of(tiles), error_of(out, decode.expected()))
        chosen = kernels.PREFILL_WINDOW if window else kernels.PREFILL
        out = prefill.prefill(chosen, torch.empty_like(prefill.q))
        print("prefill", name_of(chosen), error_of(out, prefill.expected()))
    rope_and_cache(*rope_inputs(40, 1)[0])
    torch.cuda.synchronize()
    print("rope")


def time_decode(
    report: Report,
    batch: int,
    length: int,
    window: int | None,
    trials: Sequence[DecodeTiles],
    page_size: int = 16,
    note: str = "",
) -> DecodeTiles:
    """Times all, reports the best eight, returns the best."""
    seen = min(length, window or length)
    moved = batch * (seen * TOKEN_BYTES + 2 * HEADS * DIM * 2)
    sets = max(2, min(400, math.ceil(L2 / moved)))
    batches = make_batches(
        [length] * batch, [1] * batch, window, page_size, sets, capacity=131_072
    )
    outs = [torch.empty_like(case.q) for case in batches]
    results = []
    scratch = Scratch.create(batch, HEADS, KV_HEADS, DIM, DEVICE)
    for tiles in trials:
        try:
            us = microseconds(
                [
                    partial(case.decode, tiles, scratch, out)
                    for case, out in zip(batches, outs, strict=True)
                ]
            )
        except Exception as error:
            report.note(f"{name_of(tiles)}: {str(error).splitlines()[0][:100]}")
            continue
        results.append((us, tiles))
    results.sort(key=lambda result: result[0])
    kind = "decode" if window is None else f"dec {window}"
    shape = f"{batch} x {length}{note}"
    for us, tiles in results[:8]:
        report.row(kind, shape, name_of(tiles), us, gbs=moved / us / 1e3)
    if len(results) > 8:
        print(f"{'':24}slowest {name_of(results[-1][1])} {results[-1][0]:.2f} us")
    return results[0][1]


def time_prefill(
    report: Report,
    lengths: Sequence[int],
    chunks: Sequence[int],
    window: int | None,
    trials: Sequence[PrefillTiles],
    page_size: int = 16,
    note: str = "",
) -> PrefillTiles:
    """As `time_decode`."""
    cases = make_batches(lengths, chunks, window, page_size, 2)
    pairs = sum(
        min(position + 1, window or position + 1)
        for length, chunk in zip(lengths, chunks, strict=True)
        for position in range(length - chunk, length)
    )
    flop = 4 * HEADS * DIM * pairs
    out = torch.empty_like(cases[0].q)
    results = []
    for tiles in trials:
        try:
            us = microseconds([partial(case.prefill, tiles, out) for case in cases])
        except Exception as error:
            report.note(f"{name_of(tiles)}: {str(error).splitlines()[0][:100]}")
            continue
        results.append((us, tiles))
    results.sort(key=lambda result: result[0])
    kind = "prefill" if window is None else f"pre {window}"
    shape = f"{len(chunks)} x {chunks[0]}{note}"
    for us, tiles in results[:6]:
        report.row(kind, shape, name_of(tiles), us, tflops=flop / us / 1e6)
    if len(results) > 6:
        print(f"{'':24}slowest {name_of(results[-1][1])} {results[-1][0]:.2f} us")
    return results[0][1]


def tune_decode(
    report: Report, full: list[DecodeTiles], sliding: list[DecodeTiles]
) -> None:
    small = full[0]
    for batch, length in ((1, 128), (1, 1000), (8, 1000), (16, 1000), (32, 1000)):
        trials = [*full[:5], *(replace(small, least=n) for n in (256, 512, 1024))]
        time_decode(report, batch, length, None, trials, 64)
    for batch, length in ((64, 1000), (128, 256), (256, 500)):
        trials = [replace(t, least=1024) for t in full]
        trials += [replace(small, stages=3, least=n) for n in (256, 512)]
        time_decode(report, batch, length, None, trials, 64)
    for batch, length in ((1, 8192), (1, 32_768), (1, 131_072), (8, 32_768)):
        counts = (16, 32, 33) if batch == 1 else (4,)  # programs for a sequence
        trials = [*full, *(replace(small, least=-(-length // n)) for n in counts)]
        best = time_decode(report, batch, length, None, trials, 64)
        for page_size in (16, 32):
            note = f" p{page_size}"
            trials = [best, small]
            time_decode(report, batch, length, None, trials, page_size, note)
    for batch in (1, 8, 64, 128, 256):
        for page_size in (64, 16):
            note = f" p{page_size}"
            time_decode(report, batch, 1000, 128, sliding, page_size, note)
    report.note("timed decode")


@dataclass(frozen=True)
class Contest:
    """Ways to decode ``batch`` sequences of ``length`` tokens; the first is today's."""

    batch: int
    length: int
    window: int | None
    trials: tuple[DecodeTiles, ...]

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.length}"

    def inputs(self, sets: int) -> list[Batch]:
        ones, lengths = [1] * self.batch, [self.length] * self.batch
        return make_batches(
            lengths, ones, self.window, PAGE, sets, capacity=max(131_072, self.length)
        )


PAGE = 64
# The driver's choice, and percent for 100, 132, 164, 196 and 228 KB of shared memory.
CARVEOUTS = (-1, 43, 57, 64, 85, 100)


def contests() -> list[Contest]:
    """What `--tune` times."""
    entries = []
    for batch, length in (
        (1, 500),
        (1, 1000),
        (1, 8192),
        (1, 32_768),
        (1, 131_072),
        (2, 500),
        (2, 32_768),
        (4, 500),
        (4, 32_768),
        (8, 500),
        (8, 1000),
        (8, 32_768),
        (16, 500),
        (32, 500),
        (64, 1000),
        (128, 500),
        (256, 500),
    ):
        now = kernels.decode_tiles(batch, None)
        shapes = [(128, 4, 2), (64, 4, 4), (64, 4, 3)]
        if batch > 2:
            shapes += [(128, 8, 2), (64, 4, 2)]
        else:
            shapes += [(128, 4, 3), (64, 2, 3)]
        trials = [now]
        for shape in shapes:
            tiles = DecodeTiles(*shape, least=now.least)
            if batch > 2:
                trials += [tiles]
            trials += [replace(tiles, early=True)]
        trials += [replace(now, carveout=percent) for percent in CARVEOUTS]
        if batch < 5:  # a tile for each program
            wide = DecodeTiles(128, 4, 2, least=128, early=True)
            trials += [wide, replace(wide, carveout=64)]
        entries += [Contest(batch, length, None, tuple(dict.fromkeys(trials)))]
    now = kernels.DECODE_WINDOW
    for batch in (1, 64):
        entries += [Contest(batch, 1000, 128, (now, replace(now, early=True)))]
    return entries


def compile_contests(report: Report, entries: Sequence[Contest]) -> None:
    jobs = {}
    for entry in entries:
        case = entry.inputs(1)[0]
        scratch = Scratch.create(entry.batch, HEADS, KV_HEADS, DIM, DEVICE)
        for tiles in entry.trials:
            plain = replace(tiles, least=1, carveout=-1)
            key = plain, entry.window, entry.batch
            out = torch.empty_like(case.q)
            jobs[key] = partial(case.decode, tiles, scratch, out)
    compile_all(list(jobs.values()))
    report.note(f"compiled {len(jobs)} variants")


def around(case: Batch, decode: Callable[[], object], weights: list[Tensor]) -> None:
    """What a layer does from its first norm to its second, but for the norms."""
    x, qkv, bias, o, cos, sin, positions, slots = weights
    rope_and_cache(
        project(x, qkv, None),
        bias,
        positions,
        cos,
        sin,
        case.keys,
        case.values,
        slots,
    )
    decode()
    project(case.q.flatten(1), o, None)


def layer_weights(case: Batch, batch: int, length: int) -> list[Tensor]:
    width = (HEADS + 2 * KV_HEADS) * DIM
    cos, sin = Rope(GPT_OSS_120B).cos_sin(torch.arange(length))
    last = case.tables[:, (case.lengths[0] - case.offsets[0] - 1) // PAGE]
    slots = last * PAGE + (case.lengths - 1) % PAGE
    return [
        torch.randn(batch, 2880, device=DEVICE).bfloat16(),
        (torch.randn(width, 2880, device=DEVICE) / 54).bfloat16(),
        torch.randn(width, device=DEVICE).bfloat16(),
        torch.randn(2880, HEADS * DIM, device=DEVICE).bfloat16(),
        cos.to(DEVICE),
        sin.to(DEVICE),
        torch.full((batch,), length - 1, device=DEVICE).int(),
        slots.int(),
    ]


def time_contest(report: Report, entry: Contest) -> list[str]:
    """Lines of a table: today's and the best, alone and among a layer's kernels."""
    seen = min(entry.length, entry.window or entry.length)
    moved = entry.batch * (seen * TOKEN_BYTES + 2 * HEADS * DIM * 2)
    batches = entry.inputs(max(3, min(400, math.ceil(L2 / moved))))
    outs = [torch.empty_like(case.q) for case in batches]
    layers = batches[:3]
    weights = [layer_weights(case, entry.batch, entry.length) for case in layers]
    results = []
    scratch = Scratch.create(entry.batch, HEADS, KV_HEADS, DIM, DEVICE)
    for tiles in entry.trials:
        launches = [
            partial(case.decode, tiles, scratch, out)
            for case, out in zip(batches, outs, strict=True)
        ]
        try:
            us = microseconds(launches)
            layer = microseconds(
                [
                    partial(around, case, launch, w)
                    for case, launch, w in zip(
                        layers, launches[:3], weights, strict=True
                    )
                ]
            )
        except Exception as error:
            report.note(f"{name_of(tiles)}: {str(error).splitlines()[0][:100]}")
            continue
        results.append((layer, us, tiles))
    lines = []
    ranked = sorted(results[1:], key=lambda result: result[0])
    for layer, us, tiles in [results[0], *ranked[:4]]:
        share = moved / us / 1e3 / PEAK
        kind = "window" if entry.window else "full"
        lines.append(
            f"{kind:<7}{entry.name:<11}{name_of(tiles):<30}{us:7.2f} us {share:4.0%}"
            f"  layer {layer:7.2f}"
        )
    kind = "decode" if entry.window is None else f"dec {entry.window}"
    for layer, us, tiles in results:
        config = name_of(tiles)
        row = {"kernel": kind, "shape": entry.name, "config": config, "us": us}
        report.rows.append(row | {"gbs": moved / us / 1e3, "layer_us": layer})
    return lines


def reads_newest(report: Report, tiles: DecodeTiles) -> bool:
    """Whether all sees what the kernel just before, in a graph, writes to the cache."""
    wrong = 0
    for batch, length in ((1, 9000), (3, 65), (3, 1)):
        cases = make_batches([length] * batch, [1] * batch, None, PAGE, 3)
        outs = [torch.full_like(case.q, math.nan) for case in cases]
        weights = [layer_weights(case, batch, length) for case in cases]
        scratch = Scratch.create(batch, HEADS, KV_HEADS, DIM, DEVICE)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        parts = list(zip(cases, outs, weights, strict=True))
        with torch.cuda.stream(stream):
            for case, out, w in parts:
                around(case, partial(case.decode, tiles, scratch, out), w)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for case, out, w in parts:
                around(case, partial(case.decode, tiles, scratch, out), w)
        expected = [case.expected() for case in cases]
        for _ in range(8):
            for case, _, w in parts:
                for pages in (case.keys, case.values):
                    pages.flatten(0, 1)[w[-1].long()] = math.nan
            graph.replay()
            torch.cuda.synchronize()
            errors = [
                error_of(out, right) for out, right in zip(outs, expected, strict=True)
            ]
            wrong += not all(error < TOLERANCE for error in errors)
    if wrong:
        report.note(f"WRONG {name_of(tiles)}: stale keys in {wrong} of 24 replays")
    return not wrong


def tune(report: Report) -> None:
    """Time the decode with early loads and without, alone and in a layer."""
    entries = contests()
    compile_contests(report, entries)
    choices: tuple[dict[DecodeTiles, None], dict[DecodeTiles, None]] = {}, {}
    for entry in entries:
        choices[entry.window is not None].update(dict.fromkeys(entry.trials))
    shapes = DECODE_SHAPES + random_shapes(4, decode=True)
    good = check(report, "decode", shapes, tuple(map(list, choices)))
    fine = {tiles for tiles in good[0] if reads_newest(report, tiles)} | {*good[1]}
    report.note("checked that none reads the newest key too early")
    lines = []
    try:
        for entry in entries:
            trials = tuple(tiles for tiles in entry.trials if tiles in fine)
            lines += time_contest(report, replace(entry, trials=trials))
            report.note(f"timed {entry.name}")
    finally:
        print("\n".join(lines), flush=True)


def tune_prefill(
    report: Report, full: list[PrefillTiles], sliding: list[PrefillTiles]
) -> None:
    for window, tiles in ((None, full), (128, sliding)):
        time_prefill(report, [2048] * 32, [2048] * 32, window, tiles, 64)
        time_prefill(report, [2048] * 32, [2048] * 32, window, tiles, 16, " p16")
        time_prefill(report, [2048], [2048], window, tiles, 64)
        time_prefill(report, [128] * 64, [128] * 64, window, tiles, 64)
    time_prefill(report, [32_768], [8192], None, full, 64, note=" of 32k")
    report.note("timed prefill")


def rope_inputs(tokens: int, sets: int) -> list[list[Any]]:
    width = (HEADS + 2 * KV_HEADS) * DIM
    cos, sin = Rope(GPT_OSS_120B).cos_sin(torch.arange(131_072))
    cos, sin = cos.to(DEVICE), sin.to(DEVICE)
    pages = -(-tokens // 16) + 1
    shape = (pages * sets, 16, KV_HEADS, DIM)
    keys = torch.full(shape, math.nan, dtype=torch.bfloat16, device=DEVICE)
    values = keys.clone()
    inputs = []
    for number in range(sets):
        slots = torch.randperm(pages * 16, device=DEVICE)[:tokens]
        inputs.append(
            [
                torch.randn(tokens, width, device=DEVICE).bfloat16(),
                torch.randn(width, device=DEVICE).bfloat16(),
                torch.randint(131_072, (tokens,), device=DEVICE).int(),
                cos,
                sin,
                keys,
                values,
                (slots + number * pages * 16).int(),
            ]
        )
    return inputs


def time_rope(report: Report) -> None:
    for tokens in (1, 5, 300):
        arguments = rope_inputs(tokens, 1)[0]
        arguments[-1][0] = -1 if tokens > 1 else 3
        twins = [*arguments]
        twins[5:7] = [x.clone() for x in arguments[5:7]]
        got, expected = rope_and_cache(*arguments), rope_and_cache_torch(*twins)
        for name, one, other in (
            ("q", got, expected),
            ("keys", arguments[5], twins[5]),
            ("values", arguments[6], twins[6]),
        ):
            same = torch.equal(one.isnan(), other.isnan())
            one, other = one.nan_to_num(), other.nan_to_num()
            if not same or error_of(one, other.float()) > TOLERANCE:
                report.note(f"WRONG rope, {tokens} tokens: {name}")
    for tokens in (1, 8, 64, 256, 2048, 65_536):
        moved = tokens * (HEADS + 2 * KV_HEADS) * DIM * 4
        sets = max(2, min(400, math.ceil(L2 / moved)))
        launches = [
            partial(rope_and_cache, *arguments)
            for arguments in rope_inputs(tokens, sets)
        ]
        us = microseconds(launches)
        report.row("rope", str(tokens), "", us, gbs=moved / us / 1e3)
    report.note("timed rope")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--tune", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.sanitize:
        with torch.inference_mode():
            sanitize()
        return
    report = Report()
    report.note(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")

    def section(function, *inputs):
        try:
            return function(report, *inputs)
        except Exception:
            report.note(traceback.format_exc()[-1500:])
        finally:
            if arguments.json:
                arguments.json.write_text(json.dumps(report.rows, indent=1) + "\n")

    with torch.inference_mode():
        if arguments.tune:
            section(tune)
            return
        choices = (DECODE_TILES, WINDOW_TILES)
        shapes = DECODE_SHAPES + random_shapes(16, decode=True)
        good = section(check, "decode", shapes, choices) or choices
        section(tune_decode, *good)
        prefills = (PREFILL_TILES, PREFILL_WINDOW_TILES)
        shapes = PREFILL_SHAPES + random_shapes(16, decode=False)
        good_prefills = section(check, "prefill", shapes, prefills) or prefills
        section(tune_prefill, *good_prefills)
        section(time_rope)


if __name__ == "__main__":
    main()
