"""Time whole layers for a few tokens, with and without weights prefetched to the L2.

    python3 tools/gpu/layer.py --json OUT

Each variant is a CUDA graph of layers of gpt-oss-120b's sizes, with weights of their
own, so that nothing stays in the cache from one replay to the next unless a prefetch
has put it there. Its result must be the same, bit by bit, as without prefetches.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from simplellm.kernels.attention import Scratch, attend
from simplellm.kernels.experts import Packed, down, gate_up, rotate, tilings
from simplellm.kernels.experts_few import down_few, gate_up_few
from simplellm.kernels.forward import project
from simplellm.kernels.linear import Gemv, choose, gemv, prefetch_share
from simplellm.kernels.norm import add_norm
from simplellm.kernels.rope import rope_and_cache
from simplellm.kernels.routing import route, route_and_dispatch

HIDDEN, QKV, HEADS, EXPERTS, TOP_K = 2880, 5120, 4096, 128, 4
LIMITS = 7.0, 1.702
CONTEXT, PAGE, WINDOW = 500, 64, 128
LAYERS = 6
COUNTS = 1, 2, 4, 8, 64
MB = 1 << 20


@triton.jit
def prefetch_kernel(ptr, SHARES: tl.constexpr, BYTES: tl.constexpr):
    prefetch_share(ptr, tl.program_id(0), SHARES, BYTES, 128)


@dataclass(frozen=True)
class Prefetch:
    """How many bytes of which weights are fetched ahead, and by what."""

    o_by_qkv: int = 0  # by the last programs of the QKV projection
    qkv_by_o: int = 0  # the next layer's
    down_by_gate_up: str = ""  # "early" or "late" in a program
    qkv_by_down: int = 0
    late: bool = False  # in down's programs
    evict: str = ""  # of the experts' weights
    shares: int = 1056  # programs of a projection that prefetch
    o_aside: int = 0  # by a kernel beside the attention
    qkv_aside: int = 0  # by a kernel beside the norm and the router


class Model:
    def __init__(self) -> None:
        def normal(*shape: int) -> Tensor:
            return (torch.randn(*shape, device="cuda") * 0.02).bfloat16()

        self.layers = [
            {
                "qkv": normal(QKV, HIDDEN),
                "o": normal(HIDDEN, HEADS),
                "router": normal(EXPERTS, HIDDEN),
                "gate_up": self.packed(2 * HIDDEN, True),
                "down": self.packed(HIDDEN, False),
            }
            for _ in range(LAYERS)
        ]
        self.biases = {n: normal(n) for n in (QKV, HIDDEN, EXPERTS)}
        self.expert_biases = normal(EXPERTS, 2 * HIDDEN), normal(EXPERTS, HIDDEN)
        self.norm = torch.ones(HIDDEN, device="cuda")
        angles = torch.rand(1024, 32, device="cuda")
        self.cos, self.sin = angles.cos(), angles.sin()
        self.sinks = normal(64)
        self.scratch = Scratch.create(64, 64, 8, 64, "cuda")
        self.pages = [torch.randn(2, 64 * 8, PAGE, 8, 64, device="cuda").bfloat16() / 8]
        self.pages += [self.pages[0].clone() for _ in range(LAYERS - 1)]
        self.aside = torch.cuda.Stream()
        self.batches = {tokens: self.batch(tokens) for tokens in COUNTS}

    @staticmethod
    def batch(tokens: int) -> dict[int | None, tuple[Tensor, ...]]:
        """What attention reads beside q, k and v, for layers with a window or not."""
        tables = torch.arange(tokens * 8, device="cuda").int().view(tokens, 8)
        lengths = torch.full((tokens,), CONTEXT, device="cuda").int()
        queries = torch.arange(tokens + 1, device="cuda").int()
        slots = tables[:, (CONTEXT - 1) // PAGE] * PAGE + (CONTEXT - 1) % PAGE
        common = lengths, queries, slots, lengths - 1
        first = (CONTEXT - WINDOW) // PAGE
        return {
            None: (tables, lengths * 0, *common),
            WINDOW: (
                tables[:, first:].contiguous(),
                lengths * 0 + first * PAGE,
                *common,
            ),
        }

    @staticmethod
    def packed(rows: int, paired: bool) -> Packed:
        scale = int(rotate(torch.tensor(0x01010101 * (119 + 118)), 7))
        shape = (EXPERTS, rows // 16, HIDDEN // 64)
        words = torch.randint(
            -(2**31), 2**31, (*shape, 128), dtype=torch.int32, device="cuda"
        )
        scales = torch.full((*shape, 8), scale - (scale >> 31 << 32), device="cuda")
        return Packed(words, scales.int(), HIDDEN, paired)

    def fetch_aside(self, weight: Tensor, count: int) -> None:
        self.aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.aside):
            prefetch_kernel[(66,)](weight, SHARES=66, BYTES=count, num_warps=4)

    def run(self, x: Tensor, how: Prefetch) -> Tensor:
        """Both kinds of layer in turn; x [T, hidden] is overwritten."""
        tokens = len(x)
        up, back = tilings(tokens, EXPERTS, TOP_K)
        update = None
        for index, layer in enumerate(self.layers):
            window = WINDOW if index % 2 == 0 else None
            tables, offsets, lengths, queries, slots, positions = self.batches[tokens][
                window
            ]
            following = self.layers[(index + 1) % LAYERS]["qkv"]
            x, h = add_norm(x, update, self.norm, 1e-5)
            qkv = self.project(h, layer["qkv"], None, layer["o"], how.o_by_qkv, how)
            if how.o_aside:
                self.fetch_aside(layer["o"], how.o_aside)
            keys, values = self.pages[index]
            q = rope_and_cache(
                *(qkv, self.biases[QKV], positions, self.cos, self.sin),
                *(keys, values, slots),
            )
            out = attend(
                *(q, keys, values, tables, offsets, lengths, queries, tokens),
                *(self.sinks, window),
                scratch=self.scratch,
            )
            update = self.project(
                *(out.flatten(1), layer["o"], self.biases[HIDDEN]),
                *(following, how.qkv_by_o, how),
            )
            if how.qkv_aside:
                self.fetch_aside(following, how.qkv_aside)
            x, h = add_norm(x, update, self.norm, 1e-5)
            router = layer["router"], self.biases[EXPERTS], TOP_K
            first, second = self.expert_biases
            if tokens == 1:
                ids, scores = route(h, *router)
                words = layer["down"].words
                hidden = gate_up_few(
                    *(h, ids, layer["gate_up"], first, *LIMITS),
                    after=words,
                    after_bytes=words[0].nbytes if how.down_by_gate_up else 0,
                    late=how.down_by_gate_up == "late",
                    evict=how.evict,
                )
                update = down_few(
                    *(hidden, ids, scores, layer["down"], second),
                    after=following,
                    after_bytes=how.qkv_by_down,
                    late=how.late,
                    evict=how.evict,
                )
            else:
                _, scores, pairs = route_and_dispatch(h, *router, up.tokens)
                hidden = gate_up(h, layer["gate_up"], first, pairs, *LIMITS, up)
                update = down(hidden, layer["down"], second, scores, pairs, back)
        if how.o_aside or how.qkv_aside:
            torch.cuda.current_stream().wait_stream(self.aside)
        return add_norm(x, update, self.norm, 1e-5)[1]

    @staticmethod
    def project(x, weight, bias, after, count, how) -> Tensor:
        config = choose(len(x), *weight.shape)
        if not isinstance(config, Gemv):
            return project(x, weight, bias)
        return gemv(x, weight, bias, config, x.dtype, after, count, how.shares)


def capture(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        out = run()
        graph.capture_end()
    torch.cuda.synchronize()
    return graph, out


def once(graph: torch.cuda.CUDAGraph) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1000 / LAYERS


def variants(tokens: int) -> dict[str, Prefetch]:
    whole_o, whole_qkv = HIDDEN * HEADS * 2, QKV * HIDDEN * 2
    found = {"none": Prefetch()}
    for name, size in (("all", whole_o), ("12MB", 12 * MB)):
        found[f"o aside {name}"] = Prefetch(o_aside=size)
        if tokens <= 2:
            found[f"o by qkv {name}"] = Prefetch(o_by_qkv=size)
    if tokens <= 2:
        found["o by qkv all, 264"] = Prefetch(o_by_qkv=whole_o, shares=264)
    if tokens <= 8:
        for name, size in (("all", whole_qkv), ("12MB", 12 * MB)):
            found[f"qkv aside {name}"] = Prefetch(qkv_aside=size)
            if tokens <= 2:
                found[f"qkv by o {name}"] = Prefetch(qkv_by_o=size)
        found["o, qkv aside"] = Prefetch(o_aside=whole_o, qkv_aside=whole_qkv)
    if tokens > 1:
        return found
    found["evict"] = Prefetch(evict="evict_first")
    found["qkv by o all evict"] = Prefetch(qkv_by_o=whole_qkv, evict="evict_first")
    for when in ("early", "late"):
        found[f"down {when}"] = Prefetch(down_by_gate_up=when)
    for name, size in (("all", whole_qkv), ("20MB", 20 * MB), ("10MB", 10 * MB)):
        for late in (False, True):
            label = f"qkv by down {name} {'late' if late else 'early'}"
            found[label] = Prefetch(qkv_by_down=size, late=late)
    for when in ("early", "late"):
        found[f"all, down {when}"] = Prefetch(
            o_by_qkv=whole_o, down_by_gate_up=when, qkv_by_down=whole_qkv
        )
        found[f"all late, down {when}"] = Prefetch(
            o_by_qkv=whole_o, down_by_gate_up=when, qkv_by_down=12 * MB, late=True
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    began = time.perf_counter()
    model = Model()
    results = []
    for tokens in COUNTS:
        start = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()

        def run(how: Prefetch, start=start) -> Tensor:
            return model.run(start.clone(), how)

        ways = variants(tokens)
        with ThreadPoolExecutor(12) as pool:  # compiles
            list(pool.map(run, ways.values()))
        torch.cuda.synchronize()
        graphs = {}
        for name, how in ways.items():
            try:
                graphs[name] = capture(lambda how=how, run=run: run(how))
            except Exception as failure:
                print(f"T{tokens} {name} failed: {str(failure)[:200]}")
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(15):
            for name, (graph, _) in graphs.items():
                times[name].append(once(graph))
        base = sorted(times["none"])[7]
        print(f"-- T{tokens}, {time.perf_counter() - began:.0f} s")
        for name, (_, out) in graphs.items():
            us = sorted(times[name])[7]
            same = torch.equal(out, graphs["none"][1])
            print(
                f"T{tokens:<3} {name:24} {us:8.2f} us {us / base - 1:+6.1%}"
                f"{'' if same else '  DIFFERENT'}",
                flush=True,
            )
            results.append({"tokens": tokens, "name": name, "us": us, "same": same})
        del graphs
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
