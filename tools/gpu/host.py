"""What a token costs in Python: microseconds of the engine's thread and of the text's.

    python tools/gpu/host.py
    python tools/gpu/host.py --streams 64 --tokens 1000

The embedded model's engine runs on this CPU and computes nothing: the tokens of each
step come from a table. So what is left is what a host does for each token beside a GPU,
scheduling, booking and text. The times are those of a processor: waiting, also for each
other, isn't counted, but for the last column.
"""

import argparse
import random
import time
from typing import Any

import torch

from simplellm import LLM, EngineConfig, SamplingParams
from simplellm.engine.ranks import ForwardPass

ROWS = 64  # steps with tokens of their own


def without_model(llm: LLM, streams: int) -> None:
    """Have steps find their tokens in a table, one step ahead of what is known."""
    engine = llm.engine_core
    runner, engine.depth = engine.runner, 1
    generator = torch.Generator().manual_seed(0)
    shape = ROWS, streams
    table = torch.randint(256, shape, generator=generator, dtype=torch.int32)
    steps = iter(range(10**9))

    def compute(forward: ForwardPass, graph: Any) -> list[Any]:
        count = forward.samples
        runner.sampled_tokens[:count] = table[next(steps) % ROWS, :count]
        return []

    runner.compute = compute  # type: ignore[method-assign]


def measure(streams: int, tokens: int) -> dict[str, float]:
    """Microseconds a token of ``streams`` answers of so many ``tokens`` at once."""
    config = EngineConfig(
        max_num_seqs=streams, page_size=64, num_pages=streams * (tokens // 8 + 9)
    )
    chance = random.Random(0)
    prompts = [chance.choices(range(256), k=16) for _ in range(streams)]
    with LLM(config=config, device="cpu") as llm:
        without_model(llm, streams)
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=4)
        llm.generate(prompts, params).result()
        threads = llm.engine_core.thread, llm._output_processor.thread
        clocks = [time.pthread_getcpuclockid(t.ident) for t in threads if t and t.ident]
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens)
        before, start = [*map(time.clock_gettime, clocks)], time.perf_counter()
        outputs = llm.generate(prompts, params).result()
        seconds = time.perf_counter() - start
        after = [*map(time.clock_gettime, clocks)]
    count = sum(len(output.token_ids) for output in outputs)
    spent = [end - begin for begin, end in zip(before, after, strict=True)]
    names = "engine", "text", "wall"
    found = zip(names, [*spent, seconds], strict=True)
    return {name: 1e6 * each / count for name, each in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.streams} x {options.tokens}: microseconds a token")
    print(("{:>8}" * 3).format("engine", "text", "wall"))
    for _ in range(options.times):
        found = measure(options.streams, options.tokens)
        print(("{:8.2f}" * 3).format(*found.values()), flush=True)


if __name__ == "__main__":
    main()
