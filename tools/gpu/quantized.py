"""Check and time dense families' products on one GPU, at real models' sizes.

    python tools/gpu/quantized.py [--formats "fp8 blocks,int8"] [--json OUT]

Products with weights of 8 bits, and whole feed-forward networks, with ordinary weights
as well. Each is compared with the plain operation on the same device, and timed by
replays of a CUDA graph whose launches take turns between weights that are together
larger than the L2 cache. Shares are of reading the weight once at 4,600 GB/s, for few
tokens, or, for many, how many times as fast as cuBLAS in bfloat16. What
the kernels would take with other tilings is for tune.py. Ends with 1 if a result is
wrong.
"""

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
from records import header, parser, save
from torch import Tensor
from torch.nn import functional

from simplellm import ops
from simplellm.kernels.quantized import project
from simplellm.kernels.rounding import library_multiplies, round_rows
from simplellm.kernels.variants import dense
from simplellm.layers import Dense
from simplellm.scaled import E4M3, Scaled

# Out and in of Qwen3-8B's and Llama-3.1-8B's products; networks have two of them.
SHAPES = {
    "qkv": [(6144, 4096)],
    "o": [(4096, 4096)],
    "gate_up, Qwen": [(24576, 4096)],
    "down, Qwen": [(4096, 12288)],
    "gate_up, Llama": [(28672, 4096)],
    "down, Llama": [(4096, 14336)],
    "head": [(151936, 4096)],
    "mlp, Qwen": [(24576, 4096), (4096, 12288)],
    "mlp, Llama": [(28672, 4096), (4096, 14336)],
}
FORMATS = {
    "fp8 blocks": ((128, 128), E4M3, True),
    "fp8": ((1, 0), E4M3, True),
    "int8": ((1, 0), torch.int8, True),
    "int8 alone": ((1, 0), torch.int8, False),
}
TOKENS = 1, 2, 4, 16, 64, 2048
DEVICE = "cuda"
READ = 4.6e12  # bytes/s
CACHE = 2.4e8  # bytes of weights after which nothing of the first is cached


def seconds(calls: list[Callable[[], Any]]) -> float:
    """Of one call, the median of replays."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    found = []
    for _ in range(30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(found[10:])


def scaled_mm(x: Tensor, weight: Scaled) -> Callable[[], Tensor] | None:
    """PyTorch's own product of FP8, the input rounded already, if it has the format."""
    (rows, columns), whole = weight.tile, weight.shape[1]
    tile = rows, 0 if columns == whole else columns
    if weight.values.dtype != E4M3 or not library_multiplies(tile, x.device):
        return None
    values, scales = round_rows(x, weight, 16)
    multiply = partial(torch._scaled_mm, out_dtype=torch.bfloat16)
    return partial(multiply, values, weight.values.T, scales.T, weight.scales.T)


def random_weight(size_out: int, size_in: int) -> Tensor:
    return torch.randn(size_out, size_in, device=DEVICE).bfloat16() * 0.02


def copies(weight: Scaled | Tensor) -> list[Any]:
    """So many that the cache has nothing of the first after the last."""
    many = range(max(2, math.ceil(CACHE / weight.nbytes)))
    if isinstance(weight, Tensor):
        return [weight.clone() for _ in many]
    return [replace(weight, values=weight.values.clone()) for _ in many]


def wrong_by(got: Tensor, exact: Tensor) -> float:
    """The error, as a part of the result's root mean square."""
    got = got.float().sum(1) if got.ndim == 3 else got.float()
    exact = exact.float()
    return ((got - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()).item()


def tolerance(row: dict[str, Any]) -> float:
    """Of the result's root mean square: for bfloat16, and sums of tensor cores.

    What is between a network's products may also be rounded to 8 bits the other way.
    """
    rounded = len(SHAPES[row["product"]]) > 1 and row["format"] in FORMATS
    return 0.03 if rounded else 0.01


def calls(
    x: Tensor,
    weights: list[Any],
    product: Callable[[Tensor, Any], Tensor],
    network: Callable[[Tensor, Dense], Tensor],
) -> list[Callable[[], Tensor]]:
    """A product, or a feed-forward network, with each copy of its weights."""
    sets = zip(*map(copies, weights), strict=False)
    if len(weights) == 1:
        return [partial(product, x, weight) for (weight,) in sets]
    return [partial(network, x, Dense(one, None, two, None)) for one, two in sets]


def measure(name: str, kind: str, tokens: int) -> dict[str, Any]:
    """How wrong it is, and how long it takes, beside PyTorch with ordinary weights."""
    ordinary = [random_weight(*size) for size in SHAPES[name]]
    weights: list[Any] = [*ordinary]
    if kind in FORMATS:
        weights = [Scaled.of(weight, *FORMATS[kind]) for weight in ordinary]
    x = torch.randn(tokens, SHAPES[name][0][1], device=DEVICE).bfloat16()
    if len(weights) == 1:
        exact, library = weights[0].product(x.float()), scaled_mm(x, weights[0])
    else:
        exact, library = ops.dense(x, Dense(weights[0], None, weights[1], None)), None
    ours = calls(x, weights, lambda x, weight: project(x, weight, None), dense)
    error, taken = wrong_by(ours[0](), exact), seconds(ours)
    bf16 = seconds(calls(x, ordinary, functional.linear, ops.dense))
    return {
        "product": name,
        "format": kind,
        "tokens": tokens,
        "error": error,
        "us": 1e6 * taken,
        "bf16_us": 1e6 * bf16,
        "scaled_mm_us": 1e6 * seconds([library] * 4) if library else None,
        "share": sum(weight.nbytes for weight in weights) / READ / taken,
        "tflops": 2e-12 * tokens * sum(map(math.prod, SHAPES[name])) / taken,
    }


def main() -> int:
    asked = parser(__doc__)
    asked.add_argument("--formats", default=",".join(FORMATS))
    options = asked.parse_args()
    kinds = options.formats.split(",")
    rows = [
        measure(name, kind, tokens)
        for name, sizes in SHAPES.items()
        for kind in (kinds if len(sizes) == 1 else ["bf16", *kinds])
        for tokens in TOKENS
        if name != "head" or tokens <= 64
    ]
    label = "products and feed-forward networks of dense families"
    save({"label": label, **header(), "rows": rows}, options.json)
    heads = "tokens us bf16 torch read faster error".split()
    widths = 7, 8, 8, 8, 6, 8, 8
    columns = (f"{head:>{n}}" for head, n in zip(heads, widths, strict=True))
    print(f"{'product':15} {'format':11}", *columns, sep="")
    for row in rows:
        names = "us", "bf16_us", "scaled_mm_us"
        times = (f"{row[n]:8.1f}" if row.get(n) else f"{'':8}" for n in names)
        print(
            f"{row['product']:15} {row['format']:11}{row['tokens']:7}",
            *times,
            f"{row['share']:6.0%}{row['bf16_us'] / row['us']:8.2f}{row['error']:8.4f}",
            sep="",
        )
    wrong = [row for row in rows if not row["error"] < tolerance(row)]
    print(f"{len(rows)} products, {len(wrong)} of them wrong")
    return int(len(wrong) > 0)


if __name__ == "__main__":
    sys.exit(main())
