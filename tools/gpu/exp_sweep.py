"""Sweep of the experts' kernels for 8 to 256 tokens (a scratch tool)."""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import experts_many as tool
from experts_many import HALVES, Checks, line, plan, show

from simplellm.kernels import experts as kernels
from simplellm.kernels import experts_some as some
from simplellm.kernels.experts import Tiling
from simplellm.kernels.experts_some import SomeTiling
from simplellm.kernels.norm import add_norm
from simplellm.kernels.routing import route_and_dispatch

tool.LAYERS = 6
LIMIT, ALPHA = tool.LIMIT, tool.ALPHA
BASE = Tiling(128, 16, 1, 3, 3, 4)


def launch(half, packed, x, bias, odds, dispatch, tiling):
    if isinstance(tiling, SomeTiling):
        if half == "gate_up":
            return some.gate_up_some(x, packed, bias, dispatch, LIMIT, ALPHA, tiling)
        return some.down_some(x, packed, bias, odds, dispatch, tiling)
    if half == "gate_up":
        return kernels.gate_up(x, packed, bias, dispatch, LIMIT, ALPHA, tiling)
    return kernels.down(x, packed, bias, odds, dispatch, tiling)


tool.launch = launch
COUNTS = [8, 16, 32, 64, 128, 256]
MANY = [
    BASE,
    *(Tiling(128, 16, 1, u, s, 4) for u, s in ((1, 4), (1, 6), (2, 3), (2, 4), (3, 2))),
    *(Tiling(64, 16, 1, u, s, 4) for u, s in ((1, 6), (2, 4), (3, 3), (3, 4))),
    Tiling(256, 16, 1, 1, 4, 8),
    Tiling(256, 16, 1, 2, 3, 8),
    Tiling(128, 16, 1, 2, 3, 8),
    Tiling(256, 16, 1, 1, 4, 4),
]
SOME = [
    *(SomeTiling(p, 8, 128, 1, "evict_first") for p in (8, 24, 72)),
    SomeTiling(24, 8, 128, 1, ""),
    *(SomeTiling(p, 8, 128, 3, "") for p in (8, 24, 72)),
    *(SomeTiling(24, 8, 128, n, "") for n in (2, 4)),
    SomeTiling(24, 16, 64, 2, ""),
    SomeTiling(24, 4, 168, 2, ""),
]


def chain(bench, tokens: int, up, down, tail=True) -> float:
    """Seconds of a layer: add_norm, routing, both halves."""
    torch.manual_seed(1)
    router = torch.randn(tool.LAYERS, 128, 2880, device="cuda").bfloat16() * 0.02
    rbias = torch.zeros(128, device="cuda").bfloat16()
    residual = torch.randn(tokens, 2880, device="cuda").bfloat16()
    norm = torch.ones(2880, device="cuda")
    b1, b2 = bench.biases["gate_up"], bench.biases["down"]

    def run() -> None:
        update = None
        for i in range(12):
            layer = bench.layers[i % tool.LAYERS]
            _, h = add_norm(residual, update, norm, 1e-5)
            r = router[i % tool.LAYERS]
            _, odds, lists = route_and_dispatch(h, r, rbias, 4, up.tokens)
            hidden = launch("gate_up", layer["gate_up"], h, b1, None, lists, up)
            update = launch("down", layer["down"], hidden, b2, odds, lists, down)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(9):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / 12)
    return sorted(times)[4]


