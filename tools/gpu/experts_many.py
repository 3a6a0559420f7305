"""Check, tune and time the experts' kernels for many tokens, at gpt-oss-120b's sizes.

    python3 tools/gpu/experts_many.py --json OUT

Checks that `repack` loses nothing, that every tiling's result is the same twice, with
its output poisoned, and within rounding of the twin's in float32, and that those in use
give the same bits 100 times at full size. Prints for each half, number of tokens and
tiling microseconds, GB/s, TFLOP/s and their shares of an H200's best, and which tiling
is fastest.

Times are medians of replays of a CUDA graph whose launches take turns between the
weights of two layers and four routings, each token with 4 of 128 experts at random.
Bandwidth counts the weights of the experts in use, once. The last two columns are the
clock and the power meanwhile: these kernels bring a card to its power limit, which then
lowers its clock. So each is repeated for long enough to be slowed by it.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from simplellm.kernels import experts as kernels
from simplellm.kernels.experts import Packed, Tiling, repack
from simplellm.kernels.routing import Dispatch, dispatch_torch
from simplellm.weights import MXFP4

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2880, 2880, 128, 4
LIMIT, ALPHA = 7.0, 1.702
PEAK = 4650  # GB/s, best read measured on an H200
MATMUL = 790  # TFLOP/s, bf16
LAYERS, ROUTINGS = 2, 4

SECONDS = 0.35  # of each measurement; its first third is left out

DECODE = [
    Tiling(128, 16, 1, 3, 3, 4),
    Tiling(64, 16, 1, 3, 3, 4),
    Tiling(128, 16, 2, 3, 3, 4),
    Tiling(128, 16, 2, 5, 2, 4),
    Tiling(128, 32, 3, 3, 3, 4),
    Tiling(128, 8, 1, 3, 3, 4),
    Tiling(128, 8, 1, 3, 3, 2),
    Tiling(128, 8, 1, 3, 3, 1),
    Tiling(128, 8, 1, 5, 2, 2),
    Tiling(64, 8, 1, 3, 3, 2),
    Tiling(64, 8, 1, 5, 3, 2),
    Tiling(64, 8, 1, 3, 3, 1),
]
MIDDLE = [
    Tiling(128, 64, 3, 1, 4, 4),
    Tiling(128, 64, 4, 1, 4, 4),
    Tiling(128, 32, 3, 3, 3, 4),
    Tiling(128, 64, 3, 1, 4, 8),
]
PREFILL = [
    Tiling(128, 128, 3, 1, 4, 4),
    Tiling(128, 128, 3, 1, 4, 8),
    Tiling(128, 128, 3, 3, 2, 4),
    Tiling(256, 128, 3, 1, 4, 8),
    Tiling(128, 256, 4, 1, 4, 8),
]
STAGES = [  # name, tokens to tune at, tilings
    ("decode", [8, 16, 32, 64, 128, 256], DECODE),
    ("middle", [512, 1024, 2048], MIDDLE),
    ("prefill", [4096, 8192, 16384], PREFILL),
]
HALVES = ("gate_up", "down")


def random_layer(generator: torch.Generator) -> dict[str, Packed]:
    """Random codes and every scale 2^-8, in real shapes, made in their packed order."""
    scale = int(kernels.rotate(torch.tensor(0x01010101 * (119 + 118)), 7))

    def packed(rows: int, columns: int, paired: bool) -> Packed:
        shape = (EXPERTS, rows // 16, columns // 64)
        words = torch.randint(
            *(-(2**31), 2**31, (*shape, 128)),
            dtype=torch.int32,
            device="cuda",
            generator=generator,
        )
        scales = torch.full((*shape, 8), scale - (scale >> 31 << 32), device="cuda")
        return Packed(words, scales.int(), columns, paired)

    return {
        "gate_up": packed(2 * INTERMEDIATE, HIDDEN, True),
        "down": packed(HIDDEN, INTERMEDIATE, False),
    }


def random_ids(tokens: int, experts: int, skew: float = 0) -> torch.Tensor:
    """int32 [T, k] on the CPU, each token's experts distinct, later ones likelier."""
    likelier = torch.linspace(0, skew, experts)
    return (torch.rand(tokens, experts) + likelier).topk(TOP_K).indices.int()


def plan(ids: torch.Tensor, experts: int, block: int) -> Dispatch:
    return Dispatch(*(t.cuda() for t in dispatch_torch(ids, experts, block)))


def launch(half, packed, x, bias, odds, dispatch, tiling):
    if half == "gate_up":
        return kernels.gate_up(x, packed, bias, dispatch, LIMIT, ALPHA, tiling)
    return kernels.down(x, packed, bias, odds, dispatch, tiling)


