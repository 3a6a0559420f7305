"""Check, tune and time the experts' kernels for few tokens, at gpt-oss-120b's sizes.

    python3 tools/gpu/experts_few.py --json OUT

Checks that every tiling's result is the same twice, with its output poisoned, and
within rounding of float64 arithmetic on the weights as they were before `repack`.
Prints for each half, number of tokens and tiling microseconds, GB/s and its share of an
H200's best: "few" is the kernel for one token, "many" the other one. A "layer" is
add_norm, the router, top_k, both halves of the experts for one token, and add_norm.

Times are medians of replays of a CUDA graph whose launches take turns between 16
routings, each token with 4 of 128 experts at random. Bandwidth counts the weights of
the experts in use, once.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from simplellm.kernels import experts as many
from simplellm.kernels import experts_few as few
from simplellm.kernels.experts import Packed, Tiling, repack, rotate
from simplellm.kernels.experts_few import FewTiling
from simplellm.kernels.linear import Gemv, gemv
from simplellm.kernels.norm import add_norm
from simplellm.kernels.routing import Dispatch, dispatch_torch, top_k_softmax
from simplellm.weights import MXFP4

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2880, 2880, 128, 4
LIMIT, ALPHA = 7.0, 1.702
PEAK = 4650  # GB/s, best read measured on an H200
ROUTINGS = 16
HALVES = ("gate_up", "down")

ONE = [
    FewTiling(programs=66, warps=8, registers=128),
    FewTiling(programs=33, warps=16, registers=128),
    *(
        FewTiling(programs, 4, registers)
        for programs in (99, 132)
        for registers in (128, 168, 255)
    ),
]
MANY = [
    Tiling(rows, 16, unroll=unroll, stages=stages)
    for rows in (64, 128)
    for unroll, stages in ((2, 4), (3, 3), (3, 4), (5, 3), (5, 4))
]


def random_weight(rows: int, columns: int, paired: bool) -> Packed:
    """Random codes and every scale 2^-8, in real shapes, made in their packed order."""
    scale = int(rotate(torch.tensor(0x01010101 * (119 + 118)), 7))
    shape = (EXPERTS, rows // 16, columns // 64)
    words = torch.randint(
        *(-(2**31), 2**31, (*shape, 128)), dtype=torch.int32, device="cuda"
    )
    scales = torch.full((*shape, 8), scale - (scale >> 31 << 32), device="cuda")
    return Packed(words, scales.int(), columns, paired)


def random_ids(tokens: int, experts: int) -> torch.Tensor:
    """int32 [T, k], each token's experts distinct."""
    return torch.rand(tokens, experts, device="cuda").topk(TOP_K).indices.int()


def plan(ids: torch.Tensor, experts: int, block: int) -> Dispatch:
    return Dispatch(*(t.cuda() for t in dispatch_torch(ids.cpu(), experts, block)))


def launch(half, x, ids, odds, weight, bias, tiling, pdl=True):
    if half == "gate_up":
        return few.gate_up_few(x, ids, weight, bias, LIMIT, ALPHA, tiling, pdl)
    return few.down_few(x, ids, odds, weight, bias, tiling, pdl)


def launch_many(half, x, dispatch, odds, weight, bias, tiling, pdl=True):
    if half == "gate_up":
        return many.gate_up(x, weight, bias, dispatch, LIMIT, ALPHA, tiling, pdl)
    return many.down(x, weight, bias, odds, dispatch, tiling, pdl)


