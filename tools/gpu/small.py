"""Check, tune and time the small kernels at gpt-oss's sizes, on one GPU.

    python3 tools/gpu/small.py --json OUT

Every variant is first compared with its twin in float32 on fresh random inputs, its
output poisoned. Times are those of replayed CUDA graphs of many launches, which rotate
over inputs larger than the L2 cache. Prints microseconds, GB/s and its share of an
H200's best for every kernel, size and variant; GB/s counts the weight once.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn import functional as F

from simplellm.kernels import head as heads
from simplellm.kernels import routing
from simplellm.kernels.linear import (
    Dot,
    Gemv,
    add_parts,
    linear_parts,
    linear_torch,
    project,
)
from simplellm.kernels.linear import choose as choose_linear
from simplellm.kernels.norm import add_norm, add_norm_torch
from simplellm.kernels.sampling import draw
from simplellm.sampler import Columns, SamplingParams, sample

PEAK = 4650  # GB/s, the best measured read bandwidth
HIDDEN, QKV, HEADS, EXPERTS, VOCAB = 2880, 5120, 4096, 128, 201088
SPAN = 240e6  # bytes that inputs rotate over, four times the L2 cache
Call = Callable[[], Any]
Result = TypeVar("Result")
results: list[dict] = []
started = time.perf_counter()


def say(text: str) -> None:
    print(f"{time.perf_counter() - started:6.1f} {text}", flush=True)


def normal(*shape: int, dtype=torch.bfloat16, scale: float = 1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def weights(rows: int, columns: int) -> list[torch.Tensor]:
    """Enough weights of one shape that none is in the cache when its turn comes."""
    count = max(2, math.ceil(SPAN / (rows * columns * 2)))
    return [normal(rows, columns, scale=0.02) for _ in range(count)]


def replay(calls: Sequence[Call], rounds: int = 1, tries: int = 9) -> float:
    """Median microseconds of one of ``calls``, captured ``rounds`` times over."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(tries):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / (rounds * len(calls)))
    return sorted(times)[tries // 2]


def report(kernel: str, shape: str, config: object, us: float, nbytes: float) -> None:
    rate = nbytes / us / 1000
    name = short(config)
    print(
        f"{kernel:<12} {shape:<16} {name:<26} {us:8.2f} {rate:6.0f} {rate / PEAK:6.1%}",
        flush=True,
    )
    results.append(
        {"kernel": kernel, "shape": shape, "config": name, "us": us, "gbps": rate}
    )


def short(config: object) -> str:
    if not isinstance(config, Gemv | Dot):
        return str(config)
    if isinstance(config, Gemv):
        return f"gemv r{config.rows} w{config.warps}" + " -" * (not config.pdl)
    ahead = f" a{config.ahead}" if config.pdl else " -"
    return (
        f"dot {config.rows}x{config.depth} p{config.parts} w{config.warps} "
        f"s{config.stages}{ahead}"
    )


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


def attempt(name: str, function: Callable[[], Result]) -> Result | None:
    """``function``'s result, or None after telling what it raised."""
    try:
        return function()
    except Exception as problem:
        say(f"FAILED {name}: {type(problem).__name__}: {str(problem)[:200]}")
        results.append({"failed": name, "why": str(problem)[:500]})
        torch.cuda.synchronize()
        return None


def poison() -> None:
    """Fill memory that is about to be allocated again with NaN."""
    blocks = [torch.full((size,), math.nan, device="cuda") for size in (10**4, 10**7)]
    del blocks


# ---------------------------------------------------------------- linear


def gemv_configs() -> list[Gemv]:
    """Rows and warps."""
    sizes = (1, 1), (2, 2), (2, 4), (4, 2), (4, 4), (4, 8), (8, 4)
    return [Gemv(*size) for size in sizes]


def dot_configs(size_out: int, tokens: int) -> list[Dot]:
    """Tiles, parts, warps and stages, without PDL."""
    shapes: list[tuple[int, int, tuple[int, ...], int]]
    shapes = [(32, 128, (2, 3, 4), 4), (64, 128, (3, 4, 5, 6, 8), 4)]
    shapes += [(64, 128, (3, 4, 6), 8), (64, 64, (3, 5), 4), (128, 64, (4, 6), 4)]
    shapes += [(128, 128, (4, 6, 8), 8), (64, 256, (2, 3, 4), 4)]
    if size_out == EXPERTS:
        shapes = [(64, 64, (5, 9, 15), 4), (32, 64, (5, 9, 15), 4)]
        shapes += [(16, 128, (5, 8, 12), 4), (32, 128, (5, 8, 12), 4)]
        shapes += [(64, 128, (5, 8, 12), 4)]
    width = max(16, tokens)
    found = []
    for rows, depth, parts, warps in shapes:
        stages = stage_counts((rows + width) * depth * 2)
        several = size_out != EXPERTS and depth == 128 and warps == 4
        for part, count in product(parts, stages if several else stages[:1]):
            found.append(Dot(rows, depth, part, warps, count, pdl=False))
    return found


def stage_counts(nbytes: int) -> list[int]:
    """For two programs an SM, and for one, if that makes a difference."""
    return sorted({max(2, min(6, space // nbytes)) for space in (112_000, 200_000)})


def ahead_of(config: Dot) -> list[Dot]:
    """The same with PDL and so many steps read ahead."""
    return [replace(config, pdl=True, ahead=ahead) for ahead in (0, 1, 3, 8)]


def check_linear(name: str, got: torch.Tensor, want: torch.Tensor) -> bool:
    wrong = error(got, want)
    if not wrong < 4e-3:
        say(f"WRONG {name}: relative error {wrong:.2e}")
        results.append({"wrong": name, "error": wrong})
        return False
    return True


def whole(x, weight, bias, config) -> torch.Tensor:
    """The result of the way to time, parts added up by PyTorch."""
    if isinstance(config, Gemv):
        return project(x, weight, bias, config)
    return linear_parts(x, weight, bias, config).sum(1)


def launch(x, weight, bias, config) -> torch.Tensor:
    """What the model calls: parts stay apart."""
    if isinstance(config, Gemv):
        return project(x, weight, bias, config)
    return linear_parts(x, weight, bias, config)


def run_linear(name: str, size_out: int, size_in: int, tokens: int) -> None:
    stored = weights(size_out, size_in)
    bias = normal(size_out)
    x = normal(tokens, size_in)
    nbytes = size_out * size_in * 2
    shape = f"T{tokens}"
    calls = [lambda w=w: F.linear(x, w, bias) for w in stored]
    report(name, shape, "cuBLAS", replay(calls, 3), nbytes)
    configs: list[Gemv | Dot] = []
    if tokens <= 4:
        configs += gemv_configs()
    if tokens > 4:
        configs += dot_configs(size_out, tokens)
    want = linear_torch(x, stored[0], bias)
    chosen = choose_linear(tokens, size_out, size_in)
    if chosen is not None and chosen not in configs:
        configs.append(chosen)

    def measure(config: Gemv | Dot) -> float | None:
        poison()
        got = whole(x, stored[0], bias, config)
        if not check_linear(f"{name} {shape} {short(config)}", got, want):
            return None
        calls = [partial(launch, x, w, bias, config) for w in stored]
        return replay(calls, 2, 5)

    def tune(configs: Sequence[Gemv | Dot]) -> list[tuple[float, Gemv | Dot]]:
        compile_all([partial(launch, x, stored[0], bias, c) for c in configs])
        found = []
        for config in configs:
            label = f"{name} {shape} {short(config)}"
            us = attempt(label, partial(measure, config))
            if us is not None:
                found.append((us, config))
        return sorted(found, key=lambda entry: entry[0])

    timed = tune(configs)
    dots = [config for _, config in timed if isinstance(config, Dot)]
    timed += tune([c for config in dots[:3] for c in ahead_of(config)])
    timed.sort(key=lambda entry: entry[0])
    for us, config in timed[:6]:
        report(name, shape, config, us, nbytes)
    for us, config in timed[6:]:
        results.append(
            {"kernel": name, "shape": shape, "config": short(config), "us": us}
        )
    without = [entry for entry in timed if not entry[1].pdl]
    if without:
        report(name, shape, without[0][1], without[0][0], nbytes)


def compile_all(calls: Sequence[Call]) -> None:
    """Compile in parallel; what fails here fails again, and is told, later."""

    def quiet(call: Call) -> None:
        try:
            call()
        except Exception:
            return

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(quiet, calls))
    torch.cuda.synchronize()


# ---------------------------------------------------------------- norm


def run_norm() -> None:
    for tokens, parts in product((1, 8, 64, 256), (1, 4)):
        time_norm(tokens, parts)


def time_norm(tokens: int, parts: int) -> None:
    residual = normal(tokens, HIDDEN)
    update = normal(tokens, parts, HIDDEN)
    weight = normal(HIDDEN, dtype=torch.float32)
    poison()
    other = residual.clone()
    got = add_norm(residual, update, weight, 1e-5)
    want = add_norm_torch(other, update, weight, 1e-5)
    name = f"add_norm T{tokens} S{parts}"
    for a, b in zip(got, want, strict=True):
        check_linear(name, a, b)
    for pdl in (True, False):
        calls = [lambda p=pdl: add_norm(residual, update, weight, 1e-5, p)] * 50
        nbytes = residual.nbytes * 3 + update.nbytes
        label = "PDL" if pdl else "no PDL"
        us = replay(calls)
        report("add_norm", f"T{tokens} S{parts}", label, us, nbytes)


# ---------------------------------------------------------------- routing


def run_routing() -> None:
    weight, bias = normal(EXPERTS, HIDDEN, scale=0.02), normal(EXPERTS)
    for tokens in (1, 8, 32, 64, 256, 1024, 2048, 16384):
        time_routing(weight, bias, tokens)


def time_routing(weight: torch.Tensor, bias: torch.Tensor, tokens: int) -> None:
    x = normal(tokens, HIDDEN)
    poison()
    got = routing.route(x, weight, bias, 4)
    logits = F.linear(x, weight, bias)
    same = routing.top_k_softmax(logits, 4)
    want = routing.top_k_softmax_torch(logits, 4)
    fused = routing.route_and_dispatch(x, weight, bias, 4, 16)
    apart = routing.dispatch_torch(got[0], EXPERTS, 16)
    same_ids = zip((fused[0], *fused[2]), (got[0], *apart), strict=True)
    if not all(torch.equal(a, b) for a, b in same_ids):
        say(f"WRONG route_and_dispatch at T{tokens}")
    check_linear(f"route_and_dispatch T{tokens}", fused[1], got[1])
    parts = routing.router_logits(x, weight, bias)
    if not torch.equal(same[0], want[0]):
        say(f"WRONG top_k ids at T{tokens}")
    check_linear(f"top_k T{tokens}", same[1], want[1])
    reference = routing.route_torch(x, weight, bias, 4)
    agree = float((got[0] == reference[0]).float().mean())
    say(f"route T{tokens}: {agree:.4f} of the ids as the twin's")
    for block in (16, 64):
        sorted_ = routing.dispatch(got[0], EXPERTS, block)
        expected = routing.dispatch_torch(got[0], EXPERTS, block)
        for field, a, b in zip(sorted_._fields, sorted_, expected, strict=True):
            if not torch.equal(a, b):
                say(f"WRONG dispatch {field} at T{tokens} block {block}")
    nbytes = weight.nbytes
    timed: dict[str, list[Call]] = {
        "router": [lambda: routing.router_logits(x, weight, bias)] * 30,
        "route": [lambda: routing.route(x, weight, bias, 4)] * 30,
        "choose+sort": [lambda: routing.top_k_and_dispatch(parts, 4, 16, bias)] * 30,
        "all": [lambda: routing.route_and_dispatch(x, weight, bias, 4, 16)] * 30,
        "top_k": [lambda: routing.top_k_softmax(logits, 4)] * 30,
        "dispatch": [lambda: routing.dispatch(got[0], EXPERTS, 16)] * 30,
        "torch": [lambda: F.linear(x, weight, bias).topk(4)] * 30,
    }
    for label, calls in timed.items():
        us = attempt(label, partial(replay, calls))
        if us is not None:
            report(label, f"T{tokens}", "", us, nbytes)


# ---------------------------------------------------------------- head


def run_head() -> None:
    stored = [normal(VOCAB, HIDDEN, scale=0.02) for _ in range(2)]
    for tokens in (1, 2, 8, 64):
        time_head(stored, tokens)


def time_head(stored: list[torch.Tensor], tokens: int) -> None:
    nbytes = stored[0].nbytes
    x = normal(tokens, HIDDEN)
    want = torch.empty(tokens, VOCAB, device="cuda")
    ids = heads.head_torch(x, stored[0], want)
    configs: list[Gemv | Dot] = []
    if tokens <= 2:
        configs += [Gemv(*pair) for pair in ((4, 4), (8, 4), (8, 8), (4, 2))]
    if tokens >= 2:
        configs += [
            Dot(rows, depth, 1, warps, stages, pdl=False)
            for (rows, depth), warps, stages in product(
                ((64, 128), (128, 64), (128, 128)), (4, 8), (3, 4)
            )
            if (rows + max(16, tokens)) * depth * 2 * stages <= 220 * 1024
        ]
    calls = [lambda w=w: F.linear(x, w).argmax(-1) for w in stored]
    report("head", f"T{tokens}", "cuBLAS + argmax", replay(calls), nbytes)
    calls = [lambda w=w: F.linear(x, w) for w in stored]
    report("head", f"T{tokens}", "cuBLAS", replay(calls), nbytes)
    compile_all([partial(heads.best_of, x, stored[0], None, c) for c in configs])
    timed = []
    for config in configs:
        name = f"head T{tokens} {short(config)}"

        def run(config=config, name=name) -> float | None:
            poison()
            logits = torch.full_like(want, math.nan)
            got = heads.best_of(x, stored[0], logits, config)
            good = check_linear(name, logits, want)
            gap = want.amax(-1) - want.gather(1, got[:, None].long())[:, 0]
            if not good or not bool((gap < 1e-3).all()):
                say(f"WRONG {name}: ids {got.tolist()[:4]} {ids.tolist()[:4]}")
                return None
            calls = [lambda w=w: heads.best_of(x, w, None, config) for w in stored]
            return replay(calls)

        us = attempt(name, run)
        if us is not None:
            timed.append((us, config))
    timed.sort(key=lambda entry: entry[0])
    for config in [c for _, c in timed if isinstance(c, Dot)][:1]:
        for other in ahead_of(config)[:2]:
            calls = [partial(heads.best_of, x, w, None, other) for w in stored]
            report("head", f"T{tokens}", other, replay(calls), nbytes)
    for us, config in timed[:4]:
        report("head", f"T{tokens}", config, us, nbytes)
    for us, config in timed[4:]:
        entry = {"kernel": "head", "shape": f"T{tokens}", "us": us}
        results.append({**entry, "config": short(config)})
    if not timed:
        return
    best, logits = timed[0][1], torch.empty_like(want)
    calls = [lambda w=w: heads.best_of(x, w, logits, best) for w in stored]
    report("head", f"T{tokens}", short(best) + " +log", replay(calls), nbytes)


# ---------------------------------------------------------------- chain


def run_chain() -> None:
    """norm -> qkv -> o -> norm -> router -> choices, over layers of other weights.

    As in the model, the experts' result comes in four parts; attention is left out.
    """
    layers = 8
    qkv, o = ([normal(*s, scale=0.02) for _ in range(layers)] for s in (
        (QKV, HIDDEN), (HIDDEN, HEADS)))  # fmt: skip
    router = [normal(EXPERTS, HIDDEN, scale=0.02) for _ in range(layers)]
    norm = normal(HIDDEN, dtype=torch.float32)
    bias = normal(QKV), normal(HIDDEN), normal(EXPERTS)
    nbytes = (qkv[0].nbytes + o[0].nbytes + router[0].nbytes) * layers

    def chain(x, experts, heads_out, configs):
        first, second, third = configs
        for layer in range(layers):
            x, h = add_norm(x, experts, norm, 1e-5)
            launch(h, qkv[layer], None, first)
            update = launch(heads_out, o[layer], bias[1], second)
            x, h = add_norm(x, update, norm, 1e-5)
            logits = launch(h, router[layer], None, third)
            logits = logits.view(len(h), -1, EXPERTS)
            routing.top_k_and_dispatch(logits, 4, 16, bias[2])
        return x

    for tokens in (1, 2, 8, 64):
        x, update = normal(tokens, HIDDEN), normal(tokens, 4, HIDDEN)
        heads_out = normal(tokens, HEADS)
        sizes = (QKV, HIDDEN), (HIDDEN, HEADS), (EXPERTS, HIDDEN)
        usual = [choose_linear(tokens, *size) or Gemv(4, 4) for size in sizes]
        variants = [("usual", usual)]
        dots = [config for config in usual if isinstance(config, Dot)]
        if len(dots) == len(usual):
            for ahead in (0, 1, 3):
                for count in (2, 3):
                    some = [replace(c, pdl=True, ahead=ahead) for c in dots]
                    label = f"qo{'r' if count == 3 else ''} with PDL a{ahead}"
                    variants.append((label, [*some[:count], *usual[count:]]))
        shape = f"T{tokens} a layer"
        for name, configs in variants:
            call = partial(chain, x, update, heads_out, configs)
            us = attempt(name, partial(replay, [call]))
            if us is not None:
                report("chain", shape, name, us / layers, nbytes / layers)


def check_repeats() -> None:
    """The same inputs twice give the same bits."""
    x, weight, bias = normal(16, HIDDEN), normal(QKV, HIDDEN), normal(QKV)
    config = Dot(64, 128, 3, 4, 3)
    first = project(x, weight, bias, config)
    again = [project(x, weight, bias, config) for _ in range(20)]
    say(f"repeats: {all(torch.equal(first, other) for other in again)}")
    parts = linear_parts(x, weight, bias, config)
    say(f"parts:   {torch.equal(add_parts(parts, x.dtype), first)}")


# ---------------------------------------------------------------- sampler


def run_sampler() -> None:
    """Whether each kind of sampling can be captured, and how long it takes."""
    for rows in (1, 8, 64):
        time_sampler(rows)
        time_draw(rows)


def time_draw(rows: int) -> None:
    """The kernel's tokens beside the sampler's, and its time."""
    same = total = 0
    for temperature in (0.3, 1.0, 3.0):
        logits = normal(rows, VOCAB, dtype=torch.float32, scale=3)
        best = logits.argmax(-1).int()
        params = [SamplingParams(seed=n, temperature=temperature) for n in range(rows)]
        columns = Columns.of(params, VOCAB, logits.device)
        for step in range(20):
            steps = torch.full((rows,), step, dtype=torch.int64, device="cuda")
            poison()
            got = draw(logits, best, columns.temperature, columns.seeds, steps)
            same += int((got == sample(logits, columns, steps).tokens).sum())
            total += rows
    say(f"draw B{rows}: {same} of {total} tokens as the sampler's")
    stored = [logits.clone() for _ in range(3)]
    calls = [
        partial(draw, one, best, columns.temperature, columns.seeds, steps)
        for one in stored
    ]
    us = attempt("draw", partial(replay, calls, 5))
    if us is not None:
        report("draw", f"B{rows}", "", us, logits.nbytes)


def time_sampler(rows: int) -> None:
    logits = normal(rows, VOCAB, dtype=torch.float32)
    steps = torch.zeros(rows, dtype=torch.int64, device="cuda")
    counts = torch.zeros(rows, VOCAB, dtype=torch.int64, device="cuda")
    for name, params in {
        "temperature": SamplingParams(seed=1),
        "top_p": SamplingParams(seed=1, top_p=0.9),
    }.items():
        columns = Columns.of([params] * rows, VOCAB, logits.device)

        def run(columns=columns):
            return sample(logits, columns, steps, counts, counts)

        us = attempt(f"capture {name}", partial(replay, [run] * 3))
        if us is not None:
            report("sample", f"B{rows}", name, us, logits.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default="routing sampler chain head linear")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    head = f"{'kernel':<12} {'shape':<16} {'config':<26} {'us':>8} {'GB/s':>6}  share"
    print(head, flush=True)

    def linears() -> None:
        shapes = ("qkv", QKV, HIDDEN), ("o", HIDDEN, HEADS), ("router", 128, HIDDEN)
        for tokens, shape in product((1, 2, 8, 64), shapes):
            attempt(f"{shape[0]} T{tokens}", partial(run_linear, *shape, tokens))

    parts = {
        "norm": run_norm,
        "routing": run_routing,
        "chain": run_chain,
        "linear": linears,
        "head": run_head,
        "sampler": run_sampler,
    }
    attempt("repeats", check_repeats)
    for name in options.only.split():
        attempt(name, parts[name])
        say(f"{name} done")
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