class Checks:
    """Small problems of real row and column counts, with their results in float32."""

    def __init__(self, experts: int = 8, tokens: int = 150) -> None:
        self.tokens = tokens
        self.ids = random_ids(tokens, experts, skew=1.0)
        self.experts = experts
        self.odds = torch.rand(tokens, TOP_K, device="cuda")
        self.cases = {}
        for half in HALVES:
            rows = 2 * INTERMEDIATE if half == "gate_up" else HIDDEN
            shape = (experts, rows, HIDDEN // 32)
            blocks = torch.randint(0, 256, (*shape, 16), device="cuda")
            scales = torch.randint(114, 121, shape, device="cuda")
            weight = MXFP4(blocks.to(torch.uint8), scales.to(torch.uint8))
            packed = repack(weight, half == "gate_up")
            if not torch.equal(packed.dequantize(), weight.dequantize()):
                raise AssertionError(f"{half}: repacked weights differ")
            count = tokens if half == "gate_up" else tokens * TOP_K
            x = torch.randn(count, HIDDEN, device="cuda").bfloat16()
            bias = torch.randn(experts, rows, device="cuda").bfloat16()
            dispatch = plan(self.ids, experts, 16)
            tiles = Tiling(128, 16)
            if half == "gate_up":
                expected = kernels.gate_up_torch(
                    x.float(), packed, bias, dispatch, LIMIT, ALPHA, tiles
                )
            else:
                expected = kernels.down_torch(
                    x.float(), packed, bias, self.odds, dispatch, tiles
                )
            self.cases[half] = (packed, x, bias, expected)

    def error(self, half: str, tiling: Tiling) -> float:
        """The largest error, in units of the results' root mean square."""
        packed, x, bias, expected = self.cases[half]
        dispatch = plan(self.ids, self.experts, tiling.tokens)
        out = launch(half, packed, x, bias, self.odds, dispatch, tiling)
        again = launch(half, packed, x, bias, self.odds, dispatch, tiling)
        if not torch.equal(out, again):
            return float("inf")
        # bfloat16 results: half a unit in the last place of each is theirs to lose.
        off = (out.float() - expected).abs() - expected.abs() * 2**-8
        return float((off / expected.square().mean().sqrt()).max())


class Bench:
    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.layers = [random_layer(generator) for _ in range(LAYERS)]
        self.biases = {
            half: torch.randn(EXPERTS, rows, device="cuda").bfloat16()
            for half, rows in (("gate_up", 2 * INTERMEDIATE), ("down", HIDDEN))
        }
        self.ids: dict[int, list[torch.Tensor]] = {}
        self.plans: dict[tuple[int, int], list[Dispatch]] = {}

    def routings(self, tokens: int, block: int) -> list[Dispatch]:
        if tokens not in self.ids:
            self.ids[tokens] = [random_ids(tokens, EXPERTS) for _ in range(ROUTINGS)]
        key = tokens, block
        if key not in self.plans:
            self.plans[key] = [plan(i, EXPERTS, block) for i in self.ids[tokens]]
        return self.plans[key]

    def gigabytes(self, half: str, tokens: int) -> float:
        """Of the weights in use, on average over the routings."""
        distinct = sum(len(ids.unique()) for ids in self.ids[tokens]) / ROUTINGS
        return self.layers[0][half].nbytes / EXPERTS * distinct / 1e9

    def seconds(self, half: str, tokens: int, tiling: Tiling) -> float:
        """Of one launch."""
        dispatches = self.routings(tokens, tiling.tokens)
        rows = tokens if half == "gate_up" else tokens * TOP_K
        x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        odds = torch.rand(tokens, TOP_K, device="cuda")
        launches = 8 if tokens <= 512 else 4

        def run() -> None:
            for i in range(launches):
                packed = self.layers[i % LAYERS][half]
                dispatch = dispatches[i % ROUTINGS]
                launch(half, packed, x, self.biases[half], odds, dispatch, tiling)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        began = time.perf_counter()
        while time.perf_counter() - began < SECONDS:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(8):
                graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3 / launches / 8)
        return statistics.median(times[len(times) // 3 :])


class Watch:
    """Reads the card's clock and power all the time."""

    def __init__(self) -> None:
        query = "--query-gpu=clocks.sm,power.draw.instant"
        command = ["nvidia-smi", "-i", "0", query, "--format=csv,noheader,nounits"]
        command += ["-lms", "50"]
        self.seen: list[tuple[float, list[float]]] = []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for line in self.process.stdout or ():
            values = [float(value) for value in line.split(",")]
            self.seen.append((time.perf_counter(), values))

    def since(self, start: float) -> dict[str, float]:
        """Medians of what was read in the last two thirds since ``start``."""
        start += (time.perf_counter() - start) / 3
        values = [values for at, values in self.seen if at > start]
        if not values:
            return {}
        mhz, watts = (statistics.median(column) for column in zip(*values, strict=True))
        return {"mhz": mhz, "watts": watts}


def repeats(bench: Bench, times: int = 100) -> None:
    """Whether the tilings in use give the same bits every time, on a busy GPU."""
    for tokens in (2, 4, 16, 64, 256, 2048, 16384):
        tilings = kernels.tilings(tokens, EXPERTS, TOP_K)
        for half, tiling in zip(HALVES, tilings, strict=True):
            dispatch = bench.routings(tokens, tiling.tokens)[0]
            x = torch.randn(tokens * (TOP_K if half == "down" else 1), HIDDEN)
            arguments = half, bench.layers[0][half], x.cuda().bfloat16()
            odds = torch.rand(tokens, TOP_K, device="cuda")
            rest = bench.biases[half], odds, dispatch, tiling
            first = launch(*arguments, *rest)
            same = sum(
                torch.equal(launch(*arguments, *rest), first) for _ in range(times)
            )
            verdict = "" if same == times else "  WRONG"
            print(
                f"{half:8}{tokens:6} {show(tiling):18} the same {same} of {times}"
                f" times{verdict}",
                flush=True,
            )


def show(tiling: Tiling) -> str:
    return "x".join(map(str, tiling))


def line(half: str, tokens: int, tiling: Tiling, seconds: float, gb: float) -> str:
    """A row of the table, without the clock and the power."""
    rate = gb / seconds
    rows = 2 * INTERMEDIATE if half == "gate_up" else HIDDEN
    flops = 2 * tokens * TOP_K * rows * HIDDEN / seconds / 1e12
    return (
        f"{half:8}{tokens:6} {show(tiling):18}{seconds * 1e6:9.1f} us{rate:7.0f} GB/s"
        f"{rate / PEAK:6.0%}{flops:6.0f} TF{flops / MATMUL:5.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    began = time.perf_counter()
    print("columns of a tiling: rows x tokens x widths x unroll x stages x warps")

    checks = Checks()
    jobs = [(h, t) for h in HALVES for _, _, ts in STAGES for t in ts]
    jobs = list(dict.fromkeys(jobs))

    def check(job) -> bool:
        try:
            error = checks.error(*job)
        except Exception as failure:
            print(f"{job[0]:8} {show(job[1]):18} failed: {str(failure)[:200]}")
            return False
        if not error < 0.02:
            print(f"{job[0]:8} {show(job[1]):18} WRONG by {error:.3g}")
        return error < 0.02

    # Fills every new tensor with NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    with ThreadPoolExecutor(12) as pool:
        good = {
            job for job, fine in zip(jobs, pool.map(check, jobs), strict=True) if fine
        }
    torch.use_deterministic_algorithms(False)
    print(f"{len(good)} of {len(jobs)} right, {time.perf_counter() - began:.0f} s")

    bench, watch = Bench(), Watch()
    repeats(bench)
    results = []

    def measure(half: str, tokens: int, tiling: Tiling) -> float:
        start = time.perf_counter()
        try:
            seconds = bench.seconds(half, tokens, tiling)
        except Exception as failure:
            print(f"{half} {tokens} {show(tiling)} failed: {str(failure)[:200]}")
            return float("inf")
        gb, card = bench.gigabytes(half, tokens), watch.since(start)
        said = line(half, tokens, tiling, seconds, gb)
        shown = card.get("mhz", math.nan), card.get("watts", math.nan)
        print(f"{said}{shown[0]:6.0f}{shown[1]:5.0f}", flush=True)
        row = dict(half=half, tokens=tokens, tiling=tiling, seconds=seconds, gb=gb)
        results.append(row | card)
        return seconds

    for name, counts, tilings in STAGES:
        for half in HALVES:
            print(f"-- {name}, {time.perf_counter() - began:.0f} s")
            usable = [t for t in tilings if (half, t) in good]
            best: dict[int, Tiling] = {}
            for count in counts:
                times = {t: measure(half, count, t) for t in usable}
                best[count] = min(times, key=lambda t: times[t])
            print("best:", {count: show(t) for count, t in best.items()})
    watch.process.terminate()
    print(f"done in {time.perf_counter() - began:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
