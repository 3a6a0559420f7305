"""Tokens a second that clients of a server get, beside those of the engine alone.

    python tools/gpu/clients.py gpt-oss-120b,gpt-oss-20b --json OUT

Alone is `LLM.generate` in one process. The server is that of `simplellm serve`, with
its engine in another process, and clients read streams as `simplellm bench --url` does.
A rate is all generated tokens over the time from the first request to the last token.
Random weights have no tokenizer: each token gets some text, so that there is work.

Without models it is the embedded one, to try the script itself.
"""

import argparse
import json
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from simplellm import LLM, EngineConfig
from simplellm.apps.traffic import Outcome, run_traffic, summarize_traffic, to_url
from simplellm.apps.workloads import Arrival
from simplellm.checkpoint.folder import open_config
from simplellm.server.remote.client import RemoteEngine, load_remote
from simplellm.server.serve import serve
from simplellm.server.start import Options, bind, spawn
from simplellm.text.tokenizer import Tokenizer

EACH = 32  # streams of a process of clients: of many more it could be slower than ours
PROMPT, TURNS = 128, 3
WARM = 16  # tokens of answers that are not timed


def alone(model: str | None, streams: list[int], answer: int) -> tuple[Any, Any]:
    """The device, and the rates of the engine itself for each number of streams."""
    import torch  # here, since no client or server needs it

    from simplellm.apps.bench import Bench
    from simplellm.apps.report import describe_device

    config, rates = EngineConfig(max_num_seqs=max(streams)), []
    with LLM(model, config, random_weights=model is not None) as llm:
        bench = Bench(llm, torch.Generator().manual_seed(0))
        for count in streams:
            bench.run(count, PROMPT, WARM)
            runs = [bench.run(count, PROMPT, answer) for _ in range(TURNS)]
            rates.append([count * answer / run.seconds for run in runs])
        return describe_device(llm.engine_core.runner.device), rates


def run_server(model: str | None, most: int) -> None:
    """Serve until a signal comes; standard output gets the line that says where."""
    engine, config = RemoteEngine(*spawn()), EngineConfig(max_num_seqs=most)
    loaded = load_remote(engine, model, config, random_weights=model is not None)
    if model is not None:
        texts = {
            n: f" {n:x}".encode()
            for n in range(loaded.input_processor.config.vocab_size)
        }
        tokenizer = Tokenizer(texts, {}, lambda text, special: [])
        loaded = replace(
            loaded, input_processor=replace(loaded.input_processor, tokenizer=tokenizer)
        )
    with LLM.of(loaded) as llm, closing(bind("127.0.0.1", 0)) as bound:
        serve(llm, Options([model or "embedded"]), bound, partial(print, flush=True))


def read_streams(url: str, vocabulary: int, answer: int, count: int) -> list[Outcome]:
    """What becomes of requests that are sent at once."""
    body = {"max_tokens": answer, "temperature": 0, "ignore_eos": True}
    prompts = [random.choices(range(vocabulary), k=PROMPT) for _ in range(count)]
    bodies = [body | {"prompt": prompt} for prompt in prompts]
    requests = [Arrival(str(k), "/v1/completions", b) for k, b in enumerate(bodies)]
    return run_traffic(to_url(url), requests)


def turns(model: str | None, streams: list[int], answer: int) -> Iterator[list[Any]]:
    """What the clients of a server find in each turn, for each number of streams."""
    most, vocabulary = max(streams), open_config(model, model is not None).vocab_size
    command = [sys.executable, __file__, "--serve", "--streams", str(most)]
    command += [model] if model else []
    with (
        ProcessPoolExecutor(-(-most // EACH), get_context("spawn")) as pool,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
    ):
        assert server.stdout is not None
        try:
            url = server.stdout.readline().split()[-1]
            for count in streams:
                results = []
                for length in [WARM, *[answer] * TURNS]:
                    read = partial(read_streams, url, vocabulary, length)
                    counts = [min(EACH, count - k) for k in range(0, count, EACH)]
                    outcomes = [*chain.from_iterable(pool.map(read, counts))]
                    results.append(summarize_traffic(outcomes))
                    if errors := results[-1]["errors"]:
                        raise RuntimeError(f"answers are missing: {errors}")
                yield results[1:]
        finally:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="?")
    parser.add_argument("--streams", default="64,256")
    parser.add_argument("--answer", type=int, default=512, help="tokens")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    streams = [int(count) for count in options.streams.split(",")]
    if options.serve:
        run_server(options.models, *streams)
        return
    record: dict[str, Any] = {
        "label": "what clients get of the engine's own tokens a second",
        "command": shlex.join(["python", "tools/gpu/clients.py", *sys.argv[1:]]),
        "versions": {name: version(name) for name in ("torch", "uvicorn", "uvloop")},
        "rows": [],
    }
    print(("{:>13}" * 5).format("model", "streams", "alone", "clients", "share"))
    for model in options.models.split(",") if options.models else [None]:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # its memory is free
            work = pool.submit(alone, model, streams, options.answer)
            record["device"], rates = work.result()
        served = turns(model, streams, options.answer)
        for count, own, got in zip(streams, rates, served, strict=True):
            rate, own_rate = median(t["tokens_per_second"] for t in got), median(own)
            row = {"model": model, "streams": count, "alone": own, "clients": got}
            record["rows"].append(row | {"share": (share := rate / own_rate)})
            line = f"{model or 'embedded':>13}{count:13}{own_rate:13.0f}{rate:13.0f}"
            print(f"{line}{share:13.1%}", flush=True)
            if options.json:  # what is measured is kept, whatever happens later
                options.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
