"""Start the engine from checkpoint files: how long to the first token, how much memory.

    python tools/bench_start.py --folder /tmp/gpt-oss-20b

Writes a checkpoint with a known model's tensors, random, under their real names to the
folder if it is not there, and reads it once, so that it is in the page cache. Then new
processes start on it: one that only copies the tensors to the GPU, in two ways, one
that has to compile all kernels, and two that find them compiled. Writes
figures/12-start.json.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from simplellm.bench import TimedLLM
from simplellm.checkpoint import (
    INDEX,
    Checkpoint,
    Packed,
    RandomCheckpoint,
    Upload,
    stored_shapes,
)
from simplellm.config import MODELS, ModelConfig
from simplellm.graphs import GPUConfig
from simplellm.model import find_device
from simplellm.report import describe_device, versions
from simplellm.sampler import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
SHARD = 5 * 10**9  # bytes of a file, about
PROMPT = 128  # tokens


def config_json(config: ModelConfig) -> dict[str, Any]:
    """A config.json as gpt-oss has it on Hugging Face."""
    skipped = ("rope_scaling", "layer_types", "eos_token_ids")
    data = {name: value for name, value in vars(config).items() if name not in skipped}
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        rope = {"rope_type": "yarn", **vars(config.rope_scaling)}
    return data | {
        "model_type": "gpt_oss",
        "layer_types": list(config.layer_types),
        "eos_token_id": list(config.eos_token_ids) or None,
        "rope_scaling": rope,
    }


def stored_tensors(config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors on the CPU, under the names that files have on Hugging Face."""
    source = RandomCheckpoint(config, device=find_device(None))
    for ours, parts in stored_shapes(config, "huggingface", packed=True).items():
        value = source[ours]
        if isinstance(value, Packed):
            pieces: Any = value
        else:
            pieces = value.split([shape[0] for shape in parts.values()])
        for name, piece in zip(parts, pieces, strict=True):
            yield name, piece.cpu().contiguous()


def write(folder: Path, config: ModelConfig, shard: int = SHARD) -> None:
    """Write a checkpoint of random weights, its index last."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config_json(config), indent=1)
    (folder / "config.json").write_text(text, encoding="utf-8")
    places: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(places.values())):05}.safetensors"
        save_file(held, folder / file)
        places.update(dict.fromkeys(held, file))
        held.clear()

    for name, tensor in stored_tensors(config):
        held[name] = tensor
        if sum(t.nbytes for t in held.values()) >= shard:
            flush()
    if held:
        flush()
    index = json.dumps({"weight_map": places}, indent=1)
    (folder / INDEX).write_text(index, encoding="utf-8")


def read_through(folder: Path) -> float:
    """Bytes a second at which the files are read, all of them."""
    buffer = bytearray(2**24)
    start, size = time.perf_counter(), 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                size += count
    return size / (time.perf_counter() - start)


def copy_speeds(folder: Path) -> dict[str, float]:
    """Bytes a second from mapped files to the GPU, by `Tensor.to` and by `Upload`."""
    plain, upload = partial(torch.Tensor.to, device="cuda"), Upload("cuda")
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "to": plain,
        "upload": upload,
        "to, pages touched": plain,
        "upload, pages touched": upload,
    }
    checkpoint = Checkpoint(folder)
    names = [
        n for n in checkpoint.names() if "experts.gate_up" in n and "bias" not in n
    ]
    fresh = {"to": names[0::2], "upload": names[1::2]}
    speeds = {}
    for way, send in ways.items():
        size, start = 0, time.perf_counter()
        for name in fresh[way.split(",")[0]]:
            value = checkpoint[name]
            for part in value if isinstance(value, Packed) else (value,):
                send(part)
                size += part.nbytes
        torch.cuda.synchronize()
        speeds[way] = size / (time.perf_counter() - start)
    return speeds


def listen() -> list[dict[str, Any]]:
    """A list to which Triton adds each kernel that it compiles, with milliseconds."""
    from triton import knobs

    compiled: list[dict[str, Any]] = []

    def heard(
        *, src: Any, metadata: Any, times: Any, cache_hit: bool, **_: Any
    ) -> None:
        if not cache_hit:
            compiled.append({"kernel": src.name, "ms": times.total / 1e3})

    knobs.compilation.listener = heard
    return compiled


def start_engine(folder: Path) -> dict[str, Any]:
    """Seconds that each part of a start takes, to the first token of a first prompt."""
    begun = time.perf_counter()
    gpu = torch.cuda.is_available()
    compiled = listen() if gpu else []
    if gpu:
        torch.zeros(1, device="cuda")
    initialized = time.perf_counter()
    config = GPUConfig() if gpu else None
    with TimedLLM(folder, config) as llm:
        ready = time.perf_counter()
        vocab_size = llm.config.vocab_size
        prompt = [(7 * i) % vocab_size for i in range(PROMPT)]
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1)).result()
        answered = time.perf_counter()
        print("first token", flush=True)
        loaded = llm.loaded_at
    worst = Counter[str]()
    for kernel in compiled:
        worst[kernel["kernel"]] += kernel["ms"]
    return {
        "cuda": initialized - begun,
        "weights": loaded - initialized,
        "engine": ready - loaded,
        "first_token": answered - ready,
        "kernels": len(compiled),
        "compiling": sum(worst.values()) / 1e3,
        "slowest": dict(worst.most_common(12)),
    }


def anonymous(pid: int) -> int:
    """Bytes of a process's memory that no file backs; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split(":", 1) for line in lines)
    names = ("RssAnon", "RssShmem")
    return sum(int(found[n].split()[0]) * 1024 for n in names if n in found)