class Checks:
    """Small problems of real row and column counts, with their results in float64."""

    def __init__(self, experts: int = 9) -> None:
        self.cases = {}
        for half in HALVES:
            rows = 2 * INTERMEDIATE if half == "gate_up" else HIDDEN
            shape = (experts, rows, HIDDEN // 32)
            blocks = torch.randint(0, 256, (*shape, 16), device="cuda")
            scales = torch.randint(114, 121, shape, device="cuda")
            mxfp4 = MXFP4(blocks.to(torch.uint8), scales.to(torch.uint8))
            weight = repack(mxfp4, half == "gate_up")
            matrices = mxfp4.dequantize(torch.float32)
            bias = torch.randn(experts, rows, device="cuda").bfloat16()
            for tokens in (1, 4):
                ids = random_ids(tokens, experts)
                odds = torch.rand(tokens, TOP_K, device="cuda")
                count = tokens if half == "gate_up" else tokens * TOP_K
                x = torch.randn(count, HIDDEN, device="cuda").bfloat16()
                args = x, ids, odds, weight, bias
                expected = self.reference(half, matrices, *args)
                self.cases[half, tokens] = args, expected, plan(ids, experts, 16)

    @staticmethod
    def reference(half, matrices, x, ids, odds, weight, bias) -> torch.Tensor:
        """From the weights as they were before `repack`."""
        flat = ids.flatten().long()
        rows = x.repeat_interleave(TOP_K, 0) if half == "gate_up" else x
        picked = matrices[flat].double()
        y = torch.einsum("pnk,pk->pn", picked, rows.double()) + bias[flat]
        if half == "down":
            return y.view(*ids.shape, -1) * odds[..., None]
        return few.swiglu(y, LIMIT, ALPHA)

    def error(self, half: str, tokens: int, tiling) -> float:
        """The largest error, in units of the results' root mean square."""
        args, expected, dispatch = self.cases[half, tokens]
        if tokens == 1:
            out, again = (launch(half, *args, tiling) for _ in range(2))
        else:
            x, _, odds, weight, bias = args
            if half == "down":
                x = x[dispatch.pairs.long()]
            else:
                expected = expected[dispatch.pairs.long()]
            out, again = (
                launch_many(half, x, dispatch, odds, weight, bias, tiling)
                for _ in range(2)
            )
        if not torch.equal(out, again):
            return float("inf")
        off = (out - expected).abs()
        if out.dtype == torch.bfloat16:
            off -= expected.abs() * 2**-8  # half a unit in the last place is theirs
        return float((off / expected.square().mean().sqrt()).max())


def replayed(run, launches: int) -> float:
    """Seconds of one of the ``launches`` in ``run``."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        # `torch.cuda.graph` would collect garbage first, which takes long.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        run()
        graph.capture_end()
        graph.replay()
        times = []
        for _ in range(9):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3 / launches)
    return sorted(times)[len(times) // 2]


class Bench:
    def __init__(self) -> None:
        self.weights = {
            "gate_up": random_weight(2 * INTERMEDIATE, HIDDEN, True),
            "down": random_weight(HIDDEN, INTERMEDIATE, False),
        }
        self.biases = {
            half: torch.randn(EXPERTS, rows, device="cuda").bfloat16()
            for half, rows in (("gate_up", 2 * INTERMEDIATE), ("down", HIDDEN))
        }
        self.router = torch.randn(EXPERTS, HIDDEN, device="cuda").bfloat16()
        self.ids = {
            tokens: [random_ids(tokens, EXPERTS) for _ in range(ROUTINGS)]
            for tokens in (2, 4, 8)
        }
        # No expert twice, so that nothing is in the cache.
        every = torch.randperm(EXPERTS, device="cuda").int()
        self.ids[1] = list(every.view(-1, 1, TOP_K)[:ROUTINGS])

    def gigabytes(self, half: str, tokens: int) -> float:
        """Of the weights in use, on average over the routings."""
        distinct = sum(len(i.unique()) for i in self.ids[tokens]) / ROUTINGS
        return self.weights[half].nbytes / EXPERTS * distinct / 1e9

    def inputs(self, half: str, tokens: int):
        rows = tokens if half == "gate_up" else tokens * TOP_K
        x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        return x, torch.rand(tokens, TOP_K, device="cuda")

    def seconds(self, half: str, tokens: int, tiling: FewTiling, pdl: bool) -> float:
        x, odds = self.inputs(half, tokens)
        rest = odds, self.weights[half], self.biases[half], tiling, pdl

        def run() -> None:
            for ids in self.ids[tokens]:
                launch(half, x, ids, *rest)

        return replayed(run, ROUTINGS)

    def seconds_many(self, half: str, tokens: int, tiling: Tiling, pdl: bool) -> float:
        x, odds = self.inputs(half, tokens)
        plans = [plan(ids, EXPERTS, tiling.tokens) for ids in self.ids[tokens]]
        rest = odds, self.weights[half], self.biases[half], tiling, pdl

        def run() -> None:
            for dispatch in plans:
                launch_many(half, x, dispatch, *rest)

        return replayed(run, ROUTINGS)

    def seconds_layer(self, tilings, pdl: bool, experts=True) -> float:
        """One token's chain, with the chosen experts given beforehand."""
        logits = torch.full((ROUTINGS, 1, EXPERTS), -9.0, device="cuda")
        for row, ids in zip(logits, self.ids[1], strict=True):
            row.scatter_(1, ids.long(), torch.rand(1, TOP_K, device="cuda"))
        residual = torch.randn(1, HIDDEN, device="cuda").bfloat16()
        norm = torch.ones(HIDDEN, device="cuda")
        update = torch.zeros(1, TOP_K, HIDDEN, device="cuda")
        how = Gemv(rows=4, warps=4, pdl=pdl)

        def run() -> None:
            parts = update
            for row in logits:
                _, x = add_norm(residual, parts, norm, 1e-5, pdl=pdl)
                gemv(x, self.router, None, how, torch.float32)
                ids, odds = top_k_softmax(row, TOP_K, pdl=pdl)
                if experts:
                    hidden = launch(
                        *("gate_up", x, ids, odds, self.weights["gate_up"]),
                        *(self.biases["gate_up"], tilings["gate_up"], pdl),
                    )
                    parts = launch(
                        *("down", hidden, ids, odds, self.weights["down"]),
                        *(self.biases["down"], tilings["down"], pdl),
                    )

        return replayed(run, ROUTINGS)


def show(tiling) -> str:
    return "x".join(map(str, tiling))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    began = time.perf_counter()
    results: list[dict] = []

    checks = Checks()
    jobs: list[tuple[str, int, FewTiling | Tiling]] = []
    for half in HALVES:
        jobs += [(half, 1, tiling) for tiling in ONE]
        jobs += [(half, 4, tiling) for tiling in MANY]

    def check(job) -> bool:
        half, tokens, tiling = job
        try:
            error = checks.error(*job)
        except Exception as failure:
            print(f"{half} {tokens} {show(tiling)} failed: {str(failure)[:300]}")
            return False
        if not error < 0.02:
            print(f"{half} {tokens} {show(tiling)} WRONG by {error:.3g}")
        return error < 0.02

    # Fills every new tensor with NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    with ThreadPoolExecutor(14) as pool:
        right = list(pool.map(check, jobs))
    good = {job for job, fine in zip(jobs, right, strict=True) if fine}
    print(f"{len(good)} of {len(jobs)} right, {time.perf_counter() - began:.0f} s")
    for half in HALVES:
        print(f"error of {half} {checks.error(half, 1, ONE[0]):.2g}")
    torch.use_deterministic_algorithms(False)

    bench = Bench()
    print("few: programs x warps x registers")
    print("many: rows x tokens x widths x unroll x stages x warps")

    def measure(name, half, tokens, tiling, function, pdl=True) -> float:
        try:
            seconds = function(half, tokens, tiling, pdl)
        except Exception as failure:
            print(f"{half} {tokens} {show(tiling)} failed: {str(failure)[:300]}")
            return float("inf")
        rate = bench.gigabytes(half, tokens) / seconds
        print(
            f"{name:5}{half:8}{tokens:3} {show(tiling):18}{'pdl' if pdl else '':4}"
            f"{seconds * 1e6:8.2f} us{rate:6.0f} GB/s{rate / PEAK:5.0%}",
            flush=True,
        )
        results.append(
            dict(name=name, half=half, tokens=tokens, tiling=tiling, pdl=pdl)
            | dict(seconds=seconds, rate=rate)
        )
        return seconds

    best: dict[str, list[FewTiling]] = {}
    for half in HALVES:
        print(f"-- {time.perf_counter() - began:.0f} s")
        usable = [t for t in ONE if (half, 1, t) in good]
        times = {t: measure("few", half, 1, t, bench.seconds) for t in usable}
        best[half] = sorted(usable, key=lambda t: times[t]) or [few.USUAL]
        measure("few", half, 1, best[half][0], bench.seconds, False)

    def layer(gate_up, down, pdl, experts=True) -> None:
        tilings = {"gate_up": gate_up, "down": down}
        try:
            seconds = bench.seconds_layer(tilings, pdl, experts)
        except Exception as failure:
            print(f"layer {show(gate_up)} failed: {str(failure)[:300]}")
            return
        print(
            f"layer {show(gate_up):17}{show(down):17}{'pdl' if pdl else '':4}"
            f"{'' if experts else 'no experts'}"
            f"{seconds * 1e6:8.2f} us",
            flush=True,
        )
        results.append(
            dict(name="layer", gate_up=gate_up, down=down)
            | dict(pdl=pdl, experts=experts, seconds=seconds)
        )

    print(f"-- {time.perf_counter() - began:.0f} s")
    for pdl in (True, False):
        layer(best["gate_up"][0], best["down"][0], pdl, False)
    layer(best["gate_up"][0], best["down"][0], False)
    for gate_up in best["gate_up"][:3]:
        for down in best["down"][:3]:
            layer(gate_up, down, True)
    for tokens in (2, 4, 8):
        for half in HALVES:
            print(f"-- {time.perf_counter() - began:.0f} s")
            for tiling in MANY:
                if (half, 4, tiling) in good:
                    measure("many", half, tokens, tiling, bench.seconds_many)
    print(f"done in {time.perf_counter() - began:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
