"""Run each kernel's small case, and all of them under compute-sanitizer.

    python tools/gpu/sanitize.py --json figures/11-sanitizer.json
    compute-sanitizer --tool memcheck python tools/gpu/sanitize.py attention rope

The first form runs memcheck and racecheck over every kernel, several processes at a
time. With names it only runs these kernels once each, for a tool that watches.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from simplellm.kernels.attention import Scratch, attend
from simplellm.kernels.experts import Packed, down, gate_up, repack, tilings
from simplellm.kernels.experts_few import down_few, gate_up_few
from simplellm.kernels.forward import embed
from simplellm.kernels.head import head
from simplellm.kernels.linear import linear
from simplellm.kernels.norm import add_norm
from simplellm.kernels.rope import rope_and_cache
from simplellm.kernels.routing import route, route_and_dispatch
from simplellm.kernels.sampling import draw
from simplellm.weights import MXFP4

HIDDEN, QKV, HEADS, KV_HEADS, DIM = 2880, 5120, 64, 8, 64  # gpt-oss's widths
EXPERTS, TOP_K = 6, 4  # fewer experts than gpt-oss's, for the sake of time
TOOLS = ("memcheck", "racecheck")
SUMMARY = re.compile(
    r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazards? displayed"
)
REFUSED = re.compile(r"=+ (?:Error|Internal|Warning).*", re.IGNORECASE)
DONE = "every kernel has run"


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16().cuda()


def integers(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def run_norm() -> Iterator[Tensor]:
    weight = torch.ones(HIDDEN, device="cuda")
    for tokens, parts in ((1, 3), (5, 6), (33, 1)):
        yield from add_norm(
            normal(tokens, HIDDEN), normal(tokens, parts, HIDDEN), weight, 1e-5
        )


def run_rope() -> Iterator[Tensor]:
    table = torch.rand(4096, DIM // 2, device="cuda")
    for tokens, parts in ((1, 3), (40, 1)):
        pages = torch.zeros(3, 64, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        slots = integers(*range(100, 100 + tokens - 1), -1)
        yield rope_and_cache(
            normal(tokens, parts, QKV),
            normal(QKV),
            integers(*range(4096 - tokens, 4096)),
            table,
            table,
            pages,
            pages.clone(),
            slots,
        )


def attention(
    lengths: list[int], chunks: list[int], decodes: int, window: int | None
) -> Tensor:
    """Of sequences with so many tokens each, the last ``chunks`` of them new."""
    need = [-(-length // 64) for length in lengths]
    first = [sum(need[:row]) for row in range(len(need))]
    tables = [[page + i for i in range(max(need))] for page in first]
    size = sum(need) + max(need), 64, KV_HEADS, DIM
    ends = [sum(chunks[:row]) for row in range(len(chunks) + 1)]
    scratch = Scratch.create(len(lengths), HEADS, KV_HEADS, DIM, "cuda")
    return attend(
        normal(sum(chunks), HEADS, DIM),
        normal(*size),
        normal(*size),
        torch.tensor(tables, dtype=torch.int32, device="cuda"),
        integers(*[0] * len(lengths)),
        integers(*lengths),
        integers(*ends),
        decodes,
        normal(HEADS),
        window,
        scratch=scratch,
    )


def run_decode() -> Iterator[Tensor]:
    for window in (None, 128):
        yield attention([700], [1], 1, window)  # split, and joined by heads
        yield attention([600] * 9, [1] * 9, 9, window)  # by kv heads
        yield attention([300, 0, 129], [1] * 3, 3, window)
        yield attention([65] * 17, [1] * 17, 17, window)


def run_prefill() -> Iterator[Tensor]:
    for window in (None, 128):
        yield attention([300, 129, 17], [140, 129, 1], 0, window)


def run_linear() -> Iterator[Tensor]:
    for (size_out, size_in), tokens in product(
        ((QKV, HIDDEN), (HIDDEN, 4096), (100, 96)), (1, 3, 17, 60)
    ):
        weight, bias = normal(size_out, size_in), normal(size_out)
        yield linear(normal(tokens, size_in), weight, bias)


def run_routing() -> Iterator[Tensor]:
    for experts, tokens in product((32, 128), (1, 5, 40, 300)):
        router = normal(experts, HIDDEN), normal(experts), TOP_K
        yield route(normal(tokens, HIDDEN), *router)[1]
        for block in (16, 64):
            yield route_and_dispatch(normal(tokens, HIDDEN), *router, block)[1]


def weights(rows: int, columns: int) -> MXFP4:
    shape = (EXPERTS, rows, columns // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    scales = torch.randint(118, 122, shape, dtype=torch.uint8)
    return MXFP4(blocks.cuda(), scales.cuda())


class Half(NamedTuple):
    """The repacked weights and the biases of one half of the experts."""

    weights: Packed
    bias: Tensor


def layer() -> tuple[Half, Half]:
    """Both halves of the experts, narrower than gpt-oss's."""
    width = 192
    first, second = weights(2 * width, HIDDEN), weights(HIDDEN, width)
    return (
        Half(repack(first, paired=True), normal(EXPERTS, 2 * width)),
        Half(repack(second, paired=False), normal(EXPERTS, HIDDEN)),
    )


