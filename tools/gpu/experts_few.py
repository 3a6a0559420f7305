"""Check, tune and time the experts' kernels for few tokens, at gpt-oss-120b's sizes.

    python3 tools/gpu/experts_few.py --json OUT

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
from simplellm.kernels.norm import add_norm
from simplellm.kernels.routing import Dispatch, dispatch_torch, top_k_softmax
from simplellm.mxfp4 import MXFP4

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2880, 2880, 128, 4
LIMIT, ALPHA = 7.0, 1.702
PEAK = 4650  # GB/s, best read measured on an H200
ROUTINGS = 16
HALVES = ("gate_up", "down")

ONE = [
    FewTiling(1, 2, 4),
    FewTiling(1, 3, 4),
    FewTiling(1, 4, 4),
    FewTiling(1, 6, 4),
    FewTiling(1, 12, 4),
    FewTiling(1, 2, 8),
    FewTiling(1, 3, 8),
    FewTiling(1, 6, 8),
    FewTiling(1, 3, 16),
    FewTiling(1, 4, 2),
    FewTiling(1, 8, 2),
    FewTiling(2, 2, 4),
    FewTiling(2, 4, 4),
    FewTiling(2, 2, 8),
    FewTiling(2, 3, 8),
    FewTiling(2, 3, 16),
    FewTiling(4, 2, 8),
    FewTiling(1, 4, 4, ".cg"),
    FewTiling(1, 6, 8, ".cg"),
    FewTiling(1, 4, 4, "", 64),
    FewTiling(1, 6, 8, "", 64),
]
SOME = [
    FewTiling(1, 4, 4),
    FewTiling(1, 6, 4),
    FewTiling(1, 3, 8),
    FewTiling(1, 6, 8),
    FewTiling(1, 3, 16),
    FewTiling(2, 4, 4),
    FewTiling(2, 3, 8),
    FewTiling(4, 2, 8),
]
MANY = [
    Tiling(16, 16, 1, 1, 5, 3, 1),
    Tiling(64, 16, 1, 1, 5, 3, 4),
    Tiling(128, 16, 1, 1, 5, 3, 4),
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
    """Small problems of real row and column counts, with their results in float32."""

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
            for tokens in (1, 2, 4, 8):
                ids = random_ids(tokens, experts)
                odds = torch.rand(tokens, TOP_K, device="cuda")
                count = tokens if half == "gate_up" else tokens * TOP_K
                x = torch.randn(count, HIDDEN, device="cuda").bfloat16()
                args = x, ids, odds, weight, bias
                expected = self.reference(half, matrices, *args)
                self.cases[half, tokens] = args, expected

    @staticmethod
    def reference(half, matrices, x, ids, odds, weight, bias) -> torch.Tensor:
        """In float64, from the weights as they were before `repack`."""
        flat = ids.flatten().long()
        rows = x.repeat_interleave(TOP_K, 0) if half == "gate_up" else x
        picked = matrices[flat].double()
        y = torch.einsum("pnk,pk->pn", picked, rows.double()) + bias[flat]
        if half == "down":
            return y.view(*ids.shape, -1) * odds[..., None]
        return few.swiglu(y, LIMIT, ALPHA)

    def error(self, half: str, tokens: int, tiling: FewTiling) -> float:
        """The largest error, in units of the results' root mean square."""
        args, expected = self.cases[half, tokens]
        out = launch(half, *args, tiling)
        if not torch.equal(out, launch(half, *args, tiling)):
            return float("inf")
        off = (out - expected).abs()
        if half == "gate_up":  # half a unit in the last place of each is theirs to lose
            off -= expected.abs() * 2**-8
        return float((off / expected.square().mean().sqrt()).max())


def replayed(run, launches: int) -> float:
    """Seconds of one of the ``launches`` in ``run``."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
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
        self.ids = {}
        for tokens in (1, 2, 4, 8, 16):
            ids = [random_ids(tokens, EXPERTS) for _ in range(ROUTINGS)]
            if tokens == 1:
                # No expert twice, so that nothing is in the cache.
                every = torch.randperm(EXPERTS, device="cuda").int()
                ids = list(every.view(-1, 1, TOP_K)[:ROUTINGS])
            self.ids[tokens] = [i.contiguous() for i in ids]

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

    def seconds_layer(self, tokens: int, tilings, pdl: bool) -> tuple[float, float]:
        """Norm, top-k and both halves in a row, and the first two of them alone."""
        logits = torch.full((ROUTINGS, tokens, EXPERTS), -9.0, device="cuda")
        for row, ids in zip(logits, self.ids[tokens], strict=True):
            row.scatter_(1, ids.long(), torch.rand(tokens, TOP_K, device="cuda"))
        residual = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        norm = torch.ones(HIDDEN, device="cuda")

        def run(experts: bool) -> None:
            parts = torch.zeros(tokens, TOP_K, HIDDEN, device="cuda")
            for row in logits:
                _, x = add_norm(residual, parts, norm, 1e-5, pdl=pdl)
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

        return replayed(lambda: run(True), ROUTINGS), replayed(
            lambda: run(False), ROUTINGS
        )


def show(tiling) -> str:
    return "x".join(str(field or "-") for field in tiling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    began = time.perf_counter()
    results: list[dict] = []

    checks = Checks()
    jobs = [(h, 1, t) for h in HALVES for t in ONE]
    jobs += [(h, 4, t) for h in HALVES for t in SOME]

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

    bench = Bench()
    print("few: tiles of 16 rows x ahead x warps x cache x registers")
    print("many: rows x tokens x widths x step x unroll x stages x warps")

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

    torch.use_deterministic_algorithms(False)
    best: dict[tuple[int, str], FewTiling] = {}
    for tokens, tilings in ((1, ONE), (4, SOME)):
        for half in HALVES:
            print(f"-- {time.perf_counter() - began:.0f} s")
            usable = [t for t in tilings if (half, tokens, t) in good]
            times = {t: measure("few", half, tokens, t, bench.seconds) for t in usable}
            winner = min(times, key=lambda t: times[t], default=few.USUAL)
            best[tokens, half] = winner
            measure("few", half, tokens, winner, bench.seconds, False)
    for tokens in (2, 8):
        for half in HALVES:
            error = checks.error(half, tokens, best[4, half])
            print("error", half, tokens, f"{error:.2g}")
            measure("few", half, tokens, best[4, half], bench.seconds)
    for tokens in (1, 2, 4, 8):
        nearest = 1 if tokens == 1 else 4
        pair = {half: best[nearest, half] for half in HALVES}
        for pdl in (True, False):
            try:
                whole, rest = bench.seconds_layer(tokens, pair, pdl)
            except Exception as failure:
                print(f"layer {tokens} failed: {str(failure)[:300]}")
                continue
            print(
                f"layer {tokens} tokens {'pdl' if pdl else '':4}{whole * 1e6:8.2f} us, "
                f"without the experts {rest * 1e6:.2f}",
                flush=True,
            )
            results.append(
                dict(name="layer", tokens=tokens, pdl=pdl, whole=whole, rest=rest)
            )
    for tokens in (1, 2, 4, 8, 16):
        for half in HALVES:
            for tiling in MANY if tokens in (1, 4) else MANY[-1:]:
                measure("many", half, tokens, tiling, bench.seconds_many)
    print(f"done in {time.perf_counter() - began:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
