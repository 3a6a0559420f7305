"""Compare the flash-attn libraries with our prefill kernel, where they can be had.

    python tools/gpu/flash.py --source flash_attn-2.8.3.post2.tar.gz --packages DIR
    python tools/gpu/flash.py --packages DIR --json OUT

The whole of flash-attn takes hours to build. The first form compiles the few files that
gpt-oss needs on this GPU: forward, bfloat16, heads of 64. It leaves them in DIR. The
second times what is in DIR: that, or unpacked wheels of flash-attn or flash-attn-4.
"""

import argparse
import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils import cpp_extension

sys.path.insert(0, str(Path(__file__).parents[2]))

from simplellm.batch import KVGroup
from simplellm.kernels.prefill import prefill_attention
from simplellm.ops import attention

HEADS, KV_HEADS, DIM, PAGE = 64, 8, 64, 64
SHAPES = ((1, 2048), (32, 2048), (1, 8192), (1, 32768))
SOURCES = [
    "flash_api.cpp",
    *(
        f"src/flash_fwd_{kind}hdim64_bf16_{mask}sm80.cu"
        for kind in ("", "split_")
        for mask in ("", "causal_")
    ),
]
FLAGS = [
    "-O3",
    "-std=c++17",
    "-DTORCH_EXTENSION_NAME=flash_attn_2_cuda",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
]
NVCC_FLAGS = [
    *("-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__"),
    *("-U__CUDA_NO_HALF2_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"),
    *("--expt-relaxed-constexpr", "--expt-extended-lambda", "--use_fast_math"),
    *("-Xcompiler", "-fPIC"),
]

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, int | None], Tensor]