def infinity(checks: Checks, half: str, tiling: Tiling) -> str:
    """What is wrong with a tiling that was wrong once."""
    packed, x, bias, expected = checks.cases[half]
    d = plan(checks.ids, checks.experts, 128)
    name = f"INF {half:8}{show(tiling):24}"
    try:
        outs = []
        for _ in range(3):
            out = launch(half, packed, x, bias, checks.odds, d, tiling)
            outs.append(out.float().view(expected.shape))
    except Exception as failure:
        return f"{name} failed {str(failure)[:100]}"
    rms = expected.square().mean().sqrt()
    off = [(o - expected).abs() - expected.abs() * 2**-8 for o in outs]
    bad = [((o > 0.02 * rms) | o.isnan()).flatten(0, -2) for o in off]
    rows = bad[0].any(1).nonzero().flatten().tolist()
    columns = bad[0].any(0).nonzero().flatten().tolist()
    return (
        f"{name} nan {outs[0].isnan().sum().item()} bad {[b.sum().item() for b in bad]}"
        f" differ {(outs[0] != outs[1]).sum().item()} rows {len(rows)} {rows[:20]} "
        f"columns {len(columns)} {columns[:40]} counts {d.offsets.diff().tolist()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int)
    args = parser.parse_args()
    torch.manual_seed(0)
    began = time.perf_counter()
    if args.one:
        tool.LAYERS = 1
        bench = tool.Bench()
        for tiling in (BASE, SOME[1], SOME[5]):
            for half in HALVES:
                d = bench.routings(args.one, tiling.tokens)[0]
                n = args.one * (1 if half == "gate_up" else 4)
                x = torch.randn(n, 2880, device="cuda").bfloat16()
                odds = torch.rand(args.one, 4, device="cuda")
                p = bench.layers[0][half]
                launch(half, p, x, bench.biases[half], odds, d, tiling)
        torch.cuda.synchronize()
        return

    checks = Checks()
    jobs = [(h, t) for h in HALVES for t in MANY + SOME]

    def check(job) -> bool:
        try:
            error = checks.error(*job)
        except Exception as failure:
            print(f"{job[0]:8} {show(job[1]):18} failed: {str(failure)[:200]}")
            return False
        if not error < 0.02:
            print(f"{job[0]:8} {show(job[1]):18} WRONG by {error:.3g}")
        return error < 0.02

    torch.use_deterministic_algorithms(True, warn_only=True)
    with ThreadPoolExecutor(14) as pool:
        good = {j for j, fine in zip(jobs, pool.map(check, jobs), strict=True) if fine}
    odd = [("gate_up", w, n, s) for w, n in ((1, 4), (3, 8)) for s in (1, 2, 3, 4)]
    odd += [("down", 1, 4, 4), ("down", 3, 8, 4)]
    with ThreadPoolExecutor(14) as pool:
        tries = [(h, Tiling(128, 128, w, 1, s, n)) for h, w, n, s in odd]
        print(*pool.map(lambda job: infinity(checks, *job), tries), sep="\n")
    torch.use_deterministic_algorithms(False)
    print(f"{len(good)} of {len(jobs)} right, {time.perf_counter() - began:.0f} s")

    bench = tool.Bench()
    results = []
    best = {}
    for half in HALVES:
        for tokens in COUNTS:
            times = {}
            for tiling in MANY + SOME:
                if (half, tiling) not in good:
                    continue
                try:
                    s = bench.seconds(half, tokens, tiling)
                except Exception as failure:
                    print(f"{half} {tokens} {show(tiling)} failed {str(failure)[:99]}")
                    continue
                gb = bench.gigabytes(half, tokens)
                times[tiling] = s
                results.append(
                    dict(half=half, tokens=tokens, tiling=tiling, seconds=s, gb=gb)
                )
                print(line(half, tokens, tiling, s, gb), file=sys.stderr)
            best[half, tokens] = sorted(times, key=lambda t: times[t])
            for t in [*best[half, tokens][:4], BASE]:
                gb = bench.gigabytes(half, tokens)
                print(line(half, tokens, t, times[t], gb), flush=True)
    print(f"-- chains, {time.perf_counter() - began:.0f} s")
    for tokens in COUNTS:
        ups = [t for t in best["gate_up", tokens] if isinstance(t, Tiling)][:2]
        downs = [t for t in best["down", tokens] if isinstance(t, Tiling)][:2]
        pairs = [(BASE, BASE)]
        pairs += [(BASE, BASE._replace(ahead=a)) for a in (8, 16, 32)]
        pairs += [(u, d) for u in ups for d in downs]
        pairs += [(ups[0], downs[0]._replace(ahead=a)) for a in (16, 32)]
        more = [t for t in best["gate_up", tokens] if isinstance(t, SomeTiling)]
        less = [t for t in best["down", tokens] if isinstance(t, SomeTiling)]
        if more and less:
            pairs += [(u, d) for u in more[:2] for d in less[:2]]
        for up, down in pairs:
            try:
                s = chain(bench, tokens, up, down)
            except Exception as failure:
                print(f"chain {tokens} {show(up)} {show(down)} {str(failure)[:200]}")
                continue
            results.append(dict(half="chain", tokens=tokens, up=up, down=down, s=s))
            print(
                f"chain{tokens:5} {show(up):30} {show(down):30} {s * 1e6:8.1f} us",
                flush=True,
            )
    print(f"done in {time.perf_counter() - began:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
