"""Measure what pages save and what they cost: figures/08-paged.json.

How many sequences of mixed lengths fit the bytes of a slot cache; how much sooner the
first token comes when a prefix is shared; and what a decode step and a prefill with
nothing to share take, against slots. The embedded model, float32, one thread, both
sides in turns.

    python tools/bench_paged.py                 two minutes
    python tools/bench_paged.py --rounds 1      quicker
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from simplellm.cache import Chunk, SlotCache
from simplellm.model import Transformer, load_model
from simplellm.paged import PagedCache

ROOT = Path(__file__).resolve().parents[1]
MAX_MODEL_LEN = 4096
SLOTS = 16
PAGE_SIZE = 16
PREFIX = 1000
QUESTION = 30  # tokens behind the prefix
BATCH = 32

Cache = SlotCache | PagedCache


def mixed_lengths(count: int, seed: int = 0) -> list[int]:
    """Many short requests and a few long ones: log-normal, median 400, up to 4,096."""
    rng = random.Random(seed)
    lengths = (int(rng.lognormvariate(6.0, 0.9)) for _ in range(count))
    return [min(max(length, 16), MAX_MODEL_LEN) for length in lengths]


def fitting(cache: Cache, lengths: Sequence[int]) -> int:
    """How many sequences find room, each computed a page at a time to its end."""
    manager = cache.manager
    for name, length in enumerate(lengths):
        tokens = [name] * length  # no two begin alike
        computed = manager.add(name, tokens)
        while computed < length:
            computed = min(length, computed + PAGE_SIZE)
            if not manager.grow(name, computed):
                return name
            manager.commit(name, tokens, computed)
    raise ValueError(f"all {len(lengths)} sequences fit; expected too many of them")


def capacity(model: Transformer) -> dict[str, Any]:
    config = model.config
    found: dict[str, Any] = {}
    mixed = mixed_lengths(1000)
    for name, lengths in {
        "mixed": mixed,
        "all of 4,096": [MAX_MODEL_LEN] * 100,
        "all of 100": [100] * 1000,
    }.items():
        slots = SlotCache(config, max_num_seqs=SLOTS, max_model_len=MAX_MODEL_LEN)
        pages = PagedCache(
            config, max_bytes=slots.nbytes, page_size=PAGE_SIZE, max_chunk=PAGE_SIZE
        )
        count = fitting(pages, lengths)
        found[name] = {
            "slot": fitting(slots, lengths),
            "paged": count,
            "bytes": slots.nbytes,
            "mean_length": statistics.mean(lengths[:count]),
        }
    return found


@torch.inference_mode()
def run(model: Transformer, cache: Cache, steps: list[tuple[int, list[int], int]]):
    """One step: (sequence, tokens, how many of them are computed) -> next tokens."""
    chunks: list[Chunk] = []
    tokens: list[int] = []
    positions: list[int] = []
    for name, ids, start in steps:
        cache.manager.grow(name, len(ids))
        chunks.append(Chunk(name, start, len(ids) - start))
        tokens += ids[start:]
        positions += range(start, len(ids))
    hidden = model(torch.tensor(tokens), torch.tensor(positions), cache.step(chunks))
    for name, ids, _ in steps:
        cache.manager.commit(name, ids, len(ids))
    last = torch.tensor([chunk.length for chunk in chunks]).cumsum(0) - 1
    return model.lm_head(hidden[last]).argmax(-1).tolist()


def seconds(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def first_token(model: Transformer, rounds: int) -> dict[str, Any]:
    """Seconds to the first token: nothing cached, and the prefix cached."""
    rng = random.Random(1)
    vocab = model.config.vocab_size

    def some(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    times: dict[str, list[float]] = {"miss": [], "hit": [], "slot": []}
    for _ in range(rounds):
        pages = PagedCache(model.config, num_pages=500, page_size=PAGE_SIZE)
        slots = SlotCache(model.config, max_num_seqs=1, max_model_len=2048)
        prefix = some(PREFIX)
        caches: dict[str, Cache] = {"slot": slots, "miss": pages, "hit": pages}
        for name, (kind, cache) in enumerate(caches.items()):
            tokens = prefix + some(QUESTION)

            def answer(cache: Cache = cache, name: int = name, ids=tokens) -> None:
                run(model, cache, [(name, ids, cache.manager.add(name, ids))])

            times[kind].append(seconds(answer))
    return {f"{kind}_ms": 1e3 * statistics.median(t) for kind, t in times.items()}


def decode(model: Transformer, rounds: int) -> list[dict[str, Any]]:
    """A decode step of 32 sequences, pages against slots, at several lengths."""
    rng = random.Random(2)
    found = []
    for length in (50, 200, 500, 1000):
        slots = SlotCache(model.config, max_num_seqs=BATCH, max_model_len=2048)
        pages = PagedCache(model.config, num_pages=6000, page_size=PAGE_SIZE)
        times: dict[str, list[float]] = {"slot": [], "paged": []}
        prompts = [
            [rng.randrange(model.config.vocab_size) for _ in range(length)]
            for _ in range(BATCH)
        ]
        caches: dict[str, Cache] = {"slot": slots, "paged": pages}
        running = {kind: [list(prompt) for prompt in prompts] for kind in caches}
        for kind, cache in caches.items():
            for name, ids in enumerate(running[kind]):
                cache.manager.add(name, ids)
                # What the keys are does not matter here: no need to compute them.
                cache.manager.grow(name, length)
                cache.manager.commit(name, ids, length)
        for _ in range(3 + 4 * rounds):
            for kind, cache in caches.items():
                for ids in running[kind]:
                    ids.append(1)
                steps = [
                    (name, ids, len(ids) - 1) for name, ids in enumerate(running[kind])
                ]

                def step(cache: Cache = cache, steps=steps) -> None:
                    run(model, cache, steps)

                times[kind].append(seconds(step))
        medians = {
            f"{kind}_ms": 1e3 * statistics.median(t[3:]) for kind, t in times.items()
        }
        found.append({"length": length, **medians})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    model = load_model(dtype=torch.float32, device="cpu")
    record = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, 1 thread of a CPU",
        "command": f"python tools/bench_paged.py --rounds {rounds}",
        "page_size": PAGE_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "prefix": PREFIX,
        "question": QUESTION,
        "batch": BATCH,
        "capacity": capacity(model),
        "first_token": first_token(model, rounds),
        "decode": decode(model, rounds),
    }
    path = ROOT / "figures/08-paged.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