def compile_file(source: Path, root: Path) -> tuple[Path, float]:
    """An object file, and the seconds it took. Raises RuntimeError with the errors."""
    began = time.monotonic()
    out = source.with_suffix(".o")
    folders = [
        root / "csrc/flash_attn",
        root / "csrc/flash_attn/src",
        root / "csrc/cutlass/include",
        *cpp_extension.include_paths("cuda"),
        sysconfig.get_paths()["include"],
    ]
    include = [f"-I{folder}" for folder in folders]
    major, minor = torch.cuda.get_device_capability()
    code = f"arch=compute_{major}{minor},code=sm_{major}{minor}"
    nvcc = str(Path(cpp_extension.CUDA_HOME or "/usr/local/cuda") / "bin/nvcc")
    command = [nvcc, "-gencode", code, *FLAGS, *NVCC_FLAGS, *include]
    done = subprocess.run(
        [*command, "-c", str(source), "-o", str(out)], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{source.name}: {done.stderr[-3000:]}")
    return out, time.monotonic() - began


def build(archive: Path, packages: Path) -> None:
    """Compile what gpt-oss needs of flash-attn's source, and leave it in ``packages``.

    Beside it, in build.json, are the seconds that each file took.
    """
    with TemporaryDirectory() as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        (root,) = Path(folder).iterdir()
        seconds = build_library(root, packages)
        shutil.copytree(
            root / "flash_attn", packages / "flash_attn", dirs_exist_ok=True
        )
    (packages / "build.json").write_text(json.dumps(seconds, indent=1) + "\n")


def build_library(root: Path, packages: Path) -> dict[str, float]:
    sources = [root / "csrc/flash_attn" / name for name in SOURCES]
    with ThreadPoolExecutor() as pool:
        built = list(pool.map(lambda source: compile_file(source, root), sources))
    libraries = [f"-L{path}" for path in cpp_extension.library_paths("cuda")]
    names = ["c10", "torch", "torch_cpu", "torch_python", "c10_cuda", "torch_cuda"]
    subprocess.run(
        ["g++", "-shared", "-Wl,-z,lazy"]
        + ["-o", str(packages / "flash_attn_2_cuda.so")]
        + [str(out) for out, _ in built]
        + [*libraries, *(f"-l{name}" for name in names), "-lcudart"],
        check=True,
    )
    return {
        source.name: round(seconds, 1)
        for source, (_, seconds) in zip(sources, built, strict=True)
    }


def ours(batch: int, length: int) -> Attend:
    """Our kernel for [B, Q, H, D]; keys and values are [pages, PAGE, K, D] already."""
    pages = length // PAGE

    def numbers(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    tables = numbers(range(batch * pages)).view(batch, pages)
    offsets, lengths = numbers([0] * batch), numbers([length] * batch)
    queries = numbers(range(0, batch * length + 1, length))

    def attend(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, window: int | None
    ) -> Tensor:
        keys, values = (x.view(-1, PAGE, KV_HEADS, DIM) for x in (k, v))
        group = KVGroup(
            slots=numbers([]),
            tables=tables,
            offsets=offsets,
            lengths=lengths,
            queries=queries,
            decodes=0,
            window=window,
            page_size=PAGE,
        )
        rows = q.view(-1, HEADS, DIM)
        out = torch.empty_like(rows)
        prefill_attention(rows, keys, values, group, sinks, out)
        return out.view_as(q)

    return attend


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """out [B, Q, H, D] of a softmax without sinks, lse [B, H, Q] -> with them."""
    share = torch.sigmoid(lse.transpose(1, 2) - sinks.float())
    return (out * share[..., None]).to(out.dtype)


def sides(window: int | None, none: Any) -> tuple:
    return (none, none) if window is None else (window - 1, 0)


def flash_2() -> Attend:
    """flash-attn 2, with the sinks put in afterwards. Raises ImportError."""
    from flash_attn import flash_attn_func

    def attend(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, window: int | None
    ) -> Tensor:
        out, lse, _ = flash_attn_func(
            *(q, k, v),
            causal=True,
            window_size=sides(window, -1),
            return_attn_probs=True,
        )
        return out if sinks is None else with_sinks(out, lse, sinks)

    return attend


def flash_4() -> Attend:
    """flash-attn 4, which knows sinks. Raises ImportError."""
    from flash_attn.cute import flash_attn_func

    def attend(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, window: int | None
    ) -> Tensor:
        out = flash_attn_func(
            *(q, k, v),
            causal=True,
            window_size=sides(window, None),
            learnable_sink=sinks,
        )
        return out[0] if isinstance(out, tuple) else out

    return attend


def microseconds(function: Callable[[], object], repeats: int = 15) -> float:
    """The median time of a call on the GPU."""
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times[3:])


def operations(batch: int, length: int, window: int | None) -> float:
    """Multiplications and additions of the scores that count."""
    seen = min(window or length, length)
    pairs = seen * (seen + 1) / 2 + (length - seen) * seen
    return 4.0 * batch * HEADS * DIM * pairs


def compare(
    name: str, make: Callable[[int, int], Attend], has_sinks: bool
) -> list[dict[str, Any]]:
    """Error and speed of a function for each shape, with and without a window."""
    rows = []
    for batch, length in SHAPES:
        attend = make(batch, length)
        for window in (None, 128):
            torch.manual_seed(0)
            q, k, v = (
                torch.randn(batch, length, heads, DIM, device="cuda").bfloat16()
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            sinks = torch.randn(HEADS, device="cuda").bfloat16() if has_sinks else None
            out = attend(q, k, v, sinks, window)
            error = None
            if length == 2048:
                inputs = q[0].float(), k[0].float(), v[0].float()
                exact = attention(*inputs, sinks, window=window)
                error = (out[0] - exact).abs().max().item()
            took = microseconds(lambda: attend(q, k, v, sinks, window))  # noqa: B023
            rate = operations(batch, length, window) / took / 1e6
            row = dict(name=name, batch=batch, length=length, window=window)
            row |= dict(error=error, us=round(took, 1), tflops=round(rate, 1))
            print(row, flush=True)
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="flash-attn's source archive")
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(["python", *sys.argv]),
        "rows": [],
    }

    def measure(
        name: str, make: Callable[[int, int], Attend], *, has_sinks: bool = True
    ) -> None:
        try:
            record["rows"] += compare(name, make, has_sinks)
            record[name] = "measured"
        except Exception as error:
            traceback.print_exc()
            record[name] = f"{type(error).__name__}: {str(error)[:1500]}"
        if arguments.json:
            arguments.json.write_text(json.dumps(record, indent=1) + "\n")

    packages = arguments.packages
    packages.mkdir(parents=True, exist_ok=True)
    if arguments.source:
        build(arguments.source, packages)
        return
    built = packages / "build.json"
    record["build_seconds"] = json.loads(built.read_text()) if built.exists() else None
    site.addsitedir(str(packages))
    # Kernels for other sizes are missing. They are looked for when they are called.
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_LOCAL)
    with torch.inference_mode():
        measure("ours", ours)
        measure("flash-attn 2", lambda *shape: flash_2())
        name = "flash-attn 2, no sinks"
        measure(name, lambda *shape: flash_2(), has_sinks=False)
        measure("flash-attn 4", lambda *shape: flash_4())


if __name__ == "__main__":
    main()
