"""Tokens a second in steady state, with as many requests as the cache holds.

    python tools/gpu/steady.py gpt-oss-120b --json OUT
    python tools/gpu/steady.py gpt-oss-120b --shapes 8192x1024 --seconds 60
    python tools/gpu/steady.py gpt-oss-120b --shapes 1000x1000 --most 64 --ranks 2

A shape is tokens of a prompt x tokens of an answer. The first requests begin at random
points of their lives: some of the answer's tokens are in the prompt already. So there
is no wave of prompts or of ends later. Whoever ends is replaced by a fresh request.
Prompts are random tokens and share nothing. Only what answers get in the steady seconds
counts, which begin once all of the first requests have a token.

Without a model it is the embedded one, to try the script itself.
"""

import math
import queue
import random
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from records import argument_parser, header, save

from simplellm import LLM, EngineConfig, SamplingParams
from simplellm.engine.page_manager import PageManager

SHAPES = "1000x1000,1024x8192,8192x1024"  # those that TensorRT-LLM publishes
PARTS = 12  # of the steady seconds, each with a rate of its own


def fitting(prompt: int, answer: int, manager: PageManager) -> int:
    """How many requests at random points of their lives find room, almost always.

    The window of sliding layers lies in as many pages, and a new prompt needs room.
    """
    size, window = manager.page_size, manager.windows[-1] or 0
    each = (prompt + answer / 2) / size + 0.5
    each += -(-window // size) + 1 if window else each
    spread = answer / size / math.sqrt(12)  # of a request's pages: they are uniform
    room = manager.num_pages - len(manager.windows) * -(-prompt // size)
    # count * each + 3 * spread * sqrt(count) = room
    root = (math.sqrt((3 * spread) ** 2 + 4 * each * room) - 3 * spread) / (2 * each)
    return int(root**2)


def steady(llm: LLM, prompt: int, answer: int, seconds: float) -> dict[str, Any]:
    """What one shape comes to."""
    scheduler = llm.engine_core.scheduler
    manager = scheduler.manager
    assert isinstance(manager, PageManager)
    count = min(scheduler.max_num_seqs, fitting(prompt, answer, manager))
    chance = random.Random(0)
    running = set()
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask(done: int) -> None:
        """A request whose answer has ``done`` tokens already."""
        tokens = chance.choices(range(llm.config.vocab_size), k=prompt + done)
        left = SamplingParams(temperature=0, max_tokens=answer - done, ignore_eos=True)
        future = llm.generate([tokens], left)
        running.add(future)
        future.add_done_callback(ended.put)

    def go_on(until: float) -> None:
        """Replace those that end."""
        while (left := until - time.perf_counter()) > 0:
            try:
                future = ended.get(timeout=left)
            except queue.Empty:
                return
            running.remove(future)
            future.result()
            ask(0)

    before = llm.stats()
    began = time.perf_counter()
    points = [chance.randrange(answer) for _ in range(count)]
    for done in points:
        ask(done)
    first = before.prompt_tokens + count * prompt + sum(points)
    while llm.stats().prompt_tokens < first:
        go_on(time.perf_counter() + 0.1)
    filled, start = time.perf_counter(), llm.stats()
    marks = [(filled, start.generated_tokens)]
    for part in range(1, PARTS + 1):
        go_on(filled + part * seconds / PARTS)
        end = llm.stats()
        marks.append((time.perf_counter(), end.generated_tokens))
    for future in running:
        future.cancel()
    while llm.stats().running or llm.stats().waiting:
        time.sleep(0.05)
    took = marks[-1][0] - filled
    rates = [(b - a) / (then - now) for (now, a), (then, b) in pairwise(marks)]
    return {
        "prompt": prompt,
        "answer": answer,
        "requests": count,
        "fill_seconds": filled - began,
        "steady_seconds": took,
        "tokens_per_second": (end.generated_tokens - start.generated_tokens) / took,
        "parts": rates,
        "steps": end.steps - start.steps,
        "ended": sum(end.finished.values()) - sum(start.finished.values()),
        "preemptions": end.preemptions - start.preemptions,
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--most", type=int, default=1024, help="requests at once")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of one engine")
    options = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    config = EngineConfig(
        max_num_seqs=options.most,
        max_num_batched_tokens=8192,
        prefill_chunk=8192,
        max_model_len=max(map(sum, shapes)),
        enable_prefix_caching=False,
        tensor_parallel_size=options.ranks,
    )
    record = {"label": "steady state, random weights", **header(), "rows": []}
    began = time.perf_counter()
    with LLM(options.model, config, random_weights=options.model is not None) as llm:
        print(f"ready after {time.perf_counter() - began:.0f} s")
        titles = "shape", "requests", "fill, s", "steady, s", "tokens/s", "preempted"
        print(("{:>12}" * 6).format(*titles))
        for prompt, answer in shapes:
            row = steady(llm, prompt, answer, options.seconds)
            record["rows"].append(row)
            print(
                f"{f'{prompt} x {answer}':>12}{row['requests']:12}"
                f"{row['fill_seconds']:12.1f}{row['steady_seconds']:12.1f}"
                f"{row['tokens_per_second']:12.0f}{row['preemptions']:12}",
                flush=True,
            )
            save(record, options.json)  # what is measured is kept, whatever happens


if __name__ == "__main__":
    main()
