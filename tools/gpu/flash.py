"""Attention of prompts: our kernel beside the flash-attn libraries that are there.

    python tools/gpu/flash.py --packages DIR --json OUT

DIR has unpacked wheels, of flash-attn 2, 3 or 4, beside what is installed. A library is
timed as `attention_backend="flash_attn"` calls it, which gathers the pages and puts the
sinks in, and by itself. Heads are gpt-oss's, with sinks, and those of Qwen3-8B.
"""

import site
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
from cases import CUDA, PAGE, groups, normal
from records import argument_parser, header, save
from torch import Tensor

from simplellm.model.attention import attention
from simplellm.model.batch import KVGroup
from simplellm.model.kernels.flash import MODULES, Library, Plan, attend_sequences
from simplellm.model.kernels.prefill import prefill_attention

# Query heads, kv heads, head_dim, whether there are sinks, windows.
HEADS = (64, 8, 64, True, (None, 128)), (32, 8, 128, False, (None,))
SHAPES = (1, 2048), (32, 2048), (1, 8192), (1, 32_768)
CHECKED = 2048  # tokens of a sequence that float32 is computed of
Row = dict[str, Any]
Attend = Callable[[Tensor, Tensor, Tensor, KVGroup, Tensor | None, Tensor], None]


def libraries() -> dict[int, Library | str]:
    """Each version, or why it isn't there."""
    found: dict[int, Library | str] = {}
    for name, version in MODULES.items():
        if isinstance(found.get(version), Library):
            continue
        try:
            function = import_module(name).flash_attn_varlen_func
        except Exception as error:  # of whatever it needs
            found[version] = f"{type(error).__name__}: {str(error)[:200]}"
        else:
            found[version] = Library(version, function)
    return found


def by_library(library: Library, group: KVGroup) -> Attend:
    """`prefill_attention` through a library; the plan is made once for all layers."""
    plan = Plan.of(group)

    def attend(
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        group: KVGroup,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        attend_sequences(q, keys, values, plan, group.window, sinks, library, out)

    return attend


def microseconds(function: Callable[[], object]) -> float:
    """The median time of a call; a library may not be captured in a graph."""
    times = []
    for _ in range(15):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop))
    return median(times[3:])


def operations(batch: int, length: int, window: int | None, width: int) -> float:
    """Multiplications and additions of the scores that count, heads * dim wide."""
    seen = min(window or length, length)
    pairs = seen * (seen + 1) / 2 + (length - seen) * seen
    return 4.0 * batch * width * pairs


def compare(name: str, library: Library | None) -> Iterator[Row]:
    """A row for each shape. The error is the largest, beside float32."""
    for heads, kv_heads, dim, has_sinks, windows in HEADS:
        for (batch, length), window in ((s, w) for s in SHAPES for w in windows):
            torch.manual_seed(0)
            (group,), pages = groups([length] * batch, [length] * batch, window, 1)
            q = normal(batch * length, heads, dim)
            keys, values = (normal(pages, PAGE, kv_heads, dim) for _ in "kv")
            sinks = normal(heads) if has_sinks else None
            attend = by_library(library, group) if library else prefill_attention
            arguments = q, keys, values, group, sinks, torch.full_like(q, torch.nan)
            row: Row = {"name": name, "dim": dim, "batch": batch, "length": length}
            row |= {"window": window}
            try:
                attend(*arguments)
                row |= measure(row, arguments, attend, library)
            except Exception as failure:  # of one shape; the others go on
                row["problem"] = f"{type(failure).__name__}: {str(failure)[:200]}"
            print(shown(row), flush=True)
            yield row


def measure(
    row: Row, arguments: tuple[Any, ...], attend: Attend, library: Library | None
) -> Row:
    """Error, microseconds and TFLOP/s of what has run once."""
    q, keys, values, group, sinks, out = arguments
    window, length = row["window"], row["length"]
    if length == CHECKED:
        table = group.tables[0, : length // PAGE].long()
        k, v = (x[table].flatten(0, 1).float() for x in (keys, values))
        exact = attention(q[:length].float(), k, v, sinks, window=window)
        row["error"] = (out[:length] - exact).abs().max().item()
    found = {"us": microseconds(lambda: attend(*arguments))}
    work = operations(row["batch"], length, window, q.shape[1] * q.shape[2])
    found["tflops"] = work / found["us"] / 1e6
    if library is not None:
        plan = Plan.of(group)
        k, v = (x[plan.pages, plan.rows] for x in (keys, values))
        alone = microseconds(lambda: library(q, k, v, window, **plan.lengths))
        found["alone_us"] = alone
    return {name: round(value, 1) for name, value in found.items()}


def shown(row: Row) -> str:
    """A row of the table."""
    shape = f"{row['batch']} x {row['length']}"
    begin = f"{row['name']:14}{row['dim']:4}{row['window'] or '':5}{shape:>12}"
    if "problem" in row:
        return f"{begin}  {row['problem']}"
    error = f"{row['error']:.1e}" if "error" in row else ""
    alone = f"{row['alone_us']:9.1f} alone" if "alone_us" in row else ""
    return f"{begin}{row['us']:10.1f} us{row['tflops']:6.0f} TF{error:>9}{alone}"


@torch.inference_mode()
def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--packages", type=Path, help="a folder of unpacked wheels")
    options = parser.parse_args()
    if options.packages:
        site.addsitedir(str(options.packages.resolve()))
    torch.zeros(1, device=CUDA)  # libraries look for what PyTorch has loaded
    record: Row = {**header(), "rows": []}
    ways: dict[str, Library | str | None] = {"ours": None}
    ways |= {f"flash-attn {version}": way for version, way in libraries().items()}
    for name, way in ways.items():
        if isinstance(way, str):
            print(f"{name}: {way}", flush=True)
            record[name] = way
            continue
        for row in compare(name, way):
            record["rows"].append(row)
            save(record, options.json)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