def run_experts() -> Iterator[Tensor]:
    first, second = layer()
    router = normal(EXPERTS, HIDDEN), normal(EXPERTS), TOP_K
    for tokens in (2, 5, 60, 200, 500):  # each with another tiling
        up, back = tilings(tokens, EXPERTS, TOP_K)
        x = normal(tokens, HIDDEN)
        _, scores, pairs = route_and_dispatch(x, *router, up.tokens)
        yield down(
            gate_up(x, *first, pairs, 7.0, 1.702, up), *second, scores, pairs, back
        )


def run_experts_few() -> Iterator[Tensor]:
    first, second = layer()
    x = normal(1, HIDDEN)
    ids, scores = route(x, normal(EXPERTS, HIDDEN), normal(EXPERTS), TOP_K)
    hidden = gate_up_few(x, ids, *first, 7.0, 1.702)
    yield hidden
    yield down_few(hidden, ids, scores, *second)


def run_head() -> Iterator[Tensor]:
    weight = normal(5003, HIDDEN)
    for tokens in (1, 3, 17, 100):
        logits = torch.empty(tokens, len(weight), device="cuda")
        yield head(normal(tokens, HIDDEN), weight, logits)
        yield logits


def run_sampling() -> Iterator[Tensor]:
    for rows, vocabulary in ((1, 5003), (9, 70_000)):
        logits = torch.randn(rows, vocabulary).cuda()
        best = logits.argmax(-1).int()
        numbers = torch.arange(rows, device="cuda")
        yield draw(logits, best, torch.ones(rows, device="cuda"), numbers, numbers)


def run_embed() -> Iterator[Tensor]:
    yield embed(integers(3, -1, 999, -2), integers(7, 8), normal(1000, HIDDEN))


KERNELS: dict[str, Callable[[], Iterator[Tensor]]] = {
    "embed": run_embed,
    "norm": run_norm,
    "rope": run_rope,
    "decode": run_decode,
    "prefill": run_prefill,
    "linear": run_linear,
    "routing": run_routing,
    "experts": run_experts,
    "experts_few": run_experts_few,
    "head": run_head,
    "sampling": run_sampling,
}


@torch.inference_mode()
def run(names: list[str]) -> None:
    """Launch these kernels. Raises RuntimeError for a result that is not finite."""
    for name in names:
        torch.manual_seed(0)
        for number, out in enumerate(KERNELS[name]()):
            if not out.cpu().isfinite().all():
                raise RuntimeError(f"{name}, result {number} is not finite")
        print(name)
    torch.cuda.synchronize()
    print(DONE)


@dataclass(frozen=True)
class Finding:
    """What one tool said about one kernel; no ``errors`` if it did not run."""

    kernel: str
    tool: str
    errors: int | None
    message: str = ""


def understand(kernel: str, tool: str, output: str) -> Finding:
    """The finding in what a tool and the program under it have printed."""
    counts = [int(a or b) for a, b in SUMMARY.findall(output)]
    if counts and DONE in output and "not supported" not in output:
        return Finding(kernel, tool, sum(counts))
    said = REFUSED.search(output)
    lines = output.strip().splitlines() or ["no output"]
    return Finding(kernel, tool, None, said[0] if said else lines[-1])


def watch(job: tuple[str, str], program: str = "compute-sanitizer") -> Finding:
    """Run a kernel's case under a tool."""
    kernel, tool = job
    command = [program, "--tool", tool, sys.executable, __file__, kernel]
    # Each tensor in an allocation of its own, so that no neighbour hides a bad access.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=400
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(kernel, tool, None, str(error)[:200])
    finding = understand(kernel, tool, done.stdout + done.stderr)
    if finding.errors != 0:
        print((done.stdout + done.stderr)[-3000:], file=sys.stderr)
    return finding


def table(findings: list[Finding]) -> str:
    """A row for each kernel, a column for each tool."""
    found = {(f.kernel, f.tool): f for f in findings}
    lines = ["| kernel | " + " | ".join(TOOLS) + " |", "|---" * 3 + "|"]
    for kernel in dict.fromkeys(f.kernel for f in findings):
        cells = [found[kernel, tool] for tool in TOOLS]
        shown = [
            f"did not run: {c.message}" if c.errors is None else str(c.errors)
            for c in cells
        ]
        lines.append(f"| {kernel} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=6, help="processes at a time")
    arguments = parser.parse_args()
    if unknown := set(arguments.kernels) - set(KERNELS):
        parser.error(f"no kernel {', '.join(unknown)}; expected {', '.join(KERNELS)}")
    if arguments.kernels:
        run(arguments.kernels)
        return
    run(list(KERNELS))  # compiles them, once
    with ThreadPoolExecutor(arguments.jobs) as pool:
        findings = list(pool.map(watch, product(KERNELS, TOOLS)))
    print(table(findings))
    if arguments.json:
        record = {
            "date": date.today().isoformat(),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "command": "python tools/gpu/sanitize.py " + shlex.join(sys.argv[1:]),
            "findings": [asdict(finding) for finding in findings],
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(any(finding.errors != 0 for finding in findings))


if __name__ == "__main__":
    main()