def launch(part: str, folder: Path, cache: Path) -> dict[str, Any]:
    """Run a part in a new process, and watch its memory; seconds to its first line."""
    command = [sys.executable, __file__, "--part", part, "--folder", str(folder)]
    begun, most, first = time.perf_counter(), 0, 0.0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            env=os.environ | {"TRITON_CACHE_DIR": str(cache)},
        )
        while process.poll() is None:
            most = max(most, anonymous(process.pid))
            if not first and os.fstat(output.fileno()).st_size:
                first = time.perf_counter() - begun
            time.sleep(0.01)
        if process.returncode:
            raise SystemExit(f"{shlex.join(command)}: ended with {process.returncode}")
        output.seek(0)
        answer = json.loads(output.read().splitlines()[-1])
    return {"seconds": first, "host_bytes": most} | answer


def header() -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "device": describe_device(find_device(None)) | {"cpus": os.cpu_count()},
        "versions": versions(),
        "command": shlex.join(["python", "tools/bench_start.py", *sys.argv[1:]]),
    }


def measure(folder: Path, model: str) -> dict[str, Any]:
    files = sorted(folder.glob("*.safetensors"))
    read_through(folder)
    record: dict[str, Any] = {
        "model": model,
        "file_bytes": sum(path.stat().st_size for path in files),
        "read_again": read_through(folder),
    }
    print(f"{len(files)} files, {record['file_bytes'] / 1e9:.1f} GB", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        if torch.cuda.is_available():
            record["copy"] = launch("copy", folder, Path(cache))
            print(record["copy"], flush=True)
        record["starts"] = []
        for name in ("no kernel compiled", "kernels compiled", "once more"):
            row = {"name": name} | launch("start", folder, Path(cache))
            record["starts"].append(row)
            print(json.dumps(row), flush=True)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="gpt-oss-20b")
    parser.add_argument(
        "--json", type=Path, default=ROOT / "figures/12-start.json", help="the record"
    )
    parser.add_argument("--part", choices=["write", "copy", "start"])
    options = parser.parse_args()
    folder = options.folder
    if options.part == "write":
        write(folder, MODELS[options.model])
    elif options.part == "copy":
        print(json.dumps(copy_speeds(folder)))
    elif options.part == "start":
        print(json.dumps(start_engine(folder)))
    else:
        if not (folder / INDEX).exists():
            start = time.perf_counter()
            again = [sys.executable, __file__, "--part", "write", "--folder", folder]
            subprocess.run([*again, "--model", options.model], check=True)
            print(f"written in {time.perf_counter() - start:.0f} s", flush=True)
        record = header() | measure(folder, options.model)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {options.json}")


if __name__ == "__main__":
    main()
